"""Decide at which steps ranks communicate about stopping and saving: about once a second.

All ranks take the same number of steps, so a step number tells all of them when to poll. It follows
from the time that the slowest rank needed per step since the last poll.
"""

from __future__ import annotations

import time

from ml4cube.training.ranks.dist import World

PERIOD_S = 1.0  # time between polls
_MAX_STEPS = 256  # between polls


class PollSchedule:
    """The next step after which all ranks exchange requests to stop or save."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.start_epoch(0)

    def start_epoch(self, step: int) -> None:
        """Schedule a poll after the first step of an epoch."""
        self.polling_s = 0.0  # spent in the polls of this epoch
        self._next_step = step + 1
        self._last_step, self._last_time = step, time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return True if ranks poll after this step."""
        return step >= self._next_step

    def poll(self, step: int, questions: list[bool]) -> list[bool]:
        """Return for each question whether any rank says yes; every rank must call this."""
        started = time.perf_counter()
        step_s = (started - self._last_time) / max(step - self._last_step, 1)
        *answers, slowest_step_s = self._world.maximum([*questions, step_s])
        self._last_step, self._last_time = step, time.perf_counter()
        self.polling_s += self._last_time - started
        steps = int(PERIOD_S / max(slowest_step_s, 1e-9))
        self._next_step = step + min(max(steps, 1), _MAX_STEPS)
        return [bool(answer) for answer in answers]
