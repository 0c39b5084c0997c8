"""Writing training stores: ours against the floor, the ancestor, return-to-parent and xbatcher.

Writes `benchmarks/results/sampling.json`. Every contender runs in a process of its own on the same
cube (float32 with gaps, zarr v3 in chunks of half a megabyte) in a temporary folder, in turns; the
median of several repeats counts. CPU is that of the process and all its workers; libraries are
imported before the clock starts, in workers after it. The floor decodes every chunk once, encodes
as many bytes once with the same codec, and writes them once.

Ours writes windows of one and of eight time steps from cubes of three sizes, points from the
smallest and the largest, both windows with an overlap of one half, and windows from cubes of two
to five dims. On fewer than four cores `speedup_4_procs` is null; `speedup_all_cores` is
what there is.

The others:

- *ancestor*: ml4xcube 1.1.0, in an environment of its own (`make bench-sampling` builds it), with
  as many processes as ours, on the very same cube, the largest: patches and points.
  `ancestor_over_ours_*` is its wall time over ours, start-up and all. It leaves out one or two
  samples in a hundred that we keep;
- *return to parent*: workers cut windows, the parent gets the arrays and writes them with zarr;
- *xbatcher*: `BatchGenerator` over a chunk of the cube in memory, patches stacked and appended with
  `to_zarr`; compared by the sample with one process of ours, since a whole cube would take minutes.

``python -P benchmarks/sampling.py --quick`` runs it once on a small cube.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "sampling.json"
ANCESTOR = Path(__file__).parent / ".ancestor-venv" / "bin" / "python"
CHUNK = {"time": 32, "lat": 64, "lon": 64}
WINDOWS: dict[str, dict[str, int]] = {
    "patches": {"time": 1, "lat": 16, "lon": 16},
    "cuboids": {"time": 8, "lat": 16, "lon": 16},
    "points": {},
    "patches-half": {"time": 1, "lat": 16, "lon": 16},
    "cuboids-half": {"time": 8, "lat": 16, "lon": 16},
    "patches-nd": {"lat": 16, "lon": 16},
}
OVERLAP = {
    "patches-half": {"lat": 0.5, "lon": 0.5},
    "cuboids-half": {"time": 0.5, "lat": 0.5, "lon": 0.5},
}
# Cubes of two to five dims and equal size: their shape, and their chunks.
SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "2d": ({"lat": 2048, "lon": 4096}, {"lat": 256, "lon": 512}),
    "3d": ({"time": 128, "lat": 256, "lon": 256}, CHUNK),
    "4d": (
        {"time": 32, "level": 4, "lat": 256, "lon": 256},
        {"time": 8, "level": 4, "lat": 64, "lon": 64},
    ),
    "5d": (
        {"member": 2, "time": 16, "level": 4, "lat": 256, "lon": 256},
        {"member": 2, "time": 4, "level": 4, "lat": 64, "lon": 64},
    ),
}


def make_cube_of(path: Path, shape: dict[str, int], chunks: dict[str, int]) -> None:
    """Noise to two decimals around a wave, in any dims."""
    import xarray as xr

    rng = np.random.default_rng(1)
    cells = 290 + 5 * np.sin(np.arange(shape["lon"]) / 20) + rng.normal(0, 0.5, [*shape.values()])
    cells = cells.round(2).astype("float32")
    cells[rng.random(cells.shape) < 1e-4] = np.nan
    encoding = {"t": {"chunks": tuple(chunks.values())}}
    cube = xr.Dataset({"t": (tuple(shape), cells)})
    cube.to_zarr(path, encoding=encoding, consolidated=False)


def make_cube(path: Path, steps: int) -> None:
    """Waves, a season and noise to two decimals; one box of land, some clouds."""
    import xarray as xr

    rng = np.random.default_rng(0)
    lat, lon = np.meshgrid(np.linspace(-60, 60, 256), np.linspace(0, 360, 256), indexing="ij")
    for start in range(0, steps, CHUNK["time"]):
        time_ = np.arange(start, start + CHUNK["time"])[:, None, None]
        cells = 290 - (lat / 12) ** 2 + np.sin(lon / 20 + time_ / 9) * 5
        cells = (cells + rng.normal(0, 0.5, cells.shape)).round(2).astype("float32")
        cells[:, 100:120, 40:80] = np.nan
        cells[rng.random(cells.shape) < 1e-4] = np.nan
        slab = xr.Dataset({"t": (tuple(CHUNK), cells)}, {"time": time_.ravel()})
        if start == 0:
            encoding = {"t": {"chunks": tuple(CHUNK.values())}}
            slab.to_zarr(path, encoding=encoding, consolidated=False)
        else:
            slab.to_zarr(path, append_dim="time", consolidated=False)


def labelled(path: str) -> Any:
    """The cube with blocks of its chunks dealt out."""
    import xarray as xr

    from ml4cube.splits import assign_block_split

    cube = xr.open_zarr(path, consolidated=False)
    chunks = {dim: sizes[0] for dim, sizes in cube["t"].chunksizes.items()}
    return assign_block_split(cube, chunks, split=0.8, seed=0)


def ours(path: str, out: Path, kind: str, nproc: int) -> dict[str, Any]:
    """MultiProcSampler as a user calls it."""
    from ml4cube.datasets.multiproc_sampler import MultiProcSampler

    done = MultiProcSampler(
        labelled(path),
        sample_size=WINDOWS[kind] or None,
        overlap=OVERLAP.get(kind),
        train_cube=out / "train.zarr",
        test_cube=out / "test.zarr",
        nproc=nproc,
        progress=False,
    ).run()
    assert done is not None
    return {"samples": sum(done.plan.samples.values())}


def floor(path: str, out: Path, kind: str, nproc: int) -> dict[str, Any]:
    """Decode, encode, write: each byte once, in this process."""
    import zarr

    from ml4cube.store.shard_encoding import Compressor

    array = zarr.open_array(f"{path}/t", mode="r")
    codec = Compressor()
    out.mkdir(parents=True)
    for start in range(0, array.shape[0], CHUNK["time"]):
        for y in range(0, array.shape[1], CHUNK["lat"]):
            for x in range(0, array.shape[2], CHUNK["lon"]):
                box = (slice(start, start + 32), slice(y, y + 64), slice(x, x + 64))
                cells = np.asarray(array[box])
                (out / f"{start}-{y}-{x}").write_bytes(codec.compress(cells, 4))
    return {"samples": 0}


def to_parent(path: str, out: Path, kind: str, nproc: int) -> dict[str, Any]:
    """Workers cut, the parent writes: the usual way."""
    import zarr
    from loky import get_reusable_executor

    size = {"time": 1, "lat": 1, "lon": 1} | WINDOWS[kind]
    array = zarr.open_array(f"{path}/t", mode="r")
    boxes = [
        (s, y, x)
        for s in range(0, array.shape[0], CHUNK["time"])
        for y in range(0, array.shape[1], CHUNK["lat"])
        for x in range(0, array.shape[2], CHUNK["lon"])
    ]

    def cut(box: tuple[int, int, int]) -> np.ndarray:
        import zarr

        s, y, x = box
        cells = zarr.open_array(f"{path}/t", mode="r")[s : s + 32, y : y + 64, x : x + 64]
        t, h, w = size.values()
        made = cells.reshape(32 // t, t, 64 // h, h, 64 // w, w).transpose(0, 2, 4, 1, 3, 5)
        made = made.reshape(-1, t, h, w)
        return (made[np.isfinite(made).all((1, 2, 3))] - 290.0) / 5.0

    stored = None
    for made in get_reusable_executor(nproc).map(cut, boxes):
        if stored is None:
            stored = zarr.create_array(
                out,
                shape=(0, *made.shape[1:]),
                chunks=(max(1, 2**19 // made[0].nbytes), *made.shape[1:]),
                dtype="float32",
            )
        stored.append(made)
    assert stored is not None
    return {"samples": stored.shape[0]}


def xbatcher(path: str, out: Path, kind: str, nproc: int) -> dict[str, Any]:
    """BatchGenerator over the cube in memory, samples appended chunk by chunk."""
    import xarray as xr
    from xbatcher import BatchGenerator

    size = {"time": 1, "lat": 1, "lon": 1} | WINDOWS[kind]
    cube = xr.open_zarr(path, consolidated=False).isel(time=slice(0, 32)).load()
    batches = BatchGenerator(cube, input_dims=size, preload_batch=False)
    made, first, samples = [], True, 0
    for number, patch in enumerate(batches, start=1):
        values = patch["t"].values
        if np.isfinite(values).all():
            made.append((values - 290.0) / 5.0)
        if len(made) == 1024 or number == len(batches):
            samples += len(made)
            stack = xr.Dataset({"t": (("samples", *size), np.stack(made))})
            stack.to_zarr(out, **({} if first else {"append_dim": "samples"}))
            made, first = [], False
    return {"samples": samples}


def ancestor(path: str, out: Path, kind: str, nproc: int) -> dict[str, Any]:
    """ml4xcube 1.1.0 with its defaults."""
    import io

    import xarray as xr
    from ml4xcube.datasets.multiproc_sampler import MultiProcSampler

    cube = xr.open_zarr(path, consolidated=False)
    blocks = list(CHUNK.items())
    size = WINDOWS[kind]
    out.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()):
        # without a label, since it crashes on a block whose samples all go to the other part
        sampler = MultiProcSampler(
            ds=cube,
            nproc=nproc,
            train_cube=str(out / "train.zarr"),
            test_cube=str(out / "test.zarr"),
            block_size=blocks,
            sample_size=list(size.items()) or None,
            chunk_size=(1024, 16, 16) if size else (65_536,),
            array_dims=("samples", "lat", "lon") if size else ("samples",),
            scale_fn="standardize",
        )
        train, test = sampler.get_datasets()
    return {"samples": train.sizes["samples"] + test.sizes["samples"]}


CONTENDERS = {f.__name__: f for f in (ours, floor, to_parent, xbatcher, ancestor)}


class WorkerMemory(threading.Thread):
    """Watches the highest memory of any child; `getrusage` would count the parent's, too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mb = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Look ten times a second."""
        tasks, me = Path(f"/proc/{os.getpid()}/task"), Path("/proc/self/cmdline").read_bytes()
        while not self.ended.wait(0.1):
            for listed in tasks.glob("*/children"):
                children: list[str] = []
                with contextlib.suppress(OSError):  # the thread, or the child, has ended meanwhile
                    children = listed.read_text().split()
                for child in children:
                    with contextlib.suppress(OSError):
                        if Path(f"/proc/{child}/cmdline").read_bytes() == me:
                            continue  # between fork and exec, it still is this process
                        status = Path(f"/proc/{child}/status").read_text()
                        peak = [line for line in status.splitlines() if line.startswith("VmHWM")]
                        self.mb = max([self.mb, *(int(line.split()[1]) / 1024 for line in peak)])


