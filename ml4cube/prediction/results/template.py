"""The predicted cube before its values: variables, dims, coordinates, attributes, chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import has_distances
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.classes import FLAGS
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.prediction.results.cf import empty_prediction, gaps_like, target_attrs
from ml4cube.prediction.results.layout import Layout, Variable, int_if_whole
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.dates import forecast_coords
from ml4cube.prediction.windows.geometry import DimWindows


def make_template(
    cube: xr.Dataset,
    spec: PredictionSpec,
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
    windows = spec.windows
    sizes = {d: n for d, n in windows.result_shape.items() if d not in windows.unused_dims}
    variables, coords = {}, _coords(spec)
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
        attrs = _attrs(cube, spec, variable, is_label=is_label)
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
    cube: xr.Dataset, spec: PredictionSpec, variable: Variable, *, is_label: bool
) -> dict[str, Any]:
    """Return the attributes of a variable: those of its target, as far as they hold for it."""
    if variable.target is None:
        return {"long_name": "embedding", "units": "1"}
    attrs = target_attrs(cube, variable.target, spec.source_attrs.get(variable.target, {}))
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


def _coords(spec: PredictionSpec) -> dict[str, xr.Variable]:
    """Return coordinates of the result that the cube does not have."""
    coords: dict[str, xr.Variable] = {}
    for dim, windows in spec.windows.dims.items():
        axis = spec.axes.get(dim)
        if windows.is_lead:
            assert axis is not None
            inits = windows.starts + windows.known_size - 1
            leads = windows.offset - windows.known_size + 1 + np.arange(windows.target_size)
            coords |= forecast_coords(axis, inits, leads)
        elif windows.is_single and axis is not None:
            coords |= _coord_of_windows(dim, axis, windows)
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
