"""Blocks that use AdvancedTrainer, MultiGPUTrainer and DistributedTrainer."""

import pytest

from tests.seeds import block
from tests.seeds.running import run_script

pytestmark = pytest.mark.slow

AROUND = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)

class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

x = torch.randn(64, 4)
train_dataset = TensorDataset(x, x[:, :3].argmax(1))
train_loader = DataLoader(train_dataset, batch_size=8, shuffle=True)
val_loader = DataLoader(train_dataset, batch_size=16)
scheduler = None
model = MyModel()
"""


def here(name: str) -> str:
    """The block, importing from this package instead of the files it names."""
    text = block(name)
    for module in ("trainer", "distributed"):
        text = text.replace(f"from {module} import", f"from ml4cube.training.{module} import")
    return text


def test_basic_training(tmp_path):
    after = "\nassert min(history['val_loss']) < history['val_loss'][0]\n"
    run_script(tmp_path, AROUND + here("003_1") + after)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_multi_gpu_training(tmp_path):
    run_script(tmp_path, AROUND + here("003_2"))
    assert (tmp_path / "checkpoint.pt").is_file()


def test_distributed_training_on_two_ranks(tmp_path):
    before = (
        "import os\nrank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
    )
    after = (
        "\nseen = torch.tensor([sum(len(x) for x, y in train_loader)])\n"
        "torch.distributed.all_reduce(seen)\n"
        "assert int(seen) == 64 and len(train_loader) == 1, seen\n"
    )
    run_script(tmp_path, AROUND + before + here("003_3") + after, ranks=2)
    assert (tmp_path / "checkpoint.pt").is_file()
