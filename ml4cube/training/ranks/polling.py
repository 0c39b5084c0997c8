"""Decide at which steps ranks communicate about stopping and saving: about once a second."""

from __future__ import annotations

import time

from ml4cube.training.ranks.dist import World

PERIOD_S = 1.0  # time between polls
_MAX_STEPS = 256


class PollSchedule:
    """The next step at which all ranks exchange requests to stop or save."""

    # All ranks take the same number of steps, so they need not communicate to agree on a step. The
    # interval follows from the pace of the slowest rank since the last poll.

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = self._step = 0
        self._since = self.asked = 0.0

    def start(self, step: int) -> None:
        """Restart at the beginning of an epoch; the next poll is after one step."""
        self._next, self._step, self._since = step + 1, step, time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return True if ranks poll after this step."""
        return step >= self._next

    def ask(self, step: int, questions: list[bool]) -> list[bool]:
        """Return for each question whether any rank says yes; every rank must call this."""
        pace = (time.perf_counter() - self._since) / max(step - self._step, 1)
        began = time.perf_counter()
        *answers, slowest = self._world.maximum([*questions, pace])
        self.asked += time.perf_counter() - began
        self.start(step)
        self._next = step + max(1, min(int(PERIOD_S / max(slowest, 1e-9)), _MAX_STEPS))
        return [bool(answer) for answer in answers]
