"""The runs of a `ml4cube.training.trainer.Trainer`: each is a `Loop` over the user's steps.

What one loop has reached is kept in the Trainer's `RunState`, and the next loop continues from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from ml4cube.core.display import Summary, counted, one_line
from ml4cube.core.errors import EmptyPartError, InvalidTypeError
from ml4cube.training.callbacks import explain_interrupt
from ml4cube.training.inputs.checks import refuse_several_steps
from ml4cube.training.measure.summary import run_facts, summary_of_run
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.loop import Loop
from ml4cube.training.run.trainer_state import TrainerState
from ml4cube.training.run.user_steps import UserStep
from ml4cube.training.state import default_monitor


class TrainerRuns(TrainerState):
    """The base of Trainer: what runs a loop, between the Trainer's methods and its state."""

    predict_step: Callable[[Any], Any]  # which Trainer defines

    def _summary(self) -> Summary:
        """Return how far training is, the next call, and what is trained with what."""
        options, loss = self._options, "that of train_step"
        if self.loss_step is not None:
            loss = one_line(self.loss_step.loss)
        facts = {
            **run_facts(self.model, self._world, options, self.optimizer, self.scheduler),
            "Loss": loss,
            "Metrics": list(self._metrics or ()),
        }
        next_step = "run(n_epoch, loader, valid_loader)"
        if self._best.found is not None:
            next_step += " trains on, apply_weights() loads those of the best epoch"
        if self.mode == "test":
            next_step = "run(1, loader), which tests"
        epochs = counted(self._run_state.counters.epoch, "epoch")
        monitor = options.monitor or default_monitor(self.history)
        return summary_of_run(epochs, monitor, self._best.found, next_step, facts, self.history)

    def _train(self, epochs: int, loader: Any, valid_loader: Any, wrapped: tuple[str, ...]) -> None:
        """Train for some epochs more, within the user's methods `wrapped`."""
        self._check_optimizer()
        self.check_step("train_step")
        if valid_loader is not None:
            self.check_step("test_step")
        run_state = self._run_state
        goal = run_state.goal + epochs
        loop = self._make_loop(loader, valid_loader, goal, wrapped)
        # An epoch that `max_time` has interrupted is finished from its snapshot.
        is_inside_epoch = run_state.counters.batch > 0
        is_interrupted = is_inside_epoch and self._options.snapshot_path is not None
        resume = is_interrupted or not run_state.has_trained
        run_state.has_trained = True
        self._loop, self._best.monitor = loop, loop.monitor
        try:
            loop.run(resume=resume)
        except KeyboardInterrupt as interrupt:
            explain_interrupt(interrupt, self.best_epoch)
            raise
        finally:
            self._loop = None
            # A run that stopped early trained fewer epochs, and the next call counts from there.
            # A snapshot may have had more than the goal; those count in the next call.
            run_state.goal = min(goal, loop.state.epoch)
            self._keep_state_of(loop)

    def _train_batch(self, batch: Any) -> dict[str, float]:
        """Take one optimizer step on one batch; return its numbers by name."""
        if self.is_sharded:
            raise InvalidTypeError("strategy='fsdp' trains in run() only; call run()")
        loop = self._make_loop([batch], wrapped=())
        result = loop.train_batch(batch)
        self._keep_state_of(loop)
        numbers: dict[str, Any] = {"loss": result.loss, **result.logs}
        return {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}

    def _evaluate(self, loader: Any, wrapped: tuple[str, ...] = ("run_batch",)) -> dict[str, Any]:
        """Test once, within the user's methods `wrapped`; empties `log_test`."""
        with self.testing():
            return dict(self._make_loop(wrapped=wrapped).evaluate(loader))

    def _predict(self, loader: Iterable[Any]) -> Any:
        """Return the predictions for all batches of a loader, on the CPU."""
        if not self._overrides("predict_step") and not self._overrides("test_step"):
            refuse_several_steps({"loader": loader}, "predict_cube(..., rollout=) predicts them")
        was_training = self.model.training
        try:
            predictions = self._make_loop().engine.predict(loader, self.predict_step)
            return _concatenate([_to_cpu(prediction) for prediction in predictions])
        finally:
            self.model.train(was_training)

    def _make_loop(
        self,
        loader: Any = None,
        val: Any = None,
        epochs: int = 1,
        wrapped: tuple[str, ...] = ("run_batch",),
    ) -> Loop:
        """Make a loop that continues where the last one ended; without a loader, one that tests.

        `wrapped` are the methods whose overrides the loop calls around its own passes or batches.
        """
        stepped: tuple[Any, ...] = (self.optimizer, self.scheduler)
        if loader is None:
            stepped = ()
        engine = Engine(
            self.model,
            UserStep(self, wrapped),
            *stepped,
            world=self._world,
            options=replace(self._options, epochs=epochs),
            run_state=self._run_state,
        )
        return Loop(engine, loader, val, metrics=self._metrics, callbacks=self._callbacks)

    def _check_optimizer(self) -> None:
        """Refuse to train without an optimizer."""
        if not isinstance(self.optimizer, Optimizer):
            raise InvalidTypeError(
                "optimizer must be a torch.optim.Optimizer for mode='train', got "
                f"{self.optimizer!r}; give one, or mode='test'"
            )

    def _keep_state_of(self, loop: Loop) -> None:
        """Keep what the next loop needs."""
        self._run_state = loop.run_state.left()
        if loop.engine.ema is not None and not self.is_sharded:
            self._run_state.average = loop.engine.ema.leave()
        self.progress_checker.follow(loop.state)


def _to_cpu(value: Any) -> Any:
    """Return copies on the CPU of tensors, which may be nested in tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _to_cpu(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to_cpu(item) for item in value)
    raise InvalidTypeError(
        "predict_step must return tensors, or a tuple or dict of them, got a "
        f"{type(value).__name__}"
    )


def _concatenate(parts: list[Any]) -> Any:
    """Return the tensors of all batches as one, nested like those of one batch."""
    if not parts:
        raise EmptyPartError("loader gave no batch to predict; give one that is not empty")
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _concatenate([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_concatenate(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(parts)
