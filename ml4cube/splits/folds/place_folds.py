"""LeaveRegionOut, LeaveLocationOut and LeaveLocationTimeOut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.grid import Grid
from ml4cube.core.partition import check_enough, partition, starts_in_order
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, Buffer, SplitPlan
from ml4cube.cube.coordinates import TIME_NAMES
from ml4cube.splits.buffers import (
    BufferLike,
    CyclicLike,
    GapLike,
    cut_dims,
    plan_buffer,
    reaches_of,
)
from ml4cube.splits.cube import CubeView
from ml4cube.splits.folds.protocol import CubeSplitter, Ints, fold_plan, plans_of_tests
from ml4cube.splits.label import CountInBlocks
from ml4cube.splits.locations import location_grid
from ml4cube.splits.regions import MAX_MAP_CELLS, RegionMap
from ml4cube.splits.validity import count_by_block, valid_mask


@dataclass(eq=False, repr=False)
class LeaveRegionOut(CubeSplitter):
    """Leave one region out at a time: each region is tested once, the others are train.

    Parameters
    ----------
    regions : str or DataArray
        Region ids of any type on any of the cube's dims, or the name of a variable or
        coordinate of the cube that holds them; gaps belong to no region.
    cube : Dataset or DataArray, optional
        The cube that the samples come from. Without it, X or groups must hold positions
        ("lat_index"), as those of sample stores do.
    valid, sample_size : object
        As for `BlockKFold`.
    buffer : int, str, timedelta or mapping, optional
        Distance kept between train and test, taken from train, as for `assign_region_split`.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    background : {"excluded", "train"}
        Part of the cells without a region.

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

    regions: str | xr.DataArray
    _: KW_ONLY
    buffer: BufferLike | None = None
    cyclic: CyclicLike | None = None
    background: str = "excluded"

    def _check(self) -> None:
        check_choice("background", self.background, ("excluded", "train"))

    def get_n_splits(self, X: Any = None, y: object = None, groups: Any = None) -> int:
        """Return the number of regions that hold samples; without X, those with valid cells.

        Parameters
        ----------
        X : object
            As for `split`.
        y : object
            Ignored.
        groups : object
            As for `split`.

        Returns
        -------
        int
            Number of folds that `split` yields.
        """
        if X is None and groups is None:
            if self.cube is None:
                raise InvalidTypeError(
                    f"{self!r} has no cube; pass X to count its regions, or construct it with "
                    "cube=ds"
                )
            view = CubeView.of(self.cube)
            region_map = RegionMap.of(self.regions, view)
            counts = count_by_block(valid_mask(self.valid, view), region_map.grid)
        else:
            samples = self._locate(X, groups)
            region_map = RegionMap.of(self.regions, samples.view)
            counts = samples.count(region_map.grid)
        return int((region_map.sum(counts) > 0).sum())

    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        region_map = RegionMap.of(self.regions, view)
        cut = cut_dims(region_map.grid)
        apart = plan_buffer(self.buffer, None, self.cyclic, view, cut)
        weights, _ = count(region_map.grid, None)
        region_weights = region_map.sum(weights)
        check_enough(2, region_weights, f"regions of {region_map.name!r}")
        for region in np.flatnonzero(region_weights > 0):
            region_labels = np.full(region_weights.size, TRAIN, dtype=np.uint8)
            region_labels[region] = TEST
            labels = region_map.label(region_labels, self.background)
            note = f"region {region_map.ids[region]} of {region_map.name}"
            yield fold_plan(region_map.grid, labels, weights, note, None, *apart), weights


@dataclass(eq=False, repr=False)
class LeaveLocationOut(CubeSplitter):
    """K folds of whole locations, with all their times: each is tested once.

    They test a model that fills a map between the locations it was trained on (Meyer et al. 2018,
    *Improving performance of spatio-temporal machine learning models using forward feature
    selection and target-oriented validation*, Environmental Modelling and Software 101).

    Parameters
    ----------
    n_splits : int
        Number of folds, at least 2.
    dims : str or iterable of str, optional
        Dims of the locations; by default those of latitude and longitude, of x and y, or of the
        stations.
    cube, valid, sample_size, buffer, cyclic : object
        As for `BlockKFold`.
    seed : int
        Seed of the random order.

    See Also
    --------
    assign_location_split : one split, with a validation part.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "station"), np.zeros((2, 4)))})
    >>> folds = LeaveLocationOut(2, cube=ds)
    >>> [test.tolist() for train, test in folds.split(np.zeros((8, 1)))]
    [[2, 3, 6, 7], [0, 1, 4, 5]]
    """

    n_splits: int = 5
    dims: str | Iterable[str] | None = None
    _: KW_ONLY
    buffer: BufferLike | None = None
    cyclic: CyclicLike | None = None
    seed: int = 42

    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        grid = location_grid(view, self.dims)
        apart = plan_buffer(self.buffer, None, self.cyclic, view, cut_dims(grid))
        weights, _ = count(grid, None)
        fold = partition(weights, [1 / self.n_splits] * self.n_splits, int(self.seed))
        tests = [fold == k for k in range(self.n_splits)]
        yield from plans_of_tests(grid, weights, tests, self.seed, apart)


