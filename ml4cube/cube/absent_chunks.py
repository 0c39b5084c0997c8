"""Chunks that a zarr source lacks: zarr silently reads them as its fill value.

That is right where a writer left out chunks of fill values (zarr's default), and wrong where a file
was lost. Only the user can tell, so they are counted and named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.cube.chunks.disk import DiskChunks


@dataclass(frozen=True)
class AbsentChunks:
    """Absent chunks of one variable: their number, the key of one, and the value of its cells."""

    number: int
    first: str
    reads_as: str

    @property
    def is_gap(self) -> bool:
        """True if the cells count as gaps."""
        return self.reads_as in ("nan", "NaT")

    def merge(self, other: AbsentChunks | None) -> AbsentChunks:
        """Add the chunks found before."""
        return self if other is None else replace(other, number=self.number + other.number)


def absent_chunks(
    stored: Any,
    dims: tuple[str, ...],
    cells: NDArray[Any],
    origin: Mapping[str, int],
    owned: Mapping[str, slice],
) -> AbsentChunks | None:
    """Find chunks that begin in `owned` and that a variable's source lacks.

    `stored` has `dims`; `cells` have those of the cube, as `origin`, the position of the first.
    """
    found: AbsentChunks | None = None
    for chunk, box in _chunks(stored, dims, origin, owned):
        value = cells[box].flat[0]
        # only a chunk of equal cells can be absent, so that few have to be looked up
        if _are_all(cells[box], value) and not _exists(stored, chunk):
            found = AbsentChunks(1, _key(stored, chunk), str(value)).merge(found)
    return found


def _chunks(
    stored: Any, dims: tuple[str, ...], origin: Mapping[str, int], owned: Mapping[str, slice]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the index of each stored chunk that begins in `owned`, and the box of its cells."""
    # one object in the store: a shard where there are shards
    sharded = not isinstance(stored, DiskChunks) and stored.shards
    sizes = stored.shards if sharded else stored.chunks
    ranges = [
        range(-(-owned[d].start // n), -(-owned[d].stop // n))
        for d, n in zip(dims, sizes, strict=True)
    ]
    for chunk in itertools.product(*ranges):
        box = dict.fromkeys(origin, slice(None))
        for dim, index, n in zip(dims, chunk, sizes, strict=True):
            first = index * n - origin[dim]
            box[dim] = slice(first, first + n)
        yield chunk, tuple(box.values())


def _are_all(cells: NDArray[Any], value: Any) -> bool:
    """Return True if all cells have this value; most chunks differ in the last cell already."""
    if value != value:  # NaN or NaT
        return bool(cells.flat[-1] != cells.flat[-1] and (cells != cells).all())
    return bool(cells.flat[-1] == value and np.all(cells == value))


def _key(stored: Any, chunk: tuple[int, ...]) -> str:
    if isinstance(stored, DiskChunks):
        return stored.key(chunk)
    return str(stored.metadata.encode_chunk_key(chunk))


def _exists(stored: Any, chunk: tuple[int, ...]) -> bool:
    if isinstance(stored, DiskChunks):
        return stored.has(chunk)
    from zarr.core.sync import sync

    return bool(sync((stored.store_path / _key(stored, chunk)).exists()))
