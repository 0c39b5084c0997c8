"""Is this cube the one of an earlier call? Told, wherever possible, without reading its cells."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ml4cube.cube.chunks.opened import file_behind
from ml4cube.cube.reader import is_on_cluster
from ml4cube.sampling.request import Sampling

logger = logging.getLogger(__name__)

#: Tells where a file or folder is, and whether it has changed.
State = Callable[[str | Path], str]

# Zarr stores around another one that change neither keys nor bytes.
_PASSING_ON = {"CacheStore", "LatencyStore", "LoggingStore"}

# Options of file systems by which a path means another file; none is a secret.
_WHERE = (
    "host",
    "port",
    "endpoint",
    "endpoint_url",
    "base_url",
    "account_name",
    "org",
    "repo",
    "sha",
    "ref",
)
# Of the copies made to hash what is not contiguous.
_SLAB_BYTES = 2**21


def identity_of_variable(variable: xr.Variable, state: State) -> str | None:
    """Tell one variable from another without reading files."""
    from dask.base import is_dask_collection

    data: Any = variable._data
    if is_dask_collection(data):
        file = file_behind(data)
        told = (file is not None and _told(file, state)) or _computed(data, state)
    else:
        told = _told(variable.values if variable._in_memory else data, state)
    return told and f"{variable.dims} {variable.dtype} {told}"


def _told(array: Any, state: State) -> str | None:
    """Where the cells of an array are stored, and how they are indexed and decoded."""
    from dask.base import tokenize
    from zarr import Array

    links = []
    while hasattr(array, "array"):
        how = getattr(array, "key", None), getattr(array, "func", None)
        links.append((type(array).__name__, *how))
        array = array.array
    stored = getattr(array, "_array", array)  # of xarray's ZarrArrayWrapper
    if isinstance(array, np.ndarray | pd.Index):
        place: str | None = hash_of(np.asanyarray(array))
    elif isinstance(stored, Array):
        place = _place_in_zarr(stored, state)
    else:
        place = _place_in_file(array, state)
    return place and f"{tokenize(links)} {place}"


def _place_in_zarr(stored: Any, state: State) -> str | None:
    from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

    store, place = stored.store, None
    while isinstance(store, WrapperStore):
        if type(store).__name__ not in _PASSING_ON:
            return None
        store = store._store
    session = getattr(store, "session", None)
    snapshot = getattr(session, "snapshot_id", None)  # of Icechunk
    if snapshot is not None:
        place = None if _has_changes(session, stored.path) else f"icechunk {snapshot}"
    elif isinstance(store, LocalStore):
        place = state(store.root / stored.path)
    elif isinstance(store, ZipStore):
        place = state(store.path)
    elif isinstance(store, FsspecStore):
        inside = "/".join(filter(None, (store.path.rstrip("/"), stored.path)))
        place = _place_on(store.fs, inside, state)
    return place and f"zarr {place} {stored.path}"


def _has_changes(session: Any, path: str) -> bool:
    """Whether an array is another one in a session of Icechunk than in its snapshot."""
    if not session.has_uncommitted_changes:
        return False
    diff = session.status()
    arrays = diff.new_arrays | diff.updated_arrays | diff.deleted_arrays
    return f"/{path}" in arrays | set(diff.updated_chunks)


def _place_on(fs: Any, path: str, state: State) -> str | None:
    """Where a file or folder of a file system is, and the state of files on this machine."""
    from fsspec.archive import AbstractArchiveFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.implementations.reference import ReferenceFileSystem

    fs, path = _unwrapped(fs, path)
    if isinstance(fs, LocalFileSystem):
        return state(fs._strip_protocol(path))
    if isinstance(fs, MemoryFileSystem):
        return None
    if isinstance(fs, ReferenceFileSystem):
        return _place_in_references(fs, path, state)
    if isinstance(fs, AbstractArchiveFileSystem):
        archive = getattr(fs, "of", fs.fo)
        if not hasattr(archive, "fs"):  # bytes in memory
            return None
        place = _place_on(archive.fs, archive.path, state)
        return place and f"{place} {path}"
    return f"{type(fs).__name__} {_where(fs)} {path}"


def _place_in_references(fs: Any, path: str, state: State) -> str | None:
    """The references of an array, and the files that they point to."""
    from fsspec.core import split_protocol
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.reference import LazyReferenceMapper

    if isinstance(fs.references, LazyReferenceMapper):
        # those to files on this machine would be found by reading all of them
        targets = [_unwrapped(target, "")[0] for target in fs.fss.values()]
        if any(isinstance(target, LocalFileSystem) for target in targets):
            return None
        place = _place_on(fs.references.fs, fs.references.root, state)
        return place and f"{place} {[_where(target) for target in targets]} {path}"
    digest, urls = hashlib.sha256(), set()
    folder = path.strip("/") and f"{path.strip('/')}/"
    for key in sorted(key for key in fs.references if key.startswith(folder)):
        reference = fs.references[key]
        digest.update(repr((key, reference)).encode())
        if isinstance(reference, list | tuple):
            urls.add(reference[0] or fs.target)
    for protocol, inside in itertools.groupby(sorted(urls), lambda url: split_protocol(url)[0]):
        target = fs.fss.get(protocol)
        if target is None:
            return None
        # only files on this machine have a state; of many others, each would cost the same again
        if isinstance(_unwrapped(target, "")[0], LocalFileSystem):
            places = [_place_on(target, url, state) for url in inside]
        else:
            places = [_place_on(target, "", state), *inside]
        if None in places:
            return None
        digest.update(repr(places).encode())
    return f"references {digest.hexdigest()}"


def _where(fs: Any) -> dict[str, Any]:
    """What besides a path tells where a file is, such as the host."""
    names = inspect.signature(fs.__init__).parameters
    options = dict(zip(names, fs.storage_args, strict=False)) | fs.storage_options
    # which may be part of a connection string
    where = {"account_name": getattr(fs, "account_name", None)}
    if "s3" in fs.protocol:
        # botocore's order
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        where["endpoint_url"] = url
    for given in (options.get("client_kwargs") or {}, options):
        where |= {name: given[name] for name in _WHERE if given.get(name) is not None}
    return where


def _unwrapped(fs: Any, path: Any) -> tuple[Any, Any]:
    """Find the file system that others only pass on, and the path in it."""
    from fsspec.implementations.cached import CachingFileSystem
    from fsspec.implementations.dirfs import DirFileSystem

    while True:
        if (inner := getattr(fs, "sync_fs", None)) is not None:
            fs = inner  # of zarr, around those that are not asynchronous
        elif isinstance(fs, DirFileSystem):
            fs, path = fs.fs, fs._join(path)
        elif isinstance(fs, CachingFileSystem):
            fs = fs.fs
        else:
            return fs, path


def _place_in_file(array: Any, state: State) -> str | None:
    """Variable, group and path of what xarray opened by netCDF4, h5netcdf or scipy."""
    from fsspec.implementations.local import LocalFileSystem

    datastore = getattr(array, "datastore", None)
    path, *_ = getattr(getattr(datastore, "_manager", None), "_args", None) or [None]
    if isinstance(getattr(path, "fs", None), LocalFileSystem):  # a file that fsspec has opened
        path = path.path
    if isinstance(path, str) and "://" in path:
        place = path
    elif isinstance(path, str) and os.path.exists(path):
        place = state(path)
    else:
        return None
    return f"file {place} {getattr(datastore, '_group', None)} {array.variable_name}"


def _computed(array: Any, state: State) -> str | None:
    """What dask calls an array, a hash of how it is made, and all arrays that its graph holds."""
    # The name does not tell whether these changed. Pickling finds them, however deep they are.
    import cloudpickle
    from xarray.core.indexing import ExplicitlyIndexed
    from zarr import Array

    # by id, with the value itself, so that no id is used again meanwhile
    found: dict[int, tuple[str | None, Any]] = {}

    class Finder(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            if is_on_cluster(value):
                raise LookupError(value)
            if not isinstance(value, ExplicitlyIndexed | np.ndarray | Array):
                return None
            if id(value) not in found:
                told = _told(value, state)
                if told is None:
                    raise LookupError(value)
                found[id(value)] = told, value
            return found[id(value)][0]

    with open(os.devnull, "wb") as nowhere:
        finder = Finder(nowhere)
        try:
            for _, layer in sorted(array.dask.layers.items()):
                finder.dump(layer)
        # of cells that may be anywhere, or whatever a value's own way to be pickled raises
        except Exception:
            return None
    held = hashlib.sha256("".join(str(told) for told, _ in found.values()).encode())
    return f"dask {array.name} {held.hexdigest()}"


def hash_cells(sampling: Sampling, name: str) -> str:
    """Hash the cells of a variable, block by block."""
    logger.info(
        "variable %r is read once more: only its cells tell whether this cube is the one of an "
        "earlier call",
        name,
    )
    reader, blocks = sampling.reader.only([name]), sampling.blocks
    digest = hashlib.sha256()
    for id in range(len(blocks)):
        digest.update(hash_of(reader.read(blocks.block(id).slices)[name]).encode())
    return digest.hexdigest()


def state_of(source: str | Path, outputs: Collection[str]) -> str:
    """Hash name, size and time of change of a source's files, so that a changed one is noticed."""
    root = os.path.realpath(source)
    digest = hashlib.sha256()
    folders: list[Any] = [root]
    while folders:
        folder = folders.pop()
        for entry in _entries(folder):
            path = os.fspath(entry)
            # that of a link that leads nowhere raises
            if os.path.isdir(path) if entry.is_symlink() else entry.is_dir():
                if path not in outputs and not _leads_back(entry):
                    folders.append(path)
                continue
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                # a link may lead nowhere
                about = entry.stat() if os.path.exists(path) else os.lstat(path)
                known = path[len(root) :], about.st_size, about.st_mtime_ns
                digest.update(repr(known).encode())
    return f"{root} {digest.hexdigest()}"


