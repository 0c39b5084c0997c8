"""CPU time of a client of a dask cluster for each task that it sends, and tasks at a time.

Writes `benchmarks/results/cluster.json`. Scheduler and two workers of four threads are processes
of their own on the loopback, so that the CPU time is that of the client alone. Beside it stands
the plainest way with dask: `submit` and `as_completed`, one task at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, as_completed

from ml4cube.cube.engine import DaskCluster

RESULTS = Path(__file__).parent / "results" / "cluster.json"
ADDRESS = "tcp://127.0.0.1:8913"
N_TASKS = 2000


@contextmanager
def process(*arguments: str) -> Iterator[None]:
    """Run a part of dask for some time."""
    started = subprocess.Popen([sys.executable, "-m", "dask", *arguments])
    try:
        yield
    finally:
        started.terminate()
        started.wait()


def task(_: object, number: int) -> int:
    """Do nothing."""
    return number


def ours(client: Any) -> int:
    """Run the tasks by the engine of all stages."""
    with DaskCluster(client) as engine:
        return sum(engine.run_in_order(task, None, range(N_TASKS)))


def one_by_one(client: Any) -> int:
    """Run the tasks by futures, 24 at a time."""
    numbers = iter(range(N_TASKS))
    running = as_completed(client.submit(task, None, next(numbers)) for _ in range(24))
    total = 0
    for future in running:
        total += future.result()
        for number in numbers:
            running.add(client.submit(task, None, number))
            break
    return total


def main() -> None:
    """Measure both, and write the results."""
    results = {}
    with ExitStack() as parts:
        host = ("--host", "127.0.0.1", "--no-dashboard")
        parts.enter_context(process("scheduler", *host, "--port", ADDRESS.rsplit(":", 1)[1]))
        time.sleep(5)
        for _ in range(2):
            worker = ("worker", ADDRESS, "--nthreads", "4", "--no-dashboard", "--no-nanny")
            parts.enter_context(process(*worker))
        client = parts.enter_context(Client(ADDRESS))
        client.wait_for_workers(2)
        for act in (one_by_one, ours, one_by_one, ours):
            start, cpu = time.perf_counter(), time.process_time()
            assert act(client) == sum(range(N_TASKS))
            results[act.__name__] = {
                "client_cpu_ms_per_task": round(1e3 * (time.process_time() - cpu) / N_TASKS, 2),
                "wall_ms_per_task": round(1e3 * (time.perf_counter() - start) / N_TASKS, 2),
            }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
