"""Coordinates, attributes and encodings of a predicted cube, by the CF conventions."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.statistics import NODATA
from ml4cube.cube.variables import cube_dims, names_in
from ml4cube.preprocessing.counts import is_count
from ml4cube.sampling.cf_encoding import as_json, as_texts, in_numpy_dtype

CONVENTIONS = "CF-1.11"
#: Attribute of every predicted cube, by which `predict_cube` recognizes its own.
PREDICTION_ATTR = "ml4cube_prediction"

# Attributes on the packing and range of values in the source, which predictions do not have.
_SOURCE_ATTRS = {
    *NODATA, "_FillValue", "missing_value", "scale_factor", "add_offset", "dtype",
    "valid_min", "valid_max", "valid_range", "actual_range",
}  # fmt: skip
# Attributes that name other variables.
_REFERENCES = ("bounds", "climatology", "grid_mapping")
_LATITUDE = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
_LONGITUDE = {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}
# Attributes that CF asks for, of coordinates with a usual name and no attributes.
_ATTRS_BY_NAME = {
    "lat": _LATITUDE,
    "latitude": _LATITUDE,
    "lon": _LONGITUDE,
    "longitude": _LONGITUDE,
    "time": {"standard_name": "time", "axis": "T"},
}


def empty_prediction(
    cube: xr.Dataset,
    variables: Mapping[str, xr.Variable],
    coords: Mapping[str, xr.Variable],
    lost_dims: Collection[str],
    description: Mapping[str, Any],
) -> xr.Dataset:
    """Return the predicted cube with gaps for values, and the coordinates of the cube.

    `coords` are further coordinates, and `lost_dims` dims of the cube that the result lacks, or
    has with other entries.
    """
    dims = set(cube_dims(cube)) - set(lost_dims)
    kept = {
        str(name): _in_memory(coord.variable)
        for name, coord in cube.coords.items()
        if set(coord.dims) <= dims and not is_count(name)
    } | {name: _in_memory(coord) for name, coord in coords.items()}
    for name, coord in kept.items():
        _add_usual_attrs(name, coord)
    own = {**variables, **kept}
    named = [name for variable in own.values() for name in _named_by(variable)]
    auxiliary = {}
    for name in named:
        is_wanted = name in cube.variables and name not in own
        if is_wanted and not set(lost_dims) & set(cube[name].dims):
            auxiliary[name] = _in_memory(cube[name].variable)
    result = xr.Dataset({**variables, **auxiliary}, kept)
    for variable in result.variables.values():
        for key in _REFERENCES:
            if not result.variables.keys() >= set(names_in(variable.attrs.get(key, ""))):
                del variable.attrs[key]
    version = importlib.metadata.version("ml4cube")
    return result.assign_attrs(
        {
            **cube.attrs,
            "Conventions": CONVENTIONS,
            "source": f"ml4cube {version}: model {description['model']}",
            PREDICTION_ATTR: json.dumps({"version": version, **description}),
        }
    )


def _add_usual_attrs(name: str, coord: xr.Variable) -> None:
    """Add what CF asks for to a coordinate with a usual name and no attributes."""
    if coord.attrs.keys() & {"standard_name", "units", "axis"}:
        return
    usual = _ATTRS_BY_NAME.get(name.lower(), {})
    # Only coordinates of a dim have an axis.
    is_axis = coord.dims == (name,)
    coord.attrs |= {key: value for key, value in usual.items() if key != "axis" or is_axis}


def _named_by(variable: xr.Variable) -> list[str]:
    """Return the variables that the attributes of a variable name."""
    return [name for key in _REFERENCES for name in names_in(variable.attrs.get(key, ""))]


def target_attrs(cube: xr.Dataset, name: str, source_attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a target in the cube, or else of the source."""
    attrs = _all_attrs(cube[name].variable) if name in cube.data_vars else source_attrs
    attrs = {key: value for key, value in attrs.items() if key not in _SOURCE_ATTRS}
    if not {"standard_name", "long_name"} & set(attrs):
        attrs["long_name"] = name
    return attrs


def gaps_like(
    sizes: Mapping[str, int],
    chunks: Mapping[str, int],
    dtype: np.dtype[Any],
    attrs: Mapping[str, Any],
) -> xr.Variable:
    """Return a lazy variable of gaps, in chunks."""
    chunk_sizes = tuple(chunks[dim] for dim in sizes)
    gaps = da.full(  # type: ignore[no-untyped-call]
        tuple(sizes.values()), np.nan, dtype=dtype, chunks=chunk_sizes
    )
    encoding = {"_FillValue": dtype.type(np.nan), "chunks": chunk_sizes}
    return xr.Variable(tuple(sizes), gaps, dict(attrs), encoding)


def _in_memory(source: xr.Variable) -> xr.Variable:
    """Copy into memory; of the encoding keep only that of dates."""
    copy = source.copy(deep=False).load()
    copy.attrs = _all_attrs(source)
    dates = copy.dtype.kind == "M" or copy.dtype == object
    kept = ("units", "calendar", "dtype") if dates else ()
    copy.encoding = {key: source.encoding[key] for key in kept if key in source.encoding}
    copy.encoding["_FillValue"] = None  # CF coordinates have no gaps
    return copy


def _all_attrs(source: xr.Variable) -> dict[Any, Any]:
    """Return the attributes, with those that ``decode_coords="all"`` moves into the encoding."""
    moved = {key: source.encoding[key] for key in _REFERENCES if key in source.encoding}
    return {**source.attrs, **moved}


def storable(cube: xr.Dataset) -> xr.Dataset:
    """Convert coordinates and attributes that files cannot hold, as in sample stores."""
    variables = {name: _storable(v) for name, v in cube.variables.items()}
    coords = {name: variables.pop(name) for name in cube.coords}
    return xr.Dataset(variables, coords, _json_attrs(cube.attrs))


def _storable(variable: xr.Variable) -> xr.Variable:
    result = in_numpy_dtype(variable)
    if result.dtype.kind in "SUO" and not is_time(result):  # zarr v3 has no strings of fixed length
        result = result.copy(data=as_texts(result.values))
    elif result.dtype.kind == "f" and result.dtype.itemsize not in (4, 8) and not result.chunks:
        result = result.astype(np.float64)
    result = result.copy(deep=False)
    result.attrs, result.encoding = _json_attrs(variable.attrs), variable.encoding
    return result


def _json_attrs(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    encoded: dict[str, Any] = json.loads(json.dumps(dict(attrs), default=as_json))
    return encoded
