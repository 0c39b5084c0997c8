"""What `make bench-against` times and `scripts/hash_results.py` hashes: each stage on known cubes.

A case is a function under `case`: it takes a `Workplace` and returns what is hashed, as bytes by
the name of a line. Cases run in their order, and use what earlier ones have put into the
workplace. At scale 1 the cubes are small, for hashes; a larger scale is for times. A case imports
what it calls, so that a commit that has it not yet lacks this case only.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.cubes import cell_id_cube

Hashed = dict[str, list[bytes]]

PARTS = ("train", "test", "val")
CASES: dict[str, Callable[[Workplace], Hashed]] = {}


@dataclass
class Workplace:
    """A folder, the size of the cubes, and what the cases made so far."""

    folder: Path
    scale: int = 1
    cubes: dict[str, xr.Dataset] = field(default_factory=dict)
    stores: dict[str, tuple[xr.Dataset, ...]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make cubes with gaps, another order of dims, a mask, a calendar of 360 days, months."""
        shape = {"time": 24 * self.scale, "lat": 16 * self.scale, "lon": 20 * self.scale}
        masked = cell_id_cube(shape, gaps=0.1, names=("a", "b", "c"))
        places = np.arange(shape["lat"] * shape["lon"]).reshape(shape["lat"], shape["lon"])
        masked["filter_mask"] = (("lat", "lon"), places % 97 > 0)
        plain = cell_id_cube(shape, "float64", gaps=0.05, names=("a", "b"))
        turned = cell_id_cube(shape, dim_order=("lon", "time", "lat"), calendar="360_day")
        self.cubes = {
            "plain": plain.chunk(time=6),
            "turned": turned,
            "masked": masked,
            "months": monthly_cube(self.scale),
        }
        if self.scale > 1:  # as users' cubes are; hashes know what stays in memory
            for name, cube in self.cubes.items():
                path = self.folder / f"{name}.zarr"
                cube.chunk(time=12, lat=64, lon=64).to_zarr(path)
                self.cubes[name] = xr.open_zarr(path)
        self.cubes["without gaps"] = self.cubes["plain"].fillna(0.0)


def monthly_cube(scale: int) -> xr.Dataset:
    """Make a cube of six years with a cycle, a static field, classes and few gaps."""
    from ml4cube.splits import assign_time_split

    rng = np.random.default_rng(7)
    sizes = {"time": 72, "lat": 12 * scale, "lon": 16 * scale}
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
            "lat": np.linspace(60.0, 38.0, sizes["lat"]),
            "lon": np.linspace(0.0, 30.0, sizes["lon"]),
        },
    )
    cube["cover"].attrs = {"flag_values": [0, 1, 2], "flag_meanings": "water crop forest"}
    return assign_time_split(cube, 0.6, val=0.2)


def case(function: Callable[[Workplace], Hashed]) -> Callable[[Workplace], Hashed]:
    """Add a function to the cases, under its own name."""
    CASES[function.__name__.replace("_", " ")] = function
    return function


def values_of(cube: xr.Dataset) -> list[bytes]:
    """Return the names and values of the variables of a cube in the order of their names."""
    names = sorted(map(str, cube.data_vars))
    pieces = [cube[n].values.tobytes() for n in names if cube[n].dtype.kind in "biufmM"]
    return [" ".join(names).encode(), *pieces]


def files_of(store: Path) -> list[bytes]:
    """Return the names and contents of all files of a store that hold samples."""
    pieces = []
    for path in sorted(store.rglob("*")):
        # metadata names versions and times
        if path.is_file() and path.name != "zarr.json" and path.parts[-2] != "manifest":
            pieces += [path.relative_to(store).as_posix().encode(), path.read_bytes()]
    return pieces


def sample(work: Workplace, name: str, cube: xr.Dataset, **settings: Any) -> Hashed:
    """Label and sample a cube."""
    from ml4cube.datasets.multiproc_sampler import MultiProcSampler
    from ml4cube.splits import assign_block_split

    block = {"time": 6, "lat": 8, "lon": 10}
    labelled = assign_block_split(cube, block, 0.6, val=0.2, seed=3)
    hashed = {f"{name} label": [labelled["split"].values.tobytes()]}
    paths = {f"{part}_cube": work.folder / f"{name}-{part}.zarr" for part in PARTS}
    settings = {"nproc": 1, **settings}
    sampler = MultiProcSampler(labelled, seed=3, progress=False, **paths, **settings)
    work.stores[name] = sampler.get_datasets()
    for part, path in paths.items():
        hashed[f"{name} {part}"] = files_of(path)
    return hashed


WINDOW = {"lat": 4, "lon": 5}
OVERLAPPING = {"sample_size": WINDOW, "overlap": {"lat": 0.5}}


