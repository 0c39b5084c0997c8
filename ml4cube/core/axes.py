"""Coordinates along a dim: which are dates, and whether two are equal up to rounding."""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
from numpy.typing import NDArray


def rounding_of(axis: NDArray[Any]) -> float:
    """Return the rounding error of coordinates stored in, or computed in, float32."""
    values = axis.astype(np.float64)
    known = values[np.isfinite(values)]
    cell = np.diff(np.unique(known)).min(initial=np.inf)
    # sums of steps in float32 have errors near zero too, relative to the largest value
    most = np.abs(known).max(initial=1.0)
    rounded_off = min(most * np.finfo(np.float32).eps / 2, 0.4 * cell)
    return float(min(most / 1e6, max(0.1 * cell, rounded_off)))


def same_coordinate(given: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Return True if two coordinates along a dim are equal up to rounding, in order."""
    if given.shape != wanted.shape:
        return False
    if given.dtype.kind == wanted.dtype.kind == "f":
        same = np.isclose(given, wanted, rtol=0.0, atol=rounding_of(wanted))
    else:
        try:
            same = given == wanted
        except TypeError:  # dates of calendars that cannot be compared
            return False
    missing = (given != given) & (wanted != wanted)  # NaN, NaT, also among strings
    return bool((same | missing).all())


def is_time(coord: Any) -> bool:
    """Return True if a coordinate holds dates (datetime64 or cftime)."""
    if coord.dtype.kind == "M":
        return True
    if coord.dtype != object or not coord.size:
        return False
    return isinstance(np.ravel(coord)[0], cftime.datetime)
