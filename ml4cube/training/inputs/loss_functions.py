"""What is known of a loss function: its reduction, its class weights, the shapes it compares."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ml4cube.core.errors import InvalidValueError

# Torch's losses over classes, which divide by the weights of the classes that are not ignored. The
# last one exists only in recent versions of torch.
_CLASS_MODULES = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")
    if hasattr(nn, name)
)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
# Torch's elementwise losses, which broadcast where shapes differ.
_ELEMENTWISE = (
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


class ClassWeights:
    """The weight of each target in one of torch's losses over classes."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        ignored = setting(loss, "ignore_index")
        self.ignored: int = -100 if ignored is None else ignored  # as torch does
        self._module: Any = None
        if isinstance(loss, nn.Module):
            self._module = loss
        self._of_function = setting(loss, "weight")

    def __call__(self, target: Any) -> Tensor | None:
        """Return the class weight of each target, 0 where it is ignored; None if not of classes."""
        # The weights are read anew for each batch: those of a module may be moved or replaced.
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None
        by_class = self._of_function
        if self._module is not None:
            by_class = self._module.weight
        counted = target != self.ignored
        if not isinstance(by_class, Tensor):
            return counted.float()
        classes = torch.where(counted, target, torch.zeros_like(target)).long()
        weights = by_class.detach().to(target.device)[classes]
        return torch.where(counted, weights, torch.zeros_like(weights))


def as_labels(
    target: Any, weights: Any = None, ignored: int = -100, pred: Any = None
) -> tuple[Any, Any]:
    """Return a target of one channel, and its weights, as losses of torch over classes take them.

    As whole numbers without the channel; floats with gaps become the ignored label. Others, such as
    probabilities of classes, are returned as they are.
    """
    has_channel = isinstance(target, Tensor) and target.ndim > 1 and target.shape[1] == 1
    if not has_channel:
        return target, weights
    if target.is_floating_point():
        has_value = target.isfinite()
        labels = torch.where(has_value, target, ignored).long()
        is_fraction = has_value & (labels != target)
        if bool(is_fraction.any()):
            raise InvalidValueError(
                "targets of a loss over classes must be whole numbers, got "
                f"{target[is_fraction][0].item():g}; if the target was scaled, give it CF's "
                "flag_values or an integer dtype, or use scale_fn=None"
            )
    elif pred is not None and pred.ndim == target.ndim:
        labels = target
    else:  # the axis may be one of the window
        return target, weights
    if weights is not None and weights.ndim == target.ndim:
        weights = weights.squeeze(1)
    return labels.squeeze(1), weights


class ShapeChecked:
    """A loss that refuses predictions that would be broadcast against their targets."""

    # Only the first batch of each pair of shapes is checked.

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._seen: set[tuple[torch.Size, torch.Size]] = set()

    def __call__(self, pred: Any, target: Any) -> Any:
        """Return the loss."""
        if not isinstance(pred, Tensor) or not isinstance(target, Tensor):
            return self._function(pred, target)
        if pred.shape == target.shape or (pred.shape, target.shape) in self._seen:
            return self._function(pred, target)
        with _BroadcastCheck(self._name, self._function, pred, target):
            value = self._function(pred, target)
        self._seen.add((pred.shape, target.shape))
        return value


class _BroadcastCheck(TorchFunctionMode):
    """Raise an error where torch broadcasts a prediction against a target."""

    # A tensor that the loss has reshaped itself is not checked.

    def __init__(self, name: str, loss: Callable[..., Any], pred: Tensor, target: Tensor) -> None:
        super().__init__()
        self._name, self._loss, self._pred, self._target = name, loss, pred, target
        self._own_shapes = (pred.shape, target.shape)
        try:
            self._broadcast = np.broadcast_shapes(*self._own_shapes)
        except ValueError:
            self._broadcast = pred.shape  # torch raises an error itself

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operands = [*args, *(kwargs or {}).values()]
        compares = any(g is self._pred for g in operands) and any(
            g is self._target for g in operands
        )
        if compares and func in _ELEMENTWISE:
            raise self._refusal()
        value = func(*args, **(kwargs or {}))
        # Several quantiles may be compared with one target; the result has the shape of the
        # prediction. A new shape means that samples were compared with other samples.
        shape = getattr(value, "shape", None)
        if compares and shape == self._broadcast and shape not in self._own_shapes:
            raise self._refusal()
        return value

    def _refusal(self) -> InvalidValueError:
        return InvalidValueError(
            f"{self._name}={loss_name(self._loss)}: the prediction must have the shape of "
            f"the target, {tuple(self._target.shape)}, got {tuple(self._pred.shape)}; reshape it "
            "in the model or in the loss"
        )


def warn_if_unknown(name: str, function: Callable[..., Any]) -> None:
    """Warn of a loss or metric that ignores targets in a way of its own."""
    is_known = hasattr(function, "weigh") or is_over_classes(function)
    if not is_known and setting(function, "ignore_index") is not None:
        warnings.warn(
            f"{name}={loss_name(function)} has an ignore_index, but is not a loss of torch, so its "
            "denominator is unknown. Batches are weighted by their samples, and the mean depends "
            "on the batches and ranks. Give it a method weigh(target) that returns the denominator",
            UserWarning,
            stacklevel=4,
        )


def setting(loss: Callable[..., Any], name: str) -> Any:
    """Return a setting of a loss: an attribute or the default of a parameter."""
    if hasattr(loss, name):
        return getattr(loss, name)
    parameter = _parameters(loss).get(name)
    if parameter is None or parameter.default is parameter.empty:
        return None
    return parameter.default


def reduced(loss: Callable[..., Any], reduction: str) -> Callable[..., Any]:
    """Return the loss with another reduction, if it has one."""
    loss = uncompiled(loss)  # a compiled module would set the reduction of the user's own
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        copied = copy.copy(loss)  # the user's own keeps its reduction
        copied.reduction = reduction  # type: ignore[assignment]
        return copied
    if "reduction" in _parameters(loss):
        return partial(loss, reduction=reduction)
    return loss


def is_over_classes(loss: Callable[..., Any]) -> bool:
    """Return True if a loss is one of torch's over classes, with torch's own forward."""
    function = uncompiled(loss)
    if isinstance(loss, partial):
        function = loss.func
    if isinstance(function, _CLASS_MODULES):
        return any(type(function).forward is kind.forward for kind in _CLASS_MODULES)
    return any(function is over_classes for over_classes in _CLASS_FUNCTIONS)


def uncompiled(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module that `torch.compile` has wrapped; any other loss as it is."""
    original: Callable[..., Any] = getattr(loss, "_orig_mod", loss)
    return original


def loss_name(loss: Callable[..., Any]) -> str:
    """Return the name of a loss for messages."""
    function = loss
    if isinstance(loss, partial):
        function = loss.func
    return getattr(function, "__name__", repr(function))


def _parameters(loss: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        # A module's __call__ takes any arguments, its forward names them.
        call = loss
        if isinstance(loss, nn.Module):
            call = loss.forward
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}
