"""CubeView: the dims, chunks, times and longitudes of a cube; reads no data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from dask.array.core import normalize_chunks
from numpy.typing import NDArray

from ml4cube.core.angles import MOST_LAT, in_degrees
from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.coordinates import TIME_NAMES, dates_along, find_time_dim, role_of, time_dims
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import cube_dims, cube_variables

# Longitudes up to two turns are accepted.
_MOST_LON = 720.0

# Cells of an array in memory that are processed at once, and cells per chunk of a larger one.
_CELLS_IN_MEMORY, _CELLS_IN_CHUNK = 1 << 24, 1 << 21

# Labels (one byte each) that are made at once for a cube opened without dask.
_LABELS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class CubeView:
    """A cube as the splits see it; reads no data."""

    ds: xr.Dataset
    # Dims of its largest data variable, in that variable's order.
    dims: tuple[str, ...]
    # Chunks for a label along every dim: dask's, or several file chunks together for a large cube
    # opened without dask; None for other cubes.
    chunks: dict[str, tuple[int, ...]] | None

    @classmethod
    def of(cls, cube: xr.Dataset | xr.DataArray) -> CubeView:
        """Make a view of a cube."""
        ds = as_dataset(cube)
        dims = cube_dims(ds)
        if empty := [dim for dim in dims if ds.sizes[dim] == 0]:
            raise InvalidValueError(f"the cube has no cells along {empty}")
        variables = [ds[name] for name in cube_variables(ds)[0]]
        variables.sort(key=lambda v: -v.size)
        return cls(ds, dims, _chunks(dims, ds, variables))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of cells along each dim, in the cube's order."""
        return {dim: self.ds.sizes[dim] for dim in self.dims}

    @property
    def coords(self) -> Any:
        """Coordinates of the cube."""
        return self.ds.coords

    @property
    def canonical(self) -> dict[str, int]:
        """Number of cells along each dim, sorted by name."""
        return {dim: self.ds.sizes[dim] for dim in sorted(self.dims)}

    def axis_of(self, kind: str) -> xr.DataArray | None:
        """Return the 1-D coordinate of a kind ("time", "lat" or "lon"), or None."""
        coords = self.ds.coords.values()
        if kind == "time":
            dim = find_time_dim(coords, self.dims)
            dates: xr.DataArray | None = None if dim is None else dates_along(coords, dim)
            return dates
        found = [
            coord
            for coord in coords
            if coord.ndim == 1 and coord.dims[0] in self.dims and is_kind(coord, kind)
        ]
        if not found:
            return None
        found.sort(key=lambda coord: (coord.name != coord.dims[0], str(coord.name)))
        degrees = in_degrees(found[0].values, found[0].attrs.get("units"))
        return xr.DataArray(degrees, dims=found[0].dims, name=found[0].name)

    def own(self, dim: str) -> xr.DataArray | None:
        """Return the coordinate with the name of a dim, or None."""
        return self.ds.coords[dim] if dim in self.ds.coords else None  # noqa: SIM401

    def steps_of(self, dim: str) -> xr.DataArray | None:
        """Return the coordinate that orders the steps along a dim, or None."""
        own = self.own(dim)
        dates: xr.DataArray | None = dates_along(self.ds.coords.values(), dim)
        if dates is None or (own is not None and (self.has_times(dim) or dates.isnull().any())):
            return own
        return dates

    def time_dim(self, argument: str, dim: str | None = None) -> str:
        """Return the time dim that a user names, or the one that is found for `argument`."""
        if dim is not None:
            check_choice(argument, dim, self.dims)
            return dim
        found = time_dims(list(self.ds.coords.values()), self.dims)
        if len(found) == 1:
            return found[0]
        dim = (found or self.dims)[0]
        example = f"dim={dim!r}" if argument == "dim" else f"buffer={{{dim!r}: 2}}"
        several = f", and {found} may all be it" if found else ""
        raise InvalidValueError(
            f"cannot tell the time dim of the cube, which has dims {self.dims}{several}; name it, "
            f"e.g. {example}"
        )

    def moments(self, dim: str) -> NDArray[np.intp]:
        """Return the rank in time of each step along `dim`; refuse steps in no order."""
        coord = self.steps_of(dim)
        if coord is None or not (is_time(coord) or coord.dtype.kind in "fiu"):
            return np.arange(self.sizes[dim])
        return sorted_ranks(coord)

    def has_times(self, dim: str) -> bool:
        """Return True if the dim's own coordinate holds times."""
        own = self.own(dim)
        if own is None:
            return False
        return is_time(own) or (dim.lower() in TIME_NAMES and own.dtype.kind in "fiu")

    def repeated_times(self, dim: str) -> list[NDArray[np.intp]]:
        """Return the steps of each time that occurs more than once along `dim`."""
        along = [axis.dims for kind in ("lat", "lon") if (axis := self.axis_of(kind)) is not None]
        if not self.has_times(dim) or (dim,) in along:
            return []
        rank = _ranks(self.ds.coords[dim])
        order = np.argsort(rank, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(rank[order])) + 1)
        return [steps for steps in groups if steps.size > 1]

    def sphere(self, asked: object) -> tuple[xr.DataArray, xr.DataArray]:
        """Return latitude and longitude, each 1-D along a dim of its own."""
        lat, lon = self.axis_of("lat"), self.axis_of("lon")
        if lat is not None and lon is not None and lat.dims == lon.dims:
            raise InvalidValueError(
                f"{asked!r} needs latitude and longitude along two dims, but both lie along "
                f"{lat.dims[0]!r} (stations, a track or a stacked grid); unstack a grid, or leave "
                "out groups of stations with assign_region_split"
            )
        if lat is None or lon is None:
            raise InvalidValueError(
                f"{asked!r} needs 1-D latitude and longitude, not rotated, along two dims, but the "
                f"cube has the coordinates {sorted(map(str, self.ds.coords))}; give it in cells"
            )
        check_degrees(asked, lat, lon)
        return lat, lon

    def lon_axis(self) -> xr.DataArray | None:
        """Return the longitude that is an axis of a grid, or None."""
        lon = self.axis_of("lon")
        others = [
            coord.dims for kind in ("lat", "time") if (coord := self.axis_of(kind)) is not None
        ]
        return None if lon is None or lon.dims in others else lon

    def lon_turn(self) -> tuple[str, int] | None:
        """Return the dim and the columns per turn of a longitude that spans the globe, or None."""
        coord = self.lon_axis()
        if coord is None or coord.size < 3:
            return None
        lon = coord.values
        if not (np.abs(lon) <= _MOST_LON).all():
            return None
        # longitudes may start anywhere: from 175 to -180 is an ordinary step
        step = (np.diff(lon) + 180) % 360 - 180
        if not np.allclose(step, step[0], rtol=1e-2, atol=1e-6) or step[0] == 0:
            return None
        turns_over = (abs(step.sum()) - 360) / abs(step.mean())  # columns past a full turn
        if turns_over < -1.5:
            return None
        return str(coord.dims[0]), coord.size - max(math.floor(turns_over + 1.01), 0)


