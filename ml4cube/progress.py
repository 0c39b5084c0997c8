"""Progress of long work: bars in terminals and notebooks, lines on stderr in batch jobs."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any

# A stage writes no line before this time, so that short stages write none.
_FIRST_LINE_AFTER_S = 10.0


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
        # A full disk or a closed pipe must not stop the work.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class Stage:
    """Progress of one stage: a bar, or a line for each tenth of a long stage."""

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        *,
        show: bool = True,
        done: int = 0,
        leave: bool = True,
    ) -> None:
        self._name, self._total, self._unit = name, total or 1, unit
        self._done = self._done_at_start = done
        self._start_s = time.monotonic()
        self._bar: Any = None
        # Without a total, there is no line.
        self._next_line_at = self._next_tenth() if show and total else sys.maxsize
        if show and is_interactive():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=name, unit=f" {unit}", initial=done, leave=leave)

    def update(self, n: int = 1) -> None:
        """Add `n` to what is done."""
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif self._done >= self._next_line_at:
            self._next_line_at = self._next_tenth()
            self._write_line()

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next_tenth(self) -> int:
        """Return the count at which the next tenth of the total is done."""
        tenths_done = self._done * 10 // self._total
        return math.ceil((tenths_done + 1) * self._total / 10)

    def _write_line(self) -> None:
        elapsed_s = time.monotonic() - self._start_s
        if elapsed_s < _FIRST_LINE_AFTER_S:
            return
        done_here = max(self._done - self._done_at_start, 1)
        left_s = elapsed_s * (self._total - self._done) / done_here
        write_line(
            f"{self._name}: {100 * self._done // self._total} % ({self._done:,} of "
            f"{self._total:,} {self._unit}), {duration(elapsed_s)} so far, about "
            f"{duration(left_s)} left"
        )


def duration(seconds: float) -> str:
    """Format a duration: '7.3 s', '1:15' (minutes), '3:01:01' (hours)."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
