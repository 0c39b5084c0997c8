"""Sample stores whose every sample is known: sample k of variable v holds k + a, k + b ..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.statistics import Statistics
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.ledger.folders import Files
from ml4cube.ledger.local import LocalFolder
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.store.format import ArrayLayout, StoreLayout, write_metadata, write_shard
from ml4cube.store.metadata import StoreMetadata
from ml4cube.store.shard_encoding import Compressor

WINDOW = {"lat": 2, "lon": 3}


def paths(place: Path | str, val: bool = False) -> dict[str, str]:
    """Arguments of the sampler: where the store of each part goes."""
    parts = ("train", "test", "val") if val else ("train", "test")
    return {f"{part}_cube": f"{place}/{part}.zarr" for part in parts}


def sampled(cube: xr.Dataset, folder: Path, **options: Any) -> Path:
    """Sample a cube into one train store, without a split."""
    MultiProcSampler(cube, data_split=1.0, nproc=1, **paths(folder), **options).run()
    return folder / "train.zarr"


def numbered(n: int, offset: int = 0, window: tuple[int, ...] = (2, 3)) -> np.ndarray:
    """Samples whose first cell is their number (plus offset), the next ones 0.125 apart."""
    cells = np.arange(np.prod(window, dtype=int)).reshape(window) / 8
    return (np.arange(n).reshape(-1, *(1 for _ in window)) + offset + cells).astype("f4")


def numbers(batch: Any) -> list[int]:
    """Which numbered samples a batch holds, of its first array."""
    if isinstance(batch, dict):
        batch = batch["a"]
    x = batch[0] if isinstance(batch, list | tuple) else batch
    return x.reshape(len(x), -1)[:, 0].long().tolist()


def write_store(
    root: Path,
    n: int,
    names: tuple[str, ...] = ("a",),
    *,
    shard: int = 40,
    chunk: int = 10,
    window: dict[str, int] | None = None,
    targets: tuple[str, ...] = (),
) -> Path:
    """Write a store of numbered samples: variable k holds the numbers plus 1000 k."""
    window = WINDOW if window is None else window
    sizes = tuple(window.values())
    values = {name: numbered(n, 1000 * k, sizes) for k, name in enumerate(names)}
    dims = ("samples", *window)
    arrays = [ArrayLayout(name, dims, sizes, "<f4", chunk) for name in names]
    arrays += [
        ArrayLayout(f"{dim}_index", ("samples",), (), "<i8", shard, is_coordinate=True)
        for dim in window
    ]
    index = {f"{dim}_index": np.arange(n) * size for dim, size in window.items()}
    layout = StoreLayout(n, shard, tuple(arrays), Compressor())
    root.mkdir(parents=True, exist_ok=True)
    files: Files = {}
    for k in range(layout.shard_count):
        first, last = layout.bounds(k)
        rows = {name: v[first:last] for name, v in (values | index).items()}
        files |= write_shard(LocalFolder(root), layout, k, rows)
    shape = {"time": max(n, 1), **window}
    bound = BoundRecipe.parse(shape, list(names), sample_size=window, to_pred=targets)
    metadata = StoreMetadata(
        part="train",
        bound=bound,
        statistics=Statistics.of(values, part="train"),
        accounting={"total": n, "train": n},
        split={"kind": "none"},
        provenance={"variables": {name: {} for name in names}},
        variables=names,
    )
    write_metadata(LocalFolder(root), layout, metadata.to_attrs(), files)
    return root
