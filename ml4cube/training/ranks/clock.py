"""Measure how long steps wait for other ranks, without slowing training down.

In a backward pass, gradients are reduced while others are still computed. The time from the last
gradient of this rank to the end of the pass is spent waiting for communication and other ranks. It
is measured on every 50th step, from the third on, by hooks that exist only in these steps. On a GPU
it is measured by events, which are read at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ml4cube.training.ranks.device_time import DeviceTime, Span
from ml4cube.training.ranks.dist import World

_PERIOD = 50  # steps
_FIRST = 2  # the first two steps include setup


class StepClock:
    """The fraction of its steps that this rank spends waiting for others."""

    def __init__(self, world: World, *, active: bool = True) -> None:
        self._world, self._active = world, active
        self._time = DeviceTime(world.device)
        self._in_timed_step = False
        self._is_forward = False  # the model has been called for the batch under way
        self._wait_start: Any = None  # when this rank last computed a gradient
        self._steps: list[Span] = []
        self._waits: list[Span] = []

    def timed(self, model: nn.Module, steps: int) -> AbstractContextManager[None]:
        """Time the step in the body, if that is due after so many steps."""
        due = steps % _PERIOD == _FIRST and self._world.size > 1 and self._active
        if due:
            return self._timing(model)
        return nullcontext()

    def end_backward(self) -> None:
        """End the waiting time, after a backward pass."""
        self._is_forward = False
        if self._in_timed_step:
            self._end_wait()

    def waiting_fraction(self) -> float | None:
        """Return the fraction of the timed steps spent waiting; None if none was timed."""
        if self._world.size == 1:
            return 0.0
        total = sum(map(self._time.seconds, self._steps))
        waited = sum(map(self._time.seconds, self._waits))
        if not total:
            return None
        return min(waited / total, 1.0)

    @contextmanager
    def _timing(self, model: nn.Module) -> Iterator[None]:
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._restart_wait)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        step_start = self._wait_start = self._time.now()
        if next(model.buffers(), None) is not None:
            # DDP broadcasts buffers before the forward pass of the model.
            hooks.append(model.register_forward_pre_hook(self._begin_forward))
        self._in_timed_step = True
        try:
            yield
        finally:
            self._in_timed_step = False
            for hook in hooks:
                hook.remove()
        self._steps.append((step_start, self._time.now()))

    def _begin_forward(self, *_: Any) -> None:
        # A batch may call the model several times, and waits only before the first.
        if not self._is_forward:
            self._end_wait()
        self._is_forward = True

    def _restart_wait(self, parameter: torch.Tensor) -> None:
        self._wait_start = self._time.now()

    def _end_wait(self) -> None:
        now = self._time.now()
        self._waits.append((self._wait_start, now))
        self._wait_start = now
