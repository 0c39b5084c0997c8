"""Process groups, devices and collective operations."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
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
_MAX_TIMEOUT_S = 1e9  # a longer one overflows in gloo
_OTHERS_END_S = 2.0  # time for the other ranks to end after one has failed
# gloo's threads outlive the group (DistributedDataParallel keeps a reference) and need the
# interpreter to free the tensors of the last collective. A thread that does so while the
# interpreter shuts down aborts the process, so `ddp_cleanup` waits for them.
_GLOO_THREADS_END_S = 0.25
_STORE_ERRORS = (RuntimeError, OSError)  # the process that serves the store may have ended
_ALARM_KEY = "ml4cube/alarm"
_CPU = torch.device("cpu")


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
        summed = tensor.detach().to(self._sending_device(tensor.device), copy=True)
        dist.all_reduce(summed)
        return summed.to(tensor.device)

    def gather_objects(self, value: T) -> list[T]:
        """Return the objects of all ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """Return the object of rank 0."""
        if self.size == 1:
            return value
        objects: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(objects, src=0, device=self._sending_device(_CPU))
        received: T = objects[0]
        return received

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors, in place, with those of rank 0."""
        if self.size == 1:
            return
        for tensor in tensors:
            received = tensor.detach().to(self._sending_device(tensor.device)).contiguous()
            dist.broadcast(received, src=0)
            with torch.no_grad():
                tensor.copy_(received)

    def raise_alarm(self, message: str) -> None:
        """Set a message that other ranks can read with `alarm`."""
        self._ask_store(lambda store: store.set(_ALARM_KEY, message))

    def clear_alarm(self) -> None:
        """Remove the message."""
        self._ask_store(lambda store: store.delete_key(_ALARM_KEY))

    def alarm(self) -> str | None:
        """Return the message set by a rank, without waiting for other ranks."""
        is_set = self._ask_store(lambda store: store.check([_ALARM_KEY]))
        return self._ask_store(lambda store: store.get(_ALARM_KEY).decode()) if is_set else None

    def report_error(self, error: BaseException) -> None:
        """Tell other ranks of an error of this rank, unless there is an alarm already."""
        if self.alarm() is None:
            self.raise_alarm(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _ask_store(self, ask: Callable[[Store], T]) -> T | None:
        """Return what the store of the ranks says; None if there is none any more."""
        if self.size > 1 and _Joined.store is not None:
            with suppress(*_STORE_ERRORS):
                return ask(_Joined.store)
        return None

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        device = self._sending_device(_CPU)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        if self.size > 1:
            dist.all_reduce(tensor, op=op)
        result: list[float] = tensor.tolist()
        return result

    def _sending_device(self, wanted: torch.device) -> torch.device:
        """Return the device to send a tensor from: the wanted one if the group can use it."""
        # A group that the caller made may have nccl alone, which cannot use main memory.
        backends = dist.get_backend_config() if self.size > 1 else "cpu:gloo"
        if wanted.type == "cpu":
            return wanted if "cpu:" in backends else self.device
        return wanted if f"{wanted.type}:nccl" in backends else _CPU


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
    count = _usable_gpus()
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
        store = _torchrun_store(os.environ.get("MASTER_ADDR", ""), rank, size, limit)
        _join_group(store, rank, size, _pick_backend(backend), limit)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            watch_parent(os.getppid())  # a launcher that is killed cannot end its workers
    world = World.current()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    return world


def ddp_cleanup() -> None:
    """Destroy the process group that `ddp_init` made, but not one that the caller made."""
    group = _Joined.group
    if group is not None and dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
        time.sleep(_GLOO_THREADS_END_S)
    _Joined.group = _Joined.store = None


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

    with tempfile.TemporaryDirectory(prefix="ml4cube-ranks-", ignore_cleanup_errors=True) as folder:
        run_rank = functools.partial(
            _run_rank,
            call=functools.partial(fn, *args, **kwargs),
            size=nproc,
            store_path=os.path.join(folder, "store"),
            backend=backend,
            timeout=_as_timedelta(timeout),
            parent_pid=os.getpid(),
        )
        pool = ProcessPoolExecutor(max_workers=nproc, timeout=None)
        try:
            result: T = _result_of_main([pool.submit(run_rank, rank) for rank in range(nproc)])
        except BaseException:
            pool.shutdown(wait=True, kill_workers=True)
            raise
        pool.shutdown(wait=True, kill_workers=False)
        return result


@contextmanager
def reporting_errors(world: World) -> Iterator[None]:
    """Report an error of this rank to the others, and explain a lost connection by their error."""
    try:
        yield
    except Exception as error:
        if _is_lost_connection(error):
            reason = world.alarm() or "no rank reported an error: one was killed or froze"
            message = f"rank {world.rank} lost the other ranks: {reason}"
            # Written at once, because a launcher may end this rank before its traceback appears.
            write_line(message)
            raise RunError(message) from error
        world.report_error(error)
        raise


class _Joined:
    """The process group that this module made, if any, and the store that its ranks share."""

    group: Any = None
    store: Store | None = None
    numbers = itertools.count()  # of the groups that this process joins one after the other


@functools.cache  # rank 0 may serve the store, which only one server can do at an address
def _torchrun_store(address: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store of the ranks that torchrun started; `address` only tells calls apart."""
    store: Store
    store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    return store


