"""Print hashes of results that a refactoring must not change.

    python scripts/hash_results.py > before.txt    # and again after the change; then diff the two

Stores of several cubes file by file, statistics, labels, batches, losses, weights and predictions.
The metadata of a store is left out of its hash where it names versions and times.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ml4cube.datasets.multiproc_sampler import MultiProcSampler  # noqa: E402
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader  # noqa: E402
from ml4cube.datasets.xr_dataset import XrDataset  # noqa: E402
from ml4cube.prediction import predict_cube  # noqa: E402
from ml4cube.preprocessing import Statistics, standardize  # noqa: E402
from ml4cube.splits import BlockKFold, assign_block_split, leakage_report  # noqa: E402
from ml4cube.training.pytorch import Trainer  # noqa: E402
from tests.cubes import cell_id_cube  # noqa: E402

SHAPE = {"time": 24, "lat": 16, "lon": 20}
PARTS = ("train", "test", "val")


def print_hash(name: str, *pieces: bytes) -> None:
    """Print one line: a name and a hash."""
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    print(f"{name:40} {digest[:24]}", flush=True)


def cubes() -> dict[str, xr.Dataset]:
    """Make cubes with gaps, other orders of dims, a mask, a calendar of 360 days."""
    plain = cell_id_cube(SHAPE, "float64", gaps=0.05, names=("a", "b"), dask_chunks={"time": 6})
    turned = cell_id_cube(SHAPE, "float32", dim_order=("lon", "time", "lat"), calendar="360_day")
    masked = cell_id_cube(SHAPE, "float32", gaps=0.1, names=("a", "b", "c"))
    masked["filter_mask"] = (("lat", "lon"), np.arange(320).reshape(16, 20) % 97 > 0)
    return {"plain": plain, "turned": turned, "masked": masked}


def store_files(path: Path) -> list[bytes]:
    """Return the names and contents of all files that hold samples."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.parts[-2] != "manifest")
    return [
        piece
        for p in files
        if p.name != "zarr.json"
        for piece in (p.relative_to(path).as_posix().encode(), p.read_bytes())
    ]


def sample(name: str, cube: xr.Dataset, folder: Path, **settings: Any) -> tuple[xr.Dataset, ...]:
    """Sample a cube, and hash its stores."""
    block = {"time": 6, "lat": 8, "lon": 10}
    labelled = assign_block_split(cube, block, 0.6, val=0.2, seed=3)
    print_hash(f"{name} label", labelled["split"].values.tobytes())
    paths = {f"{part}_cube": folder / f"{name}-{part}.zarr" for part in PARTS}
    stores = MultiProcSampler(labelled, seed=3, progress=False, **paths, **settings).get_datasets()
    for part, path in paths.items():
        print_hash(f"{name} {part}", *store_files(path))
    return stores


def train(stores: tuple[xr.Dataset, ...], cube: xr.Dataset, folder: Path) -> None:
    """Train a small network on stores, and hash losses, weights and predictions."""
    train, _, val = (PTXrDataset(store, to_pred="b") for store in stores)
    train_loader, val_loader = prep_dataloader(train, val, batch_size=16, seed=1)
    print_hash("batches", *(x.numpy().tobytes() + y.numpy().tobytes() for x, y in train_loader))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model, train_loader, val_loader, optimizer, loss=nn.MSELoss(), epochs=3, seed=2,
        gradient_accumulation_steps=2, gradient_clip=1.0, device="cpu",
    )  # fmt: skip
    trained = trainer.train()
    for column in ("train_loss", "val_loss"):
        print_hash(column, np.array(trainer.history[column]).tobytes())
    print_hash("weights", *(tensor.numpy().tobytes() for tensor in trained.state_dict().values()))
    out = predict_cube(trained, cube[["a", "b"]], stores[0], out=folder / "prediction.zarr")
    print_hash("prediction", out["b"].values.tobytes())


def main() -> None:
    """Hash everything."""
    torch.set_num_threads(1)
    made = cubes()
    windows = {"sample_size": {"lat": 4, "lon": 5}, "overlap": {"lat": 0.5}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sample("points", made["turned"], folder, nproc=1)
        sample("masked", made["masked"], folder, nproc=2, drop_nan=None, fill_method="mean")
        sample(
            "bits",
            made["masked"],
            folder,
            nproc=1,
            drop_nan=None,
            bitround=7,
            drop_sample=False,
            **windows,
        )
        stores = sample("windows", made["plain"], folder, nproc=1, drop_nan="if_all_nan", **windows)
        torch_cube = made["plain"].fillna(0.0)
        pairs = sample("pairs", torch_cube, folder, nproc=1, to_pred="b", **windows)
        train(pairs, torch_cube, folder)
        print_hash("store values", *(store["a"].values.tobytes() for store in stores))
    labelled = assign_block_split(made["masked"], {"lat": 8, "lon": 5}, buffer=1, seed=5)
    statistics = Statistics.from_cube(labelled)
    print_hash("statistics", statistics.to_json().encode())
    print_hash("standardized", standardize(labelled, statistics)["a"].values.tobytes())
    report = leakage_report(labelled)
    # numbers only: a sentence that reads better changes no result
    print_hash("leakage", report.table[["found", "limit", "status"]].to_csv(index=False).encode())
    arrays = XrDataset(labelled, block_size={"lat": 8, "lon": 5}, to_pred="c").get_datasets()
    print_hash("xr_dataset", *(array.tobytes() for part in arrays for array in part))
    folds = BlockKFold(n_splits=3, block_size={"lat": 4}).split_cube(made["plain"])
    print_hash("folds", *(fold["split"].values.tobytes() for fold in folds))


if __name__ == "__main__":
    main()
