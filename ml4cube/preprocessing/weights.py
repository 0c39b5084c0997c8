"""Weights of cells: by area, or as given."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import UnknownAreaError, cell_areas
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.preprocessing import cubes

Weights = str | xr.DataArray | None
V = TypeVar("V", xr.Variable, xr.DataArray)


def cell_weights(
    cube: xr.Dataset, weights: Weights, chosen: Iterable[str]
) -> tuple[xr.Variable, ...] | None:
    """Read what a user gave for weights."""
    if weights is None:
        return None
    if isinstance(weights, str):
        check_choice("weights", weights, ("area",))
        return _areas(cube, chosen)
    if not isinstance(weights, xr.DataArray):
        raise InvalidTypeError(
            f"weights is a {type(weights).__name__}; give 'area', or a DataArray, whose dims have "
            "names"
        )
    cubes.check_known("weights", (str(dim) for dim in weights.dims), cube.dims)
    cubes.check_places("weights", weights, cube)
    if weights.dtype.kind not in "fiub":
        raise InvalidTypeError(
            f"weights are of dtype {weights.dtype}; give numbers that are not negative"
        )
    found = weights.variable.astype(np.float64)
    if found.chunks is None:
        check_weights(found.values)
    return (found,)


def _areas(cube: xr.Dataset, chosen: Iterable[str]) -> tuple[xr.Variable, ...]:
    """Areas by each latitude that a variable lies on; staggered grids have two."""
    latitudes = find_latitudes(cube.coords)
    if not latitudes:
        raise InvalidValueError(
            f"weights='area' needs latitudes in numbers, but none of {list(cube.coords)} is one; "
            "name it 'lat', or give it units='degrees_north'"
        )
    used = {str(_nearest(latitudes, cube.variables[name]).name) for name in chosen}
    return tuple(area_of(c, cube.variables) for c in latitudes if c.name in used)


def find_latitudes(coords: Mapping[Hashable, xr.DataArray]) -> list[xr.DataArray]:
    """Find the latitudes of a cube, also of a rotated grid."""
    found = [
        c
        for name, c in coords.items()
        if c.ndim and c.dtype.kind in "fiu" and is_latitude(name, c.attrs, rotated=True)
    ]
    return sorted(found, key=lambda c: (c.name not in c.dims, c.ndim))


def area_of(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> xr.Variable:
    """Return the areas of cells, up to a factor, by `cell_areas`."""
    called = f"weights='area': latitudes {latitude.name!r}"
    if along := _places_along(latitude, among):
        raise UnknownAreaError(
            f"{called} are those of places along {along!r}, which have no rows and so no areas; "
            "give areas of the cells as weights, or none"
        )
    units = latitude.attrs.get("units")
    bounds = _bounds(latitude, among) if latitude.ndim == 1 else None
    return xr.Variable(latitude.dims, cell_areas(latitude.values, units, called, bounds))


def _bounds(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> NDArray[Any] | None:
    """What the latitude's attributes name as its bounds, if it is there."""
    named = str({**latitude.encoding, **latitude.attrs}.get("bounds"))
    if named not in among:
        return None
    found: NDArray[Any] = among[named].transpose(*latitude.dims, ..., missing_dims="ignore").values
    return found


def _places_along(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> str | None:
    """The dim along which latitude and longitude both vary (stations, cells of a mesh), if any."""
    if latitude.ndim != 1 or latitude.name in latitude.dims:
        return None
    varies = any(
        one.dims == latitude.dims and is_longitude(name, one.attrs, rotated=True)
        for name, one in among.items()
    )
    return str(latitude.dims[0]) if varies else None


def _nearest(found: Sequence[V], variable: xr.Variable) -> V:
    """The one with fewest dims that a variable lacks; of these, that with fewest dims."""
    return min(found, key=lambda one: (len(set(one.dims) - set(variable.dims)), one.ndim))


def fitted_weights(weights: tuple[xr.Variable, ...], variable: xr.Variable) -> xr.Variable:
    """Take the weights that fit a variable, reduced to the dims that it has."""
    found = _nearest(weights, variable)
    spare = [dim for dim in found.dims if dim not in variable.dims]
    return found.mean(spare) if spare else found
