"""A model as a method: its predictions of a cube, with its gaps and with artificial ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidValueError, caller_level
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import split_label
from ml4cube.gap_filling.arrays import hidden_variable
from ml4cube.gap_filling.blocks import GapFiller
from ml4cube.gap_filling.methods import Floats, Gaps, Method


def methods_of_model(
    cube: xr.Dataset,
    fillers: Mapping[str, GapFiller],
    model: Any,
    data: Any,
    predict: dict[str, Any],
) -> tuple[dict[str, Method], dict[str, Method]]:
    """Return the predictions that fill the gaps of a cube, and those of cells that are hidden."""
    if split_label(cube) is None:
        warnings.warn(
            "the cube has no split label, so the model may have been trained on the cells that "
            "it is scored on, and its error may be larger than the scores say",
            stacklevel=caller_level(),
        )
    methods = _predicted(cube, fillers, model, data, predict)
    hidden = cube.assign({n: hidden_variable(f, cube[n]) for n, f in fillers.items()})
    without_out = {key: value for key, value in predict.items() if key != "out"}
    return methods, _predicted(hidden, fillers, model, data, without_out)


def _predicted(
    cube: xr.Dataset,
    fillers: Mapping[str, GapFiller],
    model: Any,
    data: Any,
    predict: dict[str, Any],
) -> dict[str, Method]:
    """Return the prediction of a model for each variable, made for all cells."""
    from ml4cube.prediction import predict_cube

    options: dict[str, Any] = {"keep_gaps": False}
    if data is None:
        options["targets"] = list(fillers)
    predicted = predict_cube(model, cube, data, **{**options, **predict})
    methods, wrong = {}, {}
    for name, filler in fillers.items():
        dims = set(predicted[name].dims) if name in predicted else None
        if dims != {*cube[name].dims}:
            wrong[name] = dims
            continue
        reader = CubeReader.of(predicted, [name], filler.reader.dims)
        methods[name] = Method(partial(_read, reader, name, filler.time_dim is not None))
    if wrong:
        wanted = {name: set(cube[name].dims) for name in fillers}
        raise InvalidValueError(
            f"the model must predict the variables to fill, with dims {wanted}, got {wrong}"
        )
    return methods


def _read(reader: CubeReader, name: str, has_time: bool, gaps: Gaps) -> Floats:
    values = reader.read(gaps.box)[name].astype(np.float64)
    if has_time:
        return values
    return values[np.newaxis]
