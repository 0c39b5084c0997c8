"""Counts of removed and filled cells, carried as coordinates of a cube."""

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
from ml4cube.cube import masks_and_labels as roles
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import not_data
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.cubes import SAMPLES

logger = logging.getLogger(__name__)

#: Codes of kept and dropped samples.
KEPT, GAP, MASK = 0, 1, 2
REASONS = {GAP: "gap", MASK: "mask"}

# Prefix of the scalar coordinates that hold a cube's counts.
_PREFIX = "accounting_"
# Attribute of the total: the stages that removed cells so far, as JSON.
_STAGES = "ml4cube_stages"


class Stage(NamedTuple):
    """A call that removes cells: what it depends on, and whose cells it counts."""

    # Variables whose gaps count; none if only a mask is applied.
    names: Sequence[str]
    mode: str
    # Name of the mask.
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
        name = roles.DATA_VAR if result.name is None else result.name
        is_own = name in result.coords or name in result.dims
        result = result.coords.to_dataset() if is_own else as_dataset(result)
    counts, stages = carried(result)
    computed = xr.Dataset({name: ((), count.data) for name, count in counts.items()}).compute()
    found = {name: int(computed[name]) for name in counts}
    if "total" not in found:
        return found
    total = found.pop("total")
    removed = sum(count for name, count in found.items() if name != "filled")
    # dropped samples are gone, unlike cells
    if _has_more(result, total if stages else total - removed, stages):
        return {}
    return {"total": total, "kept": total - removed, **found}


def is_count(name: object) -> bool:
    """Return True if a coordinate of this name would be a count."""
    return str(name).startswith(_PREFIX)


def carried(cube: xr.Dataset) -> tuple[dict[str, xr.Variable], list[Stage]]:
    """Return the counts that a cube carries, and the stages that removed cells."""
    counts = {
        str(name).removeprefix(_PREFIX): coord.variable
        for name, coord in cube.coords.items()
        if is_count(name)
    }
    total = counts.get("total")
    written = [] if total is None else json.loads(total.attrs.get(_STAGES, "[]"))
    # xarray concatenates unequal counts, and makes floats of them by reindexing
    joined = any(count.ndim or count.dtype.kind == "f" for count in counts.values())
    return ({} if joined else counts), [Stage(*stage) for stage in written]


def _has_more(cube: xr.Dataset, known: int, stages: Sequence[Stage]) -> bool:
    """Return True if there are more cells than counted, as in joined pieces of equal counts."""
    if SAMPLES in cube.dims:
        return cube.sizes[SAMPLES] > known
    sizes = {str(name): variable.size for name, variable in cube.data_vars.items()}
    # if it was renamed or dropped, a larger variable may be another one
    counted = sizes.get(stages[-1].counted) if stages else None
    now = sizes.values() if counted is None else [counted]
    return known not in now and max(now, default=0) > known


def record(ds: xr.Dataset, counts: Mapping[str, Any], stages: Sequence[Stage] = ()) -> xr.Dataset:
    """Store counts in a cube, as scalar coordinates ``accounting_<name>``."""
    coords = {
        _PREFIX + name: xr.Variable((), count, {"long_name": f"accounting: {name}"})
        for name, count in counts.items()
    }
    if stages and "total" in counts:
        coords[_PREFIX + "total"].attrs[_STAGES] = json.dumps(list(stages))
    before = [name for name in ds.coords if is_count(name)]
    return ds.drop_vars(before).assign_coords(coords)


def add(before: Mapping[str, int], reason: NDArray[Any]) -> dict[str, int]:
    """Add dropped samples to earlier counts; start from zero if the samples are others."""
    counts = {name: n for name, n in before.items() if name != "kept"}
    left = counts.get("total", 0) - sum(counts.get(name, 0) for name in REASONS.values())
    if "total" not in counts or left != reason.size:
        counts = {name: n for name, n in counts.items() if name == "filled"}
        counts["total"] = reason.size
    for code, name in REASONS.items():
        if dropped := int((reason == code).sum()):
            counts[name] = counts.get(name, 0) + dropped
            logger.info("dropped %d of %d samples: %s", dropped, reason.size, name)
    return counts


def record_stage(
    result: xr.Dataset, cube: xr.Dataset, stage: Stage, reason: xr.Variable
) -> xr.Dataset:
    """Store the counts of a stage and of those before."""
    before, stages = carried(cube)
    like = cube.variables[stage.counted]
    removed = _removed(cube, stages, like)
    reason = reason * (removed == KEPT)
    # earlier counts stay if they still describe these cells
    earlier = {name: n for name, n in before.items() if name in REASONS.values()}
    valid = sum(earlier.values()) == _size(removed != KEPT, like)
    counts = {"total": like.size}
    if "filled" in before:
        counts["filled"] = before["filled"].data
    for code, name in REASONS.items():
        if any(one.mask if code == MASK else one.names for one in (*stages, stage)):
            size = _size(removed == code, like)
            known = earlier.get(name, size) * valid + size * ~valid
            counts[name] = (known + _size(reason == code, like)).data
    return record(result, counts, [*stages, stage])


