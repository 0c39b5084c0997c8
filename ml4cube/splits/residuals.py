"""Residuals: the values of a variable without trend and season, from a sample if it is large."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import has_distances, is_time
from ml4cube.core.climatology import least_squares, waves
from ml4cube.core.errors import InvalidValueError
from ml4cube.splits.cube import dates_of, microseconds

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

# Most cells that are read for one dim: 16 MB of float64, a few hundred MB with all intermediates.
CELLS_AT_MOST = 1 << 21
# Most runs of neighbouring cells along a dim in which a sample is read.
_RUNS = 8
_DAYS_OF_YEAR = {"360_day": 360.0, "noleap": 365.0, "365_day": 365.0, "all_leap": 366.0}
_HARMONICS = 2
# Steps of up to 6 hours, and a bit more, show the daily cycle.
_DAILY_CYCLE_DAYS = 0.26
# Rounding to a float dtype leaves a spread of 0.3 of the distance of neighbouring floats, and the
# operations before it a bit more. The float64 arithmetic here is off by some tens of its eps.
_ROUNDING_STEPS = 2
_EPS_OF_ROUNDING = 64
# Fraction of a cell by which equal spacing may be off: months have 28 to 31 days.
_ABOUT_EQUAL = 0.15
# The squares of larger values overflow when added up.
_TOO_LARGE = 1e150
_MICROSECONDS_PER_DAY = 86_400_000_000


class Residuals(NamedTuple):
    """The values of a variable without trend and season."""

    # Gaps are NaN.
    values: Floats
    # Position of each cell along every dim, in the order of the axes, in units of the median
    # distance of neighbours.
    positions: dict[str, Floats]
    # Spread up to which values may differ only by rounding.
    rounding: float


def sample_lines(array: xr.DataArray, dim: str, deseason: bool) -> xr.DataArray:
    """Return whole lines along `dim`, spread over the cube, that fit in memory."""
    # Lines are sampled in runs of neighbours, so that not every chunk is read. To remove the yearly
    # cycle, many of the time steps are kept at every location.
    rng = np.random.default_rng(0)
    sizes = {name: array.sizes[name] for name in sorted(map(str, array.dims))}
    length = min(sizes[dim], CELLS_AT_MOST)
    start = int(rng.integers(sizes[dim] - length + 1))
    indexers: dict[str, Any] = {dim: slice(start, start + length)}
    lines_left = max(CELLS_AT_MOST // length, 1)
    others = [name for name in sizes if name != dim]
    dated = [name for name in others if deseason and days_and_year(array, name) is not None]
    undated = sorted((name for name in others if name not in dated), key=lambda name: sizes[name])
    for name in dated:
        # So many time steps that about 16 locations are left, but 120 (ten years of months) if
        # that is more.
        keep = min(sizes[name], max(lines_left // 16, min(lines_left, 120)))
        indexers[name] = np.sort(rng.choice(sizes[name], keep, replace=False))
        lines_left = max(lines_left // keep, 1)
    for i, name in enumerate(undated):
        # Share the lines equally among the dims that follow.
        keep = min(sizes[name], max(int(lines_left ** (1 / (len(undated) - i))), 1))
        indexers[name] = _runs(sizes[name], keep, rng)
        lines_left = max(lines_left // len(indexers[name]), 1)
    return array.isel(indexers)


def _runs(n: int, keep: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return about `keep` of n positions, in up to `_RUNS` runs of neighbours."""
    if keep >= n:
        return np.arange(n)
    runs = min(_RUNS, keep)
    length = keep // runs
    # One run begins in each of equal intervals.
    edges = np.linspace(0, n, runs + 1).astype(int)
    starts = [int(rng.integers(a, max(b - length, a) + 1)) for a, b in itertools.pairwise(edges)]
    return np.unique(np.concatenate([np.arange(s, min(s + length, n)) for s in starts]))


def cycles_of(array: xr.DataArray) -> dict[str, list[float]]:
    """Return the lengths in days of the cycles that lines along each dim of dates show.

    A sample of the steps is shorter and has longer steps, so `array` must have them all.
    """
    cycles: dict[str, list[float]] = {}
    for dim in map(str, array.dims):
        dates = days_and_year(array.isel({dim: slice(CELLS_AT_MOST)}), dim)  # Lines are no longer.
        if dates is None:
            continue
        days, year = dates
        if has_year(days, year):
            cycles[dim] = [year, 1.0] if _step(days) <= _DAILY_CYCLE_DAYS else [year]
    return cycles


def has_year(days: Floats, year: float) -> bool:
    """Return whether dates span two years, in which an annual cycle shows."""
    # Two years may both be ordinary ones, and months differ in length.
    return bool(np.ptp(days) + 1.5 * _step(days) >= 2 * math.floor(year))


