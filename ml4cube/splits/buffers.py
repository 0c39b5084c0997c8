"""Buffers as users write them (cells, "30D", "150km") -> what a plan keeps -> reaches of cells."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from ml4cube.core.distance.buffer import AxisReach, Reach, SphereReach
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import SizesLike, parse_pairs
from ml4cube.cube.coordinates import dates_along
from ml4cube.splits.cube import CubeView, microseconds

BufferLike = int | str | datetime.timedelta | np.timedelta64 | SizesLike
Buffer = tuple[tuple[str, int | str], ...]

_KILOMETRES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*km\s*", re.IGNORECASE)
# pandas reads a bare number as nanoseconds, "m" as minutes, and so the "P1M" of a month
_BARE = re.compile(r"[-+\d.\s]*\d[-+\d.\s]*")
# letters that pandas takes with a warning, in the case that it asks for; ISO 8601 has its own
_ODD_CASE = re.compile(r"(?<![A-Za-z])[wdHS](?![A-Za-z])")
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d*)?)\s*([A-Za-z]+)")
_MICROSECONDS: dict[str, int | Fraction] = {
    **{"W": 604_800_000_000, "D": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000},
    **{"s": 1_000_000, "ms": 1_000, "us": 1},
    **{unit: Fraction(1, 1_000**power) for power, unit in enumerate(("ns", "ps", "fs", "as"), 1)},
}
_METRES_OR_MINUTES = re.compile(r"[-+\d.\s]+m\s*|\s*P[^T]*M\s*", re.IGNORECASE)


def parse_buffer(
    buffer: BufferLike | None,
    gap: Any,
    view: CubeView,
    cut_dims: Sequence[str],
    called: str = "buffer",
) -> Buffer:
    """Turn `buffer` and `gap` as users write them into one value by dim."""
    by_dim: dict[str, Any] = {}
    if _is_kilometres(buffer):
        by_dim[_sphere_dims(view, buffer)[0]] = buffer
    elif _is_duration(buffer):
        by_dim[view.time_dim("buffer")] = buffer
    elif _is_cells(buffer):
        by_dim.update(dict.fromkeys(cut_dims, buffer))
    elif isinstance(buffer, Iterable) and not isinstance(buffer, str):
        by_dim.update(parse_pairs("buffer", buffer, view.dims))
    elif buffer is not None:
        raise _no_buffer("buffer", buffer)
    if gap is not None:
        time = view.time_dim("gap")
        if by_dim.get(time) and not _is_cells(buffer):
            raise InvalidValueError(
                f"gap={gap!r} and buffer={by_dim[time]!r} both count along {time!r}; give one"
            )
        by_dim[time] = gap
    by_dim = _one_sphere(by_dim, view)
    of_gap = None if gap is None else view.time_dim("gap")
    kept = []
    for dim in sorted(by_dim):
        argument = "gap" if dim == of_gap else called
        if value := _check(argument, dim, by_dim[dim], view):
            _check_cut(argument, dim, value, view, cut_dims)
            kept.append((dim, value))
    return tuple(kept)


def parse_cyclic(cyclic: Any, view: CubeView, cut_dims: Sequence[str]) -> tuple[str, ...]:
    """Turn `cyclic` into dims; None finds a longitude that goes all the way round."""
    turn = view.lon_turn()
    if turn and turn[0] in cut_dims:
        _check_one_turn(*turn, view)
    if cyclic is None:
        return turn[:1] if turn else ()
    if cyclic is False:
        return ()
    if cyclic is True:
        coord = view.lon_axis()
        if coord is None:
            raise InvalidValueError(
                f"cyclic=True needs a longitude along a dim of its own, the cube has {view.dims}; "
                f"name the dim, as in cyclic={view.dims[-1]!r}"
            )
        return (str(coord.dims[0]),)
    if not isinstance(cyclic, Iterable):
        raise InvalidTypeError(
            f"cyclic={cyclic!r} is a {type(cyclic).__name__}; name dims of {view.dims}, or give "
            "True, False or None"
        )
    dims = [cyclic] if isinstance(cyclic, str) else list(cyclic)
    if unknown := [dim for dim in dims if dim not in view.dims]:
        raise InvalidValueError(f"cyclic names {unknown}, the cube has {view.dims}")
    return tuple(sorted(set(dims)))


def _check_one_turn(dim: str, columns: int, view: CubeView) -> None:
    """Refuse places that stand twice, of which one copy could train and the other test."""
    if columns < view.sizes[dim]:
        raise InvalidValueError(
            f"the columns 0 and {columns} along {dim!r} are one meridian, which could fall into "
            f"train and test; drop what stands twice: ds.isel({dim}=slice(0, {columns}))"
        )


def resolve_buffer(buffer: Buffer, cyclic: Sequence[str], view: CubeView) -> tuple[Reach, ...]:
    """Work out which cells are near to which, from the cube's coordinates."""
    by_dim = _one_sphere(dict(buffer), view)
    return tuple(_resolve(dim, value, dim in cyclic, view) for dim, value in by_dim.items())


