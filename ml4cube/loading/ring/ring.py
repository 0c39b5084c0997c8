"""Batches from chunks: decode threads fill slots, other threads gather batches from them.

A `Ring` holds as many chunks as memory allows, one per slot; a slot whose chunk is no longer
needed takes the next one. `Resident` holds all chunks at once. Threads are faster here than worker
processes, because decoding and gathering release the interpreter lock and nothing is sent between
processes. Does not use torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol, Self

import numpy as np

from ml4cube.core.errors import CubeError, InvalidValueError, StoreError
from ml4cube.core.rank_shares import ChunkSchedule, Ints
from ml4cube.loading.ring.arrays import Array, Field, SampleArray
from ml4cube.recipe.roles import ArrayName

# Bytes that a thread fills in one task.
_FILL_BYTES = 4 << 20
# Batches are appended ahead of need while those ahead of need have fewer bytes: one at least.
_AHEAD_BYTES = 8 << 20
# Takes positions in an epoch, and returns the numbers of the samples that come there.
SamplesAt = Callable[[Ints], Ints]
# Takes the positions of a batch, and returns its arrays, which are not filled yet.
MakeArrays = Callable[[Ints], list[Array]]


class ChunkSource(Protocol):
    """Samples that can be read chunk by chunk, from any thread."""

    # Samples in each chunk.
    counts: Ints
    # Whether reads mostly wait for a network.
    remote: bool

    @cached_property
    def starts(self) -> Ints:
        """The first sample of each chunk, and the number of samples."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def read(self, chunk: int, out: Mapping[ArrayName, Array]) -> None:
        """Write the samples of a chunk into one array (samples, ...) per variable."""

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""


def read_chunk(source: ChunkSource, chunk: int, views: Sequence[Mapping[ArrayName, Array]]) -> None:
    """Read one chunk, naming it if that fails."""
    by_variable = {name: array for view in views for name, array in view.items()}
    try:
        source.read(chunk, by_variable)
    except Exception as error:
        if isinstance(error, CubeError) and not isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot read {source.describe(chunk)}: {type(error).__name__}: {error}; "
            "if the file is damaged, make it again"
        ) from error


