"""What a step is: a model and a batch give a loss, and the batch has a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ml4cube.training.losses import MaskedLoss
from ml4cube.training.measure.means import Mean, warn_if_unknown
from ml4cube.training.run.batches import as_pair, weights_of


class StepResult(NamedTuple):
    """What one forward pass gives the loop."""

    # Scalar, the mean over the batch's samples, with its graph.
    loss: torch.Tensor
    pred: Any = None
    target: Any = None
    # Further means over the batch's samples; each becomes columns of the History, ``train_<name>``
    # and ``val_<name>``.
    logs: Mapping[str, Any] = {}
    # NaN where the target has a gap that the loss does not leave out, to say so if the loss is NaN;
    # never read otherwise.
    gaps: torch.Tensor | None = None


Step = Callable[[nn.Module, Any], StepResult]
Weigh = Callable[[Any, bool], torch.Tensor | None]
Count = Callable[[Any, bool], int]


class Supervised:
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`."""

    # A batch ``(X, y, weights)`` goes through `MaskedLoss`, which is made of the loss where it is
    # none.

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss
        warn_if_unknown("loss", loss)
        self._mean = Mean("loss", loss)
        self._masked = loss if isinstance(loss, MaskedLoss) else None

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""
        features, target = as_pair(batch)
        pred = module(features)
        weights = weights_of(batch)
        if weights is not None:
            return StepResult(self._weighted()(pred, target, weights), pred, target)
        gaps = None
        if target.is_floating_point() and not isinstance(self.loss, MaskedLoss):
            gaps = target.detach().sum()  # one number, left on the device
        return StepResult(self._mean(pred, target, len(features)), pred, target, gaps=gaps)

    def weigh(self, batch: Any, training: bool = True) -> torch.Tensor | None:
        """Say what a batch's loss counts beside those of others."""
        target, weights = as_pair(batch)[1], weights_of(batch)
        if weights is None:
            return self._mean.weigh(target)
        return self._weighted().weigh(target, weights)

    def _weighted(self) -> MaskedLoss:
        if self._masked is None:
            self._masked = MaskedLoss(self.loss)
        return self._masked
