"""Which epochs and steps are validated, by what they are judged, and what callbacks see of it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import InvalidValueError
from ml4cube.progress import Stage
from ml4cube.training import pytorch, trainer
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.callbacks import Callback
from tests.training_parts import At, Interrupt, dataset, losses, network, weights
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


def test_a_monitor_that_is_no_column_is_named():
    with pytest.raises(InvalidValueError, match="monitor='auc' is no number of the History"):
        make(monitor="auc").train()


def test_epochs_between_validations_are_not_judged():
    watch = Watch()
    run = make(epochs=5, validate_every=2, callbacks=watch)
    run.train()
    validated = [value is not None for value in run.history["val_loss"]]
    assert validated == [False, True, False, True, True]  # the last epoch always is
    assert watch.calls == [
        "start 20", "end True", "check",
        "start 40", "end True", "check", "start 50", "end True", "check",
    ]  # fmt: skip
    every = make(epochs=5)
    every.train()
    known = [value for value in run.history["val_loss"] if value is not None]
    assert known == [every.history["val_loss"][epoch] for epoch in (1, 3, 4)]


def test_steps_between_validations_are_rows_of_their_own():
    watch = Watch()
    run = make(epochs=2, validate_every_steps=4, callbacks=watch)  # epochs of 10 steps
    run.train()
    assert run.history["step"] == [4, 8, 10, 12, 16, 20, 20]
    assert [v is None for v in run.history["val_loss"]] == [False] * 2 + [True] + [False] * 3 + [
        True
    ]
    assert len(watch.losses) == 20
    assert run.history["train_loss"][2] == pytest.approx(sum(watch.losses[:10]) / 10)
    assert run.best_loss == min(v for v in run.history["val_loss"] if v is not None)
    whole = make(epochs=2)
    whole.train()
    assert [run.history["train_loss"][row] for row in (2, 6)] == whole.history["train_loss"]


@pytest.mark.parametrize("step", [4, 6, 8, 13])
def test_a_run_validated_by_steps_is_resumed_bit_for_bit(tmp_path, step):
    path = tmp_path / "snapshot.pt"

    def stop():
        raise Interrupt

    class Save(Callback):
        def on_step_end(self, loop):
            if loop.state.step == step:
                loop.save_snapshot()

    arguments = {"epochs": 2, "validate_every_steps": 4, "snapshot_path": path}
    with pytest.raises(Interrupt):
        make(callbacks=[Save(), At(step, stop)], **arguments).train()
    resumed, whole = make(**arguments), make(epochs=2, validate_every_steps=4)
    assert weights(resumed.train()) == weights(whole.train())
    assert losses(resumed) == losses(whole)


def test_patience_counts_checks_inside_an_epoch():
    run = make(
        epochs=3, validate_every_steps=2, patience=2, metrics={"one": lambda p, y: torch.ones(())},
        monitor="one",
    )  # fmt: skip
    run.train()
    assert run.history["step"][-1] == 6  # best at 2, then 4 and 6 are no better


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
