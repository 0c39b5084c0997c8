"""Cells of a box as samples have them: masked, filled and scaled, each cell once.

Only what needs a whole window is done window by window: gaps filled with the mean of their window,
and cells that a forecast does not know yet. Here are arrays, boxes and fitted values; no cube, and
no data set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import cell_ids
from ml4cube.core.missing import bool_mask, set_gaps
from ml4cube.core.statistics import scale_values
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.windows import BoxWindows, Index

Arrays = dict[str, NDArray[Any]]
Box = Mapping[str, slice]


@dataclass(frozen=True, eq=False)
class PreparedCells:
    """The cells of a box, ready for windows to be cut."""

    bound: BoundRecipe
    box: Box
    # By variable: with its gaps, as `prepare` was given it.
    masked: Arrays
    # By variable: filled and scaled. Those of `by_window` have no values here.
    values: Arrays
    by_window: Collection[str]
    # By variable, for those that are scaled: offset and scale, of the box or of each of its cells.
    scaling: Mapping[str, tuple[Any, Any]]


def mask_cells(cells: Mapping[str, NDArray[Any]], names: Iterable[str], mask: str | None) -> Arrays:
    """Return variables with gaps where a mask excludes their cells."""
    masked = {name: cells[name] for name in names}
    if mask is not None:
        outside = ~bool_mask(cells[mask])
        for name, values in masked.items():
            if values.dtype.kind in "fM":
                masked[name] = set_gaps(values, outside)
    return masked


def prepare(
    masked: Arrays, box: Box, bound: BoundRecipe, out: Arrays, by_window: Collection[str] = ()
) -> PreparedCells:
    """Fill and scale the cells of a box into `out`, which has an array for each variable.

    Variables of `by_window` wait for `cut`.
    """
    # The values show whether any cell lacks statistics, which is refused.
    scaling = {
        name: bound.scaling[name].in_box(box, values)
        for name, values in masked.items()
        if name in bound.scaling
    }
    for name, values in masked.items():
        if name in by_window:
            continue
        fill = bound.fills.get(name)
        if fill is not None:
            # As one sample, because every cell is filled by itself.
            ids = None
            if fill.needs_positions:
                ids = cell_ids(bound.sizes, box)[None]
            values = fill.filled(name, values[None], ids)[0]
        if name in scaling:
            values = scale_values(values, *scaling[name], out[name].dtype)
        out[name][...] = values
    return PreparedCells(bound, box, masked, out, by_window, scaling)


def cut(
    prepared: PreparedCells,
    name: str,
    windows: BoxWindows,
    index: Index,
    unknown: tuple[slice, ...] | None = None,
) -> NDArray[Any]:
    """Return windows of a variable, shape (windows, *window).

    `unknown` are cells of a window whose values must not be seen, of a variable of `by_window`.
    """
    if name not in prepared.by_window:
        return windows.cut_one(prepared.values[name], index)
    samples = windows.cut_one(prepared.masked[name], index)
    if unknown is not None:
        samples[(slice(None), *unknown)] = np.nan
    fill = prepared.bound.fills.get(name)
    if fill is not None:
        ids = None
        if fill.needs_positions:
            ids = windows.cut_one(cell_ids(prepared.bound.sizes, prepared.box), index)
        samples = fill.filled(name, samples, ids)
    if name not in prepared.scaling:
        return samples
    offset, scale = prepared.scaling[name]
    if np.ndim(offset):
        shape = prepared.masked[name].shape
        offset = windows.cut_one(np.broadcast_to(offset, shape), index)
        scale = windows.cut_one(np.broadcast_to(scale, shape), index)
    return scale_values(samples, offset, scale, prepared.values[name].dtype)
