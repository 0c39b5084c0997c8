"""The runs of a `ml4cube.training.trainer.Trainer`: each is a loop over the user's steps.

What one loop has reached is kept in the Trainer's `RunState`, and the next loop continues from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from ml4cube.core.display import Summary, counted, one_line
from ml4cube.core.errors import EmptyPartError, InvalidTypeError
from ml4cube.training.callbacks import Callback, explain_interrupt
from ml4cube.training.inputs.rollout import refuse_several_steps
from ml4cube.training.measure.summary import run_facts, summary_of_run
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.loop import Loop
from ml4cube.training.run.trainer_state import TrainerState
from ml4cube.training.run.user_steps import FollowTrainer, UserStep
from ml4cube.training.state import default_monitor


def follow(trainer: TrainerState) -> Callback:
    """Return the callback that keeps logs, progress and best weights of a Trainer."""
    return FollowTrainer(trainer)


def summary_of(trainer: TrainerState) -> Summary:
    """Return how far training is, the next call, and what is trained with what."""
    options, loss = trainer._options, "that of train_step"
    if trainer.loss_step is not None:
        loss = one_line(trainer.loss_step.loss)
    facts = {
        **run_facts(trainer.model, trainer._world, options, trainer.optimizer, trainer.scheduler),
        "Loss": loss,
        "Metrics": list(trainer._metrics or ()),
    }
    next_step, best = "run(n_epoch, loader, valid_loader)", None
    if trainer.best_epoch is not None and trainer.best_loss is not None:
        best = trainer.best_epoch, trainer.best_loss
        next_step += " trains on, apply_weights() loads those of the best epoch"
    if trainer.mode == "test":
        next_step = "run(1, loader), which tests"
    epochs = counted(trainer._run_state.counters.epoch, "epoch")
    monitor = options.monitor or default_monitor(trainer.history)
    return summary_of_run(epochs, monitor, best, next_step, facts, trainer.history)


def train(
    trainer: TrainerState, epochs: int, loader: Any, valid_loader: Any, wrapped: tuple[str, ...]
) -> None:
    """Train for some epochs more."""
    check_optimizer(trainer)
    trainer.check_step("train_step")
    if valid_loader is not None:
        trainer.check_step("test_step")
    run_state = trainer._run_state
    goal = run_state.goal + epochs
    loop = make_loop(trainer, loader, valid_loader, goal, wrapped)
    # An epoch that `max_time` has interrupted is finished from its snapshot.
    is_inside_epoch = run_state.counters.batch > 0
    is_interrupted = is_inside_epoch and trainer._options.snapshot_path is not None
    resume = is_interrupted or not run_state.has_trained
    run_state.has_trained = True
    trainer._loop = loop
    try:
        loop.run(resume=resume)
    except KeyboardInterrupt as interrupt:
        explain_interrupt(interrupt, trainer.best_epoch)
        raise
    finally:
        trainer._loop = None
        # A run that stopped early trained fewer epochs, and the next call counts from there.
        # A snapshot may have had more than the goal; those count in the next call.
        run_state.goal = min(goal, loop.state.epoch)
        _keep_state_of(trainer, loop)


def train_batch(trainer: TrainerState, batch: Any) -> dict[str, float]:
    """Take one optimizer step on one batch; return its numbers by name."""
    if trainer.is_sharded:
        raise InvalidTypeError("strategy='fsdp' trains in run() only; call run()")
    loop = make_loop(trainer, [batch], wrapped=())
    result = loop.train_batch(batch)
    _keep_state_of(trainer, loop)
    numbers: dict[str, Any] = {"loss": result.loss, **result.logs}
    return {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}


def evaluate(
    trainer: TrainerState, loader: Any, wrapped: tuple[str, ...] = ("run_batch",)
) -> dict[str, Any]:
    """Test once, within the user's methods `wrapped`; empties `log_test`."""
    with trainer.testing():
        return dict(make_loop(trainer, wrapped=wrapped).evaluate(loader))


def predict(trainer: Any, loader: Iterable[Any]) -> Any:
    """Return the predictions for all batches of a loader, on the CPU."""
    if not trainer._overrides("predict_step") and not trainer._overrides("test_step"):
        refuse_several_steps({"loader": loader}, "predict_cube(..., rollout=) predicts them")
    was_training = trainer.model.training
    try:
        predictions = make_loop(trainer).engine.predict(loader, trainer.predict_step)
        return _concatenate([_to_cpu(prediction) for prediction in predictions])
    finally:
        trainer.model.train(was_training)


def make_loop(
    trainer: TrainerState,
    loader: Any = None,
    val: Any = None,
    epochs: int = 1,
    wrapped: tuple[str, ...] = ("run_batch",),
) -> Loop:
    """Make a loop that continues where the last one ended; without a loader, one that tests.

    `wrapped` are the methods whose overrides the loop calls around its own passes or batches.
    """
    stepped: tuple[Any, ...] = (trainer.optimizer, trainer.scheduler)
    if loader is None:
        stepped = ()
    engine = Engine(
        trainer.model,
        UserStep(trainer, wrapped),
        *stepped,
        world=trainer._world,
        options=replace(trainer._options, epochs=epochs),
        run_state=trainer._run_state,
    )
    return Loop(engine, loader, val, metrics=trainer._metrics, callbacks=trainer._callbacks)


def check_optimizer(trainer: TrainerState) -> None:
    """Refuse to train without an optimizer."""
    if not isinstance(trainer.optimizer, Optimizer):
        raise InvalidTypeError(
            "optimizer must be a torch.optim.Optimizer for mode='train', got "
            f"{trainer.optimizer!r}; give one, or mode='test'"
        )


def _keep_state_of(trainer: TrainerState, loop: Loop) -> None:
    """Keep what the next loop needs."""
    trainer._run_state = loop.run_state.left()
    if loop.engine.ema is not None and not trainer.is_sharded:
        trainer._run_state.average = loop.engine.ema.leave()
    trainer.progress_checker.follow(loop.state)


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
