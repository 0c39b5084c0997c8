"""Where tasks run: in this process or on local worker processes; nothing else knows which.

Workers are started afresh (loky), never forked: zarr's event loop, dask's pools and native
decoders hang in forked children. They do not import the user's script again, so calls at module
level, notebooks and scripts without a main guard work, and functions travel by value.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
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


def check_nproc(nproc: object) -> int:
    """Refuse a number of processes that cannot work.

    Parameters
    ----------
    nproc : int
        What was asked for.

    Returns
    -------
    int
        The same.

    Raises
    ------
    InvalidTypeError
        If it is no integer.
    InvalidValueError
        If it is below 1.
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise InvalidTypeError(f"nproc={nproc!r} is a {type(nproc).__name__}; give an integer")
    if nproc < 1:
        raise InvalidValueError(f"nproc={nproc} processes cannot work; give 1 or more")
    return nproc


def local_engine(nproc: int) -> Engine:
    """Choose the engine for a number of local processes.

    Parameters
    ----------
    nproc : int
        Processes; 1 works in this process.

    Returns
    -------
    Engine
        A context manager.
    """
    return InProcess() if nproc == 1 else LocalProcesses(nproc)


class InProcess:
    """Runs tasks one after the other, here."""

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks.

        Parameters
        ----------
        fn : callable
            Called with `shared` and a task.
        shared : object
            The same for all tasks.
        tasks : iterable
            The tasks; made as they are needed.

        Yields
        ------
        (int, object)
            Position of a task and its result.
        """
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
    """Runs tasks on worker processes of this machine, started at the first task.

    Parameters
    ----------
    nproc : int
        Number of workers.
    """

    def __init__(self, nproc: int) -> None:
        """Remember the number."""
        self.nproc = nproc
        self._executor: Any = None

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks.

        Parameters
        ----------
        fn : callable
            Called with `shared` and a task, in a worker.
        shared : object
            The same for all tasks; unpacked once in each worker.
        tasks : iterable
            The tasks; made as they are needed, a few ahead of the workers.

        Yields
        ------
        (int, object)
            Position of a task and its result, in the order tasks end.

        Raises
        ------
        RunError
            If a worker dies. An error that a task raises comes as it is.
        """
        from concurrent.futures import FIRST_COMPLETED, wait

        import cloudpickle

        package = cloudpickle.dumps((fn, shared))
        queue = enumerate(tasks)
        running: dict[Any, int] = {}
        try:
            while True:
                for position, task in itertools.islice(queue, self._room(running)):
                    packed = cloudpickle.dumps(task)
                    running[self._submit(package, packed)] = position
                if not running:
                    return
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield running.pop(future), self._result(future)
        finally:
            for future in running:
                future.cancel()

    def _room(self, running: dict[Any, int]) -> int:
        return self.nproc * _AHEAD - len(running)

    def _submit(self, package: bytes, task: bytes) -> Any:
        if self._executor is None:
            from loky import ProcessPoolExecutor

            self._executor = ProcessPoolExecutor(
                max_workers=self.nproc, initializer=_watch_parent, env=_WORKER_ENV
            )
        return self._executor.submit(_run_packed, package, task)

    def _result(self, future: Any) -> Any:
        from concurrent.futures.process import BrokenProcessPool

        try:
            return future.result()
        except CubeError:
            raise
        except BrokenProcessPool as error:
            raise RunError(
                f"a worker process died: {_first_line(error)}; if memory ran out, use a smaller "
                "nproc, then run again: what is finished is kept"
            ) from error

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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _watch_parent() -> None:
    """End this worker when its parent is gone, whatever killed it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ml4cube-parent-watch").start()


@functools.lru_cache(maxsize=2)
def _unpacked(package: bytes) -> tuple[Callable[[Any, Any], Any], Any]:
    import cloudpickle

    unpacked: tuple[Callable[[Any, Any], Any], Any] = cloudpickle.loads(package)
    return unpacked


def _run_packed(package: bytes, task: bytes) -> Any:
    import cloudpickle

    fn, shared = _unpacked(package)
    return fn(shared, cloudpickle.loads(task))
