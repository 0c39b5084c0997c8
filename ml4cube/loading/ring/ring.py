"""Batches from chunks: decode threads fill slots, other threads gather batches from them.

Threads that read large chunks and gather rows of them are faster than worker processes, because
both release the interpreter lock and nothing is sent between processes. Does not use torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from ml4cube.core.errors import CubeError, StoreError
from ml4cube.core.rank_shares import ChunkSchedule, Ints
from ml4cube.loading.ring.gathering import Gatherers
from ml4cube.loading.ring.slots import Array, Field, SampleArray

# About so many positions are located at once.
_LOCATED = 4096


class ChunkSource(Protocol):
    """Samples that can be read chunk by chunk, from any thread."""

    # Samples in each chunk.
    counts: Ints
    # Whether reads mostly wait.
    slow: bool

    def read(self, chunk: int, out: Mapping[str, Array]) -> None:
        """Write the samples of a chunk into one array (samples, ...) per variable."""

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""


def read_chunk(source: ChunkSource, chunk: int, views: Sequence[Mapping[str, Array]]) -> None:
    """Read one chunk, naming it if that fails."""
    into = {name: array for view in views for name, array in view.items()}
    try:
        source.read(chunk, into)
    except Exception as error:
        if isinstance(error, CubeError) and not isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot read {source.describe(chunk)}: {type(error).__name__}: {error}; "
            "if the file is damaged, make it again"
        ) from error


class Ring:
    """Slots for chunks: threads decode into them ahead of need, `batches` gathers from them."""

    # Chunks that one epoch leaves in the slots are not decoded again in the next.

    def __init__(
        self,
        source: ChunkSource,
        fields: Sequence[Field],
        slots: int,
        threads: int,
        gatherers: int = 1,
    ) -> None:
        self._source, self._fields = source, tuple(fields)
        self._threads, self._gatherers = threads, gatherers
        self._width = int(source.counts.max(initial=1))
        self._arrays = [SampleArray(field, slots * self._width) for field in fields]
        self._inside = np.zeros(slots * self._width, np.int64)
        self._slots = slots
        # the chunk in each slot, -1 for none or an incomplete one
        self._held = np.full(slots, -1, np.int64)

    def batches(
        self,
        schedule: ChunkSchedule,
        positions: Iterable[Ints],
        take: Callable[[int], list[Array]],
    ) -> Generator[list[Array]]:
        """Gather batch after batch, some ahead of need; one such iteration at a time."""
        readers = ThreadPoolExecutor(self._threads, thread_name_prefix="ml4cube-decode")
        try:
            with Gatherers(self._gatherers) as gatherers:
                run = _RingEpoch(self, schedule, readers, gatherers)
                for wanted, visits, offsets in _located(schedule, positions):
                    while not run.is_ready_for(wanted):
                        yield run.finish()
                    run.begin(wanted, visits, offsets, take(len(wanted)))
                while len(gatherers):
                    yield run.finish()
        finally:
            # running reads still write into the slots: wait for them, cancel the others
            readers.shutdown(wait=True, cancel_futures=True)

    def load(self, schedule: ChunkSchedule, chunk: int, slot: int) -> None:
        """Decode a chunk into a slot; runs in a decode thread."""
        inside = schedule.order.chunk_permutation(schedule.epoch, chunk)
        begin = slot * self._width
        rows = slice(begin, begin + len(inside))
        np.add(inside, begin, out=self._inside[rows])
        if self._held[slot] != chunk:
            self._held[slot] = -1
            read_chunk(self._source, chunk, [array.views(rows) for array in self._arrays])
            self._held[slot] = chunk

    def gather(self, slots: Ints, offsets: Ints, out: Sequence[Array]) -> None:
        """Copy samples out of loaded slots."""
        rows = self._inside[slots * self._width + offsets]
        for array, target in zip(self._arrays, out, strict=True):
            array.gather(rows, target)


def _located(schedule: ChunkSchedule, batches: Iterable[Ints]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield the positions of each batch with their visits and offsets, located many at a time."""
    waiting: list[Ints] = []
    coming = iter(batches)
    while True:
        for batch in coming:
            waiting.append(batch)
            if sum(map(len, waiting)) >= _LOCATED:
                break
        if not waiting:
            return
        together = np.concatenate(waiting)
        visits, offsets = schedule.locate(together)
        start = 0
        for batch in waiting:
            rows = slice(start, start := start + len(batch))
            yield batch, visits[rows], offsets[rows]
        waiting = []


