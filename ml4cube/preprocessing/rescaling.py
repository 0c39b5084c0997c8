"""Apply a scaling to cubes and samples, or undo it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_real, prefixed
from ml4cube.core.missing import masked_to_gaps
from ml4cube.core.scaling import ENTRIES_ATTR, decode_entries, match_entries
from ml4cube.core.statistics import (
    offset_and_scale,
    scale_parameters,
    scale_values,
    scaled_attrs,
    scaled_dtype,
    unscaled_attrs,
)
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.cube import masks_and_labels as roles
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
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
    """Rescale one array of any kind by the statistics of each cell, lazily if it is lazy."""
    offset, scale = xr.broadcast(xr.DataArray(offset), xr.DataArray(scale))
    if not isinstance(array, xr.DataArray):
        if offset.dims:
            raise InvalidTypeError(
                f"the statistics of {name!r} keep dims, so its values must be a DataArray or in a "
                f"Dataset, got {type(array).__name__}"
            )
        array = xr.DataArray(array if hasattr(array, "dask") else masked_to_gaps(array))
        return rescale_array(name, array, offset, scale, arithmetic).data
    check_real(f"variable {name!r}", array.dtype)
    cubes.check_decoded(name, array)
    array = read_in_blocks(array)
    entries = _entries(name, array, offset) if offset.dims else []
    if array.chunks is not None:
        chunks = array.variable.chunksizes
        entries = [one.chunk({d: chunks[d] for d in one.dims}) for one in entries]
    result: xr.DataArray = xr.apply_ufunc(
        partial(_at_entries, arithmetic, offset.values, scale.values),
        array,
        *entries,
        dask="parallelized",
        output_dtypes=[scaled_dtype(array.dtype)],
        keep_attrs="override",
    )
    update = scaled_attrs if arithmetic is scale_values else unscaled_attrs
    result.attrs = update(result.attrs)
    return result


def _at_entries(
    arithmetic: Rescale,
    offset: NDArray[Any],
    scale: NDArray[Any],
    values: NDArray[Any],
    *entries: NDArray[Any],
) -> Any:
    """Rescale a block, whose memory is all that this needs."""
    return arithmetic(values, offset[entries], scale[entries])


def _entries(name: str, array: xr.DataArray, offset: xr.DataArray) -> list[xr.Variable]:
    """Return the entry of the statistics for each cell."""
    if ENTRIES_ATTR in array.attrs:
        return _of_samples(array, offset.shape)
    dims = [str(dim) for dim in offset.dims]
    labels = {dim: offset.indexes[dim].values for dim in dims if dim in offset.indexes}
    coords = {str(d): array.indexes[d].values for d in array.dims if d in array.indexes}
    sizes = {str(dim): n for dim, n in array.sizes.items()}
    places = match_entries(name, dims, offset, labels, sizes, coords)
    return [xr.Variable((dim,), along) for dim, along in places]


def _of_samples(array: xr.DataArray, shape: tuple[int, ...]) -> list[xr.Variable]:
    """Return the entry of the statistics for each cell of a store's samples, by their origins."""
    name, places = array.name, array.attrs[ENTRIES_ATTR]
    if len(places) != len(shape):
        raise InvalidValueError(
            f"the samples of {name!r} were scaled by statistics along {[p[0] for p in places]}, "
            f"got statistics of shape {shape}; use those of the store (StoreMetadata.of(...))"
        )
    entries = []
    for axis, ((dim, along), (_, _, kept, cells)) in enumerate(
        zip(decode_entries(places), places, strict=True)
    ):
        index = array.coords.get(f"{dim}_index")
        if index is None or (kept and array.sizes.get(kept) != cells):
            raise InvalidValueError(
                f"the origins of the samples of {name!r} along {dim!r} are unknown: they need the "
                f"coordinate '{dim}_index'{f' and all {cells} cells along {kept!r}' * bool(kept)}; "
                "undo the scaling before you select or rename"
            )
        first = index.variable
        cell = first + xr.Variable((kept,), np.arange(cells)) if kept else first
        found = along[np.asarray(cell.values, np.intp)]
        if found.size and found.max() >= shape[axis]:
            raise InvalidValueError(
                f"the samples of {name!r} were scaled by other statistics, longer than "
                f"{shape[axis]} along {dim!r}; use those of the store (StoreMetadata.of(...))"
            )
        entries.append(xr.Variable(cell.dims, found))
    return entries


def labelled(stats: core.VariableStatistics, values: Any) -> Any:
    """Return statistics as a number, or as a DataArray with their dims and coordinates."""
    if not isinstance(stats, FieldStatistics) or not stats.dims:
        return float(values)
    coords = {dim: (dim, labels) for dim, labels in stats.labels.items()}
    return xr.DataArray(values, coords, stats.dims)
