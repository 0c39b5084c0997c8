"""Our loader against the floor (gathering in memory, decoding alone) and a TensorDataset.

Writes `benchmarks/results/loading.json`. The same 200,000 samples (3, 16, 16) of float32 are made
once in a temporary folder, as stores of 3 MB and 12 MB chunks, and 4 million points of 3 channels.
All contenders run in turns in one process, each epoch is timed after one that is not, and the
median counts; `cold` is a first epoch, start-up included.

Run it as ``python -P benchmarks/loading.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch.utils.data import DataLoader, TensorDataset

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.datasets.shards import sharded_arrays

RESULTS = Path(__file__).parent / "results" / "loading.json"
BATCH = 256


def field(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Noise with the precision of a measurement, so that it compresses as real fields do."""
    return np.random.default_rng(seed).normal(280, 10, shape).round(2).astype("float32")


def store_of(cube: xr.Dataset, folder: Path, name: str, **options: Any) -> Path:
    """Sample a cube into one training store."""
    MultiProcSampler(
        cube,
        train_cube=folder / f"{name}.zarr",
        test_cube=folder / f"{name}-test.zarr",
        data_split=1.0,
        block_size={"time": 1},
        **options,
    ).run()
    return folder / f"{name}.zarr"


def run_through(batches: Iterable[Any]) -> int:
    """Take every batch, and count samples."""
    return sum(len(batch[0] if isinstance(batch, list | tuple) else batch) for batch in batches)


def gather(data: torch.Tensor) -> Callable[[], int]:
    """Whole shuffled batches from memory into one buffer: what no loader can beat."""
    out = torch.empty(BATCH, *data.shape[1:])

    def epoch() -> int:
        order = torch.randperm(len(data))
        for start in range(0, len(data) - BATCH + 1, BATCH):
            torch.index_select(data, 0, order[start : start + BATCH], out=out)
        return len(data) // BATCH * BATCH

    return epoch


def decode(path: Path, variables: list[str], threads: int) -> Callable[[], int]:
    """Every chunk decoded once by threads into buffers that are used again; no batches."""
    arrays = sharded_arrays(str(path), variables)
    assert arrays is not None
    first = next(iter(arrays.values()))
    chunks = -(-first.shape[0] // first.chunk)

    def some(which: range) -> None:
        room = np.empty((first.chunk, *first.shape[1:]), first.dtype)
        for chunk in which:
            n = min(first.chunk, first.shape[0] - chunk * first.chunk)
            for array in arrays.values():
                array.read(chunk, room[:n])

    def epoch() -> int:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(some, [range(k, chunks, threads) for k in range(threads)]))
        return first.shape[0]

    return epoch


def measure(contenders: dict[str, Callable[[], int]], repeats: int) -> dict[str, dict[str, float]]:
    """Samples per second, in turns: the first epoch, and the median of the others."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, epoch in contenders.items():
            began = time.perf_counter()
            rates[name].append(epoch() / (time.perf_counter() - began))
    return {
        name: {"cold": round(found[0]), "steady": round(statistics.median(found[1:]))}
        for name, found in rates.items()
    }


def small_samples(folder: Path, scale: float, repeats: int, buffer_mb: float) -> dict[str, Any]:
    """200,000 samples (3, 16, 16): variables r, g, b of one row of windows a time step."""
    steps = int(2000 * scale)
    names = ["r", "g", "b"]
    dims = ("time", "lat", "lon")
    cube = xr.Dataset({n: (dims, field((steps, 16, 1600), k)) for k, n in enumerate(names)})
    options = {"sample_size": {"lat": 16, "lon": 16}, "scale_fn": None}
    chunks = {"3mb": 1000, "12mb": 4000}
    paths = {k: store_of(cube, folder, k, chunk_size=n, **options) for k, n in chunks.items()}
    data = PTXrDataset(paths["12mb"], features=names).take(range(100 * steps))
    threads = min(4, os.cpu_count() or 1)
    contenders = {
        "gather": gather(data),
        "tensordataset": lambda: run_through(DataLoader(TensorDataset(data), BATCH, shuffle=True)),
    }
    reports = {}
    for key, path in paths.items():
        loader = prep_dataloader(
            PTXrDataset(path, features=names), batch_size=BATCH, buffer_mb=buffer_mb
        )
        reports[key] = str(loader.shuffle_report())
        contenders[f"decode_{key}"] = decode(path, names, threads)
        contenders[f"ml4cube_{key}"] = lambda loader=loader: run_through(loader)
    rates = measure(contenders, repeats)
    steady = {name: rate["steady"] for name, rate in rates.items()}
    return {
        "samples_per_second": rates,
        "shuffle": reports,
        "of_gather_small": {k: round(steady[f"ml4cube_{k}"] / steady["gather"], 3) for k in chunks},
        "of_raw_decode": {
            k: round(steady[f"ml4cube_{k}"] / steady[f"decode_{k}"], 3) for k in chunks
        },
        "over_tensordataset": {
            k: round(steady[f"ml4cube_{k}"] / steady["tensordataset"], 2) for k in chunks
        },
    }


def points(folder: Path, scale: float, repeats: int) -> dict[str, Any]:
    """4 million points of three variables."""
    dims = ("time", "lat", "lon")
    shape = (int(100 * scale), 100, 400)
    cube = xr.Dataset({n: (dims, field(shape, k)) for k, n in enumerate("rgb")})
    path = store_of(cube, folder, "points", scale_fn=None)
    data = PTXrDataset(path, features=list("rgb"))
    loader = prep_dataloader(data, batch_size=BATCH)
    whole = data.take(range(len(data)))
    contenders = {"gather": gather(whole), "ml4cube": lambda: run_through(loader)}
    rates = measure(contenders, repeats)
    ratio = rates["ml4cube"]["steady"] / rates["gather"]["steady"]
    return {"samples_per_second": rates, "of_gather_points": round(ratio, 3)}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 for 200,000 samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one thread gathers, as in our loader
    buffer_mb = 512 * args.scale
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "settings": {"batch_size": BATCH, "buffer_mb": buffer_mb, "scale": args.scale},
            "small": small_samples(Path(folder), args.scale, args.repeats, buffer_mb),
            "points": points(Path(folder), args.scale, args.repeats),
        }
    print(json.dumps(results, indent=1))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