def _entries(folder: str) -> list[Any]:
    """What is in a folder, or the file itself; nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        found: Iterable[Any] = os.scandir(folder) if os.path.isdir(folder) else [Path(folder)]
        return sorted(found, key=lambda entry: entry.name)
    return []


def _leads_back(entry: Any) -> bool:
    """Whether a folder is a link to one that it lies in."""
    if not entry.is_symlink():
        return False
    path: str = os.fspath(entry)
    real = os.path.realpath(path)
    return path.startswith(os.path.join(real, ""))


def hash_of(values: np.ndarray[Any, Any]) -> str:
    """Hash an array: its dtype, shape, values and, where it has one, mask."""
    digest = hashlib.sha256()
    if values.dtype.names and values.dtype.hasobject:
        for name in values.dtype.names:
            digest.update(hash_of(values[name]).encode())
    elif values.dtype.kind in "OT":
        texts = [f"{v} {getattr(v, 'calendar', '')}" for v in values.ravel()]
        digest.update(json.dumps(texts).encode())
    else:
        _add(digest, np.asarray(values))
    if np.ma.isMaskedArray(values):
        _add(digest, np.ma.getmaskarray(values))
    return f"{values.dtype} {values.shape} {digest.hexdigest()}"


def _add(digest: Any, values: np.ndarray[Any, Any]) -> None:
    """Hash the bytes of an array as `tobytes` has them, without a copy of it all."""
    rows = np.atleast_1d(values)
    step = max(1, len(rows) * _SLAB_BYTES // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        slab = np.ascontiguousarray(rows[start : start + step])
        digest.update(slab.reshape(-1).view(np.uint8))
