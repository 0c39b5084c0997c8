"""AdvancedTrainer and ModelCheckpoint: the best few epochs on file, exactly those."""

import math
import os
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.errors import InvalidTypeError, InvalidValueError, RunError
from ml4cube.training import distributed
from ml4cube.training.callbacks import Callback
from ml4cube.training.distributed import DistributedTrainer, GradientAccumulator, MultiGPUTrainer
from ml4cube.training.files.checkpoint import read_file
from ml4cube.training.loggers import CSVLogger
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.ranks.dist import World
from ml4cube.training.trainer import AdvancedTrainer, EarlyStopping, ModelCheckpoint
from tests.distributed_runner import on_ranks
from tests.training_parts import At, dataset, losses, network, trained, trainer, weights


class Script(Callback):
    """Put given values into the History, as if the model had earned them."""

    def __init__(self, values, column="val_loss"):
        self.values, self.column = values, column

    def on_row(self, loop, row):
        row[self.column] = self.values[row["epoch"] - 1]


@pytest.mark.parametrize(
    ("mode", "top", "kept"),
    [
        ("min", 1, [5]),
        ("min", 2, [5, 2]),
        ("min", 3, [5, 2, 4]),
        ("max", 2, [1, 6]),
        ("min", -1, [5, 2, 4, 3, 1, 6]),
    ],
)
def test_exactly_the_best_few_are_kept_best_first(tmp_path, mode, top, kept):
    values = [9.0, 2.0, 5.0, 4.0, 1.0, 9.0]
    checkpoint = ModelCheckpoint(tmp_path, mode=mode, save_top_k=top)
    trained(epochs=6, early_stopping=False, callbacks=[Script(values), checkpoint], samples=8)
    assert [int(path.stem[6:10]) for path in checkpoint.paths] == kept
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in checkpoint.paths)
    best = read_file(checkpoint.paths[0])
    assert best["value"] == values[kept[0] - 1]
    assert best["optimizer"]["state"]
    assert best["scheduler"]["last_epoch"] == kept[0]


def test_one_checkpoint_over_several_runs_keeps_the_best_few_of_each(tmp_path):
    """As cross-validation uses it: what a fold before has kept stays, and is not counted."""
    checkpoint, files = ModelCheckpoint(tmp_path, save_top_k=2), {}
    for values in ([5.0, 4.0, 3.0], [10.0, 10.0, 1.0], [2.0, 9.0, 9.0]):
        callbacks = [Script(values), checkpoint]
        trainer(epochs=3, early_stopping=False, callbacks=callbacks, samples=8).train()
        assert [read_file(p)["value"] for p in checkpoint.paths] == sorted(values)[:2]
        for path in checkpoint.paths:
            assert path not in files
            files[path] = path.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(path.read_bytes() == content for path, content in files.items())


