"""Members, quantiles and probabilities of classes: scores equal their definitions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import Scorecard, evaluate
from ml4cube.evaluation.cells.probabilities import Outputs
from tests import oracle_scorecard as oracle
from tests.evaluation.forecasts import forecast_cube, truth_cube

LAGS = [1, 3]
INITS = range(40, 60)


def with_outputs(forecast, dim, labels, spread=1.0, seed=3):
    """Noise of several outputs around a forecast; quantiles in order."""
    noise = np.random.default_rng(seed).normal(size=(len(labels), *forecast.t.shape)) * spread
    if dim == "quantile":
        noise = np.sort(noise, axis=0)
    several = xr.DataArray(noise, {dim: labels}, (dim, *forecast.t.dims)) + forecast.t
    return several.transpose("init_time", "lead_time", dim, ...).to_dataset(name="t")


@pytest.fixture(scope="module")
def truth():
    return truth_cube(gaps=0.05)


@pytest.fixture(scope="module")
def forecast(truth):
    return forecast_cube(truth, INITS, LAGS)


def cells(forecast, truth, dim):
    """Truth, outputs, latitude and lead of each pair of cells."""
    values = forecast.t.transpose("init_time", "lead_time", "lat", "lon", dim).values
    for (i, lead, lat, lon), _ in np.ndenumerate(values[..., 0]):
        step = INITS[i] + LAGS[lead]
        if step < truth.sizes["time"]:
            true, outputs = float(truth.t[step, lat, lon]), values[i, lead, lat, lon]
            if np.isfinite(true) and np.isfinite(outputs).all():
                yield true, outputs.tolist(), lat, lead


def weighted(rows, weights, value):
    w = np.array([weights[lat] for _, _, lat, _ in rows])
    return float((w * [value(true, outputs) for true, outputs, *_ in rows]).sum() / w.sum())


AREAS = np.diff(np.sin(np.deg2rad([-90, -30, 30, 90])))


@pytest.mark.slow
@pytest.mark.parametrize("n_members", [1, 2, 7])
def test_members(truth, forecast, n_members):
    several = with_outputs(forecast, "member", np.arange(n_members))
    several["t"][2, 1, 0] = np.nan  # a member without values: the cells are left out
    with pytest.warns(UserWarning, match="no model is scored where one lacks a value"):
        card = evaluate(several, truth, baselines="persistence", by="lead_time", progress=False)
    for lead in range(2):
        rows = [row for row in cells(several, truth, "member") if row[-1] == lead]
        assert rows
        one = card.scores.isel(variable=0, lead_time=lead)
        # persistence lacks a value where the truth has a gap at the init time
        rows = common(rows, truth, several, lead)
        own, other = one.sel(model="prediction"), one.sel(model="persistence")
        assert own["count"] == len(rows)
        mse = weighted(rows, AREAS, lambda t, x: (np.mean(x) - t) ** 2)
        assert own.rmse.item() == pytest.approx(mse**0.5)
        crps = weighted(rows, AREAS, lambda t, x: oracle.crps_of_members(x, t))
        assert own.crps.item() == pytest.approx(crps)
        np.testing.assert_allclose(other.crps, other.mae)
        assert one.crps_skill.item() == pytest.approx(1 - crps / other.mae.item())
        if n_members > 1:
            m = n_members
            spread = weighted(rows, AREAS, lambda t, x, m=m: np.var(x, ddof=1) * (m + 1) / m)
            assert own.spread_ratio.item() == pytest.approx((spread / mse) ** 0.5)
    counts = np.zeros(n_members + 1)
    for lead in range(2):
        rows = [row for row in cells(several, truth, "member") if row[-1] == lead]
        for true, outputs, lat, _ in common(rows, truth, several, lead):
            counts[sum(x < true for x in outputs)] += AREAS[lat]
    frequency = card.reliability["t"].rank_frequency
    np.testing.assert_allclose(frequency, counts / counts.sum())


def common(rows, truth, several, lead):
    """Rows of which persistence has a value too."""
    flags = []
    values = several.t.transpose("init_time", "lead_time", "lat", "lon", "member").values
    for (i, j, lat, lon), _ in np.ndenumerate(values[..., 0]):
        step = INITS[i] + LAGS[j]
        has_truth = step < truth.sizes["time"] and np.isfinite(truth.t[step, lat, lon])
        if j == lead and has_truth and np.isfinite(values[i, j, lat, lon]).all():
            flags.append(bool(np.isfinite(truth.t[INITS[i], lat, lon])))
    return [row for row, flag in zip(rows, flags, strict=True) if flag]


def test_members_that_equal_the_truth_share_its_rank():
    time = xr.date_range("2000-01-01", periods=1)
    truth = xr.DataArray([1.0], {"time": time}, ["time"], "t")
    members = xr.DataArray([[0.0, 1.0, 1.0]], {"time": time}, ["time", "member"], "t")
    card = evaluate(members, truth, progress=False)
    np.testing.assert_allclose(card.reliability["t"].rank_frequency, [0, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("levels", [[0.05, 0.5, 0.95], [0.1, 0.4, 0.7, 0.8], [0.5]])
def test_quantiles(truth, forecast, levels):
    several = with_outputs(forecast, "quantile", levels)
    card = evaluate(several, truth, progress=False)
    rows = list(cells(several, truth, "quantile"))
    one = card.scores.squeeze()
    medians = weighted(rows, AREAS, lambda t, x: abs(np.interp(0.5, levels, x) - t))
    assert one.mae.item() == pytest.approx(medians)
    few = rows[::25]  # the oracle integrates slowly
    exact = [oracle.crps_of_quantiles(levels, x, t) for t, x, *_ in few]
    outputs = Outputs("quantile", np.array(levels))
    values = np.array([x for _, x, *_ in few])
    fast = outputs.crps(values, np.array([t for t, *_ in few]), 1)
    np.testing.assert_allclose(fast, exact, rtol=1e-3, atol=1e-3)
    total = weighted(rows, AREAS, lambda t, x: outputs.crps(np.array([x]), np.array([t]), 1)[0])
    assert one.crps.item() == pytest.approx(total)
    for i, coverage in enumerate(card.reliability["t"].coverage):
        below = weighted(rows, AREAS, lambda t, x, i=i: t <= x[i])
        assert coverage.item() == pytest.approx(below)
    assert "spread_ratio" not in card.scores


def test_the_crps_of_equal_quantiles_is_the_absolute_error(truth, forecast):
    same = forecast.t.expand_dims(quantile=[0.1, 0.5, 0.9]).to_dataset(name="t")
    scores = evaluate(same, truth, progress=False).scores
    np.testing.assert_allclose(scores.crps, scores.mae)


def class_cubes():
    """Land-cover labels with gaps, and probabilities of three of them."""
    rng = np.random.default_rng(0)
    time = xr.date_range("2000-01-01", periods=24, freq="MS")
    coords = {"time": time, "lat": [-60.0, 0.0, 60.0], "lon": np.arange(5) * 72.0}
    labels = rng.choice([2, 5, 9], (24, 3, 5)).astype("float32")
    labels[rng.random(labels.shape) < 0.1] = np.nan
    truth = xr.Dataset({"cover": (("time", "lat", "lon"), labels)}, coords)
    truth["split"] = "time", (np.arange(24) < 12).astype("uint8")
    raw = rng.random((24, 3, 3, 5)) ** 2
    raw /= raw.sum(1, keepdims=True)
    dims = ("time", "class", "lat", "lon")
    prediction = xr.Dataset({"cover": (dims, raw)}, {**coords, "class": [2, 5, 9]})
    return prediction.isel(time=slice(12, 24)), truth


def test_probabilities_of_classes():
    prediction, truth = class_cubes()
    card = evaluate(prediction, truth, baselines="climatology", progress=False)
    p = prediction.cover.transpose("time", "lat", "lon", "class").values
    t = truth.cover.values
    total = other = weights = 0.0
    bins = np.zeros((3, 10, 4))
    for (step, lat, lon), label in np.ndenumerate(t[12:]):
        month = step % 12
        usual = [
            float(t[month, lat, lon] == c) for c in (2, 5, 9)
        ]  # one train value for each month
        if np.isnan(label) or np.isnan(t[month, lat, lon]):
            continue
        w = AREAS[lat]
        weights += w
        for k, c in enumerate((2, 5, 9)):
            happened = label == c
            probability = p[step, lat, lon, k]
            total += w * (probability - happened) ** 2
            other += w * (usual[k] - happened) ** 2
            bins[k, int(probability * 10)] += w, w * probability, w * happened, 1
    scores = card.scores.squeeze()
    assert scores.brier.sel(model="prediction").item() == pytest.approx(total / weights)
    assert scores.brier.sel(model="climatology").item() == pytest.approx(other / weights)
    assert scores.skill.item() == pytest.approx(1 - total / other)
    assert "rmse" not in scores
    table = card.reliability["cover"]
    known = bins[..., 0] > 0
    np.testing.assert_array_equal(table["count"], bins[..., 3])
    for name, k in {"probability": 1, "observed_frequency": 2}.items():
        np.testing.assert_allclose(table[name].values[known], bins[known][:, k] / bins[known][:, 0])
    assert card.map.cover_skill.dims == ("baseline", "lat", "lon")
    assert not card.spectrum.data_vars


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([0.6, 0.9], "must increase between 0 and 1, and include 0.5 or lie on both sides"),
        ([0.9, 0.1], "must increase between 0 and 1"),
        ([0.1, 1.5], "must increase between 0 and 1"),
    ],
)
def test_quantiles_that_give_no_median_are_refused(truth, forecast, levels, message):
    several = with_outputs(forecast, "quantile", levels)
    with pytest.raises(InvalidValueError, match=message):
        evaluate(several, truth, progress=False)


def test_other_dims_of_outputs_are_refused(truth, forecast):
    both = with_outputs(forecast, "quantile", [0.1, 0.9]).expand_dims(member=2)
    with pytest.raises(InvalidValueError, match="'member' or 'quantile', not both"):
        evaluate(both, truth, progress=False)
    named = with_outputs(forecast, "head", ["a", "b"])
    with pytest.raises(InvalidValueError, match=r"may have 'member', 'quantile' or 'class', got"):
        evaluate(named, truth, progress=False)


def test_labels_of_classes_must_be_those_of_the_truth():
    prediction, truth = class_cubes()
    named = prediction.assign_coords({"class": ["crop", "wood", "town"]})
    with pytest.raises(InvalidTypeError, match="labels along 'class' of 'cover' must hold real"):
        evaluate(named, truth, progress=False)


@pytest.mark.parametrize("n", [3, 8, 9])
def test_fewer_than_nine_levels_are_not_called_the_crps(truth, forecast, n):
    levels = np.linspace(0.025, 0.975, n)
    several = with_outputs(forecast, "quantile", levels)
    text = f"crps of 't' is the weighted quantile loss of {n} levels, not the CRPS, which needs 9"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        card = evaluate(several, truth, progress=False)
        n_said = sum(text in str(warning.message) for warning in caught)
        evaluate(several, truth, metrics="rmse", progress=False)  # which it does not concern
    assert n_said == (n < 9)
    assert sum(text in str(warning.message) for warning in caught) == n_said
    name = "weighted quantile loss" if n < 9 else "continuous ranked probability score"
    assert card.scores.crps.attrs["long_name"] == name
    assert Scorecard.from_json(card.to_json()).scores.crps.attrs["long_name"] == name


def test_three_levels_have_less_loss_than_the_whole_distribution():
    """Of a normal truth and its true quantiles: 0.77 of the CRPS, 1 / sqrt(pi)."""
    true = np.random.default_rng(0).normal(size=20_000)
    losses = []
    for levels in ([0.025, 0.5, 0.975], np.arange(0.05, 1, 0.1), np.arange(0.005, 1, 0.01)):
        outputs = Outputs("quantile", np.array(levels))
        quantiles = np.broadcast_to(stats.norm.ppf(levels), (true.size, len(levels)))
        losses.append(outputs.crps(quantiles, true, 1).mean() * np.pi**0.5)
    assert losses == pytest.approx([0.77, 1.0, 1.0], abs=0.02)


def test_a_point_baseline_is_called_one_beside_a_distribution(truth, forecast):
    several = with_outputs(forecast, "member", range(6))
    options = {"baselines": ["persistence", {"members": several + 1}], "progress": False}
    card = evaluate(several, truth, **options)
    text = "persistence: a value, not a distribution; crps is its absolute error"
    assert card.scores.attrs["point_baselines"] == text
    assert f"point_baselines: {text}" in repr(card)
    assert "point_baselines" not in evaluate(forecast, truth, **options).scores.attrs
    # fewer than nine members have the CRPS nevertheless
    assert card.scores.crps.attrs["long_name"] == "continuous ranked probability score"
