"""Opening of cubes in all forms that users pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_names
from ml4cube.cube.masks_and_labels import DATA_VAR
from ml4cube.ledger.locations import full_path, store_and_path

if TYPE_CHECKING:
    import xarray as xr

# Name in files of an array that xarray saved without one.
_UNNAMED = "__xarray_dataarray_variable__"


def as_dataset(ds: Any, engine: str | None = None) -> xr.Dataset:
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
    return _open_cube(ds if store is None else store, path, engine)


def _named(array: xr.DataArray) -> xr.Dataset:
    name = DATA_VAR if array.name is None else array.name
    if name in array.dims or name in array.coords:
        raise InvalidValueError(
            "the DataArray must not have the name of its dim or coordinate "
            f"{name!r}{' (the default name)' if array.name is None else ''}; rename it with "
            "ds.rename('t2m')"
        )
    return array.to_dataset(name=name)


def _open_cube(source: Any, group: str, engine: str | None) -> xr.Dataset:
    import xarray as xr

    from ml4cube.cube.chunks.bounded import bounded_decoding

    if isinstance(source, str | os.PathLike):
        source = full_path(source)
    try:
        if engine is not None or _is_file(source):
            return _with_name(xr.open_dataset(source, engine=engine, chunks={}))
        with bounded_decoding():
            cube = _open_zarr(source, group or None)
    except Exception as error:  # object stores and readers of files raise errors of many types
        reason = _advice(source) if _is_file(source) and os.path.isfile(source) else None
        raise StoreError(f"{source!s} cannot be opened as a cube: {reason or error}") from error
    return _with_name(cube)


def _open_zarr(source: Any, group: str | None) -> xr.Dataset:
    import xarray as xr

    cube: xr.Dataset
    try:
        cube = xr.open_zarr(source, group=group, consolidated=True)
    except (ValueError, KeyError):
        cube = xr.open_zarr(source, group=group, consolidated=False)
        # in this case variables come in any order; by name, and with all coordinates, also
        # those along a dim of their own, such as bounds
        cube = cube[sorted(map(str, cube.variables))]
    return cube


def _is_file(source: Any) -> bool:
    if not isinstance(source, str | os.PathLike) or str(source).endswith(".zip"):  # of zarr
        return False
    return str(source).endswith((".nc", ".nc4")) or os.path.isfile(source)


def _advice(file: str | os.PathLike[str]) -> str | None:
    """Return what a file of netCDF-4, or of another format, needs that is not installed."""
    import xarray as xr

    engines = xr.backends.list_engines().keys()
    ending = os.path.splitext(file)[1].lower()
    with open(file, "rb") as opened:
        start = opened.read(4)
    if start == b"\x89HDF" and not engines & {"netcdf4", "h5netcdf"}:
        return "netCDF-4 needs netCDF4 or h5netcdf; run `pip install netCDF4`"
    if ending in (".tif", ".tiff") and "rasterio" not in engines:
        return (
            "GeoTIFF needs rioxarray; run `pip install rioxarray` (on the command line with "
            "--engine rasterio, if its ending is another), or convert it to zarr with "
            "rioxarray.open_rasterio(path).to_dataset('band').to_zarr(...)"
        )
    if ending in (".grib", ".grib2", ".grb", ".grb2") and "cfgrib" not in engines:
        return (
            "GRIB needs cfgrib; run `pip install cfgrib` (on the command line with --engine "
            "cfgrib, if its ending is another), or convert it to zarr with "
            "xr.open_dataset(path, engine='cfgrib').to_zarr(...)"
        )
    if ending in (".nc", ".nc4") and start[:3] != b"CDF" and start != b"\x89HDF":
        return "it is not netCDF"
    if ending == ".cdf":
        return (
            "it is not netCDF; run `pip install cdflib` and convert a file of NASA's CDF to zarr "
            "with cdflib.xarray.cdf_to_xarray(path).to_zarr(...)"
        )
    return None


def _with_name(cube: xr.Dataset) -> xr.Dataset:
    """Return a cube in which an array that xarray saved without a name has the default name."""
    if _UNNAMED not in cube.data_vars or DATA_VAR in cube.variables:
        return cube
    return cube.rename({_UNNAMED: DATA_VAR})
