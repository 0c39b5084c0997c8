"""Windows that cover every cell of a cube, and the blending of overlapping ones.

Only index arithmetic. A region of cells is flattened row-major. A window is the position of its
first cell plus one offset per cell, so gathering windows and adding them back is one numpy call
each, for any number and order of dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block

# Least strides of a tile along an overlapping dim, so that few windows are computed twice.
_FEWEST_STRIDES = 4


@dataclass(frozen=True)
class Cover:
    """Windows that cover every cell of a cube."""

    # Windows are a stride apart; the last one is shifted inward, so that all are whole.

    # Dims and lengths of the cube.
    shape: dict[str, int]
    # Cells of a window along every dim.
    size: dict[str, int]
    # Cells that neighbours share along every dim.
    overlap: dict[str, int]

    @property
    def stride(self) -> dict[str, int]:
        """Cells from one window's start to the next, except the last."""
        return {dim: n - self.overlap[dim] for dim, n in self.size.items()}

    @property
    def id_step(self) -> dict[str, int]:
        """Step of the row-major cell id over sorted dims, along each dim."""
        steps, step = {}, 1
        for dim in sorted(self.shape, reverse=True):
            steps[dim], step = step, step * self.shape[dim]
        return steps

    def starts(self, dim: str) -> NDArray[np.intp]:
        """Return the first cell of each window along one dim."""
        last = self.shape[dim] - self.size[dim]
        regular = np.arange(0, last + 1, self.stride[dim], dtype=np.intp)
        return regular if regular[-1] == last else np.append(regular, last)

    def taper(self, dim: str) -> NDArray[np.float64]:
        """Return the weights of a window's cells along one dim."""
        size, shared = self.size[dim], self.overlap[dim]
        nearest_end = np.minimum(np.arange(size), np.arange(size)[::-1])
        share = np.minimum((nearest_end + 0.5) / max(shared, 0.5), 1.0)
        weights: NDArray[np.float64] = np.sin(share * (math.pi / 2)) ** 2
        return weights

    def tile_size(self, chunks: Mapping[str, int], cells: int) -> dict[str, int]:
        """Choose the size of the blocks that are predicted and written."""
        stride = self.stride
        fewest = {d: _FEWEST_STRIDES if self.overlap[d] else 1 for d in self.shape}
        count = {d: max(-(-chunks.get(d, 1) // stride[d]), fewest[d]) for d in self.shape}

        def tile() -> dict[str, int]:
            return {d: min(count[d] * stride[d], n) for d, n in self.shape.items()}

        while math.prod(tile().values()) > cells:
            largest = max(count, key=lambda d: count[d] / fewest[d])
            if count[largest] <= fewest[largest]:
                break
            count[largest] = max(count[largest] // 2, fewest[largest])
        for dim in reversed(self.shape):
            while tile()[dim] < self.shape[dim] and 2 * math.prod(tile().values()) <= cells:
                count[dim] *= 2
        return tile()

    def tile(self, block: Block, window_dims: Sequence[str]) -> Tile:
        """Return the windows that overlap a block of cells."""
        starts = {}
        for dim, cells in block.slices.items():
            every = self.starts(dim)
            starts[dim] = every[(every < cells.stop) & (every + self.size[dim] > cells.start)]
        return Tile(self, block, tuple(window_dims), starts)


@dataclass(frozen=True)
class Tile:
    """Windows that overlap one block, as positions in the flattened box that they cover."""

    cover: Cover
    block: Block
    # Dims of a window, in the model's order.
    window_dims: tuple[str, ...]
    # First cell of the windows along each dim, in the cube.
    starts: dict[str, NDArray[np.intp]]

    @property
    def box(self) -> dict[str, slice]:
        """Cells of the cube that the windows cover."""
        return {
            dim: slice(int(starts[0]), int(starts[-1]) + self.cover.size[dim])
            for dim, starts in self.starts.items()
        }

    @property
    def inner(self) -> tuple[slice, ...]:
        """Slices of the block in the box."""
        return tuple(
            slice(cells.start - box.start, cells.stop - box.start)
            for cells, box in zip(self.block.slices.values(), self.box.values(), strict=True)
        )

    @cached_property
    def _step(self) -> dict[str, int]:
        """Step in the flattened box along each dim."""
        lengths = [cells.stop - cells.start for cells in self.box.values()]
        steps = [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
        return dict(zip(self.box, steps, strict=True))

    @cached_property
    def cell_ids(self) -> NDArray[np.uint64]:
        """Row-major id over sorted dims of every cell of the flattened box."""
        ids: NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)
        step = self.cover.id_step
        for dim, cells in self.box.items():
            steps = np.arange(cells.start, cells.stop, dtype=np.uint64) * np.uint64(step[dim])
            ids = np.add.outer(ids, steps).ravel()
        return ids

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Sizes of a window along `window_dims`."""
        return tuple(self.cover.size[dim] for dim in self.window_dims)

    @cached_property
    def _offsets(self) -> NDArray[np.intp]:
        """Position of each cell of a window relative to its first cell, in the model's order."""
        offsets = np.zeros(1, dtype=np.intp)
        for dim in self.window_dims:
            steps = np.arange(self.cover.size[dim], dtype=np.intp) * self._step[dim]
            offsets = np.add.outer(offsets, steps).ravel()
        return offsets

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Weights of the cells of a window, in the model's order, flattened."""
        weights = np.ones(1)
        for dim in self.window_dims:
            weights = np.multiply.outer(weights, self.cover.taper(dim)).ravel()
        return weights

    def __len__(self) -> int:
        """Return the number of windows."""
        return math.prod(len(starts) for starts in self.starts.values())

    def batches(self, batch_size: int) -> Iterator[NDArray[np.intp]]:
        """Yield the positions of the cells of some windows at a time, in fixed order."""
        origin = np.zeros(1, dtype=np.intp)
        for dim, starts in self.starts.items():
            origin = np.add.outer(origin, (starts - starts[0]) * self._step[dim]).ravel()
        for first in itertools.count(0, batch_size):
            if first >= len(origin):
                return
            yield origin[first : first + batch_size, np.newaxis] + self._offsets


class Blend:
    """Weighted mean of overlapping windows in one box, without gaps."""

    def __init__(self, targets: int, tile: Tile) -> None:
        self._tile = tile
        self._shape = tuple(cells.stop - cells.start for cells in tile.box.values())
        self._sum = np.zeros((targets, math.prod(self._shape)))
        self._weight = np.zeros_like(self._sum)

    def add(self, positions: NDArray[np.intp], values: NDArray[np.float64]) -> None:
        """Add predicted windows."""
        index = positions.ravel()
        for target, (total, weight) in enumerate(zip(self._sum, self._weight, strict=True)):
            value = values[:, target]
            known = np.isfinite(value)
            share = np.where(known, self._tile.weights, 0.0)
            np.add.at(total, index, (np.where(known, value, 0.0) * share).ravel())
            np.add.at(weight, index, share.ravel())

    def block(self) -> NDArray[np.float64]:
        """Return the mean over windows for the block's cells."""
        mean = np.full_like(self._sum, np.nan)
        np.divide(self._sum, self._weight, out=mean, where=self._weight > 0)
        return mean.reshape(-1, *self._shape)[(slice(None), *self._tile.inner)]
