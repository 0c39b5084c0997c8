"""The one state of a run: what training changes, besides the model and its optimizer.

Loop, engine and snapshot share it. A Trainer keeps it between its calls, so that the next one goes
on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ml4cube.training.inputs.batches import Portion, StepResult
from ml4cube.training.measure.means import Meter, Meters, NonFiniteLoss, Sums
from ml4cube.training.ranks.world import World
from ml4cube.training.run.epoch_times import EpochTimes
from ml4cube.training.state import History, TrainState


class TrainMeasures:
    """Loss, logged values and gradient norms of a training epoch on this rank."""

    def __init__(self, state: TrainState) -> None:
        sums = state.sums
        self._meters = Meters(sums.get("means"))
        self._norms = Meter(sums.get("norms", Sums()))
        self.loss = self._meters["train_loss"]
        # The largest norm stays on the device, as values do in a Meter.
        self._largest: float | torch.Tensor = sums.get("largest", 0.0)
        self._first_step = state.step

    def add(self, result: StepResult, portion: Portion) -> None:
        """Add one batch."""
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        self._meters.add_logs("train_", result, portion.samples)

    def add_norm(self, norm: torch.Tensor) -> None:
        """Add the gradient norm of a step, unless it is not finite: fp16 skips such steps."""
        finite = norm.nan_to_num(0.0, 0.0, 0.0)
        self._norms.add(finite, 1, norm.isfinite())
        self._largest = finite.clamp_min(self._largest)

    def bad_step(self, batches_per_step: int) -> NonFiniteLoss | None:
        """Return the first step of the run with a loss that is not finite, if there is one."""
        bad_batch = self.loss.flush()
        if bad_batch is None:
            return None
        step = self._first_step + bad_batch.number // batches_per_step
        return bad_batch._replace(number=step)

    def columns(self, world: World, *, log_grad_norm: bool) -> dict[str, Any]:
        """Reduce to columns of the History over all ranks; every rank must call this."""
        columns: dict[str, Any] = self._meters.columns(world, "train_loss", "train_data")
        if log_grad_norm:
            mean = self._norms.sums().mean
            largest = None
            if mean is not None:
                largest = float(self._largest)
            columns |= {"grad_norm": mean, "grad_norm_max": largest}
        return columns

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        sums = {"means": self._meters.sums(), "norms": self._norms.sums()}
        return {**sums, "largest": float(self._largest)}


@dataclass
class RunState:
    """How far a run is, what it has measured, and why it is to end."""

    counters: TrainState = field(default_factory=TrainState)
    history: History = field(default_factory=History)
    # Of gradients in fp16; the engine makes it.
    scaler: Any = None
    # What `Ema.leave` returned at the end of the last run.
    average: dict[str, Any] = field(default_factory=dict)

    # Of a Trainer with several runs: at which epoch the last one was to end, and whether there was
    # any, after which a snapshot is no longer resumed.
    goal: int = 0
    has_trained: bool = False

    # Of the call under way: whether it started from a snapshot, and why it ends after this epoch.
    resumed: bool = False
    stop_reason: str | None = None

    # Of the epoch under way. No further step is taken in it if it is cut.
    is_cut: bool = False
    measures: TrainMeasures = field(init=False)
    times: EpochTimes = field(init=False)
    # The loss of the latest step's last batch.
    step_loss: torch.Tensor | None = None

    def measure(self, world: World, *, times_steps: bool) -> None:
        """Begin to measure, from the sums that a snapshot held of the epoch."""
        self.measures = TrainMeasures(self.counters)
        resumed_s = self.counters.sums.get("seconds", 0.0)
        self.times = EpochTimes(world, times_steps=times_steps, resumed_s=resumed_s)

    def keep_sums(self) -> None:
        """Put what was measured of an epoch that is not over into the counters."""
        if self.counters.batch:
            self.counters.sums = {**self.measures.state_dict(), "seconds": self.times.seconds}

    def left(self) -> RunState:
        """Return what the next run continues from."""
        kept = (self.counters, self.history, self.scaler, self.average)
        return RunState(*kept, self.goal, self.has_trained)
