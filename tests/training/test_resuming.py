"""What a run keeps, takes over and refuses when it goes on from a snapshot of another call."""

import functools
import itertools
import math
import random
import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import InvalidValueError
from ml4cube.training.callbacks import Callback
from ml4cube.training.inputs.batches import loader_seed
from ml4cube.training.inputs.identity import data_identity, digest, name_of
from ml4cube.training.pytorch import Trainer
from ml4cube.training.trainer import AdvancedTrainer, EarlyStopping
from tests.cubes import cell_id_cube
from tests.samplestores import write_store
from tests.training_parts import At, Interrupt, dataset, hooks, losses, network, weights


def make(path=None, *, lr=0.01, kind=torch.optim.SGD, schedule=None, group=(), **arguments):
    """A Trainer of four epochs of five steps, whose snapshot is written after every epoch."""
    model = arguments.pop("model", None) or network()
    optimizer = kind(model.parameters(), lr=lr, **dict(group))
    arguments = {
        "train_data": DataLoader(dataset(40), batch_size=8),
        "test_data": DataLoader(dataset(17, seed=1), batch_size=5),
        "loss": nn.MSELoss(),
        "seed": 3,
        "device": "cpu",
        "epochs": 4,
        "scheduler": None if schedule is None else schedule(optimizer),
        "snapshot_path": path,
        "save_every": 1,
        "early_stopping": False,
    } | arguments
    return Trainer(model, optimizer=optimizer, **arguments)


def cut(path, step=11, **arguments):
    """Leave a snapshot of two epochs."""

    callbacks = [*arguments.pop("callbacks", ()), At(step)]
    with pytest.raises(Interrupt):
        make(path, callbacks=callbacks, **arguments).train()


