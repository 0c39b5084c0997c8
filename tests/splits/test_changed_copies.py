"""Copies in another form: near copies, interpolated values, predictors that hold the target."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from benchmarks import honesty_copies
from ml4cube.splits import assign_block_split, assign_time_split, leakage_report
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.leakage.coarse_fields import CoarseFields, Steps
from ml4cube.splits.leakage.near_copies import find_near_copies
from ml4cube.splits.leakage.predictors import find_target
from ml4cube.splits.leakage.smoothed import running_mean_window
from ml4cube.splits.leakage.value_pairs import copied_share


def steps_of(ds: xr.Dataset) -> tuple[CubeView, Steps]:
    view = CubeView.of(ds)
    layout = Layout.of(ds["split"], ("lat", "lon"))
    return view, Steps.of(view, layout, "time")


@pytest.mark.slow
@pytest.mark.parametrize("plant", honesty_copies.PLANTS)
def test_a_planted_copy_is_named_by_its_kind(plant):
    case = honesty_copies.run(f"plant: {plant}, seed 0")
    assert case["named"], case["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("cube", honesty_copies.CLEAN)
def test_a_clean_cube_is_not_accused(cube):
    case = honesty_copies.run(f"clean: {cube}, seed 0")
    assert not case["leaks"], case["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("reach", [5, 20, 60])
@pytest.mark.parametrize("kind", ["classes", "rare", "kelvin", "ice", "rain"])
def test_values_of_few_digits_are_no_copies(kind, reach):
    fields = honesty_copies.drifting_fields(reach, reach=float(reach))
    values = {
        "classes": np.digitize(fields, [-1, -0.3, 0.3, 1]).astype("int8"),
        "rare": (fields > 1.5).astype("int8"),
        "kelvin": np.round(280 + 5 * fields).astype("float32"),
        "ice": np.clip(0.5 + 2 * fields, 0, 1).astype("float32"),
        "rain": np.round(np.maximum(fields - 1, 0), 1),
    }[kind]
    report = leakage_report(honesty_copies.forward(values), var="y")
    assert not report.leaks, report.verdict


@given(seed=st.integers(0, 99), copied=st.integers(0, 12), flip=st.booleans())
@settings(max_examples=15, deadline=None)
def test_near_copies_are_the_steps_that_correlate(seed, copied, flip):
    """The oracle correlates whole fields of noise with one another, cell by cell."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(60, 12, 12))
    if copied:
        values[-copied:] = 3 * values[5 : 5 + copied, :: -1 if flip else 1] + 7
    dims = ("time", "lat", "lon")
    ds = assign_time_split(xr.Dataset({"y": (dims, values)}), 0.7)
    view, steps = steps_of(ds)
    fields = CoarseFields.of(view, "y", "time")
    assert fields is not None
    copies = find_near_copies(fields, steps)
    held_out = values[42:].reshape(18, -1)
    turned = values[42:, ::-1].reshape(18, -1)
    train = values[:42].reshape(42, -1)
    best = max(
        (np.corrcoef(some, train)[:18, 18:].max(axis=1) > 0.999).sum()
        for some in (held_out, turned)
    )
    assert best == copied
    if copied < 3:
        assert copies is None
    else:
        assert copies is not None
        assert round(copies.share * 18) == copied
        assert (copies.first, copies.last) == (60 - copied, 59)
        assert copies.flipped == (("lat",) if flip else ())


@given(seed=st.integers(0, 99), rows=st.integers(0, 4), chunked=st.booleans())
@settings(max_examples=15, deadline=None)
def test_copied_pairs_are_those_of_a_slow_search(seed, rows, chunked):
    values = np.random.default_rng(seed).normal(size=(10, 8, 9)).astype("float32")
    values[8, :rows, 2:] = values[1, 3 : 3 + rows, :-2]
    ds = xr.Dataset({"y": (("time", "lat", "lon"), values)})
    ds["split"] = ("time", np.array([1] * 7 + [0] * 3, dtype="uint8"))
    view = CubeView.of(ds.chunk(time=3) if chunked else ds)
    train = {tuple(pair) for line in values[:7].reshape(-1, 9) for pair in itertools.pairwise(line)}
    pairs = [tuple(pair) for line in values[7:].reshape(-1, 9) for pair in itertools.pairwise(line)]
    copied = sum(pair in train for pair in pairs)
    assert copied == 6 * rows
    expected = copied / len(pairs) if copied >= 8 else 0
    assert copied_share(view, ds["split"], "y") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "lag"),
    [
        (lambda y: 1.8 * y + 32, 0),
        (lambda y: np.roll(y, -2, axis=0), 2),
        (lambda y: y + np.roll(y, -1, axis=0), None),
    ],
)
def test_a_predictor_that_holds_the_target_is_found_with_its_lag(make, lag):
    ds = honesty_copies.forward(honesty_copies.temperatures(1))
    _, steps = steps_of(ds)
    target = ds["y"].values.reshape(len(ds["time"]), -1)
    held = find_target(target, make(target), steps)
    assert held is not None
    assert held.lag == lag


@pytest.mark.parametrize(
    "make",
    [
        lambda y: np.roll(y, 1, axis=0),  # the value of the last step may be known
        lambda y: y + 0.2 * np.random.default_rng(0).normal(size=y.shape),
        lambda y: np.broadcast_to(y.mean(axis=0), y.shape),
    ],
)
def test_a_predictor_that_may_be_known_is_no_leak(make):
    ds = honesty_copies.forward(honesty_copies.temperatures(1))
    _, steps = steps_of(ds)
    target = ds["y"].values.reshape(len(ds["time"]), -1)
    assert find_target(target, make(target), steps) is None


