"""Cubes whose every cell is known, for tests that follow cells through the pipeline."""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import DTypeLike, NDArray


def cell_ids(shape: Mapping[str, int], dim_order: Sequence[str] | None = None) -> NDArray[Any]:
    """Row-major id of every cell over the *sorted* dim names, laid out in `dim_order`.

    The same cell has the same id whatever the order of dims.
    """
    canonical = sorted(shape)
    ids = np.arange(int(np.prod([shape[d] for d in canonical], dtype=int)))
    ids = ids.reshape([shape[d] for d in canonical])
    return ids.transpose([canonical.index(d) for d in dim_order or tuple(shape)])


def gap_cells(
    shape: Mapping[str, int], gaps: float, seed: int, dim_order: Sequence[str] | None = None
) -> NDArray[np.bool_]:
    """True in a share `gaps` of the cells; which ones depends on the seed and the cell id only."""
    n = int(np.prod(list(shape.values()), dtype=int))
    lost = np.random.default_rng(seed).random(n) < gaps
    return lost[cell_ids(shape, dim_order)]


def dates_after(start: str, days: NDArray[Any], calendar: str) -> NDArray[Any]:
    """Dates so many days after a date, in any calendar."""
    first = xr.date_range(start, periods=1, calendar=calendar)[0]
    return pd.Index([first + datetime.timedelta(days=int(d)) for d in days]).values


def coordinates(shape: Mapping[str, int], calendar: str | None = None) -> dict[str, Any]:
    """Days from 2000-01-01 along ``time``, cell centres along ``lat`` and ``lon``, else counts."""
    coords: dict[str, Any] = {}
    for dim, n in shape.items():
        if dim == "time":
            in_calendar = {"calendar": calendar or "standard", "use_cftime": calendar is not None}
            coords[dim] = (dim, xr.date_range("2000-01-01", periods=n, **in_calendar))
        elif dim == "lat":
            coords[dim] = (dim, -90 + 180 * (np.arange(n) + 0.5) / n, {"units": "degrees_north"})
        elif dim == "lon":
            coords[dim] = (dim, 360 * (np.arange(n) + 0.5) / n, {"units": "degrees_east"})
        else:
            coords[dim] = (dim, np.arange(n))
    return coords


def cell_id_cube(
    shape: Mapping[str, int],
    dtype: DTypeLike = np.float32,
    gaps: float = 0.0,
    seed: int = 0,
    dask_chunks: Mapping[Hashable, int] | None = None,
    dim_order: Sequence[str] | None = None,
    calendar: str | None = None,
    names: Sequence[str] = ("a",),
) -> xr.Dataset:
    """Cube in which variable number k holds ``cell id + k * number of cells`` in each cell.

    Parameters
    ----------
    shape : mapping of str to int
        Dims and lengths.
    dtype : dtype
        Of every variable; ids must fit (float32 holds 16.7 million).
    gaps : float
        Share of cells that are NaN, drawn anew for each variable; float dtypes only.
    seed : int
        Seeds the gaps.
    dask_chunks : mapping, optional
        Makes the cube lazy, in these chunks.
    dim_order : sequence of str, optional
        Order of the dims; the order of `shape` if not given. Values and gaps of a cell do not
        depend on it.
    calendar : str, optional
        A cftime calendar for ``time``, e.g. ``"360_day"``; numpy datetimes if not given.
    names : sequence of str
        Variables to make.
    """
    dims = tuple(dim_order or shape)
    ids = cell_ids(shape, dims)
    data = {}
    for k, name in enumerate(names):
        values = ids + k * ids.size
        assert gaps == 0 or np.issubdtype(dtype, np.floating), "only floats have gaps"
        cast = values.astype(dtype)
        assert np.array_equal(cast, values), f"cell ids do not fit {np.dtype(dtype)}"
        if gaps:
            cast = np.where(gap_cells(shape, gaps, seed + k, dims), np.array(np.nan, dtype), cast)
        data[name] = (dims, cast, {"units": "1", "long_name": f"cell id of {name}"})
    cube = xr.Dataset(data, coordinates(shape, calendar), {"title": "cell ids"})
    return cube.chunk(dask_chunks) if dask_chunks is not None else cube


def no_compute(*args: object, **kwargs: object) -> None:
    """A dask scheduler that proves that nothing was read."""
    raise AssertionError("computed too early")
