"""Join ranks that torchrun or srun started, or start ranks on this machine."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from pickle import PicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, check_choice
from ml4cube.cube.engine import watch_parent
from ml4cube.loading.pickling import explain_unsendable
from ml4cube.training.inputs.checks import above_zero
from ml4cube.training.ranks.environment import (
    choose_backend,
    device_of_rank,
    gpu_name,
    pick_device,
    refuse_mpirun,
    slurm_variables,
)
from ml4cube.training.ranks.messages import (
    first_cause,
    is_lost_connection,
    report_error,
    reporting_errors,
)
from ml4cube.training.ranks.world import Joined, World, loopback_if_local

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "World",
    "ddp_cleanup",
    "ddp_init",
    "join",
    "launch",
    "pick_device",
    "reporting_errors",
]

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 1e9  # a longer one overflows in gloo
_OTHERS_END_S = 2.0  # time for the other ranks to end after one has failed
# gloo's threads outlive the group (DistributedDataParallel keeps a reference) and need the
# interpreter to free the tensors of the last collective. A thread that does so while the
# interpreter shuts down aborts the process, so `ddp_cleanup` waits for them.
_GLOO_THREADS_END_S = 0.25
_ANSWER_S = 0.5  # within which a rank that has left its entry in the store confirms the answer


def ddp_init(backend: str | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT_S) -> World:
    """Initialize the process group, if this process was started by torchrun or srun."""
    # An existing group, such as one made by the user, is left as it is. The group is destroyed by
    # `dist_train` or at the end of the program.
    return join(None, backend, timeout)


def join(
    device: Any,
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT_S,
) -> World:
    """Initialize the process group, as `ddp_init` does, and return the world with this device.

    Of several devices, each rank takes its own.
    """
    chosen = device_of_rank(device)
    check_choice("backend", backend, ["gloo", "nccl", None])
    limit = _as_timedelta(timeout)
    if not dist.is_initialized():
        refuse_mpirun(os.environ)
        os.environ.update(slurm_variables(os.environ))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _served_store(os.environ.get("MASTER_ADDR", ""), rank, size, limit)
            _join_group(store, rank, size, backend, limit, chosen)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                watch_parent(os.getppid())  # a launcher that is killed cannot end its workers
    world = World.current(chosen)
    is_list = isinstance(device, Sequence) and not isinstance(device, str)
    if is_list and len(device) > 1 and world.size == 1:
        logger.warning(
            "device names %d devices, but there is one process, which uses %s; "
            "Trainer.add_on(MultiGPUAddon) trains on all of them",
            len(device),
            world.device,
        )
    return world


def ddp_cleanup(*, failed: bool = False) -> None:
    """Destroy the process group that `ddp_init` made, but not one that the caller made."""
    group = Joined.group
    if group is not None and dist.is_initialized() and dist.group.WORLD is group:
        if failed and "nccl" in dist.get_backend_config():
            # It would wait for ranks that wait for this one. The end of the process aborts it.
            return
        dist.destroy_process_group()
        time.sleep(_GLOO_THREADS_END_S)
    Joined.group = Joined.store = None


def launch(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT_S,
    device_of_rank: Sequence[str | torch.device] | None = None,
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
            devices=device_of_rank,
            parent_pid=os.getpid(),
        )
        pool = ProcessPoolExecutor(max_workers=nproc, timeout=None)
        try:
            result: T = _result_of_main([pool.submit(run_rank, rank) for rank in range(nproc)])
        except BaseException as error:
            pool.shutdown(wait=True, kill_workers=True)
            if isinstance(error.__cause__, PicklingError):
                explain_unsendable(fn, (*args, *kwargs.values()), error)
            raise
        pool.shutdown(wait=True, kill_workers=False)
        return result


@functools.cache  # rank 0 may serve the store, which only one server can do at an address
def _served_store(address: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store that ranks share; `address` only tells calls apart."""
    store: Store
    store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    return store


