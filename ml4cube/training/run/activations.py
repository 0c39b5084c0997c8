"""The memory that gradients need: what a call of a model keeps for the backward pass."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ml4cube.core.errors import caller_level


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
