"""Maps of skill, spectra and the figure of a scorecard."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ml4cube.errors import InvalidValueError
from ml4cube.evaluation import evaluate
from tests import oracle_scorecard as oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube
from tests.test_plotting import rendered

AREAS = np.diff(np.sin(np.deg2rad([-90, -30, 30, 90])))


def card_of(forecast, truth, **options):
    return evaluate(forecast, truth, progress=False, **options)


@pytest.fixture(scope="module")
def truth():
    cube = truth_cube(lon=5)
    cube.t[50, 0, 2] = np.nan
    return cube


@pytest.fixture(scope="module")
def forecast(truth):
    return forecast_cube(truth, range(40, 70), [1, 2])


def test_the_map_has_the_scores_of_each_cell(truth, forecast):
    card = card_of(forecast, truth, baselines="climatology")
    alone = card_of(forecast, truth, baselines="climatology", by=["lat", "lon"], weights=None)
    scores = alone.scores.sel(variable="t")
    order = ("model", "lat", "lon")
    np.testing.assert_allclose(card.map.t_rmse.transpose(*order), scores.rmse.transpose(*order))
    np.testing.assert_allclose(card.map.t_skill, scores.skill.transpose("baseline", "lat", "lon"))


@pytest.mark.parametrize("order", [("time", "lat", "lon"), ("lon", "time", "lat")])
def test_the_spectrum_is_that_of_complete_rows(truth, forecast, order):
    card = card_of(forecast, truth.transpose(*order))
    spectrum = card.spectrum.t
    assert spectrum.attrs == {"units": "K²", "rows_along": "lon"}
    values = {"prediction": forecast.t.values, "truth": None}
    for lead, lag in enumerate([1, 2]):
        total = {source: np.zeros(3) for source in values}
        weight = 0.0
        for i, init in enumerate(range(40, 70)):
            if init + lag >= 72:
                continue
            for lat in range(3):
                rows = {"prediction": forecast.t.values[i, lead, lat]}
                rows["truth"] = truth.t.values[init + lag, lat]
                if not all(np.isfinite(row).all() for row in rows.values()):
                    continue
                weight += AREAS[lat]
                for source, row in rows.items():
                    total[source] += AREAS[lat] * np.array(oracle.power(row))
        for source, power in total.items():
            found = spectrum.sel(source=source).isel(lead_time=lead)
            np.testing.assert_allclose(found, power / weight)


def test_the_power_of_all_wavenumbers_is_the_mean_square():
    truth = truth_cube(lon=6)
    card = card_of(truth, truth, weights=None)
    square = float((truth.t.isel(time=slice(40, None)) ** 2).mean())
    np.testing.assert_allclose(card.spectrum.t.sum("wavenumber"), square)


def test_a_level_has_rows_and_a_curvilinear_grid_too():
    truth = truth_cube()
    levels = truth.expand_dims(level=[1, 2]).drop_vars("split").assign(split=truth.split)
    forecast = forecast_cube(levels.transpose("level", "time", ...), range(40, 70), [1])
    card = card_of(forecast, levels, baselines="climatology")
    flat = card_of(forecast.isel(level=0), truth, baselines="climatology")
    assert card.map.t_skill.dims == ("baseline", "level", "lat", "lon")
    xr.testing.assert_allclose(
        card.map.t_rmse.isel(level=0, drop=True).sel(model="climatology"),
        flat.map.t_rmse.sel(model="climatology"),
    )
    curved = truth.rename(lat="y", lon="x").drop_vars(["y", "x"])
    lon, lat = np.meshgrid(np.arange(4.0), np.arange(3.0))
    curved = curved.assign_coords(lat=(("y", "x"), lat + lon), lon=(("y", "x"), lon))
    assert card_of(curved, curved).spectrum.t.attrs["rows_along"] == "x"


def test_points_have_neither_map_nor_spectrum(truth):
    station = truth.isel(lat=0, lon=0)
    card = card_of(station, station, baselines="climatology")
    assert not card.spectrum.data_vars
    assert card.map.t_rmse.dims == ("model",)
    assert len(rendered(card.plot()).axes) == 1


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.slow
def test_the_figure_shows_skill_its_map_and_spectra(truth, forecast):
    both = truth.assign(u=truth.t * 2 + 1)
    predicted = forecast.assign(u=forecast.t * 2 + 1)
    card = card_of(predicted, both, baselines=["persistence", "damped_persistence"])
    figure = rendered(card.plot())
    skill, skill_map, spectrum, *second = [a for a in figure.axes if a.get_label() != "<colorbar>"]
    assert len(second) == 3
    assert labels_of(skill) == ["persistence", "damped persistence"]
    assert [tick.get_text() for tick in skill.get_xticklabels()] == ["31", "61"]
    assert skill_map.get_title(loc="left") == "Skill over damped persistence"
    mesh = skill_map.collections[0]
    assert mesh.norm.vmin == -mesh.norm.vmax
    expected = card.map.t_skill.sel(baseline="damped_persistence").values
    np.testing.assert_allclose(np.ma.filled(mesh.get_array(), np.nan), expected)
    assert labels_of(spectrum) == ["truth", "prediction, 31 days", "prediction, 61 days"]
    assert spectrum.get_ylabel() == "power (K²)"
    other = card.plot("persistence")
    assert "Skill over persistence" in [a.get_title(loc="left") for a in other.axes]
    with pytest.raises(InvalidValueError, match=r"baseline must be .* got 'persistance'"):
        card.plot("persistance")


@pytest.mark.slow
def test_the_figure_of_a_plain_prediction_and_of_one_without_baselines(truth, forecast):
    prediction = truth.assign(t=truth.t + 1)
    skill, *_ = rendered(card_of(prediction, truth, baselines="climatology").plot()).axes
    assert [tick.get_text() for tick in skill.get_xticklabels()] == ["climatology"]
    rmse, *_ = rendered(card_of(forecast, truth).plot()).axes
    assert rmse.get_ylabel() == "RMSE (K)"
    assert labels_of(rmse) == ["prediction"]


def have_bars(axes):
    """Whether each point has a bar."""
    bars = [bars for container in axes.containers for bars in container[2]]
    segments = [segment for several in bars for segment in several.get_segments()]
    return [len(segment) > 0 and np.ptp(segment[:, 1]) > 0 for segment in segments]


@pytest.mark.slow
def test_a_score_without_an_interval_has_no_bar_and_the_figure_says_so(truth, forecast):
    few = forecast.isel(init_time=slice(0, 18))  # 9 of two steps ahead
    for one, options, expected in (
        (forecast, {"block_length": 3}, [True, True]),
        (forecast, {"block_length": 30}, [False, False]),
        (few, {}, [True, False]),
    ):
        card = card_of(one, truth, baselines="climatology", **options)
        axes = rendered(card.plot()).axes[0]
        note = "" if all(expected) else "; without a bar: no interval"
        assert axes.get_xlabel() == "lead time (days)" + note
        assert have_bars(axes) == expected
    plain = card_of(truth.assign(t=truth.t + 1).isel(time=slice(40, 50)), truth)
    assert rendered(plain.plot()).axes[0].get_xlabel() == "without a bar: no interval"


@pytest.mark.slow
def test_the_figure_leaves_out_a_spectrum_of_maps_with_gaps_in_all_rows(truth, forecast):
    gappy = truth.where(truth.lon > truth.lon[0])
    figure = rendered(card_of(forecast, gappy, baselines="persistence").plot())
    assert not any("Spectrum" in axes.get_title(loc="left") for axes in figure.axes)
