"""Two sample stores beside each other: cells and samples that one shares with the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.fingerprint import (
    COLUMNS,
    FIRST,
    SECOND,
    combine,
    fingerprint_columns,
    words_of,
)
from ml4cube.splits.folds.samples import Samples

Ints = NDArray[np.int64]

_SAMPLES = "samples"
# Cells whose fingerprints are worked out at a time.
_CELLS_AT_ONCE = 1 << 21
# Samples with fewer different values (no rain, one class, a point) may be equal by chance.
_FEWEST_VALUES = 4


@dataclass(frozen=True)
class StorePair:
    """How the samples of a held-out store lie to those of a train store."""

    train: int
    held_out: int
    # What the held-out store calls itself ("test").
    part: str
    # Samples held out that are bit for bit in train, too (as stored: scaled by the same numbers);
    # None where windows hold too few different values to tell.
    copies: int | None
    # Samples held out that cover a cell that a train sample covers; None where the two were not cut
    # from one cube.
    shared: int | None
    # Samples held out that cover a cell beside such a cell, or share one; also across the date
    # line, unless the longitude jumps there and samples begin at some of its values only.
    touching: int | None


def is_store(ds: object) -> bool:
    """Whether something is an opened sample store."""
    if not isinstance(ds, xr.Dataset) or _SAMPLES not in ds.dims:
        return False
    spec = ds.attrs.get("spec")
    return isinstance(spec, Mapping) and all(key in spec for key in ("dims", "shape", "size"))


def compare_stores(train: xr.Dataset, held_out: Any) -> StorePair:
    """Look for samples of one store in another; every sample is read once."""
    if not is_store(held_out):
        raise InvalidTypeError(
            "the first argument is a sample store, the second is a "
            f"{type(held_out).__name__}; give the opened test store, or a cube with its label"
        )
    part = str(held_out.attrs.get("part", "test"))
    for name, store in (("train", train), (part, held_out)):
        if not store.sizes[_SAMPLES]:
            raise InvalidValueError(f"the {name} store has no samples; there is nothing to judge")
    shared = touching = None
    if _one_cube(train, held_out):
        # in units of windows: nearer than 1 along all dims, two share a cell; at 1 they touch
        from sklearn.neighbors import KDTree

        dims, sizes = (train.attrs["spec"][key] for key in ("dims", "size"))
        tree, places = KDTree(_origins(train), metric="chebyshev"), _origins(held_out)
        around, columns = _lon_turn(train, held_out) or (None, 0)
        turn = [columns / n if dim == around else 0 for dim, n in zip(dims, sizes, strict=True)]
        turns = [np.multiply(k, turn) for k in ((-1, 0, 1) if around else (0,))]
        nearest = np.min([tree.query(places + by)[0][:, 0] for by in turns], axis=0)
        size = max(sizes)
        shared = int((nearest < 1 - 0.5 / size).sum())
        touching = int((nearest < 1 + 0.5 / size).sum())
    return StorePair(
        train.sizes[_SAMPLES],
        held_out.sizes[_SAMPLES],
        part,
        _copies(train, held_out),
        shared,
        touching,
    )


def _one_cube(train: xr.Dataset, held_out: xr.Dataset) -> bool:
    """Whether the positions of two stores mean the same cells."""
    a, b = train.attrs, held_out.attrs
    if any(a["spec"][key] != b["spec"][key] for key in ("dims", "shape", "size")):
        return False
    known = [attrs.get("provenance") or {} for attrs in (a, b)]
    if known[0].get("source") != known[1].get("source"):
        return False
    return all(_same_values(train, held_out, dim) for dim in a["spec"]["dims"])


def _same_values(train: xr.Dataset, held_out: xr.Dataset, dim: str) -> bool:
    """Whether equal positions along a dim have equal coordinates."""
    name = dim if dim in train.coords else f"{dim}_origin"
    if name not in train.coords or name not in held_out.coords:
        return name not in train.coords and name not in held_out.coords
    found = []
    for store in (train, held_out):
        where, first = np.unique(store[f"{dim}_index"].values, return_index=True)
        found.append(dict(zip(where.tolist(), store[name].values[first], strict=True)))
    return all(found[0][at] == found[1][at] for at in found[0].keys() & found[1].keys())


def _lon_turn(train: xr.Dataset, held_out: xr.Dataset) -> tuple[str, int] | None:
    """The longitude of the cube if it goes all the way round, and how many columns do so once."""
    # no variables, which are large; both stores, since one alone may hold a single longitude
    known = [k for k, v in train.coords.items() if v.dims == (_SAMPLES,) and k in held_out.coords]
    both = [
        xr.Dataset(coords={name: store[name].variable for name in known}, attrs=store.attrs)
        for store in (train, held_out)
    ]
    # loaded, since dask joins no dates of other calendars with such in memory
    whole = xr.concat([store.compute() for store in both], _SAMPLES)
    return Samples.locate(whole).view.lon_turn()


def _origins(store: xr.Dataset) -> NDArray[np.float64]:
    """First cell of each sample along every dim, in units of the window's size."""
    spec = store.attrs["spec"]
    along = zip(spec["dims"], spec["size"], strict=True)
    return np.stack([store[f"{dim}_index"].values / size for dim, size in along], axis=-1)


def _copies(train: xr.Dataset, held_out: xr.Dataset) -> int | None:
    """Samples held out that equal a train sample in all variables."""
    names = [
        str(name)
        for name, variable in train.data_vars.items()
        if name in held_out
        and variable.dtype.kind in "biufmM"
        and _SAMPLES in variable.dims
        and {**variable.sizes, _SAMPLES: 0} == {**held_out[name].sizes, _SAMPLES: 0}
    ]
    if not names:
        raise InvalidValueError(
            f"the stores have no variable in common: {list(train.data_vars)} and "
            f"{list(held_out.data_vars)}"
        )
    ours, _ = _fingerprints([train[name] for name in names])
    theirs, telling = _fingerprints([held_out[name] for name in names])
    return int(np.isin(theirs[telling], ours).sum()) if telling.any() else None


def _fingerprints(variables: list[xr.DataArray]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Fingerprint of each sample in all variables, and whether it tells samples apart."""
    tables = []
    different = np.zeros(variables[0].sizes[_SAMPLES], dtype=np.int64)
    for variable in variables:
        variable = variable.transpose(_SAMPLES, ...)
        n, *window = variable.shape
        offsets = [np.arange(size) for size in window]
        table = np.zeros((n, COLUMNS), dtype=np.uint64)
        step = max(_CELLS_AT_ONCE // max(int(np.prod(window)), 1), 1)
        for start in range(0, n, step):
            some = slice(start, start + step)
            values = np.asarray(variable.isel({_SAMPLES: some}).values)
            for column, words in enumerate(fingerprint_columns(values, offsets)):
                table[some, column] = words.reshape(len(words), -1).sum(-1, dtype=np.uint64)
            cells = np.sort(words_of(values)[0].reshape(len(values), -1), axis=-1)
            different[some] += (cells[:, 1:] != cells[:, :-1]).sum(-1) + 1
        tables.append(table)
    # both hashes of a sample as one value that numpy can sort
    pairs = np.ascontiguousarray(combine(tables)[:, [FIRST, SECOND]])
    together = pairs.view([("first", np.uint64), ("second", np.uint64)]).ravel()
    return together, different >= _FEWEST_VALUES