def fitted(epochs=3, **arguments):
    """An AdvancedTrainer after `fit`, with model, settings and data of `trainer`."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    parts = AdvancedTrainer(
        model, optimizer, nn.MSELoss(), schedule, seed=3, device="cpu", **arguments
    )
    train = DataLoader(dataset(40), batch_size=4, shuffle=True)
    parts.fit(train, DataLoader(dataset(17, seed=1), batch_size=5), epochs=epochs)
    return parts


def test_fit_equals_the_trainer_underneath_and_resumes(tmp_path):
    """With all that seed 003 names; checkpoints, callbacks and loggers are called."""
    settings = {
        "use_amp": True,
        "gradient_accumulation_steps": 2,
        "gradient_clip": 0.05,
        "metrics": {"l1": nn.L1Loss()},
    }
    whole = trained(**settings, epochs=4)

    def fit(epochs):
        return fitted(
            epochs,
            early_stopping=EarlyStopping(patience=10),
            checkpoint=checkpoint,
            callbacks=At(1, lambda: seen.append("step 1")),
            loggers=[CSVLogger(tmp_path / "log.csv")],
            snapshot_path=tmp_path / "s.pt",
            **settings,
        )

    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="l1", mode="max", save_top_k=2)
    seen = []
    fit(2)
    history = fit(4).history.to_dict()
    assert {n: history[n] for n in losses(whole)} == losses(whole)
    assert seen == ["step 1"]
    kept = [read_file(path)["value"] for path in checkpoint.paths]
    assert kept == sorted(history["l1"], reverse=True)[:2]
    assert len((tmp_path / "log.csv").read_text().split()) == 5


def test_further_settings_of_the_loop_are_handed_on(tmp_path):
    parts = fitted(
        5,
        fast_dev_run=2,
        ema=0.9,
        log_grad_norm=True,
        checkpoint=ModelCheckpoint(tmp_path),
        snapshot_path=tmp_path / "s.pt",
    )
    assert [row["train_n"] for row in parts.history["ranks"][0]] == [8]
    assert "grad_norm" in parts.history
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidTypeError, match=r"'grad_norms'; did you mean 'log_grad_norm'"):
        fitted(grad_norms=True)
    with pytest.raises(InvalidTypeError, match=r"epochs to fit\(\.\.\., epochs\)"):
        fitted(max_epochs=3)


def test_a_batch_job_gets_one_line_for_each_epoch(capsys):
    history = fitted(2).history
    first, last = capsys.readouterr().err.splitlines()
    assert f"train_loss {history['train_loss'][0]:.6g}, val_loss" in first
    assert first.startswith("epoch 1/2: ")
    assert "samples/s, done by about " in first
    best = min(history["val_loss"])
    assert f"(best: val_loss {best:.6g} in epoch " in last
    assert "done by" not in last
    fitted(99, max_steps=10)  # one epoch, so that nothing remains
    assert "done by" not in capsys.readouterr().err
    fitted(2, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_missing_value_is_never_called_the_best(capsys):
    trainer(epochs=2, callbacks=Script([math.nan, 0.5])).train()
    assert "(best: val_loss 0.5 in epoch 2)" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(RunError, match="val_loss was not a number in any epoch"):
        trained(epochs=2, callbacks=Script([math.nan, math.nan]))


def test_a_bar_moves_within_the_epoch_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fitted(1)
    shown = capsys.readouterr().err
    assert "epoch 1/1:   0%" in shown
    assert "steps" in shown


MODEL = network()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.01)
PARTS = MODEL, SGD, nn.MSELoss()


def without_validation():
    stopping = AdvancedTrainer(*PARTS, early_stopping=EarlyStopping(), device="cpu")
    stopping.fit(DataLoader(dataset(8), batch_size=4), epochs=2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdvancedTrainer(MODEL, SGD, "mse"), "criterion must be a loss function"),
        (lambda: AdvancedTrainer(*PARTS, early_stopping=5), "an EarlyStopping or None, got 5"),
        (lambda: AdvancedTrainer(*PARTS, gradient_accumulation_steps=0), "steps must be an int"),
        (lambda: ModelCheckpoint("x", save_top_k=0), "save_top_k must be an int of 1 or more"),
        (lambda: ModelCheckpoint("x", mode="mim"), "did you mean 'min'"),
        (lambda: ModelCheckpoint(3), "save_dir must be a path"),
        (lambda: EarlyStopping(min_delta="x"), "min_delta must be a number of 0 or more, got 'x'"),
        (lambda: MaskedLoss(nn.MSELoss), "loss=MSELoss is a class"),
        (lambda: GradientAccumulator(MODEL, SGD, "2"), "steps must be an int of 1 .* got '2'"),
        (lambda: GradientAccumulator(MODEL, SGD, 2, "1"), "max_grad_norm must be .* got '1'"),
        (lambda: GradientAccumulator(MODEL, SGD).step(0.5), "loss must be a tensor, got a float"),
        (lambda: GradientAccumulator(MODEL, SGD).step(torch.ones(())), "does not depend"),
        (lambda: MultiGPUTrainer("model"), "model must be a torch.nn.Module, got 'model'"),
        (lambda: DistributedTrainer(None), "model must be a torch.nn.Module, got None"),
        (without_validation, "monitor: unknown column 'val_loss'"),
    ],
)
def test_bad_parts_are_refused(make, said):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=said):
        make()


def test_accumulator_weighs_by_samples_and_clips():
    x, y = dataset(11).tensors
    results = []
    for sizes in ([11], [4, 4, 3]):
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        offset = nn.Parameter(torch.zeros(()))  # learned outside the model
        optimizer = torch.optim.SGD([*model.parameters(), offset], lr=0.1)
        accumulator = GradientAccumulator(model, optimizer, len(sizes), max_grad_norm=0.5)
        stepped = [
            accumulator.step(nn.functional.mse_loss(model(a) + offset, b), len(a))
            for a, b in zip(x.split(sizes), y.split(sizes), strict=True)
        ]
        assert stepped == [False] * (len(sizes) - 1) + [True]
        assert not accumulator.flush()
        results.append([*weights(model)["weight"][0], offset.item()])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    parts = [p.requires_grad_() for p in (torch.ones(1, 3), torch.zeros(1), torch.zeros(()))]
    weight, bias, offset = parts
    nn.functional.mse_loss(nn.functional.linear(x, weight, bias) + offset, y).backward()
    nn.utils.clip_grad_norm_(parts, 0.5)
    expected = [*(1 - 0.1 * weight.grad[0]).tolist(), -0.1 * offset.grad.item()]
    assert results[0] == pytest.approx(expected, rel=1e-5)


def test_a_model_and_a_criterion_that_are_replaced_are_used():
    loader, model = DataLoader(dataset(17), batch_size=5), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = AdvancedTrainer(model, optimizer, nn.MSELoss(), device="cpu", progress=False)
    run.model, run.criterion = network(seed=1), nn.L1Loss()
    x, y = dataset(17).tensors
    truth = (run.model.eval()(x) - y).abs().mean().item()
    assert run.evaluate(loader)["val_loss"] == pytest.approx(truth)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.fit(loader, epochs=1)
    assert weights(run.model) != weights(network(seed=1))
    assert weights(model) == weights(network())


def test_wrappers_save_without_prefix_and_load(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    single = MultiGPUTrainer(network(), gpu_ids=[0, 1, 2, 3])
    assert "no GPU" in caplog.text
    optimizer = torch.optim.SGD(single.model.parameters(), lr=0.5)
    single.save_checkpoint(tmp_path / "a.pt", epoch=10, optimizer=optimizer)
    other = DistributedTrainer(network(seed=1), rank=0, world_size=1)
    again = torch.optim.SGD(other.model.parameters(), lr=0.1)
    assert other.load_checkpoint(tmp_path / "a.pt", again) == 10
    assert weights(other.model) == weights(single.model)
    assert again.param_groups[0]["lr"] == 0.5
    with pytest.raises(InvalidValueError, match="this process is rank 0 of 1"):
        DistributedTrainer(network(), rank=1, world_size=4)


def test_a_model_on_several_gpus_is_saved_unwrapped(tmp_path, monkeypatch):
    """Two GPUs are claimed; DataParallel is stood in for by a wrapper with its names."""

    class Spread(nn.Module):
        def __init__(self, module, device_ids):
            super().__init__()
            self.module, self.device_ids, self.calls = module, device_ids, 0

        def forward(self, x):
            self.calls += 1
            return self.module(x)

    class Here(nn.Linear):
        def to(self, *args, **kwargs):
            return self

    monkeypatch.setattr(distributed, "DataParallel", Spread)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    several = MultiGPUTrainer(Here(3, 1), gpu_ids=[0, 1])
    assert several.model.device_ids == [0, 1]
    assert several.model(torch.ones(2, 3)).shape == (2, 1)
    assert several.model.calls == 1
    several.save_checkpoint(tmp_path / "a.pt", epoch=3)
    assert set(read_file(tmp_path / "a.pt")["model"]) == {"weight", "bias"}
    with pytest.raises(InvalidValueError, match=r"gpu_ids must be among \[0, 1\], got \[0, 2"):
        MultiGPUTrainer(Here(3, 1), gpu_ids=[0, 2])


def test_only_rank_0_saves(tmp_path):
    wrapped = DistributedTrainer(network())
    wrapped.world = World(1, 1, torch.device("cpu"))
    wrapped.save_checkpoint(tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


def samples_of(loader):
    return [x[:, 0].tolist() for x, _ in loader]


def loaders_of_a_rank():
    """What is dealt out of nine samples, and of one."""
    wrapped = DistributedTrainer(network())
    train = samples_of(wrapped.create_dataloader(dataset(9), batch_size=4))
    val = samples_of(wrapped.create_dataloader(dataset(9), batch_size=2, shuffle=False))
    one = samples_of(wrapped.create_dataloader(dataset(1), batch_size=2, shuffle=False))
    ordered = wrapped.create_dataloader(dataset(9), batch_size=4, shuffle=False, train=True)
    return train, val, one, samples_of(ordered)


@pytest.mark.slow
def test_ranks_get_equal_batches_to_train_on_and_every_sample_to_evaluate():
    there = dataset(9).tensors[0][:, 0].tolist()
    train, val, _, ordered = loaders_of_a_rank()
    assert [len(batch) for batch in train] == [4, 4, 1]  # nothing is dropped
    assert list(chain(*val)) == list(chain(*ordered)) == there
    first, second = on_ranks(2, loaders_of_a_rank)
    assert [len(batch) for batch in first[0]] == [len(batch) for batch in second[0]] == [4]
    assert sorted(chain(*first[1], *second[1])) == sorted(there)
    assert len(first[2]) + len(second[2]) == 1
    assert [len(b) for b in first[3]] == [len(b) for b in second[3]] == [4]
    with pytest.raises(InvalidTypeError, match="shuffle must be False"):
        DistributedTrainer(network()).create_dataloader(dataset(9), 4, train=False)
    with pytest.raises(InvalidTypeError, match="give train_ds, test_ds or val_ds"):
        prep_dataloader()
