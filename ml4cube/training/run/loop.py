"""The loop: the only code that runs epochs.

`Engine` runs the steps, `Feed` gives the batches, `Strategy` spreads the model over ranks,
`PollSchedule` decides when ranks communicate, `ValidationMeasures` and `make_row` measure,
`Snapshot` saves and resumes. The faces of the package translate arguments into a `Loop`; callbacks
follow it.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import InvalidTypeError, RunError
from ml4cube.training.events import HOOKS, Callback, monitored
from ml4cube.training.inputs.batches import kept_generators
from ml4cube.training.measure.history_rows import EpochTime, make_row
from ml4cube.training.measure.validation import TrainMeasures, ValidationMeasures
from ml4cube.training.ranks.clock import StepClock
from ml4cube.training.ranks.dist import reporting_errors
from ml4cube.training.ranks.polling import PERIOD_S
from ml4cube.training.ranks.signals import Signals
from ml4cube.training.run.engine import Engine, named_sets
from ml4cube.training.run.snapshot import Snapshot
from ml4cube.training.state import kept_rng

logger = logging.getLogger(__name__)

_LATE = "max_time is over"


class Loop(Engine):
    """Train a model, validate it, and call the callbacks."""

    snapshot: Snapshot | None = None
    resumed = False  # from a snapshot, by this call of `run`
    stop_reason: str | None = None
    step_loss: torch.Tensor | None = None  # of the last step's last batch
    _ends_at, _cut_short = math.inf, False  # the first on the monotonic clock
    _signals, _asked = Signals(active=False), 0.0

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
        """End training after the epoch, or the check inside it, under way; any rank may ask."""
        self.stop_reason = self.stop_reason or reason

    def run(self, *, resume: bool = True) -> nn.Module:
        """Train to the end, from the snapshot on if there is one."""
        if self.feed.loader is None:
            raise InvalidTypeError("train_data must be a loader, got None")
        self.stop_reason, self._cut_short = None, False
        limit = self.options.max_seconds
        self._ends_at = math.inf if limit is None else time.monotonic() + limit
        with ExitStack() as stack:
            if self.options.seed is not None:
                stack.enter_context(kept_rng(self.world.device))
                torch.manual_seed(self.options.seed + self.world.rank)
            # around what explains an error: a launcher ends the ranks beside a failed one at once
            self._signals = stack.enter_context(
                Signals(active=self.options.snapshot_path is not None)
            )
            stack.enter_context(reporting_errors(self.world))
            stack.callback(self._call, "on_close")
            self._forget_alarm()
            self._spread()
            self.feed.share_out()
            self.resumed = False
            if self.options.snapshot_path is not None:
                self.snapshot = Snapshot(self, self.options.snapshot_path)
                stack.callback(self.snapshot.leave)
                self.resumed = resume and self.snapshot.resume()
            if self.ema is not None:
                self.ema.apply(False)
            self._call("on_train_start")
            self._say_if_finished()
            with suppress(_OutOfTime):
                while not self._is_finished():
                    self.run_epoch()
            self.module, self._prepared = self.compiled, False
            self.save_snapshot()
            if self.ema is not None:
                self.ema.apply(True)  # what a user gets, unless a callback knows better
            self._call("on_train_end")
            model = self.strategy.unshard(self.model)
        return model.eval()

    def _forget_alarm(self) -> None:
        """Remove the alarm that a run that failed has left; every rank."""
        self.world.barrier()  # no rank is still in that run
        if self.world.is_main:
            self.world.clear_alarm()
        self.world.barrier()  # no rank raises an alarm of this run before

    def _say_if_finished(self) -> None:
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
        """Write the snapshot, also inside an epoch and while the average is applied."""
        if self.state.batch:
            self.state.sums = self.measures.state_dict()
        if self.snapshot is not None:
            with self._averaged(False):
                self.snapshot.save()

    # ------------------------------------------------------------------ an epoch

    def run_epoch(self) -> dict[str, Any]:
        """Train for one epoch, or for what is left of it, and validate; every rank."""
        self._call("on_epoch_start")
        self._prepare()
        self._began, self._validated_s = time.perf_counter(), 0.0
        self.step.around_pass(self._train, self.feed.loader, training=True)
        validates = self._validates_now()
        with self._averaged():
            row = self._measure(validates)
            self.state.epoch += 1
            self.state.start_epoch()
            self._step_scheduler()
            if validates or self.val_loader is None:
                self._step_plateau(row)
                self._call("on_check", row)
            self._call("on_epoch_end", row)
        if self._is_late():
            self.stop(_LATE)
        if self._is_stopped():
            self.stop("another rank asked to stop")
        if self.state.epoch % self.options.save_every == 0:
            self.save_snapshot()
        return row

    def _measure(self, validates: bool) -> dict[str, Any]:
        """Validate, if asked to, and add a row to the History."""
        effort = self._effort(time.perf_counter() - self._began - self._validated_s)
        measures = None
        if validates:
            started = time.perf_counter()
            self._call("on_validation_start")
            measures = self._validate()
            self._validated_s += time.perf_counter() - started
        losses = (self.measures.loss, None if measures is None else measures.loss)
        columns = partial(self._columns, measures)
        row = make_row(self.world, self.state.epoch + 1, *losses, columns, effort)
        self._call("on_row", row)
        self.history.append(row)
        if validates:
            self._call("on_validation_end", row)
        return row

    def _validates_now(self) -> bool:
        """Return True if the epoch that was just trained is validated."""
        if self.val_loader is None:
            return False
        options, epoch = self.options, self.state.epoch + 1
        if options.validate_every_steps is None and epoch % options.validate_every == 0:
            return True
        last = epoch >= options.epochs or self._is_out_of_steps() or self._is_stopped()
        return last and self.state.checked != self.state.step

    def _check_inside(self) -> None:
        """Validate inside an epoch if `validate_every_steps` asks for it; every rank."""
        every, state = self.options.validate_every_steps, self.state
        if every is None or self.val_loader is None or state.step % every:
            return
        # Without a batch, the steps are those of an epoch that has ended.
        if state.checked == state.step or not state.batch:
            return
        self._ask()
        with self._averaged():
            row = self._measure(validates=True)
            state.checked = state.step
            self._step_plateau(row)
            self._call("on_check", row)
        self._cut_short = self._cut_short or self._is_stopped()

    def _is_stopped(self) -> bool:
        """Return True if any rank asked to stop; every rank."""
        return any(self.world.maximum([self.stop_reason is not None]))

    def _is_finished(self) -> bool:
        if self.stop_reason is not None:
            logger.info("training ended after %d epochs: %s", self.state.epoch, self.stop_reason)
            return True
        return self.is_over

    def _columns(self, measures: ValidationMeasures | None) -> dict[str, Any]:
        """Return the columns of an epoch besides losses and the table of ranks; every rank."""
        columns = self.measures.columns(self.world, log_grad_norm=self.options.log_grad_norm)
        if measures is not None:
            columns |= measures.compute(self.world)
        if self.options.validate_every_steps is not None:
            columns["step"] = self.state.step
        groups = self.optimizer.param_groups
        columns["lr"] = float(groups[0]["lr"])
        if len(groups) > 1:
            columns |= {f"lr/{g.get('name', n)}": float(g["lr"]) for n, g in enumerate(groups)}
        return columns

    def _effort(self, seconds: float) -> EpochTime:
        """Return how this rank spent its training, estimated from the steps that are timed."""
        whole = max(seconds, 1e-9)
        waited, asked = self.feed.waited / whole, (self.feed.asked + self.polls.polling_s) / whole
        share = self.clock.waiting_fraction()
        if self.world.size == 1:
            asked = 0.0
        communicate = math.nan if share is None else asked + share * (1 - waited - asked)
        return EpochTime(seconds, waited, communicate)

    def _step_scheduler(self) -> None:
        if self.scheduler is None or self.options.scheduler_step_on_batch:
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _step_plateau(self, row: dict[str, Any]) -> None:
        """Step a ReduceLROnPlateau by the monitored value."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(monitored(row, self.monitor))

    # ---------------------------------------------------------------- training

    def _train(self, loader: Any) -> None:
        """Train for one epoch, or for what is left of it, on the loader or one made around it."""
        own, self.feed.loader = self.feed.loader, loader
        try:
            self._train_pass()
        finally:
            self.feed.loader = own

    def _train_pass(self) -> None:
        state, polls, step_end = self.state, self.polls, self._hooks["on_step_end"]
        if self.feed.position is None:
            state.start_epoch()
        self.measures, first = TrainMeasures(state), state.step
        self.clock = StepClock(self.world, active=not self.strategy.is_sharded)
        self.feed.paused = None
        self.module.train()
        polls.start_epoch(state.step)
        self._check_inside()  # a snapshot may have been saved while this was to come
        for portions, total in self.feed.open(state):
            if not self.model.training:
                self.module.train()
            with self.clock.timed(self.model, state.step - first):
                self.step_loss = self.take_step(portions, total).loss.detach()
            for hook in step_end:
                hook(self)
            self._check_inside()
            if self._cut_short:
                break
            if self.world.size > 1:
                self._wrap()
            if polls.is_due(state.step):
                self._ask()
                if self._cut_short:
                    break
        self._ask()

    # -------------------------------------------------------------- validation

    def _validate(self) -> ValidationMeasures:
        """Evaluate the raw model: the wrapped one would wait for ranks with fewer batches."""
        passes: list[tuple[ValidationMeasures, bool]] = []

        def evaluate(loader: Any) -> None:
            passes.append(self._evaluate(loader))

        self.strategy.sync_buffers(self.model)
        sets = named_sets(self.val_loader).values()
        self.feed.paused = self.feed.place(self.state)
        asked = True
        while asked:  # a pass cut off to save a snapshot is restarted, from the same generators
            with kept_rng(self.world.device), kept_generators(sets):
                self.step.around_pass(evaluate, self.val_loader, training=False)
                measures, cut = passes[-1]
                asked = self._ask(cut=cut)
        self._refuse(measures.loss.flush(), "validation", "batch")
        self.feed.paused = None
        return measures

    def _is_called(self) -> bool:
        """Return True if a signal came or time is over, on any rank; without waiting."""
        if not self._signals.must_save and time.perf_counter() - self._asked < PERIOD_S:
            return False
        self._asked = time.perf_counter()
        if self.feed.paused is None:  # an evaluation outside any run
            return False
        if self._signals.must_save or (self._is_late() and self.options.snapshot_path is not None):
            self.world.raise_alarm(f"rank {self.world.rank}: a signal came, or time is over")
            return True
        return self.world.alarm() is not None

    # ------------------------------------------------------- ranks ask one another

    def _ask(self, *, cut: bool = False) -> bool:
        """Look at losses and signals with all ranks; return True if a pass was cut off on any."""
        bad = self.measures.bad_step(self.options.gradient_accumulation_steps)
        signals = self._signals
        broken, save, stop, late, any_cut = self.polls.poll(
            self.state.step,
            [bad is not None, signals.must_save, signals.must_stop, self._is_late(), cut],
        )
        if broken:
            self._refuse(bad, "training", "step")
        if save:
            self._interrupt(stop=stop)
        if late:
            self._end_early()
        return any_cut

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends_at

    def _end_early(self) -> None:
        """Leave the epoch to be resumed, or without a snapshot cut it short here."""
        self.stop(_LATE)
        self._cut_short = True
        if self.options.snapshot_path is not None:
            self._interrupt(stop=False)
            raise _OutOfTime

    def _interrupt(self, *, stop: bool) -> None:
        if self.world.is_main:
            self.world.clear_alarm()
        self._save()
        self._signals.deliver()
        if stop:
            raise RunError(
                f"stopped by SIGTERM; {self.options.snapshot_path} holds epoch "
                f"{self.state.epoch + 1} up to step {self.state.step}; run it again to continue"
            )
        self._signals.must_save = False

    def _call(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(self, *args)


class _OutOfTime(Exception):
    """Ends the run inside an epoch that a snapshot holds."""
