"""An add-on that trains on several devices of this machine, with a process for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.addons.core import MixinAddOn, TrainerBase
from ml4cube.training.ranks.dist import DEFAULT_TIMEOUT_S, World, launch
from ml4cube.training.ranks.environment import count_gpus, pick_of
from ml4cube.training.ranks.shared_data import with_sampler

logger = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _Devices(TrainerBase):  # type: ignore[misc]
    """Mixin that runs the Trainer's methods in processes."""

    def __init__(
        self,
        model: nn.Module,
        device: Any = None,
        *args: Any,
        init_method: str | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        _check_init_method(init_method)
        if kwargs.get("strategy") == "fsdp":
            raise InvalidTypeError(
                "MultiGPUAddon does not support strategy='fsdp'; start the script with torchrun, "
                "without the add-on"
            )
        self.devices = _as_devices(device)
        self._timeout = timeout
        super().__init__(model, pick_of(self.devices), *args, **kwargs)

    def run(self, n_epoch: int, loader: Any, valid_loader: Any = None) -> Any:
        """Run `Trainer.run` on all devices."""
        if self._runs_here():
            return super().run(n_epoch, loader, valid_loader)
        return self._run_on_devices(loader, valid_loader, n_epoch)

    def run_epoch(self, loader: Any) -> Any:
        """Run `Trainer.run_epoch` on all devices."""
        if self._runs_here():
            return super().run_epoch(loader)
        return self._run_on_devices(loader)

    def _runs_here(self) -> bool:
        """Return True in a process that `run` or torchrun started, or if one device is enough."""
        return self._world.size > 1 or len(self.devices) == 1

    def _run_on_devices(
        self, loader: Any, valid_loader: Any = None, n_epoch: int | None = None
    ) -> Any:
        """Start the processes, and take over what they have changed; see `_run_rank`."""
        device = self.device
        self._move(torch.device("cpu"))  # to be pickled
        try:
            arguments = (self, torch.initial_seed(), loader, valid_loader, n_epoch)
            returned, changes = launch(
                _run_rank,
                len(self.devices),
                *arguments,
                timeout=self._timeout,
                device_of_rank=self.devices,
            )
            self.unpack(changes)
        finally:
            self._move(device)
        return returned

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for tensor in self._outside().values():
            tensor.data = tensor.data.to(device)
        if self.optimizer is not None:
            # Loading its own state moves the state to the device of the parameters.
            self.optimizer.load_state_dict(self.optimizer.state_dict())


class MultiGPUAddon(MixinAddOn):
    """Train on several devices of this machine, with a process for each.

    The Trainer takes ``device``, a list such as ``["cuda:0", "cuda:1"]``; without a GPU, every
    entry is a process on the CPU. Default: all GPUs. `run` and `run_epoch` start the processes,
    share the data out, and copy the trained weights, optimizer, scheduler, logs and History back to
    this Trainer, so that the model you passed is trained.

    The processes are not forked and do not run your script again, so no
    ``if __name__ == "__main__"`` is needed. They find one another through a file;
    ``init_method`` is accepted, but no port is opened. Under torchrun no processes are started.

    Each process gets its part of a DataLoader with the same batch size, so the total batch is
    larger by the number of processes. Every sample is used at most once per epoch in training, and
    exactly once in validation. Loaders of `ml4cube.datasets.pytorch.prep_dataloader` need
    ``parallel=True``.

    Attributes that your methods set on the Trainer, and state of callbacks that is not in their
    ``state_dict``, are lost with the processes.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from ml4cube.training.trainer import Trainer
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> model = nn.Linear(1, 1)
    >>> trainer = Trainer.add_on(MultiGPUAddon)(
    ...     model,
    ...     device=["cpu", "cpu"],
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=nn.MSELoss(),
    ... )
    >>> history = trainer.run(n_epoch=1, loader=loader)
    >>> [row["train_n"] for row in history["ranks"][0]]
    [16, 16]
    """

    mixin = _Devices


def _run_rank(trainer: Any, seed: int, loader: Any, valid_loader: Any, n_epoch: int | None) -> Any:
    """Call `run`, or without a number of epochs `run_epoch`, in one process.

    Rank 0 returns the result, and what the call has changed in the Trainer; other ranks None.
    """
    # This copy of the Trainer becomes that of one rank.
    trainer._world = world = World.current(trainer.devices[dist.get_rank()])
    trainer._move(world.device)
    # Seeded like the parent process, but differently on each rank.
    torch.manual_seed((seed + world.rank) % 2**63)
    loader = share_loader(loader, world, exact=trainer.mode == "test", seed=seed)
    valid_loader = share_loader(valid_loader, world, exact=True)
    if n_epoch is None:
        returned = trainer.run_epoch(loader)
    else:
        returned = trainer.run(n_epoch, loader, valid_loader)
    if not world.is_main:
        return None
    return (returned, trainer.pack())


def share_loader(loader: Any, world: World, *, exact: bool, seed: int = 0) -> Any:
    """Return a loader of a rank's part of the samples of another one.

    Parts have the same number of samples or batches, in the order of `seed` if the loader shuffles;
    those left over are in none. With `exact`, which is for validation, a list is divided whole, and
    a loader that cannot be divided is returned as it is.
    """
    if loader is None or getattr(loader, "parallel", False):  # shared out already
        return loader
    if isinstance(loader, Mapping):  # several validation sets
        return {name: share_loader(part, world, exact=exact) for name, part in loader.items()}
    if isinstance(loader, list | tuple):  # of batches
        n_shared = len(loader)
        if not exact:
            n_shared -= n_shared % world.size
        return list(loader[world.rank : n_shared : world.size])
    if not isinstance(loader, DataLoader) or not _is_divisible(loader):
        if exact:  # every rank evaluates all samples, which gives the same result
            return loader
        kind = type(loader).__name__
        kind += f" with {type(loader.sampler).__name__}" if isinstance(loader, DataLoader) else ""
        raise InvalidTypeError(
            f"loader must be a DataLoader of a map-style dataset without its own sampler, a list "
            "of batches, or prep_dataloader(..., parallel=True), to be shared out over processes; "
            f"got {kind}"
        )
    # Of the three samplers that are divisible, only DistributedSampler has this attribute.
    shuffle = getattr(loader.sampler, "shuffle", isinstance(loader.sampler, RandomSampler))
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, world.size, world.rank, shuffle, seed=seed % 2**31, drop_last=True
    )
    # In validation, the loop replaces this sampler by one that drops nothing (`exact_loader`). The
    # generator is left out, because it would seed workers on all ranks alike.
    return with_sampler(loader, sampler, drop_last=loader.drop_last, generator=None)


