"""Forecast sea surface temperature a month ahead, roll it out six months, and print its scorecard.

    python examples/forecast.py              # two minutes on two cores
    python examples/forecast.py --epochs 2   # to try it

The data are OSTIA monthly means near the equator, April 2006 to September 2010. The network learns
from the first 35 months how the anomaly changes in a month, and is scored on the last 14, in which
El Niño turned into La Niña.
"""

import argparse
from pathlib import Path

import torch
import xarray as xr
from torch import nn

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.demo.downscaling import open_truth
from ml4cube.evaluation import evaluate
from ml4cube.prediction import predict_cube
from ml4cube.splits import assign_time_split
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.pytorch import Trainer
from ml4cube.training.residual import Residual

MONTHS = 6
WINDOWS = {
    "to_pred": "anomaly",
    "features": ["anomaly", "ocean"],
    "sample_size": {"time": 2, "latitude": 18, "longitude": 72},
    "overlap": {"time": 0.5, "longitude": 0.5},
    "target_offset": {"time": 2},  # the month after two months of input
    "target_size": {"time": 1},
    "coord_features": ["dayofyear", "longitude", "latitude"],
    "fill_method": {"anomaly": "constant"},  # land has the anomaly 0; the loss leaves it out
    "const": 0.0,
    "drop_nan": None,
}


def open_cube() -> xr.Dataset:
    """Open the anomalies from the mean of each month in the training years, and an ocean mask."""
    sst = open_truth().rename("anomaly")
    cube = assign_time_split(sst.to_dataset(), split=0.65, val=0.1)
    train = cube.anomaly.where(cube.split == 1)
    with xr.set_options(keep_attrs=True):
        cube["anomaly"] = cube.anomaly.groupby("time.month") - train.groupby("time.month").mean()
    cube["ocean"] = sst.isel(time=0, drop=True).notnull().astype("float32")
    return cube.drop_vars("month")


def build_network(channels: int) -> nn.Module:
    """Build a network that predicts no change before it is trained."""
    last = nn.Conv2d(24, 1, 5, padding=2, padding_mode="replicate")
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Flatten(1, 2),  # two months of each channel
        nn.Conv2d(2 * channels, 24, 5, padding=2, padding_mode="replicate"),
        nn.GELU(),
        nn.Dropout2d(0.1),
        nn.Conv2d(24, 24, 5, padding=2, padding_mode="replicate"),
        nn.GELU(),
        last,
    )


def main() -> None:
    """Train, forecast, and say where the forecast is better than simple ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("forecast-output"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    cube = open_cube()
    # Trained on three months of its own output, so that errors do not grow in the rollout.
    train = PTXrDataset(cube, rollout=3, **WINDOWS)
    val = PTXrDataset(cube, part="val", statistics=train.statistics, **WINDOWS)
    train_loader, val_loader = prep_dataloader(train, val_ds=val, batch_size=16)
    torch.manual_seed(0)
    model = Residual(build_network(len(train.channels)), train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    model = Trainer(
        model,
        train_loader,
        val_loader,
        optimizer,
        best_model_path=args.out / "model.pt",
        early_stopping=False,  # the learning rate falls until the last epoch
        loss=MaskedLoss(nn.MSELoss()),
        epochs=args.epochs,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2e-3, total_steps=args.epochs * len(train_loader)
        ),
        scheduler_step_on_batch=True,
        seed=0,
    ).train()

    forecast = predict_cube(
        model, cube, train, out=args.out / "forecast.zarr", rollout=MONTHS, overwrite=True
    )
    card = evaluate(
        forecast,
        cube,
        baselines=["persistence", "damped_persistence", "climatology"],
        by="lead_time",
        block_length=3,  # of the few dates; half as long as the longest lead
    )
    print(card)
    card.plot().savefig(args.out / "scorecard.png", dpi=150)
    (args.out / "scorecard.json").write_text(card.to_json())
    print(f"\nforecast, scorecard and its figure are in {args.out}/")


if __name__ == "__main__":
    main()
