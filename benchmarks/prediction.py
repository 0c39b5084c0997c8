"""The cost of predict_cube: against the floor, a loop written by hand, torchgeo's and xbatcher's.

Writes `benchmarks/results/prediction.json`. All contenders predict one target from three float32
variables (zarr v3 in chunks of 1 MB), scaled, with windows of 64 × 64 cells of one time step, and
write a zarr store. Each run has a process of its own, which predicts a small cube before the clock
starts. What counts is CPU time, user and system, of all threads. All contenders run in turns, and
a ratio is the median of the ratios of the turns; ``spread`` has the lowest and the highest. All
contenders must give the same cube.

The floor has three parts: to decode every chunk of the source once with our reader; to run the
model once on every window, in contiguous batches that are ready in memory; and to encode every
chunk of the result once with the codec of our store, and write it. It scales, cuts, blends and
checks nothing. Only the floor runs with glibc set to keep what is freed: otherwise the model's own
arrays cost it more in page faults than in arithmetic. `cpu_over_floor` is our CPU time over the sum
of the three. With an overlap of one half, the floor of `cpu_over_floor_overlap` has the second part
times the windows that we compute over those without overlap, and the other parts once. Windows at
the borders of blocks are computed twice, so there are `windows_over_cover` times as many as cover
the cube. The model has two convolutions of 3 × 3 with 16 channels between; ``*_tiny`` are the same
for a 1 × 1 convolution, the worst case.

The others, whose CPU time is given over ours, hold 16 time steps in memory at a time, which is one
chunk, and blend by hand:

- *hand_written*: xarray and torch, 16 windows at a time, one array operation for each;
- *torchgeo*: a Dataset of chips and a sampler of a grid of boxes, as of GridGeoSampler (it reads
  no zarr), behind torch's DataLoader; every chip is stitched in;
- *xbatcher*: BatchGenerator with the windows' overlap, all steps of a window in a batch.

`rss_mb_10gb` is the highest resident memory of a process that predicts a cube of 10 GB to a zarr
store, with an overlap of one half. The cube has one chunk, linked many times.

``python -P benchmarks/prediction.py --quick`` runs all once on small cubes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
import zarr
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from ml4cube.core.grid import Grid
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction import predict_cube

RESULTS = Path(__file__).parent / "results" / "prediction.json"
NAMES = ("a", "b", "c")
STATISTICS = {"a": [280.0, 10.0], "b": [5.0, 2.0], "c": [0.0, 1.0], "y": [280.0, 10.0]}
WINDOW = 64
CHUNK = {"time": 16, "lat": 128, "lon": 128}
WARM = {"time": 16, "lat": 128, "lon": 128}
CUBE = {"time": 64, "lat": 512, "lon": 1024}  # 403 MB
QUICK = {"time": 16, "lat": 256, "lon": 256}
LARGE = {"time": 816, "lat": 1024, "lon": 1024}  # 10.3 GB
BATCH = 2**17 // (WINDOW * WINDOW * len(NAMES))  # as predict_cube chooses it

# glibc keeps up to half a gigabyte of what is freed, instead of asking for new pages again
KEEP_FREED = {
    f"MALLOC_{name}_": str(2**29) for name in ("TOP_PAD", "TRIM_THRESHOLD", "MMAP_THRESHOLD")
}

Array = NDArray[Any]


def make_cube(path: Path, shape: dict[str, int]) -> None:
    """Write waves and noise to two decimals, as of measurements."""
    rng = np.random.default_rng(0)
    lat, lon = (np.arange(shape[dim]) for dim in ("lat", "lon"))
    wave = np.sin(lat[:, None] / 30) + np.cos(lon / 50)
    coords = {dim: np.arange(n) for dim, n in shape.items()}
    cube = xr.Dataset(coords=coords)
    for name in NAMES:
        offset, scale = STATISTICS[name]
        cells = offset + scale * (wave + rng.normal(0, 0.3, tuple(shape.values())))
        cube[name] = tuple(shape), cells.round(2).astype("float32")
    encoding = {name: {"chunks": tuple(CHUNK.values())} for name in NAMES}
    cube.to_zarr(path, encoding=encoding, consolidated=False)


def make_large_cube(path: Path, shape: dict[str, int]) -> None:
    """Write a cube whose chunks are all links to one, which repeats a pattern."""
    pattern = np.random.default_rng(0).normal(280, 10, (1, 1, CHUNK["lon"])).astype("float32")
    one = np.broadcast_to(pattern, tuple(CHUNK.values()))
    group = zarr.create_group(path)
    grid = Grid.blocks(shape, CHUNK)
    for name in NAMES:
        array = group.create_array(
            name,
            shape=tuple(shape.values()),
            chunks=tuple(CHUNK.values()),
            dtype="float32",
            dimension_names=list(shape),
        )
        array[tuple(slice(n) for n in CHUNK.values())] = one
        first = path / name / "c" / "0" / "0" / "0"
        for block in list(grid)[1:]:
            chunk = path.joinpath(name, "c", *(str(i) for i in block.index))
            chunk.parent.mkdir(parents=True, exist_ok=True)
            os.link(first, chunk)


def make_model(kind: str) -> torch.nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    if kind == "tiny":
        return torch.nn.Conv2d(3, 1, 1)
    first = torch.nn.Conv2d(3, 16, 3, padding=1)
    return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Conv2d(16, 1, 3, padding=1))


def ours(path: Path, out: Path, kind: str, overlap: float) -> dict[str, float]:
    """Call predict_cube as a user does; count the windows that the model is given."""
    model, windows = make_model(kind), []
    model.register_forward_hook(lambda _, args, __: windows.append(len(args[0])))
    predict_cube(
        model,
        xr.open_zarr(path, consolidated=False),
        STATISTICS,
        features=NAMES,
        targets="y",
        sample_size={"lat": WINDOW, "lon": WINDOW},
        overlap={"lat": overlap, "lon": overlap},
        out=out,
        progress=False,
    )
    return {"windows": sum(windows)}


def floor(path: Path, out: Path, kind: str, overlap: float) -> dict[str, float]:
    """Decode, run the models and encode, each once; `overlap` is not used."""
    cube = xr.open_zarr(path, consolidated=False)
    target = zarr.open_array(path.with_name(path.stem + "-predicted.zarr") / "y", mode="r")
    predicted = np.asarray(target[:])
    compressor = Zstd(**target.compressors[0].to_dict()["configuration"])
    written = Grid.blocks(dict(cube.sizes), dict(zip(CHUNK, target.chunks, strict=True)))
    boxes = [tuple(block.slices.values()) for block in written]
    models = {kind: make_model(kind) for kind in ("conv", "tiny")}
    # more than caches hold, as the windows of a cube are
    batches = torch.randn(64, BATCH, len(NAMES), WINDOW, WINDOW)
    n_batches, n_left = divmod(predicted.size // WINDOW**2, BATCH)
    out.mkdir()

    seconds = {}
    began = time.process_time()
    reader = CubeReader.of(cube, NAMES, tuple(CHUNK))
    for block in Grid.blocks(dict(cube.sizes), CHUNK):
        reader.read(block.slices)
    seconds["decode"] = time.process_time() - began
    for name, model in models.items():
        began = time.process_time()
        with torch.no_grad():
            for number in range(n_batches):
                model(batches[number % len(batches)])
            model(batches[0, :n_left])
        seconds[f"forward_{name}"] = time.process_time() - began
    began = time.process_time()
    for number, box in enumerate(boxes):
        encoded = compressor.encode(np.ascontiguousarray(predicted[box]))
        (out / str(number)).write_bytes(encoded)
    seconds["encode"] = time.process_time() - began
    return seconds


def taper(overlap: float) -> Array:
    """Return the weights of a window's cells: a squared sine at both ends."""
    cells = np.arange(WINDOW)
    from_end = np.minimum(cells, cells[::-1]) + 0.5
    along = np.sin(np.minimum(from_end / max(overlap * WINDOW, 0.5), 1) * np.pi / 2) ** 2
    return (along[:, None] * along).astype("float32")


