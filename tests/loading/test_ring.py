"""The ring of chunk slots: right rows with few slots, errors that name the chunk, no idle waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.core.rank_shares import ChunkOrder, ChunkSchedule, TrainShare
from ml4cube.loading.ring.arrays import Field
from ml4cube.loading.ring.ring import BatchQueue, Ring
from ml4cube.recipe.roles import ArrayName

FIELD = Field((ArrayName("a"),), (2,), np.dtype("f4"))


class Counting:
    """Sample k holds k; remembers what was read."""

    remote = False

    def __init__(self, counts: list[int], broken: int | None = None) -> None:
        self.counts = np.array(counts, np.int64)
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.reads: list[int] = []
        self.broken = broken
        # A chunk that is read only when it is let go.
        self.held, self.let_go = -1, threading.Event()

    def read(self, chunk: int, out: Mapping[str, Any]) -> None:
        assert chunk != self.held or self.let_go.wait(60)
        self.reads.append(chunk)
        if chunk == self.broken:
            raise ValueError("no such luck")
        values = np.arange(self.starts[chunk], self.starts[chunk + 1])
        out[ArrayName("a")][...] = values[:, None]

    def describe(self, chunk: int) -> str:
        return f"chunk number {chunk}"


def take(positions: Any) -> list[Any]:
    return [FIELD.empty(len(positions))]


def expected(order: ChunkOrder, share: TrainShare, epoch: int, start: int = 0) -> list[list[int]]:
    return [order.samples(epoch)[positions].tolist() for positions in share.batches(start)]


def through(
    ring: Ring, order: ChunkOrder, share: TrainShare, epoch: int, start: int = 0
) -> list[list[int]]:
    schedule = ChunkSchedule(order, epoch, share.span(start), share.own_streams(start))
    found = []
    for (out,) in ring.batches(schedule, share.batches(start), take):
        assert (out[:, 0, 0] == out[:, 0, 1]).all()
        found.append(out[:, 0, 0].astype(int).tolist())
    return found


@settings(max_examples=150)
@example(counts=[1, 1], streams=1, spare=1, batch=1, rank_of=(1, 2), done=0, gather_threads=1)
@example(counts=[1] * 9, streams=1, spare=1, batch=1, rank_of=(2, 3), done=0, gather_threads=2)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=25),
    streams=st.integers(1, 8),
    spare=st.integers(0, 4),
    batch=st.integers(1, 40),
    rank_of=st.sampled_from([(rank, world) for world in (1, 2, 3, 5) for rank in range(world)]),
    done=st.integers(0, 3),
    gather_threads=st.integers(1, 4),
)
def test_a_ring_gives_the_order_with_any_number_of_slots(
    counts: list[int],
    streams: int,
    spare: int,
    batch: int,
    rank_of: tuple[int, int],
    done: int,
    gather_threads: int,
) -> None:
    order = ChunkOrder(counts, streams, seed=5)
    share = TrainShare(order.n, batch, *rank_of, drop_last=False, streams=streams)
    start = min(done, len(share)) * share.global_batch
    source = Counting(counts)
    ring = Ring(source, [FIELD], streams + spare, 3, gather_threads)
    for epoch in (0, 1):  # the same slots serve the next epoch
        source.reads.clear()
        found = through(ring, order, share, epoch, start)
        assert found == expected(order, share, epoch, start)
        assert len(source.reads) == len(set(source.reads))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("slots", "least", "most"), [(21, 0, 0), (15, 5, 14), (6, 14, 20)])
def test_what_an_epoch_leaves_in_the_slots_is_not_read_again(
    seed: int | None, slots: int, least: int, most: int
) -> None:
    source = Counting([5] * 20)
    order = ChunkOrder(source.counts, 1 if seed is None else 4, seed)
    share = TrainShare(order.n, 7, drop_last=False)
    ring = Ring(source, [FIELD], slots, decode_threads=2)
    for epoch in range(5):
        source.reads.clear()
        assert through(ring, order, share, epoch) == expected(order, share, epoch)
        assert len(source.reads) == len(set(source.reads))
        assert len(source.reads) == 20 if epoch == 0 else least <= len(source.reads) <= most


def test_a_chunk_that_could_not_be_read_is_not_taken_for_read() -> None:
    source = Counting([5] * 20, broken=13)
    order = ChunkOrder(source.counts, 4, seed=0)
    share = TrainShare(100, 10)
    ring = Ring(source, [FIELD], 21, 3)
    for _ in range(2):
        with pytest.raises(StoreError, match="chunk number 13"):
            through(ring, order, share, 0)
    source.broken = None
    assert through(ring, order, share, 0) == expected(order, share, 0)


def test_too_few_slots_are_refused() -> None:
    order = ChunkOrder([5] * 20, 4, seed=0)
    with pytest.raises(InvalidValueError, match=r"slots must be at least 4, .* got 3"):
        through(Ring(Counting([5] * 20), [FIELD], 3, 2), order, TrainShare(100, 10), 0)


def test_batches_are_handed_out_before_chunks_that_later_ones_need() -> None:
    order = ChunkOrder([5] * 20, 1, seed=None)
    source = Counting([5] * 20)
    source.held = 7
    share = TrainShare(100, 5)
    batches = Ring(source, [FIELD], 20, decode_threads=2, gather_threads=3).batches(
        ChunkSchedule(order, 0, range(100)), share.batches(), take
    )
    found = [next(batches)[0][:, 0, 0].tolist() for _ in range(7)]
    assert found == [positions.tolist() for positions in itertools.islice(share.batches(), 7)]
    source.let_go.set()
    assert [int(out[0, 0, 0]) for (out,) in batches] == [*range(35, 100, 5)]


def test_one_batch_is_gathered_ahead_however_large_it_is() -> None:
    large = np.empty((9 << 20,), np.uint8)
    with BatchQueue(threads=2) as queue:
        assert queue.has_room()
        queue.append([large])
        assert queue.has_room()
        queue.append([large])
        assert not queue.has_room()


def test_slots_that_the_first_of_several_batches_still_needs_are_known() -> None:
    let_go = threading.Event()
    with BatchQueue(threads=1) as queue:
        for first in (0, 4):
            queue.append(take(range(4)))
            queue.fill(np.arange(first, first + 4), slice(0, 4), lambda rows: let_go.wait(60))
        position = queue.first_unfilled()
        let_go.set()
        assert position == 0
        assert [len(queue.pop()) for _ in range(2)] == [1, 1]
        assert queue.first_unfilled() is None
