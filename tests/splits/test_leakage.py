"""leakage_report finds copies, and judges distances; both against brute force."""

import itertools
import re
import warnings
from dataclasses import replace
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
from sklearn.metrics.pairwise import haversine_distances

from benchmarks import honesty_splits
from ml4cube.core.distance.separation import nearest_box, run_lengths
from ml4cube.core.distance.variogram import Variogram, nearest_model
from ml4cube.core.fingerprint import are_informative, combine, fingerprint_columns, words_of
from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.splits import (
    assign_block_split,
    assign_location_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    audit,
    leakage_report,
    residuals,
    validity,
)
from ml4cube.splits.cube import CubeView
from ml4cube.splits.distances import ANY_TIME, Axes, Cells
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.leakage.deployment import fitting_split
from ml4cube.splits.leakage.duplicates import find_duplicates
from ml4cube.splits.leakage.expected_error import Neighbourhoods, Promise
from ml4cube.splits.leakage.separation import effective_pieces
from ml4cube.splits.leakage.space_time_variogram import SpaceTimeVariogram
from tests.cubes import cell_id_cube, coordinates
from tests.splits.test_ranges import made_field


def noise(seed=0, **sizes):
    """A cube of random values without coordinates."""
    values = np.random.default_rng(seed).normal(size=tuple(sizes.values()))
    return xr.Dataset({"a": (tuple(sizes), values)})


def random_split(ds, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return assign_rand_split(ds, **keywords)


def smooth_cube(shape=(60, 40, 60)):
    field = made_field(list(shape), [6, 5, 8], "gaussian", 0)
    sizes = dict(zip(("time", "lat", "lon"), shape, strict=True))
    coords = coordinates(sizes)
    coords["lon"] = ("lon", np.linspace(10, 69, shape[2]), {"units": "degrees_east"})
    return xr.Dataset({"t2m": (tuple(sizes), field.astype("float32"))}, coords)


def at(**coords):
    """A cube of one value everywhere: along its only coordinate, or at points."""
    dim = "point" if len(coords) > 1 else next(iter(coords))
    known = {name: (dim, np.asarray(values)) for name, values in coords.items()}
    return xr.DataArray(np.ones(known[next(iter(known))][1].size), known, dim)


def regions_of(ds, dim, length):
    return xr.DataArray(np.arange(ds.sizes[dim]) // length, dims=dim)


# ------------------------------------------------------------------ verdicts


def awkward_cubes():
    smooth = smooth_cube()
    yield "smooth", smooth
    yield "gaps", smooth.where(np.random.default_rng(1).random(smooth.t2m.shape) > 0.3)
    yield "360 days", cell_id_cube({"time": 48, "lat": 12, "lon": 15}, calendar="360_day")
    yield "noise, no coordinates", noise(2, time=40, y=30, x=30)
    yield "integers", (smooth * 1000).astype("int16")
    static = smooth.assign(height=(("lat", "lon"), np.zeros((40, 60))), grid=((), 0))
    yield "static variable first", static[["height", "grid", "t2m"]]


SCATTERED = (
    "touch a train cell and lie scattered among train cells, as if dealt at random, so the score "
    "holds for gaps between train cells only"
)


@pytest.mark.slow
@pytest.mark.parametrize("ds", [pytest.param(ds, id=name) for name, ds in awkward_cubes()])
def test_without_a_deployment_the_report_says_what_is_tested_and_warns_of_single_cells(ds):
    place = "x" if "x" in ds.dims else "lon"
    regions = regions_of(ds, place, ds.sizes[place] // 4)
    for labelled, warns in (
        (random_split(ds), True),
        (assign_time_split(ds, 0.8, gap=2), False),
        (assign_region_split(ds, regions, test=[1]), False),
    ):
        report = leakage_report(labelled)
        assert (report.leaks, report.judgement) == (False, "undecided")
        start = "This split is undecided, because no deployment is given: its test "
        assert report.verdict.startswith(start)
        assert (SCATTERED in report.verdict) == warns == bool(report.findings)
        assert "leak" not in report.verdict


def test_what_the_test_part_tests_is_said_in_distances():
    ds = smooth_cube(shape=(24, 12, 12))
    for labelled, text in (
        (assign_time_split(ds, 0.75, gap=2), "its test part tests places of train at new times (0"),
        (assign_location_split(ds, seed=1), "its test part tests new places at times of train ("),
        (random_split(ds), "its test part tests places of train at times of train ("),
    ):
        assert text in leakage_report(labelled).verdict
    forward = leakage_report(assign_time_split(ds, 0.75, gap=2)).verdict
    assert "(0 km from train in space, 3 to 8 days from train in time)" in forward
    nearer = leakage_report(random_split(ds)).verdict
    assert "days from train in time, 0 km from train in space at any time)" in nearer
    bare = ds.drop_vars(["lat", "lon", "time"])
    verdict = leakage_report(assign_block_split(bare, {"lat": 4, "lon": 4}, seed=1)).verdict
    assert re.search(r"its test cells lie \d cells along lat and \d cells along lon from", verdict)


@pytest.mark.slow
@pytest.mark.parametrize("split", [0.2, 0.5, 0.95])
@pytest.mark.parametrize("shape", [(300,), (30, 40), (6, 6, 6), (5, 5, 5, 5), (5, 5, 5, 5, 5)])
def test_random_cells_are_warned_of_at_any_fraction_and_half_of_a_cube_is_not(shape, split):
    dims = tuple("rtzyx"[-len(shape) :])
    ds = noise(**dict(zip(dims, shape, strict=True)))
    report = leakage_report(random_split(ds, split=split))
    touches = report.table.found["touching cells"] > 0.5
    assert touches or (len(shape) == 1 and split == 0.2)
    assert (SCATTERED in report.verdict) == touches
    half = assign_region_split(ds, regions_of(ds, dims[0], shape[0] // 2), test=[1])
    assert not leakage_report(half).findings


def test_a_label_has_one_verdict_whoever_made_it():
    ds = smooth_cube(shape=(12, 20, 24))
    thin = xr.DataArray(np.isin(np.arange(20), [11]), dims="lat")
    for labelled in (
        assign_region_split(ds, thin),
        random_split(ds),
        assign_block_split(ds, {"lat": 5, "lon": 6}, seed=1),
        assign_time_split(ds, 0.7, gap=1),
    ):
        made = leakage_report(labelled)
        by_hand = labelled.copy()
        by_hand["split"] = by_hand.split.copy()
        by_hand.split.attrs.clear()
        report = leakage_report(by_hand)
        # Copies are compared in the blocks of a recipe, which the verdict names.
        texts = [one.verdict.partition("; no tiles")[0] for one in (report, made)]
        assert texts[0] == texts[1]
        assert report.judgement == made.judgement
        assert made.table.found["made by"].startswith("assign_")
        assert "made by" not in report.table.index


# ------------------------------------------------------------------ expected errors


def simulated(use, seed):
    """A field of known covariance: the known cells, and those of a deployment."""
    return honesty_splits.question(use, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            "interpolation",
            {"random cells": "too easy", "natural": "fits", "quarter left out": "too hard"},
        ),
        ("stations", {"random cells": "too easy", "natural": "fits"}),
        ("region", {"random cells": "too easy", "natural": "fits"}),
        ("future", {"random cells": "too easy", "blocks": "too easy", "natural": "fits"}),
    ],
)
def test_promises_of_simulated_fields_are_judged_as_they_are(use, words):
    known, asked = simulated(use, 2)
    splits = honesty_splits.simulated_splits(use)
    for name, word in words.items():
        report = leakage_report(splits[name](known, 2), asked, var="y")
        assert report.judgement == word, report.verdict
        number = f"it promises about {report.table.found['promised error']:.2g} ("
        assert number in report.verdict
        assert "of the error in the deployment" in report.verdict
        start = {"fits": "This split fits the deployment: it"}.get(word, f"This split is {word}")
        assert report.verdict.startswith(start)
        assert ("Try " in report.verdict) == (word != "fits")
        assert SCATTERED not in report.verdict  # the deployment says what that means


@pytest.mark.slow
def test_rows_of_a_lasting_field_at_stations_are_too_easy_and_locations_are_recommended():
    result = honesty_splits.run_lasting(0)
    assert result["random rows"]["judgement"] == "too easy"
    assert result["random rows"]["promised"] < 0.6
    assert result["stations"]["judgement"] == "fits"
    full = honesty_splits.as_cube(honesty_splits.simulate(12, (12, 16), 6, 60, 0))
    is_station = np.random.default_rng(0).random((12, 16)) < 0.3
    known = honesty_splits.at_stations(full.where(is_station))
    report = leakage_report(random_split(known), full.where(~is_station), var="y")
    assert report.verdict.endswith("Try assign_location_split, which leaves out whole places.")


@pytest.mark.parametrize(
    ("distances", "words"),
    [
        ({"space": [0.0], "time": [0.0]}, "assign_rand_split"),
        ({"space": [0.0], ANY_TIME: [0.0], "time": [5.0]}, "assign_time_split"),
        ({"space": [40.0], ANY_TIME: [40.0], "time": [0.0]}, "assign_location_split"),
        ({"space": [40.0], ANY_TIME: [0.0], "time": [0.0]}, "assign_rand_split"),
        ({"space": [900.0], "time": [0.0]}, "assign_region_split"),
        ({"space": [90.0], ANY_TIME: [90.0], "time": [9.0]}, "LeaveLocationTimeOut"),
    ],
)
def test_the_split_that_is_recommended_is_as_far_as_the_deployment(distances, words):
    arrays = {domain: np.array(values) for domain, values in distances.items()}
    assert fitting_split(arrays, 50.0).startswith(words)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "word"),
    [
        (0.5, 0.4, 0.6, "too easy"),
        (0.9, 0.8, 0.99, "too easy"),
        (0.9, 0.8, 1.01, "undecided"),
        (0.92, 0.8, 0.99, "fits"),
        (1.05, 0.9, 1.3, "fits"),
        (1.05, 0.6, 1.8, "undecided"),
        (1.2, 0.99, 1.4, "undecided"),
        (1.2, 1.01, 1.4, "too hard"),
        (np.nan, np.nan, np.nan, "undecided"),
    ],
)
def test_a_promise_is_judged_by_its_interval(ratio, low, high, word):
    assert Promise(ratio, low, high).judgement == word


def slow_squared_error(cell, train, variogram):
    """The five train cells most like a cell: the variance of their mean less its value."""

    def gamma(a, b):
        km = 6371.0 * haversine_distances(np.deg2rad([a[0]]), np.deg2rad([b[0]]))[0, 0]
        return float(variogram.at(np.array(0.0 if km < 1e-6 else km), np.array(abs(a[1] - b[1]))))

    nearest = sorted(train, key=lambda other: gamma(cell, other))[:5]
    to_train = sum(gamma(cell, other) for other in nearest)
    between = sum(gamma(a, b) for a in nearest for b in nearest)
    return 2 * to_train / len(nearest) - between / len(nearest) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "stations", "curvilinear"])
