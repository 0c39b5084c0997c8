"""Coordinates as features: sine and cosine of latitude, longitude, day of the year and hour.

Unlike the angle itself, they do not jump where the circle closes. Does not use torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.sample_spec import parse_names
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.loading.sources import SampleSource, SampleVariable
from ml4cube.loading.views import Arrays, View

if TYPE_CHECKING:
    import xarray as xr

_OF_TIME = ("dayofyear", "hour")


class WithCoordinates(View):
    """Samples with sine and cosine of coordinates as additional variables."""

    def __init__(self, source: SampleSource, wanted: Any, like: str) -> None:
        super().__init__(source)
        sizes = source.variables[like].sizes
        self._window = {self.cube_dims.get(dim, dim): n for dim, n in sizes.items()}
        # by channel: dim of the cube, and values at every cell along it
        self._tables: dict[str, tuple[str, NDArray[np.float32]]] = {}
        axes = source.axes
        for name in parse_names("coord_features", wanted):
            dim, phase = _phase(name, axes)
            # samples have the coordinate <dim>_origin only where windows extend along the dim
            if dim not in self._window and f"{dim}_origin" in source.coords(np.zeros(0, np.int64)):
                raise InvalidValueError(
                    f"coord_features={name!r}: windows extend along {dim!r}, but the samples have "
                    f"no dim of that name, only {tuple(sizes)}; rename it back"
                )
            for function in (np.sin, np.cos):
                channel = f"{function.__name__}({name})"
                if channel in source.variables:
                    raise InvalidValueError(
                        f"coord_features adds a channel {channel!r}, and a variable has that name "
                        "already; rename it"
                    )
                table = function(phase).astype(np.float32)
                self._tables[channel] = (dim, table)
                self._needs[channel] = ()  # no variable of the source
                self.variables[channel] = SampleVariable(sizes, table.dtype)
        self.channels = tuple(self._tables)

    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        dim, table = self._tables[name]
        first, size = self.first_cells(self.rows(chunk), [dim])[dim], self._window.get(dim, 1)
        shape = [size if d == dim else 1 for d in self._window]
        out[...] = table[first[:, None] + np.arange(size)].reshape(-1, *shape)


def _phase(name: str, axes: Mapping[str, xr.Variable]) -> tuple[str, NDArray[np.float64]]:
    """Return the dim of a coordinate and its angle in radians at every cell."""
    if name in _OF_TIME:
        dim = _the_one([d for d, axis in axes.items() if is_time(axis)], name, axes)
        return dim, _phase_of_time(name, axes[dim])
    kinds = {
        dim: [kind for kind in (is_latitude, is_longitude) if kind(dim, axis.attrs, rotated=True)]
        for dim, axis in axes.items()
    }
    # "lat" also means a dim of another name, such as nav_lat; a dim of that very name goes first
    alike = [d for d in axes if any(kind(name, {}, rotated=True) for kind in kinds[d])]
    dim = _the_one([name] if name in axes else alike, name, axes)
    axis = axes[dim]
    units = axis.attrs.get("units")
    if not kinds[dim] and not str(units).startswith(("degree", "rad")):
        raise InvalidValueError(
            f"coord_features={name!r} must be an angle, got units {units!r}; make it a variable "
            "of the cube, or choose lat, lon, dayofyear, hour"
        )
    return dim, np.deg2rad(in_degrees(axis.values, units))


def _the_one(found: list[str], name: str, axes: Mapping[str, xr.Variable]) -> str:
    if len(found) == 1:
        return found[0]
    raise InvalidValueError(
        f"coord_features={name!r} matches {found or 'no coordinate'}; the coordinates known at "
        f"every cell are {list(axes)}. Choose angles (lat, lon), or one of {_OF_TIME} if one has "
        "dates. For samples made by hand only evenly spaced coordinates are known; give the cube "
        "itself, or its store"
    )


def _phase_of_time(name: str, axis: xr.Variable) -> NDArray[np.float64]:
    """Return the angle of times in the year, each as long as it is in the calendar, or the day."""
    import xarray as xr

    when = xr.DataArray(axis).dt
    turns = ((when.hour * 60 + when.minute) * 60 + when.second) / 86400
    if name == "dayofyear":
        turns = (when.dayofyear - 1 + turns) / when.days_in_year
    return np.asarray(2 * np.pi * turns, np.float64)
