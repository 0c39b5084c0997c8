"""Process groups, devices and collective operations."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, check_choice
from ml4cube.progress import write_line
from ml4cube.sampling.workers import watch_parent
from ml4cube.training.inputs.options import above_zero

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_S = 1e9  # the limit of timedelta and gloo
_GRACE_S = 2.0  # time for the other ranks to end after one has failed
_FAILED = "ml4cube/failed"


@dataclass(frozen=True)
class World:
    """All ranks that train together, and the rank and device of this process."""

    # With one rank, no method communicates, and no process group is needed.

    rank: int
    size: int
    device: torch.device

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> World:
        """Return a world of this process alone, even if there is a process group."""
        return cls(0, 1, pick_device(device))

    @classmethod
    def current(cls, device: str | torch.device | None = None) -> World:
        """Return the world of the process group, or of this process alone if there is none."""
        if not dist.is_initialized():
            return cls.single(device)
        return cls(dist.get_rank(), dist.get_world_size(), pick_device(device))

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and logs."""
        return self.rank == 0

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over ranks of each number."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each number."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def gather_objects(self, value: T) -> list[T]:
        """Return the objects of all ranks."""
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts

    def share(self, value: T) -> T:
        """Return the object of rank 0."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, device=self._transfer_device)
        shared: T = box[0]
        return shared

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors, in place, with those of rank 0."""
        if self.size == 1:
            return
        for tensor in tensors:
            received = tensor.detach().to(self._transfer_device).contiguous()
            dist.broadcast(received, src=0)
            with torch.no_grad():
                tensor.copy_(received)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, without reading it on the host."""
        if self.size == 1:
            return tensor
        summed = tensor.detach().to(self._transfer_device, copy=True)
        dist.all_reduce(summed)
        return summed.to(tensor.device)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.maximum([0.0])

    def raise_alarm(self, message: str | None) -> None:
        """Set a message that other ranks can read with `alarm`; None removes it."""
        store = _Group.store if self.size > 1 else None
        with suppress(RuntimeError, OSError):  # the process that serves the store may have ended
            if store is not None and message is None:
                store.delete_key(_FAILED)
            elif store is not None:
                store.set(_FAILED, str(message))

    def alarm(self) -> str | None:
        """Return the message set by a rank, without waiting for other ranks."""
        store = _Group.store if self.size > 1 else None
        try:
            return store.get(_FAILED).decode() if store and store.check([_FAILED]) else None
        except (RuntimeError, OSError):  # as above
            return None

    def report(self, error: BaseException) -> None:
        """Tell other ranks of an error of this rank, unless an earlier one is known."""
        if self.alarm() is None:
            self.raise_alarm(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._transfer_device)
        if self.size > 1:
            dist.all_reduce(tensor, op=op)
        result: list[float] = tensor.tolist()
        return result

    @property
    def _transfer_device(self) -> torch.device:
        """The device for tensors to send: nccl needs GPU memory."""
        if self.size > 1 and "nccl" in dist.get_backend() and self.device.type == "cuda":
            return self.device
        return torch.device("cpu")


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device to compute on."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidValueError(
            f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}"
        ) from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = local_rank() % max(count, 1) if found.index is None else found.index
    if index >= count:
        raise InvalidValueError(
            f"device={str(device)!r}, but this machine has {count} GPUs; use device='cpu'"
        )
    return torch.device("cuda", index)


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ddp_init(backend: str | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT_S) -> World:
    """Initialize the process group of torchrun, if this process was started by torchrun."""
    # An existing group, such as one made by the user, is left as it is. The group is destroyed by
    # `dist_train` or at the end of the program.
    check_choice("backend", backend, ["gloo", "nccl", None])
    limit = _as_timedelta(timeout)
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        base = _rendezvous(os.environ.get("MASTER_ADDR", ""), rank, size, limit)
        _join(base, rank, size, _pick_backend(backend), limit)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            watch_parent(os.getppid())  # a launcher that is killed cannot end its workers
    world = World.current()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    return world


# gloo's threads outlive the group (DistributedDataParallel keeps a reference) and need the
# interpreter to free the tensors of the last collective. A thread that does so while the
# interpreter shuts down aborts the process, so we wait here.
_GLOO_GRACE_S = 0.25


def ddp_cleanup() -> None:
    """Destroy the process group that `ddp_init` made, but not one that the caller made."""
    if _Group.made is not None and dist.is_initialized() and dist.group.WORLD is _Group.made:
        gloo = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        if gloo:
            time.sleep(_GLOO_GRACE_S)
    _Group.made, _Group.store = None, None


def launch(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT_S,
    **kwargs: Any,
) -> T:
    """Run a function on several new local processes that form one group."""
    # The processes are not forked and do not import the calling script again, so scripts without
    # ``if __name__ == "__main__"``, notebooks and lambdas work. They find one another through a
    # file, open ports only on loopback, and end with this process.
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise InvalidValueError(f"nproc must be a positive integer, got {nproc!r}")
    if not callable(fn):
        raise InvalidTypeError(f"fn must be a function, got {fn!r}")
    check_choice("backend", backend, ["gloo", "nccl", None])
    # Imported here, because it is slow.
    from loky import ProcessPoolExecutor

    folder = tempfile.mkdtemp(prefix="ml4cube-ranks-")
    pool = ProcessPoolExecutor(max_workers=nproc, timeout=None)
    healthy = False
    try:
        settings = (folder, nproc, backend, _as_timedelta(timeout), os.getpid())
        futures = [pool.submit(_run_rank, r, settings, fn, args, kwargs) for r in range(nproc)]
        result: T = _first_result(futures)
        healthy = True
        return result
    finally:
        pool.shutdown(wait=True, kill_workers=not healthy)
        shutil.rmtree(folder, ignore_errors=True)


class _Group:
    """The group made by this module, and the store for messages between ranks."""

    made: Any = None
    store: Store | None = None
    count = itertools.count()


@functools.cache
def _rendezvous(address: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Return torchrun's store; it is made once, because rank 0 may be its server."""
    found: tuple[Store, int, int] = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    return found[0]


