"""Measure distances to train, in space and time, of the test part and of a deployment.

A deployment is where and when the model will be used: the cells of another cube, or of its path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import is_time
from ml4cube.core.distance.reach import EARTH_RADIUS_KM
from ml4cube.core.distance.separation import kilometres, nearest_on_axis, unit_vectors
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, TRAIN
from ml4cube.cube.coordinates import dates_along, find_time_dim, role_of
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, check_degrees, microseconds
from ml4cube.splits.leakage.label_layout import SAMPLE, Layout
from ml4cube.splits.validity import has_value

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_DAY = 86_400_000_000.0
# Time steps that are sampled; the map of train cells is read once for each.
_STEPS = 32
# A station touches train if one of its four nearest stations is train, like the cells of a grid.
_NEIGHBOURS = 4


@dataclass(frozen=True, eq=False)
class Axes:
    """The locations and times of the cells of a cube."""

    # Dims of the locations, sorted: those of a map, or the one of stations.
    sizes: dict[str, int]
    # Unit vectors on the sphere, NaN where unknown; None without coordinates.
    points: Floats | None
    time_dim: str | None
    # Dates or numbers of its steps, if it has them.
    times: xr.DataArray | None
    # Number of steps.
    steps: int

    @classmethod
    def of(cls, view: CubeView, map_dims: tuple[str, ...] = ()) -> Axes:
        """Find the locations and times of a cube."""
        coords = view.ds.coords
        time_dim = find_time_dim(coords.values(), view.dims)
        times, steps = None, 0
        if time_dim is not None:
            steps = view.sizes[time_dim]
            for axis in (dates_along(coords.values(), time_dim), view.dim_coord(time_dim)):
                if times is not None or axis is None or bool(axis.isnull().any()):
                    continue
                if is_time(axis):
                    times = axis
                elif axis.dtype.kind in "fiu":
                    times = axis.astype("float64")
        degrees = _degrees(view, time_dim)
        if degrees is None:
            _refuse_degrees_as_data(view)
            sizes = {dim: view.sizes[dim] for dim in map_dims if dim != time_dim}
            return cls(sizes, None, time_dim, times, steps)
        lat, lon = xr.broadcast(*degrees)
        sizes = {dim: view.sizes[dim] for dim in sorted(map(str, lat.dims))}
        points = unit_vectors(*(axis.transpose(*sizes).values.ravel() for axis in (lat, lon)))
        return cls(sizes, points, time_dim, times, steps)

    @property
    def station_dim(self) -> str | None:
        """The dim of locations in no order; None on a map or along a track."""
        dim = next(iter(self.sizes), None)
        known = len(self.sizes) == 1 and self.points is not None
        return dim if known and dim != self.time_dim else None

    def km(self, locations: Bools, points: Floats, count: int = 1) -> Floats:
        """Return kilometres from points to the `count` nearest locations: (points, count)."""
        from sklearn.neighbors import KDTree

        assert self.points is not None
        near = KDTree(self.points[locations]).query(points, k=count)[0]
        found = kilometres(near, EARTH_RADIUS_KM)
        # the rounding error of a unit vector is a tenth of a millimetre
        return np.where(found < 1e-6, 0.0, found)

    def numbers(self, other: Axes) -> tuple[Floats, str]:
        """Return the times of another cube in this one's unit, and the unit."""
        own, theirs = self.times, other.times
        if own is None or theirs is None:
            return np.arange(float(self.steps)), "steps"
        kinds = [
            "dates" if is_time(times) else f"numbers ({times.attrs.get('units', 'without units')})"
            for times in (own, theirs)
        ]
        if kinds[0] != kinds[1]:
            raise InvalidValueError(
                f"the deployment has {kinds[1]} along {theirs.name!r}, but the cube has "
                f"{kinds[0]} along {own.name!r}; decode the times of both (xarray.decode_cf)"
            )
        if not is_time(own):
            unit = str(own.attrs.get("units", f"units of {own.name}"))
            return theirs.values, unit.partition(" since ")[0]
        # nanoseconds overflow after 292 years, and become integers as objects
        both = [
            dates.astype("M8[us]") if dates.dtype.kind == "M" else dates
            for dates in (own.values[:1], theirs.values)
        ]
        try:
            joined = xr.DataArray(np.concatenate(both), dims="t", name=theirs.name)
            return microseconds(joined)[1:] / _DAY, "days"
        except TypeError as error:
            raise InvalidValueError(
                "the dates of the deployment must have the cube's calendar, got another "
                f"({' '.join(str(error).split())}); use convert_calendar"
            ) from None


