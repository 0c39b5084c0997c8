"""Who reads which sample: pure functions of (samples, epoch, seed, rank, world, batch size).

Two questions, kept apart. *Which order?* An order maps positions 0 ... n - 1 of an epoch to
samples, and depends on the seed and the epoch alone: `permutation` for data in memory,
`ChunkOrder` for data that is read chunk by chunk. *Whose turn?* A share says which positions
one rank takes, cut into batches: `TrainShare` (equal ranks, nothing twice) and `EvalShare`
(everything exactly once). Nothing here knows processes, threads or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_whole

Ints = NDArray[np.int64]

# Highly composite numbers and powers of two: the more world sizes divide the number of
# streams, the fewer chunks are read by two ranks.
STREAM_COUNTS = (96, 72, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)

# Batches of fewer different blocks are poor; a report says so where the data has no more.
FEW_BLOCKS = 15
# Share of a perfect shuffle's effective batch size below which a report says what would help.
_WELL_MIXED = 0.8


def permutation(n: int, seed: int, epoch: int, chunk: int | None = None) -> Ints:
    """Shuffle 0 ... n - 1, the same in every process and on every machine.

    Parameters
    ----------
    n : int
        How many.
    seed, epoch : int
        What the order depends on, both >= 0.
    chunk : int, optional
        Which chunk's samples are shuffled; without it, a whole epoch's.

    Returns
    -------
    ndarray of int64, shape (n,)
        Every number once.

    Examples
    --------
    >>> sorted(permutation(5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    key = [seed, epoch] if chunk is None else [seed, epoch, chunk + 1]
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    return generator.permutation(n)


def worker_seed(seed: int, epoch: int) -> int:
    """Seed for what worker processes draw in one epoch.

    Parameters
    ----------
    seed, epoch : int
        What it depends on, both >= 0.

    Returns
    -------
    int
        From 0 to 2**63 - 1.
    """
    state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return int(state[0] >> 1)


@dataclass(frozen=True)
class _Share:
    n: int
    batch_size: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that are no sizes, and ranks that the world does not have."""
        check_whole("n", self.n, 0)
        check_whole("batch_size", self.batch_size, 1)
        check_whole("world", self.world, 1)
        check_whole("rank", self.rank, 0)
        if self.rank >= self.world:
            raise InvalidValueError(f"rank={self.rank} in a world of {self.world} ranks")


@dataclass(frozen=True)
class TrainShare(_Share):
    """The positions one rank trains on: equal batches on every rank, no sample twice.

    A global batch is the next ``batch_size * world`` positions, of which a rank takes every
    world-th. So the global batches are the same for any world size that makes the same
    global batch size. What is left over at the end, fewer than one global batch, belongs to
    other samples each epoch, since the order changes.

    Parameters
    ----------
    n : int
        Samples in the data set.
    batch_size : int
        Samples in a batch of one rank.
    rank, world : int
        This rank, and how many there are.
    drop_last : bool
        Whether what is left over is dropped. If not, it is one smaller last batch, equal on
        every rank: fewer than `world` samples are still left out.

    Examples
    --------
    >>> share = TrainShare(n=11, batch_size=2, rank=1, world=2)
    >>> [batch.tolist() for batch in share.batches()]
    [[1, 3], [5, 7]]
    >>> share.num_samples, len(share)
    (4, 2)
    """

    drop_last: bool = True

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self.batch_size * self.world

    def stop(self, start: int = 0) -> int:
        """First position that is left out, when the epoch goes on from `start`.

        Parameters
        ----------
        start : int
            Positions that are already used up.

        Returns
        -------
        int
            From `start` to `n`.
        """
        unit = self.global_batch if self.drop_last else self.world
        return start + (self.n - start) // unit * unit

    @property
    def num_samples(self) -> int:
        """Samples that this rank, like any other, sees in an epoch."""
        return self.stop() // self.world

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.stop() // self.global_batch)

    def batches(self, start: int = 0, together: int = 1) -> Iterator[Ints]:
        """Positions of this rank, batch by batch.

        Parameters
        ----------
        start : int
            Positions that all ranks have used up already, to go on inside an epoch.
        together : int
            So many batches at a time, end to end; the last time there may be fewer.

        Yields
        ------
        ndarray of int64, shape (batch,)
            Positions in the epoch's order.
        """
        stop, width = self.stop(start), self.global_batch * together
        for begin in range(start, stop, width):
            end = min(begin + width, stop)
            yield np.arange(begin + self.rank, end, self.world, dtype=np.int64)


@dataclass(frozen=True)
class EvalShare(_Share):
    """The positions one rank evaluates: every sample exactly once over all ranks.

    Ranks take contiguous runs, in order, whose lengths differ by at most one; with fewer
    samples than ranks some have none. Nothing is padded, so ranks may differ in their number
    of batches.

    Parameters
    ----------
    n : int
        Samples in the data set.
    batch_size : int
        Samples in a batch; the last one may be smaller.
    rank, world : int
        This rank, and how many there are.

    Examples
    --------
    >>> [[b.tolist() for b in EvalShare(5, 2, rank, 2).batches()] for rank in (0, 1)]
    [[[0, 1]], [[2, 3], [4]]]
    """

    @property
    def begin(self) -> int:
        """First position of this rank."""
        return self.n * self.rank // self.world

    @property
    def end(self) -> int:
        """One past the last position of this rank."""
        return self.n * (self.rank + 1) // self.world

    @property
    def num_samples(self) -> int:
        """Samples that this rank sees in one pass."""
        return self.end - self.begin

    def __len__(self) -> int:
        """Batches of this rank in one pass."""
        return -(-self.num_samples // self.batch_size)

    def batches(self, start: int = 0, together: int = 1) -> Iterator[Ints]:
        """Positions of this rank, batch by batch.

        Parameters
        ----------
        start : int
            Samples of this rank that are already done, to go on inside a pass.
        together : int
            So many batches at a time, end to end; the last time there may be fewer.

        Yields
        ------
        ndarray of int64, shape (batch,)
            Positions, which in an evaluation are the samples themselves.
        """
        width = self.batch_size * together
        for begin in range(self.begin + start, self.end, width):
            yield np.arange(begin, min(begin + width, self.end), dtype=np.int64)


def stream_count(chunks: int, slots: int) -> int:
    """How many streams walk the chunks at once, given room for `slots` chunks in memory.

    Half of the slots hold the chunks in use, the others those that are being read ahead: what
    is under way from a store far away is its speed times its delay, much more than one chunk.

    Parameters
    ----------
    chunks : int
        Chunks in the data set.
    slots : int
        Chunks that fit into the loader's memory.

    Returns
    -------
    int
        1 to 96, at most `chunks` and half of `slots`. World sizes that divide it share the
        work without reading chunks twice.

    Examples
    --------
    >>> stream_count(chunks=500, slots=64), stream_count(chunks=10, slots=64)
    (32, 8)
    """
    most = max(1, min(chunks, slots // 2))
    return next(count for count in STREAM_COUNTS if count <= most)


def _sections_of_slots(streams: int) -> list[int]:
    """Which section each place in the round robin walks, by reversing its mixed-radix digits."""
    # The places of one rank are those of equal remainder modulo the world size. Reversed digits put
    # them side by side for 2, 4, 8 ... ranks, so that neighbouring sections, which share a chunk
    # where they meet, mostly belong to one rank.
    factors, rest = [], streams
    for prime in (2, 3):
        while rest % prime == 0:
            factors.append(prime)
            rest //= prime
    factors += [rest] if rest > 1 else []
    sections = []
    for slot in range(streams):
        section, width = 0, streams
        for factor in factors:
            slot, digit = divmod(slot, factor)
            width //= factor
            section += digit * width
        sections.append(section)
    return sections


class ChunkOrder:
    """An order of samples that touches few chunks at a time, and each of them once.

    The chunks are shuffled and laid end to end, with the samples shuffled inside each. The
    line is cut into `streams` sections of equal length, and the order takes one sample from
    each section in turn: a batch always mixes samples of (almost) as many chunks as there
    are streams, from the first batch of the epoch to the last. Every second section is
    walked backwards, so that two sections that share a chunk come to it at the same time
    and it is read once.

    Parameters
    ----------
    counts : sequence of int
        Samples in each chunk; samples are numbered chunk by chunk. 0 is allowed.
    streams : int
        Sections of the line.
    seed : int or None
        Seed of the shuffle; None keeps the order of the samples, with one stream.

    Examples
    --------
    >>> order = ChunkOrder([4, 4, 2], streams=2, seed=0)
    >>> sorted(order.samples(epoch=3).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> ChunkOrder([2, 3], streams=1, seed=None).samples(epoch=3).tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, counts: Sequence[int] | Ints, streams: int, seed: int | None) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        check_whole("streams", streams, 1)
        if seed is None and streams != 1:
            raise InvalidValueError(
                f"streams={streams} without a seed; the order would not be kept"
            )
        if seed is not None:
            check_whole("seed", seed, 0)
        if self.counts.ndim != 1 or (self.counts < 0).any():
            raise InvalidValueError(f"counts={counts!r}; give one number >= 0 per chunk")
        self.streams = streams
        self.seed = seed
        self.first_samples = np.concatenate([[0], np.cumsum(self.counts)])
        self.n = int(self.first_samples[-1])

    def chunk_permutation(self, epoch: int, chunk: int) -> Ints:
        """Order of the samples inside a chunk.

        Parameters
        ----------
        epoch : int
            Which epoch.
        chunk : int
            Which chunk.

        Returns
        -------
        ndarray of int64, shape (samples of the chunk,)
            Index inside the chunk, for each place on the line.
        """
        count = int(self.counts[chunk])
        if self.seed is None:
            return np.arange(count, dtype=np.int64)
        return permutation(count, self.seed, epoch, chunk)

    def tour(
        self, epoch: int, start: int = 0, stop: int | None = None, rank: int = 0, world: int = 1
    ) -> Tour:
        """Plan one epoch: which chunks a rank reads when, and where each position lies.

        Parameters
        ----------
        epoch : int
            Which epoch.
        start, stop : int
            Positions that will be asked for; all by default.
        rank, world : int
            Only chunks of this rank are visited; it takes the positions of a `TrainShare`.

        Returns
        -------
        Tour
            The plan.
        """
        return Tour(self, epoch, start, self.n if stop is None else stop, rank, world)

    def samples(self, epoch: int) -> Ints:
        """Sample at every position of an epoch: the order itself.

        Parameters
        ----------
        epoch : int
            Which epoch.

        Returns
        -------
        ndarray of int64, shape (n,)
            Every sample once.
        """
        tour = self.tour(epoch)
        visits, offsets = tour.locate(np.arange(self.n, dtype=np.int64))
        result = np.empty(self.n, np.int64)
        for visit, chunk in enumerate(tour.chunks.tolist()):
            here = visits == visit
            inside = self.chunk_permutation(epoch, chunk)[offsets[here]]
            result[here] = self.first_samples[chunk] + inside
        return result


class Tour:
    """One rank's way through the chunks of one epoch; made by `ChunkOrder.tour`.

    Parameters
    ----------
    order : ChunkOrder
        What is walked.
    epoch : int
        Which epoch.
    start, stop : int
        Positions that will be asked for.
    rank, world : int
        Whose way it is.

    Attributes
    ----------
    chunks : ndarray of int64, shape (visits,)
        Chunks in the order in which they are first needed.
    first, last : ndarray of int64, shape (visits,)
        First and last position at which each is needed.
    in_use : int
        Most chunks that are needed at one position.
    """

    def __init__(
        self, order: ChunkOrder, epoch: int, start: int, stop: int, rank: int, world: int
    ) -> None:
        self.order, self.epoch = order, epoch
        chunks = np.flatnonzero(order.counts)
        if order.seed is not None:
            chunks = chunks[permutation(len(chunks), order.seed, epoch)]
        self._line = np.concatenate([[0], np.cumsum(order.counts[chunks])])
        self._lay_sections()
        owned = range(order.streams)
        if order.streams % world == 0:
            owned = range(rank, order.streams, world)
        self.in_use = len(owned)
        self._visit(chunks, owned, start, stop)

    def _lay_sections(self) -> None:
        """Where on the line each place in the round robin starts, and in which direction."""
        n, streams = self.order.n, self.order.streams
        section = np.array(_sections_of_slots(streams))
        length = n // streams + (np.arange(streams) < n % streams)
        by_section = np.empty(streams, np.int64)
        by_section[section] = length
        begin = (np.cumsum(by_section) - by_section)[section]
        self._step = np.where(section % 2 == 0, 1, -1)
        self._origin = np.where(section % 2 == 0, begin, begin + length - 1)

    def _visit(self, chunks: Ints, owned: range, start: int, stop: int) -> None:
        """Find the chunks that the owned streams cross between two positions."""
        streams, line = self.order.streams, self._line
        first = np.full(len(chunks), np.iinfo(np.int64).max)
        last = np.full(len(chunks), -1, np.int64)
        for slot in owned:
            steps = max(0, -((slot - start) // streams)), -((slot - stop) // streams)
            if steps[1] <= steps[0]:
                continue
            origin, step = int(self._origin[slot]), int(self._step[slot])
            ends = sorted((origin + step * steps[0], origin + step * (steps[1] - 1)))
            low, high = np.searchsorted(line, ends, side="right") - 1
            edges = np.clip(line[low : high + 1], ends[0], ends[1])
            tails = np.clip(line[low + 1 : high + 2] - 1, ends[0], ends[1])
            near, far = (edges, tails) if step == 1 else (tails, edges)
            place = slice(low, high + 1)
            first[place] = np.minimum(first[place], step * (near - origin) * streams + slot)
            last[place] = np.maximum(last[place], step * (far - origin) * streams + slot)
        crossed = np.flatnonzero(last >= 0)
        crossed = crossed[np.argsort(first[crossed], kind="stable")]
        self.chunks, self.first, self.last = chunks[crossed], first[crossed], last[crossed]
        self._visit_of_link = np.full(len(chunks), -1, np.int64)
        self._visit_of_link[crossed] = np.arange(len(crossed))

    def __len__(self) -> int:
        """Chunks that this rank reads."""
        return len(self.chunks)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Where positions lie: in which visit, and how far into its (shuffled) chunk.

        Parameters
        ----------
        positions : ndarray of int64
            Positions of this rank.

        Returns
        -------
        visits, offsets : ndarray of int64
            Index into `chunks`, and index into the chunk's `ChunkOrder.chunk_permutation`.
        """
        steps, slots = np.divmod(positions, self.order.streams)
        place = self._origin[slots] + self._step[slots] * steps
        link = np.searchsorted(self._line, place, side="right") - 1
        return self._visit_of_link[link], place - self._line[link]


def effective_batch_size(blocks: Sequence[int] | Ints) -> float:
    """Size of a batch of independent samples that would be worth as much as this one.

    Samples of one block are counted as if they were identical: ``B**2 / sum(c_k**2)`` for
    `c_k` samples of block k among B (Kish's effective sample size).

    Parameters
    ----------
    blocks : sequence of int
        Block of each sample in the batch.

    Returns
    -------
    float
        From 1 (all of one block) to the batch's size (all of different blocks).

    Examples
    --------
    >>> effective_batch_size([0, 0, 1, 1]), effective_batch_size([0, 1, 2, 3])
    (2.0, 4.0)
    """
    _, counts = np.unique(np.asarray(blocks), return_counts=True)
    return math.pow(counts.sum(), 2) / float(np.square(counts, dtype=np.float64).sum())


@dataclass(frozen=True)
class ShuffleReport:
    """How well batches are mixed: samples of one block resemble one another.

    Parameters
    ----------
    batch_size : int
        Samples in a full batch of one rank.
    effective_batch_size : float
        `effective_batch_size` of the batches looked at, their median.
    perfect : float
        What to expect of batches drawn from all samples at random; it depends on how many
        blocks there are. Batches that are looked at may by chance be worth a little more.
    least_blocks : int
        Least number of different blocks in one of these batches.
    blocks : int
        Blocks in the data.
    unit : str
        What a block is: ``"blocks of the split"`` or ``"chunks"``.

    Examples
    --------
    >>> report = ShuffleReport.of([[0, 0, 1, 1], [0, 1, 2, 3]], "chunks", counts=[5] * 20)
    >>> print(report)  # doctest: +NORMALIZE_WHITESPACE
    a batch of 4 is worth 3.0 independent samples (a perfect shuffle: 3.6),
    from at least 2 of 20 chunks
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
        """Sum up batches.

        Parameters
        ----------
        batches : sequence of sequence of int
            Block of each sample, batch by batch; at least one batch.
        unit : str
            What a block is.
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
        alike = float((sizes * (sizes - 1)).sum() / (n * (n - 1))) if n > 1 else 0.0
        return cls(
            batch_size=size,
            effective_batch_size=float(np.median([effective_batch_size(b) for b in batches])),
            perfect=size / (1 + (size - 1) * alike),
            least_blocks=min(len(np.unique(batch)) for batch in batches),
            blocks=int((sizes > 0).sum()),
            unit=unit,
        )

    def __str__(self) -> str:
        """One sentence, which says what limits the mixing where it is poor."""
        said = (
            f"a batch of {self.batch_size} is worth {self.effective_batch_size:.1f} independent "
            f"samples (a perfect shuffle: {self.perfect:.1f}), from at least {self.least_blocks} "
            f"of {self.blocks} {self.unit}"
        )
        if self.effective_batch_size < _WELL_MIXED * self.perfect:
            said += "; a larger buffer_mb, or a store in shuffled order, mixes better"
        if self.blocks < FEW_BLOCKS:
            said += f"; {self.blocks} {self.unit} are few: no loader can mix more"
        return said
