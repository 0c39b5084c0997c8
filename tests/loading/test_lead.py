"""Targets at a lead time: the right cells, in the right part, every pair counted."""

from __future__ import annotations

import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import CubeError, InvalidValueError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from tests.cubes import cell_id_cube
from tests.samplestores import sampled

SHAPE = {"time": 13, "lat": 4, "lon": 5}
LABELS = {"test": 0, "train": 1, "val": 2}


def labelled(label: Any, gaps: float = 0.0, dim_order: Any = None, chunks: Any = None) -> Any:
    """A cube whose label is given by time step."""
    cube = cell_id_cube(
        SHAPE, "float32", gaps=gaps, names=("a", "b"), dim_order=dim_order, dask_chunks=chunks
    )
    return cube.assign(split=("time", np.asarray(label, np.uint8)))


def maps(cube: xr.Dataset, **options: Any) -> PTXrDataset:
    """Samples that are whole maps of one step, not scaled."""
    size = {"lat": 4, "lon": 5}
    return PTXrDataset(cube, to_pred="b", sample_size=size, scale_fn=None, **options)


def pairs(
    cube: xr.Dataset, part: str, size: Any, stride: Any, offset: Any, target_size: Any, mask: Any
) -> list[tuple[tuple[int, ...], Any, Any]]:
    """Origin, X of a and b, and y of b, of every pair: one loop over all first cells."""
    dims = ("time", "lat", "lon")
    cube = cube.transpose(*dims, missing_dims="ignore")
    found = []
    for start in itertools.product(*(range(0, SHAPE[d], stride[d]) for d in dims)):
        near = {d: slice(s, s + size[d]) for d, s in zip(dims, start, strict=True)}
        far = {
            d: slice(s + offset.get(d, 0), s + offset.get(d, 0) + target_size[d])
            for d, s in zip(dims, start, strict=True)
        }
        if any(w[d].stop > SHAPE[d] for w in (near, far) for d in dims):
            continue
        inputs, answers = cube.isel(near), cube.isel(far)
        if not all((w.split == LABELS[part]).all() for w in (inputs, answers)):
            continue
        if inputs[["a", "b"]].to_array().isnull().any() or answers["b"].isnull().any():
            continue
        if mask is not None and not (inputs["m"].all() and answers["m"].all()):
            continue
        found.append((start, inputs[["a", "b"]].to_array(), answers["b"]))
    return found


