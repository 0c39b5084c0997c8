"""The slowest, most obvious version of what the splits compute, to compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle import cut, tiles

Near = Callable[[int, int], bool]


def great_circle_km(lat1: float, lon1: float, lat2: float, lon2: float) -> float:
    """Distance on a sphere of 6371 km, from the angle between two vectors."""

    def vector(lat: float, lon: float) -> NDArray[np.float64]:
        a, b = math.radians(lat), math.radians(lon)
        return np.array([math.cos(a) * math.cos(b), math.cos(a) * math.sin(b), math.sin(a)])

    u, v = vector(lat1, lon1), vector(lat2, lon2)
    return 6371.0 * math.atan2(float(np.linalg.norm(np.cross(u, v))), float(u @ v))


def near_in_cells(n: int, cells: int, cyclic: bool = False) -> Near:
    """Whether two positions are `cells` apart or less."""

    def near(i: int, j: int) -> bool:
        apart = abs(i - j)
        return (min(apart, n - apart) if cyclic else apart) <= cells

    return near


def buffered(
    labels: NDArray[np.uint8],
    near: Sequence[Near],
    near_pair: Callable[[tuple[int, ...], tuple[int, ...]], bool] | None = None,
) -> NDArray[np.uint8]:
    """Every train cell against every test and val cell."""
    result = labels.copy()
    cells = list(itertools.product(*map(range, labels.shape)))
    for cell in cells:
        if labels[cell] != 1:
            continue
        for other in cells:
            if labels[other] not in (0, 2):
                continue
            axes = all(f(i, j) for f, i, j in zip(near, cell, other, strict=True))
            if axes and (near_pair is None or near_pair(cell, other)):
                result[cell] = 255
                break
    return result


def blocks_of(labels: NDArray[Any], dims: Sequence[str], size: Mapping[str, int]) -> list[Any]:
    """Labels of each block, as one flat array per block."""
    block = [size.get(dim, n) for dim, n in zip(dims, labels.shape, strict=True)]
    return [labels[cut(box)].ravel() for box in tiles(labels.shape, block, block, ragged=True)]


def touching(labels: NDArray[np.uint8], around: Sequence[bool]) -> float:
    """Share of the test cells with a train cell among the cells around them, corners too."""
    near = labels == 1
    for axis, wraps in enumerate(around):
        there = np.moveaxis(near, axis, 0)
        grown = there.copy()
        grown[1:] |= there[:-1]
        grown[:-1] |= there[1:]
        if wraps:
            grown[0] |= there[-1]
            grown[-1] |= there[0]
        near = np.moveaxis(grown, 0, axis)
    return float(near[labels == 0].mean())
