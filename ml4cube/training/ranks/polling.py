"""When ranks ask one another: at agreed steps, about once a second."""

from __future__ import annotations

import time

from ml4cube.training.ranks.dist import World

PERIOD_S = 1.0  # how long ranks may run without asking one another
_MAX_STEPS = 256


class Pulse:
    """The step at which all ranks meet next."""

    # Every rank takes the same number of steps, so a step number is a meeting that needs no
    # message. How many steps a second has is known from the slowest rank of the last meeting.

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = self._step = 0
        self._since = self.asked = 0.0

    def start(self, step: int) -> None:
        """Count anew, as an epoch does; the next meeting is after one step."""
        self._next, self._step, self._since = step + 1, step, time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Whether the ranks meet after this step."""
        return step >= self._next

    def ask(self, step: int, questions: list[bool]) -> list[bool]:
        """Meet now; every rank must call this."""
        pace = (time.perf_counter() - self._since) / max(step - self._step, 1)
        began = time.perf_counter()
        *answers, slowest = self._world.maximum([*questions, pace])
        self.asked += time.perf_counter() - began
        self.start(step)
        self._next = step + max(1, min(int(PERIOD_S / max(slowest, 1e-9)), _MAX_STEPS))
        return [bool(answer) for answer in answers]
