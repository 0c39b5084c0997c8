"""Our loader against the floor (gathering in memory, decoding alone), torch and other libraries.

Writes `benchmarks/results/loading.json` after each of its parts, and prints what the issue asked
for beside what was found. The same samples of float32 are made once in a temporary folder: 200,000
small ones (3, 16, 16), large ones (8, 3, 32, 32), 4 million points, and a cube that is cut as it is
read. All contenders of a part run in turns in one process; ratios are medians of the ratios of one
turn, so that what else the machine does meets both sides alike. The first turn counts as `cold`
only. An epoch that takes longer than ``--seconds`` is cut there, and counts from its first batch
on, so that workers which start anew in each epoch cost a slow library nothing.

- *gather*: `index_select` of whole shuffled batches in memory; *decode*: every chunk decoded once,
  by one thread per core, into buffers that are used again;
- *tensordataset*: torch's DataLoader over a TensorDataset in memory;
- *_anew*: our loader keeps in its buffer what one epoch leaves there; these are measured with a
  buffer emptied before each epoch, so that every chunk is decoded, and so are the lazy cube and
  the remote store;
- the other libraries as `SETTINGS` says, after their own docs. They are compared with our store in
  chunks of 12 MB, all variables together, which also stands for `of_gather_small` and
  `of_raw_decode`.

A library that is not installed is left out and named; ``make bench-loading`` installs them.
``python -P benchmarks/loading.py --scale 0.02 --repeats 1`` tries it out, ``--only small remote``
measures some parts anew and keeps the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import fsspec
import numpy as np
import torch
import xarray as xr
import zarr
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.loading.loaders import SampleLoader
from ml4cube.loading.store_files import sharded_arrays

RESULTS = Path(__file__).parent / "results" / "loading.json"
DIMS = ("time", "lat", "lon")
CORES = len(os.sched_getaffinity(0))
PEERS = ("ml4xcube", "xbatcher", "litdata", "mosaicml-streaming", "webdataset", "torch", "zarr")
BATCHES = (256, 64)
DELAY_S = 0.05
SETTINGS = {
    "ml4cube": "prep_dataloader(PTXrDataset(store, features=...), batch_size=..., buffer_mb=...)",
    "tensordataset": "DataLoader(TensorDataset(samples), shuffle=True), in memory",
    "ancestor": "ml4xcube 1.1.0: a store in chunks of one batch, one chunk per item, shuffled",
    "xbatcher": "contiguous batches of a cube on disk, whose chunks are the batches; not shuffled",
    "xbatcher_in_memory": "the same slices of the cube in memory; not shuffled, nothing decoded",
    "litdata": "chunks of 64 MB, not compressed, StreamingDataset(shuffle=True), a worker per core",
    "mosaicml": "shards of 64 MB, not compressed, shuffle=True (py1e), a worker per core",
    "webdataset": "tar shards of 64 MB, shuffled by shard and by a buffer of 5000, batched in "
    "workers, one per core",
    "ancestor_lazy": "PTXrDataset of ml4xcube 1.1.0 with process_chunks, blocks that are chunks",
    "xbatcher_lazy": "BatchGenerator over the lazy cube, patches along time as long as its chunks",
    "sequential_decode": "zarr-python chunk by chunk in the order of the file, cut; not shuffled",
}


class Bar(NamedTuple):
    """What was asked for, and in which part of the benchmark it is found."""

    part: str
    least: float | None


# Key of the results: where it is measured, and how much was asked for.
BARS = {
    "of_gather_small_3mb": Bar("small", 0.30),
    "of_gather_small_12mb": Bar("small", 0.45),
    "of_raw_decode_small_3mb": Bar("small", 0.45),
    "of_raw_decode_small_12mb": Bar("small", 0.45),
    "over_tensordataset": Bar("small", 2.5),
    "of_gather_small_3mb_anew": Bar("small", 0.30),
    "of_gather_small_12mb_anew": Bar("small", 0.45),
    "of_raw_decode_small_3mb_anew": Bar("small", 0.45),
    "of_raw_decode_small_12mb_anew": Bar("small", 0.45),
    "over_tensordataset_anew": Bar("small", 2.5),
    "over_ancestor": Bar("small", 10),
    "over_xbatcher": Bar("small", 6),
    "over_xbatcher_in_memory": Bar("small", None),
    "over_litdata": Bar("small", 8),
    "over_mosaicml": Bar("small", 3),
    "over_webdataset": Bar("small", 8),
    "effective_batch": Bar("small", 200),
    "least_blocks": Bar("small", 15),
    "remote_of_local": Bar("remote", 0.7),
    "of_gather_large": Bar("large", None),
    "over_litdata_large": Bar("large", 1.5),
    "over_mosaicml_large": Bar("large", None),
    "over_webdataset_large": Bar("large", None),
    "over_ancestor_large": Bar("large", None),
    "of_gather_points": Bar("points", 0.75),
    "over_sequential_decode": Bar("lazy", 2),
    "over_xbatcher_lazy": Bar("lazy", 50),
    "over_ancestor_lazy": Bar("lazy", 4),
}

# Yields how many samples each batch of one epoch has.
Epoch = Callable[[], Iterator[int]]
Found = dict[str, Any]


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


def counted(batches: Iterable[Any]) -> Iterator[int]:
    """Take every batch, and count its samples."""
    for batch in batches:
        while not isinstance(batch, torch.Tensor):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        yield len(batch)


def anew(loader: SampleLoader) -> Iterator[int]:
    """Take every batch of a loader of ours that finds nothing in memory: all chunks are decoded."""
    for ring in loader._idle_rings.values():
        ring.chunk_of_slot.fill(-1)
    return counted(loader)


def gather(data: torch.Tensor, size: int) -> Epoch:
    """Whole shuffled batches from memory into one buffer: what no loader can beat."""
    out = torch.empty(size, *data.shape[1:])

    def epoch() -> Iterator[int]:
        order = torch.randperm(len(data))
        for start in range(0, len(data) - size + 1, size):
            torch.index_select(data, 0, order[start : start + size], out=out)
            yield size

    return epoch


def decode(path: Path, variables: list[str]) -> Epoch:
    """Every chunk decoded once by threads into buffers that are used again; no batches."""
    arrays = sharded_arrays(str(path), {name: name for name in variables})
    first = next(iter(arrays.values()))
    chunks = -(-first.shape[0] // first.chunk_size)
    rooms = [np.empty((first.chunk_size, *first.shape[1:]), first.dtype) for _ in range(CORES)]

    def some(thread: int) -> None:
        for chunk in range(thread, chunks, CORES):
            n = min(first.chunk_size, first.shape[0] - chunk * first.chunk_size)
            for array in arrays.values():
                array.read(chunk, rooms[thread][:n])

    def epoch() -> Iterator[int]:
        with ThreadPoolExecutor(CORES) as pool:
            list(pool.map(some, range(CORES)))
        yield first.shape[0]

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


class Ancestor:
    """ml4xcube over samples in chunks of one batch."""

    module = "ml4xcube"

    def __init__(self, data: torch.Tensor, folder: Path) -> None:
        self.data, self.folder = data, folder

    def epoch(self, size: int) -> Epoch:
        """Write the samples in chunks of one batch, and let every item be one."""
        from ml4xcube.datasets.pytorch import PTXrDataset as Chunks

        names = [f"v{k}" for k in range(self.data.shape[1])]
        path = self.folder / f"ancestor-{size}.zarr"
        dims = ("samples", *(f"d{k}" for k in range(self.data.ndim - 2)))
        ds = xr.Dataset({n: (dims, self.data[:, k].numpy()) for k, n in enumerate(names)})
        chunks = {"chunks": (size, *self.data.shape[2:])}
        ds.to_zarr(path, encoding=dict.fromkeys(names, chunks), consolidated=False)
        batches = AncestorBatches(Chunks(xr.open_zarr(path, consolidated=False)))
        loader = DataLoader(batches, batch_size=None, shuffle=True)
        return lambda: counted(loader)


class Litdata:
    """Chunks of 64 MB as its docs advise, a shuffled StreamingDataset."""

    module = "litdata"

    def __init__(self, data: torch.Tensor, folder: Path) -> None:
        from litdata.streaming.cache import Cache

        self.where = str(folder / "litdata")
        cache = Cache(self.where, chunk_bytes="64MB")
        for k, sample in enumerate(data):
            cache[k] = {"x": sample.clone()}
        cache.done()
        cache.merge()

    def epoch(self, size: int) -> Epoch:
        """One worker per core."""
        import litdata as ld

        stream = ld.StreamingDataset(self.where, shuffle=True, drop_last=True)
        loader = ld.StreamingDataLoader(stream, batch_size=size, num_workers=CORES)
        return lambda: counted(loader)


class Mosaicml:
    """Uncompressed MDS shards, its default shuffle (py1e)."""

    module = "streaming"

    def __init__(self, data: torch.Tensor, folder: Path) -> None:
        # images and texts need libraries whose wheels do not fit every build of torch
        for name in ("vision", "text", "multimodal"):
            sys.modules.setdefault(f"streaming.{name}", mock.MagicMock())
        from streaming import MDSWriter

        self.where = folder / "mosaicml"
        columns = {"x": "ndarray:float32:" + ",".join(map(str, data.shape[1:]))}
        with MDSWriter(out=str(self.where), columns=columns, size_limit="64mb") as writer:
            for sample in data.numpy():
                writer.write({"x": sample})

    def epoch(self, size: int) -> Epoch:
        """One worker per core; two data sets may not share a folder, so each has its own name."""
        from streaming import StreamingDataset

        local = self.where.with_name(f"mosaicml-{size}")
        local.symlink_to(self.where)
        stream = StreamingDataset(
            local=str(local), shuffle=True, batch_size=size, num_canonical_nodes=1
        )
        loader = DataLoader(stream, batch_size=size, num_workers=CORES, drop_last=True)
        return lambda: counted(loader)


class Webdataset:
    """Tar shards of raw bytes."""

    module = "webdataset"

    def __init__(self, data: torch.Tensor, folder: Path) -> None:
        import webdataset as wds

        self.shape, where = tuple(data.shape[1:]), folder / "webdataset"
        where.mkdir()
        with wds.ShardWriter(str(where / "%06d.tar"), maxsize=64 << 20, verbose=0) as sink:
            for k, sample in enumerate(data.numpy()):
                sink.write({"__key__": f"{k:08d}", "x.bin": sample.tobytes()})
        self.urls = sorted(map(str, where.glob("*.tar")))

    def epoch(self, size: int) -> Epoch:
        """Shuffled by shard and by a buffer, batched in workers, one per core."""
        import webdataset as wds

        stream = wds.WebDataset(self.urls, shardshuffle=len(self.urls), empty_check=False)

        def collate(rows: Any) -> torch.Tensor:
            values = b"".join(row[0] for row in rows)
            return torch.from_numpy(
                np.frombuffer(values, np.float32).reshape(-1, *self.shape).copy()
            )

        batched = stream.shuffle(5000).to_tuple("x.bin").batched(size, collation_fn=collate)
        loader = wds.WebLoader(batched, batch_size=None, num_workers=min(CORES, len(self.urls)))
        return lambda: counted(loader)


LIBRARIES = {
    "ancestor": Ancestor,
    "litdata": Litdata,
    "mosaicml": Mosaicml,
    "webdataset": Webdataset,
}


def written(data: torch.Tensor, folder: Path) -> dict[str, Any]:
    """The samples in the format of every other library that is installed."""
    found = {}
    for name, library in LIBRARIES.items():
        if is_here(library.module):
            began = time.perf_counter()
            found[name] = library(data, folder)
            print(f"wrote the samples for {name} in {time.perf_counter() - began:.0f} s")
    return found


def xbatcher(cube: xr.Dataset, window: dict[str, int], size: int, path: Path | None) -> Epoch:
    """Contiguous batches: `size` windows one after the other in time, cut as one slice."""
    from xbatcher import BatchGenerator

    steps = window.get("time", 1)
    batch = {**window, "time": min(size * steps, cube.sizes["time"])}
    if path is not None:
        chunks = {name: {"chunks": tuple(batch[dim] for dim in DIMS)} for name in cube}
        cube.to_zarr(path, encoding=chunks, consolidated=False)
        cube = xr.open_zarr(path, chunks=None, consolidated=False)

    def epoch() -> Iterator[int]:
        for patch in BatchGenerator(cube, batch):
            stacked = np.stack([v.values for v in patch.data_vars.values()], axis=1)
            yield len(torch.from_numpy(stacked)) // steps

    return epoch


class Turn(NamedTuple):
    """One epoch of one contender."""

    rate: float  # samples per second, with the start of the epoch unless it was cut
    cold_rate: float  # with the start of the epoch
    warm_rate: float  # from the first batch on
    first_s: float  # until the first batch


def run_epoch(epoch: Epoch, seconds: float) -> Turn:
    """Run an epoch, or so much of it as `seconds` allow after its first batch."""
    began = time.perf_counter()
    first = now = count = first_count = 0.0
    whole = True
    batches = epoch()
    for samples in batches:
        now = time.perf_counter()
        count += samples
        if not first:
            first, first_count = now, samples
        elif now - first > seconds:
            whole = False
            break
    del batches  # stops the workers, off the clock
    cold = count / (now - began)
    warm = (count - first_count) / (now - first) if now > first else cold
    return Turn(cold if whole else warm, cold, warm, first - began)


def measure(contenders: dict[str, Epoch], args: Any) -> dict[str, list[Turn]]:
    """Every contender in turns; one that is done in a second runs once more before each turn.

    Machines take back memory that lay idle while the others ran: steady is what follows an epoch.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    quick: set[str] = set()
    for number in range(args.repeats + 1):
        for name, epoch in contenders.items():
            if name in quick:
                run_epoch(epoch, args.seconds)
            began = time.perf_counter()
            turns[name].append(run_epoch(epoch, args.seconds))
            if time.perf_counter() - began < 1:
                quick.add(name)
        print(f"  turn {number}: " + ", ".join(f"{n} {t[-1].rate:,.0f}" for n, t in turns.items()))
    return turns


