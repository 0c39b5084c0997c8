"""A moving average of the weights, which often does better than the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


class Ema:
    """Exponential moving average of a model's parameters and floating-point buffers."""

    # After every step, ``average = decay * average + (1 - decay) * value``; the first step's values
    # are the first average. The running statistics of normalization layers are averaged like
    # weights, so that the averaged model is one whole; counters are copied. This is
    # `torch.optim.swa_utils.AveragedModel` with ``use_buffers=True``.

    def __init__(
        self, model: nn.Module, decay: float, parts: Callable[[Tensors], Tensors] = dict
    ) -> None:
        self.decay, self.updates = decay, 0
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._live = {name: tensor.detach() for name, tensor in parts(named).items()}
        self.average = {name: tensor.clone() for name, tensor in self._live.items()}
        smooth = [name for name, tensor in named.items() if tensor.is_floating_point()]
        self._from = [self._live[name] for name in smooth]
        self._into = [self.average[name] for name in smooth]
        self._counters = [
            (self.average[name], self._live[name]) for name in named if name not in set(smooth)
        ]
        self._is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        if self.updates:
            torch._foreach_lerp_(self._into, self._from, 1 - self.decay)
        else:
            torch._foreach_copy_(self._into, self._from)
        for average, live in self._counters:
            average.copy_(live)
        self.updates += 1

    @contextmanager
    def applied(self, on: bool = True) -> Iterator[None]:
        """Give the model the averaged weights inside a with block."""
        before = self._is_applied
        self.apply(on)
        try:
            yield
        finally:
            self.apply(before)

    @torch.no_grad()
    def apply(self, on: bool) -> None:
        """Give the model the averaged weights, or its own again."""
        if on == self._is_applied or not self.updates:
            return
        for name, live in self._live.items():
            held = live.clone()
            live.copy_(self.average[name])
            self.average[name].copy_(held)
        self._is_applied = on

    def restart(self) -> None:
        """Start a new average from the current weights of the model."""
        self.updates, self._is_applied = 0, False

    def state_dict(self, whole: Callable[[Tensors], Tensors] = dict) -> dict[str, Any]:
        """Return the average; the model must have its own weights."""
        return {"updates": self.updates, "average": whole(self.average)}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], parts: Callable[[Tensors], Tensors] = dict
    ) -> None:
        """Restore an average."""
        self.updates = state["updates"]
        average = parts(state["average"])
        for name, tensor in self.average.items():
            tensor.copy_(average[name])
