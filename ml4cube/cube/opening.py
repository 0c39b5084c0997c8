"""Opening of cubes in all forms that users pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_names
from ml4cube.cube.masks_and_labels import DATA_VAR

if TYPE_CHECKING:
    import xarray as xr


def as_dataset(ds: Any) -> xr.Dataset:
    """Return a cube in any form as a Dataset, lazily and unchanged."""
    import xarray as xr

    if isinstance(ds, xr.DataArray):
        ds = _named(ds)
    if isinstance(ds, xr.Dataset):
        check_names((*ds.variables, *ds.dims))
        return ds
    store, path = store_and_path(ds)
    if store is None and not isinstance(ds, str | os.PathLike):
        raise InvalidTypeError(
            "ds must be an xarray Dataset or DataArray, a path, a zarr store or group, or an "
            f"Icechunk session, got {type(ds).__name__}"
        )
    return _open_cube(ds if store is None else store, path)


def _named(array: xr.DataArray) -> xr.Dataset:
    name = DATA_VAR if array.name is None else array.name
    if name in array.dims or name in array.coords:
        raise InvalidValueError(
            "the DataArray must not have the name of its dim or coordinate "
            f"{name!r}{' (the default name)' if array.name is None else ''}; rename it with "
            "ds.rename('t2m')"
        )
    return array.to_dataset(name=name)


def store_and_path(source: Any) -> tuple[Any, str]:
    """Return the zarr store of a group, session or store, or None, and the path inside it."""
    import zarr
    from zarr.abc.store import Store
    from zarr.storage import StorePath

    if isinstance(source, zarr.Group | StorePath):
        return source.store, source.path
    # an Icechunk session is recognized by its store, without importing icechunk
    store = source if isinstance(source, Store) else getattr(source, "store", None)
    return (store, "") if isinstance(store, Store) else (None, "")


def _open_cube(source: Any, group: str) -> xr.Dataset:
    import xarray as xr

    cube: xr.Dataset
    try:
        if isinstance(source, str | os.PathLike) and str(source).endswith((".nc", ".nc4")):
            return xr.open_dataset(source, chunks={})
        try:
            cube = xr.open_zarr(source, group=group or None, consolidated=True)
        except (ValueError, KeyError):
            cube = xr.open_zarr(source, group=group or None, consolidated=False)
            # in this case variables come in any order; by name, and with all coordinates, also
            # those along a dim of their own, such as bounds
            cube = cube[sorted(map(str, cube.variables))]
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{source!s} cannot be opened as a cube: {error}") from error
    return cube
