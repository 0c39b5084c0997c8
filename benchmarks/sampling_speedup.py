"""Four worker processes of the sampler against one, on four cores or on four slow ones.

Writes `benchmarks/results/sampling_speedup.json`. The runs are those of `sampling.py`, on its
largest cube, in turns; the median of several repeats counts. With four cores or more this is
`speedup_4_procs`. With fewer it is null, and `speedup_4_slow_cores` stands in: every process, alone
or one of five, may use no more than its share of what four cores of that many would have (half a
core each where there are two). So what only one process can do takes as long beside what all do
together as on four cores; that four fast cores ask more of memory than four slow ones is not
shown. Shares are quotas of the kernel (cgroup v1), for which one must be root.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "sampling.py"
RESULTS = Path(__file__).parent / "results" / "sampling_speedup.json"
GROUPS = Path("/sys/fs/cgroup/cpu")
PROCESSES = 4
STEPS = 2816
REPEATS = 5
PERIOD_US = 10_000


@contextlib.contextmanager
def limited(share: float) -> Iterator[Path]:
    """Give whoever enters the group `share` of a core."""
    group = Path(tempfile.mkdtemp(prefix="ml4cube-share-", dir=GROUPS))
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * share)))
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)
        group.rmdir()


def children(pid: int) -> list[int]:
    """Processes that one has started and that still run."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def run(cube: Path, folder: Path, nproc: int, share: float | None) -> dict[str, Any]:
    """Run the sampler once, in a process of its own; each process has its own share of a core."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "out"
    command = [sys.executable, "-P", str(RUNS), "--run", "ours", str(cube), str(out)]
    command += ["patches", str(nproc)]
    with contextlib.ExitStack() as stack:
        ran = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        placed: set[int] = set()
        while ran.poll() is None:
            for pid in {ran.pid, *children(ran.pid)} - placed if share is not None else ():
                placed.add(pid)
                group = stack.enter_context(limited(share))
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    (group / "cgroup.procs").write_text(str(pid))
            time.sleep(0.02)
        if ran.returncode:
            raise RuntimeError(f"the sampler failed with exit code {ran.returncode}")
        assert ran.stdout is not None
        found: dict[str, Any] = json.loads(ran.stdout.read().splitlines()[-1])
    # emptied, not removed, as in sampling.py
    for file in (path for path in out.rglob("*") if path.is_file()):
        os.truncate(file, 0)
    return found


def main() -> None:
    """Measure, print, write the results."""
    cores = os.cpu_count() or 1
    share = None if cores >= PROCESSES else cores / PROCESSES
    reason = None if share is None else f"this machine has {cores} cores"
    if share is not None and not os.access(GROUPS / "cgroup.procs", os.W_OK):
        raise SystemExit(
            f"{reason}, and {GROUPS} cannot be written, to make four slow ones of them"
        )
    taken: dict[int, list[dict[str, Any]]] = {1: [], PROCESSES: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cube = folder / "large.zarr"
        runpy.run_path(str(RUNS))["make_cube"](cube, STEPS)
        for _ in range(REPEATS):
            for nproc, runs in taken.items():
                runs.append(run(cube, folder, nproc, share))
    wall = {n: statistics.median(one["wall_s"] for one in runs) for n, runs in taken.items()}
    cpu = {n: statistics.median(one["cpu_s"] for one in runs) for n, runs in taken.items()}
    speedup = wall[1] / wall[PROCESSES]
    results = {
        "speedup_4_procs": speedup if share is None else None,
        "speedup_4_procs_reason": reason,
        "speedup_4_slow_cores": None if share is None else speedup,
        "share_of_a_core": share,
        "wall_s": wall,
        "cpu_s": cpu,
        "turns": [a["wall_s"] / b["wall_s"] for a, b in zip(*taken.values(), strict=True)],
        "machine": {"cores": cores, "python": platform.python_version()},
        "repeats": REPEATS,
    }
    for key, value in results.items():
        print(f"{key:24} {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
