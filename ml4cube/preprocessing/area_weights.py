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
    """Check the argument ``weights``; return the weights of each variable, on its dims."""
    if weights is None:
        return {}
    if isinstance(weights, str):
        check_choice("weights", weights, ("area",))
        found = _areas(cube, chosen)
    elif isinstance(weights, xr.DataArray):
        found = dict.fromkeys(chosen, _given(cube, weights))
    else:
        raise InvalidTypeError(
            f"weights must be 'area', a DataArray or None, got {type(weights).__name__}"
        )
    return {name: _fitted(one, cube.variables[name]) for name, one in found.items()}


def _fitted(weights: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Average weights over the dims that a variable lacks."""
    spare = [dim for dim in weights.dims if dim not in variable.dims]
    return weights.mean(spare) if spare else weights


def _given(cube: xr.Dataset, weights: xr.DataArray) -> xr.Variable:
    """Check the user's weights."""
    check_aligned("weights", weights, cube)
    if weights.dtype.kind not in "fiub":
        raise InvalidTypeError(f"weights must be numbers, not negative, got dtype {weights.dtype}")
    found = weights.variable.astype(np.float64)
    if found.chunks is None:
        check_weights(found.values)
    return found


def _areas(cube: xr.Dataset, chosen: Iterable[str]) -> dict[str, xr.Variable]:
    """Return the areas of the cells of each variable; staggered grids have two latitudes."""
    latitudes = find_latitudes(cube.coords)
    if not latitudes:
        raise InvalidValueError(
            f"weights='area' needs a latitude among the coordinates, got {list(cube.coords)}; name "
            "it 'lat', or set its units to 'degrees_north'"
        )
    found = {}
    for name in chosen:
        dims = cube.variables[name].dims
        # the fewest dims that the variable lacks, then the fewest dims
        nearest = min(latitudes, key=lambda c: (len(set(c.dims) - set(dims)), c.ndim))
        found[name] = area_of(nearest, cube.variables)
    return found


def find_latitudes(coords: Mapping[Hashable, xr.DataArray]) -> list[xr.DataArray]:
    """Return the latitudes of a cube, also of a rotated grid."""
    found = [
        c
        for name, c in coords.items()
        if c.ndim and c.dtype.kind in "fiu" and is_latitude(name, c.attrs, rotated=True)
    ]
    return sorted(found, key=lambda c: (c.name not in c.dims, c.ndim))


def area_of(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> xr.Variable:
    """Return the areas of cells, up to a factor, by `cell_areas`."""
    called = f"weights='area': latitudes {latitude.name!r}"
    if along := _points_along(latitude, among):
        raise UnknownAreaError(
            f"{called} belong to points along {along!r} (stations or cells of a mesh), whose areas "
            "are unknown; give weights, or none"
        )
    units = latitude.attrs.get("units")
    bounds = _bounds(latitude, among) if latitude.ndim == 1 else None
    return xr.Variable(latitude.dims, cell_areas(latitude.values, units, called, bounds))


def _bounds(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> NDArray[Any] | None:
    """Return the bounds that the latitude's attributes name, if present."""
    named = str({**latitude.encoding, **latitude.attrs}.get("bounds"))
    if named not in among:
        return None
    found: NDArray[Any] = among[named].transpose(*latitude.dims, ..., missing_dims="ignore").values
    return found


def _points_along(latitude: xr.DataArray, among: Mapping[Any, xr.Variable]) -> str | None:
    """Return the dim along which both latitude and longitude vary (stations, a mesh), if any."""
    if latitude.ndim != 1 or latitude.name in latitude.dims:
        return None
    varies = any(
        one.dims == latitude.dims and is_longitude(name, one.attrs, rotated=True)
        for name, one in among.items()
    )
    return str(latitude.dims[0]) if varies else None
