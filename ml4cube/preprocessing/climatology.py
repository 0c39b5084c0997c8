"""Groups of a climatology: which month, season or day of the year each time step belongs to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.coordinates import is_time, time_dims

#: Labels of the groups. A day of the year counts from 1; calendars without leap days have 365,
#: or 360. The others are without cells there.
GROUPS: dict[str, NDArray[Any]] = {
    "month": np.arange(1, 13),
    "season": np.array(["DJF", "MAM", "JJA", "SON"]),
    "dayofyear": np.arange(1, 367),
}


def check_group(argument: str, by: str | None) -> None:
    """Refuse a climatology that there is not.

    Parameters
    ----------
    argument : str
        Name of the argument, for messages.
    by : str or None
        What a user gave.

    Raises
    ------
    InvalidValueError
        If it is not None, ``"month"``, ``"season"`` or ``"dayofyear"``.
    """
    check_choice(argument, by, (*GROUPS, None))


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim that is called like the one of a climatology.

    Parameters
    ----------
    by : str or None
        Kind of climatology, whose statistics have a dim of that name.
    dims : iterable of hashable
        Those of the cube.

    Raises
    ------
    InvalidValueError
        If `by` is among them.

    Examples
    --------
    >>> check_free("month", ["time", "lead_month"])
    """
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} makes a dim of that name, but the cube has one already, of "
            f"{list(dims)}; rename it, as by ds.rename({by}='lead_{by}')"
        )


def time_dim(cube: xr.Dataset) -> str:
    """Find the dim of time: the one whose coordinate holds dates.

    Parameters
    ----------
    cube : Dataset
        With numpy or cftime dates, of any calendar.

    Returns
    -------
    str
        Its name; ``"time"`` where there are several.

    Raises
    ------
    InvalidValueError
        If there is none, or several of which none is called ``"time"``.
    """
    found = time_dims(list(cube.coords.values()), cube.dims)
    dated = [dim for dim in found if dim in cube.coords and is_time(cube[dim])]
    if len(dated) == 1:
        return dated[0]
    raise InvalidValueError(
        f"a climatology needs one dim with dates for coordinates, found {dated or 'none'} among "
        f"{list(cube.dims)}; decode the times, or name the dim that counts 'time'"
    )


def group_ids(cube: xr.Dataset, by: str) -> xr.Variable:
    """Number the group of each time step.

    Parameters
    ----------
    cube : Dataset
        With a dim of time.
    by : {"month", "season", "dayofyear"}
        Kind of climatology. Seasons are those of meteorology: DJF, MAM, JJA, SON.

    Returns
    -------
    Variable of int64, (time)
        Position of the group's label in ``GROUPS[by]``.

    Raises
    ------
    InvalidValueError
        If there is no dim of time, or a date is missing.

    Examples
    --------
    >>> days = np.array(["2000-12-31", "2001-01-01", "2001-03-01"], "M8[ns]")
    >>> group_ids(xr.Dataset(coords={"time": days}), "season").values
    array([0, 0, 1])
    """
    dim = time_dim(cube)
    when = cube[dim]
    if bool(when.isnull().any()):
        raise InvalidValueError(f"{dim!r} has missing dates; leave those steps out")
    if by == "dayofyear":
        numbers = when.dt.dayofyear.values - 1
    else:
        months = when.dt.month.values
        numbers = months - 1 if by == "month" else months % 12 // 3
    return xr.Variable((dim,), np.asarray(numbers, np.int64))
