"""How a Trainer's methods and the loop call one another: what `run` becomes, and overrides."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.addons.core import Combinable
from ml4cube.training.callbacks import Callback
from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.pytorch import note_best, pick_precision
from ml4cube.training.ranks.dist import World, local_rank
from ml4cube.training.run.keeping import Keeping
from ml4cube.training.run.loop import Options, Supervised
from ml4cube.training.run.progress import ProgressChecker
from ml4cube.training.run.user_steps import UserLoop, UserStep, on_cpu
from ml4cube.training.state import History, TrainState

logger = logging.getLogger(__name__)

Device = str | torch.device | Sequence[str | torch.device] | None
M = TypeVar("M", bound=Callable[..., Any])

# What training changes in a Trainer, besides the parts that have a state_dict.
_CHANGES = (
    "best_epoch",
    "best_loss",
    "best_weights",
    "history",
    "log_test",
    "log_train",
    "mode",
    "progress_checker",
    "_ema_state",
    "_goal",
    "_scaler_state",
    "_started",
    "_state",
)


def default(method: M) -> M:
    """Mark a method of `Trainer` that users and add-ons may override."""
    method.is_default = True  # type: ignore[attr-defined]
    return method


class Stepwise(Keeping, metaclass=Combinable):
    """The engine room of `ml4cube.training.trainer.Trainer`."""

    optimizer: Optimizer | None
    scheduler: Any
    history: History
    progress_checker: ProgressChecker
    loss_step: Supervised | None
    under_way: set[str]
    count_samples: Callable[[Any], int | None]
    predict_step: Callable[[Any], Any]
    evaluate: Callable[[Any], dict[str, Any]]
    _callbacks: list[Callback]
    _goal: int  # epochs asked for so far
    _inner: dict[str, Callable[[Any], None]]
    _metrics: Mapping[str, Any] | None
    _options: dict[str, Any]
    _scaler_state: dict[str, Any]
    _running: UserLoop | None  # the loop that trains now
    _started: bool
    _state: TrainState
    _tested: History

    # ---------------------------------------------------------- what the loop asks for

    def overrides(self, name: str) -> bool:
        """Whether a subclass or an add-on defines one of the methods here."""
        return not getattr(getattr(type(self), name), "is_default", False)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self._world.is_main

    @property
    def has_metrics(self) -> bool:
        """Whether metrics are computed in testing."""
        return bool(self._metrics)

    def pass_through(self, name: str, inner: Callable[[Any], None], argument: Any) -> None:
        """Do something inside the override of `run_epoch` or `run_batch`, where there is one."""
        if name in self.under_way or not self.overrides(name):
            return inner(argument)
        self._inner[name] = inner
        try:
            getattr(self, name)(argument)
            if name in self._inner:
                raise InvalidTypeError(
                    f"{type(self).__name__}.{name} did not call super().{name}(...), so nothing "
                    "was done; call it, or define train_step and test_step instead"
                )
        finally:
            self._inner.pop(name, None)
        return None

    def weights_now(self) -> dict[str, Any]:
        """Return the model's state dict, whole also where ranks hold shares of it; every rank."""
        loop = self._running
        return self.model.state_dict() if loop is None else loop.strategy.model_state(loop.model)

    def optimizer_now(self) -> dict[str, Any] | None:
        """Return the optimizer's state dict likewise; every rank."""
        loop = self._running
        if self.optimizer is None or loop is None:
            return None if self.optimizer is None else self.optimizer.state_dict()
        return loop.strategy.optimizer_state(loop.model, self.optimizer)

    def start_at(self, state: TrainState) -> None:
        """Go on from where a state that was loaded stands."""
        self._state, self._goal, self._started = state, state.epoch, True
        self.progress_checker.follow(state)

    def pack(self) -> dict[str, Any]:
        """Return what training has changed, to be taken to another process."""
        changed = {name: getattr(self, name) for name in _CHANGES}
        parts = {name: getattr(self, name).state_dict() for name in self._parts()}
        learned = [callback.state_dict() for callback in self._callbacks]
        return {"changed": changed, "parts": to_plain(parts), "callbacks": to_plain(learned)}

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Take over what `pack` returned, in place."""
        for name, value in packed["changed"].items():
            setattr(self, name, value)
        for name, state in packed["parts"].items():
            getattr(self, name).load_state_dict(state)
        for callback, state in zip(self._callbacks, packed["callbacks"], strict=True):
            callback.load_state_dict(state)

    # ------------------------------------------------------------------------ pieces

    def _train(self, epochs: int, loader: Any, valid_loader: Any) -> None:
        self._check_optimizer()
        self._check_step("train_step")
        if valid_loader is not None:
            self._check_step("test_step")
        # An epoch that was left half done, since time was over, is finished from its snapshot.
        half_done = self._state.batch > 0 and self._options["snapshot_path"] is not None
        goal, resumes = self._goal + epochs, half_done or not self._started
        loop = self._make_loop(loader, valid_loader, goal)
        self._started, self._running = True, loop
        try:
            loop.run(resume=resumes)
        except KeyboardInterrupt as stop:
            note_best(stop, self.best_epoch)
            raise
        finally:
            self._running = None
            self._take_from(loop)
            # A snapshot may stand beyond what this call was to reach: the next call's share.
            self._goal = min(goal, loop.state.epoch)

    def _test(self, loader: Any) -> dict[str, Any]:
        self.log_reset()
        row = self.evaluate(loader)
        self.progress_checker.step += len(self.log_test["loss"])
        self.progress_checker.update_epoch()
        self._tested.append(row)
        return row

    def _make_loop(self, train: Any, val: Any, epochs: int = 1) -> UserLoop:
        """Make a loop that stands where the last one ended; without `train`, one that tests."""
        options = {"epochs": epochs, **self._options}
        if train is None:
            options.pop("limit_train_batches", None)  # a share of no loader
        loop = UserLoop(
            self,
            self.model,
            UserStep(self),
            None if train is None else self.optimizer,
            train,
            val,
            world=self._world,
            options=Options(**options),
            scheduler=None if train is None else self.scheduler,
            metrics=self._metrics,
            callbacks=self._callbacks,
        )
        loop.state, loop.history = self._state, self.history
        if self._scaler_state:
            loop.scaler.load_state_dict(self._scaler_state)
        if loop.ema is not None and self._ema_state:
            # The model has the average, as a finished run leaves it; its own weights lie aside.
            average = dict(loop.ema.average)
            loop.ema.load_state_dict({"updates": self._ema_state["updates"], "average": average})
            self.model.load_state_dict(self._ema_state["own"])
            loop.ema.apply(True)
        return loop

    def _take_from(self, loop: UserLoop) -> None:
        self._state, self.history = loop.state, loop.history
        self._scaler_state = loop.scaler.state_dict()
        if loop.ema is not None and loop.model is self.model:
            loop.ema.apply(False)
            own = copy.deepcopy(self.model.state_dict())
            self._ema_state = {"updates": loop.ema.updates, "own": own}
            loop.ema.apply(True)
        self.progress_checker.follow(loop.state)

    def _parts(self) -> list[str]:
        names = ("model", "optimizer", "scheduler")
        return [name for name in names if getattr(self, name) is not None]

    def _predict(self, module: nn.Module, batch: Any) -> Any:
        return on_cpu(self.predict_step(batch))

    def _loss_only(self, batch: Any) -> dict[str, Any]:
        if self.loss_step is None:
            raise self._no_step("train_step" if self.mode == "train" else "test_step")
        return {"loss": self.loss_step(self.model, batch).loss}

    def _hand_on(self, name: str, argument: Any) -> bool:
        """Inside the loop, do what the loop wanted to do inside an override."""
        inner = self._inner.pop(name, None)
        if inner is None:
            return False
        with self._from_outside(name):
            inner(argument)
        return True

    @contextmanager
    def _from_outside(self, name: str) -> Iterator[None]:
        """Note that an override is running already, so that the loop does not call it again."""
        self.under_way.add(name)
        try:
            yield
        finally:
            self.under_way.discard(name)

    def _own_device(self, device: Device) -> str | torch.device | None:
        """Return this rank's device of those that were given."""
        if isinstance(device, str) or not isinstance(device, Sequence):
            return device
        devices = list(device)
        if not devices:
            raise InvalidValueError("device=[] names no device; give e.g. 'cpu' or None")
        ranks = World.current("cpu").size
        if len(devices) > 1 and ranks == 1:
            logger.warning(
                "device names %d devices, but there is one process: it uses %s; "
                "Trainer.add_on(MultiGPUAddon) trains on all of them",
                len(devices),
                devices[0],
            )
        return devices[local_rank() % len(devices)]

    def _pick_precision(self, use_amp: bool, precision: Any, device: torch.device) -> str:
        return pick_precision(use_amp, precision, device)

    @property
    def _is_cut(self) -> bool:
        return self._options.get("strategy") == "fsdp" and self._world.size > 1

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise InvalidTypeError(
                f"optimizer={self.optimizer!r} is no torch.optim.Optimizer, which mode='train' "
                "needs; give one, or mode='test'"
            )

    def _check_step(self, name: str) -> None:
        if self.loss_step is None and not self.overrides(name):
            raise self._no_step(name)

    def _no_step(self, name: str) -> InvalidTypeError:
        return InvalidTypeError(
            f"{type(self).__name__} has neither {name}() nor a loss; define {name}(self, batch) in "
            "a subclass, or give loss=torch.nn.MSELoss()"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.scheduler, LRScheduler) and self.optimizer is not None:
            _track_steps(self.optimizer)


def _track_steps(optimizer: Optimizer) -> None:
    """Let torch's schedulers see the steps of an optimizer that came out of a pickle."""
    # They put a mark on its ``step`` when they are made, which a pickle does not keep, and warn
    # where it is missing.
    _Mark(optimizer)


class _Mark(LRScheduler):
    """A scheduler that changes nothing."""

    def get_lr(self) -> list[Any]:
        """Return the rates there are."""
        return [group["lr"] for group in self.optimizer.param_groups]
