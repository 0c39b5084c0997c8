"""Weights of batch means, so that means over batches and ranks are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ml4cube.training.inputs.loss_functions import (
    ClassWeights,
    ShapeChecked,
    as_labels,
    is_over_classes,
    reduced,
    setting,
)
from ml4cube.training.losses import MaskedLoss


class BatchMean:
    """A loss or metric as a mean over a batch, and the weight of the batch."""

    # The sum of ``mean * weight`` over batches, divided by the sum of ``weight``, equals the loss
    # of all of them in one batch. A loss of torch over classes divides by the weights of the
    # classes that are not ignored, so this is its weight. A loss of a user may have a method
    # `weigh`. The weight of any other loss is its number of samples. A loss that sums is divided by
    # its samples here. With weights of samples or cells, the loss is a `MaskedLoss`.

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._given, reduction = function, setting(function, "reduction")
        self._weigh = getattr(function, "weigh", None)
        self._is_sum = reduction == "sum"
        self._function = ShapeChecked(name, function)
        self._class_weights: ClassWeights | None = None
        if reduction == "mean" and is_over_classes(function):
            self._class_weights = ClassWeights(function)
            self._sum = ShapeChecked(name, reduced(function, "sum"))

    def __call__(
        self, pred: Any, target: Any, samples: int, weights: torch.Tensor | None = None
    ) -> Any:
        """Return the mean of one batch."""
        if weights is not None:
            return self._masked(pred, target, weights)
        if self._class_weights is not None:
            target, _ = as_labels(target, None, self._class_weights.ignored, pred)
        class_weights = None
        if self._class_weights is not None:
            class_weights = self._class_weights(target)
        if class_weights is None:
            value = self._function(pred, target)
            if self._is_sum:
                return value / samples
            return value
        # Of a batch in which all targets are ignored, the sum is 0, but the mean would be NaN.
        smallest = torch.finfo(class_weights.dtype).tiny
        return self._sum(pred, target) / class_weights.sum().clamp_min(smallest)

    @property
    def has_weights(self) -> bool:
        """True if batches weigh otherwise than by their number of samples."""
        return self._weigh is not None or self._class_weights is not None

    def weigh(self, target: Any, weights: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the weight of a batch; None means its number of samples."""
        if weights is not None:
            return self._masked.weigh(target, weights)
        if self._weigh is not None:
            weight: torch.Tensor = self._weigh(target)
            return weight
        if self._class_weights is not None:
            target, _ = as_labels(target, None, self._class_weights.ignored)
        class_weights = None
        if self._class_weights is not None:
            class_weights = self._class_weights(target)
        if class_weights is None:
            return None
        return class_weights.sum()

    def leaves_gaps_out(self, target: torch.Tensor) -> bool:
        """Return True if cells whose target is NaN do not count."""
        if self._class_weights is not None:
            return as_labels(target, None, self._class_weights.ignored)[0] is not target
        return isinstance(self._given, MaskedLoss)

    @cached_property
    def has_cell_values(self) -> bool:
        """True if the function is known to have a value per cell, which can be weighted."""
        if isinstance(self._given, MaskedLoss):
            return True
        function = self._given
        if isinstance(self._given, partial):
            function = self._given.func
        origin = function
        if isinstance(function, nn.Module):
            origin = type(function)
        is_of_torch = getattr(origin, "__module__", "").startswith("torch.nn.")
        return is_of_torch and setting(self._given, "reduction") is not None

    @cached_property  # made at the first batch with weights, because it copies the user's loss
    def _masked(self) -> MaskedLoss:
        if isinstance(self._given, MaskedLoss):
            return self._given
        return MaskedLoss(self._given)