def sorted_ranks(coord: xr.DataArray) -> NDArray[np.intp]:
    """Return the rank of each value among the distinct values; refuse values in no order."""
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates or numbers; fill or drop them")
    rank = _ranks(coord)
    steps = np.diff(rank)
    if not ((steps >= 0).all() or (steps <= 0).all()):
        raise InvalidValueError(
            f"the values of {coord.name!r} must be sorted; use ds.sortby({coord.name!r}), or "
            f"ds.drop_vars({coord.name!r}) if they do not give the order"
        )
    return rank


def _ranks(coord: xr.DataArray) -> NDArray[np.intp]:
    values = microseconds(coord) if is_time(coord) else coord.values
    return np.unique(values, return_inverse=True)[1].ravel()


def _chunks(
    dims: tuple[str, ...], ds: xr.Dataset, variables: list[xr.DataArray]
) -> dict[str, tuple[int, ...]] | None:
    """Return chunks for a label along every dim, or None if it needs none."""
    known: dict[str, tuple[int, ...]] = {}
    for variable in variables:
        for dim, sizes in variable.variable.chunksizes.items():
            known.setdefault(str(dim), tuple(sizes))
    if known:
        return {dim: known.get(dim, (ds.sizes[dim],)) for dim in dims}
    # opened without dask, and not read yet: a label of all cells might not fit in memory
    lazy = [variable for variable in variables if not variable.variable._in_memory]
    shape = {dim: ds.sizes[dim] for dim in dims}
    if not lazy or math.prod(shape.values()) <= _LABELS_AT_ONCE:
        return None
    stored: dict[str, int] = {}
    for variable in lazy:
        stored = {**_stored_chunks(variable), **stored}
    # labels are small, so a chunk of labels covers several chunks of the file
    return _whole_chunks(shape, stored, _LABELS_AT_ONCE)


