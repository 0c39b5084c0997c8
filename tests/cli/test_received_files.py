"""Files that somebody else wrote execute nothing: stores, runs and configurations of attackers."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ml4cube import CubeScaler, Statistics
from ml4cube.cli.by_name import PLACES, Names
from ml4cube.core.display import Summarized, Summary, Table, printable
from ml4cube.errors import InvalidValueError
from ml4cube.ledger.locations import location_of
from ml4cube.ledger.manifest import _manifest_bytes, read_manifest
from tests.cli.running import error_of, invoke, small_cube

torch = pytest.importorskip("torch")

MARK = "executed"
TOUCH = f"touch {MARK}"
# A module beside the files; importing it is enough.
EVIL = f"open({MARK!r}, 'w')\nimport torch\nclass Network(torch.nn.Conv2d): pass\n"
ATTACKS = {
    "another library": {"class": "subprocess:Popen", "args": ["touch", MARK]},
    "a function": {"class": "os:system", "command": TOUCH},
    "a module of the folder": "my_evil:Network",
    "a module of the folder, bare": "my_evil",
    "a walk through a module": {"class": "ml4cube.demo.__main__:subprocess.Popen", "args": [TOUCH]},
    "a walk through a safe one": {"class": "torch.nn:modules.module.os.system", "command": TOUCH},
    "an import of a safe one": {"class": "torch.nn.parallel.distributed:os", "command": TOUCH},
    "a sibling of a package": {"class": "torch.nnn:Evil"},
    "another part of torch": {"class": "torch.hub:load", "repo_or_dir": ".", "model": "evil"},
    "an extension": {"class": "torch.utils.cpp_extension:load", "name": "x", "sources": ["x"]},
    "a function of torch.nn": {"class": "torch.nn.utils:clip_grad_norm_"},
    "a class of ours of another kind": {"class": "ml4cube.cli.command:Command", "function": 1},
    "a function of ours": {"class": "ml4cube.training.sklearn:save_model", "path": MARK},
    "a name of a module": {"class": "torch.nn:functional"},
    "a private name": {"class": "torch.nn.modules.module:_WrappedHook"},
    "an estimator with a function": {
        "class": "sklearn.preprocessing:FunctionTransformer",
        "func": {"class": "os:system", "command": TOUCH},
    },
    "an attack in an argument": {
        "class": "torch.nn:Conv2d",
        "in_channels": {"class": "os:system", "command": TOUCH},
    },
    "an attack in a list": {
        "class": "torch.nn:Conv2d",
        "in_channels": [{"deeper": {"class": "my_evil:Network"}}],
    },
}
PLACE_ATTACKS = [
    ("optimizer", {"class": "torch.optim.optimizer:functools.partial", "func": "os"}),
    ("scheduler", {"class": "LambdaLR", "lr_lambda": {"class": "os:system", "command": TOUCH}}),
    ("scheduler", "partial"),
    ("loss", {"class": "TripletMarginWithDistanceLoss", "distance_function": {"class": "my_evil"}}),
    ("loss", "my_evil:Network"),
    ("metrics", {"a": "L1Loss", "b": "my_evil:Network"}),
    ("callbacks", ["Progress", "my_evil:Network"]),
    ("callbacks", {"class": "LossPlot", "path": MARK}),
    ("callbacks", {"class": "ml4cube.training.callbacks:ModelCheckpoint", "save_dir": MARK}),
    ("early_stopping", {"class": "BestModel", "path": MARK}),
    ("loggers", {"class": "CSVLogger", "path": MARK}),
    ("loggers", {"class": "TensorBoardLogger", "log_dir": MARK, "params": {"a": f"$({TOUCH})"}}),
    ("callbacks", {"class": "read_file", "path": "x"}),
    ("loggers", {"class": "ml4cube.training.loggers:importlib.import_module", "name": "my_evil"}),
    ("loader.augment", {"class": "ml4cube.training.loggers:CSVLogger", "path": MARK}),
    ("loader.callback", "my_evil:Network"),
    ("callback", {"class": "os:system", "command": TOUCH}),
    ("callback", "ml4cube.training.sklearn:save_model"),
]


@pytest.fixture
def evil(folder):
    Path("my_evil.py").write_text(EVIL)
    return folder


def write_run(model):
    Path("run").mkdir(exist_ok=True)
    config = {"model": model, "train_store": "train.zarr", "data": None}
    Path("run/config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("recipe", ATTACKS.values(), ids=ATTACKS)
def test_the_model_of_a_run_is_neither_imported_nor_called(evil, recipe, monkeypatch):
    monkeypatch.setattr("ml4cube.cli.predictions.samples_of", lambda *_: None)
    write_run(recipe)
    told = error_of("predict cube.zarr --run run --out x.zarr")
    assert re.search("it was neither imported nor called|must be a class|must be module:", told)
    assert not Path(MARK).exists()
    assert "my_evil" not in sys.modules
    assert os.getcwd() not in sys.path


@pytest.mark.parametrize(("argument", "recipe"), PLACE_ATTACKS)
def test_every_place_of_a_name_has_the_gate(evil, argument, recipe):
    with pytest.raises(InvalidValueError, match=r"neither imported nor called|must be a class or"):
        Names().make(argument, recipe, call=argument in ("optimizer", "scheduler"))
    assert not Path(MARK).exists()
    assert "my_evil" not in sys.modules


def test_every_argument_that_is_named_has_been_attacked():
    assert {name for name, _ in PLACE_ATTACKS} | {"model"} == set(PLACES)


def test_safe_classes_are_made_without_being_named_by_the_user():
    make = Names().make
    model = make("model", {"class": "torch.nn:Linear", "in_features": 2, "out_features": 1})
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(make("loss", {"class": "MaskedLoss", "loss": {"class": "MSELoss"}}), object)
    optimizer = make("optimizer", {"class": "Adafactor"}, model.parameters(), call=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    make("scheduler", {"class": "CosineAnnealingLR", "T_max": 2}, optimizer, call=True)
    make("scheduler", {"class": "WarmUpScheduler", "total_iters": 2}, optimizer, call=True)
    assert set(make("metrics", {"a": "RMSE", "b": "L1Loss"})) == {"a", "b"}
    assert make("early_stopping", {"class": "EarlyStopping", "patience": 3}).patience == 3
    assert len(make("callbacks", ["Progress", "RankReport"])) == 2
    logger = {"class": "CSVLogger", "path": "log.csv"}
    assert Names(frozenset({"CSVLogger"})).make("loggers", logger).path.name == "log.csv"
    assert make("loader.augment", {"class": "Flip", "dims": ["lon"]}).dims == ("lon",)


def test_a_copied_configuration_writes_no_file_that_is_executed_later(evil, monkeypatch):
    """Lines of a .pth file in site-packages are run by every Python; names of metrics are lines."""
    monkeypatch.setattr("ml4cube.cli.runs.samples_of", lambda *_: None)
    monkeypatch.setattr("ml4cube.cli.runs._loaders", lambda *_: (range(1), None))
    lines = {
        "model": {"class": "torch.nn:Linear", "in_features": 1, "out_features": 1},
        "metrics": {f"a\nimport os; os.system('{TOUCH}')#": "MSELoss"},
        "loggers": {"class": "CSVLogger", "path": "site-packages/evil.pth"},
    }
    Path("copy.yaml").write_text("# made by ml4cube 0.1.0\n" + yaml.safe_dump(CONFIG | lines))
    told = error_of("train --config copy.yaml")
    assert told.startswith("ml4cube train: loggers is CSVLogger(path='site-packages/evil.pth') in")
    assert """add --loggers '{"class": "CSVLogger", "path": "site-packages/evil.pth"}',""" in told
    assert not Path("site-packages").exists()


def test_the_refusal_prints_what_would_be_called_and_the_line_to_type(evil, monkeypatch):
    monkeypatch.setattr("ml4cube.cli.predictions.samples_of", lambda *_: None)
    monkeypatch.setattr("ml4cube.cli.predictions._load_weights", lambda *_: None)
    small_cube().to_zarr("cube.zarr")
    write_run({"class": "my_evil:Network", "in_channels": 1, "out_channels": 1, "kernel_size": 1})
    line = "predict cube.zarr --run run --out x.zarr --dry-run"
    told = error_of(line)
    assert told.startswith("ml4cube predict: model is my_evil:Network(in_channels=1, ")
    added = told.partition("add ")[2].partition(", or --trust")[0]
    assert shlex.split(added)[0] == "--model"
    invoke(f"{line} {added}")
    assert Path(MARK).exists()  # it is the user's now
    del sys.modules["my_evil"]
    invoke(f"{line} --trust")


@pytest.mark.parametrize("option", ["", "--dry-run", "--json", "--out again"])
def test_rerun_calls_nothing_of_a_provenance(cube, evil, option):
    line = "sample cube.zarr --sample-size '{lat: 2, lon: 2}' --to-pred y --nproc 1 "
    invoke(f"{line} --block-size '{{lat: 3, lon: 4}}' --train-cube t.zarr --test-cube u.zarr")
    for recipe in ({"class": "subprocess:Popen", "args": ["touch", MARK]}, "my_evil:Network"):
        rewrite_provenance("t.zarr", recipe)
        told = error_of(f"rerun t.zarr {option}")
        assert "t.zarr cannot be rerun: callback is" in told
        assert "it was neither imported nor called" in told
        assert not Path(MARK).exists()


def rewrite_provenance(store, recipe):
    """Name a callback in the attributes of a store, and forge its list of files."""
    path = Path(store, "zarr.json")
    group = json.loads(path.read_text())
    provenance = group["attributes"]["provenance"]
    group["attributes"]["spec"]["callback"] = "evil"
    provenance["callback"] = recipe
    path.write_text(json.dumps(group))
    data = path.read_bytes()
    files = read_manifest(location_of("store", store))
    files["zarr.json"] = [len(data), hashlib.sha256(data).hexdigest()]
    Path(store, "manifest/zarr.json").write_bytes(_manifest_bytes(files))


CONFIG = {
    "train_store": "t.zarr",
    "model": {"class": "my_evil:Network", "in_channels": 1, "out_channels": 1, "kernel_size": 1},
    "optimizer": "SGD",
    "loss": "MSELoss",
}


@pytest.mark.parametrize(
    ("path", "header", "is_typed"),
    [
        ("train.yaml", "", True),
        ("config.yaml", "", True),
        ("run/config.yaml", "", False),
        ("moved.yaml", "# made by ml4cube 0.1.0\n", False),
    ],
)
def test_a_configuration_is_the_users_own_unless_it_is_a_copy(
    evil, monkeypatch, path, header, is_typed
):
    monkeypatch.setattr("ml4cube.cli.runs.samples_of", lambda *_: None)
    monkeypatch.setattr("ml4cube.cli.runs._loaders", lambda *_: ())
    Path("run").mkdir()
    Path("run/best_model.pt").touch()
    Path(path).write_text(header + yaml.safe_dump(CONFIG))
    line = f"train --config {path} --run other --set optimizer.lrr=1"
    told = error_of(line)
    assert ("it was neither imported nor called" in told) != is_typed
    assert Path(MARK).exists() == is_typed
    assert "has no argument 'lrr'" in error_of(f"{line} --trust")
    assert Path(MARK).exists()


def test_a_file_cannot_say_that_it_is_trusted(evil):
    write_run("my_evil:Network")
    Path("predict.yaml").write_text("cube: cube.zarr\nrun: run\nout: x.zarr\ntrust: true\n")
    assert "has no argument 'trust'" in error_of("predict --config predict.yaml")
    assert not Path(MARK).exists()


# starts the command and then the worker processes of the sampler, as the command does
WORKERS = """
import operator
from ml4cube.cli import main as module

