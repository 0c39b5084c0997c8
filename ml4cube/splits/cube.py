"""CubeView: the dims, chunks, times and longitudes of a cube; reads coordinates, but no data."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from dask.array.core import normalize_chunks
from numpy.typing import NDArray

from ml4cube.core.angles import MOST_LAT, in_degrees
from ml4cube.core.axes import has_distances, is_time
from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.chunks.blocks import file_chunks
from ml4cube.cube.coordinates import (
    TIME_NAMES,
    dates_along,
    find_time_dim,
    map_dims,
    role_of,
    time_dims,
)
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import cube_dims, cube_variables

# Longitudes of up to two full circles are accepted.
_MAX_LON = 720.0

# Largest array in memory that is not cut into chunks, and cells of a chunk otherwise.
_CELLS_IN_MEMORY, _CELLS_IN_CHUNK = 1 << 24, 1 << 21

# Labels (one byte each) of a chunk, for a cube opened without dask.
_LABELS_IN_CHUNK = 1 << 24

Cube = xr.Dataset | xr.DataArray
# Lengths of the chunks along each dim.
Chunks = dict[str, tuple[int, ...]]


class LonCircle(NamedTuple):
    """A longitude that spans the globe."""

    dim: str
    # Columns of one full circle; the cube may repeat the first ones at its end.
    columns: int


@dataclass(frozen=True, eq=False)
class CubeView:
    """A cube as the splits see it."""

    ds: xr.Dataset
    # Dims of the data variable with most dims, in that variable's order.
    dims: tuple[str, ...]
    # Chunks for a label along every dim: dask's, or several file chunks together for a large cube
    # opened without dask; None for other cubes.
    chunks: Chunks | None

    @classmethod
    def of(cls, cube: Cube) -> CubeView:
        """Make a view of a cube."""
        ds = as_dataset(cube)
        dims = cube_dims(ds)
        if empty := [dim for dim in dims if ds.sizes[dim] == 0]:
            raise InvalidValueError(f"the cube has no cells along {empty}")
        return cls(ds, dims, _chunks(dims, ds))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of cells along each dim, in the cube's order."""
        return {dim: self.ds.sizes[dim] for dim in self.dims}

    @property
    def coords(self) -> Any:
        """Coordinates of the cube, for `check_aligned`."""
        return self.ds.coords

    @property
    def sorted_sizes(self) -> dict[str, int]:
        """Number of cells along each dim, sorted by name."""
        return {dim: self.ds.sizes[dim] for dim in sorted(self.dims)}

    @property
    def dim_of_time(self) -> str | None:
        """The dim of times, or None."""
        return find_time_dim(self.ds.coords.values(), self.dims)

    @property
    def dims_of_map(self) -> tuple[str, ...]:
        """The dims of the map, or that of stations."""
        return tuple(map_dims(self.ds.coords.values(), self.dims))

    def axis_of(self, role: str) -> xr.DataArray | None:
        """Return the 1-D coordinate with a role ("time", "latitude" or "longitude"), or None."""
        coords = self.ds.coords.values()
        if role == "time":
            dim = self.dim_of_time
            if dim is None:
                return None
            return dates_of(self.ds, dim)
        of_role = [
            coord
            for coord in coords
            if coord.ndim == 1 and coord.dims[0] in self.dims and role_of(coord) == role
        ]
        if not of_role:
            return None
        return degrees_of(min(of_role, key=lambda c: (c.name != c.dims[0], str(c.name))))

    def dim_coord(self, dim: str) -> xr.DataArray | None:
        """Return the coordinate with the name of a dim, or None."""
        # `coords.get` would make up the numbers of the cells for a dim without a coordinate.
        return self.ds.coords[dim] if dim in self.ds.coords else None  # noqa: SIM401

    def time_dim(self, argument: str, dim: str | None = None) -> str:
        """Return the time dim that a user names, or the one that is found for `argument`."""
        if dim is not None:
            check_choice(argument, dim, self.dims)
            return dim
        candidates = time_dims(list(self.ds.coords.values()), self.dims)
        if len(candidates) == 1:
            return candidates[0]
        dim = (candidates or self.dims)[0]
        example = f"dim={dim!r}" if argument == "dim" else f"buffer={{{dim!r}: 2}}"
        several = ""
        if candidates:
            several = f", and {candidates} may all be it"
        raise InvalidValueError(
            f"cannot tell the time dim of the cube, which has dims {self.dims}{several}; name it, "
            f"e.g. {example}"
        )

    def time_ranks(self, dim: str) -> NDArray[np.intp]:
        """Return the rank of each step along `dim` among the distinct times; refuse unsorted ones.

        Without a coordinate that can be sorted, this is the position of the step.
        """
        coord = dates_of(self.ds, dim)
        dim_coord = self.dim_coord(dim)
        # Dates beside a dim order it, unless its own coordinate has times, or a date is missing.
        if coord is None or (
            dim_coord is not None and (self.has_times(dim) or coord.isnull().any())
        ):
            coord = dim_coord
        if coord is None or not has_distances(coord):
            return np.arange(self.sizes[dim])
        return sorted_ranks(coord)

    def has_times(self, dim: str) -> bool:
        """Return True if the coordinate with the name of the dim holds times."""
        coord = self.dim_coord(dim)
        if coord is None:
            return False
        return is_time(coord) or (dim.lower() in TIME_NAMES and coord.dtype.kind in "fiu")

    def repeated_times(self, dim: str) -> list[NDArray[np.intp]]:
        """Return the steps of each time that occurs more than once along `dim`."""
        if not self.has_times(dim):
            return []
        lat, lon = self.axis_of("latitude"), self.axis_of("longitude")
        if any(axis is not None and axis.dims == (dim,) for axis in (lat, lon)):
            return []  # Along a track, each of these steps has its own location.
        ranks = _ranks(self.ds.coords[dim])
        order = np.argsort(ranks, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(ranks[order])) + 1)
        return [steps for steps in groups if steps.size > 1]

    def lon_axis(self) -> xr.DataArray | None:
        """Return the longitude that is an axis of a grid, or None."""
        lon = self.axis_of("longitude")
        others = (self.axis_of("latitude"), self.axis_of("time"))
        if lon is None or any(axis is not None and axis.dims == lon.dims for axis in others):
            return None
        return lon

    def lon_circle(self) -> LonCircle | None:
        """Return the longitude that spans the globe, or None."""
        axis = self.lon_axis()
        if axis is None or axis.size < 3:
            return None
        lon = axis.values
        if not (np.abs(lon) <= _MAX_LON).all():
            return None
        # Longitudes may start anywhere: from 175 to -180 is an ordinary step.
        steps = (np.diff(lon) + 180) % 360 - 180
        if not np.allclose(steps, steps[0], rtol=1e-2, atol=1e-6) or steps[0] == 0:
            return None
        # Steps from the first column to the last, beyond a full circle: -1 if every column occurs
        # once, 0 if the last repeats the first.
        excess = (abs(steps.sum()) - 360) / abs(steps.mean())
        if excess < -1.5:
            return None
        repeated_columns = max(math.floor(excess + 1.01), 0)
        return LonCircle(str(axis.dims[0]), axis.size - repeated_columns)


