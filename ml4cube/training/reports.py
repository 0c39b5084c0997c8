"""Callbacks that show a run: the table of ranks, a bar, a plot, and numbers for loggers."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError
from ml4cube.progress import Stage, duration, write_line
from ml4cube.training.events import Callback, TrainingLoop, as_list
from ml4cube.training.files.checkpoint import WRITTEN_BY, refuse_foreign
from ml4cube.training.files.paths import absolute_path, check_writable
from ml4cube.training.inputs.checks import refuse_class
from ml4cube.training.state import best_row

logger = logging.getLogger(__name__)

# A rank is called slow if others wait for it at least this fraction of the time.
_SLOW = 0.2


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

    def on_epoch_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Show the table."""
        if not loop.world.is_main:
            return
        table, table_logger = self.table(row), logging.getLogger("ml4cube.training.ranks")
        if table_logger.hasHandlers():
            table_logger.info("%s", table)
        else:
            write_line(table)

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
            "train_n": sum(rank["train_n"] for rank in ranks),
            "train_loss": row["train_loss"],
            "val_n": sum(rank.get("val_n", 0) for rank in ranks),
            "val_loss": row.get("val_loss"),
        }
        columns = [
            [name, *(_cell(name, rank.get(name)) for rank in [*ranks, total])] for name in ranks[0]
        ]
        padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
        lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
        return "\n".join([f"epoch {row['epoch']}", *lines, *_describe_slow_rank(ranks)])


class Progress(Callback):
    """Show a run on rank 0: a bar within the epoch, and a line on stderr for every epoch.

    The bar is shown in terminals and notebooks. In batch jobs, an epoch that takes long gets a
    line for each tenth instead.

    Examples
    --------
    >>> row = {"epoch": 2, "train_loss": 0.5, "val_loss": 0.75, "seconds": 2.0,
    ...        "ranks": [{"train_n": 500}, {"train_n": 500}]}
    >>> print(Progress.line(row, epochs=10, best="val_loss 0.7 in epoch 1", end="14:32"))
    epoch 2/10: train_loss 0.5, val_loss 0.75 (best: val_loss 0.7 in epoch 1), 2.0 s, \
500 samples/s, done by about 14:32
    """

    def __init__(self) -> None:
        self._bar: Stage | None = None
        self._start_time, self._start_step = 0.0, 0

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Remember time and step at which the run starts."""
        self._start_time, self._start_step = time.time(), loop.state.step

    def on_epoch_start(self, loop: TrainingLoop) -> None:
        """Open the bar."""
        if loop.world.is_main:
            name = f"epoch {loop.state.epoch + 1}/{loop.options.epochs}"
            self._bar = Stage(
                name, loop.steps_per_epoch, "steps", done=loop.steps_done, leave=False
            )

    def on_step_end(self, loop: TrainingLoop) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Write a line for a validation between steps of an epoch."""
        if self._bar is not None and loop.state.batch:  # 0 at the end of an epoch
            write_line(self.line(row, loop.options.epochs, _describe_best(loop)))

    def on_epoch_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Remove the bar and write the epoch's line."""
        self.on_close(loop)
        if not loop.world.is_main:
            return
        # `state.epoch` is the number of epochs done, with this one.
        now, state, epochs = time.time(), loop.state, loop.options.epochs
        remaining_steps = (epochs - state.epoch) * state.step / state.epoch
        if loop.options.max_steps is not None:
            remaining_steps = min(remaining_steps, loop.options.max_steps - state.step)
        step_s = (now - self._start_time) / max(state.step - self._start_step, 1)
        remaining_s = step_s * remaining_steps
        time_format = "%Y-%m-%d %H:%M"
        if remaining_s < 12 * 3600:
            time_format = "%H:%M"
        end_time = time.localtime(now + remaining_s)
        end = None
        if remaining_s > 0:
            end = time.strftime(time_format, end_time)
        write_line(self.line(row, epochs, _describe_best(loop), end))

    def on_close(self, loop: TrainingLoop) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def line(row: Mapping[str, Any], epochs: int, best: str | None, end: str | None = None) -> str:
        """Return one row of the History as text.

        Parameters
        ----------
        row : mapping
            The row.
        epochs : int
            Epochs to train.
        best : str or None
            The best value so far, in words.
        end : str, optional
            When the run is expected to end.

        Returns
        -------
        str
            One line.
        """
        step = ""
        if "step" in row:
            step = f", step {row['step']}"
        names = [name for name in ("train_loss", "val_loss") if row.get(name) is not None]
        losses = [f"{name} {row[name]:.6g}" for name in names]
        if best is not None:
            losses[-1] += f" (best: {best})"
        seconds = row["seconds"]
        rate = sum(rank["train_n"] for rank in row["ranks"]) / max(seconds, 1e-9)
        parts = [*losses, duration(seconds), f"{rate:,.0f} samples/s"]
        if end is not None:
            parts.append(f"done by about {end}")
        return f"epoch {row['epoch']}/{epochs}{step}: {', '.join(parts)}"