def go_on(path, **arguments):
    """Train on; the Trainer, and what was warned of."""
    run = make(path, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
    return run, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize(
    ("seed", "draw"),
    [
        (torch.manual_seed, lambda: float(torch.rand(()))),
        (np.random.seed, np.random.random),
        (random.seed, random.random),
        (random.seed, lambda: random.gauss(0, 1)),  # made in pairs: one waits for the next call
    ],
)
def test_what_data_draw_goes_on_with_any_generator(tmp_path, seed, draw):
    def collate(items):
        x, y = default_collate(items)
        return x + draw(), y

    path, data = tmp_path / "snapshot.pt", DataLoader(dataset(40), 8, collate_fn=collate)
    given = {"train_data": data, "test_data": None}
    seed(5)
    whole = make(**given).train()
    seed(5)
    cut(path, step=6, **given)  # after one epoch, of five draws
    seed(6)
    assert weights(make(path, **given).train()) == weights(whole)


# ----------------------------------------------------------------- what is honoured

SCHEDULES = {
    "none": (None, [1, 1]),
    "step": (lambda o: StepLR(o, 1, 0.9), [0.9**2, 0.9**3]),
    "lambda": (lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)), [1 / 3, 1 / 4]),
    "cosine": (
        lambda o: CosineAnnealingLR(o, 4),
        [(1 + math.cos(math.pi * e / 4)) / 2 for e in (2, 3)],
    ),
    "sequential": (
        lambda o: SequentialLR(o, [StepLR(o, 1, 0.5), StepLR(o, 1, 0.1)], milestones=[3]),
        [0.25, 1.0],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_the_snapshots_and_another_one_asked_for_is_told(tmp_path, name):
    schedule, factors = SCHEDULES[name]
    path = tmp_path / "s.pt"
    cut(path, schedule=schedule)
    kept = path.read_bytes()
    whole = make(schedule=schedule)
    whole.train()
    assert whole.history["lr"][2:] == pytest.approx([0.01 * factor for factor in factors])
    run, said = go_on(path, schedule=schedule, lr=0.1)
    assert losses(run) == losses(whole)
    assert len(said) == 1
    assert f"{path} is a snapshot of a run with other settings" in said[0]
    assert "keep those of the snapshot, although this call asks for others" in said[0]
    assert "lr was 0.01 and is 0.1" in said[0]
    assert "Restarted" not in said[0]
    path.write_bytes(kept)
    _, said = go_on(path, schedule=schedule, lr=0.01 * factors[0])  # as training has reached
    assert said == []


def test_another_first_rate_of_a_scheduler_is_told(tmp_path):
    path = tmp_path / "s.pt"
    cut(path, schedule=lambda o: LinearLR(o, start_factor=0.1, total_iters=2))
    run, said = go_on(path, schedule=lambda o: LinearLR(o, start_factor=0.5, total_iters=2))
    assert run.history["lr"][2:] == pytest.approx([0.01, 0.01])
    assert "start_factor was 0.1 and is 0.5" in said[0]


def test_a_sequence_of_fewer_schedulers_is_refused(tmp_path):
    def schedule(o, length):
        parts = [StepLR(o, 1, 0.5) for _ in range(length)]
        return SequentialLR(o, parts, milestones=list(range(1, length)))

    path = tmp_path / "s.pt"
    cut(path, schedule=functools.partial(schedule, length=3))
    with pytest.raises(InvalidValueError, match="another model, optimizer or scheduler"):
        go_on(path, schedule=functools.partial(schedule, length=2))


def test_settings_of_a_scheduler_are_the_snapshots_and_another_class_starts_anew(tmp_path):
    path = tmp_path / "s.pt"
    cut(path, schedule=lambda o: StepLR(o, 1, 0.5))
    kept = path.read_bytes()
    run, said = go_on(path, schedule=lambda o: StepLR(o, 1, 0.1))
    assert run.history["lr"] == pytest.approx([0.01, 0.005, 0.0025, 0.00125])
    assert "scheduler: gamma was 0.5 and is 0.1" in said[0]
    path.write_bytes(kept)
    run, said = go_on(path, schedule=lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)))
    assert run.history["lr"] == pytest.approx([0.01, 0.005, 0.0025, 0.005])
    assert "StepLR' and is 'torch.optim.lr_scheduler.LambdaLR'" in said[0]
    path.write_bytes(kept)
    run, said = go_on(path)
    assert run.history["lr"] == pytest.approx([0.01, 0.005, 0.0025, 0.0025])
    assert "StepLR' and is None" in said[0]


