"""Statistics that keep dims, have a climatology, weights or quantiles."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube import preprocessing as pp
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.statistics import scale_parameters
from ml4cube.core.sums.fields import FieldStatistics, Moments
from ml4cube.core.sums.quantiles import Histogram
from tests import oracle
from tests.cubes import coordinates

SHAPE = {"time": 30, "level": 2, "lat": 4, "lon": 2}


def made_cube(calendar: str | None = None, seed: int = 0, dtype: str = "float32") -> xr.Dataset:
    """About every 25 days for two years: gaps, infinities, a cell of gaps, a constant cell."""
    rng = np.random.default_rng(seed)
    cells = rng.normal(280, 8, tuple(SHAPE.values())).astype(dtype)
    cells[rng.random(cells.shape) < 0.2] = np.nan
    cells[rng.random(cells.shape) < 0.02] = -np.inf
    cells[:, 0, 1, 1] = np.nan
    cells[:, 1, 2, 0] = 273.15
    ds = xr.Dataset({"t": (tuple(SHAPE), cells)}, coordinates(SHAPE, calendar))
    in_calendar = {"calendar": calendar or "standard", "use_cftime": calendar is not None}
    ds["time"] = xr.date_range("2001-11-20", periods=SHAPE["time"], freq="25D", **in_calendar)
    label = rng.choice(np.array([1, 1, 1, 0, 2, 255], "uint8"), tuple(SHAPE.values()))
    ds["split"] = (tuple(SHAPE), label)
    ds["height"] = (("lat", "lon"), rng.random((4, 2)))
    return ds


def cells_at(ds: xr.Dataset, weights: xr.DataArray, place: dict[str, Any], by: str | None) -> Any:
    """Values and weights of the train cells of one entry, one by one."""
    dates = [ds.indexes["time"][i] for i in range(ds.sizes["time"])]
    values, counted = [], []
    for index in itertools.product(*(range(n) for n in SHAPE.values())):
        at = dict(zip(SHAPE, index, strict=True))
        here = all(at[dim] == i for dim, i in place.items() if dim != by)
        in_group = by is None or oracle.group_of(dates[at["time"]], by) == place[by]
        if here and in_group and ds.split.values[index] == 1:
            values.append(float(ds.t.values[index]))
            counted.append(float(weights.values[index]))
    return values, counted


FORMS: list[dict[str, Any]] = [
    {"dims": ["time", "lat", "lon"]},
    {"dims": "time"},
    {"by": "month"},
    {"by": "season", "weights": "area"},
    {"dims": ["time", "lat", "lon"], "by": "season"},
    {"weights": "area"},
]
GIVEN_WEIGHTS = xr.DataArray(np.arange(8.0).reshape(2, 4), dims=["lon", "lat"])
WEIGHED_FORMS: list[dict[str, Any]] = [
    {"dims": ["lat", "time", "lon"], "weights": GIVEN_WEIGHTS},
    {"dims": ["time", "level"], "by": "season", "weights": GIVEN_WEIGHTS},
]


@pytest.mark.parametrize("calendar", [None, "360_day"])
@pytest.mark.parametrize("form", [*FORMS, *WEIGHED_FORMS])
def test_every_entry_has_the_moments_and_quantiles_of_its_train_cells(
    form: dict[str, Any], calendar: str | None
) -> None:
    ds = made_cube(calendar)
    weights = form.get("weights", xr.DataArray(1.0))
    weights = np.cos(np.deg2rad(ds.lat)) if isinstance(weights, str) else weights
    full = weights.broadcast_like(ds.t).transpose(*ds.t.dims)
    found = pp.Statistics.from_cube(ds, ["t"], **form, quantiles=[0.5])["t"]
    assert isinstance(found, FieldStatistics)
    by, along = form.get("by"), form.get("dims", list(SHAPE))
    kept = [dim for dim in SHAPE if dim not in ([along] if isinstance(along, str) else along)]
    assert found.dims == ((by, *kept) if by else tuple(kept))
    labels = found.labels[by] if by else [None]
    checked = 0
    for g, label in enumerate(labels):
        for index in itertools.product(*(range(SHAPE[dim]) for dim in kept)):
            place = dict(zip(kept, index, strict=True)) | ({by: label} if by else {})
            values, w = cells_at(ds, full, place, by)
            expected = oracle.weighted_moments(values, w)
            at = (g, *index) if by else index
            for name in ("count", "gaps", "infs", "min", "max"):
                np.testing.assert_equal(getattr(found, name)[at], float(expected[name]))
            for name in ("mean", "std"):
                np.testing.assert_allclose(
                    getattr(found, name)[at], float(expected[name]), rtol=1e-13, atol=1e-11
                )
            for p in (0.0, 0.25, 0.5, 0.9, 1.0):
                low, high = oracle.quantile_bounds(values, w, p)
                read, off = found.quantile(p)[at], found.quantile_error[at]
                assert (math.isnan(low) and math.isnan(read)) or low - off <= read <= high + off
            checked += expected["count"]
    assert checked == found.count.sum() > 50


def test_range_over_bins_bounds_the_error_and_fields_have_fewer_bins() -> None:
    cells = np.random.default_rng(0).lognormal(0, 2, 100_000)
    one = pp.Statistics.from_cube({"t": cells}, quantiles=[0.5])["t"]
    assert 0 < one.quantile_error <= 2 * np.ptp(cells) / 65_534
    for p in (0.01, 0.25, 0.5, 0.75, 0.99):
        exact = np.quantile(cells, p, method="inverted_cdf")
        assert abs(one.quantile(p) - exact) <= one.quantile_error
    assert one.quantile(0) == cells.min()
    assert one.quantile(1) == cells.max()
    many = pp.Statistics.from_cube(
        xr.Dataset({"t": (("x", "y"), cells.reshape(50, 2000))}), dims="x", quantiles=[0.5]
    )["t"]
    assert many.histogram.bins == 4096
    exact = np.quantile(cells.reshape(50, 2000), 0.75, axis=0, method="inverted_cdf")
    np.testing.assert_array_equal(many.quantile(0.75), exact)  # 50 values, a bin each
    assert (many.quantile_error == 0).all()
    wide = xr.Dataset({"t": (("x", "y"), np.broadcast_to(np.float32(1), (1, 2**21)))})
    with pytest.raises(InvalidValueError, match=r"2097152 entries.*GB"):
        pp.Statistics.from_cube(wide, dims="x", quantiles=[0.5])


def test_integers_and_other_repeated_values_have_exact_quantiles() -> None:
    rng = np.random.default_rng(3)
    for cells in (
        rng.integers(-30_000, 30_000, 200_000).astype("int16"),
        np.round(rng.gamma(0.2, 8, 100_000), 1).astype("float32"),
        rng.integers(0, 2, 1000).astype(bool),
        np.array([2.0**60, 2.0**60 + 256, -0.0, 1e-290, -1e150, 9.96921e36]),
    ):
        one = pp.Statistics.from_cube({"t": cells}, quantiles=[0.5])["t"]
        assert one.quantile_error == 0
        for p in (0.0, 0.1, 0.5, 0.9, 1.0):
            assert one.quantile(p) == np.quantile(cells, p, method="inverted_cdf")


FINITE = st.floats(-1e6, 1e6, width=32) | st.sampled_from(
    [0.0, -0.0, 273.15, 1e-30, 1e30, -1e30, 9.96921e36, 2.0**53 + 2, 5e-324, -5e-324, -1e-310]
)
PARTS_OF_CELLS = st.lists(st.lists(FINITE, min_size=1, max_size=8), min_size=2, max_size=5)


@pytest.mark.slow
@settings(max_examples=150)
@given(PARTS_OF_CELLS, st.randoms(), st.sampled_from([3, 4, 16]))
def test_histograms_merged_in_any_order_are_that_of_the_whole_bit_for_bit(
    parts: list[list[float]], random: Any, bins: int
) -> None:
    def counted(cells: list[float]) -> Histogram:
        return Histogram.of(np.array(cells), bins)

    random.shuffle(parts)
    merged = counted(parts[0])
    for part in parts[1:]:
        merged = merged.merge(counted(part))
    seen = np.array(list(itertools.chain(*parts)))
    whole = counted(seen.tolist())
    np.testing.assert_array_equal(merged.counts, whole.counts)
    np.testing.assert_array_equal(merged.edges, whole.edges)
    assert merged.exponent == whole.exponent
    # the finest bins that are not too many, and no quantile is farther off than one of them
    edges, counts = oracle.finest_bins(seen.tolist(), bins)
    assert whole.edges.tolist() == edges
    assert whole.counts.tolist() == counts
    for p in (0.0, 0.3, 0.5, 1.0):
        exact = np.quantile(seen, p, method="inverted_cdf")
        read = whole.quantile(p, seen.min(), seen.max())
        tiny = 0 < abs(exact) < 2.0**-960
        assert abs(read - exact) <= max(whole.width, np.finfo(float).tiny if tiny else 0)


def test_a_sum_of_weights_keeps_its_digits_among_gaps() -> None:
    x = np.zeros(2**18)
    x[1::4], x[::2] = 2.0, np.nan
    found = Moments.of(x, (0,), None, np.full(x.size, 0.7691032167529132))
    np.testing.assert_allclose(found.m2 / found.weight, 1.0, rtol=1e-14)


def test_ranges_that_overflow_are_counted() -> None:
    cells = [-1e308, 1e308, 0.0, 1.0, 2.0, 3.0]
    for bins in (3, 4, 5):
        found = Histogram.of(np.array(cells), bins)
        assert (found.edges.tolist(), found.counts.tolist()) == oracle.finest_bins(cells, bins)


# NaNs that raise a flag where one calculates with them; the first are R's NA and what is left of it
SIGNALING = [
    ("<f8", 0x7FF00000000007A2),
    (">f8", 0x7FF00000000007A2),
    ("<f4", 0x7F8007A2),
    (">f4", 0x7F8007A2),
    ("<f2", 0x7D01),
]


MADE_CELLS = {
    "continuous": lambda rng, n: rng.normal(280, 10, n),
    "of few values": lambda rng, n: rng.integers(0, 5_000, n) * 0.01 + 273.15,
    "skewed": lambda rng, n: np.where(rng.random(n) < 0.6, 0.0, rng.lognormal(0, 2, n)),
    "with a fill value": lambda rng, n: np.where(np.arange(n) == 77, 9.96921e36, rng.random(n)),
    "constant": lambda rng, n: np.full(n, 5.0),
    "all gaps": lambda rng, n: np.full(n, np.nan),
    "far off": lambda rng, n: rng.choice([2.0**60, 2.0**60 + 256, -1e-300, 1e300], n),
    "just below 0": lambda rng, n: np.where(rng.random(n) < 0.3, -5e-324, rng.random(n) * 1e8),
}


@pytest.mark.parametrize("kind", MADE_CELLS)
@pytest.mark.parametrize("weighed", [False, True])
def test_a_large_block_is_counted_as_its_parts_are(kind: str, weighed: bool) -> None:
    rng = np.random.default_rng(3)
    x = MADE_CELLS[kind](rng, 300_000)
    x[rng.random(x.size) < 0.2] = np.nan
    weights = rng.integers(1, 9, x.size).astype(float) if weighed else None
    whole = Histogram.of(x, 4_096, weights)
    merged = Histogram.empty((), 4_096, whole.counts.dtype)
    for part in np.array_split(np.arange(x.size), 5):  # each sorted at once
        merged = merged.merge(
            Histogram.of(x[part], 4_096, None if weights is None else weights[part])
        )
    assert whole.exponent == merged.exponent
    np.testing.assert_array_equal(whole.edges, merged.edges)
    np.testing.assert_array_equal(whole.counts, merged.counts)
    used = ~np.isnan(x)
    assert whole.counts.sum() == (used.sum() if weights is None else weights[used].sum())


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_block_cut_into_slabs_has_the_moments_of_the_whole(
    axes: tuple[int, ...], weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(280, 10, (40, 9, 20)).astype("f4")
    x[rng.random(x.shape) < 0.2] = np.nan
    x[3, 5, 7] = np.inf
    where = rng.random(x.shape) < 0.9
    weights = rng.integers(0, 4, x.shape) * 0.7691032167529132 if weighed else None
    whole = Moments.of(x, axes, where, weights)
    for name in ("_SLAB_CELLS", "_LEAST_ENTRIES"):
        monkeypatch.setattr(f"ml4cube.core.sums.fields.{name}", 50)
    found = Moments.of(x, axes, where, weights)
    for name in ("count", "gaps", "infs", "min", "max"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    for name in ("weight", "mean", "m2"):
        expected = getattr(whole, name)
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-11, atol=1e-18)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bits"), SIGNALING)
@pytest.mark.parametrize("gaps", [0.2, 0.9])
@pytest.mark.parametrize("size", [(5, 40), (3, 70_001), (150_001, 2)])
@pytest.mark.filterwarnings("error")
def test_signaling_nans_are_gaps(dtype: str, bits: int, size: tuple[int, int], gaps: float) -> None:
    rng = np.random.default_rng(5)
    # where few numbers are alike, it shows at once if some were forgotten
    cells = (rng.normal(3, 10, size) if gaps < 0.5 else rng.integers(-1, 2, size)).astype(dtype)
    missing = rng.random(size) < gaps
    missing[-1, -1] = True
    signaling = cells.copy()
    signaling.view(f"{dtype[:-2]}u{dtype[-1]}")[missing] = bits
    cells[missing] = np.nan
    assert np.isnan(signaling[-1, -1])
    for form in (
        {},
        {"dims": "x"},
        {"dims": ["x", "y"], "quantiles": [0.5]},
        {"dims": "y", "weights": xr.DataArray(np.arange(size[0]) % 3.0, dims="x")},
    ):
        a, b = (
            pp.Statistics.from_cube(xr.Dataset({"t": (("x", "y"), x)}), **form)
            for x in (cells, signaling)
        )
        assert a == b
        assert np.sum(b["t"].count) > 0


@pytest.mark.parametrize("quantiles", [(), (0.5,)])
@pytest.mark.parametrize("form", [*FORMS, {}])
def test_cells_outside_train_change_no_bit_of_any_form(form: Any, quantiles: Any) -> None:
    ds = made_cube()
    spoiled = ds.assign(t=xr.where(ds.split == 1, ds.t, np.float32(1e9)).astype("f4"))
    for chunks in (None, {"time": 7, "lat": 3}):
        a, b = (cube.chunk(chunks) if chunks else cube for cube in (ds, spoiled))
        stats = pp.Statistics.from_cube(a, ["t"], **form, quantiles=quantiles)
        assert pp.Statistics.from_cube(b, ["t"], **form, quantiles=quantiles) == stats
        assert stats.part == "train"


def assert_alike(found: Any, whole: Any) -> None:
    """Counts and ranges are the same bits, moments the same numbers, in any order of dims."""
    order = [found.dims.index(dim) for dim in whole.dims]
    for name in ("count", "gaps", "infs", "min", "max"):
        np.testing.assert_array_equal(getattr(found, name).transpose(order), getattr(whole, name))
    for name in ("mean", "std"):
        close = getattr(found, name).transpose(order)
        np.testing.assert_allclose(close, getattr(whole, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [{"time": 7, "lat": 3}, {"lon": 1, "level": 1}])
def test_chunks_orders_and_schedulers_do_not_matter(form: Any, chunks: Any) -> None:
    ds = made_cube()
    form = {**form, "quantiles": [0.5]}
    plain = pp.Statistics.from_cube(ds, ["t"], **form)["t"]
    lazy = ds.transpose("lon", "time", "lat", "level", missing_dims="ignore").chunk(chunks)
    with dask.config.set(scheduler="synchronous"):
        one = pp.Statistics.from_cube(lazy, ["t"], **form)
    again = pp.Statistics.from_cube(lazy, ["t"], **form)
    assert one == again
    found = one["t"]
    assert_alike(found, plain)
    if "weights" not in form:
        order = [found.dims.index(dim) for dim in plain.dims]
        np.testing.assert_array_equal(found.quantile(0.3).transpose(order), plain.quantile(0.3))


@settings(max_examples=25)
@given(st.permutations(range(4)), st.sampled_from(FORMS))
def test_parts_merged_in_any_order_are_the_whole(order: list[int], form: Any) -> None:
    ds = made_cube(seed=1)
    options = {**form, "quantiles": [0.5]}
    parts = [ds.isel(time=slice(i, i + 8)) for i in (0, 8, 16, 24)]
    whole = pp.Statistics.from_cube(ds, ["t"], **options)["t"]
    merged: Any = None
    for i in order:
        stats = pp.Statistics.from_cube(parts[i], ["t"], **options)
        merged = stats if merged is None else merged.merge(stats)
    found = merged["t"]
    assert_alike(found, whole)
    if "weights" not in form:
        np.testing.assert_array_equal(found.histogram.counts, whole.histogram.counts)
        np.testing.assert_array_equal(found.histogram.edges, whole.histogram.edges)
    else:
        np.testing.assert_allclose(found.histogram.counts, whole.histogram.counts, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_json_and_pickle_keep_every_bit(form: Any) -> None:
    ds = made_cube("360_day")
    ds["plev"] = ("lat", ds.lat.values)
    for quantiles in ([], [0.5]):
        stats = pp.Statistics.from_cube(ds, ["t"], **form, quantiles=quantiles)
        for copy in (
            pp.Statistics.from_json(stats.to_json()),
            pickle.loads(pickle.dumps(stats)),  # noqa: S301
        ):
            assert copy == stats
            assert hash(copy) == hash(stats)
            np.testing.assert_array_equal(copy["t"].mean, stats["t"].mean)
            assert copy.merge(stats)["t"].count.sum() == 2 * stats["t"].count.sum()
    time_kept = pp.Statistics.from_cube(ds, ["t"], dims=["level", "lat", "lon"])
    assert pp.Statistics.from_json(time_kept.to_json()) == time_kept


def test_numbers_come_with_dims_and_coordinates() -> None:
    ds = made_cube()
    mean, std = pp.get_statistics(ds, ["height"], dims="time", by="season")["t"]
    assert mean.dims == ("season", "level", "lat", "lon")
    assert mean.season.values.tolist() == ["DJF", "MAM", "JJA", "SON"]
    np.testing.assert_array_equal(mean.lat, ds.lat)
    train = ds.t.where((ds.split == 1) & np.isfinite(ds.t)).groupby("time.season")
    expected = train.mean("time").sel(season=mean.season).transpose(*mean.dims)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    assert std.dims == mean.dims
    low, high = pp.get_range(ds, dims=["time", "lat", "lon"])["t"]
    assert (low < high).all()
    # a variable without the time has no climatology, one without a dim to keep is one number
    by_month, whole = (pp.get_statistics(ds, by=by)["height"] for by in ("month", None))
    assert by_month == pytest.approx(whole, rel=1e-14)
    weighted = pp.get_statistics(ds, weights="area")
    assert all(isinstance(number, float) for number in weighted["t"])


def test_per_pixel_statistics_of_a_lazy_cube_hold_few_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tracemalloc

    monkeypatch.setattr("ml4cube.cube.scan.usable_cores", lambda: 2)
    cells = dask.array.ones((10_000, 64, 64), chunks=(8, 64, 64))
    ds = xr.Dataset({"t": (("time", "lat", "lon"), cells)})
    pp.get_statistics(ds.isel(time=slice(80)), dims="time")
    tracemalloc.start()
    pp.get_statistics(ds, dims="time")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # the cube is 330 MB; a block of each thread is 17 MB, and so are its values as float64
    assert peak < 70e6


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize(
    "form", [{}, {"dims": ["x"]}, {"weights": xr.DataArray(np.ones(100), dims="x")}]
)
def test_integers_that_float64_rounds_are_refused_in_every_form(dtype: str, form: Any) -> None:
    cells = (2**60 + np.arange(100)).astype(dtype).reshape(1, 100)
    ds = xr.Dataset({"a": (("time", "x"), cells), "split": ("x", np.arange(100) < 60)})
    for cube in (ds, ds.chunk(x=30)):
        with pytest.raises(InvalidValueError, match="'a': integers must be at most"):
            pp.Statistics.from_cube(cube, **form)
    with pytest.raises(InvalidValueError, match="'a': integers must be at most"):
        pp.CubeScaler().fit(ds)
    small = ds.assign(a=ds["a"] - ds["a"].min())
    assert pp.get_statistics(small)["a"][1] == pytest.approx(np.std(np.arange(60)))


def test_invalid_arguments_are_refused_before_reading() -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed too early")

    ds = made_cube().chunk(time=5)
    north = ds.drop_vars("lat").assign_coords(lat=("lat", [1.0, 2.0, 3.0, 95.0]))
    negative = xr.DataArray([1.0, -1.0, 1.0, 1.0], dims="lat")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (ds, {"dims": ["tme"]}, "dims must be .*'tme'; did you mean 'time'"),
        (ds, {"by": "mnth"}, "by must be .*'mnth'; did you mean 'month'"),
        (ds, {"by": "month", "dims": ["lat"]}, "dims must include 'time'"),
        (ds, {"weights": "aera"}, "weights must be .*'aera'; did you mean 'area'"),
        (ds, {"weights": negative}, "not negative"),
        (ds, {"weights": negative.rename(lat="x")}, "weights .* 'x'"),
        (ds, {"weights": xr.DataArray([1.0], {"lat": [0.5]}, ["lat"])}, "1 cells along 'lat'"),
        (ds, {"weights": np.ones(4)}, "weights must be 'area'"),
        (ds, {"quantiles": [50]}, "from 0 to 1"),
        (north, {"weights": "area"}, "from -90 to 90"),
        (north.drop_vars("lat"), {"weights": "area"}, "needs a latitude"),
        (north.drop_vars("time"), {"by": "month"}, "one dim with dates"),
        ({"t": np.ones(3)}, {"dims": ["x"]}, "must be a Dataset or DataArray if dims"),
    ]
    with dask.config.set(scheduler=read):
        for cube, options, words in cases:
            with pytest.raises((InvalidValueError, InvalidTypeError), match=words):
                pp.Statistics.from_cube(cube, **options)
    for texts in (list("abcd"), np.array(list("abcd"), object)):
        with pytest.raises(InvalidTypeError, match=r"weights must be numbers.*dtype"):
            pp.get_statistics(ds, weights=xr.DataArray(texts, dims="lat"))
    gaps = xr.DataArray([1.0, np.nan, np.nan, -1.0], dims="lat")
    for weights in (gaps, gaps.chunk()):
        with pytest.raises(InvalidValueError, match=r"3 wrong ones of 4 \(2 of them NaN\)"):
            pp.get_statistics(ds[["t"]].isel(time=[0], level=[0], lon=[0]), weights=weights)


def test_statistics_of_another_form_do_not_merge() -> None:
    ds = made_cube()[["t", "split"]]

    def stats(cube: xr.Dataset = ds, **form: Any) -> Any:
        return pp.Statistics.from_cube(cube, dims=["time", "lat", "lon"], **form)

    levels, weighted = stats(), stats(weights="area")
    others = [
        (levels, pp.Statistics.from_cube(ds), "cannot merge"),
        (levels, stats(ds.assign_coords(level=[5, 6])), "same dims, coordinates"),
        (weighted, levels, "weights by area of the bands of lat.*weights and quantiles"),
        (weighted, stats(weights=np.cos(np.deg2rad(ds.lat))), "weights by given"),
    ]
    for one, other, words in others:
        assert one != other
        for a, b in ((one, other), (other, one)):
            with pytest.raises(InvalidValueError, match=words):
                a.merge(b)
        for each in (one, other):
            assert pp.Statistics.from_json(each.to_json()).merge(each).part == "train"


def test_quantiles_need_a_histogram() -> None:
    ds = made_cube()[["t", "split"]]
    whole, levels = (pp.Statistics.from_cube(ds, dims=dims) for dims in (None, "time"))
    for ask in (
        lambda: levels["t"].quantile(0.5),  # type: ignore[attr-defined]
        lambda: whole.quantiles([0.5]),
        lambda: scale_parameters(whole["t"], "robust"),
    ):
        with pytest.raises(InvalidValueError, match="no histogram"):
            ask()


@pytest.mark.parametrize("names", [["b"], ["a", "b", "c"]])
def test_areas_of_a_staggered_grid_are_those_of_each_variable(names: list[str]) -> None:
    north = {"units": "degrees_north", "standard_name": "latitude"}
    lat, slat = np.array([0.0, 30, 60, 90]), np.array([0.0, 60, 80])
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "a": (("lat", "x"), rng.random((4, 3))),
            "b": (("slat", "x"), rng.random((3, 3))),
            "c": ("x", rng.random(3)),
        },
        {"lat": lat, "slat": ("slat", slat, north)},
    )
    area = {
        name: xr.DataArray(oracle.band_areas(rows), dims=rows.dims)
        for name, rows in (("a", ds.lat), ("b", ds.slat))
    }
    found = pp.get_statistics(ds[names], weights="area")
    for name in names:
        weights = area.get(name, xr.DataArray(1.0))
        expected = float(ds[name].weighted(weights).mean())
        assert found[name][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("form", [{"quantiles": (0.5,)}, {"dims": ()}])
@pytest.mark.parametrize("value", [1.5, np.nan])
def test_a_single_number_has_statistics_of_every_form(value: float, form: Any, lazy: bool) -> None:
    one = xr.DataArray(value, name="z")
    stats = pp.Statistics.from_cube(one.chunk() if lazy else one, **form)["z"]
    assert (stats.count, stats.gaps) == (np.isfinite(value), np.isnan(value))
    np.testing.assert_array_equal(stats.mean, value)
    if "quantiles" in form:
        np.testing.assert_array_equal(stats.quantile(0.5), value)


LABELS: dict[str, Any] = {
    calendar: xr.date_range("1850-02-27", periods=3, freq="25h", calendar=calendar, use_cftime=True)
    for calendar in ("360_day", "noleap", "standard", "proleptic_gregorian", "julian", "all_leap")
}
LABELS["far"] = LABELS["360_day"].map(lambda date: date.replace(year=9, microsecond=7))
LABELS["texts"] = np.array(["a", "bc", ""], object)
LABELS["StringDType"] = np.array(["a", "bc", ""], np.dtypes.StringDType())


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_statistics_read_from_json_match_coordinates(labels: Any) -> None:
    whole = xr.Dataset({"t": (("x", "y"), np.arange(9.0).reshape(3, 3))}).assign_coords(x=labels)
    for ds in (whole, whole.isel(x=[0])):
        stats = pp.Statistics.from_cube(ds, dims="y")
        copy = pp.Statistics.from_json(stats.to_json())
        assert copy == stats
        assert hash(copy) == hash(stats)
        xr.testing.assert_identical(pp.standardize(ds, copy), pp.standardize(ds, stats))
        assert copy.merge(stats)["t"].count.tolist() == [6] * ds.sizes["x"]


@pytest.mark.parametrize(
    "labels", [pd.interval_range(0, 3), pd.period_range("2000", periods=3, freq="M")], ids=type
)
def test_labels_that_json_cannot_hold_are_named(labels: Any) -> None:
    ds = xr.Dataset({"t": (("x", "y"), np.arange(9.0).reshape(3, 3))}).assign_coords(x=labels)
    stats = pp.Statistics.from_cube(ds, dims="y")
    assert pickle.loads(pickle.dumps(stats)) == stats  # noqa: S301
    assert stats.merge(stats)["t"].count.tolist() == [6, 6, 6]
    with pytest.raises(InvalidTypeError, match=r"'x' must be numbers, dates or strings"):
        stats.to_json()
