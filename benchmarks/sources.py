"""Statistics and plans of cubes in many layouts, beside one whole read by zarr-python.

Writes `benchmarks/results/sources.json`: CPU seconds on one core, the least of three runs, and
their ratios. "layouts" are plain chunks, shards, gzip and packed integers; "per_byte" is the ratio
to a read of the same number of decoded bytes in zstd chunks, since packed integers are half as
many bytes. "joined" are cubes of N files opened one by one, each a block of its own, in
milliseconds a file; "dask" compares `xr.open_zarr` as it is with `chunks=None`.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import numpy as np
import xarray as xr
import zarr
from zarr.codecs import GzipCodec, ZstdCodec

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.evaluation import score_cube
from ml4cube.preprocessing import get_statistics

RESULTS = Path(__file__).parent / "results" / "sources.json"
SHAPE = {"time": 240, "lat": 256, "lon": 256}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zstd": {"chunks": (4, 256, 256), "compressors": ZstdCodec(level=1)},
    "shards": {
        "chunks": (4, 64, 256),
        "shards": (24, 256, 256),
        "compressors": ZstdCodec(level=1),
    },
    "gzip": {"chunks": (4, 256, 256), "compressors": GzipCodec(level=1)},
    "packed": {
        "chunks": (4, 256, 256),
        "dtype": "int16",
        "scale_factor": 0.01,
        "add_offset": 280.0,
        "_FillValue": -32768,
        "compressors": ZstdCodec(level=1),
    },
}
FILES = (100, 200, 400, 800)


def cube(sizes: dict[str, int], first_day: int = 0) -> xr.Dataset:
    """Make a smooth field with noise."""
    rng = np.random.default_rng(first_day)
    noise = rng.normal(size=tuple(sizes.values())).cumsum(1) / 10
    cells = 280 + 20 * np.sin(np.arange(sizes["time"]) / 10)[:, None, None] + noise
    days = np.datetime64("2000-01-01", "ns") + np.arange(sizes["time"]) * np.timedelta64(1, "D")
    coords = {
        "time": days + np.timedelta64(first_day, "D"),
        "lat": np.linspace(-80, 80, sizes["lat"]),
        "lon": np.arange(sizes["lon"]) * 360 / sizes["lon"],
    }
    return xr.Dataset({"a": (tuple(sizes), cells.astype("f4"))}, coords)


def plan(ds: xr.Dataset, folder: Path) -> None:
    """Plan samples of a map."""
    sizes = {"time": 1, "lat": ds.sizes["lat"] // 2, "lon": ds.sizes["lon"] // 2}
    targets = {"train_cube": folder / "train", "test_cube": folder / "test"}
    MultiProcSampler(
        ds, sample_size=sizes, block_size={"time": 20}, nproc=1, progress=False, **targets
    ).plan()


def cpu(act: Callable[[], object], turns: int = 3) -> float:
    """Return the least CPU time of several turns."""
    times = []
    for _ in range(turns):
        start = time.process_time()
        act()
        times.append(time.process_time() - start)
    return min(times)


def layouts(folder: Path) -> dict[str, Any]:
    """Measure each layout beside zarr-python."""
    results: dict[str, dict[str, float]] = {}
    whole = cube(SHAPE)
    for name, encoding in LAYOUTS.items():
        path = folder / f"{name}.zarr"
        whole.to_zarr(path, encoding={"a": encoding}, consolidated=False)

        def opened(path: Path = path) -> xr.Dataset:
            return xr.open_zarr(path, consolidated=False, chunks=None)

        by_zarr = cpu(lambda path=path: zarr.open_array(path, path="a", mode="r")[:])
        seconds = {
            "statistics": cpu(lambda opened=opened: get_statistics(opened(), split=None)),
            "plan": cpu(lambda opened=opened: plan(opened(), folder)),
        }
        results[name] = {"zarr_s": round(by_zarr, 3)}
        for stage, taken in seconds.items():
            results[name][f"{stage}_s"] = round(taken, 3)
            results[name][f"{stage}_over_zarr"] = round(taken / by_zarr, 2)
    for of_layout in results.values():
        for stage in ("statistics", "plan"):
            of_zstd = results["zstd"][f"{stage}_s"]
            of_layout[f"{stage}_per_byte"] = round(of_layout[f"{stage}_s"] / of_zstd, 2)
    return results


def joined(folder: Path) -> dict[str, Any]:
    """Measure cubes joined from many files."""
    sizes = {"time": 2, "lat": 16, "lon": 16}
    for i in range(max(FILES)):
        path = folder / f"{i}.zarr"
        cube(sizes, first_day=2 * i).to_zarr(path, consolidated=False)
    results: dict[str, dict[str, float]] = {}
    for n in FILES:
        pieces = [xr.open_zarr(folder / f"{i}.zarr", consolidated=False) for i in range(n)]
        ds = xr.concat(pieces, "time")
        stages: dict[str, Callable[[], object]] = {
            "statistics": lambda ds=ds: get_statistics(ds, split=None),
            "score_cube": lambda ds=ds: score_cube(ds, ds),
            "plan": lambda ds=ds: plan(ds, folder),
        }
        with mock.patch("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 512):
            milliseconds = {name: 1e3 * cpu(act) / n for name, act in stages.items()}
        results[str(n)] = {name: round(taken, 2) for name, taken in milliseconds.items()}
    first, last = results[str(FILES[0])], results[str(FILES[-1])]
    results["last_over_first"] = {name: round(last[name] / first[name], 2) for name in first}
    return results


def by_dask(folder: Path) -> dict[str, float]:
    """Compare cubes as xarray opens them with those without dask."""
    path = folder / "many.zarr"
    encoding = {"a": {"chunks": (1, 64, 64)}}
    cube({"time": 800, "lat": 64, "lon": 64}).to_zarr(path, encoding=encoding, consolidated=False)
    stages: dict[str, Callable[[xr.Dataset], object]] = {
        "statistics": lambda ds: get_statistics(ds, split=None),
        "score_cube": lambda ds: score_cube(ds, ds),
        "plan": lambda ds: plan(ds, folder),
    }
    results = {}
    for name, act in stages.items():
        with_dask = cpu(lambda act=act: act(xr.open_zarr(path, consolidated=False)))
        without = cpu(lambda act=act: act(xr.open_zarr(path, consolidated=False, chunks=None)))
        results[name] = round(with_dask / without, 2)
    return results


def main() -> None:
    """Measure all, and write the results."""
    warnings.simplefilter("ignore")
    dask.config.set(scheduler="synchronous")
    results = {}
    for act in (layouts, joined, by_dask):
        with tempfile.TemporaryDirectory() as folder:
            results[act.__name__] = act(Path(folder))
    results["versions"] = {"zarr": zarr.__version__, "xarray": xr.__version__}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
