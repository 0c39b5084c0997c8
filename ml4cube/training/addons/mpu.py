"""An add-on that trains on several devices of this machine: a process for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.addons.core import AddOnBase
from ml4cube.training.ranks.dist import DEFAULT_TIMEOUT_S, World, launch, local_rank

logger = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class MultiGPUAddon(AddOnBase):
    """Train on all devices of a list, with a process for each.

    The Trainer takes ``device``, a list such as ``["cuda:0", "cuda:1"]``; on a machine without
    GPU every entry is a process on the CPU. Without a list it is all GPUs. `run` and `run_epoch`
    start the processes, share the data out, and give the trained weights, optimizer, scheduler,
    logs and History back to this Trainer, so that the model you passed is trained.

    The processes are neither forked nor do they run your script again, so no
    ``if __name__ == "__main__"`` is needed. They meet through a file; ``init_method`` is
    understood, but no port is opened, so none can be in use. Under torchrun, which has started
    processes already, nothing more is started.

    Of a DataLoader, each process is given its part, with the batch size it has: batches are
    together as many times larger as there are processes. Every sample is used at most once an
    epoch in training, and exactly once in validation. Loaders of
    `ml4cube.datasets.pytorch.prep_dataloader` share themselves out with ``parallel=True``.

    Attributes that your methods set on the Trainer stay in the processes, and so does what a
    callback does not put into its ``state_dict``.

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

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass that starts processes.

        Parameters
        ----------
        base_cls : type
            A Trainer class.

        Returns
        -------
        type
            The subclass.
        """
        return type(base_cls)("TrainerOnDevices", (_OnDevices, base_cls), {})


class _OnDevices:
    """Comes before a Trainer class."""

    model: nn.Module
    optimizer: Any
    device: torch.device
    _world: World

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
                "strategy='fsdp' and MultiGPUAddon do not go together, since the trained model "
                "comes back whole; start the script with torchrun, without the add-on"
            )
        self.devices = _devices(device)
        self._timeout = timeout
        self._is_rank = False
        own = self.devices[local_rank() % len(self.devices)]
        super().__init__(model, own, *args, **kwargs)  # type: ignore[call-arg]

    def run(self, n_epoch: int, loader: Any, valid_loader: Any = None) -> Any:
        """As `Trainer.run`, on all devices."""
        if self._stays_here():
            return super().run(n_epoch, loader, valid_loader)  # type: ignore[misc]
        return self._on_devices("run", n_epoch, loader, valid_loader)

    def run_epoch(self, loader: Any) -> Any:
        """As `Trainer.run_epoch`, on all devices."""
        if self._stays_here():
            return super().run_epoch(loader)  # type: ignore[misc]
        return self._on_devices("run_epoch", loader)

    def _stays_here(self) -> bool:
        return self._is_rank or self._world.size > 1 or len(self.devices) == 1

    def _on_devices(self, method: str, *args: Any) -> Any:
        home = self.device
        self._move(torch.device("cpu"))  # how a model travels
        try:
            returned, packed = launch(
                _run_rank,
                len(self.devices),
                self,
                method,
                args,
                torch.initial_seed(),
                timeout=self._timeout,
            )
            self.unpack(packed)  # type: ignore[attr-defined]
        finally:
            self._move(home)
        return returned

    def enter_rank(self) -> None:
        """Become one of the processes: the Trainer of its device."""
        self._is_rank = True
        self._world = World.current(self.devices[local_rank()])
        self._move(self._world.device)

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        if self.optimizer is not None:
            # Loading brings the state to where the parameters are.
            self.optimizer.load_state_dict(self.optimizer.state_dict())


def _run_rank(trainer: Any, method: str, args: tuple[Any, ...], seed: int) -> Any:
    """What one process does; rank 0's answer goes back."""
    trainer.enter_rank()
    world = trainer._world
    # As the process that started this one was seeded, but for the rank.
    torch.manual_seed((seed + world.rank) % 2**63)
    *counts, train, val = args if method == "run" else (*args, None)
    testing = trainer.mode == "test"
    shared = [*counts, share_loader(train, world, exact=testing, seed=seed)]
    if method == "run":
        shared.append(None if val is None else share_loader(val, world, exact=True, seed=seed))
    returned = getattr(trainer, method)(*shared)
    return (returned, trainer.pack()) if world.is_main else None


