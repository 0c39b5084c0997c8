"""What may happen around the loop: stopping, keeping the best, reporting, drawing.

A callback sees the loop at fixed moments, on every rank. What it writes or shows, it does where
``loop.world.is_main``. What it learns over time goes into `state_dict`, and so into snapshots.
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    StoreError,
    check_choice,
)
from ml4cube.training.checkpoint import read_file, write_file

if TYPE_CHECKING:
    from ml4cube.training.loop import Loop

logger = logging.getLogger("ml4cube.training")

_SLOW = 0.2  # share of the time that others wait for a rank before it is called slow


class Callback:
    """Base of all callbacks: empty methods, override those you need.

    Examples
    --------
    >>> class Shout(Callback):
    ...     def on_epoch_end(self, loop, row):
    ...         print(row["train_loss"])
    """

    writes = False  # whether it leaves something behind; left out of a fast_dev_run

    def on_train_start(self, loop: Loop) -> None:
        """Run before the first step, after a snapshot was resumed.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_epoch_start(self, loop: Loop) -> None:
        """Run before the first step of an epoch.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_step_end(self, loop: Loop) -> None:
        """Run after every optimizer step; read no value of the device here, it would wait.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_row(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run after validation, before the row enters the History; add columns here.

        Parameters
        ----------
        loop : Loop
            The loop.
        row : dict
            The epoch's row; what is added must be the same on every rank.
        """

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run after validation, before the snapshot.

        Parameters
        ----------
        loop : Loop
            The loop; `loop.stop` ends it after this epoch.
        row : dict
            The epoch's row of the History, the same on every rank.
        """

    def on_train_end(self, loop: Loop) -> None:
        """Run once when training ended of itself, after the last snapshot.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_close(self, loop: Loop) -> None:
        """Run last, also after an error, to give back what was opened.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know: tensors and plain Python.

        Returns
        -------
        dict
            Empty by default.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Parameters
        ----------
        state : mapping
            From a snapshot.
        """


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Whether a value beats the best so far.

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
    """Return the value a callback watches.

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
    known = [name for name, value in row.items() if isinstance(value, int | float)]
    raise InvalidValueError(f"monitor={monitor!r} is no number of the History; it has {known}")


class EarlyStopping(Callback):
    """Stop when a value has not improved for a number of checks.

    Parameters
    ----------
    patience : int
        Checks (epochs) without improvement after which training stops.
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
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InvalidValueError(
                f"patience={patience!r} is not a number of checks; use 1 or more"
            )
        if not min_delta >= 0:
            raise InvalidValueError(f"min_delta={min_delta!r} is negative; use 0 or more")
        self.patience, self.mode, self.monitor, self.min_delta = patience, mode, monitor, min_delta
        self.best: float | None = None
        self.strikes = 0

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return self.strikes >= self.patience

    def on_train_start(self, loop: Loop) -> None:
        """Stop a resumed run that had been stopped."""
        self._judge(loop)

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Count a strike, or start counting anew."""
        value = monitored(row, self.monitor)
        margin = -self.min_delta if self.mode == "min" else self.min_delta
        bar = None if self.best is None else self.best + margin
        if is_better(value, bar, self.mode):
            self.best, self.strikes = value, 0
        else:
            self.strikes += 1
        self._judge(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return best value and strikes."""
        return {"best": self.best, "strikes": self.strikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back best value and strikes."""
        self.best, self.strikes = state["best"], state["strikes"]

    def _judge(self, loop: Loop) -> None:
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

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Keep the weights if this epoch is the best."""
        value = monitored(row, self.monitor)
        if not is_better(value, self.value, self.mode):
            return
        self.value, self.epoch = value, row["epoch"]
        weights = loop.strategy.model_state(loop.model)
        if loop.world.is_main:
            self._weights = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()
            }
            self._write(loop)

    def on_train_end(self, loop: Loop) -> None:
        """Load the best weights into the model, on every rank."""
        if not len(loop.history):
            logger.warning("no epoch was finished in time; the model is as the last step left it")
            return
        if self.value is None:
            raise RunError(
                f"no epoch gave a {self.monitor} that is a number, so there is no best model; "
                "look at trainer.history"
            )
        if loop.world.is_main and self._weights is not None:
            # After a resume the file may be gone, or another run's.
            self._write(loop)
        loop.strategy.share_model(loop.model, self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return value, epoch and weights."""
        return {"value": self.value, "epoch": self.epoch, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back value, epoch and weights."""
        self.value, self.epoch, self._weights = state["value"], state["epoch"], state["weights"]

    def _write(self, loop: Loop) -> None:
        if self.path is None or self._weights is None or loop.options.fast_dev_run:
            return
        write_file(self.path, self._weights)


class ModelCheckpoint(Callback):
    """Keep the best few epochs as files, each with the full state to go on from.

    A file holds ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``epoch``, ``monitor``,
    ``value`` and ``run``; `ml4cube.training.checkpoint.read_file` and
    ``torch.load(weights_only=True)`` read it. A new file is whole before an old one is removed, and
    only files of this run are replaced or removed.

    Parameters
    ----------
    save_dir : str or Path
        Folder; it is made.
    monitor : str
        Column of the History that decides.
    mode : {"min", "max"}
        Which way is better.
    save_top_k : int
        How many to keep; -1 keeps all. Of equal ones, the earlier stays.

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
        if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
            raise InvalidValueError(
                f"save_top_k={save_top_k!r} is no number of files; -1 keeps all"
            )
        if save_top_k == 0:
            raise InvalidValueError("save_top_k=0 keeps nothing; leave the checkpoint out instead")
        self.save_dir, self.monitor, self.mode = Path(save_dir), monitor, mode
        self.save_top_k = save_top_k
        self._kept: list[tuple[float, str]] = []  # best first
        self._run: str | None = None  # goes into files and snapshots, to know one's own

    @property
    def paths(self) -> list[Path]:
        """The files kept, best first."""
        return [self.save_dir / name for _, name in self._kept]

    def on_train_start(self, loop: Loop) -> None:
        """Forget files that are gone: a run may be killed after its last snapshot."""
        self._run = loop.world.share(self._run or uuid.uuid4().hex)
        there = loop.world.share([path.exists() for path in self.paths])
        self._kept = [entry for entry, here in zip(self._kept, there, strict=True) if here]

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
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
        """Return names and values of the files kept."""
        return {"kept": self._kept, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._kept = [(value, name) for value, name in state["kept"]]
        self._run = state.get("run")

    def _free_name(self, epoch: int) -> str:
        """Name a file that no other run has written."""
        for version in itertools.count():
            suffix = f"-v{version}" if version else ""
            name = f"epoch-{epoch:04d}{suffix}.pt"
            if not (self.save_dir / name).exists() or self._is_mine(self.save_dir / name):
                break
        return name

    def _is_mine(self, path: Path) -> bool:
        """Whether this very run wrote a file, before it was killed and went back a little."""
        try:
            return read_file(path).get("run") == self._run
        except StoreError:
            return False

    def _content(self, loop: Loop, epoch: int, value: float) -> dict[str, Any]:
        return {
            "model": loop.strategy.model_state(loop.model),
            "optimizer": loop.strategy.optimizer_state(loop.model, loop.optimizer),
            "scheduler": None if loop.scheduler is None else loop.scheduler.state_dict(),
            "scaler": loop.scaler.state_dict(),
            "epoch": epoch,
            "monitor": self.monitor,
            "value": value,
            "run": self._run,
        }


class RankReport(Callback):
    """Show per epoch what every rank did: a table on rank 0.

    It goes to the logger ``ml4cube.training.ranks`` at level INFO; where logging has not been
    set up, to the standard error stream.

    Examples
    --------
    >>> rows = [{"rank": rank, "device": "cpu", "host": "a", "train_n": 8, "train_loss": 0.5,
    ...          "seconds": 2.0, "data_wait": w, "communicate": c, "compute": 1 - w - c}
    ...         for rank, w, c in ((0, 0.05, 0.6), (1, 0.65, 0.01))]
    >>> print(RankReport.table({"epoch": 1, "train_loss": 0.5, "ranks": rows}))
    epoch 1
    rank  device  host  train_n  train_loss  seconds  data_wait  communicate  compute
       0     cpu     a        8         0.5     2.00         5%          60%      35%
       1     cpu     a        8         0.5     2.00        65%           1%      34%
     all                     16         0.5
    the others wait for rank 1, which waits for data
    """

    def __init__(self) -> None:
        self._console = _Console("ml4cube.training.ranks")

    def on_train_start(self, loop: Loop) -> None:
        """Make sure the table can be seen."""
        if loop.world.is_main:
            self._console.open()

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Show the table."""
        if loop.world.is_main:
            self._console.logger.info("%s", self.table(row))

    def on_close(self, loop: Loop) -> None:
        """Leave logging as it was."""
        self._console.close()

    @staticmethod
    def table(row: Mapping[str, Any]) -> str:
        """Return the per-rank table of one epoch as text.

        Parameters
        ----------
        row : mapping
            One row of the History.

        Returns
        -------
        str
            One line per rank and one for all; losses are means over samples. Where ranks wait
            for a slow one, a sentence names it and says what it spends its time on.
        """
        ranks: Sequence[Mapping[str, Any]] = row["ranks"]
        total = {
            "rank": "all",
            "train_n": sum(r["train_n"] for r in ranks),
            "train_loss": row["train_loss"],
            "val_n": sum(r.get("val_n", 0) for r in ranks),
            "val_loss": row.get("val_loss"),
        }
        names = list(ranks[0])
        lines = [names, *([_cell(n, r.get(n)) for n in names] for r in [*ranks, total])]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            [f"epoch {row['epoch']}"]
            + [
                "  ".join(c.rjust(w) for c, w in zip(x, widths, strict=True)).rstrip()
                for x in lines
            ]
            + _find_slow(ranks)
        )


class Progress(Callback):
    """Show epochs as a progress bar on rank 0; silent where there is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def on_train_start(self, loop: Loop) -> None:
        """Open the bar."""
        if loop.world.is_main:
            options = loop.options
            self._bar = tqdm(
                total=options.epochs, initial=loop.state.epoch, unit="epoch", disable=None
            )

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Move the bar on."""
        if self._bar is not None:
            losses = {k: row[k] for k in ("train_loss", "val_loss") if row.get(k) is not None}
            self._bar.set_postfix(losses, refresh=False)
            self._bar.update()

    def on_close(self, loop: Loop) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LossPlot(Callback):
    """Draw training and validation loss into a PNG when training ends, on rank 0.

    Parameters
    ----------
    path : str or Path
        The picture.
    """

    writes = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_train_end(self, loop: Loop) -> None:
        """Draw."""
        if not loop.world.is_main or not len(loop.history):
            return
        # Imported here: drawing libraries are loaded by those who draw.
        from ml4cube.plotting import loss_curve

        history = loop.history.to_dict()
        figure = loss_curve(history["train_loss"], history.get("val_loss"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=150)


class LoggerCallback(Callback):
    """Hand every epoch's numbers to loggers on rank 0; one that fails is dropped.

    Parameters
    ----------
    loggers : iterable of object
        Each with ``log(values, step)`` and, if it likes, ``close()``.
    """

    writes = True

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = list(loggers)
        self._dropped: set[int] = set()
        for target in self._loggers:
            if not callable(getattr(target, "log", None)):
                raise InvalidTypeError(
                    f"loggers has {target!r}, which has no method log(values, step)"
                )

    def on_train_start(self, loop: Loop) -> None:
        """Tell them at which step the run starts or goes on."""
        for target in self._alive(loop):
            if hasattr(target, "start"):
                self._try(target, "start", loop.state.step)

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Hand over the row, without the table of ranks."""
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        for target in self._alive(loop):
            self._try(target, "log", values, loop.state.step)

    def on_close(self, loop: Loop) -> None:
        """Close them."""
        for target in self._alive(loop):
            if hasattr(target, "close"):
                self._try(target, "close")

    def state_dict(self) -> dict[str, Any]:
        """Return what each says of itself; one that was dropped, or says nothing, is empty."""
        return {
            "loggers": [
                target.state_dict()
                if hasattr(target, "state_dict") and number not in self._dropped
                else {}
                for number, target in enumerate(self._loggers)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each its own back, as far as there are as many."""
        for target, own in zip(self._loggers, state.get("loggers", ()), strict=False):
            if own and hasattr(target, "load_state_dict"):
                target.load_state_dict(own)

    def _alive(self, loop: Loop) -> list[Any]:
        """Those that get values: on rank 0, and not dropped."""
        if not loop.world.is_main:
            return []
        return [t for number, t in enumerate(self._loggers) if number not in self._dropped]

    def _try(self, target: Any, method: str, *args: Any) -> None:
        try:
            getattr(target, method)(*args)
        except Exception:
            logger.exception("%s failed and gets no more values; training goes on", target)
            self._dropped |= {n for n, other in enumerate(self._loggers) if other is target}


class _Console:
    """A logger whose INFO lines are seen, for as long as it is open, in an unset logging."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET

    def open(self) -> None:
        if self.logger.hasHandlers() or self._handler is not None:
            return
        self._handler, self._level = logging.StreamHandler(), self.logger.level
        self.logger.addHandler(self._handler)
        self.logger.setLevel(logging.INFO)

    def close(self) -> None:
        if self._handler is not None:
            self.logger.removeHandler(self._handler)
            self.logger.setLevel(self._level)
            self._handler = None


def _find_slow(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rank that waits least for others is the one they wait for."""
    shares = [r.get("communicate") for r in ranks]
    known = [share for share in shares if share is not None]
    if len(known) < max(len(ranks), 2) or max(known) - min(known) < _SLOW:
        return []
    slow = ranks[shares.index(min(known))]
    usual = sorted(r["data_wait"] for r in ranks)[(len(ranks) - 1) // 2]
    cause = "waits for data" if slow["data_wait"] - usual > _SLOW / 2 else "computes longer"
    return [f"the others wait for rank {slow['rank']}, which {cause}"]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("data_wait", "communicate", "compute"):
        return f"{value:.0%}"
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
