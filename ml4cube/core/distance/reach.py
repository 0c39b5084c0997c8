"""Cells that are too near to a block of another part, on plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Grid

EARTH_RADIUS_KM = 6371.0

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AxisReach:
    """Cells ``low[i]`` to ``high[i]`` along `dim` are near to cell i."""

    dim: str
    # First and last near cell. On a cyclic dim they may exceed the ends: -1 is the last cell.
    low: Ints
    high: Ints

    @classmethod
    def of_cells(cls, dim: str, n: int, cells: int, cyclic: bool = False) -> AxisReach:
        """Make a reach of `cells` cells in both directions."""
        i = np.arange(n)
        cells = min(cells, n)
        if cyclic:
            return cls(dim, i - min(cells, n // 2), i + min(cells, n // 2))
        return cls(dim, np.maximum(i - cells, 0), np.minimum(i + cells, n - 1))

    @classmethod
    def of_distance(cls, dim: str, values: NDArray[np.int64], distance: int) -> AxisReach:
        """Make a reach of all cells whose coordinates differ by at most `distance`."""
        rising = values if values[0] <= values[-1] else -values
        low = np.searchsorted(rising, rising - distance, side="left")
        high = np.searchsorted(rising, rising + distance, side="right") - 1
        return cls(dim, low.astype(np.int64), high.astype(np.int64))

    def blocks(self, grid: Grid, cells: Ints) -> tuple[Ints, Ints]:
        """Return the first and last block in reach of each of `cells`; unrolled where cyclic."""
        axis = grid.dims.index(self.dim)
        n, tile, count = grid.shape[axis], grid.tile[axis], grid.counts[axis]

        def block(position: Ints) -> Ints:
            turns, cell = np.divmod(position, n)
            return np.asarray(turns * count + cell // tile, dtype=np.int64)

        return block(self.low[cells]), block(self.high[cells])


@dataclass(frozen=True, eq=False)
class SphereReach:
    """Cells whose centres are at most `km` apart on a great circle are near."""

    lat_dim: str
    lon_dim: str
    # Latitudes in degrees, in any order.
    lat: NDArray[np.float64]
    # Longitudes in degrees, in any order and wrapping (0 to 360, -180 to 180).
    lon: NDArray[np.float64]
    # Largest distance, in kilometres on a sphere of radius 6371 km.
    km: float

    def half_widths(self, lat: float) -> NDArray[np.float64]:
        """Return how many degrees of longitude the reach of a cell at `lat` covers in every row."""
        here, rows = np.deg2rad(lat), np.deg2rad(self.lat)
        # haversine: precise for small angles, where the law of cosines loses digits
        reach = np.sin(min(self.km / EARTH_RADIUS_KM, np.pi) / 2) ** 2
        across = np.cos(here) * np.cos(rows)
        rest = reach - np.sin((rows - here) / 2) ** 2
        # a cell exactly at the distance is near, also after rounding
        near_row = rest >= -1e-12 * max(reach, 1e-12)
        ratio = np.clip(rest / np.maximum(across, 1e-15), 0, 1)
        width = np.rad2deg(2 * np.arcsin(np.sqrt(ratio))) * (1 + 1e-9) + 1e-9
        return np.where(near_row, np.minimum(width, 180.0), -1.0)

    def spread(
        self, other: Bools, grid: Grid, axes: tuple[int, int], lat_cells: Ints, lon_cells: Ints
    ) -> Bools:
        """Tell for cells of the sphere whether a block of `other` is within reach."""
        table = np.moveaxis(other, axes, (-2, -1))
        lon = np.mod(self.lon, 360.0)
        east = np.argsort(lon, kind="stable")
        rows = table[..., grid.tile_of_cells(self.lon_dim)[east]]
        # cumulative counts along each row of blocks, to count any window of longitudes at once
        count = np.zeros((*rows.shape[:-1], rows.shape[-1] + 1), dtype=np.int32)
        np.cumsum(rows, axis=-1, out=count[..., 1:])
        result = np.zeros((*table.shape[:-2], lat_cells.size, lon_cells.size), dtype=bool)
        block_row = grid.tile_of_cells(self.lat_dim)
        for i, cell in enumerate(lat_cells):
            width = self.half_widths(float(self.lat[cell]))
            for row in np.unique(block_row[width >= 0]):
                widest = float(width[block_row == row].max())
                result[..., i, :] |= _any_within(
                    count[..., row, :], lon[east], lon[lon_cells], widest
                )
        return np.moveaxis(result, (-2, -1), axes)


def _any_within(
    count: NDArray[np.int32],
    lon: NDArray[np.float64],
    centres: NDArray[np.float64],
    width: float,
) -> Bools:
    """Return True where anything is counted within `width` degrees of a centre, cyclically."""
    if width >= 180:
        return np.broadcast_to(count[..., -1:] > 0, (*count.shape[:-1], centres.size))

    def before(x: NDArray[np.float64], side: str) -> NDArray[np.int32]:
        turns, angle = np.divmod(x, 360.0)
        index = np.searchsorted(lon, angle, side=side)  # type: ignore[call-overload]
        return np.asarray(count[..., index] + turns.astype(np.int32) * count[..., -1:])

    return np.asarray(before(centres + width, "right") > before(centres - width, "left"))


Reach = AxisReach | SphereReach


def near_to(
    other: Bools, grid: Grid, reaches: Sequence[Reach], positions: Mapping[str, Ints]
) -> Bools:
    """Tell for each cell whether it is near to a block of `other`."""
    sphere = [r for r in reaches if isinstance(r, SphereReach)]
    round_dims = {dim for r in sphere for dim in (r.lat_dim, r.lon_dim)}
    along = {r.dim: r for r in reaches if isinstance(r, AxisReach)}
    spans: dict[int, tuple[Ints, Ints]] = {}
    for axis, dim in enumerate(grid.dims):
        if dim in round_dims:
            continue
        reach = along.get(dim) or AxisReach.of_cells(dim, grid.shape[axis], 0)
        low, high = reach.blocks(grid, positions[dim])
        first, last = int(low.min()), int(high.max())
        other = np.take(other, np.arange(first, last + 1), axis=axis, mode="wrap")
        spans[axis] = (low - first, high - first)
    for r in sphere:
        axes = (grid.dims.index(r.lat_dim), grid.dims.index(r.lon_dim))
        other = r.spread(other, grid, axes, positions[r.lat_dim], positions[r.lon_dim])
    for axis, (low, high) in spans.items():
        other = _any_between(other, axis, low, high)
    return other


def _any_between(flags: Bools, axis: int, low: Ints, high: Ints) -> Bools:
    """Return the logical or of ``flags[low[i] : high[i] + 1]`` along `axis`, for every i."""
    # cells of a block mostly share their range, so compute each range once
    ranges, which = np.unique(np.stack([low, high]), axis=1, return_inverse=True)
    count = np.cumsum(flags, axis=axis, dtype=np.int32)
    before = np.concatenate([np.zeros_like(count.take([0], axis)), count], axis=axis)
    found = before.take(ranges[1] + 1, axis) > before.take(ranges[0], axis)
    return np.asarray(found.take(which.ravel(), axis))
