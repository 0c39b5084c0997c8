"""How this rank spends an epoch: computing, waiting for batches, waiting for other ranks.

In a backward pass, gradients are reduced while others are still computed. The time from the last
gradient of this rank to the end of the pass is spent waiting for communication and other ranks. It
is measured on every 50th step, from the third on, by hooks that exist only in these steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ml4cube.training.ranks.world import World

_PERIOD = 50  # steps
_FIRST = 2  # the first two steps include setup


class Spans:
    """Spans of time on a device, added up: those of its with blocks, and others.

    A GPU computes while the host goes on. So events in its queue, which it passes when it has
    computed what came before, tell its time; they are read once it has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._began: Any = None
        self._seconds = 0.0
        # Of spans that the GPU has not passed yet: when they begin and end.
        self._under_way: deque[tuple[Any, Any]] = deque()

    def now(self) -> Any:
        """Return this moment of the device: seconds, or an event of a GPU."""
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, start: Any, end: Any) -> None:
        """Add a span that ends now."""
        if not self._uses_events:
            self._seconds += end - start
            return
        self._under_way.append((start, end))
        while self._under_way and self._under_way[0][1].query():
            self._add_first()

    def __enter__(self) -> None:
        """Begin a span."""
        self._began = self.now()

    def __exit__(self, *_: object) -> None:
        self.add(self._began, self.now())

    @property
    def seconds(self) -> float:
        """The length of all spans; waits until the device has passed them."""
        while self._under_way:
            self._add_first()
        return self._seconds

    def _add_first(self) -> None:
        start, end = self._under_way.popleft()
        end.synchronize()
        self._seconds += float(start.elapsed_time(end)) / 1000


class StepClock:
    """The fraction of its steps that this rank spends waiting for others."""

    def __init__(self, world: World, *, active: bool = True) -> None:
        self._world, self._active = world, active
        self._in_timed_step = False
        self._is_forward = False  # the model has been called for the batch under way
        self._wait_start: Any = None  # when this rank last computed a gradient
        self._steps, self._waits = Spans(world.device), Spans(world.device)

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
        total = self._steps.seconds
        if not total:
            return None
        return min(self._waits.seconds / total, 1.0)

    @contextmanager
    def _timing(self, model: nn.Module) -> Iterator[None]:
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._restart_wait)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        step_start = self._wait_start = self._steps.now()
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
        self._steps.add(step_start, self._steps.now())

    def _begin_forward(self, *_: Any) -> None:
        # A batch may call the model several times, and waits only before the first.
        if not self._is_forward:
            self._end_wait()
        self._is_forward = True

    def _restart_wait(self, parameter: torch.Tensor) -> None:
        self._wait_start = self._steps.now()

    def _end_wait(self) -> None:
        now = self._steps.now()
        self._waits.add(self._wait_start, now)
        self._wait_start = now


class EpochTimes:
    """The time of training in an epoch, without validation, and what it was spent on."""

    def __init__(self, world: World, *, times_steps: bool, resumed_s: float = 0.0) -> None:
        self._world = world
        self.data_wait = Spans(world.device)
        self.step_clock = StepClock(world, active=times_steps)
        self.rank_wait_s = 0.0  # outside of steps
        self._resumed_s = resumed_s  # the time that a snapshot held
        # On the clock of time.perf_counter; a pause moves the first on by its length.
        self._started_s = time.perf_counter()
        self._paused_s: float | None = None

    @property
    def seconds(self) -> float:
        """The time so far, by this process and those before it."""
        return self._resumed_s + self._own_seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in the body."""
        self._paused_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - self._paused_s
            self._paused_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the body as waiting for other ranks."""
        started = time.perf_counter()
        yield
        self.rank_wait_s += time.perf_counter() - started

    def columns(self) -> dict[str, float | None]:
        """Return the columns of this rank in the table of ranks.

        The fractions add up to 1. Without a step that was timed, the last two are None.
        """
        own_seconds = max(self._own_seconds(), 1e-9)
        columns: dict[str, float | None] = {
            "seconds": self.seconds,
            "data_wait": self.data_wait.seconds / own_seconds,
            "communicate": None,
            "compute": None,
        }
        in_steps = self.step_clock.waiting_fraction()
        if in_steps is not None:
            data_wait, rank_wait = self.data_wait.seconds / own_seconds, 0.0
            if self._world.size > 1:
                rank_wait = self.rank_wait_s / own_seconds
            communicate = rank_wait + in_steps * (1 - data_wait - rank_wait)
            columns["communicate"] = communicate
            columns["compute"] = max(0.0, 1 - data_wait - communicate)
        return columns

    def _own_seconds(self) -> float:
        return (self._paused_s or time.perf_counter()) - self._started_s
