"""Latitudes and longitudes in degrees, whatever unit they were written in."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError

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


def cosines(latitudes: ArrayLike, units: object, called: str) -> NDArray[np.float64]:
    """Return the cosine of latitudes, to which areas of a regular grid's cells are proportional.

    Parameters
    ----------
    latitudes : array_like of float or int
        Of any shape.
    units : object
        As of `in_degrees`.
    called : str
        What they are called in messages.

    Returns
    -------
    ndarray of float
        From 0 to 1.

    Raises
    ------
    InvalidValueError
        If one is beyond a pole by more than rounding, or not finite.

    Examples
    --------
    >>> cosines([0.0, 90.0005], "degrees_north", "lat").tolist()
    [1.0, 0.0]
    """
    degrees = in_degrees(latitudes, units)
    if not (np.abs(degrees) <= MOST_LAT).all():
        raise InvalidValueError(
            f"{called} must be finite, from -90 to 90 degrees, found {degrees.min():g} to "
            f"{degrees.max():g}; mend them, or give weights of your own"
        )
    return np.cos(np.deg2rad(degrees)).clip(min=0.0)
