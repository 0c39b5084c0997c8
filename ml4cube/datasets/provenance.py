"""Where samples come from: what is written into a store, and what makes two calls the same."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import ml4cube
from ml4cube.datasets.sample_plan import Sampling, jsonable
from ml4cube.datasets.store import FORMAT

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


def fingerprint(sampling: Sampling, settings: Mapping[str, Any]) -> str:
    """Hash all that decides about a store's bytes.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    settings : mapping
        Arguments of the call that the spec does not hold.

    Returns
    -------
    str
        The same for the same call on the same cube; for cubes in memory their content counts,
        for others where they come from.
    """
    extractor = sampling.extractor
    call = {
        "format": FORMAT,
        "spec": json.loads(sampling.spec.to_json()),
        "tiles": json.loads(extractor.tiles.to_json()),
        "recipe": sampling.recipe,
        "settings": settings,
        "versions": versions(),
        "cells": {n: _identity(sampling.ds[n].variable) for n in sampling.reader.variables},
        "axes": {a.name: [_hash(a.values), dict(a.attrs)] for a in extractor.axes},
        "choice": None if extractor.choice is None else _hash(extractor.choice.used),
        "callback": None if extractor.callback is None else identity_of(extractor.callback),
        "attrs": jsonable(sampling.ds.attrs),
        "variables": {n: _described(sampling.ds[n]) for n in sampling.spec.variables},
    }
    return hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()


def _identity(variable: xr.Variable) -> str:
    """Tell one variable from another without reading files."""
    if variable.chunks is not None:
        # a dask array's name is a hash of what it is made from
        array: Any = variable._data
        return f"dask {array.name} {variable.chunks}"
    if variable._in_memory:
        return f"memory {_hash(variable.values)}"
    source = variable.encoding.get("source")
    path = Path(str(source))
    changed = path.stat().st_mtime_ns if source and path.exists() else None
    return f"file {source} {changed} {variable.dtype} {variable.shape}"


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
        Hash of its code, constants, defaults and closure; an object that is no plain function
        is known by its pickle, which may differ between processes: then it counts as another.
    """
    import cloudpickle

    if not isinstance(function, types.FunctionType):
        return hashlib.sha256(cloudpickle.dumps(function)).hexdigest()
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    named = {
        n: function.__globals__[n] for n in _names(function.__code__) & set(function.__globals__)
    }
    context = [function.__defaults__, function.__kwdefaults__, cells]
    context.append({n: v for n, v in sorted(named.items()) if not isinstance(v, types.ModuleType)})
    text = repr(_code(function.__code__)) + hashlib.sha256(cloudpickle.dumps(context)).hexdigest()
    return hashlib.sha256(text.encode()).hexdigest()


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return (code.co_code, constants, code.co_names, code.co_varnames)
