"""Split labels, labels of scores, and weights that do not lie along all dims of a variable."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ml4cube.errors import InvalidValueError
from ml4cube.evaluation import Scorecard, evaluate, score_cube
from ml4cube.plotting import scorecard_figure
from tests import oracle_scorecard as oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube


def card_of(prediction, truth, **options):
    return evaluate(prediction, truth, **{"progress": False, **options})


def with_levels(cube, axis):
    """Add a variable with levels to that without."""
    return cube.assign(z=cube.t.expand_dims(level=[500, 1000], axis=axis) * 1.0)


def test_a_label_along_levels_is_that_of_variables_without_levels_where_all_agree():
    truth = with_levels(truth_cube(train=None), 1)
    parts = np.zeros((72, 2), "uint8")
    parts[:40] = 1
    parts[30:40, 1] = 0  # a surface is neither train nor test there
    truth["split"] = ("time", "level"), parts
    forecast = with_levels(forecast_cube(truth, range(20, 70), [1, 2]), 2)
    options = {"baselines": oracle.BASELINES, "by": "lead_time"}
    found = card_of(forecast, truth, **options).scores
    surface = truth[["t"]].assign(split=("time", np.repeat([1, 255, 0], [30, 10, 32])))
    expected = card_of(forecast[["t"]], surface, **options).scores
    xr.testing.assert_equal(found.sel(variable=["t"]), expected)
    assert (expected["count"] > 0).all()


def test_labels_of_cells_that_a_variable_lacks_are_refused():
    truth = with_levels(truth_cube(), 1)
    forecast = with_levels(forecast_cube(truth, range(40, 70), [1, 2]), 2)
    with pytest.raises(InvalidValueError, match=r"by='level' lies along \['level'\], which 't'"):
        card_of(forecast, truth, by="level")
    alone = card_of(forecast[["z"]], truth, by="level").scores
    assert alone.level.values.tolist() == [500, 1000]


@pytest.mark.parametrize("dim", ["lat", "time"])
def test_an_array_with_the_name_of_its_dim_holds_labels(dim):
    truth = truth_cube()
    prediction = truth[["t"]] + np.random.default_rng(0).normal(size=truth.t.shape)
    by = truth[dim] > truth[dim][1]
    assert by.name == dim
    found = card_of(prediction, truth, by=by, split=None).scores
    expected = score_cube(prediction, truth[["t"]], by=by)
    assert found[f"{dim}_label"].values.tolist() == [False, True]
    np.testing.assert_allclose(found.rmse.squeeze(), expected.rmse.squeeze())
    # its name alone means each step
    assert card_of(prediction, truth, by=dim, split=None).scores.sizes[dim] == truth.sizes[dim]


def test_numbers_beside_none_are_labels_that_json_keeps():
    truth = truth_cube()
    region = np.array([[1, None, 2, 2]] * 3, dtype=object)
    card = card_of(truth, truth, by=xr.DataArray(region, dims=("lat", "lon"), name="region"))
    assert card.scores.region.values.tolist() == [1, 2]
    xr.testing.assert_identical(Scorecard.from_json(card.to_json()).scores, card.scores)


def test_weights_must_have_the_coordinates_of_the_truth():
    truth = truth_cube()
    prediction = truth[["t"]] + truth.lat
    weights = xr.DataArray([1.0, 2.0, 4.0], {"lat": truth.lat.values}, ["lat"])
    expected = card_of(prediction, truth, weights=weights).scores.mae.item()
    np.testing.assert_allclose(expected, 60 * 5 / 7)
    with pytest.raises(InvalidValueError, match="weights has other 'lat' coordinates"):
        card_of(prediction, truth, weights=weights[::-1])
    with pytest.raises(InvalidValueError, match="weights has 6 cells along 'lat'"):
        card_of(prediction, truth, weights=xr.DataArray(np.ones(6), dims="lat"))


def test_a_dim_of_members_that_the_truth_has_too_is_one_of_cells():
    truth = truth_cube()
    members = xr.DataArray([0.0, 10.0, 20.0], dims="member")
    simulated = truth.assign(t=(truth.t + members).transpose("time", "member", ...))
    card = card_of(simulated[["t"]] + members, simulated, by="member")
    assert card.scores.bias.squeeze().values.tolist() == [0, 10, 20]
    assert "crps" not in card.scores


def test_dates_without_a_truth_are_no_gaps():
    truth = truth_cube()
    forecast = forecast_cube(truth, range(60, 72), [1, 2])
    for one in (truth, truth.assign(split=truth.split * 0)):
        scores = card_of(forecast, one, metrics="gaps").scores
        assert scores.gaps.item() == 0
        assert scores.attrs["dates_without_truth"] == 3
        assert scores.attrs["interval"] == "none, there is no score but numbers of cells"


def test_given_times_do_not_bring_test_cells_into_the_climatology():
    truth = truth_cube(train=40)
    forecast = forecast_cube(truth, range(40, 70), [1, 2])
    options = {"baselines": ["climatology", "damped_persistence"]}
    card = card_of(forecast, truth, **options, climatology=slice("2001", "2006"))
    xr.testing.assert_equal(card.scores, card_of(forecast, truth, **options).scores)
    assert card.attrs["climatology"].startswith("by month of the train cells of 'split' in the")
    with pytest.warns(UserWarning, match=r"2001-01-01 to 2004-12-01\), with 7 dates that the pred"):
        card_of(forecast, truth.drop_vars("split"), **options, climatology=slice("2001", "2004"))


def test_damping_uses_all_pairs_that_are_a_lead_apart():
    whole = truth_cube(train=60)
    kept = np.delete(np.arange(72), [5, 6, 17, 30])
    gappy = whole.copy(deep=True)
    gappy["t"] = whole.t.where(xr.DataArray(np.isin(np.arange(72), kept), dims="time"))
    forecast = forecast_cube(whole, range(60, 70), [2, 5])
    options = {"baselines": "damped_persistence", "by": "lead_time"}
    # dates that are missing are as dates without values
    found = card_of(forecast, whole.isel(time=kept), **options).scores
    xr.testing.assert_allclose(found, card_of(forecast, gappy, **options).scores)


def test_the_map_has_latitude_and_longitude_whatever_the_order_of_dims():
    truth = with_levels(truth_cube(), 2)[["z", "split"]]  # levels between latitude and longitude
    card = card_of(truth[["z"]] + 1, truth, baselines="climatology")
    axes = scorecard_figure(card.scores, card.map, card.spectrum).axes[1]
    for shown, name in ((axes.get_xlim(), "lon"), (axes.get_ylim(), "lat")):
        assert shown[0] <= truth[name].min() < truth[name].max() <= shown[1]
        assert np.ptp(shown) < 2.1 * np.ptp(truth[name].values)


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
def test_overlapping_forecasts_are_not_independent_whatever_the_unit_of_leads(calendar):
    truth = truth_cube(150, calendar=calendar, train=30)
    forecast = forecast_cube(truth, range(30, 140), [1, 9])
    in_months = forecast.assign_coords(lead_time=[1, 9])
    cards = [card_of(one, truth) for one in (forecast, in_months)]
    assert cards[0].scores.rmse_independent.item() == pytest.approx(110 / 9)
    xr.testing.assert_identical(cards[0].scores, cards[1].scores)
    parts = [in_months.isel(init_time=part) for part in (slice(50, None), slice(0, 50))]
    later, earlier = (card_of(part, truth) for part in parts)
    merged = Scorecard.from_json(later.merge(earlier).to_json())
    xr.testing.assert_allclose(merged.scores, cards[1].scores)


@pytest.mark.filterwarnings("ignore:.*lacks a value")
def test_a_cell_without_one_of_its_quantiles_is_not_scored():
    truth = truth_cube()
    levels = xr.DataArray([-1.0, 0.0, 1.0], {"quantile": [0.1, 0.5, 0.9]}, ["quantile"])
    prediction = truth[["t"]] + levels
    lacking = prediction.where((prediction["quantile"] > 0.2) | (prediction.lon > 0))
    found = card_of(lacking, truth)
    expected = card_of(prediction.where(prediction.lon > 0), truth)
    assert np.isfinite(expected.scores.crps.item())
    xr.testing.assert_equal(found.scores, expected.scores)
    xr.testing.assert_equal(found.reliability["t"], expected.reliability["t"])


def test_the_crps_of_one_value_is_its_absolute_error_beside_members_and_alone():
    truth = truth_cube().assign(u=truth_cube().t * 2)
    members = xr.DataArray([-1.0, 0.5, 1.0], dims="member")
    prediction = truth[["t", "u"]].assign(t=truth.t + members, u=truth.u + 3)
    beside = card_of(prediction, truth, baselines="climatology").scores.sel(variable="u")
    alone = card_of(prediction[["u"]], truth, baselines="climatology", metrics=["crps", "mae"])
    for scores in (beside, alone.scores.squeeze("variable")):
        np.testing.assert_allclose(scores.crps, scores.mae)
        np.testing.assert_allclose(scores.crps.sel(model="prediction"), 3)
        assert scores.crps_skill.item() < 0
