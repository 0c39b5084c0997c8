"""Where cells lie, on the map and in time, and how far those of one kind are from train cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import is_time
from ml4cube.core.distance.buffer import EARTH_RADIUS_KM
from ml4cube.core.distance.separation import kilometres, nearest_on_axis, unit_vectors
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, TRAIN
from ml4cube.cube.coordinates import dates_along, find_time_dim
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, check_places, is_kind, microseconds
from ml4cube.splits.leakage.layout import SAMPLE, Layout
from ml4cube.splits.validity import has_value

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_DAY = 86_400_000_000.0
_KM = {"m": 1e-3, "metre": 1e-3, "metres": 1e-3, "meter": 1e-3, "meters": 1e-3, "km": 1.0}
# Steps of time at which cells are drawn: the map of train cells is read once for each.
_STEPS = 32
# A station lies beside train if one of so many nearest ones trains: a cell has four neighbours.
_NEIGHBOURS = 4


@dataclass(frozen=True, eq=False)
class Axes:
    """Where the cells of a cube lie."""

    # Dims whose indices are places, sorted: those of a map, or the one of stations.
    sizes: dict[str, int]
    # Kilometres on a plane, or unit vectors on the sphere, NaN where a place is unknown; None
    # without coordinates.
    points: Floats | None
    time_dim: str | None
    # Dates of its steps, or numbers; None where there are neither.
    times: xr.DataArray | None
    # How many steps there are.
    steps: int

    @classmethod
    def of(cls, view: CubeView, map_dims: tuple[str, ...] = (), when: str | None = None) -> Axes:
        """Find a cube's places and times."""
        coords = view.ds.coords
        time_dim = find_time_dim(coords.values(), view.dims)
        times = None
        if time_dim is not None:
            times = dates_along(coords.values(), time_dim)
            own = view.own(time_dim)
            if times is not None and own is not None and bool(times.isnull().any()):
                times = None  # the split went by the dim's own coordinate, too
            if times is None and own is not None and own.dtype.kind in "fiu":
                times = own.astype("float64") if bool(own.notnull().all()) else None
        elif when in coords and is_time(coords[when]) and not coords[when].isnull().any():
            times = None if coords[when].ndim else coords[when].expand_dims("time")
        steps = int(times is not None) if time_dim is None else view.sizes[time_dim]
        degrees, metres = _degrees(view, time_dim), _metres(view)
        places = degrees or metres
        if places is None:
            sizes = {dim: view.sizes[dim] for dim in map_dims if dim != time_dim}
            return cls(sizes, None, time_dim, times, steps)
        first, second = xr.broadcast(*places)
        sizes = {dim: view.sizes[dim] for dim in sorted(map(str, first.dims))}
        x, y = (place.transpose(*sizes).values.ravel() for place in (first, second))
        points = unit_vectors(x, y) if degrees else np.stack([x, y], axis=-1)
        return cls(sizes, points, time_dim, times, steps)

    @property
    def station_dim(self) -> str | None:
        """The dim along which places lie in no order; None on a map or along a track."""
        dim = next(iter(self.sizes), None)
        known = len(self.sizes) == 1 and self.points is not None
        return dim if known and dim != self.time_dim else None

    def km(self, places: Bools, points: Floats, count: int = 1) -> Floats:
        """Kilometres from points to the `count` nearest places, shape (points, count)."""
        from sklearn.neighbors import KDTree

        assert self.points is not None
        near = KDTree(self.points[places]).query(points, k=count)[0]
        found = near if points.shape[-1] == 2 else kilometres(near, EARTH_RADIUS_KM)
        # the roundings of a unit vector are a tenth of a millimetre
        return np.where(found < 1e-6, 0.0, found)

    def numbers(self, other: Axes) -> tuple[Floats, str]:
        """Times of a cube as this one measures them, and their unit."""
        own, theirs = self.times, other.times
        if own is None or theirs is None:
            return np.arange(float(self.steps)), "steps"
        units = [None if is_time(times) else times.attrs.get("units") for times in (own, theirs)]
        if is_time(own) != is_time(theirs) or units[0] != units[1]:
            raise InvalidValueError(
                f"the deployment has {_kind(theirs)} along {theirs.name!r}, the cube has "
                f"{_kind(own)} along {own.name!r}; decode the times of both (xarray.decode_cf)"
            )
        if not is_time(own):
            unit = str(units[0] or f"units of {own.name}")
            return theirs.values, unit.partition(" since ")[0]
        # nanoseconds span 584 years, and as objects they are integers
        both = [
            dates.astype("M8[us]") if dates.dtype.kind == "M" else dates
            for dates in (own.values[:1], theirs.values)
        ]
        try:
            joined = xr.DataArray(np.concatenate(both), dims="t", name=theirs.name)
            return microseconds(joined)[1:] / _DAY, "days"
        except TypeError as error:
            raise InvalidValueError(
                "the dates of the deployment are of another calendar than the cube's "
                f"({' '.join(str(error).split())}); convert them with convert_calendar"
            ) from None


