"""`Labels`: the groups that scores are given for, of dates and of cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.climatology import GROUPS, group_numbers
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.evaluation.cells.cell_reader import Steps
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.cube_scores import Grouping, as_list

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
        names: list[str] = []
        of_dates: dict[str, tuple[xr.DataArray, Steps]] = {}
        of_cells: list[Grouping] = []
        for label in as_list(by):
            grouping = _read(label, prediction, truth, timing)
            if isinstance(grouping, str):
                names.append(grouping)
                continue
            names.append(grouping.name)
            codes = _codes_of_dates(grouping, timing)
            if codes is None:
                of_cells.append(grouping)
            else:
                of_dates[grouping.name] = grouping.labels, codes
        if len(set(names)) < len(names) or {"variable", "model", "baseline"} & set(names):
            raise InvalidValueError(
                "by must hold labels of different names, other than 'variable', 'model' and "
                f"'baseline', got {names}; rename them, e.g. da.rename('region')"
            )
        return cls(tuple(names), of_dates, tuple(of_cells))

    @property
    def variables(self) -> dict[str, xr.Variable]:
        """Codes of cells, by names that no variable of a file has."""
        return {f"label {label.name}": label.codes.variable for label in self.of_cells}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of labels of each of `variables`."""
        return {f"label {label.name}": len(label.labels) for label in self.of_cells}


def _read(label: Any, prediction: xr.Dataset, truth: xr.Dataset, timing: Timing) -> str | Grouping:
    """Return a dim of the prediction's dates, or labels of dates or of cells."""
    if isinstance(label, str):
        if label == timing.sample_dim or (label == LEAD and timing.is_forecast):
            return label
        if label in (INIT, LEAD):
            raise InvalidValueError(f"by={label!r} needs a prediction with the dim {label!r}")
        if label in _CYCLES and label not in truth.variables:
            return _cycle(label, timing.truth_dates)
        dates = [timing.sample_dim, LEAD][: 1 + timing.is_forecast]
        choices = [*dates, *_CYCLES, *map(str, truth.variables), *map(str, truth.dims)]
        check_choice("by", label, list(dict.fromkeys(choices)))
        values = truth[label].reset_coords(drop=True)
        if label in truth.dims:  # a label for each step, even if two have the same coordinate
            return Grouping(label, values, xr.DataArray(np.arange(values.size), dims=label))
        return Grouping.of(values, truth)
    if not isinstance(label, xr.DataArray):
        raise InvalidTypeError(f"by must hold names or DataArrays, got {type(label).__name__}")
    if label.ndim and set(label.dims) <= {INIT, LEAD}:
        return Grouping.of(label, prediction)
    return Grouping.of(label, truth)


def _codes_of_dates(grouping: Grouping, timing: Timing) -> Steps | None:
    """Return the label of each sample and lead, as an index; None for labels of cells."""
    dims = grouping.codes.dims
    if dims == (timing.time_dim,):  # of the date that is predicted
        codes = grouping.codes.values[timing.valid_steps.clip(min=0)]
        return np.where(timing.valid_steps < 0, -1, codes)
    if dims and set(dims) <= {INIT, LEAD}:
        shape = {timing.sample_dim: timing.samples.size, LEAD: timing.leads.size}
        every = grouping.codes.variable.set_dims(shape)  # type: ignore[no-untyped-call]
        return np.asarray(every.transpose(*shape).values)
    return None


def _cycle(name: str, dates: xr.DataArray) -> Grouping:
    """Return the season or month of each date."""
    if not is_time(dates):
        raise InvalidValueError(
            f"by={name!r} needs dates, got {dates.dtype} along {dates.dims[0]!r}"
        )
    codes = xr.DataArray(group_numbers(dates.values, name), dims=dates.dims)
    return Grouping(name, xr.DataArray(GROUPS[name], dims=name), codes)
