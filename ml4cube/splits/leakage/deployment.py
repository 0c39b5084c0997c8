"""Measure distances to train, in space and time, of the test part and of a deployment.

A deployment is where and when the model will be used: the cells of another cube, or of its path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import has_distances, is_time
from ml4cube.core.distance.separation import kilometres, nearest_on_axis, unit_vectors
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, TRAIN
from ml4cube.cube.coordinates import dates_along, find_time_dim, map_dims, role_of
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, check_degrees, microseconds
from ml4cube.splits.leakage.label_layout import SAMPLE, Layout
from ml4cube.splits.validity import has_value

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_MICROSECONDS_PER_DAY = 86_400_000_000.0
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
    def of(cls, view: CubeView) -> Axes:
        """Find the locations and times of a cube."""
        time_dim = find_time_dim(view.ds.coords.values(), view.dims)
        times = None if time_dim is None else _times(view, time_dim)
        steps = 0 if time_dim is None else view.sizes[time_dim]
        degrees = _degrees(view, time_dim)
        if degrees is None:
            _refuse_degrees_as_data(view)
            on_map = map_dims(view.ds.coords.values(), view.dims)
            sizes = {dim: view.sizes[dim] for dim in sorted(on_map)}
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

    def nearest(
        self, locations: Ints, other: Axes, other_locations: Ints, count: int = 1
    ) -> tuple[Floats, Ints]:
        """Return kilometres to the `count` locations nearest to another cube's, and which they are.

        Locations are flat positions in `points`; the results have the shape (others, count).
        """
        from sklearn.neighbors import KDTree

        assert self.points is not None
        assert other.points is not None
        chords, nearest = KDTree(self.points[locations]).query(other.points[other_locations], count)
        km = kilometres(chords)
        # The rounding error of a unit vector is a tenth of a millimetre.
        return np.where(km < 1e-6, 0.0, km), locations[nearest]

    @property
    def time_unit(self) -> str:
        """The unit of `time_numbers`."""
        if self.times is None:
            return "steps"
        if is_time(self.times):
            return "days"
        unit = str(self.times.attrs.get("units", f"units of {self.times.name}"))
        return unit.partition(" since ")[0]

    def time_numbers(self, other: Axes) -> Floats:
        """Return the times of this cube or of another one in this one's unit."""
        ours, theirs = self.times, other.times
        if ours is None or theirs is None:
            return np.arange(float(self.steps))
        kinds = [
            "dates" if is_time(times) else f"numbers ({times.attrs.get('units', 'without units')})"
            for times in (ours, theirs)
        ]
        if kinds[0] != kinds[1]:
            raise InvalidValueError(
                f"the deployment has {kinds[1]} along {theirs.name!r}, but the cube has "
                f"{kinds[0]} along {ours.name!r}; decode the times of both (xarray.decode_cf)"
            )
        if not is_time(ours):
            return theirs.values
        # Nanoseconds overflow after 292 years, and become integers as objects.
        dates = [
            values.astype("M8[us]") if values.dtype.kind == "M" else values
            for values in (ours.values[:1], theirs.values)
        ]
        try:
            joined = xr.DataArray(np.concatenate(dates), dims="t", name=theirs.name)
            return microseconds(joined)[1:] / _MICROSECONDS_PER_DAY
        except TypeError as error:
            raise InvalidValueError(
                "the dates of the deployment must have the cube's calendar, got another "
                f"({' '.join(str(error).split())}); use convert_calendar"
            ) from None


def _times(view: CubeView, dim: str) -> xr.DataArray | None:
    """Return the dates along a dim, or else its numbers, if none is missing."""
    for coord in (dates_along(view.ds.coords.values(), dim), view.dim_coord(dim)):
        if coord is not None and has_distances(coord) and not coord.isnull().any():
            return coord if is_time(coord) else coord.astype("float64")
    return None


def _degrees(view: CubeView, time_dim: str | None) -> list[xr.DataArray] | None:
    """Return latitude and longitude: of a grid, stations, a curvilinear grid, or one point."""
    degrees = []
    for role in ("latitude", "longitude"):
        axis = view.axis_of(role)
        if axis is None:
            coords = [
                coord
                for coord in view.ds.coords.values()
                if role_of(coord) == role
                and coord.ndim != 1
                and set(coord.dims) <= set(view.dims) - {time_dim}  # not the vertices of cells
            ]
            if not coords:
                return None
            coord = max(coords, key=lambda coord: (coord.ndim, str(coord.name)))
            values = in_degrees(coord.values, coord.attrs.get("units"))
            axis = xr.DataArray(values, dims=coord.dims, name=coord.name)
        degrees.append(axis)
    if all(axis.ndim == 1 for axis in degrees):  # curvilinear grids may have unknown locations
        check_degrees("leakage_report", *degrees)
    return degrees


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
    # Label of the cube; cells without a value are excluded.
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
        time = None if axes.times is None else axes.times.name
        if time in given.coords and not given[time].ndim:
            given = given.expand_dims(time)  # The deployment is one step of a cube.
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
        valid = has_value(variables, any_of_them=True)
        if valid is None:
            valid = xr.ones_like(variables[0], dtype=bool)
        label = xr.full_like(valid, EXCLUDED, dtype=np.uint8).where(~valid, np.uint8(TRAIN))
        own_axes = Axes.of(view)
        layout = Layout.of(label, tuple(own_axes.sizes))
        if not layout.counts[TRAIN]:
            raise InvalidValueError("deployment must have cells with a value, got none")
        return cls(own_axes, layout, TRAIN)

    def steps(self) -> Ints:
        """Return the positions along time that hold some of the cells."""
        time_dim = str(self.axes.time_dim)
        if time_dim not in self.layout.label.dims:
            return np.arange(self.axes.steps)
        return np.flatnonzero(self.layout.profiles[self.code, time_dim])

    def locations(self, step: int | None = None) -> Ints:
        """Return the known locations that hold some of the cells: at one step, or at any time."""
        sizes, points = self.axes.sizes, self.axes.points
        assert points is not None
        if step is None:
            has_cells = self.layout.maps[self.code]
        else:
            label = self.layout.label.isel({self.axes.time_dim: step}, missing_dims="ignore")
            has_cells = (label == self.code).any([dim for dim in label.dims if dim not in sizes])
        missing = {dim: n for dim, n in sizes.items() if dim not in has_cells.dims}
        on_map = np.asarray(has_cells.expand_dims(missing).transpose(*sizes).values).ravel()
        return np.flatnonzero(on_map & np.isfinite(points).all(axis=-1))


