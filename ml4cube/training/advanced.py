"""AdvancedTrainer: train with `fit(train_loader, val_loader, epochs)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.display import Summarized, Summary, counted, one_line
from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.callbacks import EarlyStopping, ModelCheckpoint, reporters
from ml4cube.training.events import Callback, as_callbacks
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.inputs.options import Options, pick_precision
from ml4cube.training.measure.summary import run_facts, summary_of_run
from ml4cube.training.ranks.dist import join
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.loop import Loop
from ml4cube.training.run.steps import Supervised
from ml4cube.training.state import History, best_row, default_monitor

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint"]


class AdvancedTrainer(Summarized):
    """Train with the parts you choose, on all ranks of the process group there is.

    The model keeps the weights of the last epoch; those of the best are in the files of
    `checkpoint`. Arguments that are not listed are those of `ml4cube.training.pytorch.Trainer`,
    except ``epochs``, which `fit` takes.

    Parameters
    ----------
    model : torch.nn.Module
        The model; it is moved to the device and trained in place.
    optimizer : torch.optim.Optimizer
        Made from the model's parameters.
    criterion : callable
        The loss: ``criterion(pred, target)`` → scalar tensor.
    scheduler : object, optional
        Learning rate scheduler of torch or of `ml4cube.training.schedulers`.
    early_stopping : EarlyStopping, optional
        When to stop. Default: never.
    checkpoint : ModelCheckpoint, optional
        Which epochs to keep as files. Default: none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        scheduler: Any = None,
        use_amp: bool = False,
        gradient_accumulation_steps: int = 1,
        gradient_clip: float | None = None,
        early_stopping: EarlyStopping | None = None,
        checkpoint: ModelCheckpoint | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Any] = (),
        precision: str | None = None,
        device: str | torch.device | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        check_loss("criterion", criterion)
        if not isinstance(early_stopping, EarlyStopping | None):
            raise InvalidTypeError(
                f"early_stopping must be an EarlyStopping or None, got {early_stopping!r}"
            )
        if not isinstance(checkpoint, ModelCheckpoint | None):
            raise InvalidTypeError(
                f"checkpoint must be a ModelCheckpoint or None, got {checkpoint!r}"
            )
        self._world = join(device)
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self._callbacks = [
            *as_callbacks(early_stopping),
            *as_callbacks(checkpoint),
            *reporters(progress, loggers),
            *as_callbacks(callbacks),
        ]
        self._options = Options.choose(
            AdvancedTrainer,
            options,
            "fit(..., epochs)",
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip=gradient_clip,
            precision=pick_precision(use_amp, precision, self._world.device),
        )
        self._scheduler, self._metrics = scheduler, metrics
        self.history = History()

    def _summary(self) -> Summary:
        """Return how far the last run came, and what is trained with what."""
        history, options = self.history, self._options
        monitor = options.monitor or default_monitor(history)
        facts = {
            **run_facts(self.model, self._world, options, self.optimizer, self._scheduler),
            "Loss": one_line(self.criterion),
            "Metrics": list(self._metrics or ()),
        }
        epochs = history.to_dict().get("epoch", [0])[-1]
        best = best_row(history, monitor, options.mode)
        next_step = "fit(train_loader, val_loader, epochs)"
        return summary_of_run(counted(epochs, "epoch"), monitor, best, next_step, facts, history)

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        epochs: int = 10,
    ) -> History:
        """Train for a number of epochs; called again, it trains on, and counts from 1."""
        engine = self._make_engine(epochs, self.optimizer, self._scheduler)
        loop = Loop(
            engine, train_loader, val_loader, metrics=self._metrics, callbacks=self._callbacks
        )
        try:
            loop.run()
        finally:
            # Kept also if `run` failed. A resumed run has the rows of its snapshot as well.
            self.history = loop.history
        return self.history

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Validate once, exactly on any number of ranks; every rank must call this."""
        return Loop(self._make_engine(), metrics=self._metrics).evaluate(loader)

    def _make_engine(self, epochs: int = 1, *stepped: Any) -> Engine:
        # The model and the criterion are read anew, because users may replace them.
        step, options = Supervised(self.criterion), replace(self._options, epochs=epochs)
        return Engine(self.model, step, *stepped, world=self._world, options=options)
