"""Callbacks that stop training and save the best models; those of `reports` are listed too."""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ml4cube.core.errors import InvalidValueError, RunError, StoreError, check_choice
from ml4cube.training.events import Callback, TrainingLoop, is_better, monitored
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.inputs.options import above_zero, check_count, check_path
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
    "is_better",
    "monitored",
]

logger = logging.getLogger(__name__)


def reporting(progress: bool, loggers: Any) -> list[Callback]:
    """Return the callbacks that show a run and log it."""
    return [*([Progress()] if progress else []), LoggerCallback(loggers)]


def note_best(stop: KeyboardInterrupt, epoch: int | None) -> None:
    """Add to a Ctrl-C how to get the best weights."""
    if epoch is not None:
        stop.add_note(
            "training was interrupted, and the model is as its last step left it; "
            f"apply_weights() of the Trainer loads the weights of the best epoch, {epoch}"
        )


class EarlyStopping(Callback):
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

    def __init__(
        self,
        patience: int = 10,
        mode: str = "min",
        monitor: str = "val_loss",
        min_delta: float = 0.0,
    ) -> None:
        check_choice("mode", mode, ["min", "max"])
        check_count("patience", patience)
        if min_delta != 0 and not above_zero(min_delta):
            raise InvalidValueError(f"min_delta must be a number of 0 or more, got {min_delta!r}")
        self.patience, self.mode, self.monitor, self.min_delta = patience, mode, monitor, min_delta
        self.best: float | None = None
        self.strikes = 0

    @property
    def exhausted(self) -> bool:
        """True if patience is used up."""
        return self.strikes >= self.patience

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Stop a resumed run that was stopped before; reset the count in any other run."""
        if not loop.resumed:
            self.best, self.strikes = None, 0
        self._judge(loop)

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Count a check without improvement, or reset the count."""
        value = monitored(row, self.monitor)
        margin = -self.min_delta if self.mode == "min" else self.min_delta
        bar = None if self.best is None else self.best + margin
        if is_better(value, bar, self.mode):
            self.best, self.strikes = value, 0
        else:
            self.strikes += 1
        self._judge(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the checks without improvement."""
        return {"best": self.best, "strikes": self.strikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.best, self.strikes = state["best"], state["strikes"]

    def forget(self) -> None:
        """Reset the best value and the count."""
        self.best, self.strikes = None, 0

    def _judge(self, loop: TrainingLoop) -> None:
        if self.exhausted:
            loop.stop(f"{self.monitor} has not improved for {self.strikes} checks")


class BestModel(Callback):
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

    def __init__(
        self, path: str | Path | None = None, mode: str = "min", monitor: str = "val_loss"
    ) -> None:
        check_choice("mode", mode, ["min", "max"])
        self.path = None if path is None else Path(path)
        self.mode, self.monitor = mode, monitor
        self.value: float | None = None
        self.epoch: int | None = None
        self._weights: dict[str, torch.Tensor] | None = None
        self._checked = False  # in this process

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Keep the weights if this epoch is the best."""
        value, self._checked = monitored(row, self.monitor), True
        if not is_better(value, self.value, self.mode):
            return
        self.value, self.epoch = value, row["epoch"]
        weights = loop.strategy.model_state(loop.model)
        if loop.world.is_main:
            self._weights = copy_weights(weights)
            self._write(loop)

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Load the best weights into the model, on every rank."""
        if self.value is None and not self._checked:
            logger.warning(
                "training ended before any epoch was checked; the model has the weights of the "
                "last step"
            )
            return
        if self.value is None:
            raise RunError(
                f"{self.monitor} was not a number in any epoch, so there is no best model; "
                "look at trainer.history"
            )
        if loop.world.is_main and self._weights is not None:
            # After a resume the file may be gone, or another run's.
            self._write(loop)
        loop.load_weights(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return value, epoch and weights."""
        return {"value": self.value, "epoch": self.epoch, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.value, self.epoch, self._weights = state["value"], state["epoch"], state["weights"]

    def forget(self) -> None:
        """Forget the best epoch."""
        self.value = self.epoch = self._weights = None

    def _write(self, loop: TrainingLoop) -> None:
        if self.path is None or self._weights is None or loop.options.fast_dev_run:
            return
        write_file(self.path, self._weights)


class ModelCheckpoint(Callback):
    """Keep the best few epochs as files, each with the weights that were judged.

    A file holds ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``epoch``, ``monitor``,
    ``value`` and ``run``; `ml4cube.training.files.checkpoint.read_file` and
    ``torch.load(weights_only=True)`` read it. A new file is whole before an old one is removed, and
    only files of this run are replaced or removed. With ``ema``, the model is the average, and
    the weights that the optimizer was changing are not in the file. A run goes on from its
    snapshot, not from here.

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
        anew keeps its own; the files of runs before it stay.

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

    def __init__(
        self,
        save_dir: str | Path = "checkpoints",
        monitor: str = "val_loss",
        mode: str = "min",
        save_top_k: int = 1,
    ) -> None:
        check_choice("mode", mode, ["min", "max"])
        if save_top_k != -1:  # all
            check_count("save_top_k", save_top_k)
        check_path("save_dir", save_dir, optional=False)
        self.save_dir, self.monitor, self.mode = Path(save_dir), monitor, mode
        self.save_top_k = save_top_k
        self._kept: list[tuple[float, str]] = []  # best first
        self._run: str | None = None  # goes into files and snapshots, to know one's own

    @property
    def paths(self) -> list[Path]:
        """The files kept, best first."""
        return [self.save_dir / name for _, name in self._kept]

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Forget files that are gone, because a run may be killed after its last snapshot."""
        if not loop.state.step:  # a run of its own, as every fold has: earlier files are not its
            self._run, self._kept = None, []
        self._run = loop.world.share(self._run or uuid.uuid4().hex)
        there = loop.world.share([path.exists() for path in self.paths])
        self._kept = [entry for entry, here in zip(self._kept, there, strict=True) if here]

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Write this epoch if it is among the best, then remove what no longer is."""
        value = monitored(row, self.monitor)
        full = 0 < self.save_top_k <= len(self._kept)
        if math.isnan(value) or (full and not is_better(value, self._kept[-1][0], self.mode)):
            return
        name = loop.world.share(self._free_name(row["epoch"]) if loop.world.is_main else "")
        content = self._content(loop, row["epoch"], value)
        if loop.world.is_main:
            write_file(self.save_dir / name, content)
        self._kept.append((value, name))
        self._kept.sort(key=lambda entry: entry[0] if self.mode == "min" else -entry[0])
        while 0 < self.save_top_k < len(self._kept):
            _, worst = self._kept.pop()
            if loop.world.is_main:
                (self.save_dir / worst).unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the names and values of the files."""
        return {"kept": self._kept, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._kept = [(value, name) for value, name in state["kept"]]
        self._run = state.get("run")

    def forget(self) -> None:
        """Keep the files there are, without comparing them with later ones."""
        self._kept, self._run = [], None

    def _free_name(self, epoch: int) -> str:
        """Return the name of a file that no other run has written."""
        for version in itertools.count():
            suffix = f"-v{version}" if version else ""
            name = f"epoch-{epoch:04d}{suffix}.pt"
            if name in {kept for _, kept in self._kept}:  # of an earlier check of this epoch
                continue
            if not (self.save_dir / name).exists() or self._is_mine(self.save_dir / name):
                break
        return name

    def _is_mine(self, path: Path) -> bool:
        """Return True if this run wrote a file before it was killed and resumed."""
        try:
            return read_file(path).get("run") == self._run
        except StoreError:
            return False

    def _content(self, loop: TrainingLoop, epoch: int, value: float) -> dict[str, Any]:
        return {
            "model": loop.strategy.model_state(loop.model),
            "optimizer": loop.strategy.optimizer_state(loop.optimizer),
            "scheduler": None if loop.scheduler is None else loop.scheduler.state_dict(),
            "scaler": loop.scaler.state_dict(),
            "epoch": epoch,
            "monitor": self.monitor,
            "value": value,
            "run": self._run,
        }
