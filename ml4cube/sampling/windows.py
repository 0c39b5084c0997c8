"""Cut windows from a region of a cube."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid


def tile_cells(windows: Grid, tile: Block) -> dict[str, slice]:
    """Return the cells that the windows of a tile cover."""
    return {
        dim: slice(first * stride, (last - 1) * stride + size)
        for dim, first, last, stride, size in zip(
            windows.dims, tile.start, tile.stop, windows.stride, windows.tile, strict=True
        )
    }


def cut(
    cells: NDArray[Any],
    size: Sequence[int],
    stride: Sequence[int],
    keep: NDArray[np.intp],
) -> NDArray[Any]:
    """Cut the windows at the positions in `keep` from a region."""
    if math.prod(size) == 1:
        points = cells[tuple(slice(None, None, step) for step in stride)].reshape(-1)
        return points.take(keep).reshape(-1, *size)
    view = np.lib.stride_tricks.sliding_window_view(cells, tuple(size))
    view = view[tuple(slice(None, None, step) for step in stride)]
    return view[np.unravel_index(keep, view.shape[: cells.ndim])]


def arrange(samples: NDArray[Any], dims: Sequence[str], window_dims: Sequence[str]) -> NDArray[Any]:
    """Drop the axes that have one cell, and order the others as stored."""
    kept = [1 + dims.index(dim) for dim in window_dims]
    dropped = [axis for axis in range(1, samples.ndim) if axis not in kept]
    moved = samples.transpose([0, *kept, *dropped])
    return moved.reshape(moved.shape[: 1 + len(kept)])
