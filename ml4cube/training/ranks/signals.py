"""Signals of a scheduler or a user: save and stop, or save and go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Note SIGTERM and SIGUSR1 for as long as the block runs; act between steps."""

    # Outside the main thread, where Python lets nobody set handlers, nothing is noted.

    def __init__(self, *, active: bool = True) -> None:
        self.save = False
        self.stop = False
        self._active = active and threading.current_thread() is threading.main_thread()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if self._active:
            for number in _numbers():
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def deliver(self) -> None:
        """Let SIGTERM do what it would have done, if it came."""
        if self.stop:
            self._give_back()
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.save = True
        self.stop = self.stop or number == signal.SIGTERM

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def _numbers() -> list[int]:
    # Windows has no SIGUSR1.
    return [int(getattr(signal, n)) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n)]
