"""The Trainer on one device: what it returns, keeps, refuses, and how it resumes."""

import logging
import math
import os
import re
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    RunError,
)
from ml4cube.evaluation.metrics import RMSE
from ml4cube.training.callbacks import Callback, EarlyStopping
from ml4cube.training.files.checkpoint import write_file
from ml4cube.training.inputs.options import pick_precision
from ml4cube.training.loggers import CSVLogger
from ml4cube.training.pytorch import Trainer
from ml4cube.training.state import History
from tests.samplestores import write_store
from tests.training_parts import (
    ROOT,
    At,
    Counting,
    Interrupt,
    Save,
    Stateful,
    dataset,
    losses,
    network,
    resumed_alike,
    squared_error,
    trained,
    trainer,
    weights,
)


def test_a_model_that_does_not_fit_its_batches_fails_with_their_shapes():
    pairs = TensorDataset(torch.zeros(8, 2, 4, 4), torch.zeros(8, 1, 4, 4))
    run = trainer(model=nn.Conv2d(3, 1, 1), train=DataLoader(pairs, batch_size=4), epochs=1)
    with pytest.raises(RuntimeError, match="Given groups=1") as caught:
        run.train()
    shapes = "the batch held X of shape (4, 2, 4, 4), y of shape (4, 1, 4, 4)"
    assert caught.value.__notes__ == [shapes]


# ------------------------------------------------------------------ what it returns


def test_returned_model_is_the_best_epoch_and_equals_the_file(tmp_path):
    path = tmp_path / "new" / "best.pth"
    model, loader = network(), DataLoader(dataset(40), batch_size=4)

    class Spoil(Callback):
        """The last epoch is not the best one."""

        def on_epoch_start(self, loop):
            if loop.state.epoch == 3:
                with torch.no_grad():
                    model[0].weight.mul_(-3)

    run = trainer(
        model=model, train=loader, val=loader, best_model_path=path, epochs=4, callbacks=[Spoil()]
    )
    returned = run.train()
    assert returned is model
    assert not returned.training
    val = run.history["val_loss"]
    assert run.best_loss == min(val) < val[-1]
    assert run.best_epoch == val.index(min(val)) + 1
    assert weights(returned) == weights(path)
    assert squared_error(returned, dataset(40)) == pytest.approx(min(val), rel=1e-6)


@pytest.mark.parametrize("kind", ["MapLoader", "SampleLoader", "SampleLoader, ring"])
def test_a_loader_made_for_training_is_evaluated_in_full(tmp_path, kind):
    """It drops its last batch of 2 and shuffles, in training only."""
    data = dataset(10)
    if kind != "MapLoader":
        write_store(tmp_path / "store", 10, ("a", "b"), window={}, targets=("b",), chunk=2)
        data = PTXrDataset(tmp_path / "store", to_pred="b")
    loader = prep_dataloader(data, batch_size=4, seed=1, buffer_mb=5e-5 if "ring" in kind else 256)
    model = nn.Linear(3 if kind == "MapLoader" else 1, 1)
    run = trained(model=model, train=loader, val=loader, epochs=2, lr=0.0)
    x, y = (torch.stack([data[i][part] for i in range(10)]) for part in (0, 1))
    truth = nn.functional.mse_loss(model(x), y).item()
    assert run.evaluate(loader)["val_loss"] == pytest.approx(truth, rel=1e-6)
    assert run.history["val_loss"] == pytest.approx([truth, truth], rel=1e-6)
    assert [(r["train_n"], r["val_n"]) for (r,) in run.history["ranks"]] == [(8, 10)] * 2
    assert len(loader) == 2


def test_losses_and_metrics_are_means_over_samples():
    data, model = dataset(37), network()
    with torch.no_grad():
        pred, y = model.eval()(data.tensors[0]), data.tensors[1]
    run = trained(
        model=model,
        val=DataLoader(data, batch_size=5),
        metrics={"mae": nn.functional.l1_loss, "bias": lambda p, t: (p - t).mean().item()},
        train=DataLoader(data, batch_size=7),
        epochs=1,
        lr=0.0,  # the model stays what it is
    )
    assert run.history["val_loss"][0] == pytest.approx(nn.functional.mse_loss(pred, y).item())
    assert run.history["mae"][0] == pytest.approx(nn.functional.l1_loss(pred, y).item())
    assert run.history["bias"][0] == pytest.approx((pred - y).mean().item(), rel=1e-4)


