"""Sum cells over tiles of a lazy array, in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

# Yields the columns of a box of cells from its values and the offsets of cells in their tiles.
Columns = Callable[[NDArray[Any], list[NDArray[np.int64]]], Iterator[NDArray[Any]]]

_CELLS_AT_ONCE = 1 << 18


def sum_tiles(
    array: xr.DataArray, tile: Mapping[str, int], columns: Columns, count: int
) -> NDArray[np.uint64]:
    """Return the sums of `count` columns: (other dims..., tiles of the last dims..., columns)."""
    dims = [str(dim) for dim in array.dims]
    first = len(dims) - len(tile)
    positions = [np.arange(array.sizes[dim], dtype=np.int64) for dim in dims[first:]]
    tiles = [tile[dim] for dim in dims[first:]]
    if array.chunks is None:
        return _sum_box(array.values, *positions, columns=columns, count=count, tiles=tiles)
    axes = tuple(range(array.ndim))
    arguments: list[Any] = [array.data, axes]
    pieces: dict[int, tuple[int, ...]] = {}
    owners = []
    for axis, (at, n) in enumerate(zip(positions, tiles, strict=True), first):
        chunks = array.chunks[axis]
        arguments += [da.from_array(at, chunks=(chunks,)), (axis,)]  # type: ignore[no-untyped-call]
        parts = np.split(at // n, np.cumsum(chunks)[:-1])
        pieces[axis] = tuple(len(_starts(part)) for part in parts)
        owners.append(np.concatenate([part[_starts(part)] for part in parts]))
    total: NDArray[np.uint64] = da.blockwise(  # type: ignore[no-untyped-call]
        _sum_box,
        (*axes, array.ndim),
        *arguments,
        columns=columns,
        count=count,
        tiles=tiles,
        new_axes={array.ndim: count},
        adjust_chunks=pieces,
        align_arrays=False,  # all have the chunks of `array`
        dtype=np.uint64,
        meta=np.empty((0,) * (array.ndim + 1), dtype=np.uint64),
    ).compute()
    for axis, owner in enumerate(owners, first):  # join tiles that span several chunks
        total = np.add.reduceat(total, _starts(owner), axis=axis)
    return total


def _sum_box(
    values: NDArray[Any],
    *positions: NDArray[np.int64],
    columns: Columns,
    count: int,
    tiles: list[int],
) -> NDArray[np.uint64]:
    """Sum one box of cells over tiles, or pieces of tiles, of the last axes."""
    owners = [at // tile for at, tile in zip(positions, tiles, strict=True)]
    offsets = [at % tile for at, tile in zip(positions, tiles, strict=True)]
    outer = values.ndim - len(positions)
    shape = (*values.shape[:outer], *(len(_starts(owner)) for owner in owners), count)
    result = np.zeros(shape, dtype=np.uint64)
    flat = values.reshape(-1, *values.shape[outer:])
    into = result.reshape(-1, *result.shape[outer:])
    at_once = max(_CELLS_AT_ONCE // max(math.prod(flat.shape[1:]), 1), 1)
    for start in range(0, len(flat), at_once):
        part = slice(start, start + at_once)
        for column, cells in enumerate(columns(flat[part], offsets)):
            for axis, owner in enumerate(owners, 1):
                cells = np.add.reduceat(cells, _starts(owner), axis=axis, dtype=np.uint64)
            into[part, ..., column] = cells
    return result


def _starts(owner: NDArray[Any]) -> NDArray[np.intp]:
    """Return the first position of each run of equal values."""
    return np.flatnonzero(np.diff(owner, prepend=-1))