class _RingEpoch:
    """One epoch of a ring: the slot of every visit of a chunk. Used by one thread only."""

    # A visit is an index into the chunks of the schedule.

    def __init__(
        self, ring: Ring, schedule: ChunkSchedule, readers: ThreadPoolExecutor, gatherers: Gatherers
    ) -> None:
        self._ring, self._schedule = ring, schedule
        self._readers, self._gatherers = readers, gatherers
        self._next = 0  # first position of which no batch was begun
        self._slot_of_visit = np.full(len(schedule), -1, np.int64)
        self._reads: list[Future[None]] = []
        self._loaded = 0
        # lists, because numpy releases the interpreter lock even to look up one number
        self._first = schedule.first.tolist()
        by_last = np.argsort(schedule.last, kind="stable")
        self._by_last = list(zip(by_last.tolist(), schedule.last[by_last].tolist(), strict=True))
        self._released = 0
        # slots that hold a chunk of this schedule already, by its first visit, in order
        slots = {int(chunk): slot for slot, chunk in enumerate(ring._held) if chunk >= 0}
        visits = enumerate(schedule.chunks.tolist())
        self._kept = {visit: slots.pop(chunk) for visit, chunk in visits if chunk in slots}
        self._free = sorted({*range(ring._slots)} - {*self._kept.values()})

    def is_ready_for(self, positions: Ints) -> bool:
        """Return True if a batch can be begun now without delaying the next one to hand out."""
        if not len(self._gatherers):
            return True
        if not self._gatherers.may_begin():
            return False
        self._move_on(int(positions[0]))
        needed = self._needed(int(positions[-1]))
        return needed <= len(self._reads) and all(
            read.done() and read.exception() is None for read in self._reads[self._loaded : needed]
        )

    def begin(self, positions: Ints, visits: Ints, offsets: Ints, out: list[Array]) -> None:
        """Fill a batch, in as many steps as the slots need (as a rule, one)."""

        def gather(rows: slice) -> None:
            slots = self._slot_of_visit[visits[rows]]
            self._ring.gather(slots, offsets[rows], [array[rows] for array in out])

        self._gatherers.begin(out)
        done = 0
        while done < len(positions):
            self._move_on(int(positions[done]))
            upto = self._reachable(positions)
            if upto == done:
                # no slot is free: all hold chunks from which samples are still gathered
                self._gatherers.wait()
                continue
            self._wait(int(positions[upto - 1]))
            self._gatherers.fill(positions, slice(done, upto), gather)
            done = upto
        self._next = int(positions[-1]) + 1

    def finish(self) -> list[Array]:
        """Return the batch that was begun first."""
        out = self._gatherers.finish()
        self._move_on(self._next)
        return out

    def _move_on(self, position: int) -> None:
        """Free slots that are not needed from a position on, and read ahead."""
        unfilled = self._gatherers.unfilled()
        self._release(position if unfilled is None else unfilled)
        self._read_ahead(position)

    def _read_ahead(self, position: int) -> None:
        """Start to read the next chunks, while there are free slots."""
        soon = max(self._needed(position), self._schedule.in_use) + 2 * self._ring._threads
        while len(self._reads) < len(self._schedule):
            visit = len(self._reads)
            if visit in self._kept:
                slot = self._kept.pop(visit)
            elif self._free:
                slot = self._free.pop()
            elif self._kept and visit < soon:
                # replace the chunk that is needed last, but only by one that is needed soon
                _, slot = self._kept.popitem()
            else:
                return
            self._slot_of_visit[visit] = slot
            chunk = int(self._schedule.chunks[visit])
            self._reads.append(self._readers.submit(self._ring.load, self._schedule, chunk, slot))

    def _reachable(self, positions: Ints) -> int:
        """Return how many of the positions need only chunks that are loaded or being read."""
        if len(self._reads) == len(self._schedule):
            return len(positions)
        return int(np.searchsorted(positions, self._first[len(self._reads)]))

    def _wait(self, position: int) -> None:
        """Wait for all chunks that are needed up to a position."""
        needed = self._needed(position)
        for read in self._reads[self._loaded : needed]:
            read.result()
        self._loaded = max(self._loaded, needed)

    def _needed(self, position: int) -> int:
        """Return how many visits are needed up to a position."""
        return bisect_right(self._first, position)

    def _release(self, position: int) -> None:
        """Free the slots of chunks that are not needed from a position on."""
        while self._released < len(self._by_last):
            visit, last = self._by_last[self._released]
            if last >= position or visit >= len(self._reads):
                return
            self._reads[visit].result()
            self._free.append(int(self._slot_of_visit[visit]))
            self._released += 1


class Resident:
    """A data set that fits into memory: every chunk is read once, then only gathered."""

    def __init__(
        self,
        source: ChunkSource,
        fields: Sequence[Field],
        threads: int,
        chunks: range,
    ) -> None:
        counts = source.counts
        ends = np.concatenate([[0], np.cumsum(counts)])
        self._first = int(ends[chunks.start])
        self._arrays = [
            SampleArray(field, int(ends[chunks.stop]) - self._first) for field in fields
        ]

        def load(chunk: int) -> None:
            rows = slice(int(ends[chunk]) - self._first, int(ends[chunk + 1]) - self._first)
            read_chunk(source, chunk, [array.views(rows) for array in self._arrays])

        pool = ThreadPoolExecutor(threads, thread_name_prefix="ml4cube-decode")
        try:
            for read in [pool.submit(load, chunk) for chunk in chunks if counts[chunk]]:
                read.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def batches(
        self,
        samples: Iterable[Ints],
        take: Callable[[int], list[Array]],
        gatherers: int,
    ) -> Generator[list[Array]]:
        """Gather batch after batch of the given samples, some ahead of need."""
        with Gatherers(gatherers) as threads:
            for wanted in samples:
                while not threads.may_begin():
                    yield threads.finish()
                out = take(len(wanted))
                threads.begin(out)
                threads.fill(wanted, slice(0, len(wanted)), partial(self._gather, wanted, out))
            while len(threads):
                yield threads.finish()

    def _gather(self, samples: Ints, out: Sequence[Array], rows: slice) -> None:
        inside = samples[rows] - self._first
        for array, target in zip(self._arrays, out, strict=True):
            array.gather(inside, target[rows])
