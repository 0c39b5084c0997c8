"""What a cube holds: its data variables, label and masks, and how it is read block by block."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.axes import same_coordinate
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.missing import check_mask
from ml4cube.core.split_plan import EXCLUDED, PARTS
from ml4cube.cube import roles
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.variables import not_data, split_label

logger = logging.getLogger(__name__)

Cube = xr.Dataset | xr.DataArray | Mapping[str, Any]


def check_cube(ds: object) -> None:
    """Refuse what is neither a labelled cube nor a dict of arrays."""
    if not isinstance(ds, xr.Dataset | xr.DataArray | Mapping):
        raise InvalidTypeError(
            f"ds is a {type(ds).__name__}; give an xarray Dataset or DataArray, or a dict of "
            "arrays laid out (samples, *window)"
        )


def like_given(result: xr.Dataset, given: xr.Dataset | xr.DataArray) -> Any:
    """Give back a DataArray where a DataArray was given."""
    if isinstance(given, xr.Dataset):
        return result
    return result[roles.DATA_VAR if given.name is None else str(given.name)].rename(given.name)


def names(argument: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Read a list of variable names; one string is one name."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    listed = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(name, str) for name in listed):
        raise InvalidTypeError(f"{argument}={given!r} is no list of variable names")
    return tuple(str(name) for name in listed)


def check_known(argument: str, wanted: Iterable[str], known: Iterable[Any]) -> None:
    """Refuse names that a cube does not have."""
    listed = [str(name) for name in known]
    for name in wanted:
        check_choice(argument, name, listed)


def only_data(
    argument: str,
    wanted: Sequence[str],
    given: xr.Dataset | Mapping[str, Any],
    filter_var: str | None = roles.FILTER_VAR,
) -> tuple[str, ...]:
    """Select the data variables of a cube among names, which may be all of ``ds.data_vars``."""
    cube = given if isinstance(given, xr.Dataset) else None
    check_known(argument, wanted, given if cube is None else cube.variables)
    if cube is not None:
        others = not_data(cube, filter_var)
    else:
        others = {"split": "the split label", str(filter_var): "a mask"}
    wrong = {name: others[name] for name in wanted if name in others}
    coords = [name for name in wrong if cube is not None and name in cube.coords]
    if coords or (wanted and wrong.keys() == set(wanted)):
        found = ", ".join(f"{name!r}, which is {wrong[name]}" for name in coords or wrong)
        as_data = [name for name in coords if cube is not None and name not in cube.dims]
        named = as_data[0] if len(as_data) == 1 else as_data
        hint = f", or make data of it by ds.reset_coords({named!r})" if as_data else ""
        raise InvalidValueError(f"{argument} lists {found}, no data variable; leave it out{hint}")
    return tuple(name for name in wanted if name not in wrong)


def check_places(argument: str, array: xr.DataArray, cube: xr.Dataset | xr.DataArray) -> None:
    """Refuse an array whose cells, matched by position, would not be the cube's."""
    for dim, n in array.sizes.items():
        if n != cube.sizes[dim]:
            raise InvalidValueError(
                f"{argument} has {n} cells along {dim!r}, the cube {cube.sizes[dim]}; select the "
                "same cells, as with reindex_like"
            )
        if dim not in array.coords or dim not in cube.coords:
            continue
        given, wanted = array.coords[dim].values, cube.coords[dim].values
        if not same_coordinate(given, wanted):
            raise InvalidValueError(
                f"{argument} has other {dim!r} coordinates ({given[0]} to {given[-1]}) than the "
                f"cube ({wanted[0]} to {wanted[-1]}); select the same cells, as with reindex_like"
            )


def has_mask(present: Mapping[Any, Any], filter_var: str | None) -> bool:
    """Tell whether a mask is there; refuse a name that only a typo explains."""
    if filter_var is None or (filter_var == roles.FILTER_VAR and filter_var not in present):
        return False
    check_known("filter_var", [filter_var], present)
    return True


def with_arrays(cube: xr.Dataset, arrays: Mapping[str, xr.DataArray]) -> xr.Dataset:
    """Put arrays in the place of variables that they were made from."""
    return cube.assign({name: array.variable for name, array in arrays.items()})


def check_decoded(name: str, variable: xr.Variable | xr.DataArray) -> None:
    """Refuse packed integers whose scale is still in the attributes, and pandas' own dtypes."""
    core.check_decoded(name, variable.dtype, variable.attrs)


def check_no_fill_value(
    name: str, stats: core.VariableStatistics, variable: xr.Variable | xr.DataArray
) -> None:
    """Refuse values of which the extreme ones are what the attributes call a gap."""
    # The attribute alone is no proof: it stays where a user turned fill values into NaN.
    for key in ("_FillValue", "missing_value"):
        fill = np.ravel(variable.attrs.get(key, ()))
        if fill.dtype.kind not in "iuf" or variable.dtype.kind != "f":
            continue  # integers with such an attribute are refused before they are read
        with np.errstate(over="ignore"):  # beyond the dtype's range it cannot be among the values
            fill = fill.astype(variable.dtype).astype(np.float64)
        for value in fill:
            if np.any(np.equal(stats.min, value)) or np.any(np.equal(stats.max, value)):
                raise InvalidValueError(
                    f"variable {name!r} holds values of {value:g}, which its {key} says are gaps; "
                    "open the source with mask_and_scale=True, or apply xarray.decode_cf"
                )


