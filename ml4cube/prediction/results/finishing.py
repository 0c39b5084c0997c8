"""From blended results to the variables of a predicted cube: units, gaps, ensembles, classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.core.statistics import unscale_values
from ml4cube.prediction.results.layout import Layout, Variable
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.geometry import Windows


def finished(
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
    found, first = {}, 0
    for variable in layout.variables:
        values = means[:, first : first + variable.channels]
        first += variable.channels
        gap = gaps.all(axis=0)
        if variable.target is not None:
            values = _in_units(values, variable, spec, block)
            gap = gaps[spec.targets.index(variable.target)]
        np.copyto(values, np.nan, where=gap)
        mean = values[0] if len(values) == 1 else values.mean(axis=0)
        if variable.is_probability and reduce == "argmax":
            found[variable.name] = xr.Variable(axes, _most_likely(mean, variable))
            continue
        dims = (variable.dim or "", *axes)
        found[variable.name] = xr.Variable(dims, mean)
        if len(values) > 1:
            found[f"{variable.name}_spread"] = xr.Variable(dims, values.std(axis=0))
    unused = dict.fromkeys(spec.windows.unused_dims, 0)
    return {
        name: (one.isel({"": 0}) if "" in one.dims else one).isel(unused)
        for name, one in found.items()
    }


def _in_units(
    values: NDArray[np.float64], variable: Variable, spec: PredictionSpec, block: Block
) -> NDArray[np.float64]:
    """Undo the scaling of a target; probabilities of its classes have none."""
    scaling = spec.preparation.scaling.get(variable.target or "")
    if scaling is None or variable.is_probability:
        return values
    offset, scale = scaling.at(_cells(spec.windows, block))
    if variable.has_offset:
        return np.asarray(unscale_values(values, offset, scale))
    return np.asarray(values * np.asarray(scale) ** variable.power)


def _cells(windows: Windows, block: Block) -> Mapping[str, NDArray[Any]]:
    """Return the cell of the cube of every entry of a block, along each dim."""
    axes = list(windows.result_shape)
    found = {}
    for dim, entries in block.slices.items():
        along = windows.dims[dim]
        if along.is_apart:
            cells = along.starts[entries] + along.offset
        else:
            cells = np.arange(entries.start, entries.stop)
        if along.is_lead:
            shape = (-1, 1, *[1] * (len(axes) - 2))
            leads = np.arange(along.target_size).reshape(1, -1, *shape[2:])
            found[dim] = cells.reshape(shape) + leads
        else:
            found[dim] = cells.reshape([-1 if axis == dim else 1 for axis in axes])
    return found


def _most_likely(probabilities: NDArray[Any], variable: Variable) -> NDArray[np.float64]:
    """Return the label of the most likely class, or its position where labels are no numbers."""
    labels = variable.class_values
    known = np.isfinite(probabilities).all(axis=0)
    return np.where(known, labels[np.nan_to_num(probabilities).argmax(axis=0)], np.nan)
