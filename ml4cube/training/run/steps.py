"""A `Step` computes the loss and the weight of a batch; the usual one is ``loss(model(X), y)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.inputs.batches import StepResult, as_pair, count_samples, weights_of
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.inputs.loss_functions import warn_if_unknown
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.outside_model import modules_in
from ml4cube.training.inputs.rollout import RolledOut, find_rollout
from ml4cube.training.measure.scores import BatchMean


class Step(ABC):
    """The step of a run, and what is called around each pass and each batch."""

    # True if the sample count of a batch may differ from its size in the loader.
    counts_itself = False
    # The epoch that is trained, counted from 1.
    epoch = 1

    @abstractmethod
    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""

    @property
    @abstractmethod
    def loss_parts(self) -> list[Any]:
        """The functions and objects that compute the loss."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules besides the model that the step may use, by name."""
        return {}

    def prepare(self, options: Options, data: Mapping[str, Any]) -> None:
        """Prepare for loaders, given by the argument that holds them."""
        if options.rollout is not None or options.rollout_gradient is not None:
            raise InvalidTypeError(
                "rollout and rollout_gradient need a step of the package; give loss= in place of a "
                "train_step of your own"
            )

    def weigh(self, batch: Any, training: bool) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        return None

    def count(self, batch: Any, training: bool) -> int:
        """Return the number of samples of a batch."""
        return count_samples(batch)

    def around_pass(self, run_pass: Callable[[Any], None], loader: Any, training: bool) -> None:
        """Run a pass over a loader; steps may call a user's code around it."""
        run_pass(loader)

    def around_batch(self, run_batch: Callable[[Any], None], batch: Any) -> None:
        """Train or evaluate on one batch; steps may call a user's code around it."""
        run_batch(batch)


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
