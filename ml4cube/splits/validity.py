"""Counting valid cells block by block, in bounded memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import same_coordinate
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.statistics import check_numpy
from ml4cube.splits.cube import CubeView, in_chunks

Counts = NDArray[np.int64]
ValidLike = str | Iterable[str] | xr.DataArray

# Cells of a cube without chunks that are looked at together.
_CELLS_AT_ONCE = 1 << 24


def valid_mask(valid: ValidLike, view: CubeView, argument: str = "valid") -> xr.DataArray:
    """Turn what the user calls valid into one bool array, lazily."""
    if isinstance(valid, xr.DataArray):
        arrays = [valid]
    else:
        names = [valid] if isinstance(valid, str) else _names(valid, argument)
        if unknown := [name for name in names if name not in view.ds]:
            raise InvalidValueError(
                f"{argument}={valid!r} names {unknown}, the cube has {list(view.ds.data_vars)}"
            )
        arrays = [view.ds[name] for name in names]
    if not arrays:
        raise InvalidValueError(f"{argument} is empty; name a variable or give a mask")
    result = _valid_cells(arrays[0], view, argument)
    for array in arrays[1:]:
        result = result & _valid_cells(array, view, argument)
    return result


def _names(valid: Any, argument: str) -> list[str]:
    """A list of names, or an error."""
    if isinstance(valid, np.ndarray) or not isinstance(valid, Iterable):
        raise InvalidTypeError(
            f"{argument} is a {type(valid).__name__}; give the name of a variable, a list of "
            "names, or a DataArray of bools, whose dims have names"
        )
    return list(valid)


def on_cube(array: xr.DataArray, view: CubeView, argument: str) -> xr.DataArray:
    """Check that an array lies on the cells of a cube, and take its coordinates off."""
    called = _called(argument, array)
    check_numpy(argument if array.name is None else str(array.name), array.dtype)
    for dim, n in array.sizes.items():
        if view.sizes.get(str(dim)) != n:
            raise InvalidValueError(
                f"{called} has {n} cells along {dim!r}, the cube has "
                f"{view.sizes}; select the same cells first"
            )
        if dim in array.coords and dim in view.ds.coords:
            _check_same_places(array.coords[dim], view.ds.coords[dim], called)
    # chunks come first: a bare array no longer knows those of its file
    return xr.DataArray(in_chunks(array).variable, name=array.name)


def _called(argument: str, array: xr.DataArray) -> str:
    return argument if array.name is None else f"{argument} {array.name!r}"


def _check_same_places(given: xr.DataArray, wanted: xr.DataArray, called: str) -> None:
    """Refuse a coordinate that is turned round or shifted: its cells would not be the cube's."""
    if not same_coordinate(given.values, wanted.values):
        raise InvalidValueError(
            f"{called} has other values of {wanted.name!r} than the cube "
            f"({given.values[0]} to {given.values[-1]}, the cube {wanted.values[0]} to "
            f"{wanted.values[-1]}); select the same cells, as with reindex_like, or drop the "
            "coordinate"
        )


def check_numpy_mask(array: xr.DataArray, argument: str) -> None:
    """Refuse a mask of a dtype of pandas, whose missing cells are neither inside nor outside."""
    if not isinstance(array.dtype, np.dtype) and array.dtype.kind in "biu":
        raise InvalidTypeError(
            f"{_called(argument, array)} is of pandas' dtype {array.dtype}, whose missing cells "
            "are neither inside nor outside; make a mask of it by fillna(False).astype(bool)"
        )


def has_value(variables: Iterable[xr.DataArray], any_of_them: bool = False) -> xr.DataArray | None:
    """Whether cells have a value in all of some variables, lazily."""
    found: list[xr.DataArray] = []
    for variable in variables:
        # chunks come first: a bare array no longer knows those of its file
        bare = xr.DataArray(in_chunks(variable).variable)
        if bare.dtype.kind in "fc":
            found.append(xr.apply_ufunc(np.isfinite, bare, dask="allowed"))
        elif bare.dtype.kind in "mMO":
            found.append(bare.notnull())
        elif any_of_them:
            return None
    if not found:
        return None
    combine = operator.or_ if any_of_them else operator.and_
    return functools.reduce(combine, found)


def _valid_cells(array: xr.DataArray, view: CubeView, argument: str) -> xr.DataArray:
    check_numpy_mask(array, argument)
    bare = on_cube(array, view, argument)
    if bare.dtype.kind == "b":
        return bare
    found = has_value([bare])
    if found is not None:
        return found
    raise InvalidTypeError(
        f"{_called(argument, array)} is of {array.dtype}, which is no mask and has no gaps; give "
        "a mask of bools, as `== 1` makes one"
    )


