"""Chunks into batches: decode threads fill slots, others gather whole batches from them.

Reading a few large chunks and gathering rows of them with threads is faster than worker
processes, since both release the interpreter lock and nothing is sent between processes.
Nothing here knows torch or where chunks come from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ml4cube.core.errors import CubeError, InvalidValueError, StoreError
from ml4cube.core.shares import ChunkSchedule, Ints
from ml4cube.loading.ring.gathering import Gatherers
from ml4cube.loading.ring.slots import Array, Field, Room

# Positions that are located at once.
_LOCATED = 4096


class ChunkSource(Protocol):
    """Samples that can be read chunk by chunk, from any thread."""

    @property
    def counts(self) -> Ints: ...

    @property
    def slow(self) -> bool: ...

    def read(self, chunk: int, out: Mapping[str, Array]) -> None:
        """Write the samples of a chunk into one array (samples, ...) per variable."""

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message."""


def read_chunk(source: ChunkSource, chunk: int, views: Sequence[Mapping[str, Array]]) -> None:
    """Read one chunk, naming it if that fails."""
    into: dict[str, Array] = {}
    for view in views:
        into = {**view, **into}
    try:
        source.read(chunk, into)
    except Exception as error:
        if isinstance(error, CubeError) and not isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot read {source.describe(chunk)}: {type(error).__name__}: {error}; "
            "if the file is damaged, make it again"
        ) from error
    for view in views:
        for name, values in view.items():
            if values is not into[name]:
                values[...] = into[name]


class Ring:
    """Slots for chunks: threads decode into them ahead of need, `batches` gathers from them."""

    # What one epoch leaves in the slots the next one need not decode again.

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
        self._rooms = [Room(field, slots * self._width) for field in fields]
        self._inside = np.zeros(slots * self._width, np.int64)
        self._slots = slots
        # the chunk in each slot, -1 for none or half of one
        self._held = np.full(slots, -1, np.int64)
        self._resting = True

    @property
    def is_resting(self) -> bool:
        """Whether nothing writes into the slots, so that another epoch may begin."""
        return self._resting

    def batches(
        self,
        tour: ChunkSchedule,
        positions: Iterable[Ints],
        take: Callable[[int], list[Array]],
    ) -> Generator[list[Array]]:
        """Gather batch after batch, some ahead of need; one such iteration at a time."""
        if self._slots <= tour.in_use:
            raise InvalidValueError(
                f"{self._slots} slots for {tour.in_use} streams; a ring needs one more at least"
            )
        readers = ThreadPoolExecutor(self._threads, thread_name_prefix="ml4cube-decode")
        self._resting = False
        try:
            with Gatherers(self._gatherers) as gatherers:
                trip = _Trip(self, tour, readers, gatherers)
                for wanted, visits, offsets in _located(tour, positions):
                    while not trip.is_ready_for(wanted):
                        yield trip.finish()
                    trip.begin(wanted, visits, offsets, take(len(wanted)))
                while len(gatherers):
                    yield trip.finish()
        finally:
            # running reads still write into the slots: wait for them, forget the others
            readers.shutdown(wait=True, cancel_futures=True)
            # not reached where the user interrupts this, too
            self._resting = True

    def load(self, tour: ChunkSchedule, chunk: int, slot: int) -> None:
        """Decode a chunk into a slot; runs in a decode thread."""
        inside = tour.order.chunk_permutation(tour.epoch, chunk)
        begin = slot * self._width
        rows = slice(begin, begin + len(inside))
        np.add(inside, begin, out=self._inside[rows])
        if self._held[slot] != chunk:
            self._held[slot] = -1
            read_chunk(self._source, chunk, [room.views(rows) for room in self._rooms])
            self._held[slot] = chunk

    def gather(self, slots: Ints, offsets: Ints, out: Sequence[Array]) -> None:
        """Copy samples out of loaded slots."""
        rows = self._inside[slots * self._width + offsets]
        for room, target in zip(self._rooms, out, strict=True):
            room.gather(rows, target)


