"""Measures of a training epoch and of a validation pass, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ml4cube.training.inputs.steps import Portion, StepResult
from ml4cube.training.measure.history_rows import mean_over_ranks
from ml4cube.training.measure.scores import Meter, Meters, NonFiniteLoss, Norms, Scores
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import TrainState


class TrainMeasures:
    """Loss, logged values and gradient norms of a training epoch on this rank."""

    def __init__(self, state: TrainState) -> None:
        self.loss, self.logs, self.norms = Meter(), Meters("train_"), Norms()
        self._first_step = state.step
        for name, sums in self._sums_by_name().items():
            if name in state.sums:
                sums.load_state_dict(state.sums[name])

    def add(self, result: StepResult, portion: Portion) -> None:
        """Add one batch."""
        _add_batch(self.loss, self.logs, result, portion)

    def bad_step(self, batches_per_step: int) -> NonFiniteLoss | None:
        """Return the first step of the run with a loss that is not finite, if there is one."""
        bad_batch = self.loss.flush()
        if bad_batch is None:
            return None
        step = self._first_step + bad_batch.number // batches_per_step
        return bad_batch._replace(number=step)

    def columns(self, world: World, *, log_grad_norm: bool) -> dict[str, Any]:
        """Reduce to columns of the History over all ranks; every rank must call this."""
        loss = mean_over_ranks(world, self.loss, "train_data")
        norms = self.norms.columns() if log_grad_norm else {}
        return {"train_loss": loss} | self.logs.compute(world) | norms

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {name: sums.state_dict() for name, sums in self._sums_by_name().items()}

    def _sums_by_name(self) -> dict[str, Meter | Meters | Norms]:
        return {"loss": self.loss, "logs": self.logs, "norms": self.norms}


class ValidationMeasures:
    """Loss, metrics and logged values of a validation pass, also of each named set."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        sets: Iterable[str] = (),
        weighted: Mapping[str, Any] | None = None,
    ) -> None:
        self.loss, self.logs = Meter(), Meters("val_")
        self._scores = Scores(metrics, device, weighted) if metrics else None
        self._sets = {name: ValidationMeasures(metrics, device, (), weighted) for name in sets}

    def add(self, result: StepResult, portion: Portion, set_name: str = "") -> None:
        """Add one batch, of a named set if there are several."""
        if set_name:
            self._sets[set_name].add(result, portion)
        _add_batch(self.loss, self.logs, result, portion)
        if self._scores is not None:
            pred, target = _without_half(result.pred), _without_half(result.target)
            self._scores.update(pred, target, portion.samples, result.weights)

    def columns(self, world: World, data: str = "test_data") -> dict[str, float]:
        """Reduce to columns of the History over all ranks; every rank must call this.

        `data` names the argument that gave the batches, for an error.
        """
        # First the loss, which refuses data without a sample: metrics cannot be computed of them.
        columns = {"val_loss": mean_over_ranks(world, self.loss, data)}
        if self._scores is not None:
            columns |= self._scores.compute(world)
        columns |= self.logs.compute(world)
        for name, measures in self._sets.items():
            set_columns = measures.columns(world, f"{data}[{name!r}]")
            columns |= {f"{column}/{name}": value for column, value in set_columns.items()}
        return columns


def _add_batch(loss: Meter, logs: Meters, result: StepResult, portion: Portion) -> None:
    loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
    for name, value in result.logs.items():
        logs.add(name, torch.as_tensor(value).detach(), portion.samples)


def _without_half(value: Any) -> Any:
    """Convert half precision to float32, in which metrics are computed."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
