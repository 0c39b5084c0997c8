"""The demo, from cube to prediction: ``python -m ml4cube.demo --out demo-output``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.store import open_store
from ml4cube.demo.downscaling import (
    FEATURES,
    LAT,
    LON,
    TARGET,
    baselines,
    build_cube,
    first_guess,
    keep_means,
    open_truth,
    train_steps,
)
from ml4cube.demo.report import (
    CODES_IN_TIME_ORDER,
    draw_maps,
    draw_split,
    judge,
    kelvin,
    write_report,
)
from ml4cube.demo.train import build_model
from ml4cube.errors import StoreExistsError
from ml4cube.evaluation import evaluate
from ml4cube.plotting import loss_curve
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import get_statistics
from ml4cube.splits import assign_time_split

# Months for training (including the buffer of one month) and validation; the others are test.
TRAIN_MONTHS, VAL_MONTHS = 34, 6
# Outputs of a run, which the next run may replace.
OUTPUTS = (
    "train.zarr", "val.zarr", "test.zarr", "detail.zarr", "sst.zarr", "sst.nc", "model.pt",
    "history.json", "split_map.png", "loss_curve.png", "maps.png", "report.md", "report.json",
)  # fmt: skip


@contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Print a stage and the seconds it took, and add them to `seconds`."""
    print(f"{name} ...", flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
    print(f"{name}: {seconds[name]:.1f} s", flush=True)


def prepare_folder(folder: Path) -> None:
    """Make the folder, or remove the outputs of an earlier run; refuse other contents."""
    if folder.exists() and not folder.is_dir():
        raise StoreExistsError(f"{folder} is a file; choose a folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted({path.name for path in folder.glob("[!.]*")} - set(OUTPUTS))
    if foreign:
        raise StoreExistsError(
            f"{folder} holds {', '.join(foreign[:3])}, which the demo did not make; nothing was "
            "touched, choose another folder with --out"
        )
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def train(folder: Path, ranks: int, epochs: int) -> None:
    """Train the network on so many processes of this machine, by torchrun."""
    threads = 1
    if not torch.cuda.is_available():
        threads = max(1, (os.cpu_count() or 1) // ranks)
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}", "-m", "ml4cube.demo.train",
            "--folder", str(folder), "--epochs", str(epochs),
        ],
        check=True,
        env={"OMP_NUM_THREADS": str(min(threads, 2)), **os.environ},
    )  # fmt: skip


def run(folder: Path, *, ranks: int, epochs: int) -> dict[str, Any]:
    """Run the main job."""
    seconds: dict[str, float] = {}
    prepare_folder(folder)
    with stage("split", seconds):
        truth = open_truth()
        steps = truth.sizes["time"]
        label = assign_time_split(truth, TRAIN_MONTHS / steps, val=VAL_MONTHS / steps, gap=1)
        draw_split(truth, label["split"], folder / "split_map.png")
    with stage("statistics", seconds):
        cube = build_cube(truth, label["split"])
        statistics = get_statistics(cube)
        baseline_cube = baselines(truth, label["split"])
    with stage("sampling", seconds):
        sampler = MultiProcSampler(
            cube[[*FEATURES, TARGET, "split"]],
            sample_size={LAT: truth.sizes[LAT], LON: truth.sizes[LON]},
            to_pred=TARGET,
            drop_nan="if_all_nan",  # land: filled in features, a gap in targets
            train_cube=folder / "train.zarr",
            test_cube=folder / "test.zarr",
            val_cube=folder / "val.zarr",
            nproc=2,
        )
        sampler.run()
    with stage("training", seconds):
        train(folder, ranks, epochs)
    with stage("prediction", seconds):
        model = build_model(PTXrDataset(folder / "train.zarr", to_pred=TARGET))
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        sea = truth.notnull().all("time")
        detail = predict_cube(
            model, cube, folder / "train.zarr", out=folder / "detail.zarr", mask=sea
        )
        guess = first_guess(truth, train_steps(label["split"]))
        predicted = keep_means(guess + detail[TARGET], truth)
        predicted = write_cube(predicted, truth, folder)
    with stage("scores", seconds):
        part_of_month = label["split"].max([LAT, LON]).values
        is_test = part_of_month == CODES_IN_TIME_ORDER["test"]
        card = evaluate(
            predicted,
            cube.assign(sst=truth),
            baselines={str(name): field.rename("sst") for name, field in baseline_cube.items()},
            metrics="rmse",
        )
        verdict = judge(card.table)
        history = json.loads((folder / "history.json").read_text())
        best_epoch = int(np.argmin(history["val_loss"]))
        loss_curve(
            history["train_loss"],
            history["val_loss"],
            title="Mean squared error of the standardized detail",
        ).savefig(folder / "loss_curve.png", dpi=150)
        first_test_month = {"time": int(is_test.argmax())}
        best_baseline = verdict["best_baseline"]
        draw_maps(
            truth.isel(first_test_month),
            baseline_cube[best_baseline].isel(first_test_month),
            best_baseline,
            predicted.isel(first_test_month),
            folder / "maps.png",
        )
    report = {
        **verdict,
        "grid": " × ".join(str(n) for n in truth.sizes.values()),
        "months": {
            part: int((part_of_month == code).sum()) for part, code in CODES_IN_TIME_ORDER.items()
        },
        "statistics": statistics,
        "accounting": open_store(folder / "train.zarr").attrs["accounting"],
        "ranks": ranks,
        "epochs": len(history["val_loss"]),
        "best_epoch": best_epoch + 1,
        "rank_table": history["ranks"][best_epoch],
        "seconds": {**seconds, "total": sum(seconds.values())},
    }
    write_report(folder, report)
    return report


def write_cube(predicted: xr.DataArray, truth: xr.DataArray, folder: Path) -> xr.DataArray:
    """Write the prediction as a CF cube, zarr and netCDF."""
    result = predicted.transpose(*truth.dims).astype("float32").rename("sst")
    result.attrs = {**truth.attrs, "long_name": "sea surface temperature, downscaled by a network"}
    cube = result.to_dataset()
    cube.attrs = {
        "Conventions": "CF-1.11",
        "title": "Monthly sea surface temperature, predicted from its means over 6 x 6 cells",
        "source": "OSTIA monthly means (iris-sample-data), downscaled with ml4cube",
    }
    with warnings.catch_warnings():  # xarray opens it faster with consolidated metadata
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        cube.to_zarr(folder / "sst.zarr", mode="w")
    cube.to_netcdf(folder / "sst.nc", encoding={"sst": {"zlib": True}})
    return result


def main() -> int:
    """Run, print the result, and fail if the network is not good enough."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder to write")
    parser.add_argument("--ranks", type=int, default=2, help="training processes")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    if min(args.ranks, args.epochs) < 1:
        parser.error(f"ranks and epochs must be at least 1, got {args.ranks} and {args.epochs}")
    try:
        report = run(args.out, ranks=args.ranks, epochs=args.epochs)
    except StoreExistsError as error:
        print(f"ml4cube.demo: {error}", file=sys.stderr)
        return 2
    print(
        f"\nnetwork {kelvin(report['rmse_model_k'])} K, strongest baseline "
        f"({report['best_baseline']}) {kelvin(report['rmse_best_baseline_k'])} K: "
        f"{report['improvement']:.1%} less error ({report['needed_improvement']:.0%} needed), "
        f"{report['seconds']['total']:.0f} s\nsee {args.out / 'report.md'}"
    )
    if report["beats_baseline"]:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