def test_expected_errors_are_those_of_brute_force(kind):
    ds, _, train, test, _, _ = placed(kind, np.random.default_rng(2))
    view = CubeView.of(ds)
    axes = Axes.of(view)
    label = ds.split.where(ds.a.notnull(), 255)
    layout = Layout.of(label.drop_vars(label.coords), tuple(axes.sizes))
    model = nearest_model(np.arange(1.0, 9) * 900, 1 - np.exp(-np.arange(1.0, 9)), np.full(8, 99))
    in_time = nearest_model(np.arange(1.0, 9), np.arange(1.0, 9) / 8, np.full(8, 99))
    variogram = SpaceTimeVariogram(model, in_time, 1.3)
    cells = [Cells(axes, layout, code) for code in (0, 1)]
    assert len(test) <= 150  # all of them are in the sample
    errors = Neighbourhoods.of(*cells, {"space", "time"}).errors(variogram)
    assert errors.variances() == pytest.approx(np.diag(errors.covariances(errors)))
    truth = np.mean([slow_squared_error(cell, train, variogram) for cell in test])
    assert errors.variances().mean() == pytest.approx(truth, rel=1e-6)


def test_space_and_time_add_up_to_the_variance():
    space = Variogram(np.array([1.0, 9]), np.ones(2), np.ones(2, int), "exponential", 0.1, 1.1, 4.0)
    time = Variogram(np.array([1.0, 9]), np.ones(2), np.ones(2, int), "spherical", 0.2, 0.7, 3.0)
    both = SpaceTimeVariogram(space, time, 1.4)
    zero, far = np.array(0.0), np.array(1e6)
    assert both.at(zero, zero) == 0
    assert both.at(far, zero) == pytest.approx(1.1)
    assert both.at(zero, far) == pytest.approx(0.7)
    assert both.at(far, far) == pytest.approx(1.4)
    # A field in which nothing but the place matters.
    static = SpaceTimeVariogram(space, None, 1.1)
    assert static.at(zero, far) == pytest.approx(0.1)  # the nugget
    assert both.why_unknown(np.array([3.0]), np.array([3.0])) == ""
    rising = SpaceTimeVariogram(replace(space, range=20.0), time, 1.4)
    assert "in space still rises" in rising.why_unknown(np.array([12.0]), zero[None])
    assert rising.why_unknown(np.array([8.0]), zero[None]) == ""
    unknown = "no variogram in time could be estimated from the train cells"
    assert static.why_unknown(zero[None], np.array([1.0])) == unknown