def _degrees(view: CubeView, time_dim: str | None) -> list[xr.DataArray] | None:
    """Return latitude and longitude: of a grid, stations, a curvilinear grid, or one point."""
    found = []
    for role in ("latitude", "longitude"):
        axis = view.axis_of(role)
        if axis is None:
            others = [
                coord
                for coord in view.ds.coords.values()
                if role_of(coord) == role and coord.ndim != 1 and time_dim not in coord.dims
            ]
            if not others:
                return None
            other = max(others, key=lambda coord: (coord.ndim, str(coord.name)))
            degrees = in_degrees(other.values, other.attrs.get("units"))
            axis = xr.DataArray(degrees, dims=other.dims, name=other.name)
        found.append(xr.DataArray(axis.variable, name=axis.name))
    if all(axis.ndim == 1 for axis in found):  # curvilinear grids may have unknown locations
        check_degrees("leakage_report", *found)
    return found


def _refuse_degrees_as_data(view: CubeView) -> None:
    """Refuse latitudes and longitudes that are data variables, instead of ignoring them."""
    lat, lon = (
        [
            str(name)
            for name, var in view.ds.data_vars.items()
            if var.ndim < 3 and set(var.dims) <= set(view.dims) and role_of(var) == role
        ]
        for role in ("latitude", "longitude")
    )
    if lat and lon:
        raise InvalidValueError(
            f"{[*lat, *lon]} must be coordinates to measure distances, but they are data "
            f"variables; use ds.set_coords({[*lat, *lon]})"
        )


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a part, or of a deployment."""

    # Locations and times of their cube.
    axes: Axes
    # Label of the cells; cells without a value are excluded.
    layout: Layout
    # Code of the cells in the label.
    code: int

    @classmethod
    def of_deployment(cls, given: Any, axes: Axes) -> Cells:
        """Return the cells of a cube that have a value."""
        if not isinstance(given, xr.Dataset | xr.DataArray):
            raise InvalidTypeError(
                f"deployment must be a Dataset, a DataArray or a path, got {type(given).__name__}"
            )
        when = None if axes.times is None else axes.times.name
        if when in given.coords and not given[when].ndim:
            given = given.expand_dims(when)  # one step of a cube
        try:
            view = CubeView.of(given)
        except InvalidValueError as error:
            raise InvalidValueError(f"deployment: {error}") from None
        variables = [
            view.ds[name]
            for name in data_variables(view.ds, kinds="iufmM")
            if set(view.ds[name].dims) == set(view.dims)
        ]
        if not variables:
            raise InvalidValueError(
                f"deployment must have values, got only masks {list(view.ds.data_vars)}; pass "
                "cube.where(mask)"
            )
        used = has_value(variables, any_of_them=True)
        if used is None:
            used = xr.ones_like(variables[0], dtype=bool)
        label = xr.full_like(used, EXCLUDED, dtype=np.uint8).where(~used, np.uint8(TRAIN))
        here = Axes.of(view)
        own = cls(here, Layout.of(label, tuple(here.sizes)), TRAIN)
        if not own.layout.counts[TRAIN]:
            raise InvalidValueError("deployment must have cells with a value, got none")
        return own

    def steps(self) -> NDArray[np.intp]:
        """Return the positions along time that hold some of the cells."""
        known = self.layout.profiles.get((self.code, str(self.axes.time_dim)))
        return np.arange(self.axes.steps) if known is None else np.flatnonzero(known)

    def locations(self, step: int | None = None) -> Bools:
        """Return which locations hold some of the cells: at one step, or at any time."""
        sizes = self.axes.sizes
        if step is None or self.axes.time_dim is None:
            here = self.layout.maps[self.code]
        else:
            label = self.layout.label
            at = {self.axes.time_dim: step} if self.axes.time_dim in label.dims else {}
            here = label.isel(at) == self.code
            here = here.any([dim for dim in here.dims if dim not in sizes])
        here = here.expand_dims({dim: n for dim, n in sizes.items() if dim not in here.dims})
        return np.asarray(here.transpose(*sizes).values).ravel()


def compare_axes(axes: Axes, other: Axes | None) -> tuple[set[str], dict[str, str]]:
    """Return which of "space" and "time" can be measured between two cubes, and why not others."""
    sides = {"the cube": axes} | ({} if other is None else {"the deployment": other})
    unknown: dict[str, str] = {}
    for name, one in sides.items():
        located = axes.sizes or any(each.points is not None for each in sides.values())
        if located and one.points is None:
            unknown.setdefault("space", f"{name} has no latitude and longitude")
        timed = other is not None and any(each.steps for each in sides.values())
        if timed and one.times is None:
            unknown.setdefault("time", f"{name} has no times")
    has = {"space": axes.points is not None, "time": axes.steps > 0}
    return {domain for domain in has if has[domain] and domain not in unknown}, unknown


def distances(cells: Cells, train: Cells, measured: set[str]) -> dict[str, Floats]:
    """Return the distances of sampled cells to the nearest train cells, in space and in time."""
    # The distance in time is to the nearest time with any train cell, and that in space to the
    # nearest location that is train then (at any time, if times are not measured).
    rng = np.random.default_rng(0)
    found: dict[str, list[Floats]] = {"space": [], "time": []}
    ours, theirs = train.axes, cells.axes
    # along a track, each time has one location
    tracks = {ours.time_dim, theirs.time_dim} & {*ours.sizes, *theirs.sizes}
    together = "space" in measured and not tracks
    pairs: list[tuple[int | None, int | None]] = [(None, None)]
    if "time" in measured:
        trained = train.steps()
        steps = _sample(cells.steps(), _STEPS if together else SAMPLE, rng)
        known, when = ours.numbers(ours)[0][trained], ours.numbers(theirs)[0][steps]
        nearest = nearest_on_axis(when, known)
        apart = np.abs(when - known[nearest])
        if together:
            pairs = list(zip(steps.tolist(), trained[nearest].tolist(), strict=True))
        else:
            found["time"].append(apart)
    if "space" not in measured:
        return _joined(found)
    assert ours.points is not None
    assert theirs.points is not None
    here, there = (np.isfinite(points).all(axis=-1) for points in (ours.points, theirs.points))
    for i, (step, at) in enumerate(pairs):
        where = np.flatnonzero(cells.locations(step) & there)
        asked = _sample(where, -(-SAMPLE // len(pairs)), rng)
        locations = train.locations(at) & here
        if asked.size and locations.any():
            found["space"].append(ours.km(locations, theirs.points[asked])[:, 0])
            if step is not None:
                found["time"].append(np.full(asked.size, apart[i]))
    return _joined(found)


def _joined(found: dict[str, list[Floats]]) -> dict[str, Floats]:
    return {domain: np.concatenate(parts) for domain, parts in found.items() if parts}


def _sample(indices: NDArray[np.intp], most: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw at most `most` indices, in order."""
    if indices.size <= most:
        return indices
    return np.sort(rng.choice(indices, most, replace=False))


