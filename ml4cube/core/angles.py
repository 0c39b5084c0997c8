"""Latitudes and longitudes in degrees."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rounding may put a pole slightly beyond 90 degrees.
MOST_LAT = 90.001

_RADIANS = ("rad", "radian", "radians")


def in_degrees(values: ArrayLike, units: object) -> NDArray[np.float64]:
    """Convert angles to degrees if their units are radians."""
    angles = np.asarray(values, dtype=np.float64)
    if str(units).strip().lower() in _RADIANS:
        return np.rad2deg(angles)
    return angles
