"""Coordinates along a dim: which are dates, and whether two are the same but for rounding."""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
from numpy.typing import NDArray


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
