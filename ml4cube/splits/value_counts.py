"""Count the values in each block in one pass, for classes and quantile bins.

Classes are counted exactly. For bins, counts are exact where they fit in memory; otherwise values
are rounded down to as many leading binary digits as fit. Merging counts in any order gives the
same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Block, Grid
from ml4cube.core.missing import find_gaps
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan

Ints = NDArray[np.int64]

# Most pairs of block and value. Half a million take 12 MB; adding up two of these takes about
# 200 MB for a moment.
MAX_PAIRS = 1 << 19
# A variable with more values than this is not a class variable.
MAX_CLASSES = 256
# Name of the mask beside that of a variable; those in files have no spaces.
_MASK = "mask of valid cells"


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
    # Variable whose classes the keys are, None if they are bins.
    classes_of: str | None = None

    def merge(self, other: ValueCounts) -> ValueCounts:
        """Add up counts; rounding depends only on the sum, so the order does not matter."""
        block = np.concatenate([self.block, other.block])
        count = np.concatenate([self.count, other.count])
        if self.classes_of is not None:
            key = np.concatenate([self.key, other.key])
            return _sum_classes(block, key, count, self.classes_of)
        digits = max(self.digits_removed, other.digits_removed)
        keys = [part.key >> (digits - part.digits_removed) for part in (self, other)]
        return _sum_bins(block, np.concatenate(keys), count, digits)


def count_values(
    values: xr.DataArray, mask: xr.DataArray, grid: Grid, classes: bool
) -> ValueCounts:
    """Return the counts of the values in each block, chunk by chunk.

    Blocks are numbered along those dims of the grid that `values` or the mask has.
    """
    name = str(values.name)
    cube = xr.Dataset({name: values.variable, _MASK: mask.variable})
    dims = [dim for dim in grid.dims if dim in cube.dims]
    # blocks follow the chunks of the first
    names = sorted([name, _MASK], key=lambda variable: -cube[variable].ndim)
    reader = CubeReader.of(cube, names, dims)
    count_block = partial(_count_block, name=name, grid=grid, classes=classes)
    # Neighbours are merged, then pairs of neighbours and so on: a part would else be merged with
    # the counts of all before, which are many. The level of a part is how often it was merged.
    waiting: list[tuple[int, ValueCounts]] = []
    for counts in scan(reader, count_block, blocks_of(reader)):
        level = 0
        while waiting and waiting[-1][0] == level:
            counts = waiting.pop()[1].merge(counts)
            level += 1
        waiting.append((level, counts))
    _, total = waiting.pop()
    while waiting:
        total = waiting.pop()[1].merge(total)
    return total


def _count_block(
    block: Block, cells: Cells, *, name: str, grid: Grid, classes: bool
) -> ValueCounts:
    """Count the values of one block of the cube in each block of the grid."""
    # The id of the block of the grid that each cell lies in, from its index along every axis.
    ids: Ints = np.zeros((), dtype=np.int64)
    for dim, part in block.slices.items():
        n_blocks = grid.counts[grid.dims.index(dim)]
        ids = ids[..., None] * n_blocks + grid.tile_of_cells(dim)[part]
    mask = cells[_MASK]
    values, ids = cells[name][mask], ids[mask]
    has_value, key = _keys(values, classes)
    ids = np.where(has_value, ids, ~ids)
    ones = np.ones(ids.size, dtype=np.int64)
    if classes:
        return _sum_classes(ids, key, ones, name)
    return _sum_bins(ids, key, ones, 0)


def _sum_classes(block: Ints, key: NDArray[Any], count: Ints, name: str) -> ValueCounts:
    """Add up the counts of equal pairs of block and class."""
    if pd.unique(key[block >= 0]).size > MAX_CLASSES:
        raise InvalidValueError(
            f"stratify: {name!r} must have at most {MAX_CLASSES} distinct values to be used as "
            f"classes; for quantile bins write stratify={{{name!r}: 4}}"
        )
    table = pd.DataFrame({"block": block, "key": key, "count": count})
    table = table.groupby(["block", "key"], as_index=False, sort=False, dropna=False).sum()
    count = table["count"].to_numpy()
    return ValueCounts(table.block.to_numpy(), table.key.to_numpy(), count, classes_of=name)


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
        has_value = np.asarray(pd.notnull(words))
        return has_value, np.where(has_value, words, "").astype(str).astype(object)
    if values.dtype.kind == "f" or (values.dtype == np.uint64 and not classes):
        values = values.astype(np.float32 if values.dtype.itemsize <= 4 else np.float64)
    has_value = ~find_gaps(values)
    if classes:
        return has_value, values.astype(values.dtype.newbyteorder("="))
    if values.dtype.kind != "f":
        return has_value, values.astype(np.int64)
    # As integers, the bits of floats ascend with the value, but those of negative floats descend.
    # Adding 0 makes -0.0 equal to 0.0.
    bits = (values + 0).view(f"i{values.itemsize}")
    return has_value, np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.int64)
