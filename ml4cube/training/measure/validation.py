"""Measures of a training epoch and of a validation pass, reduced over all ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ml4cube.core.errors import EmptyPartError, RunError
from ml4cube.training.inputs.steps import Portion, StepResult
from ml4cube.training.measure.scores import (
    Meter,
    Meters,
    NonFiniteLoss,
    Norms,
    Scores,
    Sums,
    add_up,
)
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
        norms = {}
        if log_grad_norm:
            norms = self.norms.columns()
        return {"train_loss": loss} | self.logs.compute(world) | norms

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {name: sums.state_dict() for name, sums in self._sums_by_name().items()}

    def _sums_by_name(self) -> dict[str, Meter | Meters | Norms]:
        return {"loss": self.loss, "logs": self.logs, "norms": self.norms}


class ValidationMeasures:
    """Loss, metrics and logged values of a validation pass, also of each named set."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, sets: Iterable[str] = ()
    ) -> None:
        self.loss, self.logs = Meter(), Meters("val_")
        self._scores = None
        if metrics:
            self._scores = Scores(metrics, device)
        self._sets = {name: ValidationMeasures(metrics, device) for name in sets}

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


def mean_over_ranks(world: World, meter: Meter, data: str) -> float:
    """Return the mean over all ranks; every rank must call this.

    `data` names the argument that gave the batches, for the error if no sample counts.
    """
    samples, total, weight = add_up(world.gather_objects(meter.sums()))
    if not samples and data == "train_data":
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if not samples:
        raise EmptyPartError(f"{data} gave no sample; give a part that is not empty, or None")
    if not weight > 0:
        raise EmptyPartError(
            f"{data} gave samples, but not one value that counts in the loss; check the gaps of "
            "the target and the weights"
        )
    return total / weight


def refuse_non_finite(
    world: World, bad: NonFiniteLoss | None, what: str, epoch: int, unit: str
) -> None:
    """Raise on all ranks when a loss is not finite on any; every rank must call this."""
    for rank, of_rank in enumerate(world.gather_objects(bad)):
        if of_rank is None:
            continue
        advice = "Look for gaps in that batch, or lower the learning rate"
        if of_rank.target_has_gaps:
            advice = (
                "The targets of that batch have gaps (NaN); MaskedLoss of "
                "ml4cube.training.losses leaves them out: loss=MaskedLoss(your_loss)"
            )
        raise RunError(
            f"the {what} loss is {of_rank.loss} on rank {rank}, epoch {epoch}, {unit} "
            f"{of_rank.number + 1}; training stopped, the best model is as it was. {advice}"
        )


def rank_columns(
    world: World, train: Meter, val: Meter | None, times: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and the table of ranks; every rank must call this.

    `times` are the columns of the table that say how this rank spent the epoch.
    """
    train_sums, val_sums = train.sums(), Sums() if val is None else val.sums()
    rank_row: dict[str, Any] = {
        "rank": world.rank,
        "device": str(world.device),
        "host": socket.gethostname(),
        "train_n": train_sums.samples,
        "train_loss": train_sums.mean,
        "val_n": val_sums.samples,
        "val_loss": val_sums.mean,
        **times,
    }
    rank_rows = world.gather_objects(rank_row)
    return {"seconds": max(row["seconds"] for row in rank_rows), "ranks": rank_rows}
