"""Sum cells over tiles of an array, in one pass and bounded memory.

Every block is summed over the tiles in it, or their pieces; pieces of one tile in neighbouring
blocks are then added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan

# Yields arrays to be summed, one for each column of the result, from the values of a box of cells
# and, along each tiled axis, the positions of its cells in their tiles.
Columns = Callable[[NDArray[Any], list[NDArray[np.int64]]], Iterator[NDArray[Any]]]

_CELLS_AT_ONCE = 1 << 18


def sum_tiles(
    array: xr.DataArray,
    outer: Sequence[str],
    tile: Mapping[str, int],
    columns: Columns,
    n_columns: int,
) -> NDArray[np.uint64]:
    """Return the sums over tiles at each index of the outer dims: (outer..., tiles..., columns)."""
    name = str(array.name)
    sizes = {dim: array.sizes[dim] for dim in (*outer, *tile)}
    reader = CubeReader.of_variables({name: array.variable}, sizes)
    n_tiles = [math.ceil(array.sizes[dim] / size) for dim, size in tile.items()]
    shape = (*(array.sizes[dim] for dim in outer), *n_tiles, n_columns)
    sums: NDArray[np.uint64] = np.zeros(shape, dtype=np.uint64)
    blocks = blocks_of(reader)
    sum_block = partial(_sum_block, tile, columns, n_columns)
    for block, of_block in zip(blocks, scan(reader, sum_block, blocks), strict=True):
        box = [block.slices[dim] for dim in outer]
        for dim, size in tile.items():
            in_cells = block.slices[dim]
            box.append(slice(in_cells.start // size, (in_cells.stop - 1) // size + 1))
        sums[tuple(box)] += of_block
    return sums


def _sum_block(
    tile: Mapping[str, int], columns: Columns, n_columns: int, block: Block, cells: Cells
) -> NDArray[np.uint64]:
    """Sum one block of cells over the tiles, or pieces of tiles, of the last axes."""
    (values,) = cells.values()
    offsets, starts = [], []
    for dim, size in tile.items():
        positions = np.arange(block.slices[dim].start, block.slices[dim].stop)
        offsets.append(positions % size)
        starts.append(_run_starts(positions // size))
    first_tiled = values.ndim - len(tile)
    pieces = tuple(len(of_axis) for of_axis in starts)
    sums = np.zeros((*values.shape[:first_tiled], *pieces, n_columns), dtype=np.uint64)
    # The other axes become one axis of rows, of which a few at a time are summed.
    rows = values.reshape(-1, *values.shape[first_tiled:])
    sums_of_rows = sums.reshape(-1, *pieces, n_columns)
    at_once = max(_CELLS_AT_ONCE // max(math.prod(rows.shape[1:]), 1), 1)
    for start in range(0, len(rows), at_once):
        some = slice(start, start + at_once)
        for column, summands in enumerate(columns(rows[some], offsets)):
            for axis, of_axis in enumerate(starts, 1):
                summands = np.add.reduceat(summands, of_axis, axis=axis, dtype=np.uint64)
            sums_of_rows[some, ..., column] = summands
    return sums


def _run_starts(tiles: NDArray[Any]) -> NDArray[np.intp]:
    """Return the first position of each run of equal tiles."""
    return np.flatnonzero(np.diff(tiles, prepend=-1))
