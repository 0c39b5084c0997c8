"""leakage_report flags splits that flatter, and only those; duplicates against brute force."""

import datetime
import warnings
from pathlib import Path

import cftime
import dask
import dask.array as da
import iris_sample_data
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.fingerprint import combine, fingerprint_columns, informative, words_of
from ml4cube.core.separation import nearest_box, pieces, run_lengths
from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.plotting import split_timeline
from ml4cube.preprocessing import assign_mask
from ml4cube.splits import (
    assign_block_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    audit,
    leakage_report,
    ranges,
)
from ml4cube.splits.cube import CubeView
from ml4cube.splits.duplicates import find_duplicates
from tests.cubes import cell_id_cube, coordinates
from tests.test_ranges import made_field

FOLDER = Path(iris_sample_data.path)


@pytest.fixture(scope="module")
def sst():
    with xr.open_dataset(FOLDER / "ostia_monthly.nc") as ds:
        return ds[["surface_temperature"]].load()


@pytest.fixture(scope="module")
def scenarios():
    runs = []
    for name in ("A1B", "E1"):
        with xr.open_dataset(FOLDER / f"{name}_north_america.nc") as ds:
            runs.append(ds["air_temperature"].load().drop_vars("forecast_reference_time"))
    return xr.concat(runs, "scenario").to_dataset(name="t2m")


