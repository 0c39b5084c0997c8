"""`Labels`: the groups that scores are given for, of dates and of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.climatology import GROUPS, group_numbers
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.evaluation.cells.cell_reader import Steps, Tile, at_steps
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.cube_scores import Grouping

_CYCLES = ("season", "month")


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels in `by`, read against a prediction and its truth."""

    names: tuple[str, ...]
    # Of each sample and lead: labels, and the index of one; -1 is none.
    of_dates: dict[str, tuple[xr.DataArray, Steps]]
    of_cells: tuple[Grouping, ...]

    @classmethod
    def of(cls, by: Any, prediction: xr.Dataset, truth: xr.Dataset, timing: Timing) -> Labels:
        """Read the argument `by` of `evaluate`."""
        given: Sequence[Any] = list(by) if isinstance(by, list | tuple) else [by]
        names: list[str] = []
        of_dates: dict[str, tuple[xr.DataArray, Steps]] = {}
        of_cells: list[Grouping] = []
        for one in given:
            if one is None:
                continue
            found = _read(one, prediction, truth, timing)
            if isinstance(found, str):
                names.append(found)
            elif isinstance(found, Grouping):
                names.append(found.name)
                of_cells.append(found)
            else:
                name, labels, codes = found
                names.append(name)
                of_dates[name] = labels, codes
        if len(set(names)) < len(names) or {"variable", "model", "baseline"} & set(names):
            raise InvalidValueError(
                "by must hold labels of different names, other than 'variable', 'model' and "
                f"'baseline', got {names}; rename them, e.g. da.rename('region')"
            )
        return cls(tuple(names), of_dates, tuple(of_cells))

    @property
    def n_of_cells(self) -> int:
        """Number of combined labels of cells."""
        return int(np.prod([len(one.labels) for one in self.of_cells], dtype=int))

    def in_tile(
        self, valid_steps: Steps, time_dim: str, cell_dims: tuple[str, ...], tile: Tile
    ) -> Steps:
        """Return the combined label of each cell, as an index; -1 is none."""
        code = np.zeros((1,) * (2 + len(cell_dims)), np.intp)
        for one in self.of_cells:
            along = at_steps(one.codes, valid_steps, time_dim, cell_dims, tile)
            code = np.where((code < 0) | (along < 0), -1, code * len(one.labels) + along)
        return code


def _read(
    one: Any, prediction: xr.Dataset, truth: xr.Dataset, timing: Timing
) -> str | Grouping | tuple[str, xr.DataArray, Steps]:
    """Return a dim of the prediction's dates, labels of cells, or labels of dates."""
    if isinstance(one, str):
        if one == timing.sample_dim or (one == LEAD and timing.is_forecast):
            return one
        if one in (INIT, LEAD):
            raise InvalidValueError(f"by={one!r} needs a prediction with the dim {one!r}")
        if one in _CYCLES and one not in truth.variables:
            return _cycle(one, timing)
        dates = [INIT, LEAD] if timing.is_forecast else [timing.sample_dim]
        choices = [*dates, *_CYCLES, *map(str, truth.variables), *map(str, truth.dims)]
        check_choice("by", one, list(dict.fromkeys(choices)))
        if one in truth.dims:
            return _of_dates(_each_step(truth[one].reset_coords(drop=True)), timing)
        one = truth[one].reset_coords(drop=True)
    if not isinstance(one, xr.DataArray):
        raise InvalidTypeError(f"by must hold names or DataArrays, got {type(one).__name__}")
    if one.ndim and set(one.dims) <= {INIT, LEAD}:
        grouping = Grouping.of(one, prediction)
        shape = {timing.sample_dim: timing.samples.size, LEAD: timing.leads.size}
        codes = grouping.codes.variable.set_dims(shape)  # type: ignore[no-untyped-call]
        return grouping.name, grouping.labels, codes.transpose(*shape).values
    return _of_dates(Grouping.of(one, truth), timing)


def _each_step(coordinate: xr.DataArray) -> Grouping:
    """Return a label for each step of a dim, even if two have the same coordinate."""
    steps = xr.DataArray(np.arange(coordinate.size), dims=coordinate.dims)
    return Grouping(str(coordinate.name), coordinate, steps)


def _of_dates(grouping: Grouping, timing: Timing) -> Grouping | tuple[str, xr.DataArray, Steps]:
    """Return labels along time as those of the dates that are predicted."""
    if grouping.codes.dims == (timing.time_dim,):
        codes = grouping.codes.values[timing.valid_steps.clip(min=0)]
        return grouping.name, grouping.labels, np.where(timing.valid_steps < 0, -1, codes)
    return grouping


def _cycle(name: str, timing: Timing) -> tuple[str, xr.DataArray, Steps]:
    """Return the season or month of each date that is predicted."""
    dates = timing.truth_dates
    if not is_time(dates):
        raise InvalidValueError(
            f"by={name!r} needs dates, got {dates.dtype} along {dates.dims[0]!r}"
        )
    codes = group_numbers(dates.values, name)[timing.valid_steps.clip(min=0)]
    labels = xr.DataArray(GROUPS[name], dims=name)
    return name, labels, np.where(timing.valid_steps < 0, -1, codes).astype(np.intp)