def _join(base: Store, rank: int, size: int, backend: str, timeout: timedelta) -> None:
    # Without this prefix, restarted workers would read the addresses of dead ones.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"ml4cube/{run}/{restart}/{next(_Group.count)}", base)
    with _loopback(size):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    _Group.made, _Group.store = dist.group.WORLD, store
    atexit.register(ddp_cleanup)


@contextmanager
def _loopback(size: int) -> Iterator[None]:
    """Restrict gloo to the loopback interface if all ranks are on this machine."""
    name = "GLOO_SOCKET_IFNAME"
    all_local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size
    interface = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
    if not all_local or interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def _pick_backend(backend: str | None) -> str:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        return "nccl" if gpus >= local and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and gpus < local:
        raise InvalidValueError(
            f"backend='nccl' needs a GPU for each of the {local} ranks on this machine, which "
            f"has {gpus}; use backend='gloo'"
        )
    return backend


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not above_zero(seconds) or seconds >= _LONGEST_S:
        raise InvalidValueError(
            f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}"
        )
    return timedelta(seconds=seconds)


def _run_rank(
    rank: int,
    settings: tuple[str, int, str | None, timedelta, int],
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T | None:
    """Run a function as one rank, in its own process."""
    folder, size, backend, timeout, parent = settings
    watch_parent(parent)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        store = FileStore(os.path.join(folder, "store"), size)
        _join(store, rank, size, _pick_backend(backend), timeout)
        ddp_init()
        result = fn(*args, **kwargs)
    except BaseException as error:
        # The alarm tells ranks that wait in a collective why it fails.
        World.current("cpu").report(error)
        raise
    finally:
        ddp_cleanup()
    return result if rank == 0 else None


def _first_result(futures: list[Future[Any]]) -> Any:
    wait(futures, return_when=FIRST_EXCEPTION)
    if not any(future.done() and future.exception() for future in futures):
        return futures[0].result()
    wait(futures, timeout=_GRACE_S)
    errors = {r: f.exception() for r, f in enumerate(futures) if f.done() and f.exception()}
    # Report the rank that failed first, not one that only lost its connection.
    rank, error = min(errors.items(), key=lambda item: is_broken_link(_root(item[1])))
    if isinstance(error, RunError):
        raise error
    name = type(error).__name__
    raise RunError(f"rank {rank} of {len(futures)} failed: {name}: {error}") from error


def _root(error: BaseException | None) -> BaseException | None:
    """Return the first cause of an error that was passed on between processes."""
    while isinstance(error, RunError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_broken_link(error: BaseException | None) -> bool:
    """Return True if an error only says that other ranks cannot be reached."""
    signs = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and any(sign in str(error).lower() for sign in signs)
    )


@contextmanager
def explained(world: World) -> Iterator[None]:
    """Report an error of this rank to the others, and explain a lost connection by theirs."""
    try:
        yield
    except Exception as error:
        cause = world.alarm()
        if is_broken_link(error):
            reason = cause or "no rank reported an error: one was killed or froze"
            message = f"rank {world.rank} lost the other ranks: {reason}"
            # Written at once, because a launcher may end this rank before its traceback appears.
            write_line(message)
            raise RunError(message) from error
        world.report(error)
        raise