@case
def sample_points(work: Workplace) -> Hashed:
    """Sample cells."""
    return sample(work, "points", work.cubes["turned"])


@case
def fill_mean(work: Workplace) -> Hashed:
    """Fill gaps with the mean of train cells, on two processes."""
    settings = {"drop_nan": None, "fill_method": "mean"}
    return sample(work, "masked", work.cubes["masked"], nproc=2, **settings)


@case
def bitround(work: Workplace) -> Hashed:
    """Store rounded values, of overlapping windows."""
    settings = {"drop_nan": None, "bitround": 7, "drop_sample": False, **OVERLAPPING}
    return sample(work, "bits", work.cubes["masked"], **settings)


@case
def sample_windows(work: Workplace) -> Hashed:
    """Sample overlapping windows."""
    return sample(work, "windows", work.cubes["plain"], drop_nan="if_all_nan", **OVERLAPPING)


@case
def sample_pairs(work: Workplace) -> Hashed:
    """Sample windows of features and of a target."""
    return sample(work, "pairs", work.cubes["without gaps"], to_pred="b", **OVERLAPPING)


@case
def load(work: Workplace) -> Hashed:
    """Read the batches of as many epochs as the scale."""
    from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

    train, _, val = (PTXrDataset(store, to_pred="b") for store in work.stores["pairs"])
    work.kept["loaders"] = prep_dataloader(train, val, batch_size=16 * work.scale, seed=1)
    batches = []
    for _epoch in range(work.scale):
        for features, target in work.kept["loaders"][0]:
            batches.append(features.numpy().tobytes() + target.numpy().tobytes())
    return {"batches": batches}


def fit(work: Workplace, model: nn.Module, loaders: Any, **settings: Any) -> list[list[bytes]]:
    """Train a model; return the losses of training and validation, and the weights."""
    from ml4cube.training.pytorch import Trainer

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"loss": nn.MSELoss(), "epochs": 3, "seed": 2, "device": "cpu", **settings}
    trainer = Trainer(model, *loaders, optimizer, **settings)
    work.kept["model"] = trainer.train()
    losses = (trainer.history[column] for column in ("train_loss", "val_loss"))
    weights = work.kept["model"].state_dict().values()
    return [
        *([np.array(values).tobytes()] for values in losses),
        [tensor.numpy().tobytes() for tensor in weights],
    ]


@case
def train(work: Workplace) -> Hashed:
    """Train a small network on stores."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 1, 1))
    settings = {"gradient_accumulation_steps": 2, "gradient_clip": 1.0}
    results = fit(work, model, work.kept["loaders"], **settings)
    return dict(zip(("train_loss", "val_loss", "weights"), results, strict=True))


@case
def predict(work: Workplace) -> Hashed:
    """Predict a cube with the network just trained."""
    from ml4cube.prediction import predict_cube

    cube = work.cubes["without gaps"][["a", "b"]]
    out = work.folder / "prediction.zarr"
    predicted = predict_cube(work.kept["model"], cube, work.stores["pairs"][0], out=out)
    return {"prediction": [predicted["b"].values.tobytes()]}


@case
def read_store(work: Workplace) -> Hashed:
    """Read a store as arrays."""
    return {"store values": [store["a"].values.tobytes() for store in work.stores["windows"]]}


@case
def statistics(work: Workplace) -> Hashed:
    """Take statistics of train cells."""
    from ml4cube.preprocessing import Statistics
    from ml4cube.splits import assign_block_split

    labelled = assign_block_split(work.cubes["masked"], {"lat": 8, "lon": 5}, buffer=1, seed=5)
    work.kept["labelled"] = labelled
    work.kept["statistics"] = Statistics.from_cube(labelled)
    return {"statistics": [work.kept["statistics"].to_json().encode()]}


@case
def standardize(work: Workplace) -> Hashed:
    """Standardize a cube."""
    from ml4cube.preprocessing import standardize

    scaled = standardize(work.kept["labelled"], work.kept["statistics"])
    return {"standardized": [scaled["a"].values.tobytes()]}


@case
def leakage_report(work: Workplace) -> Hashed:
    """Look for leaks of a split."""
    from ml4cube.splits import leakage_report

    table = leakage_report(work.kept["labelled"]).table
    # numbers only: a sentence that reads better changes no result
    return {"leakage": [table[["found", "limit", "status"]].to_csv(index=False).encode()]}


@case
def xr_dataset(work: Workplace) -> Hashed:
    """Take all blocks of a cube as arrays."""
    from ml4cube.datasets.xr_dataset import XrDataset

    samples = XrDataset(work.kept["labelled"], block_size={"lat": 8, "lon": 5}, to_pred="c")
    arrays = [array for part in samples.get_datasets() for array in part]
    return {"xr_dataset": [array.tobytes() for array in arrays]}


@case
def folds(work: Workplace) -> Hashed:
    """Label the folds of a cross-validation."""
    from ml4cube.splits import BlockKFold

    labels = BlockKFold(n_splits=3, block_size={"lat": 4}).split_cube(work.cubes["plain"])
    return {"folds": [fold["split"].values.tobytes() for fold in labels]}


def fill(work: Workplace, rule: str, constant: float | None = None) -> Hashed:
    """Sample windows with their gaps filled by a rule."""
    settings = {"drop_nan": None, "fill_method": rule, "const": constant, "sample_size": WINDOW}
    return sample(work, f"fill {rule}", work.cubes["masked"], **settings)


@case
def fill_sample_mean(work: Workplace) -> Hashed:
    """Fill gaps with the mean of their window."""
    return fill(work, "sample_mean")


@case
def fill_constant(work: Workplace) -> Hashed:
    """Fill gaps with a number."""
    return fill(work, "constant", 3.0)


@case
def fill_noise(work: Workplace) -> Hashed:
    """Fill gaps with noise."""
    return fill(work, "noise")


def double(samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add a variable to samples: the callback of a sampler."""
    return {**samples, "twice": 2 * samples["a"]}


