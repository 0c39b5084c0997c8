"""Compute which sample each rank reads, from samples, epoch, seed, rank, world and batch size.

An order maps the positions 0 ... n - 1 of an epoch to samples, by the seed and the epoch alone:
`permutation` for data in memory, `ChunkOrder` for data that is read chunk by chunk. A share says
which positions a rank takes, in batches: `TrainShare` (equal ranks, no sample twice) and
`EvalShare` (every sample exactly once).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary

Ints = NDArray[np.int64]

# Numbers with many divisors: if the number of streams is a multiple of the number of ranks, each
# stream belongs to one rank, and few chunks are read by two ranks.
_STREAM_COUNTS = (960, 480, 240, 96, 72, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)

# With fewer blocks than this, no loader can mix well, and a report says so.
_FEW_BLOCKS = 15
# Fraction of a perfect shuffle's effective batch size below which a report gives advice.
_WELL_MIXED = 0.8


def permutation(n: int, seed: int, epoch: int, chunk: int | None = None) -> Ints:
    """Shuffle 0 ... n - 1 (the samples of `chunk`, if given), the same in every process."""
    # A 0 at the end of a key does not count, so the key of chunk 0 ends in 1.
    key = [seed, epoch]
    if chunk is not None:
        key = [seed, epoch, chunk + 1]
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    return generator.permutation(n)


def worker_seed(seed: int, epoch: int, position: int = 0) -> int:
    """Return the seed of worker processes for the batch from a position on, 0 to 2**63 - 1."""
    state = np.random.SeedSequence([seed, epoch, position]).generate_state(1, np.uint64)
    return int(state[0] >> 1)


@dataclass(frozen=True)
class _Share(ABC):
    n: int
    batch_size: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of this rank in an epoch."""

    @abstractmethod
    def span(self, start: int = 0) -> range:
        """Return the positions among which this rank's are, if the epoch continues at `start`."""

    @abstractmethod
    def batches(self, start: int = 0, together: int = 1) -> Iterator[Ints]:
        """Yield this rank's positions from `start` on, ascending, `together` batches at a time."""

    @abstractmethod
    def end_of(self, positions: Ints, start: int = 0) -> int:
        """Return the `start` from which the epoch continues after a batch."""

    def own_streams(self, start: int = 0) -> Ints | None:
        """Return the streams of which this rank takes samples; None if it may be all."""
        return None


