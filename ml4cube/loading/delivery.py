"""Handover: what is done to a batch last, and which batches were handed out lately."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch
from ml4cube.core.shares import Ints

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, torch.Generator], Any]

_REMEMBERED = 64


class Handover:
    """Brings a batch into its last form, and remembers where it came from."""

    def __init__(
        self,
        items: Callable[[Any], list[Any]] | None,
        callback: Collate | None,
        device: Any,
        augment: Augment | None,
        seed: int,
    ) -> None:
        if augment is not None and not callable(augment):
            raise InvalidTypeError(
                f"augment={augment!r} cannot be called; give a function of a batch and a generator"
            )
        if callback is not None and not callable(callback):
            raise InvalidTypeError(
                f"callback={callback!r} cannot be called; give a function of a list of items"
            )
        self.callback, self._items = callback, items
        self._device = None if device is None else _device(device)
        self._augment, self._seed = augment, seed
        kept = getattr(augment, "keeps_samples", augment is None)
        self.keeps_samples = callback is None and bool(kept)
        self._plain = device is None and augment is None and (callback is None or items is None)
        self._lately: deque[tuple[Any, int, Ints, int, bool]] = deque(maxlen=_REMEMBERED)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was handed out, which another process does not have."""
        return {**self.__dict__, "_lately": deque(maxlen=_REMEMBERED)}

    def hand(self, batch: Any, epoch: int, positions: Ints, first: int) -> Any:
        """Bring a batch into its last form."""
        whole = True
        if not self._plain:
            samples = _samples(_first_tensor(batch))
            batch = self._finished(batch, epoch, int(positions[first]))
            whole = _samples(_first_tensor(batch)) == samples
        tensor = _first_tensor(batch)
        if tensor is not None:
            self._lately.append((weakref.ref(tensor), epoch, positions, first, whole))
        return batch

    def _finished(self, batch: Any, epoch: int, position: int) -> Any:
        if self.callback is not None and self._items is not None:
            batch = self.callback(self._items(batch))
        if self._device is not None:
            batch = _moved(batch, self._device)
        if self._augment is not None:
            # positions differ between the batches of an epoch, on all ranks
            key = np.random.SeedSequence([self._seed, epoch, position])
            generator = torch.Generator(self._device or "cpu")
            generator.manual_seed(int(key.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            batch = self._augment(batch, generator)
        return batch

    def find(self, batch: Any) -> tuple[int, Ints]:
        """Say where in which epoch a batch stood."""
        tensor = _first_tensor(batch)
        for held, epoch, positions, first, whole in reversed(self._lately):
            if tensor is not None and held() is tensor:
                if not whole:
                    raise InvalidValueError(
                        "the loader's callback or augment left out some samples of this batch, or "
                        "added some, so which these are is not known; let it keep their number"
                    )
                return epoch, positions[first : first + len(tensor)]
        raise InvalidValueError(
            f"this is none of the last {_REMEMBERED} batches that the loader handed out, or its "
            "tensors are copies; ask before the batch is copied to another device, or use device="
        )

    def refuse_augmented(self) -> None:
        """Refuse to name cells that were moved."""
        if self._augment is not None:
            raise InvalidValueError(
                "the loader's augment= may have moved cells, so their coordinates are not known; "
                "coords(batch) still tells where the samples come from"
            )


def _device(given: Any) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidValueError(
            f"device={given!r} cannot be used here ({str(error).splitlines()[0]}); give a device "
            "that torch finds, such as 'cpu' or 'cuda'"
        ) from error
    return device


def _samples(tensor: Tensor | None) -> int | None:
    """How many samples a tensor holds; None if it is a single number."""
    return len(tensor) if tensor is not None and tensor.ndim else None


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list) and batch:
        return _first_tensor(batch[0])
    return None


def _moved(batch: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