def test_no_claim_is_made_without_a_variogram():
    ds = smooth_cube(shape=(24, 12, 12))
    forward = assign_time_split(ds.isel(time=slice(0, 18)), 0.75, gap=2)
    later = ds.isel(time=slice(22, None))
    for change, reason in (
        (ds.t2m * 0 + 3, "'t2m' is constant over the train cells"),
        (ds.t2m.astype(complex), "no variable holds numbers"),
        (ds.t2m.assign_coords(time=ds.time), None),
    ):
        report = leakage_report(forward.assign(t2m=change), later, var="t2m")
        if reason is not None:
            assert report.judgement == "undecided"
            assert f"nothing is claimed of errors, because {reason};" in report.verdict
            assert "and the deployment asks for places of train at new times" in report.verdict
        else:
            assert "nothing is claimed" not in report.verdict
    far = later.assign_coords(lon=later.lon + 60)
    report = leakage_report(forward, far, var="t2m")
    assert report.judgement in ("too easy", "undecided")
    in_train = leakage_report(forward, ds.isel(time=slice(0, 3)))
    assert "all cells of the deployment are cells that the model is trained on" in in_train.verdict


def test_a_deployment_with_held_out_cells_is_compared_with_train():
    ds = smooth_cube(shape=(24, 12, 12))
    forward = assign_time_split(ds, 0.75, gap=2)
    as_test = leakage_report(forward, ds.isel(time=slice(18, None)))
    assert as_test.judgement == "fits"
    assert as_test.table.found["promised error"] == pytest.approx(1, abs=0.01)
    later = ds.assign_coords(time=ds.time + np.timedelta64(24, "D"))
    found = leakage_report(forward, later.isel(time=[0])).table.found
    assert found["deployment → train, time"] == 1  # the model in use is trained on the test part


# ------------------------------------------------------------------ projected places


def projected(units="m", **attrs):
    """A map of 10 km cells with x and y of a projection."""
    field = made_field([20, 16, 18], [6, 40, 40], "exponential", 1)[:, :16, :18]
    scale = {"m": 1e4, "km": 10.0}[units]
    coords = {
        "time": pd.date_range("2000", periods=20),
        "y": ("y", scale * np.arange(16), {"units": units, **attrs}),
        "x": ("x", scale * np.arange(18), {"units": units, **attrs}),
    }
    return xr.Dataset({"a": (("time", "y", "x"), field)}, coords)


def in_other_coordinates(kind):
    """The same map by kilometres, by names of a standard, as stations, and on a small sphere."""
    ds = projected()
    if kind == "km":
        return projected("km")
    if kind == "standard names":
        renamed = projected().rename(y="row", x="column")
        for dim, axis in (("row", "y"), ("column", "x")):
            renamed[dim].attrs = {"standard_name": f"projection_{axis}_coordinate"}
        return renamed
    if kind == "stations":
        return ds.stack(station=["y", "x"]).reset_index("station").drop_indexes([], errors="ignore")
    if kind == "2-D":
        y, x = xr.broadcast(ds.y, ds.x)
        bare = ds.drop_vars(["y", "x"]).rename(y="row", x="column")
        axes = {"y": y, "x": x}
        return bare.assign_coords(
            {name: (("row", "column"), axis.values, {"units": "m"}) for name, axis in axes.items()}
        )
    return ds


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["m", "km", "standard names", "stations", "2-D"])
def test_projected_cubes_have_kilometres(kind):
    ds = in_other_coordinates(kind)
    plain = projected()
    held_out = (plain.x > 1.2e5).transpose("x").values
    label = np.broadcast_to(~held_out, (16, 18)).astype("u1")
    places = [dim for dim in ds.a.dims if dim != "time"]
    shaped = label.ravel() if len(places) == 1 else label
    report = leakage_report(ds.assign(split=(places, shaped)), var="a")
    assert report.distances["space"][0] == "km"
    expected = np.sort(np.tile(np.repeat(10.0 * np.arange(1, 6), 16), 20))
    curve = np.sort(report.distances["space"][1]["test → train"])
    assert np.unique(curve).tolist() == pytest.approx(np.unique(expected).tolist())
    assert np.mean(curve) == pytest.approx(30, rel=0.1)


def test_distances_of_other_frames_are_not_compared():
    ds = assign_location_split(projected(), seed=1)
    elsewhere = smooth_cube(shape=(20, 6, 6))
    verdict = leakage_report(ds, elsewhere.rename(t2m="a")).verdict
    assert (
        "distances in space were not compared because the cube has x and y of a projection, but "
        "the deployment has latitudes and longitudes" in verdict
    )


# ------------------------------------------------------------------ duplicates


@pytest.mark.slow
def test_scenarios_that_share_their_past_are_found():
    runs = []
    for name in ("A1B", "E1"):
        with xr.open_dataset(Path(iris_sample_data.path) / f"{name}_north_america.nc") as ds:
            runs.append(ds["air_temperature"].load().drop_vars("forecast_reference_time"))
    scenarios = xr.concat(runs, "scenario").to_dataset(name="t2m")
    same = (scenarios.t2m[0] == scenarios.t2m[1]).all(["latitude", "longitude"]).values
    years = scenarios.time.dt.year.values
    assert (same == (years <= 1999)).all()
    one_each = scenarios.assign(split=("scenario", np.array([1, 0], "u1")))
    for cube in (
        one_each,
        one_each.chunk({"time": 50, "latitude": 20, "longitude": 30}),
        one_each.transpose("longitude", "time", "scenario", "latitude"),
        one_each.isel(time=slice(None, None, -1)),
        one_each.assign_coords(scenario=["A1B", "E1"]),
    ):
        report = leakage_report(cube)
        assert report.leaks
        assert report.table.found["duplicate cells"] == sum(same) * 37 * 49
        for words in ("bitwise copies", "1860", "1999"):
            assert words in report.verdict
    # one scenario trains and tests in turn: nothing is shared
    later = leakage_report(one_each.isel(time=years > 1999))
    assert later.table.found["duplicate cells"] == 0
    # the same region held out in both: what is equal is held out together
    region = (scenarios.longitude > 280).astype("u1").drop_attrs()
    both = leakage_report(scenarios.assign(split=1 - region))
    assert both.table.found["duplicate cells"] == 0


def slow_duplicates(values, labels):
    """Held-out cells of steps that equal another step, whose twin cell trains: pair by pair."""
    found = np.zeros(labels.shape, dtype=bool)
    for i, j in itertools.permutations(range(len(values)), 2):
        if np.array_equal(values[i], values[j], equal_nan=True):
            found[i] |= np.isin(labels[i], (0, 2)) & (labels[j] == 1)
    return int(found.sum())


@pytest.mark.slow
@settings(max_examples=25)
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
    ds = assign_time_split(noise(time=500).assign_coords(coordinates({"time": 500})), 0.8, gap=5)
    for change, copies in ((0, 40), (1e-9, 0)):
        ds.a[450:490] = ds.a.values[17:57] + change
        report = leakage_report(ds)
        assert report.table.found["duplicate cells"] == copies
        assert report.leaks == (copies > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "backward", "gap"),
    [
        (60, False, 3),
        pytest.param(60, True, 0, marks=pytest.mark.soak),
        pytest.param(700, False, 0, marks=pytest.mark.soak),
        (700, True, 3),
    ],
)
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
    whole = ds.assign(t2m=filled)
    for cube in (whole, whole.chunk({"time": 50, "lon": 11}), whole.transpose("lon", ...)):
        report = leakage_report(cube)
        assert report.leaks
        assert report.table.found["cells carried forward"] == pytest.approx(0.24, abs=0.04)
        assert report.table.found["duplicate cells"] == 0
        assert "have the value of the adjacent train step" in report.verdict
    clean = leakage_report(ds)
    assert not clean.leaks
    assert clean.table.found["cells carried forward"] < 0.001
    assert clean.table.status["cells carried forward"] == "ok"


