"""Gathering windows from a box of cells, and blending overlapping windows into one.

Only index arithmetic, on arrays of any number of dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class BoxWindows:
    """Windows of one size in a box of cells, in every combination of their starts.

    Dims along which there is one start have it for every window.
    """

    # Cells of the box along each axis.
    box: tuple[int, ...]
    # First cell of the windows along each axis.
    starts: tuple[Ints, ...]
    # Cells of a window along each axis.
    size: tuple[int, ...]
    # Axes of a window in the model's order; along the others it has one cell.
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of a window along each axis, in the model's order."""
        return tuple(self.size[axis] for axis in self.order)

    @cached_property
    def _positions(self) -> NDArray[np.intp]:
        """Position in the flattened box of every cell of a window, by its first cell."""
        positions = np.arange(math.prod(self.box)).reshape(self.box)
        windows = sliding_window_view(positions, self.size)
        n = len(self.box)
        order = [*self.order, *(axis for axis in range(n) if axis not in self.order)]
        return windows.transpose(*range(n), *(n + axis for axis in order))

    def positions(self, index: Sequence[Ints]) -> NDArray[np.intp]:
        """Return the positions of the cells of windows, shape (windows, cells).

        `index` has the number of each window's start along each axis.
        """
        corners = tuple(starts[i] for starts, i in zip(self.starts, index, strict=True))
        return self._positions[corners].reshape(len(index[0]), -1)

    def gather(self, values: NDArray[Any], positions: NDArray[np.intp]) -> NDArray[Any]:
        """Return the cells of windows, shape (windows, cells), from values in the box."""
        return values.reshape(-1)[positions]


def batches(counts: tuple[int, ...], batch_size: int) -> Iterator[tuple[Ints, ...]]:
    """Yield the number of the start along each dim of some windows, in all combinations."""
    for first in range(0, math.prod(counts), batch_size):
        ids = np.arange(first, min(first + batch_size, math.prod(counts)))
        yield tuple(np.unravel_index(ids, counts))


class Blend:
    """Weighted mean of the windows in a box, each channel by itself."""

    def __init__(
        self, channels: int, windows: BoxWindows, tapers: Sequence[NDArray[np.float64]]
    ) -> None:
        self._windows = windows
        ordered = (tapers[axis] for axis in windows.order)
        self._weights = reduce(np.multiply.outer, ordered, np.ones(())).ravel()
        self._sum = np.zeros((channels, math.prod(windows.box)))
        self._weight = np.zeros_like(self._sum)

    def add(self, index: Sequence[Ints], values: NDArray[Any]) -> None:
        """Add windows, shape (windows, channels, cells); gaps do not count."""
        positions = self._windows.positions(index).ravel()
        for channel, (total, weight) in enumerate(zip(self._sum, self._weight, strict=True)):
            value = values[:, channel]
            known = np.isfinite(value)
            share = np.where(known, self._weights, 0.0)
            np.add.at(total, positions, (np.where(known, value, 0.0) * share).ravel())
            np.add.at(weight, positions, share.ravel())

    def mean(self) -> NDArray[np.float64]:
        """Return the means, shape (channels, *box); NaN where no window has a value."""
        mean = np.full_like(self._sum, np.nan)
        np.divide(self._sum, self._weight, out=mean, where=self._weight > 0)
        return mean.reshape(-1, *self._windows.box)
