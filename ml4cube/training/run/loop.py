"""The loop: the only code that runs epochs.

A `Loop` has an `Engine`, which runs the steps, and one `RunState`, which says how far the run is.
`Feed` gives the training batches, `Validation` runs validation passes, `Requests` are what ranks
tell one another, `Snapshot` saves and resumes. The faces of the package translate arguments into a
`Loop`; callbacks follow it. Methods marked "every rank" exchange something, so all ranks must call
them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, RunError
from ml4cube.training.events import HOOKS, Callback, monitored
from ml4cube.training.inputs.batches import sets_by_argument
from ml4cube.training.inputs.checks import check_loaders
from ml4cube.training.measure.means import rank_columns, refuse_non_finite
from ml4cube.training.ranks.messages import Requests, reporting_errors
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.feed import Feed
from ml4cube.training.run.snapshot import Snapshot
from ml4cube.training.run.validation import Validation, ValidationMeasures
from ml4cube.training.state import History, TrainState, kept_rng

logger = logging.getLogger(__name__)

_OUT_OF_TIME = "max_time is over"


class Loop:
    """Train a model, validate it, and call the callbacks."""

    def __init__(
        self,
        engine: Engine,
        train: Any = None,
        val: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        options = engine.options
        check_loaders(train, val, options.snapshot_path)
        engine.step.prepare(options, {"train_data": train, **sets_by_argument("test_data", val)})
        self.engine, self.run_state = engine, engine.run_state
        self.world, self.options, self.step = engine.world, options, engine.step
        self.strategy, self.scheduler = engine.strategy, engine.scheduler
        self.feed = Feed(train, engine)
        self.validation = Validation(engine, val, metrics)
        self.requests = Requests(engine.world)
        self.callbacks = [c for c in callbacks if not (options.fast_dev_run and c.writes)]
        self.snapshot: Snapshot | None = None

    # ------------------------------------------------------ what callbacks may use

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self.engine.model

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.engine.optimizer

    @property
    def scaler(self) -> Any:
        """The scaler of gradients in fp16."""
        return self.run_state.scaler

    @property
    def state(self) -> TrainState:
        """Epochs and steps so far."""
        return self.run_state.counters

    @state.setter
    def state(self, counters: TrainState) -> None:
        self.run_state.counters = counters

    @property
    def history(self) -> History:
        """The rows of the epochs so far."""
        return self.run_state.history

    @history.setter
    def history(self, history: History) -> None:
        self.run_state.history = history

    @property
    def resumed(self) -> bool:
        """True if this call of `run` started from a snapshot."""
        return self.run_state.resumed

    @property
    def step_loss(self) -> torch.Tensor | None:
        """The loss of the latest step's last batch."""
        return self.run_state.step_loss

    @property
    def monitor(self) -> str:
        """The column of the History that judges the run."""
        return self.options.monitor or default_column(self.validation.loader)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""
        return self.feed.steps

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this epoch that are done."""
        return self.feed.steps_of(self.state.batch)

    def outside(self) -> dict[str, torch.Tensor]:
        """Return by name the tensors that the optimizer trains besides the model."""
        return self.engine.outside()

    def load_weights(
        self, weights: Mapping[str, Any] | None, outside: Mapping[str, Any] | None = None
    ) -> None:
        """Load weights that rank 0 holds into the model of all ranks; every rank."""
        self.engine.load_weights(weights, outside)

    def stop(self, reason: str) -> None:
        """End training after this epoch, or its next validation between steps; on any rank."""
        self.run_state.stop_reason = self.run_state.stop_reason or reason

    def save_snapshot(self) -> None:
        """Write the snapshot, if the run has one that is older than its state; every rank."""
        if self.snapshot is not None and not self.snapshot.is_current:
            self._save()

    # ------------------------------------------------------------------- a call

    @property
    def is_over(self) -> bool:
        """True if all epochs or steps have been trained."""
        out_of_steps = self.feed.is_out_of_steps and self.state.batch == 0
        return self.state.epoch >= self.options.epochs or out_of_steps

    def run(self, *, resume: bool = True) -> nn.Module:
        """Train to the end, from the snapshot if there is one; return the model in eval mode."""
        if self.feed.loader is None:
            raise InvalidTypeError("train_data must be a loader, got None")
        if self.optimizer is None:
            raise InvalidTypeError("training needs an optimizer, got None")
        options, run_state, engine = self.options, self.run_state, self.engine
        run_state.stop_reason, run_state.is_cut = None, False
        saves = options.snapshot_path is not None
        with ExitStack() as stack:
            if options.seed is not None:
                stack.enter_context(kept_rng(self.world.device))
                torch.manual_seed(options.seed + self.world.rank)
            # Signals are handled until an error is explained, because a launcher ends all other
            # ranks as soon as one fails.
            self.requests.listen(stack, options.max_seconds, to_signals=saves)
            stack.enter_context(reporting_errors(self.world))
            stack.callback(self._call_hooks, "on_close")
            engine.check_models()
            engine.shard()
            self.feed.share_out()
            run_state.resumed = False
            if options.snapshot_path is not None:
                self.snapshot = Snapshot(self, options.snapshot_path)
                run_state.resumed = resume and self.snapshot.resume()
            engine.use_average(False)
            self._call_hooks("on_train_start")
            self._warn_if_complete()
            with suppress(_OutOfTime):
                while not self.is_finished:
                    self._run_epoch()
            if run_state.stop_reason is not None:
                epochs = self.state.epoch
                logger.info("training ended after %d epochs: %s", epochs, run_state.stop_reason)
            engine.unwrap()
            self.save_snapshot()
            engine.use_average(True)  # in the model to return, unless a callback loads others
            self._call_hooks("on_train_end")
            model = self.strategy.unshard(self.model)
        return model.eval()

    def train_batch(self, batch: Any) -> Any:
        """Take one optimizer step on one batch, outside any epoch; every rank."""
        engine = self.engine
        engine.check_models()
        self.feed.compare_sizes()
        engine.prepare()
        engine.use_average(False)  # the step changes the model's own weights
        engine.module.train()
        portion = engine.weigh(batch)
        total = self.feed.total_weight([portion] if portion.samples else [])
        if total is None:
            raise EmptyPartError("the batch to train on must have samples, got none")
        return engine.take_step([portion], total)

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Validate once, outside any epoch, exactly on any number of ranks; every rank."""
        return self.validation.evaluate(loader, self.feed.loader)

    def _warn_if_complete(self) -> None:
        if not self.world.is_main or not self.is_finished:
            return
        path, options = self.options.snapshot_path, self.options
        why = f"epochs={options.epochs}, max_steps={options.max_steps}"
        text = (
            f"training is already complete: {self.state.epoch} epochs, {self.state.step} steps "
            f"({self.run_state.stop_reason or why}). The model is that of the earlier run. To "
            "continue, ask for more epochs"
        )
        if path:
            text += f"; to start over, give another snapshot_path or delete {path}"
        warnings.warn(text, stacklevel=2)

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to train in this call."""
        return self.run_state.stop_reason is not None or self.is_over

    def _save(self) -> None:
        """Write the snapshot, with the weights that are not averaged; every rank."""
        self.run_state.keep_sums()
        if self.snapshot is not None:
            with self.engine.with_average(False):
                self.snapshot.save()

    def _call_hooks(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(self, *args)

    @cached_property
    def _hooks(self) -> dict[str, list[Callable[..., None]]]:
        """The hooks that callbacks override, so that a step calls no empty ones."""
        return {
            name: [
                getattr(callback, name)
                for callback in self.callbacks
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            for name in HOOKS
        }

    # ------------------------------------------------------------------ an epoch

    def _run_epoch(self) -> None:
        """Train for one epoch, or for what is left of it, and validate; every rank."""
        state = self.state
        self.step.epoch = state.epoch + 1
        self._call_hooks("on_epoch_start")
        self.engine.prepare()
        if self.feed.position is None:
            state.start_epoch()
        self.engine.begin_measures()
        self.step.around_pass(self._train, self.feed.loader, training=True)
        validates = self._validates_now()
        with self.engine.with_average():
            row = self._record_row(validates)
            state.epoch += 1
            state.start_epoch()
            self._step_scheduler()
            if validates or self.validation.loader is None:
                self._check(row)
            self._call_hooks("on_epoch_end", row)
        if self.requests.is_out_of_time:
            self.stop(_OUT_OF_TIME)
        if self._is_stopped():
            self.stop("another rank asked to stop")
        if state.epoch % self.options.save_every == 0:
            self.save_snapshot()

    def _train(self, loader: Any) -> None:
        """Train for the rest of an epoch, on the loader or what an override passes instead."""
        original, self.feed.loader = self.feed.loader, loader
        try:
            self._take_steps()
        finally:
            self.feed.loader = original

    def _take_steps(self) -> None:
        engine, state, run_state, requests = self.engine, self.state, self.run_state, self.requests
        first_step, clock = state.step, run_state.times.step_clock
        self.feed.position_before_validation = None  # also after a validation that failed
        engine.module.train()
        requests.start_epoch(first_step)
        self._validate_between_steps()  # if the snapshot was saved before this validation
        for portions, total in self.feed.open(run_state):
            if not engine.model.training:
                engine.module.train()
            with clock.timed(engine.model, state.step - first_step):
                run_state.step_loss = engine.take_step(portions, total).loss.detach()
            for hook in self._hooks["on_step_end"]:
                hook(self)
            self._validate_between_steps()
            if self.world.size > 1:
                engine.wrap()
            if requests.are_due(state.step):
                self._exchange_requests()
            if run_state.is_cut:
                break
        self._exchange_requests()  # about the steps since the last time

    def _record_row(self, validates: bool) -> dict[str, Any]:
        """Validate, if `validates`, and add a row to the History; every rank."""
        run_state = self.run_state
        times, measures = run_state.times.columns(), run_state.measures
        row: dict[str, Any] = {"epoch": self.state.epoch + 1}
        row |= measures.columns(self.world, log_grad_norm=self.options.log_grad_norm)
        val_loss = None
        if validates:
            with run_state.times.paused():
                self._call_hooks("on_validation_start")
                validation = self._validate()
            row |= validation.columns(self.world)
            val_loss = validation.loss
        row |= self._settings() | rank_columns(self.world, measures.loss, val_loss, times)
        row = self.world.broadcast(row)
        self._call_hooks("on_row", row)
        self.history.append(row)
        if validates:
            self._call_hooks("on_validation_end", row)
        return row

    def _settings(self) -> dict[str, Any]:
        """Return the columns that tell where the run is: the step, and the learning rates."""
        groups = self.optimizer.param_groups
        columns: dict[str, Any] = {}
        if self.options.validate_every_steps is not None:
            columns["step"] = self.state.step
        columns["lr"] = float(groups[0]["lr"])
        if len(groups) > 1:
            columns |= {f"lr/{g.get('name', n)}": float(g["lr"]) for n, g in enumerate(groups)}
        return columns

    def _check(self, row: dict[str, Any]) -> None:
        """Judge the run by a row of the History."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(monitored(row, self.monitor))
        self._call_hooks("on_check", row)

    def _step_scheduler(self) -> None:
        by_epoch = self.scheduler is not None and not self.options.scheduler_step_on_batch
        if by_epoch and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _is_stopped(self) -> bool:
        """Return True if any rank called `stop`; every rank."""
        return any(self.world.maximum([self.run_state.stop_reason is not None]))

    # -------------------------------------------------------------- validation

    def _validates_now(self) -> bool:
        """Return True if the epoch that was just trained is validated."""
        if self.validation.loader is None:
            return False
        options, epoch = self.options, self.state.epoch + 1
        if options.validate_every_steps is None and epoch % options.validate_every == 0:
            return True
        is_last = epoch >= options.epochs or self.feed.is_out_of_steps or self._is_stopped()
        return is_last and self.state.checked != self.state.step

    def _validate_between_steps(self) -> None:
        """Validate within an epoch if `validate_every_steps` is due; every rank."""
        every, state = self.options.validate_every_steps, self.state
        if every is None or self.validation.loader is None or state.step % every:
            return
        # If no batch of this epoch was read, the step count is that of the epoch before.
        if state.checked == state.step or not state.batch:
            return
        self._exchange_requests()  # a training loss that is not finite is reported first
        with self.engine.with_average():
            row = self._record_row(validates=True)
            state.checked = state.step
            self._check(row)
        self.run_state.is_cut = self.run_state.is_cut or self._is_stopped()

    def _validate(self) -> ValidationMeasures:
        """Evaluate the validation data; every rank."""
        self.engine.sync_buffers()
        self.feed.position_before_validation = self.feed.current_position(self.state)
        around_pass = partial(self.step.around_pass, loader=self.validation.loader, training=False)
        must_cut = partial(self.requests.must_cut, can_save=self.snapshot is not None)
        any_cut = True
        while any_cut:  # a pass cut off to save a snapshot is restarted, from the same generators
            measures, cut = self.validation.measure(around_pass, must_cut)
            any_cut = self._exchange_requests(cut=cut)
        self.validation.refuse_non_finite(measures)
        self.feed.position_before_validation = None
        return measures

    # ---------------------------------------------------------------- requests

    def _exchange_requests(self, *, cut: bool = False) -> bool:
        """Exchange losses, signals and time with all ranks; return True if any cut its pass off."""
        state, times = self.state, self.run_state.times
        bad = self.run_state.measures.bad_step(self.options.gradient_accumulation_steps)
        with times.waiting():
            answers = self.requests.exchange(state.step, bad_loss=bad is not None, cut=cut)
        if answers.bad_loss:
            refuse_non_finite(self.world, bad, "training", state.epoch + 1, "step")
        if answers.save:
            self._save_for_signal(stop=answers.stop)
        if answers.out_of_time:
            self._end_early()
        return answers.cut

    def _end_early(self) -> None:
        """Save the epoch and end the run, or without a snapshot take no more steps in the epoch."""
        self.stop(_OUT_OF_TIME)
        self.run_state.is_cut = True
        if self.snapshot is not None:
            self._save_for_signal(stop=False)
            raise _OutOfTime

    def _save_for_signal(self, *, stop: bool) -> None:
        """Write the snapshot at once; end the run with an error if `stop`; every rank."""
        self.requests.forget_cut()
        self._save()
        self.requests.signals.deliver()
        if stop:
            raise RunError(
                f"stopped by SIGTERM; {self.options.snapshot_path} holds epoch "
                f"{self.state.epoch + 1} up to step {self.state.step}; run it again to continue"
            )
        self.requests.signals.must_save = False


class _OutOfTime(Exception):
    """Time is over within an epoch, and a snapshot holds what was trained of it."""


def default_column(val: Any) -> str:
    """Return the column that judges a run with such validation data, unless another is chosen."""
    if val is None:
        return "train_loss"
    return "val_loss"
