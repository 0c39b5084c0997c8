"""Counts of removed and filled cells, carried as coordinates of a cube.

Every cell, or sample, has a reason code: `KEPT`, or why it was dropped. A cube keeps its shape, so
dropped cells look like gaps. The cube therefore also carries the stages that dropped cells so far;
a later stage computes their codes again, from their masks and gaps, so that no cell counts twice.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.missing import find_gaps
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube import masks_and_labels
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import not_data
from ml4cube.preprocessing import cubes

logger = logging.getLogger(__name__)

#: Reason codes.
KEPT, GAP, MASK = 0, 1, 2
#: Names of the counts of dropped cells or samples.
REASONS = {GAP: "gap", MASK: "mask"}

# Prefix of the scalar coordinates that hold a cube's counts.
_PREFIX = "accounting_"
# Attribute of the total: the stages that removed cells so far, as JSON.
_STAGES = "ml4cube_stages"


class Stage(NamedTuple):
    """A call that removes cells."""

    # Variables whose gaps count; none if only a mask is applied.
    gap_variables: Sequence[str]
    mode: str
    mask: str | None
    # Variable whose cells are counted.
    counted: str


def accounting(result: Mapping[str, Any] | xr.Dataset | xr.DataArray) -> dict[str, int]:
    """Return the counts of what `apply_filter`, `drop_nan_values` and `fill_nan_values` did.

    Parameters
    ----------
    result : dict, Dataset or DataArray
        Result of one of them. If it is lazy, its masks and variables are read once.

    Returns
    -------
    dict of str to int
        ``total``, ``kept`` and one count for each reason to drop (``mask``, ``gap``). The kept
        and dropped add up to the total. ``filled`` counts filled cells. Empty if nothing was
        counted. If the cube was cut, reduced, filled or renamed between calls, the last call
        counts the cells of the new cube, and earlier calls count as far as their masks and gaps
        are still in it.

    Notes
    -----
    After ``xr.concat`` the result is empty until cells are dropped again; add up the counts of
    the pieces instead.

    ``xr.merge`` refuses cubes with different counts: use ``compat="override"``, or drop the
    coordinates ``accounting_...`` first.

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
    if not any(map(is_count, result.coords)):
        return {}
    if isinstance(result, xr.DataArray):
        name = masks_and_labels.DATA_VAR if result.name is None else result.name
        is_coordinate = name in result.coords or name in result.dims
        result = result.coords.to_dataset() if is_coordinate else as_dataset(result)
    lazy_counts, stages = read_counts(result)
    computed = xr.Dataset({name: ((), n.data) for name, n in lazy_counts.items()}).compute()
    counts = {name: int(computed[name]) for name in lazy_counts}
    if "total" not in counts:
        return counts
    total = counts.pop("total")
    removed = sum(n for name, n in counts.items() if name != "filled")
    # dropped samples are gone, unlike cells
    if _has_uncounted_cells(result, stages, total if stages else total - removed):
        return {}
    return {"total": total, "kept": total - removed, **counts}


def is_count(name: object) -> bool:
    """Return True if a coordinate of this name would be a count."""
    return str(name).startswith(_PREFIX)


def read_counts(cube: xr.Dataset) -> tuple[dict[str, xr.Variable], list[Stage]]:
    """Return the counts that a cube carries, and the stages that removed cells."""
    counts = {
        str(name).removeprefix(_PREFIX): coord.variable
        for name, coord in cube.coords.items()
        if is_count(name)
    }
    stages = json.loads(counts["total"].attrs.get(_STAGES, "[]")) if "total" in counts else []
    # xarray concatenates unequal counts, and makes floats of them by reindexing
    joined = any(count.ndim or count.dtype.kind == "f" for count in counts.values())
    return ({} if joined else counts), [Stage(*stage) for stage in stages]


def with_counts(
    ds: xr.Dataset, counts: Mapping[str, Any], stages: Sequence[Stage] = ()
) -> xr.Dataset:
    """Store counts in a cube, as scalar coordinates ``accounting_<name>``."""
    coords = {
        _PREFIX + name: xr.Variable((), count, {"long_name": f"accounting: {name}"})
        for name, count in counts.items()
    }
    if stages and "total" in counts:
        coords[_PREFIX + "total"].attrs[_STAGES] = json.dumps(list(stages))
    return ds.drop_vars([name for name in ds.coords if is_count(name)]).assign_coords(coords)


def _has_uncounted_cells(cube: xr.Dataset, stages: Sequence[Stage], counted_cells: int) -> bool:
    """Return True if there are more cells than counted, as in joined pieces of equal counts."""
    if SAMPLE_DIM in cube.dims:
        return cube.sizes[SAMPLE_DIM] > counted_cells
    sizes = {str(name): variable.size for name, variable in cube.data_vars.items()}
    # if the counted variable was renamed or dropped, a larger one may be another
    size = sizes.get(stages[-1].counted) if stages else None
    candidates = sizes.values() if size is None else [size]
    return counted_cells not in candidates and max(candidates, default=0) > counted_cells


def add_dropped_samples(earlier: Mapping[str, int], codes: NDArray[Any]) -> dict[str, int]:
    """Count the reason codes of samples; add earlier counts, unless those are of other samples."""
    counts = {name: n for name, n in earlier.items() if name != "kept"}
    dropped_before = sum(counts.get(name, 0) for name in REASONS.values())
    left = counts.get("total", 0) - dropped_before
    if "total" not in counts or left != codes.size:
        counts = {name: n for name, n in counts.items() if name == "filled"}
        counts["total"] = codes.size
    for code, name in REASONS.items():
        if dropped := int((codes == code).sum()):
            counts[name] = counts.get(name, 0) + dropped
            logger.info("dropped %d of %d samples: %s", dropped, codes.size, name)
    return counts


