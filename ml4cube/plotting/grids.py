"""`MapGrid`: where the cells of a map are, and in which aspect they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.plotting.style import label_of, name_of, units_of, with_units

# Beyond it the aspect of a map around a pole would have no limit.
_MOST_LATITUDE = 80.0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MapGrid:
    """Values of a map, the corners of its cells, and what its axes show."""

    values: NDArray[Any]
    # edges of columns and rows, or corners of cells
    x: NDArray[Any]
    y: NDArray[Any]
    # length of a unit along y over that along x; None: these have other units, such as dates
    aspect: float | None
    # labels of the axes; None: a longitude or latitude, whose ticks say so
    labels: tuple[str | None, str | None]

    @property
    def is_geographic(self) -> bool:
        """Whether x and y are longitude and latitude in degrees."""
        return self.labels == (None, None)

    @property
    def ratio(self) -> float:
        """Height of the map over its width."""
        if self.aspect is None:
            return 0.6
        height, width = (float(np.ptp(ends)) for ends in (self.y, self.x))
        return height * self.aspect / width

    @classmethod
    def of(cls, field: xr.DataArray) -> MapGrid:
        """Find the cells of a field of two dims, by its coordinates."""
        field = _upright(field.astype(np.float64))  # float16 overflows in matplotlib
        y, x = (_coordinate_of(field, dim) for dim in field.dims)
        if not (_side(x) and _side(y)) and (curved := _curvilinear(field)):
            return cls._curved(field, *curved)
        order = [_numbers_of(y), _numbers_of(x)]
        rows, columns = (np.argsort(values, kind="stable") for values in order)
        edges_y, edges_x = (_edges(np.sort(values)) for values in order)
        if _is_angle(y):
            edges_y = edges_y.clip(-90, 90)
        aspect = None
        if _is_angle(x) and _is_angle(y):
            aspect = _aspect_at(edges_y)
        elif x.dtype.kind in "fiu" and y.dtype.kind in "fiu" and _unit(x) == _unit(y):
            aspect = 1.0  # both are lengths, or both count cells
        (edges_x, label_x), (edges_y, label_y) = (
            _with_label(coord, edges) for coord, edges in ((x, edges_x), (y, edges_y))
        )
        return cls(
            field.values[np.ix_(rows, columns)], edges_x, edges_y, aspect, (label_x, label_y)
        )

    @classmethod
    def _curved(cls, field: xr.DataArray, lat: xr.DataArray, lon: xr.DataArray) -> MapGrid:
        if min(field.shape) < 2:
            raise InvalidValueError(
                f"a map along 2-D latitudes must have two cells along each dim, got {field.sizes}"
            )
        y, x = (
            _corners(in_degrees(coord.transpose(*field.dims).values, coord.attrs.get("units")))
            for coord in (lat, lon)
        )
        y, x = y.clip(-90, 90), _joined(x % 360)
        return cls(field.values, x, y, _aspect_at(y), (None, None))

    def is_whole(self) -> NDArray[np.bool_]:
        """Return which cells of a curvilinear grid do not cross the ends of the map."""
        ends = np.stack([self.x[:-1, :-1], self.x[1:, :-1], self.x[:-1, 1:], self.x[1:, 1:]])
        return np.asarray(np.ptp(ends, axis=0) < 180)


def _upright(field: xr.DataArray) -> xr.DataArray:
    """Return a field with the dim of its x coordinate last."""
    sides = tuple(_side(_coordinate_of(field, dim)) for dim in field.dims)
    if sides in (("x", "y"), ("x", None), (None, "y")):
        return field.transpose()
    return field


def _coordinate_of(field: xr.DataArray, dim: Any) -> xr.DataArray:
    """Return the coordinate along a dim: an angle or a projection's, else its own, else positions.

    Positions have no name.
    """
    on_dim: list[xr.DataArray] = [coord for coord in field.coords.values() if coord.dims == (dim,)]
    drawable = [c for c in on_dim if c.dtype.kind in "fiuM" and not bool(c.isnull().any())]
    located = [coord for coord in drawable if _side(coord)]
    own = [coord for coord in drawable if coord.name == dim]
    return (located + own or [xr.DataArray(np.arange(field.sizes[dim]), dims=dim)])[0]


def _numbers_of(coord: xr.DataArray) -> NDArray[Any]:
    """Return a coordinate as numbers or dates, angles in degrees, longitudes without a jump."""
    if not _is_angle(coord):
        return coord.values
    degrees = in_degrees(coord.values, coord.attrs.get("units"))
    if _side(coord) == "x":
        return _joined(degrees)
    return degrees


def _side(coord: xr.DataArray) -> str | None:
    """Return "x" or "y" for a coordinate of the horizontal plane."""
    standard_name = coord.attrs.get("standard_name", "")
    for side, is_side in (("x", is_longitude), ("y", is_latitude)):
        is_named = coord.name is not None and is_side(coord.name, coord.attrs, rotated=True)
        if is_named or standard_name == f"projection_{side}_coordinate":
            return side
    return None


def _is_angle(coord: xr.DataArray) -> bool:
    """Return whether a coordinate is a latitude or longitude, also of a rotated grid."""
    of_grid: dict[str, Any] = {"name": coord.name, "attrs": coord.attrs, "rotated": True}
    return coord.name is not None and (is_latitude(**of_grid) or is_longitude(**of_grid))


def _unit(coord: xr.DataArray) -> str:
    units = str(coord.attrs.get("units", ""))
    if units in ("meter", "meters", "metre", "metres"):
        return "m"
    return units


def _curvilinear(field: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray] | None:
    """Return the 2-D latitudes and longitudes of a field without gaps, or None."""
    lat = lon = None
    for coord in reversed(list(field.coords.values())):
        if set(coord.dims) != set(field.dims) or coord.dtype.kind != "f":
            continue
        if not bool(np.isfinite(coord).all()):
            continue
        if is_latitude(coord.name, coord.attrs):
            lat = coord
        elif is_longitude(coord.name, coord.attrs):
            lon = coord
    if lat is None or lon is None:
        return None
    return lat, lon


def _joined(longitudes: NDArray[Any]) -> NDArray[Any]:
    """Return longitudes that do not jump from 360 to 0, or from 180 to -180, inside a region."""
    ordered = np.unique(longitudes)
    if len(ordered) < 2 or np.ptp(ordered) >= 360:
        return longitudes
    gaps = np.diff(ordered)
    widest = int(np.argmax(gaps))
    across = ordered[0] + 360 - ordered[-1]
    if gaps[widest] <= across * (1 + 1e-6):
        return longitudes
    return np.where(longitudes > ordered[widest], longitudes - 360, longitudes)


def _edges(centers: NDArray[Any]) -> NDArray[Any]:
    """Return the edges of cells, halfway between centers; a single cell is 1 or a day wide."""
    if len(centers) > 1:
        half = np.diff(centers) / 2
    elif centers.dtype.kind == "M":
        half = np.array([np.timedelta64(12, "h")])
    else:
        half = np.array([0.5])
    return np.concatenate([centers[:1] - half[:1], centers[:-1] + half, centers[-1:] + half[-1:]])


def _corners(centers: Floats) -> Floats:
    """Return the corners of cells, the means of four centers; the outer ones are extrapolated."""
    # differences of longitudes are at most half a turn; those of latitudes are never larger
    for axis in (0, 1):
        centers = np.moveaxis(centers, axis, 0)
        step = (np.diff(centers, axis=0) + 180) % 360 - 180
        outer = centers[:1] - step[:1] / 2, centers[-1:] + step[-1:] / 2
        centers = np.concatenate([outer[0], centers[:-1] + step / 2, outer[1]])
        centers = np.moveaxis(centers, 0, axis)
    return centers


def _aspect_at(latitudes: Floats) -> float:
    """Return the length of a degree of latitude over one of longitude, at the mid latitude."""
    middle = abs(float(latitudes.min() + latitudes.max())) / 2
    return float(1 / np.cos(np.deg2rad(min(middle, _MOST_LATITUDE))))


def _with_label(coord: xr.DataArray, edges: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
    """Return edges, in km if they are metres, and the label of their axis."""
    if _is_angle(coord):
        if is_latitude(coord.name, coord.attrs) or is_longitude(coord.name, coord.attrs):
            return edges, None
        return edges, with_units(name_of(coord), "°")
    if coord.name is None:
        return edges, f"{coord.dims[0]} (cell)"
    if edges.dtype.kind == "M":
        return edges, ""
    if _unit(coord) == "m" and np.ptp(edges) >= 1e4:
        return edges / 1000, f"{coord.name} (km)"
    if _side(coord):
        return edges, with_units(str(coord.name), units_of(coord))
    return edges, label_of(coord)
