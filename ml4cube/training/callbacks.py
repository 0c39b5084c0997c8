"""Callbacks that stop training and save the best models.

The base class, of `events`, and the callbacks that show a run, of `reports`, can be imported from
here too.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ml4cube.core.errors import InvalidValueError, RunError, check_choice
from ml4cube.training.events import (
    Callback,
    TrainingLoop,
    as_callbacks,
    as_list,
    is_better,
    monitored,
)
from ml4cube.training.files.checkpoint import read_entry, refuse_foreign, write_bytes, write_file
from ml4cube.training.files.paths import absolute_path, check_writable
from ml4cube.training.inputs.checks import above_zero, check_count
from ml4cube.training.inputs.outside_model import state_of
from ml4cube.training.reports import LoggerCallback, LossPlot, Progress, RankReport
from ml4cube.training.state import copy_weights

__all__ = [
    "BestModel",
    "Callback",
    "EarlyStopping",
    "LoggerCallback",
    "LossPlot",
    "ModelCheckpoint",
    "Progress",
    "RankReport",
    "as_callbacks",
    "is_better",
    "monitored",
]

logger = logging.getLogger(__name__)


class _MonitorCallback(Callback):
    """A callback that compares epochs by a column of the History."""

    # The attributes that are saved in snapshots, with their values before the first epoch.
    _initial_state: ClassVar[Mapping[str, Any]]

    def __init__(self, mode: str, monitor: str) -> None:
        check_choice("mode", mode, ["min", "max"])
        self.mode, self.monitor = mode, monitor
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that earlier epochs have set."""
        return {name: getattr(self, name) for name in self._initial_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes; other entries, which subclasses may add, are left to these."""
        vars(self).update({name: state[name] for name in self._initial_state if name in state})

    def forget(self) -> None:
        """Reset the attributes to their values before the first epoch."""
        vars(self).update(self._initial_state)


class EarlyStopping(_MonitorCallback):
    """Stop when a value has not improved for a number of checks.

    The count is reset in every call that trains, unless it resumes from a snapshot.

    Parameters
    ----------
    patience : int
        Checks (validations, or epochs without one) without improvement after which training stops.
    mode : {"min", "max"}
        Which way is better.
    monitor : str
        Column of the History.
    min_delta : float
        Improvements of no more than this do not count.

    Raises
    ------
    InvalidValueError
        If `patience` is below 1, `min_delta` negative or `mode` unknown.

    Examples
    --------
    >>> EarlyStopping(patience=3).strikes
    0
    """

    best: float | None
    strikes: int
    _initial_state: ClassVar = {"best": None, "strikes": 0}

    def __init__(
        self,
        patience: int = 10,
        mode: str = "min",
        monitor: str = "val_loss",
        min_delta: float = 0.0,
    ) -> None:
        check_count("patience", patience)
        if min_delta != 0 and not above_zero(min_delta):
            raise InvalidValueError(f"min_delta must be a number of 0 or more, got {min_delta!r}")
        self.patience, self.min_delta = patience, min_delta
        super().__init__(mode, monitor)

    @property
    def exhausted(self) -> bool:
        """True if patience is used up."""
        return self.strikes >= self.patience

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Stop a resumed run that was stopped before; reset the count in any other run."""
        if not loop.resumed:
            self.forget()
        self._stop_if_exhausted(loop)

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Count a check without improvement, or reset the count."""
        value = monitored(row, self.monitor)
        margin = self.min_delta
        if self.mode == "min":
            margin = -self.min_delta
        to_beat = None
        if self.best is not None:
            to_beat = self.best + margin
        if is_better(value, to_beat, self.mode):
            self.best, self.strikes = value, 0
        else:
            self.strikes += 1
        self._stop_if_exhausted(loop)

    def _stop_if_exhausted(self, loop: TrainingLoop) -> None:
        if self.exhausted:
            loop.stop(f"{self.monitor} has not improved for {self.strikes} checks")


class BestModel(_MonitorCallback):
    """Keep the weights of the best epoch, on file too, and give them back at the end.

    Parameters
    ----------
    path : str or Path, optional
        File for the weights: a plain state dict without prefixes. None keeps them in memory.
    mode : {"min", "max"}
        Which way is better.
    monitor : str
        Column of the History.

    Examples
    --------
    >>> BestModel("best.pth").value is None
    True
    """

    value: float | None
    epoch: int | None
    weights: dict[str, torch.Tensor] | None  # held by rank 0
    outside: dict[str, torch.Tensor] | None  # what else was trained, held by rank 0
    _initial_state: ClassVar = {"value": None, "epoch": None, "weights": None, "outside": None}

    def __init__(
        self, path: str | Path | None = None, mode: str = "min", monitor: str = "val_loss"
    ) -> None:
        super().__init__(mode, monitor)
        self.path = None
        if path is not None:
            self.path = absolute_path("path", path)
        self._has_checked = False  # True after a check in this process; not part of snapshots

    @property
    def found(self) -> tuple[int, float] | None:
        """The best epoch and its value; None before the first check."""
        if self.epoch is None or self.value is None:
            return None
        return (self.epoch, self.value)

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Try to write."""
        if self.path is not None and loop.world.is_main and not loop.options.fast_dev_run:
            check_writable(self.path)
            refuse_foreign(self.path)

    def _improves(self, epoch: int, value: float) -> bool:
        """Return True if a value is the best so far, and then remember it and its epoch."""
        self._has_checked = True
        better = is_better(value, self.value, self.mode)
        if better:
            self.value, self.epoch = value, epoch
        return better

    def _keep(self, weights: Mapping[str, Any], outside: Mapping[str, Any]) -> None:
        """Keep copies of the weights of the best epoch, and of what else was trained."""
        self.weights, self.outside = copy_weights(weights), copy_weights(outside)

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Keep the weights if this epoch is the best."""
        if not self._improves(row["epoch"], monitored(row, self.monitor)):
            return
        weights = loop.strategy.model_state(loop.model)
        if loop.world.is_main:
            self._keep(weights, loop.outside())
            self._write(loop)

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Load the best weights into the model, on every rank."""
        if self.value is None and self._has_checked:
            raise no_best_model(self.monitor)
        if self.value is None:
            logger.warning(
                "training ended before any epoch was checked; the model has the weights of the "
                "last step"
            )
            return
        if loop.world.is_main:
            # Written again, because after a resume the file may be gone or another run's.
            self._write(loop)
        loop.load_weights(self.weights, self.outside)

    def _write(self, loop: TrainingLoop) -> None:
        if self.path is None or self.weights is None or loop.options.fast_dev_run:
            return
        write_file(self.path, self.weights)


class ModelCheckpoint(_MonitorCallback):
    """Keep the best few epochs as files, each with the weights that were judged.

    A file holds ``model``, ``outside`` (what the optimizer trains besides the model),
    ``optimizer``, ``scheduler``, ``scaler``, ``epoch``, ``monitor``, ``value`` and ``run``;
    `ml4cube.training.files.checkpoint.read_file` and ``torch.load(weights_only=True)`` read it. A
    new file is whole before an old one is removed, and
    only files of this run are replaced or removed. With ``ema``, the model is the average, and
    the weights that the optimizer was changing are not in the file. A run is resumed from its
    snapshot, not from these files.

    Parameters
    ----------
    save_dir : str or Path
        Folder; it is made.
    monitor : str
        Column of the History that decides.
    mode : {"min", "max"}
        Which way is better.
    save_top_k : int
        How many to keep; -1 keeps all. Of equal ones, the earlier stays. Every run that starts
        anew keeps its own; the files of runs before it stay, except those of a run with the same
        `snapshot_path` that was killed.

    Raises
    ------
    InvalidValueError
        If `save_top_k` or `mode` cannot work.

    Examples
    --------
    >>> ModelCheckpoint("checkpoints", monitor="val_loss", mode="min", save_top_k=3).paths
    []
    """

    writes = True
    kept: Sequence[tuple[float, str]]  # monitored value and file name, best first
    run: str | None  # random id, saved in files and snapshots, by which a run finds its own files
    _initial_state: ClassVar = {"kept": (), "run": None}

    def __init__(
        self,
        save_dir: str | Path = "checkpoints",
        monitor: str = "val_loss",
        mode: str = "min",
        save_top_k: int = 1,
    ) -> None:
        super().__init__(mode, monitor)
        if save_top_k != -1:
            check_count("save_top_k", save_top_k)
        self.save_dir, self.save_top_k = absolute_path("save_dir", save_dir), save_top_k
        # Files of this run that no snapshot knows, because it was killed.
        self._left: list[Path] = []

    @property
    def paths(self) -> list[Path]:
        """The files kept, best first."""
        return [self.save_dir / name for _, name in self.kept]

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Find the files of this run, because it may have been killed after its last snapshot."""
        if not loop.state.step:  # a new run, such as the next fold's, leaves the files of others
            self.forget()
        if loop.world.is_main:
            check_writable(self.save_dir / "epoch.pt")
            self._mark_run(self._mark(loop))
        self.run = loop.world.broadcast(self.run)
        missing = loop.world.broadcast([path.name for path in self.paths if not path.exists()])
        self.kept = [(value, name) for value, name in self.kept if name not in missing]
        self._left = []
        if loop.world.is_main:
            files = sorted(self.save_dir.glob("epoch-*.pt"))
            own = [path for path in files if read_entry(path, "run") == self.run]
            self._left = [path for path in own if path not in self.paths]

    def _mark_run(self, mark: Path | None) -> None:
        """Take the id of a run that was killed before its first snapshot, or a new one."""
        if mark is not None and mark.exists():
            self.run = self.run or mark.read_text()
        self.run = self.run or uuid.uuid4().hex
        if mark is not None:
            write_bytes(mark, self.run.encode())

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Remove files of this run that are not among the best."""
        self._remove_left()
        mark = self._mark(loop)
        if mark is not None and loop.world.is_main:
            mark.unlink(missing_ok=True)

    def _mark(self, loop: TrainingLoop) -> Path | None:
        """Return the file with the id of a run that has not ended; None without a snapshot."""
        path = loop.options.snapshot_path
        if path is None:
            return None
        return self.save_dir / f".unfinished-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"

    def _remove_left(self) -> None:
        """Remove files that no snapshot knows, once a newer one is whole."""
        for path in self._left:
            if path not in self.paths:
                path.unlink(missing_ok=True)
        self._left = []

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Write this epoch if it is among the best, then remove what no longer is."""
        value = monitored(row, self.monitor)
        is_full = 0 < self.save_top_k <= len(self.kept)  # never with -1, which keeps all
        to_beat = None
        if is_full:
            to_beat = self.kept[-1][0]
        if not is_better(value, to_beat, self.mode):
            return
        name = loop.world.broadcast(self._free_name(row["epoch"]) if loop.world.is_main else "")
        content = self._file_content(loop, row["epoch"], value)
        if loop.world.is_main:
            write_file(self.save_dir / name, content)
        kept = sorted(
            [*self.kept, (value, name)],
            key=lambda entry: entry[0] if self.mode == "min" else -entry[0],
        )
        while 0 < self.save_top_k < len(kept):
            _, worst = kept.pop()
            if loop.world.is_main:
                (self.save_dir / worst).unlink(missing_ok=True)
        self.kept = kept
        self._remove_left()

    def _free_name(self, epoch: int) -> str:
        """Return the name of a file that no other run has written."""
        name, version = f"epoch-{epoch:04d}.pt", 0
        while not self._is_free(name):
            version += 1
            name = f"epoch-{epoch:04d}-v{version}.pt"
        return name

    def _is_free(self, name: str) -> bool:
        """Return True if no file has the name, or one that this run wrote and no longer knows."""
        path = self.save_dir / name
        if path in self.paths:  # of an earlier check of this epoch
            return False
        # A run that was killed after its last snapshot writes the same files again.
        return not path.exists() or read_entry(path, "run") == self.run

    def _file_content(self, loop: TrainingLoop, epoch: int, value: float) -> dict[str, Any]:
        """Return what the file of an epoch holds; every rank."""
        return {
            "model": loop.strategy.model_state(loop.model),
            "outside": loop.outside(),
            "optimizer": loop.strategy.optimizer_state(loop.optimizer),
            "scheduler": state_of(loop.scheduler),
            "scaler": loop.scaler.state_dict(),
            "epoch": epoch,
            "monitor": self.monitor,
            "value": value,
            "run": self.run,
        }


def no_best_model(monitor: str | None) -> RunError:
    """Return the error for a run in which the monitored column was NaN in every epoch."""
    return RunError(
        f"{monitor} was not a number in any epoch, so there is no best model; look at "
        "trainer.history"
    )


def reporters(progress: bool, *loggers: Any) -> list[Callback]:
    """Return the callbacks that show a run and log it."""
    log = LoggerCallback([target for targets in loggers for target in as_list(targets)])
    return [Progress(), log] if progress else [log]


def explain_interrupt(interrupt: KeyboardInterrupt, best_epoch: int | None) -> None:
    """Add a note to a Ctrl-C: how to get the weights of the best epoch."""
    if best_epoch is not None:
        interrupt.add_note(
            "training was interrupted, and the model is as its last step left it; "
            f"apply_weights() of the Trainer loads the weights of the best epoch, {best_epoch}"
        )
