"""Forecasts of several steps, in which the output of a model becomes its next input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.same_scaling import datasets_in
from ml4cube.loading.tensors import PTXrDataset


@dataclass(frozen=True)
class Rollout:
    """Which cells of a batch each call of a model gets and gives.

    X (samples, channels, *window) has ``inputs + (steps - 1) * outputs`` cells along time, y has
    ``steps * outputs``. A single step may lack the axis of time, where it has one cell of it.
    """

    # Cells along time that one call gets, and those that it gives.
    inputs: int
    outputs: int
    # Of time, in X and y of all steps.
    axis: int
    # Number of axes of X and y of all steps.
    ndim: int
    # Whether X and y of a single step have the axis of time.
    input_has_axis: bool
    output_has_axis: bool
    # Number of channels of y.
    targets: int
    # Channels of X that are targets too, and where y has them.
    x_channels: tuple[int, ...]
    y_channels: tuple[int, ...]

    @classmethod
    def of(cls, data: PTXrDataset) -> Self:
        """Make the rollout of a data set, whose targets must be the next steps of features."""
        dim = lead_dim(data)
        x, y = data.step_sizes[:2]
        inputs, outputs = x.get(dim, 1), y.get(dim, 1)
        offset = (data.lead or {})[dim][0]
        if offset != inputs:
            raise InvalidValueError(
                f"for a rollout target_offset along {dim!r} must be {inputs}, the cells of X, got "
                f"{offset}"
            )
        check_same_cells(data, dim)
        x_channels, y_channels = shared_channels(data)
        window = [d for d in data.lead or {} if d == dim or d in x]
        return cls(
            inputs,
            outputs,
            axis=2 + window.index(dim),
            ndim=2 + len(window),
            input_has_axis=dim in x,
            output_has_axis=dim in y,
            targets=len(data.targets),
            x_channels=x_channels,
            y_channels=y_channels,
        )

    def steps_in(self, x: Tensor) -> int:
        """Return the number of steps that a batch has."""
        if x.ndim < self.ndim:
            return 1
        return 1 + (x.shape[self.axis] - self.inputs) // self.outputs

    def input_of(self, x: Tensor, step: int) -> Tensor:
        """Return the cells of X that are the input of a step, counted from 0."""
        if x.ndim < self.ndim:  # data of a single step
            return x
        cells = x.narrow(self.axis, step * self.outputs, self.inputs)
        return self._without_axis(cells, self.input_has_axis).contiguous()

    def target_of(self, y: Tensor, step: int) -> Tensor:
        """Return the cells of y that are the target of a step, counted from 0."""
        if y.ndim < self.ndim:
            return y
        cells = y.narrow(self.axis, step * self.outputs, self.outputs)
        return self._without_axis(cells, self.output_has_axis).contiguous()

    def next_input(
        self, step_input: Tensor, output: Tensor, x: Tensor, step: int, keep: Tensor | None = None
    ) -> Tensor:
        """Return the input of a step from 1: cells of X, with the output in place of its targets.

        `given` and `output` are the input and the output of the step before. Cells where `keep`,
        of the shape of the output, is True have the value that X has there.
        """
        start = step * self.outputs
        x_index = _index(self.x_channels, x.device)
        y_index = _index(self.y_channels, x.device)
        new = self._with_axis(output).index_select(1, y_index).to(x.dtype)
        if keep is not None:
            own = x.narrow(self.axis, start + self.inputs - self.outputs, self.outputs)
            kept = self._with_axis(keep).index_select(1, y_index)
            new = torch.where(kept, own.index_select(1, x_index), new)
        old = self._with_axis(step_input).index_select(1, x_index)
        latest = torch.cat([old, new], self.axis).narrow(self.axis, self.outputs, self.inputs)
        cells = x.narrow(self.axis, start, self.inputs).index_copy(1, x_index, latest)
        return self._without_axis(cells, self.input_has_axis).contiguous()

    def forecast(
        self,
        call: Callable[[Tensor, int], Tensor],
        x: Tensor,
        steps: int,
        keep: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the output of each step; ``call(input, step)`` runs the model.

        `keep` is as in `next_input`, of all steps, and so of the shape of y.
        """
        step_input = self.input_of(x, 0)
        for step in range(steps):
            # A copy, because a model may work in place, and the next input is made from this one.
            output = call(step_input.clone() if steps > 1 else step_input, step)
            self._check_output(output, step_input)
            yield output
            if step + 1 < steps:
                kept = None
                if keep is not None:
                    kept = self.target_of(keep, step)
                step_input = self.next_input(step_input, output, x, step + 1, kept)

    def _check_output(self, output: object, step_input: Tensor) -> None:
        """Refuse an output that is not the next steps of the targets."""
        window = list(self._with_axis(step_input).shape[2:])
        window[self.axis - 2 : self.axis - 1] = [self.outputs] if self.output_has_axis else []
        expected = (len(step_input), self.targets, *window)
        if not isinstance(output, Tensor):
            raise InvalidTypeError(
                f"for a rollout the model must return a tensor of shape {expected}, got "
                f"{type(output).__name__}"
            )
        if output.shape != expected:
            raise InvalidValueError(
                f"for a rollout the model must return the next steps of the targets, of shape "
                f"{expected}, got {tuple(output.shape)}"
            )

    def _with_axis(self, cells: Tensor) -> Tensor:
        """Return cells of a single step with the axis of time."""
        if cells.ndim == self.ndim:
            return cells
        return cells.unsqueeze(self.axis)

    def _without_axis(self, cells: Tensor, has_axis: bool) -> Tensor:
        """Return cells with the axes that a single step has."""
        if has_axis:
            return cells
        return cells.squeeze(self.axis)


