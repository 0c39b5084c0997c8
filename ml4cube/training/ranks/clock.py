"""Measure how long steps wait for other ranks, without slowing training down.

In a backward pass, gradients are reduced while others are still computed. The time from the last
gradient of this rank to the end of the pass is spent waiting for communication and other ranks. It
is measured on every 50th step, from the third on, by hooks that exist only in these steps.
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
_FIRST = 2  # the first two steps include setup


class StepClock:
    """The fraction of its steps that this rank spends waiting for others."""

    def __init__(self, world: World, *, active: bool = True) -> None:
        self._world, self._active = world, active
        self._timed = False  # whether the current step is timed
        self._last = self._whole = self._waited = 0.0

    @contextmanager
    def timed(self, model: nn.Module, steps: int) -> Iterator[None]:
        """Time the step in the body, if that is due after so many steps."""
        if steps % _EVERY != _FIRST or self._world.size == 1 or not self._active:
            yield
            return
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        began = self._last = self._now()
        if any(True for _ in model.buffers()):
            # DDP broadcasts buffers before the forward pass of the model.
            hooks.append(model.register_forward_pre_hook(self._end_wait))
        self._timed = True
        try:
            yield
        finally:
            self._timed = False
            for hook in hooks:
                hook.remove()
        self._whole += self._now() - began

    def end_backward(self) -> None:
        """End the waiting time, after a backward pass."""
        if self._timed:
            self._end_wait()

    def share(self) -> float | None:
        """Return the fraction of the timed steps spent waiting for other ranks."""
        if self._world.size == 1:
            return 0.0
        return min(self._waited / self._whole, 1.0) if self._whole else None

    def _note(self, parameter: torch.Tensor) -> None:
        self._last = self._now()

    def _end_wait(self, *_: Any) -> None:
        before, self._last = self._last, self._now()
        self._waited += self._last - before

    def _now(self) -> float:
        if self._world.device.type == "cuda":  # the host is ahead of what the GPU has computed
            torch.cuda.current_stream(self._world.device).synchronize()
        return time.perf_counter()
