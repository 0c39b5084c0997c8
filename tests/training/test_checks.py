"""Which epochs and steps are validated, by what they are judged, and what callbacks see of it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.errors import InvalidTypeError
from ml4cube.progress import Stage
from ml4cube.training import pytorch, trainer
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.callbacks import Callback, EarlyStopping, ModelCheckpoint
from ml4cube.training.files.checkpoint import read_file
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.shared_data import exact_loader
from tests.training_parts import (
    At,
    assert_end_alike,
    dataset,
    hooks,
    network,
    resumed_alike,
    trained,
)
from tests.training_parts import trainer as make


def negated(pred, target):
    """Best where the error is largest."""
    return nn.functional.l1_loss(pred, target)


class Watch(Callback):
    """Note every call, and the loss of every step."""

    def __init__(self):
        self.calls, self.losses = [], []

    def on_validation_start(self, loop):
        self.calls.append(f"start {loop.state.step}")

    def on_validation_end(self, loop, row):
        self.calls.append(f"end {row['val_loss'] is not None}")

    def on_check(self, loop, row):
        self.calls.append("check")

    def on_step_end(self, loop):
        self.losses.append(float(loop.step_loss))


def test_any_metric_chooses_the_best_epoch():
    run = make(metrics={"mae": negated}, monitor="mae", mode="max", epochs=5)
    model = run.train()
    mae = run.history["mae"]
    assert run.best_loss == max(mae)
    assert run.best_epoch == mae.index(max(mae)) + 1
    assert mae.index(max(mae)) != mae.index(min(mae))
    x, y = dataset(17, seed=1).tensors
    with torch.no_grad():
        assert float(negated(model(x), y)) == pytest.approx(max(mae), rel=1e-5)


def test_epochs_between_validations_are_not_judged():
    watch = Watch()
    run = trained(epochs=5, validate_every=2, callbacks=watch)
    validated = [value is not None for value in run.history["val_loss"]]
    assert validated == [False, True, False, True, True]  # the last epoch always is
    assert watch.calls == [
        "start 20", "end True", "check",
        "start 40", "end True", "check", "start 50", "end True", "check",
    ]  # fmt: skip
    every = trained(epochs=5)
    known = [value for value in run.history["val_loss"] if value is not None]
    assert known == [every.history["val_loss"][epoch] for epoch in (1, 3, 4)]


def test_the_last_step_is_validated_in_whatever_epoch_it_falls():
    run = trained(epochs=5, validate_every=2, max_steps=25)  # epochs of 10 steps
    assert [loss is not None for loss in run.history["val_loss"]] == [False, True, True]


def test_steps_between_validations_are_rows_of_their_own():
    watch = Watch()
    run = trained(epochs=2, validate_every_steps=4, callbacks=watch)  # epochs of 10 steps
    assert run.history["step"] == [4, 8, 10, 12, 16, 20, 20]
    assert [v is None for v in run.history["val_loss"]] == [False] * 2 + [True] + [False] * 3 + [
        True
    ]
    assert len(watch.losses) == 20
    assert run.history["train_loss"][2] == pytest.approx(sum(watch.losses[:10]) / 10)
    assert run.best_loss == min(v for v in run.history["val_loss"] if v is not None)
    whole = trained(epochs=2)
    assert [run.history["train_loss"][row] for row in (2, 6)] == whole.history["train_loss"]


@pytest.mark.parametrize("step", [4, 6, 8, 13])
def test_a_run_validated_by_steps_is_resumed_bit_for_bit(tmp_path, step):
    save = hooks(on_step_end=lambda loop: loop.state.step == step and loop.save_snapshot())

    def fresh(**more):
        return make(epochs=2, validate_every_steps=4, **more)

    resumed_alike(tmp_path / "snapshot.pt", fresh, save, At(step))


def test_patience_counts_checks_inside_an_epoch():
    run = trained(
        epochs=3, validate_every_steps=2, patience=2, metrics={"one": lambda p, y: torch.ones(())},
        monitor="one",
    )  # fmt: skip
    assert run.history["step"][-1] == 6  # best at 2, then 4 and 6 are no better


class Scores(Callback):
    """Put given values into the rows that are judged, one after the other."""

    def __init__(self, *values):
        self.values = iter(values)

    def on_row(self, loop, row):
        if "val_loss" in row:
            row["val_loss"] = next(self.values)


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_gain_below_min_delta_is_none(mode, sign):
    scores = Scores(*(sign * value for value in (5.0, 4.4, 4.2, 4.0, 1.0)))
    stopping = EarlyStopping(2, mode, min_delta=0.5)
    run = trained(epochs=5, early_stopping=stopping, callbacks=scores)
    assert len(run.history) == 4


def test_checks_of_one_epoch_have_checkpoints_of_their_own(tmp_path):
    kept = ModelCheckpoint(tmp_path, save_top_k=2)
    make(
        epochs=1, validate_every_steps=2, callbacks=[Scores(5.0, 3.0, 4.0, 2.0, 9.0), kept]
    ).train()
    assert sorted(kept.paths) == sorted(tmp_path.iterdir())
    assert [read_file(path)["value"] for path in kept.paths] == [2.0, 3.0]


def on_plateau(epochs, values, *, loss=None, **arguments):
    """Train with a scheduler that lowers the rate at the first check that is no better."""
    model, batches = network(), DataLoader(dataset(40), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    pytorch.Trainer(
        model, batches, batches, optimizer, loss=loss or nn.MSELoss(), epochs=epochs, device="cpu",
        scheduler=plateau, early_stopping=False, callbacks=Scores(*values), **arguments,
    ).train()  # fmt: skip
    return optimizer.param_groups[0]["lr"]


def test_a_plateau_is_seen_by_checks_inside_epochs():
    rate = on_plateau(2, [1.0] * 5, validate_every_steps=4)
    assert rate == pytest.approx(1e-5)  # the first of five checks was the best


def test_a_run_may_change_to_checks_inside_epochs(tmp_path):
    arguments = {"snapshot_path": tmp_path / "snapshot.pt", "save_every": 1}
    make(epochs=1, **arguments).train()
    run = trained(epochs=2, validate_every_steps=5, **arguments)  # 10 steps are a multiple of that
    assert run.history["step"] == [None, 15, 20, 20]


def test_a_run_out_of_time_before_its_first_check_leaves_its_snapshot(tmp_path, caplog):
    def end_time(loop):
        loop.requests.deadline_s = 0.0 if loop.state.step == 11 else loop.requests.deadline_s

    arguments = {"epochs": 4, "validate_every": 3, "snapshot_path": tmp_path / "snapshot.pt"}
    run = trained(callbacks=hooks(on_step_end=end_time), max_time=100, **arguments)
    assert "training ended before any epoch was checked" in caplog.text
    assert run.best_epoch is None
    assert_end_alike(make(**arguments), make(epochs=4, validate_every=3))


def test_a_plateau_begins_anew_after_another_loss(tmp_path):
    path = tmp_path / "snapshot.pt"
    assert on_plateau(1, [1.0], snapshot_path=path) == 0.1
    with pytest.warns(UserWarning, match="loss was 'MSELoss' and is 'L1Loss'"):
        assert on_plateau(3, [50.0, 40.0], snapshot_path=path, loss=nn.L1Loss()) == 0.1


def test_loggers_get_the_checks_inside_an_epoch():
    class Log:
        def __init__(self):
            self.rows = []

        def log(self, values, step):
            self.rows.append((step, "val_loss" in values))

    log = Log()
    make(epochs=1, validate_every_steps=4, loggers=log).train()
    assert log.rows == [(4, True), (8, True), (10, True)]


def test_a_trainer_of_own_steps_chooses_by_the_largest(tmp_path):
    def run(mode, epochs):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        own = trainer.Trainer(
            model, "cpu", mode, optimizer, loss=nn.MSELoss(), metrics={"mae": negated},
            monitor="mae", snapshot_path=tmp_path / "snapshot.pt",
        )  # fmt: skip
        own.run(epochs, *(DataLoader(dataset(n, n), batch_size=4) for n in (40, 17)))
        return own

    first = run("min", 2)
    assert first.best_loss == min(first.history["mae"])
    with pytest.warns(UserWarning, match=r"monitor was 'mae \(min\)' and is 'mae \(max\)'"):
        after = run("max", 4)
    assert after.best_loss == max(after.history["mae"][2:])


def test_every_trainer_evaluates_another_loader():
    held_out = DataLoader(dataset(11, seed=4), batch_size=4)
    model, loss = network(), nn.MSELoss()
    model.eval()
    x, y = dataset(11, seed=4).tensors
    with torch.no_grad():
        right = float(loss(model(x), y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = pytorch.Trainer(model, held_out, None, optimizer, loss=loss, device="cpu")
    advanced = AdvancedTrainer(model, optimizer, loss, device="cpu")
    own = trainer.Trainer(model, "cpu", optimizer=optimizer, loss=loss)
    for run in (plain, advanced, own):
        assert run.evaluate(held_out)["val_loss"] == pytest.approx(right)
    assert own.progress_checker.step == 0


def test_a_long_stage_writes_a_line_for_each_tenth(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr("ml4cube.progress.time.monotonic", lambda: next(clock))
    with Stage("writing", 40, "shards") as stage:
        for _ in range(40):
            stage.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7  # the first three tenths were over in less than ten seconds
    assert lines[0] == "writing: 40 % (16 of 40 shards), 12.0 s so far, about 18.0 s left"
    assert math.isclose(float(lines[-1].split(" % ")[0].split()[-1]), 100)


def test_a_log_that_cannot_be_written_does_not_end_the_work(monkeypatch):
    class Full:
        def isatty(self):
            return False

        def write(self, text):
            raise OSError("no space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    make(epochs=1).train()


def test_a_loader_made_for_training_is_evaluated_without_augmentation():
    def far(batch, generator):
        return batch[0] + 1000, batch[1]

    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10.0)[:, None])
    loader = prep_dataloader(data, batch_size=4, augment=far)
    exact = exact_loader(loader, World(0, 1, torch.device("cpu")))
    assert sorted(float(x) for X, _ in exact for x in X) == list(range(10))


IMAGE, MASK = torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"image": IMAGE, "mask": MASK, "crs": ["EPSG:4326"] * 2},
            r"got image of shape \(2, 3, 8, 8\), mask of shape \(2, 8, 8\); make it a pair, by a "
            r"collate_fn \(.*\) that returns batch\['image'\], batch\['mask'\]",
        ),
        ({"image": IMAGE[:, :1], "mask": IMAGE[:, :1]}, r"batch\['image'\], batch\['mask'\]"),
        ({"x": IMAGE, "y": MASK}, r"must have tensors of one shape, .* batch\['x'\], batch\['y'\]"),
    ],
)
def test_a_dict_that_is_no_set_of_variables_is_refused(batch, message):
    model = nn.Conv2d(3, 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = pytorch.Trainer(model, [batch], None, optimizer, loss=nn.MSELoss(), device="cpu")
    with pytest.raises(InvalidTypeError, match=message):
        run.train()