def _one_sphere(by_dim: dict[str, Any], view: CubeView) -> dict[str, Any]:
    """Keep kilometres, one distance over latitude and longitude together, under latitude."""
    far = [value for value in by_dim.values() if _is_kilometres(value)]
    if not far:
        return by_dim
    dims = _sphere_dims(view, far[0])
    given = {dim: by_dim[dim] for dim in dims if dim in by_dim}
    distances = [value for value in given.values() if _is_kilometres(value)]
    if not distances:
        return by_dim
    if len(distances) < len(given) or len(set(map(_km, distances))) > 1:
        longest, (lat, lon) = max(distances, key=_km), dims
        raise InvalidValueError(
            f"buffer asks for {given[lat]!r} along {lat!r} and {given[lon]!r} along {lon!r}, but "
            "kilometres are one distance on the sphere over both; give that distance once, as in "
            f"{{{lat!r}: {longest!r}}}, or cells along both, as in {{{lat!r}: 2, {lon!r}: 2}}"
        )
    rest = {dim: value for dim, value in by_dim.items() if dim not in dims}
    return {**rest, dims[0]: distances[0]}


def _resolve(dim: str, value: int | str, cyclic: bool, view: CubeView) -> Reach:
    if isinstance(value, int):
        if view.has_times(dim) and not cyclic:
            # neighbours on the axis are neighbours in time, also where a time stands twice
            return AxisReach.of_distance(dim, view.moments(dim), value)
        return AxisReach.of_cells(dim, view.sizes[dim], value, cyclic)
    if _is_kilometres(value):
        lat, lon = view.sphere(value)
        return SphereReach(*_sphere_dims(view, value), lat.values, lon.values, _km(value))
    times = microseconds(_time_coord(dim, value, view))
    whole = int(times.max()) - int(times.min())
    return AxisReach.of_distance(dim, times, min(_microseconds_of(value), whole))


def _check(argument: str, dim: str, value: Any, view: CubeView) -> int | str:
    if _is_cells(value):
        if value < 0:
            raise InvalidValueError(f"{argument} of {dim!r} is {value}; give 0 or more cells")
        return int(value)
    if _is_kilometres(value):
        dims = _sphere_dims(view, value)
        if dim not in dims:
            raise InvalidValueError(
                f"{argument} of {dim!r} is {value!r}; kilometres go with one of {dims}"
            )
        return str(value).strip() if _km(value) > 0 else 0
    if _is_duration(value):
        _time_coord(dim, value, view)
        length = _microseconds_of(value)
        if length < 0:
            raise InvalidValueError(f"{argument} of {dim!r} is {value!r}; give a time of 0 or more")
        text = value if isinstance(value, str) else _said(length)
        return text.strip() if length else 0
    raise _no_buffer(f"{argument} of {dim!r}", value)


def _check_cut(
    argument: str, dim: str, value: int | str, view: CubeView, cut_dims: Sequence[str]
) -> None:
    """Refuse what cannot keep parts apart, since every part reaches all along the dim."""
    dims = _sphere_dims(view, value) if _is_kilometres(value) else (dim,)
    if any(d in cut_dims for d in dims):
        return
    along = " and ".join(map(repr, dims))
    raise InvalidValueError(
        f"{argument} asks for {value!r} along {along}, but the split is not cut there: each of "
        "its blocks or regions reaches all along, so that nothing can lie between parts. It is "
        f"cut along {list(cut_dims)}; cut it along {along} too (smaller blocks there), or leave "
        f"this {argument} out"
    )


