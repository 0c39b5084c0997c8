"""estimate_range recovers the range of made fields; suggest_block_size makes blocks as long."""

import copy
import logging
import math
import pickle
import re
import tracemalloc

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import honesty_ranges
from ml4cube.core.distance.variogram import pool, semivariances
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.splits import (
    assign_block_split,
    estimate_range,
    leakage_report,
    residuals,
    suggest_block_size,
)
from tests.cubes import coordinates

# by the distance in ranges
CORRELATIONS = {
    "exponential": lambda h: np.exp(-3 * h),
    "gaussian": lambda h: np.exp(-3 * h**2),
    "spherical": lambda h: np.where(h < 1 / 0.811, 1 - 1.5 * 0.811 * h + 0.5 * (0.811 * h) ** 3, 0),
    "matern-3/2": lambda h: (1 + 4.744 * h) * np.exp(-4.744 * h),
    "matern-5/2": lambda h: (1 + 5.918 * h + (5.918 * h) ** 2 / 3) * np.exp(-5.918 * h),
}


def made_field(shape, ranges, model, seed):
    """Gaussian random field on a torus (circulant embedding) of twice its size, or of five ranges.

    At a range its correlation is 0.05.
    """
    big = [max(2 * n, round(5 * r)) for n, r in zip(shape, ranges, strict=True)]
    squares = 0.0
    for axis, (n, r) in enumerate(zip(big, ranges, strict=True)):
        x = np.minimum(np.arange(n), n - np.arange(n)) / r
        squares = squares + x.reshape([-1 if a == axis else 1 for a in range(len(big))]) ** 2
    covariance = CORRELATIONS[model](np.sqrt(squares))
    power = np.clip(np.fft.fftn(covariance).real, 0, None)
    noise = np.random.default_rng(seed).normal(size=big)
    field = np.fft.ifftn(np.fft.fftn(noise) * np.sqrt(power)).real
    return field[tuple(slice(n) for n in shape)]


def with_gaps(field, seed, share=0.3):
    lost = np.random.default_rng(seed + 1000).random(field.shape) < share
    return np.where(lost, np.nan, field)


def with_peak_memory(function, *arguments):
    """The result, and the most bytes that were in use at once."""
    tracemalloc.start()
    result = function(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak


@pytest.mark.slow
@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "gaps"])
@pytest.mark.parametrize("model", CORRELATIONS)
@pytest.mark.parametrize(
    ("shape", "truth"),
    [
        ({"x": 6000}, {"x": 20}),
        ({"lat": 160, "lon": 200}, {"lat": 8, "lon": 14}),
        ({"time": 70, "lat": 40, "lon": 60}, {"time": 5, "lat": 6, "lon": 9}),
    ],
    ids=["1-D", "2-D", "3-D"],
)
def test_range_of_made_fields(shape, truth, model, gaps):
    for seed in range(2 if len(shape) < 3 else 1):
        field = made_field(list(shape.values()), list(truth.values()), model, seed)
        field = with_gaps(field, seed) if gaps else field
        ds = xr.Dataset({"a": (tuple(shape), field)}, coordinates(shape))
        found = estimate_range(ds, "a")
        assert found.keys() == truth.keys()
        for dim, cells in truth.items():
            assert found[dim] == pytest.approx(cells, rel=0.25), (seed, dim)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["exponential", "gaussian", "matern-3/2", "matern-5/2"])
def test_a_field_smaller_than_its_range_has_no_upper_end(model):
    for seed in range(2):
        for size in (60, 90):
            field = made_field([size, size], [90, 90], model, seed)
            ranges = estimate_range(xr.DataArray(field, dims=("y", "x")))
            for low, high in ranges.intervals.values():
                assert low < 90 < high == math.inf
            for dim, doubt in ranges.doubts().items():
                may_be_short = "may be too short" in doubt
                assert may_be_short == math.isfinite(ranges[dim])
                assert may_be_short or "the longest range to see" in doubt


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranges", "size"), [(4, 48), (10, 60)])
def test_intervals_hold_the_true_range(n_ranges, size):
    """See benchmarks/honesty_ranges.py for 3 to 30 ranges in series, maps and cubes."""
    cells, held = size / n_ranges, 0
    for seed in range(30):
        field = made_field([size, size], [cells, cells], "exponential", seed + 100)
        ranges = estimate_range(xr.DataArray(field, dims=("y", "x")))
        low, high = ranges.intervals["x"]
        held += low <= cells <= high
        if math.isfinite(ranges["x"]):
            assert low <= ranges["x"] <= high
    assert held >= 24


