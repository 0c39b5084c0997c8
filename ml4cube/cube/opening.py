"""What users give as a cube, opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_names
from ml4cube.cube import roles

if TYPE_CHECKING:
    import xarray as xr


def as_dataset(ds: Any, argument: str = "ds") -> xr.Dataset:
    """Take a cube in any form and return it as a Dataset, lazily and unchanged."""
    import os

    import xarray as xr

    if isinstance(ds, xr.DataArray):
        ds = _named(ds)
    if isinstance(ds, xr.Dataset):
        check_names((*ds.variables, *ds.dims))
        return ds
    store, inside = store_and_path(ds)
    if store is None and not isinstance(ds, str | os.PathLike):
        raise InvalidTypeError(
            f"{argument} is a {type(ds).__name__}; give an xarray Dataset or DataArray, a path, a "
            "zarr store or group, or an Icechunk session"
        )
    return _open_cube(ds if store is None else store, inside)


def _named(array: xr.DataArray) -> xr.Dataset:
    name = roles.DATA_VAR if array.name is None else array.name
    if name in array.dims or name in array.coords:
        raise InvalidValueError(
            f"the DataArray is called {name!r}, as one of its dims or coordinates"
            f"{' (that is what one without a name is called)' if array.name is None else ''}; "
            "give it a name of its own, by ds.rename('t2m')"
        )
    return array.to_dataset(name=name)


def store_and_path(source: Any) -> tuple[Any, str]:
    """Find the zarr store behind an object, and the path inside it."""
    import zarr
    from zarr.abc.store import Store
    from zarr.storage import StorePath

    if isinstance(source, zarr.Group | StorePath):
        return source.store, source.path
    # an Icechunk session is known by its store, so that icechunk need not be imported
    store = source if isinstance(source, Store) else getattr(source, "store", None)
    return (store, "") if isinstance(store, Store) else (None, "")


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
