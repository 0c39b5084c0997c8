"""Coordinates as features: sine and cosine of latitude, longitude, day of the year and hour.

Unlike the angle itself, they do not jump where the circle closes. Does not use torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError, parse_names
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.loading.sources import SampleSource, SampleVariable
from ml4cube.loading.views import Computed, View
from ml4cube.recipe.bound import CoordinateChannel
from ml4cube.recipe.roles import ArrayName

if TYPE_CHECKING:
    import xarray as xr

_TIME_FEATURES = ("dayofyear", "hour")


def coordinate_tables(
    names: str | Sequence[str] | None, axes: Mapping[str, xr.Variable]
) -> dict[str, CoordinateChannel]:
    """Return the channels of coordinates, sine and cosine, from the axes of a cube."""
    tables = {}
    for name in parse_names("coord_features", names):
        dim, angles = _angles(name, axes)
        for function in (np.sin, np.cos):
            tables[f"{function.__name__}({name})"] = CoordinateChannel(
                dim, function(angles).astype(np.float32)
            )
    return tables


def add_coordinates(source: SampleSource, names: str | Sequence[str], like: ArrayName) -> View:
    """Add sine and cosine of coordinates, repeated over the window of the variable `like`."""
    sizes, window = source.variables[like].sizes, source.window_in_cube(like)
    computed = {}
    for channel, (dim, table) in coordinate_tables(names, source.axes).items():
        # Samples have the coordinate <dim>_origin only where windows extend along the dim.
        if dim not in window and f"{dim}_origin" in source.coords(np.zeros(0, np.int64)):
            raise InvalidValueError(
                f"coord_features: windows extend along {dim!r}, the dim of {channel}, but the "
                f"samples have no dim of that name, only {tuple(sizes)}; rename it back"
            )
        if ArrayName(channel) in source.variables:
            raise InvalidValueError(
                f"coord_features adds a channel {channel!r}, and a variable has that name "
                "already; rename it"
            )
        lookup = partial(_looked_up, source, table, dim, window)
        computed[ArrayName(channel)] = Computed(SampleVariable(sizes, table.dtype), (), lookup)
    return View(source, computed)


def _looked_up(
    source: SampleSource,
    table: NDArray[np.float32],
    dim: str,
    window: Mapping[str, int],
    chunk: int,
) -> NDArray[np.float32]:
    """Return the entries of a table of all cells along a dim, for the windows of a chunk."""
    first, size = source.first_cells(source.rows(chunk), [dim])[dim], window.get(dim, 1)
    sizes = dict.fromkeys(window, 1)
    if dim in window:
        sizes[dim] = size
    values: NDArray[np.float32] = table[first[:, None] + np.arange(size)]
    return values.reshape(-1, *sizes.values())


def _angles(name: str, axes: Mapping[str, xr.Variable]) -> tuple[str, NDArray[np.float64]]:
    """Return the dim of a coordinate and its angle in radians at every cell."""
    if name in _TIME_FEATURES and name not in axes:
        dim = _only_one([d for d, axis in axes.items() if is_time(axis)], name, axes)
        return dim, _angles_of_time(name, axes[dim])
    # "lat" also means a dim of another name, such as nav_lat, if no dim has that very name; but not
    # that of a rotated grid, which is another angle.
    alike = [
        dim
        for dim, axis in axes.items()
        if any(kind(name, {}) and kind(dim, axis.attrs) for kind in (is_latitude, is_longitude))
    ]
    dim = _only_one([name] if name in axes else alike, name, axes)
    axis = axes[dim]
    units = axis.attrs.get("units")
    is_angle = any(kind(dim, axis.attrs, rotated=True) for kind in (is_latitude, is_longitude))
    if not is_angle and not str(units).startswith(("degree", "rad")):
        raise InvalidValueError(
            f"coord_features={name!r} must be an angle, got units {units!r}; make it a variable "
            "of the cube, or choose lat, lon, dayofyear, hour"
        )
    return dim, np.deg2rad(in_degrees(axis.values, units))


def _only_one(found: list[str], name: str, axes: Mapping[str, xr.Variable]) -> str:
    if len(found) == 1:
        return found[0]
    raise InvalidValueError(
        f"coord_features={name!r} matches {found or 'no coordinate'}; the coordinates known at "
        f"every cell are {list(axes)}. Choose angles (lat, lon), or one of {_TIME_FEATURES} if one "
        "has dates. Latitudes along two dims, as on rotated grids, can be variables of the cube. "
        "For samples made by hand only evenly spaced coordinates are known; give the cube itself, "
        "or its store"
    )


def _angles_of_time(name: str, axis: xr.Variable) -> NDArray[np.float64]:
    """Return the angle of times in the year, each as long as it is in the calendar, or the day."""
    import xarray as xr

    when = xr.DataArray(axis).dt
    turns = ((when.hour * 60 + when.minute) * 60 + when.second) / 86400
    if name == "dayofyear":
        turns = (when.dayofyear - 1 + turns) / when.days_in_year
    return np.asarray(2 * np.pi * turns, np.float64)
