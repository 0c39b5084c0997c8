"""Predicted cubes in netCDF files, made from a finished zarr store.

The digest of a file, one of its attributes, shows whether a user has changed the file.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.ledger.folders import HASH_ALGORITHM, Folder, sync_path
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.locations import Location
from ml4cube.store.names import netcdf_attrs

_DIGEST_ATTR = "ml4cube_digest"
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


def to_netcdf(folder: Folder, targets: tuple[str, ...]) -> Folder:
    """Write the file beside the arrays of a finished store, and return its place."""
    assert isinstance(folder, LocalFolder)
    store = folder.root
    file = store / "cube.nc"
    _check_room(store)
    try:
        _convert(store, file, targets)
        _write_digest(file)
        sync_path(file)
    except Exception:
        _raise_reason(file)
        raise
    return LocalFolder(file)


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


def _write_digest(path: Path) -> None:
    """Add the digest of a netCDF file to its attributes."""
    xr.Dataset(attrs={_DIGEST_ATTR: _digest(path)}).to_netcdf(path, mode="a")


def find_foreign_in_netcdf(path: Path) -> Sequence[str]:
    """Return a netCDF file if it has changed since its digest; raise StoreError without one."""
    try:
        with xr.open_dataset(path, decode_cf=False) as ds:
            written = ds.attrs[_DIGEST_ATTR]
        return [] if written == _digest(path) else [path.name]
    except Exception as error:  # what cannot be read, for any reason, is no predicted cube
        raise StoreError(f"{path} was not written by predict_cube") from error


def _digest(path: Path) -> str:
    """Hash names, dims, types, values and attributes, whatever library reads them."""
    hasher = hashlib.new(HASH_ALGORITHM)
    with xr.open_dataset(path, decode_cf=False, cache=False) as ds:
        attrs = {name: value for name, value in ds.attrs.items() if name != _DIGEST_ATTR}
        hasher.update(_as_text(attrs))
        for name in sorted(map(str, ds.variables)):
            variable = ds.variables[name]
            hasher.update(_as_text({"name": name, "dims": variable.dims, "shape": variable.shape}))
            hasher.update(_as_text(variable.attrs))
            for cells in _chunks(variable):
                values = np.asarray(variable[cells].values)
                hasher.update(_described(values))
    return hasher.hexdigest()


def _as_text(attrs: Mapping[Any, Any]) -> bytes:
    """Return attributes as text; libraries read a single number as a scalar or as a list of it."""
    lists = {str(name): np.asarray(value).ravel().tolist() for name, value in attrs.items()}
    return json.dumps(lists, sort_keys=True).encode()


def _described(values: NDArray[Any]) -> bytes:
    if values.dtype.kind in "OUS":  # texts
        return json.dumps(values.tolist()).encode()
    return values.dtype.str.encode() + values.tobytes()


def _chunks(variable: xr.Variable) -> Iterator[tuple[slice, ...]]:
    """Yield the cells of each chunk of a variable, so that none is read whole."""
    sizes = variable.encoding.get("chunksizes") or variable.shape
    ranges = []
    for length, size in zip(variable.shape, sizes, strict=True):
        ranges.append([slice(start, start + size) for start in range(0, length, max(size, 1))])
    return itertools.product(*ranges)
