"""The failure of one rank, told to the others while there is time.

Under gloo, ranks that lose another one get an exception. Under nccl, torch ends their process, and
so do launchers: the message must be written before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ml4cube.core.errors import RunError
from ml4cube.progress import write_line
from ml4cube.training.ranks.world import World

# Topics of the messages that ranks leave for one another in a run: which rank failed first, and
# that a validation is to be cut off.
FAILURE, CUT = "failure", "cut"
_PERIOD_S = 0.2  # between looks for such a message
_READ_S = 0.5  # a rank that fails goes on for so long, so that the others have read it


@contextmanager
def reporting_errors(world: World) -> Iterator[None]:
    """Report an error of this rank to the others, and write what ended another one.

    An error that only says that other ranks are lost is replaced by one that says why.
    """
    watch = _Watch(world)
    try:
        _forget_last_run(world)
        with watch:
            yield
    except Exception as error:
        if world.size > 1 and is_lost_connection(error):
            reason = watch.failure or world.message(FAILURE)
            message = _lost(world, reason or "no rank reported an error: one was killed or froze")
            if watch.failure is None:
                # At once, because a launcher may end this rank before its traceback appears.
                write_line(message)
            raise RunError(message) from error
        report_error(world, error)
        raise


def report_error(world: World, error: BaseException) -> None:
    """Tell the other ranks of an error of this rank, if it is the first to fail."""
    if is_lost_connection(first_cause(error)) or world.message(FAILURE) is not None:
        return
    world.post(FAILURE, f"rank {world.rank}: {type(error).__name__}: {error}")
    if world.size > 1 and not isinstance(error, RunError):  # which all ranks raise
        time.sleep(_READ_S)


def _forget_last_run(world: World) -> None:
    """Remove the messages that an earlier, failed run has left; every rank."""
    world.barrier()  # no rank is still in that run
    if world.is_main:
        world.remove(FAILURE)
        world.remove(CUT)
    world.barrier()  # no rank has left a message of this run yet


class _Watch:
    """A thread that writes which rank has failed, once one has."""

    failure: str | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ml4cube-failures")

    def __enter__(self) -> None:
        if self._world.size > 1:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._world.size > 1:
            self._thread.join(_PERIOD_S)  # it may be waiting for a store that does not answer

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.failure = self._world.message(FAILURE)
            if self.failure is not None:
                write_line(_lost(self._world, self.failure))
                return


def _lost(world: World, reason: str) -> str:
    return f"rank {world.rank} lost the other ranks: {reason}"


def is_lost_connection(error: BaseException | None) -> bool:
    """Return True if an error only says that other ranks cannot be reached."""
    # Errors of gloo name a file of its sources.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and any(sign in str(error).lower() for sign in ("gloo", "nccl"))
    )


def first_cause(error: BaseException | None) -> BaseException | None:
    """Return the first cause of an error that was passed on between processes."""
    while isinstance(error, RunError) and error.__cause__ is not None:
        error = error.__cause__
    return error
