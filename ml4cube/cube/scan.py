"""`scan`: the one walk over the cells of a cube, block by block, on any engine.

The blocks depend on stored chunks and a budget alone. So sums that are merged in the order of the
blocks have the same bits on threads, on processes and on a cluster, and however a cube was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.cube.chunks.blocks import block_shape
from ml4cube.cube.engine import Engine, Threads, choose_engine, usable_cores
from ml4cube.cube.reader import CubeReader

Cells = Mapping[str, NDArray[Any]]
Result = TypeVar("Result")


def blocks_of(
    reader: CubeReader,
    *,
    uncut: Collection[str] = (),
    budget: int | None = None,
    within: Mapping[str, slice] | None = None,
) -> list[Block]:
    """Return blocks of whole chunks of the reader's first variable, in a fixed order.

    Several small chunks make a block of at most `budget` cells, by default 2 million. A block is
    larger only if one chunk is, or if the dims that must be `uncut` are that long. Blocks lie
    `within` a region if one is given.
    """
    if 0 in reader.shape:
        return []
    ends = dict(zip(reader.dims, reader.shape, strict=True))
    box = {dim: slice(0, n) for dim, n in ends.items()} | dict(within or {})
    sizes = {dim: box[dim].stop - box[dim].start for dim in ends}
    largest = {dim: int(np.max(chunk)) for dim, chunk in reader.chunks.items()}
    shape = block_shape(sizes, largest, uncut, budget)
    spans = []
    for dim, n in ends.items():
        first, last = box[dim].start, box[dim].stop
        cut = [(first, last)]
        if dim not in uncut:
            whole = _spans(n, reader.chunks.get(dim, 1), shape[dim], reader.shards.get(dim, 1))
            cut = [(max(a, first), min(b, last)) for a, b in whole if a < last and b > first]
        spans.append(cut)
    blocks = []
    for id, of_dims in enumerate(product(*map(enumerate, spans))):
        index = tuple(position for position, _ in of_dims)
        start, stop = (tuple(span[end] for _, span in of_dims) for end in (0, 1))
        blocks.append(Block(id, reader.dims, index, start, stop))
    return blocks


def _spans(n: int, chunks: int | tuple[int, ...], most: int, shard: int) -> list[tuple[int, int]]:
    """Cut a dim into spans of whole chunks, of at most so many cells if there are several.

    Spans are whole shards, or lie inside one.
    """
    if isinstance(chunks, int):
        length = most
        if most >= shard:
            length -= most % shard
        starts: list[int] = []
        for first in range(0, n, max(shard, length)):
            starts += range(first, min(first + max(shard, length), n), length)
        return list(pairwise([*starts, n]))
    ends = [0]
    for stop in np.cumsum(chunks).tolist():
        # a longer span takes the place of the one before
        if len(ends) > 1 and stop - ends[-2] <= most:
            ends.pop()
        ends.append(stop)
    return list(pairwise(ends))


def scan(
    reader: CubeReader,
    work: Callable[[Block, Cells], Result],
    blocks: Iterable[Block],
    *,
    engine: Engine | None = None,
) -> Iterator[Result]:
    """Read each block and yield what `work` makes of it and its cells, in the order of the blocks.

    A few blocks are in memory at a time. Without an engine, an active dask client is used, else
    threads; a cube whose first variable is in memory is not sent away.
    """
    blocks = list(blocks)
    if engine is None:
        largest = max((block.size for block in blocks), default=0)
        engine = Threads(max(usable_cores(), reader.reads_at_a_time(largest)))
        if not reader.is_in_memory:
            engine = choose_engine(engine)
    shared, own = reader.split(engine.shares_memory)
    tasks = ((block, own.narrow(block.slices)) for block in blocks)
    with engine:
        yield from engine.run_in_order(_work_on_block, (work, shared), tasks)


def _work_on_block(
    shared: tuple[Callable[[Block, Cells], Result], CubeReader], task: tuple[Block, CubeReader]
) -> Result:
    work, reader = shared
    block, own = task
    return work(block, own.joined(reader).read(block.slices))
