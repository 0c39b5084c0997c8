"""Where a Trainer stands: epochs and steps."""

from __future__ import annotations

from ml4cube.training.state import TrainState


class ProgressChecker:
    """Where a Trainer stands."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def get_epoch(self) -> int:
        """Return the number of the epoch under way or to come, from 1."""
        return self.epoch + 1

    def get_step(self) -> int:
        """Return the number of the step under way or to come, from 1."""
        return self.step + 1

    def update_epoch(self) -> None:
        """Count an epoch."""
        self.epoch += 1

    def update_step(self) -> None:
        """Count a step."""
        self.step += 1

    def follow(self, state: TrainState) -> None:
        """Take over the counts of a run."""
        self.epoch, self.step = state.epoch, state.step

    def __repr__(self) -> str:
        return f"ProgressChecker(epoch={self.epoch}, step={self.step})"
