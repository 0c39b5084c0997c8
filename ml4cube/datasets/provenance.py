"""Where samples come from: what is written into a store, and what makes two calls the same."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xarray as xr

import ml4cube
from ml4cube.core.errors import StoreError
from ml4cube.datasets.cube_identity import (
    State,
    hash_cells,
    hash_of,
    identity_of_variable,
    state_of,
)
from ml4cube.datasets.sampling import Sampling, jsonable
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
    state = functools.cache(functools.partial(state_of, outputs=own))
    spec = json.loads(sampling.spec.to_json())
    # zarr lists the variables of a store without consolidated metadata in any order
    spec["variables"] = sorted(spec["variables"])
    scalars = [str(n) for n, c in sampling.ds.coords.items() if not c.dims]
    call = {
        "format": FORMAT,
        "spec": spec,
        "tiles": json.loads(extractor.tiles.to_json()),
        "recipe": sampling.recipe,
        "settings": settings,
        "versions": versions(),
        "cells": {n: _identity(sampling, n, state) for n in sampling.reader.variables},
        "scalars": {n: _identity(sampling, n, state) for n in scalars},
        "axes": {a.name: [hash_of(a.values), dict(a.attrs)] for a in extractor.axes},
        "choice": None if extractor.choice is None else hash_of(extractor.choice.used),
        "callback": callback,
        "attrs": jsonable(sampling.ds.attrs),
        "variables": {n: _described(sampling.ds[n]) for n in sampling.spec.variables},
    }
    return hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()


def _identity(sampling: Sampling, name: str, state: State) -> str:
    """Tell a variable from another one, by its cells where nothing else does."""
    variable = sampling.ds.variables[name]
    try:
        told = identity_of_variable(variable, state)
        if told is None and not variable.dims:
            told = hash_of(variable.values)
    except OSError as error:
        raise StoreError(
            f"variable {name!r} cannot be looked at to tell whether the cube has changed: {error}; "
            "the source is damaged or out of reach, mend it and run again"
        ) from error
    return told or hash_cells(sampling, name)