def ratio(turns: dict[str, list[Turn]], one: str, other: str) -> float | None:
    """Median over the turns of how many times faster one is; the first turn does not count."""
    if one not in turns or other not in turns:
        return None
    pairs = zip(turns[one][1:], turns[other][1:], strict=True)
    return round(statistics.median(a.rate / b.rate for a, b in pairs), 3)


def summary(turns: dict[str, list[Turn]]) -> Found:
    """The first epoch with its start-up, and medians of the others."""
    return {
        name: {
            "cold": round(found[0].cold_rate),
            "steady": round(statistics.median(turn.rate for turn in found[1:])),
            "first_batch_s": round(statistics.median(turn.first_s for turn in found[1:]), 3),
        }
        for name, found in turns.items()
    }


def patches(
    folder: Path, steps: int, names: list[str], window: dict[str, int], chunks: Any, args: Any
) -> dict[int, Found]:
    """Every loader over the same samples of a cube, by batch size."""
    shape = (steps, window["lat"], window["lon"] * 100)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate(names)})
    paths = {
        key: store_of(cube, folder, key, chunk_size=n, sample_size=window)
        for key, n in chunks.items()
    }
    best = [*chunks][-1]
    whole = PTXrDataset(paths[best], features=names)
    data = whole.take(range(len(whole)))
    libraries = written(data, folder)
    results: dict[int, Found] = {}
    for size in BATCHES:
        print(f"{len(data)} samples {tuple(data.shape[1:])}, batches of {size}")
        contenders = {
            "gather": gather(data, size),
            "tensordataset": lambda size=size: counted(
                DataLoader(TensorDataset(data), size, shuffle=True)
            ),
        }
        reports = {}
        for key, path in paths.items():
            samples = PTXrDataset(path, features=names)
            loader = prep_dataloader(samples, batch_size=size, buffer_mb=args.buffer_mb)
            reports[key] = loader.shuffle_report()
            contenders[f"decode_{key}"] = decode(path, names)
            contenders[f"ml4cube_{key}"] = lambda loader=loader: counted(loader)
            contenders[f"ml4cube_{key}_anew"] = lambda loader=loader: anew(loader)
        contenders |= {name: library.epoch(size) for name, library in libraries.items()}
        if is_here("xbatcher"):
            contenders["xbatcher"] = xbatcher(cube, window, size, folder / f"batches-{size}.zarr")
            contenders["xbatcher_in_memory"] = xbatcher(cube, window, size, None)
        turns = measure(contenders, args)
        others = ["tensordataset", *LIBRARIES, "xbatcher", "xbatcher_in_memory"]
        ours = [f"{key}{how}" for how in ("", "_anew") for key in paths]
        results[size] = {
            **{f"of_gather_{key}": ratio(turns, f"ml4cube_{key}", "gather") for key in ours},
            **{
                f"of_raw_decode_{key}": ratio(
                    turns, f"ml4cube_{key}", f"decode_{key.removesuffix('_anew')}"
                )
                for key in ours
            },
            **{
                f"over_{name}{how}": ratio(turns, f"ml4cube_{best}{how}", name)
                for how in ("", "_anew")
                for name in others
            },
            "effective_batch": round(min(r.effective_batch_size for r in reports.values()), 1),
            "least_blocks": min(report.least_blocks for report in reports.values()),
            "shuffle": {key: str(report) for key, report in reports.items()},
            "samples_per_second": summary(turns),
        }
    return results


