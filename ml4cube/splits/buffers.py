"""Parse buffers between parts, in cells, times and kilometres.

`plan_buffer` turns the user's arguments into what a plan and its recipe store; `reaches_of` turns
that into the cells near to each cell of a cube.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ml4cube.core.distance.reach import AxisReach, Reach, SphereReach
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, names_of
from ml4cube.core.grid import Grid, SizesLike, parse_pairs
from ml4cube.core.split_plan import Buffer, CellPlan, SplitPlan
from ml4cube.splits.cube import CubeView, check_degrees, dates_of, microseconds, sorted_ranks
from ml4cube.splits.positions import PlaceReach, Positions, positions_of

GapLike = int | str | datetime.timedelta | np.timedelta64
BufferLike = GapLike | SizesLike
CyclicLike = bool | str | Iterable[str]

_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*([A-Za-z]+)\s*")
# Names of units, in lower case; those of time as datetime.timedelta calls them. There is no "m",
# which could be metres, minutes or months.
_UNITS = {
    "km": ("km",),
    "weeks": ("w", "week", "weeks"),
    "days": ("d", "day", "days"),
    "hours": ("h", "hour", "hours"),
    "minutes": ("min", "minute", "minutes"),
    "seconds": ("s", "second", "seconds"),
    "milliseconds": ("ms",),
    "microseconds": ("us",),
}


def cut_dims(grid: Grid) -> list[str]:
    """Return the dims along which a grid has more than one block."""
    return [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]


def plan_buffer(
    buffer: BufferLike | None,
    gap: GapLike | None,
    cyclic: CyclicLike | None,
    view: CubeView,
    cut: Sequence[str],
    time_dim: str | None = None,
) -> tuple[Buffer, tuple[str, ...]]:
    """Return buffer and cyclic dims as a plan stores them, for a split that cuts the dims `cut`.

    `gap` is along `time_dim`, or along the one that is found.
    """
    parsed_buffer = _parse_buffer(buffer, gap, view, cut, time_dim)
    cyclic_dims = _parse_cyclic(cyclic, view, cut)
    for dim, value in parsed_buffer:
        if dim in cyclic_dims and _measure("buffer", value)[0] == "time":
            raise InvalidValueError(
                f"a buffer along the cyclic dim {dim!r} must be in cells, got {value!r}: a length "
                "of time is not measured around the ends"
            )
    _reaches(parsed_buffer, cyclic_dims, view)  # Refuses unsorted times before any cell is read.
    return parsed_buffer, cyclic_dims


def reaches_of(plan: SplitPlan | CellPlan, view: CubeView) -> tuple[Reach, ...]:
    """Return which cells are within the buffer of one another, by the cube's coordinates."""
    if isinstance(plan, CellPlan):
        return ()
    return _reaches(plan.buffer, plan.cyclic, view)


def _parse_buffer(
    buffer: BufferLike | None,
    gap: GapLike | None,
    view: CubeView,
    cut: Sequence[str],
    time_dim: str | None,
) -> Buffer:
    by_dim = _lengths_by_dim(buffer, view, cut)
    if gap is not None:
        time_dim = time_dim or view.time_dim("gap")
        # A number of cells along every cut dim leaves time to the gap.
        if by_dim.get(time_dim) and not isinstance(buffer, int | np.integer):
            raise InvalidValueError(
                f"gap={gap!r} and buffer={by_dim[time_dim]!r} are both along {time_dim!r}; pass one"
            )
        by_dim[time_dim] = gap
    parsed = []
    for dim, value in sorted(_merge_kilometres(by_dim, view).items()):
        argument = "buffer"
        if gap is not None and dim == time_dim:
            argument = "gap"
        kind, length = _measure(f"{argument} along {dim!r}", value)
        if not length:
            continue
        _check_along(argument, dim, kind, value, view, cut)
        parsed.append((dim, _as_stored(value, length)))
    return tuple(parsed)


def _lengths_by_dim(
    buffer: BufferLike | None, view: CubeView, cut: Sequence[str]
) -> dict[str, Any]:
    """Return the buffer along each dim that it is meant for."""
    if buffer is None:
        return {}
    if isinstance(buffer, Iterable) and not isinstance(buffer, str):
        return parse_pairs("buffer", buffer, view.dims)
    kind, _ = _measure("buffer", buffer)
    if kind == "cells":
        return dict.fromkeys(cut, buffer)
    if kind == "km":
        return {_place_dims(view, buffer)[0]: buffer}
    return {view.time_dim("buffer"): buffer}


