"""The state of a `ml4cube.training.trainer.Trainer`: its logs, its best weights, its progress."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from ml4cube.core.display import Summarized
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    check_choice,
)
from ml4cube.training.addons.core import Combinable
from ml4cube.training.files.checkpoint import read_file, to_plain, write_file
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.outside_model import (
    load_outside,
    modules_in,
    outside_model,
    state_of,
)
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.strategy import broadcast_model
from ml4cube.training.run.run_state import RunState
from ml4cube.training.run.steps import Supervised
from ml4cube.training.run.user_steps import FollowTrainer
from ml4cube.training.state import COLUMNS, History, TrainState

Log = defaultdict[str, list[Any]]
# The attributes that training changes. Model, optimizer, scheduler and callbacks have a state_dict;
# that of `FollowTrainer` holds the best epoch and its weights.
_PACKED = (
    "log_test",
    "log_train",
    "mode",
    "progress_checker",
    "_run_state",
)


@dataclass
class ProgressChecker:
    """The epochs and steps of a Trainer so far."""

    epoch: int = 0
    step: int = 0

    def get_epoch(self) -> int:
        """Return the number of the current epoch, from 1."""
        return self.epoch + 1

    def get_step(self) -> int:
        """Return the number of the current step, from 1."""
        return self.step + 1

    def update_epoch(self) -> None:
        """Count an epoch."""
        self.epoch += 1

    def update_step(self) -> None:
        """Count a step."""
        self.step += 1

    def follow(self, state: TrainState) -> None:
        """Take over the counts of a run."""
        self.epoch, self.step = state.epoch, state.step


class TrainerState(Summarized, metaclass=Combinable):
    """The base of Trainer: its logs, weights and state."""

    # What Trainer defines, and users may override.
    train_step: Callable[[Any], Any]
    test_step: Callable[[Any], Any]
    count_samples: Callable[[Any], int | None]
    metric_on_epoch_end: Callable[[], Mapping[str, float] | None]
    _overrides: Callable[[str], bool]
    mode: str  # "train" or "test"
    _callbacks: list[Any]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: Any,
        loss: Callable[..., Tensor] | None,
        *,
        metrics: Mapping[str, Any] | None,
        world: World,
        options: Options,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loss_step: Supervised | None = None
        if loss is not None:
            self.loss_step = Supervised(loss)
        self._metrics, self._world, self._options = metrics, world, options
        self.progress_checker = ProgressChecker()
        self.log_train: Log = defaultdict(list)
        self.log_test: Log = defaultdict(list)
        self._best = FollowTrainer(self, options.mode)
        self._loop: Any = None  # the one that is training, if any
        # By name of a method that the user overrides: the function that its super() call runs.
        self.pending: dict[str, Callable[[Any], None]] = {}
        self._run_state = RunState()  # as the last loop has left it; the next continues from it

    @property
    def history(self) -> History:
        # described by the Trainers, whose documentation a docstring here would make ambiguous
        return self._run_state.history

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 1, whose weights are the best."""
        return self._best.epoch

    @property
    def best_loss(self) -> float | None:
        """The value of `monitor` in the best epoch."""
        return self._best.value

    @property
    def best_weights(self) -> dict[str, Tensor] | None:
        """The weights of the best epoch, on rank 0; None if they are not known."""
        return self._best.weights

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold shares of the model while it is trained."""
        return self._options.strategy == "fsdp" and self._world.size > 1

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self._world.is_main

    # ---------------------------------------------------------------------- logs

    def logging(self, step_dict: Mapping[str, Any]) -> None:
        """Collect what a step returned; an add-on may override it."""
        log = self.log_test
        if self.mode == "train":
            log = self.log_train
        for name, value in step_dict.items():
            if isinstance(value, Tensor):
                value = value.detach()
                if value.ndim:  # the loader may use the batch's memory again
                    value = value.to("cpu", copy=True)
            log[name].append(value)

    def log_reset(self) -> None:
        """Empty `log_train` and `log_test`; called before every epoch."""
        self.log_train.clear()
        self.log_test.clear()

    def toggle(self, mode: str | None = None) -> None:
        """Switch between training and testing."""
        check_choice("mode", mode, ["train", "test", None])
        self.mode = mode or ("test" if self.mode == "train" else "train")

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Set `mode` to "test" and empty `log_test`, for one pass."""
        before, self.mode = self.mode, "test"
        self.log_test.clear()
        try:
            yield
        finally:
            self.mode = before

    def user_metrics(self) -> dict[str, float]:
        """Return what `metric_on_epoch_end` gives for the logs of all ranks; every rank."""
        _move_scalars_to_cpu(self.log_train)
        _move_scalars_to_cpu(self.log_test)
        if not self._overrides("metric_on_epoch_end"):
            return {}
        logs = self.log_train, self.log_test
        self.log_train, self.log_test = (_join_ranks(log, self._world) for log in logs)
        try:
            metrics = self.metric_on_epoch_end()
        finally:
            self.log_train, self.log_test = logs
        return self._world.broadcast(_check_user_metrics(metrics))

    # ------------------------------------------------------------------- weights

    def check_step(self, name: str) -> None:
        """Refuse a Trainer that has neither a step nor a loss."""
        if not self._overrides(name):
            self.default_step(name)

    def default_step(self, name: str) -> Supervised:
        """Return the step made of the argument `loss`."""
        if self.loss_step is None:
            raise InvalidTypeError(
                f"{type(self).__name__} has neither {name}() nor a loss; define "
                f"{name}(self, batch) in a subclass, or give loss=torch.nn.MSELoss()"
            )
        return self.loss_step

    def weights_now(self) -> dict[str, Any]:
        """Return the model's state dict, whole also if ranks hold shares of it; every rank."""
        loop = self._loop
        if loop is None:
            return self.model.state_dict()
        weights: dict[str, Any] = loop.strategy.model_state(loop.model)
        return weights

    def _modules(self) -> dict[str, nn.Module]:
        """Return by name the modules besides the model that steps may use: attributes, the loss."""
        modules = {}
        if self.loss_step is not None:
            modules = self.loss_step.modules
        modules |= modules_in("trainer", self)
        modules.pop("trainer.model", None)
        return modules

    def _outside(self) -> dict[str, Tensor]:
        """Return by name the tensors that the optimizer trains besides the model."""
        return outside_model(self.model, self.optimizer, self._modules())

    def optimizer_now(self) -> Any:
        """Return the optimizer's state dict, whole also if ranks hold shares of it; every rank."""
        if self.optimizer is None or self._loop is None:
            return state_of(self.optimizer)
        state: dict[str, Any] = self._loop.strategy.optimizer_state(self.optimizer)
        return state

    def save_model(self, filename: str | Path) -> None:
        """Write the model's weights: a plain state dict, written by rank 0."""
        weights = self.weights_now()
        if self._world.is_main:
            write_file(filename, weights)
        self._world.barrier()  # no rank continues before the file is there

    def load_model(self, filename: str | Path, strict: bool = True) -> None:
        """Read weights into the model, from a file that `save_model` or a checkpoint wrote."""
        self._load_weights(read_file(filename), str(filename), strict)

    def apply_weights(self, filename: str | Path | None = None, strict: bool = True) -> None:
        """Load the best weights so far into the model, or those of a file."""
        if filename is not None:
            self.load_model(filename, strict)
            return
        if self.best_epoch is None:
            raise RunError("no epoch was trained yet, so none is the best; call run() first")
        if not self._world.broadcast(self.best_weights is not None):
            raise RunError(
                f"the state that was loaded is not that of the best epoch, {self.best_epoch}; give "
                "the file of its weights: apply_weights(filename)"
            )
        if self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        if self._best.outside is not None:
            load_outside(self._outside(), self._best.outside, "the state of the best epoch")
        broadcast_model(self.model, self._world)
        self._world.broadcast_tensors(self._outside().values())
        self._start_from_loaded_weights()

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Keep the weights if they are the best so far; called after every check."""
        return self._best.keep_if_better(cur_epoch, cur_loss)

    def _load_weights(self, content: Mapping[str, Any], source: str, strict: bool) -> None:
        nested = content.get("model")
        weights = content
        if isinstance(nested, Mapping):
            weights = nested
        try:
            self.model.load_state_dict(weights, strict=strict)
        except (RuntimeError, AttributeError) as error:
            raise InvalidValueError(
                f"{source} holds weights of another model ({error}); give another file"
            ) from error
        self._start_from_loaded_weights()

    def _start_from_loaded_weights(self) -> None:
        """Let the next run average from here on, and leave an interrupted epoch unfinished."""
        # Replaced, because a loop that is running has the same objects.
        counters = replace(self._run_state.counters, batch=0, sums={})
        self._run_state = replace(self._run_state.left(), counters=counters, average={})

    # ---------------------------------------------------------------------- state

    def start_at(self, state: TrainState) -> None:
        """Continue from the epoch and step of a state that was loaded."""
        self._run_state.counters, self._run_state.goal = state, state.epoch
        self._run_state.has_trained = True
        self.progress_checker.follow(state)

    def pack(self) -> dict[str, Any]:
        """Return what training has changed, to be taken to another process."""
        changed = {name: getattr(self, name) for name in _PACKED}
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        learned = [callback.state_dict() for callback in self._callbacks]
        return {
            "changed": changed,
            "parts": to_plain(parts),
            "outside": to_plain(self._outside()),
            "callbacks": to_plain(learned),
        }

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Take over what `pack` returned, in place."""
        for name, value in packed["changed"].items():
            setattr(self, name, value)
        for name, part in self._parts().items():
            part.load_state_dict(packed["parts"][name])
        load_outside(self._outside(), packed["outside"], "what the processes returned")
        for callback, state in zip(self._callbacks, packed["callbacks"], strict=True):
            callback.load_state_dict(state)

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.scheduler, LRScheduler) and self.optimizer is not None:
            # torch's schedulers wrap the optimizer's ``step`` when they are made, to see that it
            # is called. A pickle does not hold the wrapper, so it is made again.
            ConstantLR(self.optimizer, factor=1.0)


def _move_scalars_to_cpu(log: Log) -> None:
    """Move the scalar tensors of a log to the CPU, in place."""
    for values in log.values():
        for number, value in enumerate(values):
            if isinstance(value, Tensor):
                values[number] = value.cpu()


def _check_user_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics as floats, or raise an error for an invalid result."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidTypeError(
            f"metric_on_epoch_end() must return a dict {{name: number}} or None, got {metrics!r}"
        )
    taken = [name for name in metrics if name in COLUMNS]
    if taken:
        raise InvalidValueError(
            f"metric_on_epoch_end() returned {taken}, which are columns of the History; use other "
            "names"
        )
    return {str(name): float(value) for name, value in metrics.items()}


def _join_ranks(log: Log, world: World) -> Log:
    """Return the log of all ranks, in the order of ranks."""
    joined: Log = defaultdict(list)
    for part in world.gather_objects(dict(log)):
        for name, values in part.items():
            joined[name] += values
    return joined
