"""What users give as a cube, opened: which dims it has, and which variables samples can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.core import roles
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_names
from ml4cube.datasets.places import store_and_path
from ml4cube.datasets.store import DATE_UNITS, open_store

if TYPE_CHECKING:
    import xarray as xr


def as_dataset(ds: Any) -> xr.Dataset:
    """Take a cube in any form and return it as a Dataset, lazily and unchanged.

    Parameters
    ----------
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        The cube; a path or URL is opened as zarr (v2 or v3) or, if it ends in ``.nc``, netCDF.

    Returns
    -------
    Dataset
        The cube. An unnamed DataArray becomes the variable ``data``.

    Raises
    ------
    InvalidTypeError
        If `ds` is none of these.
    StoreError
        If nothing that can be read is at the path.
    """
    import os

    import xarray as xr

    if isinstance(ds, xr.DataArray):
        ds = ds.to_dataset(name=ds.name if ds.name is not None else roles.DATA_VAR)
    if isinstance(ds, xr.Dataset):
        check_names((*ds.variables, *ds.dims))
        return ds
    store, inside = store_and_path(ds)
    if store is None and not isinstance(ds, str | os.PathLike):
        raise InvalidTypeError(
            f"ds is a {type(ds).__name__}; give a Dataset, a DataArray, a path, a zarr store or "
            "group, or an Icechunk session"
        )
    return _open_cube(ds if store is None else store, inside)


def open_cube_or_store(source: Any) -> xr.Dataset:
    """Open a path: a cube as it is, a store of samples after checking that it is whole.

    Parameters
    ----------
    source : str or path
        Where it lies.

    Returns
    -------
    Dataset
        Lazy.

    Raises
    ------
    StoreError
        If nothing that can be read is there, or a store is damaged.
    """
    found = as_dataset(source)
    return open_store(source) if "ml4cube_format" in found.attrs else found


def _open_cube(source: Any, group: str) -> xr.Dataset:
    import os

    import xarray as xr

    cube: xr.Dataset
    try:
        if isinstance(source, str | os.PathLike) and str(source).endswith((".nc", ".nc4")):
            cube = xr.open_dataset(source, chunks={})
        else:
            cube = _open_zarr(source, group or None)
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"no cube can be read from {source!s}: {error}") from error
    return cube


def _open_zarr(source: Any, group: str | None) -> xr.Dataset:
    """Open by consolidated metadata, or without; then variables come in no fixed order."""
    import xarray as xr

    try:
        cube: xr.Dataset = xr.open_zarr(source, group=group, consolidated=True)
    except (ValueError, KeyError):
        cube = xr.open_zarr(source, group=group, consolidated=False)
        cube = cube[sorted(map(str, cube.data_vars))]
    return cube


def cube_dims(ds: xr.Dataset) -> tuple[str, ...]:
    """Dims of a cube: those of its largest data variable, in that variable's order.

    Parameters
    ----------
    ds : Dataset
        The cube.

    Returns
    -------
    tuple of str
        Dims of the variable with most dims; among equals the one with most cells, then the
        first. Bounds (``time_bnds``), variables that have a dim twice (covariances) and those
        that are neither numbers, booleans nor dates do not count.

    Raises
    ------
    InvalidValueError
        If the cube has no variable to sample.
    """
    bounds = _bounds_names(ds)
    candidates = [
        v
        for name, v in ds.variables.items()
        if name in ds.data_vars and name not in bounds and holds_dtype(v.dtype) and v.ndim
        if not repeats_dim(v)
    ]
    if not candidates:
        raise InvalidValueError(
            "the cube has no data variable of numbers, booleans or dates with dims, each once, "
            f"only {list(ds.variables)}"
        )
    return tuple(str(d) for d in max(candidates, key=lambda v: (v.ndim, v.size)).dims)


def _bounds_names(ds: xr.Dataset) -> set[str]:
    """Names of variables that hold cell bounds, by CF attributes or by custom."""
    named = {
        str(bounds)
        for v in ds.variables.values()
        for holder in (v.attrs, v.encoding)
        for key in ("bounds", "climatology")
        if isinstance(bounds := holder.get(key), str)
    }
    custom = {str(n) for n in ds.data_vars if str(n).endswith(("_bnds", "_bounds"))}
    return named | custom


def cube_variables(ds: xr.Dataset, exclude: Iterable[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Sort a cube's data variables into those samples can hold and the others.

    Parameters
    ----------
    ds : Dataset
        The cube.
    exclude : iterable of str
        Names to leave out (the split label, the mask).

    Returns
    -------
    list of str
        Variables whose dims all are dims of the cube; they broadcast along those they lack.
    dict of str to str
        The others, excluded ones apart, each with the reason.
    """
    dims = set(cube_dims(ds))
    bounds = _bounds_names(ds)
    excluded = set(exclude)
    kept: list[str] = []
    others: dict[str, str] = {}
    for name, v in ds.data_vars.items():
        if name in excluded:
            continue
        if v.ndim == 0:
            others[str(name)] = "has no dim"
        elif name in bounds:
            others[str(name)] = "holds bounds of cells"
        elif not set(v.dims) <= dims:
            others[str(name)] = f"has dims {v.dims} outside the cube's {tuple(sorted(dims))}"
        elif not holds_dtype(v.dtype):
            others[str(name)] = f"is of dtype {v.dtype}"
        elif repeats_dim(v):
            others[str(name)] = f"has a dim twice: {v.dims}"
        else:
            kept.append(str(name))
    return kept, others


def repeats_dim(variable: xr.Variable | xr.DataArray) -> bool:
    """Tell whether a variable has a dim twice, as covariances may: no window can be cut from it.

    Parameters
    ----------
    variable : Variable or DataArray
        Any.

    Returns
    -------
    bool
        True if it has.
    """
    return len(set(variable.dims)) < variable.ndim


def holds_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether samples can hold a dtype.

    Parameters
    ----------
    dtype : dtype
        Of a variable.

    Returns
    -------
    bool
        True for numbers and booleans, but those of more than 8 bytes, which differ between
        machines, and for dates in a unit that stores know.
    """
    if dtype.kind == "M":
        return np.datetime_data(dtype)[0] in DATE_UNITS
    return dtype.kind in "fiub" and dtype.itemsize <= 8
