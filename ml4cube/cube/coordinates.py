"""Coordinates along a dim: which are times, and whether two are the same but for rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cftime
import numpy as np
from numpy.typing import NDArray

#: What dims of time are called, in small letters.
TIME_NAMES = ("time", "t", "date")


def rounding_of(axis: NDArray[Any]) -> float:
    """How far off coordinates may be that stores have rounded to float32, or computed in it.

    Parameters
    ----------
    axis : ndarray
        Coordinates along a dim.

    Returns
    -------
    float
        A distance: a share of the largest value, which may err in every sum, but at most a tenth
        of a cell, or what float32 rounds off where cells are as short as that.

    Examples
    --------
    >>> rounding_of(np.array([5e6, 5e6 + 30.0])), rounding_of(np.array([10.0, 20.0]))
    (3.0, 2e-05)
    """
    values = axis.astype(np.float64)
    known = values[np.isfinite(values)]
    cell = np.diff(np.unique(known)).min(initial=np.inf)
    # steps added up in float32 err near zero, too, by a share of the largest value
    most = np.abs(known).max(initial=1.0)
    rounded_off = min(most * np.finfo(np.float32).eps / 2, 0.4 * cell)
    return float(min(most / 1e6, max(0.1 * cell, rounded_off)))


def same_coordinate(given: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Tell whether coordinates along a dim are those of a cube, in its order.

    Parameters
    ----------
    given, wanted : ndarray
        Of the array that is given, and of the cube.

    Returns
    -------
    bool
        Whether they are equal: floats to `rounding_of` the cube's, missing ones alike.

    Examples
    --------
    >>> wanted = np.array([0.1, 0.2])
    >>> same_coordinate(wanted.astype("f4"), wanted), same_coordinate(wanted[::-1], wanted)
    (True, False)
    """
    if given.shape != wanted.shape:
        return False
    if given.dtype.kind == wanted.dtype.kind == "f":
        same = np.isclose(given, wanted, rtol=0.0, atol=rounding_of(wanted))
    else:
        try:
            same = given == wanted
        except TypeError:  # dates of calendars that cannot be compared
            return False
    missing = (given != given) & (wanted != wanted)  # NaN, NaT, also among texts
    return bool((same | missing).all())


def is_time(coord: Any) -> bool:
    """Tell whether a coordinate holds dates (datetime64 or cftime).

    Parameters
    ----------
    coord : ndarray, Variable or DataArray
        A coordinate.

    Returns
    -------
    bool
        True for dates; False for undecoded numbers.

    Examples
    --------
    >>> is_time(np.array(["2000-01-01"], "datetime64[s]")), is_time(np.arange(3))
    (True, False)
    """
    if coord.dtype.kind == "M":
        return True
    if coord.dtype != object or not coord.size:
        return False
    return isinstance(np.ravel(coord)[0], cftime.datetime)


def by_rank(coords: Iterable[Any]) -> list[Any]:
    """Sort coordinates of one kind, those that a cube most likely lies on first.

    Parameters
    ----------
    coords : iterable of DataArray
        1-D, with names and attributes.

    Returns
    -------
    list of DataArray
        A dim's own coordinate first, then one called ``time``, then what CF calls so, then other
        names of times, then by name: the order in which they were given does not matter.

    Examples
    --------
    >>> import xarray as xr
    >>> ds = xr.Dataset(coords={"date": ("obs", [1]), "time": ("obs", [2]), "x": [3]})
    >>> [coord.name for coord in by_rank(ds.coords.values())]
    ['x', 'time', 'date']
    """

    def rank(coord: Any) -> tuple[bool, bool, bool, bool, str]:
        name = str(coord.name)
        small, by_cf = name.lower(), _is_cf_time(coord)
        return name != coord.dims[0], small != "time", not by_cf, small not in TIME_NAMES, name

    return sorted(coords, key=rank)


