"""A moving average of the weights, which often does better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.ranks.strategy import Strategy

_HALF = {torch.bfloat16, torch.float16}


class Ema:
    """Exponential moving average of a model's parameters and buffers, except integer ones."""

    # After every step, ``average = decay * average + (1 - decay) * value``; the first step's values
    # are the first average. The running statistics of normalization layers are averaged like
    # weights, so that they fit the averaged weights; other buffers, such as counters, are copied.
    # This is `torch.optim.swa_utils.AveragedModel` with ``use_buffers=True``, for a model that a
    # strategy may shard: this rank averages its shards.

    def __init__(self, model: nn.Module, decay: float, strategy: Strategy) -> None:
        half = {p.dtype for p in model.parameters() if p.requires_grad} & _HALF
        if half:
            raise InvalidTypeError(
                f"ema={decay} needs weights of float32, got {half.pop()}, in which an average "
                "stands still by rounding; use model.float() and precision='bf16', or leave ema out"
            )
        self.decay, self.updates = decay, 0
        self._strategy = strategy
        self._parameters = dict(model.named_parameters()).keys()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._weights = strategy.local_shards(tensors)
        self.average = {name: tensor.clone() for name, tensor in self._weights.items()}
        averaged = [n for n, t in tensors.items() if t.is_floating_point() or t.is_complex()]
        # Lists of the tensors that are averaged, in the same order.
        self._averaged_weights = [self._weights[name] for name in averaged]
        self._averages = [self.average[name] for name in averaged]
        self._copied = tensors.keys() - averaged
        self._is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        if self.updates:
            torch._foreach_lerp_(self._averages, self._averaged_weights, 1 - self.decay)
        else:
            torch._foreach_copy_(self._averages, self._averaged_weights)
        for name in self._copied:
            self.average[name].copy_(self._weights[name])
        self.updates += 1

    @contextmanager
    def applied(self, on: bool = True) -> Iterator[None]:
        """Give the model the averaged weights, or its own (`on=False`), in a with block."""
        before = self._is_applied
        self.apply(on)
        try:
            yield
        finally:
            self.apply(before)

    @torch.no_grad()
    def apply(self, on: bool) -> None:
        """Give the model the averaged weights, or its own again, by exchanging both."""
        if on == self._is_applied or not self.updates:
            return
        for name, tensor in self._weights.items():
            previous = tensor.clone()
            tensor.copy_(self.average[name])
            self.average[name].copy_(previous)
        self._is_applied = on

    def leave(self) -> dict[str, Any]:
        """Leave the average in the model; return what `continue_from` takes."""
        with self.applied(False):
            own = {name: tensor.clone() for name, tensor in self._weights.items()}
        self.apply(True)
        left = {name: self._weights[name].clone() for name in self._parameters}
        return {"updates": self.updates, "own": own, "left": left}

    def continue_from(self, left: Mapping[str, Any]) -> None:
        """Go on with an average, if the model still has the parameters that `leave` left."""
        # Buffers are left out: an evaluation gives those of rank 0 to all ranks.
        parameters = left.get("left", {})
        device = next(iter(self._weights.values())).device
        if parameters.keys() == self._parameters and all(
            torch.equal(parameters[name].to(device), self._weights[name]) for name in parameters
        ):
            self.updates, self._is_applied = left["updates"], left["updates"] > 0
            for name, tensor in left["own"].items():
                self.average[name].copy_(tensor)

    def restart(self) -> None:
        """Start a new average from the current weights of the model."""
        self.updates, self._is_applied = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the average, whole on rank 0; the model must have its own weights; every rank."""
        average = self._strategy.gather_tensors(self.average)
        return {"updates": self.updates, "average": average}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a whole average."""
        self.updates = state["updates"]
        average = self._strategy.local_shards(state["average"])
        for name, tensor in self.average.items():
            tensor.copy_(average[name])
