"""Loss, metrics and logged values of one validation pass, reduced once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ml4cube.training.dist import World
from ml4cube.training.feed import Portion
from ml4cube.training.scores import Meter, Scores
from ml4cube.training.steps import StepResult


class Logs:
    """Further values that steps give, averaged over samples.

    Parameters
    ----------
    prefix : {"train", "val"}
        What their columns begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._meters: dict[str, Meter] = {}

    def add(self, values: Mapping[str, Any], samples: int) -> None:
        """Take in the means of one batch.

        Parameters
        ----------
        values : mapping of str to scalar
            Tensors, which are not read now, or numbers.
        samples : int
            Samples they are the means of.
        """
        for name, value in values.items():
            if name not in self._meters:
                self._meters[name] = Meter()
            self._meters[name].add(torch.as_tensor(value).detach(), samples)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce over all ranks; every rank must call this.

        Parameters
        ----------
        world : World
            The ranks.

        Returns
        -------
        dict
            ``{prefix_name: mean}``.
        """
        total: dict[str, float] = {}
        weight: dict[str, float] = {}
        for states in world.gather_objects(self.state_dict()):
            for name, state in states.items():
                total[name] = total.get(name, 0.0) + state["total"]
                weight[name] = weight.get(name, 0.0) + state["weight"]
        return {f"{self._prefix}_{name}": total[name] / weight[name] for name in total}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the sums, by name.

        Returns
        -------
        dict
            As `Meter.state_dict` gives them.
        """
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Take back the sums.

        Parameters
        ----------
        state : mapping
            From `state_dict`.
        """
        for name, sums in state.items():
            self._meters[name] = Meter()
            self._meters[name].load_state_dict(sums)


class Tally:
    """What one validation pass gives.

    Parameters
    ----------
    metrics : mapping of str to callable or metric object
        As checked by `check_metrics`.
    device : torch.device
        Where predictions lie.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self.loss, self.logs = Meter(), Logs("val")
        self._scores = Scores(metrics, device) if metrics else None

    def add(self, result: StepResult, portion: Portion) -> None:
        """Take in one batch.

        Parameters
        ----------
        result : StepResult
            What its forward pass gave.
        portion : Portion
            The batch, its samples and its weight.
        """
        self.loss.add(result.loss.detach(), portion.samples, portion.weight)
        if result.logs:
            self.logs.add(result.logs, portion.samples)
        if self._scores is not None:
            self._scores.update(_full(result.pred), _full(result.target), portion.samples)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce metrics and logged values over all ranks; every rank must call this.

        Parameters
        ----------
        world : World
            The ranks.

        Returns
        -------
        dict
            ``{name: value}``.
        """
        scores = {} if self._scores is None else self._scores.compute(world)
        return scores | self.logs.compute(world)


def _full(value: Any) -> Any:
    """Metrics compute in full precision, whatever the forward pass did."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
