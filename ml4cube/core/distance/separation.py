"""How far cells lie from the nearest box of train cells, in cells; pieces of a part."""

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
    """Distance of each point to the nearest box, each axis in its own unit.

    Parameters
    ----------
    points : ndarray of int, shape (points, dims)
        Positions of cells.
    low, high : ndarray of int, shape (boxes, dims)
        First and last cell of each box.
    scale : sequence of float
        Unit of each axis in cells; np.inf for an axis that does not count.
    period : sequence of int
        Length of each cyclic axis, 0 for others.

    Returns
    -------
    distance : ndarray of float, shape (points,)
        Euclidean distance in these units; np.inf without boxes.
    steps : ndarray of int, shape (points, dims)
        Cells along each axis to the nearest box; -1 without boxes.

    Examples
    --------
    >>> d, steps = nearest_box(np.array([[5]]), np.array([[0]]), np.array([[2]]), [1.5], [0])
    >>> d.tolist(), steps.tolist()
    ([2.0], [[3]])
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
    """How many cells the run is long in which each box lies, along each axis.

    Parameters
    ----------
    part : ndarray of bool
        Boxes that belong to the part.
    widths : sequence of ndarray of int
        Cells of the boxes along each axis.

    Returns
    -------
    list of ndarray of int
        For each axis, the length of the run of boxes of the part; 0 outside of it.
    """
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


def pieces(part: Bools, sizes: NDArray[np.float64]) -> float:
    """Number of separate pieces of a part, small ones counting less.

    Parameters
    ----------
    part : ndarray of bool
        Boxes that belong to the part; those that share a side are one piece.
    sizes : ndarray of float
        Cells of each box.

    Returns
    -------
    float
        One over the sum of squares of the pieces' shares (inverse Simpson index): n for n equal
        pieces, about 1 for a large piece and crumbs.

    Examples
    --------
    >>> pieces(np.array([True, False, True, True]), np.array([2.0, 1, 1, 1]))
    2.0
    """
    number = np.where(part, np.arange(1, part.size + 1).reshape(part.shape), 0)
    for _ in range(4 * sum(part.shape)):
        before = number.copy()
        for axis in range(part.ndim):
            line = np.moveaxis(number, axis, 0)
            for first, second in ((line[1:], line[:-1]), (line[:-1], line[1:])):
                both = (first > 0) & (second > 0)
                np.copyto(first, np.maximum(first, second), where=both)
        if (number == before).all():
            break
    volume = np.bincount(number[part].ravel(), weights=sizes[part].ravel())
    shares = volume[volume > 0] / volume.sum() if volume.size else volume
    return float(1 / (shares**2).sum()) if shares.size else 0.0


def nearest_on_axis(points: Floats, train: Floats) -> Ints:
    """Which train position is the nearest along one axis.

    Parameters
    ----------
    points, train : ndarray of float
        Positions; at least one of train.

    Returns
    -------
    ndarray of int
        For each point, an index of `train`.
    """
    order = np.argsort(train, kind="stable")
    after = np.searchsorted(train[order], points).clip(0, train.size - 1)
    before = (after - 1).clip(0)
    is_before = np.abs(train[order][before] - points) <= np.abs(train[order][after] - points)
    return np.asarray(order[np.where(is_before, before, after)])


def unit_vectors(lat: Floats, lon: Floats) -> Floats:
    """Points of the sphere in three dimensions, so that a tree of points can find neighbours.

    Parameters
    ----------
    lat, lon : ndarray of float
        Degrees, of any wrapping.

    Returns
    -------
    ndarray of float, shape (points, 3)
        Unit vectors.
    """
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)


def kilometres(chord: Floats, radius_km: float) -> Floats:
    """Great-circle distance of points whose unit vectors are `chord` apart.

    Parameters
    ----------
    chord : ndarray of float
        Straight distances, 0 to 2.
    radius_km : float
        Radius of the sphere.

    Returns
    -------
    ndarray of float
        Distances in kilometres.
    """
    return np.asarray(2 * radius_km * np.arcsin(np.clip(chord / 2, 0, 1)))
