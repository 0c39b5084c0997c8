"""Where samples come from: what is written into a store, and what makes two calls the same."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import ml4cube
from ml4cube.core.errors import InvalidTypeError
from ml4cube.datasets.sampling import Sampling, jsonable
from ml4cube.datasets.store import FORMAT
from ml4cube.datasets.windows import file_behind

logger = logging.getLogger(__name__)

#: Tells whether a file or folder has changed.
State = Callable[[Path], str]

# Zarr stores around another one that change neither keys nor bytes.
_PASSING_ON = {"CacheStore", "LatencyStore", "LoggingStore"}
_LIBRARIES = ("numpy", "xarray", "zarr", "numcodecs")


def versions() -> dict[str, str]:
    """Versions of the libraries that decide about a store's bytes.

    Returns
    -------
    dict of str to str
        By library.
    """
    return {"ml4cube": ml4cube.__version__, **{name: version(name) for name in _LIBRARIES}}


def provenance(sampling: Sampling, settings: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """Describe where samples come from; nothing that differs between equal runs.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    settings : mapping
        Arguments of the call that the spec does not hold.
    fingerprint : str
        Hash of the call.

    Returns
    -------
    dict
        JSON values.
    """
    ds = sampling.ds
    names = sampling.spec.variables
    return {
        "source": _source_path(ds),
        "attrs": jsonable(ds.attrs),
        "variables": {n: _described(ds[n]) for n in names},
        # sorted, since zarr lists the members of a group in no fixed order
        "coordinates": {n: _described(ds[n]) for n in sorted(map(str, ds.coords))},
        "left_out": dict(sorted(sampling.left_out.items())),
        "settings": dict(settings),
        "versions": versions(),
        "call": fingerprint,
    }


def _described(variable: xr.DataArray) -> dict[str, Any]:
    return {
        "dims": [str(d) for d in variable.dims],
        "shape": list(variable.shape),
        "dtype": str(variable.dtype),
        "attrs": jsonable(variable.attrs),
    }


def _source_path(ds: xr.Dataset) -> str | None:
    holders = [ds.encoding, *(v.encoding for v in ds.variables.values())]
    return next((str(h["source"]) for h in holders if h.get("source")), None)


def fingerprint(
    sampling: Sampling,
    settings: Mapping[str, Any],
    callback: str | None = None,
    outputs: Iterable[Path] = (),
) -> str:
    """Hash all that decides about a store's bytes.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    settings : mapping
        Arguments of the call that the spec does not hold.
    callback : str, optional
        The callback's `identity_of` before its first call, which may change what it holds.
    outputs : iterable of Path
        Folders that the call itself writes; they may lie in the cube's own.

    Returns
    -------
    str
        The same for the same call on the same cube: for cubes in memory their content counts,
        for others the stored arrays that they show, how they are indexed, and name, size and
        time of change of local files; of Icechunk the snapshot, which any commit to the branch
        makes another; of what dask computes its name for it, and all stored arrays in its graph.
    """
    extractor = sampling.extractor
    own = {os.path.realpath(folder) for folder in outputs}
    state = functools.cache(functools.partial(_state, outputs=own))
    spec = json.loads(sampling.spec.to_json())
    # zarr lists the variables of a store without consolidated metadata in any order
    spec["variables"] = sorted(spec["variables"])
    variables = sampling.ds.variables
    scalars = [str(n) for n in sampling.ds.coords if not variables[n].dims]
    call = {
        "format": FORMAT,
        "spec": spec,
        "tiles": json.loads(extractor.tiles.to_json()),
        "recipe": sampling.recipe,
        "settings": settings,
        "versions": versions(),
        "cells": {
            n: _identity(variables[n], state) or _cells(sampling, n)
            for n in sampling.reader.variables
        },
        "scalars": {
            n: _identity(variables[n], state) or _hash(variables[n].values) for n in scalars
        },
        "axes": {a.name: [_hash(a.values), dict(a.attrs)] for a in extractor.axes},
        "choice": None if extractor.choice is None else _hash(extractor.choice.used),
        "callback": callback,
        "attrs": jsonable(sampling.ds.attrs),
        "variables": {n: _described(sampling.ds[n]) for n in sampling.spec.variables},
    }
    return hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()


def _identity(variable: xr.Variable, state: State) -> str | None:
    """Tell one variable from another without reading files; None where only its cells do."""
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
        place: str | None = _hash(np.asanyarray(array))
    elif isinstance(stored, Array):
        place = _place_in_zarr(stored, state)
    else:
        place = _place_in_file(array, state)
    return place and f"{tokenize(links)} {place}"


def _place_in_zarr(stored: Any, state: State) -> str | None:
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem
    from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

    store, source = stored.store, None
    while isinstance(store, WrapperStore):
        if type(store).__name__ not in _PASSING_ON:
            return None
        store = store._store
    session = getattr(store, "session", None)
    snapshot = getattr(session, "snapshot_id", None)  # of Icechunk
    if session is not None and snapshot is not None and not session.has_uncommitted_changes:
        return f"icechunk {snapshot} {stored.path}"
    fs, path = _unwrapped(getattr(store, "fs", None), getattr(store, "path", ""))
    if snapshot is not None or isinstance(store, MemoryStore) or isinstance(fs, MemoryFileSystem):
        return f"memory {_hash(np.asarray(stored[...]))}"
    # what a file system looks into: a zip file, references
    container = getattr(fs, "storage_options", {}).get("fo")
    if isinstance(store, LocalStore):
        source = store.root / stored.path
    elif isinstance(fs, LocalFileSystem):
        source = Path(path) / stored.path
    elif isinstance(store, ZipStore):
        source = store.path
    elif isinstance(container, str):
        source = Path(container)
    if source is None or not source.exists():
        host = getattr(fs, "endpoint_url", None)
        return f"zarr {store} {host} {path}/{stored.path} {container}"
    return f"zarr {os.path.realpath(source)} {stored.path} {state(source)}"


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
        place = f"{os.path.realpath(path)} {state(Path(path))}"
    else:
        return None
    return f"file {place} {getattr(datastore, '_group', None)} {array.variable_name}"


def _computed(array: Any, state: State) -> str | None:
    """What dask calls an array, a hash of how it is made, and all arrays that its graph holds.

    The name does not tell whether these changed. Pickling finds them, however deep they are.
    """
    import cloudpickle
    from xarray.core.indexing import ExplicitlyIndexed
    from zarr import Array

    # by id, with the value itself, so that no id is used again meanwhile
    found: dict[int, tuple[str | None, Any]] = {}

    class Finder(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
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


def _cells(sampling: Sampling, name: str) -> str:
    """Hash the cells themselves, block by block."""
    logger.info(
        "variable %r is read once more: nothing but its cells tells whether this cube is the one "
        "of an earlier call, since it is no zarr, netCDF or dask array that could be looked into",
        name,
    )
    reader, blocks = sampling.reader.only([name]), sampling.blocks
    digest = hashlib.sha256()
    for id in range(len(blocks)):
        digest.update(_hash(reader.read(blocks.block(id).slices)[name]).encode())
    return digest.hexdigest()


def _state(source: Path, outputs: Collection[str]) -> str:
    """Hash name, size and time of change of a source's files, so that a changed one is noticed."""
    root = os.path.realpath(source)
    digest = hashlib.sha256()
    folders: list[Any] = [root]
    while folders:
        folder = folders.pop()
        found: Iterable[Any] = os.scandir(folder) if os.path.isdir(folder) else [Path(folder)]
        for entry in sorted(found, key=lambda entry: entry.name):
            path = os.fspath(entry)
            # that of a link that leads nowhere raises
            if os.path.isdir(path) if entry.is_symlink() else entry.is_dir():
                if path not in outputs and not _leads_back(entry):
                    folders.append(path)
                continue
            # a link may lead nowhere
            about = entry.stat() if os.path.exists(path) else os.lstat(path)
            known = path[len(root) :], about.st_size, about.st_mtime_ns
            digest.update(repr(known).encode())
    return digest.hexdigest()


