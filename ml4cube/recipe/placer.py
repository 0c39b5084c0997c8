"""Results of windows put back into the cells of a box, and blended where windows overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.recipe.windows import BoxWindows, Index


class Placer:
    """Weighted mean of the windows in a box, each channel by itself.

    Weights fall towards the ends of a window; windows that lie side by side have none.
    """

    def __init__(self, windows: BoxWindows, overlap: Sequence[int], channels: int) -> None:
        self._windows = windows
        shape = (channels, *windows.box)
        self._is_blended = max(windows.depths) > 1 or max(overlap) > 0
        if not self._is_blended:
            self._cells = np.full(shape, np.nan)
            self._views = windows.views(self._cells)
            return
        tapers = [_taper(windows.size[axis], overlap[axis]) for axis in windows.order]
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


def _taper(size: int, overlap: int) -> NDArray[np.float64]:
    """Return the weights of a window's cells along an axis: a squared sine at both ends."""
    from_end = np.minimum(np.arange(size), np.arange(size)[::-1])
    share = np.minimum((from_end + 0.5) / max(overlap, 0.5), 1.0)  # without overlap 1
    weights: NDArray[np.float64] = np.sin(share * (math.pi / 2)) ** 2
    return weights