def random_split(ds, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return assign_rand_split(ds, **keywords)


def smooth_cube(seed=0, ranges=(6, 5, 8), shape=(60, 40, 60)):
    field = made_field(list(shape), list(ranges), "gaussian", seed)
    sizes = dict(zip(("time", "lat", "lon"), shape, strict=True))
    coords = coordinates(sizes)
    coords["lon"] = ("lon", np.linspace(10, 69, shape[2]), {"units": "degrees_east"})
    return xr.Dataset({"t2m": (tuple(sizes), field.astype("float32"))}, coords)


def regions_of(ds, dim, length):
    return xr.DataArray(np.arange(ds.sizes[dim]) // length, dims=dim)


# ------------------------------------------------------------------ verdicts


def awkward_cubes():
    smooth = smooth_cube()
    yield "smooth", smooth
    yield (
        "lazy, turned",
        smooth.chunk({"time": 13, "lat": 40, "lon": 17}).transpose("lon", "time", ...),
    )
    yield "gaps", smooth.where(np.random.default_rng(1).random(smooth.t2m.shape) > 0.3)
    yield "360 days", cell_id_cube({"time": 48, "lat": 12, "lon": 15}, calendar="360_day")
    noise = np.random.default_rng(2).normal(size=(40, 30, 30))
    yield "noise, no coordinates", xr.Dataset({"a": (("time", "y", "x"), noise)})
    yield "integers", (smooth * 1000).astype("int16")
    static = smooth.assign(height=(("lat", "lon"), np.zeros((40, 60))), grid=((), 0))
    yield "static variable first", static[["height", "grid", "t2m"]]


@pytest.mark.parametrize("ds", [pytest.param(ds, id=name) for name, ds in awkward_cubes()])
def test_random_leaks_and_what_lies_outside_does_not(ds):
    place = "x" if "x" in ds.dims else "lon"
    assert leakage_report(random_split(ds)).leaks
    assert not leakage_report(assign_time_split(ds, 0.8, gap=2)).leaks
    regions = regions_of(ds, place, ds.sizes[place] // 4)
    assert not leakage_report(assign_region_split(ds, regions, test=[1])).leaks


def test_real_temperatures(sst):
    assert leakage_report(random_split(sst)).leaks
    assert not leakage_report(assign_time_split(sst, 0.8, gap="90D")).leaks
    regions = regions_of(sst, "longitude", 72)
    region = assign_region_split(sst, regions, test=[2])
    assert not leakage_report(region).leaks
    # the same region split, for another region and for the years to come
    assert not leakage_report(region, deployment=regions == 4).leaks
    future = {"time": sst.time.values[-1] + np.arange(200, 500) * np.timedelta64(1, "D")}
    forward = assign_time_split(sst, 0.8, gap="90D")
    assert not leakage_report(forward, deployment=future).leaks


@pytest.mark.parametrize(
    "dims", [("x",), ("y", "x"), ("t", "z", "y", "x"), ("a", "b", "c", "d", "e")]
)
def test_any_number_of_dims(dims):
    sizes = {1: 400, 2: 30, 4: 12, 5: 6}[len(dims)]
    values = np.random.default_rng(0).normal(size=(sizes,) * len(dims)).cumsum(axis=0)
    ds = xr.Dataset({"v": (dims, values)})
    assert leakage_report(random_split(ds)).leaks
    half = assign_region_split(ds, regions_of(ds, dims[0], sizes // 2), test=[1])
    assert not leakage_report(half).leaks


def test_blocks_need_a_buffer_as_long_as_the_range():
    ds = smooth_cube(shape=(20, 80, 120))
    blocks = {"lat": 8, "lon": 10}
    touching = leakage_report(assign_block_split(ds, blocks, 0.8))
    assert touching.leaks
    assert "within the range" in touching.verdict
    apart = assign_block_split(ds, {"lat": 20, "lon": 20}, 0.8, buffer={"lat": 7, "lon": 11})
    report = leakage_report(apart)
    assert not report.leaks
    assert report.table.found["touching cells"] == 0
    assert report.table.found["cells within the range"] < 0.1
    narrow = leakage_report(assign_block_split(ds, {"lat": 20, "lon": 20}, 0.8, buffer=1))
    assert narrow.table.found["cells within the range"] > 0.2
    assert narrow.findings


def test_a_range_is_held_against_the_block():
    ds = smooth_cube(shape=(20, 80, 120))
    table = leakage_report(assign_block_split(ds, {"lon": 6}, 0.8, seed=3)).table
    assert table.found["range along lon"] == pytest.approx(8, rel=0.25)
    assert table.found["block along lon"] in (6, 12, 18)
    assert table.status["block along lon"] == (
        "ok" if table.found["block along lon"] >= 8 else "warning"
    )


def test_masks_are_no_values_that_are_alike():
    ds = smooth_cube(shape=(20, 40, 60))
    ds["t2m"] = ds.t2m.copy(data=np.random.default_rng(0).normal(size=ds.t2m.shape))
    ds = assign_block_split(ds, {"lat": 10, "lon": 12}, 0.8, buffer={"lat": 2, "lon": 2})
    disc = (ds.lat - ds.lat.mean()) ** 2 + (ds.lon - ds.lon.mean()) ** 2 < 600
    plain = leakage_report(ds)
    masked = leakage_report(assign_mask(ds, disc, "land")[["land", "t2m", "split"]])
    pd.testing.assert_frame_equal(masked.table, plain.table)
    assert not masked.leaks


def test_the_range_is_that_of_the_smoothest_of_many_variables():
    ds = smooth_cube(shape=(12, 40, 60))
    rng = np.random.default_rng(0)
    noise = {f"b{i}": (ds.t2m.dims, rng.normal(size=ds.t2m.shape)) for i in range(4)}
    many = assign_block_split(xr.Dataset(noise, ds.coords).assign(b4=ds.t2m), {"lat": 8, "lon": 10})
    every, alone = leakage_report(many), leakage_report(many, var="b4")
    assert every.leaks
    assert alone.leaks
    for dim in ("lat", "lon"):
        name = f"range along {dim}"
        assert every.table.found[name] == alone.table.found[name] > 3


@pytest.mark.parametrize("split", [0.2, 0.5, 0.95])
@pytest.mark.parametrize("shape", [(300,), (30, 40), (6, 6, 6), (5, 5, 5, 5)])
def test_random_leaks_at_any_fraction(shape, split):
    dims = tuple("tzyx"[-len(shape) :])
    ds = xr.Dataset({"a": (dims, np.random.default_rng(0).normal(size=shape))})
    labelled = random_split(ds, split=split)
    assert leakage_report(labelled).leaks
    labelled.split.attrs.clear()  # somebody else's label: what it looks like must tell
    touching = leakage_report(labelled)
    assert touching.leaks == (touching.table.found["touching cells"] > 0.5)
    assert touching.leaks or (len(shape) == 1 and split == 0.2)


# ------------------------------------------------------------------ duplicates


def test_scenarios_that_share_their_past_are_found(scenarios):
    same = [
        bool((scenarios.t2m[0, i].values == scenarios.t2m[1, i].values).all()) for i in range(240)
    ]
    years = scenarios.time.dt.year.values
    assert (np.flatnonzero(same) == np.flatnonzero(years <= 1999)).all()
    expected = sum(same) * 37 * 49
    for cube in (
        scenarios,
        scenarios.chunk({"time": 50, "latitude": 20, "longitude": 30}),
        scenarios.transpose("longitude", "time", "scenario", "latitude"),
        scenarios.isel(time=slice(None, None, -1)),
        scenarios.assign_coords(scenario=["A1B", "E1"]),
    ):
        cube = cube.assign(split=("scenario", np.array([1, 0], "u1")))
        report = leakage_report(cube)
        assert report.leaks
        assert report.table.found["duplicate cells"] == expected
        assert "bitwise copies" in report.verdict
        assert "1860" in report.verdict
        assert "1999" in report.verdict
    # one scenario trains and tests in turn: nothing is shared
    later = scenarios.isel(time=years > 1999).assign(split=("scenario", np.array([1, 0], "u1")))
    assert leakage_report(later).table.found["duplicate cells"] == 0
    # the same region held out in both: what is equal is held out together
    region = (scenarios.longitude > 280).astype("u1")
    both = leakage_report(scenarios.assign(split=1 - region))
    assert both.table.found["duplicate cells"] == 0


def slow_duplicates(values, labels):
    """Held-out cells of steps that equal another step, whose twin cell trains: pair by pair."""
    found = np.zeros(labels.shape, dtype=bool)
    for i in range(len(values)):
        for j in range(len(values)):
            if i != j and np.array_equal(values[i], values[j], equal_nan=True):
                found[i] |= np.isin(labels[i], (0, 2)) & (labels[j] == 1)
    return int(found.sum())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["f4", "f8", "i2"]), st.booleans())
def test_duplicates_are_those_of_brute_force(seed, dtype, cellwise):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1000, size=(12, 9, 7)).astype(dtype)
    if dtype != "i2":
        values[rng.random(values.shape) < 0.2] = np.nan
    for _ in range(4):  # copy a step, over another one
        values[rng.integers(12)] = values[rng.integers(12)]
    shape = (12, 9, 7) if cellwise else (12, 1, 1)
    labels = np.broadcast_to(rng.choice([0, 1, 2, 255], shape), (12, 9, 7)).astype("u1")
    dims = ("time", "lat", "lon")
    ds = xr.Dataset({"a": (dims, values), "split": (dims, labels)}, coordinates({"time": 12}))
    if seed % 2:
        ds = ds.chunk({"time": 5, "lat": 4, "lon": 3})
    found = find_duplicates(CubeView.of(ds), ds["split"], ["a"])["a"]
    assert found.cells == slow_duplicates(values, labels)


def test_a_copied_tile_is_found_where_the_field_differs():
    ds = smooth_cube(shape=(30, 64, 64))
    values = ds.t2m.values.copy()
    values[25, :16, :16] = values[3, :16, :16]
    ds = assign_time_split(ds.assign(t2m=(ds.t2m.dims, values)), 0.7)
    report = leakage_report(ds)
    assert report.leaks
    assert report.table.found["duplicate cells"] == 256


@pytest.mark.parametrize("size", [4, 6, 10, 20, 40, 46])
def test_copied_blocks_are_found_whatever_their_size(size):
    """Blocks of the test part that are copies of train blocks, at another place."""
    n = 5 * size
    values = np.random.default_rng(size).normal(280, 5, size=(4, n, n)).astype("f4")
    dims = ("time", "lat", "lon")
    ds = xr.Dataset({"a": (dims, values)}, coordinates({"time": 4}))
    ds = assign_block_split(ds, {"lat": size, "lon": size}, 0.7, seed=1)
    parts = ds.split.values[0, ::size, ::size]
    (train, *_), (test, *_) = np.argwhere(parts == 1), np.argwhere(parts == 0)
    (y, x), (v, u) = train * size, test * size
    values[:, v : v + size, u : u + size] = values[:, y : y + size, x : x + size]
    found = leakage_report(ds.assign(a=(dims, values)), var="a").table.found["duplicate cells"]
    assert found == 4 * size * size


def test_a_copied_stretch_of_one_series_is_found():
    values = np.random.default_rng(0).normal(size=500)
    values[450:490] = values[17:57]
    ds = xr.Dataset({"a": ("time", values)}, coordinates({"time": 500}))
    report = leakage_report(assign_time_split(ds, 0.8, gap=5))
    assert report.table.found["duplicate cells"] == 40
    assert report.leaks
    values[450:490] += 1e-9
    assert not leakage_report(assign_time_split(ds.assign(a=("time", values)), 0.8, gap=5)).leaks


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("steps", [60, 700])
def test_values_filled_into_the_test_part_are_found(gap, backward, steps):
    rng = np.random.default_rng(0)
    sizes = {"time": steps, "lat": 20, "lon": 30}
    values = rng.normal(size=tuple(sizes.values())).astype("f4")
    label = np.where(np.arange(steps) < steps - 20, 1, 0).astype("u1")
    label[steps - 20 - gap : steps - 20] = 255
    if backward:
        label = label[::-1]
    ds = xr.Dataset({"t2m": (tuple(sizes), values), "split": ("time", label)}, coordinates(sizes))
    filled = ds.t2m.where(
        xr.DataArray(rng.random((20, 30)) > 0.24, dims=("lat", "lon")) | (ds.split == 1)
    )
    filled = filled.bfill("time") if backward else filled.ffill("time")
    ds_filled = ds.assign(t2m=filled)
    for cube in (
        ds_filled,
        ds_filled.chunk({"time": 50, "lon": 11}),
        ds_filled.transpose("lon", ...),
    ):
        report = leakage_report(cube)
        assert report.leaks
        assert report.table.found["cells carried on"] == pytest.approx(0.24, abs=0.04)
        assert report.table.found["duplicate cells"] == 0
        assert "keep the value of the train step next to them" in report.verdict
    clean = leakage_report(ds)
    assert not clean.leaks
    assert clean.table.found["cells carried on"] < 0.001
    assert clean.table.status["cells carried on"] == "ok"


def test_what_stands_still_by_nature_is_not_carried_on():
    ds = smooth_cube(shape=(48, 20, 30))
    dry = ds.t2m.where((ds.t2m > 0.5) & (np.arange(48) < 30)[:, None, None], 0.0)  # a dry season
    weekly = ds.t2m.isel(time=np.arange(48) // 7 * 7)
    height = ds.t2m[0].broadcast_like(ds.t2m).transpose(*ds.t2m.dims)
    whole = (ds.t2m * 3).round().astype("i2")
    for values in (dry, weekly, height, whole, height.where(dry > 0)):
        made = assign_time_split(ds.assign(t2m=(ds.t2m.dims, values.values)), 0.7, gap=2)
        table = leakage_report(made).table
        assert table.status["cells carried on"] == "ok"
    regions = leakage_report(assign_region_split(ds, regions_of(ds, "lon", 10), test=[1]))
    assert "cells carried on" not in regions.table.index


def test_a_verdict_says_what_was_compared():
    ds = assign_time_split(smooth_cube(shape=(30, 20, 30)), 0.8, gap=12)
    report = leakage_report(ds)
    assert "10 lat x 15 lon cells" in report.table.meaning["duplicate cells"]
    if not report.findings:
        assert "no tiles of 10 lat x 15 lon cells are copies of train ones" in report.verdict
    unread = leakage_report(ds.assign(t2m=ds.t2m.astype(complex)), var="t2m")
    assert "nothing was compared for copies" in unread.verdict


def test_constant_and_repeating_fields_are_no_duplicates():
    ds = smooth_cube(shape=(48, 20, 30))
    month = made_field([12, 20, 30], [3, 4, 4], "gaussian", 1)
    ds["normal"] = ("time", "lat", "lon"), np.tile(month, (4, 1, 1))  # repeats each year
    ds["height"] = xr.broadcast(xr.DataArray(month[0], dims=("lat", "lon")), ds.time)[0]
    ds["rain"] = xr.zeros_like(ds.t2m)
    forward = leakage_report(assign_time_split(ds, 0.7, gap=2))
    assert not forward.leaks
    assert forward.table.found["duplicate cells"] == 0
    assert forward.table.found["duplicate cells of normal"] > 0
    assert forward.table.status["duplicate cells of normal"] == "warning"
    assert forward.table.found["duplicate cells of rain"] == 0
    # and if the target itself is such a variable, it is what is judged
    assert leakage_report(assign_time_split(ds, 0.7, gap=2), var="normal").leaks


def test_fingerprints_know_their_values():
    a = np.array([1.5, np.nan, -0.0, np.inf])
    words, known = words_of(a)
    assert known.tolist() == [True, False, True, True]
    assert (words_of(a.astype(">f8"))[0] == words).all()
    assert words_of(np.array(["2000-01-01", "NaT"], "M8[s]"))[1].tolist() == [True, False]
    rng = np.random.default_rng(0)
    cells = [np.full(100, 3.0), np.r_[np.full(98, 3.0), 4, 5], rng.normal(size=100)]
    place = [np.arange(100)]
    table = np.array([[c.sum() for c in fingerprint_columns(row, place)] for row in cells])
    assert informative(table).tolist() == [False, False, True]
    swapped = np.array([[c.sum() for c in fingerprint_columns(cells[2][::-1].copy(), place)]])
    assert swapped[0, 0] != table[2, 0]  # the same values in another order
    assert (combine([table, swapped.repeat(3, 0)]) != combine([swapped.repeat(3, 0), table])).any()


# ------------------------------------------------------------------ separation


def slow_nearest(point, boxes, scale, period):
    best = np.inf
    for low, high in boxes:
        squares = 0.0
        for p, a, b, unit, n in zip(point, low, high, scale, period, strict=True):
            cells = np.arange(a, b + 1)
            apart = np.abs(cells - p)
            if n:
                apart = np.minimum(apart, n - apart)
            squares += (apart.min() / unit) ** 2
        best = min(best, squares)
    return np.sqrt(best)


def test_nearest_box_is_that_of_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(20):
        low = rng.integers(0, 15, size=(12, 2))
        high = np.minimum(low + rng.integers(0, 5, size=(12, 2)), 19)
        points = rng.integers(0, 20, size=(30, 2))
        scale, period = [1.5, [4.0, np.inf][trial % 2]], [20 * (trial % 3 == 0), 0]
        found, steps = nearest_box(points, low, high, scale, period)
        boxes = list(zip(low, high, strict=True))
        expected = [slow_nearest(p, boxes, scale, period) for p in points]
        np.testing.assert_allclose(found, expected)
        np.testing.assert_allclose(found, np.sqrt(((steps / scale) ** 2).sum(axis=1)))


def test_runs_and_pieces():
    part = np.array([[1, 1, 0, 1], [0, 1, 0, 1]], bool)
    widths = [np.array([2, 3]), np.array([1, 1, 1, 4])]
    rows, columns = run_lengths(part, widths)
    assert rows.tolist() == [[2, 5, 0, 5], [0, 5, 0, 5]]
    assert columns.tolist() == [[2, 2, 0, 4], [0, 1, 0, 4]]
    volume = np.multiply.outer(*widths).astype(float)
    left, right = 2 + 2 + 3, 8 + 12
    assert pieces(part, volume) == pytest.approx((left + right) ** 2 / (left**2 + right**2))


def test_separation_is_counted_in_cells():
    ds = xr.Dataset({"a": ("x", np.random.default_rng(0).normal(size=100).cumsum())})
    label = np.ones(100, "u1")
    label[60:], label[50:60] = 0, 255
    table = leakage_report(ds.assign(split=("x", label)), var="a").table
    assert table.found["separation along x"] == pytest.approx(30, abs=3)
    assert table.found["block along x"] == 40
    assert table.found["excluded cells"] == 10
    assert table.found["touching cells"] == 0
    assert table.found["pieces"] == 1


@pytest.mark.parametrize("shape", [(18,), (7, 9), (4, 5, 6), (60, 70)])
def test_few_test_cells_are_counted_each(shape):
    rng = np.random.default_rng(0)
    dims = tuple("zyx"[-len(shape) :])
    for _ in range(5):
        label = xr.DataArray(
            rng.choice([0, 1, 255], shape, p=[0.2, 0.1, 0.7]).astype("u1"), dims=dims
        )
        label[dict.fromkeys(dims, 0)] = 1
        ds = xr.Dataset({"a": (dims, rng.normal(size=shape)), "split": label})
        train, test = np.argwhere(label.values == 1), np.argwhere(label.values == 0)
        apart = np.sqrt(((test[:, None] - train[None]) ** 2).sum(axis=-1)).min(axis=1)
        touching = leakage_report(ds).table.found["touching cells"]
        assert touching == pytest.approx((apart <= 1).mean(), abs=1e-12)


def test_times_are_those_that_the_split_went_by():
    dates = pd.date_range("2000", periods=10).values.copy()
    ds = xr.Dataset({"a": ("time", np.random.default_rng(0).random(10))}, {"time": np.arange(10)})
    shuffled = ds.assign_coords(start=("time", dates[[3, 0, 5, 2, 7, 9, 1, 4, 6, 8]]))
    expected = leakage_report(assign_time_split(ds, 0.7)).table
    found = leakage_report(assign_time_split(shuffled, 0.7)).table
    pd.testing.assert_frame_equal(found, expected)
    assert found.unit["test → train, time"] == "steps"
    ordered = assign_time_split(ds.assign_coords(start=("time", dates)), 0.7)
    for name in ("time", "start"):
        found = leakage_report(ordered, {name: dates[-1:] + np.timedelta64(3, "D")}).table
        assert found.found["deployment → train, time"] == 6
        assert found.unit["deployment → train, time"] == "days"
    dates[3] = np.datetime64("NaT")
    gappy = ds.rename(time="obs").assign_coords(time=("obs", dates))
    found = leakage_report(assign_time_split(gappy, 0.7, dim="obs")).table
    assert found.found["test → train, time"] == 2
    assert found.unit["test → train, time"] == "steps"


def test_numbers_of_a_deployment_are_measured_in_steps_of_the_cube():
    years = xr.Dataset(
        {"a": ("time", np.random.default_rng(0).random(20))}, {"time": np.arange(1960, 2000, 2)}
    )
    for ds in (
        assign_time_split(years, 0.7),
        assign_time_split(years.isel(time=slice(-1, None, -1)), 0.7),
    ):
        for later in ({"time": [2002]}, ds.isel(time=[0]).assign_coords(time=[2002])):
            assert leakage_report(ds, later).table.found["deployment → train, time"] == 8
        itself = leakage_report(ds, ds.where(ds.split == 0, drop=True)).table.found
        assert itself["deployment → train, time"] == itself["test → train, time"]
        with pytest.raises(InvalidValueError, match="the cube has no dates"):
            leakage_report(ds, {"time": ["2002-01-01"]})


def test_latitudes_of_stations_are_no_times():
    rng = np.random.default_rng(0)
    dates = pd.date_range("2000", periods=60).values
    coords = {"lat": ("obs", rng.uniform(40, 50, 60)), "lon": ("obs", rng.uniform(0, 10, 60))}
    ds = xr.Dataset({"v": ("obs", rng.normal(size=60))}, {"obs": np.arange(60), **coords})
    ds["split"] = ("obs", [1] * 40 + [0] * 20)
    there = {"lat": [-45.0, -46], "lon": [3.0, 4]}
    for times in (np.repeat(dates[:1], 60), dates):
        with pytest.raises(InvalidValueError, match=r"\['lat', 'lon'\].*needs 'time'"):
            leakage_report(ds.assign_coords(time=("obs", times)), there)
    named = {**there, "when": dates[-2:] + np.timedelta64(20, "D")}
    found = leakage_report(ds.assign_coords(time=("obs", dates)), named).table
    assert found.found["deployment → train, time"] == 39.5


def test_of_dates_beside_steps_those_in_order_are_their_times():
    ds = xr.Dataset({"a": ("time", np.random.default_rng(0).random(20))}, {"time": np.arange(20)})
    dates = pd.date_range("2000", periods=20).values
    some = dates.copy()
    some[3] = np.datetime64("NaT")
    for first in (np.repeat(dates[:1], 20), some, dates[::-1][np.r_[3:20, :3]]):
        cube = ds.assign_coords(a_time=("time", first), valid_time=("time", dates))
        later = {"valid_time": dates[-1:] + np.timedelta64(3, "D")}
        found = leakage_report(assign_time_split(cube, 0.7), later).table
        assert found.found["deployment → train, time"] == 9
        assert found.unit["deployment → train, time"] == "days"


def test_steps_of_unordered_numbers_are_those_between_neighbours():
    order = np.random.default_rng(0).permutation(36)
    ds = xr.Dataset({"a": ("time", np.random.default_rng(1).normal(size=36))})
    ds = ds.assign(split=("time", np.where(order < 24, 1, 0))).assign_coords(time=2000 + 3 * order)
    found = leakage_report(ds, {"time": [2000 + 3 * 40]}).table.found
    assert found["deployment → train, time"] == 40 - 23
    assert found["test → train, time"] == 6.5


@pytest.mark.parametrize(
    ("times", "wanted", "says"),
    [
        (np.arange(20), [30, np.nan], "NaN or infinite"),
        (np.arange(20), ["2000-01-01", "2000-01-02"], "the cube has no dates"),
        (np.r_[np.nan, np.arange(19)], [30, 31], "the cube has float64 along 'time'"),
        (np.arange(20).astype("m8[D]"), [30, 31], "the cube has timedelta64"),
        (list("abcdefghijklmnopqrst"), [30, 31], "the cube has <U1 along 'time'"),
    ],
)
def test_times_that_cannot_be_measured_are_refused(times, wanted, says):
    ds = xr.Dataset({"a": ("time", np.random.default_rng(0).random(20))}, {"time": times})
    with pytest.raises(InvalidValueError, match=says):
        leakage_report(ds.assign(split=("time", [1] * 14 + [0] * 6)), {"time": wanted})


def test_dates_beside_steps_with_texts_are_their_times():
    dates = pd.date_range("2000", periods=12, freq="D").values
    ds = xr.Dataset({"a": ("time", np.random.default_rng(0).random(12))}, {"date": ("time", dates)})
    index = pd.MultiIndex.from_product([[2000], range(12)], names=["year", "month"])
    coords = xr.Coordinates.from_pandas_multiindex(index, "time")
    for cube in (ds, ds.assign_coords(time=list("lkjihgfedcba")), ds.assign_coords(coords)):
        labelled = assign_time_split(cube, 0.7)
        assert labelled.split.values.tolist() == [1] * 8 + [0] * 4
        row = leakage_report(labelled, cube.isel(time=[-1])).table.loc["deployment → train, time"]
        assert (row.found, row.unit) == (4, "days")


def in_time(times, dim="time", **coords):
    """A cube of one dim, the last third of whose steps is its test part."""
    size = len(times)
    ds = xr.Dataset({"a": (dim, np.random.default_rng(0).random(size))}, {dim: times})
    ds = ds.assign_coords({name: (dim, values) for name, values in coords.items()})
    return ds.assign(split=(dim, np.arange(size) < size * 2 // 3))


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "int64"])
def test_times_of_dtypes_of_pandas_are_measured(dtype):
    frame = pd.DataFrame({"time": pd.array(np.arange(1970, 2000), dtype), "a": np.arange(30.0)})
    ds = assign_time_split(frame.set_index("time").to_xarray(), 0.7)
    found = leakage_report(ds, {"time": [2010]}).table.found
    assert found["deployment → train, time"] == 2010 - 1990
    assert found["test → train, time"] == 5


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_dates_far_apart_are_measured_in_any_unit(unit):
    years = np.arange("0850", "0940", dtype="M8[Y]").astype("M8[s]")
    later = {"time": np.array(["2030-01-01"], f"M8[{unit}]")}
    found = leakage_report(in_time(years), later).table.found
    truth = np.datetime64("2030-01-01") - np.datetime64("0909-01-01")
    assert found["deployment → train, time"] == truth.astype(int)
    standard = xr.date_range("2000", periods=30, use_cftime=True, calendar="standard")
    found = leakage_report(in_time(standard), later).table.found
    truth = np.datetime64("2030-01-01") - np.datetime64("2000-01-20")
    assert found["deployment → train, time"] == truth.astype(int)
    long = np.arange("1850", "2210", dtype="M8[Y]").astype(f"M8[{unit}]")
    found = leakage_report(assign_time_split(in_time(long).drop_vars("split"), 0.5)).table.found
    assert found["test → train, time"] == pytest.approx(90.5 * 365.2425, abs=2)


def test_a_step_that_repeats_says_less_than_one_that_does_not():
    dates = pd.date_range("2000", periods=30).values
    ds = in_time(np.arange(30), init=np.repeat(dates[::10], 10), valid=dates)
    table = leakage_report(ds, {"valid": dates[-1:] + np.timedelta64(10, "D")}).table
    assert table.found["test → train, time"] == 5.5
    assert table.found["deployment → train, time"] == 20
    with pytest.raises(InvalidValueError, match=r"\['init'\].*by 'valid'; rename"):
        leakage_report(ds, {"init": dates[-1:]})
    mixed = [cftime.DatetimeNoLeap(2000, 1, 1), *[cftime.Datetime360Day(2000, 1, 1)] * 29]
    table = leakage_report(in_time(np.arange(30), when=mixed), {"time": [40]}).table
    assert table.found["deployment → train, time"] == 21
    one = in_time(np.arange(30), dim="x").expand_dims(time=[0]).assign_coords(
        date=("time", dates[:1])
    )  # fmt: skip
    table = leakage_report(one, {"date": dates[[9]]}).table
    assert table.found["deployment → train, time"] == 9


@pytest.mark.parametrize("numbered", [True, False])
def test_dates_of_stations_are_no_times(numbered):
    stations = {"lat": ("st", np.linspace(40, 50, 8)), "lon": ("st", np.linspace(0, 10, 8))}
    stations["installed"] = ("st", pd.date_range("1990", periods=8, freq="YS").values)
    values = np.random.default_rng(0).normal(size=(30, 8))
    ds = xr.Dataset({"a": (("time", "st"), values)}, stations)
    ds = assign_time_split(ds.assign_coords(time=np.arange(30)) if numbered else ds, 2 / 3)
    assert (ds.split == xr.DataArray(np.arange(30) < 20, dims="time")).all()
    table = leakage_report(ds, {"time": [50]}).table
    assert table.found["deployment → train, time"] == 31
    assert table.unit["test → train, space"] == "km"
    assert split_timeline(ds).axes[0].get_xlim() == (-0.5, 29.5)


def test_a_deployment_of_several_dates_names_those_that_say_when():
    dates = pd.date_range("2000", periods=30).values
    later = dates + np.timedelta64(100, "D")
    ds = in_time(dates)
    known = {"made": ("y", dates[:6]), "when": ("when", later)}
    for names in (["made", "when"], ["when", "made"]):
        with pytest.raises(InvalidValueError, match=r"'made'.*measured by 'time'; rename those"):
            leakage_report(ds, xr.Dataset(coords={name: known[name] for name in names}))
    forecast = xr.Dataset(coords={"when": known["when"], "time": dates[0]})
    for deployment in (forecast, forecast.drop_vars("time")):
        found = leakage_report(ds, deployment).table.found
        assert found["deployment → train, time"] == 100 + 29 - 19 - 14.5
    table = pd.DataFrame({"time": dates[-1:]}).set_index("time", drop=False)
    assert leakage_report(ds, table).table.found["deployment → train, time"] == 10


def test_dates_of_a_deployment_that_the_cube_has_too_mean_the_same():
    dates = pd.date_range("2000", periods=30).values
    there = {"when": dates[-1:], "lat": [45.0], "lon": [3.0]}
    places = {"lat": [44.0, 45.0], "lon": [3.0, 4.0]}
    ds = in_time(dates).expand_dims(places)
    for own in (("time", dates), dates[0]):  # the same, and one that says nothing of steps
        found = leakage_report(ds.assign_coords(when=own), there).table.found
        assert found["deployment → train, time"] == 10
    with pytest.raises(InvalidValueError, match=r"\['when'\], the cube's steps.*by 'time'"):
        leakage_report(ds.assign_coords(when=("time", dates[::-1])), there)
    by_date = in_time(dates, dim="date", time=dates)
    found = leakage_report(by_date, {"time": dates[-1:]}).table.found
    assert found["deployment → train, time"] == 10


def test_one_step_of_a_cube_and_one_place_are_a_deployment():
    dates = pd.date_range("2000", periods=30).values
    lat, lon = np.linspace(40, 50, 6), np.linspace(0, 10, 6)
    ds = in_time(dates).expand_dims({"lat": lat, "lon": lon})
    last = leakage_report(ds, ds.isel(time=-1)).table.found
    assert last["deployment → train, time"] == 10
    stacked = leakage_report(ds.stack(p=["time", "lat"]), ds.isel(time=[-1])).table.found
    assert stacked["deployment → train, time"] == 10
    region = ds.assign(split=ds.lat > 47)
    center = {"center_lat": 80.0, "center_lon": 120.0}
    attrs = {"center_lat": "latitude", "center_lon": "longitude"}
    turned = xr.Dataset(coords={k: ((), v, {"standard_name": attrs[k]}) for k, v in center.items()})
    with pytest.raises(InvalidValueError, match="needs 'lat' and 'lon', or 'time'"):
        leakage_report(region, turned)
    for undated in (0, np.datetime64("NaT", "s"), np.nan):
        static = xr.Dataset(coords={"lat": lat, "lon": lon, "time": undated})
        rows = leakage_report(ds, static).table.index
        assert "deployment → train, space" in rows
        assert "deployment → train, time" not in rows
    there = xr.Dataset(coords={"lat": 45.0, "lon": 3.0})
    found = leakage_report(region, there).distances["space"][1]["deployment → train"]
    assert ((found > 111 * 3) & (found < 111 * 3.4)).all()


@pytest.mark.parametrize("dates", [True, False])
def test_a_deployment_without_times_or_in_other_units_is_refused(dates):
    times = pd.date_range("2000", periods=30).values if dates else np.arange(30)
    ds = in_time(times)
    for none in ({"time": times[:0]}, ds.isel(time=slice(0, 0))):
        with pytest.raises(InvalidValueError, match="no times along 'time'; give some"):
            leakage_report(ds, none)
    ds.time.attrs["units"] = "days since 2000-01-01"
    later = xr.Dataset(coords={"time": ("time", times, {"units": "days since 2050-01-01"})})
    if dates:  # a mere attribute
        assert leakage_report(ds, later).table.found["deployment → train, time"] == 0
    else:
        with pytest.raises(InvalidValueError, match=r"since 2050.*since 2000.*decode"):
            leakage_report(ds, later)
        for unit in ("day since 2000-1-1", "days since 2000-01-01 00:00:00"):
            same = xr.Dataset(coords={"time": ("time", [40], {"units": unit})})
            assert leakage_report(ds, same).table.found["deployment → train, time"] == 21


def test_a_label_of_dims_that_were_renamed_picked_or_stacked_is_judged():
    shape = {"time": 30, "lat": 6, "lon": 6}
    ds = xr.Dataset({"a": (list(shape), np.random.default_rng(0).normal(size=[*shape.values()]))})
    blocks, steps = assign_block_split(ds, {"time": 5, "lat": 3}), assign_time_split(ds, 0.7, gap=2)
    for other, same in (
        (blocks, blocks.rename(lat="latitude")),
        (steps, steps.isel(lat=0)),
        (steps, steps.isel(lat=0, drop=True)),
        (steps, steps.stack(p=["lat", "lon"])),
    ):
        expected, found = (leakage_report(cube).table.found for cube in (other, same))
        for row in ("touching cells", "test → train, time"):
            assert found[row] == expected[row]


def test_masks_of_dtypes_of_pandas_are_refused():
    frame = pd.DataFrame(
        {"t": range(10), "ok": pd.array([True] * 5 + [False] * 4 + [None], "boolean")}
    )
    ds = frame.rename_axis("x").to_xarray().assign(split=("x", [1] * 8 + [0] * 2))
    works = [
        lambda mask: assign_block_split(ds, {"x": 1}, valid=mask),
        lambda mask: leakage_report(ds, deployment=mask),
    ]
    for work in works:
        with pytest.raises(InvalidTypeError, match=r"boolean.*fillna\(False\).astype\(bool\)"):
            work(ds.ok)
    with pytest.raises(InvalidValueError, match="nothing but 0 and 1"):
        leakage_report(ds, deployment=ds.ok.astype("Int64").fillna(0))
    for work in works:
        work(ds.ok.fillna(False).astype(bool))


def test_variables_of_dtypes_of_pandas_are_left_out():
    frame = pd.DataFrame({"t": np.random.default_rng(0).normal(size=40)}).rename_axis("time")
    label = {"split": ("time", [1] * 30 + [0] * 10)}
    expected = leakage_report(frame.to_xarray().assign(label)).table
    frame["ok"] = pd.array([True] * 39 + [None], "boolean")
    pd.testing.assert_frame_equal(leakage_report(frame.to_xarray().assign(label)).table, expected)


def test_longitude_goes_round():
    ds = cell_id_cube({"time": 4, "lat": 6, "lon": 36})
    label = np.full(36, 255, "u1")
    label[0], label[35] = 0, 1  # neighbours across the end
    report = leakage_report(ds.assign(split=("lon", label)))
    assert report.table.found["touching cells"] == 1


def test_all_around_the_globe_nothing_lies_to_one_side():
    ds = cell_id_cube({"time": 6, "lat": 8, "lon": 60})
    ds["a"] = ds.a.copy(data=np.random.default_rng(0).normal(size=ds.a.shape))
    label = np.ones(60, "u1")
    label[0] = 0
    turned = [ds.assign(split=("lon", np.roll(label, by))) for by in (0, 5)]
    assert [leakage_report(one).leaks for one in turned] == [True, True]


# ------------------------------------------------------------------ distances


def great_circle(a, b):
    (lat1, lon1), (lat2, lon2) = np.deg2rad(a), np.deg2rad(b)
    h = (
        np.sin((lat2 - lat1) / 2) ** 2
        + np.cos(lat1) * np.cos(lat2) * np.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * 6371.0 * np.arcsin(np.sqrt(h))


@pytest.mark.parametrize(
    "by_hand",
    {
        "random cells": lambda ds, rng: (ds.t2m.dims, rng.random(ds.t2m.shape) < 0.8),
        "few random train cells": lambda ds, rng: (ds.t2m.dims, rng.random(ds.t2m.shape) < 0.2),
        "random columns": lambda ds, rng: (ds.t2m.dims[1:], rng.random(ds.t2m.shape[1:]) < 0.8),
        "every fifth step": lambda ds, rng: ("time", np.arange(ds.time.size) % 5 != 0),
        "one step": lambda ds, rng: ("time", np.arange(ds.time.size) != 11),
        "two rows": lambda ds, rng: ("lat", ~np.isin(np.arange(ds.lat.size), [11, 12])),
        "by value": lambda ds, rng: (ds.t2m.dims, ds.t2m.values > ds.t2m.values.mean()),
        "by a value that rises": lambda ds, rng: (
            ds.t2m.dims,
            (ds.t2m.values + rng.normal(0, 9, ds.t2m.shape)).cumsum(0) < 0,
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_labels_by_hand_that_leave_test_cells_among_train_are_flagged(by_hand):
    ds = smooth_cube(shape=(24, 30, 30))
    dims, train = by_hand[1](ds, np.random.default_rng(0))
    assert leakage_report(ds.assign(split=(dims, train.astype("u1")))).leaks


def test_labels_by_hand_of_what_lies_outside_of_train_are_not():
    ds = smooth_cube(shape=(24, 30, 30))
    for dim in ("time", "lat"):
        last = np.arange(ds.sizes[dim]) < ds.sizes[dim] - 1
        assert not leakage_report(ds.assign(split=(dim, last.astype("u1")))).leaks
    rows = xr.DataArray(np.isin(np.arange(30), [11, 12]), dims="lat")
    assert not leakage_report(assign_region_split(ds, rows)).leaks


@pytest.mark.parametrize("other", [np.nan, 7.0])
def test_gaps_of_a_label_are_told_and_count_as_excluded(other):
    ds = smooth_cube(shape=(24, 12, 12))
    label = np.repeat([1.0, other, 0.0], [15, 3, 6])
    report = leakage_report(ds.assign(split=("time", label)))
    clean = leakage_report(ds.assign(split=("time", np.repeat([1, 255, 0], [15, 3, 6]))))
    assert not report.leaks
    assert "12 % of the cells have a label that is a gap" in report.verdict
    assert report.table.found["unlabelled cells"] == report.table.found["excluded cells"] == 432
    assert report.table.status["unlabelled cells"] == "warning"
    same = report.table.drop(index="unlabelled cells")
    pd.testing.assert_frame_equal(same, clean.table, check_dtype=False)
    assert "unlabelled cells" not in clean.table.index
    with pytest.raises(InvalidValueError, match="9 of its values are none of 0, 1, 2 and 255"):
        leakage_report(ds.assign(split=("time", np.where(label == 1, 1.0, 7.0))))


def test_distances_are_those_of_brute_force():
    lat, lon = np.linspace(60, 85, 11), np.linspace(-180, 150, 12)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 11, 12))
    label = rng.choice([0, 1, 255], (11, 12), p=[0.2, 0.1, 0.7]).astype("u1")
    days = np.datetime64("2000-01-01") + np.array([0, 1, 5, 9, 30]) * np.timedelta64(1, "D")
    ds = xr.Dataset(
        {"a": (("time", "lat", "lon"), values), "split": (("lat", "lon"), label)},
        {"lat": lat, "lon": lon, "time": days},
    )
    where = np.argwhere(label == 1)
    train = [(lat[i], lon[j]) for i, j in where]
    expected = [
        min(great_circle((lat[i], lon[j]), t) for t in train) for i, j in np.argwhere(label == 0)
    ]
    unit, curves = leakage_report(ds).distances["space"]
    assert unit == "km"
    np.testing.assert_allclose(np.sort(curves["test → train"]), np.sort(expected), rtol=1e-9)
    # points of a user, and dates
    points = {"lat": [70.0, 80.0], "lon": [190.0, -170.0]}
    curves = leakage_report(ds, deployment=points).distances["space"][1]
    expected = [min(great_circle((a, 190.0), t) for t in train) for a in (70.0, 80.0)]
    np.testing.assert_allclose(curves["deployment → train"], expected, rtol=1e-9)
    in_time = ds.drop_vars("split").assign(split=("time", np.array([1, 1, 0, 255, 0], "u1")))
    later = pd.DataFrame({"time": pd.to_datetime(["2000-02-10", "2000-03-01"])})
    unit, curves = leakage_report(in_time, deployment=later).distances["time"]
    assert unit == "days"
    assert curves["test → train"].tolist() == [4.0, 29.0]
    assert curves["deployment → train"].tolist() == [39.0, 59.0]


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
def test_dates_of_a_deployment_may_be_texts(calendar):
    def date(*fields):
        return cftime.datetime(*fields, calendar=calendar)

    time = xr.date_range(
        "2000-01-01", periods=20, calendar=calendar, use_cftime=calendar == "360_day"
    )
    ds = assign_time_split(smooth_cube(shape=(20, 8, 8)).assign_coords(time=time), 0.7)
    texts = ["2300-02-01", "2030-02", "2031", "2000-02-28T12:00"]
    dates = [date(2300, 2, 1), date(2030, 2, 1), date(2031, 1, 1), date(2000, 2, 28, 12)]
    found = leakage_report(ds, deployment={"time": texts}).distances["time"][1]
    truth = [(later - date(2000, 1, 14)) / datetime.timedelta(days=1) for later in dates]
    np.testing.assert_allclose(found["deployment → train"], truth)


def test_stations_are_as_far_apart_as_they_are_on_the_sphere():
    rng = np.random.default_rng(0)
    lat, lon = rng.uniform(-60, 60, 30), rng.uniform(0, 360, 30)
    lon_first = {"Longitude": ("station", lon), "lat": ("station", lat)}
    ds = xr.Dataset({"t2m": (("time", "station"), rng.normal(size=(8, 30)))}, lon_first)
    ds["split"] = ("station", (np.arange(30) < 20).astype("u1"))
    sites = {"lat": [10.0, -20.0], "longitude": [30.0, 350.0]}
    unit, curves = leakage_report(ds, deployment=sites).distances["space"]
    places = np.stack([lat, lon], axis=1)
    for name, asked in (
        ("test → train", places[20:]),
        ("deployment → train", np.stack(list(sites.values()), axis=1)),
    ):
        truth = [min(great_circle(place, other) for other in places[:20]) for place in asked]
        np.testing.assert_allclose(curves[name], truth)
    assert unit == "km"
    with pytest.raises(InvalidValueError, match="needs 'lat' and 'Longitude'"):
        leakage_report(ds, deployment={"station": [3]})


def test_a_deployment_far_off_is_held_against_a_split_that_stays_near():
    ds = smooth_cube(shape=(30, 40, 60))
    forward = assign_time_split(ds, 0.8, gap=3)
    elsewhere = xr.Dataset(coords={"lat": [-30.0, -20.0], "lon": [200.0, 210.0, 220.0]})
    report = leakage_report(forward, deployment=elsewhere)
    assert report.leaks  # a split in time says nothing about a new region
    assert report.table.status["test against deployment, space"] == "leak"
    assert "deployment" in report.verdict
    cells = ds.lon > 60
    inside = leakage_report(assign_region_split(ds, regions_of(ds, "lon", 15), test=[2]), cells)
    assert not inside.leaks


@pytest.mark.parametrize(
    ("deployment", "error", "words"),
    [
        (3, InvalidTypeError, r"deployment is a int; say where .*\['lat', 'lon', 'time'\]"),
        (np.ones((40, 20), bool), InvalidTypeError, "ndarray; .* a DataArray of bools"),
        ({"depth": [1.0]}, InvalidValueError, "it needs 'lat' and 'lon', or 'time'"),
        ({"lat": [1.0]}, InvalidValueError, r"coordinates \['lat'\].* needs 'lat' and 'lon'"),
        ({"lat": [1.0, 2.0], "lon": [1.0]}, InvalidValueError, "one of each for every point"),
        ({"lat": slice(0, 9), "lon": slice(0, 9)}, InvalidValueError, "as slice.*list the"),
        ({"time": slice("2030", "2031")}, InvalidValueError, r"slice\('2030'.*date_range"),
        ({"lat": []}, InvalidValueError, r"coordinates \['lat'\].* needs 'lat' and 'lon'"),
        ({"lat": ["a"], "lon": ["b"]}, InvalidValueError, "<U1 along 'lat'"),
        ({"lat": [np.nan], "lon": [3.0]}, InvalidValueError, "along 'lat', or some that are NaN"),
        ({"lat": [91.0], "lon": [3.0]}, InvalidValueError, "beyond the poles"),
        ({"time": ["spring"]}, InvalidValueError, "no dates of the cube's calendar .*'2030-01-31'"),
        ({"time": [2010.0]}, InvalidValueError, "pandas.to_datetime"),
        (xr.Dataset(coords={"lat": [], "lon": []}), InvalidValueError, "no places along 'lat'"),
        (xr.DataArray(np.zeros(3, bool), dims="lat"), InvalidValueError, "3 cells along 'lat'"),
        (xr.DataArray(np.zeros(40, bool), dims="lat"), InvalidValueError, "false everywhere"),
        (xr.DataArray(7.0), InvalidValueError, r"coordinates \[\].* needs 'lat' and 'lon'"),
    ],
)
def test_deployments_that_fit_nothing(deployment, error, words):
    ds = assign_time_split(smooth_cube(shape=(20, 40, 20)), 0.7)
    with pytest.raises(error, match=words):
        leakage_report(ds, deployment)


def test_masks_of_a_deployment_lie_on_the_cells_of_the_cube():
    ds = assign_time_split(smooth_cube(shape=(20, 40, 20)), 0.7)
    north = ds.lat > 30
    assert leakage_report(ds, north).distances
    mirrored = north.isel(lat=slice(None, None, -1))
    with pytest.raises(InvalidValueError, match="other values of 'lat' than the cube"):
        leakage_report(ds, mirrored)
    for dtype in ("int8", "float32"):
        with pytest.raises(InvalidValueError, match=r"nothing but 0 and 1.* compare it \(== 1\)"):
            leakage_report(ds, north.astype(dtype).where(ds.lat < 80))
    # a cube of values is no mask, even if it is on the same cells
    assert leakage_report(ds, ds.t2m).distances
    assert leakage_report(ds, xr.zeros_like(ds.t2m)).distances


def test_a_deployment_of_values_is_not_read_to_tell_it_from_a_mask():
    ds = assign_time_split(smooth_cube(shape=(20, 40, 20)), 0.7)
    cube = ds.t2m.chunk(time=2)
    read = []

    def noted(block, block_info):
        read.append(block_info[0]["chunk-location"][0])
        return block

    def lazy(array):
        empty = np.empty((0, 0, 0))
        return array.copy(data=array.data.map_blocks(noted, dtype=array.dtype, meta=empty))

    assert leakage_report(ds, lazy(cube)).distances
    assert read == [0]
    read.clear()
    with pytest.raises(InvalidValueError, match="nothing but 0 and 1"):
        leakage_report(ds, lazy(xr.ones_like(cube)))
    assert read == list(range(10))


@pytest.mark.parametrize("var", [1, ["a", 1]])
def test_variables_that_are_not_named_by_strings_are_refused(var):
    ds = xr.Dataset({"a": ("time", np.arange(20.0))})
    with pytest.raises(InvalidTypeError, match=r"by strings, found \[1\]"):
        leakage_report(assign_time_split(ds), var=var)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (None, "no label 'split'"),
        (np.ones(20, "u1"), "no test cell"),
        (np.zeros(20, "u1"), "no train cell"),
        (np.full(20, "a"), "holds 0, 1, 2 or 255"),
    ],
)
def test_labels_that_cannot_be_judged(label, words):
    ds = xr.Dataset({"a": ("time", np.arange(20.0))})
    if label is not None:
        ds["split"] = "time", label
    with pytest.raises(InvalidValueError, match=words):
        leakage_report(ds)


# ------------------------------------------------------------------ the object, and large cubes


def test_a_path_where_nothing_lies_is_named():
    with pytest.raises(StoreError, match=r"no cube can be read from train\.zarr"):
        leakage_report("train.zarr", "test.zarr")


def test_the_object():
    ds = random_split(smooth_cube(shape=(20, 20, 30)))
    report = audit(ds)
    assert report.leaks is True
    assert isinstance(report.table, pd.DataFrame)
    assert set(report.table.columns) == {"found", "unit", "limit", "status", "meaning"}
    assert (report.table.meaning.str.len() > 0).all()
    assert report.table.index.name == "check"
    assert report.verdict.endswith(".")
    assert report.verdict in str(report)
    assert f" {report.table.found['test cells']:.0f} " in str(report)
    assert len(report.plot().axes) == 3
    assert audit(ds.rename(split="mine"), name="mine").verdict == report.verdict


def test_copies_are_a_share_of_all_that_is_held_out():
    values = np.random.default_rng(0).normal(size=(20, 8, 8))
    values[15] = values[2]  # of val
    label = np.repeat([1, 2, 0], [12, 5, 3]).astype("u1")
    ds = xr.Dataset({"a": (("time", "y", "x"), values), "split": ("time", label)})
    shares = leakage_report(ds).shares
    assert shares["bitwise copies of train (test and val)"] == 1 / 8
    assert "bitwise copies of train" in leakage_report(ds.isel(time=slice(0, 17))).shares


def test_chunks_scheduler_and_order_of_dims_change_nothing():
    ds = assign_block_split(smooth_cube(shape=(20, 30, 40)), {"lat": 6, "lon": 8}, 0.8, val=0.1)
    plain = leakage_report(ds).table
    for other in (ds.chunk({"time": 7, "lat": 11, "lon": 9}), ds.transpose("lon", "lat", "time")):
        with dask.config.set(scheduler="synchronous"):
            table = leakage_report(other).table
        pd.testing.assert_frame_equal(table.loc[plain.index], plain)


def test_a_cube_larger_than_its_budget_is_read_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(ranges, "_CELLS_AT_MOST", 1 << 18)
    drawn = da.random.default_rng(0).normal(size=(100, 400, 400), chunks=(10, 200, 200))
    ds = xr.Dataset({"a": (("time", "lat", "lon"), drawn)}, coordinates({"time": 100}))  # 128 MB
    import tracemalloc

    labelled = assign_time_split(ds, 0.8, gap=2)
    tracemalloc.start()
    with dask.config.set(scheduler="threads", num_workers=2):
        report = leakage_report(labelled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not report.leaks
    assert peak < 70e6


def test_a_report_refuses_places_that_are_not_known():
    values = np.random.default_rng(0).normal(size=(12, 8, 10))
    lat = np.array([0.0, 5, 10, np.nan, 20, 25, 30, 35])
    ds = xr.Dataset({"v": (("time", "lat", "lon"), values)}, {"lat": lat, "lon": np.arange(10.0)})
    with pytest.raises(InvalidValueError, match=r"degrees from -90 to 90 in 'lat'.*nan at 3"):
        leakage_report(assign_block_split(ds, {"time": 2}, seed=1))