def _join_group(
    base: Store,
    rank: int,
    size: int,
    backend: str | None,
    timeout: timedelta,
    device: str | torch.device | None,
) -> None:
    gpu = gpu_name(pick_device(device))
    start, gpus = meet(PrefixStore("ml4cube", base), rank, size, gpu, timeout)
    backend, obstacle = choose_backend(backend, gpus)
    if rank == 0 and size > 1:
        logger.info("%d ranks on %d GPUs, with %s", size, len({*gpus} - {""}), backend)
        if obstacle is not None:
            warnings.warn(
                f"gradients of {size} ranks travel through main memory ({backend}), because "
                f"{obstacle}; start as many ranks as there are GPUs, or give device='cpu'",
                stacklevel=3,
            )
    store = PrefixStore(f"ml4cube/{start}", base)
    with loopback_if_local(size):
        # Objects and decisions travel in main memory, so that they do not wait for the GPU.
        backends = backend
        if backend == "nccl":
            backends = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
    Joined.group, Joined.store = dist.group.WORLD, store
    atexit.unregister(_clean_up_at_exit)
    atexit.register(_clean_up_at_exit)


def _clean_up_at_exit() -> None:
    ddp_cleanup(failed=getattr(sys, "last_value", None) is not None)  # of an error not caught


def meet(
    store: Store, rank: int, size: int, facts: Any, timeout: timedelta
) -> tuple[str, list[Any]]:
    """Return a name that only this start of the ranks has, and what each rank tells of itself."""
    # The store may hold entries of ranks that ran before a restart, and nothing tells them apart:
    # each agent of torchrun counts its restarts by itself. So rank 0 asks the rank behind every
    # entry whether it is alive.
    me = uuid.uuid4().hex
    if rank == 0:
        end = time.monotonic() + timeout.total_seconds()
        others = [_ask(store, other, me, end) for other in range(1, size)]
        store.set(f"{me}/facts", json.dumps([facts, *others]))
        start = me
    else:
        store.set(f"entry/{rank}", json.dumps([me, facts]))
        start = store.get(f"start/{me}").decode()
        store.set(f"{start}/{me}", "here")
    return start, json.loads(store.get(f"{start}/facts"))


def _ask(store: Store, rank: int, start: str, end: float) -> Any:
    """Tell a rank the name of this start, until it confirms; return its facts."""
    while time.monotonic() < end:
        name, facts = json.loads(store.get(f"entry/{rank}"))
        store.set(f"start/{name}", start)
        answer_end = time.monotonic() + _ANSWER_S
        while time.monotonic() < answer_end:
            if store.check([f"{start}/{name}"]):
                return facts
            time.sleep(0.01)
        # The entry is of a rank that has ended.
    raise RunError(f"rank {rank} has not started in time, or ended at once")


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    seconds: Any = timeout
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
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
    devices: Sequence[str | torch.device] | None,
    parent_pid: int,
) -> T | None:
    """Call a function as one rank, in its own process; return the result of rank 0."""
    watch_parent(parent_pid)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    failed = True
    try:
        store = FileStore(store_path, size)
        device = None
        if devices is not None:
            device = devices[rank]
        _join_group(store, rank, size, backend, timeout, device)
        World.current(device)
        result = call()
        failed = False
    except BaseException as error:
        # Tells ranks that wait in a collective why it fails.
        report_error(World.current("cpu"), error)
        raise
    finally:
        ddp_cleanup(failed=failed)
    if rank != 0:
        return None
    return result


def _result_of_main(futures: list[Future[Any]]) -> Any:
    """Return what rank 0 returned, or raise the error of the rank that failed first."""
    wait(futures, return_when=FIRST_EXCEPTION)
    if not any(future.done() and future.exception() for future in futures):
        return futures[0].result()
    wait(futures, timeout=_OTHERS_END_S)
    errors = {r: f.exception() for r, f in enumerate(futures) if f.done() and f.exception()}
    # The others only lost their connection to the rank that failed first.
    rank, error = min(errors.items(), key=lambda item: is_lost_connection(first_cause(item[1])))
    if isinstance(error, RunError):
        raise error
    name = type(error).__name__
    raise RunError(f"rank {rank} of {len(futures)} failed: {name}: {error}") from error
