"""Chunks that a zarr source lacks: zarr silently reads them as its fill value.

That is right where a writer left out chunks of fill values (zarr's default), and wrong where a file
was lost. Only the user can tell. Every stage that reads a cube first calls `heed_absent_chunks`,
which finds them without reading a cell, and warns of them, refuses them or makes gaps of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, StoreError, caller_level, check_choice
from ml4cube.core.missing import find_gaps
from ml4cube.core.statistics import scaled_dtype
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, files_in_graph, lazily_indexed
from ml4cube.cube.chunks.presence import ChunkPresence
from ml4cube.cube.masks_and_labels import is_label

if TYPE_CHECKING:
    import xarray as xr

#: What to do about absent chunks that read as values.
CHOICES = ("warn", "raise", "drop")


#: Name of the flags of cells that `AbsentCells` computes; no variable of a file has spaces.
ABSENT = "cells of absent chunks"


@dataclass(frozen=True)
class AbsentChunks:
    """Absent chunks of one variable: their number, the key and the cells of the first."""

    number: int
    first: str
    cells: str
    # The value of all their cells, and whether that is a gap.
    reads_as: str
    is_gap: bool

    def __str__(self) -> str:
        """Return what is absent."""
        many = self.number > 1
        count = f"{self.number:,} chunks are" if many else "1 chunk is"
        example = f"{'one is ' if many else ''}{self.first!r}, {self.cells}"
        verb = "read" if many else "reads"
        return f"{count} missing from the source ({example}) and {verb} as {self.reads_as}"


class HeededCube(NamedTuple):
    """A cube to be read, and the absent chunks of its variables, by name.

    `dropped` are, with "drop", the chunks of variables in which absent ones became gaps.
    """

    cube: xr.Dataset
    absent: Mapping[str, AbsentChunks]
    dropped: Mapping[str, ChunkPresence]


@dataclass(frozen=True)
class AbsentCells:
    """Flags of the cells of a cube where any of some variables has an absent chunk."""

    # Of each variable, the axis of the cube along each of its own.
    variables: tuple[tuple[tuple[int, ...], ChunkPresence], ...]

    @classmethod
    def of(
        cls, cube: xr.Dataset, dims: Sequence[str], chunks: Mapping[str, ChunkPresence]
    ) -> AbsentCells:
        """Return the flags of some variables of a cube with dims in some order."""
        axes = {name: tuple(map(dims.index, map(str, cube[name].dims))) for name in chunks}
        return cls(tuple((axes[name], chunks[name]) for name in chunks))

    def __call__(self, *positions: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return the flags at some positions along each dim."""
        flags = np.zeros([len(along) for along in positions], bool)
        for axes, chunks in self.variables:
            absent = chunks.absent_cells(*(positions[axis] for axis in axes))
            in_order = absent.transpose(np.argsort(axes))
            lacking = [axis for axis in range(len(positions)) if axis not in axes]
            flags |= np.expand_dims(in_order, lacking)
        return flags


def heed_absent_chunks(
    cube: xr.Dataset,
    names: Iterable[str],
    missing_chunks: str,
    *,
    mask: str | None = None,
    choices: Sequence[str] = CHOICES,
    keep_integers: bool = False,
) -> HeededCube:
    """Find absent chunks of some variables, and warn of those that read as values.

    With "raise", all are refused. With "drop", those that read as values become gaps in the cube
    that is returned, where integers are floats unless they are kept. Cells that `mask` leaves out
    are as good as gaps.
    """
    check_choice("missing_chunks", missing_chunks, choices)
    searches = {name: _search(name, cube.variables[name], mask) for name in dict.fromkeys(names)}
    absent = {name: search.absent for name, search in searches.items() if search.absent is not None}
    if missing_chunks == "raise":
        _refuse(absent)
    if missing_chunks != "warn":
        _refuse_unknown(searches, missing_chunks)
    valued = {name: chunks for name, chunks in absent.items() if not chunks.is_gap}
    if missing_chunks == "drop":
        dropped = {n: chunks for n in valued if (chunks := searches[n].chunks) is not None}
        gaps = {
            name: _with_gaps(name, cube.variables[name], chunks)
            for name, chunks in dropped.items()
            if not (keep_integers and cube.variables[name].dtype.kind in "iub")
        }
        return HeededCube(cube.assign(gaps), absent, dropped)
    _warn_of_values(valued, can_be_gaps="drop" in choices)
    return HeededCube(cube, absent, {})


def heed_in_array(array: xr.DataArray, missing_chunks: str) -> xr.DataArray:
    """Find absent chunks of an array, as `heed_absent_chunks`; return the array to be read."""
    from xarray import Dataset

    name = "cells" if array.name is None else str(array.name)
    heeded = heed_absent_chunks(Dataset({name: array.variable}), [name], missing_chunks)
    if not heeded.dropped:
        return array
    cells = Dataset({"cells": heeded.cube.variables[name]}, array.coords)["cells"]
    return cells.rename(array.name)


