"""What a step is: a model and a batch give a loss, and the batch has a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ml4cube.core.errors import InvalidValueError
from ml4cube.training.batches import as_pair, count_samples
from ml4cube.training.options import DTYPES


class StepResult(NamedTuple):
    """What one forward pass gives the loop.

    Parameters
    ----------
    loss : torch.Tensor
        Scalar, the mean over the batch's samples, with its graph.
    pred : Any, optional
        For metrics.
    target : Any, optional
        For metrics.
    logs : mapping of str to scalar
        Further means over the batch's samples; each becomes columns of the History,
        ``train_<name>`` and ``val_<name>``.
    """

    loss: torch.Tensor
    pred: Any = None
    target: Any = None
    logs: Mapping[str, Any] = {}


Step = Callable[[nn.Module, Any], StepResult]
Weigh = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Supervised:
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`.

    Parameters
    ----------
    loss : callable
        ``loss(pred, target)`` → scalar tensor.
    """

    loss: Callable[..., torch.Tensor]

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch.

        Parameters
        ----------
        module : torch.nn.Module
            The model, wrapped for several ranks where there are some.
        batch : Any
            On the device already.

        Returns
        -------
        StepResult
            Loss, prediction and target.
        """
        features, target = as_pair(batch)
        pred = module(features)
        loss = self.loss(pred, target)
        if getattr(self.loss, "reduction", "mean") == "sum":
            loss = loss / count_samples(batch)
        return StepResult(loss, pred, target)


class Forward:
    """A step in a precision, whose loss is looked at before it is used.

    Parameters
    ----------
    step : callable
        ``step(module, batch)`` → `StepResult`.
    precision : {"fp32", "bf16", "fp16"}
        What to compute in.
    device : torch.device
        Where.
    """

    def __init__(self, step: Step, precision: str, device: torch.device) -> None:
        self._step = step
        dtype = DTYPES[precision]
        self._autocast = None if dtype is None else (device.type, dtype)

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run a step forward.

        Parameters
        ----------
        module : torch.nn.Module
            The model.
        batch : Any
            On the device already.

        Returns
        -------
        StepResult
            With a loss that is one number.

        Raises
        ------
        InvalidValueError
            If the loss has a shape.
        """
        cast = self._autocast
        with nullcontext() if cast is None else torch.autocast(cast[0], dtype=cast[1]):
            result = self._step(module, batch)
        if result.loss.ndim:
            raise InvalidValueError(
                f"loss has shape {tuple(result.loss.shape)}, one number per batch is needed; "
                "use reduction='mean'"
            )
        return result