def degrees_of(coord: xr.DataArray) -> xr.DataArray:
    """Return a latitude or longitude in degrees, without other coordinates."""
    degrees = in_degrees(coord.values, coord.attrs.get("units"))
    return xr.DataArray(degrees, dims=coord.dims, name=coord.name)


def dates_of(ds: Cube, dim: str) -> xr.DataArray | None:
    """Return the coordinate of dates that identifies the steps along a dim, or None."""
    dates: xr.DataArray | None = dates_along(ds.coords.values(), dim)
    return dates


def sorted_ranks(coord: xr.DataArray) -> NDArray[np.intp]:
    """Return the rank of each value among the distinct values; refuse values in no order."""
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates or numbers; fill or drop them")
    ranks = _ranks(coord)
    steps = np.diff(ranks)
    if not ((steps >= 0).all() or (steps <= 0).all()):
        raise InvalidValueError(
            f"the values of {coord.name!r} must be sorted; use ds.sortby({coord.name!r}), or "
            f"ds.drop_vars({coord.name!r}) if they do not give the order"
        )
    return ranks


def _ranks(coord: xr.DataArray) -> NDArray[np.intp]:
    values = microseconds(coord) if is_time(coord) else coord.values
    return np.unique(values, return_inverse=True)[1].ravel()


