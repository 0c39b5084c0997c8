"""Identify a cube, so that a later call can be compared.

Cells in files are known by where these lie and by the names, sizes and times of change of the
files, in object stores by what a listing says of them; what dask computes also by its name and all
arrays in its graph; cells in memory by a hash. Where none of this tells, the cells are read once
more and hashed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import xarray as xr

from ml4cube.core.errors import StoreError, listed
from ml4cube.core.fingerprint import Words, identify_cells
from ml4cube.core.grid import Block
from ml4cube.cube.chunks.lazy_zarr import file_behind
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.ledger.folders import raise_error

logger = logging.getLogger(__name__)

#: Returns where a file or folder lies, and a hash that changes with its files.
State = Callable[[str | Path], str]

# Options of file systems that read others.
_CHAINED = {"fo", "fs", "remote_protocol", "target_protocol"}
# Options that differ from login to login.
_SECRET = re.compile("key|secret|token|password|credential")
# What listings say of an object that changes with it.
_LISTED = ("size", "ETag", "etag", "generation", "LastModified", "last_modified", "mtime")
# Largest copy made to hash an array that is not contiguous.
_SLAB_BYTES = 2**21


class SourceChangedError(StoreError):
    """A cube changed while it was read."""


@dataclass(frozen=True)
class SourceState:
    """What identifies the cells of variables without reading files, when a run begins.

    Make one with `SourceState.of`.
    """

    variables: Mapping[str, xr.Variable]
    # Real paths of what the run itself writes.
    outputs: frozenset[str]
    # None where only its cells identify a variable.
    identities: Mapping[str, str | None]

    @classmethod
    def of(cls, variables: Mapping[str, xr.Variable], outputs: Collection[str]) -> Self:
        """Identify variables; StoreError where their files are out of reach."""
        # several variables may be in one file or folder
        state = functools.cache(functools.partial(state_of, outputs=outputs))
        identities: dict[str, str | None] = {}
        for name, variable in variables.items():
            try:
                identities[name] = identity_of_variable(variable, state)
            except OSError as error:
                raise StoreError(
                    f"cannot tell whether variable {name!r} has changed: {error}; the source is "
                    "damaged or out of reach, repair it and run again"
                ) from error
        return cls(dict(variables), frozenset(outputs), identities)

    def check_unchanged(self, target: object) -> None:
        """Refuse to publish at a target what was read from files that have changed since."""
        in_files = {
            name: variable
            for name, variable in self.variables.items()
            if not variable._in_memory and self.identities[name] is not None
        }
        now = SourceState.of(in_files, self.outputs).identities
        if changed := [name for name in in_files if now[name] != self.identities[name]]:
            raise SourceChangedError(
                f"files of {listed(changed)} were written, replaced or removed while the cube was "
                f"read, so {target} would mix old and new cells, and was not written; run again "
                "when the cube is complete: the run starts over"
            )


def identity_of_variable(variable: xr.Variable, state: State) -> str | None:
    """Identify a variable without reading files; return None where only its cells tell."""
    from dask.base import is_dask_collection

    array = _array_behind(variable)
    of_cells = _of_array
    if is_dask_collection(array):
        of_cells = _of_dask
    identity = of_cells(array, state)
    return identity and f"{variable.dims} {variable.dtype} {identity}"


def _array_behind(variable: xr.Variable) -> Any:
    """Return what holds the cells: numpy's array, xarray's view of a file or a dask array."""
    from xarray.core.indexing import ExplicitlyIndexed

    data: Any = variable._data  # because `data` would load a file
    if variable.chunks is not None:
        file = file_behind(data)
        if file is None:
            return data
        return file
    if variable.ndim and isinstance(data, ExplicitlyIndexed):
        return data
    return variable.values


def _of_array(array: Any, state: State) -> str | None:
    """Identify an array by where its cells lie, and how they are selected and decoded."""
    from dask.base import tokenize
    from zarr import Array

    steps = []  # of xarray's wrappers, from the outside
    while hasattr(array, "array"):
        key, function = getattr(array, "key", None), getattr(array, "func", None)
        steps.append((type(array).__name__, key, function))
        array = array.array
    location: str | None = None
    if isinstance(array, np.ndarray | pd.Index) and not np.ma.isMaskedArray(array):
        location = hash_of(np.asarray(array))
    elif hasattr(array, "datastore"):
        location = _location_in_file(array, state)
    elif isinstance(stored := getattr(array, "get_array", lambda: array)(), Array):
        location = _location_in_zarr(stored, state)
    return location and f"{tokenize(steps)} {location}"


def _of_dask(array: Any, state: State) -> str | None:
    """Identify a dask array by its name, and by all arrays that its graph holds."""
    # the name does not change with the files; pickling finds arrays, however deep they are
    import cloudpickle
    from xarray.core.indexing import ExplicitlyIndexed
    from zarr import Array

    # identity and array by id; keeping the array keeps its id from being used again
    arrays: dict[int, tuple[str, Any]] = {}

    class Finder(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            if not isinstance(value, ExplicitlyIndexed | np.ndarray | Array):
                return None
            if id(value) not in arrays:
                identity = _of_array(value, state)
                if identity is None:
                    raise LookupError(value)
                arrays[id(value)] = identity, value
            return arrays[id(value)][0]

    with open(os.devnull, "wb") as nowhere:
        finder = Finder(nowhere)
        try:
            for _, layer in sorted(array.dask.layers.items()):
                finder.dump(layer)
        # an array that is not known, or whatever pickling a value of the graph raises
        except Exception:
            return None
    digest = hashlib.sha256("".join(identity for identity, _ in arrays.values()).encode())
    return f"dask {array.name} {digest.hexdigest()}"


def _location_in_zarr(stored: Any, state: State) -> str | None:
    """Describe where a zarr array lies; None in memory and in stores that are not known."""
    from zarr.storage import FsspecStore, LocalStore

    store, location = stored.store, None
    if isinstance(store, LocalStore):
        location = state(store.root / stored.path)
    elif isinstance(store, FsspecStore):
        inside = "/".join(filter(None, (store.path.rstrip("/"), stored.path)))
        location = _location_in_file_system(store.fs, inside, state)
    elif snapshot := getattr(getattr(store, "session", None), "snapshot_id", None):
        # of Icechunk
        location = None
        if not _is_changed(store.session, stored.path):
            location = f"icechunk {snapshot}"
    return location and f"zarr {location} {stored.path}"


def _is_changed(session: Any, path: str) -> bool:
    """Return True if an array in an Icechunk session differs from that in its snapshot."""
    if not session.has_uncommitted_changes:
        return False
    diff = session.status()
    arrays = diff.new_arrays | diff.updated_arrays | diff.deleted_arrays
    return f"/{path}" in arrays | set(diff.updated_chunks)


def _location_in_file_system(fs: Any, path: str, state: State) -> str | None:
    """Describe a path behind a URL; None in memory and where one file system reads another."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    fs = getattr(fs, "sync_fs", fs)  # zarr wraps those that are not asynchronous
    if isinstance(fs, LocalFileSystem):
        return state(path)
    if isinstance(fs, MemoryFileSystem) or fs.storage_args or _CHAINED & set(fs.storage_options):
        return None
    options = {k: v for k, v in fs.storage_options.items() if not _SECRET.search(k)}
    options["account"] = getattr(fs, "account_name", None)  # of Azure, which the environment gives
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        where = json.dumps([options, endpoint], sort_keys=True)
    except TypeError:  # an open connection or the like
        return None
    return f"{type(fs).__name__} {where} {path} {_listing_hash(fs, path)}"