def test_what_stands_still_by_nature_is_not_carried_on():
    ds = smooth_cube(shape=(48, 20, 30))
    dry = ds.t2m.where((ds.t2m > 0.5) & (np.arange(48) < 30)[:, None, None], 0.0)  # a dry season
    weekly = ds.t2m.isel(time=np.arange(48) // 7 * 7)
    height = ds.t2m[0].broadcast_like(ds.t2m).transpose(*ds.t2m.dims)
    whole = (ds.t2m * 3).round().astype("i2")
    for values in (dry, weekly, height, whole):
        made = assign_time_split(ds.assign(t2m=(ds.t2m.dims, values.values)), 0.7, gap=2)
        table = leakage_report(made).table
        assert table.status["cells carried forward"] == "ok"
    regions = leakage_report(assign_region_split(ds, regions_of(ds, "lon", 10), test=[1]))
    assert "cells carried forward" not in regions.table.index


def test_a_verdict_says_what_was_compared():
    ds = assign_time_split(smooth_cube(shape=(30, 20, 30)), 0.8, gap=12)
    report = leakage_report(ds)
    assert "10 lat x 15 lon cells" in report.table.meaning["duplicate cells"]
    assert "no tiles of 10 lat x 15 lon cells are copies of those in train" in report.verdict
    unread = leakage_report(ds.assign(t2m=ds.t2m.astype(complex)), var="t2m")
    assert "nothing could be compared for copies" in unread.verdict


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


@pytest.mark.parametrize("n", [10, 30])
def test_stations_whose_values_repeat_are_not_copies_of_others(n):
    values = np.tile(np.random.default_rng(0).normal(size=(12, n)), (5, 1))
    ds = xr.Dataset({"a": (("time", "station"), values)}, coordinates({"time": 60}))
    held_out = np.arange(n) < n // 5
    held_out_late = held_out & (np.arange(60)[:, None] >= 48)
    for label, copies in (
        (("station", ~held_out), 0),
        ((("time", "station"), ~held_out_late), 12 * (n // 5)),
    ):
        found = leakage_report(ds.assign(split=label)).table.found
        assert found["duplicate cells"] == copies


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
    assert are_informative(table).tolist() == [False, False, True]
    swapped = np.array([[c.sum() for c in fingerprint_columns(cells[2][::-1].copy(), place)]])
    assert swapped[0, 0] != table[2, 0]  # the same values in another order
    field, axes = cells[2].reshape(10, 10), [np.arange(10)] * 2
    for other in (field.T, field[::-1], field[:, ::-1], np.roll(field, 1, axis=1)):
        first, second = ([c.sum() for c in fingerprint_columns(f, axes)] for f in (field, other))
        assert [a == b for a, b in zip(first, second, strict=True)] == [False] * 2 + [True] * 3
    assert (combine([table, swapped.repeat(3, 0)]) != combine([swapped.repeat(3, 0), table])).any()


# ------------------------------------------------------------------ separation


def slow_nearest(point, boxes, scale, period):
    """Go through all cells of all boxes."""
    ranges = [map(range, low, high + 1) for low, high in boxes]
    apart = np.abs(np.array([cell for box in ranges for cell in itertools.product(*box)]) - point)
    around = np.where(period, np.minimum(apart, period - apart), apart)
    return np.sqrt(((around / scale) ** 2).sum(axis=1)).min()


def test_nearest_box_is_that_of_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(20):
        low = rng.integers(0, 15, size=(12, 2))
        high = np.minimum(low + rng.integers(0, 5, size=(12, 2)), 19)
        points = rng.integers(0, 20, size=(30, 2))
        scale = [1.5, [4.0, np.inf][trial % 2]]
        period = np.array([20 * (trial % 3 == 0), 0])
        found, steps = nearest_box(points, low, high, scale, period)
        boxes = list(zip(low, high, strict=True))
        expected = [slow_nearest(p, boxes, scale, period) for p in points]
        np.testing.assert_allclose(found, expected)
        np.testing.assert_allclose(found, np.sqrt(((steps / scale) ** 2).sum(axis=1)))


def test_runs_and_pieces():
    part = np.array([[1, 1, 0, 1], [0, 1, 0, 1]], bool)
    widths = [np.array([2, 3]), np.array([1, 1, 1, 4])]
    rows, columns = run_lengths(part, widths, [0, 0])
    assert rows.tolist() == [[2, 5, 0, 5], [0, 5, 0, 5]]
    assert columns.tolist() == [[2, 2, 0, 4], [0, 1, 0, 4]]
    left, right = 2 + 2 + 3, 8 + 12
    expected = (left + right) ** 2 / (left**2 + right**2)
    assert effective_pieces(part, np.multiply.outer(*widths)) == pytest.approx(expected)
    winding = np.ones((41, 41), bool)
    winding[1::4, :-1] = winding[3::4, 1:] = False
    assert effective_pieces(winding, np.ones(winding.shape, int)) == 1
    # Around the globe; the last column may repeat the first.
    part = np.array([[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]], bool)
    widths = [np.array([1, 1]), np.array([2, 3, 1, 3, 1])]
    for period, across in {10: 3, 9: 2}.items():
        _, columns = run_lengths(part, widths, [0, period])
        assert columns.tolist() == [[across, 0, 1, 0, across], [0, 4, 4, 0, 0]]
    whole = run_lengths(np.ones((1, 2), bool), [np.array([1]), np.array([4, 6])], [0, 10])
    assert whole[1].max() == 10
    sizes = np.multiply.outer(*widths)
    assert effective_pieces(part, sizes, [1]) == pytest.approx(8**2 / (3**2 + 5**2))
    assert effective_pieces(part, sizes) == pytest.approx(8**2 / (2**2 + 1 + 5**2))


@pytest.mark.parametrize("cells_at_once", [1, 4, 24, 10**6])
def test_a_label_looked_at_in_slabs_has_the_runs_and_counts_of_the_whole(
    monkeypatch, cells_at_once
):
    monkeypatch.setattr(validity, "_CELLS_AT_ONCE", cells_at_once)
    label = np.ones((9, 12), "u1")
    label[3:6, 4:], label[6, 8:] = 0, 255
    layout = Layout.of(xr.DataArray(label, dims=("lat", "lon")), ("lat", "lon"))
    assert {dim: starts.tolist() for dim, starts in layout.run_starts.items()} == {
        "lat": [0, 3, 6, 7],
        "lon": [0, 4, 8],
    }
    assert layout.counts == {1: 80, 2: 0, 0: 24, 255: 4}


def test_separation_is_counted_in_cells():
    label = np.repeat([1, 255, 0], [50, 10, 40]).astype("u1")
    found = leakage_report(noise(x=100).cumsum("x").assign(split=("x", label))).table.found
    assert found["separation along x"] == pytest.approx(30, abs=3)
    exact = {"block along x": 40, "excluded cells": 10, "touching cells": 0, "pieces": 1}
    assert found[list(exact)].to_dict() == exact


@pytest.mark.parametrize("shape", [(18,), (7, 9), (4, 5, 6), (60, 70)])
def test_few_test_cells_are_counted_each(shape):
    rng = np.random.default_rng(0)
    dims = tuple("zyx"[-len(shape) :])
    for _ in range(5):
        label = rng.choice([0, 1, 255], shape, p=[0.2, 0.1, 0.7]).astype("u1")
        label.flat[0] = 1
        ds = xr.Dataset({"a": (dims, rng.normal(size=shape)), "split": (dims, label)})
        train, test = np.argwhere(label == 1), np.argwhere(label == 0)
        apart = np.sqrt(((test[:, None] - train[None]) ** 2).sum(axis=-1)).min(axis=1)
        touching = leakage_report(ds).table.found["touching cells"]
        assert touching == pytest.approx((apart <= 1).mean(), abs=1e-12)


def in_time(times, dim="time", **coords):
    """A cube of one dim, the last third of whose 30 steps is its test part."""
    ds = xr.Dataset({"a": (dim, np.random.default_rng(0).random(30))}, {dim: times})
    ds = ds.assign_coords({name: (dim, values) for name, values in coords.items()})
    return ds.assign(split=(dim, np.arange(30) < 20))


STEPS = np.arange(30)
DAYS = pd.date_range("2000", periods=30).values
SOME_DAYS = np.where(STEPS == 3, np.datetime64("NaT"), DAYS)
LATER = DAYS[-1:] + np.timedelta64(3, "D")
FAR = np.array(["2030-01-01"], "M8[ns]")
MIXED = [cftime.DatetimeNoLeap(2000, 1, 1), *[cftime.Datetime360Day(2000, 1, 1)] * 29]
CFTIMES = xr.date_range("2000", periods=30, use_cftime=True, calendar="standard")


def years(first, step, unit):
    return (np.datetime64(first, "Y") + step * STEPS).astype(f"M8[{unit}]")


@pytest.mark.parametrize(
    ("cube", "use", "apart", "unit"),
    [
        (in_time(STEPS), at(time=[50]), 21, "units of time"),
        (in_time(STEPS, when=MIXED), at(time=[50]), 21, "units of time"),
        (in_time(("time", STEPS, {"units": "days since 2000"})), None, 5.5, "days"),
        (in_time(pd.Index(STEPS, dtype="Int64")), at(time=[50]), 21, "units of time"),
        (in_time(DAYS), at(time=LATER), 3, "days"),
        (in_time(STEPS, start=DAYS), at(time=LATER), 3, "days"),
        (in_time(STEPS, init=np.repeat(DAYS[::10], 10), valid=DAYS), at(valid=LATER), 3, "days"),
        (in_time(STEPS, a_time=SOME_DAYS, valid=DAYS), at(valid=LATER), 3, "days"),
        (in_time(STEPS, a_time=np.roll(DAYS, 3), valid=DAYS), at(valid=LATER), 3, "days"),
        (in_time(STEPS, start=np.roll(DAYS, 3)), at(time=[50]), 21, "units of time"),
        (in_time([f"step {i}" for i in STEPS], date=DAYS), at(time=LATER), 3, "days"),
        (in_time(STEPS, "obs", time=SOME_DAYS), None, 5.5, "units of obs"),
        (in_time(years("1850", 12, "ns")), None, 24105.5, "days"),
        (in_time(years("0850", 1, "s")), at(time=FAR), 420394, "days"),
        (in_time(CFTIMES), at(time=FAR), 10929, "days"),
    ],
)
def test_times_are_those_of_the_axis_that_orders_the_steps(cube, use, apart, unit):
    row = "test → train, time" if use is None else "deployment → train, time"
    table = leakage_report(cube, use).table
    assert table.found[row] == apart
    assert table.unit[row] == unit


def test_steps_of_unordered_numbers_are_those_between_neighbours():
    order = np.random.default_rng(0).permutation(36)
    ds = noise(time=36).assign(split=("time", order < 24)).assign_coords(time=2000 + 3 * order)
    found = leakage_report(ds, at(time=[2000 + 3 * 40])).table.found
    assert found["deployment → train, time"] == 3 * (40 - 35)
    assert found["test → train, time"] == 3 * 6.5


def test_dates_of_stations_are_no_times():
    places = {"lat": ("st", np.linspace(40, 50, 8)), "lon": ("st", np.linspace(0, 10, 8))}
    places["installed"] = ("st", pd.date_range("1990", periods=8, freq="YS").values)
    bare = assign_time_split(noise(time=30, st=8).assign_coords(places), 2 / 3)
    ds = bare.assign_coords(time=np.arange(30))
    assert leakage_report(ds, at(time=[50])).table.found["deployment → train, time"] == 21
    assert leakage_report(ds).table.unit["test → train, space"] == "km"
    assert leakage_report(bare).table.unit["test → train, time"] == "steps"
    with pytest.raises(InvalidValueError, match=r"compared with the cube: the cube has no times"):
        leakage_report(bare, at(time=[31]))


def test_a_label_of_dims_that_were_renamed_picked_or_stacked_is_judged():
    ds = noise(time=30, lat=6, lon=6)
    blocks, steps = assign_block_split(ds, {"time": 5, "lat": 3}), assign_time_split(ds, 0.7, gap=2)
    for other, same in (
        (blocks, blocks.rename(lat="latitude")),
        (blocks, blocks.assign_coords(time=[f"step {i}" for i in range(30)])),
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
    with pytest.raises(InvalidTypeError, match=r"boolean.*fillna\(False\).astype\(bool\)"):
        assign_block_split(ds, {"x": 1}, valid=ds.ok)
    assign_block_split(ds, {"x": 1}, valid=ds.ok.fillna(False).astype(bool))


def test_variables_of_dtypes_of_pandas_are_left_out():
    frame = pd.DataFrame({"t": np.random.default_rng(0).normal(size=40)}).rename_axis("time")
    label = {"split": ("time", [1] * 30 + [0] * 10)}
    expected = leakage_report(frame.to_xarray().assign(label)).table
    frame["ok"] = pd.array([True] * 39 + [None], "boolean")
    pd.testing.assert_frame_equal(leakage_report(frame.to_xarray().assign(label)).table, expected)


def test_all_around_the_globe_nothing_lies_to_one_side():
    sizes = {"time": 6, "lat": 8, "lon": 60}
    ds = noise(**sizes).assign_coords(coordinates(sizes))
    for column in (0, 5):
        table = leakage_report(ds.assign(split=("lon", np.arange(60) != column))).table
        assert table.found["touching cells"] == 1
        assert "gap along lon" not in table.index


# ------------------------------------------------------------------ distances


STEP, ROW = np.arange(24), np.arange(30)
CELLS = ("time", "lat", "lon")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "train"),
    [
        pytest.param(CELLS, lambda t2m, rng: rng.random(t2m.shape) < 0.8, id="random cells"),
        pytest.param(CELLS[1:], lambda _, rng: rng.random((30, 30)) < 0.8, id="random columns"),
        pytest.param("time", lambda *_: STEP % 5 != 0, id="every fifth step"),
        pytest.param(
            CELLS,
            lambda t2m, rng: (t2m + rng.normal(0, 9, t2m.shape)).cumsum(0) < 0,
            id="by a value that rises",
        ),
    ],
)
def test_labels_by_hand_that_leave_test_cells_among_train_are_warned_of(dims, train):
    ds = smooth_cube(shape=(24, 30, 30))
    label = train(ds.t2m.values, np.random.default_rng(0))
    report = leakage_report(ds.assign(split=(dims, label.astype("u1"))))
    assert SCATTERED in report.verdict
    assert report.judgement == "undecided"


def test_labels_by_hand_of_what_lies_outside_of_train_are_not():
    ds = smooth_cube(shape=(24, 30, 30))
    rows = xr.DataArray(np.isin(ROW, [11, 12]), dims="lat")
    for outside in (
        ds.assign(split=("time", STEP < 23)),
        ds.assign(split=("lat", ROW < 29)),
        assign_region_split(ds, rows),
        ds.assign(split=("time", STEP != 11)),
    ):
        assert not leakage_report(outside).findings


def slow_distances(asked, train):
    """Each cell by itself: nearest time that trains, nearest place then, and at any time."""
    apart = []
    for place, time in asked:
        wait = min(abs(time - other) for _, other in train)
        then = [there for there, other in train if abs(time - other) == wait]
        at_any_time = [there for there, _ in train]
        km = [
            6371.0 * haversine_distances(np.deg2rad([place]), np.deg2rad(places)).min()
            for places in (then, at_any_time)
        ]
        apart.append((km[0], wait, km[1]))
    return np.array(apart)


def placed(kind, rng):
    """A cube with gaps and a label, and a deployment, on one kind of places; and their cells."""
    if kind == "grid":
        axes = {"lat": np.linspace(60, 85, 7), "lon": np.linspace(-180, 150, 9)}
        sizes, lat, lon = (7, 9), *np.meshgrid(*axes.values(), indexing="ij")
        coords, dims = axes, ("lat", "lon")
    elif kind == "stations":
        sizes, dims = (40,), ("station",)
        lat, lon = rng.uniform(-60, 60, 40), rng.uniform(0, 360, 40)
        coords = {"Longitude": (dims, lon), "lat": (dims, lat)}
    else:
        sizes, dims = (6, 8), ("y", "x")
        lat, lon = rng.uniform(50, 90, sizes), rng.uniform(-180, 180, sizes)
        coords = {"nav_lat": (dims, lat, {"units": "degrees_north"})}
        coords["nav_lon"] = (dims, lon, {"units": "degrees_east"})
    dates = np.datetime64("2000-01-01", "ns") + np.array([0, 3, 4, 11]) * np.timedelta64(1, "D")
    values = rng.normal(size=(4, *sizes))
    values[rng.random(values.shape) < 0.4] = np.nan
    label = rng.choice([0, 1, 255], values.shape, p=[0.3, 0.2, 0.5]).astype("u1")
    label[2] = 0
    dims = ("time", *dims)
    ds = xr.Dataset({"a": (dims, values), "split": (dims, label)}, {"time": dates, **coords})
    use = ds.drop_vars("split").assign_coords(time=dates + np.timedelta64(5, "D"))
    use = use.where(rng.random(values.shape) < 0.3)

    def cells(where, delay=0):
        days = np.array([0, 3, 4, 11]) + delay
        return [((lat[tuple(at)], lon[tuple(at)]), days[i]) for i, *at in np.argwhere(where)]

    there = ~np.isnan(values)
    parts = [cells((label == code) & there) for code in (1, 0)]
    return ds, use, *parts, cells(np.isfinite(use.a.values), 5), cells(there)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "stations", "curvilinear"])
