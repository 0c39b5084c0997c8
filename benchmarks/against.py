"""CPU time of every stage in this tree, relative to another commit.

``make bench-against BASE=v0.1.0`` runs the cases of `benchmarks/cases.py` in turns with the package
of either commit, in a process of its own and in the other order each time. Each case runs once on
a small cube first, so that imports do not count. A case that the other commit lacks is skipped, and
named. The results, `benchmarks/results/against.json`, hold for each stage ``ratio``, the median of
this tree over the median of the other; ``least``, the same of the smallest times, which another
program on the machine disturbs less; and ``spread``, the upper quartile of the other tree's times
over the lower one: a ratio within the spread shows no difference. While a spread is above 1.2,
turns are added, to at most twice as many.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "against.json"
QUIET = 1.2


def cpu_seconds() -> float:
    """Return the time of this process and of its children that have ended."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usage)


def run_cases(scale: int) -> dict[str, float | str]:
    """Return the CPU seconds of each case, or the error of one that this package lacks."""
    from benchmarks.cases import CASES, Workplace

    seconds: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Workplace(Path(folder), scale)
        for name, run in CASES.items():
            began = cpu_seconds()
            try:
                run(work)
                seconds[name] = cpu_seconds() - began
            except Exception as error:
                seconds[name] = shorten(f"{type(error).__name__}: {error}", 100)
    return seconds


def measure(package: Path, scale: int) -> dict[str, Any]:
    """Run the cases in a process that imports ml4cube from a folder."""
    command = [sys.executable, "-P", str(Path(__file__)), "--cases", str(scale)]
    paths = os.pathsep.join([str(package), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    seconds: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return seconds


def extract(commit: str, folder: Path) -> None:
    """Put the package of a commit into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "ml4cube"], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive.stdout)


def compare(old: list[float], new: list[float]) -> dict[str, float]:
    """Return the figures of one stage."""
    lower, upper = np.quantile(old, [0.25, 0.75])
    figures = {
        "ratio": np.median(new) / np.median(old),
        "least": min(new) / min(old),
        "spread": upper / lower,
        "cpu_s": np.median(new),
    }
    return {
        **{name: round(float(value), 3) for name, value in figures.items()},
        "repeats": len(new),
    }


def main() -> None:
    """Measure both trees in turns, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=int, default=5, help="size of the cubes; hashes have 1")
    parser.add_argument("--cases", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.cases:
        warnings.simplefilter("ignore")
        # an editable install would lend an older package what it lacks
        sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in one.__module__]
        run_cases(1)
        print(json.dumps(run_cases(args.cases)))
        return
    if not args.base:
        parser.error("say which commit to compare with: make bench-against BASE=...")
    runs: dict[str, list[dict[str, Any]]] = {"base": [], "this": []}
    with tempfile.TemporaryDirectory() as folder:
        extract(args.base, Path(folder))
        packages = {"base": Path(folder), "this": ROOT}
        for turn in range(2 * args.repeats):
            for tree in ("base", "this") if turn % 2 else ("this", "base"):
                runs[tree].append(measure(packages[tree], args.scale))
            results = compare_stages(runs)
            quiet = all(row["spread"] <= QUIET for row in results.values())
            print(f"turn {turn + 1}, {'quiet' if quiet else 'noisy'}", file=sys.stderr)
            if turn + 1 >= args.repeats and quiet:
                break
    skipped = {stage: error for stage, error in runs["base"][0].items() if isinstance(error, str)}
    for stage, row in results.items():
        print(f"{stage:18}", *(f"{name} {value:<6}" for name, value in row.items()))
    for stage, error in skipped.items():
        print(f"{stage:18} skipped, {args.base}: {error}")
    written = {"base": args.base, "skipped": list(skipped), **results}
    args.out.write_text(json.dumps(written, indent=1) + "\n")


def compare_stages(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the figures of the stages that both trees have."""
    results = {}
    for stage, seconds in runs["this"][-1].items():
        if isinstance(seconds, str):
            sys.exit(f"{stage} fails in this tree: {seconds}")
        if isinstance(runs["base"][0][stage], float):
            results[stage] = compare(*([run[stage] for run in runs[tree]] for tree in runs))
    return results


if __name__ == "__main__":
    main()
