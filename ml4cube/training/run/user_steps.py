"""The steps that a user's Trainer defines, as the loop takes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError, check_whole
from ml4cube.training.callbacks import BestModel
from ml4cube.training.events import TrainingLoop, monitored
from ml4cube.training.inputs.batches import StepResult, count_samples
from ml4cube.training.inputs.options import Options
from ml4cube.training.run.steps import Step, Supervised
from ml4cube.training.state import capture_rng, restore_rng

_FOR_METRICS = ("output", "target")


class UserStep(Step):
    """The step of a Trainer: `train_step` or `test_step`, by the mode of the model.

    The methods in `wrapped`, such as `run_epoch`, are called around the passes or batches if the
    user overrides them. An override calls the default of Trainer by super(), and that calls the
    function which `Trainer.pending` holds for it.
    """

    def __init__(self, trainer: Any, wrapped: tuple[str, ...]) -> None:
        self._trainer = trainer
        self._overridden = [name for name in wrapped if trainer._overrides(name)]
        self.counts_itself = trainer._overrides("count_samples")
        # In training (True) and validation (False): whether the first batch had a known number of
        # samples. If not, every batch counts as one.
        self._has_counts: dict[bool, bool] = {}

    def prepare(self, options: Options, data: Mapping[str, Any]) -> None:
        """Prepare the step made of the Trainer's loss, which a user's own may call."""
        if self._default_step(training=True) is None:
            super().prepare(options, data)
        if self._trainer.loss_step is not None:
            self._trainer.loss_step.prepare(options, data)

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the user's step on one batch."""
        trainer, name = self._trainer, "train_step" if module.training else "test_step"
        default_step = self._default_step(module.training)
        if default_step is not None:
            result = default_step(module, batch)
            trainer.logging({"loss": result.loss})
            return result
        unwrapped, trainer.model = trainer.model, module
        try:
            values = getattr(trainer, name)(batch)
        finally:
            trainer.model = unwrapped
        return self._to_result(name, values)

    @property
    def loss_parts(self) -> list[Any]:
        """The user's methods, and losses that they may use."""
        trainer = self._trainer
        default_loss = []
        if trainer.loss_step is not None:
            default_loss = trainer.loss_step.loss_parts
        own_steps = [name for name in ("train_step", "test_step") if trainer._overrides(name)]
        modules = [part for part in vars(trainer).values() if isinstance(part, nn.Module)]
        losses = [module for module in modules if next(module.parameters(), None) is None]
        return [*default_loss, *(getattr(type(trainer), name) for name in own_steps), *losses]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules that the user's methods may use."""
        modules: dict[str, nn.Module] = self._trainer._modules()
        return modules

    def weigh(self, batch: Any, training: bool) -> torch.Tensor | None:
        """Return the weight of a batch's loss; None is its number of samples."""
        default_step = self._default_step(training)
        if default_step is None:
            return None
        return default_step.weigh(batch, training)

    def count(self, batch: Any, training: bool) -> int:
        """Return the number of samples of a batch."""
        if not self.counts_itself and self._default_step(training) is not None:
            return count_samples(batch)
        samples = self._trainer.count_samples(batch)
        who, kind = type(self._trainer).__name__, type(batch).__name__
        if training not in self._has_counts:
            self._has_counts[training] = samples is not None
            if samples is None and self._trainer.is_main:
                warnings.warn(
                    f"the number of samples in a batch ({kind}) is not known, so every batch "
                    "counts the same in losses and metrics, which then depend on how samples are "
                    f"cut into batches; define {who}.count_samples(self, batch)",
                    UserWarning,
                    stacklevel=2,
                )
        if not self._has_counts[training]:
            return 1
        if samples is None:
            raise InvalidTypeError(
                f"the number of samples is known of some batches, but not of this one ({kind}); "
                f"define {who}.count_samples(self, batch)"
            )
        return check_whole(f"{who}.count_samples()", samples, 0)

    def around_pass(self, run_pass: Callable[[Any], None], loader: Any, training: bool) -> None:
        """Run a pass over a loader within the user's `run_epoch`."""
        with nullcontext() if training else self._trainer.testing():
            self._call_override("run_epoch", run_pass, loader)

    def around_batch(self, run_batch: Callable[[Any], None], batch: Any) -> None:
        """Train or evaluate on one batch within the user's `run_batch`."""
        self._call_override("run_batch", run_batch, batch)

    def _call_override(self, name: str, default: Callable[[Any], None], argument: Any) -> None:
        """Call a method that the user overrides, whose super() call runs `default`."""
        if name not in self._overridden:
            default(argument)
            return
        trainer = self._trainer
        trainer.pending[name] = default
        try:
            getattr(trainer, name)(argument)
            if name in trainer.pending:
                raise InvalidTypeError(
                    f"{type(trainer).__name__}.{name} did not call super().{name}(...), so nothing "
                    "was done; call it, or define train_step and test_step instead"
                )
        finally:
            trainer.pending.pop(name, None)

    def _default_step(self, training: bool) -> Supervised | None:
        """Return the step made of the Trainer's loss, if the user defines none."""
        default_step: Supervised | None = self._trainer.loss_step
        if default_step is not None:
            default_step.epoch = self.epoch
        if self._trainer._overrides("train_step" if training else "test_step"):
            return None
        return default_step

    def _to_result(self, name: str, values: Any) -> StepResult:
        """Check and log what a user's step returned, and return it as a StepResult."""
        who = f"{type(self._trainer).__name__}.{name}"
        if not isinstance(values, Mapping) or not isinstance(values.get("loss"), torch.Tensor):
            raise InvalidTypeError(
                f"{who} must return a dict whose 'loss' is a tensor, as in {{'loss': loss}}, got "
                f"{_describe(values)}"
            )
        needs_output = name == "test_step" and bool(self._trainer._metrics)
        if needs_output and not values.keys() >= set(_FOR_METRICS):
            raise InvalidTypeError(
                f"{who} must return 'output' and 'target' too, from which metrics= are computed, "
                f"got {_describe(values)}"
            )
        self._trainer.logging(values)
        logs = {
            key: value
            for key, value in values.items()
            if key != "loss" and key not in _FOR_METRICS and _is_number(value)
        }
        return StepResult(values["loss"], values.get("output"), values.get("target"), logs)


