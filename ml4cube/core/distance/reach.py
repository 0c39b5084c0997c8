"""Find the cells that are too near to a block of another part.

A reach says which cells are near to a cell: along one dim (`AxisReach`), or on the sphere
(`SphereReach`), or by any other `MapReach`. `cells_near` applies reaches to the blocks of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Grid

EARTH_RADIUS_KM = 6371.0

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AxisReach:
    """Cells ``low[i]`` to ``high[i]`` along `dim` are near to cell i.

    On a cyclic dim, `low` and `high` may exceed the ends: -1 is the last cell.
    """

    dim: str
    low: Ints
    high: Ints

    @classmethod
    def of_cells(cls, dim: str, n: int, cells: int, cyclic: bool = False) -> AxisReach:
        """Make a reach of `cells` cells in both directions."""
        i = np.arange(n)
        if cyclic:
            cells = min(cells, n // 2)
            return cls(dim, i - cells, i + cells)
        cells = min(cells, n)
        return cls(dim, np.maximum(i - cells, 0), np.minimum(i + cells, n - 1))

    @classmethod
    def of_distance(cls, dim: str, values: Ints, distance: int) -> AxisReach:
        """Make a reach of all cells whose coordinates differ by at most `distance`."""
        rising = -values
        if values[0] <= values[-1]:
            rising = values
        low = np.searchsorted(rising, rising - distance, side="left")
        high = np.searchsorted(rising, rising + distance, side="right") - 1
        return cls(dim, low.astype(np.int64), high.astype(np.int64))

    def block_range(self, grid: Grid, cells: Ints) -> tuple[Ints, Ints]:
        """Return the first and last block along `dim` that is near to each of `cells`.

        On a cyclic dim, blocks may exceed the ends as well: -1 is the last block.
        """
        axis = grid.dims.index(self.dim)
        n, tile, count = grid.shape[axis], grid.tile[axis], grid.counts[axis]

        def block_of(position: Ints) -> Ints:
            turns, cell = np.divmod(position, n)
            return np.asarray(turns * count + cell // tile, dtype=np.int64)

        return block_of(self.low[cells]), block_of(self.high[cells])


class MapReach(Protocol):
    """Cells of a map that are near to a cell, over several dims together."""

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the map."""

    def spread(self, blocks: Bools, grid: Grid, positions: Mapping[str, Ints]) -> Bools:
        """Return True for cells near to one of `blocks`.

        In the result, the axes of the map have the cells at `positions` in place of blocks; all
        other axes still have blocks.
        """