@pytest.mark.slow
@settings(max_examples=40)
@given(
    label=st.lists(st.sampled_from([1, 1, 1, 0, 255]), min_size=13, max_size=13),
    steps=st.integers(1, 4),
    overlap=st.booleans(),
    offset=st.fixed_dictionaries({"time": st.integers(0, 6)}, optional={"lat": st.just(1)}),
    target_steps=st.none() | st.integers(1, 3),
    gaps=st.sampled_from([0.0, 0.03]),
    dim_order=st.sampled_from([None, ("lon", "time", "lat")]),
    chunks=st.sampled_from([None, {"time": 4}]),
    masked=st.booleans(),
)
def test_pairs_are_those_of_a_plain_loop(
    label: list[int],
    steps: int,
    overlap: bool,
    offset: dict[str, int],
    target_steps: int | None,
    gaps: float,
    dim_order: Any,
    chunks: Any,
    masked: bool,
) -> None:
    label[0:6] = [1] * 6  # some part is there in any case
    cube = labelled(label, gaps, dim_order, chunks)
    if masked:
        cube = cube.assign(m=("time", np.arange(13) != 3))
    size = {"time": steps, "lat": 2, "lon": 5}
    shared = steps // 2 if overlap else 0
    stride = {"time": steps - shared, "lat": 2, "lon": 5}
    target_size = size | ({"time": target_steps} if target_steps else {})
    mask: Any = "m" if masked else None
    wanted = pairs(cube, "train", size, stride, offset, target_size, mask)
    if not wanted:
        return
    data = PTXrDataset(
        cube,
        to_pred="b",
        features=["a", "b"],
        sample_size=size,
        overlap={"time": max(shared / steps, 0.01)} if overlap else None,
        target_offset=offset,
        target_size={"time": target_steps} if target_steps else None,
        scale_fn=None,
        filter_var=mask,
        part="train",
        dtype="float64",
    )
    assert len(data) == len(wanted)
    X, y = data.take(range(len(data)))
    where = data.coords(range(len(data)))
    found = {
        tuple(int(where[f"{d}_index"][k]) for d in ("time", "lat", "lon")): k
        for k in range(len(data))
    }
    kept = [d for d in (dim_order or ("time", "lat", "lon")) if size[d] > 1]
    kept_y = [d for d in (dim_order or ("time", "lat", "lon")) if target_size[d] > 1]
    for start, x_true, y_true in wanted:
        k = found[start]
        x_true = x_true.transpose("variable", *kept, ...).values.reshape(X[k].shape)
        y_true = y_true.transpose(*kept_y, ...).values.reshape(y[k].shape)
        np.testing.assert_array_equal(X[k].numpy(), x_true)
        np.testing.assert_array_equal(y[k].numpy(), y_true)
    counts = dict(data.metadata.accounting)
    total = counts.pop("total")
    assert total == sum(counts.values()) == int(np.prod([-(-SHAPE[d] // stride[d]) for d in SHAPE]))
    assert counts["train"] == len(wanted)


def test_a_target_never_comes_from_another_part() -> None:
    label = [1] * 6 + [0] * 7
    for part, steps in (("train", range(6)), ("test", range(6, 13))):
        data = maps(labelled(label), target_offset={"time": 2}, part=part)
        cells = data.to_dataset(data.take(range(len(data))), range(len(data)))
        days = (cells["time_target"] - np.datetime64("2000-01-01")).dt.days
        assert set(days.values) <= set(steps)
        assert len(data) == len(steps) - 2
        assert data.metadata.accounting["edge"] == 2
        assert data.metadata.accounting["straddle"] == 2


def test_inputs_and_targets_are_scaled_alike_and_back() -> None:
    cube = labelled([1] * 9 + [0] * 4)
    data = PTXrDataset(cube, to_pred="b", features="b", target_offset={"time": 1}, part="train")
    assert data.targets == data.features == ("b",)
    assert set(data.statistics) == {"a", "b"}
    batch = data.take(range(len(data)))
    shown = data.to_dataset(batch, range(len(data)), unscale=True)
    place = {d: xr.DataArray(shown[f"{d}_index"].values, dims="samples") for d in SHAPE}
    np.testing.assert_allclose(shown["b"], cube["b"].isel(place), rtol=1e-6)
    ahead = place | {"time": place["time"] + 1}
    np.testing.assert_allclose(shown["b_target"], cube["b"].isel(ahead), rtol=1e-6)


def test_gaps_of_inputs_are_filled_and_those_of_targets_are_not() -> None:
    """Of the same variable, too, even by name: y would be scored where nothing was measured."""
    cube = labelled([1] * 13, gaps=0.1)
    gappy = np.isnan(cube.b.transpose("time", "lat", "lon").values)
    for method in ("mean", "noise", "sample_mean", {"b": "mean"}):
        filling = {"drop_nan": None, "fill_method": method}
        data = maps(cube, features="b", target_offset={"time": 1}, **filling)
        X, y = data.take(range(len(data)))
        assert np.isfinite(X.numpy()).all()
        np.testing.assert_array_equal(np.isnan(y[:, 0].numpy()), gappy[1:])
        np.testing.assert_array_equal(
            y[:-1].numpy()[~gappy[1:-1, None]], X[1:].numpy()[~gappy[1:-1, None]]
        )


def test_several_processes_count_the_same_pairs() -> None:
    cube = labelled([1] * 9 + [0] * 4, gaps=0.02, chunks={"time": 3})
    options: dict[str, Any] = {
        "to_pred": "b",
        "target_offset": {"time": 3},
        "sample_size": {"lat": 2},
    }
    one, two = (PTXrDataset(cube, nproc=n, **options) for n in (1, 2))
    assert one.metadata.accounting == two.metadata.accounting
    everything = range(len(one))
    for ours, theirs in zip(one.take(everything), two.take(everything), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    copied = pickle.loads(pickle.dumps(one))  # noqa: S301
    np.testing.assert_array_equal(copied.take(everything)[1], one.take(everything)[1])


STORED = {"time": 5, "lat": 2, "lon": 5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    static = (("lat", "lon"), np.arange(20.0).reshape(4, 5))
    cube = labelled([1] * 13).drop_vars("split").assign(s=static)
    options = {"sample_size": STORED, "overlap": {"time": 0.8}, "scale_fn": None}
    return sampled(cube, tmp_path_factory.mktemp("lead"), **options)


@pytest.mark.parametrize(
    ("offset", "target", "inputs", "shape_x", "shape_y"),
    [
        ({"time": 1}, None, None, (3, 4, 2, 5), (1, 4, 2, 5)),
        ({"time": 4}, {"time": 1}, {"time": 4}, (3, 4, 2, 5), (1, 1, 2, 5)),
        ([("time", 2)], {"time": 3}, {"time": 1}, (3, 1, 2, 5), (1, 3, 2, 5)),
    ],
)
def test_stored_windows_hold_inputs_and_targets(
    store: Path, offset: Any, target: Any, inputs: Any, shape_x: Any, shape_y: Any
) -> None:
    whole = PTXrDataset(store, features=["a", "b", "s"]).take(range(18)).numpy()
    data = PTXrDataset(
        store, to_pred="b", target_offset=offset, target_size=target, sample_size=inputs
    )
    assert len(data) == 18
    assert data.features == ("a", "b", "s")
    X, y = data.take(range(18))
    assert (X.shape[1:], y.shape[1:]) == (shape_x, shape_y)
    k, n = dict(offset)["time"], shape_y[1]
    np.testing.assert_array_equal(X, whole[:, :, : shape_x[1]])
    np.testing.assert_array_equal(y, whole[:, 1:2, k : k + n])
    shown = data.to_dataset((X, y), range(18))
    np.testing.assert_array_equal(
        shown["time_target_cells"][:, 0], shown["time_origin"] + np.timedelta64(k, "D")
    )
    for batch in prep_dataloader(data, batch_size=4):
        assert (batch[0].shape[1:], batch[1].shape[1:]) == (shape_x, shape_y)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("cube", {"to_pred": None, "target_offset": {"time": 1}}, "need to_pred"),
        ("cube", {"target_offset": {"tine": 1}}, "'tine'"),
        ("cube", {"target_offset": {"time": -1}}, "at least 0"),
        ("cube", {"target_offset": {"time": 1.5}}, "must be an integer, got 1.5"),
        ("cube", {"target_size": {"time": 0}}, "at least 1"),
        ("cube", {"target_offset": {"time": 13}}, "together span"),
        ("cube", {"to_pred": "c", "target_offset": {"time": 1}}, "to_pred"),
        ("cube", {"target_offset": {"time": 1}, "callback": dict}, "callback cannot be combined"),
        ("store", {"target_offset": {"time": 5}}, "together span 6 cells .* a stored window has 5"),
        ("store", {"target_offset": {"depth": 1}}, "target_offset.*'depth'"),
        ("store", {"target_offset": "time"}, "target_offset must be a mapping"),
        ("store", {"target_offset": 1}, "target_offset must be a mapping"),
        ("store", {"target_offset": {"time": 3}, "target_size": {"time": 3}}, "together span"),
    ],
)
def test_leads_that_cannot_be_are_refused(
    store: Path, form: str, options: dict[str, Any], message: str
) -> None:
    given = store if form == "store" else labelled([1] * 13)
    with pytest.raises(CubeError, match=message):
        PTXrDataset(given, **{"to_pred": "b", **options})


def test_windows_of_one_array_hold_inputs_and_targets() -> None:
    samples = xr.DataArray(np.arange(12.0).reshape(3, 4), dims=("samples", "time"), name="a")
    X, y = PTXrDataset(samples, to_pred="a", target_offset={"time": 3})[1]
    assert (X.tolist(), y.tolist()) == ([[4.0]], [[7.0]])


@pytest.mark.parametrize("form", ["cube", "store"])
@pytest.mark.parametrize("target_size", [None, {"time": 1}])
def test_weights_are_those_of_the_targets_cells(
    tmp_path: Path, form: str, target_size: Any
) -> None:
    values = np.arange(48.0, dtype="f4").reshape(12, 4)
    ds = xr.Dataset(dict.fromkeys("abw", (("time", "x"), values)))
    options: dict[str, Any] = {"sample_size": {"time": 2, "x": 4}, "scale_fn": None}
    if form == "store":
        ds = sampled(ds, tmp_path, sample_size={"time": 4, "x": 4}, scale_fn=None)
        options = {"sample_size": {"time": 2}}
    data = PTXrDataset(
        ds,
        to_pred="b",
        weights="w",
        target_offset={"time": 2},
        target_size=target_size,
        **options,
    )
    assert data.features == ("a", "b")
    X, y, w = data.take(range(len(data)))
    assert len(X) >= 3
    np.testing.assert_array_equal(y, w)
    np.testing.assert_array_equal(y.flatten(1)[:, :4], X[:, 0, 0] + 8)
    shown = data.to_dataset((X, y, w), range(len(data)))
    assert shown["weights"].dims == shown["b_target"].dims
    with pytest.raises(InvalidValueError, match=r"weights.*'v'"):
        PTXrDataset(ds, "b", weights="v", target_offset={"time": 2}, **options)


def uneven(calendar: str, kind: str) -> xr.Dataset:
    """Summer days of three years, days of which one comes twice, or days from last to first."""
    dates = xr.date_range("2000-01-01", periods=1000, calendar=calendar, use_cftime=True)
    if calendar == "standard":
        dates = xr.date_range("2000-01-01", periods=1000)
    cube = cell_id_cube({"time": 1000, "x": 2}, "float32", names=("a",)).assign_coords(time=dates)
    chosen = {
        "seasonal": np.flatnonzero(cube["time"].dt.month.isin([6, 7, 8])),
        "repeated": [0, 1, 1, 2, 3],
        "descending": np.arange(9, -1, -1),
        "even": np.arange(50),
        "monthly": np.flatnonzero(cube["time"].dt.day == 1),
    }
    return cube.isel(time=chosen[kind])


@pytest.mark.parametrize("form", ["cube", "store"])
@pytest.mark.parametrize("calendar", ["standard", "noleap"])
@pytest.mark.parametrize("kind", ["seasonal", "repeated", "descending", "even", "monthly"])
def test_steps_of_unequal_length_are_named(
    tmp_path: Path, kind: str, calendar: str, form: str
) -> None:
    ds: Any = uneven(calendar, kind)
    cut: dict[str, Any] = {"sample_size": {"time": 2, "x": 2}, "overlap": {"time": 0.5}}
    if form == "store":
        ds, cut = sampled(ds, tmp_path, **cut), {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        PTXrDataset(ds, "a", target_offset={"time": 1}, **cut)
        PTXrDataset(ds, "a", target_size={"time": 1}, **cut)  # At the time of the first input.
    said = [str(w.message) for w in found if "target_offset" in str(w.message)]
    assert len(said) == (kind not in ("even", "monthly"))
    assert all("steps along 'time' differ or go back" in text for text in said)


def test_a_store_warns_of_targets_whose_gaps_were_filled_for_the_inputs(tmp_path):
    values = np.random.default_rng(0).normal(size=(40, 4, 4))
    values[::7, 1, 1] = np.nan
    ds = xr.Dataset({"t": (("time", "lat", "lon"), values)})
    paths = {"train_cube": tmp_path / "train.zarr", "test_cube": tmp_path / "test.zarr"}
    sampler = MultiProcSampler(
        ds, sample_size={"time": 2, "lat": 4, "lon": 4}, to_pred="t", data_split=0.8,
        block_size={"time": 10}, fill_method={"t": "mean"}, drop_nan="if_all_nan", **paths,
    )  # fmt: skip
    sampler.run()
    with pytest.warns(UserWarning, match="gaps of 't' .* were filled"):
        PTXrDataset(paths["train_cube"], to_pred="t", target_offset={"time": 1})
