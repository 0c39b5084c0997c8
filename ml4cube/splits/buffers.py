"""Parse buffers between parts, in cells, times and kilometres."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ml4cube.core.distance.buffer import AxisReach, Reach, SphereReach
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid, SizesLike, parse_pairs
from ml4cube.cube.coordinates import dates_along
from ml4cube.splits.cube import CubeView, microseconds

BufferLike = int | str | datetime.timedelta | np.timedelta64 | SizesLike
Buffer = tuple[tuple[str, int | str], ...]

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*([A-Za-z]+)\s*")
# Microseconds of numpy's units of time; months and years have no fixed length.
_MICROSECONDS: dict[str, int | Fraction] = {
    "W": 604_800_000_000,
    "D": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
    **{unit: Fraction(1, 1_000**power) for power, unit in enumerate(("ns", "ps", "fs", "as"), 1)},
}
# Units of time in strings, in lower case: "m" could be metres, minutes or months.
_UNITS = {
    **{"w": "W", "week": "W", "weeks": "W", "d": "D", "day": "D", "days": "D"},
    **{"h": "h", "hour": "h", "hours": "h", "min": "m", "minute": "m", "minutes": "m"},
    **{"s": "s", "second": "s", "seconds": "s", "ms": "ms", "us": "us"},
}


def cut_dims(grid: Grid) -> list[str]:
    """Return the dims along which a grid has more than one block."""
    return [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]


def plan_buffer(
    buffer: BufferLike | None,
    gap: Any,
    cyclic: Any,
    view: CubeView,
    cut: Sequence[str],
    time_dim: str | None = None,
) -> tuple[Buffer, tuple[str, ...], tuple[Reach, ...]]:
    """Return buffer and cyclic dims as a plan stores them, and the reach of the buffer."""
    parsed = _parse_buffer(buffer, gap, view, cut, time_dim)
    wraps = _parse_cyclic(cyclic, view, cut)
    return parsed, wraps, resolve_buffer(parsed, wraps, view)


def _parse_buffer(
    buffer: BufferLike | None,
    gap: Any,
    view: CubeView,
    cut: Sequence[str],
    time_dim: str | None,
) -> Buffer:
    by_dim: dict[str, Any] = {}
    if _is_kilometres(buffer):
        by_dim[_sphere_dims(view, buffer)[0]] = buffer
    elif _is_duration(buffer):
        by_dim[view.time_dim("buffer")] = buffer
    elif _is_cells(buffer):
        by_dim.update(dict.fromkeys(cut, buffer))
    elif isinstance(buffer, Iterable) and not isinstance(buffer, str):
        by_dim.update(parse_pairs("buffer", buffer, view.dims))
    elif buffer is not None:
        raise _not_a_buffer("buffer", buffer)
    if gap is not None:
        time_dim = time_dim or view.time_dim("gap")
        if by_dim.get(time_dim) and not _is_cells(buffer):
            raise InvalidValueError(
                f"gap={gap!r} and buffer={by_dim[time_dim]!r} are both along {time_dim!r}; pass one"
            )
        by_dim[time_dim] = gap
    parsed = []
    for dim, value in sorted(_merge_kilometres(by_dim, view).items()):
        argument = "gap" if gap is not None and dim == time_dim else "buffer"
        if checked := _check(argument, dim, value, view):
            _check_cut(argument, dim, checked, view, cut)
            parsed.append((dim, checked))
    return tuple(parsed)


def _parse_cyclic(cyclic: Any, view: CubeView, cut: Sequence[str]) -> tuple[str, ...]:
    """Return the cyclic dims; None finds a longitude that spans the globe."""
    turn = view.lon_turn()
    if turn and turn[0] in cut:
        _refuse_repeated_meridian(*turn, view)
    if cyclic is None:
        return turn[:1] if turn else ()
    if cyclic is False:
        return ()
    if cyclic is True:
        coord = view.lon_axis()
        if coord is None:
            raise InvalidValueError(
                "cyclic=True needs a longitude along a dim of its own, but the cube has dims "
                f"{view.dims}; name the dim, e.g. cyclic={view.dims[-1]!r}"
            )
        return (str(coord.dims[0]),)
    if not isinstance(cyclic, Iterable):
        raise InvalidTypeError(
            f"cyclic must be True, False, None or dims of {view.dims}, got {cyclic!r}"
        )
    dims = [cyclic] if isinstance(cyclic, str) else list(cyclic)
    if unknown := [dim for dim in dims if dim not in view.dims]:
        raise InvalidValueError(f"cyclic: unknown dims {unknown}; the cube has {view.dims}")
    return tuple(sorted(set(dims)))


def _refuse_repeated_meridian(dim: str, columns: int, view: CubeView) -> None:
    """Refuse a repeated meridian, since one copy could be train and the other test."""
    if columns < view.sizes[dim]:
        raise InvalidValueError(
            f"columns 0 and {columns} along {dim!r} are the same meridian, so one could be train "
            f"and the other test; drop the repeated columns: ds.isel({dim}=slice(0, {columns}))"
        )


def resolve_buffer(buffer: Buffer, cyclic: Sequence[str], view: CubeView) -> tuple[Reach, ...]:
    """Return which cells are within the buffer of one another, by the cube's coordinates."""
    by_dim = _merge_kilometres(dict(buffer), view)  # a recipe may be written by hand
    return tuple(_resolve(dim, value, dim in cyclic, view) for dim, value in by_dim.items())


def _merge_kilometres(by_dim: dict[str, Any], view: CubeView) -> dict[str, Any]:
    """Keep one distance in kilometres, under the latitude dim."""
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
            f"buffer has {given[lat]!r} along {lat!r} and {given[lon]!r} along {lon!r}, but "
            "kilometres are one distance on the sphere over both; pass that distance once, e.g. "
            f"{{{lat!r}: {longest!r}}}, or cells along both, e.g. {{{lat!r}: 2, {lon!r}: 2}}"
        )
    rest = {dim: value for dim, value in by_dim.items() if dim not in dims}
    return {**rest, dims[0]: distances[0]}


