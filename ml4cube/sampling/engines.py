"""Where tasks run: here, on local processes or on a dask cluster; nothing else knows which.

Workers are started afresh (loky), never forked: zarr's event loop, dask's pools and native
decoders hang in forked children. They do not import the user's script again, so calls at module
level, notebooks and scripts without a main guard work, and functions travel by value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from ml4cube.core.errors import CubeError, InvalidTypeError, InvalidValueError, RunError

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

# Tasks handed out per worker at a time: enough that none waits, few enough that payloads
# (cells of in-memory cubes) do not pile up.
_AHEAD = 3

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


class Engine(Protocol):
    """Runs one function over many tasks."""

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield position and result of each task as it ends, in any order."""
        ...

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        ...


def choose_engine(nproc: int, client: Any = None) -> Engine:
    """Choose where to work."""
    client = _active_client() if client is None else client
    check_client(client)
    if client is not None:
        return DaskCluster(client)
    return local_engine(nproc)


def local_engine(nproc: int) -> Engine:
    """Choose the engine for a number of processes of this machine."""
    return InProcess() if nproc == 1 else LocalProcesses(nproc)


def check_client(client: object) -> None:
    """Refuse what is no way to a cluster."""
    if client is None or (isinstance(client, str) and client):
        return
    if not hasattr(client, "submit") or not hasattr(client, "scheduler_info"):
        raise InvalidTypeError(
            f"client={client!r} is a {type(client).__name__}; give a dask.distributed Client or "
            "a scheduler's address"
        )
    # whoever waits for it here keeps it from ever answering
    if getattr(client, "asynchronous", False):
        raise InvalidValueError(
            f"the client {client!r}, given as client= or active in this process, is asynchronous; "
            "make it with Client(..., asynchronous=False), or close it"
        )


def _active_client() -> Any:
    """The client that this process made before, if any; distributed is not imported for it."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.Client.current(allow_global=True)
    except ValueError:
        return None


class InProcess:
    """Runs tasks one after the other, here."""

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks."""
        for position, task in enumerate(tasks):
            yield position, fn(shared, task)

    def __enter__(self) -> Self:
        """Start nothing."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop nothing."""


class LocalProcesses:
    """Runs tasks on worker processes of this machine, started at the first task."""

    def __init__(self, nproc: int) -> None:
        """Remember the number."""
        self.nproc = nproc
        self._executor: Any = None

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks."""
        from concurrent.futures import FIRST_COMPLETED, wait

        package = _packed((fn, shared))
        queue = enumerate(tasks)
        running: dict[Any, int] = {}
        try:
            while True:
                for position, task in itertools.islice(queue, self._room(running)):
                    payload = _packed(task)
                    with _dead_workers_told():
                        running[self._submit(package, payload)] = position
                if not running:
                    return
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    position = running.pop(future)
                    with _dead_workers_told():
                        result = future.result()
                    yield position, result
        finally:
            for future in running:
                future.cancel()

    def _room(self, running: dict[Any, int]) -> int:
        return self.nproc * _AHEAD - len(running)

    def _submit(self, package: bytes, task: bytes) -> Any:
        if self._executor is None:
            from loky import ProcessPoolExecutor

            self._executor = ProcessPoolExecutor(
                max_workers=self.nproc,
                initializer=watch_parent,
                initargs=(os.getpid(),),
                env=_WORKER_ENV,
            )
        return self._executor.submit(_run_packed, package, task)

    def __enter__(self) -> Self:
        """Start nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers; at once if something went wrong."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=kind is not None)
            self._executor = None


@contextlib.contextmanager
def _dead_workers_told() -> Iterator[None]:
    """Raise `RunError` where a pool lost a worker: by a result, or by taking no more tasks."""
    from concurrent.futures.process import BrokenProcessPool

    try:
        yield
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process died: {_first_line(error)}; if memory ran out, use a smaller "
            "nproc, then run again: what is finished is kept"
        ) from error


