"""Windows that cover every cell of a cube, and the blending of overlapping ones.

Only index arithmetic. The windows of a block cover a box of cells. The box is flattened row-major,
and a window is the positions of its cells, so gathering windows and adding them back is one numpy
call each, for any number and order of dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ml4cube.core.grid import Block, cell_ids

# Least strides of a block along an overlapping dim, so that few windows are computed twice.
_FEWEST_STRIDES = 4


@dataclass(frozen=True)
class Cover:
    """Windows that cover every cell of a cube, a stride apart.

    The last window along a dim is shifted inward, so that all are whole. All three fields have
    every dim of the cube.
    """

    # Length of the cube.
    shape: dict[str, int]
    # Cells of a window.
    window: dict[str, int]
    # Cells that neighbouring windows share.
    overlap: dict[str, int]

    @property
    def stride(self) -> dict[str, int]:
        """Cells from the start of a window to that of the next one, except the last."""
        return {dim: n - self.overlap[dim] for dim, n in self.window.items()}

    def starts(self, dim: str) -> NDArray[np.intp]:
        """Return the first cell of each window along one dim."""
        last = self.shape[dim] - self.window[dim]
        regular = np.arange(0, last + 1, self.stride[dim], dtype=np.intp)
        return regular if regular[-1] == last else np.append(regular, last)

    def taper(self, dim: str) -> NDArray[np.float64]:
        """Return the weights of a window's cells along one dim: a squared sine at both ends."""
        cells, shared = self.window[dim], self.overlap[dim]
        from_end = np.minimum(np.arange(cells), np.arange(cells)[::-1])
        share = np.minimum((from_end + 0.5) / max(shared, 0.5), 1.0)  # without overlap 1
        weights: NDArray[np.float64] = np.sin(share * (math.pi / 2)) ** 2
        return weights

    def block_size(self, chunks: Mapping[str, int], most_cells: int) -> dict[str, int]:
        """Choose blocks of whole strides that follow the chunks and, if possible, fit `most_cells`.

        A block that is too large is halved along the dim with the most strides above the fewest.
        A smaller one is doubled while it fits, first along the last dims, in which cells lie side
        by side.
        """
        stride = self.stride
        fewest = {d: _FEWEST_STRIDES if self.overlap[d] else 1 for d in self.shape}
        n_strides = {d: max(-(-chunks.get(d, 1) // stride[d]), fewest[d]) for d in self.shape}

        def size() -> dict[str, int]:
            return {d: min(n_strides[d] * stride[d], n) for d, n in self.shape.items()}

        while math.prod(size().values()) > most_cells:
            dim_to_halve = max(n_strides, key=lambda d: n_strides[d] / fewest[d])
            if n_strides[dim_to_halve] <= fewest[dim_to_halve]:
                break
            n_strides[dim_to_halve] = max(n_strides[dim_to_halve] // 2, fewest[dim_to_halve])
        for dim in reversed(self.shape):
            while size()[dim] < self.shape[dim] and 2 * math.prod(size().values()) <= most_cells:
                n_strides[dim] *= 2
        return size()


@dataclass(frozen=True)
class Tile:
    """All windows that overlap one block, and the box of cells that they cover."""

    cover: Cover
    block: Block
    # Dims of a window, in the model's order; along the others it has one cell.
    window_dims: tuple[str, ...]

    @cached_property
    def starts(self) -> dict[str, NDArray[np.intp]]:
        """First cell of the windows along each dim, in the cube."""
        starts = {}
        for dim, cells in self.block.slices.items():
            every = self.cover.starts(dim)
            ends = every + self.cover.window[dim]
            starts[dim] = every[(every < cells.stop) & (ends > cells.start)]
        return starts

    @property
    def box(self) -> dict[str, slice]:
        """Cells of the cube that the windows cover."""
        return {
            dim: slice(int(starts[0]), int(starts[-1]) + self.cover.window[dim])
            for dim, starts in self.starts.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of the box along each dim."""
        return tuple(cells.stop - cells.start for cells in self.box.values())

    @cached_property
    def cell_ids(self) -> NDArray[np.uint64]:
        """Number in the cube of each cell of the box, flattened."""
        return cell_ids(self.cover.shape, self.box).ravel()

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Cells of a window along each of `window_dims`."""
        return tuple(self.cover.window[dim] for dim in self.window_dims)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Weights of the cells of a window, in the model's order, flattened."""
        tapers = (self.cover.taper(dim) for dim in self.window_dims)
        return reduce(np.multiply.outer, tapers, np.ones(())).ravel()

    def batches(self, batch_size: int) -> Iterator[NDArray[np.intp]]:
        """Yield the positions of the cells of some windows, shape (windows, cells)."""
        dims = list(self.starts)
        positions = np.arange(math.prod(self.shape)).reshape(self.shape)
        windows = sliding_window_view(positions, [self.cover.window[dim] for dim in dims])
        # axes: the first cell along each dim, then the cells in the model's order
        order = [*self.window_dims, *(dim for dim in dims if dim not in self.window_dims)]
        window_axes = [len(dims) + dims.index(dim) for dim in order]
        windows = windows.transpose(*range(len(dims)), *window_axes)
        counts = [len(starts) for starts in self.starts.values()]
        for first in range(0, math.prod(counts), batch_size):
            ids = np.arange(first, min(first + batch_size, math.prod(counts)))
            index = np.unravel_index(ids, counts)
            corners = (s[i] - s[0] for s, i in zip(self.starts.values(), index, strict=True))
            yield windows[tuple(corners)].reshape(len(ids), -1)

    def in_block(self, values: NDArray[Any]) -> NDArray[Any]:
        """Cut the block out of values in the box: shape (targets, cells) -> (targets, *block)."""
        inner = [
            slice(cells.start - box.start, cells.stop - box.start)
            for cells, box in zip(self.block.slices.values(), self.box.values(), strict=True)
        ]
        return values.reshape(-1, *self.shape)[(slice(None), *inner)]


class Blend:
    """Weighted mean of the predicted windows of a tile, each target by itself."""

    def __init__(self, targets: int, tile: Tile) -> None:
        self._tile = tile
        self._sum = np.zeros((targets, math.prod(tile.shape)))
        self._weight = np.zeros_like(self._sum)

    def add(self, positions: NDArray[np.intp], values: NDArray[np.float64]) -> None:
        """Add windows, shape (windows, targets, cells), at their positions; gaps do not count."""
        index = positions.ravel()
        for target, (total, weight) in enumerate(zip(self._sum, self._weight, strict=True)):
            value = values[:, target]
            known = np.isfinite(value)
            share = np.where(known, self._tile.weights, 0.0)
            np.add.at(total, index, (np.where(known, value, 0.0) * share).ravel())
            np.add.at(weight, index, share.ravel())

    def mean_in_block(self) -> NDArray[np.float64]:
        """Return the means, shape (targets, *block); NaN where no window has a value."""
        mean = np.full_like(self._sum, np.nan)
        np.divide(self._sum, self._weight, out=mean, where=self._weight > 0)
        return self._tile.in_block(mean)
