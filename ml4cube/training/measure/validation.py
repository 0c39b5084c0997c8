"""Measures of a training epoch and of a validation pass, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ml4cube.training.inputs.steps import Portion, StepResult
from ml4cube.training.measure.history_rows import mean_over_ranks
from ml4cube.training.measure.scores import Means, Meter, NonFiniteLoss, Norms, Scores
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import TrainState


class ValidationMeasures:
    """Loss, metrics and logged values of a validation pass."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, sets: Iterable[str] = ()
    ) -> None:
        self.loss, self.logs = Meter(), Means("val_")
        self._scores = Scores(metrics, device) if metrics else None
        self._sets = {name: ValidationMeasures(metrics, device) for name in sets}

    def add(self, result: StepResult, portion: Portion, name: str | None = None) -> None:
        """Add one batch."""
        if name is not None:
            self._sets[name].add(result, portion)
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        if result.logs:
            self.logs.add_all(result.logs, portion.samples)
        if self._scores is not None:
            self._scores.update(_full(result.pred), _full(result.target), portion.samples)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce metrics and logged values over all ranks; every rank must call this."""
        scores = {} if self._scores is None else self._scores.compute(world)
        columns = scores | self.logs.compute(world)
        for name, measures in self._sets.items():
            loss = mean_over_ranks(world, measures.loss, f"test_data[{name!r}]")
            own = {"val_loss": loss} | measures.compute(world)
            columns |= {f"{column}/{name}": value for column, value in own.items()}
        return columns


class Measures:
    """Loss, logged values and gradient norms of a training epoch on this rank."""

    def __init__(self, state: TrainState) -> None:
        self.loss, self.logs, self.norms = Meter(), Means("train_"), Norms()
        self._first_step = state.step
        for name, part in self._parts().items():
            if name in state.sums:
                part.load_state_dict(state.sums[name])

    def add(self, result: StepResult, portion: Portion) -> None:
        """Add one batch."""
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        if result.logs:
            self.logs.add_all(result.logs, portion.samples)

    def bad_step(self, batches: int) -> NonFiniteLoss | None:
        """Return the first step (from 0) whose loss is not finite."""
        bad = self.loss.flush()
        return bad and bad._replace(number=self._first_step + bad.number // batches)

    def columns(self, world: World, *, log_grad_norm: bool) -> dict[str, Any]:
        """Reduce everything but the loss over all ranks; every rank must call this."""
        return self.logs.compute(world) | (self.norms.columns() if log_grad_norm else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def _parts(self) -> dict[str, Meter | Means | Norms]:
        return {"loss": self.loss, "logs": self.logs, "norms": self.norms}


def _full(value: Any) -> Any:
    """Convert half precision to float32, in which metrics are computed."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
