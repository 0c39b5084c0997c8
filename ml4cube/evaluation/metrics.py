"""Metrics of predictions: sums that merge, exact on any number of blocks or ranks.

Every metric is a function of a few weighted sums over pairs of predicted and true cells
(`PairSums`). Sums of parts merge into the sums of the whole. So a cube larger than memory, or one
spread over many processes, has the same scores as one array, up to float64 rounding. No averages
of batch averages are taken: they are wrong if batches or gaps are uneven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.angles import UnknownAreaError
from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.grid import Grid
from ml4cube.core.statistics import check_decoded
from ml4cube.cube import masks_and_labels
from ml4cube.cube.variables import data_variables
from ml4cube.preprocessing.area_weights import area_of, find_latitudes

Cube = xr.Dataset | xr.DataArray

_DEFAULT_METRICS = ("rmse", "mae", "bias", "r2", "correlation", "count", "unpredicted")
_BLOCK_CELLS = 2**22  # cells read at once: 32 MB in float64


@dataclass(frozen=True, eq=False)
class PairSums:
    """Weighted sums over pairs of predicted and true values, one entry per group.

    A pair counts if both values are finite. If the truth is not, the cell is a gap. If only the
    prediction is not, the cell is `unpredicted`, so that a model cannot improve its score unseen
    by leaving out difficult cells.

    Parameters
    ----------
    count, gaps, unpredicted : ndarray of int, shape (groups,)
        Pairs that count, cells without a truth, and cells with a truth but no prediction.
    weight : ndarray of float, shape (groups,)
        Sum of the pairs' weights.
    error, absolute_error, squared_error : ndarray of float, shape (groups,)
        Weighted sums of prediction - truth, of its absolute value and of its square.
    largest_error : ndarray of float, shape (groups,)
        Largest absolute error, unweighted.
    prediction_mean, truth_mean : ndarray of float, shape (groups,)
        Weighted means.
    prediction_m2, truth_m2, product_m2 : ndarray of float, shape (groups,)
        Weighted sums of squared deviations from those means, and of their products.

    Examples
    --------
    >>> import numpy as np
    >>> first = PairSums.of(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    >>> second = PairSums.of(np.array([np.nan, 5.0]), np.array([4.0, np.nan]))
    >>> both = first.merge(second)
    >>> both.count.item(), both.gaps.item(), both.unpredicted.item()
    (2, 1, 1)
    """

    count: NDArray[np.int64]
    gaps: NDArray[np.int64]
    unpredicted: NDArray[np.int64]
    weight: NDArray[np.float64]
    error: NDArray[np.float64]
    absolute_error: NDArray[np.float64]
    squared_error: NDArray[np.float64]
    largest_error: NDArray[np.float64]
    prediction_mean: NDArray[np.float64]
    truth_mean: NDArray[np.float64]
    prediction_m2: NDArray[np.float64]
    truth_m2: NDArray[np.float64]
    product_m2: NDArray[np.float64]

    @classmethod
    def empty(cls, n_groups: int = 1) -> PairSums:
        """Return sums over no pair, the neutral element of `merge`.

        Parameters
        ----------
        n_groups : int, default 1
            Number of groups.

        Returns
        -------
        PairSums
            All zero.
        """
        kinds = {"count": np.int64, "gaps": np.int64, "unpredicted": np.int64}
        return cls(**{f.name: np.zeros(n_groups, kinds.get(f.name, float)) for f in fields(cls)})

    @classmethod
    def of(
        cls,
        prediction: ArrayLike,
        truth: ArrayLike,
        weights: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        n_groups: int = 1,
    ) -> PairSums:
        """Return the sums over one block.

        Parameters
        ----------
        prediction, truth : array_like
            Values of the same shape; masked cells are gaps.
        weights : array_like, optional
            Weight of each cell, broadcast against `truth`; 1 everywhere by default.
        groups : array_like of int, optional
            Group of each cell, from 0 to ``n_groups - 1``, broadcast against `truth`; cells
            with a negative number, or masked, are left out.
        n_groups : int, default 1
            Number of groups.

        Returns
        -------
        PairSums
            The block's sums.

        Raises
        ------
        InvalidValueError
            If the shapes differ, or a weight is negative or not finite.
        InvalidTypeError
            If values are not real numbers.
        """
        p, t = _as_float64(prediction), _as_float64(truth)
        if p.shape != t.shape:
            raise InvalidValueError(
                f"prediction and truth must have the same shape, got {p.shape} and {t.shape}"
            )
        w = np.broadcast_to(1.0 if weights is None else _as_float64(weights), t.shape)
        ids = np.ma.asarray(0 if groups is None else groups).astype(np.intp, casting="same_kind")
        group = np.broadcast_to(np.ma.filled(ids, -1), t.shape)
        if not (np.isfinite(w) & (w >= 0)).all():
            raise InvalidValueError("weights must be finite and not negative")

        has_group, has_truth, is_predicted = group >= 0, np.isfinite(t), np.isfinite(p)
        is_pair = has_group & has_truth & is_predicted
        p, t, w, group_of_pair = p[is_pair], t[is_pair], w[is_pair], group[is_pair]

        def sum_by_group(values: NDArray[np.float64]) -> NDArray[np.float64]:
            if n_groups == 1:  # np.sum adds pairwise, which bincount does not
                return np.array([values.sum()])
            sums = np.bincount(group_of_pair, weights=values, minlength=n_groups)
            return sums.astype(np.float64, copy=False)

        weight = sum_by_group(w)

        def mean_by_group(values: NDArray[np.float64]) -> NDArray[np.float64]:
            mean = _ratio(sum_by_group(w * values), weight, 0.0)
            # correct for rounding, so that a constant has a spread of exactly 0
            return mean + _ratio(sum_by_group(w * (values - mean[group_of_pair])), weight, 0.0)

        error = p - t
        prediction_mean, truth_mean = mean_by_group(p), mean_by_group(t)
        dp, dt = p - prediction_mean[group_of_pair], t - truth_mean[group_of_pair]
        largest_error = np.zeros(n_groups)
        np.maximum.at(largest_error, group_of_pair, np.abs(error))
        return cls(
            count=np.bincount(group_of_pair, minlength=n_groups),
            gaps=np.bincount(group[has_group & ~has_truth], minlength=n_groups),
            unpredicted=np.bincount(
                group[has_group & has_truth & ~is_predicted], minlength=n_groups
            ),
            weight=weight,
            error=sum_by_group(w * error),
            absolute_error=sum_by_group(w * np.abs(error)),
            squared_error=sum_by_group(w * error**2),
            largest_error=largest_error,
            prediction_mean=prediction_mean,
            truth_mean=truth_mean,
            prediction_m2=sum_by_group(w * dp**2),
            truth_m2=sum_by_group(w * dt**2),
            product_m2=sum_by_group(w * dp * dt),
        )

    def merge(self, other: PairSums) -> PairSums:
        """Return the sums over the pairs of both.

        Parameters
        ----------
        other : PairSums
            Sums over other pairs, of as many groups.

        Returns
        -------
        PairSums
            New sums; neither operand changes.

        Raises
        ------
        InvalidValueError
            If the numbers of groups differ.

        References
        ----------
        Chan, Golub, LeVeque (1983), Algorithms for computing the sample variance.
        """
        if len(self.count) != len(other.count):
            raise InvalidValueError(
                f"cannot merge sums of {len(self.count)} and {len(other.count)} groups"
            )
        weight = self.weight + other.weight
        share = _ratio(other.weight, weight, 0.0)
        dp = other.prediction_mean - self.prediction_mean
        dt = other.truth_mean - self.truth_mean
        between = self.weight * share
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged |= {
            "largest_error": np.maximum(self.largest_error, other.largest_error),
            "prediction_mean": self.prediction_mean + dp * share,
            "truth_mean": self.truth_mean + dt * share,
            "prediction_m2": self.prediction_m2 + other.prediction_m2 + dp**2 * between,
            "truth_m2": self.truth_m2 + other.truth_m2 + dt**2 * between,
            "product_m2": self.product_m2 + other.product_m2 + dp * dt * between,
        }
        return PairSums(**merged)


def _as_float64(values: Any) -> NDArray[np.float64]:
    """Return values as a float64 array on the CPU, with NaN where an array is masked."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():  # numpy has no bfloat16
            values = values.double()
    array = np.asarray(values)
    if array.dtype.kind not in "biufO":
        raise InvalidTypeError(
            f"values to score must be numbers, got dtype {array.dtype}; convert them first, e.g. "
            "durations to hours with da / np.timedelta64(1, 'h'), complex numbers with abs(da)"
        )
    array = np.asarray(array, dtype=np.float64)
    return np.where(np.ma.getmaskarray(values), np.nan, array) if np.ma.is_masked(values) else array


def _ratio(
    numerator: NDArray[np.float64], denominator: NDArray[np.float64], otherwise: float = np.nan
) -> NDArray[np.float64]:
    """Divide where the denominator is above 0."""
    out = np.full_like(numerator, otherwise)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def _correlation(sums: PairSums) -> NDArray[np.float64]:
    spread = np.sqrt(sums.prediction_m2) * np.sqrt(sums.truth_m2)
    return np.clip(_ratio(sums.product_m2, spread), -1.0, 1.0)  # beyond by rounding only


_FORMULAS: dict[str, Callable[[PairSums], NDArray[Any]]] = {
    "rmse": lambda sums: np.sqrt(_ratio(sums.squared_error, sums.weight)),
    "mse": lambda sums: _ratio(sums.squared_error, sums.weight),
    "mae": lambda sums: _ratio(sums.absolute_error, sums.weight),
    "bias": lambda sums: _ratio(sums.error, sums.weight),
    "r2": lambda sums: 1.0 - _ratio(sums.squared_error, sums.truth_m2),
    "correlation": _correlation,
    "std_ratio": lambda sums: np.sqrt(_ratio(sums.prediction_m2, sums.truth_m2)),
    "max_error": lambda sums: np.where(sums.count > 0, sums.largest_error, np.nan),
    "count": lambda sums: sums.count,
    "gaps": lambda sums: sums.gaps,
    "unpredicted": lambda sums: sums.unpredicted,
}


class Metric:
    """Base class of scores that are updated batch by batch.

    Call `update` for each batch, `merge` across ranks, then `compute`. A pair of cells counts if
    both are finite, see `PairSums`.

    Attributes
    ----------
    sums : PairSums
        Sums so far, with the counts of pairs, gaps and unpredicted cells.

    Examples
    --------
    >>> import numpy as np
    >>> whole, left, right = RMSE(), RMSE(), RMSE()
    >>> prediction, truth = np.array([1.0, 2.0, 6.0]), np.array([1.0, 4.0, 2.0])
    >>> whole.update(prediction, truth)
    >>> left.update(prediction[:2], truth[:2])
    >>> right.update(prediction[2:], truth[2:])
    >>> round(whole.compute(), 6), round(left.merge(right).compute(), 6)
    (2.581989, 2.581989)
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.sums = PairSums.empty()

    def update(
        self, prediction: ArrayLike, truth: ArrayLike, weights: ArrayLike | None = None
    ) -> None:
        """Add one batch.

        Parameters
        ----------
        prediction, truth : array_like or torch.Tensor
            Values of the same shape; NaN, infinities and masked cells are gaps.
        weights : array_like, optional
            Weight of each cell, broadcast against `truth`; 1 everywhere by default.

        Raises
        ------
        InvalidValueError
            If the shapes differ, or a weight is negative or not finite.
        InvalidTypeError
            If values are not real numbers.
        """
        self.sums = self.sums.merge(PairSums.of(prediction, truth, weights))

    def merge(self, other: Self) -> Self:
        """Return the metric over the pairs of both.

        Parameters
        ----------
        other : Metric
            A metric of the same class, over other pairs.

        Returns
        -------
        Metric
            A new one; neither operand changes.

        Raises
        ------
        InvalidTypeError
            If the classes differ.
        """
        if type(other) is not type(self):
            raise InvalidTypeError(
                f"cannot merge {type(self).__name__} with {type(other).__name__}"
            )
        merged = type(self)()
        merged.sums = self.sums.merge(other.sums)
        return merged

    def reset(self) -> None:
        """Remove all pairs, as at the start of an epoch."""
        self.sums = PairSums.empty()

    def compute(self) -> float:
        """Return the score over every pair so far.

        Returns
        -------
        float
            NaN if no pair counts, or if the score is undefined (the correlation with a constant).
        """
        return float(_FORMULAS[self.name](self.sums)[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.compute():.6g} over {self.sums.count.item()} pairs)"


class RMSE(Metric):
    """Root mean squared error, in the unit of the values.

    Examples
    --------
    >>> metric = RMSE()
    >>> metric.update([1.0, 7.0], [0.0, 0.0])
    >>> metric.compute()
    5.0
    """

    name = "rmse"


class MSE(Metric):
    """Mean squared error, in the squared unit of the values.

    Examples
    --------
    >>> metric = MSE()
    >>> metric.update([1.0, 7.0], [0.0, 0.0])
    >>> metric.compute()
    25.0
    """

    name = "mse"


class MAE(Metric):
    """Mean absolute error, in the unit of the values.

    Examples
    --------
    >>> metric = MAE()
    >>> metric.update([1.0, -3.0], [0.0, 0.0])
    >>> metric.compute()
    2.0
    """

    name = "mae"


class Bias(Metric):
    """Mean of prediction - truth, in the unit of the values; positive where predicted too high.

    Examples
    --------
    >>> metric = Bias()
    >>> metric.update([1.0, 5.0], [0.0, 0.0])
    >>> metric.compute()
    3.0
    """

    name = "bias"


class R2(Metric):
    """Coefficient of determination: 1 - squared error / squared deviation of the truth.

    Examples
    --------
    >>> metric = R2()
    >>> metric.update([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])
    >>> metric.compute()
    0.5
    """

    name = "r2"


class Correlation(Metric):
    """Pearson's correlation of prediction and truth, from -1 to 1.

    Examples
    --------
    >>> metric = Correlation()
    >>> metric.update([1.0, 3.0], [2.0, 6.0])
    >>> round(metric.compute(), 6)
    1.0
    """

    name = "correlation"


class StdRatio(Metric):
    """Standard deviation of the prediction over that of the truth; below 1 is too smooth.

    Examples
    --------
    >>> metric = StdRatio()
    >>> metric.update([1.0, 3.0], [1.0, 5.0])
    >>> metric.compute()
    0.5
    """

    name = "std_ratio"


class MaxError(Metric):
    """Largest absolute error of any pair, in the unit of the values, unweighted.

    Examples
    --------
    >>> metric = MaxError()
    >>> metric.update([1.0, -3.0], [0.0, 0.0])
    >>> metric.compute()
    3.0
    """

    name = "max_error"


def area_weights(cube: xr.Dataset | xr.DataArray) -> xr.DataArray | None:
    """Return the areas of a geographic cube's cells, up to a common factor.

    Latitude is the coordinate with standard_name ``latitude`` or ``grid_latitude``, units
    ``degrees_north``, or a name such as ``lat``, ``nav_lat`` or ``rlat``; of several, that of a
    dim. The weight of a row is the area of its latitude band between its CF bounds. Without
    bounds, these lie halfway to the next rows, and not beyond a pole. If each cell has a latitude
    (a curvilinear grid), its weight is cos(latitude).

    Parameters
    ----------
    cube : Dataset or DataArray
        Any cube.

    Returns
    -------
    DataArray or None
        Weights, 0 or more, along the dims of the latitude. None if areas are unknown: there is no
        latitude, only one row of it, or points (stations, cells of a mesh) along one dim.

    Raises
    ------
    InvalidValueError
        If latitudes lie outside [-90, 90] degrees or are not finite, or bounds do not fit.

    Examples
    --------
    >>> import xarray as xr
    >>> area_weights(xr.DataArray([0, 0], {"lat": [0.0, 60.0]}, "lat")).values.round(3).tolist()
    [1.0, 0.5]
    """
    return _described_areas(cube, cube.variables if isinstance(cube, xr.Dataset) else {})[0]


def _described_areas(
    cube: Cube, bounds: Mapping[Any, xr.Variable]
) -> tuple[xr.DataArray | None, str]:
    """Return the areas of cells, or None, and a description; latitudes may name one of `bounds`."""
    latitudes = find_latitudes(cube.coords)
    if not latitudes:
        return None, "none, no coordinate is a latitude"
    latitude = latitudes[0]
    coords = {name: c.variable for name, c in cube.coords.items()}
    try:
        areas = area_of(latitude, {**bounds, **coords})
    except UnknownAreaError as error:
        return None, f"none, {error}"
    description = f"{'cosine' if latitude.ndim > 1 else 'area of the bands'} of {latitude.name}"
    attrs = {"long_name": description, "units": "1"}
    return xr.DataArray(areas, name="area_weight", attrs=attrs), description


def score_cube(
    prediction: xr.Dataset | xr.DataArray,
    truth: xr.Dataset | xr.DataArray,
    *,
    metrics: str | Sequence[str] = _DEFAULT_METRICS,
    by: str | xr.DataArray | Sequence[str | xr.DataArray] | None = None,
    weights: xr.DataArray | str | None = "area",
) -> xr.Dataset:
    """Score a predicted cube against the true one, block by block, with bounded memory.

    Parameters
    ----------
    prediction, truth : Dataset or DataArray
        Cubes on the same grid, with any order of dims. The data variables that both have are
        scored; a DataArray is one variable.
    metrics : str or sequence of str, optional
        Any of ``rmse``, ``mse``, ``mae``, ``bias``, ``r2``, ``correlation``, ``std_ratio``,
        ``max_error``, ``count``, ``gaps``, ``unpredicted``.
    by : str, DataArray or sequence of these, optional
        Separate scores for each step of a dim (``"time"``), or for each label of an array along
        dims of the cube (a map of regions; ``ds.time.dt.month``) or of a coordinate, given by
        name. Cells whose label is NaN are left out. Several are combined. A variable without a
        dim of the labels counts at each of its steps.
    weights : DataArray, "area" or None, default "area"
        Weight of each cell. ``"area"`` uses `area_weights` of the prediction or, if it has no
        latitude, of the truth, and equal weights if areas are unknown.

    Returns
    -------
    Dataset
        One data variable per metric, dims ``("variable", *by)``. Gaps of the truth are left out;
        ``unpredicted`` counts cells that have a truth but no prediction. The attribute
        ``weights`` describes the weights, or says why they are equal.

    Raises
    ------
    InvalidTypeError
        If a cube, the weights or a label is not an xarray object, or values are not real numbers.
    InvalidValueError
        If a metric is unknown, the cubes share no variable or have different grids, a variable
        holds packed integers that were not decoded, a label in `by` does not lie along dims of
        the cube, two have the same name, or latitudes are invalid.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> truth = xr.DataArray(np.zeros((2, 2)), {"lat": [0.0, 60.0]}, ("time", "lat"), name="sst")
    >>> scores = score_cube(truth + [[1.0, 0.0], [0.0, 1.0]], truth, by="time")
    >>> scores.mae.sel(variable="sst").values.round(3).tolist()
    [0.667, 0.333]
    """
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    for metric in metrics:
        check_choice("metrics", metric, list(_FORMULAS))
    for argument, cube in (("prediction", prediction), ("truth", truth)):
        if not isinstance(cube, xr.Dataset | xr.DataArray):
            raise InvalidTypeError(
                f"{argument} must be a Dataset or DataArray, got {type(cube).__name__}"
            )
    pairs = _pairs(prediction, truth)
    largest = max((predicted for predicted, _ in pairs.values()), key=lambda array: array.ndim)
    given_by: list[Any] = list(by) if isinstance(by, list | tuple) else [by]
    groupings = [_Grouping.of(one, largest) for one in given_by if one is not None]
    names = [grouping.name for grouping in groupings]
    if len({"variable", *metrics, *names}) < 1 + len(set(metrics)) + len(names):
        raise InvalidValueError(
            "by must hold labels of different names, other than 'variable' and those of metrics, "
            f"got {names}; rename them, e.g. da.rename('region')"
        )
    bounds: dict[Any, xr.Variable] = {}
    for cube in (prediction, truth):  # the truth wins: arithmetic changes a prediction's bounds too
        bounds |= cube.variables if isinstance(cube, xr.Dataset) else {}
    sums, descriptions = [], {}
    for name, (predicted, true) in pairs.items():
        cell_weights, descriptions[name] = _cell_weights(weights, predicted, true, bounds)
        sums.append(_sum_variable(predicted, true, groupings, cell_weights))
    coords = {grouping.name: grouping.labels for grouping in groupings}
    shape = [len(labels) for labels in coords.values()]
    scores = {
        metric: (
            ("variable", *coords),
            np.stack([_FORMULAS[metric](variable).reshape(shape) for variable in sums]),
        )
        for metric in metrics
    }
    distinct = set(descriptions.values())
    by_variable = [f"{name}: {text}" for name, text in descriptions.items()]
    attrs = {"weights": distinct.pop() if len(distinct) == 1 else "; ".join(by_variable)}
    return xr.Dataset(scores, {"variable": [str(name) for name in pairs], **coords}, attrs)


def _pairs(prediction: Cube, truth: Cube) -> dict[Hashable, tuple[xr.DataArray, xr.DataArray]]:
    """Return the variables of both cubes, the truth's dims in the prediction's order."""
    if isinstance(prediction, xr.DataArray) and isinstance(truth, xr.DataArray):
        # two arrays are compared whatever their names
        name = truth.name if prediction.name is None else prediction.name
        prediction, truth = prediction.rename(name), truth.rename(name)
    predicted, true = _variables(prediction), _variables(truth)
    pairs: dict[Hashable, tuple[xr.DataArray, xr.DataArray]] = {}
    for name, p in predicted.items():
        if name not in true:
            continue
        t = true[name]
        if set(p.dims) != set(t.dims):
            raise InvalidValueError(
                f"prediction and truth of {name!r} must have the same dims, got {p.dims} and "
                f"{t.dims}"
            )
        check_aligned(f"prediction of {name!r}", p, t)
        for array in (p, t):
            check_decoded(str(name), array)
        pairs[name] = p, t.transpose(*p.dims)
    if not pairs:
        raise InvalidValueError(
            f"prediction has variables {list(predicted)}, truth has {list(true)}, none in common"
        )
    return pairs


def _variables(cube: Cube) -> dict[Hashable, xr.DataArray]:
    if isinstance(cube, xr.DataArray):
        return {masks_and_labels.DATA_VAR if cube.name is None else cube.name: cube}
    return {name: cube[name] for name in data_variables(cube)}


@dataclass(frozen=True, eq=False)
class _Grouping:
    """Labels of groups, and the code of each cell along dims of the cube; -1 is no group."""

    name: str
    labels: xr.DataArray
    codes: xr.DataArray

    @classmethod
    def of(cls, by: str | xr.DataArray, cube: xr.DataArray) -> _Grouping:
        if isinstance(by, str) and by not in cube.dims:
            check_choice("by", by, sorted({str(name) for name in (*cube.dims, *cube.coords)}))
            by = cube.coords[by]
        if isinstance(by, str):
            steps = xr.DataArray(np.arange(cube.sizes[by]), dims=by)
            return cls(by, cube[by].reset_coords(drop=True), steps)
        if not isinstance(by, xr.DataArray):
            raise InvalidTypeError(f"by must hold names or DataArrays, got {type(by).__name__}")
        name = str(by.name) if by.name is not None else "group"
        check_aligned(f"by={name!r}", by, cube)
        values = by.values
        known = np.asarray(pd.notnull(values))  # xarray misses None in chunks
        labels, inverse = np.unique(values[known], return_inverse=True)
        codes = np.full(values.shape, -1, dtype=np.intp)
        codes[known] = inverse.ravel()
        name = f"{name}_label" if name in cube.dims else name
        return cls(name, xr.DataArray(labels, dims=name), xr.DataArray(codes, dims=by.dims))


def _cell_weights(
    weights: xr.DataArray | str | None,
    prediction: xr.DataArray,
    truth: xr.DataArray,
    bounds: Mapping[Any, xr.Variable],
) -> tuple[xr.DataArray | None, str]:
    """Return the weights of a variable's cells, and their description."""
    if weights is None:
        return None, "none"
    if isinstance(weights, str):
        check_choice("weights", weights, ["area", None])
        return _described_areas(prediction if find_latitudes(prediction.coords) else truth, bounds)
    if not isinstance(weights, xr.DataArray):
        raise InvalidTypeError(
            f"weights must be a DataArray, 'area' or None, got {type(weights).__name__}"
        )
    return weights, "given"


def _sum_variable(
    prediction: xr.DataArray,
    truth: xr.DataArray,
    groupings: list[_Grouping],
    weights: xr.DataArray | None,
) -> PairSums:
    """Sum over a variable, one block at a time, in a fixed order."""
    arrays = [grouping.codes for grouping in groupings] + ([] if weights is None else [weights])
    lacking = {d: n for a in arrays for d, n in a.sizes.items() if d not in prediction.dims}
    prediction, truth = prediction.expand_dims(lacking), truth.expand_dims(lacking)
    if weights is not None:
        check_aligned("weights", weights, prediction)
    n_groups = math.prod(len(grouping.labels) for grouping in groupings)
    sums = PairSums.empty(n_groups)
    for slices in _blocks(prediction):
        w = None if weights is None else _in_block(weights, prediction.dims, slices)
        # the combined code of several groupings: labels of the last one vary fastest
        group: NDArray[Any] = np.zeros((), dtype=np.intp)
        for grouping in groupings:
            code = _in_block(grouping.codes, prediction.dims, slices)
            combined = group * len(grouping.labels) + code
            group = np.where((group < 0) | (code < 0), -1, combined)
        p, t = prediction.isel(slices).values, truth.isel(slices).values
        sums = sums.merge(PairSums.of(p, t, w, group, n_groups))
    return sums


def _blocks(cube: xr.DataArray) -> Iterator[dict[Hashable, slice]]:
    """Yield the slices of blocks that follow the chunks; chunks that are too large are cut."""
    if 0 in cube.shape:
        return
    shape = {str(dim): n for dim, n in cube.sizes.items()}
    size = shape | {str(dim): max(chunks) for dim, chunks in cube.variable.chunksizes.items()}
    for dim in shape:
        cells_of_others = math.prod(size.values()) // size[dim]
        size[dim] = max(1, min(size[dim], _BLOCK_CELLS // cells_of_others))
    for block in Grid.blocks(shape, size):
        yield {dim: block.slices[str(dim)] for dim in cube.dims}


def _in_block(
    array: xr.DataArray, dims: Sequence[Hashable], slices: dict[Hashable, slice]
) -> NDArray[Any]:
    """Return the values of an array in a block, with an axis of length 1 for dims that it lacks."""
    part = array.variable.isel({dim: slices[dim] for dim in array.dims})
    values: NDArray[Any] = part.set_dims(dims).values  # type: ignore[no-untyped-call]
    return values
