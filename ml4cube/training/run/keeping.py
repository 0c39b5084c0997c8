"""What a Trainer keeps: the logs of an epoch, and the best weights so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, check_choice
from ml4cube.training.callbacks import is_better
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import copy_weights, spread_weights

Log = defaultdict[str, list[Any]]
_COLUMNS = {"epoch", "train_loss", "val_loss", "lr", "seconds", "ranks"}


class Keeping:
    """Logs and weights of a Trainer; the base of `ml4cube.training.trainer.Trainer`."""

    model: nn.Module
    mode: str
    log_train: Log
    log_test: Log
    best_epoch: int | None
    best_loss: float | None
    best_weights: dict[str, torch.Tensor] | None
    overrides: Callable[[str], bool]
    metric_on_epoch_end: Callable[[], Mapping[str, float] | None]
    weights_now: Callable[[], dict[str, Any]]
    _options: dict[str, Any]
    _ema_state: dict[str, Any]  # number of updates, and the weights that are not averaged
    _world: World

    # ---------------------------------------------------------------------- logs

    def logging(self, step_dict: Mapping[str, Any]) -> None:
        """Collect what a step returned; an add-on may override it."""
        log = self.log_train if self.mode == "train" else self.log_test
        for name, value in step_dict.items():
            log[name].append(kept(value))

    def log_reset(self) -> None:
        """Empty `log_train` and `log_test`; called before every epoch."""
        self.log_train.clear()
        self.log_test.clear()

    def toggle(self, mode: str | None = None) -> None:
        """Switch between training and testing."""
        check_choice("mode", mode, ["train", "test", None])
        self.mode = mode or ("test" if self.mode == "train" else "train")

    # ------------------------------------------------------------ saving and loading

    def save_model(self, filename: str | Path) -> None:
        """Write the model's weights: a plain state dict, written by rank 0."""
        weights = self.weights_now()
        if self._world.is_main:
            write_file(filename, weights)
        self._world.maximum([0.0])  # nobody goes on before it is there

    def load_model(self, filename: str | Path, strict: bool = True) -> None:
        """Read weights into the model."""
        self._load_weights(read_file(filename), str(filename), strict)

    def apply_weights(self, filename: str | Path | None = None, strict: bool = True) -> None:
        """Put the best weights so far into the model, or those of a file."""
        if filename is not None:
            return self.load_model(filename, strict)
        if self.best_epoch is None:
            raise RunError("no epoch was trained yet, so none is the best; call run() first")
        self._ema_state = {}
        if self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        return spread_weights(self.model, self._world)

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Keep the weights if they are the best so far; called after every check."""
        if not is_better(cur_loss, self.best_loss, self._options.get("mode", "min")):
            return False
        self.best_epoch, self.best_loss = cur_epoch, cur_loss
        weights = self.weights_now()
        if self._world.is_main:
            self.best_weights = copy_weights(weights)
        return True

    def own_metrics(self) -> dict[str, float]:
        """Return what `metric_on_epoch_end` gives for the logs of all ranks; every rank."""
        _fetch(self.log_train)
        _fetch(self.log_test)
        if not self.overrides("metric_on_epoch_end"):
            return {}
        mine = self.log_train, self.log_test
        self.log_train, self.log_test = (_of_all_ranks(log, self._world) for log in mine)
        try:
            found = self.metric_on_epoch_end()
        finally:
            self.log_train, self.log_test = mine
        return self._world.share(_checked_metrics(found))

    def best_state(self) -> dict[str, Any]:
        """Return the best weights and where they come from, for snapshots."""
        return {"epoch": self.best_epoch, "loss": self.best_loss, "weights": self.best_weights}

    def load_best_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `best_state` returned."""
        self.best_epoch, self.best_loss = state["epoch"], state["loss"]
        self.best_weights = state["weights"]

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Set `mode` to "test" for a while."""
        before, self.mode = self.mode, "test"
        try:
            yield
        finally:
            self.mode = before

    def _load_weights(self, content: Mapping[str, Any], source: str, strict: bool) -> None:
        nested = content.get("model")
        weights = nested if isinstance(nested, Mapping) else content
        try:
            self.model.load_state_dict(weights, strict=strict)
        except (RuntimeError, AttributeError) as error:
            raise InvalidValueError(
                f"{source} holds weights of another model ({error}); give another file"
            ) from error
        self._ema_state = {}  # the next run averages from here on


def kept(value: Any) -> Any:
    """Return what a log keeps of a value: detached, and safe from reuse of the batch's memory."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.to("cpu", copy=True) if value.ndim else value


def _fetch(log: Log) -> None:
    """Bring the single numbers of a log to the CPU, those of a name at once."""
    for values in log.values():
        # What an earlier check inside the epoch fetched is on the CPU already.
        far = [
            number
            for number, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_cpu
        ]
        if far:
            near = torch.stack([values[number] for number in far]).cpu().unbind()
            for number, value in zip(far, near, strict=True):
                values[number] = value


def _checked_metrics(found: Any) -> dict[str, float]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidTypeError(
            f"metric_on_epoch_end() returned {found!r}; return a dict {{name: number}}, or None"
        )
    taken = [name for name in found if name in _COLUMNS]
    if taken:
        raise InvalidValueError(
            f"metric_on_epoch_end() returned {taken}, columns of the History; use other names"
        )
    return {str(name): float(value) for name, value in found.items()}


def _of_all_ranks(log: Log, world: World) -> Log:
    if world.size == 1:
        return log
    joined: Log = defaultdict(list)
    for part in world.gather_objects(dict(log)):
        for name, values in part.items():
            joined[name] += values
    return joined