def count_by_block(codes: xr.DataArray | None, grid: Grid, classes: int = 1) -> Counts:
    """Count the cells of each class in each block, in one pass over the data."""
    present = () if codes is None else tuple(d for d in grid.dims if d in codes.dims)
    counts: Counts = np.ones(classes, dtype=np.int64)
    if codes is not None:
        counts = _count(codes.transpose(*present), grid, classes)
    return repeat_along_missing(counts, present, grid)


def repeat_along_missing(counts: Counts, present: Sequence[str], grid: Grid) -> Counts:
    """Repeat counts along the dims of the grid that were not counted along."""
    classes = counts.shape[-1]
    for axis, (dim, n) in enumerate(zip(grid.dims, grid.counts, strict=True)):
        if dim not in present:
            length = np.bincount(grid.tile_of_cells(dim), minlength=n)
            counts = np.expand_dims(counts, axis)
            counts = counts * length.reshape([-1 if a == axis else 1 for a in range(counts.ndim)])
    return counts.reshape(len(grid), classes)


def _count(codes: xr.DataArray, grid: Grid, classes: int) -> Counts:
    blocks = [grid.tile_of_cells(str(dim)) for dim in codes.dims]
    if codes.chunks is not None:
        return _count_dask(codes.data, blocks, classes)
    return _count_box(codes.values, *blocks, classes=classes)


def _count_box(codes: NDArray[Any], *blocks: NDArray[np.intp], classes: int) -> Counts:
    """Count by block in one box of cells; `blocks` are the block indices along each axis."""
    if codes.dtype.kind == "b":
        codes = np.where(codes, np.int8(0), np.int8(-1))
    counts = []
    for label in range(classes):
        count: NDArray[Any] = codes == label
        for axis, block in enumerate(blocks):
            count = np.add.reduceat(count, _starts(block), axis=axis, dtype=np.int64)
        counts.append(count)
    return np.stack(counts, axis=-1)


def _count_dask(codes: da.Array, blocks: list[NDArray[np.intp]], classes: int) -> Counts:
    """Count chunk by chunk, then add up the pieces of blocks that lie in several chunks."""
    axes = tuple(range(codes.ndim))
    arguments: list[Any] = [codes, axes]
    pieces: dict[int, tuple[int, ...]] = {}
    for axis, (block, chunks) in enumerate(zip(blocks, codes.chunks, strict=True)):
        lazy_block = da.from_array(block, chunks=(chunks,))  # type: ignore[no-untyped-call]
        arguments += [lazy_block, (axis,)]
        ends = np.cumsum(chunks)
        pieces[axis] = tuple(
            len(_starts(block[end - n : end])) for end, n in zip(ends, chunks, strict=True)
        )
    lazy = da.blockwise(  # type: ignore[no-untyped-call]
        _count_box,
        (*axes, codes.ndim),
        *arguments,
        classes=classes,
        new_axes={codes.ndim: classes},
        adjust_chunks=pieces,
        align_arrays=False,  # all are in the chunks of `codes`
        dtype=np.int64,
        meta=np.empty((0,) * (codes.ndim + 1), dtype=np.int64),
    )
    counts: Counts = lazy.compute()
    for axis, (block, chunks) in enumerate(zip(blocks, codes.chunks, strict=True)):
        ends = np.cumsum(chunks)
        parts = [block[end - n : end] for end, n in zip(ends, chunks, strict=True)]
        owner = np.concatenate([part[_starts(part)] for part in parts])
        counts = np.add.reduceat(counts, _starts(owner), axis=axis)
    return counts


def _starts(block: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where each run of equal block indices begins."""
    return np.flatnonzero(np.diff(block, prepend=-1))


def slabs(
    sizes: Mapping[Any, int], within: Mapping[Any, slice] | None = None
) -> Iterator[dict[Any, slice]]:
    """Cut a box of cells into slabs that fit in memory, in order."""
    box = {dim: (within or {}).get(dim, slice(0, n)) for dim, n in sizes.items()}
    if math.prod(s.stop - s.start for s in box.values()) <= _CELLS_AT_ONCE:
        yield box
        return
    # the first dim that can be cut: outer dims are usually those that are stored apart
    dim = next(dim for dim, s in box.items() if s.stop - s.start > 1)
    middle = (box[dim].start + box[dim].stop) // 2
    yield from slabs(sizes, {**box, dim: slice(box[dim].start, middle)})
    yield from slabs(sizes, {**box, dim: slice(middle, box[dim].stop)})
