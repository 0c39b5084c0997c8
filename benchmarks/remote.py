"""Requests to an object store: how many, how many at a time, and how fast beside a download.

Writes `benchmarks/results/remote.json`. The store is `object_store.py` in a process of its own on
the loopback, which waits 20 or 200 ms before it answers. The cube has 300 chunks of 1 MB in 20
shards, uncompressed. The download asks s3fs for the same chunks, 64 at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "remote.json"
PORT = 9413
SERVER = f"http://127.0.0.1:{PORT}"
CUBE = "s3://bench/cube.zarr"
N_CHUNKS, N_SHARDS, CHUNK_BYTES = 300, 20, 2**20


def ask(path: str) -> bytes:
    """Ask the server something about itself."""
    with urllib.request.urlopen(f"{SERVER}/-/{path}") as answer:
        return bytes(answer.read())


def measured(act: Callable[[], object]) -> dict[str, Any]:
    """Return time and requests of an act."""
    ask("log")
    start, cpu = time.perf_counter(), time.process_time()
    act()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    log = json.loads(ask("log"))
    of_array = [entry for entry in log["requests"] if "/a/c/" in entry["path"]]
    of_chunks = [entry for entry in of_array if entry["method"] == "GET"]
    asked = Counter((entry["path"], entry["range"]) for entry in of_chunks)
    return {
        "wall_s": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "gets_of_chunks": len(of_chunks),
        "heads_of_chunks": len(of_array) - len(of_chunks),
        "asked_again": sum(n - 1 for n in asked.values()),
        "megabytes": round(sum(entry.get("bytes", 0) for entry in of_chunks) / 1e6),
        "most_in_flight": log["most_in_flight"],
    }


def make_cube() -> None:
    """Write the cube to the store."""
    import numpy as np
    import xarray as xr

    cells = np.random.default_rng(0).normal(size=(N_CHUNKS, 512, 512)).astype("f4")
    days = np.datetime64("2000-01-01", "ns") + np.arange(N_CHUNKS) * np.timedelta64(1, "D")
    encoding = {"chunks": (1, 512, 512), "shards": (15, 512, 512), "compressors": None}
    ds = xr.Dataset({"a": (("time", "y", "x"), cells)}, {"time": days})
    ds.to_zarr(CUBE, encoding={"a": encoding}, consolidated=False)


def download() -> None:
    """Read all chunks by s3fs, 64 at a time."""
    import fsspec

    fs = fsspec.filesystem("s3", config_kwargs={"max_pool_connections": 64})
    shards = fs.find(f"{CUBE}/a/c")
    starts = range(0, N_CHUNKS // N_SHARDS * CHUNK_BYTES, CHUNK_BYTES)
    ranges = [(shard, start, start + CHUNK_BYTES) for shard in shards for start in starts]
    fs.cat_ranges(*map(list, zip(*ranges, strict=True)), batch_size=64)


def by_zarr() -> None:
    """Read all chunks by zarr-python."""
    import xarray as xr

    xr.open_zarr(CUBE, consolidated=False, chunks=None)["a"].load()


def statistics() -> None:
    """Read all chunks, and sum them up."""
    import xarray as xr

    from ml4cube.preprocessing import get_statistics

    get_statistics(xr.open_zarr(CUBE, consolidated=False, chunks=None), split=None)


def sample() -> None:
    """Sample the cube to a local store in two passes, by two processes."""
    from ml4cube.datasets.multiproc_sampler import MultiProcSampler

    with tempfile.TemporaryDirectory() as folder:
        targets = {"train_cube": f"{folder}/train.zarr", "test_cube": f"{folder}/test.zarr"}
        sizes = {"time": 1, "y": 64, "x": 64}
        MultiProcSampler(
            CUBE, sample_size=sizes, block_size={"time": 30}, nproc=2, progress=False, **targets
        ).run()


def main() -> None:
    """Serve, measure all, and write the results."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "AWS_ENDPOINT_URL": SERVER,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    script = str(Path(__file__).with_name("object_store.py"))
    server = subprocess.Popen([sys.executable, "-P", script, "--port", str(PORT)])
    results: dict[str, Any] = {}
    try:
        time.sleep(3)
        make_cube()
        for delay in (0.02, 0.2):
            ask(f"delay?s={delay}")
            acts = (download, by_zarr, statistics, sample)
            results[f"{round(1e3 * delay)} ms"] = {act.__name__: measured(act) for act in acts}
    finally:
        server.terminate()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
