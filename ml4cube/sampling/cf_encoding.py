"""Coordinates, attributes and names of a cube, as a sample store holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.ledger.manifest import MANIFEST
from ml4cube.recipe.recipe import Recipe
from ml4cube.sampling.tiling import Axis
from ml4cube.store.format import AXES
from ml4cube.store.names import check_writable_names

#: Long name, in a store, of the cell numbers along a dim without a coordinate.
NUMBERED = "number of the cell, which has no coordinate"


def axis_of(ds: xr.Dataset, dim: str, recipe: Recipe) -> Axis:
    """Return the coordinate along a dim, dates as numbers; cell numbers if the cube has none."""
    name = origin_name(dim, recipe)
    if dim not in ds.coords:
        return Axis(name, np.arange(ds.sizes[dim]), {"long_name": NUMBERED})
    # without the encoding of the source file, which may pack values or round dates
    coordinate = in_numpy_dtype(ds[dim].variable.to_base_variable()).drop_encoding()
    coordinate.attrs = without_epoch(coordinate.attrs)
    try:
        encoded = xr.conventions.encode_cf_variable(coordinate)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"coordinate {dim!r} of dtype {coordinate.dtype} cannot be stored: {error}; replace "
            "it by numbers, strings or datetime64 (ds.assign_coords)"
        ) from error
    values = np.asarray(encoded.values)
    if values.dtype.kind not in "fiub":
        values = as_texts(values)
    elif values.dtype.itemsize > 8:  # long doubles, which differ between machines
        values = values.astype(np.float64)
    return Axis(name, values, jsonable(encoded.attrs))


def origin_name(dim: str, recipe: Recipe) -> str:
    """Return the name of the stored coordinate with the origins of samples along a dim.

    It is the dim's own name, unless a dim or variable of the stored arrays has that.
    """
    if dim in recipe.array_dims or dim in recipe.variables:
        return f"{dim}_origin"
    return dim


def in_numpy_dtype(coordinate: xr.Variable) -> xr.Variable:
    """Return a coordinate in a numpy dtype, if it has one of pandas."""
    if isinstance(coordinate.dtype, np.dtype):
        return coordinate
    index = coordinate.to_index()
    if isinstance(index, pd.DatetimeIndex):
        index = index.tz_convert(None)
    return xr.Variable(coordinate.dims, np.asarray(index), coordinate.attrs)


def as_texts(values: NDArray[Any]) -> NDArray[Any]:
    """Return objects or bytes as strings."""
    texts = [_as_text(value) for value in values.flat]
    return np.array(texts, dtype=object).reshape(values.shape)


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)


def jsonable(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return attributes as JSON values, without those that make a reader decode again."""
    decoding = {"_FillValue", "missing_value", "scale_factor", "add_offset", "_Unsigned", "dtype"}
    decoding |= {"bounds", "climatology", "coordinates", "grid_mapping", RECIPE_ATTR}
    kept = {str(name): value for name, value in attrs.items() if name not in decoding}
    text = json.dumps(kept, default=as_json)
    # JSON has no NaN and no infinity
    values: dict[str, Any] = json.loads(text, parse_constant=lambda name: str(float(name)))
    return values


def without_epoch(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Drop units such as "days since 2000-01-01", which make a reader decode numbers as dates."""
    encoding = ("units", "calendar") if "since" in str(attrs.get("units")) else ()
    return {name: value for name, value in attrs.items() if name not in encoding}


def as_json(value: Any) -> Any:
    """Convert a value that JSON does not have; for `json.dumps(default=...)`."""
    if isinstance(value, np.ndarray | np.generic):
        return (value.astype(str) if value.dtype.kind in "mM" else value).tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)  # the order of a set differs between runs
    return _as_text(value)


def check_stored_names(recipe: Recipe, stored: Iterable[str]) -> None:
    """Refuse names of variables and dims that a sample store uses itself or cannot hold."""
    files = {MANIFEST.partition("/")[0], AXES}
    origins = {origin_name(dim, recipe) for dim in recipe.dims} | {
        f"{d}_index" for d in recipe.dims
    }
    stored = tuple(stored)
    check_writable_names((*recipe.dims, *recipe.array_dims, *stored, *sorted(origins)))
    for kind, names, taken in (
        ("dim", recipe.dims, files),
        ("variable", stored, files | origins | set(recipe.array_dims)),
    ):
        if refused := [name for name in names if name in taken]:
            raise InvalidValueError(
                f"{kind} {refused[0]!r} of the samples must have another name than {sorted(taken)},"
                " which the store uses itself; rename it (ds.rename, or in the callback)"
            )
