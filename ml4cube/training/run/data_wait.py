"""How long the device waits for batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ml4cube.training.ranks.device_time import DeviceTime, Span


class DataWait:
    """The time for which a device has nothing to compute because a batch is not there yet.

    A GPU computes while the host fetches the next batch. So events in its queue, which it passes
    when it has computed what came before, tell how long it waits; nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._time = DeviceTime(device)
        self.restart()

    def restart(self) -> None:
        """Begin to count from zero."""
        self._seconds = 0.0
        # Of waits that the GPU has not passed yet, as many as steps that it has not computed.
        self._under_way: deque[Span] = deque()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time in the body."""
        began = self._time.now()
        yield
        self._under_way.append((began, self._time.now()))
        while self._under_way and self._time.is_over(self._under_way[0][1]):
            self._add_first()

    @property
    def seconds(self) -> float:
        """The time that was counted; waits until the device has passed all of it."""
        while self._under_way:
            self._add_first()
        return self._seconds

    def _add_first(self) -> None:
        self._seconds += self._time.seconds(self._under_way.popleft())
