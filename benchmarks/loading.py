"""Our loader against the floor (gathering in memory, decoding alone), torch and other libraries.

Writes `benchmarks/results/loading.json`. The same samples of float32 are made once in a temporary
folder: 200,000 small ones (3, 16, 16), large ones (8, 3, 32, 32), 4 million points, and a cube that
is cut as it is read. All contenders run in turns in one process, `cold` is a first epoch, start-up
included, and the median of the epochs after it counts. Ratios are medians of the ratios of one
turn, so that what else the machine does meets both sides alike.

- *gather*: `index_select` of whole shuffled batches in memory; *decode*: every chunk decoded once;
- *tensordataset*: torch's DataLoader over a TensorDataset in memory;
- *ancestor*: ml4xcube 1.1.0, a store whose chunks are batches, one chunk per item;
- *xbatcher*: contiguous batches of the cube in memory, its fastest setting, not shuffled;
- *litdata*, *mosaicml*, *webdataset*: their own formats without compression, shuffled as their docs
  say, batched before collating, one worker per core.

A library that is not installed is left out and named; ``make bench-loading`` installs them.
``python -P benchmarks/loading.py --scale 0.02 --repeats 1`` tries it out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import torch
import xarray as xr
import zarr
from torch.utils.data import DataLoader, Dataset, TensorDataset
from zarr.codecs import BloscCodec

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.datasets.shards import sharded_arrays

RESULTS = Path(__file__).parent / "results" / "loading.json"
DIMS = ("time", "lat", "lon")
CORES = len(os.sched_getaffinity(0))
PEERS = ("ml4xcube", "xbatcher", "litdata", "mosaicml-streaming", "webdataset", "torch", "zarr")
DELAY_S = 0.05

Epoch = Callable[[], int]


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
        scale_fn=None,
        **options,
    ).run()
    return folder / f"{name}.zarr"


def run_through(batches: Iterable[Any]) -> int:
    """Take every batch, and count samples."""
    count = 0
    for batch in batches:
        while not isinstance(batch, torch.Tensor):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        count += len(batch)
    return count


def gather(data: torch.Tensor, size: int) -> Epoch:
    """Whole shuffled batches from memory into one buffer: what no loader can beat."""
    out = torch.empty(size, *data.shape[1:])

    def epoch() -> int:
        order = torch.randperm(len(data))
        for start in range(0, len(data) - size + 1, size):
            torch.index_select(data, 0, order[start : start + size], out=out)
        return len(data) // size * size

    return epoch


def decode(path: Path, variables: list[str], threads: int) -> Epoch:
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


def is_here(name: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(name) is not None


def versions() -> dict[str, str | None]:
    """Versions of what is compared; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


class AncestorBatches(Dataset[torch.Tensor]):
    """The ancestor's data set, whose items are chunks; variables stacked as channels."""

    def __init__(self, chunks: Any) -> None:
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        held = {name: v for name, v in self.chunks[index].items() if name not in DIMS}
        return torch.from_numpy(np.stack([np.asarray(v) for v in held.values()], axis=1))


def ancestor(data: torch.Tensor, size: int, folder: Path) -> Epoch:
    """Write the samples in chunks of one batch, and let every item be one."""
    from ml4xcube.datasets.pytorch import PTXrDataset as Ancestor

    path, names = folder / "ancestor.zarr", [f"v{k}" for k in range(data.shape[1])]
    dims = ("samples", *(f"d{k}" for k in range(data.ndim - 2)))
    ds = xr.Dataset({n: (dims, data[:, k].numpy()) for k, n in enumerate(names)})
    chunks = (size, *data.shape[2:])
    ds.to_zarr(path, mode="w", encoding={n: {"chunks": chunks} for n in names}, consolidated=False)
    batches = AncestorBatches(Ancestor(xr.open_zarr(path, consolidated=False)))
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    return lambda: run_through(loader)


def xbatcher(cube: xr.Dataset, window: dict[str, int], size: int) -> Epoch:
    """Contiguous batches: `size` windows one after the other in time, cut as one slice."""
    from xbatcher import BatchGenerator

    steps = window.get("time", 1)
    batch = {**window, "time": min(size * steps, cube.sizes["time"])}

    def epoch() -> int:
        patches = BatchGenerator(cube, batch)
        count = 0
        for patch in patches:
            stacked = np.stack([v.values for v in patch.data_vars.values()], axis=1)
            count += len(torch.from_numpy(stacked)) // steps
        return count

    return epoch


