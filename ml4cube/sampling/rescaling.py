"""Offset and scale of samples, from statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ml4cube.core.errors import InvalidValueError
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


def entries_of(scaling: Mapping[str, Scaling]) -> dict[str, Entries]:
    """Return the scaling of every cell, of variables whose scaling differs between cells."""
    return {name: one.entries for name, one in scaling.items() if one.entries}
