"""The predicted cube before its values: variables, dims, coordinates, attributes, chunks."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ml4cube.core.axes import has_distances, is_time
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.statistics import NODATA
from ml4cube.cube.classes import FLAGS
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.cube.variables import cube_dims, names_in
from ml4cube.prediction.geometry import DimWindows, Windows
from ml4cube.prediction.layout import Layout, Variable, int_if_whole
from ml4cube.prediction.placing import forecast_coords
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


def make_template(
    cube: xr.Dataset,
    windows: Windows,
    layout: Layout,
    block_size: Mapping[str, int],
    default: np.dtype[Any],
    description: Mapping[str, Any],
    *,
    with_spread: bool,
    reduce: str | None,
) -> xr.Dataset:
    """Return the predicted cube with gaps for values, lazy, in blocks.

    `block_size` has the entries of a block along each axis of the result.
    """
    sizes = {d: n for d, n in windows.result_shape.items() if d not in windows.unused_dims}
    variables, coords = {}, _coords(windows)
    names = [variable.name for variable in layout.variables]
    for variable in layout.variables:
        is_label = variable.is_probability and reduce == "argmax"
        own = _sizes(cube, variable, sizes)
        own_chunks = dict(block_size)
        if variable.dim is not None and not is_label:
            if coords.get(variable.dim, xr.Variable((), 0)).shape not in ((), (variable.channels,)):
                raise InvalidValueError(
                    f"all targets must have as many outputs along {variable.dim!r}; name others by "
                    "outputs="
                )
            if variable.dim in names:
                raise InvalidValueError(
                    f"a variable of the result cannot have the name of a dim, {variable.dim!r}; "
                    "rename it in the cube and in the data of the training"
                )
            own = _with_dim(variable, own)
            own_chunks[variable.dim] = variable.channels
            coords[variable.dim] = xr.Variable(variable.dim, np.array(variable.labels))
        dtype = _dtype(cube, variable, default)
        attrs = _attrs(cube, layout, variable, is_label=is_label)
        variables[variable.name] = gaps_like(own, own_chunks, dtype, attrs)
        if with_spread and not is_label:
            spread = {**attrs, "long_name": f"standard deviation of {variable.name} over members"}
            spread.pop("standard_name", None)
            variables[f"{variable.name}_spread"] = gaps_like(own, own_chunks, dtype, spread)
    return empty_prediction(cube, variables, coords, windows.lost_dims, description)


def _sizes(cube: xr.Dataset, variable: Variable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the dims of a variable, in the order of its target if the cube has it."""
    if variable.target in cube.data_vars:
        order = [str(dim) for dim in cube[variable.target].dims]
        if set(order) == set(sizes):
            return {dim: sizes[dim] for dim in order}
    return dict(sizes)


def _with_dim(variable: Variable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Add the dim of several outputs: before the dims of the cube."""
    assert variable.dim is not None
    of_forecast = {dim: n for dim, n in sizes.items() if dim in (INIT, LEAD)}
    return {**of_forecast, variable.dim: variable.channels, **sizes}


def _dtype(cube: xr.Dataset, variable: Variable, default: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a target: its own in the cube if that is a float."""
    if variable.target in cube.data_vars and cube[variable.target].dtype.kind == "f":
        return cube[variable.target].dtype.newbyteorder("=")
    return default.newbyteorder("=")


def _attrs(
    cube: xr.Dataset, layout: Layout, variable: Variable, *, is_label: bool
) -> dict[str, Any]:
    """Return the attributes of a variable: those of its target, as far as they hold for it."""
    if variable.target is None:
        return {"long_name": "embedding", "units": "1"}
    attrs = target_attrs(cube, variable.target, layout.expected.attrs[variable.target])
    if is_label:
        attrs.pop("units", None)  # of what the labels were computed from
        return _with_flags(attrs, variable)
    if variable.is_probability:
        for key in (*FLAGS, "standard_name"):
            attrs.pop(key, None)
        attrs |= {"long_name": f"probability of the classes of {variable.target}", "units": "1"}
    elif variable.name != variable.target:
        attrs.pop("standard_name", None)
        attrs["long_name"] = variable.name.replace("_", " ")
        if variable.power == 2 and "units" in attrs:
            attrs["units"] = f"({attrs['units']})2"
    return attrs


def _with_flags(attrs: dict[str, Any], variable: Variable) -> dict[str, Any]:
    """Add the flags of a variable's classes, unless the target's flags have them all."""
    values = variable.class_values.tolist()
    target_flags = np.ravel(attrs.get("flag_values", ())).tolist()
    if set(values) <= set(target_flags):
        return attrs
    attrs["flag_values"] = list(map(int_if_whole, values))
    if not variable.has_numbers:
        attrs["flag_meanings"] = " ".join(str(n).replace(" ", "_") for n in variable.labels)
    elif target_flags or len(str(attrs.get("flag_meanings", "")).split()) != len(values):
        attrs.pop("flag_meanings", None)  # of other classes
    return attrs


def _coords(windows: Windows) -> dict[str, xr.Variable]:
    """Return coordinates of the result that the cube does not have."""
    coords: dict[str, xr.Variable] = {}
    for dim, of_dim in windows.dims.items():
        axis = windows.coords.get(dim)
        if of_dim.is_lead:
            assert axis is not None
            inits = of_dim.starts + of_dim.known_size - 1
            leads = of_dim.offset - of_dim.known_size + 1 + np.arange(of_dim.target_size)
            coords |= forecast_coords(axis, inits, leads)
        elif of_dim.is_single and axis is not None:
            coords |= _coord_of_windows(dim, axis, of_dim)
    return coords


def _coord_of_windows(dim: str, axis: xr.Variable, windows: DimWindows) -> dict[str, xr.Variable]:
    """Return the coordinate of windows that give one value: of the target cell, or the middle."""
    values = np.asarray(axis.values)
    first = windows.starts + windows.offset
    last = first + windows.target_size - 1
    is_only = len(first) == 1
    places = values[first]
    if (first != last).any():
        if is_only or not has_distances(values):
            return {}
        places = values[first] + (values[last] - values[first]) / 2
    if is_only:
        return {dim: xr.Variable((), places[0], axis.attrs)}
    return {dim: xr.Variable(dim, places, axis.attrs)}


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
