"""Find values that were averaged over time, or interpolated from a coarser grid."""

from __future__ import annotations

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.split_plan import HELD_OUT, TRAIN
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.leakage.coarse_fields import Floats, least_apart

# Windows of running means that are looked for, in steps, and how often one must fit in the record.
_WINDOWS = range(4, 25)
_FEWEST_WINDOWS = 8
# A running mean leaves almost no variance at the frequencies that its window removes.
_LARGEST_RATIO = 0.3
_MEAN_RATIO = 0.15
# Most steps, and lines of cells in each, in which second differences are examined.
_STEPS = 8
_LINES = 64
# Second differences below this fraction of the first are 0.
_STRAIGHT = 1e-4
_MOSTLY = 0.5
# Where lines bend at points, few second differences are between 0 and this many times the limit.
_BENDS = 10.0
_MOST_BETWEEN = 0.1


def running_mean_window(values: Floats) -> int | None:
    """Return the window of a running mean along time, or None; `values` are (steps, cells)."""
    complete = values[:, np.isfinite(values).all(axis=0)]
    changes = np.diff(complete, axis=0)
    changes = changes[:, changes.any(axis=0)]
    if changes.size == 0:
        return None
    # The longest window that fits all of its own frequencies: those of its divisors fit as well.
    for window in reversed(_WINDOWS):
        if len(changes) >= _FEWEST_WINDOWS * window and _has_nulls(changes, window):
            return window
    return None


def _has_nulls(changes: Floats, window: int) -> bool:
    """Return whether the spectrum is almost 0 at all multiples of 1 / window, and not beside."""
    windows = len(changes) // window
    n = windows * window
    some = changes[-n:]
    taper = np.hanning(n)[:, None]
    power = np.abs(np.fft.rfft((some - some.mean(axis=0)) * taper, axis=0)) ** 2
    total = power.sum(axis=0)
    if not total.all():
        return False
    power = (power / total).mean(axis=1)
    # Three frequencies on either side, because harmonics of a cycle may lie on one of them
    offsets = np.outer([-1, 1], windows * np.arange(1, 4) // 4).ravel()
    nulls = np.arange(1, window // 2 + 1) * windows
    nulls = nulls[nulls + offsets.max() < power.size]
    beside = power[nulls[:, None] + offsets].min(axis=1)
    ratios = power[nulls] / np.maximum(beside, np.finfo(float).tiny)
    return bool(ratios.max() < _LARGEST_RATIO and ratios.mean() < _MEAN_RATIO)


def coarse_spacing(view: CubeView, layout: Layout, name: str) -> tuple[str, int, int] | None:
    """Return a dim, and the cells of the coarser grid along it from which a field was interpolated.

    Values between the points of that grid lie on straight lines, so most second differences are 0.
    Last, the fewest cells from a train cell to a held-out cell along the dim.
    """
    array = view.ds[name]
    if array.dtype.kind != "f" or set(array.dims) != set(view.dims):
        return None
    cut = [d for d, starts in layout.run_starts.items() if starts.size > 1]
    for dim in cut:
        apart = _cells_apart(layout, dim)
        spacing = _spacing(_sample_lines(array, dim))
        if apart is not None and spacing is not None and apart < spacing:
            return dim, spacing, apart
    return None


def _sample_lines(array: xr.DataArray, dim: str) -> Floats:
    """Return some whole lines along a dim: (lines, cells)."""
    rng = np.random.default_rng(0)
    others = [str(d) for d in array.dims if d != dim]
    picked = {}
    room = _STEPS * _LINES
    for other in sorted(others, key=lambda d: array.sizes[d]):
        keep = min(array.sizes[other], max(round(room ** (1 / len(others))), 1))
        picked[other] = np.sort(rng.choice(array.sizes[other], keep, replace=False))
    lines = array.isel(picked).transpose(..., dim).values.reshape(-1, array.sizes[dim])
    return np.asarray(lines)


def _spacing(lines: NDArray[np.floating]) -> int | None:
    """Return the spacing of the points between which the lines are straight, or None."""
    first, second = np.diff(lines, axis=1), np.diff(lines, n=2, axis=1)
    is_finite = np.isfinite(second)
    if not is_finite.any():
        return None
    usual = float(np.median(np.abs(first[np.isfinite(first)])))
    rounding = 4 * float(np.finfo(lines.dtype).eps) * float(np.nanmax(np.abs(lines)))
    if usual * 0.1 < rounding:
        return None  # too flat, or too coarsely rounded, to tell
    limit, bends = max(_STRAIGHT * usual, rounding), np.abs(second[is_finite])
    is_straight = bends < limit
    share = float(is_straight.mean())
    if share <= _MOSTLY or share > 0.99:
        return None  # a coordinate is straight all along
    if (bends[~is_straight] < _BENDS * limit).mean() > _MOST_BETWEEN:
        return None  # a smooth field, whose second differences are as small as its rounding
    return round(1 / (1 - share))


def _cells_apart(layout: Layout, dim: str) -> int | None:
    """Return the fewest steps along a dim from a train cell to a held-out cell of one line."""
    label = layout.label.transpose(..., dim)
    starts = {d: layout.run_starts[d] for d in map(str, label.dims[:-1])}
    rng = np.random.default_rng(0)
    for other, cells in starts.items():
        if cells.size > _LINES:
            starts[other] = rng.choice(cells, _LINES)
    codes = label.isel(starts).values.reshape(-1, label.sizes[dim])
    parts = [(line == TRAIN, np.isin(line, HELD_OUT)) for line in codes]
    apart = [least_apart(*of_line) for of_line in parts if all(map(np.any, of_line))]
    return min(apart, default=None)