def _kind(times: xr.DataArray) -> str:
    units = times.attrs.get("units", "without units")
    return "dates" if is_time(times) else f"numbers ({units})"


def _degrees(view: CubeView, time_dim: str | None) -> list[xr.DataArray] | None:
    """Latitude and longitude: of a grid, of stations, of a curvilinear grid, or of one place."""
    found = []
    for kind in ("lat", "lon"):
        axis = view.axis_of(kind)
        if axis is None:
            others = [
                coord
                for coord in view.ds.coords.values()
                if is_kind(coord, kind) and coord.ndim != 1 and time_dim not in coord.dims
            ]
            if not others:
                return None
            other = max(others, key=lambda coord: (coord.ndim, str(coord.name)))
            degrees = in_degrees(other.values, other.attrs.get("units"))
            axis = xr.DataArray(degrees, dims=other.dims, name=other.name)
        found.append(xr.DataArray(axis.variable, name=axis.name))
    if all(axis.ndim == 1 for axis in found):  # curvilinear grids have places that are unknown
        check_places("leakage_report", *found)
    return found


def _metres(view: CubeView) -> list[xr.DataArray] | None:
    """Distances along the two axes of a projection, in kilometres."""
    found = []
    for dim in sorted(view.dims):
        own = view.own(dim)
        unit = None if own is None else _KM.get(str(own.attrs.get("units")))
        if own is not None and unit and dim.lower()[0] in "xyen":  # no depths and heights
            found.append(xr.DataArray(own.variable) * unit)
    return found if len(found) == 2 else None


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one kind: those of a part, or of a deployment."""

    # Where the cells of their cube lie.
    axes: Axes
    # A label of these; cells without a value belong to no part.
    layout: Layout
    # Their code in the label.
    code: int

    @classmethod
    def of_deployment(cls, given: Any, axes: Axes) -> Cells:
        """Where the user says that the model will be used."""
        if not isinstance(given, xr.Dataset | xr.DataArray):
            raise InvalidTypeError(
                f"deployment must be a Dataset, a DataArray or a path, got {type(given).__name__}; "
                "points are a cube too: xarray.DataArray(numpy.ones(n), dims='point', "
                "coords={'lat': ('point', lats), 'lon': ('point', lons)})"
            )
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
                f"deployment must have values, got only masks: {list(view.ds.data_vars)}; give the "
                "cube where the mask holds, as cube.where(mask)"
            )
        used = has_value(variables, any_of_them=True)
        if used is None:
            used = xr.ones_like(variables[0], dtype=bool)
        when = None if axes.times is None else str(axes.times.name)
        label = xr.full_like(used, EXCLUDED, dtype=np.uint8).where(~used, np.uint8(TRAIN))
        here = Axes.of(view, (), when)
        own = cls(here, Layout.of(label, tuple(here.sizes)), TRAIN)
        if not own.layout.counts[TRAIN]:
            raise InvalidValueError("deployment has no cell with a value")
        return own

    def steps(self) -> NDArray[np.intp]:
        """Positions along time that hold some of them."""
        known = self.layout.profiles.get((self.code, str(self.axes.time_dim)))
        return np.arange(self.axes.steps) if known is None else np.flatnonzero(known)

    def places(self, step: int | None = None) -> Bools:
        """Places that hold some of them: at one step, or at any time."""
        sizes = self.axes.sizes
        if step is None or self.axes.time_dim is None:
            here = xr.DataArray(self.layout.maps[self.code], dims=self.layout.map_dims)
        else:
            label = self.layout.label
            at = {self.axes.time_dim: step} if self.axes.time_dim in label.dims else {}
            here = label.isel(at) == self.code
            here = here.any([dim for dim in here.dims if dim not in sizes])
        here = here.expand_dims({dim: n for dim, n in sizes.items() if dim not in here.dims})
        return np.asarray(here.transpose(*sizes).values).ravel()


@dataclass(frozen=True, eq=False)
class Measure:
    """What can be measured between two cubes, and why the rest cannot."""

    # Whether places, and times, of both are known.
    space: bool
    time: bool
    # Why not, by "space" and "time"; nothing where neither cube has such a dim.
    unknown: dict[str, str]

    @classmethod
    def of(cls, axes: Axes, other: Axes | None = None) -> Measure:
        """Find what cells of two cubes, or of one, have in common."""
        unknown = {}
        theirs = other or axes
        no_place = "neither latitude and longitude nor metres (x, y)"
        if axes.points is None and (axes.sizes or theirs.points is not None):
            unknown["space"] = f"the cube has {no_place}"
        elif axes.points is not None and theirs.points is None:
            unknown["space"] = f"the deployment has {no_place}"
        elif axes.points is not None and axes.points.shape[-1] != theirs.points.shape[-1]:  # type: ignore[union-attr]
            unknown["space"] = "the cube has degrees and the deployment metres, or the reverse"
        if other is not None and (axes.steps or other.steps):
            for name, one in (("the cube", axes), ("the deployment", other)):
                if one.times is None:
                    unknown.setdefault("time", f"{name} has no times")
        space = axes.points is not None and "space" not in unknown
        return cls(space, axes.steps > 0 and "time" not in unknown, unknown)


def distances(cells: Cells, train: Cells, measure: Measure) -> dict[str, Floats]:
    """How far cells are from train cells."""
    # Times are told apart from places: a cell is so far in time from the nearest time that trains
    # somewhere, and so far in space from the nearest place that trains then (at any time, if times
    # are not measured).
    rng = np.random.default_rng(0)
    found: dict[str, list[Floats]] = {"space": [], "time": []}
    ours, theirs = train.axes, cells.axes
    # on a track each time has one place
    together = measure.space and not {ours.time_dim, theirs.time_dim} & {*ours.sizes, *theirs.sizes}
    pairs: list[tuple[int | None, int | None]] = [(None, None)]
    if measure.time:
        steps, trained = cells.steps(), train.steps()
        steps = _some(steps, _STEPS if together else SAMPLE, rng)
        known, when = ours.numbers(ours)[0][trained], ours.numbers(theirs)[0][steps]
        nearest = nearest_on_axis(when, known)
        apart = np.abs(when - known[nearest])
        if together:
            pairs = list(zip(steps.tolist(), trained[nearest].tolist(), strict=True))
        else:
            found["time"].append(apart)
    if not measure.space:
        return _joined(found)
    assert ours.points is not None
    assert theirs.points is not None
    here, there = (np.isfinite(points).all(axis=-1) for points in (ours.points, theirs.points))
    for i, (step, at) in enumerate(pairs):
        asked = _some(np.flatnonzero(cells.places(step) & there), -(-SAMPLE // len(pairs)), rng)
        places = train.places(at) & here
        if asked.size and places.any():
            found["space"].append(ours.km(places, theirs.points[asked])[:, 0])
            if step is not None:
                found["time"].append(np.full(asked.size, apart[i]))
    return _joined(found)


def _joined(found: dict[str, list[Floats]]) -> dict[str, Floats]:
    return {domain: np.concatenate(parts) for domain, parts in found.items() if parts}


def _some(indices: NDArray[np.intp], most: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Some of many, drawn and in order."""
    if indices.size <= most:
        return indices
    return np.sort(rng.choice(indices, most, replace=False))


