"""Networks that predict changes, and weights of variables and levels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

from ml4cube.core.errors import CubeError
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.training.losses import MaskedLoss, area_weights, target_weights
from ml4cube.training.pytorch import Trainer
from ml4cube.training.residual import Residual


def atmosphere(dims: Any = ("time", "level", "lat")) -> xr.Dataset:
    """Two variables on levels and one at the surface."""
    rng = np.random.default_rng(0)
    fields = {name: (("time", "level", "lat"), rng.normal(size=(12, 3, 2))) for name in "tqs"}
    coords = {"level": [300, 500, 850], "lat": [0.0, 60.0]}
    return xr.Dataset(fields, coords).transpose(*dims).astype("float32")


def forecasts(cube: xr.Dataset, inputs: int = 1, outputs: int = 1, **options: Any) -> PTXrDataset:
    """Samples of whole fields."""
    given: dict[str, Any] = {
        "to_pred": ["q", "s", "t"],
        "features": ["t", "q"],
        "sample_size": {"time": inputs, "level": 3, "lat": 2},
        "target_offset": {"time": inputs},
        "target_size": {"time": outputs},
        "progress": False,
    }
    return PTXrDataset(cube, **{**given, **options})


class Change(nn.Module):
    """Returns the same number for all cells of the three targets."""

    def __init__(self, value: float, data: PTXrDataset) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.window = tuple(data.step_sizes[1].values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return self.value.expand(len(x), 3, *self.window)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dims", [("time", "level", "lat"), ("lat", "time", "level")])
@pytest.mark.parametrize("scale_fn", [None, "standardize"])
def test_the_change_is_added_to_the_last_step(
    inputs: int, outputs: int, dims: Any, scale_fn: Any
) -> None:
    cube = atmosphere(dims)
    data = forecasts(cube, inputs, outputs, scale_fn=scale_fn)
    x, y = data.take(range(len(data)))
    pred = Residual(Change(0.0, data), data)(x)
    assert pred.shape == y.shape
    found = data.to_dataset((x, pred), range(len(data)), unscale=True)
    assert "time_target" in found.dims or outputs == 1
    for number, first in enumerate(data.coords(range(len(data)))["time_index"]):
        last = cube.isel(time=first + inputs - 1)
        for name in ("t", "q"):
            forecast = found[f"{name}_target"].isel(samples=number)
            for one in forecast.transpose("time_target", ...) if outputs == 2 else [forecast]:
                np.testing.assert_allclose(one, last[name], rtol=1e-5, atol=1e-6)
    changed = Residual(Change(0.5, data), data)(x)
    torch.testing.assert_close(changed, pred + 0.5)
    assert (pred[:, 1] == 0).all()  # no feature to add to


def test_a_network_of_zeros_rolled_out_is_persistence() -> None:
    cube = atmosphere()
    data = forecasts(cube, rollout=3, scale_fn=None, to_pred=["q", "t"])

    class Zeros(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(2, 2, 1)
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    model = Residual(Zeros(), data)
    loader = prep_dataloader(data, batch_size=4, shuffle=False, drop_last=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), progress=False)
    errors = [
        (cube[name].values[start + lead] - cube[name].values[start]) ** 2
        for start in range(9)
        for lead in (1, 2, 3)
        for name in ("q", "t")
    ]
    assert run.evaluate(loader)["val_loss"] == pytest.approx(np.mean(errors), rel=1e-6)


def test_the_state_is_that_of_the_network() -> None:
    data = forecasts(atmosphere())
    model = Residual(Change(0.5, data), data)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Residual(Change(0.0, data), data)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert list(model.state_dict()) == ["model.value"]
    assert other.model.value.item() == 0.5
    x, _ = data.take([0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.float32
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_bad_residuals() -> None:
    cube = atmosphere()
    data = forecasts(cube)
    with pytest.raises(CubeError, match=r"model must be a torch\.nn\.Module"):
        Residual(lambda x: x, data)
    with pytest.raises(CubeError, match="data must be a PTXrDataset, got a list"):
        Residual(nn.Identity(), [])
    same_time = PTXrDataset(cube, to_pred="t", scale_fn=None)
    with pytest.raises(CubeError, match="must have a target_offset along one dim, time, got none"):
        Residual(nn.Identity(), same_time)
    with pytest.raises(CubeError, match=r"one of the targets \['q', 's', 't'\] must be a feature"):
        Residual(nn.Identity(), forecasts(cube.assign(u=cube.t), features="u"))
    with pytest.raises(CubeError, match="y must have the cells of X along all dims but 'time'"):
        Residual(nn.Identity(), forecasts(cube, target_size={"level": 1}))
    with pytest.raises(CubeError, match=r"the change of 3 targets, .* got \(1, 2, 3, 2\)"):
        Residual(nn.Identity(), data)(data.take([0])[0])
    with pytest.raises(CubeError, match=r"the change of 3 targets, .* with 4 axes, got \(1, 12\)"):
        Residual(nn.Flatten(), data)(data.take([0])[0])


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dims", [("time", "level", "lat"), ("lat", "time", "level")])
def test_weights_of_variables_levels_and_areas(outputs: int, dims: Any) -> None:
    data = forecasts(atmosphere(dims), 1, outputs, scale_fn=None)
    weights = target_weights(data, {("t", 500): 0.1, "t": 2.0, "s": 0.5, ("q", 850): 3.0})
    _, y = data.take(range(4))
    level = list(data.step_sizes[1]).index("level") - len(data.step_sizes[1])
    areas = area_weights([0.0, 60.0], axis=list(data.step_sizes[1]).index("lat") - y.ndim + 2)
    by_level = {"q": [1, 1, 3], "s": [0.5] * 3, "t": [2, 0.1, 2]}
    expected, total = 0.0, 0.0
    for index in np.ndindex(*y.shape):
        cell = dict(zip(data.step_sizes[1], index[2:], strict=True))
        w = by_level[data.targets[index[1]]][cell["level"]] * [1.0, 0.5][cell["lat"]]
        expected, total = expected + w * y[index].item() ** 2, total + w
    loss = MaskedLoss(nn.MSELoss(), weights=weights * areas)(torch.zeros_like(y), y)
    assert weights.shape[level] == 3
    assert loss.item() == pytest.approx(expected / total, rel=1e-5)


def test_weights_of_points() -> None:
    cube = atmosphere().isel(level=0, lat=0, drop=True)
    data = PTXrDataset(cube, to_pred=["t", "q"], scale_fn=None)
    assert target_weights(data, {"q": 2.0}).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"u": 1.0}, "weights: target must be 'q', 's' or 't', got 'u'"),
        ({("t", 700): 1.0}, "weights: level 700 must be in one dim of the windows of y, found in"),
        ({"t": -1.0}, "weights must be 0 or more"),
        ({"t": float("nan")}, "weights must be 0 or more"),
        ([2.0], "weights must be a mapping such as {'t2m': 2.0}, got [2.0]"),
    ],
)
def test_bad_weights(weights: Any, message: str) -> None:
    with pytest.raises(CubeError) as error:
        target_weights(forecasts(atmosphere()), weights)
    assert message in str(error.value)


def test_levels_that_differ_between_samples_have_no_weights() -> None:
    data = forecasts(atmosphere(), sample_size={"level": 2, "lat": 2}, overlap={"level": 0.5})
    with pytest.raises(CubeError, match="windows with the same cells along 'level'"):
        target_weights(data, {("t", 500): 2.0})
    with pytest.raises(CubeError, match="data must be a PTXrDataset with to_pred"):
        target_weights([], {"t": 1.0})
