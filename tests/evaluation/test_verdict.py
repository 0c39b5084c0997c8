"""Every sentence of a scorecard, and the condition under which it is said."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr

from ml4cube.evaluation import evaluate
from ml4cube.evaluation.scores.intervals import Intervals
from ml4cube.evaluation.scores.verdict import interval_text, lead_text, verdicts
from tests.evaluation.forecasts import forecast_cube, truth_cube

SIX = np.array([6, 24, 48, 72, 96, 120]).astype("m8[h]").astype("m8[ns]")
NO = np.nan


def by_lead(skill, half, leads=SIX, *, rmse=None, mae=None, independent=40.0, metric="rmse"):
    """Scores of one variable beside persistence; without leads if these are None."""
    dims = () if leads is None else ("lead_time",)
    coords = {} if leads is None else {"lead_time": leads}
    skill = xr.DataArray(np.array(skill, float), coords, dims)
    zero = xr.zeros_like(skill)
    width = zero + np.array(half, float)
    scores = {"skill": skill, "skill_low": skill - width, "skill_high": skill + width}
    scores["skill_independent"] = zero + np.array(independent, float)
    scores = xr.Dataset(scores).expand_dims(variable=["t"], baseline=["persistence"])
    for name, values in ((metric, rmse or (1.0, 2.0)), ("mae", mae or (1.0, 1.0))):
        of_models = [zero + np.array(value) for value in values]
        both = xr.concat(of_models, "model").expand_dims(variable=["t"])
        scores[name] = both.assign_coords(model=["prediction", "persistence"])
    return scores


def said(scores, groups=None):
    """The sentences, without those of groups unless these are given."""
    if groups is None:
        groups = scores.assign(skill=scores.skill * NO)
    (text,) = verdicts(scores, groups, Intervals(0.95, None), "31 dates")
    return text


def test_the_verdict_names_lead_times():
    assert said(by_lead([0.5, 0.4, 0.1, -0.3, NO, 0.2], 0.15)) == (
        "t is better than persistence at 6 h to 1 d and 5 d, not clearly different at 2 d, "
        "worse at 3 d, not comparable at 4 d."
    )


@pytest.mark.parametrize(
    ("skill", "half", "text"),
    [
        (0.3, 0.2, "t is better than persistence."),
        (0.3, 0.3, "t is not clearly different from persistence."),  # 0 is in the interval
        (-0.3, 0.3, "t is not clearly different from persistence."),
        (0.0, 0.0, "t is not clearly different from persistence."),
        (-0.3, 0.2, "t is worse than persistence."),
        (NO, NO, "t is not comparable with persistence."),
    ],
)
def test_an_interval_decides(skill, half, text):
    assert said(by_lead(skill, half, None)) == text
    of_lead = said(by_lead([skill], [half], SIX[:1]))
    assert of_lead == text.replace("persistence.", "persistence at a lead time of 6 h.")


@pytest.mark.parametrize("skill", [0.3, -0.3, 0.0])
def test_without_an_interval_nothing_is_decided(skill):
    text = said(by_lead(skill, NO, None, rmse=(1.05, 1.2), independent=4.7))
    assert text == (
        "Whether t is better than persistence cannot be decided: RMSE 1.05, of persistence 1.2; "
        "31 dates behave like 4 independent ones: too few to decide."
    )
    of_classes = by_lead(skill, NO, None, rmse=(0.8, 0.7), independent=0.2, metric="accuracy")
    sentence = said(of_classes)
    assert "cannot be decided: accuracy 0.8, of persistence 0.7; 31 dates behave like 1" in sentence
    assert sentence.endswith("like 1 independent one: too few to decide.")
    alone = said(by_lead(skill, NO, None, independent=NO))
    assert alone.endswith("RMSE 1, of persistence 2; a single date is too few to decide.")


def test_some_lead_times_may_be_undecided():
    rmse = ([1.0, 1.1, 1.3], [1.5, 1.2, 1.25])
    scores = by_lead([0.5, 0.1, 0.2], [0.1, NO, NO], SIX[:3], rmse=rmse, independent=[40, 9, 6])
    assert said(scores) == (
        "t is better than persistence at 6 h. Whether t is better than persistence at 1 d to 2 d "
        "cannot be decided: RMSE 1.1 to 1.3, of persistence 1.2 to 1.25; 31 dates behave like 6 to "
        "9 independent ones: too few to decide."
    )


@pytest.mark.parametrize(
    ("skill", "half", "mae", "is_said"),
    [
        (0.3, 0.1, (1.1, 1.0), True),
        (0.3, NO, (1.1, 1.0), True),
        (0.3, 0.1, (1.0, 1.1), False),
        (-0.3, 0.1, (1.1, 1.0), False),
        (-0.3, 0.1, (1.0, 1.1), True),
        (0.0, 0.1, (1.0, 1.1), False),
        (0.3, 0.1, (1.0, 1.0), False),
        (0.3, 0.1, (NO, NO), False),
    ],
)
def test_mae_that_disagrees_is_said(skill, half, mae, is_said):
    text = said(by_lead(skill, half, None, mae=mae))
    disagrees = f"By MAE it is the other way round: MAE {mae[0]:g}, of persistence {mae[1]:g}."
    assert text.endswith(disagrees) == ("By MAE" in text) == is_said


def test_the_lead_times_at_which_mae_disagrees():
    mae = ([1.0, 1.2, 1.3], [1.1, 1.1, 1.1])
    text = said(by_lead([0.3, 0.3, 0.3], 0.1, SIX[:3], mae=mae))
    assert text == (
        "t is better than persistence at all lead times. By MAE it is the other way round at 1 d "
        "to 2 d: MAE 1.2 to 1.3, of persistence 1.1."
    )
    without = by_lead(0.3, 0.1, None).drop_vars("mae")
    assert said(without) == "t is better than persistence."


def test_groups_say_how_many_would_differ_by_chance():
    scores = by_lead(0.3, 0.1, None)
    seasons = ["DJF", "MAM", "JJA", "SON"]
    groups = by_lead([0.3, -0.3, 0.05, 0.4], 0.1, seasons).rename(lead_time="season")
    assert said(scores, groups) == (
        "t is better than persistence. By season it is better in 2 and worse in 1 of 4 groups; of "
        "4 equally good ones 0.2 would differ by chance."
    )
    some = by_lead([0.3, -0.3, 0.05, 0.4], [0.1, 0.1, NO, NO], seasons).rename(lead_time="season")
    assert said(scores, some).endswith(
        "By season it is better in 1 and worse in 1 of 4 groups, cannot be decided in 2; of 2 "
        "equally good ones 0.1 would differ by chance."
    )
    none = by_lead([0.3, -0.3, NO, 0.4], NO, seasons).rename(lead_time="season")
    assert said(scores, none).endswith("By season it cannot be decided in any of 3 groups.")
    assert said(scores, groups.isel(season=[0])) == "t is better than persistence."
    assert "By season it is" in said(scores, groups.isel(season=[0, 1]))
    both = xr.concat([groups, groups], "region")
    (text,) = verdicts(scores, both, Intervals(0.9, None), "31 dates")
    assert "of 8 groups; of 8 equally good ones 0.8 would differ by chance." in text
    assert "By region and season it is" in text.replace(
        "By season and region", "By region and season"
    )


def test_lead_times_say_how_many_would_differ_by_chance():
    scores = by_lead([0.5, 0.4, 0.1], [0.1, 0.1, NO], SIX[:3])
    text = said(scores, scores)
    assert text.endswith("decide. Of 2 equally good lead times 0.1 would differ by chance.")
    assert "chance" not in said(scores, scores.isel(lead_time=[0, 2]))


def test_two_lead_times_are_all():
    text = said(by_lead([0.3, 0.3], 0.1, SIX[:2]))
    assert text == "t is better than persistence at all lead times."


def test_without_baselines_there_is_no_verdict():
    assert (
        verdicts(xr.Dataset({"rmse": 1.0}), xr.Dataset(), Intervals(0.95, None), "31 dates") == []
    )


@pytest.mark.parametrize(
    ("low", "independent", "length", "text"),
    [
        ([0.9, 0.8], [40.9, 30.0], None, "0.95, 31 dates behave like 30 to 40 independent ones"),
        ([0.9, NO], [30.2, 9.0], None,
         "0.95 for 1 of 2 scores, 31 dates behave like 9 to 30 independent ones"),
        ([NO, NO], [4.1, 4.2], None,
         "none, 31 dates behave like 4 independent ones: too few to decide"),
        ([NO, NO], [4.1, NO], None,
         "none, 31 dates behave like 4 independent ones: too few to decide"),
        ([NO, NO], [NO, NO], None, "none, a single date is too few to decide"),
        ([0.9, 0.8], [4.0, 4.0], 3, "0.95, blocks of 3 dates"),
        ([0.9, NO], [4.0, 4.0], 3, "0.95 for 1 of 2 scores, blocks of 3 dates"),
        ([NO, NO], [4.0, 4.0], 20, "none, 31 dates are fewer than two blocks of 20"),
    ],
)  # fmt: skip
def test_what_is_said_of_intervals(low, independent, length, text):
    arrays = {
        "rmse": [1.0, 1.0],
        "rmse_low": low,
        "rmse_high": low,
        "rmse_independent": independent,
    }
    scores = xr.Dataset({name: (("model", "season"), [a]) for name, a in arrays.items()})
    assert interval_text(scores, "31 dates", Intervals(0.95, length)) == text
    numbers = xr.Dataset({"count": 1.0})
    assert interval_text(numbers, "31 dates", Intervals(0.95, length)) == (
        "none, there is no score but numbers of cells"
    )


def test_intervals_are_described_by_the_prediction_alone():
    """A baseline whose errors last longer does not count, nor a metric that does not apply."""
    nothing = (("model",), [NO, NO])
    scores = {"acc": nothing, "acc_low": nothing, "acc_independent": nothing}
    scores |= {"rmse": (("model",), [1.0, 2.0]), "rmse_low": (("model",), [0.9, 1.9])}
    scores |= {"rmse_independent": (("model",), [50.0, 12.0])}
    text = interval_text(xr.Dataset(scores), "60 dates", Intervals(0.9, None))
    assert text == "0.9, 60 dates behave like 50 independent ones"


def test_lead_times_are_short_texts():
    leads = {6: "6 h", 24: "1 d", 36: "36 h", 72: "3 d", 78: "3.25 d", 744: "31 d"}
    for hours, text in leads.items():
        assert lead_text(np.timedelta64(hours, "h").astype("m8[ns]")) == text
    assert lead_text(np.int64(3)) == "3"


def series(n, errors, start="2000-01-01"):
    time = xr.date_range(start, periods=n)
    truth = xr.DataArray(np.arange(n) % 7.0, {"time": time}, ["time"], "t")
    return truth + errors, truth


def card_of(prediction, truth, **options):
    return evaluate(prediction, truth, progress=False, **options)


def test_a_card_of_few_dates_warns_and_decides_nothing():
    errors = np.tile([1.0, -1.0, 1.0, 3.0], 5)
    prediction, truth = series(14, errors[:14])
    said = "14 dates behave like 14 independent ones: too few to decide"
    with pytest.warns(
        UserWarning, match=f"^scores have no intervals, and nothing is decided: {said}"
    ):
        card = card_of(prediction, truth, baselines={"flat": xr.full_like(truth, 3.0)})
    assert card.scores.attrs["interval"] == f"none, {said}"
    assert card.why_no_interval == said
    assert card.scores.rmse_low.isnull().all()
    (sentence,) = card.verdict
    assert sentence.startswith("Whether t is better than flat cannot be decided: RMSE 1.65, of fl")
    assert f"interval: none, {said}" in repr(card)


def test_a_card_of_many_dates_does_not_warn():
    errors = np.random.default_rng(0).normal(size=60)
    prediction, truth = series(60, errors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        card = card_of(prediction, truth)
        by_date = card_of(prediction, truth, by="time")
    assert card.why_no_interval == ""
    assert card.scores.attrs["interval"].startswith("0.95, 60 dates behave like ")
    # each date by itself has no interval, as asked for, but all together have
    assert by_date.scores.attrs["interval"] == "none, a single date is too few to decide"
    assert by_date.scores.rmse_low.isnull().all()
    weeks = xr.DataArray(np.arange(60) // 59, {"time": truth.time}, name="part")
    text = card_of(prediction, truth, by=weeks, block_length=1).scores.attrs["interval"]
    assert text == "0.95 for 3 of 6 scores, blocks of 1 dates"
    text = card_of(prediction, truth, by=weeks * 0).scores.attrs["interval"]
    assert text.startswith("0.95, the dates of a score behave like ")
    by_lead = card_of(truth_forecast := forecast_cube(daily(), range(40, 90), [1, 2]), daily(),
                      by="lead_time", climatology="mean")  # fmt: skip
    assert truth_forecast.sizes["lead_time"] == 2
    assert ", 50 dates behave like " in by_lead.scores.attrs["interval"]


def daily():
    return truth_cube(120, freq="D", train=40)


def test_only_space_is_left_of_one_date():
    truth = truth_cube(n=1, lat=20, lon=40, train=None)
    with pytest.warns(UserWarning, match="nothing is decided: a single date is too few to decide"):
        card = card_of(truth + 1, truth, baselines={"other": truth + 2})
    assert card.scores.rmse_low.isnull().all()
    assert card.scores.skill.item() == 0.75
    assert card.verdict == [
        "Whether t is better than other cannot be decided: RMSE 1, of other 2; a single date is "
        "too few to decide."
    ]


def test_three_forecasts_decide_nothing_and_mae_says_the_opposite():
    """RMSE 2 and MAE 2 beside RMSE 2.65 and MAE 1.83."""
    truth = truth_cube()
    forecast = forecast_cube(truth, [40, 50, 60], [1], error=0)
    one_bad = forecast + xr.DataArray([0.5, 0.5, 4.5], dims="init_time")
    with pytest.warns(UserWarning, match="3 dates behave like"):
        card = card_of(forecast + 2, truth, baselines={"other": one_bad})
    (sentence,) = card.verdict
    assert "cannot be decided: RMSE 2, of other 2.63" in sentence
    assert sentence.endswith(
        "By MAE it is the other way round at a lead time of 31 d: MAE 2, of other 1.83."
    )


def test_groups_of_a_card_are_those_asked_for():
    errors = np.random.default_rng(0).normal(size=400) / 9
    prediction, truth = series(400, errors)
    flat = xr.full_like(truth, 3.0)
    (whole,) = card_of(prediction, truth, baselines={"flat": flat}).verdict
    assert whole == "t is better than flat."
    (text,) = card_of(prediction, truth, baselines={"flat": flat}, by="season").verdict
    assert text == (
        "t is better than flat. By season it is better in 4 and worse in 0 of 4 groups; of 4 "
        "equally good ones 0.2 would differ by chance."
    )


def test_merged_cards_say_what_the_whole_says():
    errors = np.random.default_rng(0).normal(size=60) / 9
    prediction, truth = series(60, errors)
    options = {"baselines": {"flat": xr.full_like(truth, 3.0)}, "metrics": "rmse"}
    whole = card_of(prediction, truth, **options)
    with pytest.warns(UserWarning, match="have no intervals"):
        parts = [card_of(prediction[part], truth, **options) for part in (slice(12), slice(12, 60))]
    merged = parts[0].merge(parts[1])
    assert parts[0].verdict != merged.verdict == whole.verdict
    assert merged.scores.attrs == whole.scores.attrs


def test_what_cannot_be_decided_has_its_own_reason():
    time = xr.date_range("2000-01-01", periods=200)
    noise = np.random.default_rng(0).normal(size=(3, 200))
    truth, own, other = (xr.DataArray(row, {"time": time}, ["time"], "t") for row in noise)
    flawless = evaluate(own, truth, baselines={"same": truth}, progress=False)
    assert flawless.verdict == [
        "Whether t is better than same cannot be decided: RMSE 1.45, of same 0; same has no error."
    ]
    with pytest.warns(UserWarning, match="200 dates are fewer than two blocks of 150"):
        card = evaluate(own, truth, baselines={"b": other}, block_length=150, progress=False)
    assert card.verdict[0].endswith("; 200 dates are fewer than two blocks of 150.")