class DaskCluster:
    """Runs tasks as futures on a dask.distributed cluster."""

    # A task that a lost worker had is run again elsewhere, so tasks must give the same however
    # often they run. Their files must lie where all workers see them.

    def __init__(self, client: Any) -> None:
        """Remember the client, connect to an address only when work starts."""
        self._given = client
        self._client: Any = None

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks."""
        from distributed import as_completed
        from distributed.client import ClosedClientError

        # a task of its own, not data to scatter: the cluster makes it again if it gets lost
        package = self._client.submit(bytes, _packed((fn, shared)), pure=False)
        running: dict[Any, int] = {}
        # bound to this client's loop, since the client need not be the process's default one
        ended: Any = as_completed(loop=self._client.loop)  # type: ignore[no-untyped-call]
        queue = enumerate(tasks)

        def top_up() -> None:
            room = max(self._threads() * _AHEAD - len(running), 0)
            for position, task in itertools.islice(queue, room):
                future = self._client.submit(_run_packed, package, _packed(task), pure=False)
                running[future] = position
                ended.add(future)

        try:
            top_up()
            for future in ended:
                position = running.pop(future)
                yield position, self._result(future)
                top_up()
        except CubeError:
            raise
        except Exception as error:
            self._check_connected(error)
            raise
        finally:
            # a closed client has nothing left to cancel
            with contextlib.suppress(ClosedClientError):
                self._client.cancel(list(running))

    def _check_connected(self, error: BaseException | None = None) -> None:
        """Say so if the client or its scheduler is gone; they fail in many ways."""
        if self._client.status != "running":
            raise RunError(
                f"the dask client {self._client!r} is closed, or its scheduler is gone (it is "
                f"{self._client.status!r}); connect to a running scheduler, then run again: what "
                "is finished is kept"
            ) from error

    def is_here(self) -> bool:
        """Say whether the workers are threads of this process."""
        given = self._given
        address = given if isinstance(given, str) else given.scheduler.address
        return str(address).startswith("inproc://")

    def _threads(self) -> int:
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        return max(1, sum(int(worker["nthreads"]) for worker in workers))

    def _result(self, future: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            return future.result()
        except (KilledWorker, CancelledError) as error:
            self._check_connected(error)
            raise RunError(
                f"the cluster gave a task up: {_first_line(error)}; if its workers ran out of "
                "memory, give them more, then run again: what is finished is kept"
            ) from error

    def __enter__(self) -> Self:
        """Connect; say so if there is nobody to work yet."""
        from distributed import Client

        given = self._given
        connect: Any = Client
        try:
            self._client = connect(given, set_as_default=False) if isinstance(given, str) else given
        except (OSError, ValueError) as error:
            raise RunError(f"client={given!r} cannot be reached: {_first_line(error)}") from error
        self._check_connected()
        if not self._client.scheduler_info(n_workers=-1)["workers"]:
            logger.warning(
                "the dask cluster at %s has no workers; nothing happens until one joins it",
                self._client.scheduler.address,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect, if the connection was made here."""
        if self._client is not self._given:
            self._client.close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@functools.cache
def watch_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever killed it and however early."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ml4cube-parent-watch").start()


def _packed(what: Any) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(what)
    except MemoryError:
        raise
    # whatever a value's own way to be pickled raises
    except Exception as error:
        raise InvalidTypeError(
            f"the cube, or what else the work needs, cannot be sent to other processes: {error}; "
            "open the cube by its path, or of Icechunk from a read-only session, or work in this "
            "process (nproc=1, without a dask client)"
        ) from error
    return packed


@functools.lru_cache(maxsize=2)
def _unpacked(package: bytes) -> tuple[Callable[[Any, Any], Any], Any]:
    import cloudpickle

    unpacked: tuple[Callable[[Any, Any], Any], Any] = cloudpickle.loads(package)
    return unpacked


def _run_packed(package: bytes, task: bytes) -> Any:
    import cloudpickle

    fn, shared = _unpacked(package)
    try:
        return fn(shared, cloudpickle.loads(task))
    except BaseException as error:
        if _travels(error):
            raise
        told, raised = error, traceback.format_exc()
    # its cause may be what cannot be sent
    told.__cause__ = told.__context__ = None
    if not _travels(told):
        told = RunError(
            f"{type(told).__name__}: {told} (raised in a worker; the error itself cannot be sent "
            "between processes)"
        )
    told.add_note(raised)
    raise told


def _travels(error: BaseException) -> bool:
    """Whether an error reaches another process as it is; one that does not breaks the pool."""
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except BaseException:  # whatever its own way to be pickled raises
        return False
    return True