def test_distances_are_those_of_brute_force(kind):
    ds, use, train, test, asked, labelled = placed(kind, np.random.default_rng(1))

    found = leakage_report(ds, use).distances
    assert (found["space"][0], found["time"][0]) == ("km", "days")
    for name, cells, trained in (
        ("test → train", test, train),
        ("deployment → train", asked, labelled),  # the model in use is trained on all of them
    ):
        truth = slow_distances(cells, trained)
        for column, domain in enumerate(("space", "time", "space at any time")):
            curve = np.sort(found[domain][1][name])
            np.testing.assert_allclose(curve, np.sort(truth[:, column]), rtol=1e-6, atol=1e-5)
    lazy = leakage_report(ds.chunk(time=2).transpose(..., "time"), use.chunk(time=3)).distances
    for domain, (_, curves) in found.items():
        for name, curve in curves.items():
            np.testing.assert_array_equal(lazy[domain][1][name], curve)


def test_vertices_of_cells_are_not_their_locations():
    """As ``decode_coords="all"`` opens them: latitudes too, along a dim that the cube lacks."""
    cubes = placed("curvilinear", np.random.default_rng(1))[:2]
    found = leakage_report(*cubes).distances["space"][1]
    names = ("nav_lat", "nav_lon")
    with_vertices = [
        ds.assign_coords({f"{name}_vertices": ds[name].expand_dims(v=4, axis=-1) for name in names})
        for ds in cubes
    ]
    for name, curve in leakage_report(*with_vertices).distances["space"][1].items():
        np.testing.assert_array_equal(curve, found[name])