class BatchQueue:
    """Batches in the order in which they are handed out, filled by threads, some ahead of need."""

    # Use it in a ``with`` statement, whose end waits for running tasks and cancels the others.
    # Only one thread may call the methods.

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ml4cube-gather")
        # Arrays of each batch, and the tasks that fill them.
        self._batches: deque[tuple[list[Array], list[Future[None]]]] = deque()
        # Tasks of all batches, each with the first position in the epoch that it fills.
        self._tasks: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        """Number of batches in the queue, full or not."""
        return len(self._batches)

    def has_room(self) -> bool:
        """Return True if a batch may be appended before the first one is handed out."""
        if not self._batches:
            return True
        batch_bytes = sum(array.nbytes for array in self._batches[0][0])
        full = (len(self._batches) - 1) * batch_bytes >= _AHEAD_BYTES
        return len(self._batches) <= self._threads and not full

    def append(self, out: list[Array]) -> None:
        """Append a batch, whose rows `fill` then fills."""
        self._batches.append((out, []))

    def fill(self, positions: Ints, rows: slice, gather: Callable[[slice], None]) -> None:
        """Start threads that fill some rows of the last batch; row i is of ``positions[i]``."""
        out, tasks = self._batches[-1]
        step = max(1, _FILL_BYTES * len(positions) // max(sum(array.nbytes for array in out), 1))
        for start in range(rows.start, rows.stop, step):
            task = self._pool.submit(gather, slice(start, min(start + step, rows.stop)))
            tasks.append(task)
            self._tasks.append((int(positions[start]), task))

    def first_unfilled(self) -> int | None:
        """Return the first position that is not filled yet; None if all are."""
        while self._tasks and self._tasks[0][1].done():
            self._tasks.popleft()
        if self._tasks:
            return self._tasks[0][0]
        return None

    def wait_for_first(self) -> None:
        """Wait for the rows at the position that `first_unfilled` returns."""
        if self._tasks:
            self._tasks[0][1].result()

    def pop(self) -> list[Array]:
        """Remove and return the first batch, once it is full."""
        out, tasks = self._batches.popleft()
        for task in tasks:
            task.result()
        return out


class Ring:
    """Slots for chunks: threads decode into them ahead of need, `batches` gathers from them."""

    # Chunks that one epoch leaves in the slots are not decoded again in the next.

    def __init__(
        self,
        source: ChunkSource,
        fields: Sequence[Field],
        slots: int,
        decode_threads: int,
        gather_threads: int = 1,
    ) -> None:
        self.slots, self.decode_threads = slots, decode_threads
        # The chunk in each slot, -1 for none or an incomplete one.
        self.chunk_of_slot = np.full(slots, -1, np.int64)
        self._source, self._gather_threads = source, gather_threads
        self._slot_size = int(source.counts.max(initial=1))
        rows = slots * self._slot_size
        self._arrays = [SampleArray(field, rows) for field in fields]
        # For every slot, the rows of its samples in the shuffled order of the chunk.
        self._shuffled_rows = np.zeros(rows, np.int64)

    def batches(
        self, schedule: ChunkSchedule, positions: Iterable[Ints], make_arrays: MakeArrays
    ) -> Generator[list[Array]]:
        """Gather batch after batch, some ahead of need; one such iteration at a time."""
        readers = ThreadPoolExecutor(self.decode_threads, thread_name_prefix="ml4cube-decode")
        try:
            with BatchQueue(self._gather_threads) as queue:
                epoch = _RingEpoch(self, schedule, readers, queue)
                for of_batch in positions:
                    while not epoch.is_ready_for(of_batch):
                        yield epoch.next_batch()
                    epoch.append(of_batch, make_arrays(of_batch))
                while len(queue):
                    yield epoch.next_batch()
        finally:
            # Running reads still write into the slots: wait for them, cancel the others.
            readers.shutdown(wait=True, cancel_futures=True)

    def load(self, schedule: ChunkSchedule, chunk: int, slot: int) -> None:
        """Decode a chunk into a slot; runs in a decode thread."""
        order = schedule.order.chunk_permutation(schedule.epoch, chunk)
        start = slot * self._slot_size
        rows = slice(start, start + len(order))
        np.add(order, start, out=self._shuffled_rows[rows])
        if self.chunk_of_slot[slot] != chunk:
            self.chunk_of_slot[slot] = -1
            read_chunk(self._source, chunk, [array.views(rows) for array in self._arrays])
            self.chunk_of_slot[slot] = chunk

    def gather(self, slots: Ints, offsets: Ints, out: Sequence[Array]) -> None:
        """Copy samples out of loaded slots, by their offsets in the shuffled chunks."""
        rows = self._shuffled_rows[slots * self._slot_size + offsets]
        for array, target in zip(self._arrays, out, strict=True):
            array.gather(rows, target)


class _RingEpoch:
    """One epoch of a ring: the slot of every visit of a chunk. Used by one thread only."""

    # A visit is an index into the chunks of the schedule. Chunks are read visit by visit.

    def __init__(
        self, ring: Ring, schedule: ChunkSchedule, readers: ThreadPoolExecutor, queue: BatchQueue
    ) -> None:
        if ring.slots < schedule.in_use:  # It would wait for a free slot forever.
            raise InvalidValueError(
                f"slots must be at least {schedule.in_use}, because so many chunks are needed at "
                f"once, got {ring.slots}"
            )
        self._ring, self._schedule = ring, schedule
        self._readers, self._queue = readers, queue
        # The first position after those of all batches in the queue.
        self._next_position = 0
        self._slot_of_visit = np.full(len(schedule), -1, np.int64)
        self._reads: list[Future[None]] = []
        self._visits_loaded = 0
        # Lists, because numpy releases the interpreter lock even to look up one number.
        self._first_positions = schedule.first.tolist()
        by_last = np.argsort(schedule.last, kind="stable")
        last_positions = schedule.last[by_last].tolist()
        self._visits_by_last = list(zip(by_last.tolist(), last_positions, strict=True))
        self._visits_released = 0
        # Slots that hold a chunk of this schedule already, by its visit, in order.
        slots = {int(chunk): slot for slot, chunk in enumerate(ring.chunk_of_slot) if chunk >= 0}
        visits = enumerate(schedule.chunks.tolist())
        self._filled_slots = {visit: slots[chunk] for visit, chunk in visits if chunk in slots}
        self._free_slots = sorted({*range(ring.slots)} - {*self._filled_slots.values()})

    def is_ready_for(self, positions: Ints) -> bool:
        """Return True if a batch can be appended now without delaying the next one to hand out."""
        if not len(self._queue):
            return True
        if not self._queue.has_room():
            return False
        self._move_to(int(positions[0]))
        needed = self._visits_needed(int(positions[-1]))
        return needed <= len(self._reads) and all(
            read.done() and read.exception() is None
            for read in self._reads[self._visits_loaded : needed]
        )

    def append(self, positions: Ints, out: list[Array]) -> None:
        """Fill a batch, in as many steps as the slots need (as a rule, one)."""
        visits, offsets = self._schedule.locate(positions)

        def gather(rows: slice) -> None:
            slots = self._slot_of_visit[visits[rows]]
            self._ring.gather(slots, offsets[rows], [array[rows] for array in out])

        self._queue.append(out)
        start = 0
        while start < len(positions):
            self._move_to(int(positions[start]))
            stop = self._reachable(positions)
            if stop == start:
                # No slot is free: all hold chunks from which samples are still gathered.
                self._queue.wait_for_first()
                continue
            self._wait_for_reads(int(positions[stop - 1]))
            self._queue.fill(positions, slice(start, stop), gather)
            start = stop
        self._next_position = int(positions[-1]) + 1

    def next_batch(self) -> list[Array]:
        """Return the first batch of the queue."""
        out = self._queue.pop()
        self._move_to(self._next_position)
        return out

    def _move_to(self, position: int) -> None:
        """Free slots that are not needed from a position on, and read ahead."""
        unfilled = self._queue.first_unfilled()
        self._release(position if unfilled is None else unfilled)
        self._read_ahead(position)

    def _release(self, position: int) -> None:
        """Free the slots of chunks that are not needed from a position on."""
        while self._visits_released < len(self._visits_by_last):
            visit, last_position = self._visits_by_last[self._visits_released]
            if last_position >= position or visit >= len(self._reads):
                return
            self._reads[visit].result()
            self._free_slots.append(int(self._slot_of_visit[visit]))
            self._visits_released += 1

    def _read_ahead(self, position: int) -> None:
        """Start to read the next chunks, while there are free slots."""
        needed = max(self._visits_needed(position), self._schedule.in_use)
        needed_soon = needed + 2 * self._ring.decode_threads
        while len(self._reads) < len(self._schedule):
            visit = len(self._reads)
            if visit in self._filled_slots:
                slot = self._filled_slots.pop(visit)
            elif self._free_slots:
                slot = self._free_slots.pop()
            elif self._filled_slots and visit < needed_soon:
                # Replace the chunk that is needed last, but only by one that is needed soon.
                _, slot = self._filled_slots.popitem()
            else:
                return
            self._slot_of_visit[visit] = slot
            chunk = int(self._schedule.chunks[visit])
            self._reads.append(self._readers.submit(self._ring.load, self._schedule, chunk, slot))

    def _reachable(self, positions: Ints) -> int:
        """Return how many of the positions need only chunks that are loaded or being read."""
        if len(self._reads) == len(self._schedule):
            return len(positions)
        return int(np.searchsorted(positions, self._first_positions[len(self._reads)]))

    def _wait_for_reads(self, position: int) -> None:
        """Wait for all chunks that are needed up to a position."""
        needed = self._visits_needed(position)
        for read in self._reads[self._visits_loaded : needed]:
            read.result()
        self._visits_loaded = max(self._visits_loaded, needed)

    def _visits_needed(self, position: int) -> int:
        """Return how many visits are needed up to a position."""
        return bisect_right(self._first_positions, position)


class Resident:
    """A range of chunks that fits into memory: each is read once, then only gathered."""

    def __init__(
        self, source: ChunkSource, fields: Sequence[Field], chunks: range, decode_threads: int
    ) -> None:
        self.chunks = chunks
        self._first_sample = int(source.starts[chunks.start])
        first_rows = (source.starts - self._first_sample).tolist()
        self._arrays = [SampleArray(field, first_rows[chunks.stop]) for field in fields]

        def load(chunk: int) -> None:
            rows = slice(first_rows[chunk], first_rows[chunk + 1])
            read_chunk(source, chunk, [array.views(rows) for array in self._arrays])

        pool = ThreadPoolExecutor(decode_threads, thread_name_prefix="ml4cube-decode")
        try:
            for read in [pool.submit(load, chunk) for chunk in chunks if source.counts[chunk]]:
                read.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def batches(
        self,
        positions: Iterable[Ints],
        samples_at: SamplesAt,
        make_arrays: MakeArrays,
        gather_threads: int,
    ) -> Generator[list[Array]]:
        """Gather batch after batch, some ahead of need."""
        with BatchQueue(gather_threads) as queue:
            for of_batch in positions:
                while not queue.has_room():
                    yield queue.pop()
                out = make_arrays(of_batch)
                queue.append(out)
                gather = partial(self._gather, samples_at(of_batch) - self._first_sample, out)
                queue.fill(of_batch, slice(0, len(of_batch)), gather)
            while len(queue):
                yield queue.pop()

    def _gather(self, rows: Ints, out: Sequence[Array], filled: slice) -> None:
        for array, target in zip(self._arrays, out, strict=True):
            array.gather(rows[filled], target[filled])


class ChunkCache:
    """Decoded chunks that were used last; bounded, shared by threads, empty after pickling."""

    def __init__(self, source: ChunkSource, fields: tuple[Field, ...], limit: int) -> None:
        self._arguments = source, fields, limit
        largest = int(source.counts.max(initial=1)) * sum(field.nbytes for field in fields)
        self.get = lru_cache(max(1, limit // max(1, largest)))(partial(_decoded, source, fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkCache, self._arguments


def _decoded(source: ChunkSource, fields: tuple[Field, ...], chunk: int) -> list[Array]:
    """Return the arrays of a chunk, one per field."""
    arrays = [field.empty(int(source.counts[chunk])) for field in fields]
    views = [field.views(array) for field, array in zip(fields, arrays, strict=True)]
    read_chunk(source, chunk, views)
    return arrays
