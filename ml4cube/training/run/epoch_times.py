"""How this rank spends the training of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ml4cube.training.ranks.clock import StepClock
from ml4cube.training.ranks.world import World
from ml4cube.training.run.data_wait import DataWait


class EpochTimes:
    """The time of training in an epoch, without validation, and what it was spent on."""

    def __init__(self, world: World, *, times_steps: bool, resumed_s: float = 0.0) -> None:
        self._world = world
        self.data_wait = DataWait(world.device)
        self.step_clock = StepClock(world, active=times_steps)
        self.rank_wait_s = 0.0  # outside of steps
        self._resumed_s = resumed_s  # the time that a snapshot held
        # On the clock of time.perf_counter; a pause moves the first on by its length.
        self._started_s = time.perf_counter()
        self._paused_s: float | None = None

    @property
    def seconds(self) -> float:
        """The time so far, by this process and those before it."""
        return self._resumed_s + self._own_seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in the body."""
        self._paused_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - self._paused_s
            self._paused_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the body as waiting for other ranks."""
        started = time.perf_counter()
        yield
        self.rank_wait_s += time.perf_counter() - started

    def columns(self) -> dict[str, float | None]:
        """Return the columns of this rank in the table of ranks.

        The fractions add up to 1. Without a step that was timed, the last two are None.
        """
        own_seconds = max(self._own_seconds(), 1e-9)
        columns: dict[str, float | None] = {
            "seconds": self.seconds,
            "data_wait": self.data_wait.seconds / own_seconds,
            "communicate": None,
            "compute": None,
        }
        in_steps = self.step_clock.waiting_fraction()
        if in_steps is not None:
            data_wait, rank_wait = self.data_wait.seconds / own_seconds, 0.0
            if self._world.size > 1:
                rank_wait = self.rank_wait_s / own_seconds
            communicate = rank_wait + in_steps * (1 - data_wait - rank_wait)
            columns["communicate"] = communicate
            columns["compute"] = max(0.0, 1 - data_wait - communicate)
        return columns

    def _own_seconds(self) -> float:
        return (self._paused_s or time.perf_counter()) - self._started_s
