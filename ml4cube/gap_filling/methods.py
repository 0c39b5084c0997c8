"""Methods: estimates of the values in gaps, from arrays (time, *cells) with NaN in gaps.

A new method is a function that estimates, one that makes it for a variable, and a row of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import date_keys
from ml4cube.core.climatology import ClimatologySums, Cycle, Design
from ml4cube.core.distance.separation import unit_vectors
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import dates_along, latitude_and_longitude, map_dims
from ml4cube.gap_filling.artificial import Flags, known_neighbours

Floats = NDArray[np.float64]

# Equally distant neighbours looked up beyond the k-th.
_TIES = 16


@dataclass(frozen=True, eq=False)
class Gaps:
    """A block with gaps, arrays (time, *cells)."""

    # NaN in gaps.
    values: Floats
    # The cells to estimate, and those that a climatology may use.
    wanted: Flags
    used: Flags
    box: Mapping[str, slice]


@dataclass(frozen=True, eq=False)
class Method:
    """Estimates of the wanted cells, NaN where there is none; other cells may have any value."""

    estimate: Callable[[Gaps], Floats]
    # Dims that blocks must not cut.
    uncut_dims: tuple[str, ...] = ()


@dataclass(frozen=True)
class MethodOptions:
    """Options of all methods, as in `fill_gaps`."""

    beyond_ends: bool
    cycle: str | int | None
    neighbours: int


def _in_time(gaps: Gaps, times: NDArray[Any], is_linear: bool, beyond_ends: bool) -> Floats:
    """Estimate from the known steps before and after; beyond the ends if asked."""
    values, n = gaps.values, len(gaps.values)
    before, after = known_neighbours(np.isfinite(values))
    has_before, has_after = before >= 0, after < n
    before, after = np.where(has_before, before, 0), np.where(has_after, after, n - 1)
    time = times.reshape(-1, *(1,) * (values.ndim - 1))
    since, until = (time - times[before]).astype(float), (times[after] - time).astype(float)
    earlier = np.take_along_axis(values, before, 0)
    later = np.take_along_axis(values, after, 0)
    is_nearer = has_before & (~has_after | (since <= until))
    result = np.where(is_nearer, earlier, later)
    result[~has_before & ~has_after] = np.nan
    inside = has_before & has_after
    if is_linear:
        span = np.where(inside, since + until, 1.0)
        share = since / np.where(span > 0, span, 1.0)
        result = np.where(inside, earlier + share * (later - earlier), result)
    if beyond_ends:
        return result
    return np.where(inside, result, np.nan)


def _from_climatology(gaps: Gaps, design: Design) -> Floats:
    """Estimate the climatology of the known cells of a part at the same place."""
    steps = np.arange(len(gaps.values))
    sums = ClimatologySums.of(design, steps, np.where(gaps.used, gaps.values, np.nan))
    return sums.climatology(design).at(steps)


def _spatial(gaps: Gaps, points: Floats, is_sphere: bool, neighbours: int) -> Floats:
    """Estimate the mean of the nearest known cells, weighted by 1 / distance squared.

    `points` are positions of the cells of the last axes: on the unit sphere, or in cells.
    """
    from scipy.spatial import KDTree

    fields = gaps.values.reshape(-1, len(points))
    result = np.full(fields.shape, np.nan)
    has_place = np.isfinite(points).all(axis=1)
    wanted = gaps.wanted.reshape(fields.shape) & has_place
    for i in np.flatnonzero(wanted.any(axis=1)):
        has_value = np.isfinite(fields[i]) & has_place
        n_known = int(has_value.sum())
        k = min(neighbours, n_known)
        if k == 0:
            continue
        # more than that, because all cells at the distance of the last one count
        looked_up = [*range(1, min(k + _TIES, n_known) + 1)]
        distance, index = KDTree(points[has_value]).query(points[wanted[i]], k=looked_up)
        is_near = distance <= distance[:, k - 1 : k] * (1 + 1e-9)
        if is_sphere:
            distance = 2 * np.arcsin(np.minimum(distance / 2, 1.0))
        # cells at one place count alone
        distance = np.maximum(distance, 1e-9)
        weight = is_near * (distance.min(axis=1, keepdims=True) / distance) ** 2
        near = fields[i][has_value][index]
        result[i, wanted[i]] = (weight * near).sum(axis=1) / weight.sum(axis=1)
    return result.reshape(gaps.values.shape)


def _linear(array: xr.DataArray, time_dim: str | None, options: MethodOptions) -> Method:
    time_dim, dates = _dates("linear", array, time_dim)
    times = date_keys(dates.values)[0]
    estimate = partial(_in_time, times=times, is_linear=True, beyond_ends=options.beyond_ends)
    return Method(estimate, (time_dim,))


def _nearest(array: xr.DataArray, time_dim: str | None, options: MethodOptions) -> Method:
    time_dim, dates = _dates("nearest", array, time_dim)
    times = date_keys(dates.values)[0]
    estimate = partial(_in_time, times=times, is_linear=False, beyond_ends=True)
    return Method(estimate, (time_dim,))


def _climatology(array: xr.DataArray, time_dim: str | None, options: MethodOptions) -> Method:
    time_dim, dates = _dates("climatology", array, time_dim)
    if options.cycle is None:
        steps = np.arange(dates.size)
        cycle = Cycle.supported_by(dates.values, steps, steps)
    else:
        cycle = Cycle.of("cycle", options.cycle)
    design = Design.of("cycle", cycle, dates.values)
    return Method(partial(_from_climatology, design=design), (time_dim,))


def _of_places(array: xr.DataArray, time_dim: str | None, options: MethodOptions) -> Method:
    dims, points, is_sphere = _map_points(array, time_dim)
    estimate = partial(_spatial, points=points, is_sphere=is_sphere, neighbours=options.neighbours)
    return Method(estimate, dims)


def _map_points(array: xr.DataArray, time_dim: str | None) -> tuple[tuple[str, ...], Floats, bool]:
    """Return the dims of a map, the points of its cells, and whether these lie on a sphere."""
    dims = map_dims(array.coords.values(), array.dims)
    if not dims:
        raise InvalidValueError(
            f"method='spatial' needs dims of places, {array.name!r} has {array.dims}"
        )
    sizes = {dim: array.sizes[dim] for dim in dims}
    places = latitude_and_longitude(array.coords.values(), time_dim)
    if places is None:
        cells = np.indices(tuple(sizes.values())).reshape(len(dims), -1).T
        return dims, cells.astype(np.float64), False
    lat, lon = (
        in_degrees(
            coord.variable.set_dims(sizes).values,
            coord.attrs.get("units"),
        )
        for coord in places
    )
    return dims, unit_vectors(lat.ravel(), lon.ravel()), True


def _dates(method: str, array: xr.DataArray, time_dim: str | None) -> tuple[str, xr.DataArray]:
    """Return the time dim and its dates, which must increase."""
    if time_dim is None:
        raise InvalidValueError(
            f"method={method!r} needs a time dim, {array.name!r} has {array.dims}; use 'spatial'"
        )
    dates = dates_along(array.coords.values(), time_dim)
    if dates is None:
        dates = array[time_dim]
    if not (np.diff(date_keys(dates.values)[0]) > 0).all():
        raise InvalidValueError(
            f"method={method!r} needs increasing dates along {time_dim!r}; sort them, as with "
            f"ds.sortby({time_dim!r}), and drop those that repeat or are missing"
        )
    return time_dim, dates


#: What makes each method for a variable, its time dim and the options, by name.
METHODS: dict[str, Callable[[xr.DataArray, str | None, MethodOptions], Method]] = {
    "linear": _linear,
    "nearest": _nearest,
    "climatology": _climatology,
    "spatial": _of_places,
}
