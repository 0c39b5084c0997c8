"""Check that data sets used together have the same scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.scaling import Scaling

# The same statistics, summed up in another order, differ by rounding.
_ROUNDING = 1e-6
# Loaders, subsets and concatenations inside one another that are searched, and items of a list,
# which may hold batches in memory.
_MOST_NESTED, _MOST_LISTED = 16, 64


def check_same_scaling(data: Mapping[str, Any]) -> None:
    """Raise if a variable is scaled differently in the data sets that arguments hold."""
    first_found: dict[str, tuple[str, Scaling]] = {}
    for argument, value in data.items():
        for dataset in datasets_in(value, _knows_scaling):
            for name, scaling in dataset.scaling.items():
                first, other = first_found.setdefault(name, (argument, scaling))
                if not _are_equal(scaling, other):
                    where = argument if argument != first else f"another data set of {argument}"
                    raise InvalidValueError(
                        f"{name!r} is scaled differently in data that are used together: "
                        f"{other.described} in {first}, {scaling.described} in {where}; make one "
                        "with the statistics of the other (MultiProcSampler or PTXrDataset, "
                        "statistics=store)"
                    )


def datasets_in(data: Any, is_wanted: Callable[[Any], bool], depth: int = 0) -> Iterator[Any]:
    """Yield the wanted data sets inside a loader, subset or concatenation."""
    if is_wanted(data):
        yield data
        return
    if depth > _MOST_NESTED or data is None:
        return
    joined: Any = getattr(data, "datasets", None)
    every_one = joined if type(joined) in (list, tuple) else (joined,)
    parts: Iterable[Any] = (getattr(data, "dataset", None), *every_one)
    if type(data) is dict:
        parts = data.values()
    elif type(data) in (list, tuple):
        parts = data[:_MOST_LISTED]
    for part in parts:
        yield from datasets_in(part, is_wanted, depth + 1)


def _knows_scaling(data: Any) -> bool:
    scaling = getattr(data, "scaling", None)
    return isinstance(scaling, Mapping) and all(isinstance(s, Scaling) for s in scaling.values())


def _are_equal(scaling: Scaling, other: Scaling) -> bool:
    """Return True if two scalings are equal up to rounding."""
    if scaling.dims != other.dims or np.shape(scaling.offset) != np.shape(other.offset):
        return False
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.subtract(scaling.offset, other.offset))
        same_offset = difference <= _ROUNDING * np.abs(scaling.scale)
    same_scale = np.isclose(scaling.scale, other.scale, rtol=_ROUNDING, atol=0.0)
    unknown = np.isnan(scaling.scale) & np.isnan(other.scale)
    return bool(np.all((same_offset & same_scale) | unknown))
