"""Roles of coordinates: time, latitude, longitude or vertical; which dims list categories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any

from numpy.typing import NDArray

from ml4cube.core.axes import is_time

#: Names of time dims, in lower case.
TIME_NAMES = ("time", "t", "date")
#: Dims of a forecast, in place of the time dim: the last input step, and the time since then.
INIT, LEAD = "init_time", "lead_time"

# Names of coordinates without attributes, in lower case.
_NAMES = {
    "latitude": ("lat", "latitude", "nav_lat"),
    "longitude": ("lon", "long", "longitude", "nav_lon"),
}
_ROTATED = {"latitude": "rlat", "longitude": "rlon"}
# Names of dims along which neighbours are no nearer than other indices, in lower case.
_CATEGORIES = {
    "scenario", "member", "ensemble", "realization", "model", "experiment", "run", "source",
    "variable", "band", "channel",
}  # fmt: skip

# Kilometres of the units that x and y of a projection have, and their names.
_KM_PER_UNIT = {
    **dict.fromkeys(("m", "metre", "metres", "meter", "meters"), 1e-3),
    **dict.fromkeys(("km", "kilometre", "kilometres", "kilometer", "kilometers"), 1.0),
}
_PROJECTED_NAMES = {"x": ("x", "easting", "xc"), "y": ("y", "northing", "yc")}


def role_of(coord: Any) -> str | None:
    """Return the role of a coordinate, or None."""
    if is_time(coord):
        return "time"
    if coord.dtype.kind not in "fiu":
        return None
    if is_latitude(coord.name, coord.attrs):
        return "latitude"
    if is_longitude(coord.name, coord.attrs):
        return "longitude"
    # cf_xarray lists the criteria of vertical coordinates under two names
    if any(_by_cf(kind, coord.attrs) for kind in ("vertical", "Z")):
        return "vertical"
    return None


def is_category(dim: str, coord: Any) -> bool:
    """Return True if a dim lists scenarios, bands or the like, by its name or its texts."""
    if dim.lower() in _CATEGORIES:
        return True
    if coord is None or not coord.size or dim.lower() in TIME_NAMES:
        return False
    if coord.dtype.kind not in "OUST":
        return False
    return not hasattr(coord.values.flat[0], "year")  # dates of cftime and periods are objects too


def is_latitude(name: object, attrs: Mapping[Any, Any], *, rotated: bool = False) -> bool:
    """Return True if a coordinate is a latitude; if `rotated`, also of a rotated grid."""
    return _is_angle("latitude", name, attrs, rotated)


def is_longitude(name: object, attrs: Mapping[Any, Any], *, rotated: bool = False) -> bool:
    """Return True if a coordinate is a longitude; if `rotated`, also of a rotated grid."""
    return _is_angle("longitude", name, attrs, rotated)


def _is_angle(kind: str, name: object, attrs: Mapping[Any, Any], rotated: bool) -> bool:
    lower_name, standard_name = str(name).lower(), _text(attrs, "standard_name")
    if standard_name == f"grid_{kind}" or (lower_name == _ROTATED[kind] and standard_name != kind):
        # many files give these units="degrees_north", by which cf_xarray takes them for latitudes
        return rotated
    return lower_name in _NAMES[kind] or _by_cf(kind, attrs)


def _by_cf(kind: str, attrs: Mapping[Any, Any]) -> bool:
    """Return True if CF attributes give a coordinate this role, by the criteria of cf_xarray."""
    return any(_text(attrs, key) in words for key, words in _criteria(kind).items())


def _text(attrs: Mapping[Any, Any], key: str) -> str:
    return str(attrs.get(key, "")).strip().lower()


@cache
def _criteria(kind: str) -> dict[str, frozenset[str]]:
    """Return the values of each attribute in lower case: cf_xarray misses ``Degrees_North``."""
    from cf_xarray.criteria import coordinate_criteria  # imports all of xarray

    criteria = coordinate_criteria[kind].items()
    return {attribute: frozenset(map(str.lower, values)) for attribute, values in criteria}


def find_time_dim(coords: Collection[Any], dims: Iterable[Any]) -> str | None:
    """Return the time dim, or None unless there is exactly one."""
    candidates = time_dims(coords, dims)
    if len(candidates) == 1:
        return candidates[0]
    return None


def time_dims(coords: Collection[Any], dims: Iterable[Any]) -> list[str]:
    """Return the dims that may be time, by the first rule that finds any."""
    on_dim = {dim: [c for c in coords if c.dims == (dim,)] for dim in dims}
    index = {dim: next((c for c in on_dim[dim] if c.name == dim), None) for dim in on_dim}
    rules: tuple[Callable[[Any], bool], ...] = (
        lambda dim: index[dim] is not None and is_time(index[dim]),
        lambda dim: any(is_time(c) and _is_named_time(c) for c in on_dim[dim]),
        lambda dim: _is_time_without_dates(dim, index[dim]),
    )
    for rule in rules:
        if matching := [str(dim) for dim in on_dim if rule(dim)]:
            if "time" in matching:
                return ["time"]
            return matching
    return []


def _is_named_time(dates: Any) -> bool:
    """Return True if dates are the time by their name or CF attributes."""
    name = str(dates.name).lower()
    # sample stores may name the origins of windows "time_origin"
    return name in ("time", "time_origin") or _by_cf("time", dates.attrs)


def _is_time_without_dates(dim: Any, index: Any) -> bool:
    """Return True if a dim is named like a time, or has numbers with CF attributes of time."""
    if str(dim).lower() in TIME_NAMES:
        return True
    return index is not None and index.dtype.kind in "fiu" and _by_cf("time", index.attrs)


def map_dims(coords: Collection[Any], dims: Iterable[Any]) -> tuple[str, ...]:
    """Return the dims of a map: of latitude and longitude, else the last two of places."""
    dims = [str(dim) for dim in dims]
    time_dim = find_time_dim(coords, dims)
    if places := latitude_and_longitude(coords, time_dim):
        return tuple(dim for dim in dims if any(dim in coord.dims for coord in places))
    index = {coord.name: coord for coord in coords if coord.dims == (coord.name,)}
    return tuple(
        dim
        for dim in dims
        if dim != time_dim
        and not is_category(dim, index.get(dim))
        and (dim not in index or role_of(index[dim]) != "vertical")
    )[-2:]


def km_per_unit(coord: Any, axis: str) -> float:
    """Return the kilometres of one unit of x or y of a projection; 0 for other coordinates."""
    if coord.dtype.kind not in "fiu" or coord.ndim > 2:
        return 0.0
    standard_name = str(coord.attrs.get("standard_name", "")).strip().lower()
    is_projected = standard_name == f"projection_{axis}_coordinate"
    if not is_projected and str(coord.name).lower() not in _PROJECTED_NAMES[axis]:
        return 0.0
    unit: Any = coord.attrs.get("units")
    if unit is None:
        # metres are the unit of the standard name
        if is_projected:
            return 1e-3
        return 0.0
    return _KM_PER_UNIT.get(str(unit).strip().lower(), 0.0)


def latitude_and_longitude(coords: Iterable[Any], time_dim: str | None) -> tuple[Any, Any] | None:
    """Return latitude and longitude of places, or None."""
    candidates = [c for c in coords if c.ndim and time_dim not in c.dims]
    by_role = {role_of(c): c for c in sorted(candidates, key=lambda c: c.name in c.dims)}
    if {"latitude", "longitude"} <= by_role.keys():
        return by_role["latitude"], by_role["longitude"]
    return None


def dates_along(coords: Iterable[Any], dim: str) -> Any:
    """Return the coordinate of dates that identifies the steps along a dim, or None."""
    dated = [c for c in coords if c.dims == (dim,) and is_time(c)]
    rules: tuple[Callable[[Any], bool], ...] = (
        lambda c: bool(c.name == dim),
        _is_named_time,
        lambda c: _is_in_order(c.values),
    )
    for rule in rules:
        if matching := [c for c in dated if rule(c)]:
            if len(matching) > 1:  # ambiguous but for the name, and later rules are weaker
                matching = [c for c in matching if c.name == "time"]
            if matching:
                return matching[0]
            return None
    return None


def _is_in_order(dates: NDArray[Any]) -> bool:
    """Return True if dates are strictly increasing or decreasing."""
    try:
        return bool((dates[1:] > dates[:-1]).all() or (dates[1:] < dates[:-1]).all())
    except TypeError:  # dates of several calendars
        return False
