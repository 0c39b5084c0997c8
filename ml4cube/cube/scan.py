"""`scan`: the one walk over the cells of a cube, block by block, on any engine.

The blocks depend on stored chunks and a budget alone. So sums that are merged in the order of the
blocks have the same bits on threads, on processes and on a cluster, and however a cube was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid
from ml4cube.cube.chunks.blocks import BLOCK_CELLS, block_shape
from ml4cube.cube.engine import Engine, Threads, choose_engine, usable_cores
from ml4cube.cube.reader import CubeReader

Cells = Mapping[str, NDArray[Any]]
Result = TypeVar("Result")


def blocks_of(
    reader: CubeReader, *, uncut: Collection[str] = (), budget: int = BLOCK_CELLS
) -> list[Block]:
    """Return blocks of whole chunks of the reader's first variable, in a fixed order.

    Several small chunks make a block of at most `budget` cells. A block is larger only if one chunk
    is, or if the dims that must be `uncut` are that long.
    """
    sizes = dict(zip(reader.dims, reader.shape, strict=True))
    if 0 in reader.shape:
        return []
    return list(Grid.blocks(sizes, block_shape(sizes, reader.chunks, uncut, budget)))


def scan(
    reader: CubeReader,
    work: Callable[[Cells], Result],
    blocks: Iterable[Block],
    *,
    engine: Engine | None = None,
) -> Iterator[Result]:
    """Read each block and yield what `work` makes of its cells, in the order of the blocks.

    A few blocks are in memory at a time. Without an engine, an active dask client is used, else
    threads; a cube whose first variable is in memory is not sent away.
    """
    if engine is None:
        local = Threads(usable_cores())
        engine = local if reader.is_in_memory else choose_engine(local)
    shared, own = reader.split(engine.shares_memory)
    tasks = ((block, own.narrow(block.slices)) for block in blocks)
    with engine:
        yield from engine.run_in_order(_work_on_block, (work, shared), tasks)


def _work_on_block(
    shared: tuple[Callable[[Cells], Result], CubeReader], task: tuple[Block, CubeReader]
) -> Result:
    work, reader = shared
    block, own = task
    return work(own.joined(reader).read(block.slices))
