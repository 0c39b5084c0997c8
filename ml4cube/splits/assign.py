"""assign_block_split, assign_rand_split, assign_time_split: add a `split` label to a cube."""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from ml4cube.core.errors import caller_level, check_whole
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.split_plan import EXCLUDED, TRAIN, CellPlan, SplitPlan, check_fractions
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.buffers import BufferLike, CyclicLike, GapLike, cut_dims, plan_buffer
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.label import CountInBlocks, add_label, check_name, with_label
from ml4cube.splits.strata import StratifyLike
from ml4cube.splits.validity import Counts, ValidLike


def assign_block_split(
    ds: Cube,
    block_size: SizesLike | None = None,
    split: float = 0.8,
    *,
    val: float = 0.0,
    seed: int = 42,
    buffer: BufferLike | None = None,
    gap: GapLike | None = None,
    cyclic: CyclicLike | None = None,
    stratify: StratifyLike | None = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole blocks of a cube to train, validation and test, at random.

    Neighbouring cells are alike. A block keeps them in one part, and `buffer` keeps a distance
    between the parts. The same arguments give the same parts under any chunks, scheduler or order
    of dims.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims. A DataArray becomes a Dataset of one variable.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim, in any order; a dim that is missing is not cut. The last block
        along a dim may be smaller. By default a few large blocks, the same for any chunks: cut
        along the dims of the map or into long periods of time, and whole along every other dim.
        At most 30 % of their cells touch another block if the cube is large enough.
    split : float
        Fraction of the cells for training; met as closely as whole blocks allow, before the
        buffer is taken off.
    val : float
        Fraction for validation; the test part gets the rest.
    seed : int
        Seed of the random order.
    buffer : int, str, timedelta or mapping, optional
        Distance kept between train and the other parts, taken from train: cells along every
        cut dim (``2``), a time (``"30D"``), kilometres on the sphere between cell centres
        (``"150km"``), or any of them by dim (``{"time": "30D", "lat": "150km"}``). A train
        cell that is within the buffer of another part's cell along all dims (up to and
        including that distance) is excluded. Dims without a buffer may touch. Kilometres
        are one distance over latitude and longitude together, whichever of them it is given
        for; two different distances, or kilometres for one and cells for the other, are refused.
        A buffer along a dim that is not cut is refused too, because it could separate nothing.
    gap : int, str or timedelta, optional
        The buffer along time.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last. By default a longitude that spans the
        globe; False for none.
    stratify : str, DataArray or mapping of str to int, optional
        Classes that are split by the same fractions, as nearly as blocks allow: the name
        of a class variable, a DataArray of classes (regions) on any of the cube's dims, the
        "season" (DJF, MAM, ...) or "month" of the time axis, or ``{"t2m": 4}`` for four
        quantile bins of a variable. Classes may be of any type, 256 at most; cells without a
        class (gaps) count only for `split` and `val`. The data are read once, in bounded memory.
        Quantile bins are exact up to half a million distinct values per block in total; beyond
        that, values are rounded to as many leading binary digits as fit. A value lies in one bin,
        so a variable with many zeros has fewer bins.
    valid : str, list of str or DataArray, optional
        Cells that count for the fractions: a mask of bools, or variables whose gaps (NaN,
        ±inf, NaT) do not count. They are read once. By default every cell counts.
    name : str
        Name of the label.

    Warns
    -----
    UserWarning
        If `block_size` is not given: names the blocks that were chosen, and how to choose better
        ones. If a class of `stratify` lies in too few blocks to be in every part. If the samples
        of a store with overlapping windows are split, so that parts may share cells.

    Returns
    -------
    Dataset
        The cube with the label added: uint8 on the cube's dims, train 1, test 0, val 2,
        excluded 255; lazy and chunked like the cube, or in memory if the cube is, or is small.
        Its attrs explain the numbers and hold the recipe from which `apply_split` rebuilds it.

    Raises
    ------
    EmptyPartError
        If a requested part would hold no valid cell.
    InvalidValueError
        If a dim is unknown, a size or a fraction is out of range, a coordinate is missing, or
        times are not sorted where a buffer lies along time.
    InvalidTypeError
        If an argument has the wrong type.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat", "lon"), np.zeros((20, 8, 8)))})
    >>> ds = assign_block_split(ds, {"time": 5, "lat": 4}, split=0.75)
    >>> float((ds.split == True).mean())
    0.75
    """
    seed = check_whole("seed", seed)
    fractions = check_fractions(split, val)

    def assign_blocks(view: CubeView, count: CountInBlocks) -> tuple[SplitPlan, Counts]:
        sizes = block_sizes(block_size, view, list(fractions.values()))
        grid = Grid.blocks(view.sorted_sizes, sizes)
        apart = plan_buffer(buffer, gap, cyclic, view, cut_dims(grid))
        weights, strata = count(grid, stratify)
        if strata is None:
            return SplitPlan.assign(grid, weights, fractions, seed, *apart), weights
        note = f"stratified by {strata.request}"
        plan = SplitPlan.assign(grid, weights, fractions, seed, *apart, note, strata.counts)
        strata.warn_of_missing(plan.table.ravel())
        return plan, weights

    return add_label(ds, assign_blocks, "assign_block_split", name, valid)


def assign_rand_split(
    ds: Cube, split: float = 0.8, *, val: float = 0.0, seed: int = 42, name: str = "split"
) -> xr.Dataset:
    """Assign single cells to train, validation and test, at random; neighbours leak.

    The neighbours of a test cell, which are nearly equal to it, are then in the train part, so
    the test score is too optimistic. Use this split to show that, or for cubes whose cells are
    independent. Otherwise use `assign_block_split`.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims.
    split : float
        Fraction of the cells for training; exact to one cell.
    val : float
        Fraction for validation; the test part gets the rest.
    seed : int
        Seed; the part of a cell depends only on it and the cell's position.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the label added, as `assign_block_split` does.

    Warns
    -----
    UserWarning
        Always: neighbours leak.

    Raises
    ------
    EmptyPartError
        If the cube has fewer cells than requested parts.
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
    seed = check_whole("seed", seed)
    fractions = check_fractions(split, val)
    plan = CellPlan(tuple(view.sorted_sizes.items()), tuple(fractions.items()), seed)
    warnings.warn(
        "assign_rand_split puts neighbouring cells, which are nearly equal, into different "
        "parts, so the test score will be too optimistic. Use assign_block_split with a buffer, "
        "assign_time_split or assign_region_split instead.",
        UserWarning,
        stacklevel=caller_level(),
    )
    return with_label(view, plan, name, "assign_rand_split")


