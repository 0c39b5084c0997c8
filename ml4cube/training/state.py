"""Counters, History and random state of a training run."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ml4cube.core.display import Summarized, Summary, Table, counted, shown
from ml4cube.core.errors import InvalidValueError

__all__ = ["History", "TrainState"]

# Columns of a History that no metric may have.
COLUMNS = {
    "epoch",
    "train_loss",
    "val_loss",
    "lr",
    "grad_norm",
    "grad_norm_max",
    "seconds",
    "step",
    "ranks",
}


@dataclass
class TrainState:
    """Counters of a run; all ranks hold the same values.

    Parameters
    ----------
    epoch : int
        Epochs finished, including validation.
    batch : int
        Batches of the current epoch that this rank has trained on.
    step : int
        Optimizer steps taken.
    checked : int
        Steps taken at the last validation inside an epoch.
    sums : dict
        Sums measured by this rank in the current epoch, by quantity.

    Examples
    --------
    >>> TrainState(epoch=2).to_dict()["epoch"]
    2
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    checked: int = 0
    sums: dict[str, Any] = field(default_factory=dict)

    def start_epoch(self) -> None:
        """Reset the counters of the last epoch."""
        self.batch, self.sums = 0, {}

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain Python values.

        Returns
        -------
        dict
            ``{name: value}``.
        """
        return asdict(self)


class History(Summarized):
    """Results of every epoch, column by column.

    Columns are ``epoch`` (from 1), ``train_loss``, ``val_loss``, one per metric, ``lr``,
    ``seconds`` and ``ranks`` (per epoch a list of rows ``rank, device, host, train_n,
    train_loss, val_n, val_loss, seconds, data_wait, communicate, compute``). Losses are means over
    the samples of all ranks. The last three are fractions of the training time that add up to 1:
    waiting for data, waiting for other ranks (timed on every 50th step; None if none was timed)
    and the rest.

    Parameters
    ----------
    columns : mapping of str to sequence, optional
        Columns of equal length. Default: an empty history.

    Raises
    ------
    InvalidValueError
        If the columns differ in length.

    Examples
    --------
    >>> history = History()
    >>> history.append({"epoch": 1, "train_loss": 0.5, "val_loss": 0.7})
    >>> history["val_loss"], len(history)
    ([0.7], 1)
    >>> History.from_json(history.to_json()) == history
    True
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]] | None = None) -> None:
        self._columns = {name: list(values) for name, values in (columns or {}).items()}
        lengths = {name: len(values) for name, values in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidValueError(f"columns of a History must have equal lengths, got {lengths}")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one epoch; missing values become None.

        Parameters
        ----------
        row : mapping of str to value
            Values by column; new columns may be added.
        """
        rows = len(self)
        for name in row:
            self._columns.setdefault(name, [None] * rows)
        for name, values in self._columns.items():
            values.append(row.get(name))

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def __getitem__(self, column: str) -> list[Any]:
        return list(self._columns[column])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._columns == other._columns

    def _summary(self) -> Summary:
        """Return the least loss, and the rows without the table of ranks."""
        loss = default_monitor(self)
        columns = [name for name in self._columns if name != "ranks"]
        rows = list(zip(*(self._columns[name] for name in columns), strict=True))
        epochs = len({*self._columns.get("epoch", ())})
        headline, best = counted(epochs, "epoch"), best_row(self, loss, "min")
        if best is not None:
            headline += f"; least {loss} {shown(best[1])} in epoch {best[0]}"
        return Summary(headline, sections={"Epochs": Table(columns, rows)})

    def keys(self) -> list[str]:
        """Return the names of the columns, so that ``dict(history)`` works.

        Returns
        -------
        list of str
            Names in order of appearance.
        """
        return list(self._columns)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return all columns.

        Returns
        -------
        dict
            ``{column: one value per epoch}``, a copy.
        """
        return {name: list(values) for name, values in self._columns.items()}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the columns as JSON, and write them to `path` if given.

        NaN and infinities become null.

        Parameters
        ----------
        path : str or Path, optional
            File to write.

        Returns
        -------
        str
            The JSON text.
        """
        text = json.dumps(nonfinite_to_none(self._columns))
        if path is not None:
            Path(path).expanduser().write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read a history from the text of `to_json`.

        Parameters
        ----------
        text : str
            The JSON text.

        Returns
        -------
        History
            An equal history, with None in place of NaN.
        """
        return cls(json.loads(text))


def default_monitor(history: History) -> str:
    """Return the column that judges a run unless another is chosen."""
    if "val_loss" in history:
        return "val_loss"
    return "train_loss"


def best_row(history: History, column: str | None, mode: str) -> tuple[int, float] | None:
    """Return the first epoch with the best value of a column, and the value; None without any."""
    columns = history.to_dict()
    pairs = zip(columns.get("epoch", ()), columns.get(column or "", ()), strict=False)
    measured = [(epoch, v) for epoch, v in pairs if v is not None and not math.isnan(v)]
    pick = max
    if mode == "min":
        pick = min
    if not measured:
        return None
    return pick(measured, key=lambda pair: pair[1])


def nonfinite_to_none(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON cannot hold them."""
    if isinstance(value, Mapping):
        return {key: nonfinite_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nonfinite_to_none(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def copy_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a model's state dict to main memory, including extra state."""
    copied: dict[str, Any] = {}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            copied[name] = value.detach().to("cpu", copy=True)
        else:
            copied[name] = copy.deepcopy(value)
    return copied


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python."""
    # Transforms in a user's dataset may draw from numpy and Python.
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    key_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), key_tensor, int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators from `capture_rng`."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators after the body."""
    state = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(state, device)
