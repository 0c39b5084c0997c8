"""Weights of the cells of a variable: their areas, by the best rule that its grid allows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ml4cube.core import areas
from ml4cube.core.angles import MOST_LAT, in_degrees
from ml4cube.core.areas import Floats, UnknownAreaError
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level, check_choice
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.coordinates import is_latitude, is_longitude, km_per_unit

#: "area", the name of a variable with areas, an array, or None for equal weights.
Weights = str | xr.DataArray | None

AREA = "area"
NO_LATITUDE = "none, no coordinate is a latitude"
_MEASURED_AREA = re.compile(r"\barea:\s*(\S+)")
# Projections whose plane has the areas of the sphere, or nearly so.
_EQUAL_AREA = {
    "lambert_azimuthal_equal_area", "albers_conical_equal_area",
    "lambert_cylindrical_equal_area", "sinusoidal", "transverse_mercator",
}  # fmt: skip


class CellWeights(NamedTuple):
    """Weights along dims of a variable, None if they are equal, and the rule in words."""

    array: xr.DataArray | None
    rule: str
    # Why a map has equal weights, or those of its plane, which the user must know.
    warning: str = ""

    @property
    def is_known(self) -> bool:
        """True if cells are weighted, or known to be equally large."""
        return not self.rule.startswith("none")

    def warn(self) -> CellWeights:
        """Show the warning, if there is one."""
        if self.warning:
            warnings.warn(self.warning, stacklevel=caller_level())
        return self


def cell_weights(
    weights: Weights, array: xr.DataArray, variables: Mapping[Any, xr.Variable]
) -> CellWeights:
    """Return the weights of the cells of a variable; `variables` are all of its cube."""
    if weights is None:
        return CellWeights(None, "none")
    if isinstance(weights, xr.DataArray):
        return CellWeights(_checked(weights, array), "given")
    if not isinstance(weights, str):
        raise InvalidTypeError(
            "weights must be 'area', the name of a variable with areas, a DataArray or None, got "
            f"{type(weights).__name__}"
        )
    variables = {**variables, **{name: c.variable for name, c in array.coords.items()}}
    if weights == AREA:
        return _areas(array, variables)
    measures = [str(name) for name, v in variables.items() if _is_measure(v, array)]
    check_choice("weights", weights, (AREA, *measures))
    return CellWeights(_measure(variables[weights], weights), f"the variable {weights}")


def _checked(weights: xr.DataArray, array: xr.DataArray) -> xr.DataArray:
    """Return the user's weights in float64, after checking them."""
    if weights.dtype.kind not in "fiub":
        raise InvalidTypeError(f"weights must be numbers, not negative, got dtype {weights.dtype}")
    weights = weights.astype(np.float64)
    if weights.chunks is None:
        check_weights(weights.values)
    return weights


def check_not_zero(weights: xr.DataArray) -> None:
    """Refuse weights of which scores would be NaN."""
    if bool((weights == 0).all()):
        raise InvalidValueError("weights must be above 0 in some cell, got zeros only")


def _is_measure(variable: xr.Variable, array: xr.DataArray) -> bool:
    """Return True if a variable may hold the areas of the cells of another one."""
    fits = all(array.sizes.get(dim) == n for dim, n in variable.sizes.items())
    return fits and variable.ndim > 0 and variable.dtype.kind in "fiu"


