"""Variables of a cube: which are data, which describe it, and which dims the cube has.

Splits, statistics, samples, predictions and scores all use these rules.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, caller_level, listed
from ml4cube.cube.masks_and_labels import (
    LABEL,
    RECIPE_ATTR,
    ROLE_ATTR,
    check_codes,
    check_label,
    is_label,
    is_mask,
)

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

#: Units of dates that samples can hold, in numpy and in CF.
DATE_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

# Names of bounds without attributes (time_bnds, bounds_lon, lat_vertices, time_bound) and of their
# dims (bnds, nv, axis_nbounds, grid_corners).
_BOUNDS = re.compile(
    r"^(bnds|bounds|vertices|corners)(_|$)|(^|_)(bnds?|bounds?|vertex|vertices|corners?)$"
)
_BOUNDS_DIM = re.compile(r"(^|_)n?(bnds?|bounds?|vertex|vertices|corners?)$|^nv(ert)?$")
_MOST_VERTICES = 16  # a longer dim is one of the cube, such as the vertices of a mesh
# How the kind of a variable begins that only the name of its dim tells from data.
_TAKEN_FOR_BOUNDS = "taken for bounds of cells by its dim"
_MOST_NAMED = 3  # variables that a warning names


def cube_dims(ds: xr.Dataset, filter_var: str | None = None) -> tuple[str, ...]:
    """Return the dims of a cube: those of its data variable with most dims, in its order."""
    kinds = not_data(ds, filter_var)
    dims_of = _dims_of_numbers(ds, kinds)
    if not dims_of:
        raise InvalidValueError(
            "the cube has no data variable of numbers, booleans or dates with each dim once, only "
            f"{_variables_with_kinds(ds, kinds)}"
        )
    return tuple(str(dim) for dim in _dims_of_grid(dims_of))


def _dims_of_numbers(
    ds: xr.Dataset, described: Container[Hashable]
) -> dict[str, tuple[Hashable, ...]]:
    """Return the dims of each data variable of numbers, booleans or dates."""
    numeric = {
        str(name): variable
        for name, variable in ds.data_vars.items()
        if name not in described and variable.dtype.kind in "fiubcmM" and not repeats_dim(variable)
    }
    # variables that samples cannot hold count only if there are no others
    held = {name: variable for name, variable in numeric.items() if holds_dtype(variable.dtype)}
    return {name: variable.dims for name, variable in (held or numeric).items()}


def _dims_of_grid(dims_of: Mapping[str, tuple[Hashable, ...]]) -> tuple[Hashable, ...]:
    """Return the dims of the variable with most dims; refuse variables of several grids."""
    most = max(map(len, dims_of.values()))
    first_on_grid: dict[frozenset[Hashable], str] = {}
    for name, dims in dims_of.items():
        if len(dims) == most:
            first_on_grid.setdefault(frozenset(dims), name)
    grid, largest = next(iter(first_on_grid.items()))
    if len(first_on_grid) > 1:
        grids = " and ".join(f"{n!r} with dims {dims_of[n]}" for n in first_on_grid.values())
        on_first_grid = [name for name, dims in dims_of.items() if grid.issuperset(dims)]
        raise InvalidValueError(
            f"the dims of the cube are ambiguous: it has {grids}; select the variables of one "
            f"grid, ds[{on_first_grid}]"
        )
    return dims_of[largest]


def _variables_with_kinds(ds: xr.Dataset, kinds: dict[str, str]) -> str:
    shown = [
        f"{str(name)!r} ({kinds.get(str(name)) or f'{v.dtype} with dims {v.dims}'})"
        for name, v in ds.data_vars.items()
    ]
    return ", ".join(shown) or "coordinates"


def cube_variables(
    ds: xr.Dataset, filter_var: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the variables that samples can hold, and for the others the reason why not."""
    dims, kinds = cube_dims(ds, filter_var), not_data(ds, filter_var)
    label = split_label(ds)
    held: list[str] = []
    reasons: dict[str, str] = {}
    for key, v in ds.data_vars.items():
        name = str(key)
        if name in (filter_var, label):  # not held, and users know why
            continue
        if name in kinds:
            by_attribute = ""
            if ROLE_ATTR in v.attrs:
                by_attribute = f" by its {ROLE_ATTR}"
            reasons[name] = f"is {kinds[name]}{by_attribute}"
        elif not set(v.dims) <= set(dims):
            reasons[name] = f"has dims {v.dims} outside the cube's {dims}"
        elif not holds_dtype(v.dtype):
            reasons[name] = f"is of dtype {v.dtype}"
        elif repeats_dim(v):
            reasons[name] = f"has a dim twice: {v.dims}"
        else:
            held.append(name)
    return held, reasons


