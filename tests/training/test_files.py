"""Files of a run: tried before training, at the place of the call, and whose they are."""

import os
import re

import pytest
import torch
from sklearn.linear_model import SGDRegressor
from torch import nn

from ml4cube.errors import InvalidTypeError, StoreError, StoreExistsError
from ml4cube.training import sklearn
from ml4cube.training.addons import StateManagerAddon
from ml4cube.training.callbacks import BestModel, LossPlot, ModelCheckpoint
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.loggers import CSVLogger
from ml4cube.training.trainer import Trainer
from tests.training_parts import At, Interrupt, dataset, hooks, loader, network, trainer, weights

# ----------------------------------------------------------------- tried before training


def never():
    raise AssertionError("it trained")


@pytest.mark.parametrize(
    "arguments",
    [
        lambda file: {"best_model_path": file},
        lambda file: {"snapshot_path": file},
        lambda file: {"callbacks": [BestModel(file)]},
        lambda file: {"callbacks": [LossPlot(file)]},
        lambda file: {"callbacks": [ModelCheckpoint(file)]},
        lambda file: {"callbacks": [ModelCheckpoint(file)], "snapshot_path": f"{file}.snapshot"},
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_training(tmp_path, arguments):
    blocked = tmp_path / "text"
    blocked.write_text("mine")
    given = arguments(blocked / "run" / "model.pt")
    given["callbacks"] = [*given.get("callbacks", ()), At(1, never)]
    with pytest.raises(
        StoreError, match=rf"{re.escape(str(blocked))}.* cannot be written: Not a d"
    ):
        trainer(**given).train()
    assert blocked.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [blocked]


def test_a_trial_leaves_nothing_behind(tmp_path):
    with pytest.raises(Interrupt):
        trainer(best_model_path=tmp_path / "new" / "model.pt", callbacks=At(1)).train()
    assert list(tmp_path.iterdir()) == []


def test_other_trainers_try_their_files_too(tmp_path):
    pytest.importorskip("skops")
    blocked = tmp_path / "text"
    blocked.write_text("mine")
    x, y = dataset(8).tensors
    run = sklearn.Trainer(SGDRegressor(), [(x, y)], model_path=blocked / "m.skops")
    with pytest.raises(StoreError, match="cannot be written: Not a directory; give another path"):
        run.train()
    assert len(run.history) == 0
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StoreError, match="cannot be written"):
        Trainer.add_on(StateManagerAddon)(
            model,
            device="cpu",
            optimizer=optimizer,
            loss=nn.MSELoss(),
            save_path=blocked / "folder",
        )


def fit_estimator(path):
    pytest.importorskip("skops")
    sklearn.Trainer(SGDRegressor(), [dataset(8).tensors], model_path=path).train()


def fit_with_states(path):
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer.add_on(StateManagerAddon)(
        model,
        device="cpu",
        optimizer=optimizer,
        loss=nn.MSELoss(),
        save_path=path,
        log_bar=False,
    ).run(1, loader(8))


OTHER_FILES = {
    "best_loss.png": lambda path: trainer(
        best_model_path=path.with_name("best.pt"), create_loss_plot=True
    ).train(),
    "model.skops": fit_estimator,
    "model.safetensors": fit_with_states,
    "model.ckpt": fit_with_states,
    "state.ckpt": lambda path: fit_with_states(path.with_name("model.safetensors")),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_files_of_others_are_not_replaced(tmp_path, name):
    path = tmp_path / name
    path.write_text("mine")
    with pytest.raises(StoreExistsError, match="exists and was not written by ml4cube"):
        OTHER_FILES[name](path)
    assert path.read_text() == "mine"
    path.unlink()
    for _ in range(2):  # what training wrote, it replaces
        OTHER_FILES[name](path)
    assert path.stat().st_size > 4


# ----------------------------------------------------------------- at the place of the call


def test_a_callback_that_changes_the_directory_moves_no_file(tmp_path, monkeypatch):
    home, here, there = (tmp_path / name for name in ("home", "here", "there"))
    for folder in (home, here, there):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    run = trainer(
        best_model_path="best.pt",
        snapshot_path="~/snapshot.pt",
        save_every=1,
        create_loss_plot=True,
        loggers=[CSVLogger("log.csv"), CSVLogger("~/log.csv")],
        callbacks=[ModelCheckpoint("top"), hooks(on_epoch_start=lambda loop: os.chdir(there))],
    )
    run.train()
    assert sorted(os.listdir(here)) == ["best.pt", "best_loss.png", "log.csv", "top"]
    assert {"log.csv", "snapshot.pt"} <= {*os.listdir(home)}
    assert list(there.iterdir()) == []
    monkeypatch.chdir(there)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = Trainer.add_on(StateManagerAddon)(
        model,
        device="cpu",
        optimizer=optimizer,
        loss=nn.MSELoss(),
        save_path="~/states",
        callbacks=hooks(on_epoch_start=lambda loop: os.chdir(here)),
        log_bar=False,
    )
    own.run(1, loader())
    assert sorted(os.listdir(home / "states")) == ["model.ckpt", "state.ckpt"]
    assert list(there.iterdir()) == []
    own.save_model("~/saved.ckpt")
    own.load_model("~/saved.ckpt")
    assert weights(home / "saved.ckpt") == weights(model)
    run.history.to_json("~/history.json")
    assert (home / "history.json").exists()
    with pytest.raises(InvalidTypeError, match=r"path must be a path such as .*, got 3"):
        CSVLogger(3)


# ----------------------------------------------------------------- the best few of a run


class Values:
    """Validation losses by epoch, in place of those computed."""

    def __init__(self, *values):
        self.values = values

    def on_row(self, loop, row):
        row["val_loss"] = self.values[row["epoch"] - 1]


def run_of(folder, *values, stop=None, save_every=10, top=2, snapshot=True):
    """Train epochs of two steps with these losses; `stop` ends it like a kill after a step."""
    kept = ModelCheckpoint(folder / "top", save_top_k=top)
    scores = hooks(on_row=Values(*values).on_row)
    callbacks = [scores, kept, *([] if stop is None else [At(stop)])]
    run = trainer(
        samples=8,
        epochs=len(values),
        save_every=save_every,
        early_stopping=False,
        snapshot_path=folder / "snapshot.pt" if snapshot else None,
        callbacks=callbacks,
    )
    if stop is None:
        run.train()
    else:
        with pytest.raises(Interrupt):
            run.train()
    return [read_file(path)["value"] for path in kept.paths], sorted(os.listdir(folder / "top"))


@pytest.mark.parametrize("again", [(5.0, 4.0, 3.0, 2.0), (2.0, 3.0, 4.0, 5.0)])
def test_a_run_killed_before_its_first_snapshot_leaves_the_best_few_of_the_next(tmp_path, again):
    _, files = run_of(tmp_path, 5.0, 4.0, 3.0, 2.0, stop=7)  # in the fourth epoch
    assert [name for name in files if name.startswith("epoch")] == [
        "epoch-0002.pt",
        "epoch-0003.pt",
    ]
    assert not (tmp_path / "snapshot.pt").exists()
    values, files = run_of(tmp_path, *again)
    assert values == sorted(again)[:2]
    assert len(files) == 2


def test_a_run_killed_after_a_snapshot_leaves_the_best_few(tmp_path):
    losses = (5.0, 4.0, 3.0, 2.0, 1.0, 6.0)
    run_of(tmp_path, *losses, stop=11, save_every=3)  # a snapshot of three epochs
    values, files = run_of(tmp_path, 5.0, 4.0, 3.0, 9.0, 9.0, 3.5, save_every=3)
    # Those of the first three epochs had been removed when better ones came.
    assert values == [3.5, 9.0]
    assert files == ["epoch-0004.pt", "epoch-0006.pt"]


def test_files_of_a_finished_run_and_of_others_stay(tmp_path):
    _, first = run_of(tmp_path, 5.0, 4.0, 3.0)
    assert first == ["epoch-0002.pt", "epoch-0003.pt"]
    (tmp_path / "snapshot.pt").unlink()  # to start over
    (tmp_path / "top" / "epoch-0009.pt").write_text("mine")
    _, files = run_of(tmp_path, 5.0, 4.0, 3.0)
    assert set(files) - set(first) == {"epoch-0009.pt", "epoch-0002-v1.pt", "epoch-0003-v1.pt"}
    assert (tmp_path / "top" / "epoch-0009.pt").read_text() == "mine"
    # Without a snapshot nothing says that a run is the same.
    run_of(tmp_path, 5.0, 4.0, stop=3, snapshot=False)
    _, later = run_of(tmp_path, 5.0, 4.0, snapshot=False)
    assert set(files) < set(later)


# ----------------------------------------------------------------- whose a file is


def test_a_file_of_others_is_told_from_one_that_is_cut_short(tmp_path):
    model, path = network(), tmp_path / "model.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Trainer(model, device="cpu", optimizer=optimizer, loss=nn.MSELoss())

    def refusal():
        with pytest.raises(StoreError) as caught:
            run.load_model(path)
        text = str(caught.value)
        assert "delete" not in text.lower()
        return text.removeprefix(f"{path} ")

    foreign = "was not written by ml4cube, so it has no checksum. If torch.save wrote it"
    torch.save(model.state_dict(), path)
    assert refusal().startswith(foreign)
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    assert refusal().startswith(foreign)
    path.write_text("my notes")
    assert refusal().startswith(foreign)
    for write in (write_file, lambda path, state: torch.save(state, path)):
        path.unlink()
        write(path, model.state_dict())
        whole = path.read_bytes()
        for size in (100, len(whole) // 2, len(whole) - 1, len(whole) - 22, len(whole) - 79):
            path.write_bytes(whole[:size])
            assert refusal() == "is cut short; restore a copy of it"