IMPORTS = {
    "ours": ("dask.array", "zarr", "ml4cube.splits", "ml4cube.datasets.multiproc_sampler"),
    "floor": ("zarr", "ml4cube.store.shard_encoding"),
    "to_parent": ("zarr", "loky"),
    "xbatcher": ("dask.array", "zarr", "xbatcher"),
    "ancestor": ("dask.array", "zarr", "ml4xcube.datasets.multiproc_sampler"),
}


def run_one(name: str, path: str, out: Path, kind: str, nproc: int) -> None:
    """Run one contender in this process and print what it took."""
    for module in IMPORTS[name]:
        importlib.import_module(module)
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    memory = WorkerMemory()
    memory.start()
    started = time.perf_counter()
    found = CONTENDERS[name](path, out, kind, nproc)
    wall = time.perf_counter() - started
    if name == "to_parent":
        from loky import get_reusable_executor

        get_reusable_executor(nproc).shutdown(wait=True)
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(
        a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime
        for a, b in zip(after, before, strict=True)
    )
    memory.ended.set()
    rss = {"parent": after[0].ru_maxrss / 1024, "worker": memory.mb}
    print(json.dumps({**found, "wall_s": wall, "cpu_s": cpu, "rss_mb": rss}))


def measure(name: str, cube: Path, folder: Path, kind: str, nproc: int) -> dict[str, Any]:
    """Start a contender in a fresh interpreter."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "out"
    python = ANCESTOR if name in ("ancestor", "xbatcher") else sys.executable
    command = [python, "-P", __file__, "--run", name, str(cube), str(out), kind, str(nproc)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{name} {kind} failed:\n{ran.stderr[-2000:]}")
    # emptied, not removed: for minutes ext4 looks in vain at inodes that were just freed, and
    # whoever makes files next would pay for it
    for file in (path for path in out.rglob("*") if path.is_file()):
        os.truncate(file, 0)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of wall, CPU and memory."""
    return {
        "samples": runs[0]["samples"],
        "wall_s": statistics.median(r["wall_s"] for r in runs),
        "cpu_s": statistics.median(r["cpu_s"] for r in runs),
        "parent_mb": statistics.median(r["rss_mb"]["parent"] for r in runs),
        "worker_mb": statistics.median(r["rss_mb"]["worker"] for r in runs),
    }


