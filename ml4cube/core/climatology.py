"""Climatologies: what is usual at a time of the year and of the day, from sums that merge.

Steps up to 16 days have a smooth climatology: harmonics of the year, and below a day of the day
with a seasonal change, fitted by least squares to the values of each cell. Each day of the year by
itself would be the mean of as many values as there are years, so that its noise looks like skill of
any forecast that is compared with it; so would the season within a month, if several values of a
month had one mean. Coarser data have a mean of each month.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import cftime
import numpy as np
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.metric_registry import ratio
from ml4cube.core.sums.mergeable import Mergeable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Labels of the groups of a climatology. A day of the year counts from 1; calendars without leap
#: days have only 365, or 360.
GROUPS: dict[str, NDArray[Any]] = {
    "month": np.arange(1, 13),
    "season": np.array(["DJF", "MAM", "JJA", "SON"]),
    "dayofyear": np.arange(1, 367),
}
DAY = "dayofyear"
#: Climatologies by name: of the season of the year, of the time of the day, of both, or of none.
CYCLES = ("month", "season", "dayofyear", "dayofyear_hour", "hour", "mean")
#: A mean over fewer years is uncertain enough to say so.
FEW_YEARS = 10

_HARMONICS, _OF_DAY = 3, 2
_DAY_US = 86_400_000_000
_DAYS_OF_YEAR = {"360_day": 360, "noleap": 365, "365_day": 365, "all_leap": 366, "366_day": 366}
# Steps in days: below a day, two or more a month (as composites of 16 days), two or more a year.
_LONGEST_FINE, _LONGEST_SMOOTH, _LONGEST_OF_YEAR = 0.99, 16.5, 200.0
# From the first to the last train date of a year, so that a fit closes at most a month of it.
_LEAST_DAYS = 330.0
_MONTH = 31
_WINDOW = re.compile(r"(\d+)D")
_CELLS_AT_ONCE = _STEPS_AT_ONCE = 4096
# Of the normal equations: below rounding of the data, above that of float64. Columns that are the
# same at all dates, as harmonics of the day of two values a day, share one coefficient.
_RIDGE = 1e-9
# Values of a cell for each coefficient.
_LEAST_VALUES = 3


def group_numbers(dates: NDArray[Any], by: str) -> Ints:
    """Return the group of each date in a climatology, as an index into its labels."""
    if dates.dtype.kind == "M":
        month = dates.astype("M8[M]").astype(np.int64) % 12
        day = (dates.astype("M8[D]") - dates.astype("M8[Y]").astype("M8[D]")).astype(np.int64)
    else:
        month = np.array([date.month - 1 for date in dates], np.int64)
        day = np.array([date.dayofyr - 1 for date in dates], np.int64)
    season = (month + 1) % 12 // 3  # December begins the first one
    groups: dict[str, Ints] = {"month": month, "season": season, "dayofyear": day}
    return groups[by]


def hours(dates: NDArray[Any]) -> Ints:
    """Return the hour of each date."""
    return np.asarray(_day_fractions(dates) * 24 + 1e-9, np.int64)


def _day_fractions(dates: NDArray[Any]) -> Floats:
    """Return the time of the day of each date, from 0 to 1."""
    if dates.dtype.kind == "M":
        part = dates.astype("M8[us]") - dates.astype("M8[D]")
        return np.asarray(part.astype(np.int64) / _DAY_US)
    seconds = [3600 * d.hour + 60 * d.minute + d.second + d.microsecond / 1e6 for d in dates]
    return np.array(seconds, np.float64) / 86_400


def year_fractions(dates: NDArray[Any]) -> Floats:
    """Return the time of the year of each date, from 0 to 1, in a year of its own length."""
    if dates.dtype.kind == "M":
        start = dates.astype("M8[Y]")
        end = start + np.timedelta64(1, "Y")
        length = end.astype("M8[us]") - start.astype("M8[us]")
        return np.asarray((dates.astype("M8[us]") - start) / length)
    days = np.array([date.dayofyr - 1 for date in dates], np.float64)
    lengths = np.array([_days_of_year(date) for date in dates], np.float64)
    return np.asarray((days + _day_fractions(dates)) / lengths)


def _days_of_year(date: cftime.datetime) -> int:
    if date.calendar in _DAYS_OF_YEAR:
        return _DAYS_OF_YEAR[date.calendar]
    if cftime.is_leap_year(date.year, date.calendar):
        return 366
    return 365


def train_years(dates: NDArray[Any]) -> int:
    """Return from how many years the mean of a month is, in the median of the months there are."""
    if not len(dates):
        return 0
    if dates.dtype.kind == "M":
        years = dates.astype("M8[Y]").astype(np.int64)
    else:
        years = np.array([date.year for date in dates], np.int64)
    pairs = np.unique(np.stack([group_numbers(dates, "month"), years]), axis=1)
    return int(np.median(np.unique(pairs[0], return_counts=True)[1]))


@dataclass(frozen=True)
class Cycle:
    """Which climatology: its name, harmonics of the year, or the days of a moving window."""

    name: str
    harmonics: int = _HARMONICS
    window: int | None = None

    @classmethod
    def of(cls, argument: str, value: Any) -> Self:
        """Read the user's choice: a name, a number of harmonics, or a window such as "31D"."""
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            if not 1 <= value <= 30:
                raise InvalidValueError(f"{argument} must have 1 to 30 harmonics, got {value}")
            return cls("dayofyear", int(value))
        if not isinstance(value, str):
            raise InvalidTypeError(
                f"{argument} must be one of {list(CYCLES)}, a window such as '31D' or a number of "
                f"harmonics, got {type(value).__name__}"
            )
        if days := _WINDOW.fullmatch(value):
            if not 1 <= int(days[1]) <= 366:
                raise InvalidValueError(f"{argument} must have 1 to 366 days, got {value!r}")
            return cls("dayofyear", window=int(days[1]))
        check_choice(argument, value, CYCLES)
        return cls(value)

    @classmethod
    def supported_by(
        cls, dates: NDArray[Any], train: NDArray[np.intp], wanted: NDArray[np.intp]
    ) -> Self:
        """Return the cycle of the step of the data that train steps show where it is wanted."""
        if len(dates) < 2 or not is_time(dates) or not len(train):
            return cls("mean")
        numbers = _days(dates)
        step = float(np.median(np.diff(numbers)))
        months = group_numbers(dates, "month")
        has_months = bool(np.isin(months[wanted], months[train]).all())
        has_year = has_months and float(np.ptp(numbers[train])) + step >= _LEAST_DAYS
        if step <= _LONGEST_FINE:
            return cls("dayofyear_hour" if has_year else "hour")
        if step <= _LONGEST_SMOOTH:
            return cls("dayofyear" if has_year else "mean")
        return cls("month" if step <= _LONGEST_OF_YEAR and has_months else "mean")

    @property
    def described(self) -> str:
        """Phrase for the scorecard."""
        if self.name in ("month", "season"):
            return f"by {self.name}"
        if self.name == "mean":
            return "one mean"
        if self.window is not None:
            return f"means of {self.window} days around the day of the year"
        if self.name == "hour":
            return f"{_OF_DAY} harmonics of the day"
        of_day = ""
        if self.name == "dayofyear_hour":
            of_day = " and of the day"
        return f"{self.harmonics} harmonics of the year{of_day}"


