"""Processes that a fault test starts, and the proof that none of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
_TAG = "ML4CUBE_FAULT_TEST"


class Run:
    """One started process and what it says, which goes to a file: an orphan can block no pipe."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """All output so far."""
        return self._log.read_text(errors="replace")

    def finish(self, timeout_s: float) -> int:
        """Wait for the end; the exit code. Past the time, the test fails."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.said}") from None


class Launcher:
    """Starts processes that carry a mark, which their children inherit and keep when orphaned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark, self._runs = uuid.uuid4().hex, 0

    def torchrun(
        self, script: Path, folder: Path, plan: dict[str, Any], *, nproc: int = 2, restarts: int = 0
    ) -> Run:
        """Start a script under torchrun, with the plan as its argument."""
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        ranks = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
        return self.python(*torchrun, *ranks, str(script), str(folder), json.dumps(plan))

    def agents(
        self, script: Path, folder: Path, plan: dict[str, Any], *, nodes: int = 2, restarts: int = 0
    ) -> list[Run]:
        """Start a script as one rank on each of several nodes, with an agent of torchrun each."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torchrun = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--rdzv-backend=c10d"]
        meeting = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        ranks = ["--nproc-per-node=1", f"--max-restarts={restarts}"]
        job = [str(script), str(folder), json.dumps(plan)]
        return [self.python(*torchrun, *meeting, *ranks, *job) for _ in range(nodes)]

    def python(self, *arguments: str, **environment: str) -> Run:
        """Start a Python process."""
        self._runs += 1
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        return Run(
            [sys.executable, *arguments],
            {**os.environ, **environment, _TAG: self._mark},
            self.folder / f"log-{self._runs}.txt",
        )

    def left(self) -> list[psutil.Process]:
        """All processes with the mark that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_TAG) == self._mark:
                    found.append(process)
            except psutil.Error:  # it has ended, or is another user's
                continue
        return found

    def assert_nothing_left(self, within_s: float = 10.0) -> None:
        """Fail if a process is left after a while, and end it."""
        end = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.1)
        told = [" ".join(p.cmdline()[:6]) for p in left if p.is_running()]
        for process in left:
            process.send_signal(signal.SIGKILL)
        assert not told, f"left running: {told}"


def wait_for(condition: Callable[[], Any], run: Run, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds, while a run goes on."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, f"it has ended:\n{run.said}"
        assert time.monotonic() < end, f"waited {timeout_s} s in vain:\n{run.said}"
        time.sleep(0.02)