@pytest.mark.slow
@pytest.mark.parametrize("size", ["64 × 64", "48 × 96"])
@pytest.mark.parametrize("cells", [8, 24])
def test_blocks_of_isotropic_maps_are_square(size, cells):
    cases = [honesty_ranges.run(f"isotropic: {size}, range {cells}, seed {s}") for s in range(6)]
    assert all(max(case["sides"]) <= 1.5 * min(case["sides"]) for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [(12, 4), (24, 8), (8, 24)])
@pytest.mark.parametrize("model", ["exponential", "gaussian"])
def test_directions_that_differ_threefold_are_told_apart(cells, model):
    for seed in range(3):
        field = made_field((64, 64), cells, model, seed)
        ranges = estimate_range(xr.DataArray(field, dims=("y", "x")))
        (low_y, _), (low_x, _) = ranges.intervals["y"], ranges.intervals["x"]
        assert (low_y > low_x) == (cells[0] > cells[1])
        assert low_y != low_x


def test_one_dim_of_a_map_has_the_range_of_both():
    field = made_field([60, 90], [12, 12], "exponential", 0)
    cube = xr.DataArray(field, dims=("y", "x"))
    both = estimate_range(cube)
    assert both["y"] == both["x"]
    assert both.intervals["y"] == both.intervals["x"]
    assert estimate_range(cube, dims="x") == {"x": both["x"]}
    # Each has the semivariances of its own lines.
    assert len(both.variograms["y"].lags) < len(both.variograms["x"].lags)


