"""The digest of a netCDF file, an attribute that shows whether a user has changed the file."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import StoreError
from ml4cube.ledger.folders import HASH_ALGORITHM

_DIGEST_ATTR = "ml4cube_digest"


def write_digest(path: Path) -> None:
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
