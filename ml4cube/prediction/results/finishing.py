"""From blended results to the variables of a predicted cube: units, gaps, ensembles, classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.core.statistics import unscale_values
from ml4cube.prediction.results.layout import Layout, Variable
from ml4cube.prediction.spec import PredictionSpec

# Dim of the only number that a variable without a dim of its own has in each cell.
_CHANNEL = ""


def to_variables(
    means: NDArray[np.float64],
    gaps: NDArray[np.bool_],
    spec: PredictionSpec,
    layout: Layout,
    block: Block,
    reduce: str | None,
) -> dict[str, xr.Variable]:
    """Return the variables of a block from its blended results.

    `means` has the shape (members, channels, *block), `gaps` (targets, *block).
    """
    axes = tuple(spec.windows.result_shape)
    variables, first = {}, 0
    for variable in layout.variables:
        values = means[:, first : first + variable.channels]
        first += variable.channels
        is_gap = gaps.all(axis=0)
        if variable.target is not None:
            values = _in_units(values, variable, spec, block)
            is_gap = gaps[spec.targets.index(variable.target)]
        np.copyto(values, np.nan, where=is_gap)
        mean = values.mean(axis=0)
        if variable.is_probability and reduce == "argmax":
            variables[variable.name] = xr.Variable(axes, _most_likely(mean, variable))
            continue
        dims = (_CHANNEL, *axes)
        if variable.dim is not None:
            dims = (variable.dim, *axes)
        variables[variable.name] = xr.Variable(dims, mean)
        if len(values) > 1:
            variables[f"{variable.name}_spread"] = xr.Variable(dims, values.std(axis=0))
    only_entry = dict.fromkeys((_CHANNEL, *spec.windows.unused_dims), 0)
    return {
        name: variable.isel(only_entry, missing_dims="ignore")
        for name, variable in variables.items()
    }


def _in_units(
    values: NDArray[np.float64], variable: Variable, spec: PredictionSpec, block: Block
) -> NDArray[np.float64]:
    """Undo the scaling of a target; probabilities of its classes have none."""
    scaling = spec.preparation.scaling.get(variable.target or "")
    if scaling is None or variable.is_probability:
        return values
    offset, scale = scaling.at(spec.windows.target_cells(block.slices))
    if variable.has_offset:
        return np.asarray(unscale_values(values, offset, scale))
    return np.asarray(values * np.asarray(scale) ** variable.power)


def _most_likely(probabilities: NDArray[Any], variable: Variable) -> NDArray[np.float64]:
    """Return the label of the most likely class, or its position where labels are no numbers."""
    labels = variable.class_values
    has_values = np.isfinite(probabilities).all(axis=0)
    return np.where(has_values, labels[np.nan_to_num(probabilities).argmax(axis=0)], np.nan)
