"""Valid cells: parse the user's `valid` and count its cells by block, in bounded memory."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, check_numpy
from ml4cube.core.grid import Grid
from ml4cube.splits.cube import CubeView, in_chunks
from ml4cube.splits.tiles import sum_tiles

Counts = NDArray[np.int64]
ValidLike = str | Iterable[str] | xr.DataArray

# Most cells of a slab.
_CELLS_AT_ONCE = 1 << 24


def valid_mask(valid: ValidLike | None, view: CubeView) -> xr.DataArray:
    """Return the user's `valid` as one lazy bool array; True without dims if not given."""
    if valid is None:
        return xr.DataArray(True)
    if isinstance(valid, xr.DataArray):
        arrays = [valid]
    elif isinstance(valid, np.ndarray) or not isinstance(valid, Iterable):
        raise InvalidTypeError(
            "valid must be the name of a variable, a list of names or a DataArray of bools, got "
            f"{type(valid).__name__}"
        )
    else:
        names = [valid] if isinstance(valid, str) else list(valid)
        for name in names:
            check_choice("valid", name, map(str, view.ds.variables))
        arrays = [view.ds[name] for name in names]
    if not arrays:
        raise InvalidValueError("valid must name at least one variable, got an empty list")
    return functools.reduce(operator.and_, [_valid_cells(array, view) for array in arrays])


def _valid_cells(array: xr.DataArray, view: CubeView) -> xr.DataArray:
    if not isinstance(array.dtype, np.dtype) and array.dtype.kind in "biu":
        # A nullable dtype of pandas, whose missing cells are neither valid nor invalid.
        raise InvalidTypeError(
            f"{_called('valid', array)} must be a mask without missing cells, got pandas' dtype "
            f"{array.dtype}; use fillna(False).astype(bool)"
        )
    bare = on_cube(array, view, "valid")
    if bare.dtype.kind == "b":
        return bare
    mask = has_value([bare])
    if mask is None:
        raise InvalidTypeError(
            f"{_called('valid', array)} must be a mask of bools or a variable with gaps, got "
            f"{array.dtype}; compare it to make a mask, e.g. == 1"
        )
    if bare.dtype == object:  # A mask of bools with gaps, as pandas makes it.
        mask = mask & ~_by_chunk(_are_false, bare)
    return mask


def _by_chunk(find: Callable[[Any], Any], array: xr.DataArray) -> xr.DataArray:
    found: xr.DataArray = xr.apply_ufunc(find, array, dask="parallelized", output_dtypes=[bool])
    return found


def _are_false(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which objects are False; the number 0 is not."""
    flat = [isinstance(value, bool | np.bool_) and not value for value in values.ravel()]
    return np.array(flat, dtype=bool).reshape(values.shape)


def has_value(variables: Iterable[xr.DataArray], any_of_them: bool = False) -> xr.DataArray | None:
    """Return a lazy mask of the cells with a finite value in all variables, or in any of them.

    None if every cell has one, because the dtypes have no gaps.
    """
    masks: list[xr.DataArray] = []
    for variable in variables:
        bare = xr.DataArray(in_chunks(variable).variable)
        if bare.dtype.kind in "fc":
            masks.append(xr.apply_ufunc(np.isfinite, bare, dask="allowed"))
        elif bare.dtype.kind in "mM":
            masks.append(bare.notnull())
        elif bare.dtype == object:  # xarray misses None among bools in chunks.
            masks.append(_by_chunk(pd.notnull, bare))
        elif any_of_them:
            return None
    if not masks:
        return None
    return functools.reduce(operator.or_ if any_of_them else operator.and_, masks)


def on_cube(array: xr.DataArray, view: CubeView, argument: str) -> xr.DataArray:
    """Check that an array lies on the cells of a cube; return it without coordinates."""
    check_numpy(argument if array.name is None else f"variable {array.name!r}", array.dtype)
    check_aligned(_called(argument, array), array, view)
    return in_chunks(array).drop_vars(list(array.coords))


def _called(argument: str, array: xr.DataArray) -> str:
    return argument if array.name is None else f"{argument} {array.name!r}"


def count_by_block(mask: xr.DataArray, grid: Grid) -> Counts:
    """Return the number of valid cells in each block, in one pass over the data."""
    dims = [dim for dim in grid.dims if dim in mask.dims]
    block = {dim: n for dim, n in zip(grid.dims, grid.tile, strict=True) if dim in dims}
    # One column: the mask, whose True are counted.
    counts = sum_tiles(mask, (), block, lambda cells, _: iter([cells]), 1)
    return repeat_along_missing(counts.astype(np.int64), dims, grid).ravel()


def repeat_along_missing(counts: Counts, dims: Sequence[str], grid: Grid) -> Counts:
    """Extend counts of shape (*blocks along `dims`, classes) to all dims of a grid.

    A cell that lacks a dim counts once for each of the block's cells along that dim.
    """
    n_classes = counts.shape[-1]
    for axis, (dim, n_blocks) in enumerate(zip(grid.dims, grid.counts, strict=True)):
        if dim not in dims:
            length = np.bincount(grid.tile_of_cells(dim), minlength=n_blocks)
            counts = np.moveaxis(np.multiply.outer(length, counts), 0, axis)
    return counts.reshape(len(grid), n_classes)


def slabs(sizes: Mapping[str, int]) -> Iterator[dict[str, slice]]:
    """Yield the slices of slabs that fit in memory, in order; together they cover the cube."""
    # Slabs are whole along the last dims, whose cells are usually stored side by side.
    lengths: dict[str, int] = {}
    for dim in reversed(list(sizes)):
        lengths[dim] = max(min(sizes[dim], _CELLS_AT_ONCE // math.prod(lengths.values())), 1)
    for starts in itertools.product(*(range(0, n, lengths[dim]) for dim, n in sizes.items())):
        corner = dict(zip(sizes, starts, strict=True))
        yield {dim: slice(a, min(a + lengths[dim], sizes[dim])) for dim, a in corner.items()}
