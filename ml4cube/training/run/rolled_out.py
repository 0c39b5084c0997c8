"""Predict batches of a forecast of several steps, each from the output of the step before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from ml4cube.core.errors import InvalidValueError, caller_level
from ml4cube.core.same_scaling import datasets_in
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.rollout import Rollout, is_sample_data


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


def find_rollout(
    options: Options, data: Mapping[str, Any], agreed: Rollout | None
) -> Rollout | None:
    """Return the rollout of the data, given by argument, that have several steps."""
    train = data.get("train_data")
    if train is not None:
        _check_steps(options, train, data)
    for argument, loader in data.items():
        for dataset in datasets_in(loader, is_sample_data):
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
    available = min((dataset.rollout for dataset in datasets_in(train, is_sample_data)), default=1)
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
