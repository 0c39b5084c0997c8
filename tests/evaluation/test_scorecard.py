"""Scorecards equal a loop over all pairs of cells, however they are read, cut and merged."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ml4cube.core.metric_registry import MEMBER, METRICS, SCORECARD_METRICS, VALUE
from ml4cube.cube.chunks import blocks
from ml4cube.errors import InvalidValueError
from ml4cube.evaluation import Scorecard, arguments, evaluate
from ml4cube.evaluation.cells.baselines import BASELINES
from ml4cube.evaluation.scores import row_groups
from ml4cube.evaluation.sums import scored_tile
from tests import oracle_scorecard as oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube

LAGS = [1, 2, 5]
WITH_ORACLE = ["rmse", "mse", "mae", "bias", "acc", "count", "unpredicted"]


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
@settings(max_examples=25)
@given(
    cycle=st.sampled_from([("MS", "month"), ("D", "mean"), ("6h", "season")]),
    calendar=st.sampled_from(["standard", "noleap", "360_day"]),
    gaps=st.sampled_from([0.0, 0.15]),
    order=st.permutations(["init_time", "lead_time", "lat", "lon"]),
    chunks=st.sampled_from([None, {"time": 7, "init_time": 3, "lat": 2}]),
    sizes=st.sampled_from([(2**21, 2**20), (30, 7)]),
    by_cell=st.booleans(),
    by_region=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_equal_a_loop_over_pairs(
    cycle, calendar, gaps, order, chunks, sizes, by_cell, by_region, seed
):
    freq, cycle = cycle
    truth = truth_cube(freq=freq, calendar=calendar, gaps=gaps, seed=seed)
    if by_cell:  # a label that varies in space too, with a buffer
        drawn = np.random.default_rng(seed).choice([0, 1, 1, 255], (72, 3))
        truth["split"] = ("time", "lat"), drawn.astype("uint8")
    inits = [0, 3, 40, 41, 47, 69]
    forecast = forecast_cube(truth, inits, LAGS, seed=seed)
    forecast["t"] = forecast.t.where(np.random.default_rng(seed).random(forecast.t.shape) > gaps)
    rows = rows_of(forecast, truth, cycle, inits)
    region = xr.DataArray([[0, 1, 1, 0]] * 3, dims=("lat", "lon"), name="region")
    given_truth, given_forecast = truth, forecast.transpose(*order)
    if chunks is not None:
        given_truth = truth.chunk({d: n for d, n in chunks.items() if d in truth.dims})
        given_forecast = given_forecast.chunk({d: n for d, n in chunks.items() if d in order})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_CELLS", sizes[0])
        patch.setattr(scored_tile, "_NUMBERS_AT_ONCE", sizes[1])
        card = evaluate(
            given_forecast,
            given_truth,
            baselines=oracle.BASELINES,
            by=["lead_time", region] if by_region else "lead_time",
            metrics=WITH_ORACLE,
            climatology=None if cycle == "month" else cycle,
            progress=False,
        )
    weights = weights_of(truth)
    for lead, label in itertools.product(range(len(LAGS)), [0, 1] if by_region else [None]):
        of_lead = [row for row in rows if row["lead"] == lead]
        one = card.scores.isel(variable=0, lead_time=lead)
        if label is not None:
            of_lead = [row for row in of_lead if region.values.ravel()[row["cell"]] == label]
            one = one.sel(region=label)
        mse = oracle.scores(of_lead, "prediction", weights).get("mse")
        for model in ("prediction", *oracle.BASELINES):
            expected = oracle.scores(of_lead, model, weights)
            check(one.sel(model=model), expected)
            if model != "prediction" and mse is not None:
                expected = {"skill": 1 - mse / expected["mse"]}
                check(one.sel(baseline=model), expected)


def card_of(forecast, truth, **options):
    return evaluate(forecast, truth, progress=False, **options)


@pytest.fixture(scope="module")
def truth():
    return truth_cube()


@pytest.fixture(scope="module")
def forecast(truth):
    return forecast_cube(truth, range(40, 71), LAGS)


def test_the_truth_as_its_own_forecast_is_perfect(truth):
    perfect = forecast_cube(truth, range(40, 71), LAGS, error=0)
    card = card_of(perfect, truth, baselines=oracle.BASELINES, by="lead_time", block_length=5)
    one = card.scores.sel(variable="t", model="prediction")
    for metric, value in {"rmse": 0, "mae": 0, "bias": 0, "acc": 1}.items():
        np.testing.assert_allclose(one[metric], value, atol=1e-12)
        np.testing.assert_allclose(one[f"{metric}_low"], value, atol=1e-12)
    assert (card.scores.skill == 1).all()
    assert (card.scores.skill_low == 1).all()
    assert (card.map.t_skill == 1).all()
    spectrum = card.spectrum.t
    np.testing.assert_allclose(spectrum.sel(source="prediction"), spectrum.sel(source="truth"))
    assert all("better" in sentence and "all lead times" in sentence for sentence in card.verdict)


def test_the_truth_as_its_own_plain_prediction_is_perfect(truth):
    card = card_of(truth, truth, baselines="climatology")
    one = card.scores.sel(variable="t")
    assert one["count"].values.tolist() == [32 * 12] * 2  # of the test part
    assert one.rmse.sel(model="prediction") == 0
    assert one.skill.item() == one.skill_low.item() == 1
    np.testing.assert_allclose(one.acc.sel(model="prediction"), 1)
    assert card.verdict == ["t is better than climatology."]
    assert "lead_time" not in card.spectrum.dims


def test_two_arrays_are_compared_whatever_their_names(truth):
    one = card_of((truth.t + 1).rename("x"), truth.t, split=None).scores
    assert one["variable"].values.tolist() == ["t"]
    assert one.units.values.tolist() == ["K"]
    np.testing.assert_allclose(one.bias, 1)


def test_a_tie_has_skill_zero_in_its_interval(truth, forecast):
    card = card_of(forecast, truth, baselines={"copy": forecast}, by="lead_time", block_length=5)
    for name in ("skill", "skill_low", "skill_high"):
        assert (card.scores[name] == 0).all()
    (sentence,) = card.verdict
    assert sentence.startswith("t is not clearly different from copy at all lead times. Of 3")
    contained = 0
    for seed in range(20):  # equally good forecasts, which differ
        other = forecast_cube(truth, range(40, 71), LAGS, seed=100 + seed)
        skill = card_of(forecast, truth, baselines={"b": other}, block_length=1).scores
        contained += bool((skill.skill_low <= 0).all() and (skill.skill_high >= 0).all())
    assert contained >= 16


def test_intervals_are_paired_and_repeatable(truth, forecast):
    noise = forecast_cube(truth, range(40, 71), LAGS, error=0, seed=5)
    worse = noise + 1.05 * (forecast.t - noise)
    options = {"baselines": {"worse": worse}, "by": "lead_time", "block_length": 3}
    one, again = (card_of(forecast, truth, **options).scores for _ in range(2))
    xr.testing.assert_identical(one, again)
    rmse = one.sel(variable="t").isel(lead_time=0)
    # the intervals of both errors overlap, but that of the skill is far from zero
    assert rmse.rmse_high.sel(model="prediction") > rmse.rmse_low.sel(model="worse")
    np.testing.assert_allclose(one.skill, 1 - 1 / 1.05**2)
    np.testing.assert_allclose(one.skill_low, one.skill)
    np.testing.assert_allclose(one.skill_high, one.skill)


def test_an_interval_of_independent_errors_is_that_of_the_textbook():
    n = 400
    errors = np.random.default_rng(0).normal(size=n)
    time = xr.date_range("2000-01-01", periods=n)
    truth = xr.DataArray(np.zeros(n), {"time": time}, ["time"], "t")
    scores = card_of(truth + errors, truth, metrics="bias", block_length=1).scores.squeeze()
    half = stats.t.ppf(0.975, n - 1) * errors.std(ddof=1) / np.sqrt(n)
    assert float(scores.bias_low) == pytest.approx(errors.mean() - half)
    assert float(scores.bias_high) == pytest.approx(errors.mean() + half)


@pytest.mark.slow
def test_labels_of_dates_and_cells(truth, forecast):
    rows = rows_of(forecast, truth, "month", range(40, 71))
    weights = weights_of(truth)
    season = ["DJF", "MAM", "JJA", "SON"]
    month = truth.time.dt.month.values
    region = xr.DataArray(
        [["a", "b", None, "a"]] * 3, {"lat": truth.lat, "lon": truth.lon}, ("lat", "lon"), "region"
    )
    warm = (truth.t > 0).where(truth.lat < 50).rename("warm")
    late = xr.DataArray(np.arange(31) > 9, dims="init_time", name="late")
    cases = {
        "season": ("season", lambda row: season[month[row["valid"]] % 12 // 3]),
        "month": ("month", lambda row: month[row["valid"]]),
        "region": (region, lambda row: region.values.ravel()[row["cell"]]),
        "warm": (
            warm,
            lambda row: warm.values.reshape(len(month), -1)[row["valid"], row["cell"]],
        ),
        "late": (late, lambda row: row["init"] > 9),
        "lat": ("lat", lambda row: np.repeat(truth.lat.values, 4)[row["cell"]]),
        "init_time": ("init_time", lambda row: forecast.init_time.values[row["init"]]),
        "time": ("time", lambda row: truth.time.values[row["valid"]]),
    }
    for name, (by, label_of) in cases.items():
        card = card_of(
            forecast,
            truth,
            baselines=oracle.BASELINES,
            by=["lead_time", by],
            metrics=WITH_ORACLE,
        )
        labels = {label_of(row) for row in rows}
        known = {label for label in labels if label is not None and label == label}
        assert set(card.scores[name].values.tolist()) <= {
            getattr(label, "item", lambda label=label: label)() for label in known
        }
        assert card.scores.sizes[name] == len(known)
        for label in known:
            for lead in (0, 2):
                chosen = [r for r in rows if label_of(r) == label and r["lead"] == lead]
                one = card.scores.sel({"variable": "t", name: label}).isel(lead_time=lead)
                check(one.sel(model="persistence"), oracle.scores(chosen, "persistence", weights))


def test_region_is_a_coordinate_of_the_truth_and_labels_combine(truth, forecast):
    named = truth.assign_coords(region=("lat", ["south", "tropics", "north"]))
    card = card_of(forecast, named, by=["season", "region", "lead_time"])
    assert card.scores.rmse.dims == ("variable", "model", "season", "region", "lead_time")
    alone = card_of(forecast.sel(lat=[60]), named.sel(lat=[60]), by="lead_time", weights=None)
    count = card.scores["count"].sel(region="north").sum("season")
    np.testing.assert_array_equal(count, alone.scores["count"])
    table = card.table
    assert list(table) == [
        "variable", "model", "metric", "baseline", "season", "region", "lead_time", "value", "low",
        "high", "independent",
    ]  # fmt: skip
    row = table[(table.metric == "rmse") & (table.region == "north") & (table.season == "DJF")]
    chosen = card.scores.rmse.sel(region="north", season="DJF", model="prediction").squeeze()
    np.testing.assert_array_equal(row["value"], chosen)


def test_parts_merge_into_the_whole_and_json_keeps_every_bit(truth, forecast):
    options = {
        "baselines": [*oracle.BASELINES, {"copy": forecast + 0.1}],
        "by": ["lead_time", "season", "lat"],
    }
    whole = card_of(forecast, truth, **options)
    parts = [forecast.isel(init_time=part) for part in (slice(20, 31), slice(0, 9), slice(9, 20))]
    first, *others = (card_of(part, truth, **options) for part in parts)
    for other in others:
        first = first.merge(Scorecard.from_json(other.to_json()))
    xr.testing.assert_allclose(first.scores, whole.scores, rtol=1e-12)
    xr.testing.assert_allclose(first.map, whole.map, rtol=1e-12)
    xr.testing.assert_allclose(first.spectrum, whole.spectrum, rtol=1e-12)
    assert first.verdict == whole.verdict
    again = Scorecard.from_json(whole.to_json())
    for one, other in ((again.scores, whole.scores), (again.map, whole.map)):
        xr.testing.assert_identical(one, other)
    assert repr(again) == repr(whole)
    assert again.to_json() == whole.to_json()


def test_scorecards_that_do_not_belong_together_are_not_merged(truth, forecast):
    card = card_of(forecast, truth, by="lead_time")
    for other, message in (
        (card, "of different 'init_time', got the same one"),
        (card_of(forecast, truth), r"same labels, got \('lead_time',\) and \(\)"),
        (card_of(forecast, truth, by="lead_time", level=0.9), "same options"),
        (card_of(forecast.isel(lead_time=[0]), truth, by="lead_time"), "'lead_time'"),
        (card_of(forecast.sel(lat=[0, 60]), truth.sel(lat=[0, 60]), by="lead_time"), "'lat'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            card.merge(other)


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
def test_one_forecast_and_dates_without_truth(calendar):
    truth = truth_cube(calendar=calendar)
    forecast = forecast_cube(truth, [70], LAGS)
    card = card_of(forecast.isel(init_time=0), truth, by="lead_time")
    assert card.scores["count"].values.ravel().tolist() == [12, 0, 0]
    assert card.scores.attrs["dates_without_truth"] == 2
    assert card.scores.rmse.isel(lead_time=1).isnull().all()
    whole = card_of(forecast.isel(lead_time=[0]), truth)
    one = card_of(forecast.isel(lead_time=0), truth)
    xr.testing.assert_equal(whole.scores, one.scores)


def test_without_valid_time_the_lead_time_counts(truth):
    daily = truth_cube(freq="D", train=40)
    forecast = forecast_cube(daily, range(40, 60), LAGS)
    given = card_of(forecast, daily, climatology="mean").scores
    without = forecast.drop_vars("valid_time")
    xr.testing.assert_equal(card_of(without, daily, climatology="mean").scores, given)
    numbers = without.assign_coords(lead_time=LAGS)
    with pytest.raises(InvalidValueError, match="needs a coordinate valid_time, or lead_time as"):
        card_of(numbers, daily)


def test_times_may_be_numbers():
    truth = truth_cube().assign_coords(time=np.arange(72) * 2.0)
    values = truth.t.values[np.add.outer([40, 50, 60], [1, 3])]
    forecast = xr.Dataset(
        {"t": (("init_time", "lead_time", "lat", "lon"), values + 1)},
        {"init_time": [80.0, 100.0, 120.0], "lead_time": [2.0, 6.0], "lat": truth.lat},
    )
    options = {"by": "lead_time", "metrics": WITH_ORACLE}
    card = card_of(forecast, truth, baselines="damped_persistence", **options)
    np.testing.assert_allclose(card.scores.bias.sel(model="prediction"), 1)
    rows = oracle.all_pairs(
        (values + 1).reshape(3, 2, -1),
        truth.t.values.reshape(72, -1),
        np.repeat(truth.split.values == 1, 12).reshape(72, 12),
        np.ones((72, 12), bool),
        [0] * 72,
        [40, 50, 60],
        [1, 3],
        ("damped_persistence",),
    )
    one = card.scores.sel(variable="t", model="damped_persistence")
    for lead in range(2):
        chosen = [row for row in rows if row["lead"] == lead]
        check(
            one.isel(lead_time=lead), oracle.scores(chosen, "damped_persistence", weights_of(truth))
        )


def test_given_baselines_are_matched_by_dates(truth, forecast):
    shifted = forecast.isel(init_time=slice(None, None, -1), lead_time=[2, 0]) + 0.5
    analysis = truth.t + 0.25
    card = card_of(
        forecast,
        truth,
        baselines={"other": shifted, "analysis": analysis},
        by="lead_time",
    )
    one = card.scores.sel(variable="t")
    np.testing.assert_allclose(one.bias.sel(model="analysis").isel(lead_time=[0, 2]), 0.25)
    bias = one.bias.sel(model="prediction").isel(lead_time=[0, 2])
    np.testing.assert_allclose(one.bias.sel(model="other").isel(lead_time=[0, 2]), bias + 0.5)
    # no model is scored at the lead time that one lacks
    assert one["count"].isel(lead_time=1).values.tolist() == [0, 0, 0]
    assert one.unpredicted.isel(lead_time=1).values.tolist() == [0, 30 * 12, 0]


def test_no_model_is_scored_where_one_lacks_a_value(truth, forecast):
    part = forecast.where(forecast.lon < 100)
    with pytest.warns(UserWarning, match=r"'prediction' does in 528 cells with a truth, 528 are"):
        card = card_of(part, truth, baselines="climatology")
    half = truth.sel(lon=slice(0, 99))
    alone = card_of(forecast.sel(lon=slice(0, 99)), half, baselines="climatology")
    xr.testing.assert_allclose(
        card.scores[["rmse", "acc", "skill", "count"]],
        alone.scores[["rmse", "acc", "skill", "count"]],
    )


def test_reading_is_lazy_and_each_chunk_is_read_once(truth, forecast):
    reads = []

    def counted(block, block_info=None):
        reads.append(block_info[0]["chunk-location"])
        return block

    chunked = forecast.chunk({"init_time": 8, "lead_time": 3, "lat": 3, "lon": 4})
    lazy = chunked.assign(t=chunked.t.copy(data=chunked.t.data.map_blocks(counted, dtype=float)))
    reads.clear()  # dask looks at the dtype
    card = card_of(lazy, truth.chunk({"time": 10}), baselines=oracle.BASELINES, by="lead_time")
    assert sorted(reads) == [(i, 0, 0, 0) for i in range(4)]
    eager = card_of(forecast, truth, baselines=oracle.BASELINES, by="lead_time")
    xr.testing.assert_allclose(card.scores, eager.scores)


@pytest.mark.slow
def test_inputs_are_not_changed(truth, forecast):
    before = truth.copy(deep=True), forecast.copy(deep=True)
    card_of(forecast, truth, baselines=oracle.BASELINES, by="lead_time").plot()
    xr.testing.assert_identical(truth, before[0])
    xr.testing.assert_identical(forecast, before[1])


def test_the_split_label_says_what_is_scored(truth, forecast):
    everything = forecast_cube(truth, range(0, 71), LAGS)
    test = card_of(everything, truth, by="lead_time")
    assert test.scores["count"].values.ravel().tolist() == [32 * 12, 32 * 12, 32 * 12]
    train = card_of(everything, truth, by="lead_time", split="train")
    both = card_of(everything, truth, by="lead_time", split=None)
    for name, cards in {"test": test, "train": train}.items():
        assert cards.attrs["scored"] == f"the {name} cells of 'split'"
    np.testing.assert_array_equal(
        both.scores["count"], test.scores["count"] + train.scores["count"]
    )
    with pytest.raises(InvalidValueError, match="no cell of 't' can be scored: the test cells"):
        card_of(everything.isel(init_time=slice(0, 9)), truth)


def test_the_repr_is_a_table_and_sentences(truth, forecast):
    options = {"baselines": ["persistence", "climatology"], "block_length": 5}
    text = repr(card_of(forecast, truth, **options))
    assert text.splitlines()[0] == (
        "<Scorecard> 31 forecasts at 3 lead times, 2004-05-01 to 2006-11-01"
    )
    assert text.splitlines()[2].split() == [
        *("variable", "lead_time", "prediction", "persistence", "climatology")
    ]
    assert "t is better than persistence at all lead times." in text
    assert "climatology: by month of the train cells of 'split'" in text


def test_starts_may_be_in_any_order(truth, forecast):
    order = np.random.default_rng(0).permutation(31)
    options = {"baselines": oracle.BASELINES, "by": ["lead_time", "season"]}
    mixed = card_of(forecast.isel(init_time=order), truth, **options)
    xr.testing.assert_allclose(mixed.scores, card_of(forecast, truth, **options).scores)


def test_intervals_do_not_depend_on_how_many_labels_fit(truth, forecast, monkeypatch):
    options = {"baselines": oracle.BASELINES, "by": ["month", "lat", "lead_time"]}
    card = card_of(forecast, truth, **options)
    monkeypatch.setattr(row_groups, "_MOST_NUMBERS", 200_000)
    xr.testing.assert_allclose(card_of(forecast, truth, **options).scores, card.scores)


def test_too_many_labels_are_refused(truth, forecast, monkeypatch):
    monkeypatch.setattr(arguments, "_MOST_BYTES", 1e5)
    with pytest.raises(InvalidValueError, match="sums for 12 of them at 93 dates and lead times"):
        card_of(forecast, truth, by=["lat", "lon"])


def test_a_path_is_opened(truth, forecast, tmp_path):
    for name, cube in {"truth": truth, "forecast": forecast}.items():
        cube.to_zarr(tmp_path / f"{name}.zarr", zarr_format=2)
    card = card_of(str(tmp_path / "forecast.zarr"), tmp_path / "truth.zarr", by="lead_time")
    xr.testing.assert_allclose(card.scores, card_of(forecast, truth, by="lead_time").scores)


@pytest.mark.slow
def test_torch_and_matplotlib_are_not_imported_to_score():
    code = (
        "import sys, ml4cube.evaluation;"
        "assert not {'torch', 'matplotlib'} & set(sys.modules), 'imported too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_json_keeps_calendars_texts_and_flags():
    truth = truth_cube(calendar="360_day")
    names = np.array(["land", "sea", "land"], dtype=object)
    truth = truth.assign_coords(region=("lat", names), warm=truth.t > 0)
    forecast = forecast_cube(truth, range(40, 70), [1])
    card = card_of(forecast, truth, by=["init_time", "region", "warm"], baselines="persistence")
    again = Scorecard.from_json(card.to_json())
    xr.testing.assert_identical(again.scores, card.scores)
    parts = [card_of(part, truth, by="region") for part in (forecast[{"init_time": slice(9)}],)]
    parts += [card_of(forecast[{"init_time": slice(9, 30)}], truth, by="region")]
    merged = Scorecard.from_json(parts[1].to_json()).merge(parts[0])
    xr.testing.assert_allclose(merged.scores, card_of(forecast, truth, by="region").scores)


def test_every_baseline_has_an_oracle():
    assert set(oracle.BASELINES) == set(BASELINES)


@pytest.mark.parametrize("metric", SCORECARD_METRICS)
def test_every_metric_is_scored_alone_if_it_applies(metric):
    """A quantity has no scores of classes, but those of members: a value is one member."""
    truth = truth_cube(120)
    forecast = forecast_cube(truth, range(60, 100), LAGS)
    positive = truth.assign(t=truth.t + 100)  # as a logarithm needs
    card = evaluate(forecast + 100, positive, metrics=metric, progress=False)
    applies = not {VALUE, MEMBER}.isdisjoint(METRICS[metric].predictions)
    assert (metric in card.scores and bool(card.scores[metric].notnull().any())) == applies
