"""Climatologies of the train cells of a cube, or given ones, and the damping of anomalies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.climatology import (
    GROUPS,
    Climatology,
    Cycle,
    Design,
    group_numbers,
    hours,
    train_years,
    warning_of_years,
)
from ml4cube.core.display import counted
from ml4cube.core.errors import caller_level, check_choice
from ml4cube.core.sums.pairs import combined
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import split_label
from ml4cube.evaluation.cells.cell_reader import Steps, Tile
from ml4cube.evaluation.cells.timing import Timing, positions, span
from ml4cube.preprocessing.cubes import cells_of_part


@dataclass(frozen=True, eq=False)
class ClimatologyOptions:
    """The climatology of train cells, or a given one."""

    train: TrainCells
    design: Design | None
    # A climatology of the user.
    means: xr.Dataset | None
    described: str
    # From how many years each mean is; None if unknown.
    years: int | None

    @classmethod
    def of(cls, truth: xr.Dataset, timing: Timing, chosen: Any) -> ClimatologyOptions:
        """Read the argument `climatology` of `evaluate`."""
        dates = timing.truth_dates.values
        if isinstance(chosen, xr.Dataset | xr.DataArray):
            train = TrainCells.of(truth, timing, None)
            return cls(train, None, as_dataset(chosen), "given", None)
        train = TrainCells.of(truth, timing, chosen)
        if chosen is None or isinstance(chosen, slice):
            cycle = Cycle.supported_by(dates, train.steps_with_cells, _scored_steps(timing))
        else:
            cycle = Cycle.of("climatology", chosen)
        design = Design.of("climatology", cycle, dates)
        described, years = f"{cycle.described} of {train.described}", None
        if is_time(timing.truth_dates):
            years = train_years(dates[train.steps_with_cells])
            described += f", from {counted(years, 'year')}"
        return cls(train, design, None, described, years)

    @property
    def why_unknown(self) -> str:
        """Why it has no value where the prediction is scored."""
        if self.train.flags.ndim > 1:
            return "a split in space leaves no train cell there"
        return f"it is {self.described}, which have no dates at that time of the year"

    @property
    def is_known(self) -> bool:
        """True if there is a climatology."""
        return self.means is not None or bool(self.train.steps.size)


def _scored_steps(timing: Timing) -> Steps:
    """Return the steps of the truth that are predicted."""
    steps = np.unique(timing.valid_steps)
    return steps[steps >= 0]


@dataclass(frozen=True, eq=False)
class TrainCells:
    """The cells that climatologies may use: those of some steps, less those without a flag."""

    described: str
    steps: Steps
    flags: xr.DataArray
    # Steps at which there is a train cell.
    steps_with_cells: Steps

    @classmethod
    def of(cls, truth: xr.Dataset, timing: Timing, chosen: Any) -> TrainCells:
        """Find the train cells: of a slice of times, of a split label, or before all forecasts."""
        dates, time_dim = timing.truth_dates, timing.time_dim
        steps = np.arange(dates.size)
        label, described = split_label(truth), ""
        if isinstance(chosen, slice):
            steps = dates.copy(data=steps).sel({time_dim: chosen}).values
            described = "the chosen times"
        elif label is None:
            steps = np.flatnonzero(timing.truth_keys < timing.sample_keys.min())
            described = "the dates before the first one of the prediction"
        if described and steps.size:
            described += f" ({span(dates[steps])})"
        flags = xr.DataArray(np.isin(np.arange(dates.size), steps), dims=time_dim)
        with_cells = flags
        if label is not None:  # the test cells of chosen times would leak into the climatology
            is_train = xr.DataArray(cells_of_part(truth, "train")[0])
            if time_dim in is_train.dims:
                others = [dim for dim in is_train.dims if dim != time_dim]
                with_cells = flags & is_train.any(others)
            flags = flags & is_train
            described = f"the train cells of {label!r}" + (described and f" in {described}")
        if flags.dims == (time_dim,):
            steps = np.flatnonzero(flags.values)
        return cls(described, steps, flags, np.flatnonzero(with_cells.values))


def given_climatology(means: xr.DataArray, dates: xr.DataArray, tile: Tile) -> Climatology:
    """Return a user's climatology in a tile; its dims other than those of cells are cycles."""
    cycles = [str(dim) for dim in means.dims if dim not in tile]
    entries = []
    for cycle in cycles:
        check_choice("dims of climatology", cycle, [*GROUPS, "hour"])
        values = dates.values
        if cycle == "hour":
            numbers, labels = hours(values), np.arange(24)
        else:
            numbers, labels = group_numbers(values, cycle), np.asarray(GROUPS[cycle])
        labels_of_means = labels[: means.sizes[cycle]]
        if cycle in means.coords:
            labels_of_means = means[cycle].values
        entries.append(positions(labels[numbers], labels_of_means))
    read = means.transpose(*cycles, ...)
    missing_dims = [dim for dim in tile if dim not in means.dims]
    read = read.expand_dims(missing_dims).transpose(*cycles, *tile)
    values = read.isel({dim: part for dim, part in tile.items() if dim in means.dims}).values
    cells = values.reshape(-1, *values.shape[len(entries) :])
    # a last group of NaN is for dates without an entry
    shape = [part.stop - part.start for part in tile.values()]
    with_unknown = np.full((len(cells) + 1, *shape), np.nan)
    with_unknown[:-1] = cells
    group = combined(zip(entries, values.shape, strict=False))
    group = np.where(group < 0, len(cells), group)
    design = Design(Cycle("mean"), np.broadcast_to(group, dates.shape), None)
    return Climatology(design, with_unknown)


def warn_of_years(options: ClimatologyOptions) -> None:
    """Say from how few years a climatology is."""
    if text := warning_of_years(options.years):
        warnings.warn(f"climatology {options.described}: {text}", stacklevel=caller_level())


def warn_of_train_cells(
    options: ClimatologyOptions, truth: xr.Dataset, timing: Timing, chosen: Any
) -> None:
    """Say which cells a climatology uses if no label tells, and the given times may be scored."""
    if split_label(truth) is not None:
        return
    text = f"truth has no split label; climatologies use {options.train.described}, which must all "
    text += "be train data; else give the truth a split label, or climatology=slice(...)"
    if isinstance(chosen, slice):
        n = np.intersect1d(options.train.steps, timing.valid_steps).size
        if not n:
            return
        text = f"climatologies use {options.train.described}, with {n:,} dates that the prediction "
        text += "is scored at; choose dates of training only"
    warnings.warn(text, stacklevel=caller_level())
