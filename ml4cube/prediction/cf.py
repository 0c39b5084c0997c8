"""Coordinates, attributes and encodings of a predicted cube by the CF conventions."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ml4cube.cube.variables import cube_dims
from ml4cube.sampling.cf_encoding import as_json, as_texts, in_numpy_dtype

CONVENTIONS = "CF-1.11"
MARK = "ml4cube_prediction"  # attribute of every predicted cube

# Attributes on the packing and range of values in the source.
_STORAGE = ("_FillValue", "missing_value", "scale_factor", "add_offset", "dtype")
_RANGES = ("valid_min", "valid_max", "valid_range", "actual_range")
_REFERENCES = ("bounds", "climatology", "grid_mapping")
_LATITUDE = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
_LONGITUDE = {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}
# What CF asks for, of coordinates whose name says what they are.
_PLAIN_NAMES = {
    "lat": _LATITUDE,
    "latitude": _LATITUDE,
    "lon": _LONGITUDE,
    "longitude": _LONGITUDE,
    "time": {"standard_name": "time", "axis": "T"},
}


def describe(
    cube: xr.Dataset,
    dtypes: Mapping[str, np.dtype[Any]],
    attrs: Mapping[str, Mapping[str, Any]],
    tile_size: Mapping[str, int],
    about: Mapping[str, Any],
) -> xr.Dataset:
    """Return the predicted cube without its values."""
    dims = cube_dims(cube)
    targets = {
        name: _target(cube, name, dtype, attrs.get(name, {}), tile_size)
        for name, dtype in dtypes.items()
    }
    coords = {
        name: _plain(coord.variable)
        for name, coord in cube.coords.items()
        if set(coord.dims) <= set(dims)
    }
    for name, coord in coords.items():
        if not coord.attrs.keys() & {"standard_name", "units", "axis"}:
            known = _PLAIN_NAMES.get(str(name).lower(), {})
            # only coordinates of a dim have an axis
            coord.attrs |= {k: v for k, v in known.items() if k != "axis" or coord.dims == (name,)}
    described = [*targets.values(), *coords.values()]
    named = [str(v.attrs[key]) for v in described for key in _REFERENCES if key in v.attrs]
    carried = {
        name: _plain(cube[name].variable)
        for name in named
        if name in cube.variables and name not in {*coords, *targets}
    }
    result = xr.Dataset({**targets, **carried}, coords)
    for variable in result.variables.values():
        for key in _REFERENCES:
            if variable.attrs.get(key, key) not in {*result.variables, key}:
                del variable.attrs[key]  # it refers to a missing variable
    version = importlib.metadata.version("ml4cube")
    return result.assign_attrs(
        {
            **cube.attrs,
            "Conventions": CONVENTIONS,
            "source": f"ml4cube {version}: model {about['model']}",
            MARK: json.dumps({"version": version, **about}),
        }
    )


def storable(cube: xr.Dataset) -> xr.Dataset:
    """Convert coordinates and attributes that files cannot hold, as in sample stores."""
    variables = {name: _storable(v) for name, v in cube.variables.items()}
    coords = {name: variables.pop(name) for name in cube.coords}
    return xr.Dataset(variables, coords, _json_attrs(cube.attrs))


def _storable(variable: xr.Variable) -> xr.Variable:
    result = in_numpy_dtype(variable)
    dates = result.dtype == object and result.size and hasattr(result.values.flat[0], "calendar")
    if result.dtype.kind in "SUO" and not dates:  # zarr v3 has no strings of fixed length
        result = result.copy(data=as_texts(result.values))
    elif result.dtype.kind == "f" and result.dtype.itemsize not in (4, 8) and not result.chunks:
        result = result.astype(np.float64)
    result = result.copy(deep=False)
    result.attrs, result.encoding = _json_attrs(variable.attrs), variable.encoding
    return result


def _json_attrs(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    encoded: dict[str, Any] = json.loads(json.dumps(dict(attrs), default=as_json))
    return encoded


def _target(
    cube: xr.Dataset,
    name: str,
    dtype: np.dtype[Any],
    known: Mapping[str, Any],
    tile_size: Mapping[str, int],
) -> xr.Variable:
    dims = cube_dims(cube)
    if name in cube.data_vars:
        known = _attrs(cube[name].variable)
        own = tuple(str(dim) for dim in cube[name].dims)
        dims = own if set(own) == set(dims) else dims
    shape = tuple(cube.sizes[dim] for dim in dims)
    chunks = tuple(tile_size[dim] for dim in dims)
    values = da.full(shape, np.nan, dtype=dtype, chunks=chunks)  # type: ignore[no-untyped-call]
    attrs = {key: value for key, value in known.items() if key not in (*_STORAGE, *_RANGES)}
    if not {"standard_name", "long_name"} & set(attrs):
        attrs["long_name"] = name
    encoding = {"_FillValue": dtype.type(np.nan), "chunks": chunks}
    return xr.Variable(dims, values, attrs, encoding)


def _plain(source: xr.Variable) -> xr.Variable:
    """Copy into memory; of the encoding keep only that of dates."""
    copy = source.copy(deep=False).load()
    copy.attrs = _attrs(source)
    dates = copy.dtype.kind == "M" or copy.dtype == object
    kept = ("units", "calendar", "dtype") if dates else ()
    copy.encoding = {key: source.encoding[key] for key in kept if key in source.encoding}
    copy.encoding["_FillValue"] = None  # CF coordinates have no gaps
    return copy


def _attrs(source: xr.Variable) -> dict[Any, Any]:
    """Return the attributes, with those that ``decode_coords="all"`` moves into the encoding."""
    moved = {key: source.encoding[key] for key in _REFERENCES if key in source.encoding}
    return {**source.attrs, **moved}
