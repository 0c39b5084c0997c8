"""Block sizes for a split without `block_size`: few large blocks with few cells at borders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ml4cube.core.grid import Grid

#: Largest fraction of a block's cells with a neighbour in another block.
MOST_TOUCHING = 0.3

# Every part gets two blocks, so that it is not a single region or period.
_BLOCKS_PER_PART = 2
_FEWEST, _MOST = 10, 500


@dataclass(frozen=True)
class LargeBlocks:
    """Block sizes, their number, and the fraction of a block's cells that touch others."""

    # Cells of a block along the dims that are cut.
    sizes: dict[str, int]
    count: int
    # Largest fraction of a block's cells with a neighbour in another block.
    touching: float

    @property
    def is_apart(self) -> bool:
        """Return True if there are blocks, and few enough of their cells touch another one."""
        return self.count > 1 and self.touching <= MOST_TOUCHING


def blocks_wanted(fractions: Iterable[float]) -> int:
    """Return the number of blocks that parts of such fractions need."""
    needed = math.ceil(round(_BLOCKS_PER_PART / min(fractions), 6))
    return min(max(needed, _FEWEST), _MOST)


def large_blocks(
    shape: Mapping[str, int],
    groups: Sequence[Sequence[str]],
    wanted: int,
    *,
    least: int = 2,
    windows: Grid | None = None,
    around: Iterable[str] = (),
) -> LargeBlocks:
    """Cut a cube along one or two dims into few blocks, few of whose cells touch another block."""
    # Considers cuts along one dim, or along two of one group, in which at most `MOST_TOUCHING` of a
    # block's cells touch another block. Of those with enough blocks it takes the one whose cells
    # touch least; if none has enough, the one with the most blocks. Chunks do not matter.
    ways = [
        way
        for group in groups
        for number in (1, 2)
        for dims in itertools.combinations(sorted(group), number)
        for way in _ways(shape, dims, wanted, windows, set(around))
        if way.count >= least
    ]

    def worth(way: LargeBlocks) -> tuple[float, ...]:
        if not way.is_apart:
            return 1, way.touching, way.count
        return 0, -min(way.count, wanted), way.touching, way.count

    return min(ways, key=worth, default=LargeBlocks({}, 1, 0.0))


def _ways(
    shape: Mapping[str, int],
    dims: tuple[str, ...],
    wanted: int,
    windows: Grid | None,
    around: set[str],
) -> Iterator[LargeBlocks]:
    """Yield every combination of cuts along these dims."""
    along = [list(_cuts(dim, shape[dim], wanted, windows, dim in around)) for dim in dims]
    for cuts in itertools.product(*along):
        count = math.prod(number for _, number, _ in cuts)
        inside = math.prod(1 - touching for *_, touching in cuts)
        sizes = dict(zip(dims, (size for size, *_ in cuts), strict=True))
        yield LargeBlocks(sizes, count, 1 - inside)


def _cuts(
    dim: str, cells: int, wanted: int, windows: Grid | None, around: bool
) -> Iterator[tuple[int, int, float]]:
    """Yield size and number of blocks along a dim, and the largest fraction at a border."""
    window = stride = 1
    if windows is not None and dim in windows.dims:
        axis = windows.dims.index(dim)
        window, stride = windows.tile[axis], windows.stride[axis]
    found = {math.ceil(cells / number / stride) * stride for number in range(2, wanted + 1)}
    for size in sorted(size for size in found if window <= size < cells):
        number = math.ceil(cells / size)
        last = cells - size * (number - 1)
        borders = 2 if around else 1
        inner = 2 / size if number > 2 else borders / size
        # a block without a whole window is of no use
        yield size, number - (last < window), min(max(inner, borders / last), 1.0)
