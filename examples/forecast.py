"""Forecast sea surface temperature a month ahead, roll it out six months, and print its scorecard.

    python examples/forecast.py [--epochs 2]     # a minute on two cores

OSTIA monthly means near the equator, April 2006 to September 2010: trained on the first 35 months,
scored on the last 14, in which El Niño turned into La Niña.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.demo.downscaling import open_truth
from ml4cube.evaluation import evaluate
from ml4cube.prediction import predict_cube
from ml4cube.splits import assign_time_split
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.pytorch import Trainer
from ml4cube.training.residual import Residual

WINDOWS = {
    "to_pred": "anomaly",
    "features": ["anomaly", "ocean"],
    "coord_features": ["dayofyear", "longitude", "latitude"],
    "sample_size": {"time": 2, "latitude": 18, "longitude": 72},
    "overlap": {"time": 0.5, "longitude": 0.5},
    "target_offset": {"time": 2},  # the month after two months of input
    "target_size": {"time": 1},
    "rollout": 3,  # trained on three months of its own output, so that errors do not grow
    "fill_method": {"anomaly": "constant"},  # land has the anomaly 0; the loss leaves it out
    "const": 0.0,
    "drop_nan": None,
}


def main() -> None:
    """Train, forecast, and say where the forecast is better than simple ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    out = Path("forecast-output")
    out.mkdir(exist_ok=True)

    sst = open_truth().rename("anomaly")
    cube = assign_time_split(sst.to_dataset(), split=0.65, val=0.1)
    train_means = cube.anomaly.where(cube.split == 1).groupby("time.month").mean()
    cube["anomaly"] = (cube.anomaly.groupby("time.month") - train_means).assign_attrs(units="K")
    cube = cube.drop_vars("month").assign(ocean=sst[0].drop_vars("time").notnull() * 1.0)

    train = PTXrDataset(cube, **WINDOWS)
    val = PTXrDataset(cube, part="val", statistics=train.statistics, **WINDOWS)
    loader, val_loader = prep_dataloader(train, val_ds=val, batch_size=16)
    torch.manual_seed(0)
    sizes = ((2 * len(train.channels), 16), (16, 16), (16, 1))
    first, second, last = (nn.Conv2d(n, m, 5, padding=2) for n, m in sizes)
    nn.init.zeros_(last.weight)  # no change, which is persistence, before it is trained
    network = [nn.Flatten(1, 2), first, nn.GELU(), nn.Dropout2d(0.1), second, nn.GELU(), last]
    model = Residual(nn.Sequential(*network), train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    steps = args.epochs * len(loader)
    rate = {"scheduler": OneCycleLR(optimizer, 2e-3, steps), "scheduler_step_on_batch": True}
    options = {"loss": MaskedLoss(nn.MSELoss()), "epochs": args.epochs, "seed": 0, **rate}
    model = Trainer(model, loader, val_loader, optimizer, early_stopping=False, **options).train()

    path = out / "forecast.zarr"
    forecast = predict_cube(model, cube, train, out=path, rollout=6, overwrite=True)
    baselines = ["persistence", "damped_persistence", "climatology"]
    card = evaluate(forecast, cube, baselines=baselines, by="lead_time")
    print(card)
    card.plot().savefig(out / "scorecard.png", dpi=150)
    (out / "scorecard.json").write_text(card.to_json())


if __name__ == "__main__":
    main()
