"""Predicted cubes in netCDF files, made from a finished zarr store."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidValueError
from ml4cube.ledger.folders import sync_path
from ml4cube.ledger.locations import Location
from ml4cube.prediction.output.digest import write_digest
from ml4cube.store.names import netcdf_attrs

_SUFFIXES = (".nc", ".nc4")
# More than a full disk has left.
_PROBE_BYTES = 2**20


def is_netcdf(location: Location) -> bool:
    """Return True for the path of a netCDF file."""
    return isinstance(location, Path) and location.suffix in _SUFFIXES


def check_netcdf(path: Path, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Raise unless targets of some dtypes can be written to a netCDF file here."""
    if not {"netcdf4", "h5netcdf"} & xr.backends.list_engines().keys():
        raise InvalidValueError(
            f"out={str(path)!r} needs netCDF4 or h5netcdf; run `pip install netCDF4`, or "
            "write '.zarr'"
        )
    for name, dtype in dtypes.items():
        if dtype == np.float16:
            raise InvalidValueError(
                f"out={path.name!r}: netCDF has no float16, the dtype of target {name!r}; write "
                "'.zarr', or convert the cube, as with ds.astype('float32')"
            )


def to_netcdf(store: Path, targets: tuple[str, ...]) -> Path:
    """Write the file beside the arrays of a finished store, and return its path."""
    file = store / "cube.nc"
    _check_room(store)
    try:
        _convert(store, file, targets)
        write_digest(file)
        sync_path(file)
    except Exception:
        _raise_reason(file)
        raise
    return file


def _check_room(store: Path) -> None:
    """Raise if the disk has no room for a file as large as a store, before HDF5 fills it.

    On a full disk h5py writes pages of errors, and may end the process.
    """
    stored = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    if shutil.disk_usage(store).free < stored + _PROBE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _raise_reason(file: Path) -> None:
    """Raise why a file cannot be written, which HDF5 does not say; remove what it has written."""
    try:
        with file.open("ab") as end:
            end.write(bytes(_PROBE_BYTES))
            end.flush()
            os.fsync(end.fileno())
    finally:
        file.unlink(missing_ok=True)


def _convert(store: Path, path: Path, targets: tuple[str, ...]) -> None:
    """Convert a store to a netCDF file, chunk by chunk, in an order that is always the same."""
    with dask.config.set(scheduler="synchronous"), xr.open_zarr(store, consolidated=True) as cube:
        cube.attrs = netcdf_attrs(cube.attrs)
        for variable in cube.variables.values():
            variable.attrs = netcdf_attrs(variable.attrs)
            # Other entries, such as a missing_value, may contradict these or do not fit the values.
            kept = ("units", "calendar", "dtype", "_FillValue")
            variable.encoding = {k: v for k, v in variable.encoding.items() if k in kept}
        encoding = {
            name: {
                "zlib": True,
                "complevel": 1,
                "shuffle": True,
                "chunksizes": tuple(parts[0] for parts in cube[name].chunks or ()),
            }
            for name in targets
        }
        cube.to_netcdf(path, format="NETCDF4", encoding=encoding)
