"""One pass of `Statistics` against dask, xarray, scikit-learn and the floor.

Writes `benchmarks/results/statistics.json`. The cube (800 MB of float32 with land gaps, zarr v3 as
xarray writes it by default) is made in a temporary folder. Every contender runs in a process of
its own, on one core and on all, in turns, each time right after the floor; the median of several
counts, of ratios that of the turns' own, and the best is given beside it. Ours, which is the
nearest to the floor, has three turns to one of the others; what is by pixel or of quartiles, which
takes several times as long, has a third of one. The floor decodes every chunk once with
the same reader as ours and does nothing with it; "zarr_floor" does so with that of all the others,
xarray on zarr-python.

Run it as ``python -P benchmarks/statistics.py``: without ``-P`` this file would hide the standard
library's module of the same name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr

SHAPE = {"time": 1000, "lat": 400, "lon": 500}
CHUNKS = {"time": 25, "lat": 200, "lon": 250}
Run = dict[str, float]
RESULTS = Path(__file__).parent / "results" / "statistics.json"
FORMS = ("pixels", "dask_pixels", "quartiles", "numpy_quartiles")
ROUND = ("ml4cube", "dask", "zarr_floor", "ml4cube", "xarray", "zarr_floor", "ml4cube", "sklearn")


def make_cube(path: Path) -> None:
    """Sea surface temperature in kelvin, as if: 26 % land, waves, noise; one slab at a time."""
    rng = np.random.default_rng(0)
    lat, lon = np.meshgrid(np.linspace(-90, 90, 400), np.linspace(0, 360, 500), indexing="ij")
    bumps = np.sin(np.deg2rad(lon * 2)) + np.cos(np.deg2rad(lat * 3 + lon)) + 0.4 * np.sin(lat)
    land = bumps > np.quantile(bumps, 0.74)
    for start in range(0, SHAPE["time"], CHUNKS["time"]):
        steps = np.arange(start, start + CHUNKS["time"])[:, None, None]
        season = np.sin(2 * np.pi * steps / 365) * lat / 10
        cells = 300 - (lat / 12) ** 2 + season + rng.normal(0, 0.5, (len(steps), *lat.shape))
        cells = np.where(land, np.nan, cells).astype("float32")
        slab = xr.Dataset({"sst": (tuple(SHAPE), cells)}, {"time": steps.ravel()})
        if start == 0:
            encoding = {"sst": {"chunks": tuple(CHUNKS.values())}}
            slab.to_zarr(path, encoding=encoding, consolidated=False)
        else:
            slab.to_zarr(path, append_dim="time", consolidated=False)


def floor(path: str, cores: int) -> float:
    """Decode every chunk once as ours does, on as many threads as cores."""
    from ml4cube.cube.engine import Threads
    from ml4cube.cube.reader import CubeReader
    from ml4cube.cube.scan import blocks_of, scan

    variable = xr.open_zarr(path, chunks=None, consolidated=False)["sst"].variable
    reader = CubeReader.of_variables({"sst": variable})
    sizes = scan(
        reader, lambda _, cells: cells["sst"].size, blocks_of(reader), engine=Threads(cores)
    )
    return float(sum(sizes))


def zarr_floor(path: str, cores: int) -> float:
    """Decode every chunk once by xarray and zarr-python, as all the others do."""
    return decode(xr.open_zarr(path, chunks=None, consolidated=False)["sst"].variable, cores)


def decode(variable: xr.Variable, cores: int) -> float:
    """Read a variable block by block, and count its cells."""
    from concurrent.futures import ThreadPoolExecutor

    from ml4cube.cube.reader import CubeReader
    from ml4cube.cube.scan import blocks_of

    boxes = [block.slices for block in blocks_of(CubeReader.of_variables({"sst": variable}))]
    with ThreadPoolExecutor(cores) as pool:
        sizes = pool.map(lambda box: variable.isel(box).values.size, boxes)
        return float(sum(sizes))


def ml4cube(path: str, cores: int) -> float:
    """Ours: mean, std, range and counts in one pass."""
    from ml4cube.preprocessing import Statistics

    ds = xr.open_zarr(path, chunks=None, consolidated=False)
    return Statistics.from_cube(ds)["sst"].std


def dask(path: str, cores: int) -> float:
    """Mean and std in one compute."""
    import dask

    array = xr.open_zarr(path, chunks={}, consolidated=False)["sst"].astype("float64")
    with dask.config.set(num_workers=cores):
        _, std = dask.compute(array.mean(), array.std())
    return float(std)


def xarray(path: str, cores: int) -> float:
    """Mean, then std: two passes, as the ancestor did."""
    import dask

    array = xr.open_zarr(path, chunks={}, consolidated=False)["sst"].astype("float64")
    with dask.config.set(num_workers=cores):
        array.mean().values.item()
        return float(array.std().values.item())


def sklearn(path: str, cores: int) -> float:
    """`StandardScaler.partial_fit`, block by block, on one thread."""
    from sklearn.preprocessing import StandardScaler

    from ml4cube.cube.chunks.blocks import blocks

    variable = xr.open_zarr(path, chunks=None, consolidated=False)["sst"].variable
    scaler = StandardScaler()
    for slices in blocks(variable):
        scaler.partial_fit(variable.isel(slices).values.reshape(-1, 1))
    return float(scaler.scale_[0])


def pixels(path: str, cores: int) -> float:
    """Ours: the same for each of 200,000 places."""
    from ml4cube.preprocessing import Statistics

    ds = xr.open_zarr(path, chunks=None, consolidated=False)
    return float(np.nanmean(Statistics.from_cube(ds, dims="time")["sst"].std))


def dask_pixels(path: str, cores: int) -> float:
    """Mean and std of each place, in one compute."""
    import dask

    array = xr.open_zarr(path, chunks={}, consolidated=False)["sst"].astype("float64")
    with dask.config.set(num_workers=cores):
        _, std = dask.compute(array.mean("time"), array.std("time"))
    return float(np.nanmean(std))


def quartiles(path: str, cores: int) -> float:
    """Ours: quartiles, off by less than a bin, beside mean, std and range; the median."""
    from ml4cube.preprocessing import Statistics

    ds = xr.open_zarr(path, chunks=None, consolidated=False)
    found = Statistics.from_cube(ds, quantiles=(0.25, 0.5, 0.75))["sst"]
    return float([found.quantile(p) for p in (0.25, 0.5, 0.75)][1])


def numpy_quartiles(path: str, cores: int) -> float:
    """Quartiles of the whole cube in memory, exact, as xarray takes them; the median."""
    cube = xr.open_zarr(path, chunks=None, consolidated=False)["sst"].load()
    return float(cube.quantile([0.25, 0.5, 0.75])[1])


def run_one(name: str, path: str, cores: int) -> None:
    """Run one contender in this process and print its figures."""
    import dask.array  # noqa: F401
    import sklearn.preprocessing  # noqa: F401
    import zarr

    import ml4cube.preprocessing  # noqa: F401

    zarr.config.set({"threading.max_workers": cores})
    # warm up code paths and thread pools, so that only the work is measured
    for warm_up in (floor, zarr_floor):
        warm_up(path + "/../small.zarr", cores)
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    std = globals()[name](path, cores)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rss = (after.ru_maxrss - before.ru_maxrss) / 1024
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, "rss_mb": rss, "result": std}))


def measure(path: Path, cores: int, repeats: int) -> dict[str, Run]:
    """Median of several runs of each contender, in turns, each right after the floor."""
    turns: dict[str, list[tuple[Run, Run]]] = {name: [] for name in (*ROUND, *FORMS)}
    for name in ROUND * repeats + FORMS * -(-repeats // 3):
        before = run_apart("floor", path, cores)
        turns[name].append((run_apart(name, path, cores), before))
    floors = [(floor, floor) for pairs in turns.values() for _, floor in pairs]
    return {
        name: {
            "cpu_s": round(statistics.median(run["cpu_s"] for run, _ in pairs), 3),
            "cpu_s_best": round(min(run["cpu_s"] for run, _ in pairs), 3),
            "cpu_over_floor": round(
                statistics.median(run["cpu_s"] / floor["cpu_s"] for run, floor in pairs), 3
            ),
            "wall_s": round(statistics.median(run["wall_s"] for run, _ in pairs), 3),
            "rss_mb": round(max(run["rss_mb"] for run, _ in pairs), 1),
            "result": pairs[0][0]["result"],
        }
        for name, pairs in {"floor": floors, **turns}.items()
    }


def run_apart(name: str, path: Path, cores: int) -> Run:
    """Run one contender in a process of its own, on so many cores."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--one", name, str(path), str(cores)],
        env={**os.environ, "OMP_NUM_THREADS": str(cores), "OPENBLAS_NUM_THREADS": str(cores)},
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    run: Run = json.loads(done.stdout.splitlines()[-1])
    return run


