"""Climatologies of the train cells of a cube, or given ones, and the damping of anomalies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import check_aligned, is_time
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level, check_choice
from ml4cube.core.scaling import GROUPS, group_numbers
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import split_label
from ml4cube.evaluation.cells.cell_reader import CellReader, Floats, Steps, Tile, at_steps
from ml4cube.evaluation.cells.timing import Timing, positions, span
from ml4cube.preprocessing.cubes import cells_of_part

Groups = NDArray[np.intp]

#: Groups of dates that have a climatology of their own.
CYCLES = (*GROUPS, "dayofyear_hour", "mean")
_DAY_US = 86_400_000_000


@dataclass(frozen=True, eq=False)
class ClimatologyOptions:
    """The means of train cells by groups of dates, or a given climatology."""

    time_dim: str
    train: TrainCells
    cycle: str
    group_of_step: Groups
    given: xr.Dataset | None
    described: str

    @classmethod
    def of(cls, truth: xr.Dataset, timing: Timing, time_dim: str, given: Any) -> ClimatologyOptions:
        """Read the argument `climatology` of `evaluate`."""
        dates = truth[time_dim]
        cycle = given if isinstance(given, str) else cycle_of(dates, timing.truth_keys)
        check_choice("climatology", cycle, CYCLES)
        if cycle != "mean" and not is_time(dates):
            raise InvalidValueError(
                f"climatology={cycle!r} needs dates along {time_dim!r}, got {dates.dtype}; "
                "use 'mean'"
            )
        train = TrainCells.of(truth, timing, time_dim, given)
        described = f"{'one mean' if cycle == 'mean' else f'by {cycle}'} of {train.described}"
        if not (given is None or isinstance(given, str | slice)):
            if not isinstance(given, xr.Dataset | xr.DataArray):
                raise InvalidTypeError(
                    "climatology must be a Dataset or DataArray, a slice of times, or one of "
                    f"{list(CYCLES)}, got {type(given).__name__}"
                )
            return cls(time_dim, train, cycle, _no_groups, as_dataset(given), "given")
        group_of_step = np.unique(groups_of(dates, cycle), return_inverse=True)[1]
        return cls(time_dim, train, cycle, group_of_step, None, described)

    def along(self, dims: Sequence[str]) -> ClimatologyOptions:
        """Return the same for a variable with some of the dims of the train cells."""
        return replace(self, train=replace(self.train, flags=flags_along(self.train.flags, dims)))

    @property
    def is_known(self) -> bool:
        """True if there is a climatology."""
        return self.given is not None or bool(self.train.steps.size)

    @property
    def n_groups(self) -> int:
        """Means of each cell."""
        if self.given is None:
            return int(self.group_of_step.max(initial=-1)) + 1
        cycles = set(self.given.sizes) & {*GROUPS, "hour"}
        return math.prod(self.given.sizes[dim] for dim in cycles)

    def of_tile(self, name: str, tile: TrainTile, dates: xr.DataArray, block: int) -> Climatology:
        """Return the climatology of a variable in one tile."""
        if self.given is None:
            return tile.climatology(self.group_of_step, block)
        return given_climatology(self.given[name], dates, tile)


_no_groups = np.zeros(0, np.intp)


def flags_along(flags: xr.DataArray, dims: Sequence[str]) -> xr.DataArray:
    """Return where flags are set at all steps of the dims that a variable lacks.

    So that none of its cells is in two parts, if the levels of another variable are.
    """
    others = [dim for dim in flags.dims if dim not in dims]
    return flags.all(others) if others else flags


def cycle_of(dates: xr.DataArray, keys: NDArray[Any]) -> str:
    """Return the cycle that suits the step of the data."""
    if not is_time(dates) or len(keys) < 2:
        return "mean"
    step = float(np.median(np.diff(keys)))
    for cycle, longest in (("dayofyear_hour", 0.99), ("dayofyear", 1.5), ("month", 45.0)):
        if step <= longest * _DAY_US:
            return cycle
    return "mean"


def groups_of(dates: xr.DataArray, cycle: str) -> NDArray[np.int64]:
    """Return the group of each date in a cycle."""
    values = dates.values
    if cycle == "mean":
        return np.zeros(len(values), np.int64)
    if cycle == "dayofyear_hour":
        return group_numbers(values, "dayofyear") * 24 + _hours(values)
    return group_numbers(values, cycle)


def _hours(dates: NDArray[Any]) -> NDArray[np.int64]:
    if dates.dtype.kind == "M":
        hours = (dates - dates.astype("M8[D]")) // np.timedelta64(1, "h")
        return np.asarray(hours, np.int64)
    return np.array([date.hour for date in dates], np.int64)


@dataclass(frozen=True, eq=False)
class TrainCells:
    """The cells that climatologies may use: those of some steps, less those without a flag."""

    described: str
    steps: Steps
    flags: xr.DataArray

    @classmethod
    def of(cls, truth: xr.Dataset, timing: Timing, time_dim: str, given: Any) -> TrainCells:
        """Find the train cells: of a slice of times, of a split label, or before all forecasts."""
        dates = truth[time_dim].reset_coords(drop=True)
        steps = np.arange(dates.size)
        label, described = split_label(truth), ""
        if isinstance(given, slice):
            steps = dates.copy(data=steps).sel({time_dim: given}).values
            described = "the given times"
        elif label is None:
            steps = np.flatnonzero(timing.truth_keys < timing.sample_keys.min())
            described = "the dates before the first one of the prediction"
        if described and steps.size:
            described += f" ({span(dates[steps])})"
        flags = xr.DataArray(np.isin(np.arange(dates.size), steps), dims=time_dim)
        if label is not None:  # the test cells of given times would leak into the climatology
            flags = flags & xr.DataArray(cells_of_part(truth, "train")[0])
            described = f"the train cells of {label!r}" + (described and f" in {described}")
        if flags.dims == (time_dim,):
            steps = np.flatnonzero(flags.values)
        return cls(described, steps, flags)


@dataclass(frozen=True, eq=False)
class Climatology:
    """Mean of each group of dates in each cell of a tile; NaN where no train cell has a value."""

    means: Floats
    group_of_step: Groups

    def at(self, steps: Steps) -> Floats:
        """Return the climatology at steps of the truth, of any shape; NaN for -1."""
        values: Floats = self.means[self.group_of_step[steps.clip(min=0)]]
        values[steps < 0] = np.nan
        return values


@dataclass(frozen=True, eq=False)
class TrainTile:
    """The train cells of a variable of the truth, in one tile; all else is NaN."""

    truth: CellReader
    train: TrainCells
    time_dim: str
    dims: tuple[str, ...]
    tile: Tile

    def at(self, steps: Steps) -> Floats:
        """Return the values at some steps."""
        values = self.truth.at({self.time_dim: steps}, self.tile)
        is_train = at_steps(self.train.flags, steps, self.time_dim, self.dims, self.tile)
        return np.asarray(np.where(is_train & np.isfinite(values), values, np.nan))

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each dim."""
        return tuple(self.tile[dim].stop - self.tile[dim].start for dim in self.dims)

    def climatology(self, group_of_step: Groups, block: int) -> Climatology:
        """Average the train cells of each group, so many steps at a time."""
        n_groups = int(group_of_step.max(initial=-1)) + 1
        total, count = (np.zeros((n_groups, *self.shape)) for _ in range(2))
        for steps in _in_blocks(self.train.steps, block):
            values = self.at(steps)
            is_known = np.isfinite(values)
            for group in np.unique(group_of_step[steps]):
                here = group_of_step[steps] == group
                total[group] += np.where(is_known[here], values[here], 0.0).sum(0)
                count[group] += is_known[here].sum(0)
        means = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        return Climatology(means, group_of_step)

    def damping(self, climatology: Climatology, timing: Timing, block: int) -> Floats:
        """Return rho of each lead and cell: the slope of later on earlier train anomalies.

        rho = sum(a(t) a(t + lead)) / sum(a(t)^2), over all pairs of train cells; 0 without any.
        """
        products, squares = (np.zeros((timing.leads.size, *self.shape)) for _ in range(2))
        pairs = [timing.pairs(lead) for lead in range(timing.leads.size)]
        span_of_train = np.arange(self.train.steps[0], self.train.steps[-1] + 1)
        for some in _in_blocks(span_of_train, block):
            of_block = [
                (first[here], second[here])
                for first, second in pairs
                for here in [(second >= some[0]) & (second <= some[-1])]
            ]
            earliest = min((first.min(initial=some[0]) for first, _ in of_block))
            steps = np.arange(earliest, some[-1] + 1)
            anomalies = self.at(steps) - climatology.at(steps)
            for lead, (first, second) in enumerate(of_block):
                earlier, later = anomalies[first - steps[0]], anomalies[second - steps[0]]
                both = np.isfinite(earlier) & np.isfinite(later)
                products[lead] += np.where(both, earlier * later, 0.0).sum(0)
                squares[lead] += np.where(both, earlier**2, 0.0).sum(0)
        rho = np.zeros_like(products)
        np.divide(products, squares, out=rho, where=squares > 0)
        return rho