def counted_by(cube: xr.Dataset, names: Sequence[str], mask: str | None) -> str | None:
    """Return the largest variable with all dims of the given ones and the mask, if any."""
    dims = _dims(*(cube.variables.get(name) for name in (*names, mask)))
    others = not_data(cube, mask)
    found = [
        str(name)
        for name, variable in cube.data_vars.items()
        if (name in names or (name not in others and variable.dtype.kind in "fiub"))
        and dims.keys() <= set(variable.dims)
    ]
    return max(
        found, key=lambda name: (cube.variables[name].ndim, cube.variables[name].size), default=None
    )


def _dims(*variables: xr.Variable | None) -> dict[Hashable, int]:
    """Return the sizes of all dims of some variables."""
    return {dim: n for one in variables if one is not None for dim, n in one.sizes.items()}


def _is_complete(cube: xr.Dataset, stage: Stage) -> bool:
    """Return True if the cube still has the variables that a stage depends on."""
    return {*stage.names, *filter(None, [stage.mask])} <= set(cube.variables)


def _size(cells: xr.Variable, like: xr.Variable) -> xr.Variable:
    """Return the number of flagged cells of a variable, which may have more dims than the flags."""
    return cells.sum() * (like.size // max(cells.size, 1))


def _removed(cube: xr.Dataset, stages: Iterable[Stage], like: xr.Variable) -> xr.Variable:
    """Return the reason code of every cell of a variable, from the stages so far."""
    removed = xr.Variable((), np.uint8(KEPT))
    for names, mode, mask, _ in (stage for stage in stages if _is_complete(cube, stage)):
        inside = None if mask is None else cubes.flags(cube.variables[mask])
        variables = [cube.variables[name] for name in names]
        if inside is not None and not names:
            reason = outside(inside, like)
        # cells along other dims do not belong to this variable
        elif _dims(*variables, inside).keys() <= set(like.dims):
            reason = reasons(variables, inside, mode, None)
        else:
            continue
        removed = removed + reason * (removed == KEPT)
    return removed


def outside(inside: xr.Variable, variable: xr.Variable) -> xr.Variable:
    """Return the reason code of the cells of a variable that lie outside a mask."""
    return ~cubes.fitted(inside, variable) * np.uint8(MASK)


def reasons(
    variables: Sequence[xr.Variable], mask: xr.Variable | None, mode: str, samples: int | None
) -> xr.Variable:
    """Return the reason code of each sample of a Dataset, or of each cell of a cube."""
    # one by one, because windows of samples may have different dims
    each = (_reasons(one, mask, mode, samples) for one in variables)
    combine: Callable[..., xr.Variable] = np.minimum if mode == "if_all_nan" else np.maximum
    return functools.reduce(combine, each)


def _reasons(
    variable: xr.Variable, mask: xr.Variable | None, mode: str, samples: int | None
) -> xr.Variable:
    """Return the reason codes by the gaps of one variable."""
    if samples is None:
        outer, window = _dims(variable, mask), {}
    else:
        outer = {SAMPLES: samples}
        window = {dim: n for dim, n in variable.sizes.items() if dim != SAMPLES}
    sizes = outer | window
    full = xr.Variable(tuple(sizes), np.broadcast_to(False, tuple(sizes.values())))
    used = [read_in_blocks(variable), *([] if mask is None else [mask])]
    result: xr.Variable = xr.apply_ufunc(
        _reasons_of_block,
        *(cubes.spread(one, full) for one in used),
        input_core_dims=[list(window)] * len(used),
        kwargs={"mode": mode, "window": len(window)},
        dask="parallelized",
        dask_gufunc_kwargs={"allow_rechunk": True},
        output_dtypes=[np.uint8],
    )
    return result


def _reasons_of_block(
    values: NDArray[Any], mask: NDArray[np.bool_] | None = None, *, mode: str, window: int
) -> NDArray[np.uint8]:
    """Return the reason codes of one block, whose last dims are the window."""
    cells = tuple(range(values.ndim - window, values.ndim))
    gaps = find_gaps(values)
    if mask is not None:
        inside = mask.any(cells)
        return np.where(inside, (gaps & mask).any(cells) * GAP, MASK).astype(np.uint8)
    lost = gaps.all(cells) if mode == "if_all_nan" else gaps.any(cells)
    return np.asarray(lost * GAP, np.uint8)
