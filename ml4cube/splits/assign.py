"""assign_*_split: a cube becomes a cube with a `split` label, by blocks, cells or in time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.distance.buffer import AxisReach, Reach
from ml4cube.core.errors import EmptyPartError, InvalidValueError, check_seed
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.split_plan import TRAIN, CellPlan, SplitPlan, check_fractions
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.buffers import BufferLike, parse_buffer, parse_cyclic, resolve_buffer
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import Cube, check_name, with_label
from ml4cube.splits.label import label_lookup as label_lookup
from ml4cube.splits.strata import Strata, StratifyLike, class_counts
from ml4cube.splits.validity import Counts, ValidLike, count_by_block, slabs, valid_mask


def assign_block_split(
    ds: Cube,
    block_size: SizesLike | None = None,
    split: float = 0.8,
    *,
    val: float = 0.0,
    seed: int = 42,
    buffer: BufferLike | None = None,
    gap: Any = None,
    cyclic: Any = None,
    stratify: StratifyLike | None = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole blocks of a cube to train, validation and test, at random.

    Cells near to one another are alike; a block keeps them in one part, and `buffer` keeps a
    distance between the parts. Which block gets which part is a function of `seed` and the
    block's position alone: it does not depend on chunks, scheduler or the order of dims.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims. A DataArray becomes a Dataset of one variable.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim, in any order; a dim that is missing is not cut. The last block
        along a dim may be smaller. By default few large blocks, the same for any chunks: along
        the dims of the map or in long stretches of time, whole along every other dim, of whose
        cells at most 30 % touch another block where the cube is large enough.
    split : float
        Fraction of the cells for training; met as closely as whole blocks allow, before the
        buffer is taken off.
    val : float
        Fraction for validation; the test part gets the rest.
    seed : int
        Seed of the random order.
    buffer : int, str, timedelta or mapping, optional
        What must lie between train and the other parts, taken from train: cells along every
        cut dim (``2``), a time (``"30D"``), kilometres on the sphere between cell centres
        (``"150km"``), or any of them by dim (``{"time": "30D", "lat": "150km"}``). A train
        cell that is within the buffer of another part's cell along all dims (up to and
        including that distance) is excluded. Dims without a buffer may touch. Kilometres
        are one distance over latitude and longitude together, whichever of them it is given
        for; two that differ, or kilometres for one and cells for the other, are refused. So
        is a buffer along a dim that is not cut, where it could keep nothing apart.
    gap : int, str or timedelta, optional
        The buffer along time.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last. By default a longitude that goes
        all the way round; False for none.
    stratify : str, DataArray or mapping of str to int, optional
        Classes that are shared out by the same fractions, as nearly as blocks allow: the name
        of a class variable, a DataArray of classes (regions) on any of the cube's dims, the
        "season" (DJF, MAM, ...) or "month" of the time axis, or ``{"t2m": 4}`` for four
        quantile bins of a variable. Classes may be of any type, 256 at most; cells without a
        class (gaps) count for `split` and `val` alone. Read once, in bounded memory: quantile
        bins are exact up to half a million different values in blocks; beyond, values are rounded
        to as many leading binary digits as fit. A value lies in one bin, so a variable of
        many zeros has fewer bins.
    valid : str, list of str or DataArray, optional
        Cells that count for the fractions: a mask of bools, or variables whose gaps (NaN,
        ±inf, NaT) do not count. Reads them once. By default every cell counts.
    name : str
        Name of the label.

    Warns
    -----
    UserWarning
        If `block_size` is not given: which blocks were chosen, and how to choose better ones. If
        a class of `stratify` lies in too few blocks to give every part one.

    Returns
    -------
    Dataset
        The cube with the label added: uint8 on the cube's dims, train 1, test 0, val 2,
        excluded 255, lazy and chunked like the cube; in memory where the cube is, or is small.
        Its attrs say what the numbers mean and
        hold the recipe from which `apply_split` makes it again.

    Raises
    ------
    EmptyPartError
        If a part that is asked for would hold no valid cell.
    InvalidValueError
        If a dim is unknown, a size or a fraction is out of range, or a coordinate is missing, or
        in no order where a buffer lies along time.
    InvalidTypeError
        If an argument is of the wrong kind.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat", "lon"), np.zeros((20, 8, 8)))})
    >>> ds = assign_block_split(ds, {"time": 5, "lat": 4}, split=0.75)
    >>> float((ds.split == True).mean())
    0.75
    """
    view = CubeView.of(ds)
    check_name(name, view)
    seed = check_seed(seed)
    fractions = check_fractions(split, val)
    sizes = block_sizes(block_size, view, fractions.values())
    grid = Grid.blocks(view.canonical, sizes)
    cut = [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]
    keep_away = parse_buffer(buffer, gap, view, cut)
    wraps = parse_cyclic(cyclic, view, cut)
    reaches = resolve_buffer(keep_away, wraps, view)
    mask = None if valid is None else valid_mask(valid, view)
    weights, strata = weigh_blocks(view, grid, mask, stratify)
    plan = SplitPlan.assign(
        grid,
        weights,
        fractions,
        seed,
        classes=None if strata is None else strata.counts.astype(np.float64),
        buffer=keep_away,
        cyclic=wraps,
        note=None if strata is None else f"stratified by {strata.said}",
    )
    if strata is not None:
        strata.warn_of_missing(plan.table.ravel(), stacklevel=3)
    check_train_left(plan, reaches, weights, mask)
    return with_label(view, plan, reaches, name, "assign_block_split")


