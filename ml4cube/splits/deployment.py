"""Where a model will be used, and how far that is from its train cells, in space and in time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cftime
import numpy as np
import xarray as xr
from dask.array.core import slices_from_chunks
from numpy.typing import NDArray

from ml4cube.core.angles import MOST_LAT, in_degrees
from ml4cube.core.axes import is_time, same_coordinate
from ml4cube.core.buffer import EARTH_RADIUS_KM
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.separation import kilometres, nearest_on_axis, unit_vectors
from ml4cube.cube.coordinates import dates_along, find_time_dim
from ml4cube.splits.cube import CubeView, check_places, in_chunks, is_kind, microseconds
from ml4cube.splits.layout import SAMPLE, Layout
from ml4cube.splits.validity import check_numpy_mask, on_cube

Floats = NDArray[np.float64]
_DAY = 86_400_000_000.0


@dataclass(frozen=True, eq=False)
class Places:
    """Where something lies: places of the map and positions in time, each on its own.

    Parameters
    ----------
    space : ndarray of float, shape (places, 1 to 3), optional
        Unit vectors on the sphere, or positions in cells.
    time : ndarray of float, optional
        Days since the cube's first date, or steps.
    """

    space: Floats | None = None
    time: Floats | None = None


@dataclass(frozen=True, eq=False)
class Ground:
    """How distances are measured on a cube.

    Parameters
    ----------
    view : CubeView
        The cube.
    map_dims : tuple of str
        Dims of a map, sorted.
    time_dim : str or None
        The time dim.
    dates : DataArray, optional
        Dates of its steps; None where they are numbered.
    units : dict of str to str
        Unit of "space" and of "time".
    place : tuple of str
        Coordinates that make a place: the dims of the map, or of stations, which have one dim,
        latitude and longitude.
    """

    view: CubeView
    map_dims: tuple[str, ...]
    time_dim: str | None
    dates: xr.DataArray | None
    units: dict[str, str] = field(default_factory=dict)
    place: tuple[str, ...] = ()

    @classmethod
    def of(cls, view: CubeView, map_dims: tuple[str, ...]) -> Ground:
        """Find out what a cube's axes are.

        Parameters
        ----------
        view : CubeView
            The cube.
        map_dims : tuple of str
            Dims of a map.

        Returns
        -------
        Ground
            Kilometres where latitude and longitude are known, days where dates are; else cells.

        Raises
        ------
        InvalidValueError
            If latitude or longitude are missing at some cells, or are no degrees.
        """
        time_dim = find_time_dim(view.ds.coords.values(), view.dims)
        space = tuple(sorted(dim for dim in map_dims if dim != time_dim))
        lat, lon = view.axis_of("lat"), view.axis_of("lon")
        dates = None if time_dim is None else dates_along(view.ds.coords.values(), time_dim)
        if dates is not None and dates.isnull().any() and view.own(str(time_dim)) is not None:
            dates = None  # the split went by the dim's own coordinate, too
        units = {"space": "cells", "time": "steps" if dates is None else "days"}
        place = space
        if lat is not None and lon is not None and {*lat.dims, *lon.dims} == set(space):
            check_places("leakage_report", lat, lon)
            units["space"] = "km"
            if lat.dims == lon.dims:
                place = (str(lat.name), str(lon.name))
        return cls(view, space, time_dim, dates, units, place)

    def of_part(self, layout: Layout, codes: tuple[int, ...]) -> Places:
        """Where parts of the label lie.

        Parameters
        ----------
        layout : Layout
            The label.
        codes : tuple of int
            Codes of the parts.

        Returns
        -------
        Places
            Their places and times, each once.
        """
        space = None
        if self.map_dims and layout.map_dims:
            here = np.any([layout.maps[code] for code in codes], axis=0)
            # a stacked dim may be that of time and one of the map
            here = here.any(tuple(i for i, d in enumerate(layout.map_dims) if d == self.time_dim))
            for axis, dim in enumerate(self.map_dims):
                if dim not in layout.map_dims:
                    here = np.repeat(np.expand_dims(here, axis), self.view.sizes[dim], axis=axis)
            space = self._points(here)
        time = None
        if self.time_dim in layout.starts:
            steps = np.any([layout.profiles[code, self.time_dim] for code in codes], axis=0)
            time = self._times()[steps]
        return Places(space, time)

    def of_user(self, deployment: Any) -> Places:
        """Where the user says that the model will be used.

        Parameters
        ----------
        deployment : Dataset, DataArray or mapping
            As for `leakage_report`.

        Returns
        -------
        Places
            Its places and times.

        Raises
        ------
        InvalidTypeError
            If it is none of these.
        InvalidValueError
            If it lies on no axis of the cube, or a mask does not fit, is empty or of numbers.
        """
        if isinstance(deployment, xr.DataArray) and deployment.dtype.kind == "b":
            return self._of_mask(deployment)
        if isinstance(deployment, xr.Dataset | xr.DataArray):
            if isinstance(deployment, xr.DataArray) and self._is_mask_of_numbers(deployment):
                raise InvalidValueError(
                    "deployment lies on the cube's cells and holds nothing but 0 and 1; if it is a "
                    "mask, compare it (== 1); if it is a cube, give it as a Dataset"
                )
            coords = {str(name): c for name, c in deployment.coords.items() if c.ndim <= 1}
            return self._of_coords(coords, grid=True)
        if isinstance(deployment, Mapping) or hasattr(deployment, "columns"):
            return self._of_coords(_by_name(deployment), grid=False)
        named = ", ".join(f"{dim!r}: [...]" for dim in self._axes())
        raise InvalidTypeError(
            f"deployment is a {type(deployment).__name__}; say where the model will be used by a "
            f"cube with the coordinates {self._axes()}, a DataArray of bools on the cells of this "
            f"cube, or the coordinates of points by name, as in {{{named}}}"
        )

    def _axes(self) -> list[str]:
        """Coordinates that a deployment may have."""
        return [*self.place, *([self._time_name()] if self.time_dim else [])]

    def _time_name(self) -> str:
        """Coordinate that says when, or the time dim that has none."""
        return str(self.time_dim if self.dates is None else self.dates.name)

    def _is_mask_of_numbers(self, array: xr.DataArray) -> bool:
        """Whether an array has the cube's cells, and says yes or no by numbers."""
        if array.dtype.kind not in "iuf" or not array.sizes.items() <= self.view.sizes.items():
            return False
        if not isinstance(array.dtype, np.dtype):  # one of pandas
            array = array.astype("float64")
        array = in_chunks(array).chunk()
        marked = False
        # one block after the other: the first of nearly every cube tells
        for box in slices_from_chunks(array.chunks or ()):  # type: ignore[no-untyped-call]
            values = array[box].values
            if not (np.isnan(values) | (values == 0) | (values == 1)).all():
                return False
            marked = marked or bool((values == 1).any())
        # without a 1 it is no mask, but maybe an array that is yet to be filled
        return marked

    def _of_mask(self, mask: xr.DataArray) -> Places:
        check_numpy_mask(mask, "deployment")
        mask = on_cube(mask, self.view, "deployment")
        if not bool(mask.any()):
            raise InvalidValueError("the deployment mask is false everywhere; mark some cells")
        space = time = None
        if present := [dim for dim in self.map_dims if dim in mask.dims]:
            here = mask.any([dim for dim in mask.dims if dim not in present]).transpose(*present)
            full = np.asarray(here.values)
            for axis, dim in enumerate(self.map_dims):
                if dim not in present:
                    full = np.repeat(np.expand_dims(full, axis), self.view.sizes[dim], axis=axis)
            space = self._points(full)
        if self.time_dim in mask.dims:
            steps = mask.any([dim for dim in mask.dims if dim != self.time_dim]).values
            time = self._times()[np.asarray(steps)]
        return Places(space, time)

    def _of_coords(self, coords: dict[str, xr.DataArray], grid: bool) -> Places:
        rng = np.random.default_rng(0)
        axes = {name: self._match_place(name, coords) for name in self.place}
        found = {dim: _at_least_1d(values) for dim, values in axes.items() if values is not None}
        space = None
        if found and len(found) == len(axes):
            places = [self._numbers(dim, values) for dim, values in found.items()]
            if grid and len({values.dims for values in found.values()}) == len(found):
                places = [rng.choice(values, 4 * SAMPLE) for values in places]
            space = self._vectors(places)
        when = self._match_time(coords)
        time = None if when is None else self._days(_at_least_1d(when))
        if space is None and time is None:
            place = " and ".join(map(repr, self.place))
            time_name = repr(self._time_name()) if self.time_dim else ""
            enough = [words for words in (place, time_name) if words]
            raise InvalidValueError(
                f"deployment has the coordinates {sorted(coords)}; to be found on this cube it "
                f"needs {', or '.join(enough)}; name them alike"
            )
        return Places(space, time)

    def _numbers(self, dim: str, values: xr.DataArray) -> Floats:
        """Coordinates of places, in degrees on the sphere, checked to be some."""
        if values.dtype.kind not in "fiu":
            raise InvalidValueError(
                f"deployment has {values.dtype} along {dim!r}, the cube has numbers; give numbers"
            )
        numbers = np.asarray(values.values, dtype=float)
        lat, lon = self.view.axis_of("lat"), self.view.axis_of("lon")
        on_lat = False
        if self.units["space"] == "km" and lat is not None and lon is not None:
            on_lat = dim in (lat.name, lat.dims[0])
            own = self.view.ds[(lat if on_lat else lon).name]
            numbers = in_degrees(numbers, values.attrs.get("units", own.attrs.get("units")))
        most = MOST_LAT if on_lat else np.inf
        if not numbers.size or not (np.isfinite(numbers) & (np.abs(numbers) <= most)).all():
            raise InvalidValueError(
                f"deployment has no places along {dim!r}, or some that are NaN or infinite"
                + (", or beyond the poles" if on_lat else "")
                + "; leave such points out"
            )
        return numbers

    def _match_time(self, coords: dict[str, xr.DataArray]) -> xr.DataArray | None:
        """The coordinate that says when, as the cube's times do."""
        called = [
            coords[name] for name in (self._time_name(), str(self.time_dim)) if name in coords
        ]
        if axes := [coord for coord in called if coord.ndim]:
            return axes[0]
        # a forecast's one start is a scalar beside the times that it is for
        others = [coord for coord in coords.values() if coord.ndim and is_time(coord)]
        if self.dates is None or not others:
            return next((coord for coord in called if self._is_when(coord)), None)
        coord = others[0]
        own = self.view.ds.coords.get(coord.name)
        beside = own is not None and own.dims == self.dates.dims
        if len(others) > 1 or (
            beside and own is not None and not same_coordinate(own.values, self.dates.values)
        ):
            raise InvalidValueError(
                f"deployment has dates as {[coord.name for coord in others]}, the cube's steps are "
                f"measured by {self._time_name()!r}; rename those that say when to that"
            )
        return coord

    def _is_when(self, scalar: xr.DataArray) -> bool:
        """Whether a scalar may say when; that of a map without time may be any."""
        if self.dates is None:
            return scalar.dtype.kind in "fiu" and bool(scalar.notnull())
        return scalar.dtype.kind in "UT" or (is_time(scalar) and bool(scalar.notnull()))

    def _match_place(self, dim: str, coords: dict[str, xr.DataArray]) -> xr.DataArray | None:
        """The coordinate that says where along a dim, as one of the cube does."""
        if dim in coords:
            return coords[dim]
        for kind in ("lat", "lon"):
            own = self.view.axis_of(kind)
            if own is None or dim not in (own.name, own.dims[0]):
                continue
            if own.name in coords:
                return coords[str(own.name)]
            axes = (coord for coord in coords.values() if coord.ndim)
            return next((coord for coord in axes if is_kind(coord, kind)), None)
        return None

    def _points(self, here: NDArray[np.bool_]) -> Floats:
        """Places of the cells of a map where `here` is true."""
        cells = np.nonzero(here)
        if self.units["space"] != "km":
            return np.stack([c.astype(float) for c in cells], axis=-1)
        by_dim = dict(zip(self.map_dims, cells, strict=True))
        lat, lon = (
            axis.values[by_dim[str(axis.dims[0])]]
            for kind in ("lat", "lon")
            if (axis := self.view.axis_of(kind)) is not None
        )
        return unit_vectors(lat, lon)

    def _vectors(self, places: list[Floats]) -> Floats:
        """Values along the map's dims -> points in which straight distances can be taken."""
        if self.units["space"] == "km":
            lat = self.view.axis_of("lat")
            first = lat is not None and self.place[0] in (lat.name, lat.dims[0])
            lats, lons = places if first else places[::-1]
            return unit_vectors(lats, lons)
        cells = []
        for dim, values in zip(self.map_dims, places, strict=True):
            coord = self.view.ds.coords.get(dim)
            if coord is not None and coord.size > 1 and coord.dtype.kind in "fiu":
                own = coord.values.astype(float)
                step = float(np.median(np.diff(own))) or 1.0
                values = (values - own[0]) / step
            cells.append(values)
        return np.stack(cells, axis=-1)

    def _times(self) -> Floats:
        """Time of every step of the cube."""
        if self.dates is not None:
            return microseconds(self.dates) / _DAY
        own = self._numbered()
        return np.arange(float(self.view.sizes[str(self.time_dim)])) if own is None else own

    def _numbered(self, values: NDArray[Any] | None = None) -> Floats | None:
        """Numbers along time, those of the cube if not given, in its steps from its first."""
        own = self.view.own(str(self.time_dim))
        if own is None or own.dtype.kind not in "fiu":
            return None
        known = own.astype("float64").values
        if not np.isfinite(known).all():
            return None
        different = np.unique(known)
        step = float(np.median(np.diff(different))) if different.size > 1 else 1.0
        numbers = known if values is None else np.asarray(values, dtype=float)
        return np.asarray((numbers - known[0]) / step)

    def _positions(self, coord: xr.DataArray) -> Floats:
        """Numbers of a deployment, as `_times` measures a cube that has no dates."""
        own = self.view.own(str(self.time_dim))
        if own is not None and self._numbered() is None:
            raise InvalidValueError(
                f"the cube has {own.dtype} along {own.name!r}, or some are missing, by which no "
                "deployment is found in time; give it numbers or dates (ds.assign_coords)"
            )
        if coord.dtype.kind not in "fiu":
            raise InvalidValueError(
                f"deployment has {coord.dtype} along {coord.name!r}, where the cube has no dates, "
                "or not in order; give numbers as the cube has"
            )
        if own is not None and not _same_units(coord, own):
            raise InvalidValueError(
                f"deployment has {coord.attrs['units']!r} along {coord.name!r}, the cube has "
                f"{own.attrs['units']!r}; decode the times of both (xarray.decode_cf), or give "
                "both in one unit"
            )
        numbers = np.asarray(coord.values, dtype=float)
        if not np.isfinite(numbers).all():
            raise InvalidValueError(
                f"deployment has times along {coord.name!r} that are NaN or infinite; leave such "
                "points out"
            )
        steps = self._numbered(numbers)
        return numbers if steps is None else steps

    def _days(self, coord: xr.DataArray) -> Floats:
        own = self.dates
        if not coord.size:
            raise InvalidValueError(
                f"deployment has no times along {coord.name!r}; give some, or leave it out"
            )
        if own is None:
            return self._positions(coord)
        if set(map(type, coord.values.tolist())) == {str}:
            coord = _dates(coord, own)
        if not is_time(coord):
            raise InvalidValueError(
                f"deployment has {coord.dtype} along {coord.name!r}, the cube has dates; decode "
                "the times, or give dates as of pandas.to_datetime"
            )
        # nanoseconds span 584 years, and as objects they are integers
        both = np.concatenate(
            [
                dates.astype("datetime64[us]") if dates.dtype.kind == "M" else dates
                for dates in (own.values[:1], coord.values.ravel())
            ]
        )
        try:
            joined = xr.DataArray(both, dims="time", name="time")
            return microseconds(joined)[1:] / _DAY
        except TypeError as error:
            raise InvalidValueError(
                "the dates of deployment are of another calendar than the cube's "
                f"({' '.join(str(error).split())}); "
                "convert them with convert_calendar"
            ) from None