def cells_of_part(ds: xr.Dataset, split: str | None) -> tuple[xr.Variable | None, str]:
    """Select the cells of one part."""
    check_choice("split", split, (*PARTS, None))
    label = split_label(ds)
    if split is None or (label is None and split == "train"):
        return None, "all"
    if label is None:
        raise InvalidValueError(
            f"split={split!r} asks for a part, but the cube has no split label; "
            "assign one, e.g. by assign_block_split"
        )
    variable = ds.variables[label]
    if variable.dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"the label {label!r} is of {variable.dtype}; give numbers: train 1, test 0, val 2, "
            "excluded 255"
        )
    known = {dim for name, other in ds.data_vars.items() if name != label for dim in other.dims}
    if strange := [dim for dim in variable.dims if dim not in known]:
        raise InvalidValueError(
            f"the label {label!r} lies along {strange}, but no variable does, so it says nothing "
            f"of their cells; rename its dims to some of {sorted(map(str, known))}"
        )
    if variable.dtype.kind == "f":
        _check_codes(label, variable)
    logger.info("using the %s part only, as %r says (split=None uses every cell)", split, label)
    return variable == PARTS[split], split


def _check_codes(label: str, variable: xr.Variable) -> None:
    """Refuse a label that was averaged: the mean of validation and test is 1, which is train."""
    # Whole numbers cannot have been; floats may hold the codes, and gaps where a cube was aligned.
    known = variable.isnull()
    for code in (*PARTS.values(), EXCLUDED):
        known = known | (variable == code)
    if not bool(known.all()):
        raise InvalidValueError(
            f"the label {label!r} holds numbers that are no part's ({sorted(PARTS.values())} or "
            f"{EXCLUDED}), as one does that was averaged with its cube; take it off first "
            f"(ds.drop_vars({label!r})) and split the coarser cube anew"
        )


def fitted(cells: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Reduce a flag per cell to the dims that a variable has."""
    spare = [dim for dim in cells.dims if dim not in variable.dims]
    return cells.any(spare) if spare else cells


def spread(cells: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Broadcast a flag per cell to a variable's dims, by name."""
    cells = fitted(cells, variable)
    sizes = {dim: n for dim, n in variable.sizes.items() if dim not in cells.dims}
    full: xr.Variable = cells.set_dims({**sizes, **cells.sizes})  # type: ignore[no-untyped-call]
    return full.transpose(*variable.dims)


def flags(mask: xr.Variable) -> xr.Variable:
    """Turn a mask's numbers into flags."""
    check_mask("the mask", mask.dtype)
    mask = read_in_blocks(mask)
    present: xr.Variable = mask.notnull()
    return present & mask.astype(bool)


def is_lazy(*arrays: Any) -> bool:
    """Tell whether any array is a dask array."""
    return any(array is not None and array.chunks is not None for array in arrays)


def with_samples(array: NDArray[Any], shape: Sequence[int], what: str) -> NDArray[Any]:
    """Give a label or mask of samples a leading dim of samples, if it lacks one."""
    n, *window = shape
    if array.shape == tuple(shape):
        return array
    by_sample = array.shape[:1] == (n,) and _ends_with(tuple(window), array.shape[1:])
    static = _ends_with(tuple(window), array.shape)
    if by_sample and static and array.ndim > 1:
        raise InvalidValueError(
            f"{what} of shape {array.shape} may be read with or without samples for data of "
            f"shape {tuple(shape)}; give it the full shape"
        )
    if not by_sample and not static:
        raise InvalidValueError(
            f"{what} has shape {array.shape}, the data {tuple(shape)}; give one value per "
            "sample, per window cell, or per cell"
        )
    return array if by_sample else np.broadcast_to(array, (n, *array.shape))


def to_shape(array: NDArray[Any], shape: Sequence[int], what: str) -> NDArray[Any]:
    """Repeat a label or mask along the window dims that it lacks."""
    target = tuple(shape)
    if array.shape[:1] != target[:1] or not _ends_with(target[1:], array.shape[1:]):
        raise InvalidValueError(f"{what} of shape {array.shape} does not fit data of {target}")
    missing = (1,) * (len(target) - array.ndim)
    return np.broadcast_to(array.reshape(array.shape[0], *missing, *array.shape[1:]), target)


def _ends_with(shape: tuple[int, ...], ending: tuple[int, ...]) -> bool:
    """Whether `shape` ends with `ending`, which may be empty."""
    return len(ending) <= len(shape) and shape[len(shape) - len(ending) :] == ending
