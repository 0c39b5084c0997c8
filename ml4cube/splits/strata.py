"""Strata: parse `stratify`, and count the cells of each class in each block."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_choice,
    check_whole,
)
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
    class_names: tuple[str, ...]
    # What is stratified, in words for the recipe.
    request: str
    # Valid cells by block, with and without a class.
    weights: Counts

    def warn_of_missing(self, labels: NDArray[np.uint8]) -> None:
        """Warn of parts without cells of a class, because too few blocks hold it."""
        codes = {part: code for part, code in PARTS.items() if (labels == code).any()}
        incomplete = []
        for name, cells in zip(self.class_names, self.counts.T, strict=True):
            missing = [part for part, code in codes.items() if not cells[labels == code].any()]
            if missing and cells.any():
                blocks = int((cells > 0).sum())
                incomplete.append(f"{name} ({blocks} blocks, none in {' and '.join(missing)})")
        if incomplete:
            more = f" and {len(incomplete) - 5} more" if len(incomplete) > 5 else ""
            warnings.warn(
                f"stratify={self.request!r}: some classes lie in too few blocks to be in every "
                f"part: {', '.join(incomplete[:5])}{more}; use smaller blocks or fewer classes",
                UserWarning,
                stacklevel=caller_level(),
            )


def class_counts(stratify: StratifyLike, view: CubeView, grid: Grid, mask: xr.DataArray) -> Strata:
    """Count the cells of each class in each block, in one pass over the data."""
    values, bins, request = _parse(stratify, view)
    pairs = count_values(values, mask, grid, classes=bins is None)
    has_class = pairs.block >= 0
    keys = pairs.key[has_class]
    if not keys.size:
        raise InvalidValueError(
            f"stratify={request!r}: no valid cell has a value; leave stratify out, or check the "
            "mask"
        )
    if bins is not None:
        class_of_key, class_names = _quantile_bins(keys, pairs.count[has_class], bins)
    else:
        classes = pd.unique(keys)
        # Texts by a hash, as in earlier versions, whose splits depend on the order of classes.
        order = [_hash(word) for word in classes] if classes.dtype == object else classes
        classes = classes[np.argsort(order)]
        class_of_key = pd.Index(classes).get_indexer(keys)
        class_names = tuple(_class_name(key, stratify, view) for key in classes)
    # Cells without a class are counted in a last column, and their blocks are complements.
    column = np.full(has_class.size, len(class_names))
    column[has_class] = class_of_key
    dims = [dim for dim in grid.dims if dim in {*values.dims, *mask.dims}]
    shape = [grid.counts[grid.dims.index(dim)] for dim in dims]
    counts = np.zeros((math.prod(shape), len(class_names) + 1), dtype=np.int64)
    np.add.at(counts, (np.where(has_class, pairs.block, ~pairs.block), column), pairs.count)
    counts = repeat_along_missing(counts.reshape(*shape, -1), dims, grid)
    return Strata(counts[:, :-1].astype(np.float64), class_names, request, counts.sum(axis=1))


def _parse(stratify: StratifyLike, view: CubeView) -> tuple[xr.DataArray, int | None, str]:
    """Return the values to classify, the number of quantile bins or None, and the request."""
    bins: int | None = None
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
        request, array = f"{bins} quantile bins of {var}", _variable(var, view)
        if array.dtype.kind not in "biufmM":
            raise InvalidTypeError(
                f"{var!r} has no quantiles because it has dtype {array.dtype}; to use its classes, "
                f"write stratify={var!r}"
            )
        check_decoded(var, array)
    elif isinstance(stratify, xr.DataArray):
        request, array = str("regions" if stratify.name is None else stratify.name), stratify
    elif isinstance(stratify, str):
        if _is_of_time(stratify, view):
            return _of_time(stratify, view), None, stratify
        request, array = stratify, _variable(stratify, view, "season", "month")
    else:
        raise InvalidTypeError(
            "stratify must be the name of a class variable, a DataArray of classes, 'season', "
            f"'month', or {{'t2m': 4}} for quantile bins, got {type(stratify).__name__}"
        )
    if not array.ndim:
        raise InvalidValueError(f"stratify: {request!r} must have dims of the cube, got a scalar")
    if array.dtype.kind not in "biufmMOUST":
        raise InvalidTypeError(
            f"stratify: {request!r} must hold integers, floats, bools, dates or texts, got "
            f"{array.dtype}"
        )
    return on_cube(array, view, "stratify").rename(request), bins, request


def _variable(name: str, view: CubeView, *others: str) -> xr.DataArray:
    check_choice("stratify", name, [*map(str, view.ds.variables), *others])
    return view.ds[name]


def _is_of_time(stratify: str, view: CubeView) -> bool:
    """Return True if `stratify` means seasons or months, not a variable of that name."""
    return stratify in ("season", "month") and stratify not in view.ds


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


def _quantile_bins(
    keys: NDArray[np.int64], counts: NDArray[np.int64], bins: int
) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """Return the bin of each key; equal values share a bin, so there may be fewer bins."""
    _, rank = np.unique(keys, return_inverse=True)
    cells = np.bincount(rank, counts).astype(np.int64)
    cells_below = np.cumsum(cells) - cells
    bin_of_rank = np.minimum(cells_below * bins // cells.sum(), bins - 1)
    used_bins, index = np.unique(bin_of_rank, return_inverse=True)
    return index[rank], tuple(f"bin {b + 1} of {bins}" for b in used_bins)


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest())


def _class_name(key: Any, stratify: StratifyLike, view: CubeView) -> str:
    if isinstance(stratify, str) and _is_of_time(stratify, view):
        return _SEASONS[key] if stratify == "season" else f"month {key}"
    return f"{key:g}" if isinstance(key, float | np.floating) else str(key)