def litdata(data: torch.Tensor, size: int, folder: Path) -> Epoch:
    """Chunks of 64 MB as its docs advise, a shuffled StreamingDataset."""
    import litdata as ld
    from litdata.streaming.cache import Cache

    where = folder / "litdata"
    cache = Cache(str(where), chunk_bytes="64MB")
    for k, sample in enumerate(data):
        cache[k] = {"x": sample.clone()}
    cache.done()
    cache.merge()
    stream = ld.StreamingDataset(str(where), shuffle=True, drop_last=True)
    loader = ld.StreamingDataLoader(stream, batch_size=size, num_workers=CORES)
    return lambda: run_through(loader)


def mosaicml(data: torch.Tensor, size: int, folder: Path) -> Epoch:
    """Uncompressed MDS shards, its default shuffle (py1e)."""
    # images and texts need libraries whose wheels do not fit every build of torch
    for name in ("vision", "text", "multimodal"):
        sys.modules.setdefault(f"streaming.{name}", mock.MagicMock())
    from streaming import MDSWriter, StreamingDataset

    where = folder / "mosaicml"
    kind = "ndarray:float32:" + ",".join(map(str, data.shape[1:]))
    with MDSWriter(out=str(where), columns={"x": kind}, size_limit="64mb") as writer:
        for sample in data.numpy():
            writer.write({"x": sample})
    stream = StreamingDataset(
        local=str(where), shuffle=True, batch_size=size, num_canonical_nodes=1
    )
    loader = DataLoader(stream, batch_size=size, num_workers=CORES, drop_last=True)
    return lambda: run_through(loader)


def webdataset(data: torch.Tensor, size: int, folder: Path) -> Epoch:
    """Tar shards of raw bytes, shuffled by shard and by a buffer of 5000, batched in workers."""
    import webdataset as wds

    where = folder / "webdataset"
    where.mkdir()
    with wds.ShardWriter(str(where / "%06d.tar"), maxsize=64 << 20, verbose=0) as sink:
        for k, sample in enumerate(data.numpy()):
            sink.write({"__key__": f"{k:08d}", "x.bin": sample.tobytes()})
    urls = sorted(map(str, where.glob("*.tar")))
    shape = tuple(data.shape[1:])
    stream = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
    decoded = stream.shuffle(5000).to_tuple("x.bin")

    def collate(rows: Any) -> torch.Tensor:
        values = b"".join(row[0] for row in rows)
        return torch.from_numpy(np.frombuffer(values, np.float32).reshape(-1, *shape).copy())

    batched = decoded.batched(size, collation_fn=collate)
    loader = wds.WebLoader(batched, batch_size=None, num_workers=min(CORES, len(urls)))
    return lambda: run_through(loader)


PEER_LOADERS: dict[str, tuple[str, Callable[[torch.Tensor, int, Path], Epoch]]] = {
    "ancestor": ("ml4xcube", ancestor),
    "litdata": ("litdata", litdata),
    "mosaicml": ("streaming", mosaicml),
    "webdataset": ("webdataset", webdataset),
}


def peers(data: torch.Tensor, size: int, folder: Path) -> dict[str, Epoch]:
    """Every other loader that is installed, over the same samples."""
    found = {}
    for name, (module, make) in PEER_LOADERS.items():
        if is_here(module):
            print(f"writing samples for {name}")
            found[name] = make(data, size, folder)
    return found


def measure(contenders: dict[str, Epoch], repeats: int) -> dict[str, list[float]]:
    """Samples per second of every epoch, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, epoch in contenders.items():
            began = time.perf_counter()
            rates[name].append(epoch() / (time.perf_counter() - began))
        print(f"turn {turn}: " + ", ".join(f"{n} {r[-1]:,.0f}" for n, r in rates.items()))
    return rates


def ratio(rates: dict[str, list[float]], one: str, other: str) -> float | None:
    """Median over the turns of how many times faster one is; the first turn does not count."""
    if one not in rates or other not in rates:
        return None
    pairs = zip(rates[one][1:], rates[other][1:], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def summary(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The first epoch, and the median of the others."""
    return {
        name: {"cold": round(found[0]), "steady": round(statistics.median(found[1:]))}
        for name, found in rates.items()
    }


