"""Check that data sets used together have the same scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.scaling import Scaling

# The same statistics, summed up in another order, differ by rounding.
_ROUNDING = 1e-6


def check_joined(given: Mapping[str, Any]) -> None:
    """Raise if a variable is scaled differently in the data sets."""
    seen: dict[str, tuple[str, Scaling]] = {}
    for argument, one in given.items():
        for dataset in _datasets(one):
            for name, scaling in dataset.scaling.items():
                first, other = seen.setdefault(name, (argument, scaling))
                if not _alike(scaling, other):
                    where = argument if argument != first else f"another data set of {argument}"
                    raise InvalidValueError(
                        f"{name!r} is scaled differently in data that are used together: "
                        f"{other.described} in {first}, {scaling.described} in {where}; make one "
                        "with the statistics of the other (MultiProcSampler or PTXrDataset, "
                        "statistics=store)"
                    )


def _datasets(given: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the data sets, inside a loader, subset or concatenation, that know their scaling."""
    known = getattr(given, "scaling", None)
    if isinstance(known, Mapping) and all(isinstance(one, Scaling) for one in known.values()):
        yield given
        return
    if depth > 8 or given is None:
        return
    inside = [getattr(given, name, None) for name in ("dataset", "datasets")]
    if type(given) in (dict, list, tuple):
        inside.append(given)
    for one in inside:
        for part in _members(one):
            yield from _datasets(part, depth + 1)


def _members(one: Any) -> list[Any]:
    if type(one) is dict:
        return list(one.values())
    # there may be many batches in memory, without scaling
    return list(one)[:64] if type(one) in (list, tuple) else [] if one is None else [one]


def _alike(one: Scaling, other: Scaling) -> bool:
    """Return True if two scalings are equal up to rounding."""
    if one.dims != other.dims or np.shape(one.offset) != np.shape(other.offset):
        return False
    with np.errstate(invalid="ignore"):
        near = np.abs(np.subtract(one.offset, other.offset)) <= _ROUNDING * np.abs(one.scale)
    same = np.isclose(one.scale, other.scale, rtol=_ROUNDING, atol=0.0)
    unknown = np.isnan(one.scale) & np.isnan(other.scale)
    return bool(np.all((near & same) | unknown))