def refuse_several_steps(data: Mapping[str, Any], advice: str) -> None:
    """Refuse data, given by argument, whose samples hold several steps of a forecast."""
    for argument, loader in data.items():
        for dataset in datasets_in(loader, is_sample_data):
            if dataset.rollout > 1:
                raise InvalidValueError(
                    f"{argument} must have samples of one step, got PTXrDataset(..., "
                    f"rollout={dataset.rollout}), whose X holds the true later steps; {advice}"
                )


def is_sample_data(data: Any) -> bool:
    """Return True for a `PTXrDataset`."""
    return isinstance(data, PTXrDataset)


def lead_dim(data: PTXrDataset) -> str:
    """Return the dim along which targets lie later than inputs."""
    dims = [dim for dim, (offset, _) in (data.lead or {}).items() if offset]
    if len(dims) != 1:
        raise InvalidValueError(
            "data must have a target_offset along one dim, time, got "
            + (f"one along {dims}" if dims else "none")
        )
    return dims[0]


def check_same_cells(data: PTXrDataset, dim: str) -> None:
    """Refuse targets that lie in other cells than the inputs along dims besides `dim`."""
    x, y = ({d: n for d, n in sizes.items() if d != dim} for sizes in data.step_sizes[:2])
    if x != y:
        raise InvalidValueError(
            f"y must have the cells of X along all dims but {dim!r}, {x}, got {y}; leave "
            "target_size out there"
        )


def shared_channels(data: PTXrDataset) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the channels of X that are targets, and those of the same variables in y."""
    shared = [name for name in data.targets if name in data.features]
    if not shared:
        raise InvalidValueError(
            f"one of the targets {list(data.targets)} must be a feature too, got the features "
            f"{list(data.features)}; name it in features="
        )
    x_channels = tuple(map(data.features.index, shared))
    return x_channels, tuple(map(data.targets.index, shared))


@lru_cache(maxsize=64)
def _index(channels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return channels as a tensor, copied to a device once."""
    with torch.inference_mode(False):  # or it could not be used in training later
        return torch.tensor(channels, device=device)
