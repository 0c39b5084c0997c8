"""Beside members and quantiles the climatology is a distribution, which nothing beats by spread."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from ml4cube.evaluation import Scorecard, evaluate
from ml4cube.evaluation.cells.climatology_distribution import _quantiles
from tests.evaluation.forecasts import truth_cube

SPREAD = np.tile([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0], 60)  # by month


def cubes(years=40, members=0, levels=(), *, gaps=0.0, seed=0):
    """A yearly cycle and noise that is three times as strong in summer; 20 years are test."""
    rng = np.random.default_rng(seed)
    n = 12 * (years + 20)
    time = xr.date_range("1950-01-01", periods=n, freq="MS")
    cycle, spread = 5 * np.cos(np.arange(n) * np.pi / 6), SPREAD[:n]
    values = cycle[:, None] + spread[:, None] * rng.normal(size=(n, 8))
    values[rng.random(values.shape) < gaps] = np.nan
    truth = xr.Dataset({"t": (("time", "x"), values)}, {"time": time})
    truth["split"] = "time", (np.arange(n) < 12 * years).astype("uint8")
    dim, size = ("member", members) if members else ("quantile", len(levels))
    drawn = rng.normal(size=(n, 8, size))
    if levels:
        drawn = np.broadcast_to(stats.norm.ppf(levels), drawn.shape)
    several = cycle[:, None, None] + spread[:, None, None] * drawn
    coords = {"time": time} | ({"quantile": list(levels)} if levels else {})
    prediction = xr.Dataset({"t": (("time", "x", dim), several)}, coords)
    return prediction.isel(time=slice(12 * years, None)), truth


def card_of(prediction, truth, **options):
    options = {"baselines": "climatology", "climatology": "month"} | options
    return evaluate(prediction, truth, progress=False, **options)


@pytest.mark.parametrize(
    ("options", "gaps"),
    [({"members": 20}, 0.0), ({"members": 3}, 0.3), ({"levels": np.arange(0.05, 1, 0.1)}, 0.0)],
)
def test_members_of_the_climatology_have_no_skill_over_it(options, gaps):
    prediction, truth = cubes(**{**options, "levels": tuple(options.get("levels", ()))}, gaps=gaps)
    card = card_of(prediction, truth)
    assert 0 < card.scores.crps_skill.item() < 0.06  # of the noise of 40 years, as below
    point = xr.full_like(truth.t, 0.0) + 5 * np.cos(np.arange(truth.time.size) * np.pi / 6)[:, None]
    beside = card_of(prediction, truth, baselines={"point": point})
    assert beside.scores.crps_skill.item() == pytest.approx(0.29, abs=0.02)
    assert card.point_baselines == ""
    assert beside.point_baselines.startswith("point: a value, not a distribution")


@pytest.mark.filterwarnings("ignore:crps of .* weighted quantile loss")
def test_few_levels_are_compared_at_the_same_levels():
    prediction, truth = cubes(levels=(0.025, 0.5, 0.975))
    assert 0 < card_of(prediction, truth).scores.crps_skill.item() < 0.06


@pytest.mark.parametrize("years", [5, 20])
def test_the_skill_over_a_distribution_is_that_over_its_noisy_mean(years):
    """Means of few years are noisy, which the RMSE shows as well; the spread adds nothing."""
    prediction, truth = cubes(years, levels=tuple(np.arange(0.05, 1, 0.1)))
    scores = card_of(prediction, truth).scores
    assert scores.skill.item() == pytest.approx(1 / (years + 1), abs=0.03)
    assert 0 < scores.crps_skill.item() < scores.skill.item() + 0.01


def test_the_distribution_changes_nothing_but_the_crps():
    prediction, truth = cubes(members=10)
    beside, mean = card_of(prediction, truth).scores, prediction.mean("member")
    alone = card_of(mean, truth).scores
    for name in ("rmse", "mae", "acc", "skill", "count"):
        np.testing.assert_allclose(beside[name], alone[name])
    baseline = {"model": "climatology"}
    assert beside.crps.sel(baseline).item() < alone.mae.sel(baseline).item() * 0.8


def test_a_given_climatology_without_train_cells_is_a_point():
    prediction, truth = cubes(members=5)
    test = truth.sel(time=prediction.time).drop_vars("split")
    means = truth.t.isel(time=slice(0, 12)) * 0
    means = means.assign_coords(time=np.arange(1, 13)).rename(time="month")
    card = card_of(prediction, test, climatology=means)
    assert card.point_baselines.startswith("climatology: a value")
    assert card.scores.crps.sel(model="climatology") == card.scores.mae.sel(model="climatology")


def test_merged_and_saved_scorecards_know_what_is_a_distribution():
    prediction, truth = cubes(members=5)
    whole = card_of(prediction, truth)
    parts = [card_of(prediction.isel(time=part), truth) for part in (slice(99), slice(99, None))]
    merged = Scorecard.from_json(parts[1].to_json()).merge(parts[0])
    xr.testing.assert_allclose(merged.scores, whole.scores)
    assert merged.scores.attrs == whole.scores.attrs
    assert merged.sums.first.outputs.values.tolist() == ["member", "quantile"]


def test_quantiles_equal_a_loop_over_cells():
    rng = np.random.default_rng(0)
    values, levels = rng.normal(size=(11, 4, 5)), np.array([0.02, 0.3, 0.5, 0.99])
    values[rng.random(values.shape) < 0.4] = np.nan
    values[:, 0, 0] = np.nan
    values[1:, 0, 1] = np.nan
    found = _quantiles(values, levels)
    assert (found[:, 0, 0] == 0).all()
    for i, j in np.ndindex(4, 5):
        of_cell = values[np.isfinite(values[:, i, j]), i, j]
        if of_cell.size:
            expected = np.quantile(of_cell, levels, method="weibull")
            np.testing.assert_allclose(found[:, i, j], expected)


def test_times_without_a_calendar_have_one_season():
    truth = truth_cube(200, train=100).assign_coords(time=np.arange(200))
    members = xr.DataArray(np.random.default_rng(0).normal(size=30), dims="member")
    card = card_of(truth[["t"]].isel(time=slice(100, None)) * 0 + members, truth, climatology=None)
    assert card.point_baselines == ""
    assert card.scores.crps_skill.item() < 0.3
