"""Tiles and blocks of a cube.

A *tile* is a box of neighbouring windows, the unit in which a cube is read; as a `Block` it counts
windows, not cells. Imports nothing that a worker does not need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError
from ml4cube.core.grid import Block, Grid, cell_ids
from ml4cube.core.partition import hash_ids
from ml4cube.core.statistics import Statistics
from ml4cube.cube.engine import Threads
from ml4cube.cube.reader import CubeReader
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.recipe import Recipe

MIB = 2**20
# Least and most bytes of a shard; between them, all parts together get about 64.
_SHARD_BYTES = (4 * MIB, 32 * MIB)
_SHARDS_WANTED = 64
# A shard is mixed from this many tiles, so that neighbours in a store come from far apart.
_TILES_PER_SHARD = 16
# Most bytes of the samples of a tile, unless chunks are larger: a tile that has blocks of several
# parts is read once for each of them.
_TILE_BYTES = MIB // 2
#: Bytes of a sample's origin along one dim: a value and an index.
ORIGIN_BYTES = 12

Callback = Callable[[Arrays], Mapping[str, Any]]


def name_of(callback: Callback | None) -> str | None:
    """Return the name of a callback, to be stored with the samples; refuse what is no function."""
    if callback is None:
        return None
    if not callable(callback):
        raise InvalidTypeError(
            f"callback must be a function of a dict of arrays, got {one_line(callback)}"
        )
    return str(getattr(callback, "__qualname__", type(callback).__name__))


@dataclass(frozen=True)
class Axis:
    """The coordinate along one dim of a cube, as it is stored."""

    name: str
    # One for each cell, dates as numbers.
    values: NDArray[Any]
    # With the encoding of dates.
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UsedBlocks:
    """The blocks of a cube that are used; a window belongs to the block in which it starts."""

    # Dims in the order of the cube.
    grid: Grid
    # In the shape of ``grid.counts``.
    used: NDArray[np.bool_]

    def are_used(self, starts: Sequence[NDArray[np.intp]]) -> NDArray[np.bool_]:
        """Return which windows of a tile are used, by their first cells along each dim."""
        blocks = [cells // size for cells, size in zip(starts, self.grid.stride, strict=True)]
        return self.used[np.ix_(*blocks)]


@dataclass(frozen=True)
class TiledRecipe:
    """All that a worker needs to know to make the samples of a tile; picklable."""

    bound: BoundRecipe
    # Tiles over the positions of ``bound.windows``.
    tiles: Grid
    # One for each dim of the cube.
    axes: tuple[Axis, ...]
    # Name of the split label.
    label: str
    # None if all blocks are used.
    used_blocks: UsedBlocks | None = None
    # Of the train cells, where the fill method needs them.
    fill: Statistics | None = None
    # Called with all samples of one part of a tile.
    callback: Callback | None = None

    @property
    def recipe(self) -> Recipe:
        """How samples are cut from any cube."""
        return self.bound.recipe

    @property
    def boxes(self) -> Grid:
        """Boxes of cells like tiles, whose windows share cells with neighbours; boxes do not."""
        shape = self.bound.sizes
        of_dims = zip(self.recipe.dims, self.tiles.tile, self.recipe.stride, strict=True)
        sizes = {dim: min(windows * stride, shape[dim]) for dim, windows, stride in of_dims}
        return Grid.blocks(shape, sizes)

    def threads(self, reader: CubeReader) -> Threads:
        """Return threads that read tiles, ahead of their use where reading is waiting."""
        box = self.bound.cells_of(self.tiles.block(0))  # of the largest
        n_cells = math.prod(cells.stop - cells.start for cells in box.values())
        # as many tiles as are being read wait for their use
        return Threads(reader.reads_at_a_time(2 * n_cells))

    def origins(self, tile: Block, keep: NDArray[np.intp]) -> Arrays:
        """Return the first cell of each sample along every dim, as value and as index."""
        result: Arrays = {}
        windows = np.unravel_index(keep, tuple(tile.shape.values()))
        of_dims = zip(self.axes, self.recipe.dims, self.bound.starts_of(tile), windows, strict=True)
        for axis, dim, starts, numbers in of_dims:
            result[axis.name] = axis.values[starts].take(numbers)
            result[f"{dim}_index"] = starts.astype(self.bound.index_dtype).take(numbers)
        return result


def sample_bytes(recipe: Recipe, dtypes: Mapping[str, np.dtype[Any]]) -> int:
    """Return the bytes of a sample and its origin, before compression."""
    values = math.prod(recipe.size) * sum(dtypes[name].itemsize for name in recipe.variables)
    return values + ORIGIN_BYTES * len(recipe.dims)


def shard_bytes(total: int) -> int:
    """Return the bytes of a shard, all arrays together: total / 64, within 4 to 32 MiB."""
    least, most = _SHARD_BYTES
    return min(max(total // _SHARDS_WANTED, least), most)


def tiling(bound: BoundRecipe, chunks: Mapping[str, int], sample_bytes: int) -> Grid:
    """Return the tiles in which a cube is read: chunks, or as many as are worth reading at once."""
    windows = bound.windows
    counts = dict(zip(windows.dims, windows.counts, strict=True))
    stride = dict(zip(windows.dims, windows.stride, strict=True))
    tile = {d: min(max(1, round(chunks.get(d, 1) / stride[d])), n) for d, n in counts.items()}
    shard = shard_bytes(len(windows) * sample_bytes)
    tile_bytes = min(shard // _TILES_PER_SHARD, _TILE_BYTES)
    while math.prod(tile.values()) * sample_bytes < tile_bytes:
        growing = [d for d in counts if tile[d] < counts[d]]
        if not growing:
            break
        # double the dim with the most tiles, of equals the one whose name comes last
        dim = max(growing, key=lambda d: (counts[d] / tile[d], d))
        tile[dim] = min(tile[dim] * 2, counts[dim])
    return Grid.blocks(counts, tile)


def block_order(blocks: Grid, at_random: bool, seed: int) -> NDArray[np.intp]:
    """Return the ids of blocks in the order in which they are used."""
    if not at_random:
        return np.arange(len(blocks))
    # the split uses the seed itself, and must be independent of this draw; no block has the id -1
    order_seed = int(hash_ids(seed, [-1])[0])
    counts = dict(zip(blocks.dims, blocks.counts, strict=True))
    # as if blocks were cells: these ids do not depend on the order of dims
    ids = cell_ids(counts, {dim: slice(0, n) for dim, n in counts.items()})
    return np.argsort(hash_ids(order_seed, ids.reshape(-1)), kind="stable")