def spacing(train: Cells, measure: Measure) -> dict[str, float]:
    """Median distance of a train place to the nearest other one, and of one time to the next."""
    found = {"space": 0.0, "time": 0.0}
    if measure.space and train.axes.points is not None:
        places = train.places() & np.isfinite(train.axes.points).all(axis=-1)
        asked = _some(np.flatnonzero(places), SAMPLE, np.random.default_rng(0))
        if places.sum() > 1:
            found["space"] = float(
                np.median(train.axes.km(places, train.axes.points[asked], 2)[:, 1])
            )
    if measure.time:
        steps = np.diff(np.unique(train.axes.numbers(train.axes)[0]))
        found["time"] = float(np.median(steps)) if steps.size else 0.0
    return found


def beside_stations(cells: Cells, train: Cells) -> float:
    """Share of stations that have one that trains among the nearest ones."""
    points = cells.axes.points
    assert points is not None
    known = np.isfinite(points).all(axis=-1)
    asked, trains = (np.flatnonzero(part.places() & known) for part in (cells, train))
    used = np.union1d(asked, trains)
    if asked.size == 0 or used.size < 2:
        return float("nan")
    from sklearn.neighbors import KDTree

    asked = _some(asked, SAMPLE, np.random.default_rng(0))
    count = min(_NEIGHBOURS + 1, used.size)
    near = used[KDTree(points[used]).query(points[asked], k=count)[1]]
    others = near != asked[:, None]
    return float((np.isin(near, trains) & others).any(axis=1).mean())
