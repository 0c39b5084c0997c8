"""Ranks whose models differ, and classes that only the script of the ranks knows."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from ml4cube.errors import InvalidValueError
from ml4cube.training.pytorch_distributed import Trainer
from tests.distributed_runner import TwoRanks
from tests.training_parts import ROOT, loader

TWO_RANKS = TwoRanks()
on_two_ranks, ran = TWO_RANKS.add, TWO_RANKS.fixture()


def of(model, **arguments):
    """A Trainer of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader(8), loader(8)
    return Trainer(model, *data, optimizer, loss=nn.MSELoss(), device="cpu", **arguments)


@on_two_ranks
def models_that_differ_are_refused_by_name(folder):
    rank = torch.distributed.get_rank()
    wider = nn.Sequential(nn.Linear(3, 2 + rank), nn.Linear(2 + rank, 1))
    deeper = nn.Sequential(*[nn.Linear(3, 3) for _ in range(rank)], nn.Linear(3, 1))
    shapes = {0: re.escape("(2, 3)"), 1: re.escape("(3, 3)")}
    seen = rf"0\.weight has the shape {shapes[rank]} on rank {rank} and {shapes[1 - rank]} on rank"
    for strategy in ("ddp", "fsdp"):
        match = rf"must be the same on all ranks, but {seen} {1 - rank}, and 2 more"
        with pytest.raises(InvalidValueError, match=match):
            of(wider, strategy=strategy).train()
    with pytest.raises(InvalidValueError, match=r"0\.weight has the shape"):
        of(deeper).evaluate(loader(8))
    of(nn.Linear(3, 1), epochs=1).train()  # ranks can go on with equal ones


test_on_two_ranks = TWO_RANKS.test()

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ml4cube.training.pytorch_distributed import Trainer, dist_train


class Bias:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def update(self, pred, target):
        self.sum, self.n = self.sum + float((pred - target).sum()), self.n + len(pred)

    def merge(self, other):
        self.sum, self.n = self.sum + other.sum, self.n + other.n
        return self

    def compute(self):
        return self.sum / self.n

    def reset(self):
        self.sum, self.n = 0.0, 0


def run():
    x = torch.arange(12.0).reshape(-1, 1) / 12
    data = TensorDataset(x, x)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(data, 4), DataLoader(data, 4)
    trainer = Trainer(
        model, *loaders, optimizer, loss=nn.MSELoss(), metrics={"bias": Bias()}, epochs=2,
        device="cpu",
    )
    trainer.train()
    with torch.no_grad():
        truth = float((model(x) - x).mean())
    return trainer.history["bias"][trainer.best_epoch - 1], truth


value, truth = dist_train(run, 2)
assert abs(value - truth) < 1e-6, (value, truth)
print("done")
"""


@pytest.mark.slow
def test_a_metric_of_the_script_is_joined_over_its_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.stdout == "done\n", done.stderr