def patches(
    folder: Path, steps: int, names: list[str], window: dict[str, int], args: Any, chunks: Any
) -> dict[str, Any]:
    """Every loader over the same samples of a cube, for both batch sizes."""
    lat, lon = window["lat"], window["lon"]
    shape = (steps, lat, lon * 100)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate(names)})
    options = {"sample_size": window}
    paths = {k: store_of(cube, folder, k, chunk_size=n, **options) for k, n in chunks.items()}
    best = [*chunks][-1]
    # beside the default compressor, the one that decodes fastest
    fast = {"chunk_size": chunks[best], "compressors": BloscCodec(cname="lz4", shuffle="shuffle")}
    paths[f"{best}_byteshuffle"] = store_of(cube, folder, "byteshuffle", **fast, **options)
    largest = PTXrDataset(paths[best], features=names)
    data = largest.take(range(len(largest)))
    result: dict[str, Any] = {"shape": list(data.shape)}
    for size in (64, 256):
        mine = folder / f"peers-{size}"
        mine.mkdir()
        contenders = {
            "gather": gather(data, size),
            "tensordataset": lambda size=size: run_through(
                DataLoader(TensorDataset(data), size, shuffle=True)
            ),
        }
        reports = {}
        for key, path in paths.items():
            loader = prep_dataloader(
                PTXrDataset(path, features=names), batch_size=size, buffer_mb=args.buffer_mb
            )
            report = loader.shuffle_report()
            reports[key] = {
                "effective_batch_size": round(report.effective_batch_size, 1),
                "least_blocks": report.least_blocks,
                "said": str(report),
            }
            contenders[f"decode_{key}"] = decode(path, names, CORES)
            contenders[f"ml4cube_{key}"] = lambda loader=loader: run_through(loader)
        contenders |= peers(data, size, mine)
        if is_here("xbatcher"):
            contenders["xbatcher"] = xbatcher(cube, window, size)
        rates = measure(contenders, args.repeats)
        others = ("tensordataset", "ancestor", "xbatcher", "litdata", "mosaicml", "webdataset")
        result[f"batch_{size}"] = {
            "samples_per_second": summary(rates),
            "shuffle": reports,
            "of_gather": {k: ratio(rates, f"ml4cube_{k}", "gather") for k in paths},
            "of_raw_decode": {k: ratio(rates, f"ml4cube_{k}", f"decode_{k}") for k in paths},
            **{f"over_{name}": ratio(rates, f"ml4cube_{best}", name) for name in others},
        }
        shutil.rmtree(mine)
    return result


def points(folder: Path, args: Any) -> dict[str, Any]:
    """4 million points of three variables."""
    shape = (max(2, int(100 * args.scale)), 100, 400)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate("rgb")})
    data = PTXrDataset(store_of(cube, folder, "points"), features=list("rgb"))
    whole = data.take(range(len(data)))
    result: dict[str, Any] = {}
    for size in (64, 256):
        loader = prep_dataloader(data, batch_size=size)
        contenders = {"gather": gather(whole, size), "ml4cube": lambda it=loader: run_through(it)}
        rates = measure(contenders, args.repeats)
        result[f"batch_{size}"] = {
            "samples_per_second": summary(rates),
            "of_gather_points": ratio(rates, "ml4cube", "gather"),
        }
    return result