@given(seed=st.integers(0, 1000), size=st.integers(8, 40))
def test_pooled_semivariances_are_those_of_all_lines_of_a_square(seed, size):
    rng = np.random.default_rng(seed)
    field = with_gaps(rng.normal(size=(size, size)), seed)
    positions = np.arange(float(size))
    pooled = pool(semivariances(field, positions), semivariances(field.T, positions))
    expected = semivariances(np.concatenate([field, field.T]), positions)
    for ours, theirs in zip(pooled, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("cells", [8, 24])
def test_the_interval_is_printed_and_a_wide_one_is_logged(cells, caplog):
    field = made_field([64, 64], [cells, cells], "exponential", 4)
    with caplog.at_level(logging.WARNING, "ml4cube"):
        ranges = estimate_range(xr.Dataset({"a": (("y", "x"), field)}))
    low, high = ranges.intervals["x"]
    if cells == 8:
        assert f"{low:.3g} to {high:.3g}" in repr(ranges)
        assert not caplog.records
    else:
        assert f"{low:.3g} or more" in repr(ranges)
        assert re.search(r"a along x: .*90 % interval.* or more", caplog.text)


def test_few_pairs_of_values_have_no_range():
    field = made_field([80, 80], [8, 8], "exponential", 0)
    for share, told in ((0.97, False), (0.6, True)):
        found = estimate_range(xr.DataArray(with_gaps(field, 0, share), dims=("y", "x")))
        assert [math.isfinite(cells) for cells in found.values()] == [told, told]
        if told:
            assert found["x"] == pytest.approx(8, rel=0.4)
        else:
            assert re.search(r"only \d+ distances? ha\w+ 30 pairs", found.reasons["x"])


def test_stations_are_not_cut_into_blocks_of_their_order():
    rng = np.random.default_rng(0)
    places = {"lat": ("station", rng.uniform(40, 50, 30)), "lon": ("station", rng.random(30))}
    line = made_field([300], [9], "exponential", 1)[:, None] + 0.1 * rng.normal(size=(300, 30))
    ds = xr.Dataset({"a": (("time", "station"), line)}, places)
    found = estimate_range(ds)
    assert math.isnan(found["station"])
    assert "lists stations" in found.reasons["station"]
    assert math.isfinite(found["time"])
    assert suggest_block_size(ds, min_blocks=40)["station"] == 30
    for cube, dims in ((ds, "station"), (ds.isel(time=0), None)):
        with pytest.raises(
            InvalidValueError, match=r"along 'station' are not regions.*assign_region_split"
        ):
            suggest_block_size(cube, "a", dims)


def slow_semivariances(line, positions, longest):
    """Every pair, one by one."""
    sums, counts = {}, {}
    for i in range(line.size):
        for j in range(i + 1, line.size):
            lag = max(math.floor(positions[j] - positions[i] + 0.5), 1)
            if np.isfinite(line[i]) and np.isfinite(line[j]) and lag <= math.floor(longest + 0.5):
                sums[lag] = sums.get(lag, 0.0) + (line[i] - line[j]) ** 2
                counts[lag] = counts.get(lag, 0) + 1
    return {lag: sums[lag] / counts[lag] / 2 for lag in sums}, counts


@pytest.mark.parametrize("axis", ["regular", "irregular", "with a hole"])
def test_semivariances_are_those_of_all_pairs(axis):
    rng = np.random.default_rng(3)
    line = with_gaps(rng.normal(size=40), 0)
    positions = {
        "regular": np.arange(40.0),
        "irregular": np.cumsum(rng.choice([0.5, 1.0, 1.0, 3.0], size=40)),
        "with a hole": np.sort(rng.uniform(0, 20, 40) + np.repeat([0, 1e6], 20)),
    }[axis]
    longest = float(positions[-1] - positions[0]) / 2
    lags, half, pairs = semivariances(line[None], positions)
    expected, counts = slow_semivariances(line, positions, longest)
    assert np.abs(lags - sorted(expected)).max() < 1
    np.testing.assert_allclose(half, [expected[lag] for lag in sorted(expected)], rtol=1e-12)
    assert pairs.tolist() == [counts[lag] for lag in sorted(counts)]


@pytest.mark.parametrize(
    ("values", "keywords"),
    [
        (np.arange(400.0), {"detrend": False}),
        (np.arange(400.0), {}),
        (np.arange(400.0) ** 2, {}),
        (np.random.default_rng(0).normal(size=400).cumsum(), {"detrend": False}),
        (np.arange(400, dtype="float32") * 0.1 + 1e4, {}),
        (np.arange(400), {}),
    ],
    ids=["trend", "trend taken off", "curve", "random walk", "float32", "integers"],
)
def test_a_trend_has_no_sill(values, keywords, caplog):
    with caplog.at_level(logging.WARNING, "ml4cube"):
        found = estimate_range(xr.Dataset({"a": ("x", values)}), "a", **keywords)
    assert math.isnan(found["x"])
    assert found.reasons["x"].startswith("no sill")
    assert "no sill" in caplog.text
    assert math.isnan(found.variograms["x"].range)


@pytest.mark.parametrize(
    "values",
    [
        np.full((6, 7), 3.5),
        np.full((6, 7), np.nan),
        np.full((6, 7), np.inf),
        np.ones((1, 1)),
        np.arange(4.0).reshape(2, 2),
        np.zeros((3, 50), dtype=bool),
        np.where(np.eye(30), 1.0, np.nan),
    ],
    ids=["constant", "all gap", "infinite", "one cell", "tiny", "bools", "lonely cells"],
)
def test_nothing_to_see_is_no_crash(values):
    found = estimate_range(xr.Dataset({"a": (("y", "x"), values)}), "a")
    assert set(found) == {"y", "x"}
    assert all(math.isnan(r) for r in found.values())
    assert all(found.reasons[dim].startswith("no sill") for dim in found)


@pytest.mark.parametrize("dtype", ["float32", "int16", ">f4", "uint8", "bool"])
def test_dtypes(dtype):
    field = made_field([80, 90], [8, 8], "gaussian", 1)
    scaled = field > 0 if dtype == "bool" else np.round(30 * field + 125)
    found = estimate_range(xr.DataArray(scaled.astype(dtype), dims=("y", "x")))
    whole = 8 if dtype == "bool" else estimate_range(xr.DataArray(field, dims=("y", "x")))["x"]
    assert found["x"] == pytest.approx(whole, rel=0.4 if dtype == "bool" else 0.1)


def test_a_season_and_a_trend_are_taken_off():
    n = 2400
    for calendar in (None, "360_day"):
        coords = coordinates({"time": n}, calendar)
        noise = made_field([n], [12], "exponential", 5)
        season = 5 * np.cos(2 * np.pi * np.arange(n) / (360 if calendar else 365.2425))
        values = noise + season + 0.01 * np.arange(n)
        ds = xr.Dataset({"a": ("time", values)}, coords)
        assert estimate_range(ds, "a")["time"] == pytest.approx(12, rel=0.25)
        # Dates may lie beside the dim.
        beside = ds.rename_dims(time="step").drop_indexes("time")
        assert estimate_range(beside, "a")["step"] == estimate_range(ds, "a")["time"]
        beside = beside.assign_coords(step=np.arange(n))
        assert estimate_range(beside, "a")["step"] == pytest.approx(12, rel=0.25)
        assert not estimate_range(ds, "a", deseason=False, detrend=False)["time"] < 40


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("slope", [1.0, 0.1])
def test_what_a_trend_leaves_by_rounding_has_no_range(slope, dtype):
    ds = xr.Dataset(coords=coordinates({"time": 24, "lat": 18, "lon": 36}))
    ds["time"] = xr.date_range("2000-01-01", periods=24, freq="MS")
    trend = (slope * np.arange(24)).astype(dtype)[:, None, None]
    ds["a"] = (("time", "lat", "lon"), np.broadcast_to(trend, (24, 18, 36)))
    found = estimate_range(ds)
    assert all(math.isnan(r) for r in found.values()), found
    assert f"no more than a few steps of {dtype}" in found.reasons["time"]
    assert "all values along it are equal" in found.reasons["lat"]


def test_a_few_steps_of_float32_are_not_equal_values():
    field = made_field([80, 90], [8, 8], "gaussian", 1)
    dims = ("y", "x")
    coarse = (1e5 + 0.05 * field / field.std()).astype("float32")  # a spread of 6 steps
    found = estimate_range(xr.DataArray(coarse, dims=dims))
    whole = estimate_range(xr.DataArray(field, dims=dims))
    assert found == pytest.approx(whole, rel=0.2)
    flicker = (1e5 + 0.003 * field / field.std()).astype("float32")
    for keywords in ({}, {"detrend": False, "deseason": False}):
        found = estimate_range(xr.DataArray(flicker, dims=dims), **keywords)
        assert math.isnan(found["x"])
        assert "no more than a few steps of float32" in found.reasons["x"]


def test_irregular_axes_count_in_median_steps():
    field = made_field([4000, 8], [20, 1], "gaussian", 2)
    kept = np.sort(np.random.default_rng(0).choice(4000, 2800, replace=False))
    coords = {"x": 0.25 * kept}
    found = estimate_range(xr.DataArray(field[kept], dims=("x", "y"), coords=coords))
    assert found["x"] == pytest.approx(20, rel=0.25)
    backwards = xr.DataArray(field[kept][::-1], dims=("x", "y"), coords={"x": 0.25 * kept[::-1]})
    assert estimate_range(backwards)["x"] == pytest.approx(20, rel=0.25)


@pytest.mark.slow
def test_order_of_dims_and_chunks_do_not_matter(monkeypatch):
    field = made_field([60, 50, 40], [8, 6, 5], "exponential", 0)
    ds = xr.Dataset({"a": (("time", "lat", "lon"), field)}, coordinates({"time": 60}))
    monkeypatch.setattr(residuals, "CELLS_AT_MOST", 20_000)  # so that a sample is read
    whole = estimate_range(ds, "a")
    assert estimate_range(ds.transpose("lon", "time", "lat"), "a") == whole
    assert estimate_range(ds.chunk({"time": 7, "lat": 50, "lon": 9}), "a") == whole
    assert list(estimate_range(ds, "a", ["lon", "lat"])) == ["lon", "lat"]
    for dim, cells in {"time": 8, "lat": 6, "lon": 5}.items():
        assert whole[dim] == pytest.approx(cells, rel=0.35)


@pytest.mark.slow
def test_a_sample_of_a_large_cube_is_read_in_bounded_memory():
    drawn = da.random.default_rng(0).normal(size=(200, 400, 400), chunks=(20, 200, 200))
    ds = xr.Dataset({"a": (("time", "y", "x"), drawn)})  # 256 MB
    found, peak = with_peak_memory(estimate_range, ds, "a", "time")
    assert found["time"] == 1.0
    assert peak < 150e6


@pytest.mark.parametrize(
    ("freq", "shape", "steps_of_a_cycle"),
    [
        ("2h", [13_140, 60], 12),  # a day; the steps of a sample lie days apart
        ("D", [731, 120], 365.2425),  # two years; the steps of a sample span a bit less
    ],
)
def test_cycles_are_removed_from_sampled_steps_too(freq, shape, steps_of_a_cycle, monkeypatch):
    monkeypatch.setattr(residuals, "CELLS_AT_MOST", 20_000)
    steps, places = np.ogrid[: shape[0], : shape[1]]
    wave = 5 * np.sin(2 * np.pi * (steps / steps_of_a_cycle + places / 60))
    times = xr.date_range("2000-01-01", periods=shape[0], freq=freq)
    field = made_field(shape, [1, 6], "exponential", 0)
    cube = xr.DataArray(field + wave, {"time": times}, ("time", "x"))
    assert estimate_range(cube, dims="x")["x"] == pytest.approx(6, rel=0.35)


@pytest.mark.parametrize(
    ("freq", "periods"), [("D", 730), ("2h", 8760), ("W", 104), ("MS", 24), ("ME", 24)]
)
def test_two_ordinary_years_are_two_years(freq, periods):
    times = xr.date_range("2021-01-01", periods=periods, freq=freq)
    days = (times - times[0]).days.to_numpy()
    noise = np.random.default_rng(0).normal(size=(periods, 50))
    season = 10 * np.cos(2 * np.pi * days / 365.2425)
    cube = xr.DataArray(noise + season[:, None], {"time": times}, ("time", "x"))
    assert estimate_range(cube, dims="time", detrend=False)["time"] == 1.0


@pytest.mark.parametrize("x", [[5.0, 6.0, 3.0], [0.0, 2.0, 1.0]])
def test_an_axis_out_of_order_is_assumed_to_be_equally_spaced(x, caplog):
    estimate_range(xr.DataArray([1.0, 2.0, 4.0], dims="x", coords={"x": x}))
    assert "x is not sorted" in caplog.text


def test_it_is_a_dict_that_knows_more():
    found = estimate_range(xr.Dataset({"a": ("x", made_field([500], [9], "gaussian", 0))}))
    assert isinstance(found, dict)
    assert dict(found) == {"x": found["x"]}
    again = pickle.loads(pickle.dumps(found))  # noqa: S301
    for other in (again, copy.copy(found), copy.deepcopy(found)):
        assert other == found
        assert other.variograms["x"].model == "gaussian"
    assert len(found.plot().axes) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"var": "b"}, "unknown variable 'b'"),
        ({"var": None}, "pass var to name one"),
        ({"var": ["a", "c"]}, r"name of one variable, got \['a', 'c'\]"),
        ({"dims": "z"}, r"unknown dims \['z'\]"),
        ({"var": "when"}, "datetime64"),
        ({"var": "scalar"}, "must have dims"),
        ({"min_blocks": 1}, "min_blocks must be at least 2, got 1"),
    ],
)
def test_errors(arguments, words):
    ds = xr.Dataset({name: ("x", np.zeros(9)) for name in ("a", "c")})
    ds = ds.assign(when=ds["a"].astype("datetime64[ns]"), scalar=1.0)
    find = suggest_block_size if "min_blocks" in arguments else estimate_range
    with pytest.raises((InvalidValueError, InvalidTypeError), match=words):
        find(ds, **{"var": "a", **arguments})


