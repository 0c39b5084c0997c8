"""Offset and scale of samples, from statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import xarray as xr

from ml4cube.core.errors import InvalidValueError, prefixed
from ml4cube.core.scaling import Entries, Scaling
from ml4cube.core.statistics import Statistics


def select_statistics(given: Statistics, names: Iterable[str]) -> Statistics:
    """Return the statistics of some variables; refuse a variable without."""
    names = list(names)
    if missing := [name for name in names if name not in given]:
        raise InvalidValueError(
            f"statistics= has {list(given)}, but the samples also have {missing}; add statistics "
            "of these, or drop them from the cube"
        )
    return Statistics({name: given[name] for name in names}, given.part)


def scaling_of(
    statistics: Statistics, scale_fn: str | None, cube: xr.Dataset, dims: Sequence[str]
) -> dict[str, Scaling]:
    """Return offset and scale of every variable that is scaled, in every cell of a cube."""
    if scale_fn is None:
        return {}
    sizes = {dim: cube.sizes[dim] for dim in dims}
    coords = {dim: cube.indexes[dim].values for dim in dims if dim in cube.indexes}
    scaling = {}
    part = ""
    if statistics.part:
        part = f" of the {statistics.part} part"
    for name, stats in statistics.items():
        with prefixed(f"variable {name!r}{part}"):
            scaling[name] = Scaling.of(name, stats, scale_fn, sizes, coords)
    return scaling


def entries_of(scaling: Mapping[str, Scaling]) -> dict[str, Entries]:
    """Return the scaling of every cell, of variables whose scaling differs between cells."""
    return {name: one.entries for name, one in scaling.items() if one.entries}