def _is_divisible(loader: DataLoader[Any]) -> bool:
    """Return True if ranks can share the samples: each has an index, and comes once an epoch."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:  # it may draw fewer samples than there are, or more
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def _as_devices(device: Any) -> list[torch.device]:
    """Return the devices to train on, or without a GPU the CPU as many times."""
    gpus = count_gpus()
    names = device
    if isinstance(device, str | torch.device):
        names = [device]
    if device is None or str(device) == "cuda":
        names = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    if not isinstance(names, Sequence) or not names:
        raise InvalidValueError(
            f"device must be a list such as ['cuda:0', 'cuda:1'] or ['cpu', 'cpu'], got {device!r}"
        )
    devices = [torch.device(name) for name in names]
    if gpus == 0 and any(each.type == "cuda" for each in devices):
        logger.warning("device=%s, but this machine has no GPU; using the CPU", device)
        return [torch.device("cpu")] * len(devices)
    if len(devices) == 1:
        logger.warning("MultiGPUAddon has one device, %s, so one process trains", devices[0])
    return devices


def _check_init_method(init_method: str | None) -> None:
    """Refuse an address on another machine; one on this machine is accepted, but not used."""
    url = urlsplit(init_method or "env://")
    is_local = url.scheme in ("env", "file") or (url.scheme == "tcp" and url.hostname in _LOOPBACK)
    if not is_local:
        raise InvalidValueError(
            "init_method must be an address on this machine such as 'tcp://localhost:12355', or "
            f"be left out, got {init_method!r}; use torchrun for several machines"
        )