def small(folder: Path, args: Any) -> dict[int, Found]:
    """200,000 samples (3, 16, 16) in chunks of 3 and 12 MB, all variables together."""
    chunks = {f"small_{mb}mb": max(1, int(333 * mb * args.scale)) for mb in (3, 12)}
    steps = max(4, int(2000 * args.scale))
    return patches(folder, steps, list("rgb"), {"lat": 16, "lon": 16}, chunks, args)


def large(folder: Path, args: Any) -> dict[int, Found]:
    """6,000 samples (8, 3, 32, 32) in chunks of 12 MB."""
    window = {"time": 3, "lat": 32, "lon": 32}
    chunks = {"large": max(1, int(125 * args.scale))}
    names = [f"v{k}" for k in range(8)]
    found = patches(folder, max(18, int(180 * args.scale)), names, window, chunks, args)
    return {
        size: {f"{k}_large" if k.startswith("over_") else k: v for k, v in values.items()}
        for size, values in found.items()
    }


def points(folder: Path, args: Any) -> dict[int, Found]:
    """4 million points of three variables."""
    shape = (max(2, int(100 * args.scale)), 100, 400)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate("rgb")})
    data = PTXrDataset(store_of(cube, folder, "points"), features=list("rgb"))
    whole = data.take(range(len(data)))
    results = {}
    for size in BATCHES:
        print(f"{len(whole)} points, batches of {size}")
        loader = prep_dataloader(data, batch_size=size)
        contenders = {"gather": gather(whole, size), "ml4cube": lambda it=loader: counted(it)}
        turns = measure(contenders, args)
        results[size] = {
            "of_gather_points": ratio(turns, "ml4cube", "gather"),
            "samples_per_second": summary(turns),
        }
    return results


