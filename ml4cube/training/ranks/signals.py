"""Catch SIGTERM (save and stop) and SIGUSR1 (save and continue)."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# Windows has no SIGUSR1.
_SIGNALS = [getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n)]


class Signals:
    """A context that records SIGTERM and SIGUSR1, to be handled between steps."""

    # Python allows signal handlers only in the main thread; elsewhere nothing is recorded.

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
