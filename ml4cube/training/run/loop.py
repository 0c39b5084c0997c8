"""The loop: the only code that runs epochs.

`Engine` runs the steps, `Feed` gives the batches, `Strategy` spreads the model over ranks,
`PollSchedule` decides when ranks communicate, `TrainMeasures` and `ValidationMeasures` measure,
`Snapshot` saves and resumes. The faces of the package translate arguments into a `Loop`; callbacks
follow it. Methods marked "every rank" exchange something, so all ranks must call them.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import InvalidTypeError, RunError
from ml4cube.training.events import HOOKS, Callback, monitored
from ml4cube.training.inputs.batches import kept_generators
from ml4cube.training.measure.validation import TrainMeasures, ValidationMeasures, rank_columns
from ml4cube.training.ranks.clock import StepClock
from ml4cube.training.ranks.failures import CUT, FAILURE, reporting_errors
from ml4cube.training.ranks.polling import PERIOD_S
from ml4cube.training.ranks.signals import Signals
from ml4cube.training.run.engine import Engine, named_sets
from ml4cube.training.run.snapshot import Snapshot
from ml4cube.training.state import kept_rng

logger = logging.getLogger(__name__)

_OUT_OF_TIME = "max_time is over"


class Loop(Engine):
    """Train a model, validate it, and call the callbacks."""

    snapshot: Snapshot | None = None
    resumed = False  # True if this call of `run` started from a snapshot
    stop_reason: str | None = None  # set if training ends after this epoch
    step_loss: torch.Tensor | None = None  # the loss of the latest step's last batch
    _deadline_s = math.inf  # on the clock of time.monotonic
    _epoch_is_cut = False  # True if no further step is taken in this epoch
    # On the clock of time.perf_counter. Each validation moves it by its own time, so that the time
    # since then is the time of training.
    _epoch_started_s = 0.0
    _validation_started_s: float | None = None  # of one that is under way
    _resumed_s = 0.0  # the training time of this epoch that a snapshot held
    _messages_read_s = 0.0  # when messages were last looked for, on the clock of time.perf_counter
    _signals = Signals(active=False)

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

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""
        return self.feed.steps

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this epoch that are done."""
        return self.feed.steps_of(self.state.batch)

    def stop(self, reason: str) -> None:
        """End training after this epoch, or its next validation between steps; on any rank."""
        self.stop_reason = self.stop_reason or reason

    def run(self, *, resume: bool = True) -> nn.Module:
        """Train to the end, from the snapshot if there is one; return the model in eval mode."""
        if self.feed.loader is None:
            raise InvalidTypeError("train_data must be a loader, got None")
        self.stop_reason, self._epoch_is_cut = None, False
        limit = self.options.max_seconds
        self._deadline_s = math.inf if limit is None else time.monotonic() + limit
        with ExitStack() as stack:
            if self.options.seed is not None:
                stack.enter_context(kept_rng(self.world.device))
                torch.manual_seed(self.options.seed + self.world.rank)
            # Signals are handled until an error is explained, because a launcher ends all other
            # ranks as soon as one fails.
            self._signals = stack.enter_context(
                Signals(active=self.options.snapshot_path is not None)
            )
            stack.enter_context(reporting_errors(self.world))
            stack.callback(self._call_hooks, "on_close")
            self.check_models()
            self._shard()
            self.feed.share_out()
            self.resumed = False
            if self.options.snapshot_path is not None:
                self.snapshot = Snapshot(self, self.options.snapshot_path)
                stack.callback(self.snapshot.leave)
                self.resumed = resume and self.snapshot.resume()
            if self.ema is not None:
                self.ema.apply(False)
            self._call_hooks("on_train_start")
            self._warn_if_complete()
            with suppress(_OutOfTime):
                while not self._is_finished():
                    self._run_epoch()
            if self.stop_reason is not None:
                logger.info(
                    "training ended after %d epochs: %s", self.state.epoch, self.stop_reason
                )
            self.module, self._wrapped = self.compiled, None
            self.save_snapshot()
            if self.ema is not None:
                self.ema.apply(True)  # the model to return, unless a callback loads other weights
            self._call_hooks("on_train_end")
            model = self.strategy.unshard(self.model)
        return model.eval()

    def _warn_if_complete(self) -> None:
        if not self.world.is_main or not self._is_finished():
            return
        path, options = self.options.snapshot_path, self.options
        why = self.stop_reason or f"epochs={options.epochs}, max_steps={options.max_steps}"
        warnings.warn(
            f"training is already complete: {self.state.epoch} epochs, {self.state.step} steps "
            f"({why}). The model is that of the earlier run. To continue, ask for more epochs"
            + (f"; to start over, give another snapshot_path or delete {path}" if path else ""),
            stacklevel=2,
        )

    def save_snapshot(self) -> None:
        """Write the snapshot, if the run has one that is older than its state; every rank."""
        if self.snapshot is not None and not self.snapshot.is_current:
            self._save()

    def _save(self) -> None:
        """Write the snapshot, with the weights that are not averaged; every rank."""
        if self.state.batch:
            self.state.sums = self.measures.state_dict()
            self.state.sums["seconds"] = self._resumed_s + self._train_seconds()
        if self.snapshot is not None:
            with self._with_average(False):
                self.snapshot.save()

    # ------------------------------------------------------------------ an epoch

    def _run_epoch(self) -> None:
        """Train for one epoch, or for what is left of it, and validate; every rank."""
        self.step.epoch = self.state.epoch + 1
        self._call_hooks("on_epoch_start")
        self._prepare()
        self._epoch_started_s = time.perf_counter()
        self._validation_started_s = None  # also after a validation that failed
        self.step.around_pass(self._train, self.feed.loader, training=True)
        validates = self._validates_now()
        with self._with_average():
            row = self._record_row(validates)
            self.state.epoch += 1
            self.state.start_epoch()
            self._step_scheduler()
            if validates or self.val_loader is None:
                self._step_plateau(row)
                self._call_hooks("on_check", row)
            self._call_hooks("on_epoch_end", row)
        if self._is_out_of_time():
            self.stop(_OUT_OF_TIME)
        if self._is_stopped():
            self.stop("another rank asked to stop")
        if self.state.epoch % self.options.save_every == 0:
            self.save_snapshot()

    def _record_row(self, validates: bool) -> dict[str, Any]:
        """Validate, if `validates`, and add a row to the History; every rank."""
        times = self._times()
        validation = None
        if validates:
            self._validation_started_s = time.perf_counter()
            self._call_hooks("on_validation_start")
            validation = self._validate()
            self._epoch_started_s += time.perf_counter() - self._validation_started_s
            self._validation_started_s = None
        row = {"epoch": self.state.epoch + 1} | self._columns(validation)
        val_loss = None if validation is None else validation.loss
        row |= rank_columns(self.world, self.measures.loss, val_loss, times)
        row = self.world.broadcast(row)
        self._call_hooks("on_row", row)
        self.history.append(row)
        if validates:
            self._call_hooks("on_validation_end", row)
        return row

    def _validates_now(self) -> bool:
        """Return True if the epoch that was just trained is validated."""
        if self.val_loader is None:
            return False
        options, epoch = self.options, self.state.epoch + 1
        if options.validate_every_steps is None and epoch % options.validate_every == 0:
            return True
        is_last = epoch >= options.epochs or self._is_out_of_steps() or self._is_stopped()
        return is_last and self.state.checked != self.state.step

    def _validate_between_steps(self) -> None:
        """Validate within an epoch if `validate_every_steps` is due; every rank."""
        every, state = self.options.validate_every_steps, self.state
        if every is None or self.val_loader is None or state.step % every:
            return
        # If no batch of this epoch was read, the step count is that of the epoch before.
        if state.checked == state.step or not state.batch:
            return
        self._poll_ranks()  # a training loss that is not finite is reported first
        with self._with_average():
            row = self._record_row(validates=True)
            state.checked = state.step
            self._step_plateau(row)
            self._call_hooks("on_check", row)
        self._epoch_is_cut = self._epoch_is_cut or self._is_stopped()

    def _is_stopped(self) -> bool:
        """Return True if any rank called `stop`; every rank."""
        return any(self.world.maximum([self.stop_reason is not None]))

    def _is_finished(self) -> bool:
        return self.stop_reason is not None or self.is_over

    def _columns(self, validation: ValidationMeasures | None) -> dict[str, Any]:
        """Return the columns of an epoch besides its number and the ranks; every rank."""
        columns = self.measures.columns(self.world, log_grad_norm=self.options.log_grad_norm)
        if validation is not None:
            columns |= validation.columns(self.world)
        if self.options.validate_every_steps is not None:
            columns["step"] = self.state.step
        groups = self.optimizer.param_groups
        columns["lr"] = float(groups[0]["lr"])
        if len(groups) > 1:
            columns |= {f"lr/{g.get('name', n)}": float(g["lr"]) for n, g in enumerate(groups)}
        return columns

    def _train_seconds(self) -> float:
        """Return the time spent on training in this epoch by this process."""
        return (self._validation_started_s or time.perf_counter()) - self._epoch_started_s

    def _times(self) -> dict[str, float | None]:
        """Return how this rank spent the epoch's training: its columns in the table of ranks.

        The fractions add up to 1. Without a step that was timed, the last two are None.
        """
        seconds = self._train_seconds()
        whole = max(seconds, 1e-9)
        data_wait, rank_wait = self.feed.data_wait.seconds / whole, 0.0
        if self.world.size > 1:
            rank_wait = (self.feed.rank_wait_s + self.polls.polling_s) / whole
        waiting_in_steps = self.clock.waiting_fraction()
        communicate = compute = None
        if waiting_in_steps is not None:
            communicate = rank_wait + waiting_in_steps * (1 - data_wait - rank_wait)
            compute = max(0.0, 1 - data_wait - communicate)
        return {
            "seconds": self._resumed_s + seconds,
            "data_wait": data_wait,
            "communicate": communicate,
            "compute": compute,
        }

    def _step_scheduler(self) -> None:
        by_epoch = self.scheduler is not None and not self.options.scheduler_step_on_batch
        if by_epoch and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _step_plateau(self, row: dict[str, Any]) -> None:
        """Step a ReduceLROnPlateau by the monitored value."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(monitored(row, self.monitor))

    # ---------------------------------------------------------------- training

    def _train(self, loader: Any) -> None:
        """Train for the rest of an epoch, on the loader or what an override passes instead."""
        original, self.feed.loader = self.feed.loader, loader
        try:
            self._train_pass()
        finally:
            self.feed.loader = original

    def _train_pass(self) -> None:
        state, polls, step_end = self.state, self.polls, self._hooks["on_step_end"]
        if self.feed.position is None:
            state.start_epoch()
        self.measures, first_step = TrainMeasures(state), state.step
        self._resumed_s = state.sums.get("seconds", 0.0)
        self.clock = StepClock(self.world, active=not self.strategy.is_sharded)
        self.feed.position_before_validation = None  # also after a validation that failed
        self.module.train()
        polls.start_epoch(state.step)
        self._validate_between_steps()  # if the snapshot was saved before this validation
        for portions, total in self.feed.open(state):
            if not self.model.training:
                self.module.train()
            with self.clock.timed(self.model, state.step - first_step):
                self.step_loss = self.take_step(portions, total).loss.detach()
            for hook in step_end:
                hook(self)
            self._validate_between_steps()
            if self.world.size > 1:
                self._wrap()
            if polls.is_due(state.step):
                self._poll_ranks()
            if self._epoch_is_cut:
                break
        self._poll_ranks()  # about the steps since the last poll

    # -------------------------------------------------------------- validation

    def _validate(self) -> ValidationMeasures:
        """Evaluate the validation data; every rank."""
        passes: list[tuple[ValidationMeasures, bool]] = []

        def evaluate(loader: Any) -> None:
            passes.append(self._evaluate(loader, self._must_cut_pass))

        self.sync_buffers()
        sets = named_sets(self.val_loader).values()
        self.feed.position_before_validation = self.feed.current_position(self.state)
        any_cut = True
        while any_cut:  # a pass cut off to save a snapshot is restarted, from the same generators
            with kept_rng(self.world.device), kept_generators(sets):
                self.step.around_pass(evaluate, self.val_loader, training=False)
            measures, cut = passes[-1]
            any_cut = self._poll_ranks(cut=cut)
        self._raise_if_not_finite(measures.loss.flush(), "validation", "batch")
        self.feed.position_before_validation = None
        return measures

    def _must_cut_pass(self) -> bool:
        """Return True if a signal came or time is over, on any rank; without waiting."""
        if not self._signals.must_save and time.perf_counter() - self._messages_read_s < PERIOD_S:
            return False
        self._messages_read_s = time.perf_counter()
        if self._signals.must_save or (self._is_out_of_time() and self.snapshot is not None):
            self.world.post(CUT, "a signal came, or time is over")
            return True
        return any(self.world.message(topic) is not None for topic in (CUT, FAILURE))

    # ------------------------------------------------------- communication of ranks

    def _poll_ranks(self, *, cut: bool = False) -> bool:
        """Exchange losses, signals and time with all ranks; return True if any cut its pass off."""
        bad = self.measures.bad_step(self.options.gradient_accumulation_steps)
        signals = self._signals
        broken, save, stop, late, any_cut = self.polls.poll(
            self.state.step,
            [bad is not None, signals.must_save, signals.must_stop, self._is_out_of_time(), cut],
        )
        if broken:
            self._raise_if_not_finite(bad, "training", "step")
        if save:
            self._save_for_signal(stop=stop)
        if late:
            self._end_early()
        return any_cut

    def _is_out_of_time(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _end_early(self) -> None:
        """Save the epoch and end the run, or without a snapshot take no more steps in the epoch."""
        self.stop(_OUT_OF_TIME)
        self._epoch_is_cut = True
        if self.snapshot is not None:
            self._save_for_signal(stop=False)
            raise _OutOfTime

    def _save_for_signal(self, *, stop: bool) -> None:
        """Write the snapshot at once; end the run with an error if `stop`; every rank."""
        if self.world.is_main:
            self.world.remove(CUT)
        self._save()
        self._signals.deliver()
        if stop:
            raise RunError(
                f"stopped by SIGTERM; {self.options.snapshot_path} holds epoch "
                f"{self.state.epoch + 1} up to step {self.state.step}; run it again to continue"
            )
        self._signals.must_save = False

    def _call_hooks(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(self, *args)


class _OutOfTime(Exception):
    """Time is over within an epoch, and a snapshot holds what was trained of it."""
