"""Residuals: the values of a variable without trend and season, from a sample if it is large."""

from __future__ import annotations

import itertools
import logging
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError
from ml4cube.splits.cube import microseconds

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

# Most cells that are read for one dim: 16 MB of float64, a few hundred MB with all intermediates.
CELLS_AT_MOST = 1 << 21
_RUNS = 8
_YEAR_DAYS = {"360_day": 360.0, "noleap": 365.0, "365_day": 365.0, "all_leap": 366.0}
_HARMONICS = 2
# Rounding to a float dtype leaves a spread of 0.3 of its steps, and a few operations a bit more.
# The float64 arithmetic here is off by some tens of its eps at most.
_STEPS_OF_ROUNDING = 2
_EPS_OF_ROUNDING = 64
# Fraction of a cell by which equal spacing may be off: months have 28 to 31 days.
_ABOUT_EQUAL = 0.15
# The squares of larger values overflow when added up.
_TOO_LARGE = 1e150
_MICROSECONDS_PER_DAY = 86_400_000_000


def sample_lines(array: xr.DataArray, dim: str, deseason: bool) -> xr.DataArray:
    """Return whole lines along `dim`, spread over the cube, that fit in memory."""
    # Lines are sampled in runs of neighbours, so that not every chunk is read. To remove the yearly
    # cycle, a good part of the time steps is kept for every line.
    rng = np.random.default_rng(0)
    sizes = {str(name): n for name, n in sorted(array.sizes.items(), key=lambda item: str(item[0]))}
    n = min(sizes[dim], CELLS_AT_MOST)
    start = int(rng.integers(sizes[dim] - n + 1))
    taken: dict[str, Any] = {dim: slice(start, start + n)}
    lines = max(CELLS_AT_MOST // n, 1)
    dated = [name for name in sizes if name != dim and deseason and _dates(array, name) is not None]
    others = sorted((name for name in sizes if name != dim and name not in dated), key=sizes.get)  # type: ignore[arg-type]
    for name in dated:
        keep = min(sizes[name], max(lines // 16, min(lines, 120)))
        taken[name] = np.sort(rng.choice(sizes[name], keep, replace=False))
        lines = max(lines // keep, 1)
    for i, name in enumerate(others):
        keep = min(sizes[name], max(int(lines ** (1 / (len(others) - i))), 1))
        taken[name] = _runs(sizes[name], keep, rng)
        lines = max(lines // len(taken[name]), 1)
    return array.isel(taken)


def _runs(n: int, keep: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return about `keep` of n positions, in up to `_RUNS` runs of neighbours."""
    if keep >= n:
        return np.arange(n)
    runs = min(_RUNS, keep)
    length = keep // runs
    # one run in each of equal intervals
    edges = np.linspace(0, n, runs + 1).astype(int)
    starts = [int(rng.integers(a, max(b - length, a) + 1)) for a, b in itertools.pairwise(edges)]
    return np.unique(np.concatenate([np.arange(s, min(s + length, n)) for s in starts]))


class Residuals(NamedTuple):
    """Values without trend and season."""

    values: Floats  # gaps are NaN
    positions: dict[str, Floats]
    rounding: float  # a spread up to which values may be only rounding errors


def remove_trend_and_season(
    array: xr.DataArray, order: list[str], detrend: bool, deseason: bool
) -> Residuals:
    """Return the residuals with axes in `order`."""
    array = array.transpose(*order)
    values = np.array(array.values, dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    positions = {dim: _positions(array, dim) for dim in order}
    known = np.isfinite(values)
    if not known.any():
        return Residuals(values, positions, 0.0)
    largest = float(np.abs(values[known]).max())
    if largest > _TOO_LARGE:
        raise InvalidValueError(
            f"{array.name!r} has values of {largest:.3g}, too large to be squared in float64; "
            "check whether a fill value was not decoded"
        )
    values -= values[known].mean()
    if deseason:
        for axis, dim in enumerate(order):
            values = _without_season(values, axis, array, dim, positions[dim])
    if detrend:
        values = _without_trend(values, [positions[dim] for dim in order])
    rounding = _EPS_OF_ROUNDING * float(np.finfo(np.float64).eps) * largest
    if array.dtype.kind == "f":
        top = array.dtype.type(largest)
        step = float(top - np.nextafter(top, array.dtype.type(0)))
        rounding = max(rounding, _STEPS_OF_ROUNDING * step)
    return Residuals(values, positions, rounding)


def _positions(array: xr.DataArray, dim: str) -> Floats:
    """Return the position of each cell, in units of the median distance of neighbours."""
    n = array.sizes[dim]
    coord = array.coords.get(dim)
    plain = np.arange(float(n))
    if coord is None or n < 2 or coord.isnull().any():
        return plain
    dated = is_time(coord)
    if not dated and coord.dtype.kind not in "fiu":
        return plain
    at = np.asarray(microseconds(coord) if dated else coord, dtype=float)
    step = float(np.median(np.abs(np.diff(at)))) if np.isfinite(at).all() else 0.0
    if step == 0:
        return plain
    at = np.abs(at - at[0]) / step
    if not (np.diff(at) >= 0).all():
        logger.warning("%s is not sorted; its cells are assumed to be equally spaced", dim)
        return plain
    evenly = at * ((n - 1) / at[-1])
    return plain if np.abs(evenly - plain).max() <= _ABOUT_EQUAL else at


def _dates(array: xr.DataArray, dim: str) -> tuple[Floats, float] | None:
    """Return days since the first date along a dim, and the length of its calendar's year."""
    coord = array.coords.get(dim)
    if coord is None or coord.size < 2 or not is_time(coord) or coord.isnull().any():
        return None
    days = microseconds(coord) / _MICROSECONDS_PER_DAY
    calendar = "standard" if coord.dtype.kind == "M" else coord.values[0].calendar
    return days, _YEAR_DAYS.get(calendar, 365.2425)


def _without_season(
    values: Floats, axis: int, array: xr.DataArray, dim: str, positions: Floats
) -> Floats:
    """Remove the yearly cycle, and the daily one, of every line along time."""
    # Mean and trend of a line are fitted too, or the cycles would absorb part of the trend, but
    # they are not removed.
    dates = _dates(array, dim)
    if dates is None:
        return values
    days, year = dates
    if np.ptp(days) + np.median(np.abs(np.diff(days))) < 2 * year:
        return values
    cycles = [year] if np.median(np.abs(np.diff(days))) > 0.26 else [year, 1.0]
    columns = [np.ones_like(days), (positions - positions.mean()) / positions.std()]
    for length in cycles:
        for harmonic in range(1, _HARMONICS + 1):
            angle = 2 * np.pi * harmonic * days / length
            columns += [np.cos(angle), np.sin(angle)]
    design = np.stack(columns, axis=1)
    lines = np.moveaxis(values, axis, 0).reshape(days.size, -1)
    for start in range(0, lines.shape[1], 4096):
        part = lines[:, start : start + 4096]
        known = np.isfinite(part)
        normal = np.einsum("tk,tl,tc->ckl", design, design, known, optimize=True)
        right = np.einsum("tk,tc->ck", design, np.where(known, part, 0.0), optimize=True)
        fit = np.einsum("ckl,cl->ck", np.linalg.pinv(normal, rcond=1e-9, hermitian=True), right)
        fit[known.sum(axis=0) < 3 * (design.shape[1] - 1)] = 0.0  # too few values to fit a season
        part -= design[:, 2:] @ fit[:, 2:].T
    return np.moveaxis(lines.reshape(np.moveaxis(values, axis, 0).shape), 0, axis)


def _without_trend(values: Floats, positions: list[Floats]) -> Floats:
    """Remove one plane fitted to all cells."""
    known = np.isfinite(values)
    columns = []
    for axis, at in enumerate(positions):
        if at.size > 1:
            shape = [-1 if a == axis else 1 for a in range(values.ndim)]
            columns.append(((at - at.mean()) / at.std()).reshape(shape))
    bare = np.where(known, values, 0.0)
    rows = [known.astype(float), *(known * column for column in columns)]
    normal = np.array([[np.sum(a * b) for b in rows] for a in rows])
    slopes = np.linalg.pinv(normal, rcond=1e-12) @ np.array([np.sum(row * bare) for row in rows])
    for slope, column in zip(slopes[1:], columns, strict=True):
        values = values - slope * column
    return values
