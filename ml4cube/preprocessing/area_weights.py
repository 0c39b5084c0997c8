"""Weights of cells: their areas, or given ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import UnknownAreaError, cell_areas
from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.coordinates import is_latitude, is_longitude

Weights = str | xr.DataArray | None


def cell_weights(
    cube: xr.Dataset, weights: Weights, chosen: Iterable[str]
) -> dict[str, xr.Variable]:
    """Return the weights of the cells of each chosen variable, averaged over dims it lacks."""
    if weights is None:
        return {}
    if isinstance(weights, str):
        check_choice("weights", weights, ("area",))
        found = _areas(cube, chosen)
    elif isinstance(weights, xr.DataArray):
        found = dict.fromkeys(chosen, _check_given(cube, weights))
    else:
        raise InvalidTypeError(
            f"weights must be 'area', a DataArray or None, got {type(weights).__name__}"
        )
    fitting = {}
    for name, variable in found.items():
        lacking = [dim for dim in variable.dims if dim not in cube.variables[name].dims]
        fitting[name] = variable.mean(lacking) if lacking else variable
    return fitting


def _check_given(cube: xr.Dataset, weights: xr.DataArray) -> xr.Variable:
    """Return the user's weights in float64, after checking them."""
    check_aligned("weights", weights, cube)
    if weights.dtype.kind not in "fiub":
        raise InvalidTypeError(f"weights must be numbers, not negative, got dtype {weights.dtype}")
    variable = weights.variable.astype(np.float64)
    if variable.chunks is None:
        check_weights(variable.values)
    return variable


def _areas(cube: xr.Dataset, chosen: Iterable[str]) -> dict[str, xr.Variable]:
    """Return the areas of the cells of each variable, by the latitude of its grid."""
    latitudes = find_latitudes(cube.coords)
    if not latitudes:
        raise InvalidValueError(
            f"weights='area' needs a latitude among the coordinates, got {list(cube.coords)}; name "
            "it 'lat', or set its units to 'degrees_north'"
        )
    areas = {}
    for name in chosen:
        dims = set(cube.variables[name].dims)
        # staggered grids have two latitudes: the one with the fewest dims that the variable lacks
        latitude = min(latitudes, key=lambda coord: (len(set(coord.dims) - dims), coord.ndim))
        areas[name] = area_of(latitude, cube.variables)
    return areas


def find_latitudes(coords: Mapping[Hashable, xr.DataArray]) -> list[xr.DataArray]:
    """Return the latitudes of a cube, also of a rotated grid."""
    found = [
        coord
        for name, coord in coords.items()
        if coord.ndim and coord.dtype.kind in "fiu" and is_latitude(name, coord.attrs, rotated=True)
    ]
    return sorted(found, key=lambda coord: (coord.name not in coord.dims, coord.ndim))


def area_of(latitude: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> xr.Variable:
    """Return the areas of cells, up to a factor; bounds and longitudes are among `variables`."""
    described = f"weights='area': latitudes {latitude.name!r}"
    if dim := _dim_of_points(latitude, variables):
        raise UnknownAreaError(
            f"{described} belong to points along {dim!r} (stations or cells of a mesh), whose "
            "areas are unknown; give weights, or none"
        )
    units = latitude.attrs.get("units")
    bounds = _bounds(latitude, variables) if latitude.ndim == 1 else None
    return xr.Variable(latitude.dims, cell_areas(latitude.values, units, described, bounds))


def _bounds(latitude: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> NDArray[Any] | None:
    """Return the bounds that the latitude's attributes name, if present."""
    name = str({**latitude.encoding, **latitude.attrs}.get("bounds"))
    if name not in variables:
        return None
    bounds = variables[name].transpose(*latitude.dims, ..., missing_dims="ignore")
    return np.asarray(bounds.values)


def _dim_of_points(latitude: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> str | None:
    """Return the dim along which both latitude and longitude vary (stations, a mesh), if any."""
    if latitude.ndim != 1 or latitude.name in latitude.dims:
        return None
    has_longitude = any(
        variable.dims == latitude.dims and is_longitude(name, variable.attrs, rotated=True)
        for name, variable in variables.items()
    )
    return str(latitude.dims[0]) if has_longitude else None
