"""The `split` label of a cube: made lazily from a plan, and rebuilt from its recipe."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, caller_level
from ml4cube.core.grid import Grid
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import (
    EXCLUDED,
    PARTS,
    TRAIN,
    CellPlan,
    Labels,
    SplitPlan,
    label_box,
)
from ml4cube.cube.masks_and_labels import NAME_ATTR, RECIPE_ATTR, is_label
from ml4cube.splits.block_sizes import ADVICE_FOR_SAMPLES
from ml4cube.splits.buffers import cut_dims, reaches_of
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.strata import Strata, StratifyLike, class_counts
from ml4cube.splits.validity import Counts, ValidLike, count_by_block, slabs, valid_mask

RECIPE_FORMAT = 1

# Counts the valid cells of each block of a grid, and those of each class of `stratify`.
CountInBlocks = Callable[[Grid, StratifyLike | None], tuple[Counts, Strata | None]]
# A way of splitting: returns the plan for a cube, and the valid cells of each of its blocks.
Way = Callable[[CubeView, CountInBlocks], tuple[SplitPlan, Counts]]

_SMALLER_BUFFER = "use a smaller buffer, larger blocks or a smaller test fraction"


def apply_split(ds: Cube, recipe: str | Mapping[str, Any], *, name: str = "split") -> xr.Dataset:
    """Rebuild a split label from its recipe.

    Parameters
    ----------
    ds : Dataset or DataArray
        A cube with the dims and lengths of the one that was split, in any dim order and any
        chunking. Coordinates are needed if the buffer is a time or in kilometres.
    recipe : str or mapping
        The value of ``ds.split.attrs["ml4cube_split"]``, as JSON or as a dict.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the same label, bitwise equal.

    Raises
    ------
    InvalidValueError
        If it is not a split recipe, or was made for a cube of another shape or with other
        coordinates (reversed, shifted, other years).

    Examples
    --------
    >>> from ml4cube.splits import assign_block_split
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((20, 8)))})
    >>> label = assign_block_split(ds, {"time": 5}).split
    >>> bool((apply_split(ds, label.attrs["ml4cube_split"]).split == label).all())
    True
    """
    view = CubeView.of(ds)
    check_name(name, view)
    plan, made_by, coord_ends = read_recipe(recipe)
    if plan.cube_shape != view.sorted_sizes:
        raise InvalidValueError(
            f"the recipe is for a cube of {plan.cube_shape}, but this cube has "
            f"{view.sorted_sizes}; select the same cells, or make a new split"
        )
    _check_coord_ends(coord_ends, view)
    return with_label(view, plan, name, made_by)


def add_label(
    ds: Cube,
    way: Way,
    made_by: str,
    name: str,
    valid: ValidLike | None,
    advice: str = _SMALLER_BUFFER,
) -> xr.Dataset:
    """Add the label of a way of splitting, which the function `made_by` offers, to a cube."""
    view = CubeView.of(ds)
    check_name(name, view)
    mask = valid_mask(valid, view)
    plan, weights = way(view, partial(weigh_blocks, view, mask))
    check_parts(view, plan, weights, mask, advice)
    return with_label(view, plan, name, made_by)


def weigh_blocks(
    view: CubeView, mask: xr.DataArray, grid: Grid, stratify: StratifyLike | None
) -> tuple[Counts, Strata | None]:
    """Count the valid cells of each block and of each class in it; read the data once."""
    if stratify is None:
        return count_by_block(mask, grid), None
    strata = class_counts(stratify, view, grid, mask)
    return strata.weights, strata


def check_parts(
    view: CubeView,
    plan: SplitPlan,
    weights: Counts,
    mask: xr.DataArray,
    advice: str = _SMALLER_BUFFER,
) -> None:
    """Refuse a plan of which a part holds no valid cell, also once the buffer is taken off."""
    labels = plan.table.ravel()
    parts = dict(plan.fractions)
    for part in parts:
        if part != "train" and not weights[labels == PARTS[part]].any():
            raise EmptyPartError(f"the {part} part would hold no valid cell; {advice}")
    if "train" in parts and not _keeps_train(view, plan, weights, mask):
        raise EmptyPartError(
            f"the gap or buffer takes every valid cell of the train part; {advice}"
        )


def _keeps_train(view: CubeView, plan: SplitPlan, weights: Counts, mask: xr.DataArray) -> bool:
    """Return whether some valid cell is in train once the buffer is taken off."""
    reaches = reaches_of(plan, view)
    if not reaches:
        return bool(weights[plan.table.ravel() == TRAIN].any())
    for box in slabs(plan.cube_shape):
        positions = {dim: np.arange(s.start, s.stop) for dim, s in box.items()}
        labels = plan.label_cells(positions, reaches)
        train_cells = xr.DataArray(labels == TRAIN, dims=plan.grid.dims)
        in_box = {dim: s for dim, s in box.items() if dim in mask.dims}
        if (train_cells & mask.isel(in_box)).any():
            return True
    return False


def with_label(view: CubeView, plan: SplitPlan | CellPlan, name: str, made_by: str) -> xr.Dataset:
    """Add the label of a plan to its cube, lazily if the cube is chunked."""
    _warn_of_overlapping_samples(view, plan)
    look_up = _look_up_labels(view, plan)
    labels: Any
    if view.chunks is None:
        labels = np.empty(tuple(view.sizes.values()), dtype=np.uint8)
        for box in slabs(view.sizes):  # A buffer needs more memory than the labels.
            cells = [np.arange(s.start, s.stop) for s in box.values()]
            labels[tuple(box.values())] = look_up(*cells)
    else:
        labels = _lazy_labels(look_up, view.dims, view.chunks)
    recipe = {
        "format": RECIPE_FORMAT,
        "made_by": made_by,
        "plan": json.loads(plan.to_json()),
        "ends": _coord_ends(view),
    }
    attrs = {
        "long_name": "part of a train/test split",
        "flag_values": [TRAIN, PARTS["test"], PARTS["val"], EXCLUDED],
        "flag_meanings": "train test val excluded",
        RECIPE_ATTR: json.dumps(recipe),
        NAME_ATTR: name,
    }
    return view.ds.assign({name: (view.dims, labels, attrs)})


def _warn_of_overlapping_samples(view: CubeView, plan: SplitPlan | CellPlan) -> None:
    """Warn if samples of a store are split although their windows overlap in the cube."""
    spec = view.ds.attrs.get("spec")
    if not isinstance(spec, Mapping) or "stride" not in spec or SAMPLE_DIM not in view.dims:
        return
    windows = zip(spec["dims"], spec["size"], spec["stride"], strict=True)
    cells = {dim: size - stride for dim, size, stride in windows}
    if any(cells.values()) and (isinstance(plan, CellPlan) or SAMPLE_DIM in cut_dims(plan.grid)):
        warnings.warn(
            f"the samples are windows that overlap by {cells} cells, and are split by their order "
            f"in the store. {ADVICE_FOR_SAMPLES}",
            UserWarning,
            stacklevel=caller_level(),
        )


def _look_up_labels(view: CubeView, plan: SplitPlan | CellPlan) -> partial[Labels]:
    """Return the function that looks up the labels of a box of cells of the cube."""
    return partial(label_box, dims=view.dims, plan=plan, reaches=reaches_of(plan, view))


def _lazy_labels(
    look_up: partial[Labels], dims: tuple[str, ...], chunks: Mapping[Any, tuple[int, ...]]
) -> Any:
    """Return labels as a dask array; its name depends on plan, reaches and chunks."""
    # Stores hold the name, to tell calls apart, so it must not change: dask names a partial
    # otherwise than its function and arguments.
    positions_and_axes: list[Any] = []
    for axis, dim in enumerate(dims):
        positions = np.arange(sum(chunks[dim]))
        lazy = da.from_array(positions, chunks=(chunks[dim],))  # type: ignore[no-untyped-call]
        positions_and_axes += [lazy, (axis,)]
    return da.blockwise(  # type: ignore[no-untyped-call]
        look_up.func,
        tuple(range(len(dims))),
        *positions_and_axes,
        **look_up.keywords,
        align_arrays=False,  # All arrays have the cube's chunks.
        dtype=np.uint8,
        meta=np.empty((0,) * len(dims), dtype=np.uint8),
    )


def label_lookup(ds: xr.Dataset, name: str) -> Callable[..., Labels] | None:
    """Return the function that computes a lazy label box by box.

    None if the label was changed, or the cube no longer has the coordinates that it was made with.
    """
    label = ds[name]
    dask_name = str(getattr(label.variable._data, "name", ""))
    if not dask_name.startswith("label_box-") or RECIPE_ATTR not in label.attrs:
        return None
    plan, _, _ = read_recipe(label.attrs[RECIPE_ATTR])
    view = CubeView.of(ds)
    if plan.cube_shape != view.sorted_sizes or label.dims != view.dims:
        return None
    try:
        look_up = _look_up_labels(view, plan)
    except InvalidValueError:  # A coordinate that the buffer needs was dropped.
        return None
    # Dask names an array by its inputs, so another name may mean other labels.
    lazy = _lazy_labels(look_up, view.dims, label.variable.chunksizes)
    if lazy.name == dask_name:
        return look_up
    return None


def check_name(name: str, view: CubeView) -> None:
    """Refuse a name that a label cannot have."""
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"name must be a string such as 'split', got {name!r}")
    if name in view.ds.dims or name in view.ds.coords:
        raise InvalidValueError(
            f"name={name!r} is a dim or coordinate of the cube; choose another name"
        )
    if name not in view.ds:
        return
    existing = view.ds[name]
    may_be_label = RECIPE_ATTR in existing.attrs or existing.dtype.kind in "biu"
    if not (may_be_label and is_label(name, existing.dtype, existing.attrs)):
        raise InvalidValueError(
            f"name={name!r} is a variable of the cube of dtype {existing.dtype}, not a split "
            f"label; choose another name, or rename it, e.g. ds.rename({name}='{name}_data')"
        )


def _coord_ends(view: CubeView) -> dict[str, list[float | str]]:
    """Return the first and last coordinate of each dim, which identify the cube."""
    ends = {}
    for dim in view.sorted_sizes:
        if dim in view.ds.coords:
            values = view.ds[dim].values
            ends[dim] = [_plain_value(values[0]), _plain_value(values[-1])]
    return ends


def _plain_value(value: Any) -> float | str:
    """Return a coordinate as JSON can hold it; durations in nanoseconds."""
    if isinstance(value, np.datetime64):
        return str(np.datetime_as_string(value, unit="s"))
    # This is a date of another calendar (cftime); pandas' periods have no `isoformat`.
    if hasattr(value, "hour") and hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="seconds"))
    if isinstance(value, np.timedelta64):
        value = value.astype("timedelta64[ns]").astype(np.int64)
    number = isinstance(value, int | float | np.integer | np.floating)
    if number and math.isfinite(value):
        return float(value)
    return str(value)


def _check_coord_ends(expected: Mapping[str, Any], view: CubeView) -> None:
    """Refuse a cube of the same shape with other coordinates."""
    all_ends: dict[str, Any] = _coord_ends(view)
    for dim in sorted(expected.keys() & all_ends.keys()):
        (first, last), ends = all_ends[dim], expected[dim]
        if any(isinstance(value, str) for value in (first, last, *ends)):
            same = [first, last] == ends
        else:  # A float32 coordinate may have become a float64.
            step = abs(last - first) / max(view.ds.sizes[dim] - 1, 1)
            tolerance = max(1e-3 * step, 1e-6 * abs(first), 1e-6 * abs(last))
            if step:  # Half a step or more would match the next cell.
                tolerance = min(tolerance, 0.4 * step)
            same = abs(first - ends[0]) <= tolerance and abs(last - ends[1]) <= tolerance
        if not same:
            raise InvalidValueError(
                f"the recipe is for a cube whose {dim!r} runs from {ends[0]} to {ends[1]}, but "
                f"here it runs from {first} to {last}; sort and select the same cells, or make a "
                "new split"
            )


def read_recipe(
    recipe: str | Mapping[str, Any],
) -> tuple[SplitPlan | CellPlan, str, Mapping[str, Any]]:
    """Return the plan in a recipe, the function that made it, and the ends of the coordinates."""
    if isinstance(recipe, str):
        try:
            recipe = json.loads(recipe)
        except json.JSONDecodeError as error:
            raise InvalidValueError(f"recipe must be JSON, got {recipe!r:.80} ({error})") from None
    if not isinstance(recipe, Mapping) or not isinstance(recipe.get("plan"), Mapping):
        raise InvalidValueError(
            f"recipe must be ds.split.attrs[{RECIPE_ATTR!r}], got {recipe!r:.80}"
        )
    if recipe.get("format") != RECIPE_FORMAT:
        raise InvalidValueError(
            f"the recipe has format {recipe.get('format')!r}, but this version of ml4cube reads "
            f"format {RECIPE_FORMAT}; use the version that wrote it"
        )
    kind: type[SplitPlan | CellPlan] = SplitPlan
    if recipe["plan"].get("kind") == "cells":
        kind = CellPlan
    plan = kind.from_json(json.dumps(recipe["plan"]))
    return plan, str(recipe.get("made_by", "apply_split")), recipe.get("ends", {})
