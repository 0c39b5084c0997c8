"""Choose block sizes for a split without `block_size`: large blocks with few cells at borders.

Considered are cuts along one dim, or along two dims of one group: the dims of the map, or those of
time, or the others. Chunks do not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ml4cube.core.grid import Grid

# Largest fraction of a block's cells that may have a neighbour in another block.
_MOST_TOUCHING = 0.3
# Every part gets two blocks, so that it is not a single region or period.
_BLOCKS_PER_PART = 2
_FEWEST_BLOCKS, _MOST_BLOCKS = 10, 500


@dataclass(frozen=True)
class LargeBlocks:
    """Blocks of `sizes` cells along the dims that are cut, and their number.

    `touching` is the largest fraction of a block's cells with a neighbour in another block.
    """

    sizes: dict[str, int]
    count: int
    touching: float

    @property
    def is_apart(self) -> bool:
        """Return True if there are blocks, and few enough of their cells touch another one."""
        return self.count > 1 and self.touching <= _MOST_TOUCHING


def blocks_wanted(fractions: Iterable[float]) -> int:
    """Return the number of blocks that parts of such fractions need."""
    needed = math.ceil(round(_BLOCKS_PER_PART / min(fractions), 6))  # 2 / (1 - 0.9) exceeds 20
    return min(max(needed, _FEWEST_BLOCKS), _MOST_BLOCKS)


def large_blocks(
    shape: Mapping[str, int],
    groups: Sequence[Sequence[str]],
    wanted: int,
    *,
    fewest: int,
    windows: Grid | None,
    cyclic: Collection[str],
) -> LargeBlocks:
    """Cut a cube into `wanted` blocks, or as many as possible, few of whose cells touch others.

    If many cells touch others however the cube is cut, the blocks with the fewest such cells are
    returned; ask `is_apart`. Returned is one block, the cube, if there cannot be `fewest` blocks.
    If `windows` are given, blocks are at least as large as a window.
    """
    candidates: list[LargeBlocks] = []
    for group in map(sorted, groups):
        for dims in (*itertools.combinations(group, 1), *itertools.combinations(group, 2)):
            candidates += _cut_along(dims, shape, wanted, windows, cyclic)

    def penalty(blocks: LargeBlocks) -> tuple[float, ...]:
        if not blocks.is_apart:
            return 1, blocks.touching, blocks.count
        return 0, -min(blocks.count, wanted), blocks.touching, blocks.count

    enough = (blocks for blocks in candidates if blocks.count >= fewest)
    return min(enough, key=penalty, default=LargeBlocks({}, 1, 0.0))


def _cut_along(
    dims: tuple[str, ...],
    shape: Mapping[str, int],
    wanted: int,
    windows: Grid | None,
    cyclic: Collection[str],
) -> Iterator[LargeBlocks]:
    """Yield the blocks of every combination of cuts along these dims."""
    cuts_of_dims = [_cuts(dim, shape[dim], wanted, windows, dim in cyclic) for dim in dims]
    for cuts in itertools.product(*cuts_of_dims):
        not_touching = math.prod(1 - cut.touching for cut in cuts)
        sizes = {dim: size for cut in cuts for dim, size in cut.sizes.items()}
        yield LargeBlocks(sizes, math.prod(cut.count for cut in cuts), 1 - not_touching)


def _cuts(
    dim: str, cells: int, wanted: int, windows: Grid | None, cyclic: bool
) -> Iterator[LargeBlocks]:
    """Yield the blocks of every cut along one dim."""
    window = stride = 1
    if windows is not None and dim in windows.dims:
        axis = windows.dims.index(dim)
        window, stride = windows.tile[axis], windows.stride[axis]
    sizes = {math.ceil(cells / number / stride) * stride for number in range(2, wanted + 1)}
    for size in sorted(size for size in sizes if window <= size < cells):
        number = math.ceil(cells / size)
        last_size = cells - size * (number - 1)
        # The blocks at the ends have a neighbour on one side only, unless the dim is cyclic.
        end_neighbours = 1
        if cyclic:
            end_neighbours = 2
        most_neighbours = 2
        if number == 2:
            most_neighbours = end_neighbours
        touching = max(end_neighbours / last_size, most_neighbours / size)
        # A last block without a whole window is of no use.
        count = number
        if last_size < window:
            count = number - 1
        yield LargeBlocks({dim: size}, count, min(touching, 1.0))