def _days(dates: NDArray[Any]) -> Floats:
    """Return days since some date."""
    if dates.dtype.kind == "M":
        ticks = dates.astype("M8[us]").astype(np.int64)
    else:
        ticks = cftime.date2num(dates, "microseconds since 1970-01-01", dates[0].calendar)
    return np.asarray(ticks, np.float64) / _DAY_US


@dataclass(frozen=True, eq=False)
class Design:
    """What a climatology is made of at each step of a cube: a group, and columns of a fit."""

    cycle: Cycle
    group_of_step: NDArray[np.intp]
    # (steps, coefficients); None for a mean of each group. A fit holds in groups with a value.
    columns: Floats | None
    # Groups of each day of the year, of means over a window.
    groups_of_day: int = 1

    @classmethod
    def of(cls, argument: str, cycle: Cycle, dates: NDArray[Any]) -> Self:
        """Return the design of a cycle at all dates."""
        if cycle.name == "mean":
            return cls(cycle, np.zeros(len(dates), np.intp), None)
        if not is_time(dates):
            raise InvalidValueError(
                f"{argument}={cycle.name!r} needs dates along the time dim, got {dates.dtype}; use "
                "'mean'"
            )
        if cycle.name in ("month", "season"):
            return cls(cycle, group_numbers(dates, cycle.name).astype(np.intp), None)
        phases, times = year_fractions(dates), _day_fractions(dates)
        if cycle.window is not None:
            n_hours = 1
            if len(np.unique(times)) > 1:
                n_hours = 24
            days = np.floor(phases * 366 + 1e-9).astype(np.intp)
            of_day = np.floor(times * n_hours + 1e-9).astype(np.intp)
            return cls(cycle, days * n_hours + of_day, None, n_hours)
        months = group_numbers(dates, "month").astype(np.intp)
        day_waves = waves(times, _OF_DAY)
        if cycle.name == "hour":
            return cls(cycle, np.zeros_like(months), day_waves)
        of_year = waves(phases, cycle.harmonics)
        if cycle.name == "dayofyear":
            return cls(cycle, months, of_year)
        changes = (of_year[:, 1:3, None] * day_waves[:, None, 1:]).reshape(len(dates), -1)
        return cls(cycle, months, np.concatenate([of_year, day_waves[:, 1:], changes], axis=1))

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        if self.cycle.window is not None:
            return 366 * self.groups_of_day
        return int(self.group_of_step.max(initial=-1)) + 1