def assign_rand_split(
    ds: Cube, split: float = 0.8, *, val: float = 0.0, seed: int = 42, name: str = "split"
) -> xr.Dataset:
    """Assign single cells to train, validation and test, at random; neighbours leak.

    A test cell's neighbours, nearly equal to it, are then in the train part, and the test
    score promises more than the model holds. Use it to show that, or for cubes whose cells
    are independent; else `assign_block_split`.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims.
    split : float
        Fraction of the cells for training; met to one cell.
    val : float
        Fraction for validation; the test part gets the rest.
    seed : int
        Seed; a cell's part is a function of it and the cell's position alone.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the label added, as `assign_block_split` does.

    Warns
    -----
    UserWarning
        Always: that neighbours leak.

    Raises
    ------
    EmptyPartError
        If the cube has fewer cells than parts are asked for.
    InvalidValueError
        If a fraction is out of range.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("lat", "lon"), np.zeros((10, 10)))})
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     ds = assign_rand_split(ds, 0.9)
    >>> int((ds.split == False).sum())
    10
    """
    view = CubeView.of(ds)
    check_name(name, view)
    seed = check_seed(seed)
    fractions = check_fractions(split, val)
    plan = CellPlan(tuple(view.canonical.items()), tuple(fractions.items()), int(seed))
    warnings.warn(
        "assign_rand_split puts neighbouring cells, which are nearly equal, into different "
        "parts: the test score will flatter. Use assign_block_split with a buffer, "
        "assign_time_split or assign_region_split.",
        UserWarning,
        stacklevel=2,
    )
    return with_label(view, plan, (), name, "assign_rand_split")