def _leads_back(entry: Any) -> bool:
    """Whether a folder is a link to one that it lies in."""
    if not entry.is_symlink():
        return False
    path: str = os.fspath(entry)
    real = os.path.realpath(path)
    return path.startswith(os.path.join(real, ""))


def _hash(values: np.ndarray[Any, Any]) -> str:
    if values.dtype.kind == "O":
        data = json.dumps([f"{v} {getattr(v, 'calendar', '')}" for v in values.ravel()]).encode()
    else:
        data = np.ascontiguousarray(values).tobytes()
    if np.ma.isMaskedArray(values):
        data += np.ma.getmaskarray(values).tobytes()
    return f"{values.dtype} {values.shape} {hashlib.sha256(data).hexdigest()}"


def identity_of(function: Callable[..., Any]) -> str:
    """Tell one callback from another, the same in every process.

    Parameters
    ----------
    function : callable
        The callback.

    Returns
    -------
    str
        Hash of its code, constants, defaults and closure, and of the globals it names; not of
        the file and lines it stands in. Helpers of an importable module count with their own
        code. What Python itself cannot look into is known by its pickle, which may differ
        between processes: then it counts as another callback.

    Raises
    ------
    InvalidTypeError
        If it holds what cannot be pickled, so that no other process could run it.
    """
    with _travelling(function):
        known = _Canonical().of(function, whole=True)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a callback as a worker process gets it.

    Parameters
    ----------
    function : callable
        The callback.

    Returns
    -------
    callable
        What it keeps for its next call is not seen by the original.

    Raises
    ------
    InvalidTypeError
        As `identity_of`.
    """
    import cloudpickle

    with _travelling(function):
        copied: Callable[..., Any] = cloudpickle.loads(cloudpickle.dumps(function))
    return copied


@contextlib.contextmanager
def _travelling(function: Callable[..., Any]) -> Iterator[None]:
    """Name the callback that cannot be sent to another process."""
    try:
        yield
    # whatever a value's own way to be pickled raises
    except Exception as error:
        raise InvalidTypeError(
            f"callback={function!r} holds what other processes cannot get: {error}; locks, open "
            "files and the like must be made inside the callback, when it is called"
        ) from error


_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__firstlineno__"}


class _Canonical:
    """Writes values as tuples and texts that are the same in every process."""

    def __init__(self) -> None:
        # by id, with the value itself, so that no id is used again meanwhile
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any, whole: bool = False) -> Any:
        """Describe a value; a function's closure and globals where it is no mere helper."""
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return repr(value)
        if isinstance(value, tuple):
            return "tuple", self._each(value)
        if isinstance(value, set | frozenset):
            # each by itself, so that nothing depends on the order in which they come
            return "set", sorted(repr(_Canonical().of(v)) for v in value)
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars)
            return "code", value.co_code, self._each(value.co_consts), names
        # a function that calls itself, a list that holds itself
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, types.FunctionType):
            return self._of_function(value, whole or not _importable(value))
        if isinstance(value, type):
            return self._of_class(value)
        return self._of_object(value)

    def _each(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self.of(value) for value in values)

    def _of_function(self, function: types.FunctionType, whole: bool) -> Any:
        code, known = function.__code__, function.__globals__
        parts: list[Any] = [code, function.__defaults__, function.__kwdefaults__]
        if whole:
            parts.append([_content(cell) for cell in function.__closure__ or ()])
            parts.append({n: known[n] for n in sorted(_names(code) & set(known))})
        return "function", self._each(parts)

    def _of_class(self, kind: type) -> Any:
        if _importable(kind):
            return "named", kind.__module__, kind.__qualname__
        members = sorted((n, v) for n, v in vars(kind).items() if n not in _OF_EVERY_CLASS)
        return "class", kind.__qualname__, self._each(kind.__bases__), self._each(members)

    def _of_object(self, value: Any) -> Any:
        kind = type(value).__qualname__
        if isinstance(value, list):
            return kind, self._each(value)
        if isinstance(value, dict):
            return kind, self._each(value.items())
        if isinstance(value, np.ndarray | np.generic):
            return kind, _hash(np.asarray(value))
        if isinstance(value, types.ModuleType):
            return kind, value.__name__
        if isinstance(value, types.MethodType):
            return kind, self._each((value.__self__, value.__func__))
        if isinstance(value, staticmethod | classmethod):
            return kind, self._each((value.__func__,))
        if isinstance(value, property):
            return kind, self._each((value.fget, value.fset, value.fdel))
        if isinstance(value, functools.partial):
            return kind, self._each((value.func, value.args, value.keywords))
        if _is_plain(value):
            return kind, self._each((type(value), vars(value)))
        return "pickle", _pickled(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _importable(value: Any) -> bool:
    """Whether another process finds it by its name; what a script or notebook defines, not."""
    module = getattr(value, "__module__", None)
    if module is None or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_plain(value: Any) -> bool:
    """Whether an object is nothing but its class and attributes."""
    kind: Any = type(value)
    as_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    slots = any(vars(c).get("__slots__") for c in kind.__mro__)
    return as_usual and not slots and hasattr(value, "__dict__")


def _pickled(value: Any) -> str:
    import cloudpickle

    return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))
