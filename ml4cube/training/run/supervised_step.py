"""The step of supervised learning: ``loss(model(X), y)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ml4cube.training.inputs.batches import as_pair, weights_of
from ml4cube.training.inputs.loss_functions import warn_if_unknown
from ml4cube.training.inputs.steps import Step, StepResult
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.measure.means import BatchMean


class Supervised(Step):
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`.

    The loss of a batch ``(X, y, weights)`` is a `MaskedLoss`, made from `loss` if it is not one.
    """

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss
        warn_if_unknown("loss", loss)
        self._mean = BatchMean("loss", loss)

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""
        features, target = as_pair(batch)
        pred, weights = module(features), weights_of(batch)
        loss, gaps = self._mean(pred, target, len(features), weights), None
        leaves_gaps_out = weights is not None or isinstance(self.loss, MaskedLoss)
        if target.is_floating_point() and not leaves_gaps_out:
            # NaN if any value is. It stays on the device, so that this does not wait for it.
            gaps = target.sum()
        return StepResult(loss, pred, target, gaps=gaps, weights=weights)

    @property
    def loss_parts(self) -> list[Any]:
        """The loss function."""
        return [self.loss]

    def weigh(self, batch: Any, training: bool = True) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        return self._mean.weigh(as_pair(batch)[1], weights_of(batch))
