"""The one state of a run: what training changes, besides the model and its optimizer.

Loop, engine and snapshot share it. A Trainer keeps it between its calls, so that the next one goes
on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ml4cube.training.measure.validation import TrainMeasures
from ml4cube.training.ranks.world import World
from ml4cube.training.run.epoch_times import EpochTimes
from ml4cube.training.state import History, TrainState


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
