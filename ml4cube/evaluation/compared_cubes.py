"""`ComparedCubes`: prediction, truth and given baselines, opened and matched by date."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import check_left_out, data_variables
from ml4cube.evaluation.cells.baselines import FROM_INIT, PREDICTION
from ml4cube.evaluation.cells.cell_reader import Steps
from ml4cube.evaluation.cells.predicted import matching_steps, own_steps
from ml4cube.evaluation.cells.timing import Timing, with_forecast_dims
from ml4cube.ledger.locations import store_and_path

Models = dict[str, tuple[xr.Dataset, Mapping[str, Steps]]]


class ComparedCubes(NamedTuple):
    """Cubes of the same variables."""

    prediction: xr.Dataset
    truth: xr.Dataset
    names: list[str]
    timing: Timing
    # The prediction and given baselines, each with the steps that are compared.
    models: Models


def open_cubes(
    prediction: Any,
    truth: Any,
    baselines: Mapping[str, Any],
    *,
    named_baselines: Iterable[str],
    data: Any,
    predict: Mapping[str, Any] | None,
    progress: bool,
    missing_chunks: str,
) -> ComparedCubes:
    """Open all cubes, predict if a model is given, and match dates."""
    if isinstance(prediction, xr.DataArray) and isinstance(truth, xr.DataArray):
        prediction = prediction.rename(truth.name)  # two arrays are compared whatever their names
    truth = as_dataset(truth)
    time_dim = _time_dim_of(truth)
    by_default = {"progress": progress, "missing_chunks": missing_chunks}
    cube = _as_prediction(prediction, truth, data, predict, by_default)
    names = _common_variables(cube, truth, time_dim)
    cube = heed_absent_chunks(cube, names, missing_chunks).cube
    truth = heed_absent_chunks(truth, names, missing_chunks).cube
    timing = Timing.of(cube, truth, time_dim)
    _check_starts(named_baselines, timing)
    models: Models = {PREDICTION: (cube, own_steps(timing))}
    for name, given in baselines.items():
        baseline = with_forecast_dims(as_dataset(given))
        for variable in names:
            if variable not in baseline:
                raise InvalidValueError(f"the baseline {name!r} lacks the variable {variable!r}")
        baseline = heed_absent_chunks(baseline, names, missing_chunks).cube
        models[name] = baseline, matching_steps(name, baseline, timing)
    return ComparedCubes(cube, truth, names, timing, models)


def _time_dim_of(truth: xr.Dataset) -> str:
    """Return the time dim of the truth."""
    time_dim = find_time_dim(truth.coords.values(), truth.dims)
    if time_dim is None:
        raise InvalidValueError(
            f"truth must have one time dim, got {[str(dim) for dim in truth.dims]}; name it "
            "'time', or score maps without one with score_cube"
        )
    return time_dim


def _check_starts(named: Iterable[str], timing: Timing) -> None:
    """Refuse baselines that start from the last input of a plain prediction."""
    from_init = [name for name in named if name in FROM_INIT]
    if from_init and not timing.is_forecast:
        raise InvalidValueError(
            f"baselines {from_init} start from the value at init_time, which a prediction without "
            "lead times lacks; choose 'climatology', or give cubes"
        )


def _as_prediction(
    prediction: Any,
    truth: xr.Dataset,
    data: Any,
    predict: Mapping[str, Any] | None,
    by_default: Mapping[str, Any],
) -> xr.Dataset:
    """Return a predicted cube, which a model makes first."""
    is_cube = isinstance(prediction, xr.Dataset | xr.DataArray | str | os.PathLike)
    if is_cube or store_and_path(prediction)[0] is not None:
        if data is not None or predict is not None:
            raise InvalidTypeError("data and predict need a model, got a predicted cube")
        return with_forecast_dims(as_dataset(prediction))
    from ml4cube.prediction import predict_cube

    options = {**by_default, **(predict or {})}
    return with_forecast_dims(predict_cube(prediction, truth, data, **options))


def _common_variables(cube: xr.Dataset, truth: xr.Dataset, time_dim: str) -> list[str]:
    """Return the variables to score."""
    true = [name for name in data_variables(truth) if time_dim in truth[name].dims]
    predicted = data_variables(cube)
    check_left_out(cube)
    names = [name for name in predicted if name in true]
    if not names:
        raise InvalidValueError(
            f"prediction has variables {predicted}, truth has {true} along {time_dim!r}, none in "
            "common"
        )
    return names
