"""Forecasts of several steps, in which the output of a model becomes its next input."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level
from ml4cube.loading.tensors import PTXrDataset
from ml4cube.training.inputs.checks import sample_data_in
from ml4cube.training.inputs.options import Options


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


class RolledOut:
    """Predictions and targets of a batch whose loss is that of several steps together.

    Steps are samples of their own: they are joined along the axis of samples, so that a loss gets
    them in the shape of a single step.
    """

    def __init__(self, rollout: Rollout, options: Options) -> None:
        self.rollout, self._options = rollout, options
        self._is_measured = False  # what the gradient of one call needs

    def steps(self, x: Tensor, epoch: int, *, training: bool) -> int:
        """Return the steps to predict: all that a batch has, or in training those of the epoch."""
        in_batch = self.rollout.steps_in(x)
        if training:
            return min(self._options.rollout_in(epoch) or in_batch, in_batch)
        return in_batch

    def predict(self, module: nn.Module, x: Tensor, y: Tensor, steps: int) -> Tensor:
        """Return the predictions of all steps; gaps of y keep the values of X in the next input."""
        first = 0  # with a gradient
        if torch.is_grad_enabled():
            first = max(0, steps - (self._options.rollout_gradient or steps))
        # DDP prepares the reduction of gradients and copies buffers in each call of it. That is
        # done once a batch, in the first call with a gradient.
        inner = module
        if isinstance(module, DistributedDataParallel):
            inner = module.module

        def call(step_input: Tensor, step: int) -> Any:
            if step < first:
                with torch.no_grad():
                    return inner(step_input)
            if step > first:
                return inner(step_input)
            if step:  # else weights that autocast has converted get no gradient in older torch
                torch.clear_autocast_cache()
            return self._first_call(module, step_input, steps)

        keep = None
        if steps > 1:
            keep = ~y.isfinite()
        outputs = list(self.rollout.forecast(call, x, steps, keep))
        if steps == 1:
            return outputs[0]
        return torch.cat(outputs)

    def scored(self, y: Tensor, weights: Tensor | None, steps: int) -> tuple[Tensor, Tensor | None]:
        """Return targets and weights of some steps, joined like the predictions."""
        y = self._joined(y, steps)
        if weights is None:
            return y, None
        if weights.ndim == 1:  # of samples
            return y, weights.repeat(steps)
        return y, self._joined(weights, steps)

    def _joined(self, cells: Tensor, steps: int) -> Tensor:
        parts = [self.rollout.target_of(cells, step) for step in range(steps)]
        if steps == 1:
            return parts[0]
        return torch.cat(parts)

    def _first_call(self, module: nn.Module, step_input: Tensor, steps: int) -> Any:
        """Call the model; the first time in training, measure what its gradient needs."""
        calls = max(self._options.rollout_steps, default=steps)
        calls = min(calls, self._options.rollout_gradient or calls)
        if self._is_measured or calls == 1 or not torch.is_grad_enabled():
            return module(step_input)
        self._is_measured = True
        saved = SavedForGradient()
        with saved:
            output = module(step_input)
        warn_if_too_much(saved.nbytes, calls, step_input.device)
        return output


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


def find_rollout(
    options: Options, data: Mapping[str, Any], agreed: Rollout | None
) -> Rollout | None:
    """Return the rollout of the data, given by argument, that have several steps."""
    train = data.get("train_data")
    if train is not None:
        _check_steps(options, train, data)
    for argument, loader in data.items():
        for dataset in sample_data_in(loader):
            if dataset.rollout == 1:
                continue
            rollout = Rollout.of(dataset)
            if agreed is not None and rollout != agreed:
                raise InvalidValueError(
                    f"all data must have the same features, targets, sample_size and target_size "
                    f"for a rollout; {argument} differs from the others"
                )
            agreed = rollout
    return agreed


def _check_steps(options: Options, train: Any, data: Mapping[str, Any]) -> None:
    """Refuse more steps than the training data have, and warn of losses that do not compare."""
    wanted = options.rollout_steps
    available = min((dataset.rollout for dataset in sample_data_in(train)), default=1)
    if max(wanted, default=1) > available:
        raise InvalidValueError(
            f"rollout must be at most that of the training data, {available}, got "
            f"{options.rollout!r}; make them with PTXrDataset(..., rollout={max(wanted)})"
        )
    by_training = data.get("test_data", ...) is None or (options.monitor or "").startswith("train_")
    if len(wanted) > 1 and by_training:
        warnings.warn(
            f"the training loss chooses the best epoch, but with rollout={options.rollout!r} it is "
            "that of other steps in other epochs; give test_data, and leave monitor out",
            stacklevel=caller_level(),
        )


class SavedForGradient(saved_tensors_hooks):
    """Counts the bytes that calls of a model in its body keep for the backward pass."""

    def __init__(self) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._bytes: dict[int, int] = {}  # by storage, because views share one

    @property
    def nbytes(self) -> int:
        """The bytes that were kept, without the weights of the model."""
        return sum(self._bytes.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        if not any(isinstance(owner, nn.Parameter) for owner in (tensor, tensor._base)):
            storage = tensor.untyped_storage()
            self._bytes[storage.data_ptr()] = storage.nbytes()
        return tensor


def warn_if_too_much(nbytes: int, calls: int, device: torch.device) -> None:
    """Warn if a device lacks the memory for several calls, of which one has been made."""
    free = free_memory(device)
    if free is None or nbytes * (calls - 1) <= free:
        return
    warnings.warn(
        f"the gradient of rollout={calls} steps needs about {calls * nbytes / 1e9:.3g} GB, "
        f"{nbytes / 1e9:.3g} GB for each, and {device} has {free / 1e9:.3g} GB left; give "
        "rollout_gradient, the last steps that get a gradient, or a smaller batch_size",
        stacklevel=caller_level(),
    )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device; None if that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return free + reserved - used
    if device.type == "cpu":
        with suppress(OSError, StopIteration):  # a system without this file
            lines = Path("/proc/meminfo").read_text().splitlines()
            available = next(line for line in lines if line.startswith("MemAvailable:"))
            return int(available.split()[1]) * 1024
    return None
