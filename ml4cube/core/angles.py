"""Latitudes and longitudes in degrees, and areas of cells."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError


class UnknownAreaError(InvalidValueError):
    """The areas of cells cannot be computed from their latitudes alone."""


# Rounding may put a pole slightly beyond 90 degrees.
MOST_LAT = 90.001

_RADIANS = ("rad", "radian", "radians")


def in_degrees(values: ArrayLike, units: object) -> NDArray[np.float64]:
    """Convert angles to degrees if their units are radians."""
    angles = np.asarray(values, dtype=np.float64)
    return np.rad2deg(angles) if str(units).strip().lower() in _RADIANS else angles


def cell_areas(
    latitudes: ArrayLike, units: object, name: str, bounds: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Return areas of cells, up to a factor that is the same for all cells."""
    # For one latitude per row, the area of its band: sin(north edge) - sin(south edge). The edges
    # of a row are its bounds, or else halfway to the next rows, as far beyond the last ones, and
    # never beyond a pole. Rows may have any order and spacing; rows at one latitude share a band.
    # For latitudes along two or more dims, the cosine.
    degrees = in_degrees(latitudes, units)
    if not (np.abs(degrees) <= MOST_LAT).all():
        raise InvalidValueError(
            f"{name} must be finite, from -90 to 90 degrees, got {degrees.min():g} to "
            f"{degrees.max():g}; correct them, or give weights of your own or none"
        )
    degrees = degrees.clip(-90.0, 90.0)
    if degrees.ndim != 1:
        return np.cos(np.deg2rad(degrees)).clip(min=0.0)
    if bounds is not None:
        edges = _row_edges(degrees, in_degrees(bounds, units), name)
        return np.abs(np.diff(np.sin(np.deg2rad(edges)), axis=-1))[:, 0]
    rows, row_of_cell, cells_in_row = np.unique(degrees, return_inverse=True, return_counts=True)
    if len(rows) == 1:
        raise UnknownAreaError(
            f"{name} are all {rows[0]:g}, so the height of a row is unknown; add bounds, or use "
            "no weights"
        )
    between = (rows[1:] + rows[:-1]) / 2
    outer = 2 * rows[[0, -1]] - between[[0, -1]] if len(rows) else rows
    edges = np.concatenate([outer[:1], between, outer[1:]]).clip(-90.0, 90.0)
    areas: NDArray[np.float64] = np.diff(np.sin(np.deg2rad(edges))) / cells_in_row
    return areas[row_of_cell]


def _row_edges(
    rows: NDArray[np.float64], bounds: NDArray[np.float64], name: str
) -> NDArray[np.float64]:
    """Return the bounds of rows, which may exceed a pole; raise if they belong to other rows."""
    fits = bounds.shape == (len(rows), 2)
    if fits:
        south, north = np.sort(bounds).T
        rounding = 1e-3  # of float32
        fits = bool(((south <= rows + rounding) & (rows <= north + rounding)).all())
    if not fits:
        raise InvalidValueError(
            f"{name} must each lie between their bounds; correct the bounds, or drop them"
        )
    return bounds.clip(-90.0, 90.0)