def assign_time_split(
    ds: Cube,
    split: float = 0.8,
    *,
    val: float = 0.0,
    gap: GapLike | None = None,
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
        Fraction of the cells for training, the earliest; the gap is taken from it.
    val : float
        Fraction for validation; the rest, the latest cells, is the test part.
    gap : int, str or timedelta, optional
        Distance kept between train and the other parts: distinct times (``1``) or a time
        (``"30D"``). Train steps up to and including that distance are excluded.
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
        share a part.

    Raises
    ------
    EmptyPartError
        If a requested part would hold no valid cell, or the gap takes all of train.
    InvalidValueError
        If the dim is unknown, times are not sorted, or a fraction is out of range.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": ("time", np.zeros(10))})
    >>> assign_time_split(ds, 0.6, val=0.2, gap=1).split.values.tolist()
    [1, 1, 1, 1, 1, 255, 2, 2, 0, 0]
    """
    fractions = check_fractions(split, val)

    def assign_times(view: CubeView, count: CountInBlocks) -> tuple[SplitPlan, Counts]:
        time_dim = view.time_dim("dim", dim)
        ranks = view.time_ranks(time_dim)
        buffer, _ = plan_buffer(None, gap, False, view, [time_dim], time_dim)
        grid = Grid.blocks(view.sorted_sizes, {time_dim: 1})
        weights, _ = count(grid, None)
        # A time may have several steps, which share a part.
        distinct_times = Grid.blocks({time_dim: int(ranks.max()) + 1}, {time_dim: 1})
        time_plan = SplitPlan.in_order(distinct_times, np.bincount(ranks, weights), fractions)
        labels = time_plan.table[ranks]
        gap_steps = dict(buffer).get(time_dim)
        if isinstance(gap_steps, int) and len(distinct_times) < ranks.size:
            # The gap counts distinct times. A plan's buffer does so only along a dim whose own
            # coordinate holds times, so the gap becomes part of the labels.
            buffer = ()
            first_held_out = ranks[labels != TRAIN].min(initial=ranks.size + gap_steps)
            labels[(labels == TRAIN) & (ranks >= first_held_out - gap_steps)] = EXCLUDED
        return SplitPlan(grid, labels.tobytes(), None, time_plan.fractions, buffer), weights

    advice = f"use a smaller gap than {gap!r}, or a larger train fraction"
    return add_label(ds, assign_times, "assign_time_split", name, valid, advice)
