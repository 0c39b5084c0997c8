"""What ranks tell one another in a run: that one failed, or asks all to save, to stop, to end.

All ranks take the same number of steps, so a step number tells all of them when to exchange
requests: about once a second, by the time that the slowest rank needed per step since the last
time.

Under gloo, ranks that lose another one get an exception. Under nccl, torch ends their process, and
so do launchers: the message of a failure must be written before.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from ml4cube.core.errors import RunError
from ml4cube.progress import write_line
from ml4cube.training.ranks.world import World

# Topics of the messages that ranks leave for one another in a run: which rank failed first, and
# that a validation is to be cut off.
FAILURE, CUT = "failure", "cut"
_LOOK_S = 0.2  # between looks for such a message
_READ_S = 0.5  # a rank that fails goes on for so long, so that the others have read it
PERIOD_S = 1.0  # time between exchanges
_MAX_STEPS = 256  # between exchanges
# Windows has no SIGUSR1.
_SIGNALS = [getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n)]


class Signals:
    """A context that records SIGTERM (save and stop) and SIGUSR1 (save and continue)."""

    # They are handled between steps. Python allows signal handlers only in the main thread;
    # elsewhere nothing is recorded.

    def __init__(self, *, active: bool = True) -> None:
        self.must_save = self.must_stop = False
        self._active = active and threading.current_thread() is threading.main_thread()
        self._original_handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if self._active:
            for number in _SIGNALS:
                self._original_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore_handlers()
        if kind is None:  # else the error is to be seen, which may be why SIGTERM came
            self.deliver()

    def deliver(self) -> None:
        """Raise SIGTERM again with its original handler, if it came."""
        if self.must_stop:
            self.must_stop = False
            self._restore_handlers()
            signal.raise_signal(signal.SIGTERM)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.must_save = True
        self.must_stop |= number == signal.SIGTERM

    def _restore_handlers(self) -> None:
        for number, handler in self._original_handlers.items():
            signal.signal(number, handler)
        self._original_handlers.clear()


class Answers(NamedTuple):
    """Whether any rank has a loss that is not finite, asks for something, or cut its pass off."""

    bad_loss: bool
    save: bool
    stop: bool
    out_of_time: bool
    cut: bool


class Requests:
    """The requests of this rank, and the next step after which all ranks exchange theirs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.signals = Signals(active=False)
        self.deadline_s = math.inf  # on the clock of time.monotonic
        self._messages_read_s = 0.0  # on the clock of time.perf_counter
        self.start_epoch(0)

    def listen(self, stack: ExitStack, max_seconds: float | None, *, to_signals: bool) -> None:
        """Listen to signals until the stack is closed, and begin to count the time."""
        self.deadline_s = time.monotonic() + (max_seconds or math.inf)
        self.signals = stack.enter_context(Signals(active=to_signals))

    @property
    def is_out_of_time(self) -> bool:
        """True if the time of this rank is over."""
        return time.monotonic() > self.deadline_s

    def start_epoch(self, step: int) -> None:
        """Plan to exchange requests after the first step of an epoch."""
        self._next_step = step + 1
        self._last_step, self._last_time = step, time.perf_counter()

    def are_due(self, step: int) -> bool:
        """Return True if ranks exchange requests after this step."""
        return step >= self._next_step

    def exchange(self, step: int, *, bad_loss: bool, cut: bool) -> Answers:
        """Exchange requests with all ranks; every rank must call this."""
        started = time.perf_counter()
        step_s = (started - self._last_time) / max(step - self._last_step, 1)
        signals = self.signals
        requests = [bad_loss, signals.must_save, signals.must_stop, self.is_out_of_time, cut]
        *answers, slowest_step_s = self._world.maximum([*requests, step_s])
        self._last_step, self._last_time = step, time.perf_counter()
        steps = int(PERIOD_S / max(slowest_step_s, 1e-9))
        self._next_step = step + min(max(steps, 1), _MAX_STEPS)
        return Answers(*map(bool, answers))

    def must_cut(self, *, can_save: bool) -> bool:
        """Return True if a signal came or time is over, on any rank; without waiting."""
        must_save = self.signals.must_save
        if not must_save and time.perf_counter() - self._messages_read_s < PERIOD_S:
            return False
        self._messages_read_s = time.perf_counter()
        if must_save or (can_save and self.is_out_of_time):
            self._world.post(CUT, "a signal came, or time is over")
            return True
        return any(self._world.message(topic) is not None for topic in (CUT, FAILURE))

    def forget_cut(self) -> None:
        """Remove the message that a pass is to be cut off."""
        if self._world.is_main:
            self._world.remove(CUT)


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
            self._thread.join(_LOOK_S)  # it may be waiting for a store that does not answer

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
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