def lazy_cube(folder: Path, args: Any) -> dict[str, Any]:
    """Windows of a chunked cube on disk, cut as they are read."""
    path, window = folder / "cube.zarr", {"lat": 16, "lon": 16}
    chunks = (8, 128, 128)
    shape = (max(16, int(400 * args.scale)), 256, 256)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate("rgb")})
    cube.to_zarr(path, encoding={n: {"chunks": chunks} for n in cube}, consolidated=False)
    lazy = xr.open_zarr(path, consolidated=False)
    group = zarr.open_group(path, mode="r")

    def sequential() -> int:
        """Decode chunk after chunk, and cut."""
        count = 0
        for t in range(0, shape[0], chunks[0]):
            for y in range(0, shape[1], chunks[1]):
                for x in range(0, shape[2], chunks[2]):
                    box = np.s_[t : t + chunks[0], y : y + chunks[1], x : x + chunks[2]]
                    cells = np.stack([group[n][box] for n in "rgb"], axis=1)
                    n, _, h, w = cells.shape
                    cut = cells.reshape(n, 3, h // 16, 16, w // 16, 16).transpose(0, 2, 4, 1, 3, 5)
                    count += len(np.ascontiguousarray(cut.reshape(-1, 3, 16, 16)))
        return count

    def xbatcher_lazy() -> Iterator[torch.Tensor]:
        from xbatcher import BatchGenerator

        few = lazy.isel(time=slice(0, 8))
        for patch in BatchGenerator(few, {"time": 8, **window}):
            yield torch.from_numpy(np.stack([v.values for v in patch.data_vars.values()], axis=1))

    data = PTXrDataset(lazy, features=list("rgb"), sample_size=window, scale_fn=None)
    loader = prep_dataloader(data, batch_size=256, buffer_mb=args.buffer_mb / 2)
    contenders = {"sequential_decode": sequential, "ml4cube": lambda: run_through(loader)}
    if is_here("xbatcher"):
        contenders["xbatcher_lazy"] = lambda: run_through(xbatcher_lazy())
    if is_here("ml4xcube"):
        from ml4xcube.datasets.pytorch import PTXrDataset as Ancestor

        sizes = [("time", 1), *window.items()]
        blocks = list(zip(DIMS, chunks, strict=True))
        old = Ancestor(lazy, sample_size=sizes, block_sizes=blocks, process_chunks=True)
        items = DataLoader(AncestorBatches(old), batch_size=None, shuffle=True)
        contenders["ancestor_lazy"] = lambda: run_through(items)
    rates = measure(contenders, args.repeats)
    return {
        "samples_per_second": summary(rates),
        "shuffle": str(loader.shuffle_report()),
        **{f"over_{n}": ratio(rates, "ml4cube", n) for n in contenders if n != "ml4cube"},
    }


def remote(folder: Path, store: Path, names: list[str], args: Any) -> dict[str, Any]:
    """The same store behind a file system that takes 50 ms for every read, and without delay."""
    memory = fsspec.filesystem("memory")
    memory.put(str(store), "/remote.zarr", recursive=True)
    kind = type(memory)
    plain = kind.cat_file

    def late(self: Any, *given: Any, **options: Any) -> bytes:
        time.sleep(DELAY_S)
        return plain(self, *given, **options)

    data = PTXrDataset("memory://remote.zarr", features=names)
    loaders = [prep_dataloader(data, batch_size=256, buffer_mb=args.buffer_mb) for _ in range(2)]

    def delayed() -> int:
        with mock.patch.object(kind, "cat_file", late):
            return run_through(loaders[1])

    rates = measure({"near": lambda: run_through(loaders[0]), "far": delayed}, args.repeats)
    memory.rm("/remote.zarr", recursive=True)
    found = ratio(rates, "far", "near")
    return {"samples_per_second": summary(rates), "delay_s": DELAY_S, "of_local": found}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 for 200,000 small samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.buffer_mb = 512 * args.scale
    warnings.filterwarnings("ignore", message=".*not part in the Zarr format 3.*")
    torch.set_num_threads(1)  # one thread gathers, as in our loader
    settings = {"batch_sizes": [64, 256], "buffer_mb": args.buffer_mb, "scale": args.scale}
    settings |= {"workers_of_peers": CORES, "repeats": args.repeats}
    results: dict[str, Any] = {
        "machine": {"cpus": CORES, "platform": platform.platform()},
        "versions": {"python": platform.python_version(), **versions()},
        "settings": settings,
        "not_installed": [
            name for name, (module, _) in PEER_LOADERS.items() if not is_here(module)
        ],
    }
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name, "small"), Path(name, "large")
        small.mkdir()
        large.mkdir()
        scaled = [max(1, int(n * args.scale)) for n in (1000, 4000)]
        chunks = dict(zip(("3mb", "12mb"), scaled, strict=True))
        rgb, eight = list("rgb"), [f"v{k}" for k in range(8)]
        window = {"lat": 16, "lon": 16}
        steps = max(4, int(2000 * args.scale))
        results["small"] = patches(small, steps, rgb, window, args, chunks)
        results["remote"] = remote(small, small / "3mb.zarr", rgb, args)
        cuboid = {"time": 3, "lat": 32, "lon": 32}
        steps = max(18, int(180 * args.scale))
        results["large"] = patches(
            large, steps, eight, cuboid, args, {"12mb": max(1, scaled[0] // 8)}
        )
        results["points"] = points(Path(name), args)
        results["lazy_cube"] = lazy_cube(Path(name), args)
    print(json.dumps(results, indent=1))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
