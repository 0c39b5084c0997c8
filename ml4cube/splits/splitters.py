"""Splitters with scikit-learn's protocol, which also label cubes fold by fold."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.buffer import Reach
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    check_choice,
)
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.partition import cut_in_order, hash_ids, partition
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, SplitPlan, check_fractions
from ml4cube.splits.assign import (
    block_sizes,
    check_name,
    check_seed,
    check_train_left,
    weigh_blocks,
    with_label,
)
from ml4cube.splits.buffers import BufferLike, parse_buffer, parse_cyclic, resolve_buffer
from ml4cube.splits.cube import TIME_NAMES, CubeView
from ml4cube.splits.regions import RegionMap, check_recipe_size
from ml4cube.splits.samples import Samples
from ml4cube.splits.strata import StratifyLike, class_counts
from ml4cube.splits.validity import ValidLike, valid_mask

Ints = NDArray[np.int64]
Cube = xr.Dataset | xr.DataArray
Fold = tuple[SplitPlan, tuple[Reach, ...]]
# Weights of the blocks of a grid, and of classes in them.
Weigh = Callable[[Grid], tuple[Ints, NDArray[np.float64] | None]]


class CubeSplitter:
    """What the splitters share; use one of its subclasses."""

    cube: Cube | None
    valid: ValidLike | None
    sample_size: SizesLike | None

    def split(
        self, X: Any, y: object = None, groups: Any = None
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Give the samples to train on and to test on, fold by fold.

        Parameters
        ----------
        X : array_like, DataFrame, Dataset or DataArray, samples first
            The samples. Where they lie is told by `groups`; else by index levels, columns or
            coordinates of X that are called like the cube's dims ("lat") or positions
            ("lat_index"), such as those of ``ds.to_dataframe().dropna()`` or a sample store;
            else the rows are the cells of the splitter's cube, or its valid cells, in the
            order of its dims.
        y : object
            Ignored.
        groups : DataFrame, Dataset or mapping of str to array_like, optional
            Columns as above, apart from X.

        Yields
        ------
        tuple of ndarray of int
            Rows of the train part and of the test part; samples in the buffer between them,
            and those with cells of both, are in neither.

        Raises
        ------
        EmptyPartError
            If a part of a fold holds no sample.
        InvalidValueError
            If a parameter does not fit the cube, or samples lie outside it.
        InvalidTypeError
            If nothing says where the samples lie.
        """
        self._check()
        samples = self._locate(X, groups)
        for fold, (plan, reaches) in enumerate(
            self._folds(samples.view, lambda grid: self._weigh_samples(samples, grid)), start=1
        ):
            samples.check_known([dim for dim, _ in plan.buffer])
            labels = samples.labels(plan, reaches)
            train, test = np.flatnonzero(labels == TRAIN), np.flatnonzero(labels == TEST)
            if not train.size or not test.size:
                raise EmptyPartError(
                    f"fold {fold} of {self!r} has {train.size} train and {test.size} test samples "
                    f"of {samples.n}; use a smaller buffer or gap, smaller blocks or fewer folds"
                )
            yield train, test

    def split_cube(self, ds: Cube | None = None, *, name: str = "split") -> Iterator[xr.Dataset]:
        """Label the cube fold by fold, for the sampler.

        Parameters
        ----------
        ds : Dataset or DataArray, optional
            The cube; by default the one that the splitter was made with.
        name : str
            Name of the label.

        Yields
        ------
        Dataset
            The cube with a label as `assign_block_split` makes it: train 1, test 0, the
            buffer and cells of neither 255; lazy, with the recipe that makes it again.

        Raises
        ------
        EmptyPartError
            If a part of a fold holds no valid cell.
        InvalidValueError
            If a parameter does not fit the cube.
        """
        self._check()
        ds = self.cube if ds is None else ds
        if ds is None:
            raise InvalidTypeError(f"{self!r} has no cube; write split_cube(ds), or give cube=ds")
        view = CubeView.of(ds)
        check_name(name, view)
        mask = None if self.valid is None else valid_mask(self.valid, view)
        weighed: dict[Grid, tuple[Ints, NDArray[np.float64] | None]] = {}

        def weigh(grid: Grid) -> tuple[Ints, NDArray[np.float64] | None]:
            weights, strata = weigh_blocks(view, grid, mask, getattr(self, "stratify", None))
            classes = None if strata is None else strata.counts.astype(np.float64)
            weighed[grid] = weights, classes
            return weighed[grid]

        for plan, reaches in self._folds(view, weigh):
            check_recipe_size(plan, str(getattr(self, "regions", "blocks")))
            check_train_left(plan, reaches, weighed[plan.grid][0], mask)
            yield with_label(view, plan, reaches, name, type(self).__name__)

    def get_n_splits(self, X: Any = None, y: object = None, groups: Any = None) -> int:
        """Give the number of folds.

        Parameters
        ----------
        X, y, groups : object
            As for `split`; they matter for `LeaveRegionOut` alone.

        Returns
        -------
        int
            Folds that `split` gives.
        """
        return int(self.n_splits)  # type: ignore[attr-defined]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Get the parameters.

        Parameters
        ----------
        deep : bool
            Ignored; scikit-learn passes it.

        Returns
        -------
        dict
            Value of each parameter.
        """
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters.

        Parameters
        ----------
        **params : object
            Parameters by name.

        Returns
        -------
        CubeSplitter
            Itself.

        Raises
        ------
        InvalidValueError
            If there is no such parameter, or a value is out of range.
        """
        for name in params:
            check_choice("parameter", name, self._names())
        for name, value in params.items():
            setattr(self, name, value)
        self._check()
        return self

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def __repr__(self) -> str:
        """Name the parameters that are not as by default."""
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if name == "self":
                continue
            value = getattr(self, name)
            if isinstance(value, xr.Dataset | xr.DataArray):
                sizes = ", ".join(f"{dim}: {n}" for dim, n in value.sizes.items())
                shown.append(f"{name}=<{type(value).__name__} {sizes}>")
            elif parameter.default is inspect.Parameter.empty or value != parameter.default:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __sklearn_clone__(self) -> Self:
        """Clone without copying the cube, which a splitter only looks at."""
        return type(self)(**self.get_params())

    def get_metadata_routing(self) -> Any:
        """Tell scikit-learn that `split` takes groups, where metadata routing is enabled.

        Returns
        -------
        sklearn.utils.metadata_routing.MetadataRequest
            The request.
        """
        from sklearn.utils.metadata_routing import MetadataRequest

        request = MetadataRequest(owner=self)
        request.split.add_request(param="groups", alias=True)
        return request

    def _check(self) -> None:
        """Check parameters that need no cube."""
        raise NotImplementedError

    def _folds(self, view: CubeView, weigh: Weigh) -> Iterator[Fold]:
        """Plan each fold, with its buffer resolved."""
        raise NotImplementedError

    def _dims(self) -> tuple[str, ...]:
        """Dims that the split is about, as far as the parameters say."""
        return ()

    def _locate(self, X: Any, groups: Any) -> Samples:
        return Samples.locate(
            X,
            groups,
            cube=self.cube,
            valid=self.valid,
            sample_size=self.sample_size,
            dims=self._dims(),
            ordered=isinstance(self, ForwardChaining),
        )

    def _weigh_samples(
        self, samples: Samples, grid: Grid
    ) -> tuple[Ints, NDArray[np.float64] | None]:
        cut = [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]
        samples.check_known(cut)
        stratify = getattr(self, "stratify", None)
        if stratify is None:
            return samples.count(grid), None
        mask = None if self.valid is None else valid_mask(self.valid, samples.view)
        strata = class_counts(stratify, samples.view, grid, mask)
        return samples.count(grid), strata.counts.astype(np.float64)


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
        grid = Grid.blocks(view.canonical, block_sizes(self.block_size, view))
        cut = [dim for dim, count in zip(grid.dims, grid.counts, strict=True) if count > 1]
        keep_away = parse_buffer(self.buffer, self.gap, view, cut)
        wraps = parse_cyclic(self.cyclic, view)
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
        Cells of a block by dim; a dim that is missing is not cut. By default the chunk sizes
        of the cube.
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
        _check_number("n_splits", self.n_splits, 2)
        check_seed(self.seed)

    def _tests(
        self, weights: Ints, classes: NDArray[np.float64] | None
    ) -> Iterator[NDArray[np.bool_]]:
        _check_folds(self.n_splits, weights, "blocks")
        fold = partition(weights, [1 / self.n_splits] * self.n_splits, int(self.seed), classes)
        for k in range(self.n_splits):
            yield fold == k


