"""The step of supervised learning: ``loss(model(X), y)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ml4cube.training.inputs.batches import as_pair, weights_of
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.inputs.loss_functions import warn_if_unknown
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.outside_model import modules_in
from ml4cube.training.inputs.steps import Step, StepResult
from ml4cube.training.measure.scores import BatchMean
from ml4cube.training.run.rolled_out import RolledOut, find_rollout


class Supervised(Step):
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`.

    The loss of a batch ``(X, y, weights)`` is a `MaskedLoss`, made from `loss` if it is not one.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = check_loss("loss", loss)
        warn_if_unknown("loss", loss)
        self._mean = BatchMean("loss", loss)
        self._rolled_out: RolledOut | None = None  # if data have several steps of a forecast

    def prepare(self, options: Options, data: Mapping[str, Any]) -> None:
        """Prepare for loaders, given by the argument that holds them."""
        before = None
        if self._rolled_out is not None:
            before = self._rolled_out.rollout
        rollout = find_rollout(options, data, before)
        if rollout is not before and rollout is not None:
            self._rolled_out = RolledOut(rollout, options)

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""
        features, target = as_pair(batch)
        weights = weights_of(batch)
        if self._rolled_out is None:
            pred = module(features)
        else:
            steps = self._rolled_out.steps(features, self.epoch, training=torch.is_grad_enabled())
            pred = self._rolled_out.predict(module, features, target, steps)
            target, weights = self._rolled_out.scored(target, weights, steps)
        loss, gaps = self._mean(pred, target, features.shape[0], weights), None
        leaves_gaps_out = weights is not None or self._mean.leaves_gaps_out(target)
        if target.is_floating_point() and not leaves_gaps_out:
            # NaN if any value is. It stays on the device, so that this does not wait for it.
            gaps = target.sum()
        return StepResult(loss, pred, target, gaps=gaps, weights=weights)

    @property
    def loss_parts(self) -> list[Any]:
        """The loss function."""
        return [self.loss]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The loss function, or modules that are its attributes."""
        return modules_in("loss", self.loss)

    def weigh(self, batch: Any, training: bool = True) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        weights = weights_of(batch)
        if weights is None and not self._mean.has_weights:
            return None
        features, target = as_pair(batch)
        if self._rolled_out is not None:
            steps = self._rolled_out.steps(features, self.epoch, training=training)
            target, weights = self._rolled_out.scored(target, weights, steps)
        return self._mean.weigh(target, weights)