def _chunks(dims: tuple[str, ...], ds: xr.Dataset) -> Chunks | None:
    """Return chunks for a label along every dim, or None if it needs none."""
    variables = [ds[name].variable for name in cube_variables(ds)[0]]
    whole = [variable for variable in variables if set(variable.dims) == set(dims)]
    chunked = next((variable for variable in whole if variable.chunksizes), None)
    if chunked is not None:
        return {dim: chunked.chunksizes[dim] for dim in dims}
    # Opened without dask, and not read yet: a label of all cells might not fit in memory.
    unread = next((variable for variable in whole if not variable._in_memory), None)
    if unread is None or unread.size <= _LABELS_IN_CHUNK:
        return None
    # Labels are small, so a chunk of labels covers several chunks of the file.
    sizes = {dim: ds.sizes[dim] for dim in dims}
    return _join_file_chunks(sizes, file_chunks(unread), _LABELS_IN_CHUNK)


def in_chunks(array: xr.DataArray) -> xr.DataArray:
    """Return the array, chunked if it is large and has no chunks."""
    largest = _CELLS_IN_CHUNK
    if array.variable._in_memory:
        largest = _CELLS_IN_MEMORY
    if array.chunks is not None or array.size <= largest:
        return array
    sizes = {str(dim): n for dim, n in array.sizes.items()}
    return array.chunk(_join_file_chunks(sizes, file_chunks(array.variable), _CELLS_IN_CHUNK))


def _join_file_chunks(sizes: Mapping[str, int], in_file: Mapping[str, int], cells: int) -> Chunks:
    """Return chunks of about `cells` cells that consist of whole chunks of the file."""
    chunks = normalize_chunks(  # type: ignore[no-untyped-call]
        "auto",
        shape=tuple(sizes.values()),
        limit=cells,
        dtype=np.dtype(np.uint8),
        previous_chunks=tuple(min(in_file.get(dim, n), n) for dim, n in sizes.items())
        if in_file.keys() & sizes.keys()
        else None,
    )
    return dict(zip(sizes, chunks, strict=True))


def check_degrees(argument: object, lat: xr.DataArray, lon: xr.DataArray) -> None:
    """Refuse missing or impossible degrees, with which distances would be meaningless."""
    for coord, limit in ((lat, MOST_LAT), (lon, _MAX_LON)):
        wrong = np.flatnonzero(~(np.abs(coord.values) <= limit))
        if wrong.size:
            shown = ", ".join(f"{coord.values[i]:g} at {i}" for i in wrong[:3])
            raise InvalidValueError(
                f"{argument!r} needs degrees from {-limit:.0f} to {limit:.0f} in {coord.name!r}, "
                f"got {wrong.size} others ({shown}); correct the coordinate, or drop it to measure "
                "in cells"
            )


def microseconds(coord: xr.DataArray) -> NDArray[np.int64]:
    """Return microseconds since the first date, for any calendar."""
    values: Any = coord.values
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates; fill or drop them")
    if coord.dtype.kind == "M":
        values = values.astype("datetime64[us]")  # Nanoseconds overflow after 292 years.
        return np.asarray((values - values[0]).astype(np.int64))
    elapsed = [date // datetime.timedelta(microseconds=1) for date in values - values[0]]
    return np.array(elapsed, dtype=np.int64)
