"""Distances of cells from the nearest box of train cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ml4cube.core.distance.reach import EARTH_RADIUS_KM, Bools, Floats, Ints

_PAIRS_AT_ONCE = 1 << 21


def nearest_box(
    points: Ints, low: Ints, high: Ints, unit: Sequence[float], period: Sequence[int]
) -> tuple[Floats, Ints]:
    """Return the distance of each point to the nearest box, and the cells along each axis.

    `points` (points, axes) are cells, `low` and `high` (boxes, axes) the first and last cell of
    each box. `unit` is, for each axis, the number of cells that count as a distance of 1 (inf: the
    axis does not count), `period` the length of each cyclic axis, 0 for others. Without boxes
    distances are inf and cells -1.
    """
    distance = np.full(len(points), np.inf)
    cells_apart = np.full(points.shape, -1, dtype=np.int64)
    if not len(low):
        return distance, cells_apart
    at_once = max(_PAIRS_AT_ONCE // len(low), 1)
    for start in range(0, len(points), at_once):
        some = slice(start, start + at_once)
        by_axis = [
            _cells_apart(points[some, axis], low[:, axis], high[:, axis], period[axis])
            for axis in range(points.shape[1])
        ]
        squares = np.zeros(by_axis[0].shape)
        for cells, cells_per_unit in zip(by_axis, unit, strict=True):
            squares += (cells / cells_per_unit) ** 2
        nearest = squares.argmin(axis=1)
        rows = np.arange(len(nearest))
        distance[some] = np.sqrt(squares[rows, nearest])
        cells_apart[some] = np.stack([of_axis[rows, nearest] for of_axis in by_axis], axis=1)
    return distance, cells_apart


def _cells_apart(point: Ints, low: Ints, high: Ints, period: int) -> Ints:
    """Return the cells from each point to each box along one axis, 0 inside."""
    below, above = low[None, :] - point[:, None], point[:, None] - high[None, :]
    apart = np.maximum(below, above)
    if period:
        # Also to the copies of the box one period up and down.
        apart = np.minimum(apart, np.maximum(below + period, above - period))
        apart = np.minimum(apart, np.maximum(below - period, above + period))
    return np.asarray(np.maximum(apart, 0))


def run_lengths(part: Bools, widths: Sequence[Ints], period: Sequence[int]) -> list[Ints]:
    """Return, along each axis, the length in cells of the run of boxes of a part at each box.

    `part` is True for the boxes of the part; others have length 0. `widths` are the cells of the
    boxes along each axis, `period` is as for `nearest_box`.
    """
    lengths = []
    for axis, width in enumerate(widths):
        others = [other for other in range(part.ndim) if other != axis]
        stop = np.expand_dims(np.cumsum(width), others)
        start = stop - np.expand_dims(width, others)
        # A run ends at the nearest boxes of other parts, before and after it, or with the axis.
        run_start = np.maximum.accumulate(np.where(part, 0, stop), axis)
        backwards = np.flip(np.where(part, width.sum(), start), axis)
        run_stop = np.flip(np.minimum.accumulate(backwards, axis), axis)
        length = np.where(part, run_stop - run_start, 0)
        # Runs at both ends of a whole cyclic axis are one; the last cells may repeat the first.
        if period[axis] and (repeated := width.sum() - period[axis]) >= 0:
            first, last = length.take([0], axis), length.take([-1], axis)
            at_end = part & ((run_start == 0) | (run_stop == width.sum())) & (first * last > 0)
            length = np.where(at_end, np.minimum(first + last - repeated, period[axis]), length)
        lengths.append(length)
    return lengths


def nearest_on_axis(points: Floats | Ints, train: Floats | Ints) -> Ints:
    """Return for each point the index of the nearest train position along one axis."""
    order = np.argsort(train, kind="stable")
    rising = train[order]
    after = np.searchsorted(rising, points).clip(0, train.size - 1)
    before = (after - 1).clip(0)
    is_before = np.abs(rising[before] - points) <= np.abs(rising[after] - points)
    return np.asarray(order[np.where(is_before, before, after)])


def unit_vectors(lat: Floats, lon: Floats) -> Floats:
    """Return unit vectors (points, 3) of positions in degrees, for neighbour searches in a tree."""
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)


def kilometres(chord: Floats) -> Floats:
    """Return the great-circle distance of points whose unit vectors are `chord` apart."""
    return np.asarray(2 * EARTH_RADIUS_KM * np.arcsin(np.clip(chord / 2, 0, 1)))
