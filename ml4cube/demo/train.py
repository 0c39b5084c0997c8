"""Train the demo's network, with one process per rank, started by torchrun.

torchrun --nproc-per-node 2 -m ml4cube.demo.train --folder demo-output
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.demo.downscaling import TARGET
from ml4cube.demo.model import Downscaler, sea_mse
from ml4cube.training.pytorch_distributed import Trainer, ddp_init, dist_train

GLOBAL_BATCH = 4
SEED = 0


def build_model(data: PTXrDataset) -> Downscaler:
    """Build the network for the samples of a store."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        rows, columns = data[0][0].shape[1:]
        return Downscaler(len(data.features), (rows, columns))


def main() -> None:
    """Train on the stores of a folder, and write model and history to it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()

    world = ddp_init()
    train, val = (
        PTXrDataset(args.folder / f"{part}.zarr", to_pred=TARGET) for part in ("train", "val")
    )
    train_loader, val_loader = prep_dataloader(
        train, val, batch_size=max(1, GLOBAL_BATCH // world.size), parallel=True, seed=SEED
    )
    model = build_model(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=args.epochs * len(train_loader)
    )
    trainer = Trainer(
        model,
        train_loader,
        val_loader,
        optimizer,
        best_model_path=str(args.folder / "model.pt"),
        early_stopping=False,  # the learning rate falls until the last epoch
        loss=sea_mse,
        epochs=args.epochs,
        validate_parallelism=True,
        scheduler=scheduler,
        scheduler_step_on_batch=True,
        seed=SEED,
    )
    dist_train(trainer)
    if world.is_main:
        trainer.history.to_json(args.folder / "history.json")


if __name__ == "__main__":
    main()