class BlockShuffleSplit(_BlockSplitter):
    """Random splits of whole blocks into train and test, each drawn anew.

    Parameters
    ----------
    n_splits : int
        Splits, 1 or more.
    block_size : mapping or list of (str, int), optional
        Cells of a block by dim; a dim that is missing is not cut. By default the chunk sizes
        of the cube.
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
        _check_number("n_splits", self.n_splits, 1)
        check_seed(self.seed)
        check_fractions(self.test_size, 0.0, ("test_size", "val"))
        if not 0 < self.test_size < 1:
            raise InvalidValueError(
                f"test_size={self.test_size!r} leaves a part empty; give a fraction above 0 and "
                "below 1"
            )

    def _tests(
        self, weights: Ints, classes: NDArray[np.float64] | None
    ) -> Iterator[NDArray[np.bool_]]:
        _check_folds(2, weights, "blocks")
        wanted = [1 - self.test_size, self.test_size]
        for seed in hash_ids(int(self.seed), np.arange(self.n_splits)).tolist():
            yield partition(weights, wanted, seed, classes) == 1


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
        or positions ("time_index"); the steps are then those that occur in them.
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
        _check_number("n_splits", self.n_splits, 1)

    def _dims(self) -> tuple[str, ...]:
        return tuple(sorted(TIME_NAMES, reverse=True)) if self.dim is None else (self.dim,)

    def _folds(self, view: CubeView, weigh: Weigh) -> Iterator[Fold]:
        dim = view.time_dim("dim") if self.dim is None else self.dim
        if dim not in view.dims:
            raise InvalidValueError(f"dim={dim!r} is no dim of the cube, it has {view.dims}")
        keep_away = parse_buffer(None if self.gap is None else {dim: self.gap}, None, view, [dim])
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
        X, groups : object
            As for `split`.
        y : object
            Ignored.

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
        wraps = parse_cyclic(self.cyclic, view)
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


def _check_number(argument: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError(f"{argument}={value!r} is a {type(value).__name__}; give an integer")
    if value < least:
        raise InvalidValueError(f"{argument}={value} is too few; give {least} or more")
