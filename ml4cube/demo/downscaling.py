"""Task of the demo: monthly sea surface temperature from its means over 6 × 6 cells.

The coarse field is made from the fine one (perfect-model downscaling), so it lacks the errors of
a real coarse product (bias, noise, other land masks).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
from sklearn.linear_model import Ridge

from ml4cube.core.split_plan import TRAIN

FACTOR = 6
LAT, LON = "latitude", "longitude"
PENALTY = 3.0  # of the ridge regression, K²
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
    has_value = means.notnull().astype("float64").interp(target)
    values = means.fillna(0.0).interp(target)
    result = (values / has_value.where(has_value > 1e-9)).transpose(*truth.dims)
    return result.assign_coords({LAT: truth[LAT], LON: truth[LON]})


def keep_means(field: xr.DataArray, truth: xr.DataArray) -> xr.DataArray:
    """Shift each block of a field to the mean of its sea cells, which the coarse field tells."""
    missing = (truth.astype("float64") - field).coarsen({LAT: FACTOR, LON: FACTOR}).mean()
    on_cells = missing.sel({LAT: truth[LAT], LON: truth[LON]}, method="nearest")
    return field + on_cells.assign_coords({LAT: truth[LAT], LON: truth[LON]}).fillna(0.0)


def first_guess(truth: xr.DataArray, train: xr.DataArray) -> xr.DataArray:
    """Return the interpolated means plus the mean detail of train months, with the means kept."""
    coarse = interpolate(truth)
    return keep_means(coarse + (truth - coarse).where(train).mean("time"), truth)


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
    cube = xr.Dataset(
        {
            "coarse_anomaly": coarse - coarse.where(train).mean("time"),
            "mean_detail": (truth - coarse).where(train).mean("time"),
            "ocean": truth.notnull().all("time"),
            "season_sin": sine,
            "season_cos": cosine,
            TARGET: truth - first_guess(truth, train),
        }
    ).astype("float32")
    for name in ("coarse_anomaly", "mean_detail", TARGET):
        cube[name].attrs = {"units": "K"}
    return cube.assign(split=label)


def baselines(truth: xr.DataArray, label: xr.DataArray) -> xr.Dataset:
    """Return simple predictions of the fine field, each fitted to train months only.

    All but the climatology know the coarse field, and keep its means.
    """
    train = train_steps(label)
    past = truth.astype("float64").where(train)
    guess = first_guess(truth, train)
    from_coarse = {
        "bilinear": interpolate(truth),
        "bilinear + mean detail": guess,
        "ridge regression": guess + regress(truth - guess, truth, train),
    }
    climatology = past.groupby("time.month").mean().sel(month=truth["time"].dt.month)
    return xr.Dataset(
        {"monthly climatology": climatology.drop_vars("month")}
        | {name: keep_means(field, truth) for name, field in from_coarse.items()}
    ).transpose(*truth.dims)


def regress(
    detail: xr.DataArray, truth: xr.DataArray, train: xr.DataArray, penalty: float = PENALTY
) -> xr.DataArray:
    """Predict detail by ridge regression on the season and nine neighbouring coarse anomalies.

    One regression for each block, with the penalty that does best where train months are left out.
    """
    means = truth.astype("float64").coarsen({LAT: FACTOR, LON: FACTOR}).mean()
    anomaly = (means - means.where(train).mean("time")).fillna(0.0).transpose("time", LAT, LON)
    padded = np.pad(anomaly, ((0, 0), (1, 1), (0, 0)), mode="edge")
    padded = np.pad(padded, ((0, 0), (0, 0), (1, 1)), mode="wrap")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    cycle = np.stack(season(truth), axis=1)
    fields = detail.fillna(0.0).transpose("time", LAT, LON).values
    result = np.empty_like(fields)
    for row, column in np.ndindex(anomaly.shape[1:]):
        inputs = np.concatenate([windows[:, row, column].reshape(len(cycle), -1), cycle], axis=1)
        block = np.s_[:, row * FACTOR : (row + 1) * FACTOR, column * FACTOR : (column + 1) * FACTOR]
        cells = fields[block]
        ridge = Ridge(penalty)
        ridge.fit(inputs[train.values], cells[train.values].reshape(int(train.sum()), -1))
        result[block] = ridge.predict(inputs).reshape(cells.shape)
    return detail.transpose("time", LAT, LON).copy(data=result)
