"""Predict a cube with a trained model, on the original grid, with units and gaps.

    python examples/predict_cube.py                # trains a small model on a synthetic cube first
    python examples/predict_cube.py --cube my_cube.zarr --stores stores --target ndvi

In the second form, the stores and the model come from the two other examples.
"""

import argparse
from pathlib import Path

import torch
import xarray as xr
from distributed_dataset_creation import made_cube
from distributed_training import build_model

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.evaluation.metrics import score_cube
from ml4cube.prediction import predict_cube
from ml4cube.splits import assign_block_split
from ml4cube.training.pytorch import Trainer


def prepare(stores: Path, cube: xr.Dataset, target: str) -> None:
    """Write stores and train a model for two epochs."""
    cube = assign_block_split(cube, block_size={"lat": 12, "lon": 12}, seed=1)
    MultiProcSampler(
        cube,
        train_cube=stores / "train.zarr",
        test_cube=stores / "test.zarr",
        sample_size={"lat": 6, "lon": 6},
        to_pred=target,
        nproc=2,
    ).run()
    data = [PTXrDataset(stores / f"{part}.zarr", to_pred=target) for part in ("train", "test")]
    train_loader, test_loader = prep_dataloader(*data, batch_size=64)
    model = build_model(len(data[0].features), 1)
    Trainer(
        model,
        train_loader,
        test_loader,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        best_model_path=str(stores / "best_model.pt"),
        loss=torch.nn.MSELoss(),
        epochs=2,
    ).train()


def main() -> None:
    """Load the model, predict, and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cube", help="path or URL of a zarr cube; a made one if absent")
    parser.add_argument("--stores", type=Path, default=Path("predict-stores"))
    parser.add_argument("--target", default="greenness")
    parser.add_argument("--out", type=Path, default=Path("prediction.zarr"))
    args = parser.parse_args()

    cube = xr.open_zarr(args.cube) if args.cube else made_cube()
    if not (args.stores / "best_model.pt").exists():
        args.stores.mkdir(parents=True, exist_ok=True)
        prepare(args.stores, cube, args.target)

    data = PTXrDataset(args.stores / "train.zarr", to_pred=args.target)
    model = build_model(len(data.features), len(data.targets))
    model.load_state_dict(torch.load(args.stores / "best_model.pt", weights_only=True))

    overlap = dict.fromkeys(data.metadata.recipe.window_dims, 0.5)
    predicted = predict_cube(
        model, cube, args.stores / "train.zarr", out=args.out, overlap=overlap, overwrite=True
    )
    print(predicted)
    print(score_cube(predicted, cube[[args.target]], metrics=["rmse", "r2"]).to_dataframe())


if __name__ == "__main__":
    main()