def _located(tour: ChunkSchedule, batches: Iterable[Ints]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Positions of each batch with their visits and offsets, found for many batches at once."""
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
        visits, offsets = tour.locate(together)
        start = 0
        for batch in waiting:
            place = slice(start, start := start + len(batch))
            yield batch, visits[place], offsets[place]
        waiting = []


class _Trip:
    """One epoch through a ring: which visit is in which slot. Lives in one thread only."""

    def __init__(
        self, ring: Ring, tour: ChunkSchedule, readers: ThreadPoolExecutor, gatherers: Gatherers
    ) -> None:
        self._ring, self._tour = ring, tour
        self._readers, self._gatherers = readers, gatherers
        self._next = 0  # position up to which batches were begun
        self._slot_of_visit = np.full(len(tour), -1, np.int64)
        self._reads: list[Future[None]] = []
        self._loaded = 0
        # as lists: numpy gives up the interpreter's lock even where it looks up one number
        self._first = tour.first.tolist()
        by_last = np.argsort(tour.last, kind="stable")
        self._by_last = list(zip(by_last.tolist(), tour.last[by_last].tolist(), strict=True))
        self._released = 0
        # slots that hold a chunk of this tour already, by its visit, the last one at the end
        slots = {int(chunk): slot for slot, chunk in enumerate(ring._held) if chunk >= 0}
        visits = enumerate(tour.chunks.tolist())
        self._kept = {visit: slots.pop(chunk) for visit, chunk in visits if chunk in slots}
        self._free = sorted({*range(ring._slots)} - {*self._kept.values()})

    def is_ready_for(self, positions: Ints) -> bool:
        """Whether to begin a batch rather than to hand out one: the latter must not wait for it."""
        if not len(self._gatherers):
            return True
        if not self._gatherers.has_room():
            return False
        self._move_on(int(positions[0]))
        needed = self._needed(int(positions[-1]))
        return needed <= len(self._reads) and all(
            read.done() and read.exception() is None for read in self._reads[self._loaded : needed]
        )

    def begin(self, positions: Ints, visits: Ints, offsets: Ints, out: list[Array]) -> None:
        """Let a batch be filled, in as many goes as the slots allow (as a rule, one)."""

        def gather(rows: slice) -> None:
            slots = self._slot_of_visit[visits[rows]]
            self._ring.gather(slots, offsets[rows], [array[rows] for array in out])

        self._gatherers.begin(out)
        done = 0
        while done < len(positions):
            self._move_on(int(positions[done]))
            upto = self._reachable(positions)
            if upto == done:
                # the slots hold chunks of which this rank takes nothing, or which batches are
                # being filled from: free them first
                self._gatherers.wait()
                continue
            self._wait(int(positions[upto - 1]))
            self._gatherers.fill(positions, slice(done, upto), gather)
            done = upto
        self._next = int(positions[-1]) + 1

    def finish(self) -> list[Array]:
        """Hand out the batch that was begun first."""
        out = self._gatherers.finish()
        self._move_on(self._next)
        return out

    def _move_on(self, position: int) -> None:
        """Free the slots that are done with, and read on; a position is to be begun next."""
        unfilled = self._gatherers.unfilled()
        self._release(position if unfilled is None else unfilled)
        self._read_ahead(position)

    def _read_ahead(self, position: int) -> None:
        """Start to read the next chunks, as long as there are slots for them."""
        soon = max(self._needed(position), self._tour.in_use) + 2 * self._ring._threads
        while len(self._reads) < len(self._tour):
            visit = len(self._reads)
            if visit in self._kept:
                slot = self._kept.pop(visit)
            elif self._free:
                slot = self._free.pop()
            elif self._kept and visit < soon:
                # what is needed last makes room, but only for what is needed soon
                _, slot = self._kept.popitem()
            else:
                return
            self._slot_of_visit[visit] = slot
            chunk = int(self._tour.chunks[visit])
            self._reads.append(self._readers.submit(self._ring.load, self._tour, chunk, slot))

    def _reachable(self, positions: Ints) -> int:
        """How many of the positions need only chunks that are being read or loaded."""
        if len(self._reads) == len(self._tour):
            return len(positions)
        return int(np.searchsorted(positions, self._first[len(self._reads)]))

    def _wait(self, position: int) -> None:
        """Wait until every chunk is loaded that is needed up to a position."""
        needed = self._needed(position)
        for read in self._reads[self._loaded : needed]:
            read.result()
        self._loaded = max(self._loaded, needed)

    def _needed(self, position: int) -> int:
        """How many chunks, the first ones, are needed up to a position."""
        return bisect_right(self._first, position)

    def _release(self, position: int) -> None:
        """Free the slots of chunks that are needed only before a position."""
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
        chunks: range | None = None,
    ) -> None:
        counts = source.counts
        held = range(len(counts)) if chunks is None else chunks
        ends = np.concatenate([[0], np.cumsum(counts)])
        self._first = int(ends[held.start])
        self._rooms = [Room(field, int(ends[held.stop]) - self._first) for field in fields]

        def load(chunk: int) -> None:
            rows = slice(int(ends[chunk]) - self._first, int(ends[chunk + 1]) - self._first)
            read_chunk(source, chunk, [room.views(rows) for room in self._rooms])

        with ThreadPoolExecutor(threads, thread_name_prefix="ml4cube-decode") as pool:
            for read in [pool.submit(load, chunk) for chunk in held if counts[chunk]]:
                read.result()

    def gather(self, samples: Ints, out: Sequence[Array]) -> None:
        """Copy samples into a batch."""
        rows = samples - self._first
        for room, target in zip(self._rooms, out, strict=True):
            room.gather(rows, target)