def _check_along(
    argument: str, dim: str, kind: str, value: Any, view: CubeView, cut: Sequence[str]
) -> None:
    """Refuse a length that cannot be measured along a dim, or a dim that the split leaves whole."""
    dims: tuple[str, ...] = (dim,)
    if kind == "km":
        dims = _place_dims(view, value)
    if dim not in dims:
        raise InvalidValueError(
            f"{argument} along {dim!r} is {value!r}, but kilometres must be along one of {dims}"
        )
    if kind == "time":
        _sorted_dates(dim, value, view)  # Refuses a dim without dates.
    if not set(dims) & set(cut):
        uncut = " and ".join(map(repr, dims))
        raise InvalidValueError(
            f"{argument} is {value!r} along {uncut}, but the split is not cut there: every "
            "block or region spans the whole dim, so a buffer cannot separate them. The split "
            f"is cut along {list(cut)}; use smaller blocks along {uncut}, or leave this "
            f"{argument} out"
        )


def _parse_cyclic(cyclic: CyclicLike | None, view: CubeView, cut: Sequence[str]) -> tuple[str, ...]:
    """Return the cyclic dims; None finds a longitude that spans the globe."""
    circle = view.lon_circle()
    if circle and circle.dim in cut and circle.columns < view.sizes[circle.dim]:
        dim, columns = circle
        raise InvalidValueError(
            f"columns 0 and {columns} along {dim!r} are the same meridian, so one could be train "
            f"and the other test; drop the repeated columns: ds.isel({dim}=slice(0, {columns}))"
        )
    if cyclic is None:
        if circle:
            return (circle.dim,)
        return ()
    if cyclic is False:
        return ()
    if cyclic is True:
        lon = view.lon_axis()
        if lon is None:
            raise InvalidValueError(
                "cyclic=True needs a longitude along a dim of its own, but the cube has dims "
                f"{view.dims}; name the dim, e.g. cyclic={view.dims[-1]!r}"
            )
        return (str(lon.dims[0]),)
    dims = names_of("cyclic", cyclic)
    for dim in dims:
        check_choice("cyclic", dim, view.dims)
    return tuple(sorted(set(dims)))


def _merge_kilometres(by_dim: dict[str, Any], view: CubeView) -> dict[str, Any]:
    """Keep one distance in kilometres, under the first dim of places."""
    distances = [value for value in by_dim.values() if _number_and_unit(value)[1] == "km"]
    if not distances:
        return by_dim
    dims = _place_dims(view, distances[0])
    on_map = {dim: by_dim[dim] for dim in dims if dim in by_dim}
    if len({_measure("buffer", value) for value in on_map.values()}) > 1:
        first, second = dims
        raise InvalidValueError(
            f"buffer has {on_map[first]!r} along {first!r} and {on_map[second]!r} along "
            f"{second!r}, but kilometres are one distance over both; pass that distance once, "
            f"e.g. {{{first!r}: {distances[0]!r}}}, or cells along both, e.g. "
            f"{{{first!r}: 2, {second!r}: 2}}"
        )
    others = {dim: value for dim, value in by_dim.items() if dim not in on_map}
    if not on_map:
        return others
    return {**others, dims[0]: next(iter(on_map.values()))}


def _measure(argument: str, value: Any) -> tuple[str, float]:
    """Return "cells", "km" or "time" and the number of cells, kilometres or microseconds."""
    number, unit = _number_and_unit(value)
    # In numpy, a timedelta64 is an integer.
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64):
        kind, length = "cells", float(value)
    elif unit == "km":
        kind, length = "km", number
    elif (time := _timedelta(value)) is not None:
        kind, length = "time", time // datetime.timedelta(microseconds=1)
    else:
        raise InvalidTypeError(
            f"{argument} must be cells (2), a length of time ('30D', '12h', '30min'), a distance "
            f"('150km'), or one of these by dim ({{'time': '30D'}}), got {value!r}; units of time "
            "are W, D, h, min, s, ms or us"
        )
    if length < 0:
        raise InvalidValueError(f"{argument} must be 0 or more, got {value!r}")
    return kind, length


