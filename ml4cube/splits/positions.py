"""Positions of the cells of a cube, between which there are kilometres.

They are on the sphere, by latitudes and longitudes of a grid, a curvilinear grid, stations or one
point; on the sphere of a rotated grid; or on the plane of a projection, by x and y in metres or
kilometres.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.reach import EARTH_RADIUS_KM
from ml4cube.core.distance.separation import kilometres, unit_vectors
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.cube.coordinates import is_latitude, is_longitude, km_per_unit, role_of
from ml4cube.splits.cube import CubeView, check_degrees, degrees_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The coordinates of each frame, between which distances can be measured.
DEGREES, ROTATED, PLANE = (
    "latitudes and longitudes",
    "rotated latitudes and longitudes",
    "x and y of a projection",
)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the cells of a map, or of a list of stations, lie."""

    # Dims of the cells, sorted.
    sizes: dict[str, int]
    # (cells, 3): unit vectors, or kilometres on a plane; NaN where unknown.
    points: Floats
    frame: str

    def kilometres(self, apart: Floats) -> Floats:
        """Return the distance of points that are `apart` in straight lines."""
        km = apart
        if self.frame != PLANE:
            km = kilometres(apart)
        # The rounding error of a unit vector is a tenth of a millimetre.
        return np.where(km < 1e-6, 0.0, km)

    def straight(self, km: float) -> float:
        """Return how far points are apart in a straight line at a distance."""
        if self.frame == PLANE:
            return km
        return float(2 * np.sin(min(km / EARTH_RADIUS_KM, np.pi) / 2))

    def nearest(
        self, cells: Ints, other: Positions, other_cells: Ints, count: int = 1
    ) -> tuple[Floats, Ints]:
        """Return kilometres to the `count` of `cells` nearest to others, and which they are.

        Both results have the shape (others, count).
        """
        from sklearn.neighbors import KDTree

        apart, nearest = KDTree(self.points[cells]).query(other.points[other_cells], count)
        return self.kilometres(apart), cells[nearest]


@dataclass(frozen=True, eq=False)
class PlaceReach:
    """Cells at most so many kilometres apart are near: on any map, and among stations."""

    places: Positions
    km: float

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the map."""
        return tuple(self.places.sizes)

    def spread(self, blocks: Bools, grid: Grid, positions: Mapping[str, Ints]) -> Bools:
        """Return True for cells near to one of `blocks`, as `MapReach` asks."""
        from sklearn.neighbors import KDTree

        axes = [grid.dims.index(dim) for dim in self.dims]
        last = range(-len(axes), 0)
        blocks = np.moveaxis(blocks, axes, last)
        others = blocks.shape[: -len(axes)]
        cells = [positions[dim] for dim in self.dims]
        shape = tuple(self.places.sizes.values())
        asked = self.places.points.reshape(*shape, 3)[np.ix_(*cells)].reshape(-1, 3)
        is_known = np.isfinite(self.places.points).all(axis=1)
        is_asked_known = np.isfinite(asked).all(axis=1)
        # A cell exactly at the distance is near, also after rounding.
        apart = self.places.straight(self.km) * (1 + 1e-9) + 1e-9
        patterns, pattern_of = np.unique(
            blocks.reshape(math.prod(others), -1), axis=0, return_inverse=True
        )
        near = np.zeros((len(patterns), len(asked)), dtype=bool)
        for row, pattern in enumerate(patterns):
            on_map = pattern.reshape(blocks.shape[-len(axes) :])
            in_blocks = on_map[np.ix_(*(grid.tile_of_cells(dim) for dim in self.dims))].ravel()
            if (in_blocks & is_known).any() and is_asked_known.any():
                tree = KDTree(self.places.points[in_blocks & is_known])
                near[row, is_asked_known] = tree.query(asked[is_asked_known])[0][:, 0] <= apart
        near = near[pattern_of.ravel()].reshape(*others, *(axis_cells.size for axis_cells in cells))
        return np.moveaxis(near, last, axes)


def positions_of(view: CubeView, argument: object) -> Positions | None:
    """Return the positions of a cube's cells, or None; refuse impossible degrees."""
    for frame, axes_of in ((DEGREES, _degrees), (ROTATED, _rotated), (PLANE, _plane)):
        axes = axes_of(view)
        if axes is None:
            continue
        if frame != PLANE and all(axis.ndim == 1 for axis in axes):
            check_degrees(argument, *axes)  # curvilinear grids may have unknown positions
        first, second = xr.broadcast(*axes)
        sizes = {dim: view.sizes[dim] for dim in sorted(map(str, first.dims))}
        values = [axis.transpose(*sizes).values.ravel() for axis in (first, second)]
        if frame == PLANE:
            points = np.stack([*values, np.zeros(values[0].size)], axis=-1)
        else:
            points = unit_vectors(*values)
        return Positions(sizes, points, frame)
    return None


def _degrees(view: CubeView) -> list[xr.DataArray] | None:
    """Return latitude and longitude: of a grid, stations, a curvilinear grid, or one point."""
    degrees = []
    for role in ("latitude", "longitude"):
        axis = view.axis_of(role)
        if axis is None:
            coords = [
                coord
                for coord in view.ds.coords.values()
                if role_of(coord) == role and coord.ndim != 1 and _on_map(coord, view)
            ]
            if not coords:
                return None
            axis = degrees_of(max(coords, key=lambda coord: (coord.ndim, str(coord.name))))
        degrees.append(axis)
    return degrees


def _on_map(coord: xr.DataArray, view: CubeView) -> bool:
    """Return True for a coordinate of the cells; vertices have a dim of their own."""
    return set(coord.dims) <= set(view.dims) - {view.dim_of_time}


def _rotated(view: CubeView) -> list[xr.DataArray] | None:
    """Return the axes of a rotated grid: distances are the same on any rotated sphere."""
    axes = []
    for is_axis in (is_latitude, is_longitude):
        coords = [
            coord
            for coord in view.ds.coords.values()
            if coord.ndim == 1
            and coord.dims[0] in view.dims
            and coord.dtype.kind in "fiu"
            and is_axis(coord.name, coord.attrs, rotated=True)
        ]
        if len(coords) != 1:
            return None
        axes.append(degrees_of(coords[0]))
    return axes


def _plane(view: CubeView) -> list[xr.DataArray] | None:
    """Return y and x of a projection in kilometres."""
    axes = []
    for axis in ("y", "x"):
        coords = [
            coord
            for coord in view.ds.coords.values()
            if km_per_unit(coord, axis) and _on_map(coord, view)
        ]
        if not coords:
            return None
        coord = min(coords, key=lambda coord: (coord.name not in view.dims, str(coord.name)))
        in_km = coord.values.astype(float) * km_per_unit(coord, axis)
        axes.append(xr.DataArray(in_km, dims=coord.dims, name=coord.name))
    return axes


def refuse_degrees_as_data(view: CubeView) -> None:
    """Refuse latitudes and longitudes that are data variables, instead of ignoring them."""
    lat, lon = (
        [
            str(name)
            for name, var in view.ds.data_vars.items()
            if var.ndim < 3 and set(var.dims) <= set(view.dims) and role_of(var) == role
        ]
        for role in ("latitude", "longitude")
    )
    if lat and lon:
        raise InvalidValueError(
            f"{[*lat, *lon]} must be coordinates to measure distances, but they are data "
            f"variables; use ds.set_coords({[*lat, *lon]})"
        )
