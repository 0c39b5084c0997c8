"""What ranks compute in the fault tests, beside what one plain loop over all samples gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import R2Score
from torchmetrics.classification import BinaryAUROC

from ml4cube.errors import StoreError
from ml4cube.training.callbacks import ModelCheckpoint
from ml4cube.training.pytorch_distributed import Trainer
from ml4cube.training.ranks.dist import World
from tests.faults.training_job import data, model, share

Weights = dict[str, list[Any]]


def plain(net: nn.Module) -> Weights:
    """All values, small enough to send."""
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def linear() -> nn.Module:
    """A model without any randomness."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train(net: nn.Module, batches: Any, **more: Any) -> Trainer:
    """Train with SGD and momentum."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    arguments = {"loss": nn.MSELoss(), "epochs": 3, "device": "cpu", **more}
    trainer = Trainer(net, batches, arguments.pop("val", None), optimizer, **arguments)
    trainer.train()
    return trainer


def by_hand(windows: list[TensorDataset], epochs: int = 3) -> Weights:
    """One step per window on the mean over its samples: what all of it should be equal to."""
    net, loss_of = linear(), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for window in windows:
            x, y = window.tensors
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
    return plain(net)


def cut(source: TensorDataset, *pieces: range) -> TensorDataset:
    """The samples of several ranges together."""
    picked = [i for piece in pieces for i in piece]
    return TensorDataset(*(tensor[picked] for tensor in source.tensors))


# ------------------------------------------------------------------ equal to one process


def halves() -> tuple[Weights, list[float]]:
    """64 samples in steps of 8 over all ranks: 1 × 8 or 2 × 4."""
    world, source = World.current("cpu"), data(64, seed=5)
    batches = DataLoader(source, 8 // world.size, sampler=share(source, shuffle=False))
    trainer = train(linear(), batches, val=DataLoader(data(37, seed=6), 5))
    return plain(trainer.model), [*trainer.history["train_loss"], *trainer.history["val_loss"]]


WINDOWS_EVEN = [(24, range(24)), (14, range(24, 38))]
SIZES_UNEVEN = ((4, 4, 1), (2, 4, 4))


def partial_windows() -> list[Weights]:
    """Three batches of 4 to a step, 19 samples a rank; then lists of batches, two to a step."""
    world, source = World.current("cpu"), data(38, seed=5)
    even = DataLoader(source, 4, sampler=share(source, shuffle=False))
    first = train(linear(), even, gradient_accumulation_steps=3)
    start, own = 19 * world.rank, []
    for size in SIZES_UNEVEN[world.rank]:
        own.append(cut(source, range(start, start + size)).tensors)
        start += size
    second = train(linear(), own, gradient_accumulation_steps=2)
    return [plain(trainer.model) for trainer in (first, second)]


def partial_windows_by_hand() -> list[Weights]:
    """The same samples per step, from one process."""
    source = data(38, seed=5)
    even = [cut(source, samples) for _, samples in WINDOWS_EVEN]
    uneven = [
        cut(source, range(8), range(19, 25)),
        cut(source, range(8, 9), range(25, 29)),
    ]
    return [by_hand(even), by_hand(uneven)]


# -------------------------------------------------------------------- exact validation


class AboveZero(BinaryAUROC):
    """AUROC of "the target is above zero"."""

    def update(self, pred: torch.Tensor, target: torch.Tensor) -> None:
        super().update(pred.sigmoid(), (target > 0).int())


def scores(samples: int) -> dict[str, float]:
    """Loss and metrics of an untrained model on a few samples, shared out over ranks."""
    source, val = data(8, seed=1), few(samples)
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    trainer = Trainer(
        net,
        DataLoader(source, 4),
        DataLoader(val, 1, sampler=share(val, shuffle=False)),
        optimizer,
        loss=nn.MSELoss(),
        metrics={"auroc": AboveZero(), "r2": R2Score()},
        epochs=1,
        device="cpu",
    )
    trainer.train()
    return {name: trainer.history[name][0] for name in ("val_loss", "auroc", "r2")}


def few(samples: int) -> TensorDataset:
    """Validation samples, both classes among the first two."""
    x, y = data(samples, seed=3).tensors
    y[0], y[1] = y[0].abs() + 0.1, -y[1].abs() - 0.1
    return TensorDataset(x, y)


def scores_by_hand(samples: int) -> dict[str, float]:
    """All samples in one batch."""
    x, y = few(samples).tensors
    with torch.no_grad():
        pred = linear()(x)
    auroc, r2 = AboveZero(), R2Score()
    auroc.update(pred, y)
    r2.update(pred, y)
    loss = nn.functional.mse_loss(pred, y)
    return {"val_loss": float(loss), "auroc": float(auroc.compute()), "r2": float(r2.compute())}


# ---------------------------------------------------------------------------- files


def with_norm(folder: str) -> tuple[float, float]:
    """Train a BatchNorm model; the validation loss reported for the best epoch."""
    source, val = data(104, seed=1), data(37, seed=2)
    keep = ModelCheckpoint(Path(folder) / "top", save_top_k=1)
    trainer = train(
        model(),
        DataLoader(source, 4, sampler=share(source, shuffle=True)),
        val=DataLoader(val, 5, sampler=share(val, shuffle=False)),
        best_model_path=f"{folder}/best.pt",
        snapshot_path=f"{folder}/snapshot.pt",
        epochs=5,
        seed=World.current("cpu").rank,
        callbacks=[keep],
    )
    assert trainer.best_loss is not None
    return trainer.best_loss, min(trainer.history["val_loss"])


def refused(folder: str) -> tuple[str, bool]:
    """What a rank says of a snapshot with one flipped bit, and whether the best model stayed."""
    world = World.current("cpu")
    snapshot, best = Path(folder) / "snapshot.pt", Path(folder) / "best.pt"
    before = best.read_bytes()
    if world.is_main:
        raw = bytearray(snapshot.read_bytes())
        raw[len(raw) // 2] ^= 1
        snapshot.write_bytes(raw)
    world.share(None)
    try:
        with_norm(folder)
    except StoreError as error:
        return str(error), best.read_bytes() == before
    return "nothing", False


def all_on_two(folder: str) -> dict[str, Any]:
    """All that two ranks are to show, in one start."""
    return {
        "halves": halves(),
        "windows": partial_windows(),
        "norm": with_norm(folder),
        "refused": refused(folder),
    }


def all_on_three() -> dict[int, dict[str, float]]:
    """Fewer samples than ranks, and more."""
    return {samples: scores(samples) for samples in (2, 37)}
