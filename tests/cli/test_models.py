"""`train`, `predict` and `evaluate` on real data, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

from ml4cube.cli.by_name import Names
from ml4cube.cli.doctor import _progress
from ml4cube.evaluation import Scorecard
from ml4cube.evaluation import evaluate as compare
from ml4cube.splits import assign_time_split
from tests.cli.running import error_of, invoke

torch = pytest.importorskip("torch")
iris_sample_data = pytest.importorskip("iris_sample_data")

MODULE = """
import torch


class NextMonth(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.change = torch.nn.Sequential(
            torch.nn.Conv3d(1, width, 1), torch.nn.GELU(), torch.nn.Conv3d(width, 1, 1)
        )

    def forward(self, x):
        return x + self.change(x)


def narrow(*, width):
    return NextMonth(width)


def absolute(pred, target, power=1.0):
    return (pred - target).abs().pow(power).mean()
"""
TRAIN = (
    "train train.zarr val.zarr --model my_models:NextMonth --set model.width=4 --optimizer AdamW "
    "--set optimizer.lr=1e-2 --set loss.class=MaskedLoss --set loss.loss.class=MSELoss "
    "--set data.target_offset.time=1 --set data.features=past --batch-size 16 "
)


@pytest.fixture(scope="module")
def sst(tmp_path_factory):
    """Monthly sea surface temperatures in the Atlantic, with land as gaps, and stores of them."""
    folder = tmp_path_factory.mktemp("sst")
    with xr.open_dataset(Path(iris_sample_data.path) / "ostia_monthly.nc") as ds:
        cube = ds.surface_temperature.isel(longitude=slice(0, 48)).load().rename("sst")
    cube = cube.drop_vars([name for name in cube.coords if name not in cube.dims])
    xr.Dataset({"sst": cube, "past": cube}).to_zarr(folder / "sst.zarr")
    before = os.getcwd()
    os.chdir(folder)
    Path("my_models.py").write_text(MODULE)
    invoke("split sst.zarr --method time --split 0.6 --val 0.2 --out split.json")
    invoke(
        "sample sst.zarr --recipe split.json --sample-size '{time: 2, latitude: 6, longitude: 6}' "
        "--to-pred sst --drop-nan if_all_nan --fill-method mean --nproc 1 --train-cube train.zarr "
        "--test-cube test.zarr --val-cube val.zarr"
    )
    os.chdir(before)
    return folder


@pytest.fixture
def run(sst, folder):
    for path in sst.iterdir():
        (folder / path.name).symlink_to(path)


@pytest.mark.slow
def test_a_forecast_of_real_temperatures(run):
    trained = json.loads(invoke(f"{TRAIN} --epochs 2 --run run --json").stdout)
    assert trained["epochs"] == 2
    history = json.loads(Path("run/history.json").read_text())
    assert min(history["val_loss"]) == trained["best_value"]
    assert "already complete" in invoke(f"{TRAIN} --epochs 2 --run run", code=3).stderr
    assert json.loads(invoke(f"{TRAIN} --epochs 3 --run run --json").stdout)["epochs"] == 3

    told = error_of("predict sst.zarr --run run --out forecast.zarr")
    named = """--model '{"class": "my_models:NextMonth", "width": 4}'"""
    assert f"If you trust it, add {named}, or --trust" in told
    run_of_mine = f"predict sst.zarr --run run {named}"
    invoke(f"{run_of_mine} --out forecast.zarr --init-times '2009-08-16'")
    forecast = xr.open_zarr("forecast.zarr", decode_timedelta=True)
    assert forecast.sst.dims == ("init_time", "lead_time", "latitude", "longitude")
    invoke("predict sst.zarr --run run --trust --out all.zarr")
    Path("all.zarr.yaml").unlink()  # as if it had found no room
    told = invoke("predict sst.zarr --run run --trust --out all.zarr").stderr
    assert "all.zarr exists already, complete and made by the same call" in told
    assert Path("all.zarr.yaml").exists()
    line = "evaluate all.zarr sst.zarr --recipe split.json --baselines '[persistence, climatology]'"
    report = json.loads(invoke(f"{line} --out scores.json --json").stdout)
    card = compare(
        "all.zarr",
        assign_time_split(xr.open_zarr("sst.zarr"), 0.6, val=0.2),
        baselines=["persistence", "climatology"],
    )
    assert report["verdict"] == card.verdict
    assert Scorecard.from_json(Path("scores.json").read_text()).verdict == card.verdict
    scored = {(r["model"], r["metric"]): r["value"] for r in report["scores"]}
    assert scored["prediction", "rmse"] < 1.5 < 300  # K, unscaled

    # the same weights, given one by one, and from the snapshot
    same = "--model my_models:NextMonth --set model.width=4 --store-or-stats train.zarr"
    for weights in ("run/best_model.pt", "run/snapshot.pt"):
        plan = invoke(f"predict sst.zarr --weights {weights} {same} --out x.zarr --dry-run").stdout
        assert weights in plan
    assert not Path("x.zarr").exists()
    os.rename("train.zarr", "moved.zarr")
    invoke(f"{run_of_mine} --out moved_forecast.zarr --store-or-stats moved.zarr")
    os.rename("moved.zarr", "train.zarr")
    assert xr.open_zarr("moved_forecast.zarr").sst.equals(xr.open_zarr("all.zarr").sst)
    told = error_of("predict sst.zarr --run run --out x.zarr --model my_models:NextMonth")
    assert "has the weights of another model" in told

    found = json.loads(invoke("doctor run --json").stdout)["findings"]
    assert {row["level"] for row in found if row["subject"] != "ranks"} == {"ok"}
    weights = Path("run/best_model.pt")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    Path("run/config.yaml").unlink()
    found = json.loads(invoke("doctor run --json", code=1).stdout)["findings"]
    assert {row["subject"] for row in found if row["level"] == "error"} == {
        "best_model.pt",
        "config.yaml",
    }


@pytest.mark.slow
def test_two_ranks_share_the_work(run):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    config = invoke(f"{TRAIN} --epochs 1 --run run --print-config").stdout
    Path("train.yaml").write_text(config)
    done = subprocess.run(
        [*launcher, "-m", "ml4cube", "train", "--config", "train.yaml", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epochs"] == 1  # rank 0 alone reports
    ranks = json.loads(Path("run/history.json").read_text())["ranks"][0]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert abs(ranks[0]["train_n"] - ranks[1]["train_n"]) <= 16
    assert yaml_of("run/config.yaml") == {
        **yaml_of("train.yaml"),
        "train_store": os.path.abspath("train.zarr"),
        "val_store": os.path.abspath("val.zarr"),
    }


def yaml_of(path):
    import yaml

    return yaml.safe_load(Path(path).read_text())


@pytest.mark.slow
def test_dry_runs_of_training_make_nothing(run):
    before = sorted(Path().rglob("*"))
    plan = json.loads(invoke(f"{TRAIN} --dry-run --json").stdout)
    assert plan["features"] == ["past"]
    assert plan["parameters"] == 4 * 2 + 5
    invoke(f"{TRAIN} --fast-dev-run")
    after = [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


@pytest.mark.slow
def test_a_run_keeps_its_configuration_and_its_weights(run):
    invoke(f"{TRAIN} --epochs 1 --run run")
    kept = Path("run/config.yaml").read_text()
    # nothing is left to train, and another model is refused before that
    invoke(f"{TRAIN} --epochs 1 --run run", code=3)
    told = error_of(f"{TRAIN} --epochs 1 --run run --set model.width=8")
    assert "run was trained with model" in told
    assert Path("run/config.yaml").read_text() == kept
    invoke("stats sst.zarr --recipe split.json --out stats.json")
    told = error_of("predict sst.zarr --run run --store-or-stats stats.json --out x.zarr")
    assert "must be a sample store with run" in told
    Path("run/snapshot.pt").unlink()
    weights = Path("run/best_model.pt").read_bytes()
    assert "has best_model.pt, but no snapshot.pt" in error_of(f"{TRAIN} --run run")
    assert Path("run/best_model.pt").read_bytes() == weights
    # of a run that was killed before its first snapshot, the same command starts anew
    Path("run/history.json").unlink()
    told = error_of(f"{TRAIN} --run run --set model.width=8")
    assert "run was trained with model" in told
    invoke(f"{TRAIN} --epochs 1 --run run")
    assert {"snapshot.pt", "history.json"} <= set(os.listdir("run"))
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("# my notes\nrun: mine\n")
    assert "no command of ml4cube made it" in error_of(f"{TRAIN} --run mine")
    Path("my_notes").mkdir()
    Path("my_notes/history.json").write_text("my notes")
    assert "is no folder of a run" in error_of(f"{TRAIN} --run my_notes")
    stopping = "--early-stopping '{class: EarlyStopping, patience: 3}'"
    assert "parameters" in invoke(f"{TRAIN} --run 0123 {stopping} --dry-run").stdout


WRONG = [
    ("--model my_models:NextMont", "has no 'NextMont'; did you mean 'NextMonth'"),
    ("--model NextMonth", "a name must be module:name"),
    ("--set model.widht=3", "model 'my_models:NextMonth' has no argument 'widht'; did you mean"),
    ("--optimizer AdmW", "optimizer must be a class or function of 'torch.optim', got 'AdmW'"),
    ("--set optimizer.lrr=1", "optimizer 'AdamW' has no argument 'lrr'; did you mean 'lr'"),
    ("--set optimizer.lr=-1", "optimizer 'AdamW': Invalid learning rate: -1"),
    ("--set model.width=wide", "model 'my_models:NextMonth': "),
    ("--set loader.buffer=1", "loader has no argument 'buffer'"),
    ("--set data.coords=lat", "data has no argument 'coords'"),
    ("--loader 3", "loader must be a mapping of arguments, got 3"),
    ("--set loss.class=MaskedLos", "did you mean 'MaskedLoss'"),
    ("--precision fp17", "precision must be"),
    ("--epochs 0", "epochs must be an int of 1 or more"),
]


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(run):
    for options, message in WRONG:
        assert message in error_of(f"{TRAIN} {options}")
    assert "needs run, or model and weights" in error_of("predict sst.zarr --out x.zarr")
    assert not Path("run").exists()
    assert "is a zarr store, not a folder of a run" in error_of(f"{TRAIN} --run sst.zarr")


def test_objects_by_name(folder):
    Path("my_models.py").write_text(MODULE)
    make = Names(trusts=True).make
    assert isinstance(make("loss", "MSELoss"), torch.nn.MSELoss)
    loss = make("loss", {"class": "my_models:absolute", "power": 2.0})
    assert loss(torch.tensor([3.0]), torch.tensor([1.0])) == 4
    assert make("loss", "my_models:absolute").__name__ == "absolute"
    masked = make("loss", {"class": "MaskedLoss", "loss": {"class": "HuberLoss", "delta": 0.5}})
    assert masked.loss.delta == 0.5
    model = make("model", {"class": "my_models:narrow", "width": 3}, call=True)
    assert model.change[0].out_channels == 3
    optimizer = make("optimizer", {"class": "SGD", "lr": 0.5}, model.parameters(), call=True)
    assert optimizer.param_groups[0]["lr"] == 0.5
    metrics = make("metrics", {"mae": "L1Loss", "rmse": "my_models:absolute"})
    assert isinstance(metrics["mae"], torch.nn.L1Loss)
    assert make("early_stopping", {"class": "EarlyStopping", "patience": 3}).patience == 3
    assert make("early_stopping", False) is False
    assert make("callbacks", ()) == []
    assert make("loader.augment", {"class": "Flip", "dims": ["lon"]}).dims == ("lon",)


def test_a_module_that_lacks_another_says_which(folder):
    Path("lacks_another.py").write_text("import not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="'not_installed'"):
        Names(trusts=True).make("loss", "lacks_another:f")


def test_doctor_says_what_ranks_wait_for():
    rows = [
        {"rank": rank, "train_n": 8, "data_wait": data, "communicate": others}
        for rank, data, others in ((0, 0.05, 0.6), (1, 0.65, 0.01))
    ]
    history = {"epoch": [1, 2], "train_loss": [0.6, 0.5], "ranks": [[], rows]}
    state = {"epoch": 2, "step": 30, "batch": 4}
    found = [finding.found for finding in _progress({"state": state, "history": history})]
    assert found == [
        "stopped inside epoch 3, after 30 steps",
        "wait 35% of the time for data",
        "wait 30% of the time for one another",
        "the others wait for rank 1, which waits for data",
    ]
