"""Windows of one size in a box of cells: cut out of it, or put back and blended where they overlap.

They are strided views of an array over the box, so that many are read or written in one numpy call,
whatever the number and order of dims.
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
        ordered: NDArray[Any] = views[without_single]
        return ordered

    def corners(self, index: Index) -> Index:
        """Return the first cell of windows along each axis."""
        return tuple(starts[i] for starts, i in zip(self.starts, index, strict=True))

    def cut(self, arrays: NDArray[Any], index: Index) -> NDArray[Any]:
        """Return windows, shape (windows, arrays, *window), of arrays over the box."""
        windows: NDArray[Any] = self.views(arrays)[self.corners(index)]
        return windows

    def cut_one(self, array: NDArray[Any], index: Index) -> NDArray[Any]:
        """Return windows, shape (windows, *window), of one array over the box."""
        if math.prod(self.size) == 1:
            points = np.ravel_multi_index(self.corners(index), self.box)
            return array.reshape(-1).take(points).reshape(-1, *self.shape)
        windows: NDArray[Any] = self.cut(array[None], index)[:, 0]
        return windows

    def with_any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which windows have a flagged cell, by start along each axis."""
        of_every_start = window_any(flags, self.size, [1] * len(self.size))
        return of_every_start[np.ix_(*self.starts)]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Along each axis, how many windows at most have a cell in common."""
        return tuple(map(_depth, self.starts, self.size))

    def group_of(self, index: Index) -> Ints:
        """Return the group of each window; no windows of a group overlap."""
        group = np.zeros_like(index[0])
        for numbers, depth in zip(index, self.depths, strict=True):
            group = group * depth + numbers % depth
        return group


def _depth(starts: Ints, size: int) -> int:
    """Return how many windows along an axis have a cell in common, at most."""
    first = np.searchsorted(starts, starts - size, side="right")
    return int((np.arange(len(starts)) - first).max(initial=0)) + 1


def every_window(counts: Sequence[int]) -> Index:
    """Return the windows of all combinations of some numbers of starts."""
    return tuple(np.unravel_index(np.arange(math.prod(counts)), tuple(counts)))


class Placer:
    """Weighted mean of the windows in a box, each channel by itself.

    Weights fall towards the ends of a window; windows that lie side by side have none.
    """

    def __init__(self, windows: BoxWindows, shared: Sequence[int], channels: int) -> None:
        self._windows = windows
        shape = (channels, *windows.box)
        self._is_blended = max(windows.depths) > 1 or max(shared) > 0
        if not self._is_blended:
            self._cells = np.full(shape, np.nan)
            self._views = windows.views(self._cells)
            return
        tapers = [_taper(windows.size[axis], shared[axis]) for axis in windows.order]
        self._window_weights = reduce(np.multiply.outer, tapers, np.ones(()))
        self._sum = np.zeros(shape)
        # One for all channels, until one of them has a gap where another has a value.
        self._weight = np.zeros((1, *windows.box))
        self._sums, self._weights = windows.views(self._sum), windows.views(self._weight)

    def add(self, index: Index, results: NDArray[Any]) -> None:
        """Add windows, shape (windows, channels, cells); values that are not finite are gaps."""
        results = results.reshape(*results.shape[:2], *self._windows.shape)
        has_value = np.isfinite(results)
        if self._is_blended:
            self._blend(index, results, has_value)
            return
        if not has_value.all():
            results = np.where(has_value, results, np.nan)
        self._views[self._windows.corners(index)] = results

    def _blend(self, index: Index, results: NDArray[Any], has_value: NDArray[np.bool_]) -> None:
        """Add weighted results to the sums."""
        weights = self._window_weights
        if has_value.all():
            weights = np.broadcast_to(weights, (len(results), len(self._weight), *weights.shape))
        else:
            if len(self._weight) < len(self._sum):
                self._weight = np.repeat(self._weight, len(self._sum), axis=0)
                self._weights = self._windows.views(self._weight)
            weights, results = np.where(has_value, weights, 0.0), np.where(has_value, results, 0.0)
        weighted = results * weights
        for part in self._side_by_side(index):
            corners = self._windows.corners(tuple(numbers[part] for numbers in index))
            self._sums[corners] += weighted[part]
            self._weights[corners] += weights[part]

    def cells(self) -> NDArray[np.float64]:
        """Return the means, shape (channels, *box); NaN where no window has a value."""
        if not self._is_blended:
            return self._cells
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = self._sum / self._weight
        return means

    def _side_by_side(self, index: Index) -> Iterator[slice]:
        """Split windows into slices of windows that do not overlap."""
        ends = np.flatnonzero(np.diff(self._windows.group_of(index))) + 1
        yield from map(slice, [0, *ends.tolist()], [*ends.tolist(), len(index[0])])


def _taper(size: int, shared: int) -> NDArray[np.float64]:
    """Return the weights of a window's cells along an axis: a squared sine at both ends."""
    from_end = np.minimum(np.arange(size), np.arange(size)[::-1])
    share = np.minimum((from_end + 0.5) / max(shared, 0.5), 1.0)  # 1 where none is shared
    weights: NDArray[np.float64] = np.sin(share * (math.pi / 2)) ** 2
    return weights