def stacked(cube: xr.Dataset, steps: slice) -> xr.DataArray:
    """Read and scale some time steps, shape (variables, time, lat, lon)."""
    scaled = [(cube[n] - STATISTICS[n][0]) / STATISTICS[n][1] for n in NAMES]
    part = [one.isel(time=steps).astype("float32") for one in scaled]
    return xr.concat(part, dim="variable").transpose("variable", "time", "lat", "lon").load()


def blended(
    path: Path,
    out: Path,
    overlap: float,
    windows: Callable[[xr.DataArray], Iterator[tuple[tuple[Any, ...], Array]]],
) -> dict[str, float]:
    """Blend what `windows` yields (box, predicted cells) and write it, some steps at a time."""
    cube = xr.open_zarr(path, consolidated=False)
    weights = taper(overlap)
    shape = tuple(cube.sizes[dim] for dim in CHUNK)
    chunks = tuple(CHUNK.values())
    array = zarr.create_array(out / "y", shape=shape, chunks=chunks, dtype="float32")
    for start in range(0, shape[0], CHUNK["time"]):
        steps = slice(start, start + CHUNK["time"])
        x = stacked(cube, steps)
        total, weight = np.zeros(x.shape[1:], "float32"), np.zeros(x.shape[1:], "float32")
        for box, y in windows(x):
            total[box] += y * weights
            weight[box] += weights
        offset, scale = STATISTICS["y"]
        array[steps] = total / weight * scale + offset
    return {}


