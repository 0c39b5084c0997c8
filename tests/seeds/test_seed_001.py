"""zae-engine's Trainer with add-ons, and training on several devices."""

import inspect

import pytest
import torch

from ml4cube.training.addons import AddOnBase
from ml4cube.training.trainer import ProgressChecker, Trainer
from tests.seeds import block
from tests.seeds.running import run_script

pytestmark = pytest.mark.slow


def replaced(text: str, old: str, new: str) -> str:
    """`text` with its only `old` replaced."""
    assert text.count(old) == 1
    return text.replace(old, new)


# The names that the first block takes for granted, and a stand-in for the wandb package, which
# would want the network.
AROUND = """
import sys, types
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
sent = []
wandb = types.ModuleType("wandb")
wandb.init = lambda **arguments: sent.append(arguments["project"]) or wandb
wandb.log = lambda values, step: sent.append((step, values["train_loss"], values["val_loss"]))
wandb.finish = lambda: sent.append("finished")
sys.modules["wandb"] = wandb

x = torch.randn(64, 4)
data = TensorDataset(x, x[:, :3].argmax(1))
train_loader, valid_loader = DataLoader(data, batch_size=8), DataLoader(data, batch_size=16)
my_model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
my_optimizer = torch.optim.Adam(my_model.parameters(), lr=1e-2)
my_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, 5, 0.5)
"""
AFTER = """
losses = [entry[2] for entry in sent[1:-1]]
assert (sent[0], sent[-1], len(losses)) == ("my_project", "finished", 10), sent
assert losses[-1] < losses[0]
assert my_optimizer.param_groups[0]["lr"] == 0.0025
saved = torch.load("checkpoints/model.ckpt", weights_only=True)
assert trainer.best_epoch == trainer.load_state()
assert all(torch.equal(saved[name], value) for name, value in my_model.state_dict().items())
"""


def test_basic_usage(tmp_path):
    """Two things are not as in the text.

    It uses Trainer itself, which it says must be subclassed, so one argument is added: the
    loss. Without a GPU, 'cuda' is 'cpu'.
    """
    text = replaced(
        block("001_1"), "mode='train',", "mode='train',\n    loss=nn.CrossEntropyLoss(),"
    )
    if not torch.cuda.is_available():
        text = replaced(text, "device='cuda'", "device='cpu'")
    run_script(tmp_path, AROUND + text + AFTER)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "model.ckpt",
        "state.ckpt",
    ]


# Keeps hold of the model that the block makes inside a function, and of what it was at first.
RECORD = """
import torch

class Recorded(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        Recorded.made = self, {name: value.clone() for name, value in self.state_dict().items()}

torch.nn.Linear = Recorded
"""
COMPARE = """
    model, first = Recorded.made
    saved = torch.load("dummy_model_mgpu.pth", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value), name
        assert not torch.equal(first[name], value), name
"""


def test_multi_gpu_addon(tmp_path):
    """One thing is not as in the text: on a machine with less than two GPUs, two are counted.

    So its assertion holds, and the add-on, which finds that they are not there, trains on two
    processes on the CPU.
    """
    text = block("001_2")
    if torch.cuda.device_count() < 2:
        text = replaced(text, "torch.cuda.device_count()", "2")
    printed = run_script(tmp_path, RECORD + text + COMPARE)
    assert "Model saved as 'dummy_model_mgpu.pth'." in printed
    if not torch.cuda.is_available():
        assert "this machine has no GPU; using the CPU" in printed


def test_every_name_of_the_text_is_there():
    parameters = inspect.signature(Trainer).parameters
    for name in ("model", "device", "mode", "optimizer", "scheduler", "log_bar", "gradient_clip"):
        assert name in parameters
    assert parameters["gradient_clip"].default == 0.0
    methods = {
        "train_step": ["batch"],
        "test_step": ["batch"],
        "run": ["n_epoch", "loader", "valid_loader"],
        "run_epoch": ["loader"],
        "run_batch": ["batch"],
        "metric_on_epoch_end": [],
    }
    for name, arguments in methods.items():
        assert list(inspect.signature(getattr(Trainer, name)).parameters)[1:] == arguments
    assert inspect.signature(Trainer.add_on).parameters["add_on_cls"].kind.name == "VAR_POSITIONAL"
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, "cpu", "test", loss=torch.nn.MSELoss())
    assert trainer.log_train == trainer.log_test == {}
    assert isinstance(trainer.progress_checker, ProgressChecker)
    with pytest.raises(TypeError, match="abstract"):
        AddOnBase()
