"""Climatologies: smooth cycles, any calendar, gaps, merging, and what a record supports."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.climatology import (
    ClimatologySums,
    Cycle,
    Design,
    smooth_days,
    train_years,
    warning_of_years,
    year_fractions,
)
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from tests.oracle import slow_fit, slow_rows, slow_waves


def dates_of(freq="D", n=1500, calendar="standard", start="2001-01-01"):
    return xr.date_range(start, periods=n, freq=freq, calendar=calendar, use_cftime=None).values


def fitted(cycle, dates, values, blocks=1):
    design = Design.of("climatology", Cycle.of("climatology", cycle), dates)
    blocks = np.array_split(np.arange(len(dates)), blocks)
    parts = [ClimatologySums.of(design, steps, values[steps]) for steps in blocks]
    return (
        functools.reduce(ClimatologySums.merge, parts).climatology(design).at(np.arange(len(dates)))
    )


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day", "julian"])
@pytest.mark.parametrize(
    ("freq", "cycle"), [("D", "dayofyear"), ("D", 5), ("7h", "dayofyear_hour")]
)
def test_fits_are_those_of_least_squares_for_each_cell(calendar, freq, cycle):
    dates = dates_of(freq, 1600, calendar)
    rng = np.random.default_rng(0)
    values = 280 + rng.normal(size=(1600, 4)).cumsum(0)
    values[rng.random(values.shape) < 0.3] = np.nan
    values[:-5, 3] = np.nan
    index = xr.DataArray(dates, dims="t").to_index()
    rows = slow_rows(index, calendar, 5 if cycle == 5 else 3, has_hours=freq == "7h")
    # months without a value are left out below
    months = np.array([date.month for date in index])
    expected = slow_fit(rows, values)
    for cell, month in itertools.product(range(4), range(1, 13)):
        if not np.isfinite(values[months == month, cell]).any():
            expected[months == month, cell] = np.nan
    np.testing.assert_allclose(fitted(cycle, dates, values), expected, atol=1e-9)
    whole = values.copy()
    whole[np.isnan(whole)] = 1.0  # blocks without gaps, by the faster way
    np.testing.assert_allclose(fitted(cycle, dates, whole), slow_fit(rows, whole), atol=1e-9)


@given(st.integers(1, 7), st.integers(0, 10**6), st.sampled_from(["month", "dayofyear", "31D"]))
def test_sums_of_parts_merge_to_those_of_the_whole(blocks, seed, cycle):
    rng = np.random.default_rng(seed)
    dates = dates_of(n=800)
    values = rng.normal(size=(800, 3))
    values[rng.random(values.shape) < rng.choice([0, 0.2])] = np.nan
    whole, parts = (fitted(cycle, dates, values, n) for n in (1, blocks))
    np.testing.assert_allclose(whole, parts, atol=1e-10)


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
@pytest.mark.parametrize(("freq", "cycle", "window"), [("D", "31D", 31), ("6h", "9D", 9)])
def test_a_window_is_the_mean_of_the_days_around_at_the_same_hour(calendar, freq, cycle, window):
    dates = dates_of(freq, 1700, calendar)
    values = np.random.default_rng(0).normal(size=(1700, 1))
    index = xr.DataArray(dates, dims="t").to_index()
    day = np.floor(year_fractions(dates) * 366 + 1e-9)
    hour = np.array([date.hour for date in index])
    expected = []
    for d, h in zip(day, hour, strict=True):
        apart = np.abs(day - d)
        is_near = np.minimum(apart, 366 - apart) <= window // 2
        expected.append(values[is_near & (hour == h)].mean())
    np.testing.assert_allclose(fitted(cycle, dates, values)[:, 0], expected)


def test_a_cycle_of_the_year_and_the_day_is_found_exactly_in_any_calendar():
    for calendar in ("standard", "noleap", "360_day"):
        dates = dates_of("3h", 8 * 800, calendar)
        year, day = year_fractions(dates), np.arange(8 * 800) % 8 / 8
        truth = 280 + 8 * np.cos(2 * np.pi * (year - 0.1)) + 2 * np.sin(4 * np.pi * year)
        truth += (3 + np.cos(2 * np.pi * year)) * np.cos(2 * np.pi * (day - 0.6))
        found = fitted("dayofyear_hour", dates, truth[:, None])
        np.testing.assert_allclose(found[:, 0], truth, atol=1e-9)


def test_leap_days_fall_in_the_right_place():
    dates = dates_of(n=4 * 366, start="2001-01-01")
    phases = year_fractions(dates)
    for date, phase in zip(dates, phases, strict=True):
        if str(date)[5:10] == "03-01":
            assert phase == pytest.approx(59 / 365, abs=1 / 365)
        if str(date)[5:10] == "12-31":
            assert phase == pytest.approx(1, abs=1.1 / 365)


def test_cells_without_enough_values_and_months_without_any_have_no_climatology():
    dates = dates_of(n=730)
    values = np.ones((730, 3))
    months = dates.astype("M8[M]").astype(int) % 12
    values[20:, 0] = np.nan
    values[(months < 5) | (months > 7), 1] = np.nan  # known in summer
    found = fitted("dayofyear", dates, values)
    assert np.isnan(found[:, 0]).all()
    assert (np.isfinite(found[:, 1]) == ((months >= 5) & (months <= 7))).all()
    assert found[:, 2] == pytest.approx(1)
    one = Design.of("climatology", Cycle("mean"), dates)
    sums = ClimatologySums.of(one, np.zeros(0, int), np.zeros((0, 3)))
    assert np.isnan(sums.climatology(one).at(np.array([0, -1]))).all()


@pytest.mark.parametrize(
    ("freq", "n", "train", "wanted", "name"),
    [
        ("D", 3000, slice(0, 2000), slice(2000, None), "dayofyear"),
        ("h", 720, slice(0, 500), slice(500, None), "hour"),  # a month of hours
        ("6h", 4000, slice(0, 3000), slice(3000, None), "dayofyear_hour"),
        ("MS", 24, slice(0, 17), slice(17, None), "month"),  # two years of months
        ("MS", 24, slice(0, 8), slice(8, None), "mean"),
        ("D", 365, slice(0, 250), slice(250, None), "mean"),  # a year of days
        ("D", 365, slice(0, None, 2), slice(1, None, 2), "dayofyear"),
        ("D", 700, slice(0, 310), slice(366, 380), "mean"),  # January, but no whole year
        ("8D", 120, slice(0, 80), slice(80, None), "dayofyear"),
        ("16D", 60, slice(0, 40), slice(40, None), "dayofyear"),
        ("16D", 60, slice(0, 15), slice(15, 18), "mean"),
        ("QS", 40, slice(0, 20), slice(20, None), "month"),  # each quarter has a mean of its own
        ("YS", 20, slice(0, 10), slice(10, None), "mean"),
        ("D", 1, slice(0, 1), slice(0, 1), "mean"),
    ],
)
def test_the_default_is_a_cycle_that_the_record_supports(freq, n, train, wanted, name):
    for calendar in ("standard", "360_day"):
        dates, steps = dates_of(freq, n, calendar), np.arange(n)
        assert Cycle.supported_by(dates, steps[train], steps[wanted]).name == name
    assert Cycle.supported_by(steps, steps[train], steps[wanted]).name == "mean"


def test_years_are_counted_for_each_month():
    assert train_years(dates_of(n=365)) == 1
    assert train_years(dates_of("MS", 60, "360_day")) == 5
    summers = dates_of(n=3650)
    months = summers.astype("M8[M]").astype(int) % 12
    assert train_years(summers[(months > 4) & (months < 8)]) == 10
    assert train_years(summers[:0]) == 0
    assert "fewer than 10 years" in warning_of_years(9)
    assert not warning_of_years(10)
    assert not warning_of_years(None)


def test_invalid_cycles():
    for wrong, message in (
        ("monthly", "climatology must be .*, got 'monthly'; did you mean 'month'"),
        ("400D", "climatology must have 1 to 366 days, got '400D'"),
        (0, "climatology must have 1 to 30 harmonics, got 0"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            Cycle.of("climatology", wrong)
    with pytest.raises(InvalidTypeError, match=r"climatology must be one of .* got float"):
        Cycle.of("climatology", 3.5)
    with pytest.raises(InvalidValueError, match="climatology='month' needs dates along"):
        Design.of("climatology", Cycle("month"), np.arange(3))


def test_single_days_are_smoothed_with_their_weights():
    rng = np.random.default_rng(0)
    days = np.arange(366)
    true_mean = 280 + 8 * np.cos(2 * np.pi * (days + 0.5) / 365)
    true_std = 2 + np.sin(2 * np.pi * (days + 0.5) / 365)
    n = np.where(days < 365, 10.0, 0)
    values = true_mean + true_std * rng.normal(size=(10, 4, 366))
    mean, variance = values.mean(0).T, values.var(0).T
    weight = np.broadcast_to(n[:, None], mean.shape)
    mean[365], variance[365] = np.nan, np.nan
    smooth, spread = smooth_days(mean, variance, weight)
    known = slice(0, 365)
    assert np.abs(smooth.T - true_mean)[:, known].mean() < 0.1
    assert np.abs(np.sqrt(spread).T - true_std)[:, known].mean() < 0.1
    rows = [slow_waves((d + 0.5) / 365, 3) for d in days]
    np.testing.assert_allclose(smooth, slow_fit(rows, mean), atol=1e-9)


@given(st.integers(0, 365), st.integers(1, 366), st.sampled_from([360, 365, 366]))
def test_days_far_from_all_others_have_no_smooth_mean(first, n, length):
    has_day = np.isin(np.arange(366), (first + np.arange(n)) % length)
    has_day[length - 1] = True  # the calendar is known by its last day
    mean = np.where(has_day, 1.0, np.nan)[:, None]
    smooth, spread = smooth_days(mean, mean, has_day[:, None].astype(float))
    if has_day.sum() < 21:
        assert np.isnan(smooth).all()
        return
    days = np.flatnonzero(has_day)
    for day in range(length):
        apart = np.abs(days - day)
        is_near = np.minimum(apart, length - apart).min() <= 31
        assert np.isfinite(smooth[day, 0]) == np.isfinite(spread[day, 0]) == is_near
