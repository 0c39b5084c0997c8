"""Climatologies: cycles by the step of the data, train cells only, given ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr

from benchmarks import honesty_climatology
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate
from tests import oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube


def climatology_error(truth, **options):
    """Bias of the climatology at each date: climatology - truth, of the only cell."""
    card = evaluate(
        truth, truth, baselines="climatology", by="time", progress=False, split=None,
        **options,
    )  # fmt: skip
    return card.scores.bias.sel(model="climatology").squeeze().values, card.attrs["climatology"]


@pytest.mark.slow
@pytest.mark.parametrize("calendar", ["standard", "360_day"])
@pytest.mark.parametrize(
    ("freq", "n", "described", "key"),
    [
        ("MS", 60, "by month of", lambda d: d.month),
        ("D", 1200, "3 harmonics of the year of", None),
        ("12h", 2300, "3 harmonics of the year and of the day of", None),
        ("10D", 120, "3 harmonics of the year of", None),
        ("2MS", 60, "by month of", lambda d: d.month),
        ("YS", 20, "one mean of", lambda d: 0),
    ],
)
def test_the_cycle_follows_from_the_step(calendar, freq, n, described, key):
    train = n - n // 3
    truth = truth_cube(n, 1, 1, freq=freq, calendar=calendar, train=train)
    found, text = climatology_error(truth, weights=None)
    assert text.startswith(described)
    values, dates = truth.t.values.ravel(), truth.indexes["time"]
    if key is None:
        rows = oracle.slow_rows(dates, calendar, 3, has_hours=freq == "12h")
        known = np.where(np.arange(n) < train, values, np.nan)
        usual = oracle.slow_fit(rows, known[:, None])[:, 0]
        np.testing.assert_allclose(found, usual - values, atol=1e-6)
        return
    groups = [key(d) for d in dates]
    sums: dict = {}
    for value, group in list(zip(values, groups, strict=True))[:train]:
        sums.setdefault(group, []).append(value)
    expected = [
        np.mean(sums[group]) - value if group in sums else np.nan
        for value, group in zip(values, groups, strict=True)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_slice_or_the_dates_before_the_prediction_are_train():
    truth = truth_cube(train=None)
    forecast = forecast_cube(truth, range(40, 70), [1])
    options = {"baselines": "climatology", "progress": False}
    with pytest.warns(UserWarning, match=r"no split label; climatologies use the dates before the"):
        before = evaluate(forecast, truth, **options)
    times = truth.time.values
    label = truth.assign(split=("time", (np.arange(72) < 40).astype("uint8")))
    for given_truth, given in ((truth, slice(None, times[39])), (label, None)):
        card = evaluate(forecast, given_truth, **options, climatology=given)
        xr.testing.assert_equal(card.scores, before.scores)
    assert "2001-01-01 to 2004-04-01" in before.attrs["climatology"]
    other = evaluate(forecast, label, **options, climatology=slice(times[12], times[35]))
    assert (other.scores.rmse != before.scores.rmse).any()


def test_a_given_climatology_is_used_as_it_is():
    truth = truth_cube()
    train = truth.isel(time=slice(0, 40))
    by_month = train.t.groupby("time.month").mean()
    forecast = forecast_cube(truth, range(40, 70), [1, 3])
    options = {"baselines": ["climatology", "damped_persistence"], "progress": False}
    own = evaluate(forecast, truth, **options)
    for given in (by_month, by_month.to_dataset(name="t").isel(month=slice(None, None, -1))):
        card = evaluate(forecast, truth, **options, climatology=given)
        xr.testing.assert_allclose(card.scores, own.scores)
        assert card.attrs["climatology"] == "given"
    # a cycle of days and hours, a cube without a dim of the cells, and one without a cycle
    hours = xr.DataArray([[1.0, 2.0]] * 366, dims=("dayofyear", "hour"), coords={"hour": [0, 12]})
    found = truth_cube(10, 1, 1, freq="12h")
    error = climatology_error(found, climatology=hours.rename("t"), weights=None)[0]
    np.testing.assert_allclose(error, np.tile([1.0, 2.0], 5) - found.t.values.ravel())
    error = climatology_error(found, climatology=xr.DataArray(3.0, name="t"), weights=None)[0]
    np.testing.assert_allclose(error, 3 - found.t.values.ravel())


def test_a_date_without_train_cells_has_no_climatology_and_says_so():
    truth = truth_cube(train=8)  # January to August
    options = {"by": "month", "climatology": "month", "progress": False}
    with pytest.warns(UserWarning, match="'climatology' does in"):
        card = evaluate(truth, truth, baselines="climatology", **options)
    assert card.scores["count"].sel(month=9, model="climatology").item() == 0
    assert card.scores.unpredicted.sel(month=9, model="climatology").item() == 12 * 6
    # other scores do not need one
    alone = evaluate(truth, truth, **options)
    assert alone.scores["count"].sel(month=9).item() == 12 * 6
    assert alone.scores.acc.sel(month=9).isnull().all()


def test_invalid_climatologies():
    truth = truth_cube()
    forecast = forecast_cube(truth, range(40, 70), [1])
    with pytest.raises(InvalidValueError, match=r"climatology must be .*, got 'monthly'"):
        evaluate(forecast, truth, climatology="monthly")
    with pytest.raises(InvalidTypeError, match=r"climatology must be one of .* got float"):
        evaluate(forecast, truth, climatology=3.5)
    with pytest.raises(InvalidValueError, match=r"dims of climatology must be .*, got 'week'"):
        evaluate(forecast, truth, climatology=xr.DataArray([1.0], dims="week", name="t"))
    with pytest.raises(InvalidValueError, match="climatology must have the variables \\['t'\\]"):
        evaluate(forecast, truth, climatology=xr.Dataset({"u": ("month", np.ones(12))}))
    for baseline in ("climatology", ["climatology"]):
        with pytest.raises(InvalidValueError, match="need train cells, but truth has no split"):
            evaluate(truth.drop_vars("split"), truth.drop_vars("split"), baselines=baseline)
    numbers = truth.assign_coords(time=np.arange(72))
    with pytest.raises(InvalidValueError, match="climatology='month' needs dates along the"):
        evaluate(numbers, numbers, climatology="month")


def test_nothing_that_can_be_scored_is_an_error():
    """A split in space leaves no train cells where test cells are."""
    truth = truth_cube()
    part = xr.zeros_like(truth["split"].broadcast_like(truth["t"]))
    dim = next(str(dim) for dim in part.dims if dim != "time")
    part = part.where(part[dim] != part[dim][0], 1).astype("uint8")
    with pytest.raises(
        InvalidValueError, match="in any cell with a truth, because a split in space"
    ):
        evaluate(truth, truth.assign(split=part), baselines="climatology", progress=False)


def test_a_split_in_time_is_told_of_the_season_not_of_space():
    truth = truth_cube(train=5)
    late = truth.isel(time=slice(5, 12))
    with pytest.raises(InvalidValueError, match="no dates at that time of the year; leave it out"):
        evaluate(late, truth, baselines="climatology", climatology="month", progress=False)


@pytest.mark.parametrize(
    ("freq", "n", "described"),
    [
        ("h", 720, "2 harmonics of the day"),
        ("MS", 24, "by month"),
        ("D", 365, "one mean"),
    ],
)
def test_short_records_are_compared_with_what_they_support(freq, n, described):
    """A month of hours, two years of months and a year of days, split in time."""
    truth = truth_cube(n, 1, 2, freq=freq, train=n * 7 // 10)
    test = truth.isel(time=slice(n * 7 // 10, None))
    with pytest.warns(UserWarning, match=r"climatology .* from 1 year: .* fewer than 10 years"):
        card = evaluate(test, truth, baselines="climatology", progress=False)
    assert card.attrs["climatology"].startswith(described)
    assert card.scores["count"].values.tolist() == [[2 * test.time.size] * 2]
    assert card.scores.unpredicted.values.tolist() == [[0, 0]]
    assert card.verdict == [
        "t cannot be compared with climatology: the climatology is from one year."
    ]
    assert "from 1 year" in repr(card)


@pytest.mark.slow
def test_a_forecast_that_knows_only_the_season_has_no_skill():
    """Simulated truth: five train years, and a forecast that is the true cycle."""
    keys = [*honesty_climatology.keys("1 years")[:3], *honesty_climatology.keys("5 years")]
    results = {key: honesty_climatology.run(key) for key in keys}
    of_five = [numbers["skill"] for key, numbers in results.items() if key.startswith("5 years")]
    # about .065 is what three harmonics fitted to five years of such errors cost
    assert 0.05 < np.mean(of_five) < 0.07
    rows = honesty_climatology.rows(results)
    assert len(rows) == 4
    assert all(row["met"] for row in rows if "of 5 years" not in row["claim"]), rows


def test_few_years_are_warned_of_where_a_score_uses_them():
    truth = truth_cube()
    options = {"progress": False}
    for used in ({"baselines": "climatology", "metrics": "rmse"}, {"metrics": "acc"}, {}):
        with pytest.warns(UserWarning, match=r"from 3 years: with fewer than 10 years, the noise"):
            evaluate(truth, truth, **used, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(truth, truth, metrics="rmse", **options)


def test_ten_years_are_enough_to_say_nothing():
    truth = truth_cube(14 * 12, 1, 1, train=11 * 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        card = evaluate(truth, truth, baselines="climatology", progress=False)
    assert card.verdict == ["t is better than climatology."]
    assert card.attrs["climatology_years"] == 11


def test_shares_of_classes_stay_between_0_and_1():
    n = 800
    rng = np.random.default_rng(0)
    time = xr.date_range("2000-01-01", periods=n)
    flags = {"flag_values": np.array([0, 1], "int8"), "flag_meanings": "dry wet"}
    season = np.cos(2 * np.pi * np.arange(n) / 365)
    wet = (rng.random(n) < np.where(season > 0.5, 0.9, 0.0)).astype("int8")
    truth = xr.Dataset({"w": ("time", wet, flags)}, {"time": time})
    truth["split"] = "time", (np.arange(n) < 700).astype("uint8")
    shares = xr.DataArray(np.full((n, 2), 0.5), {"time": time, "class": [0, 1]}, ("time", "class"))
    card = evaluate(shares.rename("w"), truth, baselines="climatology", progress=False)
    reliable = card.scores.brier.sel(model="climatology").item()
    assert 0 < reliable < 0.5
    assert np.isfinite(card.scores.log_loss.sel(model="climatology").item())


@pytest.mark.parametrize(("freq", "n", "years"), [("8D", 46 * 20, 12), ("QS", 160, 24)])
def test_composites_and_quarters_have_their_season(freq, n, years):
    time = xr.date_range("1980-01-01", periods=n, freq=freq)
    cycle = xr.DataArray(
        8 * np.cos(2 * np.pi * time.day_of_year.values / 365.25), {"time": time}, "time"
    )
    noise = xr.DataArray(np.random.default_rng(0).normal(size=(n, 10)), dims=("time", "x"))
    truth = (cycle + noise).rename("t").to_dataset()
    truth["split"] = "time", (np.arange(n) < 0.6 * n).astype("uint8")
    only_season = (cycle + 0 * noise).rename("t").isel(time=slice(int(0.6 * n), None))
    card = evaluate(only_season, truth, baselines="climatology", progress=False)
    # one mean of a month, or of all quarters, would be far from the season of the truth
    assert 0 < float(card.scores.skill.squeeze()) < 0.06
    assert card.attrs["climatology_years"] == years