class LossPlot(Callback):
    """Draw training and validation loss into a PNG when training ends, on rank 0.

    Parameters
    ----------
    path : str or Path
        The picture.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from ml4cube.training.pytorch import Trainer
    >>> model, batches = torch.nn.Linear(1, 1), [(torch.ones(4, 1), torch.ones(4, 1))]
    >>> optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot = LossPlot(f"{folder}/loss.png")
    ...     trained = Trainer(
    ...         model, batches, batches, optimizer, loss=loss, epochs=2, callbacks=plot
    ...     ).train()
    ...     plot.path.is_file()
    True
    """

    writes = True

    def __init__(self, path: str | Path) -> None:
        self.path = absolute_path("path", path)

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Try to write."""
        if loop.world.is_main:
            check_writable(self.path)
            refuse_foreign(self.path)

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Draw the losses of all rows of the History."""
        if not loop.world.is_main or not len(loop.history):
            return
        # Imported here: drawing libraries are loaded by those who draw.
        from ml4cube.plotting import loss_curve

        figure = loss_curve(loop.history)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=150, metadata={"Software": WRITTEN_BY})


class LoggerCallback(Callback):
    """Send the numbers of every epoch to loggers on rank 0; drop loggers that fail.

    Parameters
    ----------
    loggers : object or iterable of object
        Each with ``log(values, step)`` and, optionally, ``start(step)``, ``close()``,
        ``state_dict()`` and ``load_state_dict(state)``.
    """

    writes = True

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = as_list(loggers)  # None where one was dropped
        for target in self._loggers:
            refuse_class("loggers", target)
            if not callable(getattr(target, "log", None)):
                raise InvalidTypeError(
                    f"loggers must have a method log(values, step), got {one_line(target)}"
                )

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Start the loggers at the step of the run."""
        self._call(loop, "start", loop.state.step)

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Log the row of a validation between steps of an epoch."""
        if loop.state.batch:  # 0 at the end of an epoch
            self.on_epoch_end(loop, row)

    def on_epoch_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Log the numbers of the row, without the table of ranks."""
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self._call(loop, "log", values, loop.state.step)

    def on_close(self, loop: TrainingLoop) -> None:
        """Close the loggers."""
        self._call(loop, "close")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each logger; that of a dropped one is empty."""
        states: list[Any] = [getattr(target, "state_dict", dict)() for target in self._loggers]
        return {"loggers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each logger."""
        for target, saved in zip(self._loggers, state.get("loggers", ()), strict=False):
            if saved and hasattr(target, "load_state_dict"):
                target.load_state_dict(saved)

    def _call(self, loop: TrainingLoop, method: str, *args: Any) -> None:
        """Call a method of the loggers that have it, on rank 0; drop those that fail."""
        for number, target in enumerate(self._loggers if loop.world.is_main else ()):
            try:
                if hasattr(target, method):
                    getattr(target, method)(*args)
            except Exception:
                name = type(target).__name__
                logger.exception("logger %s failed and is dropped; training continues", name)
                self._loggers[number] = None


def _describe_best(loop: TrainingLoop) -> str | None:
    """Return the best value so far of the monitored column, in words."""
    best = best_row(loop.history, loop.monitor, loop.options.mode)
    if best is None:
        return None
    return f"{loop.monitor} {best[1]:.6g} in epoch {best[0]}"


def _describe_slow_rank(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the rank that waits least for others, if they wait long for it."""
    if len(ranks) < 2 or any(rank.get("communicate") is None for rank in ranks):
        return []
    slowest, *_, fastest = sorted(ranks, key=lambda rank: rank["communicate"])
    if fastest["communicate"] - slowest["communicate"] < _SLOW:
        return []
    median_data_wait = statistics.median_low(rank["data_wait"] for rank in ranks)
    # Data are the cause if they explain half of the least difference that is reported.
    waits_for_data = slowest["data_wait"] - median_data_wait > _SLOW / 2
    cause = "computes longer"
    if waits_for_data:
        cause = "waits for data"
    return [f"the others wait for rank {slowest['rank']}, which {cause}"]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("data_wait", "communicate", "compute"):
        return f"{value:.0%}"
    if name == "seconds":
        return f"{value:.2f}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
