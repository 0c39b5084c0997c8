"""Strata: parse `stratify`, and count the cells of each class in each block."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, check_whole
from ml4cube.core.grid import Grid
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import check_decoded
from ml4cube.splits.cube import CubeView
from ml4cube.splits.validity import Counts, on_cube, repeat_along_missing
from ml4cube.splits.value_counts import count_values

StratifyLike = str | xr.DataArray | Mapping[str, int]

_SEASONS = ("DJF", "MAM", "JJA", "SON")


@dataclass(frozen=True, eq=False)
class Strata:
    """Cells of each class in each block."""

    # Valid cells by block and class.
    counts: NDArray[np.float64]
    names: tuple[str, ...]
    # The request in words, for the recipe.
    name: str
    # Valid cells by block, with and without a class.
    weights: Counts

    def warn_of_missing(self, labels: NDArray[np.uint8], stacklevel: int) -> None:
        """Warn of parts without cells of a class, because too few blocks hold it."""
        codes = {part: code for part, code in PARTS.items() if (labels == code).any()}
        lacking = []
        for name, cells in zip(self.names, self.counts.T, strict=True):
            without = [part for part, code in codes.items() if not cells[labels == code].any()]
            if without and cells.any():
                lacking.append(
                    f"{name} ({int((cells > 0).sum())} blocks, none in {' and '.join(without)})"
                )
        if lacking:
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            warnings.warn(
                f"stratify={self.name!r}: some classes lie in too few blocks to be in every part: "
                f"{', '.join(lacking[:5])}{more}; use smaller blocks or fewer classes",
                UserWarning,
                stacklevel=stacklevel,
            )


def class_counts(
    stratify: StratifyLike, view: CubeView, grid: Grid, mask: xr.DataArray | None
) -> Strata:
    """Count the cells of each class in each block, in one pass over the data."""
    values, bins, name = _values(stratify, view)
    if mask is not None:
        values, mask = xr.broadcast(values, mask)
    found = count_values(values, mask, grid, classes=bins is None)
    there = found.block >= 0
    key, count = found.key[there], found.count[there]
    if not key.size:
        raise InvalidValueError(
            f"stratify={name!r}: no valid cell has a value; leave stratify out, or check the mask"
        )
    if bins is not None:
        of_pair, names = _quantile_bins(key, count, bins)
    else:
        keys = pd.unique(key)
        # texts in an order of their own, in which the splits of earlier versions were made
        keys = keys[np.argsort([_code(word) for word in keys] if keys.dtype == object else keys)]
        of_pair = pd.Index(keys).get_indexer(key)
        names = tuple(map(_class_name(stratify, view), keys))
    label = np.full(there.size, len(names))
    label[there] = of_pair
    present = [dim for dim in grid.dims if dim in values.dims]
    shape = [grid.counts[grid.dims.index(dim)] for dim in present]
    counts = np.zeros((math.prod(shape), len(names) + 1), dtype=np.int64)
    np.add.at(counts, (np.where(there, found.block, ~found.block), label), found.count)
    counted = repeat_along_missing(counts.reshape(*shape, len(names) + 1), present, grid)
    return Strata(counted[:, :-1].astype(np.float64), names, name, counted.sum(axis=1))


def _code(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest())


def _values(stratify: StratifyLike, view: CubeView) -> tuple[xr.DataArray, int | None, str]:
    """Return the values to classify, the number of quantile bins if any, and a name."""
    bins: Any = None
    if isinstance(stratify, Mapping):
        if len(stratify) != 1:
            raise InvalidValueError(
                f"stratify must have one variable, e.g. {{'t2m': 4}} for four quantile bins, got "
                f"{dict(stratify)!r}"
            )
        var, bins = next(iter(stratify.items()))
        if not 2 <= check_whole("the number of quantile bins in stratify", bins) <= 100:
            raise InvalidValueError(
                f"the number of quantile bins in stratify must be from 2 to 100, got {bins}"
            )
        name, array = f"{bins} quantile bins of {var}", _variable(var, view)
        if array.dtype.kind not in "biufmM":
            raise InvalidTypeError(
                f"{var!r} has no quantiles because it has dtype {array.dtype}; to use its classes, "
                f"write stratify={var!r}"
            )
        check_decoded(var, array.dtype, array.attrs)
    elif isinstance(stratify, xr.DataArray):
        name, array = str("regions" if stratify.name is None else stratify.name), stratify
    elif isinstance(stratify, str):
        if _is_of_time(stratify, view):
            return _of_time(stratify, view), None, stratify
        name, array = stratify, _variable(stratify, view, "season", "month")
    else:
        raise InvalidTypeError(
            "stratify must be the name of a class variable, a DataArray of classes, 'season', "
            f"'month', or {{'t2m': 4}} for quantile bins, got {type(stratify).__name__}"
        )
    return on_cube(array, view, "stratify").rename(name), bins, name


def _is_of_time(stratify: StratifyLike, view: CubeView) -> bool:
    """Return True if `stratify` means seasons or months, not a variable of that name."""
    return isinstance(stratify, str) and stratify in ("season", "month") and stratify not in view.ds


def _variable(name: str, view: CubeView, *others: str) -> xr.DataArray:
    check_choice("stratify", name, [*map(str, view.ds.variables), *others])
    return view.ds[name]


def _of_time(kind: str, view: CubeView) -> xr.DataArray:
    """Return the month (1 to 12) or season (0 to 3) of each time step."""
    coord = view.axis_of("time")
    if coord is None or not is_time(coord):
        raise InvalidValueError(
            f"stratify={kind!r} needs dates along a dim, but the cube has the coordinates "
            f"{list(view.ds.coords)}; decode the times (xarray.decode_cf)"
        )
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates; fill or drop them")
    month = coord.dt.month.values
    codes = month if kind == "month" else month % 12 // 3
    return xr.DataArray(codes, dims=coord.dims, name=kind)


def _class_name(stratify: StratifyLike, view: CubeView) -> Callable[[Any], str]:
    """Return the function that names a class."""
    if _is_of_time(stratify, view):
        return _SEASONS.__getitem__ if stratify == "season" else "month {}".format
    return lambda key: f"{key:g}" if isinstance(key, float | np.floating) else str(key)


def _quantile_bins(
    key: NDArray[np.int64], count: NDArray[np.int64], bins: int
) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """Return the bin of each key; equal values share a bin, so there may be fewer bins."""
    _, which = np.unique(key, return_inverse=True)
    of_key = np.bincount(which, count).astype(np.int64)
    before = np.cumsum(of_key) - of_key
    bin_of_key = np.minimum(before * bins // of_key.sum(), bins - 1)
    used, label = np.unique(bin_of_key, return_inverse=True)
    return label[which], tuple(f"bin {b + 1} of {bins}" for b in used)
