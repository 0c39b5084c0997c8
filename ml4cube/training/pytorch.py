"""Train a model on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.display import Summarized, Summary, counted, one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError
from ml4cube.training.callbacks import (
    BestModel,
    Callback,
    EarlyStopping,
    LossPlot,
    RankReport,
    as_callbacks,
    explain_interrupt,
    reporters,
)
from ml4cube.training.files.paths import absolute_path
from ml4cube.training.inputs.options import Options, pick_precision
from ml4cube.training.measure.summary import data_text, run_facts, summary_of_run
from ml4cube.training.ranks.dist import World
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.loop import Loop, default_column
from ml4cube.training.run.steps import Supervised
from ml4cube.training.state import History

PathLike = str | Path


class Trainer(Summarized):
    """Train on one device, keep the best model, stop when nothing improves any more.

    A batch ``(X, y)`` trains the model to give y; X alone, or a dict of tensors, trains it to
    give back X. Losses and metrics are means over samples, or with `MaskedLoss`, or batches
    ``(X, y, weights)``, weighted means over the cells that have a value.

    Parameters
    ----------
    model : torch.nn.Module
        The model; it is moved to the device and trained in place.
    train_data : iterable
        Loader of training batches; its ``set_epoch`` is called where it has one.
    test_data : iterable, mapping of str to iterable, or None
        Loader of validation batches, or several by name, such as ``{"north": ..., "south": ...}``:
        each then has columns ``val_loss/north`` and ``<metric>/north`` of its own, and
        ``val_loss`` is that of all their samples together. None: nothing is validated and the
        training loss decides.
    optimizer : torch.optim.Optimizer
        Made from the model's parameters.
    save_every : int
        Epochs between snapshots.
    best_model_path : str or Path, optional
        File for the weights of the best epoch: a plain state dict.
    snapshot_path : str or Path, optional
        File with the full state of the run, written every `save_every` epochs, at the end, and
        on SIGTERM (then training stops) and SIGUSR1 (then it continues). A run that finds it goes
        on from it.
    early_stopping : bool or EarlyStopping
        Whether to stop when the validation loss no longer improves, or when and by what.
    patience : int
        Checks (epochs) without improvement after which to stop.
    loss : callable
        ``loss(pred, target)`` → scalar tensor; required.
    metrics : mapping of str to callable or object, optional
        Functions ``metric(pred, target)``, averaged over samples, or objects with ``update`` and
        ``compute`` such as those of torchmetrics, which reduce themselves.
    epochs : int
        How many to train at most.
    validate_parallelism : bool
        Whether to show, each epoch, a table of what every rank did; the History has it anyway.
    create_loss_plot : bool
        Whether to draw the losses into ``<best model>_loss.png`` next to the best model.
    model_path : str or Path, optional
        The same as `best_model_path`.
    gradient_accumulation_steps : int
        Batches per optimizer step, weighted by their samples.
    gradient_clip : float, optional
        Largest norm of the gradients.
    use_amp : bool
        Whether to compute in half precision: bf16, or fp16 on a GPU without it.
    precision : {"fp32", "bf16", "fp16"}, optional
        The precision by name; default fp32.
    scheduler : object, optional
        Learning rate scheduler of torch.
    scheduler_step_on_batch : bool
        Whether it moves on after every optimizer step, not every epoch.
    max_steps : int, optional
        Optimizer steps to take at most.
    callbacks : Callback or iterable of Callback
        Called after the built-in ones.
    loggers : object or iterable of object
        Each with ``log(values, step)``; given every epoch's numbers.
    seed : int, optional
        Seeds dropout and loaders without a seed of their own, for the time of training.
    device : str or torch.device, optional
        Default: the GPU, else the CPU.
    find_unused_parameters : bool
        Whether some parameters may get no gradient in a step (matters on several ranks).
    max_time : float, str or timedelta, optional
        Time after which to end, counted from the call of `train`: seconds, ``"HH:MM:SS"`` or
        ``"DD:HH:MM:SS"``. With `snapshot_path`, the epoch under way is left to be resumed;
        without, it is cut short there and validated.
    limit_train_batches, limit_val_batches : int or float, optional
        Batches of each loader to use at most, on each rank: a count, or a share between 0 and 1.0.
    fast_dev_run : bool or int
        Try everything once and write nothing: one epoch of that many batches (True: one) in
        training and in each validation set; no snapshot, no best model, no plot, no loggers, no
        callback that writes.
    ema : float, optional
        Decay of a moving average of the weights, e.g. 0.999. It is the averaged weights that are
        validated, saved as the best and returned.
    compile : bool, str or mapping
        Whether to run the model through `torch.compile`; the name of a backend, or a dict of its
        arguments. Files have the names of the model that was given.
    log_grad_norm : bool
        Whether the History gets ``grad_norm`` and ``grad_norm_max``: mean and largest norm of the
        gradients, before clipping, over the steps of an epoch.
    strategy : {"ddp", "fsdp"}
        How the model lies on several ranks: whole on each; or cut into shares, for models that
        outgrow one GPU. The trained model is given back whole, in main memory.
    shard_modules : int, type or sequence of type, optional
        With "fsdp", which modules are fetched on their own: those of these classes, or members
        of ``nn.Sequential`` and the like with so many parameters; default 1,000,000.
    monitor : str, optional
        Column of the History that chooses the best epoch and stops early: ``train_loss``,
        ``val_loss`` or a metric. Default: ``val_loss``, or ``train_loss`` without `test_data`.
    mode : {"min", "max"}
        Which way `monitor` is better.
    validate_every : int
        Epochs between validations; the last epoch is always validated.
    validate_every_steps : int, optional
        Optimizer steps between validations. Each adds a row to the History, with a column
        ``step``; the end of an epoch is then validated only if it is the last.
    rollout : int or mapping of int to int, optional
        Steps of a forecast to train: the output of the model becomes its next input, and the loss
        is that of all steps together. Or these steps by the epoch, counted from 1, from which
        they are trained: ``{1: 1, 5: 2, 10: 4}``. At most, and by default, the `rollout` of the
        `PTXrDataset` in `train_data`. Validation predicts all steps that its data have.
    rollout_gradient : int, optional
        Last steps of a `rollout` through which gradients are computed, which takes their memory;
        those before count in the loss, but not in its gradient. Default: all.
    version : str or int, optional
        Version of the loss and the metrics, to be changed with what they compute: a run that is
        resumed then chooses its best epoch anew. Snapshots know them by their names only.
    progress : bool
        Whether to show a bar and write a line to stderr for every epoch, on rank 0.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work; nothing has been started or written then.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), epochs=3)
    >>> trained = trainer.train()
    >>> len(trainer.history["val_loss"])
    3
    """

    _first_call = "train()"  # as the summary names it

    def __init__(
        self,
        model: nn.Module,
        train_data: Iterable[Any],
        test_data: Iterable[Any] | Mapping[str, Iterable[Any]] | None,
        optimizer: Optimizer,
        save_every: int = 10,
        best_model_path: PathLike | None = None,
        snapshot_path: PathLike | None = None,
        early_stopping: bool | EarlyStopping = True,
        patience: int = 10,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        metrics: Mapping[str, Any] | None = None,
        epochs: int = 10,
        validate_parallelism: bool = False,
        create_loss_plot: bool = False,
        *,
        model_path: PathLike | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip: float | None = None,
        use_amp: bool = False,
        precision: str | None = None,
        scheduler: Any = None,
        scheduler_step_on_batch: bool = False,
        max_steps: int | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Any] = (),
        seed: int | None = None,
        device: str | torch.device | None = None,
        find_unused_parameters: bool = False,
        max_time: float | str | timedelta | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        fast_dev_run: bool | int = False,
        ema: float | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        log_grad_norm: bool = False,
        strategy: str = "ddp",
        shard_modules: Any = None,
        monitor: str | None = None,
        mode: str = "min",
        validate_every: int = 1,
        validate_every_steps: int | None = None,
        rollout: int | Mapping[int, int] | None = None,
        rollout_gradient: int | None = None,
        version: str | int | None = None,
        progress: bool = True,
    ) -> None:
        if train_data is None:
            raise InvalidTypeError("train_data must be a loader, got None")
        if optimizer is None:
            raise InvalidTypeError("optimizer must be made from model.parameters(), got None")
        if not isinstance(early_stopping, bool | EarlyStopping):
            raise InvalidTypeError(
                f"early_stopping must be True, False or an EarlyStopping, got {early_stopping!r}"
            )
        step = Supervised(loss)
        best_path = _pick_best_path(best_model_path, model_path, snapshot_path)
        if create_loss_plot and best_path is None:
            raise InvalidTypeError(
                "create_loss_plot=True saves the plot next to the best model; give best_model_path "
                "too"
            )
        world = self._make_world(device)
        options = Options(
            epochs=epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip=gradient_clip,
            precision=pick_precision(use_amp, precision, world.device),
            scheduler_step_on_batch=scheduler_step_on_batch,
            seed=seed,
            snapshot_path=snapshot_path,
            save_every=save_every,
            find_unused_parameters=find_unused_parameters,
            max_time=max_time,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            fast_dev_run=fast_dev_run,
            ema=ema,
            compile=compile,
            log_grad_norm=log_grad_norm,
            strategy=strategy,
            shard_modules=shard_modules,
            monitor=monitor,
            mode=mode,
            validate_every=validate_every,
            validate_every_steps=validate_every_steps,
            rollout=rollout,
            rollout_gradient=rollout_gradient,
            version=version,
        )
        column = monitor or default_column(test_data)
        self._best = BestModel(best_path, mode, column)
        built_in: list[Callback] = [self._best, *reporters(progress, loggers)]
        default_stopping = EarlyStopping(patience, mode, column)
        if isinstance(early_stopping, EarlyStopping):
            built_in.append(early_stopping)
        elif early_stopping:
            built_in.append(default_stopping)
        if validate_parallelism:
            built_in.append(RankReport())
        if create_loss_plot and best_path is not None:
            built_in.append(LossPlot(best_path.with_name(f"{best_path.stem}_loss.png")))
        self._loop = Loop(
            Engine(model, step, optimizer, scheduler, world=world, options=options),
            train_data,
            test_data,
            metrics=metrics,
            callbacks=[*built_in, *as_callbacks(callbacks)],
        )
        self.model = model

    def _summary(self) -> Summary:
        """Return how far the run is, the next call, and what is trained on what."""
        loop = self._loop
        next_step = self._first_call
        if loop.is_finished:
            next_step = "predict_cube(trainer.model, ...), evaluate(loader)"
        elif loop.state.step:
            next_step = "train() goes on"
        facts = {
            **run_facts(loop.model, loop.world, loop.options, loop.optimizer, loop.scheduler),
            "Loss": one_line(loop.step.loss_parts[0]),
            "Metrics": list(loop.validation.metrics),
            "Training": data_text(loop.feed.loader),
            "Validation": data_text(loop.validation.loader),
            "Best model": self._best.path,
            "Stopped": loop.run_state.stop_reason,
        }
        progress = f"{loop.state.epoch} of {counted(loop.options.epochs, 'epoch')}"
        return summary_of_run(
            progress, self._best.monitor, self._best.found, next_step, facts, self.history
        )

    @property
    def history(self) -> History:
        """Losses, metrics and timings of every epoch."""
        return self._loop.history

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 1, whose weights are kept; None before the first has ended."""
        return self._best.epoch

    @property
    def best_loss(self) -> float | None:
        """The value of `monitor` in the best epoch."""
        return self._best.value

    def train(self) -> nn.Module:
        """Train to the end, or go on from the snapshot.

        Called again without a snapshot, it trains on from the weights that are there, those of
        the best epoch, and an average (`ema`) is restarted; optimizer and scheduler go on as the
        last step left them. `epochs` counts those of all calls.

        Returns
        -------
        torch.nn.Module
            The model, in eval mode, with the weights of the best epoch, which are also those in
            the file at `best_model_path`.

        Raises
        ------
        RunError
            If a loss is not finite, or another rank failed, or SIGTERM came.
        StoreError
            If the snapshot is damaged.
        InvalidValueError
            If the snapshot is of another model.
        EmptyPartError
            If a loader gives no sample.
        """
        try:
            return self._loop.run()
        except KeyboardInterrupt as interrupt:
            explain_interrupt(interrupt, self.best_epoch)
            raise

    def apply_weights(self) -> nn.Module:
        """Put the weights of the best epoch so far into the model; every rank.

        `train` does so at its end; call this after a run that was interrupted, as by Ctrl-C, which
        leaves the model as after the last step. A later `train` continues from these weights, but
        with `snapshot_path` from the snapshot.

        Returns
        -------
        torch.nn.Module
            The model, in eval mode.

        Raises
        ------
        RunError
            If no epoch was finished yet, so that none is the best.
        """
        if self.best_epoch is None:
            raise RunError("no epoch was finished yet, so none is the best; call train() first")
        self._loop.load_weights(self._best.weights, self._best.outside)
        return self._loop.strategy.unshard(self._loop.model).eval()

    def evaluate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, float]:
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
        return self._loop.evaluate(loader)

    def _make_world(self, device: str | torch.device | None) -> World:
        """Return the ranks that train: here, this process alone."""
        return World.single(device)


def _pick_best_path(
    best_model_path: PathLike | None, model_path: PathLike | None, snapshot_path: PathLike | None
) -> Path | None:
    """Return the path of the best model, which has two names, or refuse the paths of a run."""
    paths = {
        "best_model_path": best_model_path,
        "model_path": model_path,
        "snapshot_path": snapshot_path,
    }
    absolute = {n: absolute_path(n, path) for n, path in paths.items() if path is not None}
    for name, path in absolute.items():
        if path.is_dir():
            raise InvalidValueError(f"{name}={str(path)!r} is a folder; give the path of a file")
    snapshot = absolute.pop("snapshot_path", None)
    best_paths = set(absolute.values())
    if len(best_paths) > 1:
        raise InvalidTypeError(
            f"best_model_path={str(best_model_path)!r} and model_path={str(model_path)!r} are the "
            "same argument and differ; give one of them"
        )
    if snapshot in best_paths:
        raise InvalidValueError(
            f"best_model_path and snapshot_path are both {str(snapshot_path)!r}; give two files"
        )
    return next(iter(best_paths), None)