def corners(x: xr.DataArray, overlap: float) -> Iterator[tuple[slice, slice]]:
    """Yield the windows of a map."""
    stride = WINDOW - round(overlap * WINDOW)
    for y in range(0, x.sizes["lat"] - WINDOW + 1, stride):
        for left in range(0, x.sizes["lon"] - WINDOW + 1, stride):
            yield slice(y, y + WINDOW), slice(left, left + WINDOW)


def hand_written(path: Path, out: Path, kind: str, overlap: float) -> dict[str, float]:
    """Take windows out of an array, all steps of each at once."""
    model = make_model(kind)

    def windows(x: xr.DataArray) -> Iterator[tuple[tuple[Any, ...], Array]]:
        cells = x.values
        for box in corners(x, overlap):
            batch = np.ascontiguousarray(cells[(..., *box)].swapaxes(0, 1))
            with torch.no_grad():
                y = model(torch.from_numpy(batch))
            yield (slice(None), *box), y[:, 0].numpy()

    return blended(path, out, overlap, windows)


class Chips(torch.utils.data.Dataset[dict[str, Any]]):
    """Chips of scaled maps in memory, by their box."""

    def __init__(self, x: xr.DataArray) -> None:
        self.x = x.values

    def __getitem__(self, box: tuple[int, slice, slice]) -> dict[str, Any]:
        """Return the chip and, so that it can be stitched, its box."""
        return {"image": torch.from_numpy(self.x[(slice(None), *box)].copy()), "bounds": box}


def torchgeo(path: Path, out: Path, kind: str, overlap: float) -> dict[str, float]:
    """Load chips of a grid with a DataLoader, and stitch them."""
    model = make_model(kind)

    def collate(chips: list[dict[str, Any]]) -> tuple[torch.Tensor, list[Any]]:
        return torch.stack([chip["image"] for chip in chips]), [chip["bounds"] for chip in chips]

    def windows(x: xr.DataArray) -> Iterator[tuple[tuple[Any, ...], Array]]:
        boxes = [(t, *box) for t in range(x.sizes["time"]) for box in corners(x, overlap)]
        chips = torch.utils.data.DataLoader(
            Chips(x), batch_size=BATCH, sampler=boxes, collate_fn=collate
        )
        for images, bounds in chips:
            with torch.no_grad():
                y = model(images)
            yield from zip(bounds, y[:, 0].numpy(), strict=True)

    return blended(path, out, overlap, windows)


def xbatcher(path: Path, out: Path, kind: str, overlap: float) -> dict[str, float]:
    """Generate batches of all steps of a patch; where a patch belongs is in its coordinates."""
    from xbatcher import BatchGenerator

    model = make_model(kind)
    shared = round(overlap * WINDOW)

    def windows(x: xr.DataArray) -> Iterator[tuple[tuple[Any, ...], Array]]:
        patches = BatchGenerator(
            x,
            input_dims={**x.sizes, "lat": WINDOW, "lon": WINDOW},
            input_overlap={"lat": shared, "lon": shared} if shared else {},
            preload_batch=False,
        )
        for patch in patches:
            batch = patch.transpose("time", "variable", "lat", "lon").values
            with torch.no_grad():
                y = model(torch.from_numpy(np.ascontiguousarray(batch)))
            first = (int(patch[dim][0]) for dim in ("lat", "lon"))
            yield (slice(None), *(slice(a, a + WINDOW) for a in first)), y[:, 0].numpy()

    return blended(path, out, overlap, windows)


PEERS = (hand_written, torchgeo, *((xbatcher,) if importlib.util.find_spec("xbatcher") else ()))
CONTENDERS = {run.__name__: run for run in (floor, ours, *PEERS)}


def run_one(name: str, path: Path, out: Path, kind: str, overlap: float) -> None:
    """Run one contender in this process and print what it took."""
    torch.set_num_threads(1)
    run = CONTENDERS[name]
    run(path.with_name("warm.zarr"), out.with_name(f"warm-{out.name}"), kind, overlap)
    began = time.process_time()
    parts = run(path, out, kind, overlap)
    cpu = time.process_time() - began
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"cpu_s": cpu, "rss_mb": peak / 1024, **parts}))


