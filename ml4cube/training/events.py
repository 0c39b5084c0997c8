"""Callbacks: objects whose methods the training loop calls at fixed moments.

A callback is called on every rank. It should write or show only where ``loop.world.is_main``. What
it learns over time belongs in `state_dict`, and so in snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.display import PrintedAsCall, one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.options import Options
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.strategy import Strategy
from ml4cube.training.state import History, TrainState

__all__ = ["Callback", "TrainingLoop", "is_better", "monitored"]


class TrainingLoop(Protocol):
    """The training loop, as far as callbacks may use it.

    Attributes
    ----------
    model : torch.nn.Module
        The model, without wrappers.
    optimizer : torch.optim.Optimizer
        The optimizer.
    scheduler : object or None
        The scheduler.
    scaler : torch.amp.GradScaler
        The scaler of gradients in fp16; disabled in other precisions.
    world : World
        The ranks, and which of them this is.
    strategy : Strategy
        The layout of the model over the ranks.
    options : Options
        The settings of the run.
    state : TrainState
        Epochs and steps so far.
    history : History
        The rows of the epochs so far.
    monitor : str
        The column of the History that judges the run.
    step_loss : torch.Tensor or None
        The loss of the last step's last batch; None before the first step.
    steps_done : int
        Optimizer steps of this epoch that are done.
    steps_per_epoch : int or None
        Optimizer steps of an epoch; None if the loader has no length.
    resumed : bool
        True if the run was resumed from a snapshot.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    world: World
    strategy: Strategy
    options: Options
    state: TrainState
    history: History
    monitor: str
    step_loss: torch.Tensor | None
    steps_done: int
    steps_per_epoch: int | None
    resumed: bool

    def outside(self) -> dict[str, torch.Tensor]:
        """Return what the optimizer trains besides the model, such as learned weights of a loss.

        Returns
        -------
        dict of str to Tensor
            Parameters by name, and the buffers of modules that have them.
        """

    def load_weights(
        self, weights: Mapping[str, Any] | None, outside: Mapping[str, Any] | None = None
    ) -> None:
        """Load weights that rank 0 holds into the model of all ranks; every rank.

        Parameters
        ----------
        weights : mapping or None
            A state dict; None on other ranks.
        outside : mapping, optional
            Values for the tensors of `outside`. Default: they stay as they are.
        """

    def save_snapshot(self) -> None:
        """Write the snapshot, if the run has one; every rank."""

    def stop(self, reason: str) -> None:
        """End training after the epoch, or the check inside it, under way; any rank may ask.

        Parameters
        ----------
        reason : str
            Shown in the log.
        """


class Callback(PrintedAsCall):
    """Base of all callbacks: empty methods, override those you need.

    Examples
    --------
    >>> class Shout(Callback):
    ...     def on_epoch_end(self, loop, row):
    ...         print(row["train_loss"])
    """

    writes = False  # True if it leaves files behind; such callbacks are left out of a fast_dev_run

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Run before the first step, after a snapshot was resumed.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        """

    def on_epoch_start(self, loop: TrainingLoop) -> None:
        """Run before the first step of an epoch.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        """

    def on_step_end(self, loop: TrainingLoop) -> None:
        """Run after every optimizer step.

        Parameters
        ----------
        loop : TrainingLoop
            The loop. ``loop.step_loss`` is the loss of the step's last batch, a tensor; reading it
            makes the device wait, so read it only now and then.
        """

    def on_row(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Run after validation, before the row is added to the History; add columns here.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        row : dict
            The epoch's row; added columns must be the same on every rank.
        """

    def on_validation_start(self, loop: TrainingLoop) -> None:
        """Run before a validation pass of training.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        """

    def on_validation_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Run after a validation pass of training.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        row : dict
            The row of the History with the pass's loss and metrics, the same on every rank.
        """

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Run when a run is judged: after every validation, or every epoch without one.

        Parameters
        ----------
        loop : TrainingLoop
            The loop; `loop.stop` ends it.
        row : dict
            The row of the History, the same on every rank.
        """

    def on_epoch_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Run after validation, before the snapshot.

        Parameters
        ----------
        loop : TrainingLoop
            The loop; `loop.stop` ends it after this epoch.
        row : dict
            The epoch's row of the History, the same on every rank.
        """

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Run once when training has ended without an error, after the last snapshot.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        """

    def on_close(self, loop: TrainingLoop) -> None:
        """Run last, also after an error, to close what was opened.

        Parameters
        ----------
        loop : TrainingLoop
            The loop.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and plain Python.

        Returns
        -------
        dict
            Empty by default.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Parameters
        ----------
        state : mapping
            From a snapshot.
        """

    def forget(self) -> None:
        """Forget the best value so far.

        Called after `load_state_dict` if the run continues with another loss, metric or validation
        data, so that new values of the callback's `monitor` cannot be compared with old ones.
        """


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def as_list(argument: Any) -> list[Any]:
    """Return the objects of an argument that takes one object, several or None."""
    if argument is None:
        return []
    is_one = isinstance(argument, str) or not isinstance(argument, Iterable)
    if is_one:
        return [argument]
    return list(argument)


def as_callbacks(argument: Any) -> list[Callback]:
    """Return the callbacks of a run, or refuse anything else."""
    callbacks = as_list(argument)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InvalidTypeError(
                f"callbacks must be objects of subclasses of Callback, got {one_line(callback)}"
            )
    return callbacks


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Return True if a value is better than the best so far.

    Parameters
    ----------
    value : float
        The new one; NaN never wins.
    best : float or None
        The best so far; anything but NaN beats None.
    mode : {"min", "max"}
        Which way is better.

    Returns
    -------
    bool
        True only if strictly better.

    Examples
    --------
    >>> is_better(0.5, 0.7, "min"), is_better(math.nan, None, "min")
    (True, False)
    """
    if math.isnan(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def monitored(row: Mapping[str, Any], monitor: str) -> float:
    """Return the value of the column that a callback monitors.

    Parameters
    ----------
    row : mapping
        The epoch's row of the History.
    monitor : str
        Name of a column.

    Returns
    -------
    float
        Its value.

    Raises
    ------
    InvalidValueError
        If there is no such column.
    """
    if isinstance(row.get(monitor), int | float):
        return float(row[monitor])
    numbers = [name for name, value in row.items() if isinstance(value, int | float)]
    raise InvalidValueError(f"monitor: unknown column {monitor!r}; the History has {numbers}")
