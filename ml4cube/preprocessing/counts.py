"""Count dropped and filled cells, and carry the counts along with a cube.

Every cell, or sample, has a reason code: `KEPT`, or why it was dropped. A cube keeps its shape, so
dropped cells look like gaps, and a coordinate holds the codes of all cells. Dropped samples are
gone, so scalar coordinates hold their numbers, and that of filled cells.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.missing import find_gaps
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.variables import not_data
from ml4cube.preprocessing import cubes

logger = logging.getLogger(__name__)

N = TypeVar("N")

#: Reason codes.
KEPT, GAP, MASK = 0, 1, 2
#: Names of the counts of dropped cells or samples.
REASONS = {GAP: "gap", MASK: "mask"}

# Prefix of the coordinates that hold counts, and the coordinate with the reason codes of cells.
_PREFIX = "accounting_"
_CODES = "accounting_reason"


def accounting(result: Mapping[str, Any] | xr.Dataset | xr.DataArray) -> dict[str, int]:
    """Return the counts of what `apply_filter`, `drop_nan_values` and `fill_nan_values` did.

    Parameters
    ----------
    result : dict, Dataset or DataArray
        Result of one of them. If it is lazy, its masks and variables are read once.

    Returns
    -------
    dict of str to int
        ``total``, ``kept`` and one count for each reason for which any were dropped (``mask``,
        ``gap``). The kept and dropped add up to the total; what several calls would drop counts
        for the first one. ``filled`` counts filled cells. Empty if nothing was counted.

    Notes
    -----
    A cube carries the reason of every cell as the coordinate ``accounting_reason`` (0 kept, 1 gap,
    2 mask), so the counts are those of the cells that are left after a selection, and of all
    pieces after ``xr.concat`` along a dim that they have. A mean over one of its dims drops the
    coordinate. ``xr.merge`` refuses cubes that differ in it: use ``compat="override"``, or drop
    the coordinates ``accounting_...`` first.

    Examples
    --------
    >>> import numpy as np
    >>> from ml4cube.preprocessing import drop_nan_values
    >>> ds = xr.Dataset({"t": ("x", [1.0, np.nan, 3.0])}).chunk(x=1)
    >>> accounting(drop_nan_values(ds, ["t"]))
    {'total': 3, 'kept': 2, 'gap': 1}
    """
    if not isinstance(result, xr.Dataset | xr.DataArray):
        return dict(getattr(result, "accounting", {}))
    counts, codes = read_counts(result), read_codes(result)
    are_of_samples = "total" in counts
    if codes is not None and not are_of_samples:
        counts["total"] = xr.Variable((), codes.size)
        counts |= {name: (codes == code).sum() for code, name in REASONS.items()}
    numbers = {str(name): int(n) for name, n in xr.Dataset(counts).compute().items()}
    filled = _only_filled(numbers)
    if "total" not in numbers:
        return filled
    dropped = {name: numbers[name] for name in REASONS.values() if numbers.get(name)}
    kept = numbers["total"] - sum(dropped.values())
    # pieces with equal counts, which xarray does not add up, were joined
    if are_of_samples and result.sizes.get(SAMPLE_DIM, 0) > kept:
        return {}
    return {"total": numbers["total"], "kept": kept, **dropped, **filled}


def is_count(name: object) -> bool:
    """Return True if a coordinate of this name would be a count."""
    return str(name).startswith(_PREFIX)


def read_counts(cube: xr.Dataset | xr.DataArray) -> dict[str, xr.Variable]:
    """Return the counts that scalar coordinates hold."""
    counts = {
        str(name).removeprefix(_PREFIX): coord.variable
        for name, coord in cube.coords.items()
        if is_count(name) and name != _CODES
    }
    # xarray concatenates unequal counts, and makes floats of them by reindexing
    joined = any(count.ndim or count.dtype.kind == "f" for count in counts.values())
    return {} if joined else counts


def read_codes(cube: xr.Dataset | xr.DataArray) -> xr.Variable | None:
    """Return the reason codes of cells, unless xarray has averaged or reindexed them."""
    codes = cube.coords.get(_CODES)
    return None if codes is None or codes.dtype != np.uint8 else codes.variable


def with_counts(ds: xr.Dataset, counts: Mapping[str, Any]) -> xr.Dataset:
    """Store counts in a cube, as scalar coordinates ``accounting_<name>``."""
    coords = {
        _PREFIX + name: xr.Variable((), count, {"long_name": f"accounting: {name}"})
        for name, count in counts.items()
    }
    previous = [name for name in ds.coords if is_count(name) and name != _CODES]
    return ds.drop_vars(previous).assign_coords(coords)


def _only_filled(counts: Mapping[str, N]) -> dict[str, N]:
    return {name: counts[name] for name in counts if name == "filled"}


def drop_samples(cube: xr.Dataset, codes: NDArray[Any]) -> xr.Dataset:
    """Drop the samples whose reason code is not `KEPT`, and add them to the counts."""
    counts = {name: int(count.values) for name, count in read_counts(cube).items()}
    dropped_before = sum(counts.get(name, 0) for name in REASONS.values())
    # earlier counts may be of other samples, as after a selection
    if "total" not in counts or counts["total"] - dropped_before != codes.size:
        counts = {"total": codes.size, **_only_filled(counts)}
    for code, name in REASONS.items():
        if dropped := int((codes == code).sum()):
            counts[name] = counts.get(name, 0) + dropped
            logger.info("dropped %d of %d samples: %s", dropped, codes.size, name)
    return with_counts(cube.isel({SAMPLE_DIM: np.flatnonzero(codes == KEPT)}), counts)


def with_codes(cube: xr.Dataset, codes: xr.Variable, counted: str) -> xr.Dataset:
    """Store the reason codes of the cells of a variable; earlier reasons take precedence."""
    earlier = read_codes(cube)
    variable = read_in_blocks(cube.variables[counted])
    if earlier is not None and set(earlier.dims) <= set(variable.dims):
        codes = earlier + codes * (earlier == KEPT)
    codes = cubes.broadcast_to(codes, variable.sizes)
    if variable.chunks is not None:
        codes = codes.chunk(variable.chunksizes)
    codes.attrs = {"long_name": "why the cell was dropped", "flag_values": [KEPT, *REASONS]}
    codes.attrs["flag_meanings"] = " ".join(["kept", *REASONS.values()])
    return with_counts(cube, _only_filled(read_counts(cube))).assign_coords({_CODES: codes})


def variable_to_count(cube: xr.Dataset, names: Sequence[str], mask: str | None) -> str | None:
    """Return the largest variable with all dims of the given ones and the mask, if any."""
    dims = {dim for name in {*names, mask} & {*cube.variables} for dim in cube[name].dims}
    others = not_data(cube, mask)
    candidates = [
        str(name)
        for name, variable in cube.data_vars.items()
        if (name in names or (name not in others and variable.dtype.kind in "fiub"))
        and dims <= set(variable.dims)
    ]
    return max(candidates, key=lambda name: (cube[name].ndim, cube[name].size), default=None)


def gap_codes(
    variables: Sequence[xr.Variable], mask: xr.Variable | None, mode: str, samples: int | None
) -> xr.Variable:
    """Return the reason code of each of so many samples, or of each cell if None."""
    # one by one, because windows of samples may have different dims
    each = (_gap_codes(variable, mask, mode, samples) for variable in variables)
    combine: Callable[..., xr.Variable] = np.minimum if mode == "if_all_nan" else np.maximum
    codes = functools.reduce(combine, each)
    return codes if samples is None else cubes.broadcast_to(codes, {SAMPLE_DIM: samples})


def _gap_codes(
    variable: xr.Variable, mask: xr.Variable | None, mode: str, samples: int | None
) -> xr.Variable:
    """Return the reason codes by the gaps of one variable."""
    gaps: xr.Variable = xr.apply_ufunc(
        find_gaps, read_in_blocks(variable), dask="parallelized", output_dtypes=[np.bool_]
    )
    if mask is not None:
        gaps = gaps & mask
    kept_dims = gaps.dims if samples is None else [SAMPLE_DIM]
    if mode == "if_all_nan":
        return ~cubes.any_over_other_dims(~gaps, kept_dims) * np.uint8(GAP)
    codes = cubes.any_over_other_dims(gaps, kept_dims) * np.uint8(GAP)
    return codes if mask is None else codes + mask_codes(mask, kept_dims)


def mask_codes(mask: xr.Variable, dims: Sequence[Hashable]) -> xr.Variable:
    """Return the reason code of each cell along some dims by a mask alone."""
    return ~cubes.any_over_other_dims(mask, dims) * np.uint8(MASK)