def _no_buffer(argument: str, value: Any) -> InvalidTypeError:
    if isinstance(value, str) and _BARE.fullmatch(value):
        return InvalidTypeError(
            f"{argument} is {value!r}, a number without a unit; give cells as an integer (2), or "
            "a time ('30D', '12h') or a distance ('150km') with its unit"
        )
    if isinstance(value, str) and _METRES_OR_MINUTES.fullmatch(value):
        return InvalidTypeError(
            f"{argument} is {value!r}, where m may be metres, minutes or months; write '0.5km', "
            "'30min' or '30D'"
        )
    return InvalidTypeError(
        f"{argument} is {value!r}, neither cells (2), nor a time ('30D', '12h'), nor a distance "
        "('150km'), nor one of them by dim ({'time': '30D'}); months and years have no fixed "
        "length, give days"
    )


def _is_cells(value: Any) -> bool:
    # numpy counts a timedelta64 among its integers
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def _is_kilometres(value: Any) -> bool:
    return isinstance(value, str) and _KILOMETRES.fullmatch(value) is not None


def _km(value: str) -> float:
    return float(value.lower().replace("km", ""))


def _is_duration(value: Any) -> bool:
    if not isinstance(value, str | datetime.timedelta | np.timedelta64):
        return False
    if isinstance(value, str) and (_BARE.fullmatch(value) or _METRES_OR_MINUTES.fullmatch(value)):
        return False
    if isinstance(value, np.timedelta64) and np.datetime_data(value)[0] in ("generic", "M", "Y"):
        return False  # a number without a unit, or of no fixed length
    try:
        _microseconds_of(value)
    except ValueError:
        return False
    return True


def _microseconds_of(value: str | datetime.timedelta | np.timedelta64) -> int:
    """A length of time, rounded up: times are told apart to the microsecond."""
    if pd.isna(value):
        raise ValueError("no time at all")
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("P"):
            text = _ODD_CASE.sub(lambda unit: unit.group().swapcase(), text)
        try:
            return _microseconds_of(pd.Timedelta(text))
        except pd.errors.OutOfBoundsTimedelta:  # three centuries, in nanoseconds
            long = _NUMBER_AND_UNIT.fullmatch(text)
            if long is None:
                raise
            number, unit = long.groups()
            return math.ceil(Fraction(number) * _microseconds_of(f"1{unit}"))
    if isinstance(value, pd.Timedelta):
        value = value.to_timedelta64()
    if isinstance(value, np.timedelta64):
        unit, count = np.datetime_data(value)
        # Python's integers: numpy's would wrap around
        length = int(value.astype(np.int64)) * count * _MICROSECONDS[unit]
        return math.ceil(length) if length > 0 else math.floor(length)
    return value // datetime.timedelta(microseconds=1)


def _said(microseconds: int) -> str:
    """A length of time in the largest unit in which it is a whole number."""
    for unit, length in (("D", 86_400_000_000), ("s", 1_000_000)):
        if microseconds % length == 0:
            return f"{microseconds // length}{unit}"
    return f"{microseconds}us"


def _sphere_dims(view: CubeView, value: Any) -> tuple[str, str]:
    lat, lon = view.sphere(value)
    return str(lat.dims[0]), str(lon.dims[0])


def _time_coord(dim: str, value: Any, view: CubeView) -> Any:
    """Dates along `dim`, checked to be in order."""
    coord = dates_along(view.ds.coords.values(), dim)
    if coord is None:
        coord = view.own(dim)
        raise InvalidValueError(
            f"{value!r} along {dim!r} needs dates there, found "
            f"{'no coordinate' if coord is None else coord.dtype}; decode the times "
            "(xarray.decode_cf) or give the buffer in cells"
        )
    steps = np.diff(microseconds(coord))
    if not ((steps >= 0).all() or (steps <= 0).all()):
        raise InvalidValueError(
            f"{value!r} along {dim!r} needs times in order; sort them with "
            f"ds.sortby({coord.name!r})"
        )
    return coord
