"""Sums over pairs of predicted and true cells, which merge.

Sums of parts merge into the sums of the whole. So a cube larger than memory, or one spread over
many processes, has the same scores as one array, up to float64 rounding. No averages of batch
averages are taken: they are wrong if batches or gaps are uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.metric_registry import (
    METRICS,
    MOMENTS,
    PAIR_METRICS,
    SUMMANDS,
    Cells,
    Floats,
    Sums,
    ratio,
    sums_of,
)
from ml4cube.core.sums.fields import slabs
from ml4cube.core.sums.mergeable import Mergeable

COUNTS = ("count", "gaps", "unpredicted")
#: Sums of all metrics that need no more than prediction and truth.
PAIR_SUMS = sums_of(PAIR_METRICS)
_MAXIMA = {name for name, summand in SUMMANDS.items() if summand.is_maximum}


@dataclass(frozen=True, eq=False)
class Groups:
    """The group and the weight of each cell that is scored, 1-D."""

    of_cell: NDArray[np.intp]
    weights: Floats
    n: int

    @cached_property
    def weight(self) -> Floats:
        """Sum of the weights of each group."""
        return self.add_up(self.weights)

    def add_up(self, values: Floats) -> Floats:
        """Return the sum of each group."""
        if self.n == 1:  # np.sum adds pairwise, which bincount does not
            return np.array([values.sum()])
        return np.bincount(self.of_cell, values, self.n).astype(np.float64, copy=False)

    def sums(self, cells: Cells, names: Iterable[str]) -> dict[str, Floats]:
        """Return the sums that are named, and the weight; without those that cells do not have."""
        wanted = dict.fromkeys(names)
        sums = {"weight": self.weight}
        for name, summand in SUMMANDS.items():
            is_unknown = summand.needs and getattr(cells, summand.needs) is None
            if name not in wanted or is_unknown:
                continue
            values = summand.of(cells)
            if summand.is_maximum:
                sums[name] = np.zeros(self.n)
                np.maximum.at(sums[name], self.of_cell, values)
            else:
                sums[name] = self.add_up(self.weights * values)
        if not wanted.keys().isdisjoint(MOMENTS):
            sums |= self._moments(cells)
        return sums

    def class_sums(
        self, probabilities: Floats, true: NDArray[np.intp], n_classes: int
    ) -> dict[str, Floats]:
        """Return sums by class, (groups, classes), and those of -log(probability of the true one).

        `probabilities` has the shape (cells, classes), `true` the position of the true class.
        """
        predicted = probabilities.argmax(1)
        of_true = np.take_along_axis(probabilities, true[:, None], 1)[:, 0]
        surprise = -np.log(of_true.clip(np.finfo(np.float64).eps, 1))  # as in scikit-learn
        everywhere, is_hit = np.ones(len(true), bool), predicted == true

        def by_class(classes: NDArray[np.intp], used: NDArray[np.bool_]) -> Floats:
            position = self.of_cell[used] * n_classes + classes[used]
            sums = np.bincount(position, self.weights[used], self.n * n_classes)
            return sums.astype(np.float64, copy=False).reshape(self.n, n_classes)

        return {
            "log_score": self.add_up(self.weights * surprise),
            "true": by_class(true, everywhere),
            "predicted": by_class(predicted, everywhere),
            "hits": by_class(true, is_hit),
        }

    def _moments(self, cells: Cells) -> dict[str, Floats]:
        prediction_mean, truth_mean = self._mean(cells.prediction), self._mean(cells.truth)
        from_prediction_mean = cells.prediction - prediction_mean[self.of_cell]
        from_truth_mean = cells.truth - truth_mean[self.of_cell]
        return {
            "prediction_mean": prediction_mean,
            "truth_mean": truth_mean,
            "prediction_m2": self.add_up(self.weights * from_prediction_mean**2),
            "truth_m2": self.add_up(self.weights * from_truth_mean**2),
            "product_m2": self.add_up(self.weights * from_prediction_mean * from_truth_mean),
        }

    def _mean(self, values: Floats) -> Floats:
        mean = ratio(self.add_up(self.weights * values), self.weight, 0.0)
        # corrected for rounding, so that a constant has a spread of exactly 0
        rest = self.add_up(self.weights * (values - mean[self.of_cell]))
        return mean + ratio(rest, self.weight, 0.0)


def combined(codes: Iterable[tuple[NDArray[Any], int]]) -> NDArray[np.intp]:
    """Return the combined group of several, of so many each; the last varies fastest, -1 is none.

    Arrays of groups broadcast against each other.
    """
    group = np.zeros((), np.intp)
    for code, n in codes:
        group = np.where((group < 0) | (code < 0), -1, group * n + code)
    return group


def merged(ours: Sums, theirs: Sums) -> dict[str, Floats]:
    """Return the sums over the cells of both, whose shapes broadcast.

    Source: Chan, Golub, LeVeque (1983), Algorithms for computing the sample variance.
    """
    both: dict[str, Any] = {}
    for name, values in theirs.items():
        combine = np.maximum if name in _MAXIMA else np.add
        both[name] = combine(ours[name], values)
    if "truth_mean" in both:
        share = ratio(theirs["weight"], both["weight"], 0.0)
        between = ours["weight"] * share
        prediction_step = theirs["prediction_mean"] - ours["prediction_mean"]
        truth_step = theirs["truth_mean"] - ours["truth_mean"]
        both["prediction_mean"] = ours["prediction_mean"] + prediction_step * share
        both["truth_mean"] = ours["truth_mean"] + truth_step * share
        both["prediction_m2"] += prediction_step**2 * between
        both["truth_m2"] += truth_step**2 * between
        both["product_m2"] += prediction_step * truth_step * between
    return both


def without(total: Sums, part: Sums) -> dict[str, Floats]:
    """Return sums over the cells that are not in a part: `part` merged with negative weights."""
    means = ("prediction_mean", "truth_mean")
    removed = {name: -values for name, values in part.items()}
    removed |= {name: part[name] for name in means if name in part}
    rest = merged(total, removed)
    for name in {"prediction_m2", "truth_m2"} & rest.keys():
        rest[name] = rest[name].clip(min=0)  # below by rounding only
    return rest


def merged_along(sums: Sums, axis: int) -> dict[str, Floats]:
    """Return the sums merged along an axis."""
    total: dict[str, Any] = {}
    for name, values in sums.items():
        combine = np.maximum if name in _MAXIMA else np.add
        total[name] = combine.reduce(values, axis)
    if "truth_mean" not in sums:
        return total
    n = sums["weight"].shape[axis]
    parts = [{name: sums[name].take(i, axis) for name in ("weight", *MOMENTS)} for i in range(n)]
    moments = parts[0]
    for part in parts[1:]:
        moments = merged(moments, part)
    return total | {name: moments[name] for name in MOMENTS}


@dataclass(frozen=True, eq=False)
class PairSums(Mergeable):
    """Weighted sums over pairs of predicted and true values, one entry per group.

    A pair counts if both values are finite. If the truth is not, the cell is a gap. If only the
    prediction is not, the cell is `unpredicted`, so that a model cannot improve its score unseen
    by leaving out difficult cells.

    Parameters
    ----------
    arrays : mapping of str to ndarray, shape (groups,)
        Sums by name: ``count``, ``gaps`` and ``unpredicted``, ``weight`` of the pairs, and those
        that were asked for, see `ml4cube.core.metric_registry`.

    Examples
    --------
    >>> import numpy as np
    >>> first = PairSums.of(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    >>> second = PairSums.of(np.array([np.nan, 5.0]), np.array([4.0, np.nan]))
    >>> both = first.merge(second)
    >>> both.count.item(), both.gaps.item(), both.unpredicted.item()
    (2, 1, 1)
    """

    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def empty(cls, n_groups: int = 1, names: Iterable[str] = PAIR_SUMS) -> PairSums:
        """Return sums over no pair, the neutral element of `merge`.

        Parameters
        ----------
        n_groups : int, default 1
            Number of groups.
        names : iterable of str, optional
            Names of the sums; default: those of all metrics of pairs.

        Returns
        -------
        PairSums
            All zero.
        """
        counts: dict[str, NDArray[Any]] = {name: np.zeros(n_groups, np.int64) for name in COUNTS}
        return cls(counts | {name: np.zeros(n_groups) for name in ("weight", *names)})

    @classmethod
    def of(
        cls,
        prediction: ArrayLike,
        truth: ArrayLike,
        weights: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        n_groups: int = 1,
        names: Iterable[str] = PAIR_SUMS,
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
        names : iterable of str, optional
            Names of the sums; default: those of all metrics of pairs.

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
        p, t = _on_cpu(prediction), _on_cpu(truth)
        if p.shape != t.shape:
            raise InvalidValueError(
                f"prediction and truth must have the same shape, got {p.shape} and {t.shape}"
            )
        w = _as_float64(_on_cpu(1.0 if weights is None else weights))
        if not (np.isfinite(w) & (w >= 0)).all():
            raise InvalidValueError("weights must be finite and not negative")
        ids = np.ma.asarray(0 if groups is None else groups).astype(np.intp, casting="same_kind")
        weight = np.broadcast_to(w, t.shape)
        group = np.broadcast_to(np.ma.filled(ids, -1), t.shape)
        total = cls.empty(n_groups, names)
        for slab in slabs(t.shape, tuple(range(t.ndim))):  # parts that stay in cache
            pair = _as_float64(p[slab]), _as_float64(t[slab])
            part = _sums_of_slab(*pair, weight[slab], group[slab], n_groups, names)
            total = total.merge(cls(part))
        return total

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a sum by its name, shape (groups,)."""
        return self.arrays[name]

    @property
    def count(self) -> NDArray[np.int64]:
        """Pairs that count, shape (groups,)."""
        return self["count"]

    @property
    def gaps(self) -> NDArray[np.int64]:
        """Cells without a truth, shape (groups,)."""
        return self["gaps"]

    @property
    def unpredicted(self) -> NDArray[np.int64]:
        """Cells with a truth but no prediction, shape (groups,)."""
        return self["unpredicted"]

    def merge(self, other: PairSums) -> PairSums:
        """Return the sums over the pairs of both.

        Parameters
        ----------
        other : PairSums
            Sums of the same names over other pairs, of as many groups.

        Returns
        -------
        PairSums
            New sums; neither operand changes.

        Raises
        ------
        InvalidValueError
            If the names or the numbers of groups differ.

        References
        ----------
        Chan, Golub, LeVeque (1983), Algorithms for computing the sample variance.
        """
        if len(self.count) != len(other.count):
            raise InvalidValueError(
                f"cannot merge sums of {len(self.count)} and {len(other.count)} groups"
            )
        if self.arrays.keys() != other.arrays.keys():
            raise InvalidValueError(
                f"cannot merge sums with the names {sorted(self.arrays)} and {sorted(other.arrays)}"
            )
        return PairSums(merged(self.arrays, other.arrays))

    def of_all_groups(self) -> PairSums:
        """Return the sums over the pairs of all groups, as one group.

        Returns
        -------
        PairSums
            Sums of one group.
        """
        total = merged_along(self.arrays, 0)
        return PairSums({name: np.atleast_1d(values) for name, values in total.items()})

    def score(self, metric: str) -> NDArray[Any]:
        """Return a metric of each group.

        Parameters
        ----------
        metric : str
            Name of a metric whose sums these are.

        Returns
        -------
        ndarray, shape (groups,)
            NaN where no pair counts, or the metric is undefined.
        """
        return METRICS[metric].formula(self.arrays)


def _sums_of_slab(
    prediction: Floats,
    truth: Floats,
    weight: Floats,
    group: NDArray[np.intp],
    n_groups: int,
    names: Iterable[str],
) -> dict[str, NDArray[Any]]:
    has_group, has_truth, is_predicted = group >= 0, np.isfinite(truth), np.isfinite(prediction)
    is_pair = has_group & has_truth & is_predicted
    flags = {
        "count": is_pair,
        "gaps": has_group & ~has_truth,
        "unpredicted": has_group & has_truth & ~is_predicted,
    }
    counts = {}
    for name, flag in flags.items():
        if n_groups == 1:  # several times as fast
            counts[name] = np.array([np.count_nonzero(flag)])
        else:
            counts[name] = np.bincount(group[flag], minlength=n_groups)
    pairs = Groups(group[is_pair], weight[is_pair], n_groups)
    return counts | pairs.sums(Cells(prediction[is_pair], truth[is_pair]), names)


def _on_cpu(values: Any) -> NDArray[Any]:
    """Return values as an array of numbers on the CPU, masked if they are."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():  # numpy has no bfloat16
            values = values.double()
    array: NDArray[Any] = np.asanyarray(values)
    if array.dtype.kind not in "biufO":
        raise InvalidTypeError(
            f"values to score must be numbers, got dtype {array.dtype}; convert them first, e.g. "
            "durations to hours with da / np.timedelta64(1, 'h'), complex numbers with abs(da)"
        )
    return array


def _as_float64(values: NDArray[Any]) -> Floats:
    """Return values as float64, with NaN where an array is masked."""
    array = np.asarray(values, np.float64)
    if np.ma.is_masked(values):
        return np.where(np.ma.getmaskarray(values), np.nan, array)
    return array