def find_time_dim(coords: Iterable[Any], dims: Iterable[Any]) -> str | None:
    """Find the dim whose steps are those of time.

    Parameters
    ----------
    coords : iterable of DataArray
        All coordinates of a cube.
    dims : iterable of str
        The cube's dims.

    Returns
    -------
    str or None
        The first dim found of these: with dates of its own; called like one of time, with dates
        beside it; with dates beside it that are called ``time``, or so by CF, or are the origins
        of a store's samples; called like one of time, with numbers; with dates called otherwise
        like times; only called like one of time; with any dates, as those on which stations began;
        called like one of time, with lead times.

    Examples
    --------
    >>> import xarray as xr
    >>> days = np.array(["2000-01-01", "2000-01-02"], "datetime64[s]")
    >>> ds = xr.Dataset(coords={"time": [0, 1], "built": ("station", days)})
    >>> find_time_dim(ds.coords.values(), ds.dims)
    'time'
    >>> find_time_dim(ds.drop_vars("time").coords.values(), ["station"])
    'station'
    """
    dims, coords = list(dims), [c for c in coords if c.ndim == 1]
    called = [dim for dim in dims if str(dim).lower() in TIME_NAMES]
    kinds = {c.name: c.dtype.kind for c in coords}

    # ranks: the smaller, the likelier
    def of_dates(dates: Any) -> int:
        name, dim = str(dates.name).lower(), dates.dims[0]
        if dates.name == dim:
            return 0
        if dim in called:
            return 1
        of_samples = name.endswith("_origin") and name.removesuffix("_origin") in TIME_NAMES
        if name == "time" or of_samples or _is_cf_time(dates):
            return 2
        return 4 if name in TIME_NAMES else 6

    def of_name(dim: Any) -> int:
        kind = kinds.get(dim, "none")
        if kind in "fiu":
            return 3
        return 7 if kind == "m" else 5  # timedelta64: lead times of starts along another dim

    dated = by_rank(c for c in coords if c.dims[0] in dims and is_time(c))
    found = [(of_dates(dates), dates.dims[0]) for dates in dated]
    found += [(of_name(dim), dim) for dim in called]
    return str(min(found, key=lambda ranked: ranked[0])[1]) if found else None


def _is_cf_time(coord: Any) -> bool:
    return bool(coord.attrs.get("standard_name") == "time" or coord.attrs.get("axis") == "T")


def steps_along(coords: Iterable[Any], dim: str) -> Any:
    """Find the coordinate that says in which order the steps along a dim come.

    Parameters
    ----------
    coords : iterable of DataArray
        All coordinates of a cube.
    dim : str
        A dim.

    Returns
    -------
    DataArray or None
        Dates along the dim, its own or of another name; else its own coordinate, if any, also
        where dates are missing. Numbers of a dim that is called like one of time are times,
        whatever dates there are.

    Examples
    --------
    >>> import xarray as xr
    >>> dates = np.array(["2000-01-02", "2000-01-01"], "datetime64[s]")
    >>> by_number = xr.Dataset(coords={"time": [0, 1], "start": ("time", dates)})
    >>> steps_along(by_number.coords.values(), "time").name
    'time'
    >>> of_stations = xr.Dataset(coords={"obs": [0, 1], "start": ("obs", dates)})
    >>> steps_along(of_stations.coords.values(), "obs").name
    'start'
    """
    coords = list(coords)
    own = next((coord for coord in coords if coord.name == dim), None)
    if own is not None and dim.lower() in TIME_NAMES and own.dtype.kind in "fiu":
        return own
    dates = dates_along(coords, dim)
    if dates is None or (own is not None and bool(dates.isnull().any())):
        return own
    return dates


def times_along(coords: Iterable[Any], dim: str) -> Any:
    """Find the dates by which the steps along a dim are measured and shown.

    Parameters
    ----------
    coords : iterable of DataArray
        All coordinates of a cube.
    dim : str
        A dim.

    Returns
    -------
    DataArray or None
        Those of `steps_along`, if they are dates; else the first others that are all there, in
        order, and not all the same; those of which each step has another before those that
        repeat.

    Examples
    --------
    >>> import xarray as xr
    >>> dates = np.array(["2000-01-02", "2000-01-01"], "datetime64[s]")
    >>> by_number = xr.Dataset(coords={"time": [0, 1], "start": ("time", dates)})
    >>> times_along(by_number.coords.values(), "time").name
    'start'
    """
    coords = list(coords)
    steps = steps_along(coords, dim)
    if steps is not None and is_time(steps):
        return steps
    beside = by_rank(c for c in coords if c.dims == (dim,) and is_time(c) and c.notnull().all())
    best = max(beside, key=lambda dates: _how_ordered(dates.values), default=None)
    return best if best is not None and _how_ordered(best.values) else None


def _how_ordered(dates: NDArray[Any]) -> int:
    """2 if each step is later than the one before, or each earlier; 1 if some repeat; else 0."""
    before, after = dates[:-1], dates[1:]
    try:
        rising, falling = (after >= before).all(), (after <= before).all()
    except TypeError:  # dates of several calendars
        return 0
    if dates.size == 1:
        return 2
    return 0 if rising == falling else 1 + int((before != after).all())


def dates_along(coords: Iterable[Any], dim: str) -> Any:
    """Find the dates that say where the steps along a dim lie.

    Parameters
    ----------
    coords : iterable of DataArray
        All coordinates of a cube.
    dim : str
        A dim.

    Returns
    -------
    DataArray or None
        The dim's own, or others of which two differ: one date for all of several steps, as of a
        forecast's start, tells none of them from the others.
    """
    found = by_rank(c for c in coords if c.dims == (dim,) and is_time(c))
    return next((c for c in found if c.name == dim or c.size == 1 or _differ(c.values)), None)


def _differ(dates: NDArray[Any]) -> bool:
    try:
        return bool((dates != dates[:1]).any())
    except TypeError:  # dates of several calendars, in no order
        return False
