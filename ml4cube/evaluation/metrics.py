"""Metrics of predictions, updated batch by batch: exact on any number of blocks or ranks.

Every metric is a function of a few sums that merge, see `PairSums`.
"""

from __future__ import annotations

from typing import ClassVar, Self

from numpy.typing import ArrayLike

from ml4cube.core.errors import InvalidTypeError
from ml4cube.evaluation.cube_scores import area_weights as area_weights
from ml4cube.evaluation.cube_scores import score_cube as score_cube
from ml4cube.evaluation.pair_sums import FORMULAS
from ml4cube.evaluation.pair_sums import PairSums as PairSums


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
        return float(FORMULAS[self.name](self.sums)[0])

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
