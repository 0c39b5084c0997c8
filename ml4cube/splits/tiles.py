"""Sum cells over tiles of a lazy array, in one pass and bounded memory.

Every chunk is summed over the tiles in it, or their pieces; pieces of one tile in neighbouring
chunks are then added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

# Yields arrays to be summed, one for each column of the result, from the values of a box of cells
# and, along each tiled axis, the positions of its cells in their tiles.
Columns = Callable[[NDArray[Any], list[NDArray[np.int64]]], Iterator[NDArray[Any]]]

_CELLS_AT_ONCE = 1 << 18


def sum_tiles(
    array: xr.DataArray, tile: Mapping[str, int], columns: Columns, n_columns: int
) -> NDArray[np.uint64]:
    """Return the sums over tiles of the last dims: (other dims..., tiles..., columns)."""
    dims = [str(dim) for dim in array.dims]
    first_tiled = len(dims) - len(tile)
    positions = [np.arange(array.sizes[dim], dtype=np.int64) for dim in dims[first_tiled:]]
    tile_sizes = [tile[dim] for dim in dims[first_tiled:]]
    if array.chunks is None:
        return _sum_box(
            array.values, *positions, columns=columns, n_columns=n_columns, tile_sizes=tile_sizes
        )
    axes = tuple(range(array.ndim))
    arrays_and_axes: list[Any] = [array.data, axes]
    pieces_in_chunks: dict[int, tuple[int, ...]] = {}
    tile_of_piece = []
    for axis, (cells, size) in enumerate(zip(positions, tile_sizes, strict=True), first_tiled):
        chunks = array.chunks[axis]
        arrays_and_axes += [da.from_array(cells, chunks=(chunks,)), (axis,)]  # type: ignore[no-untyped-call]
        by_chunk = np.split(cells // size, np.cumsum(chunks)[:-1])
        pieces_in_chunks[axis] = tuple(len(_run_starts(tiles)) for tiles in by_chunk)
        tile_of_piece.append(np.concatenate([tiles[_run_starts(tiles)] for tiles in by_chunk]))
    sums: NDArray[np.uint64] = da.blockwise(  # type: ignore[no-untyped-call]
        _sum_box,
        (*axes, array.ndim),
        *arrays_and_axes,
        columns=columns,
        n_columns=n_columns,
        tile_sizes=tile_sizes,
        new_axes={array.ndim: n_columns},
        adjust_chunks=pieces_in_chunks,
        align_arrays=False,  # All arrays have the chunks of `array`.
        dtype=np.uint64,
        meta=np.empty((0,) * (array.ndim + 1), dtype=np.uint64),
    ).compute()
    for axis, tiles in enumerate(tile_of_piece, first_tiled):
        sums = np.add.reduceat(sums, _run_starts(tiles), axis=axis)
    return sums


def _sum_box(
    values: NDArray[Any],
    *positions: NDArray[np.int64],
    columns: Columns,
    n_columns: int,
    tile_sizes: list[int],
) -> NDArray[np.uint64]:
    """Sum one box of cells over the tiles, or pieces of tiles, of the last axes."""
    offsets = [cells % size for cells, size in zip(positions, tile_sizes, strict=True)]
    starts = [_run_starts(cells // size) for cells, size in zip(positions, tile_sizes, strict=True)]
    first_tiled = values.ndim - len(positions)
    pieces = tuple(len(of_axis) for of_axis in starts)
    sums = np.zeros((*values.shape[:first_tiled], *pieces, n_columns), dtype=np.uint64)
    # The other axes become one axis of rows, of which a few at a time are summed.
    rows = values.reshape(-1, *values.shape[first_tiled:])
    sums_of_rows = sums.reshape(-1, *pieces, n_columns)
    at_once = max(_CELLS_AT_ONCE // max(math.prod(rows.shape[1:]), 1), 1)
    for start in range(0, len(rows), at_once):
        some = slice(start, start + at_once)
        for column, cells in enumerate(columns(rows[some], offsets)):
            for axis, of_axis in enumerate(starts, 1):
                cells = np.add.reduceat(cells, of_axis, axis=axis, dtype=np.uint64)
            sums_of_rows[some, ..., column] = cells
    return sums


def _run_starts(tiles: NDArray[Any]) -> NDArray[np.intp]:
    """Return the first position of each run of equal tiles."""
    return np.flatnonzero(np.diff(tiles, prepend=-1))
