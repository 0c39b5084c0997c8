"""BlockKFold, BlockShuffleSplit and ForwardChaining."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import (
    InvalidValueError,
)
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.partition import hash_ids, partition, starts_in_order
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, SplitPlan, check_fractions
from ml4cube.cube.coordinates import TIME_NAMES
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.buffers import BufferLike, CyclicLike, GapLike, cut_dims, plan_buffer
from ml4cube.splits.cube import CubeView
from ml4cube.splits.folds.protocol import CubeSplitter, Ints, fold_plan, plans_of_tests
from ml4cube.splits.label import CountInBlocks
from ml4cube.splits.strata import StratifyLike


@dataclass(eq=False, repr=False)
class _BlockSplitter(CubeSplitter):
    """Base of the splitters of blocks."""

    n_splits: int = 5
    block_size: SizesLike | None = None
    _: KW_ONLY
    buffer: BufferLike | None = None
    gap: GapLike | None = None
    cyclic: CyclicLike | None = None
    stratify: StratifyLike | None = None
    seed: int = 42

    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        sizes = block_sizes(self.block_size, view, self._shares())
        grid = Grid.blocks(view.sorted_sizes, sizes)
        apart = plan_buffer(self.buffer, self.gap, self.cyclic, view, cut_dims(grid))
        weights, strata = count(grid, self.stratify)
        class_weights = None
        if strata:
            class_weights = strata.counts
        tests = self._test_blocks(weights, class_weights)
        yield from plans_of_tests(grid, weights, tests, self.seed, apart)

    @abstractmethod
    def _shares(self) -> list[float]:
        """Return the fraction of the cells in each fold, or in train and test."""

    @abstractmethod
    def _test_blocks(
        self, weights: Ints, class_weights: NDArray[np.float64] | None
    ) -> list[NDArray[np.bool_]]:
        """Return for each fold which blocks are the test part."""


@dataclass(eq=False, repr=False)
class BlockKFold(_BlockSplitter):
    """K folds of whole blocks: each block is tested once and is train in the other folds.

    The test folds partition the samples, or the valid cells, and are as equal in number as
    whole blocks allow. The fold of a block depends only on `seed`, the block's position and
    the numbers of samples.

    Parameters
    ----------
    n_splits : int
        Number of folds, at least 2.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim; a dim that is missing is not cut. By default few large blocks,
        with a warning, as for `assign_block_split`.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it, X or groups must hold positions
        ("lat_index"), as those of sample stores do.
    valid : str, list of str or DataArray, optional
        Valid cells, as for `assign_block_split`: the cells that `split_cube` counts and that the
        rows of X may be.
    sample_size : mapping or list of (str, int), optional
        Cells that a sample covers, starting at its origin; 1 by default. Sample stores know
        their own. Samples with cells of both train and test are left out.
    buffer : int, str, timedelta or mapping, optional
        Distance kept between train and test, taken from train, as for `assign_block_split`.
    gap : int, str or timedelta, optional
        The buffer along time.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    stratify : str, DataArray or mapping of str to int, optional
        Classes of the cube's cells that are spread evenly over folds, as for
        `assign_block_split`.
    seed : int
        Seed of the random order.

    See Also
    --------
    assign_block_split : one split, with a validation part.

    Examples
    --------
    >>> import xarray as xr
    >>> from sklearn.linear_model import Ridge
    >>> from sklearn.model_selection import cross_val_score
    >>> rng = np.random.default_rng(0)
    >>> ds = xr.Dataset({name: (("time", "lat"), rng.random((30, 12))) for name in ("a", "b")})
    >>> table = ds.to_dataframe()
    >>> folds = BlockKFold(5, {"time": 6, "lat": 4}, cube=ds)
    >>> cross_val_score(Ridge(), table[["a"]], table["b"], cv=folds).shape
    (5,)
    """

    def _shares(self) -> list[float]:
        return [1 / self.n_splits] * self.n_splits

    def _test_blocks(
        self, weights: Ints, class_weights: NDArray[np.float64] | None
    ) -> list[NDArray[np.bool_]]:
        fold = partition(weights, self._shares(), int(self.seed), class_weights)
        return [fold == k for k in range(self.n_splits)]


@dataclass(eq=False, repr=False)
class BlockShuffleSplit(_BlockSplitter):
    """Random splits of whole blocks into train and test, each drawn independently.

    Parameters
    ----------
    n_splits : int
        Number of splits, at least 1.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim; a dim that is missing is not cut. By default few large blocks,
        with a warning, as for `assign_block_split`.
    cube, valid, sample_size, buffer, gap, cyclic, stratify : object
        As for `BlockKFold`.
    seed : int
        Seed of the random orders.
    test_size : float
        Fraction of the samples, or valid cells, for testing; met as closely as whole blocks
        allow.

    Examples
    --------
    >>> import xarray as xr
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((30, 12)))})
    >>> draws = BlockShuffleSplit(3, {"time": 6, "lat": 4}, test_size=0.2, cube=ds)
    >>> [test.size for train, test in draws.split(np.zeros((360, 2)))]
    [72, 72, 72]
    """

    n_splits: int = 10
    _: KW_ONLY
    test_size: float = 0.2

    _FEWEST_FOLDS = 1

    def _check(self) -> None:
        super()._check()
        check_fractions(self.test_size, names=("test_size", "val"))
        if not 0 < self.test_size < 1:
            raise InvalidValueError(
                f"test_size must be above 0 and below 1, so that no part is empty, got "
                f"{self.test_size!r}"
            )

    def _shares(self) -> list[float]:
        return [1 - self.test_size, self.test_size]

    def _test_blocks(
        self, weights: Ints, class_weights: NDArray[np.float64] | None
    ) -> list[NDArray[np.bool_]]:
        seeds = hash_ids(int(self.seed), np.arange(self.n_splits)).tolist()
        return [partition(weights, self._shares(), seed, class_weights) == 1 for seed in seeds]


@dataclass(eq=False, repr=False)
class ForwardChaining(CubeSplitter):
    """Folds in order of time: train on the past and test on the period that follows.

    Time is cut into ``n_splits + 1`` periods with about equal numbers of samples. Fold k trains
    on the first k of them, without the `gap` before the next, which is the test part. All samples
    of one time are in one part; nothing later than the test part is used.

    Parameters
    ----------
    n_splits : int
        Number of folds, at least 1.
    gap : int, str or timedelta, optional
        Distance kept between train and test: time steps (``1``) or a time (``"30D"``). Train
        steps up to and including that distance from the test part are left out.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it, X or groups must hold times ("time")
        or positions ("time_index"). With times alone, the steps of `gap` and `sample_size` are
        the times that occur in them, so the gap is never too short.
    valid, sample_size : object
        As for `BlockKFold`.
    dim : str, optional
        The time dim; found by its dates or its name.

    See Also
    --------
    assign_time_split : one split, with a validation part.

    Examples
    --------
    >>> import xarray as xr
    >>> ds = xr.Dataset({"t2m": ("time", np.zeros(8))})
    >>> folds = ForwardChaining(3, gap=1, cube=ds)
    >>> [(train.tolist(), test.tolist()) for train, test in folds.split(np.zeros((8, 1)))]
    [([0], [2, 3]), ([0, 1, 2], [4, 5]), ([0, 1, 2, 3, 4], [6, 7])]
    """

    n_splits: int = 5
    gap: GapLike | None = None
    _: KW_ONLY
    dim: str | None = None

    _FEWEST_FOLDS = 1

    def _time_dims(self) -> tuple[str, ...]:
        if self.dim is None:
            return TIME_NAMES
        return (self.dim,)

    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        dim = view.time_dim("dim", self.dim)
        buffer, _ = plan_buffer(None, self.gap, False, view, [dim], dim)
        grid = Grid.blocks(view.sorted_sizes, {dim: 1})
        weights, _ = count(grid, None)
        time_ranks = view.time_ranks(dim)
        n_periods = self.n_splits + 1
        # The first time of every period but period 0.
        starts = starts_in_order(
            np.bincount(time_ranks, weights), [1 / n_periods] * n_periods, "time steps"
        )
        period = np.searchsorted(starts, time_ranks, side="right")
        gap_steps = dict(buffer).get(dim, 0)
        if isinstance(gap_steps, str):  # A duration, which is the plan's buffer.
            gap_steps = 0
        else:  # It counts distinct times, so it is part of the labels, not of the plan's buffer.
            buffer = ()
        for fold, test_start in enumerate(starts, start=1):
            labels = np.full(period.size, EXCLUDED, dtype=np.uint8)
            labels[period < fold] = TRAIN
            labels[period == fold] = TEST
            note = f"fold {fold} of {self.n_splits}"
            plan = fold_plan(grid, labels, weights, note, buffer=buffer)
            if gap_steps:
                labels[(labels == TRAIN) & (time_ranks >= test_start - gap_steps)] = EXCLUDED
                note += f", gap of {gap_steps}"
                plan = replace(plan, labels=labels.tobytes(), note=note)
            yield plan, weights
