"""Counting the values of each block in one pass, to make classes and quantile bins of them.

A tally holds how often each value occurs in each block: exactly where that fits in memory,
else with values rounded down to as many leading binary digits as do. Tallies are merged in
any order with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid

Ints = NDArray[np.int64]

# Pairs of block and value that a tally holds. Half a million take 12 MB; adding two such tallies
# up takes about 200 MB on the way.
MAX_PAIRS = 1 << 19
# A variable with more values than this is no class variable.
MAX_CLASSES = 256

_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True, eq=False)
class Tally:
    """How often each value occurs in each block."""

    # Block of each pair, rising.
    block: Ints
    # The value's place in the order of all values; rises within a block.
    key: Ints
    # Cells of the block that have the value.
    count: Ints
    # Valid cells without a value by block.
    gaps: dict[int, int] = field(default_factory=dict)
    # Binary digits that were rounded off the keys.
    level: int = 0
    # What a key stands for, where values are no numbers.
    texts: dict[int, str] = field(default_factory=dict)

    def at_level(self, level: int) -> Tally:
        """Round keys off, and add up pairs that become equal."""
        if level == self.level:
            return self
        return _sum(
            self.block, self.key >> (level - self.level), self.count, self.gaps, level, self.texts
        )

    def within(self, pairs: int) -> Tally:
        """Round keys off until no more than `pairs` are left, or one for each block."""
        result = self
        while result.block.size > pairs and result.level < 63:
            result = result.at_level(result.level + 1)
        return result


def tally(values: xr.DataArray, mask: xr.DataArray | None, grid: Grid, classes: bool) -> Tally:
    """Count the values of each block, chunk by chunk."""
    dims = [dim for dim in grid.dims if dim in values.dims]
    blocks = [grid.tile_of_cells(dim) for dim in dims]
    counts = [grid.counts[grid.dims.index(dim)] for dim in dims]
    name = str(values.name)
    values = values.transpose(*dims)
    if mask is not None:
        values, mask = xr.unify_chunks(values, mask.transpose(*dims))
    if values.chunks is None and (mask is None or mask.chunks is None):
        inside = None if mask is None else mask.values
        return _tally_box(values.values, inside, blocks, counts, classes, name)
    if values.chunks is None and mask is not None:
        values = values.chunk(mask.chunksizes)
    elif mask is not None and mask.chunks is None:
        mask = mask.chunk(values.chunksizes)
    # one array, so that dask sees what values and mask share and reads it once
    axes = tuple(range(len(dims)))
    arguments: list[Any] = [
        values.data,
        axes,
        *((None, None) if mask is None else (mask.data, axes)),
    ]
    for axis, block in enumerate(blocks):
        arguments += [da.from_array(block, chunks=(values.data.chunks[axis],)), (axis,)]  # type: ignore[no-untyped-call]
    boxes = da.blockwise(  # type: ignore[no-untyped-call]
        partial(_tally_chunk, counts=counts, classes=classes, name=name),
        axes,
        *arguments,
        adjust_chunks=dict.fromkeys(axes, 1),
        align_arrays=False,
        dtype=object,
        meta=np.empty((0,) * len(axes), dtype=object),
    )
    merge = dask.delayed(_merge)  # type: ignore[attr-defined]
    parts = list(boxes.to_delayed().ravel())
    while True:
        parts = [merge(parts[i : i + 2], classes, name) for i in range(0, len(parts), 2)]
        if len(parts) == 1:
            return cast("Tally", parts[0].compute())


def _tally_chunk(
    values: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    *blocks: NDArray[np.intp],
    counts: Sequence[int],
    classes: bool,
    name: str,
) -> NDArray[Any]:
    """Tally one chunk, in an array of one thing as dask wants it."""
    result = np.empty((1,) * values.ndim, dtype=object)
    result[(0,) * values.ndim] = _tally_box(values, mask, blocks, counts, classes, name)
    return result


def _merge(boxes: Sequence[Tally | NDArray[Any]], classes: bool, name: str) -> Tally:
    """Add tallies up; coarsening is decided by the sum, so the order does not matter."""
    parts = [box if isinstance(box, Tally) else box.item() for box in boxes]
    level = max(part.level for part in parts)
    parts = [part.at_level(level) for part in parts]
    gaps: dict[int, int] = {}
    texts: dict[int, str] = {}
    for part in parts:
        texts.update(part.texts)
        for id, n in part.gaps.items():
            gaps[id] = gaps.get(id, 0) + n
    block = np.concatenate([part.block for part in parts])
    key = np.concatenate([part.key for part in parts])
    count = np.concatenate([part.count for part in parts])
    return _bounded(_sum(block, key, count, gaps, level, texts), classes, name)


def _bounded(result: Tally, classes: bool, name: str) -> Tally:
    if not classes:
        return result.within(MAX_PAIRS)
    if np.unique(result.key).size > MAX_CLASSES:
        raise InvalidValueError(
            f"stratify: {name!r} has more than {MAX_CLASSES} different values, too many for "
            f"classes; for quantile bins write stratify={{{name!r}: 4}}"
        )
    return result


def _tally_box(
    values: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    blocks: Sequence[NDArray[np.intp]],
    counts: Sequence[int],
    classes: bool,
    name: str,
) -> Tally:
    """Tally one box of cells; `blocks` are block indices along each axis, of `counts`."""
    ids: NDArray[Any] = np.zeros((), dtype=np.int64)
    for block, n in zip(blocks, counts, strict=True):
        ids = ids[..., None] * n + block
    flat = np.asarray(values).ravel()
    ids = np.broadcast_to(ids, np.shape(values)).ravel()
    if mask is not None:
        inside = np.asarray(mask).ravel()
        flat, ids = flat[inside], ids[inside]
    has_value, key, texts = _keys(flat, name)
    lost, n_lost = np.unique(ids[~has_value], return_counts=True)
    gaps = dict(zip(lost.tolist(), n_lost.tolist(), strict=True))
    ids = ids[has_value]
    packed = _packed(ids, key)
    if packed is None:
        return _bounded(_sum(ids, key, np.ones(key.size, np.int64), gaps, 0, texts), classes, name)
    packed.sort()  # of values alone this is many times faster than of their order
    starts = np.flatnonzero(np.diff(packed, prepend=-1))
    count = np.diff(starts, append=packed.size)
    block, key = packed[starts] >> 32, (packed[starts] & 0xFFFFFFFF) - (1 << 31)
    return _bounded(Tally(block, key, count, gaps, 0, texts), classes, name)


def _packed(block: Ints, key: Ints) -> Ints | None:
    """Block and key in one number that orders them, if both are of 32 bits."""
    if not key.size or key.min() < -(1 << 31) or key.max() >= 1 << 31 or block.max() >= 1 << 31:
        return None
    return np.asarray((block << 32) | (key + (1 << 31)), dtype=np.int64)


def _sum(
    block: Ints, key: Ints, count: Ints, gaps: dict[int, int], level: int, texts: dict[int, str]
) -> Tally:
    """Add up the counts of equal pairs of block and key."""
    packed = _packed(block, key)
    order = np.lexsort((key, block)) if packed is None else np.argsort(packed, kind="stable")
    block, key, count = block[order], key[order], count[order]
    first = np.ones(block.size, dtype=bool)
    first[1:] = (np.diff(block) != 0) | (key[1:] != key[:-1])
    starts = np.flatnonzero(first)
    total = np.add.reduceat(count, starts) if starts.size else count
    return Tally(block[starts], key[starts], total, gaps, level, texts)


def _keys(values: NDArray[Any], name: str) -> tuple[NDArray[np.bool_], Ints, dict[int, str]]:
    """Which values are no gaps, and whole numbers in the order of those values."""
    kind = values.dtype.kind
    if kind in "bi":
        return np.ones(values.size, dtype=bool), values.astype(np.int64), {}
    if kind == "u":
        key = (values.astype(np.uint64) ^ _SIGN).view(np.int64)  # in order beyond 2**63 as well
        return np.ones(values.size, dtype=bool), key, {}
    if kind in "mM":
        there = ~np.isnat(values)
        return there, values[there].astype(values.dtype.newbyteorder("=")).view(np.int64), {}
    if kind == "f" and values.dtype.itemsize <= 8:
        there = np.isfinite(values)
        number = values[there].astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
        # the bits of floats rise with their value, and of negative ones with their size
        bits = (number + 0).view(f"i{number.itemsize}")
        return there, np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype("i8"), {}
    if kind in "UOTS":
        there = np.array([value is not None and value == value for value in values], dtype=bool)
        words = values[there].astype(str)
        unique, which = np.unique(words, return_inverse=True)
        codes = [_code(str(word)) for word in unique]
        key = np.array(codes, dtype=np.int64)[which.ravel()]
        return there, key, dict(zip(codes, unique.tolist(), strict=True))
    raise InvalidTypeError(
        f"stratify: {name!r} is of {values.dtype}; give integers, floats, bools, dates or texts"
    )


def _code(word: str) -> int:
    """Code of a word, the same in every process and chunk."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest())


def key_names(result: Tally, dtype: np.dtype[Any]) -> dict[int, str]:
    """What the keys of a tally of classes stand for."""
    keys = np.unique(result.key)
    if result.texts:
        return {int(key): result.texts[int(key)] for key in keys}
    if dtype.kind == "b":
        return {int(key): str(bool(key)) for key in keys}
    if dtype.kind == "u":
        return {int(key): str(int(key) + (1 << 63)) for key in keys}
    if dtype.kind in "mM":
        return {int(key): str(key.view(dtype.newbyteorder("="))) for key in keys}
    if dtype.kind == "f":
        width = np.float64 if dtype.itemsize == 8 else np.float32
        whole = keys.astype(f"i{np.dtype(width).itemsize}")
        bits = np.where(whole < 0, np.iinfo(whole.dtype).min - whole, whole)
        floats = bits.view(width).tolist()
        return {int(key): f"{value:g}" for key, value in zip(keys, floats, strict=True)}
    return {int(key): str(key) for key in keys}
