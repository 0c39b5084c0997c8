"""A prediction that counts its model's calls and may stop at one of them; also run as a script."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from ml4cube.prediction import predict_cube

STEPS = 40
# Of the ten blocks of `source`, one has only gaps, for which no model is needed.
CALLS, GAP_BLOCK = 9, 2


class Logged(torch.nn.Module):
    """Doubles its input; one byte in a file for each call."""

    def __init__(self, log: Path, factor: float = 2.0) -> None:
        super().__init__()
        self.log = log
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    @property
    def calls(self) -> int:
        """Calls so far, in all processes."""
        return self.log.stat().st_size if self.log.exists() else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.log.open("ab") as file:
            file.write(b".")
        if self.log.stat().st_size == int(os.environ.get("STOP_AT", -1)):
            if os.environ["STOP_BY"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"interrupt": KeyboardInterrupt, "error": ZeroDivisionError}[
                os.environ["STOP_BY"]
            ]
        time.sleep(float(os.environ.get("SLEEP_S", 0)))
        return x * self.factor


def source(first: int = 0, steps: int = STEPS) -> xr.Dataset:
    """Return a cube with another value in each cell, and gaps, also in all cells of a block."""
    values = np.arange(steps * 64 * 64, dtype="f4").reshape(steps, 64, 64)
    values[:, :3] = np.nan
    values[8:13] = np.nan
    time = np.datetime64("2000-01-01", "ns") + np.arange(first, first + steps) * np.timedelta64(
        1, "D"
    )
    return xr.Dataset(
        {"t": (("time", "lat", "lon"), values + 1e6 * first, {"units": "K"})},
        coords={"time": time, "lat": np.linspace(-80, 80, 64), "lon": np.arange(64.0)},
    )


if __name__ == "__main__":
    log, path, *steps = sys.argv[1:]
    cube = source(*map(int, steps))
    predict_cube(Logged(Path(log)), cube, out=path, append=bool(steps), progress=False)