def main() -> None:
    """Make the cube, run the contenders, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=3, metavar=("NAME", "PATH", "CORES"), help="internal")
    args = parser.parse_args()
    if args.one:
        run_one(args.one[0], args.one[1], int(args.one[2]))
        return
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cube.zarr"
        make_cube(path)
        small = xr.Dataset({"sst": (("time",), np.zeros(10, "float32"))})
        small.to_zarr(Path(folder) / "small.zarr", consolidated=False)
        by_cores = {n: measure(path, n, args.repeats) for n in sorted({1, cores})}
    report(by_cores, args.out)


def report(by_cores: dict[int, dict[str, Run]], out: Path) -> None:
    """Print the table; the keys at the top are the worst over the numbers of cores."""
    for cores, table in by_cores.items():
        print(f"\n{cores} core(s)           CPU s   over floor   wall s   MB above start   result")
        for name, row in table.items():
            print(
                f"{name:15s} {row['cpu_s']:9.2f} {row['cpu_over_floor']:12.2f}"
                f" {row['wall_s']:8.2f} {row['rss_mb']:12.0f} {row['result']:14.6f}"
            )
    tables = by_cores.values()
    summary = {
        "cpu_over_floor": max(t["ml4cube"]["cpu_over_floor"] for t in tables),
        "cpu_over_floor_by_cores": {
            cores: t["ml4cube"]["cpu_over_floor"] for cores, t in by_cores.items()
        },
        "cpu_over_floor_of_best": {
            cores: round(t["ml4cube"]["cpu_s_best"] / t["floor"]["cpu_s_best"], 3)
            for cores, t in by_cores.items()
        },
        "cpu_over_zarr_floor_by_cores": {
            cores: round(t["ml4cube"]["cpu_over_floor"] / t["zarr_floor"]["cpu_over_floor"], 3)
            for cores, t in by_cores.items()
        },
        "dask_cpu_over_ours": min(t["dask"]["cpu_s"] / t["ml4cube"]["cpu_s"] for t in tables),
        "pixels_dask_cpu_over_ours": min(
            t["dask_pixels"]["cpu_s"] / t["pixels"]["cpu_s"] for t in tables
        ),
        "quartiles_numpy_cpu_over_ours": min(
            t["numpy_quartiles"]["cpu_s"] / t["quartiles"]["cpu_s"] for t in tables
        ),
        "rss_mb": max(t["ml4cube"]["rss_mb"] for t in tables),
    }
    print(json.dumps(summary, indent=2))
    cube = {"shape": SHAPE, "chunks": CHUNKS, "mb": 4 * int(np.prod(list(SHAPE.values()))) // 10**6}
    # other work on the machine adds to CPU times, most where memory is shared
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_end": round(os.getloadavg()[0], 1),
    }
    full = {**summary, "cube": cube, "machine": machine, "by_cores": by_cores}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(full, indent=2) + "\n")


if __name__ == "__main__":
    main()