def _stored_chunks(variable: xr.DataArray) -> dict[str, int]:
    """Return the chunk sizes of the file that a variable was opened from."""
    return {
        str(name): int(size)
        for name, size in (variable.encoding.get("preferred_chunks") or {}).items()
        if name in variable.sizes and isinstance(size, int | np.integer) and size > 0
    }


def _whole_chunks(
    sizes: Mapping[str, int], stored: Mapping[str, int], cells: int
) -> dict[str, tuple[int, ...]]:
    """Return chunks of about `cells` cells that consist of whole chunks of the file."""
    of_file = tuple(min(stored.get(dim, n), n) for dim, n in sizes.items())
    chunks = normalize_chunks(  # type: ignore[no-untyped-call]
        "auto",
        shape=tuple(sizes.values()),
        limit=cells,
        dtype=np.dtype(np.uint8),
        previous_chunks=of_file if stored else None,
    )
    return dict(zip(sizes, chunks, strict=True))


def in_chunks(array: xr.DataArray) -> xr.DataArray:
    """Return the array, chunked if it is large and has no chunks."""
    least = _CELLS_IN_MEMORY if array.variable._in_memory else _CELLS_IN_CHUNK
    if array.chunks is not None or array.size <= least:
        return array
    sizes = {str(dim): n for dim, n in array.sizes.items()}
    return array.chunk(_whole_chunks(sizes, _stored_chunks(array), _CELLS_IN_CHUNK))


def check_degrees(asked: object, lat: xr.DataArray, lon: xr.DataArray) -> None:
    """Refuse missing or impossible degrees, with which distances would be meaningless."""
    for coord, most in ((lat, MOST_LAT), (lon, _MOST_LON)):
        wrong = np.flatnonzero(~(np.abs(coord.values) <= most))
        if wrong.size:
            shown = ", ".join(f"{coord.values[i]:g} at {i}" for i in wrong[:3])
            raise InvalidValueError(
                f"{asked!r} needs degrees from {-most:.0f} to {most:.0f} in {coord.name!r}, got "
                f"{wrong.size} others ({shown}); correct the coordinate, or drop it to measure in "
                "cells"
            )


def is_kind(coord: xr.DataArray, kind: str) -> bool:
    """Return True if a coordinate holds times ("time"), latitudes ("lat") or longitudes ("lon")."""
    return role_of(coord) == {"lat": "latitude", "lon": "longitude"}.get(kind, kind)


def microseconds(coord: xr.DataArray) -> NDArray[np.int64]:
    """Return microseconds since the first date, for any calendar."""
    values: Any = coord.values
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates; fill or drop them")
    if coord.dtype.kind == "M":
        values = values.astype("datetime64[us]")  # nanoseconds overflow after 292 years
        return np.asarray((values - values[0]).astype(np.int64))
    since = [
        d.days * 86_400_000_000 + d.seconds * 1_000_000 + d.microseconds for d in values - values[0]
    ]
    return np.array(since, dtype=np.int64)