def check_left_out(ds: xr.Dataset, reasons: Mapping[str, str] | None = None) -> None:
    """Warn of variables that are left out and may be data; refuse data named like the label.

    `reasons` are those of `cube_variables`; None where variables on any dims are used.
    """
    label = split_label(ds)
    if label is not None and RECIPE_ATTR not in ds[label].attrs and ds[label].variable._in_memory:
        check_codes(label, ds[label].variable)
    kinds = not_data(ds)
    doubtful = {n: f"is {k}" for n, k in kinds.items() if k.startswith(_TAKEN_FOR_BOUNDS)}
    for name, why in (reasons or {}).items():
        if name not in kinds and ds[name].dtype.kind in "fiubc":
            doubtful[name] = why
    if doubtful:
        shown = [f"{name!r} {why}" for name, why in doubtful.items()]
        more = []
        if len(shown) > _MOST_NAMED:
            more = [f"and {len(shown) - _MOST_NAMED} more"]
        warnings.warn(
            f"left out, although it may be data: {'; '.join(shown[:_MOST_NAMED] + more)}",
            stacklevel=caller_level(),
        )


def why_not_held(ds: xr.Dataset, filter_var: str | None = None) -> dict[str, str]:
    """Return why samples do not hold variables of a cube, also of those that users leave out."""
    _, reasons = cube_variables(ds, filter_var)
    kinds = not_data(ds, filter_var)
    return {name: f"is {kind}" for name, kind in kinds.items()} | reasons


def data_variables(ds: xr.Dataset, exclude: Iterable[str] = (), kinds: str = "fiub") -> list[str]:
    """Return the data variables on any dims whose dtype is of one of numpy's `kinds`."""
    others = {*exclude, *not_data(ds), split_label(ds)}
    return [
        str(name)
        for name, v in ds.data_vars.items()
        if name not in others and v.dtype.kind in kinds and not repeats_dim(v)
    ]


def not_data(ds: xr.Dataset, filter_var: str | None = None) -> dict[str, str]:
    """Return the variables that are not data, whatever their dtype, with their kind."""
    found = {}
    for name, variable in ds.variables.items():
        if is_label(name, variable.dtype, variable.attrs):
            found[str(name)] = "the split label"
        elif is_mask(name, variable.dtype, variable.attrs, filter_var):
            found[str(name)] = "a mask"
        elif name in ds.coords:
            found[str(name)] = "a coordinate"
        elif variable.ndim == 0:
            found[str(name)] = "a scalar"
    found = named_by_attributes(ds) | found
    return found | _bounds_by_name(ds, found)


def named_by_attributes(ds: xr.Dataset) -> dict[str, str]:
    """Find bounds, grid mappings and sizes of cells by CF attributes, also in the encoding."""
    mappings = [str(n) for n, v in ds.data_vars.items() if "grid_mapping_name" in v.attrs]
    found = dict.fromkeys(mappings, "a grid mapping")
    # not with cf_xarray, which misses the bounds of a climatology
    for attribute, kind in (
        ("grid_mapping", "a grid mapping"),
        ("bounds", "bounds of cells"),
        ("climatology", "bounds of cells"),
    ):
        for variable in ds.variables.values():
            value = variable.attrs.get(attribute, variable.encoding.get(attribute, ""))
            found.update({name: kind for name in names_in(value) if name in ds.data_vars})
    for variable in ds.variables.values():
        value = variable.attrs.get("cell_measures", variable.encoding.get("cell_measures", ""))
        measures = [word for word in str(value).split() if not word.endswith(":")]
        found.update({name: "sizes of cells" for name in measures if name in ds.data_vars})
    return found