def test_names_of_copied_members_are_written_in_full():
    ds = noise(run=3, lat=30, lon=30).isel(run=[0, 1, 0])
    ds = ds.assign_coords(run=[f"historical-{i}" for i in "abc"])
    report = leakage_report(ds.assign(split=("run", np.array([1, 1, 0], "u1"))))
    assert "(run historical-c)" in report.verdict


def test_a_hole_in_the_data_is_no_train_cell():
    field = made_field([40, 40], [30, 30], "exponential", 0)
    coords = {"lat": np.linspace(-20, 19, 40), "lon": np.linspace(0, 39, 40)}
    full = xr.Dataset({"y": (("lat", "lon"), field)}, coords)
    hole = (np.abs(full.lat) < 15) & (np.abs(full.lon - 19) < 15)
    for ds in (full.where(~hole), full.where(~hole).chunk(lat=7)):
        report = leakage_report(random_split(ds), full.where(hole))
        assert report.judgement == "too easy"
        assert report.table.found["deployment → train, space"] > 400
        parts = ["train cells", "test cells"]
        assert report.table.found[parts].sum() == 1600 - hole.sum()
        assert report.table.found["cells without a value"] == hole.sum()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_cells_fit_interpolation_and_blocks_are_too_hard_for_it(seed):
    field = made_field([60, 60], [30, 30], "exponential", seed)
    coords = {"lat": np.linspace(30, 50, 60), "lon": np.linspace(0, 20, 60)}
    full = xr.Dataset({"y": (("lat", "lon"), field)}, coords)
    known = full.where(np.random.default_rng(seed).random((60, 60)) < 0.1)
    honest = leakage_report(random_split(known, seed=seed), full)
    assert honest.judgement == "fits"
    assert honest.table.loc["promised error"].found == pytest.approx(1, abs=0.08)
    hard = assign_block_split(known, {"lat": 10, "lon": 10}, 0.8, seed=seed, valid="y")
    report = leakage_report(hard, full)
    assert report.judgement in ("too hard", "undecided")  # the map holds few independent pieces
    assert report.table.found["promised error"] > 1.2
    # for a region that nothing is known of, the same random split is too easy
    elsewhere = full.assign_coords(lon=full.lon + 60)
    assert leakage_report(random_split(known, seed=seed), elsewhere).judgement in (
        "too easy",
        "undecided",  # if the variogram has no sill within half of the map
    )


