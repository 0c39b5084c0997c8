"""Distances of cells from the nearest box of train cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PAIRS_AT_ONCE = 1 << 21


def nearest_box(
    points: Ints, low: Ints, high: Ints, scale: Sequence[float], period: Sequence[int]
) -> tuple[Floats, Ints]:
    """Return the distance of each point to the nearest box, and the cells along each axis.

    `low` and `high` are the first and last cell of each box, `scale` is the unit of each axis in
    cells (inf: the axis does not count), `period` the length of each cyclic axis, 0 for others.
    Without boxes distances are inf and steps -1.
    """
    distance = np.full(len(points), np.inf)
    steps = np.full(points.shape, -1, dtype=np.int64)
    if not len(low):
        return distance, steps
    at_once = max(_PAIRS_AT_ONCE // len(low), 1)
    for start in range(0, len(points), at_once):
        part = slice(start, start + at_once)
        apart = [
            _apart(points[part, axis], low[:, axis], high[:, axis], period[axis])
            for axis in range(points.shape[1])
        ]
        squares = np.zeros(apart[0].shape)
        for along, unit in zip(apart, scale, strict=True):
            squares += (along / unit) ** 2
        nearest = squares.argmin(axis=1)
        rows = np.arange(len(nearest))
        distance[part] = np.sqrt(squares[rows, nearest])
        steps[part] = np.stack([along[rows, nearest] for along in apart], axis=1)
    return distance, steps


def _apart(point: Ints, low: Ints, high: Ints, period: int) -> Ints:
    below, above = low[None, :] - point[:, None], point[:, None] - high[None, :]
    apart = np.maximum(np.maximum(below, above), 0)
    if period:
        around = np.minimum(
            np.maximum(below + period, above - period), np.maximum(below - period, above + period)
        )
        apart = np.minimum(apart, np.maximum(around, 0))
    return np.asarray(apart)


def run_lengths(part: Bools, widths: Sequence[Ints]) -> list[Ints]:
    """Return the cells in each box's run of boxes of the part, along each axis; 0 outside."""
    lengths = []
    for axis, width in enumerate(widths):
        flags = np.moveaxis(part, axis, 0)
        total = np.zeros(flags.shape, dtype=np.int64)
        for order in (range(len(width)), range(len(width) - 1, -1, -1)):
            running = np.zeros(flags.shape[1:], dtype=np.int64)
            for i in order:
                running = np.where(flags[i], running + width[i], 0)
                total[i] += running
        total -= np.where(flags, width.reshape(-1, *(1,) * (flags.ndim - 1)), 0)
        lengths.append(np.moveaxis(total, 0, axis))
    return lengths


def nearest_on_axis(points: Floats, train: Floats) -> Ints:
    """Return for each point the index of the nearest train position along one axis."""
    order = np.argsort(train, kind="stable")
    after = np.searchsorted(train[order], points).clip(0, train.size - 1)
    before = (after - 1).clip(0)
    is_before = np.abs(train[order][before] - points) <= np.abs(train[order][after] - points)
    return np.asarray(order[np.where(is_before, before, after)])


def unit_vectors(lat: Floats, lon: Floats) -> Floats:
    """Return unit vectors (points, 3) of positions in degrees, for neighbour searches in a tree."""
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)


def kilometres(chord: Floats, radius_km: float) -> Floats:
    """Return the great-circle distance of points whose unit vectors are `chord` apart."""
    return np.asarray(2 * radius_km * np.arcsin(np.clip(chord / 2, 0, 1)))