module.program = lambda: None
module.main()
from ml4cube.cube.engine import local_engine

with local_engine(2) as engine:
    print(sorted(engine.run(operator.add, 1, [1, 2])))
"""


@pytest.fixture
def shadows(folder):
    for name in ("pandas", "numpy", "torch", "xarray", "cloudpickle", "psutil", "wandb", "loky"):
        Path(f"{name}.py").write_text(f"open({MARK!r}, 'w')\n")


def start(*arguments):
    """Start Python and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_modules_of_the_working_directory_are_not_taken_for_libraries(cube, shadows):
    Path("my_callbacks.py").write_text("def same(sample):\n    return sample\n")
    line = (
        "sample cube.zarr --sample-size '{lat: 2, lon: 2}' --to-pred y --nproc 1 --train-cube "
        "t.zarr --test-cube u.zarr --block-size '{lat: 3, lon: 4}' --callback my_callbacks:same"
    )
    assert "train samples" in start("-m", "ml4cube", *shlex.split(line))
    assert not Path(MARK).exists()


@pytest.mark.slow
def test_workers_do_not_search_the_working_directory_either(shadows):
    assert start("-P", "-c", WORKERS) == "[(0, 2), (1, 3)]\n"
    assert not Path(MARK).exists()


# clears the screen, sets the title, goes to the line's start, reverses letters
RUDE = ("\x1b[2J", "\x1b]0;title\x07", "\r", "\u202e", "\x9b31m")


