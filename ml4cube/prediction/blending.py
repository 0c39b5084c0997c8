"""Windows that cover every cell of a cube, and the blending of overlapping ones.

Only index arithmetic. A region of cells is flattened row-major, and a window is the positions of
its cells, so gathering windows and adding them back is one numpy call each, for any number and
order of dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
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


@dataclass(frozen=True)
class Tile:
    """Windows that overlap one block, as positions in the flattened box that they cover."""

    cover: Cover
    block: Block
    # Dims of a window, in the model's order.
    window_dims: tuple[str, ...]

    @cached_property
    def starts(self) -> dict[str, NDArray[np.intp]]:
        """First cell of the windows along each dim, in the cube."""
        starts = {}
        for dim, cells in self.block.slices.items():
            every = self.cover.starts(dim)
            starts[dim] = every[(every < cells.stop) & (every + self.cover.size[dim] > cells.start)]
        return starts

    @property
    def box(self) -> dict[str, slice]:
        """Cells of the cube that the windows cover."""
        return {
            dim: slice(int(starts[0]), int(starts[-1]) + self.cover.size[dim])
            for dim, starts in self.starts.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of the box along each dim."""
        return tuple(cells.stop - cells.start for cells in self.box.values())

    @property
    def inner(self) -> tuple[slice, ...]:
        """Slices of the block in the box."""
        return tuple(
            slice(cells.start - box.start, cells.stop - box.start)
            for cells, box in zip(self.block.slices.values(), self.box.values(), strict=True)
        )

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Sizes of a window along `window_dims`."""
        return tuple(self.cover.size[dim] for dim in self.window_dims)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Weights of the cells of a window, in the model's order, flattened."""
        tapers = (self.cover.taper(dim) for dim in self.window_dims)
        return reduce(np.multiply.outer, tapers, np.ones(())).ravel()

    def batches(self, batch_size: int) -> Iterator[NDArray[np.intp]]:
        """Yield the positions of the cells of some windows at a time, in fixed order."""
        dims = list(self.starts)
        positions = np.arange(math.prod(self.shape)).reshape(self.shape)
        windows = sliding_window_view(positions, [self.cover.size[dim] for dim in dims])
        # dims that are not in `window_dims` have one cell
        order = [*self.window_dims, *(dim for dim in dims if dim not in self.window_dims)]
        axes = [len(dims) + dims.index(dim) for dim in order]
        windows = windows.transpose(*range(len(dims)), *axes)
        counts = [len(starts) for starts in self.starts.values()]
        for first in range(0, math.prod(counts), batch_size):
            ids = np.arange(first, min(first + batch_size, math.prod(counts)))
            index = np.unravel_index(ids, counts)
            corners = (s[i] - s[0] for s, i in zip(self.starts.values(), index, strict=True))
            yield windows[tuple(corners)].reshape(len(ids), -1)


class Blend:
    """Weighted mean of overlapping windows in one box, without gaps."""

    def __init__(self, targets: int, tile: Tile) -> None:
        self._tile = tile
        self._sum = np.zeros((targets, math.prod(tile.shape)))
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
        return mean.reshape(-1, *self._tile.shape)[(slice(None), *self._tile.inner)]
