"""Where samples come from: what is written into a store, and what makes two calls the same."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import ml4cube
from ml4cube.core.errors import InvalidTypeError
from ml4cube.datasets.sampling import Sampling, jsonable
from ml4cube.datasets.store import FORMAT
from ml4cube.datasets.windows import zarr_behind

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
    sampling: Sampling, settings: Mapping[str, Any], outputs: Iterable[Path] = ()
) -> str:
    """Hash all that decides about a store's bytes.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    settings : mapping
        Arguments of the call that the spec does not hold.
    outputs : iterable of Path
        Folders that the call itself writes; they may lie in the cube's own.

    Returns
    -------
    str
        The same for the same call on the same cube: for cubes in memory their content counts,
        for others where they come from, and number, size and time of change of local files;
        of Icechunk the snapshot, which any commit to the branch makes another.
    """
    extractor = sampling.extractor
    own = {os.path.realpath(folder) for folder in outputs}
    state = functools.cache(functools.partial(_state, outputs=own))
    spec = json.loads(sampling.spec.to_json())
    # zarr lists the variables of a store without consolidated metadata in any order
    spec["variables"] = sorted(spec["variables"])
    call = {
        "format": FORMAT,
        "spec": spec,
        "tiles": json.loads(extractor.tiles.to_json()),
        "recipe": sampling.recipe,
        "settings": settings,
        "versions": versions(),
        "cells": {n: _identity(sampling.ds, n, state) for n in sampling.reader.variables},
        "axes": {a.name: [_hash(a.values), dict(a.attrs)] for a in extractor.axes},
        "choice": None if extractor.choice is None else _hash(extractor.choice.used),
        "callback": None if extractor.callback is None else identity_of(extractor.callback),
        "attrs": jsonable(sampling.ds.attrs),
        "variables": {n: _described(sampling.ds[n]) for n in sampling.spec.variables},
    }
    return hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()


def _identity(ds: xr.Dataset, name: str, state: Callable[[Path], str]) -> str:
    """Tell one variable from another without reading its cells."""
    from dask.base import tokenize

    variable = ds[name].variable
    if variable._in_memory and variable.chunks is None:
        return f"memory {_hash(variable.values)}"
    known = [f"{variable.dtype} {variable.shape}"]
    stored, keys = zarr_behind(variable)
    if stored is None and variable.chunks is not None:
        # a dask array's name is a hash of what it is made from; where it shows a file, also of
        # the time of its folder, which a store that is put beside it changes
        array: Any = variable._data
        known.append(f"dask {array.name} {variable.chunks}")
    if stored is not None:
        known.append(f"zarr {stored.store_path} {tokenize(keys)}")
        # Icechunk: the state of the repository that the session reads
        known.append(str(getattr(getattr(stored.store, "session", None), "snapshot_id", None)))
        root = getattr(stored.store, "root", None)
        source = None if root is None else Path(root) / stored.path
    else:
        found = variable.encoding.get("source") or ds.encoding.get("source")
        source = None if found is None else Path(str(found))
        known.append(f"file {source}")
    if source is not None and source.exists():
        known.append(state(source))
    return ", ".join(known)


def _state(source: Path, outputs: Collection[str]) -> str:
    """Number, size and newest change of the files of a source, so that a changed one is noticed."""
    number, size, changed = 0, 0, 0
    folders = [Path(os.path.realpath(source))]
    while folders:
        folder = folders.pop()
        entries: Iterable[Any] = os.scandir(folder) if folder.is_dir() else [folder]
        for entry in entries:
            if entry.is_dir():
                if os.fspath(entry) not in outputs:
                    folders.append(Path(entry))
                continue
            found = entry.stat()
            number, size = number + 1, size + found.st_size
            changed = max(changed, found.st_mtime_ns)
    return f"{number} files {size} bytes {changed}"


def _hash(values: np.ndarray[Any, Any]) -> str:
    if values.dtype.kind == "O":
        data = json.dumps([str(v) for v in values.ravel()]).encode()
    else:
        data = np.ascontiguousarray(values).tobytes()
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
    try:
        known = _Canonical().of(function, whole=True)
    # whatever a value's own way to be pickled raises
    except Exception as error:
        raise InvalidTypeError(
            f"callback={function!r} holds what other processes cannot get: {error}; locks, open "
            "files and the like must be made inside the callback, when it is called"
        ) from error
    return hashlib.sha256(repr(known).encode()).hexdigest()


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
