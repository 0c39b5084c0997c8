"""What ml4cube says about errors, against simulations whose truth is known.

``make bench-honesty`` runs every case that `benchmarks/results/honesty.json` does not hold yet, on
all cores, and prints one table of all bars. It can be stopped and started again at any time. Each
part is a module ``honesty_PART.py`` beside this file with three functions:

- ``keys()``: the names of its cases, which do not depend on one another;
- ``run(key)``: the numbers of one case, a function of its name alone;
- ``rows(results)``: one row for each bar, from the cases that are there.

A result is kept with the commit that made it. ``--fresh PART`` throws those of a part away.
``--draw`` draws the figures of `docs/explanation/honest_splits.md`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from loky import get_reusable_executor

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "honesty.json"
PARTS = ("areas", "climatology", "copies", "intervals", "ranges", "splits")


def part_module(part: str) -> ModuleType:
    """Import the module of a part, also in a worker."""
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    return importlib.import_module(f"honesty_{part}")


def run_case(part: str, key: str) -> dict[str, Any]:
    """Run one case, on one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result: dict[str, Any] = part_module(part).run(key)
    return result


def present_commit() -> str:
    """Return the commit of the tree, with a mark if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    answer = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def load_results() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results that are there: by part, then by case."""
    stored = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    return {part: stored.get(part, {}) for part in PARTS}


def bars(results: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of all parts, from the cases that are there."""
    table = []
    for part, cases in results.items():
        module = part_module(part)
        known = set(module.keys())
        numbers = {key: case["numbers"] for key, case in cases.items() if key in known}
        if numbers:
            counts = f"{len(numbers)} of {len(known)}"
            table += [{"part": part, "cases": counts, **row} for row in module.rows(numbers)]
    return table


def save(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write the results and their table, aside first."""
    splits = {key: case["numbers"] for key, case in results["splits"].items()}
    whole = {
        "bars": bars(results),
        "honest_splits": part_module("splits").summary(splits),
        "results": results,
    }
    text = json.dumps(whole, indent=1, default=float).replace("NaN", "null")
    aside = RESULTS.with_suffix(".part")
    aside.write_text(text + "\n")
    aside.replace(RESULTS)


def open_cases(results: dict[str, dict[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Return the cases still to run, the parts in turns."""
    waiting = []
    for part, cases in results.items():
        keys = part_module(part).keys()
        waiting.append([(part, key) for key in keys if key not in cases])
    turns = itertools.zip_longest(*waiting)
    return [case for turn in turns for case in turn if case is not None]


def run_cases(results: dict[str, dict[str, dict[str, Any]]], hours: float, nproc: int) -> None:
    """Run what is open until the time is over, and save every half minute."""
    commit = present_commit()
    pool = get_reusable_executor(max_workers=nproc, timeout=600)
    deadline = time.monotonic() + hours * 3600
    saved = time.monotonic()
    waiting = open_cases(results)
    running: dict[Future[dict[str, Any]], tuple[str, str]] = {}
    total = len(waiting)
    while running or (waiting and time.monotonic() < deadline):
        while waiting and len(running) < nproc + 1 and time.monotonic() < deadline:
            case = waiting.pop(0)
            running[pool.submit(run_case, *case)] = case
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            part, key = running.pop(future)
            results[part][key] = {"commit": commit, "numbers": future.result()}
        if time.monotonic() - saved > 30:
            save(results)
            saved = time.monotonic()
            left = len(waiting) + len(running)
            print(f"{total - left} of {total} cases", file=sys.stderr, flush=True)


def print_table(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print all bars, and from which commits their results are."""
    for row in bars(results):
        mark = "met" if row["met"] else "NOT MET"
        print(
            f"{row['part']:12} {mark:8} {row['claim']}: {row['measured']} (bar: {row['bar']};",
            end="",
        )
        print(f" {row['cases']} cases)")
    commits = {case["commit"] for cases in results.values() for case in cases.values()}
    print(f"results of commits: {', '.join(sorted(commits))}")


def main() -> None:
    """Run the open cases, save them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=3.0, help="start no case after this time")
    parser.add_argument("--nproc", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", nargs="*", choices=PARTS, default=(), metavar="PART")
    parser.add_argument("--draw", action="store_true", help="draw figures, and run nothing")
    options = parser.parse_args()
    if options.draw:
        part_module("splits").draw()
        return
    results = load_results()
    for part in options.fresh:
        results[part] = {}
    run_cases(results, options.hours, options.nproc)
    save(results)
    print_table(results)


if __name__ == "__main__":
    main()