def with_stage_counts(
    result: xr.Dataset, cube: xr.Dataset, stage: Stage, codes: xr.Variable
) -> xr.Dataset:
    """Store the counts of a stage that made `result` of `cube`, and of those before."""
    earlier_counts, stages = read_counts(cube)
    counted = cube.variables[stage.counted]
    earlier_codes = _earlier_codes(cube, stages, counted)
    codes = codes * (earlier_codes == KEPT)
    # earlier counts stay if they still describe these cells
    dropped_before = sum(n for name, n in earlier_counts.items() if name in REASONS.values())
    still_valid = dropped_before == _count(earlier_codes != KEPT, counted)
    counts = {"total": counted.size}
    if "filled" in earlier_counts:
        counts["filled"] = earlier_counts["filled"].data
    for code, name in REASONS.items():
        causes: list[Any] = [each.gap_variables for each in (*stages, stage)]
        if code == MASK:
            causes = [each.mask for each in (*stages, stage)]
        if any(causes):
            count = _count(earlier_codes == code, counted)
            earlier = earlier_counts.get(name, count)
            earlier = earlier.where(still_valid, count)  # type: ignore[no-untyped-call]
            counts[name] = (earlier + _count(codes == code, counted)).data
    return with_counts(result, counts, [*stages, stage])


def variable_to_count(cube: xr.Dataset, names: Sequence[str], mask: str | None) -> str | None:
    """Return the largest variable with all dims of the given ones and the mask, if any."""
    dims = _all_sizes(*(cube.variables.get(name) for name in (*names, mask))).keys()
    others = not_data(cube, mask)
    candidates = [
        str(name)
        for name, variable in cube.data_vars.items()
        if (name in names or (name not in others and variable.dtype.kind in "fiub"))
        and dims <= set(variable.dims)
    ]
    return max(candidates, key=lambda name: (cube[name].ndim, cube[name].size), default=None)


def _earlier_codes(cube: xr.Dataset, stages: Iterable[Stage], counted: xr.Variable) -> xr.Variable:
    """Return the reason code of every cell of a variable, from the stages so far."""
    codes = xr.Variable((), np.uint8(KEPT))
    for stage in stages:
        used = [cube.variables.get(n) for n in (*stage.gap_variables, stage.mask) if n is not None]
        if any(variable is None for variable in used):
            continue
        if not stage.gap_variables:
            stage_codes = mask_codes(cube.variables[stage.mask], counted)
        elif _all_sizes(*used).keys() <= set(counted.dims):
            stage_codes = gap_codes(cube, stage.gap_variables, stage.mode, stage.mask)
        else:  # cells along other dims do not belong to this variable
            continue
        codes = codes + stage_codes * (codes == KEPT)
    return codes


def _all_sizes(*variables: xr.Variable | None) -> dict[Hashable, int]:
    """Return the sizes of all dims of some variables."""
    return {
        dim: n
        for variable in variables
        if variable is not None
        for dim, n in variable.sizes.items()
    }


def _count(flags: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Return the number of flagged cells of a variable, which may have more dims than the flags."""
    return flags.sum() * (variable.size // max(flags.size, 1))


def mask_codes(mask: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Return the reason code of each cell of a variable by a mask alone."""
    flags = cubes.any_over_other_dims(cubes.as_flags(mask), variable.dims)
    return ~flags * np.uint8(MASK)


def gap_codes(
    cube: xr.Dataset, gap_variables: Iterable[str], mode: str, mask: str | None
) -> xr.Variable:
    """Return the reason code of each sample, or of each cell of a cube without samples."""
    flags = [] if mask is None else [cubes.as_flags(cube.variables[mask])]
    samples = {dim: n for dim, n in cube.sizes.items() if dim == SAMPLE_DIM}
    # one by one, because windows of samples may have different dims
    each = (_gap_codes(cube.variables[name], flags, mode, samples) for name in gap_variables)
    combine: Callable[..., xr.Variable] = np.minimum if mode == "if_all_nan" else np.maximum
    return functools.reduce(combine, each)


def _gap_codes(
    variable: xr.Variable, flags: Sequence[xr.Variable], mode: str, samples: Mapping[Any, int]
) -> xr.Variable:
    """Return the reason codes by the gaps of one variable, inside the flags of a mask, if any."""
    inputs = [read_in_blocks(variable), *flags]
    outer = samples or _all_sizes(*inputs)
    window = {dim: n for dim, n in variable.sizes.items() if dim not in outer}
    codes: xr.Variable = xr.apply_ufunc(
        _gap_codes_of_block,
        *(cubes.broadcast_to(array, {**outer, **window}) for array in inputs),
        input_core_dims=[list(window)] * len(inputs),
        kwargs={"mode": mode, "window": len(window)},
        dask="parallelized",
        dask_gufunc_kwargs={"allow_rechunk": True},
        output_dtypes=[np.uint8],
    )
    return codes


def _gap_codes_of_block(
    values: NDArray[Any], mask: NDArray[np.bool_] | None = None, *, mode: str, window: int
) -> NDArray[np.uint8]:
    """Return the reason codes of one block, whose last dims are the window."""
    window_axes = tuple(range(values.ndim - window, values.ndim))
    gaps = find_gaps(values)
    if mask is not None:
        in_mask = mask.any(window_axes)
        has_gap = (gaps & mask).any(window_axes)
        return np.where(in_mask, has_gap * GAP, MASK).astype(np.uint8)
    dropped = gaps.all(window_axes) if mode == "if_all_nan" else gaps.any(window_axes)
    return np.asarray(dropped * GAP, np.uint8)