@pytest.mark.parametrize("window", [4, 7, 12])
def test_the_window_of_a_running_mean_is_found(window):
    walks = np.random.default_rng(0).normal(size=(200, 40)).cumsum(axis=0)
    smooth = np.lib.stride_tricks.sliding_window_view(walks, window, axis=0).mean(axis=-1)
    assert running_mean_window(smooth) == window
    assert running_mean_window(walks) is None


@pytest.mark.parametrize("reach", [0, 4])
@pytest.mark.parametrize("digit", [1e-2, 1e-3, 3e-4])
def test_packed_values_that_agree_by_chance_are_no_copies(digit, reach):
    """About as many levels as int16 has, which fields of a reanalysis are decoded from."""
    fields = gaussian_filter(np.random.default_rng(0).normal(size=(60, 64, 64)), (0, reach, reach))
    values = 280 + 8 * np.round(fields / fields.std() / digit) * digit
    ds = assign_time_split(xr.Dataset({"y": (("time", "lat", "lon"), values)}), 0.7)
    assert copied_share(CubeView.of(ds), ds["split"], "y") == 0


def test_copies_among_packed_values_are_found():
    values = np.round(np.random.default_rng(0).normal(size=(60, 32, 32)), 3)
    values[50:, :16, :16] = values[5:15, 16:, 16:]
    ds = assign_time_split(xr.Dataset({"y": (("time", "lat", "lon"), values)}), 0.7)
    assert copied_share(CubeView.of(ds), ds["split"], "y") > 0.1


@pytest.mark.parametrize(("mean", "deviation"), [(280, 5), (1e5, 800)])
@pytest.mark.parametrize("length", [60, 150, 300])
def test_a_smooth_field_of_floats_was_not_interpolated(length, mean, deviation):
    rng = np.random.default_rng(length)
    lat, lon = np.meshgrid(np.arange(192), np.arange(192), indexing="ij")
    waves = [
        np.cos(lat * rng.normal() / length + lon * rng.normal() / length + rng.uniform(0, 6))
        for _ in range(48)
    ]
    fields = np.sum(np.reshape(waves, (4, 12, 192, 192)), axis=1) / 2.5
    values = (mean + deviation * fields).astype("float32")
    ds = xr.Dataset({"y": (("time", "lat", "lon"), values)})
    report = leakage_report(assign_block_split(ds, {"lat": 16, "lon": 16}, 0.7), var="y")
    assert not report.leaks, report.verdict


@pytest.mark.parametrize("cover", [0.9, 0.95, 0.98])
def test_scenes_of_few_values_are_not_interpolated(cover):
    """A scene without a value equals the mean, and so any weighted mean of two others."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(120, 48, 48))
    clouds = gaussian_filter(rng.normal(size=noise.shape), (0, 6, 6))
    clouds += clouds.std() * rng.normal(size=(120, 1, 1))
    values = np.where(clouds > np.quantile(clouds, 1 - cover), np.nan, noise)
    ds = xr.Dataset({"ndvi": (("time", "lat", "lon"), values)})
    report = leakage_report(assign_block_split(ds, {"time": 6}, 0.7), var="ndvi")
    assert not report.leaks, report.verdict


def test_the_sine_of_the_hour_was_not_scaled():
    hours = np.broadcast_to(np.sin(2 * np.pi * np.arange(96) / 24)[:, None, None], (96, 6, 6))
    ds = xr.Dataset({"hour": (("time", "lat", "lon"), hours)})
    report = leakage_report(assign_time_split(ds, 0.65))
    assert not any("scaled" in finding for finding in report.findings)


@pytest.mark.parametrize(
    ("cycle", "steps"),
    [
        (lambda t: 5 * np.cos(2 * np.pi * t / 8) + 1.5 * np.cos(6 * np.pi * t / 8 + 0.4), 480),
        (lambda t: np.sign(np.cos(2 * np.pi * t / 24)), 960),
        (lambda t: np.clip(3 * np.cos(2 * np.pi * t / 12), -0.5, 0.5), 240),
    ],
)
def test_a_cycle_of_odd_harmonics_is_no_running_mean(cycle, steps):
    noise = np.random.default_rng(0).normal(size=(steps, 100)).cumsum(axis=0)
    values = cycle(np.arange(steps))[:, None] + 0.1 * noise / noise.std()
    assert running_mean_window(values) is None


@pytest.mark.parametrize("every", [4, 8, 16])
def test_steps_of_a_smooth_process_are_not_interpolated(every):
    noise = np.random.default_rng(0).normal(size=(400, 24, 24))
    ds = xr.Dataset({"y": (("time", "lat", "lon"), gaussian_filter(noise, (12, 3, 3)))})
    ds["split"] = ("time", (np.arange(400) % every == 0).astype("uint8"))
    report = leakage_report(ds, var="y")
    assert not report.leaks, report.verdict


def test_a_predictor_that_is_almost_the_target_is_not_called_a_mean():
    rng = np.random.default_rng(0)
    y, noise = rng.normal(size=(2, 240, 24))
    ds = assign_time_split(xr.Dataset({"y": (("time", "lon"), y)}), 0.7)
    _, steps = steps_of(ds)
    predictor = y + 0.0305 * noise + 0.012 * np.roll(y, -1, axis=0)
    held = find_target(y, predictor, steps)
    assert held is not None
    assert held.lag == 0
