"""Forecasts trained on their own output: the loss and gradient of a plain loop, on any ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, SGDRegressor
from torch import nn
from torch.utils.data import DataLoader, Subset

from ml4cube.core.errors import CubeError
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.training import pytorch, pytorch_distributed, sklearn
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.inputs import rollout as rolled_out
from ml4cube.training.inputs.rollout import Rollout
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.trainer import Trainer as StepTrainer
from tests.distributed_runner import TwoRanks, assert_same_on_all_ranks
from tests.training_parts import At, losses, resumed_alike, weights

LAT, LON = 2, 3


def weather(steps: int = 20, gaps: float = 0.0, dims: Any = ("time", "lat", "lon")) -> xr.Dataset:
    """Temperature, which is predicted; rain, which is only a target; the sun and heights."""
    rng = np.random.default_rng(0)
    shape = (steps, LAT, LON)
    t = rng.normal(size=shape).cumsum(0).astype("f4")
    t[rng.random(shape) < gaps] = np.nan
    cube = xr.Dataset(
        {
            "height": (("lat", "lon"), rng.normal(size=shape[1:]).astype("f4")),
            "rain": (("time", "lat", "lon"), rng.normal(size=shape).astype("f4")),
            "sun": ("time", rng.normal(size=steps).astype("f4")),
            "t": (("time", "lat", "lon"), t),
        },
        {"time": np.arange("2000-01-01", steps, dtype="M8[D]")},
    )
    return cube.transpose(*dims)


def forecasts(cube: xr.Dataset, rollout: int = 1, inputs: int = 1, **options: Any) -> PTXrDataset:
    """Samples of whole maps for a forecast of one step after another."""
    given: dict[str, Any] = {
        "to_pred": ["rain", "t"],
        "features": ["height", "sun", "t"],
        "sample_size": {"time": inputs, "lat": LAT, "lon": LON},
        "overlap": {"time": 0.9} if inputs > 1 else None,
        "target_offset": {"time": inputs},
        "target_size": {"time": 1},
        "scale_fn": None,
        "progress": False,
        "rollout": rollout,
    }
    return PTXrDataset(cube, **{**given, **options})


def network(channels: int = 3, targets: int = 2, norm: bool = False) -> nn.Module:
    """A small network, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm2d(4)] if norm else []
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), *middle, nn.Tanh(), nn.Conv2d(4, targets, 1)
        )