def test_a_scheduler_that_joins_a_run_has_what_it_wrote_into_the_optimizer(tmp_path):
    path = tmp_path / "s.pt"
    cut(path)
    cycle = functools.partial(OneCycleLR, max_lr=0.1, total_steps=4)
    run, said = go_on(path, schedule=cycle)
    alone = make(epochs=2, schedule=cycle)
    alone.train()
    assert run.history["lr"][2] == pytest.approx(0.01)
    assert run.history["lr"][3] == pytest.approx(alone.history["lr"][1])
    assert "scheduler was None and is 'torch.optim.lr_scheduler.OneCycleLR'" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is 2"),
        ({"gradient_clip": 0.1}, "gradient_clip was None and is 0.1"),
        ({"precision": "bf16"}, "precision was 'fp32' and is 'bf16'"),
        ({"precision": "fp16"}, "precision was 'fp32' and is 'fp16'"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"ema": 0.5}, "ema was None and is 0.5"),
        ({"train_data": DataLoader(dataset(40), batch_size=4)}, "batch_size was 8 and is 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changed_settings_are_honoured_and_listed(tmp_path, change, told):
    """As a run whose weights and state are taken by hand, after the same two epochs."""
    path = tmp_path / "s.pt"
    cut(path)
    content = torch.load(path, weights_only=True)
    run, said = go_on(path, **change)
    assert len(said) == 1
    assert told in said[0]
    drawn = content["ranks"][0]["rng"]["torch"]
    restore = hooks(on_train_start=lambda loop: torch.set_rng_state(drawn))
    by_hand = make(callbacks=[] if "seed" in change else restore, **change)
    by_hand._loop.model.load_state_dict(content["model"])
    by_hand._loop.state.epoch = 2  # the rest of the four epochs
    by_hand.train()
    assert losses(run)["train_loss"][2:] == losses(by_hand)["train_loss"]
    assert losses(run)["val_loss"][2:] == losses(by_hand)["val_loss"]


def test_other_batches_begin_the_epoch_under_way_anew(tmp_path):
    path = tmp_path / "s.pt"
    save = hooks(on_step_end=lambda loop: loop.state.step == 8 and loop.save_snapshot())
    cut(path, step=9, callbacks=[save])
    run, said = go_on(path, train_data=DataLoader(dataset(40), batch_size=4))
    assert "batch_size was 8 and is 4. Restarted: the current epoch" in said[0]
    assert [rows[0]["train_n"] for rows in run.history["ranks"]] == [40, 40, 40, 40]


def test_a_run_that_nothing_changed_and_one_that_is_called_again_say_nothing(tmp_path):
    path = tmp_path / "s.pt"
    cut(path, schedule=lambda o: StepLR(o, 1, 0.9), loss=lambda p, y: (p - y).abs().mean())
    _, said = go_on(
        path, schedule=lambda o: StepLR(o, 1, 0.9), loss=lambda p, y: (p - y).abs().mean()
    )
    assert said == []
    model, loader = network(), DataLoader(dataset(16), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    again = AdvancedTrainer(
        model,
        optimizer,
        nn.MSELoss(),
        StepLR(optimizer, 1, 0.5),
        snapshot_path=tmp_path / "again.pt",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit(loader, epochs=2)
        assert again.fit(loader, epochs=3)["lr"] == [0.1, 0.05, 0.025]
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    with pytest.warns(UserWarning, match=r"lr was 0\.1 and is 1\.0"):
        again.fit(loader, epochs=4)


# ------------------------------------------------------------------ what is refused


class Other(torch.optim.SGD):
    """An optimizer of another class."""


def other_data():
    data = dataset(40)
    return DataLoader(TensorDataset(data.tensors[0] + 1e-3, data.tensors[1]), batch_size=8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"kind": Other},
            r"snapshot of another run: optimizer: class was \'torch\.optim\.sgd\.SGD\' and is ",
        ),
        ({"train_data": DataLoader(dataset(32), batch_size=8)}, "samples was 40 and is 32"),
        ({"train_data": other_data()}, r"snapshot of another run: data: values"),
    ],
    ids=["optimizer", "samples", "values"],
)
def test_another_run_is_refused_by_name_and_leaves_the_snapshot(tmp_path, change, told):
    path = tmp_path / "s.pt"
    cut(path)
    before = path.read_bytes()
    with pytest.raises(InvalidValueError, match=told) as caught:
        make(path, **change).train()
    assert "give another snapshot_path or delete it" in str(caught.value)
    assert path.read_bytes() == before


def test_other_features_targets_statistics_and_stores_are_refused_by_name(tmp_path):
    for store, names in (("one", "abc"), ("copy", "abc"), ("two", "bac")):
        write_store(tmp_path / store, 40, tuple(names), window={})

    def run(store="one", features=("a", "b"), target="c"):
        data = PTXrDataset(tmp_path / store, to_pred=target, features=list(features))
        loader = DataLoader(data, batch_size=8)
        model = nn.Linear(len(features), 1)
        settings = {"train_data": loader, "test_data": None, "epochs": 1, "lr": 1e-9}
        make(tmp_path / "s.pt", model=model, **settings).train()

    run()
    with pytest.raises(
        InvalidValueError, match=r"another run: data: features was \['a', 'b'\] and"
    ):
        run(features=("a",))
    with pytest.raises(InvalidValueError, match=r"features was \['a', 'b'\] and is \['b', 'a'\]"):
        run(features=("b", "a"))
    with pytest.raises(InvalidValueError, match=r"targets was \['c'\] and is \['b'\]"):
        run(features=("a", "c"), target="b")
    with pytest.raises(InvalidValueError, match=r"data: source was .*; statistics: b, a\."):
        run("two")
    with pytest.warns(UserWarning, match="training is already complete"):
        run("copy")


