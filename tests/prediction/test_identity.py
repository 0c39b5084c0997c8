"""Which predictions are the same call."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from ml4cube.core.scaling import Scaling
from ml4cube.prediction.output.same_call import call_of, source_state
from tests.prediction.output_job import source

SLOPE, SHIFT = 3.0, 1.0
OUT = Path("/tmp/cube.zarr")


def scaled(x: Any, by: float = 2.0) -> Any:
    return x * by * SLOPE


def shifted(x: float) -> float:
    return x + SHIFT


class Net(torch.nn.Module):
    """A model of the user, with attributes, a buffer and functions that it calls."""

    has_slope = True

    def __init__(self, offset: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x) + self.offset

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.activated(self.layer(x)) * self.slope

    @staticmethod
    def activated(x: torch.Tensor) -> torch.Tensor:
        return scaled(x)

    @property
    def slope(self) -> float:
        return shifted(0.0) if self.has_slope else 1.0


class OtherNet(Net):
    """The same weights, another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x) - self.offset


def identity(model: Any, settings: Any = ()) -> str | None:
    cube = source(steps=1)
    call = call_of(model, cube, {"setting": settings}, source_state(cube, ["t"], OUT))
    return call and call.id


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def fitted(slope: float = 1.0) -> LinearRegression:
    x = np.arange(5.0)[:, None]
    return LinearRegression().fit(x, slope * x)


def exported() -> Any:
    return torch.export.export(net(), (torch.zeros(3, 1),))


MAKERS = {
    "a module": net,
    "a module of torch": lambda: copy.deepcopy(torch.nn.Sequential(net().layer, torch.nn.ReLU())),
    "a list of modules": lambda: [net(), net(offset=2.0)],
    "a function": lambda: scaled,
    "a partial function": lambda: functools.partial(scaled, by=3.0),
    "an estimator": fitted,
    "a pipeline": lambda: make_pipeline(StandardScaler(), FunctionTransformer(scaled), fitted()),
    "an exported program": exported,
    "a compiled module": lambda: torch.compile(net()),
    "a list with a compiled module": lambda: [torch.compile(net())],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_is_known_when_it_is_made_again(kind):
    first, second = identity(MAKERS[kind]()), identity(MAKERS[kind]())
    assert first is not None
    assert first == second


def other_weights() -> Net:
    model = net()
    with torch.no_grad():
        model.layer.bias += 1e-6
    return model


def other_buffer() -> Net:
    model = net()
    model.mean += 1
    return model


def other_class() -> Net:
    torch.manual_seed(0)
    return OtherNet()


def with_a_new_forward() -> Net:
    model = net()
    model.forward = lambda x: x
    return model


def test_other_models_have_other_identities(monkeypatch):
    models = [
        net(), net(offset=2.0), other_weights(), other_buffer(), other_class(), net().eval(),
        with_a_new_forward(), [net()], [net(), net()], net().double(), exported(),
        torch.nn.Conv1d(1, 1, 3, padding=1), torch.nn.Conv1d(1, 1, 3, padding=1, dilation=2),
        scaled, functools.partial(scaled, by=3.0), lambda x: x,
        fitted(), fitted(2.0),
    ]  # fmt: skip
    known = [identity(model) for model in models]
    # functions that a static method and a property of Net call use these
    for name, value in (("SLOPE", 4.0), ("SHIFT", 2.0)):
        monkeypatch.setitem(globals(), name, value)
        known.append(identity(net()))
    known.append(identity(scaled))
    monkeypatch.setattr(Net, "has_slope", False)  # the source of the class does not show it
    known.append(identity(net()))
    assert None not in known
    assert len(set(known)) == len(known)


def test_settings_count_too():
    scalings = [{"t": Scaling("t", (), 0.0, scale)} for scale in (1.0, 2.0)]
    known = {identity(net(), settings) for settings in ((), (1,), *scalings)}
    assert None not in known
    assert len(known) == 4
    # equal sets that are iterated in another order, as in another process
    assert list({0, 8}) != list({8, 0})
    assert identity(net(), {0, 8}) == identity(net(), {8, 0})


def test_what_is_not_known_has_no_identity():
    model = net()
    for unknown in (lambda x: model(x), exec_made()):
        assert identity(unknown) is None
    cells_of_dask = source().chunk(time=5).map(lambda values: values + Unpicklable())
    in_dask = source_state(cells_of_dask, ["t"], OUT)
    assert call_of(model, source(), {}, in_dask) is None
    assert source_state(source(), ["t"], None) is None


class Unpicklable(float):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def exec_made() -> Any:
    made: dict[str, Any] = {}
    exec("def f(x): return x", made)
    return made["f"]
