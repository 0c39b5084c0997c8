"""How long the device waits for batches."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ml4cube.training.ranks.device_time import DeviceTime, Span


class DataWait:
    """The time, in with blocks, for which a device computes nothing as a batch is not there yet.

    A GPU computes while the host fetches the next batch. So events in its queue, which it passes
    when it has computed what came before, tell how long it waits; nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._time = DeviceTime(device)
        self._began: Any = None
        self._seconds = 0.0
        # Of waits that the GPU has not passed yet, as many as steps that it has not computed.
        self._under_way: deque[Span] = deque()

    def __enter__(self) -> None:
        """Begin to count."""
        self._began = self._time.now()

    def __exit__(self, *_: object) -> None:
        span = (self._began, self._time.now())
        if not self._time.uses_events:  # no need to wait until the device has passed it
            self._seconds += self._time.seconds(span)
            return
        self._under_way.append(span)
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
