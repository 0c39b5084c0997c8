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

from ml4cube.cube.chunks.disk import StoredChunks


@dataclass(frozen=True)
class AbsentChunks:
    """Absent chunks of one variable: their number, the key of the first, the value of its cells."""

    number: int
    first: str
    reads_as: str

    @property
    def is_gap(self) -> bool:
        """True if the cells count as gaps."""
        return self.reads_as in ("nan", "NaT")

    def merge(self, later: AbsentChunks) -> AbsentChunks:
        """Add chunks found later."""
        return replace(self, number=self.number + later.number)


def absent_chunks(
    stored: StoredChunks,
    dims: tuple[str, ...],
    cells: NDArray[Any],
    origin: Mapping[str, int],
    owned: Mapping[str, slice],
) -> AbsentChunks | None:
    """Find the chunks that begin in `owned` and that a variable's source lacks.

    `dims` are those of `stored`; `cells` have all dims of the cube, in the order of `origin`, where
    they begin, with one cell along those that `dims` lacks.
    """
    # Such dims repeat the chunks, which are counted where they begin.
    if any(cells_of_dim.start for dim, cells_of_dim in owned.items() if dim not in dims):
        return None
    absent = [
        (stored.key(chunk), str(cells[box].flat[0]))
        for chunk, box in _chunks(stored, dims, origin, owned)
        # only a chunk of equal cells can be absent, so that few have to be looked up
        if _is_constant(cells[box]) and not stored.has(chunk)
    ]
    return AbsentChunks(len(absent), *absent[0]) if absent else None


def _chunks(
    stored: StoredChunks,
    dims: tuple[str, ...],
    origin: Mapping[str, int],
    owned: Mapping[str, slice],
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the index of each stored chunk that begins in `owned`, and its box in the cells."""
    sizes = dict(zip(dims, stored.chunks, strict=True))
    # of each dim the chunks whose first cell, index * n, lies in `owned`
    ranges = [range(-(-owned[d].start // n), -(-owned[d].stop // n)) for d, n in sizes.items()]
    for chunk in itertools.product(*ranges):
        box = dict.fromkeys(origin, slice(None))
        for index, (dim, n) in zip(chunk, sizes.items(), strict=True):
            start = index * n - origin[dim]
            box[dim] = slice(start, start + n)
        yield chunk, tuple(box.values())


def _is_constant(cells: NDArray[Any]) -> bool:
    """Return True if all cells are equal, or all are gaps; mostly the last cell tells."""
    first, last = cells.flat[0], cells.flat[-1]
    if first != first:  # NaN or NaT
        return bool(last != last and (cells != cells).all())
    return bool(last == first and np.all(cells == first))
