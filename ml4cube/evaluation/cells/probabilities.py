"""Scores of members, quantiles and probabilities: CRPS, ranks, coverage, reliability."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.evaluation.cells.cell_reader import CLASS, Floats

MEMBER, QUANTILE = "member", "quantile"
#: Quantiles of which the weighted loss is close to the CRPS.
LEAST_LEVELS = 9
_BINS = 10


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the numbers along a dim of several outputs are: members or quantiles."""

    dim: str
    levels: Floats

    @classmethod
    def of(cls, array: xr.DataArray, of_truth: Sequence[Hashable]) -> Outputs | None:
        """Return the outputs of a variable, None if it has one value for each true one.

        A dim that the truth has too is one of cells, such as the members of a simulation.
        """
        dims = [dim for dim in (MEMBER, QUANTILE) if dim in array.dims and dim not in of_truth]
        if not dims:
            return None
        if len(dims) > 1:
            raise InvalidValueError(
                f"{array.name!r} must have a dim 'member' or 'quantile', not both, got {array.dims}"
            )
        levels = np.arange(array.sizes[dims[0]], dtype=float)
        if dims[0] == QUANTILE:
            levels = np.asarray(array[QUANTILE].values, float)
            is_sorted = (np.diff(levels) > 0).all() and levels[0] >= 0 and levels[-1] <= 1
            if not is_sorted or not levels[0] <= 0.5 <= levels[-1]:
                raise InvalidValueError(
                    f"quantiles of {array.name!r} must increase between 0 and 1, and include 0.5 "
                    f"or lie on both sides of it, got {levels}"
                )
        return cls(dims[0], levels)

    def point(self, values: Floats, axis: int) -> Floats:
        """Return the mean of the members, or the median, between two quantiles if need be."""
        if self.dim == MEMBER:
            return np.asarray(values.mean(axis))
        upper = int(np.searchsorted(self.levels, 0.5))
        lower = upper if self.levels[upper] == 0.5 else upper - 1
        low, high = values.take(lower, axis), values.take(upper, axis)
        if lower == upper:
            return np.asarray(low)
        share = (0.5 - self.levels[lower]) / (self.levels[upper] - self.levels[lower])
        return np.asarray(low + share * (high - low))

    def crps(self, values: Floats, truth: Floats, axis: int) -> Floats:
        """Return the continuous ranked probability score of each cell.

        Members: the fair estimator (Ferro 2014), whose expectation does not depend on their
        number. Quantiles: twice the pinball loss, integrated over levels, each of which stands for
        those that are nearest to it (Laio and Tamea 2007).
        """
        values, above = np.moveaxis(values, axis, 0), np.moveaxis(values, axis, 0) - truth
        if self.dim == QUANTILE:
            edges = np.concatenate([[0.0], (self.levels[1:] + self.levels[:-1]) / 2, [1.0]])
            loss = np.zeros(truth.shape)
            for level, share, over in zip(self.levels, np.diff(edges), above, strict=True):
                loss += 2 * share * np.maximum((1 - level) * over, -level * over)
            return loss
        score = np.abs(above).mean(0)
        m = len(values)
        if m > 1:
            factors = 2 * np.arange(m) - (m - 1)
            score = score - np.tensordot(factors, np.sort(values, axis=0), 1) / (m * (m - 1))
        return np.asarray(score)

    def variance(self, values: Floats, axis: int) -> Floats:
        """Return the variance that the squared error of a reliable ensemble's mean has."""
        # of the members and of the mean itself (Fortin et al. 2014)
        m = values.shape[axis]
        if self.dim != MEMBER or m < 2:
            return np.full(np.delete(values.shape, axis), np.nan)
        return np.asarray(values.var(axis, ddof=1) * (m + 1) / m)

    def observed(self, values: Floats, truth: Floats, weights: Floats, axis: int) -> Floats:
        """Sum up weights by the rank of the truth, or below each quantile and in all."""
        values = np.moveaxis(values, axis, 0)
        if self.dim == QUANTILE:
            below = [weights[truth <= quantile].sum() for quantile in values]
            return np.array([below, [weights.sum()] * len(below)])
        # equal members share the weight of a truth that equals them
        first, last = (values < truth).sum(0), (values <= truth).sum(0)
        share, n = weights / (last - first + 1), len(values) + 2
        starts = np.bincount(first.ravel(), share.ravel(), n)
        ends = np.bincount(last.ravel() + 1, share.ravel(), n)
        return np.asarray(np.cumsum(starts - ends)[None, :-1])


def reliability_sums(probability: Floats, happened: Floats, weights: Floats) -> Floats:
    """Sum up weights, probabilities, events and cells, shape (4, bins), by bin of probability."""
    bins = np.clip((probability * _BINS).astype(np.intp), 0, _BINS - 1)
    columns = (weights, weights * probability, weights * happened, np.ones_like(weights))
    return np.array([np.bincount(bins, column, _BINS) for column in columns])


def reliability_coords(outputs: Outputs | None, classes: NDArray[Any] | None) -> dict[str, Any]:
    """Return the labels of the sums for what a variable predicts, none for one value a cell."""
    if classes is not None:
        centres = (np.arange(_BINS) + 0.5) / _BINS
        sums = ["weight", "probability", "observed", "count"]
        return {"sum": sums, CLASS: classes, "probability_bin": centres}
    if outputs is None:
        return {}
    if outputs.dim == QUANTILE:
        return {"sum": ["below", "weight"], QUANTILE: outputs.levels}
    return {"sum": ["weight"], "rank": np.arange(len(outputs.levels) + 1)}


def reliability_table(sums: xr.DataArray) -> xr.Dataset:
    """Return frequencies from the sums that `reliability_coords` names."""
    of = {str(name): sums.sel(sum=name, drop=True) for name in sums["sum"].values}
    weight = of["weight"].where(of["weight"] > 0)
    if "rank" in sums.dims:
        return xr.Dataset({"rank_frequency": weight.fillna(0) / weight.sum()})
    if QUANTILE in sums.dims:
        return xr.Dataset({"coverage": of["below"] / weight})
    return xr.Dataset(
        {
            "probability": of["probability"] / weight,
            "observed_frequency": of["observed"] / weight,
            "count": of["count"].astype(np.int64),
        }
    )