@pytest.mark.slow
def test_what_was_not_compared_is_said():
    ds = assign_time_split(smooth_cube(shape=(30, 20, 30)), 0.8, gap=3)
    first = ds.isel(time=0, drop=True)
    for use, domain, why in (
        (first, "time", "the deployment has no times"),
        (first.assign_coords(lon=ds.lon + 80), "time", "the deployment has no times"),
        (at(time=ds.time.values[-3:]), "space", "the deployment has no latitude"),
        (ds.isel(time=[-1]).drop_vars(["lat", "lon"]), "space", "the deployment has no latitude"),
    ):
        report = leakage_report(ds, use)
        assert report.table.status[f"test against deployment, {domain}"] == "unknown"
        assert f"distances in {domain} were not compared because {why}" in report.verdict
        assert not report.leaks
    # one step of a cube is a deployment at that time
    last = leakage_report(ds, ds.isel(time=-1)).table.found
    assert last["deployment → train, time"] == 9
    assert last["deployment → train, space"] == 0


def test_a_deployment_decides_only_on_what_was_compared():
    known = random_split(smooth_cube(shape=(10, 12, 14)))
    nowhere = dict.fromkeys(("nav_lat", "nav_lon"), (("y", "x"), np.full((3, 3), np.nan)))
    unplaced = noise(y=3, x=3).assign_coords(nowhere)
    with pytest.raises(InvalidValueError, match=r"cannot be compared.*longitudes are missing"):
        leakage_report(known.isel(time=0, drop=True), unplaced)
    years = known.rename(time="year").assign_coords(year=range(10))
    for ds, domain in ((known.drop_vars(["lat", "lon"]), "space"), (years, "year")):
        report = leakage_report(ds, ds.drop_vars("split"))
        assert report.judgement == "undecided"
        assert "nothing is claimed of errors, because the split is cut along" in report.verdict
        assert f"distances in {domain} were not compared" in report.verdict


@pytest.mark.parametrize(
    ("deployment", "error", "words"),
    [
        (3, InvalidTypeError, "must be a Dataset, a DataArray or a path, got int"),
        (at(depth=[1.0]), InvalidValueError, "the deployment has no times"),
        (at(lat=[91.0], lon=[3.0]), InvalidValueError, "degrees from -90 to 90 in 'lat'"),
        (at(lat=[np.nan], lon=[3.0]), InvalidValueError, "nan at 0"),
        (at(time=[2010.0]), InvalidValueError, "numbers.*but the cube has dates.*decode_cf"),
        (
            at(time=xr.date_range("2030", periods=3, calendar="360_day", use_cftime=True)),
            InvalidValueError,
            "the cube's calendar.*convert_calendar",
        ),
        (at(lat=[1.0], lon=[1.0]) * np.nan, InvalidValueError, "must have cells with a value"),
        (at(lat=[1.0], lon=[1.0]) > 0, InvalidValueError, r"only masks.*cube\.where\(mask\)"),
        (xr.Dataset(coords={"lat": [1.0]}), InvalidValueError, "deployment: the cube has no data"),
    ],
)
def test_deployments_that_fit_nothing(deployment, error, words):
    ds = assign_time_split(smooth_cube(shape=(20, 40, 20)), 0.7)
    with pytest.raises(error, match=words):
        leakage_report(ds, deployment)


def stations(rng, n=60, steps=40):
    """Stations in no order, of one smooth field."""
    lat, lon = rng.uniform(40, 60, n), rng.uniform(0, 30, n)
    waves = rng.normal(size=(3, steps))
    shape = np.stack([np.sin(lat / 6), np.cos(lon / 8), np.sin((lat + lon) / 9)])
    values = np.einsum("kt,ks->ts", waves, shape) + 0.1 * rng.normal(size=(steps, n))
    coords = {"lat": ("station", lat), "lon": ("station", lon)}
    coords["time"] = pd.date_range("2000", periods=steps)
    return xr.Dataset({"t2m": (("time", "station"), values)}, coords)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_stations_among_train_are_warned_of_in_whatever_order_they_stand(seed):
    rng = np.random.default_rng(seed)
    ds = stations(rng)
    blocks = np.arange(60) // 5  # consecutive ones, which lie anywhere
    test = [int(i) for i in rng.permutation(12)[:3]]
    for label in (np.isin(blocks, test), rng.permutation(60) < 12):
        report = leakage_report(ds.assign(split=("station", 1 - label.astype("u1"))))
        assert "touch a train cell" in report.verdict
        assert report.table.found["touching cells"] > 0.8
    west = (ds.lon < 8).astype(int)
    region = assign_region_split(ds, west.drop_vars(["lat", "lon"]), test=[1])
    order = np.argsort(ds.lon.values)
    for one in (region, region.isel(station=order)):
        assert not leakage_report(one).findings
    half = (ds.lon > 15).astype(int).drop_vars(["lat", "lon"])
    assert not leakage_report(ds.assign(split=half)).findings


def test_gaps_of_a_label_are_excluded():
    ds = smooth_cube(shape=(24, 12, 12))
    gaps, excluded = (
        leakage_report(ds.assign(split=("time", np.repeat([1, code, 0], [15, 3, 6])))).table
        for code in (np.nan, 255)
    )
    assert gaps.found["excluded cells"] == 432
    pd.testing.assert_frame_equal(gaps, excluded)


@pytest.mark.parametrize(
    ("label", "options", "error", "words"),
    [
        (np.arange(20) < 15, {"var": 1}, InvalidTypeError, "var must be a name"),
        (np.arange(20) < 15, {"var": ["a", 1]}, InvalidValueError, r"unknown variables \[1\]"),
        (np.arange(20) < 15, {"name": "part"}, InvalidValueError, "no label 'part'"),
        (np.ones(20, "u1"), {}, InvalidValueError, "must have test cells"),
        (np.zeros(20, "u1"), {}, InvalidValueError, "must have train cells"),
        (np.full(20, "a"), {}, InvalidTypeError, "must hold numbers .*got dtype <U1"),
        (np.arange(20) % 4, {}, InvalidValueError, r"must hold \[0, 1, 2\] or 255, got other"),
    ],
)
def test_variables_and_labels_that_cannot_be_judged(label, options, error, words):
    with pytest.raises(error, match=words):
        leakage_report(noise(time=20).assign(split=("time", label)), **options)


