"""Cubes of forecasts and their truth, for tests of the scorecard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr


def truth_cube(
    n: int = 72,
    lat: int = 3,
    lon: int = 4,
    *,
    freq: str = "MS",
    calendar: str = "standard",
    gaps: float = 0.0,
    train: int | None = 40,
    seed: int = 0,
) -> xr.Dataset:
    """A yearly cycle and a first-order autoregression in each cell; the first steps are train."""
    rng = np.random.default_rng(seed)
    time = xr.date_range(
        "2001-01-01", periods=n, freq=freq, calendar=calendar, use_cftime=calendar != "standard"
    )
    anomaly = rng.normal(size=(n, lat, lon))
    for step in range(1, n):
        anomaly[step] += 0.7 * anomaly[step - 1]
    values = anomaly + 5 * np.cos(2 * np.pi * np.arange(n) / 12)[:, None, None]
    values[rng.random(values.shape) < gaps] = np.nan
    cube = xr.Dataset(
        {"t": (("time", "lat", "lon"), values, {"units": "K"})},
        {
            "time": time,
            "lat": ("lat", np.linspace(-60, 60, lat), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(lon) * 360 / lon, {"units": "degrees_east"}),
        },
    )
    if train is not None:
        cube["split"] = "time", (np.arange(n) < train).astype("uint8")
    return cube


def forecast_cube(
    truth: xr.Dataset,
    inits: Sequence[int],
    lags: Sequence[int],
    *,
    error: float = 1.0,
    seed: int = 1,
) -> xr.Dataset:
    """The truth at so many steps after each init, plus noise; NaN beyond its end."""
    n = truth.sizes["time"]
    steps = np.add.outer(np.array(inits), np.array(lags))
    time = truth.time.values
    values = truth.t.transpose("time", ...).values[steps.clip(max=n - 1)]
    values = values + error * np.random.default_rng(seed).normal(size=values.shape)
    later = xr.date_range(
        time[0],
        periods=n + max(lags),
        freq=xr.infer_freq(truth.time),
        use_cftime=time.dtype == object,
    ).values
    valid: Any = later[steps]
    elapsed = valid - time[list(inits)][:, None]
    lead = np.sort(elapsed, axis=0)[len(inits) // 2].astype("m8[ns]")
    dims = ("init_time", "lead_time", *(d for d in truth.t.dims if d != "time"))
    coords = {
        "init_time": time[list(inits)],
        "lead_time": lead,
        "valid_time": (("init_time", "lead_time"), valid),
    }
    coords |= {d: truth[d] for d in truth.t.dims if d != "time"}
    return xr.Dataset({"t": (dims, values, {"units": "K"})}, coords)
