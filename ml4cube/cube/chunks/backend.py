"""Arrays that xarray indexes lazily, with gaps in place of absent chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from xarray import Variable
from xarray.backends import BackendArray
from xarray.core.indexing import ExplicitIndexer, IndexingSupport, explicit_indexing_adapter

from ml4cube.core.missing import set_gaps
from ml4cube.cube.chunks.presence import ChunkPresence


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