def assign_time_split(
    ds: Cube,
    split: float = 0.8,
    *,
    val: float = 0.0,
    gap: Any = None,
    dim: str | None = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole time steps in order: train, gap, validation, test.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube; times in ascending or descending order.
    split : float
        Fraction of the cells for training, the earliest; the gap is taken off it.
    val : float
        Fraction for validation; the latest cells, the rest, are the test part.
    gap : int, str or timedelta, optional
        What must lie between train and the others: time steps (``1``) or a time (``"30D"``).
        Train steps up to and including that distance are excluded.
    dim : str, optional
        The time dim; found by its dates or its name.
    valid : str, list of str or DataArray, optional
        Cells that count for the fractions, as for `assign_block_split`.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the label added, as `assign_block_split` does; all cells of one time
        step share a part.

    Raises
    ------
    EmptyPartError
        If a part that is asked for would hold no valid cell, or the gap takes all of train.
    InvalidValueError
        If the dim is unknown, times are out of order, or a fraction is out of range.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": ("time", np.zeros(10))})
    >>> assign_time_split(ds, 0.6, val=0.2, gap=1).split.values.tolist()
    [1, 1, 1, 1, 1, 255, 2, 2, 0, 0]
    """
    view = CubeView.of(ds)
    check_name(name, view)
    fractions = check_fractions(split, val)
    dim = view.time_dim("dim") if dim is None else dim
    if dim not in view.dims:
        raise InvalidValueError(f"dim={dim!r} is no dim of the cube, it has {view.dims}")
    moment = view.moments(dim)
    keep_away = parse_buffer(None if gap is None else {dim: gap}, None, view, [dim], "gap")
    reaches = resolve_buffer(keep_away, (), view)
    grid = Grid.blocks(view.canonical, {dim: 1})
    mask = None if valid is None else valid_mask(valid, view)
    weights = count_by_block(mask, grid)
    if moment.max() + 1 == moment.size:
        forward = bool(moment[0] <= moment[-1])
        plan = SplitPlan.in_order(grid, weights, fractions, forward=forward, buffer=keep_away)
    else:
        plan = _in_order_of_times(grid, weights, fractions, moment, dim, keep_away)
    advice = f"use a smaller gap than {gap!r}, or a larger train fraction"
    check_train_left(plan, reaches, weights, mask, advice)
    return with_label(view, plan, reaches, name, "assign_time_split")


def _in_order_of_times(
    grid: Grid,
    weights: Counts,
    fractions: Mapping[str, float],
    moment: np.ndarray[Any, np.dtype[np.intp]],
    dim: str,
    keep_away: tuple[tuple[str, int | str], ...],
) -> SplitPlan:
    """Cut times into parts where some stand on the axis more than once."""
    by_time = np.bincount(moment, np.ravel(weights))
    times = Grid.blocks({dim: by_time.size}, {dim: 1})
    steps = tuple(pair for pair in keep_away if isinstance(pair[1], int))
    cut = SplitPlan.in_order(times, by_time, fractions, buffer=steps)
    reaches = [AxisReach.of_cells(dim, by_time.size, n) for _, n in steps if isinstance(n, int)]
    labels = cut.label_cells({dim: np.arange(by_time.size)}, reaches)[moment]
    # a gap in steps counts times and is in the labels; one in days is the same for equal times
    left = () if steps else keep_away
    return SplitPlan(grid, labels.tobytes(), None, cut.fractions, left)


def weigh_blocks(
    view: CubeView, grid: Grid, mask: xr.DataArray | None, stratify: StratifyLike | None
) -> tuple[Counts, Strata | None]:
    """Count the valid cells of each block, and those of each class; reads the data once."""
    if stratify is None:
        return count_by_block(mask, grid).ravel(), None
    strata = class_counts(stratify, view, grid, mask)
    if strata.weights is not None:
        return strata.weights, strata
    return count_by_block(mask, grid).ravel(), strata


def check_train_left(
    plan: SplitPlan,
    reaches: tuple[Reach, ...],
    weights: Any,
    mask: xr.DataArray | None,
    advice: str = "use a smaller buffer, larger blocks or a smaller test fraction",
) -> None:
    """Refuse a buffer that takes every valid cell of the train part."""
    train = np.flatnonzero((plan.table.ravel() == TRAIN) & (np.ravel(weights) > 0))
    if not train.size and dict(plan.fractions).get("train"):
        raise EmptyPartError(f"what is kept free beside the train part leaves none of it; {advice}")
    if not reaches:
        return
    # of many blocks the whole cube is looked through, which takes fewer steps
    boxes = [plan.grid.block(int(id)).slices for id in train] if train.size < 1000 else [{}]
    for within in boxes:
        for box in slabs(plan.cube_shape, within):
            positions = {dim: np.arange(s.start, s.stop) for dim, s in box.items()}
            left = plan.label_cells(positions, reaches) == TRAIN
            if mask is not None:
                inside = mask.isel({d: s for d, s in box.items() if d in mask.dims})
                left = left & _align(inside, plan.grid.dims)
            if left.any():
                return
    if train.size:
        kept_off = " and ".join(f"{value!r} along {dim!r}" for dim, value in plan.buffer)
        raise EmptyPartError(
            f"{kept_off} between train and the other parts takes every cell of the {train.size} "
            f"train blocks; {advice}"
        )


def _align(mask: xr.DataArray, dims: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Values with a length-1 axis for each dim that the mask lacks."""
    present = [dim for dim in dims if dim in mask.dims]
    index = tuple(slice(None) if dim in present else None for dim in dims)
    return np.asarray(mask.transpose(*present).values[index])