def rate(row: dict[str, Any]) -> float:
    """Seconds of wall per sample."""
    return float(row["wall_s"] / row["samples"])


def planned(workers: int) -> list[tuple[str, str, int, str]]:
    """Contender, windows, processes and cube of every run of a turn."""
    ours_on = [("patches", 1, "large"), ("patches", workers, "large"), ("points", 1, "small")]
    ours_on += [("patches", 1, cube) for cube in ("small", "middle")]
    ours_on += [("patches", workers, cube) for cube in ("small", "middle")]
    ours_on += [("cuboids", n, "large") for n in (1, workers)]
    ours_on += [("points", workers, cube) for cube in ("small", "large")]
    ours_on += [(kind, workers, "small") for kind in OVERLAP]
    ours_on += [("patches-nd", workers, cube) for cube in SHAPES]
    jobs = [("floor", "patches", 1, "large"), *(("ours", *job) for job in ours_on)]
    jobs += [("to_parent", "patches", workers, "large"), ("xbatcher", "patches", 1, "large")]
    return [
        *jobs,
        ("ancestor", "patches", workers, "large"),
        ("ancestor", "points", workers, "large"),
    ]


def bars(
    rows: dict[str, dict[str, Any]], workers: int, cores: int, mb: list[float]
) -> dict[str, Any]:
    """What the issue of a fast sampler asks for, and what stands behind it."""
    alone, together = rows["ours patches x1 large"], rows[f"ours patches x{workers} large"]
    cpu = [rows[f"ours patches x1 {cube}"]["cpu_s"] for cube in ("small", "middle", "large")]
    sized = [rows[f"ours patches x{workers} {cube}"] for cube in ("small", "middle", "large")]
    speedup = alone["wall_s"] / together["wall_s"]
    return {
        "cpu_over_floor": alone["cpu_s"] / rows["floor patches x1 large"]["cpu_s"],
        "ancestor_over_ours_points": rows[f"ancestor points x{workers} large"]["wall_s"]
        / rows[f"ours points x{workers} large"]["wall_s"],
        "ancestor_over_ours_patches": rows[f"ancestor patches x{workers} large"]["wall_s"]
        / together["wall_s"],
        "speedup_4_procs": speedup if cores >= 4 else None,
        **({} if cores >= 4 else {"speedup_4_procs_reason": f"this machine has {cores} cores"}),
        "speedup_all_cores": speedup,
        "speedup_all_cores_processes": workers,
        "rss_mb_per_worker": max(r["worker_mb"] for label, r in rows.items() if "ours" in label),
        "rss_mb_over_sizes": [row["worker_mb"] for row in sized],
        "to_parent_over_ours": rows[f"to_parent patches x{workers} large"]["wall_s"]
        / together["wall_s"],
        "xbatcher_over_ours": rate(rows["xbatcher patches x1 large"]) / rate(alone),
        # seconds for each further megabyte: equal where cost is linear
        "cpu_s_per_mb": [(cpu[i + 1] - cpu[i]) / (mb[i + 1] - mb[i]) for i in range(len(cpu) - 1)],
        "cpu_s_over_sizes": cpu,
    }