def waves(phases: Floats, harmonics: int) -> Floats:
    """Return columns of 1, and cosine and sine of each harmonic."""
    angles = 2 * np.pi * phases[:, None] * np.arange(1, harmonics + 1)
    waves = np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(len(phases), -1)
    return np.concatenate([np.ones((len(phases), 1)), waves], axis=1)


@dataclass(frozen=True, eq=False)
class ClimatologySums(Mergeable):
    """Sums of the values of cells that a climatology follows from."""

    # (groups, *cells)
    count: Floats
    # Of the values in each group, or of values times each column of a fit.
    total: Floats
    # Of products of columns, above the diagonal; an axis of cells has length 1 without gaps.
    products: Floats

    @classmethod
    def of(cls, design: Design, steps: NDArray[np.intp], values: Floats) -> ClimatologySums:
        """Sum up values (steps, *cells) of some steps; NaN is a gap."""
        parts = []
        for start in range(0, max(len(steps), 1), _STEPS_AT_ONCE):
            some = slice(start, start + _STEPS_AT_ONCE)
            parts.append(cls._of_few(design, steps[some], values[some]))
        return reduce(cls.merge, parts)

    @classmethod
    def _of_few(cls, design: Design, steps: NDArray[np.intp], values: Floats) -> ClimatologySums:
        cells = values.shape[1:]
        is_known = np.isfinite(values)
        filled = np.where(is_known, values, 0.0)
        groups = design.group_of_step[steps]
        count, group_total = np.zeros((2, design.n_groups, *cells))
        for group in np.unique(groups):
            here = groups == group
            count[group] = is_known[here].sum(0)
            if design.columns is None:
                group_total[group] = filled[here].sum(0)
        if design.columns is None:
            return cls(count, group_total, np.zeros((0, *(1 for _ in cells))))
        columns = design.columns[steps]
        first, second = np.triu_indices(columns.shape[1])
        of_steps = columns[:, first] * columns[:, second]
        products = of_steps.sum(0).reshape(-1, *(1 for _ in cells))
        is_whole = is_known.all(0)
        if not is_whole.all():
            products = np.where(is_whole, products, 0.0)
            has_gaps = is_known.any(0) & ~is_whole
            products[:, has_gaps] = of_steps.T @ is_known[:, has_gaps].astype(np.float64)
        return cls(count, np.tensordot(columns.T, filled, 1), products)

    def merge(self, other: ClimatologySums) -> ClimatologySums:
        """Return the sums of both, of the same cells at other steps of the same design."""
        return ClimatologySums(
            self.count + other.count, self.total + other.total, self.products + other.products
        )

    def climatology(self, design: Design) -> Climatology:
        """Return the climatology of each cell."""
        if design.columns is not None:
            return Climatology(design, self.coefficients(), self.count > 0)
        count, total = self.count, self.total
        if design.cycle.window is not None:
            count, total = (_over_window(sums, design) for sums in (count, total))
        return Climatology(design, ratio(total, count))

    def coefficients(self) -> Floats:
        """Solve the normal equations of each cell; NaN for one with too few values."""
        k = len(self.total)
        count, total = self.count.sum(0).ravel(), self.total.reshape(k, -1)
        products = self.products.reshape(len(self.products), -1)
        means = np.full_like(total, np.nan)
        is_enough = np.flatnonzero(count >= _LEAST_VALUES * k)
        for start in range(0, len(is_enough), _CELLS_AT_ONCE):
            cells = is_enough[start : start + _CELLS_AT_ONCE]
            if products.shape[1] == 1:  # one matrix for all cells
                means[:, cells] = _solve(_matrices(products, k)[0], total[:, cells])
                continue
            of_cells = _solve(_matrices(products[:, cells], k), total[:, cells].T[..., None])
            means[:, cells] = of_cells[..., 0].T
        return means.reshape(self.total.shape)


