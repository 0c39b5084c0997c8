"""Time as a device sees it: by events in the queue of a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

# When a span began and ended.
Span = tuple[Any, Any]


class DeviceTime:
    """Moments of a device: seconds, or events of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.uses_events = device.type == "cuda"

    def now(self) -> Any:
        """Return this moment."""
        if not self.uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_over(self, moment: Any) -> bool:
        """Return True if the device has passed a moment."""
        return not self.uses_events or bool(moment.query())

    def seconds(self, span: Span) -> float:
        """Return the length of a span; waits until the device has passed it."""
        start, end = span
        if self.uses_events:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
        return float(end - start)