# ------------------------------------------------------------------ the object, and large cubes


@pytest.mark.slow
def test_paths_are_opened(tmp_path):
    ds = assign_time_split(smooth_cube(shape=(20, 10, 12)), 0.7, gap=2)
    ds.to_zarr(tmp_path / "cube.zarr")
    ds.drop_vars("split").isel(time=[-1]).to_netcdf(tmp_path / "use.nc")
    expected = leakage_report(ds, ds.isel(time=[-1]).drop_vars("split"))
    report = leakage_report(str(tmp_path / "cube.zarr"), tmp_path / "use.nc")
    assert report.verdict == expected.verdict
    for cubes in ((tmp_path / "nothing.zarr",), (ds, tmp_path / "nothing.nc")):
        with pytest.raises(StoreError, match=r"nothing\.(zarr|nc)"):
            leakage_report(*cubes)


@pytest.mark.slow
def test_the_object():
    ds = random_split(smooth_cube(shape=(20, 20, 30)))
    report = audit(ds)
    assert report.leaks is False
    assert isinstance(report.table, pd.DataFrame)
    assert set(report.table.columns) == {"found", "unit", "limit", "status", "meaning"}
    assert (report.table.meaning.str.len() > 0).all()
    assert report.table.index.name == "check"
    assert report.verdict.endswith(".")
    text = " ".join(str(report).split())
    assert report.verdict in text
    assert f"test cells: {report.table.found['test cells']:,.0f}," in text
    assert len(report.plot().axes) == 4
    assert audit(ds.rename(split="mine"), name="mine").verdict == report.verdict


@pytest.mark.parametrize("rows_of_gaps", [0, 4])
def test_copies_are_a_share_of_all_that_is_held_out(rows_of_gaps):
    label = np.repeat([1, 2, 0], [12, 5, 3]).astype("u1")
    ds = noise(time=20, y=8, x=8).assign(split=("time", label))
    ds.a[:, :rows_of_gaps] = np.nan
    ds.a[15] = ds.a[2]  # of val
    shares = leakage_report(ds).shares
    assert shares["bitwise copies of train (test and val)"] == 1 / 8
    assert "bitwise copies of train" in leakage_report(ds.isel(time=slice(0, 17))).shares


@pytest.mark.slow
def test_chunks_scheduler_and_order_of_dims_change_nothing():
    ds = assign_block_split(smooth_cube(shape=(20, 30, 40)), {"lat": 6, "lon": 8}, 0.8, val=0.1)
    plain = leakage_report(ds).table
    for other in (ds.chunk({"time": 7, "lat": 11, "lon": 9}), ds.transpose("lon", "lat", "time")):
        with dask.config.set(scheduler="synchronous"):
            table = leakage_report(other).table
        pd.testing.assert_frame_equal(table.loc[plain.index], plain)


@pytest.mark.slow
def test_a_cube_larger_than_its_budget_is_read_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(residuals, "CELLS_AT_MOST", 1 << 18)
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
    lat = np.array([0.0, 5, 10, np.nan, 20, 25, 30, 35])
    ds = noise(time=12, lat=8, lon=10).assign_coords(lat=lat, lon=np.arange(10.0))
    with pytest.raises(InvalidValueError, match=r"degrees from -90 to 90 in 'lat'.*nan at 3"):
        leakage_report(assign_block_split(ds, {"time": 2}, seed=1))


def test_latitudes_that_are_data_variables_are_refused():
    ds = assign_block_split(stations(np.random.default_rng(0)), {"station": 5}, seed=0)
    data = ds.reset_coords(["lat", "lon"])
    for cubes in ((data,), (ds, data.drop_vars("split"))):
        with pytest.raises(InvalidValueError, match=r"ds\.set_coords\(\['lat', 'lon'\]\)"):
            leakage_report(*cubes)
    mended = leakage_report(data.set_coords(["lat", "lon"])).table
    pd.testing.assert_frame_equal(mended, leakage_report(ds).table)


def test_copies_in_many_small_fields_are_not_more_than_there_are():
    """A sample of the tiles stands for all of them; a tile is in several groups of equal runs."""
    rng = np.random.default_rng(0)
    library = rng.normal(size=(10, 12, 2, 2))
    values = library[rng.integers(0, 10, 500)].reshape(-1, 2, 2)
    split = rng.integers(0, 2, values.shape).astype("u1")
    dims = ("time", "y", "x")
    cube = xr.Dataset({"a": (dims, values), "split": (dims, split)}, coordinates({"time": 6000}))
    found = leakage_report(cube).table.found["duplicate cells"]
    held_out = int((split == 0).sum())
    assert 0.9 * held_out < found <= held_out


def test_another_member_of_the_same_dates_is_no_leak_but_is_said():
    values = np.random.default_rng(0).normal(size=(5, 60, 4, 4)).cumsum(1)
    coords = {**coordinates({"time": 60}), "member": np.arange(5)}
    ds = xr.Dataset({"t": (("member", "time", "lat", "lon"), values)}, coords)
    ds = ds.assign_coords(lat=np.arange(4.0), lon=np.arange(4.0))
    labelled = assign_region_split(ds.isel(member=slice(4)), ds.member[:4], test=[3])
    text = "100 % of the test cells are at the location and time of a train cell of another member"
    report = leakage_report(labelled)
    assert not report.leaks
    assert text in report.verdict
    new = leakage_report(labelled, ds.isel(member=[4]))
    assert new.judgement == "fits"
    assert text in new.verdict


def test_cells_at_one_place_in_two_parts_are_found():
    """The first row of a grid with a fold has each place twice, in blocks of two parts."""
    lat, lon = np.meshgrid(np.linspace(80, 10, 12), np.linspace(0, 110, 24), indexing="ij")
    lon[0, 12:], lat[0, 12:] = lon[0, 11::-1], lat[0, 11::-1]
    values = np.random.default_rng(0).normal(size=(12, 24)).cumsum(0).cumsum(1)
    values[0, 12:] = values[0, 11::-1]
    part = np.repeat(np.array([[1, 0]], np.uint8), 12, axis=1).repeat(12, axis=0)
    coords = {"lat": (("y", "x"), lat), "lon": (("y", "x"), lon)}
    ds = xr.Dataset({"t": (("y", "x"), values), "split": (("y", "x"), part)}, coords)
    report = leakage_report(ds)
    assert report.leaks
    assert report.table.loc["cells at train locations", "found"] == pytest.approx(1 / 12)
    assert "8.3 % of the test cells are at the location and time of a train cell" in report.verdict
    few = leakage_report(ds.isel(y=slice(1, None)))
    assert few.table.loc["cells at train locations", "found"] == 0