def compare_axes(axes: Axes, other: Axes | None) -> tuple[set[str], dict[str, str]]:
    """Return which of "space" and "time" can be measured between two cubes, and why not others."""
    cubes = {"the cube": axes} | ({} if other is None else {"the deployment": other})
    needs_space = axes.sizes or any(cube.points is not None for cube in cubes.values())
    needs_time = other is not None and any(cube.steps for cube in cubes.values())
    unknown: dict[str, str] = {}
    for name, cube in cubes.items():
        if needs_space and cube.points is None:
            unknown.setdefault("space", f"{name} has no latitude and longitude")
        if needs_time and cube.times is None:
            unknown.setdefault("time", f"{name} has no times")
    known = {"space": axes.points is not None, "time": axes.steps > 0}
    return {domain for domain in known if known[domain] and domain not in unknown}, unknown


def distances(cells: Cells, train: Cells, measured: set[str]) -> dict[str, Floats]:
    """Return the distances of sampled cells to the nearest train cells, in space and in time."""
    # The distance in time is to the nearest time with any train cell, and that in space to the
    # nearest location that is train then (at any time, if times are not measured).
    rng = np.random.default_rng(0)
    found: dict[str, list[Floats]] = {"space": [], "time": []}
    axes, train_axes = cells.axes, train.axes
    # Along a track, each time has one location.
    on_track = {train_axes.time_dim, axes.time_dim} & {*train_axes.sizes, *axes.sizes}
    space_by_step = "space" in measured and not on_track
    # A step, the nearest one with train cells, and their distance in time; None is all steps.
    pairs: list[tuple[int | None, int | None, float]] = [(None, None, math.nan)]
    if "time" in measured:
        train_steps = train.steps()
        steps = _sample(cells.steps(), _STEPS if space_by_step else SAMPLE, rng)
        train_times = train_axes.time_numbers(train_axes)[train_steps]
        times = train_axes.time_numbers(axes)[steps]
        nearest = nearest_on_axis(times, train_times)
        time_distances = np.abs(times - train_times[nearest])
        if space_by_step:
            pairs = list(zip(steps, train_steps[nearest], time_distances, strict=True))
        else:
            found["time"].append(time_distances)
    for step, train_step, time_distance in pairs if "space" in measured else ():
        locations = _sample(cells.locations(step), math.ceil(SAMPLE / len(pairs)), rng)
        train_locations = train.locations(train_step)
        if locations.size and train_locations.size:
            km, _ = train_axes.nearest(train_locations, axes, locations)
            found["space"].append(km.ravel())
            if step is not None:
                found["time"].append(np.full(locations.size, time_distance))
    return {domain: np.concatenate(parts) for domain, parts in found.items() if parts}


def _sample(indices: Ints, most: int, rng: np.random.Generator) -> Ints:
    """Draw at most `most` indices, in order."""
    if indices.size <= most:
        return indices
    return np.sort(rng.choice(indices, most, replace=False))


def spacing(train: Cells, measured: set[str]) -> dict[str, float]:
    """Return the median distance between neighbouring train locations, and times of the cube."""
    medians = {"space": 0.0, "time": 0.0}
    if "space" in measured and (locations := train.locations()).size > 1:
        sample = _sample(locations, SAMPLE, np.random.default_rng(0))
        # The nearest location is the location itself.
        km, _ = train.axes.nearest(locations, train.axes, sample, 2)
        medians["space"] = float(np.median(km[:, 1]))
    if "time" in measured:
        steps = np.diff(np.unique(train.axes.time_numbers(train.axes)))
        medians["time"] = float(np.median(steps)) if steps.size else 0.0
    return medians


def stations_near_train(cells: Cells, train: Cells) -> float:
    """Return the fraction of stations with a train station among their nearest stations."""
    stations, train_stations = cells.locations(), train.locations()
    labelled = np.union1d(stations, train_stations)
    if stations.size == 0 or labelled.size < 2:
        return float("nan")
    sample = _sample(stations, SAMPLE, np.random.default_rng(0))
    count = min(_NEIGHBOURS + 1, labelled.size)
    _, nearest = cells.axes.nearest(labelled, cells.axes, sample, count)
    is_other_train = np.isin(nearest, train_stations) & (nearest != sample[:, None])
    return float(is_other_train.any(axis=1).mean())
