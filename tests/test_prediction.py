"""predict_cube: the identity gives the cube back, and every model what a plain loop gives."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.core.statistics import Statistics
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.store import open_store
from ml4cube.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    StoreError,
    StoreExistsError,
)
from ml4cube.evaluation.metrics import score_cube
from ml4cube.postprocessing import undo_standardizing
from ml4cube.prediction import predict_cube, run
from ml4cube.preprocessing import CubeScaler, accounting, drop_nan_values, get_statistics
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.splits.cube import CubeView
from ml4cube.store.metadata import StoreMetadata
from ml4cube.training.ranks.dist import World, launch
from tests.cubes import cell_id_cube
from tests.distributed_runner import kept_ranks
from tests.samplestores import sampled

IDENTITY = torch.nn.Identity()


@st.composite
def cubes_and_windows(draw):
    dims = draw(st.permutations(["time", "lat", "lon", "lev"]))[: draw(st.integers(1, 4))]
    shape = {dim: draw(st.integers(1, 7)) for dim in dims}
    size = {dim: draw(st.integers(1, n)) for dim, n in shape.items() if draw(st.booleans())}
    overlap = {dim: draw(st.sampled_from([0.0, 0.3, 0.5, 0.8])) for dim in size}
    chunks = draw(st.none() | st.fixed_dictionaries({dim: st.integers(1, 4) for dim in dims}))
    names = ("a", "b")[: draw(st.integers(1, 2))]
    cube = cell_id_cube(
        shape,
        draw(st.sampled_from([np.float32, np.float64])),
        gaps=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 99)),
        dask_chunks=chunks,
        names=names,
    )
    return cube, size, overlap


def statistics(cube: xr.Dataset) -> dict[str, list[float]]:
    return {str(n): [float(v.size) / 2, float(v.size) / 4] for n, v in cube.data_vars.items()}


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(cubes_and_windows(), st.integers(1, 9), st.booleans())
def test_the_identity_returns_the_cube(case, batch_size, scaled):
    cube, size, overlap = case
    given = statistics(cube) if scaled else None
    windows = {"sample_size": size, "overlap": overlap}
    result = predict_cube(IDENTITY, cube, given, **windows, batch_size=batch_size)
    assert list(result.data_vars) == list(cube.data_vars)
    for name, expected in cube.data_vars.items():
        assert result[name].dims == expected.dims
        assert result[name].dtype == expected.dtype
        np.testing.assert_allclose(result[name], expected, rtol=2e-6, atol=2e-4)
    assert list(result.coords) == list(cube.coords)
    for coord in cube.coords:
        assert result[coord].equals(cube[coord])


def taper(size: int, shared: int) -> list[float]:
    return [
        math.sin(math.pi / 2 * min((min(i, size - 1 - i) + 0.5) / shared, 1)) ** 2 if shared else 1
        for i in range(size)
    ]


def oracle(model, values, size, shared):
    """Every window by hand, weighted sums cell by cell."""
    axes = range(values.ndim)
    starts = []
    for axis in axes:
        n, stride = values.shape[axis], size[axis] - shared[axis]
        regular = list(range(0, n - size[axis] + 1, stride))
        starts.append(sorted({*regular, n - size[axis]}))
    total, weight = np.zeros(values.shape), np.zeros(values.shape)
    tapers = [taper(size[axis], shared[axis]) for axis in axes]
    for corner in itertools.product(*starts):
        window = tuple(slice(a, a + n) for a, n in zip(corner, size, strict=True))
        y = model(values[window])
        for cell in np.ndindex(*size):
            place = tuple(a + i for a, i in zip(corner, cell, strict=True))
            w = math.prod(tapers[axis][i] for axis, i in enumerate(cell))
            if math.isfinite(y[cell]):
                total[place] += w * y[cell]
                weight[place] += w
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1), np.nan)


def uneven(window):
    """A model whose result depends on where in the window a cell lies, and on all its cells."""
    return window * (1 + np.arange(window.size).reshape(window.shape)) + np.nanmean(window)


class Uneven(torch.nn.Module):
    def forward(self, x):
        rows = [uneven(row[0].numpy()) for row in x.double()]
        return torch.from_numpy(np.stack(rows))[:, None]


@pytest.mark.slow
@settings(max_examples=60)
@given(cubes_and_windows(), st.integers(1, 9))
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_any_model_is_blended_as_by_hand(case, batch_size):
    cube, size, overlap = case
    cube = cube[["a"]]
    result = predict_cube(
        Uneven(), cube, sample_size=size, overlap=overlap, batch_size=batch_size, keep_gaps=False
    )
    sizes = [size.get(dim, 1) for dim in cube.a.dims]
    shared = []
    for dim, n in zip(cube.a.dims, sizes, strict=True):
        fraction = overlap.get(dim, 0.0)
        cells = math.floor(fraction * n + 0.5)
        shared.append(min(max(cells, 1), n - 1) if fraction and n > 1 else 0)
    expected = oracle(uneven, cube.a.values.astype(float), sizes, shared)
    np.testing.assert_allclose(result.a, expected, rtol=1e-5)


@pytest.mark.parametrize("cells", [1, 50, 10**6])
def test_tiles_of_any_size_give_the_same_cube(cells, monkeypatch):
    monkeypatch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (cells, cells))
    cube = cell_id_cube({"time": 9, "lat": 13, "lon": 11}, gaps=0.1)
    result = predict_cube(Uneven(), cube, sample_size={"lat": 4, "lon": 3}, overlap=0.5)
    expected = oracle(uneven, cube.a.values.astype(float), [1, 4, 3], [0, 2, 2])
    np.testing.assert_allclose(result.a, np.where(cube.a.isnull(), np.nan, expected), rtol=1e-5)


class Noting(torch.nn.Module):
    """Returns the first channels; notes what it was given and in which mode."""

    def __init__(self, targets: int = 1) -> None:
        super().__init__()
        self.inner = torch.nn.Dropout(0.9)
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.targets = targets
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(x)
        return self.inner(x)[:, : self.targets] * self.weight


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_windows_per_call_are_chosen_by_bytes_and_change_nothing(kind, monkeypatch):
    """Stands in for a GPU: the model runs on the CPU, with as many windows as on a GPU."""
    monkeypatch.setattr(run, "device_of", lambda *_: torch.device(kind))
    monkeypatch.setattr(run, "_CPU_BATCH_BYTES", 2 * 16 * 16 * 2 * 4)
    cube = cell_id_cube({"time": 4, "lat": 32, "lon": 32}, "float32", names=("a", "b"))
    given = []
    model = torch.nn.Conv2d(2, 2, 3, padding=1)
    model.register_forward_hook(lambda _, args, __: given.append(len(args[0])))
    call = partial(predict_cube, model, cube, sample_size={"lat": 16, "lon": 16}, progress=False)
    predicted = call()
    assert given == ([2] * 8 if kind == "cpu" else [16])
    xr.testing.assert_allclose(predicted, call(batch_size=1), atol=0.01)


def test_the_model_runs_in_eval_mode_and_gets_its_mode_back_module_by_module():
    model = Noting().train()
    model.inner.eval()
    predict_cube(model, cell_id_cube({"x": 5}))
    assert model.training
    assert not model.inner.training

    def fail(self, x):
        raise ArithmeticError

    model.forward = fail.__get__(model)
    with pytest.raises(ArithmeticError):
        predict_cube(model, cell_id_cube({"x": 5}))
    assert model.training


def test_the_model_sees_features_in_order_scaled_with_one_cell_dims_dropped():
    cube = cell_id_cube({"time": 3, "lat": 4, "lon": 6}, names=("a", "b"))
    cube["height"] = (("lon", "lat"), np.arange(24.0).reshape(6, 4))
    model, names = Noting(), {"features": ["b", "height"], "targets": "a"}
    windows = {"sample_size": {"lat": 4, "lon": 2}, "batch_size": 3}
    predict_cube(model, cube, {"b": [10.0, 2.0]}, **names, **windows)
    x = torch.cat(model.seen)
    assert x.shape == (9, 2, 4, 2)
    assert x.dtype == torch.float32
    first = cube.isel(time=0, lon=slice(0, 2))
    np.testing.assert_allclose(x[0, 0], (first.b - 10) / 2)
    np.testing.assert_allclose(x[0, 1], first.height.T)


def test_points_are_rows_of_features_and_a_target_axis_may_be_missing():
    cube = cell_id_cube({"time": 3, "lat": 4}, names=("a", "b"))
    summed = predict_cube(lambda x: x.sum(1), cube, targets="c", features=["a", "b"])
    np.testing.assert_allclose(summed.c, cube.a + cube.b)
    assert summed.c.dtype == np.float32
    assert summed.c.attrs == {"long_name": "c"}


def test_only_what_is_no_target_mask_or_label_is_a_feature_by_default():
    cube = cell_id_cube({"time": 3, "lat": 4}, names=("a", "b"))
    cube["split"] = ("time", np.array([1, 1, 0], np.uint8))
    cube["when"] = ("time", cube.time.values)
    cube["sea"] = ("lat", np.array([True, True, False, True]))
    model = Noting()
    result = predict_cube(model, cube, targets="b", mask="sea")
    assert model.seen[0].shape[1] == 1
    assert np.isnan(result.b.isel(lat=2)).all()
    np.testing.assert_array_equal(result.b.isel(lat=[0, 1, 3]), cube.a.isel(lat=[0, 1, 3]))
    again = predict_cube(model, cube.drop_vars("sea"), targets="b", mask=cube.sea)
    assert result.identical(again)


def metadata(cube: xr.Dataset, **spec) -> StoreMetadata:
    """What a store made from the cube would say of itself."""
    names = [str(name) for name in cube.data_vars]
    made = BoundRecipe.parse(dict(cube.sizes), names, **spec)
    values = {name: cube[name].values for name in names if cube[name].dtype.kind == "f"}
    attrs = {name: {"attrs": dict(cube[name].attrs)} for name in names}
    found = Statistics.of(values, part="train")
    about = {"variables": attrs}
    return StoreMetadata("train", made, found, {}, {}, about, tuple(names), fill=found)


@pytest.mark.parametrize("fill", ["sample_mean", "mean", "constant", "noise"])
def test_a_store_brings_windows_scaling_and_filling_and_gaps_stay_gaps(fill):
    cube = cell_id_cube({"time": 4, "lat": 6, "lon": 8}, gaps=0.2)
    const = 3.0 if fill == "constant" else None
    windows = {"sample_size": {"lat": 4, "lon": 4}, "overlap": 0.5}
    about = metadata(cube, **windows, fill_method=fill, const=const)
    result = predict_cube(IDENTITY, cube.transpose("lon", "time", "lat"), about)
    assert result.a.dims == ("lon", "time", "lat")
    np.testing.assert_allclose(result.a.transpose(*cube.a.dims), cube.a, rtol=1e-5, atol=1e-4)
    filled = predict_cube(IDENTITY, cube, about, keep_gaps=False)
    assert np.isfinite(filled.a).all()
    if fill == "mean":
        gaps = filled.a.values[cube.a.isnull().values]
        np.testing.assert_allclose(gaps, float(cube.a.mean(dtype=float)), rtol=1e-6)


@pytest.mark.parametrize("fill", ["sample_mean", "mean", "noise"])
def test_the_model_sees_gaps_filled_as_in_training(fill, tmp_path):
    """By the raw cells, each once, and not by the samples that overlap and are filled already."""
    values = np.arange(20.0)
    cube = xr.Dataset({"a": ("x", values**2), "b": ("x", -values)})
    cube.a[4:8] = cube.a[13] = np.nan  # one window is nothing but gaps
    cut = {"sample_size": {"x": 4}, "overlap": 0.5, "drop_nan": "if_all_nan", "seed": 7}
    for samples in (
        PTXrDataset(cube, features=["a", "b"], **cut, fill_method=fill),
        PTXrDataset(sampled(cube, tmp_path, **cut, fill_method=fill), features=["a", "b"]),
    ):
        model = Noting(targets=2)
        predict_cube(model, cube, samples)
        seen = torch.cat(model.seen)
        trained = torch.stack([samples[i] for i in range(len(samples))])
        in_order = [x[x[:, 1, 0].argsort()] for x in (seen, trained)]
        np.testing.assert_allclose(*in_order, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fill", ["sample_mean", "mean", "constant", "noise"])
def test_gaps_that_training_filled_before_a_callback_are_not_filled_after_it(fill):
    def celsius(samples):
        return {"a": samples["a"] - 273.15}

    cube = xr.Dataset({"a": ("x", 280 + np.arange(20.0))})
    cube.a[3] = np.nan
    const = 273.15 if fill == "constant" else None
    cut = {"sample_size": {"x": 4}, "drop_nan": None, "fill_method": fill, "const": const}
    samples = PTXrDataset(cube, features="a", **cut, callback=celsius)
    filled = cube.fillna(273.15) - 273.15
    xr.testing.assert_allclose(predict_cube(IDENTITY, filled, samples), filled)
    gaps = cube - 273.15
    if fill == "sample_mean":  # of the other cells, in their units
        gappy = predict_cube(IDENTITY, gaps, samples, keep_gaps=False)
        assert gappy.a[3] == pytest.approx(float(gaps.a[:3].mean()))
        gaps.a[:4] = np.nan
    with pytest.raises(InvalidValueError, match=f"training filled .'{fill}'. before the .*celsius"):
        predict_cube(IDENTITY, gaps, samples, keep_gaps=False)


def test_noise_belongs_to_a_cell_whatever_the_tile_window_and_dim_order(monkeypatch):
    cube = cell_id_cube({"time": 4, "lat": 6, "lon": 8}, gaps=0.3)
    about = metadata(cube, sample_size={"lat": 4}, overlap=0.5, fill_method="noise")
    first = predict_cube(IDENTITY, cube, about, keep_gaps=False)
    monkeypatch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (1, 1))
    turned = cube.transpose("lon", "lat", "time")
    second = predict_cube(IDENTITY, turned, about, sample_size={"lat": 3}, keep_gaps=False)
    np.testing.assert_allclose(second.a.transpose(*cube.a.dims), first.a, rtol=1e-5)
    # the overlap of the store belongs to its windows
    made = [json.loads(cube.attrs["ml4cube_prediction"]) for cube in (first, second)]
    assert [description["overlap"]["lat"] for description in made] == [2, 0]


def test_the_model_sees_dims_in_the_order_of_the_store_whatever_the_cube():
    cube = cell_id_cube({"time": 2, "lat": 4, "lon": 6}, names=("a", "b"))
    about = metadata(cube, sample_size={"lat": 2, "lon": 3}, to_pred="b", features=["a"])
    model = Noting()
    predict_cube(model, cube.transpose("lon", "time", "lat"), about, batch_size=100)
    assert model.seen[0].shape[2:] == (2, 3)
    window = torch.cat(model.seen)[0, 0] * about.statistics["a"].std + about.statistics["a"].mean
    np.testing.assert_allclose(window, cube.a.isel(time=0, lat=slice(2), lon=slice(3)), atol=1e-4)


@pytest.mark.parametrize("given", [{}, {"sample_size": {"lat": 3, "lon": 3}}])
def test_the_model_sees_windows_as_the_store_keeps_them_if_their_size_is_given_too(given):
    cube = cell_id_cube({"time": 2, "lat": 3, "lon": 3}, names=("a",))
    kept = {"sample_size": {"lat": 3, "lon": 3}, "array_dims": ["samples", "lon", "time", "lat"]}
    about = metadata(cube, **kept, scale_fn=None)
    model = Noting()
    predict_cube(model, cube, about, **given)
    seen = torch.cat(model.seen)[0, 0]
    np.testing.assert_array_equal(seen[:, 0], cube.a.isel(time=0).transpose("lon", "lat"))


def test_a_data_set_brings_the_features_that_the_model_was_trained_on():
    """In the order they were given in, which a store does not know."""
    cube = cell_id_cube({"time": 4, "lat": 6}, names=("a", "b", "c"))
    cube = cube.assign_coords(lat=np.arange(6.0))
    cut = {"sample_size": {"lat": 2}, "block_size": {"time": 2}}
    samples = PTXrDataset(cube, "c", ["b", "a"], **cut)
    b, c = samples.statistics["b"], samples.statistics["c"]
    result = predict_cube(lambda x: x[:, :1] if x.shape[1] == 2 else None, cube, samples)
    np.testing.assert_allclose(result.c, (cube.b - b.mean) / b.std * c.std + c.mean, rtol=1e-5)
    copied = predict_cube(IDENTITY, cube, PTXrDataset(cube, features=["b", "a"], **cut))
    assert list(copied.data_vars) == ["b", "a"]
    with pytest.raises(InvalidValueError, match="made from arrays without metadata"):
        predict_cube(IDENTITY, cube, PTXrDataset(cube.rename(time="samples"), "c"))


def test_an_array_without_a_name_has_one_name_down_the_road():
    array = cell_id_cube({"time": 4, "lat": 3})["a"].rename(None)
    found = get_statistics(array)
    result = predict_cube(IDENTITY, array, found, sample_size={"lat": 2})
    assert list(found) == list(result.data_vars) == list(CubeView.of(array).ds) == ["data"]
    np.testing.assert_allclose(result["data"], array, rtol=1e-5, atol=1e-5)
    for truth in (array, result):
        assert score_cube(result, truth)["variable"].values.tolist() == ["data"]
    assert score_cube(array, array)["variable"].values.tolist() == ["data"]


@pytest.mark.parametrize("side", ["features", "targets"])
def test_a_store_that_does_not_know_a_variable_does_not_know_its_scaling(side):
    cube = cell_id_cube({"time": 4, "lat": 6}, names=("a", "b"))
    samples = PTXrDataset(cube, features=["a", "b"], sample_size={"lat": 2})
    with pytest.raises(InvalidValueError, match=r"unknown variables \['new'\].*'a', 'b'"):
        predict_cube(IDENTITY, cube.assign(new=cube.a), samples, **{side: ["new", "b"]})


@pytest.mark.parametrize("given", [None, "land", "array"])
@pytest.mark.parametrize("drop_sample", [True, False])
def test_the_mask_of_the_store_makes_gaps_where_it_did_in_training(drop_sample, given):
    cube = cell_id_cube({"time": 2, "lat": 4})
    options = {"filter_var": "land", "fill_method": "mean", "drop_sample": drop_sample}
    about = metadata(cube, sample_size={"lat": 4}, **options)
    land = xr.DataArray([True, False, True, True], dims="lat")
    model = Noting()
    mask = land if given == "array" else given
    result = predict_cube(model, cube.assign(land=land), about, mask=mask)
    mean, std = about.statistics["a"].mean, about.statistics["a"].std
    seen = (cube.a[:, 1] - mean) / std if drop_sample else [0, 0]  # the train mean
    np.testing.assert_allclose(torch.cat(model.seen)[:, 0, 1], seen, atol=1e-6)
    assert result.a.isnull().sum("time").values.tolist() == [0, 2, 0, 0]


def test_attributes_of_a_target_that_is_not_in_the_cube_come_from_the_store():
    cube = cell_id_cube({"time": 2, "lat": 4}, names=("a", "b"))
    cube.b.attrs = {"units": "K", "standard_name": "air_temperature", "valid_max": 3.0}
    about = metadata(cube, to_pred="b")
    result = predict_cube(lambda x: x, cube[["a"]], about)
    assert result.b.attrs == {"units": "K", "standard_name": "air_temperature"}
    scale = about.statistics["b"].std / about.statistics["a"].std
    expected = (cube.a - about.statistics["a"].mean) * scale + about.statistics["b"].mean
    np.testing.assert_allclose(result.b, expected, rtol=1e-5)


def test_units_are_those_of_the_values(tmp_path):
    """Of a scaled cube, of a store, and of what is predicted from either."""
    cube = cell_id_cube({"time": 8, "lat": 4})
    cube.a.attrs = {"units": "K", "standard_name": "air_temperature"}
    cube["split"] = ("time", [1] * 6 + [0] * 2)
    scaler = CubeScaler().fit(cube)
    scaled = scaler.transform(cube)
    predicted = predict_cube(IDENTITY, scaled, features="a", out=tmp_path / "predicted.zarr")
    assert predicted.a.attrs["units"] == "1"
    back = scaler.inverse_transform(predicted)
    assert back.a.attrs.items() >= cube.a.attrs.items()
    np.testing.assert_allclose(back.a, cube.a, atol=1e-5)

    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in ("train", "test")}
    train, _ = MultiProcSampler(cube, nproc=1, **paths).get_datasets()
    assert train.a.attrs["units"] == "1"
    undone = undo_standardizing(train.a, StoreMetadata.of(train).statistics)
    assert undone.attrs["units"] == "K"
    data = PTXrDataset(train, features="a")
    assert data.to_dataset(data.take([0]), [0], unscale=True).a.attrs["units"] == "K"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = predict_cube(IDENTITY, cube, train)
        predict_cube(IDENTITY, cube.drop_attrs(), train)
    assert result.a.attrs == cube.a.attrs
    # the model would see numbers that are scaled twice, or 273 too small
    celsius = (cube - 273.15).assign(a=lambda x: x.a.assign_attrs(units="degC"))
    for wrong, units in ((scaled, "1"), (celsius, "degC")):
        with pytest.warns(
            UserWarning, match=f"'a' has units '{units}' in this cube and had 'K' in training"
        ):
            predict_cube(IDENTITY, wrong, train)


@pytest.mark.parametrize(("dim", "other"), [("lat", "time"), ("time", "lat")])
@pytest.mark.parametrize("form", ["path", "Dataset", "PTXrDataset"])
def test_windows_that_the_model_would_see_mirrored_are_named(tmp_path, dim, other, form):
    cube = cell_id_cube({"time": 8, "lat": 4}, calendar="noleap").assign_coords(
        lat=[60.0, 50.0, 40.0, 30.0]
    )
    if form == "PTXrDataset":
        source = PTXrDataset(cube, features="a", sample_size={dim: 2})
    else:
        path = sampled(cube, tmp_path, sample_size={dim: 2})
        source = path if form == "path" else open_store(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict_cube(IDENTITY, cube, source)
        # Along the other dim, windows have one cell.
        predict_cube(IDENTITY, cube.isel({other: slice(None, None, -1)}), source)
        predict_cube(IDENTITY, cube.drop_vars(dim), source)
    with pytest.warns(UserWarning, match=f"{dim!r} .* in this cube .* mirrored"):
        predict_cube(IDENTITY, cube.isel({dim: slice(None, None, -1)}), source)


def test_a_constant_variable_and_packed_or_unfit_ones():
    cube = cell_id_cube({"time": 3}) * 0 + 7
    assert (predict_cube(IDENTITY, cube, {"a": [7.0, 0.0]}).a == 7).all()
    cube.a.attrs["scale_factor"] = 0.1
    copied = predict_cube(IDENTITY, cube)  # floats are values, whatever they once were packed by
    assert (copied.a == 7).all()
    for mark in ("scale_factor", "_FillValue"):
        cube.a.attrs = {mark: 1}
        with pytest.raises(InvalidValueError, match=f"packed int16 values.*{mark}"):
            predict_cube(IDENTITY, cube.astype("int16"))
    dates = xr.Dataset({"when": ("time", np.array(["2000-01-01"], "M8[ns]"))})
    with pytest.raises(InvalidTypeError, match="datetime64"):
        predict_cube(IDENTITY, dates, features="when")


# --- on disk ---------------------------------------------------------------------------------


def cf_cube(calendar: str | None = None) -> xr.Dataset:
    cube = cell_id_cube({"time": 5, "lat": 6, "lon": 8}, gaps=0.1, calendar=calendar, names=("t",))
    cube.t.attrs.update(units="K", standard_name="air_temperature", grid_mapping="crs")
    cube["crs"] = ((), 0, {"grid_mapping_name": "latitude_longitude"})
    bounds = np.stack([cube.time.values, cube.time.values], axis=1)
    cube["time_bnds"] = (("time", "bnds"), bounds)
    cube.time.attrs["bounds"] = "time_bnds"
    cube.lat.attrs["bounds"] = "lat_bnds"  # points to nothing
    cube = cube.assign_coords(region=("lat", list("aabbcc")), height=2.0)
    cube.attrs["title"] = "known cells"
    return cube


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
@pytest.mark.parametrize("calendar", [None, "360_day"])
def test_the_written_cube_is_the_returned_one_with_cf_metadata(tmp_path, suffix, calendar):
    cube = cf_cube(calendar)
    path = tmp_path / f"cube{suffix}"
    result = predict_cube(IDENTITY, cube, sample_size={"lat": 3}, overlap=0.5, out=path)
    for written in (result, xr.open_dataset(path)):
        np.testing.assert_allclose(written.t, cube.t, rtol=1e-6)
        assert written.t.dtype == np.float32
        assert written.t.attrs["units"] == "K"
        assert written.attrs["title"] == "known cells"
        assert written.attrs["Conventions"].startswith("CF-1.")
        assert json.loads(written.attrs["ml4cube_prediction"])["model"] == "Identity"
        assert np.isnan(written.t.encoding["_FillValue"])
        assert "bounds" not in written.lat.attrs
        for name in ("time", "lat", "lon", "region", "height", "time_bnds", "crs"):
            assert (written[name] == cube[name]).all(), name
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_netcdf_is_written_whatever_the_encoding_of_coordinates_says(tmp_path):
    cube = cell_id_cube({"time": 3, "lat": 4}, names=("t",)).assign_coords(height=2.0)
    cube.lat.attrs.update(missing_value=-9.0, _FillValue=-8.0)  # xarray refuses to write both
    cube.t.attrs["coordinates"] = "gone"
    predict_cube(IDENTITY, cube, out=tmp_path / "cube.nc")
    with xr.open_dataset(tmp_path / "cube.nc") as written:
        assert (written.lat == cube.lat).all()
        assert written.t.encoding["coordinates"] == "height"


@pytest.mark.parametrize("grid_mapping", ["crs", "crs: lat lon"])
def test_bounds_and_grid_mapping_are_kept_however_the_cube_was_opened(tmp_path, grid_mapping):
    cube = cf_cube()
    cube.t.attrs["grid_mapping"] = grid_mapping
    del cube.lat.attrs["bounds"]
    cube.to_netcdf(tmp_path / "source.nc")
    with xr.open_dataset(tmp_path / "source.nc", decode_coords="all") as opened:
        assert {"time_bnds", "crs"} <= set(opened.coords)
        results = [predict_cube(IDENTITY, cube), predict_cube(IDENTITY, opened)]
        predict_cube(IDENTITY, opened, out=tmp_path / "cube.nc")
        assert "bounds" not in opened.time.attrs
    with xr.open_dataset(tmp_path / "cube.nc") as written:
        results.append(written.load())
    for result in results:
        assert result.time.attrs["bounds"] == "time_bnds"
        assert result.t.attrs["grid_mapping"] == grid_mapping
        assert (result.time_bnds.values == cube.time_bnds.values).all()
        assert "crs" in result.variables


def test_what_was_dropped_from_the_cube_is_not_counted_for_the_prediction():
    cube = drop_nan_values(cell_id_cube({"time": 2, "lat": 3}, gaps=0.3))
    assert accounting(cube)["gap"] > 0
    assert set(predict_cube(IDENTITY, cube).coords) == {"time", "lat"}


def test_coordinates_with_plain_names_get_what_cf_asks_for():
    cube = cell_id_cube({"time": 2, "lat": 3, "lon": 4})
    for name in cube.coords:
        cube[name].attrs.clear()
    result = predict_cube(IDENTITY, cube)
    latitude = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
    assert result.lat.attrs == latitude
    assert result.time.attrs == {"standard_name": "time", "axis": "T"}
    assert cube.lat.attrs == {}
    lat = xr.DataArray(np.zeros((3, 4)), dims=("y", "x"))
    curved = cube.drop_vars(["lat", "lon"]).rename(lat="y", lon="x").assign_coords(lat=lat)
    assert "axis" not in predict_cube(IDENTITY, curved).lat.attrs


def test_a_cube_is_kept_if_its_successor_cannot_take_its_place(tmp_path, monkeypatch):
    cube, path = cell_id_cube({"time": 2, "lat": 3}), tmp_path / "cube.zarr"
    predict_cube(IDENTITY, cube, out=path)
    rename = Path.rename

    def failing(source, target):
        if source.name.startswith("ml4cube-store-") and target == path:
            raise PermissionError("no")
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(StoreError, match=r"cube\.zarr cannot be written: no; .* run again"):
            predict_cube(IDENTITY, cube + 1, out=path, overwrite=True)
    np.testing.assert_array_equal(xr.open_zarr(path).a, cube.a)
    predict_cube(IDENTITY, cube + 1, out=path, overwrite=True)
    np.testing.assert_array_equal(xr.open_zarr(path).a, cube.a + 1)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_was_read_from_a_zarr_store_can_be_written_again(tmp_path):
    cf_cube().chunk({"time": 2, "lat": 3}).to_zarr(tmp_path / "source.zarr", zarr_format=2)
    result = predict_cube(IDENTITY, tmp_path / "source.zarr", out=tmp_path / "cube.zarr")
    np.testing.assert_allclose(result.t, cf_cube().t, rtol=1e-6)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
@pytest.mark.parametrize(
    ("times", "written"),
    [
        (
            pd.date_range("2000-01-01", periods=3, tz="Europe/Berlin"),
            np.arange("1999-12-31T23", "2000-01-03T23", 24, dtype="M8[h]").astype("M8[ns]"),
        ),
        (pd.period_range("2000-01", periods=3, freq="M"), ["2000-01", "2000-02", "2000-03"]),
        (pd.CategoricalIndex(["b", "a", "c"]), ["b", "a", "c"]),
        (np.array([b"b", b"a", b"c"]), ["b", "a", "c"]),
        (np.arange(3, dtype=np.longdouble), [0.0, 1.0, 2.0]),
    ],
    ids=["zone", "period", "category", "bytes", "longdouble"],
)
def test_coordinates_that_no_file_holds_are_written_as_a_sample_store_has_them(
    tmp_path, suffix, times, written
):
    cube = cell_id_cube({"time": 3, "lat": 4}, names=("t",)).assign_coords(time=times)
    result = predict_cube(IDENTITY, cube, out=tmp_path / f"cube{suffix}")
    assert (result.time.values == written).all()
    assert (result.t.values == cube.t.values).all()
    assert predict_cube(IDENTITY, cube).time.equals(cube.time)  # memory holds them


@pytest.mark.parametrize(
    ("value", "in_zarr", "in_netcdf"),
    [
        (pd.Timestamp("2000-01-02"), "2000-01-02 00:00:00", "2000-01-02 00:00:00"),
        (np.array(["2000-01-02"], "M8[D]"), ["2000-01-02"], "2000-01-02"),
        ({"b", "a"}, ["a", "b"], ["a", "b"]),
        ({"a": b"x"}, {"a": "x"}, '{"a": "x"}'),
        (True, True, "true"),
        (None, None, "null"),
        ([1.5, 2.5], [1.5, 2.5], [1.5, 2.5]),
    ],
)
def test_attributes_of_any_kind_are_written(tmp_path, value, in_zarr, in_netcdf):
    cube = cell_id_cube({"time": 3, "lat": 4}, names=("t",))
    for attrs in (cube.attrs, cube.t.attrs, cube.lat.attrs):
        attrs["made"] = value
    for suffix, expected in ((".zarr", in_zarr), (".nc", in_netcdf)):
        result = predict_cube(IDENTITY, cube, out=tmp_path / f"cube{suffix}")
        for attrs in (result.attrs, result.t.attrs, result.lat.attrs):
            found = attrs["made"]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == expected


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_a_taken_path_is_refused_and_only_a_cube_of_ours_is_replaced(tmp_path, suffix):
    cube, path = cf_cube(), tmp_path / f"cube{suffix}"
    predict_cube(IDENTITY, cube, out=path)
    with pytest.raises(StoreExistsError, match=r"made by another call .*overwrite=True"):
        predict_cube(IDENTITY, cube + 1, out=path)
    predict_cube(lambda x: x + 1, cube, out=path, overwrite=True)
    with xr.open_dataset(path) as again:
        np.testing.assert_allclose(again.t, cube.t + 1, rtol=1e-6)

    foreign = tmp_path / f"foreign{suffix}"
    if suffix == ".zarr":
        cube.to_zarr(foreign)
    else:
        foreign.write_text("my notes")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(StoreExistsError, match="does not replace it"):
        predict_cube(IDENTITY, cube, out=foreign, overwrite=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_path_that_appears_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "cube.nc"

    def model(x):
        path.write_text("my notes")
        return x

    with pytest.raises(StoreExistsError, match="exists"):
        predict_cube(model, cf_cube(), out=path)
    assert path.read_text() == "my notes"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_nothing_behind(tmp_path):
    batches = []

    def failing_later(x):
        batches.append(x)
        return x if len(batches) <= 3 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        predict_cube(failing_later, cf_cube(), out=tmp_path / "cube.zarr", batch_size=20)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_named_before_any_work(tmp_path):
    cube = cell_id_cube({"time": 4, "lat": 4}).assign_coords(lat=[0.0, 1.0, 2.0, 3.0])
    turned = cube.a.isel(lat=slice(None, None, -1)) > 3
    bad = [
        ({"features": "sst"}, InvalidValueError, r"features: unknown variable 'sst'.* \['a'\]"),
        ({"mask": "sea"}, InvalidValueError, "mask: unknown variable 'sea'"),
        ({"sample_size": {"lat": 5}}, InvalidValueError, "sample_size.*lat.* 5"),
        ({"sample_size": {"latitude": 2}}, InvalidValueError, "'latitude'"),
        ({"overlap": {"lat": 1.0}}, InvalidValueError, "overlap.*lat.* 1.0"),
        ({"batch_size": 0}, InvalidValueError, "batch_size must be at least 1"),
        ({"batch_size": 2.0}, InvalidTypeError, "batch_size must be an integer, got 2.0"),
        ({"overwrite": "no"}, InvalidTypeError, "overwrite must be True or False, got 'no'"),
        ({"keep_gaps": 1}, InvalidTypeError, "keep_gaps must be True or False, got 1"),
        ({"out": 3}, InvalidTypeError, "out must be a path, a URL, a zarr store .*, got 3"),
        ({"store_or_stats": {"a": [1.0]}}, InvalidTypeError, r"store_or_stats\['a'\].*1.0"),
        ({"store_or_stats": {"a": [1.0, np.nan]}}, InvalidValueError, r"_stats\['a'\].*nan"),
        ({"store_or_stats": {"b": [1.0, 1.0]}}, InvalidValueError, "'b'"),
        ({"out": "memory://x/cube.nc"}, InvalidValueError, "netCDF file .* local path only"),
        ({"out": tmp_path / "cube.tif"}, InvalidValueError, r"end in '\.zarr'.*cube\.tif"),
        ({"out": tmp_path / "no" / "cube.zarr"}, InvalidValueError, "does not exist"),
        ({"model": 3}, InvalidTypeError, "model must be .*, got 3"),
        ({"model": lambda x: x[:, :, None]}, InvalidValueError, r"must return shape \(16, 1\)"),
        ({"model": lambda x: (x, x)}, InvalidValueError, "got 2 arrays; name several outputs"),
        ({"model": lambda x: "no"}, InvalidTypeError, "must return tensors or arrays.* got str"),
        ({"mask": xr.DataArray([True], dims="lev")}, InvalidValueError, "mask has the dim 'lev'"),
        ({"ds": cube.isel(lat=slice(0))}, InvalidValueError, r"no cell along \['lat'\]"),
        ({"mask": turned}, InvalidValueError, "mask has other 'lat' coordinates"),
    ]
    for arguments, error, message in bad:
        with pytest.raises(error, match=message):
            predict_cube(**{"model": IDENTITY, "ds": cube, **arguments})
    points = "windows of a single point (sample_size= makes larger ones)"
    for model, size, shape, windows in (
        (torch.nn.Linear(7, 1), None, "(16, 1)", points),
        (torch.nn.Conv1d(3, 1, 1), {"lat": 2}, "(8, 1, 2)", "windows {'lat': 2}"),
    ):
        with pytest.raises(RuntimeError) as caught:
            predict_cube(model, cube, sample_size=size)
        told = f"the model was given X of shape {shape}: features ['a'], {windows}"
        assert caught.value.__notes__ == [told]
    assert predict_cube(IDENTITY, cube, batch_size=np.int64(3)).a.shape == (4, 4)
    assert list(tmp_path.iterdir()) == []


def test_float16_is_refused_for_netcdf_before_the_work(tmp_path):
    cube = cell_id_cube({"time": 4, "lat": 4}).astype("float16")
    with pytest.raises(InvalidValueError, match=r"x\.nc.* no float16, the dtype of target 'a'"):
        predict_cube(lambda x: 1 / 0, cube, out=tmp_path / "x.nc")
    assert list(tmp_path.iterdir()) == []
    assert predict_cube(IDENTITY, cube, out=tmp_path / "x.zarr").a.dtype == np.float16


def test_a_cube_that_does_not_fit_the_store_is_refused():
    cube = cell_id_cube({"time": 4, "lat": 6})
    about = metadata(cube, sample_size={"lat": 4})
    with pytest.raises(InvalidValueError, match=r"windows of the store have \{'lat': 4\} cells"):
        predict_cube(IDENTITY, cube.isel(lat=slice(3)), about)
    with pytest.raises(InvalidValueError, match="dims of the cube must be those of the store"):
        predict_cube(IDENTITY, cube.rename(lat="y"), about)


# --- many ranks ------------------------------------------------------------------------------


def predict_on_rank(path: str | None, fail_on: int | None = None) -> dict:
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.BatchNorm1d(1).requires_grad_(True)
    model = torch.nn.parallel.DistributedDataParallel(model)
    rank = torch.distributed.get_rank()
    if rank == fail_on:
        model.module.forward = lambda x: 1 / 0
    cube = cell_id_cube({"time": 7, "lat": 30, "lon": 401}, gaps=0.05)
    result = predict_cube(model, cube, sample_size={"lon": 5}, overlap=0.5, out=path)
    return result.a.load().to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [None, ".zarr"])
def test_many_ranks_write_the_cube_that_one_writes(tmp_path, suffix):
    path = suffix and str(tmp_path / f"cube{suffix}")
    with kept_ranks():
        result = xr.DataArray.from_dict(launch(predict_on_rank, 3, path))
    cube = cell_id_cube({"time": 7, "lat": 30, "lon": 401}, gaps=0.05)
    np.testing.assert_allclose(result, cube.a / np.sqrt(1 + 1e-5), rtol=1e-5)


@pytest.mark.slow
def test_a_rank_that_fails_stops_all_and_leaves_nothing(tmp_path):
    with kept_ranks(), pytest.raises(RunError, match=r"rank 1 .*division by zero"):
        launch(predict_on_rank, 2, str(tmp_path / "cube.zarr"), 1)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_cluster_beside_several_ranks_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(World, "current", lambda device: World(0, 2, torch.device(device)))
    ds = cell_id_cube({"time": 4, "lat": 4})
    with pytest.raises(InvalidTypeError, match="client must be None in a group of 2 ranks"):
        predict_cube(IDENTITY, ds, out=tmp_path / "p.zarr", client="tcp://127.0.0.1:9")
    assert not list(tmp_path.iterdir())
