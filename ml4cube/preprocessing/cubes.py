"""Checks of cubes, and the label and masks of a cube."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level, check_choice
from ml4cube.core.missing import bool_mask, check_mask
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import NODATA, VariableStatistics
from ml4cube.cube import masks_and_labels
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import not_data, split_label
from ml4cube.ledger.locations import store_and_path

logger = logging.getLogger(__name__)

Opened = xr.Dataset | xr.DataArray | Mapping[str, Any]
Cube = Opened | str | os.PathLike[str]
Flags = TypeVar("Flags", xr.Variable, xr.DataArray)


def opened(ds: Any) -> Opened:
    """Return a cube of any kind, or samples; a path, store or session is opened."""
    if isinstance(ds, xr.Dataset | xr.DataArray | Mapping):
        return ds
    if isinstance(ds, str | os.PathLike) or store_and_path(ds)[0] is not None:
        return as_dataset(ds)
    raise InvalidTypeError(
        "ds must be a Dataset, a DataArray, a path, a zarr store or group, or a dict of arrays "
        f"(samples, *window), got {type(ds).__name__}"
    )


def check_known(argument: str, wanted: Iterable[str], known: Iterable[Any]) -> None:
    """Refuse names that a cube does not have."""
    listed = [str(name) for name in known]
    for name in wanted:
        check_choice(argument, name, listed)


def only_data(
    argument: str,
    wanted: Sequence[str],
    cube: xr.Dataset,
    filter_var: str | None = masks_and_labels.FILTER_VAR,
) -> tuple[str, ...]:
    """Return those names that are data variables; refuse coordinates, and a list of no data."""
    check_known(argument, wanted, cube.variables)
    others = not_data(cube, filter_var)
    # masks and labels may be listed, as by list(ds.data_vars)
    wrong = {name: others[name] for name in wanted if name in others}
    coords = [name for name in wrong if name in cube.coords]
    if coords or (wanted and wrong.keys() == set(wanted)):
        found = ", ".join(f"{name!r} ({wrong[name]})" for name in coords or wrong)
        hint = ""
        if coords:
            hint = "; ds.reset_coords() turns coordinates into data variables"
        raise InvalidValueError(f"{argument} must be data variables, got {found}{hint}")
    return tuple(name for name in wanted if name not in wrong)


def present_mask(names: Iterable[Any], filter_var: str | None) -> str | None:
    """Return the name of the mask if it is present; refuse an unknown name but the default."""
    names = list(names)
    is_missing_default = filter_var == masks_and_labels.FILTER_VAR and filter_var not in names
    if filter_var is None or is_missing_default:
        return None
    check_known("filter_var", [filter_var], names)
    return filter_var


def with_arrays(cube: xr.Dataset, arrays: Mapping[str, xr.DataArray]) -> xr.Dataset:
    """Replace variables of a cube."""
    return cube.assign({name: array.variable for name, array in arrays.items()})


def check_no_fill_value(
    name: str, stats: VariableStatistics, variable: xr.Variable | xr.DataArray
) -> None:
    """Refuse values whose minimum or maximum is the fill value in the attributes."""
    # the attribute alone proves nothing: it stays after a user has turned fill values into NaN
    for key in ("_FillValue", "missing_value"):
        fill = np.ravel(variable.attrs.get(key, ()))
        if fill.dtype.kind not in "iuf" or variable.dtype.kind != "f":
            continue  # such integers are refused before they are read
        with np.errstate(over="ignore"):  # outside the dtype's range
            fill = fill.astype(variable.dtype).astype(np.float64)
        for value in fill:
            if np.any(np.equal(stats.min, value)) or np.any(np.equal(stats.max, value)):
                raise InvalidValueError(
                    f"variable {name!r} holds its {key} {value:g} as values; open the source with "
                    "mask_and_scale=True, or apply xarray.decode_cf"
                )
    _warn_of_invalid(name, stats, variable)


def _warn_of_invalid(
    name: str, stats: VariableStatistics, variable: xr.Variable | xr.DataArray
) -> None:
    """Warn of values that the attributes call invalid, as far as minimum and maximum show them."""
    least, most = float(np.min(stats.min)), float(np.max(stats.max))
    low, high = valid_range(variable)
    # values in 32 bits, or unpacked ones, are rounded
    rounding = 1e-6 * max(abs(end) for end in (low, high, 0.0) if np.isfinite(end))
    nodata = [value for value in nodata_values(variable) if value in (least, most)]
    if nodata:
        said = f"whose attributes say that {nodata[0]:g} is no value, has it as one"
    elif least < low - rounding or most > high + rounding:
        said = f"valid from {low:g} to {high:g} by its attributes, is from {least:g} to {most:g}"
    else:
        return
    warnings.warn(
        f"variable {name!r}, {said}; make such cells gaps (ds.where), or correct the attributes",
        stacklevel=caller_level(),
    )


def nodata_values(variable: xr.Variable | xr.DataArray) -> list[float]:
    """Return the numbers that mean a gap by attributes that xarray does not decode."""
    values: list[float] = []
    for key, value in variable.attrs.items():
        numbers = np.ravel(value)
        if str(key).lower().strip("_") in NODATA and numbers.dtype.kind in "iuf":
            values += numbers.astype(np.float64).tolist()
    return values


def valid_range(variable: xr.Variable | xr.DataArray) -> tuple[float, float]:
    """Return the least and the greatest valid value by CF's attributes; infinite without them."""
    attrs = variable.attrs
    both = np.ravel(attrs.get("valid_range", ()))
    low, high = both if both.size == 2 else (attrs.get("valid_min"), attrs.get("valid_max"))
    return _limit(low, variable.encoding, -np.inf), _limit(high, variable.encoding, np.inf)


