"""Splitters with scikit-learn's protocol, which also label cubes fold by fold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.buffer import Reach
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_seed,
    check_whole,
)
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.partition import cut_in_order, hash_ids, partition
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, SplitPlan, check_fractions
from ml4cube.cube.coordinates import TIME_NAMES
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.buffers import BufferLike, parse_buffer, parse_cyclic, resolve_buffer
from ml4cube.splits.cube import CubeView
from ml4cube.splits.folds.protocol import CubeSplitter, Fold, Ints, Weigh
from ml4cube.splits.label import Cube
from ml4cube.splits.regions import RegionMap
from ml4cube.splits.strata import StratifyLike
from ml4cube.splits.validity import ValidLike, valid_mask


class _BlockSplitter(CubeSplitter):
    """What the splitters of blocks share."""

    n_splits: int
    block_size: SizesLike | None
    buffer: BufferLike | None
    gap: Any
    cyclic: Any
    stratify: StratifyLike | None
    seed: int

    def _dims(self) -> tuple[str, ...]:
        named: list[str] = []
        given: Any
        for given in (self.block_size, self.buffer):
            with contextlib.suppress(TypeError, ValueError):  # no sizes by dim: told when parsed
                named += [str(dim) for dim in dict(given)]
        return tuple(dict.fromkeys(named))

    def _folds(self, view: CubeView, weigh: Weigh) -> Iterator[Fold]:
        sizes = block_sizes(self.block_size, view, self._shares())
        grid = Grid.blocks(view.canonical, sizes)
        cut = [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]
        keep_away = parse_buffer(self.buffer, self.gap, view, cut)
        wraps = parse_cyclic(self.cyclic, view, cut)
        reaches = resolve_buffer(keep_away, wraps, view)
        weights, classes = weigh(grid)
        for fold, test in enumerate(self._tests(weights, classes), start=1):
            share = float(weights[test].sum() / weights.sum())
            plan = SplitPlan(
                grid=grid,
                labels=np.where(test, TEST, TRAIN).astype(np.uint8).tobytes(),
                seed=int(self.seed),
                fractions=(("train", 1 - share), ("test", share)),
                buffer=keep_away,
                cyclic=wraps,
                note=f"fold {fold} of {self.n_splits}",
            )
            yield plan, reaches

    def _shares(self) -> list[float]:
        """Shares of the blocks that are dealt out."""
        raise NotImplementedError

    def _tests(
        self, weights: Ints, classes: NDArray[np.float64] | None
    ) -> Iterator[NDArray[np.bool_]]:
        """Whether each block tests, fold by fold."""
        raise NotImplementedError


class BlockKFold(_BlockSplitter):
    """K folds of whole blocks: every block tests once, and trains in the other folds.

    The test folds partition the samples, or the valid cells, and are as equal in number as
    whole blocks allow. Which block is in which fold depends on `seed`, the block's place and
    the numbers of samples alone.

    Parameters
    ----------
    n_splits : int
        Folds, 2 or more.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim; a dim that is missing is not cut. By default few large blocks,
        with a warning, as for `assign_block_split`.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it X or groups must hold positions
        ("lat_index"), as those of sample stores do.
    buffer : int, str, timedelta or mapping, optional
        What must lie between train and test, taken from train, as for `assign_block_split`.
    gap : int, str or timedelta, optional
        The buffer along time.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    stratify : str, DataArray or mapping of str to int, optional
        Classes of the cube's cells that are shared out evenly, as for `assign_block_split`.
    valid : str, list of str or DataArray, optional
        Valid cells, as for `assign_block_split`: what `split_cube` counts, and what the rows
        of X may be.
    sample_size : mapping or list of (str, int), optional
        Cells that a sample covers, from its origin on; 1 by default. Sample stores know
        their own. Samples with cells of train and test are left out.
    seed : int
        Seed of the random order.

    See Also
    --------
    assign_block_split : one split, with a validation part.

    Examples
    --------
    >>> from sklearn.linear_model import Ridge
    >>> from sklearn.model_selection import cross_val_score
    >>> rng = np.random.default_rng(0)
    >>> ds = xr.Dataset({name: (("time", "lat"), rng.random((30, 12))) for name in ("a", "b")})
    >>> table = ds.to_dataframe()
    >>> folds = BlockKFold(5, {"time": 6, "lat": 4}, cube=ds.assign_coords(lat=range(12)))
    >>> cross_val_score(Ridge(), table[["a"]], table["b"], cv=folds).shape
    (5,)
    """

    def __init__(
        self,
        n_splits: int = 5,
        block_size: SizesLike | None = None,
        *,
        cube: Cube | None = None,
        buffer: BufferLike | None = None,
        gap: Any = None,
        cyclic: Any = None,
        stratify: StratifyLike | None = None,
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
        seed: int = 42,
    ) -> None:
        """Store the parameters; those that need the cube are checked by `split`."""
        self.n_splits = n_splits
        self.block_size = block_size
        self.cube = cube
        self.buffer = buffer
        self.gap = gap
        self.cyclic = cyclic
        self.stratify = stratify
        self.valid = valid
        self.sample_size = sample_size
        self.seed = seed
        self._check()

    def _check(self) -> None:
        check_whole("n_splits", self.n_splits, 2)
        check_seed(self.seed)

    def _shares(self) -> list[float]:
        return [1 / self.n_splits] * self.n_splits

    def _tests(
        self, weights: Ints, classes: NDArray[np.float64] | None
    ) -> Iterator[NDArray[np.bool_]]:
        _check_folds(self.n_splits, weights, "blocks")
        fold = partition(weights, self._shares(), int(self.seed), classes)
        for k in range(self.n_splits):
            yield fold == k


class BlockShuffleSplit(_BlockSplitter):
    """Random splits of whole blocks into train and test, each drawn anew.

    Parameters
    ----------
    n_splits : int
        Splits, 1 or more.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim; a dim that is missing is not cut. By default few large blocks,
        with a warning, as for `assign_block_split`.
    test_size : float
        Fraction of the samples, or valid cells, for testing, met as closely as whole blocks
        allow.
    cube, buffer, gap, cyclic, stratify, valid, sample_size : object
        As for `BlockKFold`.
    seed : int
        Seed of the random orders.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((30, 12)))})
    >>> draws = BlockShuffleSplit(3, {"time": 6, "lat": 4}, test_size=0.2, cube=ds)
    >>> [test.size for train, test in draws.split(np.zeros((360, 2)))]
    [72, 72, 72]
    """

    def __init__(
        self,
        n_splits: int = 10,
        block_size: SizesLike | None = None,
        *,
        test_size: float = 0.2,
        cube: Cube | None = None,
        buffer: BufferLike | None = None,
        gap: Any = None,
        cyclic: Any = None,
        stratify: StratifyLike | None = None,
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
        seed: int = 42,
    ) -> None:
        """Store the parameters; those that need the cube are checked by `split`."""
        self.n_splits = n_splits
        self.block_size = block_size
        self.test_size = test_size
        self.cube = cube
        self.buffer = buffer
        self.gap = gap
        self.cyclic = cyclic
        self.stratify = stratify
        self.valid = valid
        self.sample_size = sample_size
        self.seed = seed
        self._check()

    def _check(self) -> None:
        check_whole("n_splits", self.n_splits, 1)
        check_seed(self.seed)
        check_fractions(self.test_size, 0.0, ("test_size", "val"))
        if not 0 < self.test_size < 1:
            raise InvalidValueError(
                f"test_size={self.test_size!r} leaves a part empty; give a fraction above 0 and "
                "below 1"
            )

    def _shares(self) -> list[float]:
        return [1 - self.test_size, self.test_size]

    def _tests(
        self, weights: Ints, classes: NDArray[np.float64] | None
    ) -> Iterator[NDArray[np.bool_]]:
        _check_folds(2, weights, "blocks")
        for seed in hash_ids(int(self.seed), np.arange(self.n_splits)).tolist():
            yield partition(weights, self._shares(), seed, classes) == 1


class ForwardChaining(CubeSplitter):
    """Train on the past, test on what follows, and move on in time.

    Time is cut into ``n_splits + 1`` stretches of about equally many samples. Fold k trains
    on the first k of them, without the `gap` before the next, which it tests on. All samples
    of one time are in one part; nothing later than the test part is used.

    Parameters
    ----------
    n_splits : int
        Folds, 1 or more.
    gap : int, str or timedelta, optional
        What must lie between train and test: time steps (``1``), or a time (``"30D"``); train
        steps up to and including that distance from the test part are left out.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it X or groups must hold times ("time")
        or positions ("time_index"); the steps, of `sample_size` too, are then those that occur
        in them, which is never too few.
    dim : str, optional
        The time dim; found by its dates or its name.
    valid, sample_size : object
        As for `BlockKFold`.

    See Also
    --------
    assign_time_split : one split, with a validation part.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": ("time", np.zeros(8))})
    >>> folds = ForwardChaining(3, gap=1, cube=ds)
    >>> [(train.tolist(), test.tolist()) for train, test in folds.split(np.zeros((8, 1)))]
    [([0], [2, 3]), ([0, 1, 2], [4, 5]), ([0, 1, 2, 3, 4], [6, 7])]
    """

    _times_alone = True

    def __init__(
        self,
        n_splits: int = 5,
        gap: Any = None,
        *,
        cube: Cube | None = None,
        dim: str | None = None,
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
    ) -> None:
        """Store the parameters; those that need the cube are checked by `split`."""
        self.n_splits = n_splits
        self.gap = gap
        self.cube = cube
        self.dim = dim
        self.valid = valid
        self.sample_size = sample_size
        self._check()

    def _check(self) -> None:
        check_whole("n_splits", self.n_splits, 1)

    def _dims(self) -> tuple[str, ...]:
        return TIME_NAMES if self.dim is None else (self.dim,)

    def _folds(self, view: CubeView, weigh: Weigh) -> Iterator[Fold]:
        dim = view.time_dim("dim") if self.dim is None else self.dim
        if dim not in view.dims:
            raise InvalidValueError(f"dim={dim!r} is no dim of the cube, it has {view.dims}")
        by_dim = None if self.gap is None else {dim: self.gap}
        keep_away = parse_buffer(by_dim, None, view, [dim], "gap")
        reaches = resolve_buffer(keep_away, (), view)
        grid = Grid.blocks(view.canonical, {dim: 1})
        weights, _ = weigh(grid)
        moment = view.moments(dim)
        by_moment = np.bincount(moment, weights).astype(np.float64)
        _check_folds(self.n_splits + 1, by_moment, "time steps")
        heavy = np.flatnonzero(by_moment > 0)
        stretches = self.n_splits + 1
        stretch = cut_in_order(by_moment[heavy], [1 / stretches] * stretches)
        starts = heavy[np.searchsorted(stretch, np.arange(1, stretches))]
        of_step = np.searchsorted(starts, moment, side="right")
        # a gap in steps counts times, of which some may stand on the axis twice
        steps = dict(keep_away).get(dim)
        steps = steps if isinstance(steps, int) else 0
        if steps:
            keep_away, reaches = (), ()
        for fold in range(1, stretches):
            labels = np.where(of_step < fold, TRAIN, np.where(of_step == fold, TEST, EXCLUDED))
            labels[(labels == TRAIN) & (moment >= starts[fold - 1] - steps)] = EXCLUDED
            held = weights[of_step == fold].sum() / weights[of_step <= fold].sum()
            plan = SplitPlan(
                grid=grid,
                labels=labels.astype(np.uint8).tobytes(),
                fractions=(("train", 1 - float(held)), ("test", float(held))),
                buffer=keep_away,
                note=f"fold {fold} of {self.n_splits}" + (f", gap of {steps}" if steps else ""),
            )
            _check_gap(plan, reaches, weights, dim, self.gap, fold)
            yield plan, reaches


class LeaveRegionOut(CubeSplitter):
    """Leave one region out at a time: each tests once, the others train.

    Parameters
    ----------
    regions : str or DataArray
        Region ids of any type on any of the cube's dims, or the name of a variable or
        coordinate of the cube that holds them; gaps belong to no region.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it X or groups must hold positions
        ("lat_index"), as those of sample stores do.
    buffer : int, str, timedelta or mapping, optional
        What must lie between train and test, taken from train, as for `assign_region_split`.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    background : {"excluded", "train"}
        What becomes of cells without a region.
    valid, sample_size : object
        As for `BlockKFold`.

    See Also
    --------
    assign_region_split : one split, with a validation part.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((2, 4)))})
    >>> biome = xr.DataArray(["bog", "bog", "fen", "heath"], dims="lat")
    >>> folds = LeaveRegionOut(biome, cube=ds)
    >>> [test.tolist() for train, test in folds.split(np.zeros((8, 1)))]
    [[0, 1, 4, 5], [2, 6], [3, 7]]
    """

    def __init__(
        self,
        regions: str | xr.DataArray,
        *,
        cube: Cube | None = None,
        buffer: BufferLike | None = None,
        cyclic: Any = None,
        background: str = "excluded",
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
    ) -> None:
        """Store the parameters; those that need the cube are checked by `split`."""
        self.regions = regions
        self.cube = cube
        self.buffer = buffer
        self.cyclic = cyclic
        self.background = background
        self.valid = valid
        self.sample_size = sample_size
        self._check()

    def _check(self) -> None:
        check_choice("background", self.background, ("excluded", "train"))

    def _dims(self) -> tuple[str, ...]:
        if isinstance(self.regions, xr.DataArray):
            return tuple(str(dim) for dim in self.regions.dims)
        return ()

    def get_n_splits(self, X: Any = None, y: object = None, groups: Any = None) -> int:
        """Count the regions that hold samples; without X, those that hold valid cells.

        Parameters
        ----------
        X : object
            As for `split`.
        y : object
            Ignored.
        groups : object
            As X.

        Returns
        -------
        int
            Folds that `split` gives.
        """
        if X is None and groups is None:
            if self.cube is None:
                raise InvalidTypeError(f"{self!r} has no cube; give X to count regions, or cube=ds")
            view = CubeView.of(self.cube)
            mask = None if self.valid is None else valid_mask(self.valid, view)
            _, held = RegionMap.of(self.regions, view).weigh(mask)
        else:
            samples = self._locate(X, groups)
            region_map = RegionMap.of(self.regions, samples.view)
            held = region_map.sum(samples.count(region_map.grid))
        return int((held > 0).sum())

    def _folds(self, view: CubeView, weigh: Weigh) -> Iterator[Fold]:
        region_map = RegionMap.of(self.regions, view)
        keep_away = parse_buffer(self.buffer, None, view, region_map.dims)
        wraps = parse_cyclic(self.cyclic, view, region_map.dims)
        reaches = resolve_buffer(keep_away, wraps, view)
        weights, _ = weigh(region_map.grid)
        held = region_map.sum(weights)
        _check_folds(2, held, f"regions of {region_map.called!r}")
        for region in np.flatnonzero(held > 0):
            of_region = np.full(held.size, TRAIN, dtype=np.uint8)
            of_region[region] = TEST
            labels = region_map.label(of_region, TRAIN if self.background == "train" else EXCLUDED)
            share = held[region] / weights[labels != EXCLUDED].sum()
            plan = SplitPlan(
                grid=region_map.grid,
                labels=labels.tobytes(),
                fractions=(("train", 1 - float(share)), ("test", float(share))),
                buffer=keep_away,
                cyclic=wraps,
                note=f"region {region_map.ids[region]} of {region_map.called}",
            )
            yield plan, reaches


def _check_gap(
    plan: SplitPlan, reaches: tuple[Reach, ...], weights: Ints, dim: str, gap: Any, fold: int
) -> None:
    """Refuse a gap that takes the whole train part of a fold."""
    steps = {d: np.arange(n if d == dim else 1) for d, n in plan.cube_shape.items()}
    left = plan.label_cells(steps, reaches).ravel() == TRAIN
    if not (weights[left] > 0).any():
        raise EmptyPartError(
            f"gap={gap!r} takes every time step of the train part of fold {fold}; use a shorter "
            "gap or fewer folds"
        )


def _check_folds(
    folds: int, weights: NDArray[np.int64] | NDArray[np.float64], of_what: str
) -> None:
    usable = int((weights > 0).sum())
    if usable < folds:
        raise EmptyPartError(
            f"{folds} parts are needed, and {usable} of {weights.size} {of_what} hold samples or "
            "valid cells; use fewer folds or smaller blocks"
        )
