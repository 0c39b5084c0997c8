"""How long steps wait for other ranks: timed on few of them, without making a device wait.

In a backward pass gradients travel while others are still computed. What is left when the last
gradient of this rank is there is waiting: for the wire, and for ranks that are not as far. That
tail is timed on every 50th step, from the third on, by hooks that exist only then. On a GPU it is
timed by events in its own stream, which are read when the epoch has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ml4cube.training.ranks.dist import World

_EVERY = 50
_FIRST = 2  # the first two steps also set up what later ones use

Span = tuple[Any, Any]


class StepClock:
    """The share of its steps that this rank spends waiting for others."""

    def __init__(self, world: World, *, active: bool = True) -> None:
        self._world, self._active = world, active
        self._events = world.device.type == "cuda"
        self._timed = False  # the step under way
        self._last: Any = None
        self._steps: list[Span] = []
        self._waits: list[Span] = []

    def is_due(self, steps: int) -> bool:
        """Whether to time a step."""
        return steps % _EVERY == _FIRST and self._world.size > 1 and self._active

    @contextmanager
    def timed(self, model: nn.Module) -> Iterator[None]:
        """Time the step in the body."""
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        began = self._last = self._now()
        if any(True for _ in model.buffers()):
            # What comes before the model's own forward pass is rank 0's buffers travelling.
            hooks.append(model.register_forward_pre_hook(self._end_wait))
        self._timed = True
        try:
            yield
        finally:
            self._timed = False
            for hook in hooks:
                hook.remove()
        self._steps.append((began, self._now()))

    def end_backward(self) -> None:
        """Say that a backward pass has returned, which it does when gradients have arrived."""
        if self._timed:
            self._end_wait()

    def share(self) -> float | None:
        """Return the share of the timed steps spent waiting for other ranks."""
        if self._world.size == 1:
            return 0.0
        total = sum(map(self._seconds, self._steps))
        waited = sum(map(self._seconds, self._waits))
        return min(waited / total, 1.0) if total else None

    def _note(self, parameter: torch.Tensor) -> None:
        self._last = self._now()

    def _end_wait(self, *_: Any) -> None:
        now = self._now()
        self._waits.append((self._last, now))
        self._last = now

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, span: Span) -> float:
        begin, end = span
        if self._events:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000
        return float(end - begin)