def _join_group(base: Store, rank: int, size: int, backend: str, timeout: timedelta) -> None:
    # Without this prefix, restarted workers would read the addresses of dead ones.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"ml4cube/{run}/{restart}/{next(_Joined.numbers)}", base)
    with _loopback_if_local(size):
        # Objects and decisions travel in main memory, so that they do not wait for the GPU.
        backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
    _Joined.group, _Joined.store = dist.group.WORLD, store
    atexit.register(ddp_cleanup)


@contextmanager
def _loopback_if_local(size: int) -> Iterator[None]:
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


def _usable_gpus() -> int:
    # torch may count GPUs that it cannot use, with a driver that is too old for example.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _pick_backend(backend: str | None) -> str:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = _usable_gpus()
    if backend is None:
        return "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and gpus < local_size:
        raise InvalidValueError(
            f"backend='nccl' needs a GPU for each of the {local_size} ranks on this machine, which "
            f"has {gpus}; use backend='gloo'"
        )
    return backend


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not above_zero(seconds) or seconds >= _MAX_TIMEOUT_S:
        raise InvalidValueError(
            f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}"
        )
    return timedelta(seconds=seconds)


def _run_rank(
    rank: int,
    *,
    call: Callable[[], T],
    size: int,
    store_path: str,
    backend: str | None,
    timeout: timedelta,
    parent_pid: int,
) -> T | None:
    """Call a function as one rank, in its own process; return the result of rank 0."""
    watch_parent(parent_pid)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        store = FileStore(store_path, size)
        _join_group(store, rank, size, _pick_backend(backend), timeout)
        ddp_init()
        result = call()
    except BaseException as error:
        # The alarm tells ranks that wait in a collective why it fails.
        World.current("cpu").report_error(error)
        raise
    finally:
        ddp_cleanup()
    return result if rank == 0 else None


def _result_of_main(futures: list[Future[Any]]) -> Any:
    """Return what rank 0 returned, or raise the error of the rank that failed first."""
    wait(futures, return_when=FIRST_EXCEPTION)
    if not any(future.done() and future.exception() for future in futures):
        return futures[0].result()
    wait(futures, timeout=_OTHERS_END_S)
    errors = {r: f.exception() for r, f in enumerate(futures) if f.done() and f.exception()}
    # The others only lost their connection to the rank that failed first.
    rank, error = min(errors.items(), key=lambda item: _is_lost_connection(_first_cause(item[1])))
    if isinstance(error, RunError):
        raise error
    name = type(error).__name__
    raise RunError(f"rank {rank} of {len(futures)} failed: {name}: {error}") from error


def _first_cause(error: BaseException | None) -> BaseException | None:
    """Return the first cause of an error that was passed on between processes."""
    while isinstance(error, RunError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return True if an error only says that other ranks cannot be reached."""
    signs = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and any(sign in str(error).lower() for sign in signs)
    )