@dataclass(eq=False, repr=False)
class LeaveLocationTimeOut(CubeSplitter):
    """K folds of locations and periods of time: tested where and when nothing is trained on.

    Locations are dealt into K groups and time is cut into K periods. Fold k tests the locations of
    group k in period k, and trains on the other locations in the other periods; the other cells
    of these locations or of this period are left out (Meyer et al. 2018, as for
    `LeaveLocationOut`).

    Parameters
    ----------
    n_splits : int
        Number of folds, at least 2.
    dims : str or iterable of str, optional
        Dims of the locations, as for `LeaveLocationOut`.
    cube, valid, sample_size : object
        As for `BlockKFold`.
    buffer : int, str or mapping, optional
        Distance kept in space between train and test, taken from train.
    gap : int, str or timedelta, optional
        Distance kept in time.
    cyclic : str, list of str or bool, optional
        As for `BlockKFold`.
    seed : int
        Seed of the random order of locations.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "station"), np.zeros((2, 4)))})
    >>> folds = LeaveLocationTimeOut(2, cube=ds)
    >>> [(train.tolist(), test.tolist()) for train, test in folds.split(np.zeros((8, 1)))]
    [([4, 5], [2, 3]), ([2, 3], [4, 5])]
    """

    n_splits: int = 5
    dims: str | Iterable[str] | None = None
    _: KW_ONLY
    buffer: BufferLike | None = None
    gap: GapLike | None = None
    cyclic: CyclicLike | None = None
    seed: int = 42

    def _time_dims(self) -> tuple[str, ...]:
        return TIME_NAMES

    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        time_dim = view.time_dim("dim")
        location_dims = cut_dims(location_grid(view, self.dims))
        grid = Grid.blocks(view.sorted_sizes, dict.fromkeys([time_dim, *location_dims], 1))
        if len(grid) > MAX_MAP_CELLS:
            raise InvalidValueError(
                f"the cube has {len(grid)} cells along {[time_dim, *location_dims]}, but the "
                f"recipe can hold {MAX_MAP_CELLS}; use BlockKFold with blocks in space and time"
            )
        weights, _ = count(grid, None)
        shares = [1 / self.n_splits] * self.n_splits
        axis = grid.dims.index(time_dim)
        # One row for each time, one column for each location.
        by_time = np.moveaxis(weights.reshape(grid.counts), axis, 0)
        by_time = by_time.reshape(by_time.shape[0], -1)
        group = partition(by_time.sum(axis=0), shares, int(self.seed))
        ranks = view.time_ranks(time_dim)
        starts = starts_in_order(np.bincount(ranks, by_time.sum(axis=1)), shares, "time steps")
        period = np.searchsorted(starts, ranks, side="right")
        buffer, cyclic = plan_buffer(self.buffer, None, self.cyclic, view, location_dims)
        gap, _ = plan_buffer(None, self.gap, False, view, [time_dim], time_dim)
        others = [n for i, n in enumerate(grid.counts) if i != axis]
        for k in range(self.n_splits):
            # Buffer and gap are taken off each by itself, because neither places nor times of
            # the test part are in train.
            of_places = _label_along(view, location_dims, group == k, buffer, cyclic)
            of_times = _label_along(view, [time_dim], period == k, gap, ())[:, None]
            labels = np.full(by_time.shape, EXCLUDED, dtype=np.uint8)
            for code in (TRAIN, TEST):
                labels[(of_places == code) & (of_times == code)] = code
            in_order = np.moveaxis(labels.reshape(by_time.shape[0], *others), 0, axis)
            note = f"fold {k + 1} of {self.n_splits}"
            yield fold_plan(grid, in_order, weights, note, self.seed), weights


def _label_along(
    view: CubeView,
    dims: list[str],
    is_test: NDArray[np.bool_],
    buffer: Buffer,
    cyclic: tuple[str, ...],
) -> NDArray[np.uint8]:
    """Return the labels of places, or of times, with a buffer around those that test."""
    grid = Grid.blocks(view.sorted_sizes, dict.fromkeys(dims, 1))
    labels = np.where(is_test, TEST, TRAIN).astype(np.uint8)
    plan = SplitPlan(grid, labels.tobytes(), None, (("train", 0.5), ("test", 0.5)), buffer, cyclic)
    positions = {dim: np.arange(view.sizes[dim]) for dim in dims}
    positions = dict.fromkeys(view.sorted_sizes, np.arange(1)) | positions
    return plan.label_cells(positions, reaches_of(plan, view)).ravel()
