"""Arrays that xarray indexes lazily: of `DiskChunks`, and with gaps in place of absent chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xarray import Variable
from xarray.backends import BackendArray
from xarray.core.indexing import ExplicitIndexer, IndexingSupport, explicit_indexing_adapter

from ml4cube.core.missing import set_gaps
from ml4cube.cube.chunks.disk import DiskChunks
from ml4cube.cube.chunks.presence import ChunkPresence


class _BasicArray(BackendArray):
    """An array that is read by integers and slices."""

    shape: tuple[int, ...]
    _read: Callable[[tuple[int | slice, ...]], NDArray[Any]]

    def __getitem__(self, key: ExplicitIndexer) -> NDArray[Any]:
        """Read cells; xarray reduces other indexers to integers and slices."""
        cells: NDArray[Any] = explicit_indexing_adapter(
            key, self.shape, IndexingSupport.BASIC, self._read
        )
        return cells


class ChunksArray(_BasicArray):
    """A zarr array on local disk, for xarray's lazy indexing."""

    def __init__(self, chunks: DiskChunks, shape: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.shape = shape
        self.dtype = chunks.dtype

    def _read(self, key: tuple[int | slice, ...]) -> NDArray[Any]:
        along_axes = [_box_and_pick(k, n) for k, n in zip(key, self.shape, strict=True)]
        cells = self.chunks.read([box for box, _ in along_axes])
        return cells[tuple(pick for _, pick in along_axes)]


def _box_and_pick(key: int | slice, n: int) -> tuple[slice, int | slice]:
    """Return the box to read along an axis of `n` cells, and the index into it."""
    cells = range(n)[key]
    if isinstance(cells, int):
        return slice(cells, cells + 1), 0
    if not cells:
        return slice(0, 0), slice(None)
    low, high = sorted((cells[0], cells[-1]))
    return slice(low, high + 1), slice(None, None, cells.step)


class GapsArray(_BasicArray):
    """A lazily indexed array whose absent chunks are gaps."""

    def __init__(
        self, array: Any, chunks: ChunkPresence, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.array = array
        self.chunks = chunks
        self.shape = shape
        self.dtype = dtype

    def _read(self, key: tuple[int | slice, ...]) -> NDArray[Any]:
        dims = [str(axis) for axis in range(len(self.shape))]
        cells = np.asarray(Variable(dims, self.array)[key].values)
        positions = [np.atleast_1d(np.arange(n)[k]) for k, n in zip(key, self.shape, strict=True)]
        flags = self.chunks.absent_cells(*positions).reshape(cells.shape)
        return set_gaps(cells, flags).astype(self.dtype, copy=False)
