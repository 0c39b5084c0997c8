"""Arrays that xarray indexes lazily: read without zarr-python, or with gaps for absent chunks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xarray import Variable
from xarray.backends import BackendArray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core.indexing import (
    ExplicitIndexer,
    ExplicitlyIndexed,
    IndexingSupport,
    explicit_indexing_adapter,
)

from ml4cube.core.missing import set_gaps
from ml4cube.cube.chunks.presence import ChunkPresence
from ml4cube.cube.chunks.stored import ChunkFiles


class GapsArray(BackendArray):
    """A lazily indexed array whose absent chunks are gaps."""

    def __init__(
        self, array: Any, chunks: ChunkPresence, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.array = array
        self.chunks = chunks
        self.shape = shape
        self.dtype = dtype

    def __getitem__(self, key: ExplicitIndexer) -> NDArray[Any]:
        """Read cells; xarray reduces other indexers to integers and slices."""
        cells: NDArray[Any] = explicit_indexing_adapter(
            key, self.shape, IndexingSupport.BASIC, self._read
        )
        return cells

    def _read(self, key: tuple[int | slice, ...]) -> NDArray[Any]:
        dims = [str(axis) for axis in range(len(self.shape))]
        cells = np.asarray(Variable(dims, self.array)[key].values)
        positions = [np.atleast_1d(np.arange(n)[k]) for k, n in zip(key, self.shape, strict=True)]
        flags = self.chunks.absent_cells(*positions).reshape(cells.shape)
        return set_gaps(cells, flags).astype(self.dtype, copy=False)


class ChunksArray(BackendArray):
    """A zarr array that is read without zarr-python."""

    def __init__(self, chunks: ChunkFiles, shape: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.shape = shape
        self.dtype = chunks.dtype

    def __getitem__(self, key: ExplicitIndexer) -> NDArray[Any]:
        """Read cells; xarray reduces other indexers to integers and slices."""
        cells: NDArray[Any] = explicit_indexing_adapter(
            key, self.shape, IndexingSupport.BASIC, self._read
        )
        return cells

    def _read(self, key: tuple[int | slice, ...]) -> NDArray[Any]:
        box: list[slice] = []
        inside: list[slice | int] = []
        for of_axis, n in zip(key, self.shape, strict=True):
            if not isinstance(of_axis, slice):
                box.append(slice(of_axis % n, of_axis % n + 1))
                inside.append(0)
                continue
            cells = range(n)[of_axis]
            box.append(slice(min(cells, default=0), max(cells, default=-1) + 1))
            inside.append(slice(None, None, cells.step))
        return self.chunks.read(box)[tuple(inside)]


def read_directly(lazy: Any) -> Any:
    """Return a lazily indexed array that reads the zarr array behind it without zarr-python."""
    if type(lazy) is ZarrArrayWrapper:
        chunks = ChunkFiles.of(lazy._array)
        return lazy if chunks is None else ChunksArray(chunks, lazy.shape)
    if not isinstance(lazy, ExplicitlyIndexed) or not hasattr(lazy, "array"):
        return lazy
    direct: Any = copy.copy(lazy)
    direct.array = read_directly(lazy.array)
    return direct