def _limit(value: Any, encoding: Mapping[Any, Any], default: float) -> float:
    number = np.asarray(value)
    if number.dtype.kind not in "iuf" or number.size != 1 or np.isnan(number):
        return default
    if number.dtype.kind == "f":
        return float(number)
    # CF: an integer is that of packed values, if these are packed
    scale, offset = encoding.get("scale_factor", 1.0), encoding.get("add_offset", 0.0)
    return float(number.item() * scale + offset)


def cells_of_part(ds: xr.Dataset, split: str | None) -> tuple[xr.Variable | None, str]:
    """Return the cells of one part, None for all, and its name; all if there is no label."""
    label, part = label_of_part(ds, split)
    return None if label is None else label == PARTS[part], part


def label_of_part(ds: xr.Dataset, split: str | None) -> tuple[xr.Variable | None, str]:
    """Return the split label of a cube, None if all cells are used, and the name of the part."""
    check_choice("split", split, (*PARTS, None))
    label = split_label(ds)
    if split is None or (label is None and split == "train"):
        return None, "all"
    if label is None:
        raise InvalidValueError(
            f"split={split!r} needs a split label, which the cube lacks; assign one, as with "
            "assign_block_split"
        )
    variable = ds.variables[label]
    dims = {dim for name, other in ds.data_vars.items() if name != label for dim in other.dims}
    if strange := [dim for dim in variable.dims if dim not in dims]:
        raise InvalidValueError(
            f"the split label {label!r} has the dims {strange}, which no variable has; rename them "
            f"to some of {sorted(map(str, dims))}"
        )
    if variable.dtype.kind == "f" or masks_and_labels.RECIPE_ATTR not in variable.attrs:
        masks_and_labels.check_codes(label, variable)
    logger.info("using only the %s part of %r (split=None uses every cell)", split, label)
    return variable, split


def as_flags(mask: xr.Variable) -> xr.Variable:
    """Convert a mask to booleans; NaN is False."""
    check_mask("the mask", mask.dtype)
    flags: xr.Variable = xr.apply_ufunc(
        bool_mask, read_in_blocks(mask), dask="parallelized", output_dtypes=[np.bool_]
    )
    return flags


def any_over_other_dims(flags: xr.Variable, dims: Sequence[Hashable]) -> xr.Variable:
    """Return where any flag is set along the dims that are not in `dims`."""
    others = [dim for dim in flags.dims if dim not in dims]
    if others:
        return flags.any(others)
    return flags


def all_over_other_dims(flags: Flags, dims: Sequence[Hashable]) -> Flags:
    """Return where flags are set at all steps of the dims that are not in `dims`.

    So that no cell of a variable is in two parts, if the levels of another are.
    """
    others = [dim for dim in flags.dims if dim not in dims]
    if others:
        return flags.all(others)
    return flags


def broadcast_to(variable: xr.Variable, sizes: Mapping[Any, int]) -> xr.Variable:
    """Broadcast to dims by name; flags may have other dims, along which any counts."""
    full: xr.Variable = any_over_other_dims(variable, list(sizes)).set_dims(sizes)  # type: ignore[no-untyped-call]
    return full
