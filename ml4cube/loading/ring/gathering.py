"""Batches that threads fill before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from ml4cube.core.shares import Ints
from ml4cube.loading.ring.slots import Array

# A thread fills so much in one go.
_GO_BYTES = 4 << 20
# Batches are begun before they are asked for as long as those that wait are smaller together.
_AHEAD_BYTES = 8 << 20


class Gatherers:
    """Threads that fill batches in the order in which these are handed out, some ahead of need."""

    # To be used in a ``with`` statement, at whose end what runs is waited for and the rest
    # forgotten. All methods are called by one thread.

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ml4cube-gather")
        # batches that were begun, the first one first, with what is under way for them
        self._begun: deque[tuple[list[Array], list[Future[None]]]] = deque()
        # what is under way for all of them, by the first of its positions
        self._goes: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        """Batches that were begun and not handed out."""
        return len(self._begun)

    def has_room(self) -> bool:
        """Whether to begin one more batch before the first is handed out."""
        if not self._begun:
            return True
        waiting = len(self._begun) * sum(array.nbytes for array in self._begun[0][0])
        return len(self._begun) <= self._threads and waiting < _AHEAD_BYTES

    def begin(self, out: list[Array]) -> None:
        """Begin a batch."""
        self._begun.append((out, []))

    def fill(self, positions: Ints, rows: slice, work: Callable[[slice], object]) -> None:
        """Let threads fill some rows of the batch that was begun last."""
        out, under_way = self._begun[-1]
        step = max(1, _GO_BYTES * len(positions) // max(sum(array.nbytes for array in out), 1))
        for start in range(rows.start, rows.stop, step):
            done = self._pool.submit(_run, work, slice(start, min(start + step, rows.stop)))
            under_way.append(done)
            self._goes.append((int(positions[start]), done))

    def unfilled(self) -> int | None:
        """Say from which position on rows are still being filled."""
        while self._goes and self._goes[0][1].done():
            self._goes.popleft()
        return self._goes[0][0] if self._goes else None

    def wait(self) -> None:
        """Wait until the rows are filled from which `unfilled` counts."""
        if self._goes:
            self._goes[0][1].result()

    def finish(self) -> list[Array]:
        """Hand out the batch that was begun first, when it is full."""
        out, under_way = self._begun.popleft()
        for done in under_way:
            done.result()
        return out


def _run(work: Callable[[slice], object], rows: slice) -> None:
    work(rows)
