"""Statistics of small spreads on large offsets, beside bottleneck, against long double."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube import preprocessing as pp
from tests import oracle

# dtype, centre, spread, share of gaps
OFFSETS = [
    ("float32", 273.15, 0.01, 0.1),
    ("float32", 5e5, 50.0, 0.1),
    ("float32", 101325.0, 1.0, 0.1),
    ("float64", 1e6, 0.01, 0.1),
]


@pytest.fixture(autouse=True)
def bottleneck_in_use() -> Iterator[None]:
    """As older versions of xarray have it, unasked."""
    with xr.set_options(use_bottleneck=True, use_numbagg=False):
        yield


def made_cube(dtype: str, centre: float, spread: float, gaps: float) -> xr.Dataset:
    """A million cells: steps, levels, places."""
    rng = np.random.default_rng(3)
    cells = rng.normal(centre, spread, (500, 2, 1000)).astype(dtype)
    cells[rng.random(cells.shape) < gaps] = np.nan
    return xr.Dataset({"t": (("time", "level", "place"), cells)})


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "centre", "spread", "gaps"), OFFSETS)
@pytest.mark.parametrize("chunks", [None, {"time": 37, "place": 300}])
def test_mean_and_spread_are_those_of_long_double(
    dtype: str, centre: float, spread: float, gaps: float, chunks: Any
) -> None:
    ds = made_cube(dtype, centre, spread, gaps)
    cube = ds.chunk(chunks) if chunks else ds
    exact = oracle.moments(ds.t.values)
    parts = [pp.Statistics.from_cube(cube.isel(time=slice(i, i + 50))) for i in range(0, 500, 50)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    weights = xr.DataArray(np.full(1000, 0.3), dims="place")
    found = {
        "plain": pp.get_statistics(cube)["t"],
        "merged": merged.mean_std()["t"],
        "weighted": pp.get_statistics(cube, weights=weights)["t"],
        "samples": pp.get_statistics({"t": ds.t.values})["t"],
    }
    for form, (m, s) in found.items():
        assert abs(m - exact["mean"]) <= 1e-6 * exact["std"], form
        assert abs(s / exact["std"] - 1) <= 1e-6, form
    levels = pp.get_statistics(cube, dims=["time", "place"])["t"]
    for i in range(2):
        exact = oracle.moments(ds.t.values[:, i])
        assert abs(float(levels[0][i]) - exact["mean"]) <= 1e-6 * exact["std"]
        assert abs(float(levels[1][i]) / exact["std"] - 1) <= 1e-6


def test_bottleneck_is_installed_and_wrong_where_we_are_right() -> None:
    """Why none of our sums goes through xarray: its own mean is off beside bottleneck."""
    import bottleneck

    assert bottleneck.__version__
    ds = made_cube("float32", 5e5, 50.0, 0.0)
    exact = oracle.moments(ds.t.values)
    assert abs(float(ds.t.mean()) - exact["mean"]) > 0.01 * exact["std"]
    assert abs(pp.get_statistics(ds)["t"][0] - exact["mean"]) <= 1e-6 * exact["std"]
    filled = pp.fill_nan_values({"t": np.append(ds.t.values.ravel(), np.nan)}, method="mean")
    assert abs(filled["t"][-1] - exact["mean"]) <= 0.5 * np.spacing(np.float32(exact["mean"]))
