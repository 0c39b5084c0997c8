"""Train on the stores that distributed_dataset_creation.py wrote, on one rank or many.

    python examples/distributed_training.py                                # one process
    torchrun --nproc-per-node 2 examples/distributed_training.py           # two, CPU or GPU
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/distributed_training.py --stores /shared/stores           # a cluster

After an interruption, the same command resumes from the last snapshot.
"""

import argparse
from pathlib import Path

import torch

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.training.pytorch_distributed import Trainer, ddp_init, dist_train


def build_model(inputs: int, outputs: int) -> torch.nn.Module:
    """Three convolutions that keep the window's size."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(inputs, 32, 3, padding=1),
        torch.nn.GELU(),
        torch.nn.Conv2d(32, 32, 3, padding=1),
        torch.nn.GELU(),
        torch.nn.Conv2d(32, outputs, 1),
    )


def main() -> None:
    """Open the stores, train, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", type=Path, default=Path("stores"))
    parser.add_argument("--target", default="greenness")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    ddp_init()
    train, val = (
        PTXrDataset(str(args.stores / f"{part}.zarr"), to_pred=args.target)
        for part in ("train", "val")
    )
    train_loader, val_loader = prep_dataloader(
        train, val, batch_size=args.batch_size, parallel=True, num_workers=2
    )
    torch.manual_seed(0)
    model = build_model(len(train.features), len(train.targets))
    trainer = Trainer(
        model=model,
        train_data=train_loader,
        test_data=val_loader,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        save_every=1,
        best_model_path=str(args.stores / "best_model.pt"),
        snapshot_path=str(args.stores / "snapshot.pt"),
        loss=torch.nn.MSELoss(),
        metrics={"mae": torch.nn.L1Loss()},
        epochs=args.epochs,
        patience=5,
        validate_parallelism=True,
        create_loss_plot=True,
    )
    dist_train(trainer)


if __name__ == "__main__":
    main()