def names_in(attribute: object) -> list[str]:
    """Return the variables that a CF attribute names; a grid mapping may be "crs: x y"."""
    return [word.rstrip(":") for word in str(attribute).split()]


def _bounds_by_name(ds: xr.Dataset, described: Mapping[str, str]) -> dict[str, str]:
    """Find bounds by the name of the variable, or of a dim that no data variable has."""
    variables = {str(n): v for n, v in ds.data_vars.items() if n not in described}
    short_dims = {dim for dim, n in ds.sizes.items() if n <= _MOST_VERTICES}
    by_name = {name for name in variables if _BOUNDS.search(name.lower())}
    dim_of_bounds = _dim_of_bounds(variables, short_dims.difference(ds.coords))
    data_dims = _dims_of_data(variables, by_name.union(dim_of_bounds))
    has_own_dim = _names_along(variables, short_dims - data_dims)
    by_dim = has_own_dim.intersection(dim_of_bounds)
    bounds = _named_after_axis(ds, by_name) | (by_name & has_own_dim)
    kinds: dict[str, str] = {}
    for name in variables:
        if name in bounds:
            kinds[name] = "bounds of cells by its name"
        elif data_dims and name in by_dim:
            # a dim alone tells only beside data that they can be the bounds of
            kinds[name] = (
                f"{_TAKEN_FOR_BOUNDS} {dim_of_bounds[name]!r} (give the dim a coordinate if it is "
                "data)"
            )
    return kinds


def _dim_of_bounds(
    variables: Mapping[str, xr.DataArray], dims: Iterable[Hashable]
) -> dict[str, Hashable]:
    """Return the first dim of each variable that is one of bounds by its name, among some dims."""
    bounds_dims = {dim for dim in dims if _BOUNDS_DIM.search(str(dim).lower())}
    dim_of: dict[str, Hashable] = {}
    for name, variable in variables.items():
        for dim in variable.dims:
            if dim in bounds_dims:
                dim_of.setdefault(name, dim)
    return dim_of


def _dims_of_data(variables: Mapping[str, xr.DataArray], but: Container[str]) -> set[Hashable]:
    """Return the dims of the variables that samples can hold, but for some."""
    dims: set[Hashable] = set()
    for name, variable in variables.items():
        if name not in but and holds_dtype(variable.dtype) and not repeats_dim(variable):
            dims.update(variable.dims)
    return dims


def _names_along(variables: Mapping[str, xr.DataArray], dims: set[Hashable]) -> set[str]:
    """Return the variables along any of some dims."""
    return {name for name, variable in variables.items() if dims.intersection(variable.dims)}


def _named_after_axis(ds: xr.Dataset, names: Iterable[str]) -> set[str]:
    """Return the names that are those of a coordinate or dim, and say that they are its bounds."""
    axis_names = {str(name).lower() for name in (*ds.coords, *ds.dims)}
    return {name for name in names if _BOUNDS.sub("", name.lower()) in axis_names}


def split_label(ds: xr.Dataset) -> str | None:
    """Return the name of the variable with the part of each cell."""
    if LABEL in ds.variables:
        check_label(LABEL, ds.variables[LABEL])
        return LABEL
    found = [str(n) for n, v in ds.variables.items() if is_label(n, v.dtype, v.attrs)]
    if len(found) > 1:
        raise InvalidValueError(
            f"only one variable can be the split label, got {listed(found)}; rename it to 'split'"
        )
    if found:
        return found[0]
    # a renamed and then aligned label looks like data computed with a label
    for name, var in ds.variables.items():
        if RECIPE_ATTR in var.attrs and var.dtype.kind != "b":
            logger.warning(
                "%r of %s is treated as data computed with a split label; rename it to 'split' if "
                "it is the label",
                name,
                var.dtype,
            )
    return None


def repeats_dim(variable: xr.Variable | xr.DataArray) -> bool:
    """Return True if a variable has a dim twice, such as a covariance; no window fits it."""
    return len(set(variable.dims)) < variable.ndim


def holds_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if samples can hold a dtype."""
    if dtype.kind == "M":
        return np.datetime_data(dtype)[0] in DATE_UNITS
    return dtype.kind in "fiub" and dtype.itemsize <= 8
