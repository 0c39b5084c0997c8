"""Cutting windows out of a box of cells, and blending overlapping windows into one.

Windows are strided views of an array over the box, so that many are read or added in one numpy
call, whatever the number and order of dims.
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

from ml4cube.core.missing import window_any

Ints = NDArray[np.intp]
#: Windows, by the number of their start along each axis.
Index = tuple[Ints, ...]


@dataclass(frozen=True, eq=False)
class BoxWindows:
    """Windows of one size in a box of cells, in every combination of their starts."""

    # Cells of the box along each axis.
    box: tuple[int, ...]
    # First cell of the windows along each axis, ascending.
    starts: tuple[Ints, ...]
    # Cells of a window along each axis.
    size: tuple[int, ...]
    # Axes of a window in the model's order; along the others it has one cell.
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of a window along each axis, in the model's order."""
        return tuple(self.size[axis] for axis in self.order)

    def views(self, arrays: NDArray[Any]) -> NDArray[Any]:
        """Return views of arrays over the box, with an axis for each axis of it, arrays, window.

        ``views[windows.corners(index)]`` are windows, shape (windows, arrays, *window).
        """
        n = len(self.box)
        views = sliding_window_view(arrays, self.size, tuple(range(1, n + 1)), writeable=True)
        single = [axis for axis in range(n) if axis not in self.order]
        window_axes = (1 + n + axis for axis in (*self.order, *single))
        views = views.transpose(*range(1, n + 1), 0, *window_axes)
        without_single: Any = (..., *[0] * len(single))
        found: NDArray[Any] = views[without_single]
        return found

    def corners(self, index: Index) -> Index:
        """Return the first cell of windows along each axis."""
        return tuple(starts[i] for starts, i in zip(self.starts, index, strict=True))

    def cut(self, arrays: NDArray[Any], index: Index) -> NDArray[Any]:
        """Return windows, shape (windows, arrays, *window), of arrays over the box."""
        windows: NDArray[Any] = self.views(arrays)[self.corners(index)]
        return windows

    def with_any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which windows have a flagged cell, by start along each axis."""
        of_every_start = window_any(flags, self.size, [1] * len(self.size))
        return of_every_start[np.ix_(*self.starts)]

    def group_of(self, index: Index) -> Ints:
        """Return the group of each window; no windows of a group overlap."""
        group = np.zeros_like(index[0])
        for along, most in zip(index, self._depths, strict=True):
            group = group * most + along % most
        return group

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        """Along each axis, how many windows at most have a cell in common."""
        depths = []
        for starts, size in zip(self.starts, self.size, strict=True):
            first = np.searchsorted(starts, starts - size, side="right")
            depths.append(int((np.arange(len(starts)) - first).max(initial=0)) + 1)
        return tuple(depths)

    def apart(self, index: Index) -> Iterator[slice]:
        """Split windows into slices of windows that do not overlap."""
        ends = np.flatnonzero(np.diff(self.group_of(index))) + 1
        yield from map(slice, [0, *ends.tolist()], [*ends.tolist(), len(index[0])])


class Blend:
    """Weighted mean of the windows in a box, each channel by itself."""

    def __init__(
        self, channels: int, windows: BoxWindows, tapers: Sequence[NDArray[np.float64]]
    ) -> None:
        self._windows = windows
        ordered = (tapers[axis] for axis in windows.order)
        self._window_weights = reduce(np.multiply.outer, ordered, np.ones(()))
        self._sum = np.zeros((channels, *windows.box))
        # One for all channels, until one of them has a gap where another has a value.
        self._weight = np.zeros((1, *windows.box))
        self._sums, self._weights = windows.views(self._sum), windows.views(self._weight)

    def add(self, index: Index, values: NDArray[Any]) -> None:
        """Add windows, shape (windows, channels, *window); gaps do not count."""
        windows, weights, known = self._windows, self._window_weights, np.isfinite(values)
        if known.all():
            weights = np.broadcast_to(weights, (len(values), len(self._weight), *weights.shape))
        else:
            if len(self._weight) < len(self._sum):
                self._weight = np.repeat(self._weight, len(self._sum), axis=0)
                self._weights = windows.views(self._weight)
            weights, values = np.where(known, weights, 0.0), np.where(known, values, 0.0)
        values = values * weights
        for apart in windows.apart(index):
            corners = windows.corners(tuple(along[apart] for along in index))
            self._sums[corners] += values[apart]
            self._weights[corners] += weights[apart]

    def mean(self) -> NDArray[np.float64]:
        """Return the means, shape (channels, *box); NaN where no window has a value."""
        with np.errstate(invalid="ignore"):
            mean: NDArray[np.float64] = self._sum / self._weight
        return mean


def every_window(counts: Sequence[int]) -> Index:
    """Return the windows of all combinations of some numbers of starts."""
    return tuple(np.unravel_index(np.arange(math.prod(counts)), tuple(counts)))
