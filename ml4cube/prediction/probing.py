"""What a model returns, known from its first results, and the blocks that it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import xarray as xr

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.cube.variables import cube_variables
from ml4cube.prediction.block import BlockPredictor
from ml4cube.prediction.models import Model, classes_of
from ml4cube.prediction.results.layout import CLASS, Expected, Outputs, int_if_whole
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.sampling.request import source_chunks
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import all_ranks_or_none

# A block is a 16th of the cube, within these if windows are not larger.
_BLOCK_CELLS = (2**14, 2**20)
_BYTES_PER_CELL = 64  # of a block, with its inputs and sums, that the most cells allow


def expected_results(
    spec: PredictionSpec, models: Sequence[Model], outputs: Any, reduce: str | None
) -> Expected:
    """Return what is known of the results of a model."""
    named = Outputs.parse(outputs, spec.windows.result_shape)
    labels = _labels_of(models)
    classes: dict[str, tuple[Any, ...] | None] = {}
    numbers = {}
    for target, flags in spec.classes.items():
        classes[target] = tuple(map(int_if_whole, flags)) or None
        numbers[target] = {name: label for label, name in flags.items()}
    if labels:  # of fitted models; they come before those that the flags of the targets list
        classes = dict.fromkeys(spec.targets, labels)
    if reduce == "argmax" and not classes and named.dim != CLASS:
        raise InvalidValueError(
            "reduce='argmax' needs targets that are classes: integers, or outputs={'class': ...}"
        )
    window = spec.windows.target_window
    return Expected(spec.targets, spec.are_targets_named, window, classes, named, numbers)


def _labels_of(models: Sequence[Model]) -> tuple[Any, ...] | None:
    """Return the labels of the classes that fitted classifiers know."""
    of_models = [classes_of(model) for model in models]
    labels = {tuple(classes.tolist()): None for classes in of_models if classes is not None}
    if len(labels) > 1:
        raise InvalidValueError(f"all members must have the same classes, got {[*labels]}")
    return next(iter(labels), None)


def probe(
    predictor: BlockPredictor, cube: xr.Dataset, expected: Expected, world: World
) -> BlockPredictor:
    """Return the predictor with the layout of the first result, which rank 0 makes."""
    probed = predictor
    with all_ranks_or_none(world):
        if world.is_main:
            blocks = choose_blocks(predictor, cube)
            probed = predictor.find_layout(blocks, expected)
            if probed is not predictor:  # else there are only gaps
                _check_layout(probed)
            if choose_blocks(probed, cube) != blocks:  # whose first batch has other windows
                probed.probe_results.clear()
    layout, windows = world.broadcast((probed.layout, probed.spec.windows))
    return replace(probed, layout=layout, spec=replace(probed.spec, windows=windows))


def _check_layout(predictor: BlockPredictor) -> None:
    """Refuse results that cannot become the cube that was asked for."""
    layout, windows = predictor.layout, predictor.spec.windows
    lacking = {dim for dim in layout.lacking if windows.dims[dim].is_single}
    if windows.lead_dim in lacking:
        raise InvalidValueError(
            f"the model must return {windows.n_leads} steps along {windows.lead_dim!r}, as the "
            "targets of the data set have, got results without that axis"
        )
    several = [v.name for v in layout.variables if v.name != v.target or v.channels > 1]
    if windows.rollout > 1 and (several or lacking):
        raise InvalidValueError(
            f"rollout={windows.rollout} needs a model that returns one number per target and cell, "
            f"to be its next input, got {several or f'none along {lacking}'}"
        )
    if predictor.reduce == "argmax" and not any(v.is_probability for v in layout.variables):
        raise InvalidValueError(
            "reduce='argmax' needs a model that returns one number for each class, got one for "
            f"{[variable.name for variable in layout.variables]}"
        )
    _refuse_means_of_labels(predictor)
    _refuse_unscalable(predictor, lacking)


def _refuse_unscalable(predictor: BlockPredictor, lacking: set[str]) -> None:
    """Refuse one value for a whole window along a dim along which the scaling differs."""
    for variable in predictor.layout.variables:
        scaling = predictor.spec.preparation.scaling.get(variable.target or "")
        if scaling is not None and (both := lacking & set(scaling.dims)):
            raise InvalidValueError(
                f"{variable.target!r} was scaled per {sorted(both)}, and the model returns one "
                "value for a whole window along it, which cannot be unscaled"
            )


def _refuse_means_of_labels(predictor: BlockPredictor) -> None:
    """Refuse labels of classes where a cell has several results."""
    labels = [variable.name for variable in predictor.layout.variables if variable.is_label]
    overlap = any(axis.has_overlaps for axis in predictor.spec.windows.axes)
    if labels and (overlap or len(predictor.members) > 1):
        raise InvalidValueError(
            f"the model must return a number for each class of {labels}, got labels, which would "
            "be averaged over members and windows that overlap; choose with reduce='argmax'"
        )


def choose_blocks(predictor: BlockPredictor, cube: xr.Dataset) -> Grid:
    """Choose the blocks that are predicted and written, near the cube's chunks."""
    windows = predictor.spec.windows
    fewest, most = _BLOCK_CELLS
    # Inputs as read and scaled, with flags of gaps; sums, weights and means of results.
    n_leads = max(windows.n_leads, 1)
    n_inputs = math.prod(windows.dims[dim].size for dim in windows.lost_dims)
    n_bytes = 9 * n_inputs * len(predictor.spec.features)
    n_bytes += 24 * len(predictor.members) * predictor.channels * n_leads
    # Of all leads together.
    cells = math.prod(windows.result_shape.values()) // n_leads
    cells = min(max(cells // 16, fewest), most)
    cells = max(cells * _BYTES_PER_CELL // max(n_bytes, _BYTES_PER_CELL), 1)
    variables = (cube[name].variable for name in cube_variables(cube)[0])
    largest = max(variables, key=lambda variable: variable.ndim)
    chunks = {d: n for d, n in source_chunks(largest).items() if d not in windows.lost_dims}
    return Grid.blocks(windows.result_shape, windows.block_size(chunks, cells * n_leads))
