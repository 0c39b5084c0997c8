"""Means of losses and metrics over batches, exact on any number of ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ml4cube.core.errors import EmptyPartError, RunError
from ml4cube.training.inputs.batches import StepResult, Weight
from ml4cube.training.ranks.world import World

_BUFFER_SIZE = 512  # batches whose means are on the device before they are summed on the host


class NonFiniteLoss(NamedTuple):
    """The first batch or step whose loss is NaN or infinite."""

    number: int  # from 0
    loss: float
    target_has_gaps: bool


class Sums(NamedTuple):
    """The sums of a weighted mean on one rank: ``total`` is the sum of value times weight."""

    samples: int = 0
    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean; None without samples that count."""
        if not self.weight:
            return None
        return self.total / self.weight


class Meter:
    """A weighted mean of batch means."""

    # Values stay on the device until `flush`, because reading one makes the host wait.

    def __init__(self, sums: Iterable[Any] = Sums()) -> None:
        self._samples, self._total, self._weight = sums
        self._batches_summed = 0
        self._bad: NonFiniteLoss | None = None
        # Mean and weight of a batch, and NaN (or another number) if its target has gaps (or not).
        self._buffer: list[tuple[Tensor, Weight, Tensor | None]] = []

    def add(
        self,
        value: Tensor,
        samples: int,
        weight: Weight | None = None,
        gaps: Tensor | None = None,
    ) -> None:
        """Add the mean of one batch, whose weight is by default its number of samples."""
        self._samples += samples
        self._buffer.append((value, samples if weight is None else weight, gaps))
        if len(self._buffer) >= _BUFFER_SIZE:
            self.flush()

    def flush(self) -> NonFiniteLoss | None:
        """Sum the buffered batches; return the first batch whose mean is not finite."""
        if self._buffer:
            values, weights, gaps = zip(*self._buffer, strict=True)
            for value, weight, gap in zip(_to_host(values), _to_host(weights), gaps, strict=True):
                self._total += value * weight
                self._weight += weight
                if self._bad is None and not math.isfinite(value):
                    has_gaps = gap is not None and bool(gap.isnan())
                    self._bad = NonFiniteLoss(self._batches_summed, value, has_gaps)
                self._batches_summed += 1
            self._buffer.clear()
        return self._bad

    def sums(self) -> Sums:
        """Return the sums."""
        self.flush()
        return Sums(self._samples, self._total, self._weight)


class Meters:
    """Weighted means of several quantities, by column."""

    def __init__(self, sums: Mapping[str, Iterable[Any]] | None = None) -> None:
        self._meters = {name: Meter(saved) for name, saved in (sums or {}).items()}

    def __getitem__(self, name: str) -> Meter:
        return self._meters.setdefault(name, Meter())

    def sums(self) -> dict[str, Sums]:
        """Return the sums of this rank."""
        return {name: meter.sums() for name, meter in self._meters.items()}

    def add_logs(self, prefix: str, result: StepResult, samples: int) -> None:
        """Add what a step logs of a batch, in columns with a prefix."""
        for name, value in result.logs.items():
            self[prefix + name].add(torch.as_tensor(value).detach(), samples)

    def columns(self, world: World, loss: str, data: str) -> dict[str, float]:
        """Return the means over all ranks, whose quantities may differ; every rank.

        `loss` is the column of the loss, which must have samples; `data` names the argument that
        gave them, for an error.
        """
        ranks_by_name: dict[str, list[Sums]] = {loss: []}
        for rank_sums in world.gather_objects(self.sums()):
            for name, sums in rank_sums.items():
                ranks_by_name.setdefault(name, []).append(sums)
        columns = {}
        for name, ranks in ranks_by_name.items():
            total = Sums(*map(sum, zip(*ranks, strict=True)))
            if name == loss:
                _check_counted(total, data)
            columns[name] = math.nan if total.mean is None else total.mean
        return columns


def _check_counted(sums: Sums, data: str) -> None:
    """Refuse data of which no sample, or no cell, counts in the loss."""
    if not sums.samples and data == "train_data":
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if not sums.samples:
        raise EmptyPartError(f"{data} gave no sample; give a part that is not empty, or None")
    if not sums.weight > 0:
        raise EmptyPartError(
            f"{data} gave samples, but not one value that counts in the loss; check the gaps of "
            "the target and the weights"
        )


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
    train_sums, val_sums = train.sums(), Sums()
    if val is not None:
        val_sums = val.sums()
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


def _to_host(values: Sequence[float | Tensor]) -> list[float]:
    """Return numbers as they are, or scalar tensors after reading all at once from the device."""
    if not isinstance(values[0], Tensor):
        return [float(value) for value in values]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    # In two steps, because some devices have no float64.
    numbers: list[float] = stacked.cpu().double().tolist()
    return numbers
