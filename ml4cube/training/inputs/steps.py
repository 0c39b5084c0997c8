"""A step: a model and a batch give a loss, and the batch has a weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ml4cube.training.inputs.batches import count_samples

Weight = float | torch.Tensor


class StepResult(NamedTuple):
    """The result of one forward pass."""

    # Scalar, the mean over the batch's samples, with its graph.
    loss: torch.Tensor
    pred: Any = None
    target: Any = None
    # Further means over the batch's samples. Each adds columns to the History: ``train_<name>``
    # and ``val_<name>``.
    logs: Mapping[str, Any] = {}
    # NaN where the target has a gap that the loss does not leave out. It is read only to explain a
    # loss that is NaN.
    gaps: torch.Tensor | None = None


class Portion(NamedTuple):
    """One batch on the device, and its weight."""

    # As the loader gave it.
    batch: Any
    samples: int
    # The weight of its mean loss: the number of samples, or what `Step.weigh` returned.
    weight: Weight


class Step(ABC):
    """The step of a run, and what is called around each pass and each batch."""

    # True if the sizes of the loader do not tell how many samples a batch has.
    counts_itself = False

    @abstractmethod
    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch."""

    @property
    @abstractmethod
    def loss_parts(self) -> list[Any]:
        """The functions and objects that compute the loss."""

    def weigh(self, batch: Any, training: bool) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        return None

    def count(self, batch: Any, training: bool) -> int:
        """Return the number of samples of a batch."""
        return count_samples(batch)

    def around_pass(self, work: Callable[[Any], None], loader: Any, training: bool) -> None:
        """Do a pass over a loader."""
        work(loader)

    def around_batch(self, work: Callable[[Any], None], batch: Any) -> None:
        """Do the work of one batch."""
        work(batch)