def _in_blocks(steps: Steps, size: int) -> Iterator[Steps]:
    return (steps[start : start + size] for start in range(0, len(steps), size))


def given_climatology(means: xr.DataArray, dates: xr.DataArray, tile: TrainTile) -> Climatology:
    """Return a user's climatology in a tile; its dims other than those of cells are cycles."""
    cycles = [str(dim) for dim in means.dims if dim not in tile.dims]
    check_aligned("climatology", means.isel(dict.fromkeys(cycles, 0), drop=True), tile.truth.array)
    entries = []
    for cycle in cycles:
        check_choice("dims of climatology", cycle, [*GROUPS, "hour"])
        values = dates.values
        numbers = _hours(values) if cycle == "hour" else group_numbers(values, cycle)
        labels = np.arange(24) if cycle == "hour" else GROUPS[cycle]
        known = means[cycle].values if cycle in means.coords else labels[: means.sizes[cycle]]
        entries.append(positions(labels[numbers], known))
    read = means.transpose(*cycles, ...)
    missing_dims = [dim for dim in tile.dims if dim not in means.dims]
    read = read.expand_dims(missing_dims).transpose(*cycles, *tile.dims)
    values = read.isel({dim: tile.tile[dim] for dim in means.dims if dim in tile.dims}).values
    return _flat(np.asarray(values, float), tile.shape, entries, dates.size)


