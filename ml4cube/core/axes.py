"""Coordinates along a dim: which are dates or numbers, and whether two arrays have the same."""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError

_LIKE_NUMPY = ("standard", "gregorian", "proleptic_gregorian")


def rounding_of(axis: NDArray[Any]) -> float:
    """Return the rounding error of coordinates stored in, or computed in, float32."""
    values = axis.astype(np.float64)
    finite = values[np.isfinite(values)]
    smallest_step = np.diff(np.unique(finite)).min(initial=np.inf)
    largest = np.abs(finite).max(initial=1.0)
    # Sums of steps have errors near zero too, relative to the largest value. Half a step or more
    # would match the next cell.
    of_float32 = min(largest * np.finfo(np.float32).eps / 2, 0.4 * smallest_step)
    # Users round coordinates to fewer digits, too.
    return float(min(max(0.1 * smallest_step, of_float32), largest / 1e6))


def same_coordinate(coordinate: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Return True if two coordinates along a dim are equal up to rounding, in order."""
    if coordinate.shape != wanted.shape:
        return False
    if coordinate.dtype.kind == wanted.dtype.kind == "f":
        same = np.isclose(coordinate, wanted, rtol=0.0, atol=rounding_of(wanted))
    else:
        try:
            same = coordinate == wanted
        except TypeError:  # dates of different calendars
            return False
    missing = (coordinate != coordinate) & (
        wanted != wanted
    )  # NaN and NaT, also in arrays of objects
    return bool((same | missing).all())


def check_aligned(argument: str, array: Any, cube: Any) -> None:
    """Refuse a DataArray that does not lie along dims of a Dataset, at the same coordinates."""
    for dim, n in array.sizes.items():
        if dim not in cube.sizes:
            raise InvalidValueError(
                f"{argument} has the dim {dim!r}; the cube has {[str(d) for d in cube.dims]}"
            )
        if n != cube.sizes[dim]:
            raise InvalidValueError(
                f"{argument} has {n} cells along {dim!r}, the cube {cube.sizes[dim]}; select the "
                "same cells, as with reindex_like"
            )
        if dim not in array.coords or dim not in cube.coords:
            continue
        coordinate, wanted = array.coords[dim].values, cube.coords[dim].values
        if not same_coordinate(coordinate, wanted):
            raise InvalidValueError(
                f"{argument} has other {dim!r} coordinates ({coordinate[0]} to {coordinate[-1]}) "
                f"than the cube ({wanted[0]} to {wanted[-1]}); select the same cells, as with "
                "reindex_like"
            )


def is_time(coord: Any) -> bool:
    """Return True if a coordinate holds dates (datetime64 or cftime)."""
    if coord.dtype.kind == "M":
        return True
    if coord.dtype != object or not coord.size:
        return False
    return isinstance(np.ravel(coord)[0], cftime.datetime)


def has_distances(coord: Any) -> bool:
    """Return True for dates and numbers; texts, periods and intervals have no distances."""
    return is_time(coord) or coord.dtype.kind in "fiu"


def date_keys(dates: NDArray[Any]) -> tuple[NDArray[Any], str]:
    """Return dates as numbers that are equal where the dates are, and the kind of dates."""
    if dates.dtype.kind == "M":
        return dates.astype("M8[us]").astype(np.int64), "dates of the standard calendar"
    if dates.dtype.kind in "fiu":
        return dates.astype(np.float64), "numbers"
    first = dates.flat[0] if dates.size else None
    if not isinstance(first, cftime.datetime):
        raise InvalidValueError(f"times must be dates or numbers, got dtype {dates.dtype}")
    calendar = "standard" if first.calendar in _LIKE_NUMPY else first.calendar
    ticks = cftime.date2num(dates, "microseconds since 1970-01-01", first.calendar)
    return np.asarray(ticks, np.int64), f"dates of the {calendar} calendar"