def _listing_hash(fs: Any, path: str) -> str:
    """Hash what a file system lists below a path; empty if it lists nothing of use."""
    from zarr.core.sync import sync

    try:
        fs.invalidate_cache(path)
        is_async = getattr(fs, "asynchronous", False)
        listing = sync(fs._find(path, detail=True)) if is_async else fs.find(path, detail=True)
    except Exception:  # file systems raise any, as where a user may read but not list
        return ""
    facts = []
    for name, entry in sorted(listing.items()):
        facts.append([name, *(str(entry.get(key, "")) for key in _LISTED)])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _location_in_file(array: Any, state: State) -> str | None:
    """Describe file, group and variable of what netCDF4, h5netcdf or scipy has opened."""
    group = file = array.datastore.ds
    while getattr(file, "parent", None) is not None:
        file = file.parent
    path = file.filepath() if hasattr(file, "filepath") else getattr(file, "filename", None)
    if not isinstance(path, str):
        return None
    if "://" not in path:
        if not os.path.exists(path):
            return None
        path = state(path)
    inside = getattr(group, "path", None) or getattr(group, "name", None)
    return f"file {path} {inside} {array.variable_name}"


def hash_cells(name: str, variable: xr.Variable) -> str:
    """Hash the cells of a variable; not its chunks, by which blocks are read."""
    logger.info(
        "reading variable %r in full: only its cells can show whether the cube is that of an "
        "earlier call",
        name,
    )
    reader = CubeReader.of_variables({name: variable})
    sums = sum(scan(reader, _identify_block, blocks_of(reader)), np.zeros(2, np.uint64))
    return f"{variable.dims} {variable.shape} {variable.dtype} {sums.tolist()}"


