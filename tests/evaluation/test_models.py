"""A model is scored as the cube that predict_cube makes with it."""

from __future__ import annotations

import pytest
import torch
import xarray as xr

from ml4cube.errors import InvalidTypeError
from ml4cube.evaluation import evaluate
from ml4cube.prediction import predict_cube
from tests.evaluation.forecasts import truth_cube


def test_a_model_is_scored_as_its_prediction():
    truth = truth_cube()
    model, options = torch.nn.Linear(1, 1), {"sample_size": {}, "batch_size": 7}
    statistics = {"t": [0.5, 2.0]}
    shared = {"baselines": "climatology", "by": "season", "progress": False}
    card = evaluate(model, truth, data=statistics, predict=options, **shared)
    cube = predict_cube(model, truth, statistics, **options, progress=False)
    xr.testing.assert_identical(card.scores, evaluate(cube, truth, **shared).scores)


def test_what_is_neither_a_cube_nor_a_model_is_refused():
    with pytest.raises(
        InvalidTypeError, match="model must be a torch module, an exported program, an estimator"
    ):
        evaluate(3, truth_cube(), progress=False)
