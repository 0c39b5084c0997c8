"""Apply a scaling to cubes and samples, or undo it.

Statistics that keep dims have an entry for each level, pixel or month. A cell of a cube is rescaled
by the entry of its coordinates, a cell of a store's samples by that of its position in the cube.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.climatology import GROUPS
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_real, prefixed
from ml4cube.core.missing import masked_to_gaps
from ml4cube.core.scaling import ENTRIES_ATTR, decode_entries, match_entries
from ml4cube.core.statistics import (
    check_decoded,
    offset_and_scale,
    scale_parameters,
    scale_values,
    scaled_attrs,
    scaled_dtype,
    unscaled_attrs,
    unscaled_dtype,
)
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.cube import masks_and_labels
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import split_label
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.samples import Samples, like_given

logger = logging.getLogger(__name__)

#: Of each variable: [mean, std] or [min, max], or statistics.
Pairs = Mapping[str, Sequence[Any] | core.VariableStatistics]
#: `scale_values` or `unscale_values`.
RescaleValues = Callable[..., Any]


def rescale(
    ds: cubes.Cube,
    pairs: Pairs,
    argument: str,
    scale_fn: str,
    rescale_values: RescaleValues,
    filter_var: str | None = None,
) -> Any:
    """Rescale every variable that has a pair of numbers, except labels and masks."""
    ds = cubes.opened(ds)
    if not isinstance(pairs, Mapping):
        raise InvalidTypeError(
            f"{argument} must be a mapping {{variable: [a, b]}}, got {type(pairs).__name__}"
        )
    arrays: Mapping[Any, Any]
    if isinstance(ds, xr.Dataset | xr.DataArray):
        pairs = _pairs_of_cube(pairs, ds)
        cube = as_dataset(ds)
        cubes.present_mask(cube.variables, filter_var)
        arrays = _unlabelled(cube, filter_var)
    else:
        cubes.present_mask(ds, filter_var)
        arrays = {n: a for n, a in ds.items() if n not in ("split", filter_var)}
    names = _names_in_common(argument, pairs, arrays)
    # all numbers are checked before a value is read
    numbers = {n: _offset_and_scale(f"{argument}[{n!r}]", pairs[n], scale_fn) for n in names}
    if rescale_values is scale_values:
        warn_of_erased({name: pairs[name] for name in names}, scale_fn)
    rescaled = {n: rescale_array(n, arrays[n], *numbers[n], rescale_values) for n in names}
    if isinstance(ds, xr.Dataset | xr.DataArray):
        return like_given(cubes.with_arrays(cube, rescaled), ds)
    return Samples({**ds, **rescaled}, getattr(ds, "accounting", None))


def _pairs_of_cube(pairs: Pairs, cube: xr.Dataset | xr.DataArray) -> Pairs:
    """Return pairs by variable; a single one is that of an array without a name."""
    if isinstance(cube, xr.DataArray) and cube.name is None and len(pairs) == 1:
        return {masks_and_labels.DATA_VAR: next(iter(pairs.values()))}
    return pairs


def _unlabelled(cube: xr.Dataset, filter_var: str | None) -> dict[Any, xr.DataArray]:
    """Return the data variables of a cube but for labels and masks."""
    label = split_label(cube)
    return {
        name: array
        for name, array in cube.items()
        if name != label
        and not masks_and_labels.is_mask(name, array.dtype, array.attrs, filter_var)
    }


def _names_in_common(argument: str, pairs: Pairs, arrays: Mapping[Any, Any]) -> list[str]:
    """Return the variables that have a pair; refuse pairs of others only."""
    names = [str(name) for name in arrays if name in pairs]
    if not names:
        raise InvalidValueError(
            f"{argument} has {list(pairs)}, the data have {list(arrays)}: no variable in common"
        )
    return names


def warn_of_erased(pairs: Pairs, scale_fn: str) -> None:
    """Warn of variables of which scaling keeps nothing, because no place of theirs has a spread."""
    erased = [str(name) for name, pair in pairs.items() if _is_erased(pair, scale_fn)]
    if erased:
        logger.warning(
            "the statistics of %s keep dims and have no spread anywhere, as of a static variable "
            "per pixel, or of a single year per day: scaling turns all train cells into 0; compute "
            "them over more dims, or leave these variables unscaled",
            erased,
        )


def _is_erased(pair: Any, scale_fn: str) -> bool:
    """Return True if offsets differ between places, and each place has only its offset."""
    if isinstance(pair, core.VariableStatistics):
        low, spread = pair.min, np.subtract(pair.max, pair.min)
    else:
        low, second = pair
        spread = second
        if scale_fn == "normalize":
            spread = second - low
    offsets = np.asarray(low)
    known = offsets[np.isfinite(offsets)]
    return bool(known.size) and known.min() < known.max() and not np.any(spread > 0)


def _offset_and_scale(described: str, pair: Any, scale_fn: str) -> tuple[Any, Any]:
    """Return offset and scale of two numbers or of statistics; DataArrays if these have dims."""
    if not isinstance(pair, core.VariableStatistics):
        return offset_and_scale(described, pair, scale_fn)
    with prefixed(described):
        offset, scale = scale_parameters(pair, scale_fn)
    return labelled(pair, offset), labelled(pair, scale)


def rescale_array(
    name: str, array: Any, offset: Any, scale: Any, rescale_values: RescaleValues
) -> Any:
    """Rescale one array of any kind by the offset and scale of each cell, lazily if it is lazy."""
    offset, scale = xr.broadcast(xr.DataArray(offset), xr.DataArray(scale))
    if not isinstance(array, xr.DataArray):
        if offset.dims:
            raise InvalidTypeError(
                f"the statistics of {name!r} keep dims, so its values must be a DataArray or in a "
                f"Dataset, got {type(array).__name__}"
            )
        array = xr.DataArray(array if hasattr(array, "dask") else masked_to_gaps(array))
        return rescale_array(name, array, offset, scale, rescale_values).data
    check_real(f"variable {name!r}", array.dtype)
    check_decoded(name, array)
    array = read_in_blocks(array)
    # xarray's groupby sorts seasons by name, and leaves out months without a date
    groups = {d: GROUPS[str(d)] for d in offset.indexes if d in GROUPS and d not in array.dims}
    offset, scale = offset.reindex(groups), scale.reindex(groups)
    entries = []
    if offset.dims:
        entries = _entries(name, array, offset)
    if array.chunks is not None:
        chunks = array.variable.chunksizes
        entries = [along.chunk({dim: chunks[dim] for dim in along.dims}) for along in entries]
    is_scaling = rescale_values is scale_values
    out_dtype = unscaled_dtype
    if is_scaling:
        out_dtype = scaled_dtype
    result: xr.DataArray = xr.apply_ufunc(
        partial(_rescale_block, rescale_values, offset.values, scale.values),
        array,
        *entries,
        dask="parallelized",
        output_dtypes=[out_dtype(array.dtype)],
        keep_attrs="override",
    )
    update = unscaled_attrs
    if is_scaling:
        update = scaled_attrs
    result.attrs = update(result.attrs)
    return result


def _rescale_block(
    rescale_values: RescaleValues,
    offset: NDArray[Any],
    scale: NDArray[Any],
    values: NDArray[Any],
    *entries: NDArray[Any],
) -> Any:
    # numbers are chosen block by block, because those of all cells are as large as the cube
    return rescale_values(values, offset[entries], scale[entries])


def _entries(name: str, array: xr.DataArray, offset: xr.DataArray) -> list[xr.Variable]:
    """Return, for each dim of the statistics, the entry of every cell."""
    if ENTRIES_ATTR in array.attrs:
        return _entries_of_samples(array, offset.shape)
    dims = [str(dim) for dim in offset.dims]
    labels = {dim: offset[dim].values for dim in dims if dim in offset.indexes}
    coords = {str(d): array[d].values for d in array.dims if d in array.indexes}
    sizes = {str(dim): n for dim, n in array.sizes.items()}
    matched = match_entries(name, dims, offset, labels, sizes, coords)
    return [xr.Variable((dim,), entries) for dim, entries in matched]


def _entries_of_samples(array: xr.DataArray, shape: tuple[int, ...]) -> list[xr.Variable]:
    """Return `_entries` of a store's samples, which know their positions in the cube."""
    name, stored = array.name, array.attrs[ENTRIES_ATTR]
    if len(stored) != len(shape):
        raise InvalidValueError(
            f"the samples of {name!r} were scaled by statistics along {[s[0] for s in stored]}, "
            f"got statistics of shape {shape}; use those of the store (StoreMetadata.of(...))"
        )
    # the dim of the window that lies along a dim of the statistics, "" if none does, and its cells
    windows = [(str(entry[2]), int(entry[3])) for entry in stored]
    result = []
    for (dim, entry_of_cell), (window_dim, window), n_entries in zip(
        decode_entries(stored), windows, shape, strict=True
    ):
        index = array.coords.get(f"{dim}_index")
        if index is None or (window_dim and array.sizes.get(window_dim) != window):
            whole_window = ""
            if window_dim:
                whole_window = f" and all {window} cells along {window_dim!r}"
            raise InvalidValueError(
                f"the origins of the samples of {name!r} along {dim!r} are unknown: they need the "
                f"coordinate '{dim}_index'{whole_window}; undo the scaling before you select or "
                "rename"
            )
        cells = index.variable
        if window_dim:
            cells = cells + xr.Variable((window_dim,), np.arange(window))
        found = entry_of_cell[np.asarray(cells.values, np.intp)]
        if found.size and found.max() >= n_entries:
            raise InvalidValueError(
                f"the samples of {name!r} were scaled by other statistics, longer than "
                f"{n_entries} along {dim!r}; use those of the store (StoreMetadata.of(...))"
            )
        result.append(xr.Variable(cells.dims, found))
    return result


def labelled(stats: core.VariableStatistics, values: Any) -> Any:
    """Return statistics as a number, or as a DataArray with their dims and coordinates."""
    if not isinstance(stats, FieldStatistics) or not stats.dims:
        return float(values)
    coords = {dim: (dim, labels) for dim, labels in stats.labels.items()}
    return xr.DataArray(values, coords, stats.dims)