class OfOne(RMSE):
    """A vector of one entry."""

    def compute(self):
        return torch.tensor([super().compute()], dtype=torch.float64)


def test_metric_objects_reduce_themselves():
    torchmetrics = pytest.importorskip("torchmetrics")
    given = torchmetrics.R2Score()
    run = trained(metrics={"r2": given, "rmse": RMSE(), "of_one": OfOne()}, epochs=1)
    x, y = dataset(17, seed=1).tensors
    pred = run.model(x).detach()
    assert run.history["r2"][0] == pytest.approx(torchmetrics.R2Score()(pred, y).item())
    assert run.history["rmse"][0] == pytest.approx(((pred - y) ** 2).mean().sqrt().item())
    assert run.history["of_one"] == run.history["rmse"]
    assert not given.update_called  # what the user passed keeps its state


def test_metrics_that_squash_some_batches_and_not_others_are_warned_of(caplog):
    classes = pytest.importorskip("torchmetrics.classification")

    class Squashed(classes.BinaryAUROC):
        def update(self, pred, target):
            super().update(pred.sigmoid(), (target > 0).int())

    class Raw(classes.BinaryAUROC):
        pass

    x, y = dataset(16, seed=1).tensors
    val = [(x[:8], (y[:8] > 0).int()), (x[8:], (y[8:] > 0).int())]
    loss = lambda pred, target: (pred - target).pow(2).mean()  # noqa: E731
    trainer(metrics={"fine": Squashed()}, val=val, loss=loss, epochs=1).train()
    assert not caplog.records
    scaled = [(100 * inputs, target) for inputs, target in val]
    for _ in range(2):
        trainer(metrics={"raw": Raw()}, val=scaled, loss=loss, epochs=2).train()
    (record,) = caplog.records
    assert "metrics raw of torchmetrics get predictions outside 0 to 1" in record.message


def test_every_step_trains_in_train_mode_and_validation_in_eval_mode():
    modes = []

    class Watch(nn.Linear):
        def forward(self, x):
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    class Meddle(Callback):
        def on_step_end(self, loop):
            loop.model.eval()

    data = dataset(8)
    loader = DataLoader(data, batch_size=4)
    trainer(model=Watch(3, 1), train=loader, val=loader, epochs=2, callbacks=[Meddle()]).train()
    assert modes == ([(True, True)] * 2 + [(False, False)] * 2) * 2


@pytest.mark.parametrize("generator", [None, "shared"])
def test_validation_moves_no_training_randomness(generator):
    shared = None if generator is None else torch.Generator()

    class Draws(Dataset):
        """Draws from every global generator, as a transform may."""

        def __len__(self):
            return 5

        def __getitem__(self, index):
            return torch.rand(3) + np.random.rand(), torch.rand(1)  # noqa: NPY002

    def run(val):
        if shared is not None:
            shared.manual_seed(0)
        train = DataLoader(dataset(12), batch_size=4, shuffle=True, generator=shared)
        np.random.seed(0)  # noqa: NPY002
        done = trained(train=train, val=val, early_stopping=False)
        return done.history["train_loss"]

    few = DataLoader(Draws(), batch_size=5, shuffle=True, generator=shared)
    many = DataLoader(Draws(), batch_size=1, shuffle=True, generator=shared)
    assert run(few) == run(many)


