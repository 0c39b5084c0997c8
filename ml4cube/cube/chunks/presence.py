"""Which chunks of a zarr array exist, found by their files or one listing, without reading any."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# So many keys are asked for one by one, since a store may hold a million beside them.
_FEW_KEYS = 32
# Of an array; a listing without either of them does not list what lies in a store.
_METADATA = ("zarr.json", ".zarray")


@dataclass(frozen=True, eq=False)
class ChunkPresence:
    """Which stored chunks of a variable exist; where zarr has shards, these are meant.

    Make one with `ChunkPresence.of`. Arrays have the axes of the variable.
    """

    is_present: NDArray[np.bool_]
    # Cells of a chunk along each axis, and those of the first chunk that lie before the variable.
    chunks: tuple[int, ...]
    before: tuple[int, ...]
    # Key in zarr of the first chunk that is absent, if one is.
    first: str | None

    @classmethod
    def of(cls, array: Any, box: Sequence[slice | int]) -> Self | None:
        """Find the chunks of a box of a zarr array; None where its store cannot tell."""
        sizes = array.shards or array.chunks
        cells = [
            range(*_as_slice(of_axis).indices(n))
            for of_axis, n in zip(box, array.shape, strict=True)
        ]
        touched = [
            range(of_axis.start // n, -(-of_axis.stop // n))
            for of_axis, n in zip(cells, sizes, strict=True)
        ]
        keys = [array.metadata.encode_chunk_key(chunk) for chunk in itertools.product(*touched)]
        existing = _existing(array, keys)
        if existing is None:
            return None
        is_present = np.array([key in existing for key in keys], bool)
        kept = [axis for axis, of_axis in enumerate(box) if isinstance(of_axis, slice)]
        return cls(
            is_present.reshape([len(touched[axis]) for axis in kept]),
            tuple(sizes[axis] for axis in kept),
            tuple(cells[axis].start % sizes[axis] for axis in kept),
            next((key for key in keys if key not in existing), None),
        )

    @classmethod
    def of_boxes(cls, array: Any, boxes: Sequence[Sequence[slice]]) -> Self | None:
        """Find the chunks of a whole zarr array; those that no box touches count as present."""
        chunks = cls.of(array, (slice(None),) * array.ndim)
        if chunks is None or chunks.first is None:
            return chunks
        untouched = np.ones(chunks.is_present.shape, bool)
        for box in boxes:
            of_axes = zip(box, array.shape, chunks.chunks, strict=True)
            cells = [(*cells.indices(n)[:2], size) for cells, n, size in of_axes]
            untouched[tuple(slice(start // n, -(-stop // n)) for start, stop, n in cells)] = False
        is_present = chunks.is_present | untouched
        absent = np.argwhere(~is_present)
        key = None
        if len(absent):
            key = array.metadata.encode_chunk_key(tuple(absent[0].tolist()))
        return cls(is_present, chunks.chunks, chunks.before, key)

    @property
    def number_absent(self) -> int:
        """Number of chunks that are absent."""
        return int(self.is_present.size - np.count_nonzero(self.is_present))

    def first_box(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the cells of the first absent chunk in a variable of some shape."""
        index = np.argwhere(~self.is_present)[0].tolist()
        starts = [i * n - skip for i, n, skip in zip(index, self.chunks, self.before, strict=True)]
        ends = [start + n for start, n in zip(starts, self.chunks, strict=True)]
        return tuple(
            slice(max(start, 0), min(end, n))
            for start, end, n in zip(starts, ends, shape, strict=True)
        )

    def absent_cells(self, *positions: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which cells are of absent chunks, by their positions along each axis."""
        index = (
            (of_axis + skip) // n
            for of_axis, n, skip in zip(positions, self.chunks, self.before, strict=True)
        )
        flags: NDArray[np.bool_] = ~self.is_present[np.ix_(*index)]
        return flags


def _as_slice(cells: slice | int) -> slice:
    if isinstance(cells, slice):
        return cells
    return slice(cells, cells + 1)


def _existing(array: Any, keys: Sequence[str]) -> set[str] | None:
    """Return which of an array's keys exist, or more; None if the store cannot tell."""
    from zarr.storage import FsspecStore, LocalStore

    store = array.store
    if type(store) is LocalStore:  # looking for each file is quicker than walking through folders
        folder, has_shards = str(store.root / array.path), array.shards is not None
        return {key for key in keys if _exists(f"{folder}/{key}", has_shards)}
    if "http" in getattr(getattr(store, "fs", None), "protocol", ()):
        return None  # a web server lists pages, not files
    prefix = ""
    if array.path:
        prefix = f"{array.path}/"
    try:
        if isinstance(store, FsspecStore) and len(keys) <= _FEW_KEYS:
            return {
                key for key, size in zip(keys, _sizes(store, prefix, keys), strict=True) if size
            }
        listed = {key.removeprefix(prefix) for key in _listed(store, prefix)}
    except Exception:  # stores raise any, as where a user may read but not list
        return None
    if any(name in listed for name in _METADATA):
        return listed
    return None


def _exists(path: str, is_shard: bool) -> bool:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return False
    # zarr reads an empty file as a shard without chunks, and refuses it as a chunk
    return size > 0 or not is_shard


def _sizes(store: Any, prefix: str, keys: Sequence[str]) -> list[int]:
    """Return the sizes of objects, 0 where there is none."""
    from zarr.core.sync import sync

    async def size_of(key: str) -> int:
        try:
            return int(await store.getsize(prefix + key))
        except FileNotFoundError:
            return 0

    async def collect() -> list[int]:
        return await asyncio.gather(*(size_of(key) for key in keys))

    return sync(collect())


def _listed(store: Any, prefix: str) -> list[str]:
    from zarr.core.sync import sync

    async def collect() -> list[str]:
        return [key async for key in store.list_prefix(prefix)]

    return sync(collect())
