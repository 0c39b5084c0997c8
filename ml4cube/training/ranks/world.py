"""All ranks that train together, and what they exchange."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ml4cube.training.ranks.environment import pick_device

T = TypeVar("T")

_STORE_ERRORS = (RuntimeError, OSError)  # the process that serves the store may have ended
_FOREVER = timedelta(days=365)
_CPU = torch.device("cpu")


class Joined:
    """The process group that this package made, if any, and the store that its ranks share.

    `groups` are those that a `World` made beside it, or beside a group of the caller.
    """

    group: Any = None
    store: Store | None = None
    groups: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True)
class World:
    """All ranks that train together, and the rank and device of this process."""

    # With one rank, no method communicates, and no process group is needed. Numbers, objects and
    # tensors on the CPU travel through main memory, so that they do not wait for the GPU.

    rank: int
    size: int
    device: torch.device
    is_patient: bool = False  # waits for late ranks without limit

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> World:
        """Return a world of this process alone, even if there is a process group."""
        return cls(0, 1, pick_device(device))

    @classmethod
    def current(cls, device: str | torch.device | None = None) -> World:
        """Return the world of the process group, or of this process alone if there is none.

        In a process group, torch then uses the device of this rank by default.
        """
        if not dist.is_initialized():
            return cls.single(device)
        world = cls(dist.get_rank(), dist.get_world_size(), pick_device(device))
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        return world

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and logs."""
        return self.rank == 0

    def patient(self) -> World:
        """Return the same world, but without a limit on the time that ranks wait; every rank.

        A rank that has ended is noticed all the same, one that is stuck is not.
        """
        patient = replace(self, is_patient=True)
        if self.size > 1:
            self.barrier()  # all ranks are alive, and none waits without limit for the group
            patient._group()
        return patient

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.maximum([0.0])

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over ranks of each number."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each number."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a tensor, without reading it on the host."""
        if self.size == 1:
            return tensor
        device = _sending_device(tensor.device)
        summed = tensor.detach().to(device, copy=True)
        dist.all_reduce(summed, group=self.group(device))
        return summed.to(tensor.device)

    def gather_objects(self, value: T) -> list[T]:
        """Return the objects of all ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, _pickled(value), group=self._group())
        return [pickle.loads(pickled) for pickled in gathered]  # noqa: S301

    def broadcast(self, value: T) -> T:
        """Return the object of rank 0."""
        if self.size == 1:
            return value
        objects: list[Any] = [_pickled(value) if self.is_main else None]
        dist.broadcast_object_list(objects, src=0, group=self._group(), device=_CPU)
        received: T = pickle.loads(objects[0])  # noqa: S301
        return received

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors, in place, with those of rank 0."""
        if self.size == 1:
            return
        for tensor in tensors:
            device = _sending_device(tensor.device)
            received = tensor.detach().to(device).contiguous()
            dist.broadcast(received, src=0, group=self.group(device))
            with torch.no_grad():
                tensor.copy_(received)

    def group(self, device: torch.device) -> Any:
        """Return the process group for tensors on a device; None is the one of all of torch."""
        if device.type != "cpu":
            return None
        return self._group()

    def post(self, topic: str, message: str) -> None:
        """Leave a message that all ranks can read."""
        self._ask_store(lambda store: store.set(f"ml4cube/{topic}", message))

    def remove(self, topic: str) -> None:
        """Remove a message."""
        self._ask_store(lambda store: store.delete_key(f"ml4cube/{topic}"))

    def message(self, topic: str) -> str | None:
        """Return the message that a rank has left, without waiting for other ranks."""
        key = f"ml4cube/{topic}"
        is_there = self._ask_store(lambda store: store.check([key]))
        if not is_there:
            return None
        return self._ask_store(lambda store: store.get(key).decode())

    def _ask_store(self, ask: Callable[[Store], T]) -> T | None:
        """Return what the store of the ranks says; None if there is none any more."""
        if self.size > 1 and Joined.store is not None:
            with suppress(*_STORE_ERRORS):
                return ask(Joined.store)
        return None

    def _group(self) -> Any:
        """Return the process group for what is in main memory; every rank."""
        if self.is_patient:
            return _beside("patient", _FOREVER)
        # A group that the caller made may have nccl alone, which cannot use main memory.
        if "cpu:" in dist.get_backend_config():
            return None
        return _beside("cpu", None)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self._group())
        result: list[float] = tensor.tolist()
        return result


def _pickled(value: Any) -> bytes:
    """Pickle an object with its class, which may be defined in a script that ranks do not run."""
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def _beside(name: str, timeout: timedelta | None) -> Any:
    """Return a group of all ranks with gloo, beside that of torch; made when first asked for.

    All ranks must ask for it at the same time then.
    """
    if Joined.groups.get("torch's") is not dist.group.WORLD:  # with which the others have ended
        Joined.groups = {"torch's": dist.group.WORLD}
    if name not in Joined.groups:
        with loopback_if_local(dist.get_world_size()):
            Joined.groups[name] = dist.new_group(backend="gloo", timeout=timeout)
    return Joined.groups[name]


def _sending_device(device: torch.device) -> torch.device:
    """Return the device to send a tensor from: where it is if that has nccl, else the CPU."""
    if f"{device.type}:nccl" in dist.get_backend_config():
        return device
    return _CPU


@contextmanager
def loopback_if_local(size: int) -> Iterator[None]:
    """Restrict gloo to the loopback interface if all ranks are on this machine."""
    variable = "GLOO_SOCKET_IFNAME"
    all_local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if not all_local or loopback is None or variable in os.environ:
        yield
        return
    os.environ[variable] = loopback
    try:
        yield
    finally:
        del os.environ[variable]