def test_global_random_state_is_left_alone_when_seeded():
    before = torch.get_rng_state()
    first, second = trained(), trained()
    assert torch.equal(before, torch.get_rng_state())
    assert losses(first) == losses(second)
    assert losses(first) != losses(trained(seed=4))


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.ones(4, 3), (4, 3)),
        ([torch.ones(4, 3)], (4, 3)),
        ({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}, (4, 3)),
        ({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, (2, 2, 3)),  # windows: channels first
    ],
)
def test_inputs_alone_are_reconstructed(batch, shape):
    seen = []

    def loss(pred, target):
        seen.append((tuple(pred.shape), target.sum().item()))
        return nn.functional.mse_loss(pred, target)

    trainer(model=nn.Linear(3, 3), train=[batch], val=[batch], epochs=1, loss=loss).train()
    assert seen == [(shape, 12.0)] * 2


# ------------------------------------------------------------- what steps are made of


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 3), (5, 4), (1, 12)])
def test_accumulated_batches_weigh_by_samples(batch_size, accumulate):
    """Also the last window, which is cut short, and the last batch, which is smaller."""
    model = nn.Linear(3, 1)
    start = weights(model)
    window = batch_size * accumulate
    parts = {}
    for size, steps in ((window, 1), (batch_size, accumulate)):
        model.load_state_dict({name: torch.tensor(v) for name, v in start.items()})
        run = trained(
            model=model,
            train=DataLoader(dataset(37), batch_size=size),
            gradient_accumulation_steps=steps,
            schedule=False,
            early_stopping=False,
            epochs=2,
        )
        parts[steps] = (weights(model)["weight"][0], run.history["train_loss"])
        assert run._loop.state.step == 2 * math.ceil(37 / window)
    one, many = parts[1], parts[accumulate]
    assert many[0] == pytest.approx(one[0], rel=1e-5, abs=1e-7)  # a weight may be near 0
    assert many[1] == pytest.approx(one[1], rel=1e-5)


def test_schedulers_move_per_epoch_per_step_or_on_a_plateau():
    per_epoch, per_step = trained(), trained(scheduler_step_on_batch=True, max_steps=25, epochs=9)
    assert per_epoch.history["lr"] == pytest.approx([0.01, 0.009, 0.0081])
    assert per_step._loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**25)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(dataset(8), batch_size=4)
    run = Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), epochs=3, scheduler=plateau)
    run.train()
    assert plateau.num_bad_epochs == 0
    assert plateau.last_epoch == 3


@pytest.mark.parametrize(
    ("device", "is_supported", "precision"),
    [("cpu", False, "bf16"), ("cuda", False, "fp16"), ("cuda", True, "bf16")],
)
def test_amp_chooses_the_precision_of_the_device(
    monkeypatch, caplog, device, is_supported, precision
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_supported)
    caplog.set_level("INFO")
    assert pick_precision(True, None, torch.device(device)) == precision
    assert f"{device} computes in {precision}" in caplog.text
    assert pick_precision(False, None, torch.device(device)) == "fp32"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_in_it_and_keeps_float32_weights(precision):
    seen = set()

    def loss(pred, target):
        seen.add(pred.dtype)
        return nn.functional.mse_loss(pred.float(), target)

    def metric(pred, target):
        seen.add(pred.dtype)
        return nn.functional.l1_loss(pred, target)

    run = trained(precision=precision, loss=loss, metrics={"mae": metric})
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    assert seen == {half, torch.float32}
    assert next(run.model.parameters()).dtype == torch.float32
    assert run.history["val_loss"][-1] < run.history["val_loss"][0]


def test_patience_counts_checks_without_improvement_and_a_stopped_run_stays_stopped(tmp_path):
    for _ in range(2):
        run = trained(lr=0.0, patience=3, epochs=20, snapshot_path=tmp_path / "s.pt")
        assert len(run.history) == 1 + 3
        assert run.best_epoch == 1


def test_without_validation_the_training_loss_decides():
    run = trained(val=None, epochs=2)
    assert "val_loss" not in run.history
    assert run.best_loss == min(run.history["train_loss"])