def _same_units(first: xr.DataArray, second: xr.DataArray) -> bool:
    """Whether undecoded times count the same, if both say what they count."""
    units = [coord.attrs.get("units") for coord in (first, second)]
    if None in units or units[0] == units[1]:
        return True
    try:
        days = [
            cftime.num2date([0, 1], unit, coord.attrs.get("calendar", "standard"))
            for unit, coord in zip(units, (first, second), strict=True)
        ]
        return bool((days[0] == days[1]).all())
    except (AttributeError, TypeError, ValueError):  # no units of times, or other calendars
        return False


def _at_least_1d(coord: xr.DataArray) -> xr.DataArray:
    """One point, if it is a scalar."""
    return coord if coord.ndim else coord.expand_dims(str(coord.name))


def _by_name(deployment: Any) -> dict[str, xr.DataArray]:
    """Coordinates of points: columns and named index levels of a table, or entries of a mapping."""
    if hasattr(deployment, "columns"):
        levels = [name for name in deployment.index.names if name is not None]
        deployment = deployment.reset_index([n for n in levels if n not in deployment.columns])
    found = {}
    for name in deployment:
        values = np.atleast_1d(np.asarray(deployment[name]))
        if isinstance(deployment[name], slice):
            raise InvalidValueError(
                f"deployment gives {name!r} as {deployment[name]}; list the values, one for each "
                "point (numpy.arange, xarray.date_range)"
            )
        if values.ndim != 1:
            raise InvalidValueError(
                f"deployment gives {name!r} as {type(deployment[name]).__name__} of shape "
                f"{values.shape}; give one number for each point"
            )
        found[str(name)] = xr.DataArray(values, dims="points", name=name)
    sizes = {name: values.size for name, values in found.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidValueError(
            f"deployment has {sizes} coordinates by name; give one of each for every point"
        )
    return found


def _dates(texts: xr.DataArray, own: xr.DataArray) -> xr.DataArray:
    """Texts as dates of the cube's calendar."""
    dates: Any
    try:
        if own.dtype.kind == "M":
            dates = texts.values.astype("datetime64[us]")
        else:
            fields = [[int(n) for n in re.split("[-T: ]", text)] for text in texts.values]
            calendar = own.dt.calendar
            dates = [cftime.datetime(*f, *[1, 1][len(f) - 1 :], calendar=calendar) for f in fields]
    except (ValueError, TypeError) as error:
        raise InvalidValueError(
            f"deployment has texts along {texts.name!r} that are no dates of the cube's calendar "
            f"({error}); write them as '2030-01-31', or give dates as of xarray.date_range"
        ) from None
    return xr.DataArray(np.asarray(dates), dims="points", name=texts.name)


def distances(ground: Ground, places: Places, train: Places) -> dict[str, Floats]:
    """How far places are from train places, and times from train times.

    Parameters
    ----------
    ground : Ground
        How to measure.
    places : Places
        Of test cells, or of the deployment.
    train : Places
        Of train cells.

    Returns
    -------
    dict of str to ndarray of float
        "space" and "time", where both are known; up to `SAMPLE` distances each.
    """
    found = {}
    rng = np.random.default_rng(0)
    if places.space is not None and train.space is not None and len(train.space):
        points = _some(places.space, rng)
        from sklearn.neighbors import KDTree

        near = KDTree(train.space).query(points, return_distance=True)[0][:, 0]
        on_sphere = ground.units["space"] == "km"
        found["space"] = kilometres(near, EARTH_RADIUS_KM) if on_sphere else np.asarray(near)
        # the roundings of a unit vector are a tenth of a millimetre
        found["space"] = np.where(found["space"] < 1e-6, 0.0, found["space"])
    if places.time is not None and train.time is not None and train.time.size:
        found["time"] = nearest_on_axis(_some(places.time, rng), train.time)
    return found


def _some(values: Floats, rng: np.random.Generator) -> Floats:
    if len(values) <= SAMPLE:
        return values
    return values[np.sort(rng.choice(len(values), SAMPLE, replace=False))]
