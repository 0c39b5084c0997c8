"""Methods: estimates of the values in gaps, from arrays (time, *cells) with NaN in gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import date_keys
from ml4cube.core.climatology import ClimatologySums, Cycle, Design
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import dates_along
from ml4cube.cube.reader import CubeReader
from ml4cube.gap_filling.artificial import Flags, known_neighbours
from ml4cube.gap_filling.places import map_points

Floats = NDArray[np.float64]

#: Methods by name.
METHODS = ("linear", "nearest", "climatology", "spatial")
# Cells of a grid that may be as far away as the last neighbour.
_TIES = 16


class Method(Protocol):
    """Estimates the cells that are wanted; NaN where it cannot."""

    @property
    def whole(self) -> tuple[str, ...]:
        """Dims that a block must have whole."""

    def estimate(
        self, values: Floats, wanted: Flags, used: Flags, box: Mapping[str, slice]
    ) -> Floats: ...


@dataclass(frozen=True, eq=False)
class InTime:
    """From the known steps before and after: linear or the nearest; beyond the ends if asked."""

    whole: tuple[str, ...]
    times: NDArray[Any]
    is_linear: bool
    beyond_ends: bool

    def estimate(
        self, values: Floats, wanted: Flags, used: Flags, box: Mapping[str, slice]
    ) -> Floats:
        """Return estimates of all cells."""
        n = len(values)
        before, after = known_neighbours(np.isfinite(values))
        has_before, has_after = before >= 0, after < n
        before, after = np.where(has_before, before, 0), np.where(has_after, after, n - 1)
        since = (self.times.reshape(-1, *(1,) * (values.ndim - 1)) - self.times[before]).astype(
            float
        )
        until = (self.times[after] - self.times.reshape(-1, *(1,) * (values.ndim - 1))).astype(
            float
        )
        earlier = np.take_along_axis(values, before, 0)
        later = np.take_along_axis(values, after, 0)
        is_nearer = has_before & (~has_after | (since <= until))
        nearest = np.where(is_nearer, earlier, later)
        nearest[~has_before & ~has_after] = np.nan
        inside = has_before & has_after
        result = nearest
        if self.is_linear:
            span = np.where(inside, since + until, 1.0)
            share = since / np.where(span > 0, span, 1.0)
            result = np.where(inside, earlier + share * (later - earlier), nearest)
        if self.beyond_ends:
            return result
        return np.where(inside, result, np.nan)


@dataclass(frozen=True, eq=False)
class FromClimatology:
    """The climatology of the known cells of a part at the same place."""

    whole: tuple[str, ...]
    design: Design

    def estimate(
        self, values: Floats, wanted: Flags, used: Flags, box: Mapping[str, slice]
    ) -> Floats:
        """Return estimates of all cells."""
        steps = np.arange(len(values))
        sums = ClimatologySums.of(self.design, steps, np.where(used, values, np.nan))
        return sums.climatology(self.design).at(steps)


@dataclass(frozen=True, eq=False)
class Spatial:
    """The mean of the nearest known cells of the same step, weighted by 1 / distance squared."""

    whole: tuple[str, ...]
    # Position of each cell of the last axes: on the unit sphere, or in cells.
    points: Floats
    is_sphere: bool
    neighbours: int

    def estimate(
        self, values: Floats, wanted: Flags, used: Flags, box: Mapping[str, slice]
    ) -> Floats:
        """Return estimates of the wanted cells."""
        from scipy.spatial import KDTree

        fields = values.reshape(-1, len(self.points))
        result = np.full(fields.shape, np.nan)
        has_place = np.isfinite(self.points).all(axis=1)
        wanted_fields = wanted.reshape(fields.shape) & has_place
        for i in np.flatnonzero(wanted_fields.any(axis=1)):
            has_value = np.isfinite(fields[i]) & has_place
            k = min(self.neighbours, int(has_value.sum()))
            if k == 0:
                continue
            # more than that, because all cells at the distance of the last one count
            most = min(k + _TIES, int(has_value.sum()))
            distance, index = KDTree(self.points[has_value]).query(
                self.points[wanted_fields[i]], k=[*range(1, most + 1)]
            )
            is_near = distance <= distance[:, k - 1 : k] * (1 + 1e-9)
            if self.is_sphere:
                distance = 2 * np.arcsin(np.minimum(distance / 2, 1.0))
            # cells at one place count alone
            distance = np.maximum(distance, 1e-9)
            weight = is_near * (distance.min(axis=1, keepdims=True) / distance) ** 2
            near = fields[i][has_value][index]
            result[i, wanted_fields[i]] = (weight * near).sum(axis=1) / weight.sum(axis=1)
        return result.reshape(values.shape)


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction of a model, which has been made for all cells."""

    whole: tuple[str, ...]
    reader: CubeReader
    name: str
    time_dim: str | None

    def estimate(
        self, values: Floats, wanted: Flags, used: Flags, box: Mapping[str, slice]
    ) -> Floats:
        """Return the prediction in a box."""
        predicted = self.reader.read(box)[self.name].astype(np.float64)
        if self.time_dim is not None:
            return predicted
        return predicted[np.newaxis]


class MethodOptions(NamedTuple):
    """Which method, and its options."""

    method: str
    beyond_ends: bool
    cycle: str | int | None
    neighbours: int

    def method_of(self, array: xr.DataArray, time_dim: str | None) -> Method:
        """Return the method for one variable."""
        if self.method == "spatial":
            return Spatial(*map_points(array, time_dim), self.neighbours)
        if time_dim is None:
            raise InvalidValueError(
                f"method={self.method!r} needs a time dim, {array.name!r} has {array.dims}; use "
                "'spatial'"
            )
        dates = dates_along(array.coords.values(), time_dim)
        if dates is None:
            dates = array[time_dim]
        keys, _ = date_keys(dates.values)
        if not (np.diff(keys) > 0).all():
            raise InvalidValueError(
                f"method={self.method!r} needs increasing dates along {time_dim!r}; sort them, as "
                f"with ds.sortby({time_dim!r}), and drop those that repeat or are missing"
            )
        if self.method != "climatology":
            is_linear = self.method == "linear"
            return InTime((time_dim,), keys, is_linear, self.beyond_ends or not is_linear)
        if self.cycle is None:
            steps = np.arange(dates.size)
            cycle = Cycle.supported_by(dates.values, steps, steps)
        else:
            cycle = Cycle.of("cycle", self.cycle)
        return FromClimatology((time_dim,), Design.of("cycle", cycle, dates.values))
