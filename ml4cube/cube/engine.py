"""Run tasks on threads, in local processes or on a dask cluster. Only the engine knows which.

`ml4cube.training.ranks.engine` has one more: it shares tasks among ranks.

Local workers are started afresh (loky), never forked, because zarr's event loop, dask's pools and
native decoders hang in forked children. They do not import the user's script again. So calls work
at module level, in notebooks and in scripts without a main guard, and functions are sent by value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

from ml4cube.core.errors import CubeError, InvalidTypeError, InvalidValueError, RunError

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

# Tasks sent at a time: enough that no worker waits, few enough that payloads (cells of in-memory
# cubes) do not pile up.
_TASKS_PER_WORKER = 3

# How often a cluster is asked for its workers.
_SECONDS_BETWEEN_COUNTS = 2

# One thread per worker, and a malloc that keeps freed memory: page faults on fresh buffers cost
# as much as decoding.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "134217728",
    "MALLOC_TRIM_THRESHOLD_": "134217728",
}


class Engine(ABC):
    """Runs one function over many tasks."""

    #: True if tasks see the memory of this process, so that nothing is sent to them.
    shares_memory = False

    @abstractmethod
    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield position and result of each task as it ends, in any order."""

    def run_in_order(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[Result]:
        """Yield the results in the order of the tasks, in whatever order they end."""
        waiting: dict[int, Result] = {}
        next_position = 0
        for position, result in self.run(fn, shared, tasks):
            waiting[position] = result
            while next_position in waiting:
                yield waiting.pop(next_position)
                next_position += 1

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop; at once after an error."""


def choose_engine(local: Engine, client: Any = None) -> Engine:
    """Choose a cluster if one is given or active, else the engine of this machine."""
    if client is None:
        client = _active_client()
    check_client(client)
    if client is None:
        return local
    return DaskCluster(client)


def local_engine(nproc: int) -> Engine:
    """Choose the engine for a number of processes of this machine."""
    if nproc == 1:
        return Threads(1)
    return LocalProcesses(nproc)


def usable_cores() -> int:
    """Return the number of cores that this process may use, at most eight."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return min(count, 8)


def check_client(client: object) -> None:
    """Refuse anything but a client or a scheduler's address."""
    if client is None or (isinstance(client, str) and client):
        return
    if not hasattr(client, "submit") or not hasattr(client, "scheduler_info"):
        raise InvalidTypeError(
            "client must be a dask.distributed Client or a scheduler's address, "
            f"got client={client!r}"
        )
    # waiting for it here would keep its event loop from answering
    if getattr(client, "asynchronous", False):
        raise InvalidValueError(
            f"client must not be asynchronous, got {client!r}; create it with Client(..., "
            "asynchronous=False)"
        )


def _active_client() -> Any:
    """Return the client that this process created before, if any, without importing distributed."""
    distributed = sys.modules.get("distributed")
    # a task that waits for others keeps the thread that they need
    if distributed is None or _is_in_task(distributed):
        return None
    try:
        client = distributed.Client.current(allow_global=True)
    except ValueError:
        return None
    # waiting for it here would keep its event loop from answering
    if client.asynchronous:
        logger.warning(
            "working in this process, because the active client %r is asynchronous; create it with "
            "Client(..., asynchronous=False) to use its workers",
            client,
        )
        return None
    return client


def _is_in_task(distributed: Any) -> bool:
    """Return True in a task of a dask worker."""
    try:
        distributed.get_worker()
    except ValueError:
        return False
    return True


class Threads(Engine):
    """Runs tasks on threads of this process; a single one is the caller's."""

    shares_memory = True

    def __init__(self, count: int) -> None:
        self.count = count

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, some of them ahead of the one whose result is taken."""
        if self.count == 1:
            for position, task in enumerate(tasks):
                yield position, fn(shared, task)
            return
        with ThreadPoolExecutor(self.count, "ml4cube-task") as pool:
            running: deque[Future[Result]] = deque()
            positions = itertools.count()
            try:
                for task in tasks:
                    running.append(pool.submit(fn, shared, task))
                    if len(running) > 2 * self.count:
                        yield next(positions), running.popleft().result()
                while running:
                    yield next(positions), running.popleft().result()
            finally:
                for future in running:
                    future.cancel()


class _Workers(Engine):
    """Runs tasks in other processes, a few per worker at a time."""

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks."""
        shared_part = self._send_shared(_pickled((fn, shared)))
        queue = enumerate(tasks)
        running: dict[Any, int] = {}  # position of the task by its future
        try:
            while True:
                most = self._n_workers() * _TASKS_PER_WORKER
                free = most - len(running)
                # several at a time, which costs a cluster a quarter of sending one by one
                if free >= most // 3:
                    new = list(itertools.islice(queue, free))
                    futures = self._submit(shared_part, [_pickled(task) for _, task in new])
                    for future, (position, _) in zip(futures, new, strict=True):
                        running[future] = position
                if not running:
                    return
                for future, result in self._wait(running):
                    yield running.pop(future), result
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._cancel(running)

    def _send_shared(self, pickled: bytes) -> Any:
        """Send what all tasks share, if that saves sending it with each task."""
        return pickled

    @abstractmethod
    def _n_workers(self) -> int: ...

    @abstractmethod
    def _submit(self, shared_part: Any, tasks: Sequence[bytes]) -> Sequence[Any]:
        """Send tasks; return their futures."""

    @abstractmethod
    def _wait(self, running: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        """Wait for at least one task to end; return futures with their results."""

    @abstractmethod
    def _explain(self, error: Exception) -> None:
        """Raise `RunError` if workers died or cannot be reached."""

    @abstractmethod
    def _cancel(self, running: Iterable[Any]) -> None: ...


class LocalProcesses(_Workers):
    """Runs tasks in worker processes of this machine."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc

    def __enter__(self) -> Self:
        """Make a pool, which starts workers at the first task."""
        from loky import ProcessPoolExecutor

        self._executor = ProcessPoolExecutor(
            max_workers=self.nproc,
            initializer=watch_parent,
            initargs=(os.getpid(),),
            env=_WORKER_ENV,
        )
        return self

    def _n_workers(self) -> int:
        return self.nproc

    def _submit(self, shared_part: bytes, tasks: Sequence[bytes]) -> Sequence[Any]:
        return [self._executor.submit(_run_pickled, shared_part, task) for task in tasks]

    def _wait(self, running: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        from concurrent.futures import FIRST_COMPLETED, wait

        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield future, future.result()

    def _explain(self, error: Exception) -> None:
        from concurrent.futures.process import BrokenProcessPool

        # raised by a result, or by a pool that accepts no more tasks
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                f"a worker process died: {_first_line(error)}; if memory ran out, use a smaller "
                "nproc, then run again: finished work is kept"
            ) from error

    def _cancel(self, running: Iterable[Any]) -> None:
        for future in running:
            future.cancel()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop the workers."""
        self._executor.shutdown(wait=True, kill_workers=kind is not None)


class DaskCluster(_Workers):
    """Runs tasks as futures on a dask.distributed cluster."""

    # Tasks of a lost worker run again elsewhere, so they must give the same however often they run.
    # Their files must lie where all workers see them.

    def __init__(self, client: Any) -> None:
        """Remember the client; connect to an address only when work starts."""
        self._given = client
        self._client: Any = None
        self._futures: Any = None
        self._threads = 0
        self._counted_at = -math.inf

    def runs_in_this_process(self) -> bool:
        """Return True if the workers are threads of this process."""
        given = self._given
        address = given
        if not isinstance(given, str):
            address = given.scheduler.address
        return str(address).startswith("inproc://")

    def _send_shared(self, pickled: bytes) -> Any:
        from distributed import as_completed

        # bound to this client's loop, because the client need not be the process's default one
        self._futures = as_completed(loop=self._client.loop, with_results=True, raise_errors=False)  # type: ignore[no-untyped-call]
        # a task, not data to scatter: if it is lost, the cluster makes it again
        return self._client.submit(bytes, pickled, pure=False)

    def _n_workers(self) -> int:
        # workers come and go, but asking for each task would cost more than sending it
        if time.monotonic() > self._counted_at + _SECONDS_BETWEEN_COUNTS:
            workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
            self._threads = sum(int(worker["nthreads"]) for worker in workers)
            self._counted_at = time.monotonic()
        return max(1, self._threads)

    def _submit(self, shared_part: Any, tasks: Sequence[bytes]) -> Sequence[Any]:
        if not tasks:
            return []
        shared_parts = [shared_part] * len(tasks)
        futures: list[Any] = self._client.map(_run_pickled, shared_parts, tasks, pure=False)
        self._futures.update(futures)
        return futures

    def _wait(self, running: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        batch: list[tuple[Any, Any]] = self._futures.next_batch()
        for future, _ in batch:
            if future.status != "finished":
                future.result()  # raises its error
        return batch

    def _explain(self, error: Exception) -> None:
        from distributed import CancelledError, KilledWorker

        if isinstance(error, CubeError):
            return
        self._check_connected(error)
        if isinstance(error, KilledWorker | CancelledError):
            raise RunError(
                f"the cluster gave up a task: {_first_line(error)}; if its workers ran out of "
                "memory, give them more, then run again: finished work is kept"
            ) from error

    def _check_connected(self, error: BaseException | None = None) -> None:
        """Raise if the client or its scheduler is gone; they fail in many ways."""
        if self._client.status != "running":
            raise RunError(
                f"the dask client {self._client!r} is closed, or its scheduler is gone (status "
                f"{self._client.status!r}); connect to a running scheduler, then run again: "
                "finished work is kept"
            ) from error

    def _cancel(self, running: Iterable[Any]) -> None:
        from distributed.client import ClosedClientError

        # a closed client has nothing left to cancel
        with contextlib.suppress(ClosedClientError):
            self._client.cancel(list(running))

    def __enter__(self) -> Self:
        """Connect; warn if there are no workers yet."""
        self._client = self._given
        if isinstance(self._given, str):
            self._client = _connected(self._given)
        self._check_connected()
        if not self._client.scheduler_info(n_workers=-1)["workers"]:
            logger.warning(
                "the dask cluster at %s has no workers; nothing happens until one joins it",
                self._client.scheduler.address,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Disconnect, if the connection was made here."""
        if self._client is not self._given:
            self._client.close()


@contextlib.contextmanager
def active_cluster(address: str | None) -> Iterator[None]:
    """Make a cluster the place of all work in this context, as an active client does."""
    if address is None:
        yield
        return
    with _connected(address, set_as_default=True):
        yield


def _connected(address: str, set_as_default: bool = False) -> Any:
    from distributed import Client

    connect: Any = Client
    try:
        return connect(address, set_as_default=set_as_default)
    except (OSError, ValueError) as error:
        raise RunError(
            f"the dask scheduler {address!r} cannot be reached: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@functools.cache
def watch_parent(parent: int) -> None:
    """End this process when its parent is gone, for any reason and however early."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ml4cube-parent-watch").start()


def _pickled(value: Any) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(value)
    except MemoryError:
        raise
    # whatever pickling a value raises
    except Exception as error:
        raise InvalidTypeError(
            f"the cube, or another argument, cannot be sent to other processes: {error}; open the "
            "cube by its path, for Icechunk from a read-only session, or work in this process "
            "(nproc=1, without a dask client)"
        ) from error
    return pickled


@functools.lru_cache(maxsize=2)
def _unpickled(shared_part: bytes) -> Any:
    """Return the function and the shared value of a run, once for all tasks of a worker."""
    import cloudpickle

    return cloudpickle.loads(shared_part)


def _run_pickled(shared_part: bytes, task: bytes) -> Any:
    import cloudpickle

    fn, shared = _unpickled(shared_part)
    try:
        return fn(shared, cloudpickle.loads(task))
    except Exception as raised:
        error, stack = raised, traceback.format_exc()
    # of other errors, and of causes, it is not known whether they can be sent; if not, the pool
    # breaks
    if not isinstance(error, CubeError):
        error = RunError(f"{type(error).__name__}: {error} (raised in a worker)")
    error.__cause__ = error.__context__ = None
    error.add_note(stack)
    raise error
