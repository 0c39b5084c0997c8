"""Parse buffers between parts, in cells, times and kilometres."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ml4cube.core.distance.reach import AxisReach, Reach, SphereReach
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, names_of
from ml4cube.core.grid import Grid, SizesLike, parse_pairs
from ml4cube.core.split_plan import CellPlan, SplitPlan
from ml4cube.cube.coordinates import dates_along
from ml4cube.splits.cube import CubeView, microseconds, sorted_ranks

BufferLike = int | str | datetime.timedelta | np.timedelta64 | SizesLike
Buffer = tuple[tuple[str, int | str], ...]

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*([A-Za-z]+)\s*")
# Units in lower case, as datetime.timedelta calls them: "m" could be metres, minutes or months.
_UNITS = {
    **{"km": "km", "w": "weeks", "week": "weeks", "weeks": "weeks"},
    **{"d": "days", "day": "days", "days": "days", "h": "hours", "hour": "hours", "hours": "hours"},
    **{"min": "minutes", "minute": "minutes", "minutes": "minutes"},
    **{"s": "seconds", "second": "seconds", "seconds": "seconds"},
    **{"ms": "milliseconds", "us": "microseconds"},
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
) -> tuple[Buffer, tuple[str, ...]]:
    """Return buffer and cyclic dims as a plan stores them."""
    parsed = _parse_buffer(buffer, gap, view, cut, time_dim)
    wraps = _parse_cyclic(cyclic, view, cut)
    _resolve_all(parsed, wraps, view)  # refuse times in no order before any cell is read
    return parsed, wraps


def _parse_buffer(
    buffer: BufferLike | None,
    gap: Any,
    view: CubeView,
    cut: Sequence[str],
    time_dim: str | None,
) -> Buffer:
    by_dim: dict[str, Any] = {}
    if isinstance(buffer, Iterable) and not isinstance(buffer, str):
        by_dim = parse_pairs("buffer", buffer, view.dims)
    elif buffer is not None:
        kind, _ = _measure("buffer", buffer)
        if kind == "cells":
            by_dim = dict.fromkeys(cut, buffer)
        else:
            dim = _sphere_dims(view, buffer)[0] if kind == "km" else view.time_dim("buffer")
            by_dim = {dim: buffer}
    if gap is not None:
        time_dim = time_dim or view.time_dim("gap")
        if by_dim.get(time_dim) and not isinstance(buffer, int | np.integer):
            raise InvalidValueError(
                f"gap={gap!r} and buffer={by_dim[time_dim]!r} are both along {time_dim!r}; pass one"
            )
        by_dim[time_dim] = gap
    parsed = []
    for dim, value in sorted(_merge_kilometres(by_dim, view).items()):
        argument = "gap" if gap is not None and dim == time_dim else "buffer"
        kind, length = _measure(f"{argument} along {dim!r}", value)
        if not length:
            continue
        dims = _sphere_dims(view, value) if kind == "km" else (dim,)
        if dim not in dims:
            raise InvalidValueError(
                f"{argument} along {dim!r} is {value!r}, but kilometres must be along one of {dims}"
            )
        along = " and ".join(map(repr, dims))
        if kind == "time":
            _time_coord(dim, value, view)
        if not set(dims) & set(cut):
            raise InvalidValueError(
                f"{argument} is {value!r} along {along}, but the split is not cut there: every "
                "block or region spans the whole dim, so a buffer cannot separate them. The split "
                f"is cut along {list(cut)}; use smaller blocks along {along}, or leave this "
                f"{argument} out"
            )
        parsed.append((dim, _as_stored(value, length)))
    return tuple(parsed)


def _parse_cyclic(cyclic: Any, view: CubeView, cut: Sequence[str]) -> tuple[str, ...]:
    """Return the cyclic dims; None finds a longitude that spans the globe."""
    turn = view.lon_turn()
    if turn and turn[0] in cut and turn[1] < view.sizes[turn[0]]:
        dim, columns = turn
        raise InvalidValueError(
            f"columns 0 and {columns} along {dim!r} are the same meridian, so one could be train "
            f"and the other test; drop the repeated columns: ds.isel({dim}=slice(0, {columns}))"
        )
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
    dims = names_of("cyclic", cyclic)
    for dim in dims:
        check_choice("cyclic", dim, view.dims)
    return tuple(sorted(set(dims)))


def reaches_of(plan: SplitPlan | CellPlan, view: CubeView) -> tuple[Reach, ...]:
    """Return which cells are within the buffer of one another, by the cube's coordinates."""
    return () if isinstance(plan, CellPlan) else _resolve_all(plan.buffer, plan.cyclic, view)


