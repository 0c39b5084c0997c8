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
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, lazily_indexed
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
    absent: dict[str, AbsentChunks] = {}
    valued: dict[str, ChunkPresence] = {}
    unknown: list[str] = []
    for name in dict.fromkeys(names):
        variable = cube.variables[name]
        zarr = LazyZarr.of(variable)
        if zarr is None or (zarr.array is not None and zarr.box is None):
            if not is_label(name, variable.dtype, variable.attrs):  # which is mostly computed
                unknown.append(name)
            continue
        if zarr.array is None or zarr.absent_are_gaps or not variable.ndim:
            continue
        chunks = ChunkPresence.of(zarr.array, zarr.box or ())
        if chunks is None:
            unknown.append(name)
        elif chunks.first is not None:
            absent[name] = _described(variable, chunks, chunks.first, is_mask=name == mask)
            if not absent[name].is_gap:
                valued[name] = chunks
    if missing_chunks == "raise":
        _refuse(absent, unknown)
    if missing_chunks == "drop":
        gaps = {}
        for name, chunks in valued.items():
            variable = cube.variables[name]
            if not (keep_integers and variable.dtype.kind in "iub"):
                gaps[name] = _with_gaps(name, variable, chunks)
        return HeededCube(cube.assign(gaps), absent, valued)
    as_gaps = ", and 'drop' takes them for gaps" if "drop" in choices else ""
    for name in valued:
        warnings.warn(
            f"variable {name!r}: {absent[name]}. This is right if its writer leaves out chunks "
            "that hold only this value, as zarr does, and wrong if files were lost; "
            f"missing_chunks='raise' refuses them{as_gaps}",
            stacklevel=caller_level(),
        )
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


def _described(
    variable: xr.Variable, chunks: ChunkPresence, first: str, *, is_mask: bool
) -> AbsentChunks:
    box = chunks.first_box(variable.shape)
    one_cell = tuple(along.start for along in box)
    lazy = lazily_indexed(variable)
    assert lazy is not None
    value = np.asarray(lazy[one_cell].values)
    is_gap = not value if is_mask else find_gaps(value)
    cells = ", ".join(f"{d} {s.start}:{s.stop}" for d, s in zip(variable.dims, box, strict=True))
    return AbsentChunks(chunks.number_absent, first, cells, str(value), bool(is_gap))


def _refuse(absent: Mapping[str, AbsentChunks], unknown: Sequence[str]) -> None:
    """Refuse absent chunks, and variables of which they are not known."""
    for name, found in absent.items():
        raise StoreError(
            f"variable {name!r}: {found}; repair the source, or give missing_chunks='warn' if its "
            "writer leaves out chunks that hold only this value"
        )
    if unknown:
        raise InvalidValueError(
            f"missing_chunks='raise' is not possible for {sorted(unknown)}: missing chunks can be "
            "found in an opened zarr store that can be listed, and in a range of its cells, not in "
            "what dask computes or selects; give the path of the store, or missing_chunks='warn'"
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
