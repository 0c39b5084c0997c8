"""A user who presses Ctrl-C while threads are waited for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


def interrupt_shutdowns(patch: pytest.MonkeyPatch) -> None:
    """Interrupt every wait for the end of a pool's threads, which go on."""
    plain = ThreadPoolExecutor.shutdown

    def interrupted(self: ThreadPoolExecutor, **options: Any) -> None:
        plain(self, wait=False, cancel_futures=True)
        raise KeyboardInterrupt

    patch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