def _measure(variable: xr.Variable, name: str) -> xr.DataArray:
    """Return areas that a cube has; cells where they are missing weigh 0."""
    values = np.asarray(variable.values, np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    check_weights(values)
    return xr.DataArray(values, dims=variable.dims, name=name)


def _areas(array: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> CellWeights:
    """Return the areas of cells, by the first rule that applies."""
    if named := _MEASURED_AREA.search(_attribute(array.variable, "cell_measures")):
        measure = variables.get(named[1])
        if measure is not None and _is_measure(measure, array):
            return CellWeights(_measure(measure, named[1]), f"cell_measures {named[1]}")
    latitudes = find_latitudes(array.coords)
    if not latitudes:
        return _areas_in_plane(array, variables)
    latitude = latitudes[0]
    longitude = _longitude_beside(latitude, array)
    try:
        if (polygons := _polygons(latitude, longitude, variables)) is not None:
            rule = f"polygons between the bounds of {latitude.name}"
            return CellWeights(_without_missing(polygons, latitude.dims), rule)
        if latitude.ndim == 1:
            return _bands(latitude, longitude, variables)
        return _quadrilaterals(latitude, longitude)
    except UnknownAreaError as error:
        if latitude.ndim == 1:
            return CellWeights(None, f"none, {error}")
        in_plane = _areas_in_plane(array, variables)
        if in_plane.is_known:
            return in_plane
        return CellWeights(
            None, f"none, {error}", f"cells of {array.name!r} have equal weights, because {error}"
        )


def _attribute(variable: xr.Variable, name: str) -> str:
    """Return an attribute, which xarray may have moved to the encoding."""
    return str({**variable.encoding, **variable.attrs}.get(name, ""))


def find_latitudes(coords: Mapping[Hashable, xr.DataArray]) -> list[xr.DataArray]:
    """Return the latitudes of a variable, also of a rotated grid, those of dims first."""
    latitudes = [
        coord
        for name, coord in coords.items()
        if coord.ndim and coord.dtype.kind in "fiu" and is_latitude(name, coord.attrs, rotated=True)
    ]
    return sorted(latitudes, key=lambda coord: (coord.name not in coord.dims, coord.ndim))


def _longitude_beside(latitude: xr.DataArray, array: xr.DataArray) -> xr.DataArray | None:
    """Return the longitude that belongs to a latitude, both on Earth or both of a rotated grid."""
    is_rotated = not is_latitude(latitude.name, latitude.attrs)
    longitudes = [
        coord
        for name, coord in array.coords.items()
        if coord.ndim == latitude.ndim
        and coord.dtype.kind in "fiu"
        and is_longitude(name, coord.attrs, rotated=True)
        and is_longitude(name, coord.attrs) != is_rotated
    ]
    if latitude.name in latitude.dims:
        longitudes = [coord for coord in longitudes if coord.dims != latitude.dims]
    longitudes.sort(key=lambda coord: coord.dims != latitude.dims)
    return next(iter(longitudes), None)


def _bounds_of(coord: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> Floats | None:
    """Return the bounds that a coordinate names, in degrees or its unit, vertices last."""
    name = _attribute(coord.variable, "bounds")
    if name not in variables:
        return None
    bounds = variables[name].transpose(*coord.dims, ..., missing_dims="ignore")
    return in_degrees(bounds.values, coord.attrs.get("units"))


def _degrees(coord: xr.DataArray) -> Floats:
    return in_degrees(coord.values, coord.attrs.get("units"))


def _polygons(
    latitude: xr.DataArray, longitude: xr.DataArray | None, variables: Mapping[Any, xr.Variable]
) -> Floats | None:
    """Return the areas of polygons, if both coordinates have the vertices of each cell."""
    if longitude is None or longitude.dims != latitude.dims:
        return None
    lats, lons = (_bounds_of(coord, variables) for coord in (latitude, longitude))
    if lats is None or lons is None or lats.shape != lons.shape:
        return None
    if lats.ndim != latitude.ndim + 1 or lats.shape[-1] < 3:
        return None
    lats = areas.without_fill_values(lats, MOST_LAT, f"bounds of {latitude.name!r}")
    return areas.polygon_areas(lats, areas.without_fill_values(lons, None, ""))


def _without_missing(values: Floats, dims: tuple[Hashable, ...]) -> xr.DataArray:
    """Return areas with 0 for cells without a position."""
    if not (np.isfinite(values) & (values > 0)).any():
        raise UnknownAreaError("no cell has an area")
    return xr.DataArray(np.where(np.isfinite(values), values, 0.0), dims=dims)


def _bands(
    latitude: xr.DataArray, longitude: xr.DataArray | None, variables: Mapping[Any, xr.Variable]
) -> CellWeights:
    """Return the areas of bands of latitude, times widths in longitude where these differ."""
    described = f"weights='area': latitudes {latitude.name!r}"
    if longitude is not None and longitude.dims == latitude.dims:
        raise UnknownAreaError(
            f"{described} belong to points along {latitude.dims[0]!r} (stations or cells of a "
            "mesh), whose areas are unknown; give weights, or none"
        )
    heights = areas.band_areas(_degrees(latitude), described, _bounds_of(latitude, variables))
    rows = xr.DataArray(heights, dims=latitude.dims)
    rule = f"area of the bands of {latitude.name}"
    widths = None if longitude is None else _widths(longitude, variables)
    if longitude is None or widths is None:
        return CellWeights(rows, rule)
    columns = xr.DataArray(widths, dims=longitude.dims)
    return CellWeights(rows * columns, f"{rule} and widths of {longitude.name}")


def _widths(longitude: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> Floats | None:
    """Return the widths of cells in longitude; None if they are equal."""
    bounds = _bounds_of(longitude, variables)
    if bounds is not None and bounds.shape == (longitude.size, 2):
        return areas.bounded_widths(bounds, 360.0)
    return areas.cell_widths(_degrees(longitude), 360.0)


def _quadrilaterals(latitude: xr.DataArray, longitude: xr.DataArray | None) -> CellWeights:
    """Return the areas between neighbouring centres of a curvilinear grid."""
    name = f"weights='area': latitudes {latitude.name!r}"
    if longitude is not None:
        longitude = longitude.transpose(*latitude.dims, missing_dims="ignore")
    lats = _degrees(latitude)
    lons = None if longitude is None else _degrees(longitude)
    values = areas.grid_areas(lats, lons, name)
    rule = f"spherical quadrilaterals between the centres of {latitude.name}"
    if np.isnan(values).any():
        rule += " (cells without a position weigh 0)"
    return CellWeights(_without_missing(values, latitude.dims), rule)


def _areas_in_plane(array: xr.DataArray, variables: Mapping[Any, xr.Variable]) -> CellWeights:
    """Return dx dy of coordinates in metres, else equal weights."""
    axes = [coord for coord in array.coords.values() if _is_in_metres(coord)]
    if len(axes) != 2:
        return CellWeights(None, NO_LATITUDE)
    names = " and ".join(str(coord.name) for coord in axes)
    rule = f"dx dy of {names}"
    product = None
    for coord in axes:
        widths = areas.cell_widths(coord.values.astype(np.float64))
        if widths is not None:
            of_dim = xr.DataArray(widths, dims=coord.dims)
            product = of_dim if product is None else product * of_dim
    mapping = variables.get(_attribute(array.variable, "grid_mapping").split(":")[0])
    projection = "" if mapping is None else str(mapping.attrs.get("grid_mapping_name", ""))
    if projection in _EQUAL_AREA:
        return CellWeights(product, f"{rule} in {projection}")
    return CellWeights(
        product,
        f"{rule}, areas in the plane of the projection",
        f"cells of {array.name!r} are weighted by {rule}, their areas in the plane of the "
        "projection, because it has no latitudes; add latitude and longitude of each cell, or "
        "give weights",
    )


def _is_in_metres(coord: xr.DataArray) -> bool:
    """Return True for the x or y of a projection, along its own dim."""
    is_axis = coord.ndim == 1 and coord.name in coord.dims
    return is_axis and any(km_per_unit(coord, axis) for axis in ("x", "y"))
