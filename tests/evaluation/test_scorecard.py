"""Scorecards equal a loop over all pairs of cells, however they are read, cut and merged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.evaluation import evaluate, scoring
from tests import oracle_scorecard as oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube

LAGS = [1, 2, 5]
METRICS = ["rmse", "mse", "mae", "bias", "acc", "count", "unpredicted"]


def group(date, cycle):
    if cycle == "month":
        return date.month
    return date.month % 12 // 3 if cycle == "season" else "always"


def rows_of(forecast, truth, cycle, inits, names=oracle.BASELINES, lags=LAGS, scored=None):
    """All pairs, by the oracle."""
    n = truth.sizes["time"]
    values = truth.t.transpose("time", "lat", "lon").values.reshape(n, -1)
    flags = truth.split.broadcast_like(truth.t).transpose("time", "lat", "lon").values
    flags = flags.reshape(n, -1)
    predicted = forecast.t.transpose("init_time", "lead_time", "lat", "lon").values
    dates = truth.indexes["time"]
    return oracle.all_pairs(
        predicted.reshape(*predicted.shape[:2], -1),
        values,
        flags == 1,
        flags == 0 if scored is None else scored,
        [group(date, cycle) for date in dates],
        list(inits),
        lags,
        names,
    )


def weights_of(truth):
    assert truth.lat.values.tolist() == [-60, 0, 60]
    edges = np.sin(np.deg2rad([-90, -30, 30, 90]))
    return np.repeat(np.diff(edges), truth.sizes["lon"])


def check(scores, expected):
    for metric, value in expected.items():
        np.testing.assert_allclose(
            float(scores[metric]), value, rtol=1e-9, atol=1e-12, err_msg=metric
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lacks a value")
@settings(max_examples=25, deadline=None)
@given(
    cycle=st.sampled_from([("MS", "month"), ("D", "mean"), ("6h", "season")]),
    calendar=st.sampled_from(["standard", "noleap", "360_day"]),
    gaps=st.sampled_from([0.0, 0.15]),
    order=st.permutations(["init_time", "lead_time", "lat", "lon"]),
    chunks=st.sampled_from([None, {"time": 7, "init_time": 3, "lat": 2}]),
    sizes=st.sampled_from([(2**20, 2**24, 2**27), (7, 30, 2000)]),
    by_cell=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_equal_a_loop_over_pairs(cycle, calendar, gaps, order, chunks, sizes, by_cell, seed):
    freq, cycle = cycle
    truth = truth_cube(freq=freq, calendar=calendar, gaps=gaps, seed=seed)
    if by_cell:  # a label that varies in space too, with a buffer
        drawn = np.random.default_rng(seed).choice([0, 1, 1, 255], (72, 3))
        truth["split"] = ("time", "lat"), drawn.astype("uint8")
    inits = [0, 3, 40, 41, 47, 69]
    forecast = forecast_cube(truth, inits, LAGS, seed=seed)
    forecast["t"] = forecast.t.where(np.random.default_rng(seed).random(forecast.t.shape) > gaps)
    rows = rows_of(forecast, truth, cycle, inits)
    given_truth, given_forecast = truth, forecast.transpose(*order)
    if chunks is not None:
        given_truth = truth.chunk({d: n for d, n in chunks.items() if d in truth.dims})
        given_forecast = given_forecast.chunk({d: n for d, n in chunks.items() if d in order})
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_BLOCK_CELLS", "_READ_CELLS", "_TILE_BYTES"), sizes, strict=True):
            patch.setattr(scoring, name, size)
        card = evaluate(
            given_forecast,
            given_truth,
            baselines=oracle.BASELINES,
            by="lead_time",
            metrics=METRICS,
            climatology=None if cycle == "month" else cycle,
            n_boot=0,
            progress=False,
        )
    weights = weights_of(truth)
    for lead in range(len(LAGS)):
        of_lead = [row for row in rows if row["lead"] == lead]
        one = card.scores.isel(variable=0, lead_time=lead)
        mse = oracle.scores(of_lead, "prediction", weights).get("mse")
        for model in ("prediction", *oracle.BASELINES):
            expected = oracle.scores(of_lead, model, weights)
            check(one.sel(model=model), expected)
            if model != "prediction" and mse is not None:
                expected = {"skill": 1 - mse / expected["mse"]}
                check(one.sel(baseline=model), expected)
