"""Print hashes of results that a refactoring must not change.

    python scripts/hash_results.py > before.txt    # and again after the change; then diff the two

Stores of several cubes file by file, every rule of filling and scaling, statistics, labels,
batches, losses and weights (also of forecasts, classes and two ranks), predictions of networks and
estimators, scores, insights and filled gaps. The metadata of a store is left out of its hash where
it names versions and times.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from sklearn.linear_model import Ridge
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ml4cube.datasets.multiproc_sampler import MultiProcSampler  # noqa: E402
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader  # noqa: E402
from ml4cube.datasets.xr_dataset import XrDataset  # noqa: E402
from ml4cube.evaluation import evaluate, score_cube  # noqa: E402
from ml4cube.gap_filling import fill_gaps  # noqa: E402
from ml4cube.gap_filling.methods import METHODS  # noqa: E402
from ml4cube.insights import get_insights  # noqa: E402
from ml4cube.prediction import predict_cube  # noqa: E402
from ml4cube.preprocessing import CubeScaler, Statistics, standardize  # noqa: E402
from ml4cube.splits import (  # noqa: E402
    BlockKFold,
    assign_block_split,
    assign_time_split,
    leakage_report,
)
from ml4cube.training.losses import CrossEntropy  # noqa: E402
from ml4cube.training.pytorch import Trainer  # noqa: E402
from tests.cubes import cell_id_cube  # noqa: E402
from tests.distributed_runner import on_ranks  # noqa: E402

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


def print_cube(name: str, cube: xr.Dataset) -> None:
    """Hash the variables of a cube in the order of their names."""
    names = sorted(map(str, cube.data_vars))
    pieces = [cube[n].values.tobytes() for n in names if cube[n].dtype.kind in "biufmM"]
    print_hash(name, " ".join(names).encode(), *pieces)


def double(samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add a variable to samples: the callback of a sampler."""
    return {**samples, "twice": 2 * samples["a"]}


def sampling_rules(masked: xr.Dataset, plain: xr.Dataset, folder: Path) -> None:
    """Sample with every rule of filling, with a callback, and scaled per pixel and per month."""
    windows = {"sample_size": {"lat": 4, "lon": 5}, "nproc": 1}
    for rule, constant in {"sample_mean": None, "constant": 3.0, "noise": None}.items():
        settings = {"drop_nan": None, "fill_method": rule, "const": constant, **windows}
        sample(f"fill {rule}", masked, folder, **settings)
    sample("callback", plain, folder, callback=double, drop_nan="if_all_nan", **windows)
    for name, rule in {"pixel": ("lat", "lon"), "month": None}.items():
        options = {"climatology": "month"} if rule is None else {"per": ("variable", *rule)}
        scaler = CubeScaler(**options).fit(plain)
        sample(f"scaled by {name}", plain, folder, statistics=scaler, **windows)


def monthly_cube() -> xr.Dataset:
    """Make a cube of six years with a cycle, a static field, classes and few gaps."""
    rng = np.random.default_rng(7)
    sizes = {"time": 72, "lat": 12, "lon": 16}
    shape = tuple(sizes.values())
    values = 280 + rng.normal(size=shape).cumsum(axis=0)
    values += 5 * np.cos(2 * np.pi * np.arange(72) / 12)[:, None, None]
    cube = xr.Dataset(
        {
            "t": (list(sizes), values),
            "rain": (list(sizes), np.maximum(rng.normal(size=shape), 0.0)),
            "height": (["lat", "lon"], rng.uniform(0, 100, shape[1:])),
            "cover": (list(sizes), rng.integers(0, 3, shape).astype("int8")),
            "trust": (list(sizes), rng.uniform(0.5, 1, shape)),
        },
        {
            "time": (np.datetime64("2001-01", "M") + np.arange(72)).astype("datetime64[ns]"),
            "lat": np.linspace(60.0, 38.0, 12),
            "lon": np.linspace(0.0, 30.0, 16),
        },
    )
    cube["cover"].attrs = {"flag_values": [0, 1, 2], "flag_meanings": "water crop forest"}
    return assign_time_split(cube, 0.6, val=0.2)


def fit(model: nn.Module, data: tuple[PTXrDataset, PTXrDataset], name: str, **settings: Any) -> Any:
    """Train a model and hash its losses and weights."""
    loaders = prep_dataloader(data[0], val_ds=data[1], batch_size=16, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"loss": nn.MSELoss(), "epochs": 3, "seed": 2, "device": "cpu", **settings}
    trainer = Trainer(model, *loaders, optimizer, **settings)
    trained = trainer.train()
    losses = [np.array(trainer.history[column]).tobytes() for column in ("train_loss", "val_loss")]
    weights = (tensor.numpy().tobytes() for tensor in trained.state_dict().values())
    print_hash(f"{name} losses and weights", *losses, *weights)
    return trained


