"""Invalid arguments of evaluate: one clear error, before any value is read."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate
from tests.cubes import no_compute
from tests.evaluation.forecasts import forecast_cube, truth_cube

TRUTH = truth_cube()
FORECAST = forecast_cube(TRUTH, range(40, 60), [1, 2])
PLAIN = TRUTH.isel(time=slice(40, 60))
SHIFTED = FORECAST.drop_vars("valid_time").assign_coords(
    init_time=FORECAST.init_time.values + np.timedelta64(5, "h")
)
ANOTHER_CALENDAR = truth_cube(calendar="noleap")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"baselines": "persistance"},
            r"baselines must be .*got 'persistance'; did you",
        ),
        ({"baselines": {"persistence": FORECAST}}, "must have another name, got 'persistence'"),
        ({"baselines": {"prediction": FORECAST}}, "must have another name, got 'prediction'"),
        ({"baselines": {"a": FORECAST.rename(t="u")}}, "the baseline 'a' lacks the variable 't'"),
        ({"baselines": {"a": FORECAST.isel(lat=0)}}, r"prediction of 't' must have the dims"),
        ({"baselines": {"a": TRUTH.isel(time=0)}}, r"baseline 'a' must have the dims 'init_time'"),
        ({"baselines": {"a": SHIFTED}}, "the baseline 'a' has no date of the prediction"),
        ({"baselines": {"a": ANOTHER_CALENDAR}}, "baseline 'a' has dates of the noleap calendar"),
        ({"metrics": "rsme"}, r"metrics must be .* got 'rsme'; did you mean 'rmse'"),
        ({"by": "leadtime"}, r"by must be .* got 'leadtime'; did you mean 'lead_time'"),
        ({"by": ["season", "season"]}, r"by must hold labels of different names.*got \['season', "),
        ({"by": xr.DataArray([0, 1], dims="lat", name="zone")}, "has 2 cells along 'lat'"),
        ({"split": "testing"}, r"split must be .* got 'testing'"),
        ({"weights": "areas"}, r"weights must be .* got 'areas'"),
        ({"weights": TRUTH.t**2}, "weights must lie along the dims of a step of 't'"),
        ({"weights": TRUTH.lat * 0 - 1}, "weights must be finite and not negative"),
        ({"level": 95}, "level must be between 0 and 1, got 95"),
        ({"block_length": 0}, "block_length must be at least 1, got 0"),
    ],
)
def test_invalid_values(options, message):
    lazy = (cube.assign(t=cube.t.chunk().reset_coords(drop=True)) for cube in (FORECAST, TRUTH))
    import dask

    with dask.config.set(scheduler=no_compute), pytest.raises(InvalidValueError, match=message):
        evaluate(*lazy, progress=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baselines": [3]}, "baselines must hold names, or a mapping .* got int"),
        ({"baselines": [FORECAST]}, r"mapping of names to cubes, got Dataset; give .* a name"),
        ({"by": 3}, "by must hold names or DataArrays, got int"),
        ({"weights": 3}, "weights must be 'area', the name of .*, a DataArray or None, got int"),
        ({"level": "high"}, "level must be a real number, got 'high'"),
        ({"data": TRUTH}, "data and predict need a model, got a predicted cube"),
    ],
)
def test_invalid_types(options, message):
    with pytest.raises(InvalidTypeError, match=message):
        evaluate(FORECAST, TRUTH, progress=False, **options)


@pytest.mark.parametrize(
    ("prediction", "truth", "message"),
    [
        (FORECAST.rename(t="u"), TRUTH, r"prediction has variables \['u'\], truth has \['t'\]"),
        (FORECAST.isel(init_time=0, drop=True), TRUTH, "must have the dims 'init_time' and 'lead"),
        (PLAIN.rename(time="step"), TRUTH, "must have the dims 'init_time' and 'lead_time', or 't"),
        (FORECAST, TRUTH.isel(time=0), "truth must have one time dim"),
        (
            FORECAST,
            TRUTH.isel(time=slice(None, None, -1)),
            "truth must have increasing dates along",
        ),
        (
            FORECAST,
            ANOTHER_CALENDAR,
            "of one calendar, got dates of the standard calendar",
        ),
        (
            FORECAST.assign_coords(lat=[0, 1, 2]),
            TRUTH,
            "of 't' has other 'lat' coordinates",
        ),
        (
            FORECAST,
            TRUTH.isel(time=slice(0, 30)),
            "must have dates that are predicted, got 2001",
        ),
        (FORECAST.isel(init_time=[0, 0]), TRUTH, "must have each date once along 'init_time'"),
        (PLAIN, TRUTH, r"\['persistence'\] start from the value at init_time, which"),
    ],
)
def test_cubes_that_do_not_fit(prediction, truth, message):
    baselines = ["persistence"] if prediction is PLAIN else []
    with pytest.raises(InvalidValueError, match=message):
        evaluate(prediction, truth, baselines=baselines, progress=False)


def test_lead_time_needs_a_forecast():
    with pytest.raises(InvalidValueError, match="by='lead_time' needs a prediction with the dim"):
        evaluate(PLAIN, TRUTH, by="lead_time", progress=False)


def test_packed_integers_are_refused():
    packed = TRUTH.assign(t=TRUTH.t.astype("int16").assign_attrs(scale_factor=0.1))
    with pytest.raises(InvalidValueError, match="has packed int16 values"):
        evaluate(FORECAST, packed, progress=False)