@dataclass(frozen=True, eq=False)
class SphereReach:
    """Cells whose centres are at most `km` apart on a great circle are near.

    Latitudes and longitudes are in degrees, in any order; longitudes may be 0 to 360 or -180 to
    180. Distances are on a sphere of radius 6371 km.
    """

    lat_dim: str
    lon_dim: str
    lat: Floats
    lon: Floats
    km: float

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of latitude and longitude."""
        return self.lat_dim, self.lon_dim

    def spread(self, blocks: Bools, grid: Grid, positions: Mapping[str, Ints]) -> Bools:
        """Return True for cells near to one of `blocks`, as of any `MapReach`."""
        axes = grid.dims.index(self.lat_dim), grid.dims.index(self.lon_dim)
        lat_cells, lon_cells = positions[self.lat_dim], positions[self.lon_dim]
        blocks = np.moveaxis(blocks, axes, (-2, -1))
        lon = np.mod(self.lon, 360.0)
        eastward = np.argsort(lon, kind="stable")
        rising_lon = lon[eastward]
        in_blocks = blocks[..., grid.tile_of_cells(self.lon_dim)[eastward]]
        # Cumulative counts along each row of blocks (all blocks of one latitude), to count any
        # range of longitudes at once.
        count = np.zeros((*in_blocks.shape[:-1], in_blocks.shape[-1] + 1), dtype=np.int32)
        np.cumsum(in_blocks, axis=-1, out=count[..., 1:])
        near = np.zeros((*blocks.shape[:-2], lat_cells.size, lon_cells.size), dtype=bool)
        block_row = grid.tile_of_cells(self.lat_dim)
        for i, cell in enumerate(lat_cells):
            degrees = self._degrees_of_longitude(float(self.lat[cell]))  # one per latitude
            for row in np.unique(block_row[degrees >= 0]):
                farthest = float(degrees[block_row == row].max())
                counts = count[..., row, :]
                near[..., i, :] |= _any_within(counts, rising_lon, lon[lon_cells], farthest)
        return np.moveaxis(near, (-2, -1), axes)

    def _degrees_of_longitude(self, lat: float) -> Floats:
        """Return the degrees that `km` from a cell at `lat` spans at each latitude; -1 if none."""
        here, lats = np.deg2rad(lat), np.deg2rad(self.lat)
        # Haversines of angles: precise for small ones, where the law of cosines loses digits.
        whole = np.sin(min(self.km / EARTH_RADIUS_KM, np.pi) / 2) ** 2
        left_for_longitude = whole - np.sin((lats - here) / 2) ** 2
        # A cell exactly at the distance is near, also after rounding.
        in_reach = left_for_longitude >= -1e-12 * max(whole, 1e-12)
        ratio = left_for_longitude / np.maximum(np.cos(here) * np.cos(lats), 1e-15)
        degrees = np.rad2deg(2 * np.arcsin(np.sqrt(np.clip(ratio, 0, 1)))) * (1 + 1e-9) + 1e-9
        return np.where(in_reach, degrees, -1.0)


Reach = AxisReach | MapReach


def cells_near(
    blocks: Bools, grid: Grid, reaches: Sequence[Reach], positions: Mapping[str, Ints]
) -> Bools:
    """Return True for each cell that is near to one of `blocks`, a mask of the grid's blocks.

    `positions` are the cells to tell of along each dim. There is at most one reach for a dim.
    """
    on_map = next((reach for reach in reaches if not isinstance(reach, AxisReach)), None)
    map_dims: tuple[str, ...] = ()
    if on_map is not None:
        map_dims = on_map.dims
    by_dim = {reach.dim: reach for reach in reaches if isinstance(reach, AxisReach)}
    near = blocks
    # By axis, the first and last block that are near to each cell; other blocks are dropped at
    # once, so that the slower steps that follow see few.
    ranges: dict[int, tuple[Ints, Ints]] = {}
    for axis, dim in enumerate(grid.dims):
        if dim in map_dims:
            continue
        of_dim = by_dim.get(dim) or AxisReach.of_cells(dim, grid.shape[axis], 0)
        low, high = of_dim.block_range(grid, positions[dim])
        first, last = int(low.min()), int(high.max())
        near = np.take(near, np.arange(first, last + 1), axis=axis, mode="wrap")
        ranges[axis] = (low - first, high - first)
    if on_map is not None:
        near = on_map.spread(near, grid, positions)
    for axis, (low, high) in ranges.items():
        near = _any_between(near, axis, low, high)
    return near


def _any_within(
    count: NDArray[np.int32],
    lon: Floats,
    centres: Floats,
    degrees: float,
) -> Bools:
    """Return True where anything is counted within some degrees of a centre, cyclically.

    ``count[..., i]`` is the cumulative count of the first i longitudes, which rise from 0 to 360.
    """

    def count_before(angle: Floats, side: str) -> NDArray[np.int32]:
        turns, angle = np.divmod(angle, 360.0)
        index = np.searchsorted(lon, angle, side=side)  # type: ignore[call-overload]
        return np.asarray(count[..., index] + turns.astype(np.int32) * count[..., -1:])

    west, east = centres - degrees, centres + degrees
    return np.asarray(count_before(east, "right") > count_before(west, "left"))


def _any_between(flags: Bools, axis: int, low: Ints, high: Ints) -> Bools:
    """Return the logical or of ``flags[low[i] : high[i] + 1]`` along `axis`, for every i."""
    # Cells of a block mostly share their range, so compute each range once.
    ranges, range_of_cell = np.unique(np.stack([low, high]), axis=1, return_inverse=True)
    count = np.cumsum(flags, axis=axis, dtype=np.int32)
    count_before = np.concatenate([np.zeros_like(count.take([0], axis)), count], axis=axis)
    is_near = count_before.take(ranges[1] + 1, axis) > count_before.take(ranges[0], axis)
    return np.asarray(is_near.take(range_of_cell.ravel(), axis))
