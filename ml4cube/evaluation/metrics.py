"""Metrics of predictions, updated batch by batch: exact on any number of blocks or ranks.

Every metric is a function of a few sums that merge, see `PairSums`.
"""

from __future__ import annotations

import copy
from typing import Self

from numpy.typing import ArrayLike

from ml4cube.core.errors import InvalidTypeError, check_choice
from ml4cube.core.metric_registry import METRICS, PAIR_METRICS
from ml4cube.core.sums.pairs import PairSums as PairSums
from ml4cube.evaluation.cube_scores import area_weights as area_weights
from ml4cube.evaluation.cube_scores import score_cube as score_cube


class Metric:
    """A score that is updated batch by batch.

    Call `update` for each batch, `merge` across ranks, then `compute`. A pair of cells counts if
    both are finite, see `PairSums`.

    Parameters
    ----------
    name : str
        Any of the metrics of `score_cube`; the usual ones have a class of their own.

    Attributes
    ----------
    sums : PairSums
        Sums so far, with the counts of pairs, gaps and unpredicted cells.

    Examples
    --------
    >>> import numpy as np
    >>> whole, left, right = Metric("rmse"), Metric("rmse"), Metric("rmse")
    >>> prediction, truth = np.array([1.0, 2.0, 6.0]), np.array([1.0, 4.0, 2.0])
    >>> whole.update(prediction, truth)
    >>> left.update(prediction[:2], truth[:2])
    >>> right.update(prediction[2:], truth[2:])
    >>> round(whole.compute(), 6), round(left.merge(right).compute(), 6)
    (2.581989, 2.581989)
    """

    def __init__(self, name: str) -> None:
        check_choice("name", name, list(PAIR_METRICS))
        self.name = name
        self.sums = PairSums.empty(names=METRICS[name].sums)

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
        batch = PairSums.of(prediction, truth, weights, names=METRICS[self.name].sums)
        self.sums = self.sums.merge(batch)

    def merge(self, other: Self) -> Self:
        """Return the metric over the pairs of both.

        Parameters
        ----------
        other : Metric
            The same metric, over other pairs.

        Returns
        -------
        Metric
            A new one; neither operand changes.

        Raises
        ------
        InvalidTypeError
            If it is another metric.
        """
        if type(other) is not type(self) or other.name != self.name:
            raise InvalidTypeError(f"cannot merge {self._title} with {other._title}")
        merged = copy.copy(self)
        merged.sums = self.sums.merge(other.sums)
        return merged

    def reset(self) -> None:
        """Remove all pairs, as at the start of an epoch."""
        self.sums = PairSums.empty(names=METRICS[self.name].sums)

    def compute(self) -> float:
        """Return the score over every pair so far.

        Returns
        -------
        float
            NaN if no pair counts, or if the score is undefined (the correlation with a constant).
        """
        return float(self.sums.score(self.name)[0])

    @property
    def _title(self) -> str:
        return self.name if type(self) is Metric else type(self).__name__

    def __repr__(self) -> str:
        return f"{self._title}({self.compute():.6g} over {self.sums.count.item()} pairs)"


class RMSE(Metric):
    """Root mean squared error, in the unit of the values.

    Examples
    --------
    >>> metric = RMSE()
    >>> metric.update([1.0, 7.0], [0.0, 0.0])
    >>> metric.compute()
    5.0
    """

    def __init__(self) -> None:
        super().__init__("rmse")


class MSE(Metric):
    """Mean squared error, in the squared unit of the values.

    Examples
    --------
    >>> metric = MSE()
    >>> metric.update([1.0, 7.0], [0.0, 0.0])
    >>> metric.compute()
    25.0
    """

    def __init__(self) -> None:
        super().__init__("mse")


class MAE(Metric):
    """Mean absolute error, in the unit of the values.

    Examples
    --------
    >>> metric = MAE()
    >>> metric.update([1.0, -3.0], [0.0, 0.0])
    >>> metric.compute()
    2.0
    """

    def __init__(self) -> None:
        super().__init__("mae")


class Bias(Metric):
    """Mean of prediction - truth, in the unit of the values; positive where predicted too high.

    Examples
    --------
    >>> metric = Bias()
    >>> metric.update([1.0, 5.0], [0.0, 0.0])
    >>> metric.compute()
    3.0
    """

    def __init__(self) -> None:
        super().__init__("bias")


class R2(Metric):
    """Coefficient of determination: 1 - squared error / squared deviation of the truth.

    Examples
    --------
    >>> metric = R2()
    >>> metric.update([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])
    >>> metric.compute()
    0.5
    """

    def __init__(self) -> None:
        super().__init__("r2")


class Correlation(Metric):
    """Pearson's correlation of prediction and truth, from -1 to 1.

    Examples
    --------
    >>> metric = Correlation()
    >>> metric.update([1.0, 3.0], [2.0, 6.0])
    >>> round(metric.compute(), 6)
    1.0
    """

    def __init__(self) -> None:
        super().__init__("correlation")


class StdRatio(Metric):
    """Standard deviation of the prediction over that of the truth; below 1 is too smooth.

    Examples
    --------
    >>> metric = StdRatio()
    >>> metric.update([1.0, 3.0], [1.0, 5.0])
    >>> metric.compute()
    0.5
    """

    def __init__(self) -> None:
        super().__init__("std_ratio")


class MaxError(Metric):
    """Largest absolute error of any pair, in the unit of the values, unweighted.

    Examples
    --------
    >>> metric = MaxError()
    >>> metric.update([1.0, -3.0], [0.0, 0.0])
    >>> metric.compute()
    3.0
    """

    def __init__(self) -> None:
        super().__init__("max_error")
