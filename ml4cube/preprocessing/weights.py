"""Weights of cells: by area, or as given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import xarray as xr

from ml4cube.core.angles import cosines
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.fields import check_weights
from ml4cube.cube.coordinates import is_latitude
from ml4cube.preprocessing import cubes

Weights = str | xr.DataArray | None
V = TypeVar("V", xr.Variable, xr.DataArray)


def cell_weights(
    cube: xr.Dataset, weights: Weights, chosen: Iterable[str]
) -> tuple[xr.Variable, ...] | None:
    """Read what a user gave for weights.

    Parameters
    ----------
    cube : Dataset
        Whose cells are weighed.
    weights : {"area"}, DataArray or None
        ``"area"`` weighs by the cosine of latitude, as cells of a regular grid cover it. A
        DataArray is matched by the names of its dims.
    chosen : iterable of str
        Variables that are weighed.

    Returns
    -------
    tuple of Variable of float64, or None
        On some dims of the cube, lazy if given so; several where variables lie on different
        latitudes, of which `fitted_weights` takes one.

    Raises
    ------
    InvalidTypeError
        If it is of another type, or holds no numbers.
    InvalidValueError
        If there is no latitude, a dim is unknown, coordinates differ, or a weight is negative
        or not finite.

    Examples
    --------
    >>> ds = xr.Dataset({"t": ("lat", [1.0, 2.0])}, {"lat": [0.0, 60.0]})
    >>> [one.values.round(3) for one in cell_weights(ds, "area", ["t"])]
    [array([1. , 0.5])]
    """
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
    """Cosine of each latitude that a variable lies on; staggered grids have two."""
    latitude = [
        c
        for name, c in cube.coords.items()
        if c.ndim and c.dtype.kind in "fiu" and is_latitude(name, c.attrs, rotated=True)
    ]
    if not latitude:
        raise InvalidValueError(
            f"weights='area' needs latitudes in numbers, but none of {list(cube.coords)} is one; "
            "name it 'lat', or give it units='degrees_north'"
        )
    latitude.sort(key=lambda c: c.name not in c.dims)  # a dim's own goes first, as in scores
    used = {str(_nearest(latitude, cube.variables[name]).name) for name in chosen}
    return tuple(_area(coord) for coord in latitude if coord.name in used)


def _nearest(found: Sequence[V], variable: xr.Variable) -> V:
    """The one with fewest dims that a variable lacks; of these, that with fewest dims."""
    return min(found, key=lambda one: (len(set(one.dims) - set(variable.dims)), one.ndim))


def _area(found: xr.DataArray) -> xr.Variable:
    """Cosine of latitude, on the dims of the latitude."""
    called = f"weights='area': latitudes {found.name!r}"
    return xr.Variable(found.dims, cosines(found.values, found.attrs.get("units"), called))


def fitted_weights(weights: tuple[xr.Variable, ...], variable: xr.Variable) -> xr.Variable:
    """Take the weights that fit a variable, reduced to the dims that it has.

    Parameters
    ----------
    weights : tuple of Variable
        Each on some dims of the cube.
    variable : Variable
        What they are for.

    Returns
    -------
    Variable
        Not repeated along dims that the weights lack. Along a dim that the variable lacks, its
        one copy weighs what the others weigh in the mean.
    """
    found = _nearest(weights, variable)
    spare = [dim for dim in found.dims if dim not in variable.dims]
    return found.mean(spare) if spare else found