def remove_trend_and_season(
    array: xr.DataArray, detrend: bool, cycles: Mapping[str, Sequence[float]]
) -> Residuals:
    """Return the residuals, with axes sorted by the names of dims.

    `cycles` are those to remove along each dim, from `cycles_of` before steps were sampled.
    """
    dims = sorted(str(dim) for dim in array.dims)
    values = np.array(array.transpose(*dims).values, dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    positions = {dim: _positions(array, dim) for dim in dims}
    is_finite = np.isfinite(values)
    if not is_finite.any():
        return Residuals(values, positions, 0.0)
    largest = float(np.abs(values[is_finite]).max())
    if largest > _TOO_LARGE:
        raise InvalidValueError(
            f"{array.name!r} has values of {largest:.3g}, too large to be squared in float64; "
            "check whether a fill value was not decoded"
        )
    values -= values[is_finite].mean()
    for axis, dim in enumerate(dims):
        if dim in cycles and (dates := days_and_year(array, dim)) is not None:
            values = _without_season(values, axis, dates[0], cycles[dim], positions[dim])
    if detrend:
        values = _without_trend(values, list(positions.values()))
    rounding = _EPS_OF_ROUNDING * float(np.finfo(np.float64).eps) * largest
    if array.dtype.kind == "f":
        top = array.dtype.type(largest)
        step = float(top - np.nextafter(top, array.dtype.type(0)))  # to the neighbouring float
        rounding = max(rounding, _ROUNDING_STEPS * step)
    return Residuals(values, positions, rounding)


def _positions(array: xr.DataArray, dim: str) -> Floats:
    """Return the position of each cell, in units of the median distance of neighbours."""
    n = array.sizes[dim]
    coord = array.coords[dim] if dim in array.coords else dates_of(array, dim)
    equally_spaced = np.arange(float(n))
    if coord is None or n < 2 or coord.isnull().any() or not has_distances(coord):
        return equally_spaced
    numbers = (microseconds(coord) if is_time(coord) else coord.values).astype(float)
    step = 0.0
    if np.isfinite(numbers).all():
        step = _step(numbers)
    if step == 0:
        return equally_spaced
    positions = np.abs(numbers - numbers[0]) / step
    steps = np.diff(numbers)
    if not ((steps >= 0).all() or (steps <= 0).all()):
        logger.warning("%s is not sorted; its cells are assumed to be equally spaced", dim)
        return equally_spaced
    error = np.abs(positions * ((n - 1) / positions[-1]) - equally_spaced).max()
    if error > _ABOUT_EQUAL:
        return np.asarray(positions)
    return equally_spaced


def days_and_year(array: xr.Dataset | xr.DataArray, dim: str) -> tuple[Floats, float] | None:
    """Return days since the first date along a dim, and the length of its calendar's year."""
    coord = dates_of(array, dim)
    if coord is None or coord.size < 2 or coord.isnull().any():
        return None
    days = microseconds(coord) / _MICROSECONDS_PER_DAY
    calendar = "standard"
    if coord.dtype.kind != "M":
        calendar = coord.values[0].calendar
    return days, _DAYS_OF_YEAR.get(calendar, 365.2425)


def _step(numbers: Floats) -> float:
    """Return the median distance of neighbours."""
    return float(np.median(np.abs(np.diff(numbers))))


def _without_season(
    values: Floats, axis: int, days: Floats, cycles: Sequence[float], positions: Floats
) -> Floats:
    """Remove cycles of every line along time.

    Dates and lengths of cycles are in days. A line keeps its cycles if it has too few values.
    """
    # Mean and trend of a line are fitted too, or the cycles would absorb part of the trend, but
    # they are not removed.
    trend = (positions - positions.mean()) / positions.std()
    columns = [np.ones((days.size, 1)), trend[:, None]]
    columns += [waves(days / cycle, _HARMONICS)[:, 1:] for cycle in cycles]
    design = np.concatenate(columns, axis=1)
    time_first = np.moveaxis(values, axis, 0)
    lines = time_first.reshape(days.size, -1)
    coefficients = np.nan_to_num(least_squares(design, lines)[2:])
    lines = lines - design[:, 2:] @ coefficients
    return np.moveaxis(lines.reshape(time_first.shape), 0, axis)


def _without_trend(values: Floats, positions: list[Floats]) -> Floats:
    """Remove one plane fitted to all cells."""
    is_finite = np.isfinite(values)
    columns = []
    for axis, axis_positions in enumerate(positions):
        if axis_positions.size > 1:
            column = (axis_positions - axis_positions.mean()) / axis_positions.std()
            others = [other for other in range(values.ndim) if other != axis]
            columns.append(np.expand_dims(column, others))
    filled = np.where(is_finite, values, 0.0)
    design = [is_finite.astype(float), *(is_finite * column for column in columns)]
    normal = np.array([[np.sum(a * b) for b in design] for a in design])
    right = np.array([np.sum(column * filled) for column in design])
    slopes = (np.linalg.pinv(normal, rcond=1e-12) @ right)[1:]
    for slope, column in zip(slopes, columns, strict=True):
        values = values - slope * column
    return values
