"""Random training runs on two ranks against a DDP loop written by hand.

`make test-faults` runs many more seeds than the suite does.
"""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.training.pytorch_distributed import Trainer
from tests.distributed_runner import on_ranks

pytestmark = pytest.mark.slow

EVEN = {
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth": nn.SmoothL1Loss,
    "poisson": nn.PoissonNLLLoss,
    "logits": nn.BCEWithLogitsLoss,
}


def draw(seed):
    """Settings, data and a model: floats with every second seed, classes with the others."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    train, val = int(rng.integers(8, 50)), int(rng.integers(1, 30))
    x = [torch.randn(n, 3) for n in (train, val)]
    if seed % 2:
        loss = EVEN[rng.choice(list(EVEN))]()
        y = [torch.rand(n, 2) for n in (train, val)]
        out = 2
    else:
        loss = nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 5.0, 0.3]) if rng.random() < 0.6 else None,
            ignore_index=0 if rng.random() < 0.6 else -100,
        )
        # class 0 only in validation: torch's loss of a batch that is all ignored is NaN
        y = [torch.randint(1, 3, (train,)), torch.randint(0, 3, (val,))]
        y[1][-1] = 1
        out = 3
    data = [TensorDataset(*pair) for pair in zip(x, y, strict=True)]
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, out))
    settings = {
        "gradient_accumulation_steps": int(rng.choice([1, 1, 2, 3])),
        "gradient_clip": rng.choice([None, 0.05]),
        "epochs": int(rng.integers(1, 4)),
    }
    batch_size = int(rng.integers(1, 4))
    kind = rng.choice(["sgd", "adam"])
    return data, model, loss, settings, batch_size, kind


def optimizer_of(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loaders(data, batch_size, seed):
    return prep_dataloader(*data, batch_size=batch_size, parallel=True, seed=seed)


def by_hand(data, model, loss, settings, batch_size, kind, seed):
    """Train with torch alone; return the validation loss of every epoch and the best weights."""
    parallel = DistributedDataParallel(model)
    optimizer = optimizer_of(kind, model)
    loader, _ = loaders(data, batch_size, seed)
    window = settings["gradient_accumulation_steps"]
    curve, best = [], None
    for epoch in range(settings["epochs"]):
        loader.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, len(batches), window):
            together = batches[first : first + window]
            samples = sum(len(x) for x, _ in together)
            for position, (x, y) in enumerate(together, 1):
                last = position == len(together)
                with nullcontext() if last else parallel.no_sync():
                    (loss(parallel(x), y) * len(x) / samples).backward()
            if settings["gradient_clip"]:
                nn.utils.clip_grad_norm_(model.parameters(), settings["gradient_clip"])
            optimizer.step()
            optimizer.zero_grad()
        x, y = data[1].tensors
        with torch.no_grad():
            curve.append(float(loss(model(x), y)))
        if curve[-1] == min(curve):
            best = copy.deepcopy(model.state_dict())
    return curve, best


def check(seed):
    data, model, loss, settings, batch_size, kind = draw(seed)
    ours = copy.deepcopy(model)
    train, val = loaders(data, batch_size, seed)
    trainer = Trainer(
        ours, train, val, optimizer_of(kind, ours), loss=loss, early_stopping=False,
        device="cpu", **settings,
    )  # fmt: skip
    trained = trainer.train()
    x, y = data[1].tensors
    with torch.no_grad():
        returned = float(loss(trained(x), y))
    found = trainer.history["val_loss"]
    np.testing.assert_allclose(returned, min(found), rtol=1e-5, atol=1e-7, err_msg=str(seed))
    if seed % 2:
        curve, best = by_hand(data, model, loss, settings, batch_size, kind, seed)
        np.testing.assert_allclose(found, curve, rtol=2e-5, atol=1e-6, err_msg=str(seed))
        if np.diff(np.sort(curve)[:2]).min(initial=1.0) > 1e-5:  # or the best may be either
            for name, tensor in trained.state_dict().items():
                torch.testing.assert_close(tensor, best[name], rtol=2e-5, atol=1e-5)
    return found


def check_all(first, last):
    return [check(seed) for seed in range(first, last)]


def test_random_runs_agree_with_a_loop_by_hand():
    one, two = on_ranks(2, check_all, 0, 30, timeout=120.0)
    assert one == two


@pytest.mark.soak
def test_many_random_runs_agree_with_a_loop_by_hand():
    on_ranks(2, check_all, 1000, 1400, timeout=280.0)
