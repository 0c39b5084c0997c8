"""Chunks into batches: decode threads fill slots, one thread gathers whole batches from them.

Reading a few large chunks with threads and gathering rows in the consuming thread is faster
than worker processes, since decoding releases the interpreter lock and nothing is sent
between processes. Nothing here knows torch or where chunks come from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import CubeError, InvalidValueError, StoreError
from ml4cube.core.shard import Ints, Tour

Array = NDArray[Any]

# Variables whose samples are smaller are held sample by sample, all variables together.
_SMALL_BYTES = 64
# Positions that are located at once.
_LOCATED = 4096


class ChunkSource(Protocol):
    """Samples that can be read chunk by chunk, from any thread.

    Attributes
    ----------
    counts : ndarray of int64, shape (chunks,)
        Samples in each chunk; samples are numbered chunk by chunk.
    slow : bool
        Whether a read mostly waits (a remote store), so that many should run at once.
    """

    @property
    def counts(self) -> Ints: ...

    @property
    def slow(self) -> bool: ...

    def read(self, chunk: int, out: Mapping[str, Array]) -> None:
        """Write the samples of a chunk into one array (samples, ...) per variable."""

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message."""


@dataclass(frozen=True)
class Field:
    """One array of a batch: a variable, or several variables stacked as channels.

    Parameters
    ----------
    variables : tuple of str
        Variables, in channel order.
    window : tuple of int
        Cells of one sample of one variable.
    dtype : numpy.dtype
        Type of the values handed over.
    stacked : bool
        Whether there is a channel axis; without it there is exactly one variable.

    Examples
    --------
    >>> Field(("sst", "ice"), (16, 16), np.dtype("float32")).empty(4).shape
    (4, 2, 16, 16)
    """

    variables: tuple[str, ...]
    window: tuple[int, ...]
    dtype: np.dtype[Any]
    stacked: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (len(self.variables), *self.window) if self.stacked else self.window

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, samples: int) -> Array:
        """Make room for samples.

        Parameters
        ----------
        samples : int
            How many.

        Returns
        -------
        ndarray, shape (samples, channels, *window) or (samples, *window)
            Not initialised.
        """
        return np.empty((samples, *self.shape), self.dtype)

    def views(self, array: Array) -> dict[str, Array]:
        """View each variable's part of an array made by `empty`.

        Parameters
        ----------
        array : ndarray
            Rows of an array from `empty`.

        Returns
        -------
        dict of str to ndarray, shape (samples, *window)
            One view per variable.
        """
        if not self.stacked:
            return {self.variables[0]: array}
        return {name: array[:, channel] for channel, name in enumerate(self.variables)}


class Room:
    """Room for many samples of a field, from which batches are gathered.

    The samples of each variable lie end to end, as they do in a file: a chunk is decoded
    straight to where it is gathered from, and not copied in between. Only where a sample of a
    variable is as small as a point, all variables of a sample lie together.

    Parameters
    ----------
    field : Field
        What is held.
    samples : int
        How many.

    Examples
    --------
    >>> field = Field(("a", "b"), (8,), np.dtype("float64"))
    >>> room = Room(field, samples=10)
    >>> room.views(slice(4, 6))["b"][...] = [[1.0], [2.0]]
    >>> out = field.empty(1)
    >>> room.gather(np.array([5]), out)
    >>> out[0, 1, 0]
    np.float64(2.0)
    """

    def __init__(self, field: Field, samples: int) -> None:
        self._field = field
        channels = len(field.variables) if field.stacked else 1
        cells = int(np.prod(field.window, dtype=np.int64))
        if channels == 1 or cells * field.dtype.itemsize < _SMALL_BYTES:
            self._samples = field.empty(samples)
            self._flat = self._samples.reshape(samples, channels * cells)
            self._channels: Ints | None = None
        else:
            self._samples = np.empty((channels, samples, *field.window), field.dtype)
            self._flat = self._samples.reshape(channels * samples, cells)
            self._channels = np.arange(channels) * samples

    def views(self, rows: slice) -> dict[str, Array]:
        """View each variable's part of some rows.

        Parameters
        ----------
        rows : slice
            Which samples.

        Returns
        -------
        dict of str to ndarray, shape (samples, *window)
            One view per variable.
        """
        if self._channels is None:
            return self._field.views(self._samples[rows])
        return dict(zip(self._field.variables, self._samples[:, rows], strict=True))

    def gather(self, rows: Ints, out: Array) -> None:
        """Copy samples into a batch.

        Parameters
        ----------
        rows : ndarray of int64
            Which samples.
        out : ndarray, shape (samples, channels, *window) or (samples, *window)
            Where to; contiguous.
        """
        if self._channels is not None:
            rows = (rows[:, None] + self._channels).reshape(-1)
        # mode="clip" lets numpy write straight into the target; all rows are in range
        target = out.reshape(len(rows), self._flat.shape[1])
        np.take(self._flat, rows, axis=0, out=target, mode="clip")


