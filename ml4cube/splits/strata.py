"""`stratify` as users write it -> how many cells of each class lie in each block."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import check_decoded
from ml4cube.splits.cube import CubeView
from ml4cube.splits.tally import Tally, key_names, tally
from ml4cube.splits.validity import Counts, on_cube, repeat_along_missing

StratifyLike = str | xr.DataArray | Mapping[str, int]

_SEASONS = ("DJF", "MAM", "JJA", "SON")


@dataclass(frozen=True, eq=False)
class Strata:
    """Cells of each class in each block."""

    # Valid cells by block and class.
    counts: Counts
    names: tuple[str, ...]
    # What the user asked for, for the recipe.
    said: str
    # Valid cells by block, with and without a class; None if no mask was given.
    weights: Counts | None

    def warn_of_missing(self, labels: NDArray[np.uint8], stacklevel: int) -> None:
        """Warn where a part holds no cell of a class, since too few blocks hold the class."""
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
                f"stratify={self.said!r}: too few blocks hold some classes to give every part one: "
                f"{', '.join(lacking[:5])}{more}; use smaller blocks or fewer classes",
                UserWarning,
                stacklevel=stacklevel,
            )


def class_counts(
    stratify: StratifyLike, view: CubeView, grid: Grid, mask: xr.DataArray | None
) -> Strata:
    """Count the cells of each class in each block, in one pass over the data."""
    values, bins, said = _values(stratify, view)
    if mask is not None:
        values, mask = xr.broadcast(values, mask)
    found = tally(values, mask, grid, classes=bins is None)
    if not found.key.size:
        raise InvalidValueError(
            f"stratify={said!r}: no valid cell has a value; leave stratify out, or check the mask"
        )
    keys = np.unique(found.key)
    if bins is not None:
        label, names = _quantile_bins(found, keys, bins)
    elif _is_of_time(stratify, view):
        label = np.searchsorted(keys, found.key)
        names = tuple(_SEASONS[key] if said == "season" else f"month {key}" for key in keys)
    else:
        label = np.searchsorted(keys, found.key)
        by_key = key_names(found, values.dtype)
        names = tuple(by_key[int(key)] for key in keys)
    present = [dim for dim in grid.dims if dim in values.dims]
    counted = _by_block(found, label, len(names), present, grid)
    weights = None
    if mask is not None:
        weights = counted.sum(axis=1)
    return Strata(counted[:, :-1], names, said, weights)


def _values(stratify: StratifyLike, view: CubeView) -> tuple[xr.DataArray, int | None, str]:
    """Values to make classes of, the number of quantile bins if any, and what was asked."""
    bins: Any = None
    if isinstance(stratify, Mapping):
        if len(stratify) != 1:
            raise InvalidValueError(
                f"stratify={dict(stratify)!r} has {len(stratify)} variables; give one, as in "
                "{'t2m': 4} for four quantile bins"
            )
        name, bins = next(iter(stratify.items()))
        if isinstance(bins, bool) or not isinstance(bins, int | np.integer):
            raise InvalidTypeError(
                f"stratify={dict(stratify)!r}: {bins!r} is no number of quantile bins; give 2 or "
                "more"
            )
        if not 2 <= bins <= 100:
            raise InvalidValueError(
                f"stratify={dict(stratify)!r}: give 2 to 100 quantile bins, found {bins}"
            )
        said, array = f"{bins} quantile bins of {name}", _variable(name, view)
        if array.dtype.kind not in "biufmM":
            raise InvalidTypeError(
                f"stratify={dict(stratify)!r}: {name!r} is of {array.dtype}, which has no "
                f"quantiles; for its classes write stratify={name!r}"
            )
        check_decoded(name, array.dtype, array.attrs)
    elif isinstance(stratify, xr.DataArray):
        said, array = str("regions" if stratify.name is None else stratify.name), stratify
    elif isinstance(stratify, str):
        if _is_of_time(stratify, view):
            return _of_time(stratify, view), None, stratify
        said, array = stratify, _variable(stratify, view)
    else:
        raise InvalidTypeError(
            f"stratify is a {type(stratify).__name__}; give the name of a class variable, a "
            "DataArray of classes, 'season', 'month', or {'t2m': 4} for quantile bins"
        )
    return on_cube(array, view, "stratify").rename(said), bins, said


def _is_of_time(stratify: StratifyLike, view: CubeView) -> bool:
    """Whether the user means seasons or months of the dates, not a variable of that name."""
    return isinstance(stratify, str) and stratify in ("season", "month") and stratify not in view.ds


def _variable(name: Any, view: CubeView) -> xr.DataArray:
    if not isinstance(name, str) or name not in view.ds:
        raise InvalidValueError(
            f"stratify names {name!r}, the cube has {list(view.ds.variables)}; name one of them, "
            "'season' or 'month'"
        )
    return view.ds[name]


def _of_time(kind: str, view: CubeView) -> xr.DataArray:
    """Month (1 to 12) or season (0 to 3) of each time step."""
    coord = view.axis_of("time")
    if coord is None or not is_time(coord):
        raise InvalidValueError(
            f"stratify={kind!r} needs dates along a dim, the cube has {list(view.ds.coords)}; "
            "decode the times (xarray.decode_cf)"
        )
    if coord.isnull().any():
        raise InvalidValueError(f"{coord.name!r} has missing dates; fill or drop them")
    month = coord.dt.month.values
    codes = month if kind == "month" else month % 12 // 3
    return xr.DataArray(codes, dims=coord.dims, name=kind)


def _quantile_bins(
    found: Tally, keys: NDArray[np.int64], bins: int
) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """Bin of each pair; a value lies in one bin, so many equal values make fewer bins."""
    of_key = np.bincount(np.searchsorted(keys, found.key), found.count).astype(np.int64)
    before = np.cumsum(of_key) - of_key
    bin_of_key = np.minimum(before * bins // of_key.sum(), bins - 1)
    used, label = np.unique(bin_of_key, return_inverse=True)
    names = tuple(f"bin {int(b) + 1} of {bins}" for b in used)
    return label.ravel()[np.searchsorted(keys, found.key)], names


def _by_block(
    found: Tally, label: NDArray[np.intp], classes: int, present: list[str], grid: Grid
) -> Counts:
    """Counts by block of the whole grid and class, with those without a class as last column."""
    shape = [grid.counts[grid.dims.index(dim)] for dim in present]
    counts = np.zeros((int(np.prod(shape, dtype=np.int64)), classes + 1), dtype=np.int64)
    np.add.at(counts, (found.block, label), found.count)
    for block, n in found.gaps.items():
        counts[block, -1] += n
    return repeat_along_missing(counts.reshape([*shape, classes + 1]), present, grid)