def _resolve(dim: str, value: int | str, cyclic: bool, view: CubeView) -> Reach:
    if isinstance(value, int):
        if view.has_times(dim) and not cyclic:
            # count distinct times, because a time may occur twice on the axis
            return AxisReach.of_distance(dim, view.moments(dim), value)
        return AxisReach.of_cells(dim, view.sizes[dim], value, cyclic)
    if _is_kilometres(value):
        lat, lon = view.sphere(value)
        return SphereReach(*_sphere_dims(view, value), lat.values, lon.values, _km(value))
    times = microseconds(_time_coord(dim, value, view))
    longest = int(times.max()) - int(times.min())
    return AxisReach.of_distance(dim, times, min(_microseconds_of(value), longest))


def _check(argument: str, dim: str, value: Any, view: CubeView) -> int | str:
    """Return a buffer along one dim as a plan holds it; 0 for none."""
    if _is_cells(value):
        if value < 0:
            raise InvalidValueError(f"{argument} along {dim!r} must be 0 or more, got {value}")
        return int(value)
    if _is_kilometres(value):
        dims = _sphere_dims(view, value)
        if dim not in dims:
            raise InvalidValueError(
                f"{argument} along {dim!r} is {value!r}, but kilometres must be along one of {dims}"
            )
        return str(value).strip() if _km(value) > 0 else 0
    if _is_duration(value):
        _time_coord(dim, value, view)
        length = _microseconds_of(value)
        if length < 0:
            raise InvalidValueError(f"{argument} along {dim!r} must be 0 or more, got {value!r}")
        text = value if isinstance(value, str) else _format(length)
        return text.strip() if length else 0
    raise _not_a_buffer(f"{argument} along {dim!r}", value)


def _check_cut(
    argument: str, dim: str, value: int | str, view: CubeView, cut: Sequence[str]
) -> None:
    """Refuse a buffer along a dim that no part ends along, where it could separate nothing."""
    dims = _sphere_dims(view, value) if _is_kilometres(value) else (dim,)
    if any(d in cut for d in dims):
        return
    along = " and ".join(map(repr, dims))
    raise InvalidValueError(
        f"{argument} is {value!r} along {along}, but the split is not cut there: every block or "
        f"region spans the whole dim, so a buffer cannot separate them. The split is cut along "
        f"{list(cut)}; use smaller blocks along {along}, or leave this {argument} out"
    )


def _not_a_buffer(argument: str, value: Any) -> InvalidTypeError:
    return InvalidTypeError(
        f"{argument} must be cells (2), a length of time ('30D', '12h', '30min'), a distance "
        f"('150km'), or one of these by dim ({{'time': '30D'}}), got {value!r}; units of time are "
        "W, D, h, min, s, ms or us"
    )


def _is_cells(value: Any) -> bool:
    # numpy counts a timedelta64 among its integers
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def _quantity(value: Any) -> tuple[Fraction, str] | None:
    """Split a text into number and unit, in lower case."""
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else (Fraction(found[1]), found[2].lower())


def _is_kilometres(value: Any) -> bool:
    found = _quantity(value)
    return found is not None and found[1] == "km" and found[0] >= 0


def _km(value: str) -> float:
    return float(value.lower().replace("km", ""))


def _is_duration(value: Any) -> bool:
    if isinstance(value, np.timedelta64):
        return np.datetime_data(value)[0] in _MICROSECONDS and not np.isnat(value)
    found = _quantity(value)
    return isinstance(value, datetime.timedelta) or (found is not None and found[1] in _UNITS)


def _microseconds_of(value: Any) -> int:
    """Return a length of time, rounded away from zero to microseconds."""
    if isinstance(value, datetime.timedelta):
        return int(value // datetime.timedelta(microseconds=1))
    if isinstance(value, np.timedelta64):
        unit, count = np.datetime_data(value)
        # Python integers, because numpy integers overflow
        length = int(value.astype(np.int64)) * count * _MICROSECONDS[unit]
    else:
        found = _quantity(value)
        if found is None or found[1] not in _UNITS:  # in a recipe, which is not checked before
            raise _not_a_buffer("buffer", value)
        length = found[0] * _MICROSECONDS[_UNITS[found[1]]]
    return math.ceil(length) if length > 0 else math.floor(length)


def _format(microseconds: int) -> str:
    """Write a length of time in whole days, seconds or microseconds."""
    for unit, length in (("D", 86_400_000_000), ("s", 1_000_000)):
        if microseconds % length == 0:
            return f"{microseconds // length}{unit}"
    return f"{microseconds}us"


def _sphere_dims(view: CubeView, value: Any) -> tuple[str, str]:
    lat, lon = view.sphere(value)
    return str(lat.dims[0]), str(lon.dims[0])


def _time_coord(dim: str, value: Any, view: CubeView) -> Any:
    """Return the dates along `dim`, which must be sorted."""
    coord = dates_along(view.ds.coords.values(), dim)
    if coord is None:
        coord = view.own(dim)
        raise InvalidValueError(
            f"{value!r} needs dates along {dim!r}, got "
            f"{'no coordinate' if coord is None else coord.dtype}; decode the times "
            "(xarray.decode_cf) or give the buffer in cells"
        )
    steps = np.diff(microseconds(coord))
    if not ((steps >= 0).all() or (steps <= 0).all()):
        raise InvalidValueError(
            f"{value!r} along {dim!r} needs sorted times; use ds.sortby({coord.name!r})"
        )
    return coord
