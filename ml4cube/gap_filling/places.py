"""Places of a variable: the dims of its map, and the points of its cells."""

from __future__ import annotations

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import is_category, role_of

Floats = NDArray[np.float64]


def map_dims(array: xr.DataArray, time_dim: str | None) -> tuple[str, ...]:
    """Return the dims of a map: of latitude and longitude, else neither time nor vertical."""
    places = _latitude_and_longitude(array, time_dim)
    if places is not None:
        return tuple(d for d in map(str, array.dims) if any(d in coord.dims for coord in places))
    return tuple(
        dim
        for dim in map(str, array.dims)
        if dim != time_dim
        and not is_category(dim, array.coords.get(dim))
        and (dim not in array.coords or role_of(array[dim]) != "vertical")
    )


def _latitude_and_longitude(
    array: xr.DataArray, time_dim: str | None
) -> tuple[xr.DataArray, xr.DataArray] | None:
    """Return latitude and longitude of the places of a variable, or None."""
    coords = [c for c in array.coords.values() if c.ndim and time_dim not in c.dims]
    by_role = {role_of(c): c for c in sorted(coords, key=lambda c: c.name in c.dims)}
    if {"latitude", "longitude"} <= by_role.keys():
        return by_role["latitude"], by_role["longitude"]
    return None


def map_points(array: xr.DataArray, time_dim: str | None) -> tuple[tuple[str, ...], Floats, bool]:
    """Return the dims of a map, the points of its cells, and whether these lie on a sphere."""
    dims = map_dims(array, time_dim)
    if not dims:
        raise InvalidValueError(
            f"method='spatial' needs dims of places, {array.name!r} has {array.dims}"
        )
    sizes = {dim: array.sizes[dim] for dim in dims}
    places = _latitude_and_longitude(array, time_dim)
    if places is None:
        cells = np.indices(tuple(sizes.values())).reshape(len(dims), -1).T
        return dims, cells.astype(np.float64), False
    lat, lon = (
        in_degrees(
            coord.variable.set_dims(sizes).values,  # type: ignore[no-untyped-call]
            coord.attrs.get("units"),
        )
        for coord in places
    )
    return dims, _on_sphere(lat, lon), True


def _on_sphere(latitudes: Floats, longitudes: Floats) -> Floats:
    """Return points on the unit sphere, shape (cells, 3), of places in degrees."""
    lat, lon = np.deg2rad(latitudes.ravel()), np.deg2rad(longitudes.ravel())
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