def spacing(train: Cells, measured: set[str]) -> dict[str, float]:
    """Return the median distance between neighbouring train locations, and train times."""
    found = {"space": 0.0, "time": 0.0}
    if "space" in measured and train.axes.points is not None:
        locations = train.locations() & np.isfinite(train.axes.points).all(axis=-1)
        asked = _sample(np.flatnonzero(locations), SAMPLE, np.random.default_rng(0))
        if asked.size > 1:
            nearest = train.axes.km(locations, train.axes.points[asked], 2)[:, 1]
            found["space"] = float(np.median(nearest))
    if "time" in measured:
        steps = np.diff(np.unique(train.axes.numbers(train.axes)[0]))
        found["time"] = float(np.median(steps)) if steps.size else 0.0
    return found


def stations_near_train(cells: Cells, train: Cells) -> float:
    """Return the fraction of stations with a train station among their nearest stations."""
    points = cells.axes.points
    assert points is not None
    known = np.isfinite(points).all(axis=-1)
    asked, trains = (np.flatnonzero(part.locations() & known) for part in (cells, train))
    used = np.union1d(asked, trains)
    if asked.size == 0 or used.size < 2:
        return float("nan")
    from sklearn.neighbors import KDTree

    asked = _sample(asked, SAMPLE, np.random.default_rng(0))
    count = min(_NEIGHBOURS + 1, used.size)
    near = used[KDTree(points[used]).query(points[asked], k=count)[1]]
    others = near != asked[:, None]
    return float((np.isin(near, trains) & others).any(axis=1).mean())
