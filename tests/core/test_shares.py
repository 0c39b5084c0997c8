"""Which rank reads which sample: hundreds of geometries, without starting a process."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.rank_shares import (
    ChunkOrder,
    ChunkSchedule,
    EvalShare,
    ShuffleReport,
    TrainShare,
    effective_batch_size,
    permutation,
)
from ml4cube.loading.memory import Memory

GEOMETRIES = [
    (n, batch, world)
    for n in (0, 1, 2, 7, 64, 97)
    for batch in (1, 3, 16)
    for world in (1, 2, 3, 5, 8)
]


def train_shares(
    n: int, batch: int, world: int, drop_last: bool = True, streams: int | None = None
) -> list[TrainShare]:
    return [TrainShare(n, batch, rank, world, drop_last, streams) for rank in range(world)]


def batches_of(share: TrainShare | EvalShare, *options: int) -> list[list[int]]:
    return [positions.tolist() for positions in share.batches(*options)]


def global_batches(shares: list[TrainShare], start: int = 0) -> list[list[int]]:
    """What all ranks read in each step together, sorted."""
    steps = zip(*(share.batches(start) for share in shares), strict=True)
    return [sorted(np.concatenate(step).tolist()) for step in steps]


@pytest.mark.parametrize(("n", "batch", "world"), GEOMETRIES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("streams", [None, 1, 6])
def test_train_ranks_are_equal_and_read_nothing_twice(
    n: int, batch: int, world: int, drop_last: bool, streams: int | None
) -> None:
    shares = train_shares(n, batch, world, drop_last, streams)
    read = [batches_of(share) for share in shares]
    assert {tuple(map(len, batches)) for batches in read} == {tuple(map(len, read[0]))}
    assert {(len(s), s.num_samples) for s in shares} == {(len(read[0]), sum(map(len, read[0])))}
    flat = [p for batches in read for b in batches for p in b]
    assert len(flat) == len(set(flat))
    left_out = n - len(flat)
    assert 0 <= left_out < (batch * world if drop_last else world)
    assert all(len(b) == batch for batches in read for b in batches) or not drop_last


@pytest.mark.parametrize(("n", "batch", "world"), GEOMETRIES)
def test_evaluation_reads_every_sample_exactly_once(n: int, batch: int, world: int) -> None:
    shares = [EvalShare(n, batch, rank, world) for rank in range(world)]
    read = [batches_of(share) for share in shares]
    assert [p for batches in read for b in batches for p in b] == list(range(n))
    assert [len(s) for s in shares] == [len(batches) for batches in read]
    sizes = [s.num_samples for s in shares]
    assert sizes == [sum(map(len, batches)) for batches in read]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("streams", [None, 1, 4, 16])
def test_global_batches_do_not_depend_on_the_world(world: int, streams: int | None) -> None:
    expected = global_batches(train_shares(500, 24, 1))
    assert global_batches(train_shares(500, 24 // world, world, streams=streams)) == expected


@settings(max_examples=200)
@given(
    n=st.integers(0, 400),
    batch=st.integers(1, 9),
    world=st.integers(1, 20),
    streams=st.integers(1, 24),
    start=st.integers(0, 100),
    drop_last=st.booleans(),
)
def test_a_rank_takes_samples_of_its_own_streams_only(
    n: int, batch: int, world: int, streams: int, start: int, drop_last: bool
) -> None:
    start, end = min(start, n), min(start, n)
    shares = train_shares(n, batch, world, drop_last, streams)
    for step in zip(*(share.batches(start) for share in shares), strict=True):
        together = np.sort(np.concatenate(step))
        assert together.tolist() == [*range(end, end + len(together))]
        assert all((np.diff(positions) > 0).all() for positions in step)
        end += len(together)
        assert {s.end_of(own, start) for s, own in zip(shares, step, strict=True)} == {end}
    for share in shares:
        taken = [p % streams for positions in share.batches(start) for p in positions]
        assert share.own_streams(start).tolist() == sorted(set(taken))


def reads(order: ChunkOrder, batch: int, world: int) -> int:
    """Chunks that all ranks read in an epoch."""
    shares = train_shares(order.n, batch, world, streams=order.streams)
    return sum(len(ChunkSchedule(order, 0, s.span(), s.own_streams())) for s in shares)


WORLDS = [*range(1, 17), 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 100, 128, 160]
LARGE_WORLDS = [192, 256, 384, 512, 768, 1000, 1024]


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.slow) for world in LARGE_WORLDS)]
)
@pytest.mark.parametrize("streams", [48, 96, 960])
def test_ranks_share_only_the_chunks_of_streams_that_they_share(world: int, streams: int) -> None:
    chunks = 10 * max(world, streams)
    order = ChunkOrder([64] * chunks, streams, seed=3)
    at_borders = (world + streams - math.gcd(world, streams)) / streams
    assert reads(order, 16, world) <= 1.1 * at_borders * chunks
    if streams % world == 0 or streams >= 20 * world:
        assert reads(order, 16, world) <= 1.1 * chunks


@settings(max_examples=100)
@given(
    n=st.integers(1, 300),
    batch=st.integers(1, 12),
    before=st.integers(1, 6),
    after=st.integers(1, 6),
    data=st.data(),
)
def test_resuming_on_another_world_loses_and_repeats_nothing(
    n: int, batch: int, before: int, after: int, data: st.DataObject
) -> None:
    first = train_shares(n, batch, before)
    done = data.draw(st.integers(0, len(first[0])))
    read = global_batches(first)[:done] + global_batches(
        train_shares(n, batch, after), start=done * batch * before
    )
    flat = sorted(p for step in read for p in step)
    assert flat == list(range(len(flat)))
    assert n - len(flat) < batch * after


chunk_counts = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@settings(max_examples=150)
@given(
    counts=chunk_counts,
    streams=st.integers(1, 30),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
)
def test_an_order_holds_every_sample_once(
    counts: list[int], streams: int, seed: int, epoch: int
) -> None:
    order = ChunkOrder(counts, streams, seed)
    samples = order.samples(epoch)
    assert sorted(samples.tolist()) == list(range(sum(counts)))
    assert np.array_equal(samples, ChunkOrder(np.array(counts), streams, seed).samples(epoch))


@settings(max_examples=150)
@given(
    counts=chunk_counts,
    streams=st.integers(1, 30),
    world=st.integers(1, 12),
    batch=st.integers(1, 9),
    data=st.data(),
)
def test_a_schedule_has_the_chunks_of_its_rank_when_they_are_needed(
    counts: list[int], streams: int, world: int, batch: int, data: st.DataObject
) -> None:
    order = ChunkOrder(counts, streams, seed=7)
    rank = data.draw(st.integers(0, world - 1))
    share = TrainShare(order.n, batch, rank, world, streams=streams)
    start = data.draw(st.integers(0, order.n))  # not always a whole number of global batches
    schedule = ChunkSchedule(order, 2, share.span(start), share.own_streams(start))
    samples = order.samples(2)
    assert (np.diff(schedule.first) >= 0).all()
    assert len(set(schedule.chunks.tolist())) == len(schedule)
    for positions in share.batches(start):
        visits, offsets = schedule.locate(positions)
        for p, visit, offset in zip(positions, visits, offsets, strict=True):
            chunk = int(schedule.chunks[visit])
            assert schedule.first[visit] <= p <= schedule.last[visit]
            inside = order.chunk_permutation(2, chunk)[offset]
            assert order.first_samples[chunk] + inside == samples[p]


@pytest.mark.parametrize("chunks", [48, 50, 75, 200])
@pytest.mark.parametrize("streams", [8, 16, 24, 48])
def test_one_rank_reads_every_chunk_once_and_holds_few(chunks: int, streams: int) -> None:
    order = ChunkOrder([100] * chunks, streams, seed=3)
    schedule = ChunkSchedule(order, 1, range(order.n))
    assert sorted(schedule.chunks.tolist()) == list(range(chunks))
    held = [int(((schedule.first <= p) & (p <= schedule.last)).sum()) for p in range(0, order.n, 7)]
    assert max(held) <= streams


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_together_read_few_chunks_twice(world: int) -> None:
    order = ChunkOrder([100] * 130, 24, seed=3)
    assert 130 <= reads(order, 8, world) <= 130 + 23
    if world in (2, 4, 8):  # neighbouring sections belong to one rank
        assert reads(order, 8, world) <= 130 + world - 1


def test_batches_mix_as_many_chunks_as_there_are_streams() -> None:
    order = ChunkOrder([256] * 200, 48, seed=0)
    chunk_of_sample = np.repeat(np.arange(200), 256)
    for positions in TrainShare(order.n, 256).batches():
        blocks = chunk_of_sample[order.samples(0)[positions]]
        # at the epoch's two ends neighbouring streams share a chunk
        assert len(set(blocks.tolist())) >= 24
        assert effective_batch_size(blocks) >= 0.95 * 24


@pytest.mark.parametrize("chunk_mb", [0.5, 1, 2.5, 4, 8])
@pytest.mark.parametrize("gb", [0.6, 0.9, 3, 40])
@pytest.mark.parametrize("batch", [64, 256])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_fifteen_chunks_in_every_batch_with_the_default_buffer(
    chunk_mb: float, gb: float, batch: int, world: int
) -> None:
    """Even of a store in grid order, where chunks are the blocks, for all that a sampler makes."""
    chunks = int(gb * 1024 / chunk_mb)
    counts = np.full(chunks, 1000)
    counts[-1] = 137
    memory = Memory(counts, int(chunk_mb * 2**20 / 1000), buffer_mb=512)
    assert not memory.fits
    order = memory.order(seed=5)
    share = TrainShare(order.n, batch // world, 0, world)
    schedule = ChunkSchedule(order, 3, range(order.n))
    steps = len(share)
    for step in {*range(20), *range(0, steps, max(1, steps // 50)), *range(steps - 20, steps)}:
        whole = np.arange(step * share.global_batch, (step + 1) * share.global_batch)
        assert len(np.unique(schedule.chunks[schedule.locate(whole)[0]])) >= 15


@settings(max_examples=200)
@example(counts=[5] * 40, sample_bytes=100, buffer_kb=10, world=2, shuffle=True)
@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    sample_bytes=st.integers(1, 4000),
    buffer_kb=st.floats(0.01, 500),
    world=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_no_rank_holds_more_than_its_buffer(
    counts: list[int], sample_bytes: int, buffer_kb: float, world: int, shuffle: bool
) -> None:
    limit = int(buffer_kb * 1024)
    try:
        memory = Memory(np.array(counts), sample_bytes, buffer_kb / 1024)
    except InvalidValueError:
        assert 2 * max(counts) * sample_bytes > limit
        assert sum(counts) * sample_bytes > limit
        return
    order = memory.order(3 if shuffle else None)
    for rank in range(world):
        train = TrainShare(order.n, 1, rank, world, streams=order.streams)
        evaluation = EvalShare(order.n, 1, rank, world)
        for share, samples in ((train, range(order.n)), (evaluation, evaluation.span())):
            chunks = memory.resident_chunks(samples)
            if chunks is not None:
                assert sum(counts[chunk] for chunk in chunks) * sample_bytes <= limit
                assert {*np.repeat(range(len(counts)), counts)[samples]} == {*chunks}
            else:
                schedule = ChunkSchedule(order, 0, share.span(), share.own_streams())
                assert memory.slots * max(counts) * sample_bytes <= limit
                assert schedule.in_use < memory.slots


def test_order_without_seed_is_the_order_of_samples() -> None:
    order = ChunkOrder([3, 0, 4], 1, None)
    assert order.samples(epoch=9).tolist() == list(range(7))
    schedule = ChunkSchedule(order, 0, range(2, 5))
    assert schedule.chunks.tolist() == [0, 2]
    assert schedule.first.tolist() == [2, 3]
    assert schedule.last.tolist() == [2, 4]


def test_orders_never_change() -> None:
    """Resuming a run needs the same order from another version of this package."""
    assert permutation(8, seed=42, epoch=0).tolist() == PERMUTATION
    assert ChunkOrder([4, 4, 4], 3, seed=42).samples(1).tolist() == CHUNKED


PERMUTATION = [3, 4, 2, 7, 6, 1, 5, 0]
CHUNKED = [3, 10, 7, 0, 8, 4, 2, 9, 5, 1, 11, 6]


def test_effective_batch_size_is_between_one_and_the_batch() -> None:
    assert effective_batch_size([3] * 10) == 1
    assert effective_batch_size(list(range(10))) == 10
    assert math.isclose(effective_batch_size([0, 0, 0, 1]), 16 / 10)


def test_blocks_without_samples_do_not_count() -> None:
    report = ShuffleReport.of([[0, 2], [2, 2]], "chunks", [3, 0, 5])
    assert (report.blocks, report.least_blocks) == (2, 1)


@pytest.mark.parametrize(("n", "batch", "world"), GEOMETRIES)
@pytest.mark.parametrize("together", [2, 5, 1000])
def test_several_batches_at_once_are_the_same_batches(
    n: int, batch: int, world: int, together: int
) -> None:
    shares = [*train_shares(n, batch, world), *train_shares(n, batch, world, drop_last=False)]
    evals = [EvalShare(n, batch, rank, world) for rank in range(world)]
    for share in (*shares, *evals):
        for start in {0, min(batch * world, share.num_samples)}:
            one, many = batches_of(share, start), batches_of(share, start, together)
            cut = [run[k : k + batch] for run in many for k in range(0, len(run), batch)]
            assert cut == one
            assert len(many) == -(-len(one) // together)