def share_loader(loader: Any, world: World, *, exact: bool, seed: int = 0) -> Any:
    """Return a loader that gives a rank its part of another one."""
    if getattr(loader, "parallel", False):  # shares itself out
        return loader
    if isinstance(loader, Mapping):  # several validation sets
        sets = loader.items()
        return {n: share_loader(each, world, exact=exact, seed=seed) for n, each in sets}
    if isinstance(loader, list | tuple):
        whole = len(loader) if exact else len(loader) // world.size * world.size
        return list(loader[world.rank : whole : world.size])
    if not isinstance(loader, DataLoader) or not _is_plain(loader):
        if exact:  # every rank evaluates all of it, which is exact as well
            return loader
        raise InvalidTypeError(
            f"loader={_describe(loader)} cannot be shared out to {world.size} processes; give a "
            "DataLoader with a map-style dataset and no sampler of its own, a list of batches, "
            "or prep_dataloader(..., parallel=True)"
        )
    shuffled = isinstance(loader.sampler, RandomSampler)
    if isinstance(loader.sampler, DistributedSampler):
        shuffled = loader.sampler.shuffle
    workers = loader.num_workers
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        # The loop replaces this one in validation, by one that leaves nothing out.
        sampler=DistributedSampler(
            loader.dataset,
            world.size,
            world.rank,
            shuffle=shuffled and not exact,
            seed=seed % 2**31,
            drop_last=True,
        ),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last and not exact,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=loader.persistent_workers if workers else False,
    )


def _is_plain(loader: DataLoader[Any]) -> bool:
    known = (RandomSampler, SequentialSampler, DistributedSampler)
    sampler = loader.sampler
    return (
        not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(sampler) in known
        and not (isinstance(sampler, RandomSampler) and sampler.replacement)
    )


def _describe(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return f"a DataLoader with a {type(loader.sampler).__name__}"
    return f"a {type(loader).__name__}"


def _devices(device: Any) -> list[torch.device]:
    """Return the devices to train on; on a machine without GPU, the CPU as often."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None or (isinstance(device, str | torch.device) and str(device) == "cuda"):
        asked = [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]
    elif isinstance(device, str | torch.device):
        asked = [torch.device(device)]
    elif isinstance(device, Sequence) and device:
        asked = [torch.device(entry) for entry in device]
    else:
        raise InvalidValueError(
            f"device={device!r} names no device; give a list such as ['cuda:0', 'cuda:1'], or "
            "['cpu', 'cpu']"
        )
    if gpus == 0 and any(entry.type == "cuda" for entry in asked):
        logger.warning("device=%s, but this machine has no GPU; using the CPU", device)
        return [torch.device("cpu")] * len(asked)
    if len(asked) == 1:
        logger.warning("MultiGPUAddon has one device, %s, so one process trains", asked[0])
    return asked


def _check_init_method(init_method: str | None) -> None:
    """Accept an address on this machine; it is not needed, since ranks meet through a file."""
    if init_method is None:
        return
    place = urlsplit(init_method) if isinstance(init_method, str) else None
    if place is None or place.scheme not in ("tcp", "env", "file"):
        raise InvalidValueError(
            f"init_method={init_method!r} is no address; give e.g. 'tcp://localhost:12355', or "
            "leave it out"
        )
    if place.scheme == "tcp" and place.hostname not in _LOOPBACK:
        raise InvalidValueError(
            f"init_method={init_method!r} is on another machine; MultiGPUAddon starts processes on "
            "this one, torchrun starts them on several"
        )
