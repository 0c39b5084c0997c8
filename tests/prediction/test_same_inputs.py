"""What a model is given in prediction is what it was trained on; the identity gives the cube."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import CubeError
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import get_statistics
from tests.cubes import cell_id_cube, cell_ids
from tests.samplestores import sampled


class Recorder(torch.nn.Module):
    """Returns some channels, and keeps every window by the number of its first cell."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("single", torch.zeros(1))  # else it is given doubles
        self.windows: dict[int, torch.Tensor] = {}

    def forward(self, x):
        for window in x:
            first = int(window[0].reshape(-1)[0])
            assert first not in self.windows or window.equal(self.windows[first])
            self.windows[first] = window.clone()
        return x[:, self.channels]


@st.composite
def recipes(draw):
    """A cube, the arguments that cut samples from it, and the cube that a model is given.

    The first feature numbers the cells, and is never scaled, filled or masked.
    """
    dims = draw(st.permutations(["time", "lat", "lon"]))
    shape = {dim: draw(st.integers(3, 6)) for dim in dims}
    cube = cell_id_cube(
        shape,
        draw(st.sampled_from([np.float32, np.float64])),
        gaps=draw(st.sampled_from([0.0, 0.1, 0.5])),
        seed=draw(st.integers(0, 99)),
        dask_chunks=draw(
            st.none() | st.fixed_dictionaries({dim: st.integers(2, 4) for dim in dims})
        ),
        names=("a", "b"),
    )
    cube = cube.assign(
        id=(dims, cell_ids(shape).astype(np.int32)), h=cube.b.isel({dims[0]: 1}, drop=True) / 7
    )
    share = draw(st.sampled_from([None, 0.9, 0.5]))
    if share is not None:
        random = np.random.default_rng(draw(st.integers(0, 99)))
        cube["filter_mask"] = dims, random.random(tuple(shape.values())) < share
    fill = draw(st.sampled_from([None, "sample_mean", "mean", "constant", "noise", "mixed"]))
    drops = ["auto", "if_all_nan", None] + ([] if share is None else ["masked"])
    size = {dim: draw(st.integers(1, min(n, 3))) for dim, n in shape.items()}
    arguments = {
        "features": ["id", "a", "b", "h"],
        "sample_size": size,
        "overlap": {dim: draw(st.sampled_from([0.0, 0.3, 0.7])) for dim in dims},
        "drop_nan": draw(st.sampled_from(drops)),
        "apply_mask": draw(st.booleans()),
        "drop_sample": draw(st.booleans()),
        "scale_fn": draw(st.sampled_from(["standardize", "normalize", "robust", None])),
        "fill_method": {"a": "mean", "b": "sample_mean"} if fill == "mixed" else fill,
        "const": 2.5 if fill == "constant" else None,
        "seed": draw(st.integers(0, 3)),
    }
    levels = draw(st.sampled_from([None, ["lat"], ["time", "lon"]]))
    if levels is not None and arguments["scale_fn"] == "standardize":
        arguments["statistics"] = get_statistics(cube[["a", "b", "h"]], split=None, dims=levels)
    return cube, arguments


def options_of_a_data_set(draw, cube, arguments):
    """Draw what only `PTXrDataset` takes: coordinates, and targets later than the inputs."""
    names = draw(st.sampled_from([[], ["lat"], ["dayofyear", "lon"]]))
    options = {"coord_features": names or None}
    if draw(st.booleans()):
        reach = cube.sizes["time"] - arguments["sample_size"]["time"]
        options["target_offset"] = {"time": draw(st.integers(0, reach))}
        options["to_pred"] = draw(st.sampled_from(["a", ["b", "a"]]))
    return options


@pytest.mark.slow
@settings(max_examples=80, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_the_model_is_given_what_it_was_trained_on(tmp_path_factory, data):
    cube, arguments = data.draw(recipes())
    options = options_of_a_data_set(data.draw, cube, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if "target_offset" in options or data.draw(st.booleans()):
                samples = PTXrDataset(cube, **arguments, **options)
            else:
                features = arguments.pop("features")
                store = sampled(cube, tmp_path_factory.mktemp("store"), **arguments)
                samples = PTXrDataset(store, features=features, **options)
        except CubeError:
            assume(False)
        targets = samples.targets or samples.features
        model = Recorder([samples.features.index(name) for name in targets])
        everywhere = xr.DataArray(np.ones(tuple(cube.sizes.values()), bool), dims=list(cube.sizes))
        predict_cube(
            model, cube, samples, mask=everywhere, keep_gaps=False, progress=False,
            batch_size=data.draw(st.integers(1, 50)),
        )  # fmt: skip
    assert len(samples)
    for item in (samples[i] for i in range(len(samples))):
        x = item[0] if isinstance(item, tuple) else item
        np.testing.assert_array_equal(model.windows[int(x[0].reshape(-1)[0])], x)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(recipes(), st.integers(1, 50))
def test_the_identity_gives_the_cube_back_whatever_the_recipe(case, batch_size):
    cube, arguments = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = PTXrDataset(cube, **arguments)
        except CubeError:
            assume(False)
        result = predict_cube(torch.nn.Identity(), cube, samples, batch_size=batch_size)
    inside = xr.ones_like(cube.id, bool)
    if "filter_mask" in cube and arguments["apply_mask"]:
        inside = cube.filter_mask
    for name in arguments["features"]:
        expected = cube[name].broadcast_like(cube.id).where(inside).transpose(*result[name].dims)
        np.testing.assert_allclose(result[name], expected, rtol=2e-6, atol=2e-4)
