"""Handover: the last steps of a batch, and the positions of those handed out lately."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch
from ml4cube.core.rank_shares import Ints

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, torch.Generator], Any]

_MOST_REMEMBERED = 64
_STEPS_UNDER_WAY = 2


class Handover:
    """The last steps of a collated batch: device and augmentation; remembers the latest ones."""

    def __init__(
        self,
        callback: Collate | None,
        device: torch.device | None,
        augment: Sequence[Augment],
        seed: int,
    ) -> None:
        self._device, self._augment, self._seed = device, augment, seed
        self._copy = None if device is None else BatchCopy(device)
        # A callback or an augmentation of the user may leave out samples.
        augment_keeps = all(getattr(step, "keeps_samples", False) for step in augment)
        self.keeps_samples = callback is None and augment_keeps
        # First tensor, epoch and positions of the latest batches.
        self._recent: deque[tuple[Any, int, Ints]] = deque(maxlen=_MOST_REMEMBERED)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the batches, which another process does not have."""
        return {**self.__dict__, "_recent": deque(maxlen=_MOST_REMEMBERED)}

    def complete(self, batch: Any, epoch: int, positions: Ints) -> Any:
        """Return a batch in its last form, and remember its positions."""
        if self._copy is not None:
            batch = self._copy(batch)
        if self._augment:
            # The first positions of the batches of an epoch differ, on all ranks.
            key = np.random.SeedSequence([self._seed, epoch, int(positions[0])])
            generator = torch.Generator(self._device or "cpu")
            generator.manual_seed(int(key.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            for step in self._augment:
                batch = step(batch, generator)
        tensor = _first_tensor(batch)
        if tensor is not None:
            self._recent.append((weakref.ref(tensor), epoch, positions))
        return batch

    def find(self, batch: Any) -> tuple[int, Ints]:
        """Return the epoch of a batch and its positions in it."""
        tensor = _first_tensor(batch)
        for known, epoch, positions in reversed(self._recent):
            if tensor is not None and known() is tensor:
                if not tensor.ndim or len(tensor) != len(positions):
                    raise InvalidValueError(
                        "the loader's callback or augment changed the number of samples in this "
                        "batch, so they cannot be identified; keep their number"
                    )
                return epoch, positions
        raise InvalidValueError(
            f"the batch must be one of the last {_MOST_REMEMBERED} that the loader handed out, and "
            "no copy; ask before it is copied to another device, or use device="
        )

    def refuse_augmented(self) -> None:
        """Refuse a loader that may have moved cells."""
        if self._augment:
            raise InvalidValueError(
                "the loader's augment= may have moved cells, so their coordinates are not known; "
                "coords(batch) still gives the origins of the samples"
            )


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list) and batch:
        return _first_tensor(batch[0])
    return None


class BatchCopy:
    """Copies batches to a device; to a GPU, while it computes on those before."""

    # The copies run on a stream of their own. The stream that computes waits for each, and the host
    # for the steps before the last two, or it would fill the GPU's memory with batches.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._steps: deque[torch.cuda.Event] = deque()  # the ends of the steps under way

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchCopy, (self._device,)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with all its tensors on the device."""
        if self._device.type != "cuda":
            return to_device(batch, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._steps.append(current.record_event())
        if len(self._steps) > _STEPS_UNDER_WAY:
            self._steps.popleft().synchronize()
        copied = to_device(batch, self._device, self._stream)
        current.wait_stream(self._stream)
        return copied


def to_device(batch: Any, device: torch.device, stream: torch.cuda.Stream | None = None) -> Any:
    """Return the batch with all its tensors on a device, copied on a stream of it if given."""
    if isinstance(batch, Tensor):
        return _tensor_to_device(batch, device, stream)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, stream) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device, stream) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*moved)
        return type(batch)(moved)
    if is_dataclass(batch) and not isinstance(batch, type):
        # Works for frozen dataclasses and those with an __init__ of their own.
        other = copy.copy(batch)
        for field in fields(batch):
            moved = to_device(getattr(batch, field.name), device, stream)
            object.__setattr__(other, field.name, moved)
        return other
    return batch


def _tensor_to_device(
    tensor: Tensor, device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    if tensor.device == device:
        return tensor
    if device.type == "mps" and tensor.dtype == torch.float64:
        raise InvalidTypeError(
            "device='mps' has no float64, got a batch of it; give dtype='float32' to PTXrDataset, "
            "or tensors that are float32"
        )
    if stream is None or tensor.device.type != "cpu":
        # Only CUDA (and ROCm) has read memory that is not pinned when this returns. Others still
        # read it, and main memory is not filled yet, while it is used again.
        return tensor.to(device, non_blocking=device.type == "cuda")
    with torch.cuda.stream(stream):
        moved = tensor.to(device, non_blocking=True)
    # Its memory belongs to the stream of copies, which must not use it again before it is free.
    moved.record_stream(torch.cuda.current_stream(device))
    return moved
