"""AdvancedTrainer: fit(train_loader, val_loader, epochs) → history, over the one `Loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.callbacks import EarlyStopping, ModelCheckpoint, reporting
from ml4cube.training.events import Callback, as_callbacks
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.inputs.options import Options, pick_precision
from ml4cube.training.ranks.dist import World, ddp_init
from ml4cube.training.run.loop import Loop
from ml4cube.training.run.supervised_step import Supervised
from ml4cube.training.state import History

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint"]


class AdvancedTrainer:
    """Train with the parts you choose, on all ranks of the process group there is."""

    # The model keeps the weights of the last epoch; those of the best are in the files of
    # `checkpoint`.

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
        arguments = dict(locals())
        check_loss("criterion", criterion)
        for name, part, kind in (
            ("early_stopping", early_stopping, EarlyStopping),
            ("checkpoint", checkpoint, ModelCheckpoint),
        ):
            if part is not None and not isinstance(part, kind):
                raise InvalidTypeError(f"{name} must be an {kind.__name__} or None, got {part!r}")
        ddp_init()
        self._world = World.current(device)
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self._callbacks: list[Callback] = [
            *(part for part in (early_stopping, checkpoint) if part is not None),
            *reporting(progress, loggers),
            *as_callbacks(callbacks),
        ]
        self._options = Options.choose(
            AdvancedTrainer,
            arguments,
            "fit(..., epochs)",
            precision=pick_precision(use_amp, precision, self._world.device),
        )
        self._scheduler, self._metrics = scheduler, metrics
        self.history = History()

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        epochs: int = 10,
    ) -> History:
        """Train for a number of epochs; called again, it trains on, and counts from 1."""
        loop = self._make_loop(
            self.optimizer,
            train_loader,
            val_loader,
            options=replace(self._options, epochs=epochs),
            scheduler=self._scheduler,
            callbacks=self._callbacks,
        )
        try:
            loop.run()
        finally:
            self.history = loop.history  # a resumed one replaces the empty one
        return self.history

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Validate once, exactly on any number of ranks; every rank must call this."""
        options = replace(self._options, limit_train_batches=None)
        return self._make_loop(options=options).evaluate(loader)

    def _make_loop(self, *parts: Any, **more: Any) -> Loop:
        step = Supervised(self.criterion)
        return Loop(self.model, step, *parts, world=self._world, metrics=self._metrics, **more)