@case
def callback(work: Workplace) -> Hashed:
    """Sample through a callback."""
    cube = work.cubes["months"][["t", "rain"]].rename(t="a")
    settings = {"callback": double, "drop_nan": "if_all_nan", "sample_size": WINDOW}
    return sample(work, "callback", cube, **settings)


def scale(work: Workplace, name: str, **options: Any) -> Hashed:
    """Sample windows scaled by other statistics than those of a variable."""
    from ml4cube.preprocessing import CubeScaler

    cube = work.cubes["months"][["t", "rain"]].rename(t="a")
    scaler = CubeScaler(**options).fit(cube)
    return sample(work, f"scaled by {name}", cube, statistics=scaler, sample_size=WINDOW)


@case
def scale_by_pixel(work: Workplace) -> Hashed:
    """Scale every pixel by its own statistics."""
    return scale(work, "pixel", per=("variable", "lat", "lon"))


@case
def scale_by_month(work: Workplace) -> Hashed:
    """Scale every month by its own statistics."""
    return scale(work, "month", climatology="month")


def fit_on_months(
    work: Workplace,
    name: str,
    layers: Callable[[int], nn.Module],
    data: dict[str, Any],
    **fit_: Any,
) -> Hashed:
    """Train a model on windows cut from the monthly cube."""
    from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

    settings = {"sample_size": {"lat": 4, "lon": 4}, **data}
    train, val = (
        PTXrDataset(work.cubes["months"], part=part, **settings) for part in ("train", "val")
    )
    work.kept["data"] = train
    loaders = prep_dataloader(train, val_ds=val, batch_size=16 * work.scale, seed=1)
    results = fit(work, layers(len(train.channels)), loaders, **fit_)
    return {f"{name} losses and weights": [piece for pieces in results for piece in pieces]}


def two_layers(channels: int) -> nn.Module:
    """Make a network that sees the neighbours of a cell."""
    return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1))


@case
def rollout(work: Workplace) -> Hashed:
    """Train a forecast with coordinates and static fields over two steps."""
    data = {
        "to_pred": "t",
        "features": ["t", "rain", "height"],
        "target_offset": {"time": 1},
        "coord_features": ["lat", "dayofyear"],
        "rollout": 2,
    }
    torch.manual_seed(0)
    return fit_on_months(work, "rollout", two_layers, data)


@case
def forecast(work: Workplace) -> Hashed:
    """Predict two steps from many starts."""
    from ml4cube.prediction import predict_cube

    cube = work.cubes["months"]
    starts = {"init_times": cube["time"][48:70], "rollout": 2}
    out = work.folder / "forecast.zarr"
    work.kept["forecast"] = predict_cube(
        work.kept["model"], cube, work.kept["data"], out=out, **starts
    )
    return {"forecast": values_of(work.kept["forecast"])}


@case
def scorecard(work: Workplace) -> Hashed:
    """Compare a forecast with baselines by lead time."""
    from ml4cube.evaluation import evaluate

    baselines = ["persistence", "climatology", "damped_persistence", "anomaly_persistence"]
    truth = work.cubes["months"][["t", "split"]]
    card = evaluate(work.kept["forecast"], truth, baselines=baselines, by=["lead_time"])
    return {"scorecard": values_of(card.scores)}


@case
def weights(work: Workplace) -> Hashed:
    """Train with a weight for every cell."""
    layers = lambda channels: nn.Conv2d(channels, 1, 1)  # noqa: E731
    data = {"to_pred": "t", "weights": "trust"}
    return fit_on_months(work, "weights of cells", layers, data)


