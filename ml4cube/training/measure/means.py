"""What a loss or a metric of a batch is the mean of, so that batches and ranks add up exactly."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ml4cube.core.errors import InvalidValueError

# Torch's losses whose targets are classes: they divide by the weights of the classes that count.
# One of them is younger than the oldest torch that we run with.
_CLASS_MODULES = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")
    if hasattr(nn, name)
)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
# Torch's losses that are computed value by value, and broadcast where shapes differ.
_VALUE_BY_VALUE = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.multilabel_soft_margin_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)


class Classes:
    """What torch's losses over classes divide by, target by target."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        ignored = setting(loss, "ignore_index")
        self.ignored: int = -100 if ignored is None else ignored  # as torch does
        # The weights of a module may still be moved to another device.
        self._holder = loss if isinstance(loss, nn.Module) else None
        self._weight = setting(loss, "weight")

    def __call__(self, target: Any) -> torch.Tensor | None:
        """Return the weights of the classes, 0 where one is ignored."""
        if not isinstance(target, torch.Tensor) or target.is_floating_point():
            return None
        weight = self._weight if self._holder is None else self._holder.weight
        counted = target != self.ignored
        if not isinstance(weight, torch.Tensor):
            return counted.float()
        classes = torch.where(counted, target, torch.zeros_like(target)).long()
        weights = weight.detach().to(target.device)[classes]
        return torch.where(counted, weights, torch.zeros_like(weights))


class Mean:
    """A loss or a metric as a mean, and what that mean weighs beside those of other batches."""

    # The mean over all batches is the sum of ``mean * weight`` over the sum of ``weight``, and it
    # equals the loss of all of them in one batch: a loss of torch over classes divides by the
    # weights of the classes that are not ignored, and so weighs that; any other loss divides by a
    # number in proportion to its samples. One that sums is divided by its samples here.

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        reduction = setting(function, "reduction")
        self._weigh = getattr(function, "weigh", None)
        self._sums = reduction == "sum"  # which would weigh large batches twice
        self._function = Paired(name, function)
        self._classes = self._summed = None
        if reduction == "mean" and is_over_classes(function):
            # The sum is 0 where every target of a batch is ignored, and the mean NaN.
            self._classes, self._summed = Classes(function), Paired(name, reduced(function, "sum"))

    def __call__(self, pred: Any, target: Any, samples: int) -> Any:
        """Return the mean of one batch."""
        counts = None if self._classes is None else self._classes(target)
        if counts is not None and self._summed is not None:
            total = counts.sum().clamp_min(torch.finfo(counts.dtype).tiny)
            return self._summed(pred, target) / total
        value = self._function(pred, target)
        return value / samples if self._sums else value

    def weigh(self, target: Any) -> torch.Tensor | None:
        """Return what the mean of a batch weighs."""
        if self._weigh is not None:
            weight: torch.Tensor = self._weigh(target)
            return weight
        counts = None if self._classes is None else self._classes(target)
        return None if counts is None else counts.sum()


class Paired:
    """Call a loss, and refuse predictions that would be broadcast against their targets."""

    # The first batch of each pair of shapes is looked at; later ones cost a comparison.

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._seen: set[tuple[torch.Size, torch.Size]] = set()

    def __call__(self, pred: Any, target: Any) -> Any:
        """Return what the function returns."""
        if not isinstance(pred, torch.Tensor) or not isinstance(target, torch.Tensor):
            return self._function(pred, target)
        if pred.shape == target.shape or (pred.shape, target.shape) in self._seen:
            return self._function(pred, target)
        with _Watch(self._name, self._function, pred, target):
            value = self._function(pred, target)
        self._seen.add((pred.shape, target.shape))
        return value


class _Watch(TorchFunctionMode):
    """Looks at what torch is told to do with a prediction and a target of another shape."""

    # What a loss reshapes itself is another tensor, and its own affair.

    def __init__(
        self, name: str, loss: Callable[..., Any], pred: torch.Tensor, target: torch.Tensor
    ) -> None:
        super().__init__()
        self._name, self._loss, self._pred, self._target = name, loss, pred, target
        try:
            self._together = np.broadcast_shapes(pred.shape, target.shape)
        except ValueError:
            self._together = pred.shape  # nothing can be broadcast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        both = any(g is self._pred for g in given) and any(g is self._target for g in given)
        if both and any(func is own for own in _VALUE_BY_VALUE):
            raise self._refusal()
        value = func(*args, **(kwargs or {}))
        # Quantiles may be subtracted from one target; here each sample meets those of others.
        if (
            both
            and isinstance(value, torch.Tensor)
            and value.shape == self._together
            and value.shape not in (self._pred.shape, self._target.shape)
        ):
            raise self._refusal()
        return value

    def _refusal(self) -> InvalidValueError:
        return InvalidValueError(
            f"{self._name}={called(self._loss)}: the prediction must have the shape of the target, "
            f"{tuple(self._target.shape)}, got {tuple(self._pred.shape)}, which would be "
            "broadcast; let the model return that shape, or reshape one of them in the loss"
        )


def warn_if_unknown(name: str, function: Callable[..., Any]) -> None:
    """Warn where what a loss or a metric divides by is not known, and likely is not its samples."""
    known = hasattr(function, "weigh") or is_over_classes(function)
    if not known and setting(function, "ignore_index") is not None:
        warnings.warn(
            f"{name}={called(function)} has an ignore_index, but computes in a way of its own, so "
            "what it divides by is not known: batches count by their samples, and its mean "
            "depends on how samples are cut into batches and ranks. Give it a method "
            "weigh(target) that returns what it divides by",
            UserWarning,
            stacklevel=4,
        )


def setting(loss: Callable[..., Any], name: str) -> Any:
    """Return what a loss is set to."""
    if hasattr(loss, name):
        return getattr(loss, name)
    taken = _parameters(loss).get(name)
    return None if taken is None or taken.default is taken.empty else taken.default


def reduced(loss: Callable[..., Any], reduction: str) -> Callable[..., Any]:
    """Return the same loss, reduced in another way, where it knows of that."""
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        alike = copy.copy(loss)  # the user's own keeps its reduction
        alike.reduction = reduction  # type: ignore[assignment]
        return alike
    return partial(loss, reduction=reduction) if "reduction" in _parameters(loss) else loss


def is_over_classes(loss: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's over classes, computed as torch does."""
    function = loss.func if isinstance(loss, partial) else loss
    if isinstance(function, _CLASS_MODULES):
        return any(type(function).forward is kind.forward for kind in _CLASS_MODULES)
    return any(function is own for own in _CLASS_FUNCTIONS)


def called(loss: Callable[..., Any]) -> str:
    """Return what a loss is called in messages."""
    function = loss.func if isinstance(loss, partial) else loss
    return getattr(function, "__name__", repr(function))


def _parameters(loss: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        # What calls a module takes anything; its forward says what.
        call = loss.forward if isinstance(loss, nn.Module) else loss
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}