def test_other_samples_of_the_same_source_are_other_data():
    ds = cell_id_cube({"time": 40}, "float32", names=("a", "b"))
    window = {"sample_size": {"time": 4}}
    choices = [
        window,
        {"sample_size": {"time": 5}},
        window | {"drop_nan": None},
        window | {"target_offset": {"time": 2}},
        window | {"target_offset": {"time": 3}},
        window | {"weights": np.arange(10.0)},
        window | {"weights": np.arange(10.0) + 1},
    ]
    made = [PTXrDataset(ds, to_pred="b", features="a", scale_fn=None, **c) for c in choices]
    whole = dataset(40)
    made += [Subset(whole, range(20)), Subset(whole, range(20, 40))]
    found = [data_identity(DataLoader(data)) for data in made]
    assert all(a != b for a, b in itertools.combinations(found, 2))
    given = {"target_offset": [("time", 2)], "sample_size": [("time", 4)]}  # as pairs
    again = PTXrDataset(ds, to_pred="b", features="a", scale_fn=None, **given)
    assert data_identity(DataLoader(again)) == found[3]
    assert data_identity(DataLoader(Subset(whole, list(range(20))))) == found[-2]


def test_arrays_of_a_users_data_set_are_not_taken_for_names():
    class Own(Dataset):
        features, targets = torch.zeros(4, 2), np.zeros(4)
        statistics, lead = np.zeros((2, 2)), 6

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.features[index], self.targets[index]

    assert data_identity(DataLoader(Own())) == {"samples": 4}


# ------------------------------------------------------------ what is judged anew


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "loss was '<lambda>' and is 'MSELoss'"),
        ({"version": 2, "loss": lambda p, y: (p - y).pow(2).mean()}, "version was None and is 2"),
    ],
    ids=["name", "version"],
)
def test_after_a_change_of_loss_the_choice_of_the_best_starts_anew(tmp_path, change, told):
    path = tmp_path / "s.pt"
    small = {"loss": lambda p, y: nn.functional.mse_loss(p, y) * 1e-3}
    cut(path, **small)
    run, said = go_on(path, early_stopping=True, patience=1, **change)
    assert run.best_epoch == 4  # with the loss before, 1 or 2
    assert run.best_loss == min(run.history["val_loss"][2:])
    assert told in said[0]
    assert said[0].endswith("Restarted: the choice of the best epoch")


def test_other_validation_data_and_metrics_are_judged_anew(tmp_path):
    path = tmp_path / "s.pt"
    x, y = dataset(17, seed=1).tensors
    easy = DataLoader(TensorDataset(x, torch.zeros_like(y)), batch_size=5)
    cut(path, test_data=easy)
    kept = path.read_bytes()
    run, said = go_on(path)
    assert run.best_epoch > 2
    assert "validation" in said[0]
    path.write_bytes(kept)
    run, said = go_on(path, test_data=easy, metrics={"mae": nn.functional.l1_loss})
    assert run.best_epoch == int(torch.tensor(run.history["val_loss"]).argmin()) + 1
    assert "mae was None and is 'l1_loss'" in said[0]
    assert "Restarted" not in said[0]

    def watch(metric):
        stopping = EarlyStopping(patience=9, monitor="score")
        go = {"metrics": {"score": metric}, "early_stopping": stopping}
        return stopping, go

    path.unlink()
    cut(path, **watch(nn.functional.mse_loss)[1])
    stopping, go = watch(lambda p, y: nn.functional.mse_loss(p, y) + 1e3)
    _, said = go_on(path, **go)
    assert stopping.best > 1e3
    assert "the choice of the best epoch" in said[0]
    go["metrics"] |= {"s": nn.functional.l1_loss}  # begins alike, but is another
    _, said = go_on(path, **(go | {"epochs": 5}))
    assert "s was None and is 'l1_loss'" in said[0]
    assert "Restarted" not in said[0]


