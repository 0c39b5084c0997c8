"""Places of a variable: the dims of its map, and the points of its cells."""

from __future__ import annotations

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.distance.separation import unit_vectors
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import latitude_and_longitude, map_dims

Floats = NDArray[np.float64]


def map_points(array: xr.DataArray, time_dim: str | None) -> tuple[tuple[str, ...], Floats, bool]:
    """Return the dims of a map, the points of its cells, and whether these lie on a sphere."""
    dims = map_dims(array.coords.values(), array.dims)
    if not dims:
        raise InvalidValueError(
            f"method='spatial' needs dims of places, {array.name!r} has {array.dims}"
        )
    sizes = {dim: array.sizes[dim] for dim in dims}
    places = latitude_and_longitude(array.coords.values(), time_dim)
    if places is None:
        cells = np.indices(tuple(sizes.values())).reshape(len(dims), -1).T
        return dims, cells.astype(np.float64), False
    lat, lon = (
        in_degrees(
            coord.variable.set_dims(sizes).values,
            coord.attrs.get("units"),
        )
        for coord in places
    )
    return dims, unit_vectors(lat.ravel(), lon.ravel()), True