def find_absent_chunks(
    cube: xr.Dataset, names: Iterable[str], mask: str | None = None
) -> dict[str, AbsentChunks]:
    """Return the absent chunks of some variables, without a word."""
    absent = {name: _search(name, cube.variables[name], mask).absent for name in names}
    return {name: chunks for name, chunks in absent.items() if chunks is not None}


class _Search(NamedTuple):
    """Absent chunks of a variable, which of its chunks exist, and whether these are known."""

    absent: AbsentChunks | None = None
    chunks: ChunkPresence | None = None
    is_known: bool = True


def _search(name: str, variable: xr.Variable, mask: str | None) -> _Search:
    """Find the absent chunks of a variable."""
    lazy = lazily_indexed(variable)
    if lazy is None:
        if is_label(name, variable.dtype, variable.attrs):  # which is mostly computed
            return _Search()
        return _Search(_in_graph(variable, is_mask=name == mask), is_known=False)
    zarr = LazyZarr.behind(lazy._data, np.dtype(variable.dtype))
    if zarr.array is None or zarr.absent_are_gaps or not variable.ndim:
        return _Search()
    chunks = None
    if zarr.box is not None:
        chunks = ChunkPresence.of(zarr.array, zarr.box)
    if chunks is None:
        return _Search(is_known=False)
    return _Search(_described(lazy, chunks, is_mask=name == mask), chunks)


def _in_graph(variable: xr.Variable, *, is_mask: bool) -> AbsentChunks | None:
    """Find absent chunks of a file that dask reads for a variable; cells are those of the file."""
    from xarray import Variable

    for file, boxes in files_in_graph(variable._data):
        zarr = LazyZarr.behind(file, np.dtype(variable.dtype))
        if not zarr.is_whole:
            continue
        chunks = ChunkPresence.of_boxes(zarr.array, boxes)
        axes = [f"axis {axis}" for axis in range(file.ndim)]
        dims = variable.dims if variable.ndim == file.ndim else axes
        if chunks is not None and chunks.first is not None:
            found = _described(Variable(dims, file), chunks, is_mask=is_mask)
            if found is not None and not found.is_gap:
                return found
    return None


def _described(lazy: xr.Variable, chunks: ChunkPresence, *, is_mask: bool) -> AbsentChunks | None:
    """Describe the absent chunks of a variable without dask; None if there is none."""
    if chunks.first is None:
        return None
    box = chunks.first_box(lazy.shape)
    one_cell = tuple(along.start for along in box)
    value = np.asarray(lazy[one_cell].values)
    is_gap = not value if is_mask else find_gaps(value)
    cells = ", ".join(f"{d} {s.start}:{s.stop}" for d, s in zip(lazy.dims, box, strict=True))
    return AbsentChunks(chunks.number_absent, chunks.first, cells, str(value), bool(is_gap))


def _refuse(absent: Mapping[str, AbsentChunks]) -> None:
    for name, chunks in absent.items():
        raise StoreError(
            f"variable {name!r}: {chunks}; repair the source, or give missing_chunks='warn' if its "
            "writer leaves out chunks that hold only this value"
        )


def _refuse_unknown(searches: Mapping[str, _Search], missing_chunks: str) -> None:
    unknown = [name for name, search in searches.items() if not search.is_known]
    if unknown:
        raise InvalidValueError(
            f"missing_chunks={missing_chunks!r} is not possible for {sorted(unknown)}: missing "
            "chunks can be found in an opened zarr store that can be listed, and in a range of its "
            "cells, not in what dask computes or selects; give the path of the store, or "
            "missing_chunks='warn'"
        )


def _warn_of_values(absent: Mapping[str, AbsentChunks], *, can_be_gaps: bool) -> None:
    as_gaps = ""
    if can_be_gaps:
        as_gaps = ", and 'drop' takes them for gaps"
    for name, chunks in absent.items():
        warnings.warn(
            f"variable {name!r}: {chunks}. This is right if its writer leaves out chunks "
            "that hold only this value, as zarr does, and wrong if files were lost; "
            f"missing_chunks='raise' refuses them{as_gaps}",
            stacklevel=caller_level(),
        )


def _with_gaps(name: str, variable: xr.Variable, chunks: ChunkPresence) -> xr.Variable:
    """Return a lazy variable with gaps in place of absent chunks."""
    from xarray import Variable
    from xarray.core.indexing import LazilyIndexedArray

    from ml4cube.cube.chunks.backend import GapsArray

    kind = variable.dtype.kind
    if kind not in "fciumM":
        raise InvalidValueError(
            f"missing_chunks='drop' makes gaps, which {name!r} of dtype {variable.dtype} cannot "
            "hold; convert it, as with ds.astype('float32'), or give 'warn' or 'raise'"
        )
    dtype = scaled_dtype(variable.dtype) if kind in "iu" else variable.dtype
    inner = lazily_indexed(variable)
    assert inner is not None
    lazy = LazilyIndexedArray(GapsArray(inner._data, chunks, variable.shape, dtype))
    gaps = Variable(variable.dims, lazy, variable.attrs, variable.encoding)
    if variable.chunks is None:
        return gaps
    # named after the given array, so that no cache confuses two states of a file
    return gaps.chunk(variable.chunksizes, name=f"present-{variable.data.name}")
