"""Variogram of a variable in space and time together, estimated from train cells.

It is the product-sum model (De Iaco, Myers and Posa 2001, *Space-time analysis using a general
product-sum model*, Statistics and Probability Letters 52), fitted to pairs of cells of one time and
to pairs of one place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.variogram import Variogram, nearest_model, semivariances
from ml4cube.splits import residuals
from ml4cube.splits.cube import in_chunks
from ml4cube.splits.distances import Axes, Cells

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

# Locations and rows of other dims that are sampled for the variogram in space.
_LOCATIONS = 600
_ROWS = 64
# Classes of distance grow by this factor once they are wider than the spacing of locations.
_GROWTH = 1.15
# More than this fraction of the cells may not lie beyond all distances with a semivariance.
_MAX_UNSEEN = 0.1
# Coordinate that numbers the locations of a cube, to know which were sampled.
_NUMBER = "ml4cube_number_of_location"


@dataclass(frozen=True, eq=False)
class SpaceTimeVariogram:
    """Semivariances of a variable in space and time together."""

    # By distance in kilometres at one time, and by difference of time at one place; None if
    # unknown.
    space: Variogram | None
    time: Variogram | None
    # Variance over space and time.
    variance: float

    def at(self, km: Floats, apart: Floats) -> Floats:
        """Return the semivariance of cells so many kilometres and so much time apart."""
        marginals = [variogram for variogram in (self.space, self.time) if variogram is not None]
        nugget = min((variogram.nugget for variogram in marginals), default=0.0)
        in_space, space_sill = _structure(self.space, km, nugget)
        in_time, time_sill = _structure(self.time, apart, nugget)
        # What both have in common, which is then not added twice.
        common = space_sill + time_sill - max(self.variance - nugget, space_sill, time_sill)
        common = min(max(common, 0.0), space_sill, time_sill)
        is_apart = (km > 0) | (apart > 0)
        joint = space_sill * in_space + time_sill * in_time - common * in_space * in_time
        return np.where(is_apart, nugget + joint, 0.0)

    def why_unknown(self, km: Floats, apart: Floats) -> str:
        """Return why nothing is known of the errors at such distances; "" if they are known."""
        for variogram, distances, where in (
            (self.space, km, "in space"),
            (self.time, apart, "in time"),
        ):
            if not (distances > 0).any():
                continue
            if variogram is None:
                return f"no variogram {where} could be estimated from the train cells"
            longest = float(variogram.lags.max())
            if variogram.range > longest and (distances > longest).mean() > _MAX_UNSEEN:
                return (
                    f"the variogram {where} still rises at the longest distance between train "
                    "cells that can be judged, and cells lie beyond it"
                )
        return ""


def _structure(variogram: Variogram | None, lag: Floats, nugget: float) -> tuple[Floats, float]:
    """Return the semivariance above the nugget as a fraction of its sill, and that sill."""
    if variogram is None:
        return np.zeros(lag.shape), 0.0
    sill = variogram.sill - nugget
    if sill <= 0:
        return np.zeros(lag.shape), 0.0
    return np.where(lag > 0, (variogram.at(lag) - nugget) / sill, 0.0), sill


def fit_space_time(
    array: xr.DataArray, train: Cells, measured: set[str]
) -> SpaceTimeVariogram | None:
    """Fit the variogram of train cells without the season; None for a constant variable."""
    axes = train.axes
    if array.dtype.kind == "b":
        array = array.astype(float)
    cells = in_chunks(array)
    cycles = residuals.cycles_of(cells)
    cells = cells.where(train.layout.label == train.code)
    map_sizes = {dim: n for dim, n in axes.sizes.items() if dim in cells.dims}
    time_dim = None
    if axes.time_dim in cells.dims:
        time_dim = axes.time_dim
    cells = _sample_cells(cells, map_sizes, time_dim)
    sample = residuals.remove_trend_and_season(cells, detrend=False, cycles=cycles)
    if not np.isfinite(sample.values).any():
        return None
    variance = float(np.nanvar(sample.values))
    if math.sqrt(variance) <= sample.rounding:
        return None
    in_space = in_time = None
    is_track = time_dim in map_sizes
    if "space" in measured and not is_track:
        in_space = _fit_in_space(sample, cells, map_sizes, axes)
    if "time" in measured and time_dim is not None and not is_track:
        in_time = _fit_in_time(sample, time_dim, axes)
    return SpaceTimeVariogram(in_space, in_time, variance)


def _sample_cells(
    cells: xr.DataArray, map_sizes: dict[str, int], time_dim: str | None
) -> xr.DataArray:
    """Number the locations of cells; of many cells, return a sample of lines."""
    if map_sizes:
        numbers = np.arange(math.prod(map_sizes.values())).reshape(tuple(map_sizes.values()))
        cells = cells.assign_coords({_NUMBER: (tuple(map_sizes), numbers)})
    if cells.size <= residuals.CELLS_AT_MOST:
        return cells
    line_dim = time_dim or next(iter(map_sizes), str(cells.dims[0]))
    return residuals.sample_lines(cells, line_dim, deseason=True)


def _fit_in_space(
    sample: residuals.Residuals, cells: xr.DataArray, map_sizes: dict[str, int], axes: Axes
) -> Variogram | None:
    """Fit the variogram in space; None if the variable lacks a dim of the locations."""
    if not map_sizes or len(map_sizes) != len(axes.sizes):
        return None
    dims = list(sample.positions)
    axes_of_map = [dims.index(dim) for dim in map_sizes]
    fields = np.moveaxis(sample.values, axes_of_map, range(-len(axes_of_map), 0))
    number = cells[_NUMBER].transpose(*map_sizes).values.ravel()
    return _space_variogram(fields.reshape(-1, number.size), number, axes)


def _fit_in_time(sample: residuals.Residuals, time_dim: str, axes: Axes) -> Variogram | None:
    """Fit the variogram in time, by differences in the units of the axes."""
    lines = np.moveaxis(sample.values, list(sample.positions).index(time_dim), -1)
    step = 1.0
    if axes.steps > 1:
        step = np.median(np.abs(np.diff(axes.time_numbers(axes))))
    lags, semivariance, pairs = semivariances(
        lines.reshape(-1, lines.shape[-1]), sample.positions[time_dim]
    )
    return nearest_model(lags * step, semivariance, pairs)


def _space_variogram(fields: Floats, number: Ints, axes: Axes) -> Variogram | None:
    """Return the variogram in kilometres of fields, (times and others, locations)."""
    from sklearn.neighbors import KDTree

    points = axes.places.points[number]
    usable = np.flatnonzero(np.isfinite(fields).any(axis=0) & np.isfinite(points).all(axis=1))
    if usable.size < 2:
        return None
    rng = np.random.default_rng(0)
    if usable.size > _LOCATIONS:
        # Clusters of neighbours, because few pairs of a random sample are near to one another.
        centres = rng.choice(usable, _LOCATIONS // 15, replace=False)
        nearest = KDTree(points[usable]).query(points[centres], 15)[1]
        usable = usable[np.unique(nearest)]
    counts = np.isfinite(fields[:, usable]).sum(axis=1)
    full = np.flatnonzero(counts >= min(2, counts.max()))
    rows = np.sort(rng.choice(full, min(full.size, _ROWS), replace=False))
    values = fields[np.ix_(rows, usable)]
    straight = points[usable]
    first, second = np.triu_indices(usable.size, 1)
    km = axes.places.kilometres(np.linalg.norm(straight[first] - straight[second], axis=1))
    to_nearest = np.full(usable.size, np.inf)
    np.minimum.at(to_nearest, first, np.where(km > 0, km, np.inf))
    np.minimum.at(to_nearest, second, np.where(km > 0, km, np.inf))
    spacing, longest = float(np.median(to_nearest)), float(km.max()) / 2
    if not np.isfinite(spacing) or longest <= spacing:
        return None
    edges = [0.5 * spacing]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + spacing, edges[-1] * _GROWTH))
    class_of_pair = np.searchsorted(edges, km)
    use = (km > 0) & (km <= longest)
    squares, distances, pairs = (np.zeros(len(edges) + 1) for _ in range(3))
    for row in values:
        difference = row[first] - row[second]
        is_finite = use & np.isfinite(difference)
        of_class = class_of_pair[is_finite]
        size = len(edges) + 1
        squares += np.bincount(of_class, difference[is_finite] ** 2, size)
        distances += np.bincount(of_class, km[is_finite], size)
        pairs += np.bincount(of_class, minlength=size)
    filled = pairs > 0
    return nearest_model(
        distances[filled] / pairs[filled],
        squares[filled] / pairs[filled] / 2,
        pairs[filled].astype(np.int64),
    )
