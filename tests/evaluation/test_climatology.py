"""Climatologies: cycles by the step of the data, train cells only, given ones."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate
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
    ("freq", "n", "cycle", "key"),
    [
        ("MS", 60, "month", lambda d: d.month),
        ("D", 1200, "dayofyear", lambda d: d.timetuple().tm_yday),
        ("12h", 2300, "dayofyear_hour", lambda d: (d.timetuple().tm_yday, d.hour)),
        ("10D", 120, "month", lambda d: d.month),
        ("YS", 20, "one mean", lambda d: 0),
    ],
)
def test_the_cycle_follows_from_the_step(calendar, freq, n, cycle, key):
    train = n - n // 3
    truth = truth_cube(n, 1, 1, freq=freq, calendar=calendar, train=train)
    found, described = climatology_error(truth, weights=None)
    assert cycle in described.split(" of ")[0].split()[-1] or described.startswith(cycle)
    values, groups = truth.t.values.ravel(), [key(d) for d in truth.indexes["time"]]
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
    with pytest.warns(UserWarning, match="'climatology' does in"):
        card = evaluate(truth, truth, baselines="climatology", by="month", progress=False)
    assert card.scores["count"].sel(month=9, model="climatology").item() == 0
    assert card.scores.unpredicted.sel(month=9, model="climatology").item() == 12 * 6
    # other scores do not need one
    alone = evaluate(truth, truth, by="month", progress=False)
    assert alone.scores["count"].sel(month=9).item() == 12 * 6
    assert alone.scores.acc.sel(month=9).isnull().all()


def test_invalid_climatologies():
    truth = truth_cube()
    forecast = forecast_cube(truth, range(40, 70), [1])
    with pytest.raises(InvalidValueError, match=r"climatology must be .*, got 'monthly'"):
        evaluate(forecast, truth, climatology="monthly")
    with pytest.raises(InvalidTypeError, match=r"climatology must be a Dataset .* got int"):
        evaluate(forecast, truth, climatology=3)
    with pytest.raises(InvalidValueError, match=r"dims of climatology must be .*, got 'week'"):
        evaluate(forecast, truth, climatology=xr.DataArray([1.0], dims="week", name="t"))
    with pytest.raises(InvalidValueError, match="climatology must have the variables \\['t'\\]"):
        evaluate(forecast, truth, climatology=xr.Dataset({"u": ("month", np.ones(12))}))
    for baseline in ("climatology", ["climatology"]):
        with pytest.raises(InvalidValueError, match="need train cells, but truth has no split"):
            evaluate(truth.drop_vars("split"), truth.drop_vars("split"), baselines=baseline)
    numbers = truth.assign_coords(time=np.arange(72))
    with pytest.raises(InvalidValueError, match="climatology='month' needs dates along 'time'"):
        evaluate(numbers, numbers, climatology="month")


def test_nothing_that_can_be_scored_is_an_error():
    """A split in space leaves no train cells where test cells are."""
    truth = truth_cube()
    part = xr.zeros_like(truth["split"].broadcast_like(truth["t"]))
    dim = next(str(dim) for dim in part.dims if dim != "time")
    part = part.where(part[dim] != part[dim][0], 1).astype("uint8")
    with pytest.raises(InvalidValueError, match="'climatology' has no value in any cell"):
        evaluate(truth, truth.assign(split=part), baselines="climatology", progress=False)