def read_chunk(source: ChunkSource, chunk: int, views: Sequence[Mapping[str, Array]]) -> None:
    """Read one chunk, naming it if that fails.

    Parameters
    ----------
    source : ChunkSource
        Where to read.
    chunk : int
        What to read.
    views : sequence of mapping of str to ndarray
        For each field, where to put each of its variables. A variable may appear in several.

    Raises
    ------
    StoreError
        If the chunk cannot be read; the message names it.
    """
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


class Buffers:
    """Arrays for batches, used again as soon as nobody holds the batch any more.

    A fresh array costs page faults, which is as much as filling it. An array is taken back
    when the last reference to what `take` returned is gone, so a batch that is kept is safe.

    Parameters
    ----------
    field : Field
        What the arrays hold.
    samples : int
        Rows of a full batch.

    Examples
    --------
    >>> buffers = Buffers(Field(("a",), (2,), np.dtype("float32")), samples=4)
    >>> buffers.take(3).shape
    (3, 1, 2)
    """

    def __init__(self, field: Field, samples: int) -> None:
        self._field, self._samples = field, samples
        self._idle: list[Array] = []
        self._lent: dict[int, tuple[weakref.ref[Array], Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._field, self._samples)

    def take(self, rows: int) -> Array:
        """Hand out an array for a batch.

        Parameters
        ----------
        rows : int
            At most the rows of a full batch.

        Returns
        -------
        ndarray, shape (rows, ...)
            Not initialised.
        """
        try:
            base = self._idle.pop()  # in one step, since several threads may take
        except IndexError:
            base = self._field.empty(self._samples)
        view = base[:rows]
        key = id(base)
        self._lent[key] = weakref.ref(view, lambda _: self._take_back(key)), base
        return view

    def _take_back(self, key: int) -> None:
        self._idle.append(self._lent.pop(key)[1])


class Ring:
    """Slots for chunks: threads decode into them ahead of need, `batches` gathers from them.

    What one epoch leaves in the slots the next one need not decode again.

    Parameters
    ----------
    source : ChunkSource
        Where chunks come from.
    fields : sequence of Field
        What a batch holds.
    slots : int
        Chunks in memory at once; more than are in use at one time (a tour's streams).
    threads : int
        Chunks decoded at once.
    """

    def __init__(
        self, source: ChunkSource, fields: Sequence[Field], slots: int, threads: int
    ) -> None:
        self._source, self._fields, self._threads = source, tuple(fields), threads
        self._width = int(source.counts.max(initial=1))
        self._rooms = [Room(field, slots * self._width) for field in fields]
        self._inside = np.zeros(slots * self._width, np.int64)
        self._slots = slots
        # the chunk in each slot, -1 for none or half of one
        self._held = np.full(slots, -1, np.int64)

    def batches(
        self,
        tour: Tour,
        positions: Iterable[Ints],
        take: Callable[[int], list[Array]],
    ) -> Generator[list[Array]]:
        """Gather batch after batch; one such iteration at a time.

        Parameters
        ----------
        tour : Tour
            The plan of the epoch, from the first of the positions to the last.
        positions : iterable of ndarray of int64
            Positions of each batch, ascending.
        take : callable
            Hands out one array per field for a number of rows.

        Yields
        ------
        list of ndarray
            One array per field.

        Raises
        ------
        InvalidValueError
            If there are too few slots for the tour.
        StoreError
            If a chunk cannot be read; the message names it.
        """
        if self._slots <= tour.in_use:
            raise InvalidValueError(
                f"{self._slots} slots for {tour.in_use} streams; a ring needs one more at least"
            )
        threads = ThreadPoolExecutor(self._threads, thread_name_prefix="ml4cube-decode")
        try:
            trip = _Trip(self, tour, threads)
            for wanted, visits, offsets in _located(tour, positions):
                out = take(len(wanted))
                trip.gather(wanted, visits, offsets, out)
                yield out
        finally:
            # running reads still write into the slots: wait for them, forget the others
            threads.shutdown(wait=True, cancel_futures=True)

    def load(self, tour: Tour, chunk: int, slot: int) -> None:
        """Decode a chunk into a slot; runs in a decode thread.

        Parameters
        ----------
        tour : Tour
            The plan of the epoch, which knows the order inside the chunk.
        chunk : int
            What to read.
        slot : int
            Where to put it.
        """
        inside = tour.order.chunk_permutation(tour.epoch, chunk)
        begin = slot * self._width
        rows = slice(begin, begin + len(inside))
        np.add(inside, begin, out=self._inside[rows])
        if self._held[slot] != chunk:
            self._held[slot] = -1
            read_chunk(self._source, chunk, [room.views(rows) for room in self._rooms])
            self._held[slot] = chunk

    def gather(self, slots: Ints, offsets: Ints, out: Sequence[Array]) -> None:
        """Copy samples out of loaded slots.

        Parameters
        ----------
        slots, offsets : ndarray of int64
            Slot of each sample, and its place in the order inside the chunk.
        out : sequence of ndarray
            One array per field, one row per sample.
        """
        rows = self._inside[slots * self._width + offsets]
        for room, target in zip(self._rooms, out, strict=True):
            room.gather(rows, target)


def _located(tour: Tour, batches: Iterable[Ints]) -> Iterator[tuple[Ints, Ints, Ints]]:
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

    def __init__(self, ring: Ring, tour: Tour, threads: ThreadPoolExecutor) -> None:
        self._ring, self._tour, self._threads = ring, tour, threads
        self._slot_of_visit = np.full(len(tour), -1, np.int64)
        self._reads: list[Future[None]] = []
        self._loaded = 0
        self._by_last = np.argsort(tour.last, kind="stable")
        self._released = 0
        # slots that hold a chunk of this tour already, by its visit, the last one at the end
        slots = {int(chunk): slot for slot, chunk in enumerate(ring._held) if chunk >= 0}
        visits = enumerate(tour.chunks.tolist())
        self._kept = {visit: slots.pop(chunk) for visit, chunk in visits if chunk in slots}
        self._free = sorted({*range(ring._slots)} - {*self._kept.values()})

    def gather(self, positions: Ints, visits: Ints, offsets: Ints, out: Sequence[Array]) -> None:
        """Fill a batch, in as many goes as the slots allow (as a rule, one)."""
        done = 0
        while done < len(positions):
            self._release(int(positions[done]))
            self._read_ahead(int(positions[done]))
            upto = self._reachable(positions)
            if upto == done:
                # the slots hold chunks of which this rank takes nothing: free them first
                continue
            self._wait(int(positions[upto - 1]))
            go = slice(done, upto)
            slots = self._slot_of_visit[visits[go]]
            self._ring.gather(slots, offsets[go], [array[go] for array in out])
            done = upto
        self._release(int(positions[-1]) + 1)
        self._read_ahead(int(positions[-1]) + 1)

    def _read_ahead(self, position: int) -> None:
        """Start to read the next chunks, as long as there are slots for them."""
        soon = int(np.searchsorted(self._tour.first, position, side="right"))
        soon = max(soon, self._tour.in_use) + 2 * self._ring._threads
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
            self._reads.append(self._threads.submit(self._ring.load, self._tour, chunk, slot))

    def _reachable(self, positions: Ints) -> int:
        """How many of the positions need only chunks that are being read or loaded."""
        if len(self._reads) == len(self._tour):
            return len(positions)
        return int(np.searchsorted(positions, self._tour.first[len(self._reads)]))

    def _wait(self, position: int) -> None:
        """Wait until every chunk is loaded that is needed up to a position."""
        needed = int(np.searchsorted(self._tour.first, position, side="right"))
        for read in self._reads[self._loaded : needed]:
            read.result()
        self._loaded = max(self._loaded, needed)

    def _release(self, position: int) -> None:
        """Free the slots of chunks that are needed only before a position."""
        while self._released < len(self._by_last):
            visit = int(self._by_last[self._released])
            if self._tour.last[visit] >= position or visit >= len(self._reads):
                return
            self._reads[visit].result()
            self._free.append(int(self._slot_of_visit[visit]))
            self._released += 1


class Resident:
    """A data set that fits into memory: every chunk is read once, then only gathered.

    Parameters
    ----------
    source : ChunkSource
        Where chunks come from.
    fields : sequence of Field
        What a batch holds.
    threads : int
        Chunks decoded at once.
    chunks : range, optional
        Chunks to hold; all by default.

    Raises
    ------
    StoreError
        If a chunk cannot be read; the message names it.
    """

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
        """Copy samples into a batch.

        Parameters
        ----------
        samples : ndarray of int64
            Which samples.
        out : sequence of ndarray
            One array per field, one row per sample.
        """
        rows = samples - self._first
        for room, target in zip(self._rooms, out, strict=True):
            room.gather(rows, target)