@dataclass(frozen=True)
class TrainShare(_Share):
    """Positions that one rank trains on: equal batches on every rank, no sample twice.

    A global batch is the next ``batch_size * world`` positions, of which each rank takes as many.
    Global batches are therefore the same for any world size with the same global batch size.
    Without `drop_last`, the rest of an epoch is one smaller batch, equal on every rank; fewer than
    `world` samples are then left out. `start` counts positions of all ranks.

    `streams` is that of a `ChunkOrder`: a rank then takes samples of few streams, so that few
    chunks are read by several ranks. None: every rank takes every world-th position.
    """

    # If `world` divides `streams`, each stream belongs to one rank. If not, the chunks of a stream
    # at a border between two ranks are read by both: all ranks together read each chunk
    # (world + streams - gcd) / streams times. With equal global batches for any world, no order
    # does much better: a rank that shares no chunk needs one of its own in every batch, and a
    # single rank must hold all of these in its buffer at once.

    drop_last: bool = True
    streams: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self.batch_size * self.world

    @property
    def num_samples(self) -> int:
        """Samples of this rank in an epoch."""
        return len(self.span()) // self.world

    def span(self, start: int = 0) -> range:
        """Return the positions of all ranks, if the epoch continues at `start`."""
        unit = self.global_batch if self.drop_last else self.world
        return range(start, start + (self.n - start) // unit * unit)

    def batches(self, start: int = 0, together: int = 1) -> Iterator[Ints]:
        """Yield this rank's positions from `start` on, ascending, `together` batches at a time."""
        stop, batch = self.span(start).stop, self.global_batch
        for first in range(start, stop, batch * together):
            last = min(first + batch * together, stop)
            if self._groups == self.world:
                yield np.arange(first + self.rank, last, self.world, dtype=np.int64)
            else:
                starts = range(first, last, batch)
                yield np.concatenate([self._positions(p, min(batch, stop - p)) for p in starts])

    def end_of(self, positions: Ints, start: int = 0) -> int:
        """Return the `start` from which the epoch continues after a batch of all ranks."""
        batch = self.global_batch
        whole = start + ((int(positions[-1]) - start) // batch + 1) * batch
        return min(whole, self.span(start).stop)

    def own_streams(self, start: int = 0) -> Ints | None:
        """Return the streams of which this rank takes samples from `start` on; None: maybe all."""
        if self.streams is None:
            return None
        stop, batch = self.span(start).stop, self.global_batch
        # Batches that start in the same stream have samples of the same streams.
        starts = range(start, stop, batch)
        taken = np.zeros(self.streams, bool)
        for first in {*starts[: self.streams // math.gcd(batch, self.streams)], *starts[-1:]}:
            positions = self._positions(first, min(batch, stop - first))
            taken[positions % self.streams] = True
        return np.flatnonzero(taken)

    @property
    def _groups(self) -> int:
        """Number of groups of ranks, of which each has streams of its own."""
        if self.streams is None:
            return self.world
        return math.gcd(self.world, self.streams)

    def _positions(self, start: int, size: int) -> Ints:
        """Return this rank's positions in the global batch of some size that begins at `start`."""
        # Group k takes the streams with remainder k, counted from the first of the batch: of any
        # batch an equal number of samples. In the order of their sections, these are shared out
        # among its ranks, so that only the streams at the borders belong to two of them. Ranks of
        # a group follow one another: on one machine, chunks that two of them read are cached.
        groups = self._groups
        group, place = divmod(self.rank, self.world // groups)
        positions = np.arange(start + group, start + size, groups, dtype=np.int64)
        if groups == self.world:
            return positions
        assert self.streams is not None
        section = _sections_of_streams(self.streams)[positions % self.streams]
        by_section = np.argsort(section.astype(np.int16), kind="stable")
        own = size // self.world
        return np.sort(positions[by_section[place * own : (place + 1) * own]])


@dataclass(frozen=True)
class EvalShare(_Share):
    """Positions that one rank evaluates: every sample exactly once over all ranks.

    Ranks take contiguous runs whose lengths differ by at most one. Nothing is padded, so ranks
    may have different numbers of batches, or none. `start` counts positions of this rank.
    """

    @property
    def num_samples(self) -> int:
        """Samples of this rank in an epoch."""
        return len(self.span())

    def span(self, start: int = 0) -> range:
        """Return this rank's positions, without the first `start` of them."""
        begin, end = (self.n * rank // self.world for rank in (self.rank, self.rank + 1))
        return range(begin + start, end)

    def batches(self, start: int = 0, together: int = 1) -> Iterator[Ints]:
        """Yield this rank's positions from `start` on, `together` batches at a time."""
        span, width = self.span(start), self.batch_size * together
        for first in range(span.start, span.stop, width):
            yield np.arange(first, min(first + width, span.stop), dtype=np.int64)

    def end_of(self, positions: Ints, start: int = 0) -> int:
        """Return the `start` from which this rank continues after a batch."""
        return int(positions[-1]) + 1 - self.span().start


def stream_count(chunks: int, slots: int) -> int:
    """Return the number of streams, 1 to 960, that read chunks if `slots` chunks fit in memory."""
    # Half of the slots hold the chunks in use, the others those that are read ahead: reads from a
    # distant store must cover its speed times its latency, which is much more than one chunk.
    most = max(1, min(chunks, slots // 2))
    return next(count for count in _STREAM_COUNTS if count <= most)


@cache
def _sections_of_streams(streams: int) -> Ints:
    """Return the section that each stream reads: its number with the digits reversed."""
    # The digits are those of a mixed radix, the prime factors of the number of streams. The streams
    # of one rank have equal remainders modulo the world size. Reversed digits put them next to each
    # other for 2, 4, 8 ... ranks, so that adjacent sections, which share a chunk at their border,
    # mostly belong to one rank.
    factors, rest = [], streams
    for prime in (2, 3):
        while rest % prime == 0:
            factors.append(prime)
            rest //= prime
    return np.arange(streams).reshape(*factors, rest).ravel(order="F")


class ChunkOrder:
    """Order of samples that uses few chunks at a time, and each of them once.

    The chunks are shuffled and concatenated, with the samples shuffled inside each. The sequence is
    cut into `streams` sections of equal length, and the order takes one sample from each section in
    turn. Every batch therefore mixes samples of about as many chunks as there are streams. Every
    second section is read backwards: two sections that share a chunk need it at the same time, and
    it is read once. Without a seed there is one stream, in the order of the samples.
    """

    def __init__(self, counts: Sequence[int] | Ints, streams: int, seed: int | None) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.streams = streams
        self.seed = seed
        self.first_samples = np.concatenate([[0], np.cumsum(self.counts)])
        self.n = int(self.first_samples[-1])

    def chunk_permutation(self, epoch: int, chunk: int) -> Ints:
        """Return the order of the samples inside a chunk."""
        count = int(self.counts[chunk])
        if self.seed is None:
            return np.arange(count, dtype=np.int64)
        return permutation(count, self.seed, epoch, chunk)

    def samples(self, epoch: int) -> Ints:
        """Return the sample at every position of an epoch."""
        shuffled = [self.chunk_permutation(epoch, chunk) for chunk in range(len(self.counts))]
        schedule = ChunkSchedule(self, epoch, range(self.n))
        visits, offsets = schedule.locate(np.arange(self.n, dtype=np.int64))
        first_of_chunk = self.first_samples[schedule.chunks[visits]]
        return first_of_chunk + np.concatenate(shuffled)[first_of_chunk + offsets]


class ChunkSchedule:
    """The chunks that are read for a span of positions of an epoch, or for some streams of it.

    `chunks` are in the order in which they are first needed, `first` and `last` are the first and
    last position at which each is. At most `in_use` chunks are needed at one position.
    """

    def __init__(
        self, order: ChunkOrder, epoch: int, span: range, streams: Ints | None = None
    ) -> None:
        self.order, self.epoch = order, epoch
        chunks = np.flatnonzero(order.counts)
        if order.seed is not None:
            chunks = chunks[permutation(len(chunks), order.seed, epoch)]
        # Where each shuffled chunk begins in the sequence of all.
        self._starts = np.concatenate([[0], np.cumsum(order.counts[chunks])])
        self._find_sections()
        read = range(order.streams) if streams is None else streams.tolist()
        self.in_use = len(read)
        self._find_chunks(chunks, read, span)

    def _find_sections(self) -> None:
        """Find where each stream begins in the shuffled sequence, and its direction (1 or -1)."""
        n, streams = self.order.n, self.order.streams
        section = _sections_of_streams(streams)
        length = n // streams + (np.arange(streams) < n % streams)
        length_of_section = length[np.argsort(section)]
        begin = (np.cumsum(length_of_section) - length_of_section)[section]
        self._step = np.where(section % 2 == 0, 1, -1)
        self._origin = np.where(section % 2 == 0, begin, begin + length - 1)

    def _find_chunks(self, chunks: Ints, read: Sequence[int], span: range) -> None:
        """Find the chunks that some streams cross in a span of positions."""
        # Stream s takes its k-th sample at position k * streams + s.
        streams, starts, start = self.order.streams, self._starts, span.start
        first = np.full(len(chunks), np.iinfo(np.int64).max)
        last = np.full(len(chunks), -1, np.int64)
        for stream in read:
            of_stream = range(start + (stream - start) % streams, span.stop, streams)
            if not of_stream:
                continue
            origin, step = int(self._origin[stream]), int(self._step[stream])
            # Lowest and highest index in the sequence: of all these samples, then of those in each
            # chunk.
            lowest, highest = sorted(
                origin + step * (position // streams) for position in (of_stream[0], of_stream[-1])
            )
            first_crossed, last_crossed = np.searchsorted(starts, (lowest, highest), "right") - 1
            crossing = slice(first_crossed, last_crossed + 1)
            lows = np.clip(starts[crossing], lowest, highest)
            highs = np.clip(starts[first_crossed + 1 : last_crossed + 2] - 1, lowest, highest)
            at_low, at_high = (np.abs(at - origin) * streams + stream for at in (lows, highs))
            first[crossing] = np.minimum.reduce([first[crossing], at_low, at_high])
            last[crossing] = np.maximum.reduce([last[crossing], at_low, at_high])
        crossed = np.flatnonzero(last >= 0)
        crossed = crossed[np.argsort(first[crossed], kind="stable")]
        self.chunks, self.first, self.last = chunks[crossed], first[crossed], last[crossed]
        self._visit_of_chunk = np.full(len(chunks), -1, np.int64)
        self._visit_of_chunk[crossed] = np.arange(len(crossed))

    def __len__(self) -> int:
        return len(self.chunks)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return index into `chunks` and offset into the shuffled chunk of each position."""
        steps, streams = np.divmod(positions, self.order.streams)
        index = self._origin[streams] + self._step[streams] * steps  # in the sequence
        shuffled_chunk = np.searchsorted(self._starts, index, side="right") - 1
        return self._visit_of_chunk[shuffled_chunk], index - self._starts[shuffled_chunk]


def effective_batch_size(blocks: Sequence[int] | Ints) -> float:
    """Return Kish's effective sample size of a batch, ``B**2 / sum(c_k**2)``."""
    _, counts = np.unique(np.asarray(blocks), return_counts=True)
    return math.pow(counts.sum(), 2) / float(np.square(counts, dtype=np.float64).sum())


@dataclass(frozen=True, repr=False)
class ShuffleReport(Summarized):
    """Report of how well batches are mixed, given that samples of one block are similar.

    Parameters
    ----------
    batch_size : int
        Samples in a full batch of one rank.
    effective_batch_size : float
        Median of Kish's effective sample size of the batches: samples of one block count as
        identical.
    perfect : float
        Expected value for batches drawn at random from all samples.
    least_blocks : int
        Smallest number of different blocks in one of these batches.
    blocks : int
        Blocks in the data.
    unit : str
        Kind of block: ``"blocks of the split"`` or ``"chunks"``.

    Examples
    --------
    >>> report = ShuffleReport.of([[0, 0, 1, 1], [0, 1, 2, 3]], "chunks", counts=[5] * 20)
    >>> report
    <ShuffleReport> a batch of 4 is worth 3.0 independent samples (a perfect shuffle: 3.6), from at
        least 2 of 20 chunks
    """

    batch_size: int
    effective_batch_size: float
    perfect: float
    least_blocks: int
    blocks: int
    unit: str

    @classmethod
    def of(
        cls, batches: Sequence[Sequence[int] | Ints], unit: str, counts: Sequence[int] | Ints
    ) -> ShuffleReport:
        """Summarize batches.

        Parameters
        ----------
        batches : sequence of sequence of int
            Block of each sample, batch by batch; at least one batch.
        unit : str
            Kind of block.
        counts : sequence of int
            Samples in each block of the data.

        Returns
        -------
        ShuffleReport
            The report.
        """
        size = max(len(batch) for batch in batches)
        sizes = np.asarray(counts, np.float64)
        n = sizes.sum()
        same_block = 0.0
        if n > 1:
            same_block = float((sizes * (sizes - 1)).sum() / (n * (n - 1)))
        return cls(
            batch_size=size,
            effective_batch_size=float(np.median([effective_batch_size(b) for b in batches])),
            perfect=size / (1 + (size - 1) * same_block),
            least_blocks=min(len(np.unique(batch)) for batch in batches),
            blocks=int((sizes > 0).sum()),
            unit=unit,
        )

    def _summary(self) -> Summary:
        """Return one sentence, with advice where batches are poorly mixed."""
        sentence = (
            f"a batch of {self.batch_size} is worth {self.effective_batch_size:.1f} independent "
            f"samples (a perfect shuffle: {self.perfect:.1f}), from at least {self.least_blocks} "
            f"of {self.blocks} {self.unit}"
        )
        if self.effective_batch_size < _WELL_MIXED * self.perfect:
            sentence += "; a larger buffer_mb, or a store in shuffled order, mixes better"
        if self.blocks < _FEW_BLOCKS:
            sentence += f"; {self.blocks} {self.unit} are few: no loader can mix more"
        return Summary(sentence)