def _resolve_all(buffer: Buffer, cyclic: Sequence[str], view: CubeView) -> tuple[Reach, ...]:
    by_dim = _merge_kilometres(dict(buffer), view)  # a recipe may be written by hand
    return tuple(_resolve(dim, value, dim in cyclic, view) for dim, value in by_dim.items())


def _merge_kilometres(by_dim: dict[str, Any], view: CubeView) -> dict[str, Any]:
    """Keep one distance in kilometres, under the latitude dim."""
    far = [value for value in by_dim.values() if str(value).strip().lower().endswith("km")]
    if not far:
        return by_dim
    lat, lon = _sphere_dims(view, far[0])
    given = {dim: by_dim[dim] for dim in (lat, lon) if dim in by_dim}
    if len({_measure("buffer", value) for value in given.values()}) > 1:
        raise InvalidValueError(
            f"buffer has {given[lat]!r} along {lat!r} and {given[lon]!r} along {lon!r}, but "
            "kilometres are one distance on the sphere over both; pass that distance once, e.g. "
            f"{{{lat!r}: {far[0]!r}}}, or cells along both, e.g. {{{lat!r}: 2, {lon!r}: 2}}"
        )
    rest = {dim: value for dim, value in by_dim.items() if dim not in given}
    return rest if not given else {**rest, lat: next(iter(given.values()))}


def _resolve(dim: str, value: int | str, cyclic: bool, view: CubeView) -> Reach:
    kind, length = _measure("buffer", value)
    if kind == "km":
        lat, lon = view.sphere(value)
        return SphereReach(*_sphere_dims(view, value), lat.values, lon.values, length)
    if kind == "time":
        times = microseconds(_time_coord(dim, value, view))
        return AxisReach.of_distance(dim, times, min(int(length), int(np.ptp(times))))
    if view.has_times(dim) and not cyclic:
        # count distinct times, because a time may occur twice on the axis
        return AxisReach.of_distance(dim, view.moments(dim), int(length))
    return AxisReach.of_cells(dim, view.sizes[dim], int(length), cyclic)


def _measure(argument: str, value: Any) -> tuple[str, float]:
    """Return "cells", "km" or "time" and the number of cells, kilometres or microseconds."""
    length: Any = None
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    kind = _UNITS.get(found[2].lower(), "") if found else ""
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64):
        kind, length = "cells", int(value)  # numpy counts a timedelta64 among its integers
    elif found and kind == "km":
        length = float(found[1])
    else:
        time = value
        with contextlib.suppress(
            AttributeError, ValueError, OverflowError
        ):  # NaT, months, too long
            if found and kind:
                time = datetime.timedelta(**{kind: float(found[1])})
            elif isinstance(value, np.timedelta64) and np.datetime_data(value)[0] != "generic":
                time = pd.Timedelta(value).to_pytimedelta()
            if isinstance(time, datetime.timedelta):
                kind, length = "time", time // datetime.timedelta(microseconds=1)
    if length is None:
        raise InvalidTypeError(
            f"{argument} must be cells (2), a length of time ('30D', '12h', '30min'), a distance "
            f"('150km'), or one of these by dim ({{'time': '30D'}}), got {value!r}; units of time "
            "are W, D, h, min, s, ms or us"
        )
    if length < 0:
        raise InvalidValueError(f"{argument} must be 0 or more, got {value!r}")
    return kind, length


def _as_stored(value: Any, length: float) -> int | str:
    """Return a buffer for the recipe: cells, or a text with a unit."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, datetime.timedelta | np.timedelta64):
        return int(value)
    for unit, microseconds_in in (("D", 86_400_000_000), ("s", 1_000_000)):
        if length % microseconds_in == 0:
            return f"{int(length) // microseconds_in}{unit}"
    return f"{int(length)}us"


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
    sorted_ranks(coord)
    return coord
