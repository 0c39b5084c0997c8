"""`CubeScaler`: every method per variable, level, pixel and month, there and exactly back."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube import postprocessing as post
from ml4cube import preprocessing as pp
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError
from ml4cube.core.statistics import scale_parameters
from ml4cube.preprocessing.scaler import METHODS
from tests import oracle
from tests.cubes import coordinates, no_compute

DIMS = ("time", "level", "lat", "lon")
PER: list[Any] = [("variable",), "level", ("variable", "lat", "lon"), ("variable", "level", "lat")]
CLIMATOLOGIES = [None, "month", "season"]


def made_cube(
    calendar: str | None = None, seed: int = 0, steps: int = 36, offset: float = 280
) -> xr.Dataset:
    """Three years of months on levels a thousand units apart; gaps, a constant place, one of gaps.

    The first two years are train, the third is test.
    """
    rng = np.random.default_rng(seed)
    cells = rng.normal(offset, 8, (steps, 2, 3, 4)).astype("float32")
    cells[:, 1] += 1000
    cells += 20 * np.sin(np.arange(steps) * np.pi / 6)[:, None, None, None].astype("float32")
    cells[rng.random(cells.shape) < 0.1] = np.nan
    cells[:, 0, 0, 0] = 273.15
    cells[:, 1, 2, 3] = np.nan
    sizes = dict(zip(DIMS, cells.shape, strict=True))
    ds = xr.Dataset(
        {"t": (DIMS, cells, {"units": "K"}), "orog": (("lat", "lon"), rng.random((3, 4)))},
        coordinates(sizes, calendar),
        {"title": "made"},
    )
    in_calendar = {"calendar": calendar or "standard", "use_cftime": calendar is not None}
    ds["time"] = xr.date_range("2000-01-01", periods=steps, freq="MS", **in_calendar)
    ds["split"] = ("time", (np.arange(steps) < 24).astype("uint8"))
    return ds


def expected_scaled(ds: xr.Dataset, method: str, per: Any, by: str | None) -> np.ndarray:
    """Each place and group scaled on its own, by numpy alone."""
    kept = [dim for dim in DIMS if dim in ((per,) if isinstance(per, str) else per)]
    cells, train = ds.t.values.astype("f8"), ds.split.values == 1
    groups = np.array([by and oracle.group_of(date, by) for date in ds.indexes["time"]], object)
    result = np.full(cells.shape, np.nan)
    for index in itertools.product(*(range(ds.sizes[dim]) for dim in kept)):
        place = tuple(index[kept.index(dim)] if dim in kept else slice(None) for dim in DIMS[1:])
        for group in set(groups):
            here = groups == group
            values = cells[(here & train, *place)]
            values = values[np.isfinite(values)]
            if not values.size:
                continue
            if method == "standardize":
                offset, scale = values.mean(), values.std()
            elif method == "normalize":
                offset, scale = values.min(), np.ptp(values)
            else:
                low, offset, high = np.quantile(values, [0.25, 0.5, 0.75], method="inverted_cdf")
                scale = high - low
            scale = 1.0 if np.ptp(values) == 0 or scale == 0 else scale
            result[(here, *place)] = (cells[(here, *place)] - offset) / scale
    return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("climatology", CLIMATOLOGIES)
def test_every_place_is_scaled_by_its_own_train_cells(
    method: str, per: Any, climatology: str | None
) -> None:
    ds = made_cube("360_day" if climatology == "season" else None)
    scaler = pp.CubeScaler(method, per, climatology).fit(ds)
    scaled = scaler.transform(ds)
    lazy = ds.transpose(*DIMS[::-1]).chunk({"lon": 1, "time": 7})
    with dask.config.set(scheduler=no_compute):
        unread = scaler.transform(lazy)
        back = scaler.inverse_transform(unread)
    for result in (unread.t, back.t):
        assert (result.dims, result.chunks) == (lazy.t.dims, lazy.t.chunks)
        assert result.dtype == np.float32
    np.testing.assert_array_equal(unread.t.transpose(*DIMS), scaled.t)
    expected = expected_scaled(ds, method, per, climatology)
    assert (np.isnan(scaled.t.values) == np.isnan(expected)).all()
    if method != "robust":
        np.testing.assert_allclose(scaled.t, expected, rtol=2e-6, atol=2e-6)
    else:
        stats = scaler.statistics_["t"]
        spread = np.nan_to_num(stats.quantile(0.75) - stats.quantile(0.25))
        assert (stats.quantile_error[spread > 0] < 0.01 * spread[spread > 0]).all()
        # few cells at a place: between two neighbours a quartile may be any
        if per == ("variable",) and climatology is None:
            np.testing.assert_allclose(scaled.t, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from(METHODS),
    st.sampled_from(PER),
    st.sampled_from(CLIMATOLOGIES),
    st.sampled_from([None, "area"]),
    st.integers(0, 10**6),
    st.sampled_from([0.0, -280.0, 280.0, 1e5]),
)
def test_scaled_and_back_is_within_2_ulp(
    method: str, per: Any, climatology: str | None, weights: str | None, seed: int, offset: float
) -> None:
    ds = made_cube(seed=seed, offset=offset)
    scaler = pp.CubeScaler(method, per, climatology, weights)
    back = scaler.inverse_transform(scaler.fit_transform(ds))
    for name in ("t", "orog"):
        here, there = ds[name], back[name]
        first = np.nanmax(np.abs(scale_parameters(scaler.statistics_[name], method)[0]))
        # a unit in the last place of the larger of value and offset, as `unscale_values` says
        larger = np.maximum(abs(here), abs(here.dtype.type(first)))
        error = abs(here.astype("f8") - there.astype("f8")) / np.spacing(larger)
        assert not (error > 2).any()
        if method != "robust":
            # values come back except where a place has no train cell
            lost = np.isnan(there) & np.isfinite(here)
            assert not lost.any() or per != ("variable",)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [0.0, 1.0, 280.0])
def test_scaled_as_float64_every_float32_comes_back_as_it_was(method: str, offset: float) -> None:
    # values down to a hundred millionth of the offset, of which a scaled float32 keeps no digit
    rng = np.random.default_rng(0)
    near_zero = rng.choice([-1, 1], 1000) * (1 + offset) * 10.0 ** rng.uniform(-8, 0, 1000)
    far = (offset + rng.normal(size=9000)).astype("float32")
    ds = xr.Dataset({"a": ("x", np.concatenate([near_zero.astype("float32"), far]))})
    scaler = pp.CubeScaler(method).fit(ds)
    wide = scaler.inverse_transform(scaler.transform(ds.astype("float64")))
    np.testing.assert_array_equal(wide.a.astype("float32"), ds.a)
    narrow = scaler.inverse_transform(scaler.transform(ds))
    assert narrow.a.dtype == np.float32
    # a step of float32 around the offset, at most half of it lost twice
    step = np.spacing(np.float32(max(offset, float(abs(ds.a).max()))))
    assert 0 < abs(narrow.a - ds.a).max() <= step


@pytest.mark.parametrize("method", METHODS)
def test_constants_become_0_and_come_back_exactly_and_empty_places_become_gaps(
    method: str,
) -> None:
    ds = made_cube()
    ds.t[{"time": 30, "level": 1, "lat": 2, "lon": 3}] = 5.0  # only test cells there
    scaler = pp.CubeScaler(method, ("variable", "level", "lat", "lon")).fit(ds)
    scaled = scaler.transform(ds)
    constant = {"level": 0, "lat": 0, "lon": 0}
    assert (scaled.t[constant] == 0).all()
    back = scaler.inverse_transform(scaled)
    np.testing.assert_array_equal(back.t[constant], ds.t[constant])
    assert np.isnan(scaled.t[{"level": 1, "lat": 2, "lon": 3}]).all()
    empty = ds.assign(t=ds.t.where(ds.split != 1))
    for per in ("variable", "level"):
        with pytest.raises(InvalidValueError, match=r"'t'.*all gaps"):
            pp.CubeScaler(method, per).fit(empty).transform(ds)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("per", "climatology"), [("level", None), (("lat", "lon"), "season")])
@pytest.mark.parametrize("weights", [None, "area", "given"])
def test_partial_fits_in_any_order_and_merged_scalers_are_one_fit(
    method: str, per: Any, climatology: str | None, weights: Any
) -> None:
    ds = made_cube()
    if weights == "given":
        weights = xr.DataArray([1.0, 0.5, 0.25], dims="lat")
    make = lambda: pp.CubeScaler(method, per, climatology, weights)  # noqa: E731
    parts = [ds.isel(time=slice(i, i + 6)) for i in (0, 6, 12, 18)]
    whole = make().fit(ds).transform(ds)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        scaler = make()
        for i in order:
            assert scaler.partial_fit(parts[i]) is scaler
        np.testing.assert_allclose(scaler.transform(ds).t, whole.t, rtol=1e-5, atol=1e-6)
    left, right = make().partial_fit(parts[0]), make().partial_fit(parts[1])
    merged = left.merge(right).merge(make().partial_fit(parts[2]).partial_fit(parts[3]))
    np.testing.assert_allclose(merged.transform(ds).t, whole.t, rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidValueError, match="parameters differ"):
        merged.merge(pp.CubeScaler(method, per, climatology, xr.DataArray([1.0], dims="x")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("climatology", [None, "month"])
def test_the_order_of_dims_does_not_matter_to_merge(method: str, climatology: str | None) -> None:
    ds = made_cube()
    parts = ds.isel(time=slice(12)), ds.isel(time=slice(12, None)).transpose(*DIMS[::-1])
    fitted = pp.CubeScaler(method, ("level", "lat"), climatology).fit(parts[0])
    other = pp.CubeScaler(method, ("lat", "level"), climatology).fit(parts[1])
    merged = fitted.merge(other).transform(ds)
    expected = fitted.partial_fit(parts[1].transpose(*DIMS)).transform(ds)
    xr.testing.assert_identical(merged, expected)


def test_parameters_stay_those_of_the_first_fit() -> None:
    ds = made_cube()
    weights = xr.DataArray([1.0, 0.5, 1e6], dims="lat")
    for fitted in (pp.CubeScaler().fit(ds), pp.CubeScaler().fit(ds).merge(pp.CubeScaler().fit(ds))):
        for changed in ({"weights": "area"}, {"weights": weights}, {"method": "normalize"}):
            scaler = pickle.loads(pickle.dumps(fitted)).set_params(**changed)  # noqa: S301
            with pytest.raises(InvalidValueError, match="was fitted as CubeScaler"):
                scaler.partial_fit(ds)
            for work in (scaler.transform, scaler.inverse_transform):
                with pytest.raises(InvalidValueError, match="restore its parameters"):
                    work(ds)
            scaler.fit(ds).partial_fit(ds).transform(ds)
    levels = pp.CubeScaler(per=["level"]).fit(ds)
    levels.per.append("lat")  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match=r"fitted as CubeScaler.*per=\('level',\)"):
        levels.partial_fit(ds)
    with pytest.raises(InvalidTypeError, match="other must be a fitted CubeScaler, got Statistics"):
        levels.merge(levels.statistics_)  # type: ignore[arg-type]
    other = pp.CubeScaler(weights=weights).fit(ds).set_params(weights=2 * weights)
    with pytest.raises(InvalidValueError, match="or call fit again"):
        other.partial_fit(ds)


def test_the_protocol_of_scikit_learn_holds_with_every_parameter() -> None:
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import make_pipeline
    from sklearn.utils.validation import check_is_fitted

    ds = made_cube()
    weights = np.cos(np.deg2rad(ds.lat))
    scaler = pp.CubeScaler("robust", ("variable", "level"), "month", weights)
    copy = clone(scaler)
    assert copy.get_params()["weights"].identical(weights)
    assert copy.set_params(climatology="season", weights=None).climatology == "season"
    assert repr(copy) == (
        "CubeScaler(method='robust', per=('variable', 'level'), climatology='season')"
    )
    with pytest.raises(NotFittedError):
        check_is_fitted(scaler)
    with pytest.raises(RunError, match="not fitted"):
        scaler.transform(ds)
    with pytest.raises(InvalidValueError, match="did you mean 'method'"):
        scaler.set_params(methods="normalize")
    fitted = scaler.fit(ds)
    check_is_fitted(fitted)
    pipeline = make_pipeline(clone(scaler))
    xr.testing.assert_identical(pipeline.fit_transform(ds), fitted.transform(ds))
    loaded = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    xr.testing.assert_identical(loaded.transform(ds), fitted.transform(ds))
    assert (
        loaded.merge(fitted).statistics_["t"].count.sum() == 2 * fitted.statistics_["t"].count.sum()
    )


def test_statistics_are_matched_by_coordinates_not_by_position() -> None:
    ds = made_cube()
    scaler = pp.CubeScaler(per=("level", "lat"), climatology="month").fit(ds)
    scaled = scaler.transform(ds)
    some = ds.isel(level=[1, 0], lat=[2, 0], time=slice(7, 30))
    expected = scaled.isel(level=[1, 0], lat=[2, 0], time=slice(7, 30))
    xr.testing.assert_identical(scaler.transform(some).t, expected.t)
    single = pp.CubeScaler(per="level").fit(ds)
    with pytest.raises(InvalidValueError, match=r"no statistics of 't' at lat \[12.5\]"):
        scaler.transform(ds.isel(lat=[0]).assign_coords(lat=[12.5]))
    with pytest.raises(InvalidValueError, match="length 2 along 'level', the data 1"):
        single.transform(ds.drop_vars("level").isel(level=[0]))
    with pytest.raises(InvalidValueError, match=r"have dims \['level'\]"):
        single.transform(ds.isel(level=0, drop=True))
    summer = pp.CubeScaler(climatology="month").fit(ds.sel(time=ds.time.dt.month.isin([6, 7])))
    with pytest.raises(InvalidValueError, match=r"no statistics of month \[1, 2, 3, 4, 5, 8\]"):
        summer.transform(ds)
    assert summer.transform(ds.isel(time=[5, 18])).t.notnull().any()


def test_coordinates_rounded_to_float32_are_the_same_places() -> None:
    ds = made_cube()
    ds["lat"] = [0.1, 0.2, 0.3]
    scaler = pp.CubeScaler(per="lat").fit(ds)
    rounded = ds.assign_coords(lat=ds.lat.astype("f4"))
    expected = scaler.transform(ds)
    np.testing.assert_array_equal(scaler.transform(rounded).t, expected.t)
    some = {"lat": [2, 0]}
    np.testing.assert_array_equal(scaler.transform(rounded.isel(some)).t, expected.t.isel(some))
    with pytest.raises(InvalidValueError, match="no statistics of 't' at lat"):
        scaler.transform(ds.assign_coords(lat=ds.lat + 0.05))


def test_places_that_stand_twice_are_matched_only_as_they_were() -> None:
    values = np.random.default_rng(0).normal(size=(9, 4))
    ds = xr.Dataset({"a": (("time", "lat"), values)}, {"lat": [1.0, 1.0, 2.0, 3.0]})
    scaler = pp.CubeScaler(per="lat").fit(ds)
    expected = (values - values.mean(axis=0)) / values.std(axis=0)
    np.testing.assert_allclose(scaler.transform(ds).a, expected)
    with pytest.raises(InvalidValueError, match="duplicate coordinates along 'lat'"):
        scaler.transform(ds.isel(lat=[2, 3]))


def test_functions_take_the_same_statistics() -> None:
    ds = made_cube()
    stats = pp.Statistics.from_cube(ds, dims=["time", "lat", "lon"], by="month")
    per = ("variable", "level")
    scaled = pp.CubeScaler(per=per, climatology="month").fit(ds).transform(ds)
    xr.testing.assert_identical(pp.standardize(ds, stats), scaled)
    pairs = pp.get_statistics(ds, dims=["time", "lat", "lon"], by="month")
    xr.testing.assert_identical(pp.standardize(ds, pairs), scaled)
    mean, _ = pp.get_statistics(ds, ["orog"], by="month")["t"]
    anomaly = pp.standardize(ds, {"t": [mean, 1.0]}).t
    np.testing.assert_allclose(anomaly, ds.t - mean.sel(month=ds.time.dt.month), atol=1e-4)
    by_level = xr.DataArray([1.0, 2.0], dims="level")
    np.testing.assert_allclose(pp.standardize(ds, {"t": [0.0, by_level]}).t, ds.t / by_level, 1e-6)
    unit = pp.CubeScaler("normalize", per, "month").fit(ds).transform(ds)
    xr.testing.assert_identical(pp.normalize(ds, stats), unit)


@pytest.mark.parametrize(("by", "dates"), [("season", slice(None)), ("month", slice(151, 243))])
def test_a_climatology_of_xarray_is_matched_by_its_labels(by: str, dates: slice) -> None:
    time = xr.date_range("2001-01-01", periods=365)
    values = np.random.default_rng(0).normal(size=365) + time.month
    t = xr.DataArray(values, {"time": time}, ["time"], name="t").isel(time=dates)
    groups = t.groupby(f"time.{by}")
    wanted = (groups - groups.mean()).groupby(f"time.{by}") / groups.std()
    pairs = {"t": [groups.mean(), groups.std()]}
    scaled = pp.standardize(t, pairs)
    np.testing.assert_allclose(scaled, wanted)
    np.testing.assert_allclose(post.undo_standardizing(scaled, pairs), t)


def test_rain_on_mostly_dry_days_is_shifted_not_blown_up() -> None:
    rng = np.random.default_rng(0)
    rain = np.where(rng.random((500, 3)) < 0.8, 0.0, rng.exponential(5, (500, 3)))
    rain[:, 2] = rng.normal(0, 1, 500)
    ds = xr.Dataset({"rain": (("time", "x"), rain)})
    for per, columns in (("variable", [0, 1]), ("x", [0, 1, 2])):
        scaler = pp.CubeScaler("robust", per).fit(ds.isel(x=columns))
        scaled = scaler.transform(ds.isel(x=columns)).rain
        off = scaler.statistics_["rain"].quantile_error.max()
        np.testing.assert_allclose(scaled[:, :2], rain[:, :2], rtol=0, atol=off)
        back = scaler.inverse_transform(scaled)
        np.testing.assert_allclose(back, rain[:, columns], rtol=0, atol=1e-12)
    low, high = np.quantile(scaled[:, 2], [0.25, 0.75], method="inverted_cdf")
    assert high - low == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_variables_put_into_one_array_are_scaled_apart(method: str) -> None:
    ds = made_cube()[["t"]].fillna(250)
    ds["rain"] = abs(ds.t - 280) * 1e-6
    array = ds.to_array()
    scaler = pp.CubeScaler(method).fit(array)
    scaled = scaler.transform(array)
    expected = pp.CubeScaler(method).fit(ds).transform(ds)
    np.testing.assert_allclose(scaled, expected.to_array(), rtol=1e-5, atol=1e-5)
    back = scaler.inverse_transform(scaled)
    np.testing.assert_allclose(back, array, rtol=1e-5, atol=1e-9)
    assert back.dtype == array.dtype


def test_samples_without_names_of_dims_are_scaled_per_variable() -> None:
    rng = np.random.default_rng(0)
    samples = {"t": rng.normal(280, 5, (200, 4, 4)).astype("f4"), "split": np.arange(200) % 4 > 0}
    samples["t"][samples["split"] == 0] = 1e9
    scaler = pp.CubeScaler("robust").fit(samples)
    scaled = scaler.transform(samples)["t"][samples["split"]]
    quartiles = np.quantile(scaled, [0.25, 0.5, 0.75], method="inverted_cdf")
    np.testing.assert_allclose(quartiles[1], 0, atol=1e-3)
    np.testing.assert_allclose(quartiles[2] - quartiles[0], 1, atol=1e-3)
    for options in ({"per": "level"}, {"climatology": "month"}, {"weights": "area"}):
        with pytest.raises(InvalidTypeError, match="dict of arrays"):
            pp.CubeScaler(**options).fit(samples)
    stats = pp.get_statistics(made_cube(), dims="time")
    with pytest.raises(InvalidTypeError, match=r"'t' keep dims.*in a Dataset"):
        pp.standardize(samples, stats)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "robsut"}, "method must be .*'robsut'; did you mean 'robust'"),
        ({"per": "levle"}, "per must be .*'levle'; did you mean 'level'"),
        ({"climatology": "seasons"}, "climatology must be .*'seasons'; did you mean 'season'"),
        ({"per": "time", "climatology": "month"}, "dims must include 'time'"),
    ],
)
def test_wrong_parameters_are_refused_by_fit(options: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        pp.CubeScaler(**options).fit(made_cube())


def test_the_time_of_a_climatology_may_have_any_name() -> None:
    ds = made_cube()
    scaled, renamed = (
        pp.CubeScaler(climatology="month").fit_transform(cube)
        for cube in (ds, ds.rename(time="date"))
    )
    xr.testing.assert_identical(renamed, scaled.rename(time="date"))


def test_a_dim_called_like_the_climatology_is_refused() -> None:
    ds = made_cube()
    leads = ds.expand_dims(month=np.arange(12))
    scaler = pp.CubeScaler(climatology="month").fit(ds)
    acts = (pp.CubeScaler(climatology="month").fit, scaler.transform, scaler.inverse_transform)
    for work in (*acts, lambda cube: pp.get_range(cube, by="month")):
        for cube in (leads, leads.t, leads.chunk()):
            with pytest.raises(InvalidValueError, match=r"already has.*month='lead_month'"):
                work(cube)
    pp.CubeScaler(climatology="month").fit_transform(leads.rename(month="lead_month"))
    pp.CubeScaler(climatology="season").fit_transform(leads)


def test_scaled_values_are_in_units_of_one_until_the_scaling_is_undone() -> None:
    """As CF has it; a reader that masks by a valid range would lose every scaled value."""
    ds = made_cube()
    ds.t.attrs = {"units": "K", "standard_name": "air_temperature", "long_name": "T"}
    ds.t.attrs["valid_range"] = [200.0, 2000.0]
    stats = pp.Statistics.from_cube(ds)
    scaler = pp.CubeScaler(per="level", climatology="month").fit(ds)
    for scale, undo in (
        (lambda x: pp.standardize(x, stats), lambda x: post.undo_standardizing(x, stats)),
        (lambda x: pp.normalize(x, stats), lambda x: post.undo_normalizing(x, stats)),
        (scaler.transform, scaler.inverse_transform),
    ):
        scaled = scale(ds)
        assert scaled.t.attrs["units"] == scale(ds.t).attrs["units"] == "1"
        assert scaled.t.attrs["long_name"] == "T"
        assert not scaled.t.attrs.keys() & {"standard_name", "valid_range"}
        assert undo(scaled).t.attrs == undo(scaled.t).attrs == ds.t.attrs
        assert undo(scale(scaled)).t.attrs["units"] == "1"  # which is scaled still
        assert scaled.orog.attrs == {}
        assert scaled.split.attrs == ds.split.attrs
    # values in units of their own, as of a model, keep them
    assert post.undo_standardizing(ds.t, 1.0, 2.0).attrs["units"] == "K"


def test_days_of_the_year_are_scaled_by_a_smooth_climatology() -> None:
    rng = np.random.default_rng(0)
    time = xr.date_range("2001-01-01", periods=5 * 365, calendar="noleap", use_cftime=True)
    season = 8 * np.cos(2 * np.pi * (np.arange(time.size) % 365) / 365)
    noise = rng.normal(size=(time.size, 2))
    ds = xr.Dataset({"t": (("time", "x"), 280 + season[:, None] + noise)}, {"time": time})
    scaler = pp.CubeScaler(per="x", climatology="dayofyear").fit(ds)
    scaled = scaler.transform(ds)
    # the mean of five values of each day would take a fifth of the noise away
    assert float((scaled.t.values - noise).std()) < 0.1
    xr.testing.assert_allclose(scaler.inverse_transform(scaled), ds)
    halves = [pp.CubeScaler(per="x", climatology="dayofyear").fit(ds.isel(time=part)) for part in
              (slice(0, 900), slice(900, None))]  # fmt: skip
    xr.testing.assert_allclose(halves[0].merge(halves[1]).transform(ds), scaled)
    mean, std = pp.get_statistics(ds, dims="time", by="dayofyear")["t"]
    assert mean.sizes == {"dayofyear": 366, "x": 2}
    xr.testing.assert_allclose(pp.standardize(ds, {"t": [mean, std]}), scaled)
    with pytest.raises(InvalidValueError, match="needs method='standardize', got 'robust'"):
        pp.CubeScaler("robust", climatology="dayofyear").fit(ds)
    # a fit of summers would scale winters by whatever its waves do there
    summer = pp.CubeScaler(climatology="dayofyear").fit(ds.sel(time=ds.time.dt.month.isin([6, 7])))
    with pytest.raises(InvalidValueError, match=r"no statistics of dayofyear \[1, 2, 3, 4, 5, 6\]"):
        summer.transform(ds)
