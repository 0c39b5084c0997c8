"""How the loop calls the methods that a user's Trainer defines: its steps, its hooks.

There is no loop here: every method hands on to the one it overrides in `Loop`, some of them
through a method of the Trainer that an add-on may have overridden.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ml4cube.core.errors import EmptyPartError, InvalidTypeError
from ml4cube.training.callbacks import Callback, monitored
from ml4cube.training.measure.validation import Tally
from ml4cube.training.run.batches import count_samples
from ml4cube.training.run.feed import Portion, Weight
from ml4cube.training.run.loop import Loop, StepResult, Supervised
from ml4cube.training.state import capture_rng, restore_rng

if TYPE_CHECKING:
    from ml4cube.training.run.stepwise import Stepwise

_FOR_METRICS = ("output", "target")


class UserStep:
    """The step of a Trainer: `train_step` or `test_step`, by the mode of the model."""

    def __init__(self, trainer: Stepwise) -> None:
        self._trainer = trainer
        # Whether the loader's sizes say nothing of how many samples a batch has.
        self.counts_itself = trainer.overrides("count_samples")
        self._counted: dict[bool, bool] = {}  # in training, or not: whether samples are known

    def weigh(self, batch: Any, training: bool) -> torch.Tensor | None:
        """Say what a batch's loss counts beside those of others."""
        loss = self._loss_step(training)
        return None if loss is None else loss.weigh(batch)

    def count(self, batch: Any, training: bool) -> int:
        """Say how many samples a batch has."""
        if not self.counts_itself and self._loss_step(training) is not None:
            return count_samples(batch)
        samples = self._trainer.count_samples(batch)
        if samples is None:
            return self._take_as_one(batch, training)
        try:
            number = operator.index(samples)
        except TypeError:
            number = -1
        if number < 0:
            raise InvalidTypeError(
                f"{type(self._trainer).__name__}.count_samples must return a whole number of "
                f"samples, or None, got {samples!r}"
            )
        return number if self._counted.setdefault(training, True) else 1

    def _take_as_one(self, batch: Any, training: bool) -> int:
        """Count a batch as one, and say so, unless batches before were counted by samples."""
        trainer = self._trainer
        who, kind = type(trainer).__name__, type(batch).__name__
        if self._counted.get(training):
            raise InvalidTypeError(
                f"of some batches it is known how many samples they have, of this one ({kind}) it "
                f"is not; define {who}.count_samples(self, batch), which returns them"
            )
        if training not in self._counted and trainer.is_main:
            warnings.warn(
                f"how many samples a batch ({kind}) has is not known, so in losses and metrics "
                "every batch counts the same, and they depend on how samples are cut into "
                f"batches; define {who}.count_samples(self, batch), which returns them",
                UserWarning,
                stacklevel=2,
            )
        self._counted[training] = False
        return 1

    def _loss_step(self, training: bool) -> Supervised | None:
        """The step that is made of the loss given to the Trainer, where that is the one taken."""
        own = self._trainer.overrides("train_step" if training else "test_step")
        return None if own else self._trainer.loss_step

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the user's step on one batch."""
        trainer = self._trainer
        if not trainer.overrides("run_batch") or "run_batch" in trainer.under_way:
            return self._run(module, batch)
        box: list[StepResult] = []
        trainer.pass_through("run_batch", lambda b: box.append(self._run(module, b)), batch)
        return box[0]

    def loss_parts(self) -> list[Any]:
        """Return what decides about the loss: the user's methods, and losses that they may use."""
        trainer = self._trainer
        parts = [] if trainer.loss_step is None else [trainer.loss_step.loss]
        parts += [
            getattr(type(trainer), n) for n in ("train_step", "test_step") if trainer.overrides(n)
        ]
        return parts + [
            part
            for part in vars(trainer).values()
            if isinstance(part, nn.Module) and next(part.parameters(), None) is None
        ]

    def _run(self, module: nn.Module, batch: Any) -> StepResult:
        trainer, name = self._trainer, "train_step" if module.training else "test_step"
        if not trainer.overrides(name) and trainer.loss_step is not None:
            result = trainer.loss_step(module, batch)
            trainer.logging({"loss": result.loss})
            return result
        raw, trainer.model = trainer.model, module
        try:
            values = getattr(trainer, name)(batch)
        finally:
            trainer.model = raw
        return self._read(name, values)

    def _read(self, name: str, values: Any) -> StepResult:
        who = f"{type(self._trainer).__name__}.{name}"
        if not isinstance(values, Mapping) or not isinstance(values.get("loss"), torch.Tensor):
            raise InvalidTypeError(
                f"{who} returned {_short(values)}; return a dict whose 'loss' is a tensor, as in "
                "{'loss': loss}"
            )
        measured = name == "test_step" and self._trainer.has_metrics
        if measured and not values.keys() >= set(_FOR_METRICS):
            raise InvalidTypeError(
                f"{who} returned {_short(values)}, but metrics= are computed from 'output' and "
                "'target'; return {'loss': loss, 'output': pred, 'target': target}"
            )
        self._trainer.logging(values)
        logs = {
            key: value
            for key, value in values.items()
            if key != "loss" and key not in _FOR_METRICS and _is_number(value)
        }
        return StepResult(values["loss"], values.get("output"), values.get("target"), logs)


