"""Threads that fill batches before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from ml4cube.core.rank_shares import Ints
from ml4cube.loading.ring.slots import Array

# Bytes that a thread fills in one task.
_FILL_BYTES = 4 << 20
# Batches are begun ahead of need while those that wait have fewer bytes.
_AHEAD_BYTES = 8 << 20


class Gatherers:
    """Threads that fill batches in the order in which they are handed out, some ahead of need."""

    # Use it in a ``with`` statement, whose end waits for running tasks and cancels the others.
    # Only one thread may call the methods.

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ml4cube-gather")
        # batches that were begun, in order, with their tasks
        self._begun: deque[tuple[list[Array], list[Future[None]]]] = deque()
        # tasks of all of them, with the first position of each
        self._fills: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        """Number of batches that were begun and not handed out."""
        return len(self._begun)

    def may_begin(self) -> bool:
        """Return True if one more batch may be begun before the first is handed out."""
        if not self._begun:
            return True
        waiting = len(self._begun) * sum(array.nbytes for array in self._begun[0][0])
        return len(self._begun) <= self._threads and waiting < _AHEAD_BYTES

    def begin(self, out: list[Array]) -> None:
        """Begin a batch."""
        self._begun.append((out, []))

    def fill(self, positions: Ints, rows: slice, work: Callable[[slice], None]) -> None:
        """Start threads that fill some rows of the batch that was begun last."""
        out, under_way = self._begun[-1]
        step = max(1, _FILL_BYTES * len(positions) // max(sum(array.nbytes for array in out), 1))
        for start in range(rows.start, rows.stop, step):
            done = self._pool.submit(work, slice(start, min(start + step, rows.stop)))
            under_way.append(done)
            self._fills.append((int(positions[start]), done))

    def unfilled(self) -> int | None:
        """Return the first position that is still being filled, if any."""
        while self._fills and self._fills[0][1].done():
            self._fills.popleft()
        return self._fills[0][0] if self._fills else None

    def wait(self) -> None:
        """Wait for the rows at the position that `unfilled` returns."""
        if self._fills:
            self._fills[0][1].result()

    def finish(self) -> list[Array]:
        """Return the batch that was begun first, once it is full."""
        out, under_way = self._begun.popleft()
        for done in under_way:
            done.result()
        return out
