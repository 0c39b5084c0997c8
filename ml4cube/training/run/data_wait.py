"""How long the device waits for batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DataWait:
    """The time for which a device has nothing to compute because a batch is not there yet.

    A GPU computes while the host fetches the next batch. So events in its queue, which it passes
    when it has computed what came before, tell how long it waits; nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin to count from zero."""
        self._seconds = 0.0
        # Of waits that the GPU has not passed yet, as many as steps that it has not computed.
        self._under_way: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time in the body."""
        began = self._now()
        yield
        self._under_way.append((began, self._now()))
        while self._under_way and self._is_over(self._under_way[0][1]):
            self._add_first()

    @property
    def seconds(self) -> float:
        """The time that was counted; waits until the device has passed all of it."""
        while self._under_way:
            self._add_first()
        return self._seconds

    def _add_first(self) -> None:
        began, ended = self._under_way.popleft()
        if self._uses_events:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000
        else:
            self._seconds += ended - began

    def _is_over(self, moment: Any) -> bool:
        return not self._uses_events or moment.query()

    def _now(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
