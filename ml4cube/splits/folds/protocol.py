"""What scikit-learn asks of a splitter, and labels on cubes beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.buffer import Reach
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, check_choice
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.split_plan import TEST, TRAIN, SplitPlan
from ml4cube.splits.assign import check_train_left, weigh_blocks
from ml4cube.splits.cube import CubeView
from ml4cube.splits.folds.samples import Samples
from ml4cube.splits.label import Cube, check_name, with_label
from ml4cube.splits.regions import check_recipe_size
from ml4cube.splits.strata import class_counts
from ml4cube.splits.validity import ValidLike, valid_mask

Ints = NDArray[np.int64]
Fold = tuple[SplitPlan, tuple[Reach, ...]]
# Weights of the blocks of a grid, and of classes in them.
Weigh = Callable[[Grid], tuple[Ints, NDArray[np.float64] | None]]


class CubeSplitter:
    """What the splitters share; use one of its subclasses."""

    cube: Cube | None
    valid: ValidLike | None
    sample_size: SizesLike | None
    _times_alone = False  # whether times say enough of where samples lie

    def split(
        self, X: Any, y: object = None, groups: Any = None
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Give the samples to train on and to test on, fold by fold.

        Parameters
        ----------
        X : array_like, DataFrame, Dataset or DataArray, samples first
            The samples. Where they lie along a dim is told by `groups`; else by index levels,
            columns or coordinates of X that are called like the cube's dims ("lat") or positions
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
            if hasattr(self, "regions"):
                check_recipe_size(plan, "regions")
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
            elif np.ndim(value) and hasattr(value, "dtype"):
                shown.append(f"{name}=<{type(value).__name__} {np.shape(value)}>")
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
            ordered=self._times_alone,
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
