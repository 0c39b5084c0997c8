"""Count the values in each block in one pass, for classes and quantile bins.

Counts are exact where they fit in memory. Otherwise values are rounded down to as many leading
binary digits as fit. Merging counts in any order gives the same result.
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

# Most pairs of block and value. Half a million take 12 MB; adding up two of these takes about
# 200 MB for a moment.
MAX_PAIRS = 1 << 19
# A variable with more values than this is not a class variable.
MAX_CLASSES = 256

_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True, eq=False)
class ValueCounts:
    """Number of cells by block and value."""

    # Block of each pair, ascending.
    block: Ints
    # An integer in the order of the values; ascending within a block.
    key: Ints
    # Cells of the block with the value.
    count: Ints
    # Valid cells without a value by block.
    gaps: dict[int, int] = field(default_factory=dict)
    # Binary digits that were removed from the keys by rounding.
    level: int = 0
    # The value of each key, if values are texts.
    texts: dict[int, str] = field(default_factory=dict)

    def at_level(self, level: int) -> ValueCounts:
        """Round keys, and add up pairs that become equal."""
        if level == self.level:
            return self
        return _sum(
            self.block, self.key >> (level - self.level), self.count, self.gaps, level, self.texts
        )

    def rounded_to(self, pairs: int) -> ValueCounts:
        """Round keys until at most `pairs` are left, or one per block."""
        result = self
        while result.block.size > pairs and result.level < 63:
            result = result.at_level(result.level + 1)
        return result


def count_values(
    values: xr.DataArray, mask: xr.DataArray | None, grid: Grid, classes: bool
) -> ValueCounts:
    """Return the counts of the values in each block, chunk by chunk."""
    dims = [dim for dim in grid.dims if dim in values.dims]
    blocks = [grid.tile_of_cells(dim) for dim in dims]
    counts = [grid.counts[grid.dims.index(dim)] for dim in dims]
    name = str(values.name)
    values = values.transpose(*dims)
    if mask is not None:
        values, mask = xr.unify_chunks(values, mask.transpose(*dims))
    if values.chunks is None and (mask is None or mask.chunks is None):
        inside = None if mask is None else mask.values
        return _count_box(values.values, inside, blocks, counts, classes, name)
    if values.chunks is None and mask is not None:
        values = values.chunk(mask.chunksizes)
    elif mask is not None and mask.chunks is None:
        mask = mask.chunk(values.chunksizes)
    # in one graph, so that dask reads only once what values and mask share
    axes = tuple(range(len(dims)))
    arguments: list[Any] = [
        values.data,
        axes,
        *((None, None) if mask is None else (mask.data, axes)),
    ]
    for axis, block in enumerate(blocks):
        arguments += [da.from_array(block, chunks=(values.data.chunks[axis],)), (axis,)]  # type: ignore[no-untyped-call]
    boxes = da.blockwise(  # type: ignore[no-untyped-call]
        partial(_count_chunk, counts=counts, classes=classes, name=name),
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
            return cast("ValueCounts", parts[0].compute())


def _count_chunk(
    values: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    *blocks: NDArray[np.intp],
    counts: Sequence[int],
    classes: bool,
    name: str,
) -> NDArray[Any]:
    """Count one chunk; return the counts in an object array of one element, as dask needs."""
    result = np.empty((1,) * values.ndim, dtype=object)
    result[(0,) * values.ndim] = _count_box(values, mask, blocks, counts, classes, name)
    return result


def _merge(boxes: Sequence[ValueCounts | NDArray[Any]], classes: bool, name: str) -> ValueCounts:
    """Add up counts; rounding depends only on the sum, so the order does not matter."""
    parts = [box if isinstance(box, ValueCounts) else box.item() for box in boxes]
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


def _bounded(result: ValueCounts, classes: bool, name: str) -> ValueCounts:
    if not classes:
        return result.rounded_to(MAX_PAIRS)
    if np.unique(result.key).size > MAX_CLASSES:
        raise InvalidValueError(
            f"stratify: {name!r} must have at most {MAX_CLASSES} distinct values to be used as "
            f"classes; for quantile bins write stratify={{{name!r}: 4}}"
        )
    return result


def _count_box(
    values: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    blocks: Sequence[NDArray[np.intp]],
    counts: Sequence[int],
    classes: bool,
    name: str,
) -> ValueCounts:
    """Count one box of cells; `blocks` are block indices along each axis, of `counts`."""
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
    packed.sort()  # many times faster than argsort
    starts = np.flatnonzero(np.diff(packed, prepend=-1))
    count = np.diff(starts, append=packed.size)
    block, key = packed[starts] >> 32, (packed[starts] & 0xFFFFFFFF) - (1 << 31)
    return _bounded(ValueCounts(block, key, count, gaps, 0, texts), classes, name)


def _packed(block: Ints, key: Ints) -> Ints | None:
    """Return block and key in one sortable integer, if both fit in 32 bits."""
    if not key.size or key.min() < -(1 << 31) or key.max() >= 1 << 31 or block.max() >= 1 << 31:
        return None
    return np.asarray((block << 32) | (key + (1 << 31)), dtype=np.int64)


def _sum(
    block: Ints, key: Ints, count: Ints, gaps: dict[int, int], level: int, texts: dict[int, str]
) -> ValueCounts:
    """Add up the counts of equal pairs of block and key."""
    packed = _packed(block, key)
    order = np.lexsort((key, block)) if packed is None else np.argsort(packed, kind="stable")
    block, key, count = block[order], key[order], count[order]
    first = np.ones(block.size, dtype=bool)
    first[1:] = (np.diff(block) != 0) | (key[1:] != key[:-1])
    starts = np.flatnonzero(first)
    total = np.add.reduceat(count, starts) if starts.size else count
    return ValueCounts(block[starts], key[starts], total, gaps, level, texts)


def _keys(values: NDArray[Any], name: str) -> tuple[NDArray[np.bool_], Ints, dict[int, str]]:
    """Return which cells have values, integers in the order of these values, and texts."""
    kind = values.dtype.kind
    if kind in "bi":
        return np.ones(values.size, dtype=bool), values.astype(np.int64), {}
    if kind == "u":
        key = (values.astype(np.uint64) ^ _SIGN).view(np.int64)  # keeps the order beyond 2**63
        return np.ones(values.size, dtype=bool), key, {}
    if kind in "mM":
        there = ~np.isnat(values)
        return there, values[there].astype(values.dtype.newbyteorder("=")).view(np.int64), {}
    if kind == "f" and values.dtype.itemsize <= 8:
        there = np.isfinite(values)
        number = values[there].astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
        # as integers, the bits of floats ascend with the value; for negative floats they descend
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
        f"stratify: {name!r} must hold integers, floats, bools, dates or texts, got {values.dtype}"
    )


def _code(word: str) -> int:
    """Return a code of a word that is the same in every process and chunk."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest())


def key_names(result: ValueCounts, dtype: np.dtype[Any]) -> dict[int, str]:
    """Return the name of each key of counted classes."""
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
