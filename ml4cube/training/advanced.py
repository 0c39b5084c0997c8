"""AdvancedTrainer: fit(train_loader, val_loader, epochs) → history, over the one `Loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.callbacks import (
    Callback,
    EarlyStopping,
    LoggerCallback,
    ModelCheckpoint,
    Progress,
)
from ml4cube.training.events import as_callbacks
from ml4cube.training.pytorch import pick_precision
from ml4cube.training.ranks.dist import World, ddp_init
from ml4cube.training.run.checks import check_loss
from ml4cube.training.run.loop import Loop, Supervised
from ml4cube.training.run.options import Options, refuse_unknown
from ml4cube.training.state import History

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint"]


class AdvancedTrainer:
    """Train with the parts you choose, on all ranks of the process group there is.

    The model keeps the weights of the last epoch; those of the best are in the files of
    `checkpoint`.

    Parameters
    ----------
    model : torch.nn.Module
        The model, trained in place.
    optimizer : torch.optim.Optimizer
        Made from the model's parameters.
    criterion : callable
        ``criterion(pred, target)`` → scalar tensor.
    scheduler : object, optional
        Learning rate scheduler of torch.
    use_amp : bool
        Whether to compute in half precision: fp16 on a GPU, bf16 elsewhere.
    gradient_accumulation_steps : int
        Batches per optimizer step, weighted by their samples.
    gradient_clip : float, optional
        Largest norm of the gradients.
    early_stopping : EarlyStopping, optional
        When to stop.
    checkpoint : ModelCheckpoint, optional
        What to keep on file.
    metrics : mapping, optional
        ``{name: metric}``, as for `ml4cube.training.pytorch.Trainer`.
    callbacks : Callback or iterable of Callback
        Called after those two.
    loggers : object or iterable of object
        Each with ``log(values, step)``.
    precision : {"fp32", "bf16", "fp16"}, optional
        The precision by name.
    scheduler_step_on_batch : bool
        Whether the scheduler moves on after every optimizer step, not every epoch.
    max_steps : int, optional
        Optimizer steps to take at most.
    snapshot_path : str or Path, optional
        File to save the full state of the run to, and to resume from.
    save_every : int
        Epochs between snapshots.
    seed : int, optional
        Seeds dropout and unseeded loaders for the time of training.
    device : str or torch.device, optional
        Default: the GPU of this rank, else the CPU.
    progress : bool
        Whether to show a bar and write a line to stderr for every epoch, on rank 0.
    **options : Any
        Further settings, as for `ml4cube.training.pytorch.Trainer`: ``max_time``,
        ``limit_train_batches``, ``limit_val_batches``, ``fast_dev_run``, ``ema``, ``compile``,
        ``log_grad_norm``, ``find_unused_parameters``, ``strategy``, ``shard_modules``, ``monitor``,
        ``mode``, ``validate_every``, ``validate_every_steps``.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> trainer = AdvancedTrainer(model, optimizer, nn.MSELoss(), gradient_accumulation_steps=2)
    >>> history = trainer.fit(loader, loader, epochs=2)
    >>> len(history["val_loss"])
    2
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
        scheduler_step_on_batch: bool = False,
        max_steps: int | None = None,
        snapshot_path: str | Path | None = None,
        save_every: int = 10,
        seed: int | None = None,
        device: str | torch.device | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        check_loss("criterion", criterion)
        for name, part, kind in (
            ("early_stopping", early_stopping, EarlyStopping),
            ("checkpoint", checkpoint, ModelCheckpoint),
        ):
            if part is not None and not isinstance(part, kind):
                raise InvalidTypeError(f"{name}={part!r} is no {kind.__name__}; give one, or None")
        ddp_init()
        self._world = World.current(device)
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self._callbacks: list[Callback] = [
            *(part for part in (early_stopping, checkpoint) if part is not None),
            *([Progress()] if progress else []),
            LoggerCallback(loggers),
            *as_callbacks(callbacks),
        ]
        self._options: dict[str, Any] = {
            "max_steps": max_steps,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clip": gradient_clip,
            "precision": pick_precision(use_amp, precision, self._world.device),
            "scheduler_step_on_batch": scheduler_step_on_batch,
            "seed": seed,
            "snapshot_path": snapshot_path,
            "save_every": save_every,
            **options,
        }
        refuse_unknown(AdvancedTrainer, options, "fit(..., epochs)")
        Options(**self._options)  # refuses here, not in fit
        self._scheduler, self._metrics = scheduler, metrics
        self.history = History()

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        epochs: int = 10,
    ) -> History:
        """Train for a number of epochs; called again, it trains on, and counts from 1.

        Parameters
        ----------
        train_loader : iterable
            Loader of training batches.
        val_loader : iterable, or mapping of str to iterable, optional
            Loader of validation batches, or several by name; without one, ``val_loss`` cannot be
            monitored.
        epochs : int
            How many to train at most; with `snapshot_path`, which a second call goes on from as
            well, in all calls together.

        Returns
        -------
        History
            What every epoch gave; also in `history`.

        Raises
        ------
        InvalidValueError
            If the optimizer is left from a run with ``strategy="fsdp"``.
        RunError
            If a loss is not finite, another rank failed, or SIGTERM came.
        """
        loop = self._make_loop(
            self.optimizer,
            train_loader,
            val_loader,
            options=Options(epochs=epochs, **self._options),
            scheduler=self._scheduler,
            callbacks=self._callbacks,
        )
        self.history = loop.history
        try:
            loop.run()
        finally:
            self.history = loop.history  # a resumed one replaces the empty one
        return self.history

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Validate once, exactly on any number of ranks; every rank must call this.

        Parameters
        ----------
        loader : iterable, or mapping of str to iterable
            Batches, or several sets by name.

        Returns
        -------
        dict of str to float
            ``val_loss`` and the metrics.

        Raises
        ------
        EmptyPartError
            If it gives no sample.
        """
        options = {k: v for k, v in self._options.items() if k != "limit_train_batches"}
        return self._make_loop(options=Options(**options)).evaluate(loader)

    def _make_loop(self, *parts: Any, **more: Any) -> Loop:
        step = Supervised(self.criterion)
        return Loop(self.model, step, *parts, world=self._world, metrics=self._metrics, **more)
