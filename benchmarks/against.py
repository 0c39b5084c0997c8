"""CPU time of every stage in this tree, relative to another commit.

``make bench-against BASE=v0.1.0`` checks the other commit out into a temporary folder. Each turn
runs the stages once in either tree, in a process of its own and in the other order each time. Each
stage runs once on a small cube first, so that imports do not count. The results,
`benchmarks/results/against.json`, hold for each stage ``ratio``, the median of this tree over the
median of the other, and ``spread``, the largest time of the other tree over its smallest: a ratio
within the spread shows no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "against.json"


def stages(steps: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the stages in their order; each uses what those before it have left in `folder`."""
    import numpy as np
    import torch
    import xarray as xr

    from ml4cube.datasets.multiproc_sampler import MultiProcSampler
    from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
    from ml4cube.prediction import predict_cube
    from ml4cube.preprocessing import Statistics
    from ml4cube.splits import assign_block_split, leakage_report
    from ml4cube.training.pytorch import Trainer

    rng = np.random.default_rng(0)
    cells = rng.normal(size=(2, steps, 128, 128)).astype("float32")
    cells[:, :, :32, :32] = np.nan
    sizes = {"time": steps, "lat": 128, "lon": 128}
    coords = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(steps) * np.timedelta64(1, "D"),
        "lat": np.linspace(60, 30, 128),
        "lon": np.linspace(0, 30, 128),
    }
    variables = {name: (list(sizes), one) for name, one in zip("ab", cells, strict=True)}
    path = folder / "cube.zarr"
    xr.Dataset(variables, coords).chunk(time=16, lat=64, lon=64).to_zarr(path)
    cube = xr.open_zarr(path)
    split = assign_block_split(cube, {"lat": 32, "lon": 32}, split=0.6, val=0.2, buffer={"lat": 2})
    train, test, val = (folder / f"{part}.zarr" for part in ("train", "test", "val"))

    def sample() -> object:
        where = {"train_cube": train, "test_cube": test, "val_cube": val}
        window = {"lat": 8, "lon": 8}
        return MultiProcSampler(split, nproc=1, sample_size=window, to_pred="b", **where).run()

    def load() -> None:
        loader = prep_dataloader(PTXrDataset(train, to_pred="b"), batch_size=128)
        for _epoch in range(3):
            for _batch in loader:
                pass

    def make_trainer() -> Trainer:
        torch.manual_seed(0)
        parts = (PTXrDataset(one, to_pred="b") for one in (train, val))
        model = torch.nn.Conv2d(1, 1, 3, padding=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loaders = prep_dataloader(*parts, batch_size=16)
        best = str(folder / "best.pt")
        loss = torch.nn.MSELoss()
        return Trainer(model, *loaders, optimizer, best_model_path=best, loss=loss, epochs=2)

    def predict() -> object:
        model = torch.nn.Conv2d(1, 1, 3, padding=1)
        return predict_cube(model, cube, train, out=folder / "predicted.zarr", overlap=0.5)

    return {
        "split": lambda: split["split"].load(),
        "statistics": lambda: Statistics.from_cube(split),
        "leakage_report": lambda: leakage_report(split),
        "sample": sample,
        "load": load,
        "train": lambda: make_trainer().train(),
        "predict": predict,
    }


def run_stages(steps: int) -> dict[str, float]:
    """Return the CPU seconds of each stage, in this process and its children."""
    seconds = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, stage in stages(steps, Path(temporary)).items():
            began = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
            stage()
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[name] = time.process_time() - began[0]
            seconds[name] += children.ru_utime - began[1].ru_utime
    return seconds


def measure(tree: Path, steps: int) -> dict[str, float]:
    """Run the stages in a process that imports ml4cube from `tree`."""
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__)), "--stages", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure both trees in turns, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=512, help="time steps of the cube")
    parser.add_argument("--stages", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.stages:
        run_stages(16)
        print(json.dumps(run_stages(args.stages)))
        return
    if not args.base:
        parser.error("say which commit to compare with: make bench-against BASE=...")
    git = ["git", "-C", str(ROOT), "worktree"]
    times: dict[str, list[dict[str, float]]] = {"base": [], "this": []}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        subprocess.run([*git, "add", "--quiet", "--detach", str(base), args.base], check=True)
        try:
            trees = {"base": base, "this": ROOT}
            for turn in range(args.repeats):
                for name in list(trees)[:: -1 if turn % 2 else 1]:
                    times[name].append(measure(trees[name], args.steps))
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)
    results = {}
    for stage in times["this"][0]:
        old, new = ([run[stage] for run in times[name]] for name in ("base", "this"))
        results[stage] = {
            "ratio": round(statistics.median(new) / statistics.median(old), 3),
            "spread": round(max(old) / min(old), 3),
            "cpu_s": round(statistics.median(new), 3),
        }
        print(f"{stage:16} {results[stage]}")
    args.out.write_text(json.dumps({"base": args.base, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
