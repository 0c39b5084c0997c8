"""Check that data sets used together have the same scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    if depth > 16 or given is None:
        return
    inside: Iterable[Any] = (getattr(given, "dataset", None), getattr(given, "datasets", None))
    if type(given) is dict:
        inside = given.values()
    elif type(given) in (list, tuple):
        inside = given[:64]  # there may be many batches in memory, without scaling
    for one in inside:
        yield from _datasets(one, depth + 1)


def _alike(one: Scaling, other: Scaling) -> bool:
    """Return True if two scalings are equal up to rounding."""
    if one.dims != other.dims or np.shape(one.offset) != np.shape(other.offset):
        return False
    with np.errstate(invalid="ignore"):
        near = np.abs(np.subtract(one.offset, other.offset)) <= _ROUNDING * np.abs(one.scale)
    same = np.isclose(one.scale, other.scale, rtol=_ROUNDING, atol=0.0)
    unknown = np.isnan(one.scale) & np.isnan(other.scale)
    return bool(np.all((near & same) | unknown))