def forecasts(cube: xr.Dataset, folder: Path) -> None:
    """Train, roll out, predict and score a forecast with coordinates, weights and static fields."""
    settings: dict[str, Any] = {
        "to_pred": "t",
        "features": ["t", "rain", "height"],
        "sample_size": {"lat": 4, "lon": 4},
        "target_offset": {"time": 1},
        "coord_features": ["lat", "dayofyear"],
        "rollout": 2,
    }
    data = tuple(PTXrDataset(cube, part=part, **settings) for part in ("train", "val"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(len(data[0].channels), 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1)
    )
    trained = fit(model, data, "rollout")
    starts = cube["time"][48:70]
    forecast = predict_cube(
        trained, cube, data[0], out=folder / "forecast.zarr", init_times=starts, rollout=2
    )
    print_cube("forecast", forecast)
    baselines = ["persistence", "climatology", "damped_persistence", "anomaly_persistence"]
    card = evaluate(forecast, cube[["t", "split"]], baselines=baselines, by=["lead_time"])
    print_cube("scorecard", card.scores)
    settings = {"to_pred": "t", "sample_size": {"lat": 4, "lon": 4}, "weights": "trust"}
    data = tuple(PTXrDataset(cube, part=part, **settings) for part in ("train", "val"))
    fit(nn.Conv2d(len(data[0].channels), 1, 1), data, "weights of cells")


def classes_and_estimators(cube: xr.Dataset, folder: Path) -> None:
    """Predict classes, and maps of an estimator with overlapping windows."""
    settings: dict[str, Any] = {"features": ["t", "rain"], "sample_size": {"lat": 4, "lon": 4}}
    data = tuple(
        PTXrDataset(cube, to_pred="cover", part=part, **settings) for part in ("train", "val")
    )
    torch.manual_seed(0)
    model = fit(nn.Conv2d(2, 3, 1), data, "classes", loss=CrossEntropy([0, 1, 2]))
    out = predict_cube(model, cube, data[0], out=folder / "cover.zarr", reduce="argmax")
    print_cube("classes", out)
    windows = PTXrDataset(cube, to_pred="t", features=["rain"], sample_size={"lat": 4, "lon": 4})
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 3, padding=1)
    overlapping = predict_cube(model, cube, windows, out=folder / "overlap.zarr", overlap=0.5)
    print_cube("overlap", overlapping)
    table = cube[["t", "rain"]].stack(cell=["time", "lat", "lon"])
    ridge = Ridge().fit(table["rain"].values[:, None], table["t"].values)
    mapped = predict_cube(
        ridge, cube, None, out=folder / "ridge.zarr", features=["rain"], targets=["t"]
    )
    print_cube("estimator", mapped)
    print_cube("score_cube", score_cube(overlapping[["t"]], cube[["t"]], by=cube["time"].dt.season))


def fill_and_describe(cube: xr.Dataset) -> None:
    """Hash insights, and gaps filled by every method."""
    gappy = cube[["t", "rain", "split"]].copy(deep=True)
    holes = np.random.default_rng(3).random(gappy["t"].shape) < 0.1
    gappy["t"] = gappy["t"].where(~holes)
    print_cube("insights", get_insights(gappy))
    for method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            filled = fill_gaps(gappy, "t", method)
        print_cube(f"gaps filled by {method}", filled.cube)


def train_on_rank(folder: str) -> list[bytes]:
    """Train on this rank and return losses and weights."""
    cube = monthly_cube()
    settings: dict[str, Any] = {"to_pred": "t", "features": ["rain"], "sample_size": {"lat": 4}}
    data = tuple(PTXrDataset(cube, part=part, **settings) for part in ("train", "val"))
    loaders = prep_dataloader(data[0], val_ds=data[1], batch_size=16, seed=1, parallel=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    from ml4cube.training.pytorch_distributed import Trainer as RanksTrainer

    trainer = RanksTrainer(
        model,
        *loaders,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        best_model_path=f"{folder}/best.pt",
        loss=nn.MSELoss(),
        epochs=2,
    )
    trained = trainer.train()
    losses = [np.array(trainer.history[column]).tobytes() for column in ("train_loss", "val_loss")]
    return losses + [tensor.numpy().tobytes() for tensor in trained.state_dict().values()]


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
    cube = monthly_cube()
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(temporary)
        sampling_rules(made["masked"], cube[["t", "rain"]].rename(t="a"), folder)
        forecasts(cube, folder)
        classes_and_estimators(cube, folder)
        fill_and_describe(cube)
        for rank, pieces in enumerate(on_ranks(2, train_on_rank, temporary)):
            print_hash(f"rank {rank} of 2", *pieces)


if __name__ == "__main__":
    main()
