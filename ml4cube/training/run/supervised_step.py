"""The step of supervised learning: ``loss(model(X), y)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ml4cube.training.inputs.batches import as_pair, weights_of
from ml4cube.training.inputs.steps import Step, StepResult
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.measure.means import BatchMean, setting, warn_if_unknown


class Supervised(Step):
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`.

    The loss of a batch ``(X, y, weights)`` is a `MaskedLoss`, made from `loss` if it is not one.
    """

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss
        warn_if_unknown("loss", loss)
        self._mean = BatchMean("loss", loss)
        self._masked = loss if isinstance(loss, MaskedLoss) else None

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""
        features, target = as_pair(batch)
        pred = module(features)
        weights = weights_of(batch)
        if weights is not None:
            loss = self._weighted()(pred, target, weights)
            return StepResult(loss, pred, target, weights=weights)
        gaps = None
        if target.is_floating_point() and not isinstance(self.loss, MaskedLoss):
            # NaN if any value is. It stays on the device, so that this does not wait for it.
            gaps = target.sum()
        return StepResult(self._mean(pred, target, len(features)), pred, target, gaps=gaps)

    @property
    def loss_parts(self) -> list[Any]:
        """The loss function."""
        return [self.loss]

    def weigh(self, batch: Any, training: bool = True) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        target, weights = as_pair(batch)[1], weights_of(batch)
        if weights is None:
            return self._mean.weigh(target)
        return self._weighted().weigh(target, weights)

    def _weighted(self) -> MaskedLoss:
        """Return the loss of weighted batches, made at the first: it copies the user's loss."""
        if self._masked is None:
            self._masked = MaskedLoss(self.loss)
        return self._masked


def weighted_metrics(metrics: Mapping[str, Any]) -> dict[str, MaskedLoss]:
    """Return the metrics that have a value per cell, as means weighted by a batch's weights."""
    return {
        name: metric if isinstance(metric, MaskedLoss) else MaskedLoss(metric)
        for name, metric in metrics.items()
        if isinstance(metric, MaskedLoss) or _is_loss_of_torch(metric)
    }


def _is_loss_of_torch(metric: Any) -> bool:
    function = metric.func if isinstance(metric, partial) else metric
    origin = type(function) if isinstance(function, nn.Module) else function
    is_of_torch = getattr(origin, "__module__", "").startswith("torch.nn.")
    return is_of_torch and setting(metric, "reduction") is not None
