"""Step, which computes the loss and the weight of a batch, and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.inputs.batches import count_samples
from ml4cube.training.inputs.options import Options

Weight = float | torch.Tensor


class StepResult(NamedTuple):
    """The result of one forward pass."""

    # The mean over the batch's samples: a scalar that requires grad in training.
    loss: torch.Tensor
    pred: Any = None
    target: Any = None
    # Further means over the batch's samples. Each adds columns to the History: ``train_<name>``
    # and ``val_<name>``.
    logs: Mapping[str, Any] = {}
    # NaN where the target has a gap that the loss does not leave out. It is read only to explain a
    # loss that is NaN.
    gaps: torch.Tensor | None = None
    # Those that the batch brings, for metrics.
    weights: torch.Tensor | None = None


class Portion(NamedTuple):
    """One of the batches of a step, and the weight of its mean loss."""

    # In the form that the loader gave it, on the device of the run.
    batch: Any
    samples: int
    # What `Step.weigh` returned, or else the number of samples.
    weight: Weight


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
