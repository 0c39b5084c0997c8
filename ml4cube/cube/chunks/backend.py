"""`DiskChunks` as an array that xarray indexes lazily."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from xarray.backends import BackendArray
from xarray.core.indexing import ExplicitIndexer, IndexingSupport, explicit_indexing_adapter

from ml4cube.cube.chunks.disk import DiskChunks


class ChunksArray(BackendArray):
    """A zarr array on local disk, for xarray's lazy indexing."""

    def __init__(self, chunks: DiskChunks, shape: tuple[int, ...]) -> None:
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
