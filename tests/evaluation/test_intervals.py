"""Intervals of scores equal a slow oracle, and contain the truth as often as they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ml4cube.evaluation import evaluate
from ml4cube.evaluation.scores.intervals import Intervals
from tests.evaluation.forecasts import forecast_cube, truth_cube


def slow_interval(without, level=0.95, longest_lead=1, block_length=None):
    """Half the width, and the independent dates, of one score, by loops; NaN without interval."""
    n = len(without)
    if n < 2 or any(map(math.isnan, without)):
        return math.nan, math.nan
    mean = math.fsum(without) / n
    added = [(n - 1) * (mean - value) for value in without]
    square = math.fsum(a * a for a in added)
    r = math.fsum(a * b for a, b in itertools.pairwise(added)) / square
    r = min(max(r + (1 + 3 * r) / n, 0), 1)
    independent = min(n * (1 - r) / (1 + r), n / longest_lead)
    cosines = 0 if n < 15 else min(8, int(independent / 5))
    if block_length is not None:
        cosines = min(n // block_length, n - 1)
    if cosines < 2:
        return math.nan, independent
    variance = 0.0
    for j in range(1, cosines + 1):
        wave = [math.cos(math.pi * j * (t + 0.5) / n) for t in range(n)]
        slow = math.sqrt(2 / n) * math.fsum(a * w for a, w in zip(added, wave, strict=True))
        variance += slow**2 / cosines
    return stats.t.ppf((1 + level) / 2, cosines) * math.sqrt(variance / n), independent


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 90),
    gaps=st.sampled_from([0.0, 0.4]),
    phi=st.sampled_from([0.0, 0.5]),
    lead=st.integers(1, 9),
    block_length=st.sampled_from([None, None, 1, 3, 30]),
    seed=st.integers(0, 99),
)
def test_intervals_equal_a_loop_over_dates_and_cosines(n, gaps, phi, lead, block_length, seed):
    rng = np.random.default_rng(seed)
    without = 1 + rng.normal(size=(n, 2, 3)) / 10
    for t in range(1, n):
        without[t] += phi * (without[t - 1] - 1)
    is_used = rng.random((n, 1, 3)) >= gaps
    without[0, 0, 2] = np.nan  # without this date there is no score
    leads = np.array([[1, lead, 1]])
    half, independent = Intervals(0.9, block_length).around(without, is_used, leads)
    for model in range(2):
        for group in range(3):
            dates = without[is_used[:, 0, group], model, group].tolist()
            expected = slow_interval(dates, 0.9, leads[0, group], block_length)
            np.testing.assert_allclose(half[model, group], expected[0], rtol=1e-6)
            np.testing.assert_allclose(independent[model, group], expected[1], rtol=1e-6)


@pytest.mark.slow
def test_the_interval_of_a_scorecard_is_that_of_its_scores_without_each_date():
    """All scores by one mechanism: those of cubes that lack the date, one after the other."""
    truth = truth_cube(train=40)
    forecast = forecast_cube(truth, range(40, 58), [1])
    options = {"baselines": "climatology", "progress": False, "block_length": 2}
    scores = evaluate(forecast, truth, **options).scores
    without = [
        evaluate(forecast.isel(init_time=np.arange(18) != t), truth, **options).scores
        for t in range(18)
    ]
    for name in ("rmse", "mae", "bias", "acc", "skill"):
        model = {"baseline": 0} if name == "skill" else {"model": 0}
        series = [float(s[name].isel(variable=0, **model)) for s in without]
        half, independent = slow_interval(series, block_length=2)
        one = scores.isel(variable=0, **model)
        assert float(one[f"{name}_independent"]) == pytest.approx(independent)
        for end, sign in (("low", -1), ("high", 1)):
            assert float(one[f"{name}_{end}"]) == pytest.approx(float(one[name]) + sign * half)


def test_ends_lie_within_what_a_score_can_be():
    errors = np.zeros(40)
    errors[5] = 9.0  # one date has all the error
    time = xr.date_range("2000-01-01", periods=40)
    truth = xr.DataArray(np.arange(40.0), {"time": time}, ["time"], "t")
    flat = xr.full_like(truth, 19.5)
    card = evaluate(truth + errors, truth, baselines={"flat": flat}, progress=False, block_length=1)
    one = card.scores.squeeze()
    assert one.rmse_low.sel(model="prediction") == one.mae_low.sel(model="prediction") == 0
    assert one.bias_low.sel(model="prediction") < 0
    assert one.skill_high == 1


@pytest.mark.parametrize("n", [14, 15])
def test_fifteen_dates_are_the_fewest(n):
    without = (np.arange(n)[:, None] % 2) + 1.0  # from one date to the next the other way round
    half, independent = Intervals(0.95, None).around(without, np.ones((n, 1), bool), np.ones(1))
    assert independent.item() == n
    assert np.isfinite(half.item()) == (n == 15)


def test_scores_that_may_be_negative_have_such_ends_and_shares_end_at_one():
    rng = np.random.default_rng(0)
    time = xr.date_range("2000-01-01", periods=60)
    noise = xr.DataArray(rng.normal(size=(2, 60)), {"time": time}, ["model", "time"], "t")
    own, truth = noise
    card = evaluate(own, truth, climatology=xr.zeros_like(truth[0]), progress=False)
    assert -1 < card.scores.acc_low.item() < 0 < card.scores.acc_high.item() < 1
    classes = card_of_classes(own > 0, truth > 0)
    assert -1 < classes.scores.kappa_low.item() < 0 < classes.scores.kappa_high.item() < 1
    one_wrong = truth > 0
    one_wrong[0] = ~one_wrong[0]
    classes = card_of_classes(one_wrong, truth > 0)
    assert classes.scores.accuracy.item() < classes.scores.accuracy_high.item() == 1
    assert classes.scores.balanced_accuracy_high.item() == 1
    assert float(classes.classes["t"].recall_high.max()) == 1


def card_of_classes(prediction, truth):
    return evaluate(prediction, truth, block_length=1, progress=False)


def autoregression(rng, n, phi, *shape):
    """Errors with unit variance that are phi of the last ones and something new."""
    errors = rng.normal(size=(n, *shape))
    for t in range(1, n):
        errors[t] = phi * errors[t - 1] + math.sqrt(1 - phi**2) * errors[t]
    return errors


def simulated(n, phi, draws, seed=0):
    """Scores of two equally good models on 4 cells, each draw a label."""
    rng = np.random.default_rng(seed)
    dims = ("time", "cell", "draw")
    coords = {"time": xr.date_range("2000-01-01", periods=n), "draw": np.arange(draws)}
    own, other = (
        xr.DataArray(autoregression(rng, n, phi, 4, draws), coords, dims, "t") for _ in range(2)
    )
    card = evaluate(
        own, own * 0, baselines={"other": other}, by="draw", metrics=["rmse", "bias"],
        weights=None, progress=False,
    )  # fmt: skip
    return card.scores.sel(variable="t").isel(model=0, baseline=0)


def coverage(scores, metric, true):
    """Share of draws with an interval, and how many of these contain the truth."""
    low, high = scores[f"{metric}_low"], scores[f"{metric}_high"]
    has = low.notnull()
    inside = (low <= true) & (true <= high)
    return float(has.mean()), float(inside[has].mean()) if has.any() else math.nan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "phi", "with_interval", "lowest"),
    [
        (365, 0.0, 1, 0.92),
        pytest.param(365, 0.8, 0.95, 0.91, marks=pytest.mark.soak),
        (1500, 0.95, 0.95, 0.91),
        (365, 0.95, 0, 0.84),
    ],
)
def test_intervals_of_lasting_errors_contain_the_truth(n, phi, with_interval, lowest):
    """The bars of 1,000 draws are .92 to .98, and .88 of the last; fewer draws vary more."""
    scores = simulated(n, phi, 400)
    for metric, true in (("rmse", 1), ("bias", 0), ("skill", 0)):
        share, inside = coverage(scores, metric, true)
        assert share >= with_interval, metric
        assert lowest <= inside <= 0.985, metric


@pytest.mark.filterwarnings("ignore:scores have no intervals")
def test_fourteen_months_have_no_interval_and_no_verdict():
    scores = simulated(14, 0.8, 100)
    for metric in ("rmse", "bias", "skill"):
        assert scores[f"{metric}_low"].isnull().all()
        assert scores[f"{metric}_high"].isnull().all()
    assert scores.rmse_independent.median() < 7  # truly 3


def test_dates_of_a_season_follow_one_another():
    """The errors of a year are the same: a season has about as many independent dates as years."""
    rng = np.random.default_rng(0)
    time = xr.date_range("1980-01-01", periods=480, freq="MS")
    of_year = np.repeat(rng.normal(size=41), 12)[1:481]  # December belongs to the next year
    truth = xr.DataArray(np.zeros(480), {"time": time}, ["time"], "t")
    scores = evaluate(truth + of_year, truth, by="season", progress=False).scores
    independent = scores.rmse_independent.sel(model="prediction").squeeze()
    assert ((independent > 40 / 2) & (independent < 40 * 1.5)).all()  # of 120 dates
    # in a month, a year lies between one date and the next
    monthly = evaluate(truth + of_year, truth, by="month", progress=False).scores
    assert (monthly.rmse_independent > 20).all()


def test_leads_of_a_group_count_in_steps_between_its_own_dates():
    truth = truth_cube(400, train=40)
    forecast = forecast_cube(truth, range(40, 390), [1, 6])
    by_lead = evaluate(forecast, truth, by="lead_time", progress=False).scores
    of_lead = by_lead.rmse_independent.squeeze().values
    assert of_lead[0] > 350 / 6
    assert of_lead[1] == pytest.approx(350 / 6)
    months = forecast.assign_coords(month=("init_time", forecast.init_time.dt.month.values))
    scores = evaluate(forecast, truth, by=["lead_time", months.month], progress=False).scores
    assert (scores.rmse_independent > 29 / 2).any()  # a year apart, leads of 6 do not overlap