def main() -> None:
    """Measure all, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.run:
        name, cube, out, kind, nproc = args.run
        run_one(name, cube, Path(out), kind, int(nproc))
        return
    # as pip does for what it installs, also the others: workers would compile us anew each time
    compileall.compile_dir(Path(__file__).parents[1] / "ml4cube", quiet=1)
    repeats = 1 if args.quick else args.repeats
    steps = [64, 128, 256] if args.quick else [704, 1408, 2816]
    cores = os.cpu_count() or 1
    workers = max(2, min(4, cores))
    taken: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cubes = {name: folder / f"{name}.zarr" for name in ("small", "middle", "large")}
        for n, path in zip(steps, cubes.values(), strict=True):
            make_cube(path, n)
        for name, (shape, chunks) in SHAPES.items():
            cubes[name] = folder / f"{name}.zarr"
            make_cube_of(cubes[name], shape, chunks)
        jobs = planned(workers)
        for turn in range(repeats):
            for name, kind, nproc, cube in jobs:
                label = f"{name} {kind} x{nproc} {cube}"
                taken.setdefault(label, []).append(measure(name, cubes[cube], folder, kind, nproc))
            print(f"turn {turn + 1} of {repeats} done", file=sys.stderr)
    rows = {label: middle(runs) for label, runs in taken.items()}
    for label, row in rows.items():
        print(
            f"{label:32} {row['samples']:>11,} samples {row['wall_s']:>8.2f} s wall "
            f"{row['cpu_s']:>8.2f} s cpu {row['worker_mb']:>6.0f} MB a worker"
        )
    mb = [n * 256 * 256 * 4 / 1e6 for n in steps]
    results = {
        **bars(rows, workers, cores, mb),
        "machine": {"cores": cores, "python": platform.python_version()},
        "cube_mb": mb,
        "repeats": repeats,
        "rows": rows,
    }
    for key in list(results)[:-4]:
        print(f"{key:28} {results[key]}")
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
