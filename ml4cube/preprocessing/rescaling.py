"""Apply a scaling to cubes and samples, or undo it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, prefixed
from ml4cube.core.missing import plain
from ml4cube.core.statistics import (
    check_real,
    offset_and_scale,
    scale_parameters,
    scale_values,
    scaled_attrs,
    scaled_dtype,
    unscaled_attrs,
)
from ml4cube.cube import masks_and_labels as roles
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.rescaling import labelled, rescale_at_places
from ml4cube.cube.variables import is_mask, split_label
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.samples import Samples, like_given

#: Statistics, or two numbers of each variable: [mean, std] or [min, max].
Pairs = Mapping[str, Sequence[Any] | core.VariableStatistics]
#: `scale_values` or `unscale_values`.
Rescale = Callable[..., Any]


def rescale(
    ds: cubes.Cube,
    pairs: Pairs,
    argument: str,
    scale_fn: str,
    arithmetic: Rescale,
    filter_var: str | None = None,
) -> Any:
    """Rescale every variable that has a pair of numbers, except labels and masks."""
    cubes.check_cube(ds)
    if not isinstance(pairs, Mapping):
        raise InvalidTypeError(
            f"{argument} must be a mapping {{variable: [a, b]}}, got {type(pairs).__name__}"
        )
    arrays: Mapping[Any, Any]
    excluded: set[Any]
    if not isinstance(ds, xr.Dataset | xr.DataArray):
        cubes.has_mask(ds, filter_var)
        arrays, excluded = ds, {"split", filter_var}
    else:
        if isinstance(ds, xr.DataArray) and ds.name is None and len(pairs) == 1:
            pairs = {roles.DATA_VAR: next(iter(pairs.values()))}
        cube = as_dataset(ds)
        cubes.has_mask(cube.variables, filter_var)
        arrays = cube.data_vars
        excluded = {n for n in arrays if is_mask(n, cube, filter_var)} | {split_label(cube)}
    wanted = [str(name) for name in arrays if name in pairs and name not in excluded]
    if not wanted:
        raise InvalidValueError(
            f"{argument} has {list(pairs)}, the data have {list(arrays)}: no variable in common"
        )
    numbers = {n: _numbers(f"{argument}[{n!r}]", pairs[n], scale_fn) for n in wanted}
    scaled = {n: rescale_array(n, arrays[n], *numbers[n], arithmetic) for n in wanted}
    if isinstance(ds, xr.Dataset | xr.DataArray):
        return like_given(cubes.with_arrays(cube, scaled), ds)
    return Samples({**ds, **scaled}, getattr(ds, "accounting", None))


def _numbers(called: str, entry: Any, scale_fn: str) -> tuple[Any, Any]:
    """Return offset and scale by two numbers or by statistics, which may have dims."""
    if not isinstance(entry, core.VariableStatistics):
        return offset_and_scale(called, entry, scale_fn, (xr.DataArray,))
    with prefixed(called):
        offset, scale = scale_parameters(entry, scale_fn)
    return labelled(entry, offset), labelled(entry, scale)


def rescale_array(name: str, array: Any, offset: Any, scale: Any, arithmetic: Rescale) -> Any:
    """Rescale one array of any kind, lazily if it is lazy."""
    differs = isinstance(offset, xr.DataArray) or isinstance(scale, xr.DataArray)
    if not isinstance(array, xr.DataArray):
        if differs:
            raise InvalidTypeError(
                f"the statistics of {name!r} keep dims, so its values must be a DataArray or in a "
                f"Dataset, got {type(array).__name__}"
            )
        array = xr.DataArray(array if hasattr(array, "dask") else plain(array))
        return rescale_array(name, array, offset, scale, arithmetic).data
    check_real(name, array.dtype)
    cubes.check_decoded(name, array)
    if differs:
        offset, scale = xr.broadcast(xr.DataArray(offset), xr.DataArray(scale))
        dims = [str(dim) for dim in offset.dims]
        labels = {dim: offset.indexes[dim].values for dim in dims if dim in offset.indexes}
        numbers = (offset.values, scale.values)
        result = rescale_at_places(array, arithmetic, *numbers, dims, labels)
    else:
        result = xr.apply_ufunc(
            arithmetic,
            read_in_blocks(array),
            kwargs={"offset": offset, "scale": scale},
            dask="parallelized",
            output_dtypes=[scaled_dtype(array.dtype)],
            keep_attrs="override",
        )
    update = scaled_attrs if arithmetic is scale_values else unscaled_attrs
    result.attrs = update(result.attrs)
    return result