@pytest.fixture
def rude(folder):
    """A cube whose names, units and attributes control the terminal."""
    ds = small_cube().rename(a=f"a{RUDE[0]}", b=f"b{RUDE[3]}", lat=f"lat{RUDE[1]}")
    ds["y"].attrs["units"] = "".join(RUDE)
    ds.attrs["title"] = "".join(RUDE)
    ds.to_zarr("rude.zarr")
    return ds


def assert_harmless(text):
    shown = text.replace("\n", "")
    assert all(letter.isprintable() for letter in shown), repr(text)


def test_names_of_a_file_do_not_control_the_terminal(rude):
    for line in ("inspect rude.zarr", "inspect rude.zarr --json", "stats rude.zarr"):
        result = invoke(line)
        assert_harmless(result.stdout + result.stderr)
        assert "x1b" in result.stdout or "u001b" in result.stdout
    for line in ("stats rude.zarr --variables t", "sample rude.zarr --sample-size '{x: 2}'"):
        assert_harmless(error_of(line))


def test_reprs_of_what_a_file_names_do_not_control_the_terminal(rude):
    for one in (Statistics.from_cube(rude, split=None), CubeScaler().fit(rude), Rude()):
        assert_harmless(repr(one))
        assert "\\x1b" in repr(one) or one.__class__ is CubeScaler


class Rude(Summarized):
    def _summary(self):
        table = Table(RUDE, [RUDE])
        return Summary(RUDE[0], dict.fromkeys(RUDE, RUDE[0]), dict.fromkeys(RUDE, table))


@given(text=st.text())
def test_printable_texts_stay_as_they_are(text):
    harmless = printable(text)
    assert_harmless("".join(letter for letter in harmless if not letter.isspace()))
    assert printable(harmless) == harmless
    if text.isprintable():
        assert harmless == text