def _over_window(sums: Floats, design: Design) -> Floats:
    """Add up the days around each day of the year."""
    of_days = sums.reshape(366, design.groups_of_day, -1)
    window = min(design.cycle.window or 1, 366)
    first = -(window // 2)
    shifted = (np.roll(of_days, -shift, axis=0) for shift in range(first, first + window))
    return np.asarray(sum(shifted)).reshape(sums.shape)


def _matrices(products: Floats, k: int) -> Floats:
    """Return the matrices of the normal equations (cells, k, k)."""
    matrices = np.zeros((products.shape[1], k, k))
    first, second = np.triu_indices(k)
    matrices[:, first, second] = matrices[:, second, first] = products.T
    return matrices


def _solve(matrices: Floats, right: Floats) -> Floats:
    """Solve normal equations (..., k, k), of which some columns may be the same."""
    size = np.trace(matrices, axis1=-2, axis2=-1)[..., None, None] / matrices.shape[-1]
    ridged = matrices + _RIDGE * size * np.eye(matrices.shape[-1])
    coefficients = np.linalg.solve(ridged, right)
    # what the ridge took from columns that are not the same
    refined: Floats = coefficients + np.linalg.solve(ridged, right - matrices @ coefficients)
    return refined


def least_squares(columns: Floats, values: Floats) -> Floats:
    """Return the coefficients of each cell, of values (steps, cells); NaN for one with too few."""
    steps = np.arange(len(values))
    design = Design(Cycle("dayofyear"), np.zeros_like(steps), columns)
    return ClimatologySums.of(design, steps, values).coefficients()


@dataclass(frozen=True, eq=False)
class Climatology:
    """Means of groups (groups, *cells), or coefficients of a fit and where it holds."""

    design: Design
    numbers: Floats
    is_known: NDArray[np.bool_] | None = None
    # Whether the first axis of cells has shares of classes, which a fit may take beyond 0 and 1.
    are_shares: bool = False

    def at(self, steps: NDArray[np.intp]) -> Floats:
        """Return the climatology at steps of any shape; NaN for -1, and where none is known."""
        inside = steps.clip(min=0)
        groups = self.design.group_of_step[inside]
        if self.design.columns is None or self.is_known is None:
            values: Floats = self.numbers[groups]
        else:
            values = np.tensordot(self.design.columns[inside], self.numbers, 1)
            values[~self.is_known[groups]] = np.nan
            if self.are_shares:
                values = values.clip(0.0, 1.0)
                values /= values.sum(steps.ndim, keepdims=True)
        values[steps < 0] = np.nan
        return values


def smooth_days(mean: Floats, variance: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return smooth means and variances of each day of the year, from those of single days.

    The first axis has 366 days, which may be fewer in the calendar: the last ones are empty then.
    NaN where an entry has too few days, and more than a month from its days: a fit of summers says
    nothing of winters.
    """
    shape, weight = mean.shape, np.nan_to_num(weight.reshape(366, -1))
    last = int(np.flatnonzero(weight.any(1)).max(initial=0)) + 1
    length = last
    if last <= 360:
        length = 360
    columns = waves((np.arange(366) + 0.5) / length, _HARMONICS)
    smooth_mean = _fit(columns, np.nan_to_num(mean.reshape(366, -1)), weight)
    deviation = np.nan_to_num(mean.reshape(366, -1)) - smooth_mean
    squares = np.nan_to_num(variance.reshape(366, -1)) + deviation**2
    smooth_variance = _fit(columns, squares, weight)
    # a fit of squares may dip below what any day has
    least = np.where(weight > 0, squares, np.inf).min(0)
    least = np.where(np.isfinite(least), least, 0.0)
    smooth_variance = np.maximum(smooth_variance, least)
    is_far = ~_is_near(weight > 0, length)
    smooth_mean[is_far] = smooth_variance[is_far] = np.nan
    return smooth_mean.reshape(shape), smooth_variance.reshape(shape)


def _is_near(has_day: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Return which days of a year of some length have a day within a month of them."""
    around = np.concatenate([has_day[length - _MONTH : length], has_day, has_day[:_MONTH]])
    n_before = np.concatenate([np.zeros_like(around[:1], np.int64), around.cumsum(0)])
    return np.asarray(n_before[2 * _MONTH + 1 :] > n_before[: -2 * _MONTH - 1])


def _fit(columns: Floats, values: Floats, weight: Floats) -> Floats:
    """Return the weighted least-squares fit of each cell (rows, cells)."""
    k = columns.shape[1]
    fitted = np.full_like(values, np.nan)
    is_enough = np.flatnonzero((weight > 0).sum(0) >= _LEAST_VALUES * k)
    for start in range(0, len(is_enough), _CELLS_AT_ONCE):
        cells = is_enough[start : start + _CELLS_AT_ONCE]
        here = weight[:, cells]
        matrices = np.einsum("dk,dl,dc->ckl", columns, columns, here, optimize=True)
        right = columns.T @ (here * values[:, cells])
        fitted[:, cells] = columns @ _solve(matrices, right.T[..., None])[..., 0].T
    return fitted


def warning_of_years(years: int | None) -> str:
    """Return what must be said of a climatology from so few years; nothing of one from enough."""
    if years is None or years >= FEW_YEARS:
        return ""
    return (
        f"with fewer than {FEW_YEARS} years, the noise of a climatology counts as skill of the "
        "models beside it"
    )


def is_one_year(attrs: Mapping[Any, Any]) -> bool:
    """Return True if the climatology of a scorecard is from one year: too few for a verdict."""
    return bool(attrs.get("climatology_years", FEW_YEARS) <= 1)
