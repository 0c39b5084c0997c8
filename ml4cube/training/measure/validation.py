"""What an epoch of training and a pass of validation measure, reduced once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ml4cube.training.inputs.steps import Portion, StepResult
from ml4cube.training.measure.rows import mean_over_ranks
from ml4cube.training.measure.scores import Bad, Meter, Norms, Scores
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import TrainState


class Logs:
    """Further values that steps give, averaged over samples."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._meters: dict[str, Meter] = {}

    def add(self, values: Mapping[str, Any], samples: int) -> None:
        """Take in the means of one batch."""
        for name, value in values.items():
            if name not in self._meters:
                self._meters[name] = Meter()
            self._meters[name].add(torch.as_tensor(value).detach(), samples)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce over all ranks; every rank must call this."""
        total: dict[str, float] = {}
        weight: dict[str, float] = {}
        for states in world.gather_objects(self.state_dict()):
            for name, state in states.items():
                total[name] = total.get(name, 0.0) + state["total"]
                weight[name] = weight.get(name, 0.0) + state["weight"]
        return {f"{self._prefix}_{name}": total[name] / weight[name] for name in total}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the sums, by name."""
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Take back the sums."""
        for name, sums in state.items():
            self._meters[name] = Meter()
            self._meters[name].load_state_dict(sums)


class Tally:
    """What one validation pass gives."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, sets: Iterable[str] = ()
    ) -> None:
        self.loss, self.logs = Meter(), Logs("val")
        self._scores = Scores(metrics, device) if metrics else None
        self._sets = {name: Tally(metrics, device) for name in sets}

    def add(self, result: StepResult, portion: Portion, name: str | None = None) -> None:
        """Take in one batch."""
        if name is not None:
            self._sets[name].add(result, portion)
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        if result.logs:
            self.logs.add(result.logs, portion.samples)
        if self._scores is not None:
            self._scores.update(_full(result.pred), _full(result.target), portion.samples)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce metrics and logged values over all ranks; every rank must call this."""
        scores = {} if self._scores is None else self._scores.compute(world)
        columns = scores | self.logs.compute(world)
        for name, tally in self._sets.items():
            loss = mean_over_ranks(world, tally.loss, f"test_data[{name!r}]")
            own = {"val_loss": loss} | tally.compute(world)
            columns |= {f"{column}/{name}": value for column, value in own.items()}
        return columns


class Measures:
    """What this rank's training measures in one epoch, read from the device only when asked."""

    def __init__(self, state: TrainState) -> None:
        self.loss, self.logs, self.norms = Meter(), Logs("train"), Norms()
        self._first_step = state.step
        for name, part in self._parts().items():
            if name in state.sums:
                part.load_state_dict(state.sums[name])

    def add(self, result: StepResult, portion: Portion) -> None:
        """Take in one batch."""
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        if result.logs:
            self.logs.add(result.logs, portion.samples)

    def bad_step(self, batches: int) -> Bad | None:
        """Return number (from 0) and loss of the first step whose loss is not finite."""
        bad = self.loss.flush()
        return None if bad is None else (self._first_step + bad[0] // batches, *bad[1:])

    def columns(self, world: World, *, log_grad_norm: bool) -> dict[str, Any]:
        """Reduce over all ranks, but for the loss; every rank must call this."""
        return self.logs.compute(world) | (self.norms.columns() if log_grad_norm else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def _parts(self) -> dict[str, Meter | Logs | Norms]:
        return {"loss": self.loss, "logs": self.logs, "norms": self.norms}


def _full(value: Any) -> Any:
    """Metrics compute in full precision, whatever the forward pass did."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
