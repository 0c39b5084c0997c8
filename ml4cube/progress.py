"""Progress of long work: bars in terminals and notebooks, lines on stderr in batch jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

# Shorter stages write no line.
_SHORT_S = 10.0


def is_interactive() -> bool:
    """Return True if stderr is a terminal, or this is a notebook."""
    if sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def write_line(text: str) -> None:
    """Write one line to stderr, above the bar if there is one."""
    if is_interactive():
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        # a full disk or a closed pipe must not stop the work
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class Stage:
    """Progress of one stage: a bar, or a line for each tenth of a long stage."""

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        *,
        show: bool = True,
        done: int = 0,
        leave: bool = True,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = self._first = done
        self._started = time.monotonic()
        self._bar: Any = None
        # count at which the next line is due; never without a total
        self._next = self._tenth_after(done) if show and total else sys.maxsize
        if show and is_interactive():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=what, unit=f" {unit}", initial=done, leave=leave)

    def update(self, n: int = 1) -> None:
        """Add `n` to what is done."""
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif self._done >= self._next:
            self._write()

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tenth_after(self, done: int) -> int:
        total = self._total or 1
        return -(-(done * 10 // total + 1) * total // 10)

    def _write(self) -> None:
        total = self._total or 1
        self._next = self._tenth_after(self._done)
        elapsed = time.monotonic() - self._started
        if elapsed < _SHORT_S:
            return
        left = elapsed * (total - self._done) / max(self._done - self._first, 1)
        write_line(
            f"{self._what}: {100 * self._done // total} % ({self._done:,} of {total:,} "
            f"{self._unit}), {duration(elapsed)} so far, about {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """Format a duration."""
    # >>> duration(7.26), duration(75), duration(3 * 3600 + 61) ('7.3 s', '1:15', '3:01:01')
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
