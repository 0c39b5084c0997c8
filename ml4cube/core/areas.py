"""Areas of the cells of a grid, up to a factor that is the same for all of them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.angles import MOST_LAT
from ml4cube.core.distance.separation import unit_vectors
from ml4cube.core.errors import InvalidValueError

Floats = NDArray[np.float64]

# Larger angles are fill values, as of land.
_MOST_ANGLE = 1e4
# Rounds in which missing centres are extrapolated from neighbours, and the rows beyond a block that
# these depend on.
_ROUNDS, _HALO = 2, 6
_BLOCK_CELLS = 2**18
# Widths that differ by less are equal up to the rounding of coordinates.
_ROUNDING = 2e-3
# Areas by the digest of coordinates: the variables of a cube share a few grids, and are read one by
# one.
_recent: dict[tuple[tuple[int, ...], bytes], Floats] = {}
_MOST_RECENT = 3


class UnknownAreaError(InvalidValueError):
    """The areas of cells cannot be computed from their coordinates."""


def grid_areas(
    latitudes: Floats, longitudes: Floats | None, name: str, bounds: Floats | None = None
) -> Floats:
    """Return the areas of the cells of a grid, from degrees of each row or of each cell."""
    if latitudes.ndim == 1:
        return band_areas(latitudes, name, bounds)
    if longitudes is None or longitudes.shape != latitudes.shape or latitudes.ndim != 2:
        raise UnknownAreaError(
            f"{name} need longitudes along the same two dims; add them, or give weights"
        )
    latitudes = without_fill_values(latitudes, MOST_LAT, name)
    longitudes = without_fill_values(longitudes, None, "")
    for axis in (0, 1):
        # the rows and columns of a regular grid, repeated, which may touch the poles
        rows, columns = latitudes.take([0], axis), longitudes.take([0], 1 - axis)
        is_regular = (latitudes == rows).all() and (longitudes == columns).all()
        if is_regular and rows.size > 1:
            heights = band_areas(rows.ravel(), name).reshape(rows.shape)
            widths = cell_widths(columns.ravel(), 360.0)
            return heights * (
                np.ones(columns.shape) if widths is None else widths.reshape(columns.shape)
            )
    is_shared = _is_shared(latitudes, longitudes)
    return quadrilateral_areas(
        np.where(is_shared, np.nan, latitudes), np.where(is_shared, np.nan, longitudes)
    )


def _is_shared(latitudes: Floats, longitudes: Floats) -> NDArray[np.bool_]:
    """Return where a position is that of the next cell, as 0, 0 where a model ran no land."""
    is_shared = np.zeros(latitudes.shape, bool)
    for axis in (0, 1):
        rows = np.moveaxis(np.stack([latitudes, longitudes]), axis + 1, 1)
        flags = np.moveaxis(is_shared, axis, 0)
        is_same = (rows[:, 1:] == rows[:, :-1]).all(0)
        flags[1:] |= is_same
        flags[:-1] |= is_same
    return is_shared


def band_areas(degrees: Floats, name: str, bounds: Floats | None = None) -> Floats:
    """Return the areas of latitude bands: sin(north edge) - sin(south edge)."""
    # The edges of a row are its bounds, or else halfway to the next rows, as far beyond the last
    # ones, and never beyond a pole. Rows may have any order and spacing; rows at one latitude share
    # a band.
    check_latitudes(degrees, name)
    degrees = degrees.clip(-90.0, 90.0)
    if bounds is not None:
        edges = _row_edges(degrees, bounds, name)
        return np.abs(np.diff(np.sin(np.deg2rad(edges)), axis=-1))[:, 0]
    rows, row_of_cell, cells_in_row = np.unique(degrees, return_inverse=True, return_counts=True)
    if len(rows) == 1:
        raise UnknownAreaError(
            f"{name} are all {rows[0]:g}, so the height of a row is unknown; add bounds, or use "
            "no weights"
        )
    edges = _halfway(rows).clip(-90.0, 90.0)
    areas: Floats = np.diff(np.sin(np.deg2rad(edges))) / cells_in_row
    return areas[row_of_cell]


def check_latitudes(degrees: Floats, name: str) -> None:
    """Refuse latitudes that are missing or beyond a pole."""
    if not (np.abs(degrees) <= MOST_LAT).all():
        raise InvalidValueError(
            f"{name} must be finite, from -90 to 90 degrees, got {degrees.min():g} to "
            f"{degrees.max():g}; correct them, or give weights of your own or none"
        )


def _row_edges(rows: Floats, bounds: Floats, name: str) -> Floats:
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


def _halfway(centres: Floats) -> Floats:
    """Return edges halfway between two or more increasing centres, and as far beyond the ends."""
    between = (centres[1:] + centres[:-1]) / 2
    ends = 2 * centres[[0, -1]] - between[[0, -1]]
    return np.concatenate([ends[:1], between, ends[1:]])


def cell_widths(centres: Floats, period: float | None = None) -> Floats | None:
    """Return the widths of cells along an axis that may be a circle; None if they are equal."""
    if not np.isfinite(centres).all():
        raise UnknownAreaError("the longitudes must be finite")
    positions = centres
    if period is not None:
        positions = np.mod(np.mod(centres, period).round(9), period)
    places, place_of_cell, cells_at = np.unique(positions, return_inverse=True, return_counts=True)
    if len(places) == 1:
        return None
    if period is not None:
        # the circle is cut in its largest gap; without one the grid goes around it
        steps = np.diff(places, append=places[0] + period)
        first = int(steps.argmax()) + 1
        order = np.roll(np.arange(len(places)), -first)
        around = places[order] + np.where(order < first, period, 0.0)
        if steps.max() <= 1.5 * np.median(steps):
            around = np.concatenate([around[-1:] - period, around, around[:1] + period])
            widths_in_order = np.diff((around[1:] + around[:-1]) / 2)
        else:
            widths_in_order = np.diff(_halfway(around))
        widths = np.empty_like(widths_in_order)
        widths[order] = widths_in_order
    else:
        widths = np.diff(_halfway(places))
    widths = (widths / cells_at)[place_of_cell]
    if np.ptp(widths) <= _ROUNDING * widths.max():
        return None
    return widths


def bounded_widths(bounds: Floats, period: float | None = None) -> Floats | None:
    """Return the widths of cells between their bounds; None if they are equal."""
    widths = np.abs(bounds[:, 1] - bounds[:, 0])
    if period is not None:
        is_across = (widths > period / 2) & (widths < period * (1 - 1e-9))
        widths = np.where(is_across, period - widths, widths)
    if not (np.isfinite(widths) & (widths > 0)).all():
        raise InvalidValueError("bounds of longitudes must be finite, and have a width")
    if np.ptp(widths) <= _ROUNDING * widths.max():
        return None
    return widths


def polygon_areas(latitudes: Floats, longitudes: Floats) -> Floats:
    """Return the areas of polygons on the unit sphere, whose vertices lie along the last axis."""
    return _polygon_areas(unit_vectors(latitudes, longitudes))


def quadrilateral_areas(latitudes: Floats, longitudes: Floats) -> Floats:
    """Return the areas around the centres of a grid (rows, columns); NaN where a centre is missing.

    A corner is the mean of the four centres around it; those beyond an edge, and missing ones, are
    extrapolated along great circles. A cell without enough neighbours has the mean area.
    """
    digest = blake2b(latitudes.tobytes())
    digest.update(longitudes.tobytes())
    key = latitudes.shape, digest.digest()
    areas = _recent.get(key)
    if areas is None:
        areas = _areas_between(latitudes, longitudes)
        if len(_recent) == _MOST_RECENT:
            _recent.clear()
        _recent[key] = areas
    return areas


def _areas_between(latitudes: Floats, longitudes: Floats) -> Floats:
    rows, columns = latitudes.shape
    step = max(1, _BLOCK_CELLS // max(columns, 1))
    areas = np.empty(latitudes.shape)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first = max(start - _HALO, 0)
        part = np.s_[first : stop + _HALO]
        centres = unit_vectors(latitudes[part], longitudes[part])
        areas[start:stop] = _areas_around(centres)[start - first : stop - first]
    has_centre = np.isfinite(latitudes + longitudes)
    is_computed = np.isfinite(areas) & (areas > 0)
    if not is_computed.any():
        raise UnknownAreaError("fewer than two neighbouring cells along each dim have a position")
    areas[~is_computed] = areas[is_computed].mean()
    areas[~has_centre] = np.nan
    areas.flags.writeable = False
    return areas


def without_fill_values(angles: Floats, most: float | None, name: str) -> Floats:
    """Return angles with NaN for fill values; raise beyond the `most` degrees that may be."""
    is_fill = ~(np.abs(angles) < _MOST_ANGLE)
    angles = np.where(is_fill, np.nan, angles)
    if most is not None:
        valid = angles[~is_fill]
        check_latitudes(valid, name)
        angles = angles.clip(-90.0, 90.0)
    return angles


def _areas_around(centres: Floats) -> Floats:
    """Return the areas of the quadrilaterals around centres (rows, columns, 3)."""
    padded = np.full((centres.shape[0] + 2, centres.shape[1] + 2, 3), np.nan)
    padded[1:-1, 1:-1] = centres
    for _ in range(_ROUNDS):
        padded = _with_extrapolated(padded)
    corners = padded[:-1, :-1] + padded[1:, :-1] + padded[:-1, 1:] + padded[1:, 1:]
    corners /= np.linalg.norm(corners, axis=-1, keepdims=True)
    vertices = [corners[:-1, :-1], corners[:-1, 1:], corners[1:, 1:], corners[1:, :-1]]
    return _polygon_areas(np.stack(vertices, axis=-2))


def _with_extrapolated(centres: Floats) -> Floats:
    """Fill missing centres with the mean of the mirror images of neighbours in their neighbours."""
    total, count = np.zeros_like(centres), np.zeros((*centres.shape[:2], 1))
    for axis, is_reversed in ((0, False), (0, True), (1, False), (1, True)):
        step = 1
        if is_reversed:
            step = -1
        line = np.moveaxis(centres, axis, 0)[::step]
        far, near = line[:-2], line[1:-1]
        image = 2 * (far * near).sum(-1, keepdims=True) * near - far
        is_known = np.isfinite(image).all(-1, keepdims=True)
        np.moveaxis(total, axis, 0)[::step][2:] += np.where(is_known, image, 0.0)
        np.moveaxis(count, axis, 0)[::step][2:] += is_known
    with np.errstate(invalid="ignore", divide="ignore"):
        images = total / np.linalg.norm(total, axis=-1, keepdims=True)
    is_missing = ~np.isfinite(centres).all(-1, keepdims=True)
    return np.where(is_missing & (count > 0), images, centres)


def _polygon_areas(vertices: Floats) -> Floats:
    """Return the areas of spherical polygons (..., vertices, 3), from a fan of triangles.

    The area of a triangle is that of Van Oosterom and Strackee (1983), The solid angle of a plane
    triangle, IEEE Transactions on Biomedical Engineering 30; one clockwise is negative.
    """
    a = vertices[..., 0, :]
    total = np.zeros(vertices.shape[:-2])
    for k in range(1, vertices.shape[-2] - 1):
        b, c = vertices[..., k, :], vertices[..., k + 1, :]
        # edges, not vertices, in the product, or small cells lose digits
        volume = (a * np.cross(b - a, c - a)).sum(-1)
        scale = 1 + (a * b).sum(-1) + (b * c).sum(-1) + (c * a).sum(-1)
        total += 2 * np.arctan2(volume, scale)
    return np.abs(total)
