"""CubeSplitter: the methods that scikit-learn expects of a splitter, and labels on cubes."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.display import PrintedAsCall
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, check_choice, check_whole
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.split_plan import TEST, TRAIN, Buffer, SplitPlan
from ml4cube.splits.buffers import cut_dims
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.folds.samples import Samples
from ml4cube.splits.label import CountInBlocks, check_name, check_parts, weigh_blocks, with_label
from ml4cube.splits.regions import check_recipe_size
from ml4cube.splits.strata import Strata, StratifyLike, class_counts
from ml4cube.splits.validity import ValidLike, valid_mask

Ints = NDArray[np.int64]


@dataclass(eq=False, repr=False, kw_only=True)
class CubeSplitter(PrintedAsCall, ABC):
    """Base of the splitters; use one of its subclasses.

    Parameters
    ----------
    cube : Dataset or DataArray, optional
        The cube that the samples come from.
    valid : str, list of str or DataArray, optional
        Valid cells.
    sample_size : mapping or list of (str, int), optional
        Cells that a sample covers.
    """

    cube: Cube | None = None
    valid: ValidLike | None = None
    sample_size: SizesLike | None = None

    _FEWEST_FOLDS: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Check the parameters that need no cube; `split` checks the others."""
        self._check()

    def split(
        self, X: Any, y: object = None, groups: Any = None
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Yield the train samples and the test samples of each fold.

        Parameters
        ----------
        X : array_like, DataFrame, Dataset or DataArray, samples first
            The samples. Their positions in the cube come from `groups`, if given. Otherwise
            from index levels, columns or coordinates of X that are named like the cube's dims
            ("lat") or positions ("lat_index"), such as those of ``ds.to_dataframe().dropna()``
            or a sample store. Otherwise the rows must be the cells of the splitter's cube, or
            its valid cells, in the order of its dims.
        y : object
            Ignored.
        groups : DataFrame, Dataset or mapping of str to array_like, optional
            Table with the columns described above.

        Yields
        ------
        tuple of ndarray of int
            Row numbers of the train part and of the test part. Samples in the buffer between
            them, and samples with cells of both, are in neither.

        Raises
        ------
        EmptyPartError
            If a part of a fold holds no sample.
        InvalidValueError
            If a parameter does not fit the cube, or samples lie outside it.
        InvalidTypeError
            If the positions of the samples are unknown.
        """
        self._check()
        samples = self._locate(X, groups)

        def count(grid: Grid, stratify: StratifyLike | None) -> tuple[Ints, Strata | None]:
            samples.check_known(cut_dims(grid))
            if stratify is None:
                return samples.count(grid), None
            mask = valid_mask(self.valid, samples.view)
            return samples.count(grid), class_counts(stratify, samples.view, grid, mask)

        for fold, (plan, _) in enumerate(self._folds(samples.view, count), start=1):
            samples.check_known([dim for dim, _ in plan.buffer])
            labels = samples.labels(plan)
            train, test = np.flatnonzero(labels == TRAIN), np.flatnonzero(labels == TEST)
            if not train.size or not test.size:
                raise EmptyPartError(
                    f"fold {fold} of {self!r} has {train.size} train and {test.size} test samples "
                    f"(of {samples.n}); use a smaller buffer or gap, smaller blocks or fewer folds"
                )
            yield train, test

    def split_cube(self, ds: Cube | None = None, *, name: str = "split") -> Iterator[xr.Dataset]:
        """Yield the cube with a split label for each fold, for the sampler.

        Parameters
        ----------
        ds : Dataset or DataArray, optional
            The cube; by default the splitter's own.
        name : str
            Name of the label.

        Yields
        ------
        Dataset
            The cube with a label as from `assign_block_split`: train 1, test 0, all other
            cells 255; lazy, with the recipe that rebuilds it.

        Raises
        ------
        EmptyPartError
            If a part of a fold holds no valid cell.
        InvalidValueError
            If a parameter does not fit the cube.
        """
        self._check()
        if ds is None:
            ds = self.cube
        if ds is None:
            raise InvalidTypeError(f"{self!r} has no cube; call split_cube(ds)")
        view = CubeView.of(ds)
        check_name(name, view)
        mask = valid_mask(self.valid, view)
        for plan, weights in self._folds(view, partial(weigh_blocks, view, mask)):
            if hasattr(self, "regions"):  # Their plans hold a label for each cell of the map.
                check_recipe_size(plan, "regions")
            check_parts(view, plan, weights, mask)
            yield with_label(view, plan, name, type(self).__name__)

    def get_n_splits(self, X: Any = None, y: object = None, groups: Any = None) -> int:
        """Return the number of folds.

        Parameters
        ----------
        X, y, groups : object
            As for `split`; only `LeaveRegionOut` uses them.

        Returns
        -------
        int
            Number of folds that `split` yields.
        """
        return int(self.n_splits)  # type: ignore[attr-defined]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters.

        Parameters
        ----------
        deep : bool
            Ignored; part of scikit-learn's protocol.

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
            The splitter itself.

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
        return list(inspect.signature(cls).parameters)

    def __sklearn_clone__(self) -> Self:
        """Clone without copying the cube, which a splitter never changes."""
        return type(self)(**self.get_params())

    def get_metadata_routing(self) -> Any:
        """Return scikit-learn's metadata request: `split` takes groups.

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
        for name, least in (("n_splits", self._FEWEST_FOLDS), ("seed", None)):
            if hasattr(self, name):
                check_whole(name, getattr(self, name), least)

    @abstractmethod
    def _folds(self, view: CubeView, count: CountInBlocks) -> Iterator[tuple[SplitPlan, Ints]]:
        """Yield the plan of each fold, and the samples or valid cells in each of its blocks."""

    def _time_dims(self) -> tuple[str, ...]:
        """Return the dims along which times locate samples even without a cube."""
        return ()

    def _locate(self, X: Any, groups: Any) -> Samples:
        return Samples.locate(X, groups, self.cube, self.valid, self.sample_size, self._time_dims())


def fold_plan(
    grid: Grid,
    labels: NDArray[np.uint8],
    weights: Ints,
    note: str,
    seed: int | None = None,
    buffer: Buffer = (),
    cyclic: tuple[str, ...] = (),
) -> SplitPlan:
    """Return the plan of a fold by the labels of its blocks, and the cells of each block."""
    train, test = (int(weights[labels.ravel() == code].sum()) for code in (TRAIN, TEST))
    share = test / max(train + test, 1)
    fractions = (("train", 1 - share), ("test", share))
    if seed is not None:
        seed = int(seed)
    return SplitPlan(grid, labels.tobytes(), seed, fractions, buffer, cyclic, note)


def plans_of_tests(
    grid: Grid,
    weights: Ints,
    tests: Sequence[NDArray[np.bool_]],
    seed: int,
    apart: tuple[Buffer, tuple[str, ...]],
) -> Iterator[tuple[SplitPlan, Ints]]:
    """Yield the plan of each fold by which blocks it tests; all others are train."""
    for fold, is_test in enumerate(tests, start=1):
        labels = np.where(is_test, TEST, TRAIN).astype(np.uint8)
        yield (
            fold_plan(grid, labels, weights, f"fold {fold} of {len(tests)}", seed, *apart),
            weights,
        )