def trainer(
    train: Any,
    val: Any = None,
    model: nn.Module | None = None,
    kind: Any = pytorch.Trainer,
    batch_size: int = 4,
    **options: Any,
) -> Any:
    """A Trainer of such data."""
    model = network() if model is None else model
    given: dict[str, Any] = {"loss": nn.MSELoss(), "epochs": 3, "progress": False, "device": "cpu"}
    loader = prep_dataloader(train, batch_size=batch_size, seed=1)
    val_loader = None if val is None else prep_dataloader(val, batch_size=5, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return kind(model, loader, val_loader, optimizer, **{**given, **options})


# ------------------------------------------------------------------------ the loop itself


def plain_forecast(
    model: Any, x: Any, y: Any, inputs: int, outputs: int, steps: int, pairs: Any
) -> list[Any]:
    """Predict one step after another by numpy; arrays are (sample, channel, time, cell)."""
    x, predicted = x.copy(), []
    for step in range(steps):
        first = step * outputs
        output = model(x[:, :, first : first + inputs])
        predicted.append(output)
        for time in range(outputs):
            later = first + inputs + time
            if later == x.shape[2]:
                break
            for x_channel, y_channel in pairs:
                for sample in range(len(x)):
                    for cell in range(x.shape[3]):
                        if np.isfinite(y[sample, y_channel, first + time, cell]):
                            value = output[sample, y_channel, time, cell]
                            x[sample, x_channel, later, cell] = value
    return predicted


@settings(max_examples=40)
@given(
    inputs=st.integers(1, 3),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 4),
    time_is_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_forecasts_are_those_of_a_plain_loop(
    inputs: int, outputs: int, steps: int, time_is_last: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dims = ("lat", "time") if time_is_last else ("time", "lat")
    length = inputs + steps * outputs
    variables = {
        name: (("time", "lat"), rng.normal(size=(length, 4))) for name in ("a", "b", "c", "d")
    }
    cube = xr.Dataset(variables).transpose(*dims)
    cube["d"] = cube["d"].where(rng.random(cube["d"].shape) > 0.3)
    cube["a"] = cube["a"].where(rng.random(cube["a"].shape) > 0.1)
    data = PTXrDataset(
        cube,
        to_pred=["d", "c", "a"],
        features=["a", "b", "d"],
        sample_size={"time": inputs, "lat": 4},
        target_offset={"time": inputs},
        target_size={"time": outputs},
        rollout=steps,
        scale_fn=None,
        drop_nan=None,
        dtype="float64",
    )
    x, y = (array[None] for array in data[0])
    mix = rng.normal(size=(3 * outputs, 3 * inputs)) / 2

    def on_arrays(given: Any) -> Any:
        flat = np.einsum("oi,sic->soc", mix, given.reshape(len(given), 3 * inputs, 4))
        return flat.reshape(len(given), 3, outputs, 4)

    def on_tensors(given: torch.Tensor, step: int) -> torch.Tensor:
        array = given.numpy()
        if array.ndim == 4 and time_is_last:
            array = array.swapaxes(2, 3)
        output = on_arrays(array.reshape(1, 3, inputs, 4))
        if outputs == 1:
            output = output[:, :, 0]
        elif time_is_last:
            output = output.swapaxes(2, 3)
        return torch.from_numpy(np.ascontiguousarray(output))

    rollout = Rollout.of(data)
    assert rollout.steps_in(x) == steps
    found = list(rollout.forecast(on_tensors, x, steps, keep=~y.isfinite()))

    def with_time(array: Any) -> Any:
        array = array.numpy()
        if array.ndim == 4 and time_is_last:
            array = array.swapaxes(2, 3)
        return array.reshape(1, 3, -1, 4)

    pairs = [(0, 2), (2, 0)]  # of a and d in x and in y
    expected = plain_forecast(on_arrays, with_time(x), with_time(y), inputs, outputs, steps, pairs)
    for one, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(with_time(one), true)
    for step in range(steps):
        part = with_time(y)[:, :, step * outputs : (step + 1) * outputs]
        np.testing.assert_array_equal(with_time(rollout.target_of(y, step)), part)


@pytest.mark.parametrize("output", [torch.zeros(4, 2, 1, LAT, LON), torch.zeros(4, 1, LAT, LON)])
def test_an_output_of_another_shape_is_refused(output: torch.Tensor) -> None:
    data = forecasts(weather(), 2)
    x, _ = data.take(range(4))
    with pytest.raises(CubeError, match=r"of shape \(4, 2, 2, 3\), got \(4, [12], "):
        next(Rollout.of(data).forecast(lambda given, step: output, x, 2))
    with pytest.raises(CubeError, match=r"must return a tensor of shape .*, got tuple"):
        next(Rollout.of(data).forecast(lambda given, step: (output,), x, 2))


# ---------------------------------------------------------------- loss and gradient


class Persistence(nn.Module):
    """Returns the temperature that it gets, times a weight that is 1, and no rain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last temperature."""
        t = x[:, 2:] if x.ndim == 4 else x[:, 2:, -1]
        return torch.cat([torch.zeros_like(t), t * self.weight], 1)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_persistence_has_the_loss_of_persistence(inputs: int, gaps: float) -> None:
    cube = weather(gaps=gaps)
    fill = {"fill_method": {"t": "constant"}, "const": 7.0} if gaps else {}
    data = forecasts(cube, 4, inputs, drop_nan=None, **fill)
    errors, t, rain = [], cube["t"].values.astype(float), cube["rain"].values.astype(float)
    for start in range(inputs - 1, 20 - 4):
        forecast = np.where(np.isnan(t[start]), 7, t[start])
        for lead in range(1, 5):
            truth = t[start + lead]
            errors += [*((forecast - truth) ** 2).ravel(), *(rain[start + lead] ** 2).ravel()]
            forecast = np.where(np.isnan(truth), 7, forecast)  # a gap stays what X has there
    run = trainer(data, data, Persistence(), loss=MaskedLoss(nn.MSELoss()))
    assert len(data) == 17 - inputs
    loss = run.evaluate(prep_dataloader(data, batch_size=5, shuffle=False, drop_last=False))
    assert loss["val_loss"] == pytest.approx(np.nanmean(errors), rel=1e-6)


def test_a_linear_system_is_learnt_by_its_forecasts() -> None:
    system = torch.tensor([[0.9, 0.3], [-0.4, 0.8]])
    steps = [torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])]
    for _ in range(39):
        steps.append(system @ steps[-1])
    values = torch.stack(steps).numpy()
    cube = xr.Dataset({name: (("time", "x"), values[:, i]) for i, name in enumerate("ab")})
    data = PTXrDataset(
        cube,
        to_pred=["a", "b"],
        sample_size={"x": 3},
        target_offset={"time": 1},
        rollout=5,
        scale_fn=None,
        progress=False,
    )
    model = nn.Conv1d(2, 2, 1, bias=False)
    nn.init.zeros_(model.weight)
    loader = prep_dataloader(data, batch_size=len(data), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = pytorch.Trainer(
        model,
        loader,
        loader,
        optimizer,
        loss=nn.MSELoss(),
        epochs=300,
        early_stopping=False,
        progress=False,
        rollout={1: 1, 50: 2, 100: 5},
        device="cpu",
    )
    run.train()
    assert run.best_loss < 1e-7
    np.testing.assert_allclose(model.weight.detach().squeeze(-1), system, atol=1e-3)


@pytest.mark.parametrize("last", [1, 2, 3, None])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradient_is_that_of_a_plain_loop(last: int | None, accumulated: int) -> None:
    cube = weather(19, gaps=0.1)  # 16 samples
    data = forecasts(cube, 3, drop_nan=None, fill_method="constant", const=0.0)
    model, masked = network(), MaskedLoss(nn.MSELoss())
    run = trainer(
        data,
        model=model,
        loss=masked,
        epochs=1,
        rollout_gradient=last,
        batch_size=16 // accumulated,
        gradient_accumulation_steps=accumulated,
    )
    run.train()
    # The same step of all samples at once, by hand.
    plain = network()
    x, y = data.take(range(16))
    state, outputs, targets = x[:, :, 0], [], []
    for step in range(3):
        output = plain(state)
        if step < 3 - (last or 3):
            output = output.detach()
        outputs.append(output)
        targets.append(y[:, :, step])
        if step < 2:
            t = torch.where(y[:, 1, step].isnan(), x[:, 2, step + 1], output[:, 1])
            state = torch.stack([x[:, 0, step + 1], x[:, 1, step + 1], t], 1)
    loss = masked(torch.stack(outputs), torch.stack(targets))
    loss.backward()
    assert run.history["train_loss"][0] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        torch.testing.assert_close(model.get_parameter(name), parameter)


def test_half_precision_has_the_gradient_of_the_last_steps() -> None:
    # Weights that autocast has converted without a gradient must not be used in the last step.
    data = forecasts(weather(), 3)
    changes = []
    for precision in ("fp32", "bf16"):
        model = trainer(data, rollout_gradient=1, epochs=1, precision=precision).train()
        pairs = zip(model.parameters(), network().parameters(), strict=True)
        changes.append([(after - before).detach() for after, before in pairs])
    for whole, half in zip(*changes, strict=True):
        assert (whole - half).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("of_cells", [False, True])
def test_weights_belong_to_their_samples_and_steps(of_cells: bool) -> None:
    cube = weather()
    cube["w"] = abs(cube["rain"])
    data = forecasts(cube, 3, weights="w" if of_cells else np.arange(17.0))
    found = trainer(data, data, Persistence()).evaluate(
        prep_dataloader(data, batch_size=5, shuffle=False, drop_last=False)
    )
    x, y, w = data.take(range(17))
    w = (w if of_cells else w.reshape(-1, 1, 1, 1, 1)).expand_as(y)
    pred = torch.stack([torch.zeros_like(y[:, 0]), x[:, 2, :1].expand_as(y[:, 1])], 1)
    expected = ((pred - y) ** 2 * w).sum() / w.sum()
    assert found["val_loss"] == pytest.approx(expected.item(), rel=1e-6)


# ------------------------------------------------------------------- schedule and options


def test_one_step_is_bit_equal_to_training_without_a_rollout() -> None:
    cube = weather()
    plain = trainer(forecasts(cube), forecasts(cube))
    one = trainer(forecasts(cube), forecasts(cube), rollout=1, rollout_gradient=1)
    assert weights(plain.train()) == weights(one.train())
    assert losses(plain) == losses(one)
    # Data of several steps, of which one is trained: the samples are those of a shorter cube.
    shorter = trainer(forecasts(cube.isel(time=slice(18))), loss=MaskedLoss(nn.MSELoss()))
    several = trainer(forecasts(cube, 3), rollout=1, loss=MaskedLoss(nn.MSELoss()))
    assert weights(shorter.train()) == weights(several.train())
    assert losses(shorter) == losses(several)


class Halved(nn.Module):
    """Halves its input, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half of the input."""
        return x.mul_(0.5) if self.in_place else x * 0.5


def test_a_model_that_works_in_place_does_not_change_its_next_input() -> None:
    data = forecasts(weather(), 3, 2, to_pred="t", features=["t"])
    losses = []
    for in_place in (False, True):
        model = nn.Sequential(Halved(in_place), nn.Flatten(1, 2), network(2, 1))
        run = trainer(data, data, model, batch_size=1)  # of which steps are views
        run.train()
        losses.append(run.history["train_loss"])
    assert losses[0] == losses[1]


class Counted(Persistence):
    """Notes whether each of its calls was in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note."""
        self.calls.append(self.training)
        return super().forward(x)


def test_a_schedule_trains_more_steps_from_its_epochs_on() -> None:
    data, val, model = forecasts(weather(), 4), forecasts(weather(), 2), Counted()
    trainer(data, val, model, epochs=4, rollout={2: 2, 4: 3}, batch_size=16).train()
    assert sum(model.calls) == 1 + 2 + 2 + 3
    # Validation predicts all the steps of its data, in each of 4 batches.
    assert len(model.calls) - sum(model.calls) == 4 * 4 * 2
    by_default = trainer(data, val, Counted(), epochs=1, batch_size=16)
    assert sum(by_default.train().calls) == 4  # all steps of the data


def test_fast_dev_run_tries_the_most_steps() -> None:
    data = forecasts(weather(), 4)
    run = trainer(data, data, rollout={1: 1, 9: 3}, fast_dev_run=True)
    assert run._loop.options.rollout == 3


@pytest.mark.slow
def test_a_compiled_model_and_subsets_train_alike() -> None:
    data = forecasts(weather(), 3)
    whole = trainer(data, data, rollout_gradient=2)
    compiled = trainer(data, data, rollout_gradient=2, compile="aot_eager")
    assert weights(whole.train()) == weights(compiled.train())
    model = network()
    subset = DataLoader(Subset(data, range(12)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    AdvancedTrainer(model, optimizer, nn.MSELoss(), progress=False, rollout=2).fit(subset, subset)
    assert weights(model) != weights(network())


def test_a_run_resumes_inside_its_schedule(tmp_path: Path) -> None:
    data = forecasts(weather(), 3)

    def fresh(**options: Any) -> Any:
        return trainer(
            data,
            data,
            network(norm=True),
            epochs=4,
            rollout={2: 2, 3: 3},
            rollout_gradient=2,
            save_every=1,
            **options,
        )

    position, _ = resumed_alike(tmp_path / "snapshot.pt", fresh, At(9))
    assert position["epoch"] == 2
    changed = trainer(
        data, data, network(norm=True), epochs=5, rollout=3, snapshot_path=tmp_path / "snapshot.pt"
    )
    with pytest.warns(
        UserWarning,
        match=r"rollout was \{'2': 2, '3': 3\} and is 3, rollout_gradient was 2 and is None",
    ):
        changed.train()


def test_too_little_memory_for_the_gradient_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data = forecasts(weather(), 4)
    # Per sample and cell: X of 3 channels, tanh and its input of 4 channels, at most.
    monkeypatch.setattr(rolled_out, "free_memory", lambda device: 3 * 4 * LAT * LON * 4 * 3 - 1)
    with pytest.warns(UserWarning, match="the gradient of rollout=4 steps needs about .* GB"):
        trainer(data, rollout=4, loss=nn.MSELoss()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(data, rollout=4, rollout_gradient=1).train()
        monkeypatch.setattr(rolled_out, "free_memory", lambda device: None)
        trainer(data, rollout=4).train()


def test_what_a_call_keeps_for_its_gradient() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    saved = rolled_out.SavedForGradient()
    with saved:
        model(torch.zeros(8, 10))
    assert saved.nbytes == 8 * 10 * 4 + 8 * 20 * 4  # the input, and the result of tanh
    assert rolled_out.free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": 0}, "rollout must be an int of 1 or more, or {epoch: steps}"),
        ({"rollout": {}}, "rollout must be an int of 1 or more, or {epoch: steps}"),
        ({"rollout": {0: 2}}, "rollout must be an int of 1 or more, or {epoch: steps}"),
        ({"rollout_gradient": 0}, "rollout_gradient must be an int of 1 or more, or None, got 0"),
        (
            {"rollout": {1: 1, 5: 4}},
            "rollout must be at most that of the training data, 3, got {1: 1, 5: 4}; make them "
            "with PTXrDataset(..., rollout=4)",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CubeError) as error:
        trainer(forecasts(weather(), 3), **options)
    assert message in str(error.value)


class OwnStep(StepTrainer):
    """Trains on what a batch has, whatever that is."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Predict the mean."""
        return {"loss": self.model(batch[0][:, :, 0]).mean()}


class CallsDefault(StepTrainer):
    """Adds a number to the step of the loss."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Call the default."""
        return {**super().train_step(batch), "batch": 1.0}


@pytest.mark.parametrize(
    ("kind", "rollout"),
    [(StepTrainer, None), (StepTrainer, {1: 1, 2: 3}), (CallsDefault, None)],
)
def test_a_trainer_of_steps_predicts_them_as_the_others_do(kind: Any, rollout: Any) -> None:
    train, val = forecasts(weather(), 3), forecasts(weather(12), 3)
    other = trainer(train, val, rollout=rollout, early_stopping=False)
    other.train()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"loss": nn.MSELoss(), "rollout": rollout, "progress": False}
    run = kind(model, "cpu", "train", optimizer, **settings)
    loaders = [prep_dataloader(train, batch_size=4, seed=1), prep_dataloader(None, val, 5)]
    run.run(3, *loaders)
    for name in ("train_loss", "val_loss"):
        assert run.history[name] == other.history[name]
    alone = StepTrainer(model, "cpu", "test", loss=nn.MSELoss(), progress=False)
    assert alone.evaluate(loaders[1])["val_loss"] == run.history["val_loss"][-1]
    match = r"loader must have samples of one step, got PTXrDataset\(\.\.\., rollout=3\)"
    with pytest.raises(CubeError, match=match):
        run.inference(loaders[1])


def test_estimators_refuse_several_steps() -> None:
    several = prep_dataloader(forecasts(weather(), 3), batch_size=4)
    one = prep_dataloader(forecasts(weather()), batch_size=4)
    with pytest.raises(CubeError, match=r"train_data must have samples of one step"):
        sklearn.Trainer(SGDRegressor(), several)
    run = sklearn.Trainer(LinearRegression(), one, one, batch_training=False)
    run.train()
    with pytest.raises(CubeError, match=r"data must have samples of one step"):
        run.evaluate(several)


def test_bad_data() -> None:
    cube, model = weather(), network()
    optimizer = torch.optim.SGD(model.parameters())
    no_target = forecasts(cube, 3, features=["sun", "height"])
    with pytest.raises(CubeError, match=r"one of the targets \['rain', 't'\] must be a f"):
        trainer(no_target)
    with pytest.raises(CubeError, match="for a rollout; test_data differs from the others"):
        trainer(forecasts(cube, 3), forecasts(cube, 3, features=["sun", "t"]))
    with pytest.raises(CubeError, match="at most that of the training data, 1, got 2"):
        trainer(forecasts(cube), rollout=2)
    steps = OwnStep(model, "cpu", "train", optimizer, rollout=2)
    loader = prep_dataloader(forecasts(cube, 3), batch_size=4)
    with pytest.raises(CubeError, match="rollout and rollout_gradient need a step of the package"):
        steps.run(1, loader)
    run = trainer(forecasts(cube))
    with pytest.raises(CubeError, match="loader differs"):
        trainer(forecasts(cube, 2)).evaluate(
            prep_dataloader(forecasts(cube, 2, features=["sun", "t"]), batch_size=4)
        )
    assert run.evaluate(prep_dataloader(forecasts(cube, 2), batch_size=4))["val_loss"] > 0


# -------------------------------------------------------------------------------- ranks

two_ranks = TwoRanks()
ran = two_ranks.fixture()


def train_on_ranks_and_alone(**options: Any) -> None:
    """Train with all samples in one batch, on two ranks and alone: equal to rounding."""
    data, val = forecasts(weather(19), 3), forecasts(weather(12), 3)
    assert len(data) == 16
    runs = []
    for kind, share in ((pytorch_distributed.Trainer, 8), (pytorch.Trainer, 16)):
        model, parallel = network(), share == 8
        loader, val_loader = prep_dataloader(
            data, test_ds=val, batch_size=share, seed=1, parallel=parallel
        )
        run = kind(
            model,
            loader,
            val_loader,
            torch.optim.SGD(model.parameters(), lr=0.05),
            loss=MaskedLoss(nn.MSELoss()),
            epochs=3,
            progress=False,
            device="cpu",
            rollout={1: 1, 2: 3},
            **options,
        )
        run.train()
        runs.append(run)
    assert_same_on_all_ranks(json.dumps([losses(runs[0]), weights(runs[0].model)]))
    for column in ("train_loss", "val_loss"):
        assert runs[0].history[column] == pytest.approx(runs[1].history[column], rel=1e-5)


@two_ranks.add
def two_ranks_train_like_one(folder: str) -> None:
    train_on_ranks_and_alone()


@two_ranks.add
def two_ranks_train_the_last_steps_like_one(folder: str) -> None:
    train_on_ranks_and_alone(rollout_gradient=1)
    train_on_ranks_and_alone(rollout_gradient=2)


@two_ranks.add
def shards_train_like_one(folder: str) -> None:
    train_on_ranks_and_alone(strategy="fsdp", rollout_gradient=2)


@two_ranks.add
def buffers_change_between_the_steps(folder: str) -> None:
    data, model = forecasts(weather(), 3), network(norm=True)
    run = pytorch_distributed.Trainer(
        model,
        prep_dataloader(data, batch_size=2, seed=1, parallel=True),
        None,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        epochs=2,
        progress=False,
        device="cpu",
        gradient_accumulation_steps=2,
    )
    run.train()
    assert_same_on_all_ranks(json.dumps([losses(run), weights(run.model)]))


test_ranks = two_ranks.test()