# ------------------------------------------------------------------- resuming


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [20, 17, 3], ids=["epoch end", "inside", "first epoch"])
@pytest.mark.parametrize("generator", [False, True])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, stop_at, generator):
    """Dropout, momentum, scheduler, shuffling, accumulation: bit for bit."""

    def fresh(**arguments):
        source = torch.Generator().manual_seed(5) if generator else None
        train = DataLoader(dataset(40), batch_size=2, shuffle=True, generator=source)
        return trainer(train=train, gradient_accumulation_steps=2, epochs=4, **arguments)

    stops = [Save(stop_at)] if stop_at % 10 else []
    position, _ = resumed_alike(tmp_path / "s.pt", fresh, *stops, At(stop_at + 1), save_every=1)
    assert position["step"] == stop_at
    assert bool(position["batch"]) == bool(stop_at % 10)


@pytest.mark.parametrize("hook", ["on_step_end", "on_row", "on_epoch_end"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_callback_may_save_the_snapshot_at_any_moment(tmp_path, hook, ema):
    def save(self, loop, row=None):
        if loop.state.step in (13, 20):
            loop.save_snapshot()

    saving = type("Saving", (Callback,), {hook: save})()
    stop = At(18 if hook == "on_step_end" else 22)
    resumed_alike(tmp_path / "s.pt", partial(trainer, ema=ema), saving, stop)


def test_a_run_in_fp16_is_resumed_with_its_scale(tmp_path):
    """A first scale that is too high skips steps until it is found; not again after a resume."""
    fresh = partial(trainer, precision="fp16", epochs=2, save_every=1)
    _, resumed = resumed_alike(tmp_path / "s.pt", fresh, At(12))
    assert resumed._loop.scaler.get_scale() < 2**16


def test_finished_run_returns_at_once_with_its_own_best_model(tmp_path):
    paths = {"snapshot_path": tmp_path / "s.pt", "best_model_path": tmp_path / "b.pt"}
    done = trained(**paths)
    model = done.model
    write_file(paths["best_model_path"], network(seed=9).state_dict())  # another run's
    before = paths["snapshot_path"].read_bytes()
    unusable = DataLoader(dataset(40), batch_size=4, collate_fn=lambda items: None)
    again = trained(train=unusable, **paths)
    assert weights(again.model) == weights(model)
    assert weights(model) == weights(paths["best_model_path"])
    assert losses(again) == losses(done)
    assert paths["snapshot_path"].read_bytes() == before
    longer = trained(**paths | {"epochs": 5})
    assert len(longer.history) == 5


@pytest.mark.parametrize("ema", [None, 0.5])
def test_state_that_is_no_tensor_is_kept_with_the_weights(tmp_path, ema):
    paths = {"snapshot_path": tmp_path / "s.pt", "best_model_path": tmp_path / "b.pt"}
    more = {"save_every": 1, "ema": ema, "schedule": False}
    with pytest.raises(Interrupt):
        trainer(model=Counting(), callbacks=[At(11)], **paths, **more).train()
    run = trained(model=Counting(), **paths, **more)
    model = run.model
    assert model.calls == {"train": 10 * run.best_epoch, "name": "counting"}
    saved = torch.load(paths["best_model_path"], weights_only=True)
    assert saved["_extra_state"] == model.calls
    model.calls["odd"] = object()
    with pytest.raises(InvalidTypeError, match=r"'_extra_state'\]\['odd'\] is a object, which"):
        trainer(model=model)


def test_a_metric_of_arrays_refuses_other_predictions_by_name():
    class Two(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": x}

    with pytest.raises(InvalidTypeError, match=r"metrics\['r'\] compares .* dict of \['a', 'b'\]"):
        trainer(
            model=Two(3, 1),
            loss=lambda p, y: nn.functional.mse_loss(p["a"], y),
            metrics={"r": RMSE()},
        ).train()


def test_after_ctrl_c_the_best_weights_are_within_reach():
    def ctrl_c():
        raise KeyboardInterrupt

    wanted = weights(trained(epochs=2).model)
    run = trainer(epochs=3, callbacks=[At(25, ctrl_c)])
    with pytest.raises(RunError, match="no epoch was finished yet"):
        run.apply_weights()
    with pytest.raises(KeyboardInterrupt) as caught:
        run.train()
    assert (
        f"apply_weights() of the Trainer loads the weights of the best epoch, {run.best_epoch}"
        in (caught.value.__notes__[0])
    )
    assert weights(run.model) != wanted
    assert weights(run.apply_weights()) == wanted
    assert not run.model.training


def test_stale_best_model_of_another_run_is_never_returned(tmp_path):
    path = tmp_path / "best.pth"
    write_file(path, network(seed=9).state_dict())
    stale = path.read_bytes()
    bad = [(torch.full((4, 3), math.nan), torch.zeros(4, 1))]
    with pytest.raises(RunError, match=r"training loss is nan on rank 0, epoch 1, step 1"):
        trainer(train=bad, best_model_path=path).train()
    assert path.read_bytes() == stale
    with pytest.raises(RunError, match=r"validation loss is nan on rank 0, epoch 1, batch 1"):
        trainer(val=bad, best_model_path=path).train()
    assert path.read_bytes() == stale


def test_nan_names_its_step_and_leaves_the_best_model(tmp_path):
    path = tmp_path / "best.pth"
    good = (torch.ones(4, 3), torch.ones(4, 1))
    bad = (torch.full((4, 3), math.inf), torch.ones(4, 1))

    class Turns(list):
        def set_epoch(self, epoch):
            self[5] = bad if epoch == 2 else good

    files = {"best_model_path": path, "snapshot_path": tmp_path / "s.pt", "save_every": 1}
    with pytest.raises(RunError, match=r"on rank 0, epoch 3, step 11;"):
        trained(train=Turns([good] * 8), gradient_accumulation_steps=2, **files)
    saved = torch.load(path, weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert torch.load(tmp_path / "s.pt", weights_only=True)["state"]["epoch"] == 2


def test_snapshot_holds_the_data_statistics_and_names(tmp_path):
    class Statistics:
        def to_json(self):
            return '{"a": 1}'

    data = dataset(8)
    data.statistics, data.features, data.targets = Statistics(), ("a", "b"), "c"
    trainer(train=DataLoader(data, batch_size=4), snapshot_path=tmp_path / "s.pt").train()
    facts = torch.load(tmp_path / "s.pt", weights_only=True)["data"]
    assert facts == {"features": ["a", "b"], "targets": ["c"], "statistics": '{"a": 1}'}


def test_loader_that_knows_its_position_is_asked_for_it(tmp_path):
    loaders = []

    def fresh(**arguments):
        loaders.append(Stateful(list(DataLoader(dataset(24), batch_size=4))))
        return trainer(train=loaders[-1], **arguments)

    resumed_alike(tmp_path / "s.pt", fresh, Save(8), At(9))
    assert loaders[-1].told == {"given": 2}


@pytest.mark.parametrize("when", ["training", "validation"])
def test_sigterm_leaves_a_snapshot_before_the_handler_that_was_there_is_called(tmp_path, when):
    """In validation too: the run goes on with that validation when it is resumed."""

    def term():
        os.kill(os.getpid(), signal.SIGTERM)

    class Val(DataLoader):
        passes = 0

        def __iter__(self):
            self.passes += 1
            for number, batch in enumerate(super().__iter__()):
                if when == "validation" and self.passes == 2 and number == 1:
                    term()
                yield batch

    def handler(*_):
        raise Interrupt

    path, whole = tmp_path / "s.pt", trained()
    before = signal.signal(signal.SIGTERM, handler)
    try:
        val = Val(dataset(17, seed=1), batch_size=5)
        stops = [At(13, term)] if when == "training" else []
        with pytest.raises(Interrupt):
            trained(snapshot_path=path, val=val, callbacks=stops)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert torch.load(path, weights_only=True)["state"]["batch"] > 0
    resumed = trained(snapshot_path=path)
    assert weights(resumed.model) == weights(whole.model)
    assert losses(resumed) == losses(whole)


def test_sigterm_after_the_last_step_is_not_lost(tmp_path):
    class Term(Callback):
        def on_train_end(self, loop):
            signal.raise_signal(signal.SIGTERM)

    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        trained(snapshot_path=tmp_path / "s.pt", epochs=1, callbacks=[Term()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


# --------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": None}, InvalidTypeError, "loss must be a loss function such as"),
        ({"loss": nn.MSELoss}, InvalidTypeError, "loss=MSELoss is a class; give an object of it"),
        ({"metrics": {"r2": RMSE}}, InvalidTypeError, "metrics['r2']=RMSE is a class"),
        ({"metrics": {3: RMSE()}}, InvalidTypeError, "names of metrics must be strings, got 3"),
        ({"metrics": [nn.functional.l1_loss]}, InvalidTypeError, "metrics must be a mapping"),
        ({"metrics": {"mae": 1}}, InvalidTypeError, "must be a function of (pred, target)"),
        ({"metrics": {"lr": nn.functional.l1_loss}}, InvalidValueError, "must not be named"),
        ({"loggers": [CSVLogger]}, InvalidTypeError, "loggers=CSVLogger is a class"),
        ({"loggers": "tensorboard"}, InvalidTypeError, "loggers must have a method log(values"),
        ({"train": dataset(8)}, InvalidTypeError, "train_data must be a loader of batches"),
        ({"val": {"a": dataset(8)}}, InvalidTypeError, "test_data['a'] must be a loader of"),
        ({"train": torch.ones(4, 3)}, InvalidTypeError, "of batches, got <Tensor>"),
        ({"train": iter([1])}, InvalidTypeError, "used up after one epoch"),
        ({"device": ["cpu"]}, InvalidValueError, "device must be a torch device such as 'cpu'"),
        ({"device": "gpu"}, InvalidValueError, "or 'cuda:0', got 'gpu'"),
        ({"device": "cuda:99"}, InvalidValueError, "cuda:99"),
        ({"best_model_path": "a", "model_path": "b"}, InvalidTypeError, "same argument"),
        ({"best_model_path": "a", "snapshot_path": "a"}, InvalidValueError, "two files"),
        ({"best_model_path": "/"}, InvalidValueError, "is a folder"),
        ({"best_model_path": 3}, InvalidTypeError, "best_model_path must be a path"),
        ({"snapshot_path": 3}, InvalidTypeError, "snapshot_path must be a path"),
        ({"create_loss_plot": True}, InvalidTypeError, "give best_model_path too"),
        ({"epochs": 2.5}, InvalidValueError, "epochs must be an int of 1 or more, got 2.5"),
        ({"save_every": 0}, InvalidValueError, "save_every must be an int of 1 or more, got 0"),
        ({"patience": 0}, InvalidValueError, "patience must be"),
        ({"max_steps": -1}, InvalidValueError, "max_steps must be an int of 1 or more, or None"),
        ({"gradient_clip": 0.0}, InvalidValueError, "gradient_clip must be a norm above 0"),
        ({"gradient_clip": "1"}, InvalidValueError, "or None, got '1'"),
        ({"ema": "0.9"}, InvalidValueError, "ema must be a decay between 0 and 1, such as 0.999"),
        ({"precision": "bf61"}, InvalidValueError, "did you mean 'bf16'"),
        ({"precision": "fp32", "use_amp": True}, InvalidTypeError, "contradict"),
        ({"scheduler": 3}, InvalidTypeError, "scheduler must have a method step()"),
        ({"callbacks": EarlyStopping}, InvalidTypeError, "subclasses of Callback"),
        ({"early_stopping": "yes"}, InvalidTypeError, "an EarlyStopping, got 'yes'"),
        ({"seed": -1}, InvalidValueError, "seed must be an int from 0, or None, got -1"),
        ({"limit_train_batches": 0}, InvalidValueError, "limit_train_batches must be"),
        ({"limit_val_batches": 1.5}, InvalidValueError, "limit_val_batches must be"),
        ({"limit_val_batches": True}, InvalidValueError, "limit_val_batches must be"),
        ({"fast_dev_run": -1}, InvalidValueError, "fast_dev_run must be"),
        ({"max_time": 0}, InvalidValueError, "max_time must be"),
        ({"max_time": "1:30"}, InvalidValueError, "max_time must be"),
        ({"ema": 1.0}, InvalidValueError, "ema must be"),
        ({"ema": True}, InvalidValueError, "ema must be"),
        ({"compile": 3}, InvalidValueError, "compile must be"),
        ({"val": {}}, InvalidValueError, "empty dict"),
        ({"val": {"a/b": [1]}}, InvalidValueError, "'a/b'"),
        ({"val": {3: [1]}}, InvalidValueError, "got 3"),
        ({"strategy": "fdsp"}, InvalidValueError, "did you mean 'fsdp'"),
        ({"shard_modules": 5}, InvalidValueError, "needs strategy='fsdp'"),
        ({"strategy": "fsdp", "find_unused_parameters": True}, InvalidValueError, "contradict"),
        *(
            ({"strategy": "fsdp", "shard_modules": groups}, InvalidTypeError, "modules must be")
            for groups in ("Linear", 0, [nn.Linear, 3], True, int)
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        trainer(**arguments)
    assert not list(tmp_path.iterdir())


class Curve(RMSE):
    """Not a number."""

    def compute(self):
        return ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train": []}, EmptyPartError, "train_data gave no batch"),
        ({"train": [(torch.ones(0, 3), torch.ones(0, 1))]}, EmptyPartError, "train_data gave"),
        ({"val": []}, EmptyPartError, "test_data gave no sample"),
        ({"train": [[torch.ones(2, 3)] * 4]}, InvalidTypeError, "list of 4 items"),
        ({"train": ["text"]}, InvalidTypeError, "tensor with a sample axis"),
        ({"loss": nn.MSELoss(reduction="none")}, InvalidValueError, "reduction='mean'"),
        ({"loss": lambda p, y: 0.5}, InvalidTypeError, "the loss must be a tensor, got a float"),
        ({"loss": lambda p, y: y.mean()}, InvalidValueError, "not depend on any parameter"),
        ({"metrics": {"e": lambda p, y: p - y}}, InvalidValueError, "a mean, got shape (5, 1)"),
        ({"metrics": {"e": lambda p, y: "x"}}, InvalidTypeError, "one number per batch, got 'x'"),
        ({"metrics": {"roc": Curve()}}, InvalidTypeError, "metrics['roc'].compute() must"),
    ],
)
def test_bad_batches_and_losses_are_refused_by_name(arguments, error, message, tmp_path):
    with pytest.raises(error, match=re.escape(message)):
        trained(best_model_path=tmp_path / "best.pt", **arguments)
    assert not list(tmp_path.iterdir())


def test_models_optimizers_and_schedulers_that_cannot_work_together_are_refused():
    model, loader = network(), DataLoader(dataset(8), batch_size=4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.AdamW(network().parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    by_step = {"scheduler": plateau, "scheduler_step_on_batch": True}
    steps = {"scheduler": torch.optim.lr_scheduler.StepLR(other, 1)}
    for given, optimizer, more, said in (
        (model, other, {}, "none of the model's parameters"),
        (network().requires_grad_(False), other, {}, "no parameter to train"),
        (lambda x: x, other, {}, r"model must be a torch\.nn\.Module"),
        (model, torch.optim.LBFGS(model.parameters()), {}, r"got LBFGS, whose step\(\)"),
        (model, sgd, steps, r"\(StepLR\) must be made with the optimizer that trains"),
        (model, sgd, by_step, "ReduceLROnPlateau contradict"),
        (model, sgd, {"scheduler": plateau, "mode": "max"}, r"LROnPlateau\(mode='min'\) contr"),
    ):
        with pytest.raises((InvalidTypeError, InvalidValueError), match=said):
            Trainer(given, loader, None, optimizer, loss=nn.MSELoss(), **more)


def test_callbacks_and_loggers_may_be_none():
    trained(callbacks=None, loggers=None, epochs=1)


def test_snapshot_of_another_model_is_refused_by_name(tmp_path):
    path = tmp_path / "snapshot.pt"
    trainer(snapshot_path=path, epochs=1).train()
    with pytest.raises(
        InvalidValueError, match=r"snapshot\.pt is a snapshot of another run: parameters"
    ):
        trainer(model=nn.Linear(3, 1), snapshot_path=path).train()


# -------------------------------------------------------------- what is seen of it


@pytest.mark.slow
def test_rank_table_is_seen_where_logging_is_not_set_up(tmp_path):
    script = """
from tests.training_parts import trained
trained(validate_parallelism=True, create_loss_plot=True, best_model_path="m/best.pth",
        progress=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("train_loss") == 3
    assert (tmp_path / "m" / "best_loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["best.pth", "best_loss.png"]


def test_rank_table_obeys_a_logging_that_is_set_up(caplog):
    with caplog.at_level(logging.INFO, logger="ml4cube"):
        run = trained(validate_parallelism=True)
    tables = [r for r in caplog.records if r.name == "ml4cube.training.ranks"]
    assert len(tables) == 3
    assert logging.getLogger("ml4cube.training.ranks").handlers == []
    row = run.history["ranks"][-1][0]
    assert row["train_loss"] == run.history["train_loss"][-1]
    assert row["val_loss"] == run.history["val_loss"][-1]
    assert (row["train_n"], row["val_n"], row["rank"]) == (40, 17, 0)
    assert 0 <= row["data_wait"] <= 1


def test_history_columns_and_json(tmp_path):
    run = trained(metrics={"mae": nn.functional.l1_loss})
    columns = run.history.to_dict()
    assert list(columns) == [
        "epoch",
        "train_loss",
        "val_loss",
        "mae",
        "lr",
        "seconds",
        "ranks",
    ]
    text = run.history.to_json(tmp_path / "history.json")
    assert History.from_json((tmp_path / "history.json").read_text()) == run.history
    assert History.from_json(text).to_dict() == columns
    with pytest.raises(InvalidValueError, match="equal lengths"):
        History({"a": [1], "b": []})
    History(columns).append({"epoch": 4})
    assert len(columns["epoch"]) == 3  # the lists of the caller are left alone


def test_logger_that_fails_is_dropped_and_training_goes_on(caplog):
    class Logger:
        def __init__(self, fails):
            self.fails, self.seen, self.closed = fails, [], False

        def log(self, values, step):
            self.seen.append((values["val_loss"], step))
            if self.fails:
                raise OSError("disk full")

        def close(self):
            self.closed = True

    good, bad = Logger(fails=False), Logger(fails=True)
    run = trained(loggers=[bad, good])
    assert good.seen == list(zip(run.history["val_loss"], [10, 20, 30], strict=True))
    assert good.closed
    assert len(bad.seen) == 1
    assert caplog.text.count("training continues") == 1
    assert "disk full" in caplog.text


def test_callbacks_see_every_moment_and_keep_their_state(tmp_path):
    class Count(Callback):
        def __init__(self):
            self.calls, self.steps = [], 0

        def on_train_start(self, loop):
            self.calls.append("start")

        def on_step_end(self, loop):
            self.steps += 1

        def on_epoch_end(self, loop, row):
            self.calls.append(row["epoch"])
            if row["epoch"] == 2:
                loop.stop("enough")

        def on_train_end(self, loop):
            self.calls.append("end")

        def on_close(self, loop):
            self.calls.append("close")

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    first = Count()
    trainer(callbacks=[first], snapshot_path=tmp_path / "s.pt").train()
    assert first.calls == ["start", 1, 2, "end", "close"]
    second = Count()
    trainer(callbacks=[second], snapshot_path=tmp_path / "s.pt").train()
    assert second.steps == 30


def test_loader_sampler_or_dataset_is_told_the_epoch():
    told = []

    class Told(TensorDataset):
        def set_epoch(self, epoch):
            told.append(epoch)

    trainer(train=DataLoader(Told(*dataset(8).tensors), batch_size=4)).train()
    assert told == [0, 1, 2]


def test_early_stopping_may_be_given_in_detail_and_counts_anew_in_a_new_run():
    stopping = EarlyStopping(patience=1, mode="min")
    for _ in range(2):
        run = trained(epochs=5, early_stopping=stopping, lr=0.0, samples=8)
        assert len(run.history) == 2