class FollowTrainer(BestModel):
    """Keep a Trainer's logs, progress and best weights up to date with the loop."""

    def __init__(self, trainer: Any, mode: str) -> None:
        super().__init__(mode=mode)  # the column is that of each run
        self._trainer = trainer
        self._rng: dict[str, Any] | None = None

    def on_train_start(self, loop: TrainingLoop) -> None:
        """Continue with the random state at the end of the run before."""
        if self._rng is not None and loop.options.seed is not None:
            restore_rng(self._rng, loop.world.device)
        self._trainer.progress_checker.follow(loop.state)

    def on_epoch_start(self, loop: TrainingLoop) -> None:
        """Empty the logs."""
        self._trainer.log_reset()

    def on_step_end(self, loop: TrainingLoop) -> None:
        """Update the step count."""
        self._trainer.progress_checker.step = loop.state.step

    def on_row(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Add the user's own metrics, which are computed from the batches of all ranks."""
        row |= self._trainer.user_metrics()

    def on_check(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Update the counts, and keep the weights if they are the best."""
        self._trainer.progress_checker.follow(loop.state)
        self._trainer.check_better(row["epoch"], monitored(row, self.monitor))

    def on_epoch_end(self, loop: TrainingLoop, row: dict[str, Any]) -> None:
        """Update the counts, also if nothing was validated."""
        self._trainer.progress_checker.follow(loop.state)

    def on_train_end(self, loop: TrainingLoop) -> None:
        """Remember the random state; the model keeps the weights of the last epoch."""
        self._rng = capture_rng(loop.world.device)

    def keep_if_better(self, epoch: int, value: float) -> bool:
        """Keep the weights if they are the best so far, and return True then; every rank."""
        if not self._improves(epoch, value):
            return False
        weights = self._trainer.weights_now()
        if self._trainer.is_main:
            self._keep(weights, self._trainer._outside())
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best weights; a snapshot restores the random state itself."""
        super().load_state_dict(state)
        self._rng = None


def _is_number(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and value.ndim == 0) or isinstance(value, int | float)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {list(value)}"
    return f"a {type(value).__name__}"
