"""Run commands in this process, and the blocks of pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from click.testing import CliRunner

from ml4cube.cli.main import program

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|yaml|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def invoke(line: str, *arguments: str, code: int = 0) -> Any:
    """Run ``ml4cube LINE`` in this process and check its exit code."""
    result = CliRunner().invoke(program, [*shlex.split(line), *map(str, arguments)])
    assert result.exit_code == code, f"{line}\n{result.output}\n{result.exception!r}"
    return result


def error_of(line: str, code: int = 2) -> str:
    """Return the one line that a failing command writes."""
    result = invoke(line, code=code)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def run_page(page: str) -> list[str]:
    """Run a page in the working directory: write its files, run its commands; return these."""
    lines = []
    for kind, text in BLOCK.findall((ROOT / page).read_text()):
        name = re.match(r"# (\S+\.(?:py|yaml))\n", text)
        if name is not None:
            Path(name[1]).write_text(text)
        elif kind == "bash":
            lines += text.replace("\\\n", " ").splitlines()
    for line in lines:
        assert line.startswith("ml4cube ")
        invoke(line.removeprefix("ml4cube "))
    return lines


def make_quickstart_cube() -> None:
    """Write my_cube.zarr, by the first block of the quickstart."""
    page = (ROOT / "docs/tutorials/quickstart.md").read_text()
    exec(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0], {})


def small_cube() -> xr.Dataset:
    """Two inputs and their sum, 12 months on a 6 × 8 grid, with gaps in one input."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(280, 5, (12, 6, 8)), rng.gamma(2, 2, (12, 6, 8))
    fields = {"a": a.astype("float32"), "b": b.astype("float32"), "y": (a + b).astype("float32")}
    fields["b"][:, 0, 0] = np.nan
    dims = ("time", "lat", "lon")
    return xr.Dataset(
        {name: (dims, values, {"units": "K"}) for name, values in fields.items()},
        {
            "time": np.arange("2000-01", "2001-01", dtype="M8[M]").astype("M8[ns]"),
            "lat": np.linspace(-50.0, 50, 6),
            "lon": np.arange(8) * 45.0,
        },
    )