def test_a_finished_run_says_that_nothing_is_left_and_keeps_its_best(tmp_path):
    path = tmp_path / "s.pt"
    done = make(path)
    model = done.train()
    run, said = go_on(path, loss=nn.L1Loss())
    assert weights(run.model) == weights(model)
    assert (run.best_epoch, run.best_loss) == (done.best_epoch, done.best_loss)
    assert "loss was 'MSELoss' and is 'L1Loss'" in said[0]
    assert "training is already complete" in said[1]
    assert "epochs=4" in said[1]


def test_losses_are_known_by_name_and_version():
    def own(p, y):
        return (p - y).mean()

    named = [nn.MSELoss(), nn.functional.l1_loss, own, functools.partial(own, y=0)]
    assert [name_of(loss) for loss in named] == ["MSELoss", "l1_loss", "own", "own"]


# --------------------------------------------------------------- frozen parameters


@pytest.mark.parametrize("adds", [False, True])
def test_layers_unfrozen_in_a_run_are_so_after_a_resume(tmp_path, adds):
    """Once in epoch 2, by a callback that a resumed run does not come by again."""

    class Unfreeze(Callback):
        def on_epoch_start(self, loop):
            if loop.state.epoch == 1:
                loop.model[0].requires_grad_(True)
                if adds:
                    layer = {"params": loop.model[0].parameters(), "lr": 0.1}
                    loop.optimizer.add_param_group(layer)

    def settings():
        model = network()
        model[0].requires_grad_(False)

        def kind(parameters, lr):
            chosen = [p for p in model.parameters() if p.requires_grad or not adds]
            return torch.optim.SGD(chosen, lr=lr, momentum=0.9)

        return {"model": model, "kind": kind, "callbacks": [Unfreeze()]}

    whole = make(**settings())
    wanted = weights(whole.train())
    path = tmp_path / "s.pt"
    cut(path, **settings())
    run, said = go_on(path, **settings())
    assert said == []
    assert weights(run.model) == wanted
    assert losses(run) == losses(whole)
    path.unlink()
    given, stop = settings(), At(11)
    run = make(path, **(given | {"callbacks": [*given["callbacks"], stop]}))
    with pytest.raises(Interrupt):
        run.train()
    stop.step = None
    assert weights(run.train()) == wanted  # with the optimizer that has the layer by now
    path.unlink()
    cut(path, **settings())
    changed = settings()
    changed["model"][0].requires_grad_(True)
    if not adds:  # else the optimizer has other parameters
        run, said = go_on(path, **changed)
        assert said == []  # as the snapshot has it
        assert weights(run.model) == wanted


def test_what_is_frozen_is_the_snapshots(tmp_path):
    path = tmp_path / "s.pt"
    cut(path)
    model = network()
    model[0].requires_grad_(False)
    run, said = go_on(path, model=model)
    assert "parameters: trained was ['0.weight', '0.bias', " in said[0]
    assert weights(run.model) == weights(make().train())


def test_the_seed_of_every_loader_of_ours_is_known():
    cube = cell_id_cube({"time": 24, "lat": 4}, "float64", names=("a", "b"))
    ours = PTXrDataset(cube, to_pred="b", block_size={"time": 2}, part="train")
    for data in (ours, torch.utils.data.TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))):
        loader = prep_dataloader(data, batch_size=2, seed=9)
        loader = loader[0] if isinstance(loader, tuple) else loader
        assert loader_seed(loader) == 9


@pytest.mark.parametrize("kind", [xr.DataArray, np.copy])
def test_arrays_of_any_dtype_and_size_are_told_apart(kind):
    zeros = np.zeros(3_000_000)
    one = zeros.copy()
    one[1] = 1
    arrays = [np.ones(2), np.ones(2, "f4"), np.ones((2, 1)), zeros, one]
    found = [digest({"weights": kind(array)}) for array in arrays]
    assert found == [digest({"weights": kind(array.copy())}) for array in arrays]
    assert len(set(found)) == len(found)