def _identify_block(block: Block, cells: Cells) -> Words:
    """Return the sums of the cells of a block, a slab at a time."""
    (values,) = cells.values()
    values = np.asarray(values, values.dtype.newbyteorder("="))
    rows = max(1, len(values) * _SLAB_BYTES // max(1, 8 * values.size))
    sums = np.zeros(2, np.uint64)
    for first in range(0, len(values), rows):
        starts = (block.start[0] + first, *block.start[1:])
        sums += identify_cells(values[first : first + rows], starts)
    return sums


def state_of(source: str | Path, outputs: Collection[str]) -> str:
    """Return a file's or folder's path, and a hash of its files' names, sizes and times."""
    root = os.path.realpath(source)
    digest = hashlib.sha256()
    for path in _files(root, outputs):
        # a file may have gone since it was listed, or be a link to nothing
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            name_size_time = path[len(root) :], stat.st_size, stat.st_mtime_ns
            digest.update(repr(name_size_time).encode())
    return f"{root} {digest.hexdigest()}"


def _files(root: str, outputs: Collection[str]) -> Iterator[str]:
    """List the files in a folder, but not those in `outputs`; or the file itself."""
    if not os.path.isdir(root):
        yield root
        return
    for folder, folders, files in os.walk(root, onerror=raise_error, followlinks=True):
        folders[:] = sorted(
            name
            for name in folders
            if (path := os.path.join(folder, name)) not in outputs
            # a link to a folder that it lies in has no end
            and not (os.path.islink(path) and path.startswith(os.path.realpath(path) + os.sep))
        )
        yield from (os.path.join(folder, name) for name in sorted(files))


def hash_of(values: np.ndarray[Any, Any]) -> str:
    """Hash an array: its dtype, shape and values."""
    digest: Any = hashlib.sha256()
    if values.dtype.kind in "OT":
        texts = [f"{v} {getattr(v, 'calendar', '')}" for v in values.ravel()]
        digest.update(json.dumps(texts).encode())
    else:
        rows = np.atleast_1d(values)
        step = max(1, len(rows) * _SLAB_BYTES // max(1, rows.nbytes))
        for start in range(0, len(rows), step):
            slab = np.ascontiguousarray(rows[start : start + step])
            digest.update(slab.reshape(-1).view(np.uint8))
    return f"{values.dtype} {values.shape} {digest.hexdigest()}"