def _flat(
    values: Floats, shape: tuple[int, ...], entries: list[Steps], n_steps: int
) -> Climatology:
    """Join several cycles into one; a last group of NaN is for dates without an entry."""
    cycle_shape = values.shape[: len(entries)]
    cells = values.reshape(-1, *values.shape[len(entries) :])
    means = np.full((len(cells) + 1, *shape), np.nan)
    means[:-1] = cells
    if not entries:
        return Climatology(means, np.zeros(n_steps, np.intp))
    group = np.ravel_multi_index([along.clip(min=0) for along in entries], cycle_shape)
    unknown = np.any([along < 0 for along in entries], axis=0)
    return Climatology(means, np.where(unknown, len(cells), group))


def warn_of_train_cells(
    options: ClimatologyOptions, truth: xr.Dataset, timing: Timing, given: Any
) -> None:
    """Say which cells a climatology uses if no label tells, and the given times may be scored."""
    if split_label(truth) is not None:
        return
    text = f"truth has no split label; climatologies use {options.train.described}, which must all "
    text += "be train data; else give the truth a split label, or climatology=slice(...)"
    if isinstance(given, slice):
        n = np.intersect1d(options.train.steps, timing.valid_steps).size
        if not n:
            return
        text = f"climatologies use {options.train.described}, with {n:,} dates that the prediction "
        text += "is scored at; choose dates of training only"
    warnings.warn(text, stacklevel=caller_level())