@case
def classes(work: Workplace) -> Hashed:
    """Train and predict classes."""
    from ml4cube.prediction import predict_cube
    from ml4cube.training.losses import CrossEntropy

    layers = lambda channels: nn.Conv2d(channels, 3, 1)  # noqa: E731
    data = {"to_pred": "cover", "features": ["t", "rain"]}
    torch.manual_seed(0)
    hashed = fit_on_months(work, "classes", layers, data, loss=CrossEntropy([0, 1, 2]))
    cube, out = work.cubes["months"], work.folder / "cover.zarr"
    predicted = predict_cube(work.kept["model"], cube, work.kept["data"], out=out, reduce="argmax")
    return {**hashed, "classes": values_of(predicted)}


@case
def overlap(work: Workplace) -> Hashed:
    """Predict with windows that overlap."""
    from ml4cube.datasets.pytorch import PTXrDataset
    from ml4cube.prediction import predict_cube

    cube = work.cubes["months"]
    windows = PTXrDataset(cube, to_pred="t", features=["rain"], sample_size={"lat": 4, "lon": 4})
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 3, padding=1)
    out = work.folder / "overlap.zarr"
    work.kept["overlap"] = predict_cube(model, cube, windows, out=out, overlap=0.5)
    return {"overlap": values_of(work.kept["overlap"])}


@case
def estimator(work: Workplace) -> Hashed:
    """Predict with an estimator of scikit-learn."""
    from sklearn.linear_model import Ridge

    from ml4cube.prediction import predict_cube

    cube = work.cubes["months"]
    table = cube[["t", "rain"]].stack(cell=["time", "lat", "lon"])
    ridge = Ridge().fit(table["rain"].values[:, None], table["t"].values)
    names = {"features": ["rain"], "targets": ["t"]}
    mapped = predict_cube(ridge, cube, None, out=work.folder / "ridge.zarr", **names)
    return {"estimator": values_of(mapped)}


@case
def score_cube(work: Workplace) -> Hashed:
    """Score a prediction by season."""
    from ml4cube.evaluation import score_cube

    truth = work.cubes["months"][["t"]]
    scores = score_cube(work.kept["overlap"][["t"]], truth, by=truth["time"].dt.season)
    return {"score_cube": values_of(scores)}


@case
def insights(work: Workplace) -> Hashed:
    """Describe a cube with gaps."""
    from ml4cube.insights import get_insights

    gappy = work.cubes["months"][["t", "rain", "split"]].copy()
    holes = np.random.default_rng(3).random(gappy["t"].shape) < 0.1
    gappy["t"] = gappy["t"].where(~holes)
    work.kept["gappy"] = gappy
    return {"insights": values_of(get_insights(gappy))}


@case
def fill_gaps(work: Workplace) -> Hashed:
    """Fill gaps of a cube by every method."""
    from ml4cube.gap_filling import fill_gaps
    from ml4cube.gap_filling.methods import METHODS

    hashed = {}
    for method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            filled = fill_gaps(work.kept["gappy"], "t", method)
        hashed[f"gaps filled by {method}"] = values_of(filled.cube)
    return hashed


@case
def two_ranks(work: Workplace) -> Hashed:
    """Train on two ranks."""
    from ml4cube.training.pytorch_distributed import dist_train

    results = dist_train(train_on_rank, 2, str(work.folder), work.scale, backend="gloo")
    return {f"rank {rank} of 2": pieces for rank, pieces in enumerate(results)}


def train_on_rank(folder: str, scale: int) -> list[list[bytes]]:
    """Train on this rank and return the losses and weights of all."""
    from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
    from ml4cube.training.pytorch_distributed import Trainer

    cube = monthly_cube(scale)
    settings = {"to_pred": "t", "features": ["rain"], "sample_size": {"lat": 4}}
    train, val = (PTXrDataset(cube, part=part, **settings) for part in ("train", "val"))
    settings = {"batch_size": 16 * scale, "seed": 1, "parallel": True}
    loaders = prep_dataloader(train, val_ds=val, **settings)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    best = f"{folder}/best.pt"
    settings = {"best_model_path": best, "loss": nn.MSELoss(), "epochs": 2}
    trainer = Trainer(model, *loaders, optimizer, **settings)
    weights = trainer.train().state_dict().values()
    pieces = [np.array(trainer.history[column]).tobytes() for column in ("train_loss", "val_loss")]
    pieces += [tensor.numpy().tobytes() for tensor in weights]
    of_all: list[list[bytes]] = [[], []]
    torch.distributed.all_gather_object(of_all, pieces)
    return of_all