def _number_and_unit(value: Any) -> tuple[float, str]:
    """Return the number and the unit in a text such as "30D"; the unit is "" in anything else."""
    match = None
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
    for unit, names in _UNITS.items():
        if match and match[2].lower() in names:
            return float(match[1]), unit
    return 0.0, ""


def _timedelta(value: Any) -> datetime.timedelta | None:
    """Return a length of time, or None for NaT, months, too long times and anything else."""
    number, unit = _number_and_unit(value)
    try:
        if unit:
            return datetime.timedelta(**{unit: number})
        if isinstance(value, np.timedelta64) and np.datetime_data(value)[0] != "generic":
            return pd.Timedelta(value).to_pytimedelta()
    except (AttributeError, ValueError, OverflowError):
        return None
    if isinstance(value, datetime.timedelta):
        return value
    return None


def _as_stored(value: Any, length: float) -> int | str:
    """Return a buffer for the recipe: cells, or a text with a unit."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, datetime.timedelta | np.timedelta64):
        return int(value)
    for unit, unit_us in (("D", 86_400_000_000), ("s", 1_000_000)):
        if length % unit_us == 0:
            return f"{int(length) // unit_us}{unit}"
    return f"{int(length)}us"


def _reaches(buffer: Buffer, cyclic: Sequence[str], view: CubeView) -> tuple[Reach, ...]:
    by_dim = _merge_kilometres(dict(buffer), view)  # A recipe may be written by hand.
    return tuple(_reach(dim, value, dim in cyclic, view) for dim, value in by_dim.items())


def _reach(dim: str, value: int | str, cyclic: bool, view: CubeView) -> Reach:
    kind, length = _measure("buffer", value)
    if kind == "km":
        return _reach_on_map(view, value, length)
    if kind == "time":
        times = microseconds(_sorted_dates(dim, value, view))
        return AxisReach.of_distance(dim, times, min(int(length), int(np.ptp(times))))
    if view.has_times(dim) and not cyclic:
        # Distinct times are counted, because a time may occur twice on the axis.
        return AxisReach.of_distance(dim, view.time_ranks(dim), int(length))
    return AxisReach.of_cells(dim, view.sizes[dim], int(length), cyclic)


def _reach_on_map(view: CubeView, distance: Any, km: float) -> SphereReach | PlaceReach:
    """Return the cells of the map that are near to one another: faster on a grid of degrees."""
    lat, lon = view.axis_of("latitude"), view.axis_of("longitude")
    if lat is None or lon is None or lat.dims == lon.dims:
        return PlaceReach(_places(view, distance), km)
    check_degrees(distance, lat, lon)
    return SphereReach(str(lat.dims[0]), str(lon.dims[0]), lat.values, lon.values, km)


def _place_dims(view: CubeView, distance: Any) -> tuple[str, ...]:
    return _reach_on_map(view, distance, 0.0).dims


def _places(view: CubeView, distance: Any) -> Positions:
    """Return the positions that a distance in kilometres needs."""
    places = positions_of(view, distance)
    if places is None:
        raise InvalidValueError(
            f"{distance!r} needs latitude and longitude, or x and y in metres or kilometres, but "
            f"the cube has the coordinates {sorted(map(str, view.ds.coords))}; give it in cells"
        )
    if view.dim_of_time in places.sizes:
        raise InvalidValueError(
            f"{distance!r} needs places that stay the same, but they lie along "
            f"{view.dim_of_time!r}, as those of a track; give it in cells or as a time"
        )
    return places


def _sorted_dates(dim: str, distance: Any, view: CubeView) -> xr.DataArray:
    """Return the dates along `dim`, which must be sorted; the user's `distance` needs them."""
    dates = dates_of(view.ds, dim)
    if dates is None:
        coord = view.dim_coord(dim)
        raise InvalidValueError(
            f"{distance!r} needs dates along {dim!r}, got "
            f"{'no coordinate' if coord is None else coord.dtype}; decode the times "
            "(xarray.decode_cf) or give the buffer in cells"
        )
    sorted_ranks(dates)
    return dates
