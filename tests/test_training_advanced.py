"""AdvancedTrainer and ModelCheckpoint: the best few epochs on file, exactly those."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.callbacks import Callback
from ml4cube.training.checkpoint import read_file
from ml4cube.training.distributed import DistributedTrainer, GradientAccumulator, MultiGPUTrainer
from ml4cube.training.trainer import AdvancedTrainer, EarlyStopping, ModelCheckpoint
from tests.training_parts import dataset, losses, network, trainer, weights


class Script(Callback):
    """Put given values into the History, as if the model had earned them."""

    def __init__(self, values):
        self.values = values

    def on_epoch_end(self, loop, row):
        row["val_loss"] = self.values[row["epoch"] - 1]


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
    run = trainer(epochs=6, early_stopping=False, callbacks=[Script(values), checkpoint], samples=8)
    run.train()
    assert [int(path.stem[6:10]) for path in checkpoint.paths] == kept
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in checkpoint.paths)
    best = read_file(checkpoint.paths[0])
    assert best["value"] == values[kept[0] - 1]
    assert best["optimizer"]["state"]
    assert best["scheduler"]["last_epoch"] == kept[0]


def test_files_of_another_run_are_neither_replaced_nor_removed(tmp_path):
    first = ModelCheckpoint(tmp_path, save_top_k=1)
    trainer(epochs=1, callbacks=[first]).train()
    before = first.paths[0].read_bytes()
    second = ModelCheckpoint(tmp_path, save_top_k=1)
    trainer(epochs=1, callbacks=[second]).train()
    assert first.paths[0].read_bytes() == before
    assert [p.name for p in (*first.paths, *second.paths)] == ["epoch-0001.pt", "epoch-0001-v1.pt"]


def test_fit_equals_the_trainer_underneath_and_resumes(tmp_path):
    data, val = dataset(40), DataLoader(dataset(17, seed=1), batch_size=5)
    whole = trainer(gradient_accumulation_steps=2, epochs=4)
    whole.train()

    def fit(epochs):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        parts = AdvancedTrainer(
            model,
            optimizer,
            nn.MSELoss(),
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            gradient_accumulation_steps=2,
            early_stopping=EarlyStopping(patience=10),
            snapshot_path=tmp_path / "s.pt",
            seed=3,
            device="cpu",
        )
        parts.fit(DataLoader(data, batch_size=4, shuffle=True), val, epochs=epochs)
        return parts

    fit(2)
    history = fit(4).history.to_dict()
    assert {n: history[n] for n in losses(whole)} == losses(whole)


def test_bad_parts_are_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(InvalidTypeError, match="criterion='mse'"):
        AdvancedTrainer(model, optimizer, "mse")
    with pytest.raises(InvalidTypeError, match="early_stopping=5 is no EarlyStopping"):
        AdvancedTrainer(model, optimizer, nn.MSELoss(), early_stopping=5)
    with pytest.raises(InvalidValueError, match="gradient_accumulation_steps=0"):
        AdvancedTrainer(model, optimizer, nn.MSELoss(), gradient_accumulation_steps=0)
    with pytest.raises(InvalidValueError, match="save_top_k=0"):
        ModelCheckpoint("x", save_top_k=0)
    with pytest.raises(InvalidValueError, match="did you mean 'min'"):
        ModelCheckpoint("x", mode="mim")
    stopping = AdvancedTrainer(model, optimizer, nn.MSELoss(), early_stopping=EarlyStopping())
    with pytest.raises(InvalidValueError, match="monitor='val_loss' is no number"):
        stopping.fit(DataLoader(dataset(8), batch_size=4), epochs=2)


def test_accumulator_weighs_by_samples_and_clips():
    x, y = dataset(11).tensors
    results = []
    for sizes in ([11], [4, 4, 3]):
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = GradientAccumulator(model, optimizer, len(sizes), max_grad_norm=0.5)
        stepped = [
            accumulator.step(nn.functional.mse_loss(model(a), b), len(a))
            for a, b in zip(x.split(sizes), y.split(sizes), strict=True)
        ]
        assert stepped == [False] * (len(sizes) - 1) + [True]
        assert not accumulator.flush()
        results.append(weights(model)["weight"][0])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert abs(results[0][0] - 1) <= 0.05 + 1e-6


def test_wrappers_save_without_prefix_and_load(tmp_path, caplog):
    single = MultiGPUTrainer(network(), gpu_ids=[0, 1, 2, 3])
    assert "no GPU" in caplog.text or torch.cuda.is_available()
    optimizer = torch.optim.SGD(single.model.parameters(), lr=0.5)
    single.save_checkpoint(tmp_path / "a.pt", epoch=10, optimizer=optimizer)
    other = DistributedTrainer(network(seed=1), rank=0, world_size=1)
    again = torch.optim.SGD(other.model.parameters(), lr=0.1)
    assert other.load_checkpoint(tmp_path / "a.pt", again) == 10
    assert weights(other.model) == weights(single.model)
    assert again.param_groups[0]["lr"] == 0.5
    with pytest.raises(InvalidValueError, match="this process is rank 0 of 1"):
        DistributedTrainer(network(), rank=1, world_size=4)
