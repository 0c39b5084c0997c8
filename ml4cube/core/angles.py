"""Latitudes and longitudes in degrees, whatever unit they were written in."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rounding may put a pole slightly beyond 90 degrees.
MOST_LAT = 90.001

_RADIANS = ("rad", "radian", "radians")


def in_degrees(values: ArrayLike, units: object) -> NDArray[np.float64]:
    """Turn angles into degrees, where their units say that they are radians.

    Parameters
    ----------
    values : array_like of float or int
        Angles.
    units : object
        As the attribute ``units`` of CF conventions says; anything but radians is taken for
        degrees.

    Returns
    -------
    ndarray of float
        Degrees.

    Examples
    --------
    >>> in_degrees([0.0, np.pi / 2], "radian").tolist(), in_degrees([90], "degrees_north").tolist()
    ([0.0, 90.0], [90.0])
    """
    angles = np.asarray(values, dtype=np.float64)
    return np.rad2deg(angles) if str(units).strip().lower() in _RADIANS else angles
