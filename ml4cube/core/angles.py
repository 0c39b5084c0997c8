"""Latitudes and longitudes: what is one, in degrees whatever unit it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError

# Rounding may put a pole slightly beyond 90 degrees.
MOST_LAT = 90.001

_RADIANS = ("rad", "radian", "radians")

# By the standard name of CF conventions.
_NAMES = {
    "latitude": ("lat", "latitude", "nav_lat"),
    "longitude": ("lon", "long", "longitude", "nav_lon"),
}
_ROTATED = {"latitude": "rlat", "longitude": "rlon"}
_UNITS = {
    "latitude": ("degrees_north", "degree_north", "degrees_n", "degree_n", "degreesn", "degreen"),
    "longitude": ("degrees_east", "degree_east", "degrees_e", "degree_e", "degreese", "degreee"),
}


def is_latitude(name: object, attrs: Mapping[Any, Any], *, rotated: bool = False) -> bool:
    """Tell whether a coordinate is a latitude, by its name and attributes.

    Parameters
    ----------
    name : object
        Its name.
    attrs : mapping
        Its attributes, of which ``standard_name`` and ``units`` of CF conventions count.
    rotated : bool
        Whether that of a rotated grid (``rlat``, ``grid_latitude``) is one. Areas and distances
        are right in it, as a rotation of the sphere changes neither; places on Earth are not.

    Returns
    -------
    bool
        Whether any of these says so.

    Examples
    --------
    >>> is_latitude("y", {"units": "degrees_north"}), is_latitude("nav_lat", {})
    (True, True)
    >>> is_latitude("rlat", {}), is_latitude("rlat", {}, rotated=True)
    (False, True)
    """
    return _is_angle("latitude", name, attrs, rotated)


def is_longitude(name: object, attrs: Mapping[Any, Any], *, rotated: bool = False) -> bool:
    """Tell whether a coordinate is a longitude, by its name and attributes.

    Parameters
    ----------
    name : object
        Its name.
    attrs : mapping
        Its attributes.
    rotated : bool
        Whether that of a rotated grid (``rlon``, ``grid_longitude``) is one.

    Returns
    -------
    bool
        As of `is_latitude`.
    """
    return _is_angle("longitude", name, attrs, rotated)


def _is_angle(kind: str, name: object, attrs: Mapping[Any, Any], rotated: bool) -> bool:
    called = str(name).lower()
    standard, units = (
        str(attrs.get(key, "")).strip().lower() for key in ("standard_name", "units")
    )
    if standard == f"grid_{kind}" or (called == _ROTATED[kind] and standard != kind):
        return rotated  # whatever the units: files write degrees_north here too
    return standard == kind or called in _NAMES[kind] or units in _UNITS[kind]


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