def measure(name: str, path: Path, kind: str, overlap: float) -> dict[str, float]:
    """Run a contender in a process of its own; check its cube, keep the first one."""
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    out = folder / "predicted.zarr"
    command = [sys.executable, "-P", __file__, "--run", name, str(path), str(out), kind]
    environment = {**os.environ, **(KEEP_FREED if name == "floor" else {})}
    ran = subprocess.run([*command, str(overlap)], capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(f"{name} failed:\n{ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    if name != "floor" and path.stem != "large":
        right = path.with_name(f"{path.stem}-{kind}-{overlap}.npy")
        values = np.asarray(zarr.open_array(out / "y", mode="r")[:])
        if right.exists():
            np.testing.assert_allclose(values, np.load(right), rtol=1e-5, atol=1e-3)
        else:
            np.save(right, values)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        os.truncate(file, 0)  # not removed: see sampling.py
    return found


def n_windows(shape: dict[str, int], overlap: float) -> int:
    """Return how many windows cover a cube."""
    stride = WINDOW - round(overlap * WINDOW)
    per_map = ((shape[dim] - WINDOW) // stride + 1 for dim in ("lat", "lon"))
    return shape["time"] * int(np.prod(list(per_map)))


def ratios(turn: dict[str, dict[str, float]], shape: dict[str, int]) -> dict[str, float]:
    """Return the ratios of one turn."""
    parts, found = turn["floor"], {}
    for kind, suffix in (("conv", ""), ("tiny", "_tiny")):
        for overlap, name in ((0.0, "cpu_over_floor"), (0.5, "cpu_over_floor_overlap")):
            ours = turn[f"ours {kind} {overlap}"]
            times = ours["windows"] / n_windows(shape, 0.0)
            least = parts["decode"] + parts[f"forward_{kind}"] * times + parts["encode"]
            found[name + suffix] = ours["cpu_s"] / least
    for peer in PEERS:
        for overlap, suffix in ((0.0, ""), (0.5, "_overlap")):
            cpu = turn[f"{peer.__name__} conv {overlap}"]["cpu_s"]
            ratio = cpu / turn[f"ours conv {overlap}"]["cpu_s"]
            found[f"{peer.__name__}_over_ours{suffix}"] = ratio
    return found


def planned() -> list[tuple[str, str, float]]:
    """Return contender, model and overlap of every run of a turn."""
    jobs = [("floor", "conv", 0.0)]
    jobs += [("ours", kind, overlap) for kind in ("conv", "tiny") for overlap in (0.0, 0.5)]
    return jobs + [(peer.__name__, "conv", overlap) for peer in PEERS for overlap in (0.0, 0.5)]


def take_turns(path: Path, repeats: int) -> list[dict[str, dict[str, float]]]:
    """Run all contenders in turns, in an order that moves on."""
    jobs, turns = planned(), []
    for number in range(repeats):
        turn = {}
        for name, kind, overlap in jobs[number % len(jobs) :] + jobs[: number % len(jobs)]:
            label = name if name == "floor" else f"{name} {kind} {overlap}"
            turn[label] = measure(name, path, kind, overlap)
        turns.append(turn)
        print(f"turn {number + 1} of {repeats} done", file=sys.stderr)
    return turns


def main() -> None:
    """Measure all, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.run:
        name, cube, out, kind, overlap = args.run
        run_one(name, Path(cube), Path(out), kind, float(overlap))
        return
    torch.set_num_threads(1)
    shape = QUICK if args.quick else CUBE
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path, warm, large = (folder / f"{name}.zarr" for name in ("cube", "warm", "large"))
        make_cube(path, shape)
        make_cube(warm, WARM)
        make_large_cube(large, QUICK if args.quick else LARGE)
        for cube in (path, warm):  # the floor encodes it
            ours(cube, cube.with_name(f"{cube.stem}-predicted.zarr"), "conv", 0.0)
        turns = take_turns(path, 1 if args.quick else args.repeats)
        rss_mb = measure("ours", large, "conv", 0.5)
    by_turn = [ratios(turn, shape) for turn in turns]
    spread = {key: [one[key] for one in by_turn] for key in by_turn[0]}
    rows = {label: [turn[label] for turn in turns] for label in turns[0]}
    summary = {
        **{key: round(statistics.median(values), 3) for key, values in spread.items()},
        "rss_mb_10gb": round(rss_mb["rss_mb"]),
    }
    for label, runs in rows.items():
        middle = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
        print(f"{label:24}", "  ".join(f"{part} {value:.2f}" for part, value in middle.items()))
    print(json.dumps(summary, indent=1))
    results = {
        **summary,
        "spread": {key: [round(min(v), 3), round(max(v), 3)] for key, v in spread.items()},
        "cpu_s_10gb": round(rss_mb["cpu_s"]),
        "windows_over_cover": round(rows["ours conv 0.5"][0]["windows"] / n_windows(shape, 0.5), 3),
        "cube": {"shape": shape, "chunks": CHUNK, "window": WINDOW, "features": len(NAMES)},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "zarr", "xarray", "numpy")},
        "rows": rows,
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