def lazy(folder: Path, args: Any) -> dict[int, Found]:
    """Windows of a chunked cube on disk, cut as they are read."""
    path, window = folder / "cube.zarr", {"lat": 16, "lon": 16}
    chunks = (8, 128, 128)
    shape = (max(16, int(400 * args.scale)), 256, 256)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate("rgb")})
    cube.to_zarr(path, encoding={n: {"chunks": chunks} for n in cube}, consolidated=False)
    opened = xr.open_zarr(path, consolidated=False)
    group = zarr.open_group(path, mode="r")

    def sequential() -> Iterator[int]:
        """Decode chunk after chunk, and cut."""
        for t in range(0, shape[0], chunks[0]):
            for y in range(0, shape[1], chunks[1]):
                for x in range(0, shape[2], chunks[2]):
                    box = np.s_[t : t + chunks[0], y : y + chunks[1], x : x + chunks[2]]
                    cells = np.stack([group[n][box] for n in "rgb"], axis=1)
                    n, _, h, w = cells.shape
                    cut = cells.reshape(n, 3, h // 16, 16, w // 16, 16).transpose(0, 2, 4, 1, 3, 5)
                    yield len(np.ascontiguousarray(cut.reshape(-1, 3, 16, 16)))

    def patches_of_xbatcher() -> Iterator[int]:
        from xbatcher import BatchGenerator

        for patch in BatchGenerator(opened, {"time": chunks[0], **window}):
            stacked = np.stack([v.values for v in patch.data_vars.values()], axis=1)
            yield len(torch.from_numpy(stacked))

    data = PTXrDataset(opened, features=list("rgb"), sample_size=window, scale_fn=None)
    size = BATCHES[0]
    loader = prep_dataloader(data, batch_size=size, buffer_mb=args.buffer_mb / 2)
    contenders: dict[str, Epoch] = {
        "sequential_decode": sequential,
        "ml4cube": lambda: anew(loader),
    }
    if is_here("xbatcher"):
        contenders["xbatcher_lazy"] = patches_of_xbatcher
    if is_here("ml4xcube"):
        from ml4xcube.datasets.pytorch import PTXrDataset as Chunks

        sizes, blocks = [("time", 1), *window.items()], list(zip(DIMS, chunks, strict=True))
        old = Chunks(opened, sample_size=sizes, block_sizes=blocks, process_chunks=True)
        items = DataLoader(AncestorBatches(old), batch_size=None, shuffle=True)
        contenders["ancestor_lazy"] = lambda: counted(items)
    print(f"{len(data)} windows of a lazy cube, batches of {size}")
    turns = measure(contenders, args)
    others = ("sequential_decode", "xbatcher_lazy", "ancestor_lazy")
    return {
        size: {
            **{f"over_{name}": ratio(turns, "ml4cube", name) for name in others},
            "shuffle": str(loader.shuffle_report()),
            "samples_per_second": summary(turns),
        }
    }


def remote(folder: Path, args: Any) -> dict[int, Found]:
    """A store behind a file system that takes 50 ms for every read, and without that delay."""
    shape = (max(4, int(2000 * args.scale)), 16, 1600)
    cube = xr.Dataset({n: (DIMS, field(shape, k)) for k, n in enumerate("rgb")})
    window, chunk = {"lat": 16, "lon": 16}, max(1, int(1000 * args.scale))
    store = store_of(cube, folder, "remote", chunk_size=chunk, sample_size=window)
    memory = fsspec.filesystem("memory")
    memory.put(str(store), "/remote.zarr", recursive=True)
    kind = type(memory)
    plain = kind.cat_file

    def late(self: Any, *given: Any, **options: Any) -> bytes:
        time.sleep(DELAY_S)
        return plain(self, *given, **options)

    data = PTXrDataset("memory://remote.zarr", features=list("rgb"))
    size = BATCHES[0]
    options = {"batch_size": size, "buffer_mb": args.buffer_mb / 2}
    near, far = (prep_dataloader(data, **options) for _ in range(2))

    def delayed() -> Iterator[int]:
        with mock.patch.object(kind, "cat_file", late):
            yield from anew(far)

    print(f"{len(data)} samples behind {DELAY_S} s per read, batches of {size}")
    turns = measure({"near": lambda: anew(near), "far": delayed}, args)
    memory.rm("/remote.zarr", recursive=True)
    warm = [b.warm_rate / a.warm_rate for a, b in zip(turns["near"], turns["far"], strict=True)]
    return {
        size: {
            "remote_of_local": round(statistics.median(warm[1:]), 3),
            "remote_of_local_with_start": ratio(turns, "far", "near"),
            "samples_per_second": summary(turns),
        }
    }


PARTS: dict[str, Callable[[Path, Any], dict[int, Found]]] = {
    "small": small,
    "lazy": lazy,
    "remote": remote,
    "points": points,
    "large": large,
}


def table(results: Found) -> str:
    """What was asked for beside what was found."""
    first, second = BATCHES
    lines = [f"{'':32}{'asked':>8}{f'batch {first}':>12}{f'batch {second}':>12}"]
    for key, bar in BARS.items():
        found = results.get(key)
        if found is None:
            continue
        least = "" if bar.least is None else f"{bar.least:g}"
        other = results[f"batch_{second}"].get(key)
        short = bar.least is not None and found < bar.least
        lines.append(
            f"{key:32}{least:>8}{found:>12g}{'' if other is None else f'{other:g}':>12}"
            + ("   less than asked" if short else "")
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 for 200,000 small samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="longest epoch measured")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.buffer_mb = 512 * args.scale
    return args


def main() -> None:
    """Measure part after part; write the results after each, and print them at the end."""
    args = arguments()
    for noise in (".*not part in the Zarr format 3.*", ".*array is not writable.*"):
        warnings.filterwarnings("ignore", message=noise)
    torch.set_num_threads(1)  # one thread gathers, as in our loader
    fixed = {
        "machine": {"cpus": CORES, "platform": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), **versions()},
        "settings": {
            **{"buffer_mb": args.buffer_mb, "scale": args.scale, "repeats": args.repeats},
            **{"longest_epoch_s": args.seconds, "workers_of_peers": CORES, **SETTINGS},
        },
    }
    results: Found = {f"batch_{size}": {} for size in BATCHES} | {"parts": {}}
    if len(args.only) < len(PARTS) and args.out.exists():
        before = json.loads(args.out.read_text())
        if all(before.get(key) == value for key, value in fixed.items()):
            results = {key: before[key] for key in results}
    for part in args.only:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), args)
        for size, values in found.items():
            here = {key for key, bar in BARS.items() if bar.part == part}
            results[f"batch_{size}"] |= {k: v for k, v in values.items() if k in here}
            results["parts"].setdefault(part, {})[f"batch_{size}"] = values
        results["parts"][part]["took_s"] = round(time.perf_counter() - began)
        results["parts"][part]["load_average"] = os.getloadavg()
        tops = results[f"batch_{BATCHES[0]}"]
        ordered = {key: tops[key] for key in BARS if key in tops}
        for key in ("of_gather_small", "of_raw_decode"):
            largest = f"{key.removesuffix('_small')}_small_12mb"  # the store of the other ratios
            if largest in tops:
                ordered[key] = tops[largest]
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps({**ordered, **fixed, **results}, indent=1) + "\n")
        print(f"{part}: {results['parts'][part]['took_s']} s, written to {args.out}\n")
    print(json.dumps(fixed["settings"], indent=1))
    print(table(json.loads(args.out.read_text())))
    missing = [name for name, library in LIBRARIES.items() if not is_here(library.module)]
    if missing:
        print("not installed, so not compared with: " + ", ".join(missing))


if __name__ == "__main__":
    main()
