"""Count the values in each block in one pass, for classes and quantile bins.

Classes are counted exactly. For bins, counts are exact where they fit in memory; otherwise values
are rounded down to as many leading binary digits as fit. Merging counts in any order gives the
same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.missing import find_gaps

Ints = NDArray[np.int64]

# Most pairs of block and value. Half a million take 12 MB; adding up two of these takes about
# 200 MB for a moment.
MAX_PAIRS = 1 << 19
# A variable with more values than this is not a class variable.
MAX_CLASSES = 256


@dataclass(frozen=True, eq=False)
class ValueCounts:
    """Number of cells by block and value, one entry for each pair of these that occurs."""

    # Id of the block; its bitwise complement, ~id, which is negative, for cells without a value.
    block: Ints
    # The class, or for bins an integer in the order of the values.
    key: NDArray[Any]
    # Cells of the block with the value.
    count: Ints
    # Binary digits that were removed from the keys of bins by rounding.
    digits_removed: int = 0


def count_values(
    values: xr.DataArray, mask: xr.DataArray, grid: Grid, classes: bool
) -> ValueCounts:
    """Return the counts of the values in each block, chunk by chunk.

    Blocks are numbered along those dims of the grid that `values` or the mask has.
    """
    name = str(values.name)
    mask = mask & xr.ones_like(values, dtype=bool)
    values = values.broadcast_like(mask)
    dims = [dim for dim in grid.dims if dim in values.dims]
    n_blocks = [grid.counts[grid.dims.index(dim)] for dim in dims]
    # In one graph, so that dask reads only once what values and mask share.
    arrays = xr.unify_chunks(values.transpose(*dims).chunk(), mask.transpose(*dims).chunk())
    axes = tuple(range(len(dims)))
    arrays_and_axes: list[Any] = []
    for array in arrays:
        arrays_and_axes += [array.data, axes]
    for axis, dim in enumerate(dims):
        chunks = arrays[0].chunksizes[dim]
        blocks = da.from_array(grid.tile_of_cells(dim), chunks=(chunks,))  # type: ignore[no-untyped-call]
        arrays_and_axes += [blocks, (axis,)]
    counts = da.blockwise(  # type: ignore[no-untyped-call]
        partial(_count_chunk, n_blocks=n_blocks, classes=classes),
        axes,
        *arrays_and_axes,
        adjust_chunks=dict.fromkeys(axes, 1),
        align_arrays=False,
        dtype=object,
        meta=np.empty((0,) * len(axes), dtype=object),
    )
    merge = dask.delayed(partial(_merge, classes=classes, name=name))  # type: ignore[attr-defined]
    parts = list(counts.to_delayed().ravel())
    while True:
        parts = [merge(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        if len(parts) == 1:
            return cast("ValueCounts", parts[0].compute())


def _count_chunk(
    values: NDArray[Any],
    mask: NDArray[np.bool_],
    *blocks: NDArray[np.intp],
    n_blocks: Sequence[int],
    classes: bool,
) -> NDArray[Any]:
    """Count one chunk; return the counts in an object array of one element, as dask needs."""
    # The id of each cell's block, from its index along every axis.
    ids: Ints = np.zeros((), dtype=np.int64)
    for block, n in zip(blocks, n_blocks, strict=True):
        ids = ids[..., None] * n + block
    values, ids = values[mask], ids[mask]
    known, key = _keys(values, classes)
    ids = np.where(known, ids, ~ids)
    result = np.empty((1,) * len(blocks), dtype=object)
    ones = np.ones(ids.size, dtype=np.int64)
    result[...] = _sum_classes(ids, key, ones) if classes else _sum_bins(ids, key, ones, 0)
    return result


def _merge(counts: Sequence[ValueCounts | NDArray[Any]], classes: bool, name: str) -> ValueCounts:
    """Add up counts; rounding depends only on the sum, so the order does not matter."""
    parts = [part if isinstance(part, ValueCounts) else part.item() for part in counts]
    block = np.concatenate([part.block for part in parts])
    count = np.concatenate([part.count for part in parts])
    if not classes:
        digits_removed = max(part.digits_removed for part in parts)
        keys = [part.key >> (digits_removed - part.digits_removed) for part in parts]
        return _sum_bins(block, np.concatenate(keys), count, digits_removed)
    result = _sum_classes(block, np.concatenate([part.key for part in parts]), count)
    if pd.unique(result.key[result.block >= 0]).size > MAX_CLASSES:
        raise InvalidValueError(
            f"stratify: {name!r} must have at most {MAX_CLASSES} distinct values to be used as "
            f"classes; for quantile bins write stratify={{{name!r}: 4}}"
        )
    return result


def _sum_classes(block: Ints, key: NDArray[Any], count: Ints) -> ValueCounts:
    """Add up the counts of equal pairs of block and class."""
    table = pd.DataFrame({"block": block, "key": key, "count": count})
    table = table.groupby(["block", "key"], as_index=False, sort=False, dropna=False).sum()
    return ValueCounts(table.block.to_numpy(), table.key.to_numpy(), table["count"].to_numpy())


def _sum_bins(block: Ints, key: Ints, count: Ints, digits_removed: int) -> ValueCounts:
    """Add up the counts of equal pairs; round keys until few are left, or two per block."""
    if all((part == part.astype(np.int32)).all() for part in (block, key)):
        # Both fit into one integer, which is faster to sort.
        order = np.argsort((block << 32) | (key + (1 << 31)), kind="stable")
    else:
        order = np.lexsort((key, block))
    block, key, count = block[order], key[order], count[order]
    while True:  # Rounded keys stay sorted.
        is_new_pair = np.ones(block.size, dtype=bool)
        is_new_pair[1:] = (block[1:] != block[:-1]) | (key[1:] != key[:-1])
        starts = np.flatnonzero(is_new_pair)
        count = np.add.reduceat(count, starts) if starts.size else count
        block, key = block[starts], key[starts]
        # After 63 digits, only the signs are left.
        if starts.size <= MAX_PAIRS or digits_removed == 63:
            return ValueCounts(block, key, count, digits_removed)
        key, digits_removed = key >> 1, digits_removed + 1


def _keys(values: NDArray[Any], classes: bool) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which cells have values, and their classes, or integers in the order of the values."""
    if values.dtype.kind in "OUST":
        words = values.astype(object)
        known = np.asarray(pd.notnull(words))
        return known, np.where(known, words, "").astype(str).astype(object)
    if values.dtype.kind == "f" or (values.dtype == np.uint64 and not classes):
        values = values.astype(np.float32 if values.dtype.itemsize <= 4 else np.float64)
    known = ~find_gaps(values)
    if classes:
        return known, values.astype(values.dtype.newbyteorder("="))
    if values.dtype.kind != "f":
        return known, values.astype(np.int64)
    # As integers, the bits of floats ascend with the value, but those of negative floats descend.
    # Adding 0 makes -0.0 equal to 0.0.
    bits = (values + 0).view(f"i{values.itemsize}")
    return known, np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.int64)
