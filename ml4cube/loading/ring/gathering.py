"""Threads that fill batches before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from ml4cube.core.rank_shares import Ints
from ml4cube.loading.ring.arrays import Array

# Bytes that a thread fills in one task.
_FILL_BYTES = 4 << 20
# Batches are appended ahead of need while those ahead of need have fewer bytes: one at least.
_AHEAD_BYTES = 8 << 20


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
