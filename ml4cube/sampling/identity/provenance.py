"""Describe where samples come from, for the store, and tell whether two calls are the same.

Two calls are the same if they would write the same bytes: equal settings, sample recipe, split,
cube (see `cube`), callback (see `callback`) and versions of the libraries that decide about bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import xarray as xr

import ml4cube
from ml4cube.core.errors import StoreError
from ml4cube.cube.absent_chunks import ABSENT
from ml4cube.ledger.call import CallId, Fields, differing, in_words
from ml4cube.sampling.cf_encoding import jsonable
from ml4cube.sampling.identity.callback import path_of
from ml4cube.sampling.identity.cube import SourceState, hash_cells, hash_of
from ml4cube.sampling.sampled_cube import SampledCube
from ml4cube.store.format import FORMAT

# What messages call the fields of a recipe or a split plan.
_SHOWN_AS = {"size": "sample_size", "targets": "to_pred", "grid": "blocks"}
_LIBRARIES = ("numpy", "xarray", "zarr", "numcodecs")


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide about a store's bytes."""
    return {"ml4cube": ml4cube.__version__, **{name: version(name) for name in _LIBRARIES}}


def provenance(sampled: SampledCube, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe where samples come from, the same for equal runs."""
    ds = sampled.ds
    names = sampled.recipe.variables
    callback = path_of(sampled.tiled.callback)
    return {
        "source": _source_path(ds),
        "attrs": jsonable(ds.attrs),
        "variables": {n: _described(ds[n]) for n in names},
        # sorted, since zarr lists the members of a group in no fixed order
        "coordinates": {n: _described(ds[n]) for n in sorted(map(str, ds.coords))},
        "left_out": dict(sorted(sampled.left_out.items())),
        "settings": dict(settings),
        "versions": versions(),
        **({} if callback is None else {"callback": callback}),
    }


def _described(variable: xr.DataArray) -> dict[str, Any]:
    return {
        "dims": [str(d) for d in variable.dims],
        "shape": list(variable.shape),
        "dtype": str(variable.dtype),
        "attrs": jsonable(variable.attrs),
    }


def _source_path(ds: xr.Dataset) -> str | None:
    encodings = [ds.encoding, *(variable.encoding for variable in ds.variables.values())]
    sources = [str(encoding["source"]) for encoding in encodings if encoding.get("source")]
    return next(iter(sources), None)


@dataclass(frozen=True)
class Call(CallId):
    """All that decides about the bytes of stores. Make one with `Call.of_samples`.

    The kinds of its parts are "settings", "spec", "split", "source", "callback", "versions" and
    "derived", which follows from the others.
    """

    # The files of the cube when the call began.
    source: SourceState

    @classmethod
    def of_samples(
        cls,
        sampled: SampledCube,
        settings: Mapping[str, Any],
        callback: str | None = None,
        outputs: Iterable[str] = (),
        *,
        may_read: bool = True,
    ) -> Call:
        """Collect what decides about the bytes of a call; StoreError if it may not read cells."""
        tiled, ds = sampled.tiled, sampled.ds
        recipe = json.loads(tiled.bound.to_json())
        # zarr lists the variables of a store without consolidated metadata in any order
        recipe["variables"] = sorted(recipe["variables"])
        # as users give it; the stride would differ with every other sample_size
        recipe["overlap"] = tiled.recipe.overlap
        del recipe["stride"]
        plan = {n: value for n, value in sampled.split.get("plan", {}).items() if n != "labels"}
        scalars = [str(name) for name, coord in ds.coords.items() if not coord.dims]
        read = [name for name in sampled.reader.cells.sources if name not in (tiled.label, ABSENT)]
        names = [*read, *scalars, tiled.label]
        source_state = SourceState.of({n: ds.variables[n] for n in names}, frozenset(outputs))
        identity = functools.partial(_identity, source_state, may_read=may_read)
        parts = {
            "settings": settings,
            "spec": {_SHOWN_AS.get(name, name): value for name, value in recipe.items()},
            "split": {_SHOWN_AS.get(name, name): value for name, value in plan.items()},
            "source": {
                **{f"cells of {name!r}": identity(name) for name in (*read, *scalars)},
                **_described_source(sampled),
            },
            "callback": {"code, values or version": callback},
            "versions": {"format of stores": FORMAT, **versions()},
            "derived": {
                "labels": [sampled.split, identity(tiled.label)],
                "tiles": tiled.tiles.to_json(),
                "blocks used": tiled.used_blocks and hash_of(tiled.used_blocks.used),
            },
        }
        call = CallId.of(parts)
        return cls(call.id, call.parts, source_state)

    def unlike(self, earlier: Fields) -> str:
        """Name what differs from the call that made a store, by the parts that the store holds."""
        differences = differing(earlier, self.parts)
        if len(differences) > 1:
            differences.pop("derived", None)
        text = in_words(differences)
        loaded = " (a file opened lazily and then loaded counts as different; open it again)"
        return text + (loaded if "cells of" in text else "")


def _described_source(sampled: SampledCube) -> dict[str, Any]:
    """Describe a cube but for its cells."""
    ds, axes = sampled.ds, sampled.tiled.axes
    source: dict[str, Any] = {f"coordinate {axis.name!r}": hash_of(axis.values) for axis in axes}
    source |= {f"attributes of coordinate {axis.name!r}": dict(axis.attrs) for axis in axes}
    source |= {f"description of {n!r}": _described(ds[n]) for n in sampled.recipe.variables}
    source |= {f"attribute {name!r}": value for name, value in jsonable(ds.attrs).items()}
    return source


def _identity(source: SourceState, name: str, *, may_read: bool) -> str:
    """Identify a variable, by its cells where nothing else tells."""
    identity, variable = source.identities[name], source.variables[name]
    if identity is None and not variable.dims:
        identity = hash_of(variable.values)
    if identity is None and not may_read:
        raise StoreError(f"only the cells of variable {name!r} identify it")
    return identity or hash_cells(name, variable)
