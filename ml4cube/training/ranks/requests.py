"""What any rank asks of all: to save, to stop, to end; and when ranks tell one another.

All ranks take the same number of steps, so a step number tells all of them when to exchange
requests: about once a second, by the time that the slowest rank needed per step since the last
time.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import NamedTuple

from ml4cube.training.ranks.failures import CUT, FAILURE
from ml4cube.training.ranks.signals import Signals
from ml4cube.training.ranks.world import World

PERIOD_S = 1.0  # time between exchanges
_MAX_STEPS = 256  # between exchanges


class Answers(NamedTuple):
    """Whether any rank has a loss that is not finite, asks for something, or cut its pass off."""

    bad_loss: bool
    save: bool
    stop: bool
    out_of_time: bool
    cut: bool


class Requests:
    """The requests of this rank, and the next step after which all ranks exchange theirs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.signals = Signals(active=False)
        self.deadline_s = math.inf  # on the clock of time.monotonic
        self._messages_read_s = 0.0  # on the clock of time.perf_counter
        self.start_epoch(0)

    def listen(self, stack: ExitStack, max_seconds: float | None, *, to_signals: bool) -> None:
        """Listen to signals until the stack is closed, and begin to count the time."""
        self.deadline_s = time.monotonic() + (max_seconds or math.inf)
        self.signals = stack.enter_context(Signals(active=to_signals))

    @property
    def is_out_of_time(self) -> bool:
        """True if the time of this rank is over."""
        return time.monotonic() > self.deadline_s

    def start_epoch(self, step: int) -> None:
        """Plan to exchange requests after the first step of an epoch."""
        self._next_step = step + 1
        self._last_step, self._last_time = step, time.perf_counter()

    def are_due(self, step: int) -> bool:
        """Return True if ranks exchange requests after this step."""
        return step >= self._next_step

    def exchange(self, step: int, *, bad_loss: bool, cut: bool) -> Answers:
        """Exchange requests with all ranks; every rank must call this."""
        started = time.perf_counter()
        step_s = (started - self._last_time) / max(step - self._last_step, 1)
        signals = self.signals
        requests = [bad_loss, signals.must_save, signals.must_stop, self.is_out_of_time, cut]
        *answers, slowest_step_s = self._world.maximum([*requests, step_s])
        self._last_step, self._last_time = step, time.perf_counter()
        steps = int(PERIOD_S / max(slowest_step_s, 1e-9))
        self._next_step = step + min(max(steps, 1), _MAX_STEPS)
        return Answers(*map(bool, answers))

    def must_cut(self, *, can_save: bool) -> bool:
        """Return True if a signal came or time is over, on any rank; without waiting."""
        must_save = self.signals.must_save
        if not must_save and time.perf_counter() - self._messages_read_s < PERIOD_S:
            return False
        self._messages_read_s = time.perf_counter()
        if must_save or (can_save and self.is_out_of_time):
            self._world.post(CUT, "a signal came, or time is over")
            return True
        return any(self._world.message(topic) is not None for topic in (CUT, FAILURE))

    def forget_cut(self) -> None:
        """Remove the message that a pass is to be cut off."""
        if self._world.is_main:
            self._world.remove(CUT)
