"""ml4xcube's distributed Trainer: its signature and its example."""

import ast
import inspect

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.training.pytorch_distributed import Trainer
from tests.seeds import block
from tests.seeds.running import run_script


def declared_parameters() -> list[tuple[str, object]]:
    """Names and default values in the constructor that the block declares."""
    function = ast.parse(block("000_1").rstrip() + ": pass").body[0]
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(value) for value in function.args.defaults]
    required = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return list(zip(names, required + defaults, strict=True))


def test_constructor_has_every_declared_parameter_in_order():
    ours = list(inspect.signature(Trainer.__init__).parameters.values())
    declared = declared_parameters()
    assert [p.name for p in ours[: len(declared)]] == [name for name, _ in declared]
    for parameter, (name, default) in zip(ours, declared, strict=False):
        if default is not inspect.Parameter.empty:
            assert parameter.default == default, name


def test_train_takes_nothing_and_returns_a_module():
    declared = ast.parse("def " + block("000_2").strip() + ": pass").body[0]
    assert declared.name == "train"
    assert [argument.arg for argument in declared.args.args] == ["self"]
    signature = inspect.signature(Trainer.train, eval_str=True)
    assert list(signature.parameters) == ["self"]
    assert signature.return_annotation is torch.nn.Module


# The blocks leave three things open: the layer's sizes (`nn.Linear(...)`), and
# "extract X_train and y_train ... and potentially reshape". They are supplied around the
# block: a Linear that takes `...` for its sizes, and names that are worked out when the
# block first asks for them.
AROUND = """
import numpy as np, torch

class LinearOfOpenSize(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*((3, 2) if sizes == (...,) else sizes))

torch.nn.Linear = LinearOfOpenSize

class Supplied(dict):
    def __missing__(self, name):
        part, letter = {"train": 0, "test": 1}[name[2:]], {"X": 0, "y": 1}[name[0]]
        values = self[name[2:] + "_data"][letter]
        if letter == 1:
            return (np.asarray(values).reshape(-1) > 0).astype("int64")
        return np.asarray(values, dtype="float32").reshape(len(values), -1)

    def __getitem__(self, name):
        if name in self:
            return super().__getitem__(name)
        if name[:2] in ("X_", "y_"):
            return self.__missing__(name)
        raise KeyError(name)

names = Supplied(__name__="__main__")
exec(compile(open("block.py").read(), "block.py", "exec"), names)
model = names["trained_model"]
assert not any(key.startswith("module.") for key in model.state_dict())
saved = torch.load("best_model.pth", weights_only=True)
assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
assert not torch.equal(model.linear.weight, torch.zeros_like(model.linear.weight))
# one write, so that lines of two ranks do not mix
import sys
sys.stdout.write(f"samples {len(names['train_ds'])} {len(names['test_ds'])}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_example_runs(tmp_path, ranks):
    rng = np.random.default_rng(0)
    shape = {"time": 20, "lat": 200, "lon": 200}
    cube = xr.Dataset(
        {
            name: (tuple(shape), rng.normal(size=tuple(shape.values())).astype("float32"))
            for name in ("variable1", "variable2", "variable3", "variable4")
        },
        coords={dim: np.arange(n) for dim, n in shape.items()},
    )
    cube.chunk({"time": 10, "lat": 25, "lon": 25}).to_zarr(tmp_path / "sample_data.zarr")
    (tmp_path / "block.py").write_text(block("000_3"))

    printed = run_script(tmp_path, AROUND, ranks=ranks)

    train, test = map(int, printed.split("samples ")[1].split()[:2])
    chunk = 10 * 25 * 25
    # whole chunks of points, none lost: five, or as many more as it took to have a test sample
    assert (train + test) % chunk == 0
    assert train + test >= 5 * chunk
    assert min(train, test) >= chunk
