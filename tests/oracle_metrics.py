"""Every metric of pairs by its textbook formula, cell by cell, in exact fractions.

`ORACLES` has one function for each metric that scores prediction and truth alone. It takes rows
(prediction, truth, weight) of the cells where both are finite, as fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Rows = list[tuple[Fraction, Fraction, Fraction]]


def mean(rows: Rows, value: Callable[[Fraction, Fraction], Fraction]) -> Fraction:
    return sum((w * value(p, t) for p, t, w in rows), Fraction()) / sum(w for *_, w in rows)


def root(value: Fraction) -> float:
    return math.sqrt(value)


def mse(rows: Rows) -> Fraction:
    return mean(rows, lambda p, t: (p - t) ** 2)


def truth_variance(rows: Rows) -> Fraction:
    usual = mean(rows, lambda p, t: t)
    return mean(rows, lambda p, t: (t - usual) ** 2)


def prediction_variance(rows: Rows) -> Fraction:
    usual = mean(rows, lambda p, t: p)
    return mean(rows, lambda p, t: (p - usual) ** 2)


def covariance(rows: Rows) -> Fraction:
    p_mean, t_mean = mean(rows, lambda p, t: p), mean(rows, lambda p, t: t)
    return mean(rows, lambda p, t: (p - p_mean) * (t - t_mean))


ORACLES: dict[str, Callable[[Rows], Any]] = {
    "rmse": lambda rows: root(mse(rows)),
    "mse": mse,
    "mae": lambda rows: mean(rows, lambda p, t: abs(p - t)),
    "bias": lambda rows: mean(rows, lambda p, t: p - t),
    "r2": lambda rows: 1 - mse(rows) / truth_variance(rows),
    "correlation": lambda rows: (
        covariance(rows) / root(prediction_variance(rows)) / root(truth_variance(rows))
    ),
    "std_ratio": lambda rows: root(prediction_variance(rows) / truth_variance(rows)),
}


def score(metric: str, prediction: Any, truth: Any, weights: Any) -> float:
    """A metric of all cells; NaN where it is undefined."""
    cells = zip(prediction.ravel(), truth.ravel(), weights.ravel(), strict=True)
    finite = [cell for cell in cells if math.isfinite(cell[0]) and math.isfinite(cell[1])]
    if metric == "max_error":  # which has no weights
        return max((abs(p - t) for p, t, _ in finite), default=math.nan)
    rows = [(Fraction(float(p)), Fraction(float(t)), Fraction(float(w))) for p, t, w in finite]
    try:
        return float(ORACLES[metric](rows))
    except ZeroDivisionError:
        return math.nan
