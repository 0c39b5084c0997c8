"""`PairSums`: weighted sums over pairs of predicted and true cells, and the formulas of metrics.

Sums of parts merge into the sums of the whole. So a cube larger than memory, or one spread over
many processes, has the same scores as one array, up to float64 rounding. No averages of batch
averages are taken: they are wrong if batches or gaps are uneven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError


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
        p, t = as_float64(prediction), as_float64(truth)
        if p.shape != t.shape:
            raise InvalidValueError(
                f"prediction and truth must have the same shape, got {p.shape} and {t.shape}"
            )
        w = np.broadcast_to(1.0 if weights is None else as_float64(weights), t.shape)
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
            mean = ratio(sum_by_group(w * values), weight, 0.0)
            # correct for rounding, so that a constant has a spread of exactly 0
            return mean + ratio(sum_by_group(w * (values - mean[group_of_pair])), weight, 0.0)

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
        share = ratio(other.weight, weight, 0.0)
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


def as_float64(values: Any) -> NDArray[np.float64]:
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


def ratio(
    numerator: NDArray[np.float64], denominator: NDArray[np.float64], otherwise: float = np.nan
) -> NDArray[np.float64]:
    """Divide where the denominator is above 0."""
    out = np.full_like(numerator, otherwise)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def _correlation(sums: PairSums) -> NDArray[np.float64]:
    spread = np.sqrt(sums.prediction_m2) * np.sqrt(sums.truth_m2)
    return np.clip(ratio(sums.product_m2, spread), -1.0, 1.0)  # beyond by rounding only


FORMULAS: dict[str, Callable[[PairSums], NDArray[Any]]] = {
    "rmse": lambda sums: np.sqrt(ratio(sums.squared_error, sums.weight)),
    "mse": lambda sums: ratio(sums.squared_error, sums.weight),
    "mae": lambda sums: ratio(sums.absolute_error, sums.weight),
    "bias": lambda sums: ratio(sums.error, sums.weight),
    "r2": lambda sums: 1.0 - ratio(sums.squared_error, sums.truth_m2),
    "correlation": _correlation,
    "std_ratio": lambda sums: np.sqrt(ratio(sums.prediction_m2, sums.truth_m2)),
    "max_error": lambda sums: np.where(sums.count > 0, sums.largest_error, np.nan),
    "count": lambda sums: sums.count,
    "gaps": lambda sums: sums.gaps,
    "unpredicted": lambda sums: sums.unpredicted,
}