class UserLoop(Loop):
    """The loop, passing through `run_epoch` and `run_batch` of a Trainer that overrides them."""

    def __init__(self, trainer: Stepwise, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer = trainer

    def take_step(self, portions: Sequence[Portion], total: Weight) -> StepResult:
        """Take a step, inside the user's `run_batch` where it is of one batch."""
        if len(portions) != 1 or not self._trainer.overrides("run_batch"):
            return super().take_step(portions, total)
        take, box = super().take_step, []

        def inner(batch: Any) -> None:
            box.append(take([portions[0]._replace(batch=batch)], total))

        self._trainer.pass_through("run_batch", inner, portions[0].batch)
        return box[0]

    def _train(self) -> None:
        train, own = super()._train, self.feed.loader

        def inner(loader: Any) -> None:
            self.feed.loader = loader  # the override may have put something around it
            try:
                train()
            finally:
                self.feed.loader = own

        self._trainer.pass_through("run_epoch", inner, own)

    def _validate(self) -> Tally:
        validate, own = super()._validate, self.val_loader
        box: list[Tally] = []

        def inner(loader: Any) -> None:
            self.val_loader = loader
            try:
                box.append(validate())
            finally:
                self.val_loader = own

        with self._trainer.testing():
            self._trainer.pass_through("run_epoch", inner, own)
        return box[0]

    def _evaluate(self, loader: Any) -> tuple[Tally, bool]:
        self._trainer.log_test.clear()  # an evaluation cut off by a signal starts again
        with self._trainer.testing():
            return super()._evaluate(loader)


class Follow(Callback):
    """Keeps a Trainer's logs, progress and best weights up to date with the loop."""

    def __init__(self, trainer: Stepwise) -> None:
        self._trainer = trainer
        self._rng: dict[str, Any] | None = None

    @property
    def monitor(self) -> str:
        """The column that the Trainer's best epoch is chosen by."""
        loop = self._trainer._running
        return "val_loss" if loop is None else loop.monitor

    @property
    def mode(self) -> str:
        """Which way that column is better."""
        better: str = self._trainer._options.get("mode", "min")
        return better

    def on_train_start(self, loop: Loop) -> None:
        """Go on with the random numbers of the run before, and know where a snapshot stood."""
        if self._rng is not None and loop.options.seed is not None:
            restore_rng(self._rng, loop.world.device)
        self._trainer.progress_checker.follow(loop.state)

    def on_epoch_start(self, loop: Loop) -> None:
        """Empty the logs."""
        self._trainer.log_reset()

    def on_step_end(self, loop: Loop) -> None:
        """Count."""
        self._trainer.progress_checker.step = loop.state.step

    def on_row(self, loop: Loop, row: dict[str, Any]) -> None:
        """Add the user's own metrics, which see the batches of all ranks."""
        row |= self._trainer.own_metrics()

    def on_check(self, loop: Loop, row: dict[str, Any]) -> None:
        """Count, and keep the weights if they are the best."""
        self._trainer.progress_checker.follow(loop.state)
        self._trainer.check_better(row["epoch"], monitored(row, loop.monitor))

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Count, also where nothing was judged."""
        self._trainer.progress_checker.follow(loop.state)

    def on_train_end(self, loop: Loop) -> None:
        """Remember where random numbers stand."""
        self._rng = capture_rng(loop.world.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the best weights so far, and where they come from."""
        return self._trainer.best_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back; a snapshot brings its own random numbers."""
        self._trainer.load_best_state(state)
        self._rng = None

    def forget(self) -> None:
        """Let the next epoch be the best."""
        self.load_state_dict({"epoch": None, "loss": None, "weights": None})


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: on_cpu(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(on_cpu(item) for item in value)
    raise InvalidTypeError(
        f"predict_step returned a {type(value).__name__}; return tensors, or a tuple or dict of "
        "them"
    )


def joined(parts: list[Any]) -> Any:
    if not parts:
        raise EmptyPartError("loader gave no batch to predict; give one that is not empty")
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(parts)


def _is_number(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and value.ndim == 0) or isinstance(value, int | float)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {list(value)}"
    return f"a {type(value).__name__}"