def test_values_too_large_to_be_squared_are_refused():
    field = made_field([80, 60], [6, 6], "gaussian", 0)
    assert estimate_range(xr.Dataset({"a": (("y", "x"), 1e140 * field)}))["x"] > 4
    with pytest.raises(InvalidValueError, match=r"'a' has values of .*fill value"):
        estimate_range(xr.Dataset({"a": (("y", "x"), 1e300 * field)}))


def blocks_along(cells, size):
    return [min(size, cells - start) for start in range(0, cells, size)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_as_long_as_the_range(seed):
    field = made_field([97, 101], [9, 14], "exponential", seed)
    ds = xr.Dataset({"a": (("lat", "lon"), field)})
    ranges = estimate_range(ds, "a")
    sizes = suggest_block_size(ds, "a", min_blocks=6)
    for dim in ("lat", "lon"):
        assert min(blocks_along(ds.sizes[dim], sizes[dim])) >= ranges[dim]
    assert math.prod(len(blocks_along(ds.sizes[d], sizes[d])) for d in sizes) >= 6
    labelled = assign_block_split(ds, sizes, 0.7)
    assert set(np.unique(labelled.split)) == {0, 1}


@pytest.mark.parametrize(
    ("sizes", "least"), [((200,), 5), ((48, 60), 7), ((24, 36, 48), 10), ((9, 500), 7)]
)
def test_blocks_of_values_without_a_range_still_have_an_inside(sizes, least):
    values = np.random.default_rng(0).normal(size=sizes)
    ds = xr.Dataset({"a": (("time", "y", "x")[-len(sizes) :], values)})
    found = suggest_block_size(ds, "a")
    inside = 1.0
    for dim, size in found.items():
        assert min(blocks_along(ds.sizes[dim], size)) >= min(least, ds.sizes[dim])
        inside *= 1 if size == ds.sizes[dim] else (size - 2) / size
    assert inside > 0.5
    touching = leakage_report(assign_block_split(ds, found, 0.7), var="a").table.found
    assert touching["touching cells"] <= 0.5


def test_too_few_blocks_are_told_in_plain_words(caplog):
    trend = np.add.outer(np.arange(60.0) ** 2, np.arange(40.0) ** 2)
    ds = xr.Dataset({"a": (("y", "x"), trend)})
    with caplog.at_level(logging.WARNING, "ml4cube"):
        sizes = suggest_block_size(ds, "a")
    assert "fewer than 10" in caplog.text
    assert "add a buffer" in caplog.text
    counts = [len(blocks_along(ds.sizes[dim], sizes[dim])) for dim in sizes]
    assert math.prod(counts) >= 10
    assert set(np.unique(assign_block_split(ds, sizes, 0.8, val=0.1).split)) == {0, 1, 2}


def test_a_dim_with_a_range_is_cut_before_one_without(caplog):
    field = made_field([300, 40], [30, 30], "gaussian", 1) + 3 * np.arange(40) ** 2
    sizes = suggest_block_size(xr.DataArray(field, dims=("y", "x")), min_blocks=8)
    assert sizes["x"] == 40
    assert sizes["y"] <= 50


def test_a_cube_too_small_for_blocks_is_told(caplog):
    with caplog.at_level(logging.WARNING, "ml4cube"):
        sizes = suggest_block_size(xr.DataArray(np.zeros((2, 3)), dims=("y", "x")))
    assert sizes == {"y": 2, "x": 3}
    assert "only 1 blocks as long as the range fit in the cube, fewer than 10. " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    [np.datetime64("9999-01-01", "s"), np.datetime64("2300-01-01", "s"), 9.96e36],
    ids=str,
)
def test_a_wide_hole_in_an_axis_takes_no_room(last):
    values = np.random.default_rng(0).normal(size=400)
    dated = isinstance(last, np.datetime64)
    first = np.datetime64("2000-01-01", "s") if dated else 0.0
    axis = np.append(first + np.arange(399), last)
    cube = xr.Dataset({"a": ("t", values)}, {"t": axis})
    found, peak = with_peak_memory(estimate_range, cube)
    assert peak < 20e6
    assert found.keys() == {"t"}
    suggest_block_size(cube)
    leakage_report(assign_block_split(cube, {"t": 20}))


def test_a_long_axis_takes_no_more_than_its_values():
    values = np.random.default_rng(0).normal(size=300_000)
    cube = xr.DataArray(values, {"x": np.arange(300_000.0)}, dims="x")
    assert with_peak_memory(estimate_range, cube)[1] < 30 * values.nbytes
