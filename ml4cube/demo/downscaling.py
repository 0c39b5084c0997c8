"""Task of the demo: monthly sea surface temperature from its means over 6 × 6 cells.

The coarse field is made from the fine one (perfect-model downscaling), so it lacks the errors of
a real coarse product (bias, noise, other land masks).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from ml4cube.core.split_plan import TRAIN

FACTOR = 6
LAT, LON = "latitude", "longitude"
FEATURES = ["coarse_anomaly", "mean_detail", "ocean", "season_sin", "season_cos"]
TARGET = "detail"


def open_truth() -> xr.DataArray:
    """Open OSTIA monthly means: 54 × 18 × 432 cells around the equator, land as gaps."""
    import iris_sample_data

    with xr.open_dataset(Path(iris_sample_data.path) / "ostia_monthly.nc") as ds:
        sst = ds["surface_temperature"].load()
    sst = sst.drop_vars([name for name in sst.coords if name not in sst.dims]).rename("sst")
    sst.attrs = {
        "standard_name": "surface_temperature",
        "long_name": "sea surface temperature, monthly mean",
        "units": "K",
        "cell_methods": "time: mean",
    }
    return sst


def interpolate(truth: xr.DataArray) -> xr.DataArray:
    """Average over the sea cells of blocks, and interpolate bilinearly to the fine grid.

    Longitude is cyclic. If some of the four means around a cell are gaps, the others weigh more.
    """
    means = truth.astype("float64").coarsen({LAT: FACTOR, LON: FACTOR}).mean()
    rows, columns = means.sizes[LAT], means.sizes[LON]
    fine_rows = (np.arange(truth.sizes[LAT]) + 0.5) / FACTOR - 0.5
    fine_columns = (np.arange(truth.sizes[LON]) + 0.5) / FACTOR - 0.5
    # Coordinates are in units of blocks, with a column more on either side, for cyclic longitude.
    means = means.drop_vars([LAT, LON]).pad({LON: 1}, mode="wrap")
    means = means.assign_coords({LAT: np.arange(rows), LON: np.arange(-1, columns + 1)})
    target = {LAT: np.clip(fine_rows, 0, rows - 1), LON: fine_columns}
    known = means.notnull().astype("float64").interp(target)
    values = means.fillna(0.0).interp(target)
    result = (values / known.where(known > 1e-9)).transpose(*truth.dims)
    return result.assign_coords({LAT: truth[LAT], LON: truth[LON]})


def season(truth: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the sine and cosine of the time of year."""
    angle = 2 * np.pi * truth["time"].dt.month / 12
    return xr.apply_ufunc(np.sin, angle), xr.apply_ufunc(np.cos, angle)


def train_steps(label: xr.DataArray) -> xr.DataArray:
    """Return which time steps are train, for a split along time."""
    return (label == TRAIN).all([dim for dim in label.dims if dim != "time"])


def build_cube(truth: xr.DataArray, label: xr.DataArray) -> xr.Dataset:
    """Return a cube with features, target and label; means are of train months only."""
    coarse = interpolate(truth)
    train = train_steps(label)
    sine, cosine = season(truth)
    mean_detail = (truth - coarse).where(train).mean("time")
    cube = xr.Dataset(
        {
            "coarse_anomaly": coarse - coarse.where(train).mean("time"),
            "mean_detail": mean_detail,
            "ocean": truth.notnull().all("time"),
            "season_sin": sine,
            "season_cos": cosine,
            TARGET: truth - coarse - mean_detail,
        }
    ).astype("float32")
    for name in ("coarse_anomaly", "mean_detail", TARGET):
        cube[name].attrs = {"units": "K"}
    return cube.assign(split=label)


def baselines(truth: xr.DataArray, label: xr.DataArray) -> xr.Dataset:
    """Return simple predictions of the fine field, each fitted to train months only."""
    train = train_steps(label)
    past = truth.astype("float64").where(train)
    coarse = interpolate(truth)  # on the fine grid
    detail = (truth - coarse).where(train)
    mean_detail = detail.mean("time")
    sine, cosine = season(truth)
    anomaly = coarse - coarse.where(train).mean("time")
    train_anomaly = anomaly.where(train)
    slope = (train_anomaly * (detail - mean_detail)).sum("time") / (train_anomaly**2).sum("time")
    return xr.Dataset(
        {
            "monthly climatology": past.groupby("time.month")
            .mean()
            .sel(month=truth["time"].dt.month)
            .drop_vars("month"),
            "bilinear": coarse,
            "bilinear + mean detail": coarse + mean_detail,
            "bilinear + seasonal detail": coarse
            + _fit(detail, [sine, cosine], train).where(truth.notnull().all("time")),
            "bilinear + regressed detail": coarse + mean_detail + slope * anomaly,
        }
    ).transpose(*truth.dims)


def _fit(detail: xr.DataArray, terms: list[xr.DataArray], train: xr.DataArray) -> xr.DataArray:
    """Fit a constant and `terms` to train months by least squares, and return all months."""
    design = xr.concat([xr.ones_like(terms[0]), *terms], "term").transpose("time", "term")
    inverse = np.linalg.pinv(design.values[train.values])
    solver = xr.DataArray(inverse, dims=("term", "time")).assign_coords(
        time=detail["time"][train.values]
    )
    values = detail.isel(time=train.values).fillna(0.0)
    return design.dot((solver * values).sum("time"), dim="term")
