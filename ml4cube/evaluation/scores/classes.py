"""Scores of classes, from the weights of cells where each is true, predicted, and both."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from ml4cube.evaluation.pair_sums import ratio
from ml4cube.evaluation.scores.intervals import Floats
from ml4cube.evaluation.sums.block_sums import HITS, LOG_SCORE, PREDICTED, TRUE

Sums = dict[str, Floats]


def _by_class(sums: Sums, what: str, n: int) -> Floats:
    return np.stack([sums[f"{what}_{k}"] for k in range(n)])


def recall(sums: Sums, n: int) -> Floats:
    """Return the share of each class that is found, (classes, ...); NaN of classes not there."""
    return ratio(_by_class(sums, HITS, n), _by_class(sums, TRUE, n))


def precision(sums: Sums, n: int) -> Floats:
    """Return how much of what is predicted as each class is true; NaN of those not predicted."""
    return ratio(_by_class(sums, HITS, n), _by_class(sums, PREDICTED, n))


def f1(sums: Sums, n: int) -> Floats:
    """Return the harmonic mean of precision and recall of each class."""
    both = _by_class(sums, TRUE, n) + _by_class(sums, PREDICTED, n)
    return ratio(2 * _by_class(sums, HITS, n), both)


def iou(sums: Sums, n: int) -> Floats:
    """Return the intersection over union of each class, the Jaccard index."""
    hits = _by_class(sums, HITS, n)
    return ratio(hits, _by_class(sums, TRUE, n) + _by_class(sums, PREDICTED, n) - hits)


def frequency(sums: Sums, n: int) -> Floats:
    """Return the share of cells of each class in the truth."""
    true = _by_class(sums, TRUE, n)
    return ratio(true, np.broadcast_to(true.sum(0), true.shape))


def _accuracy(sums: Sums, n: int) -> Floats:
    return ratio(_by_class(sums, HITS, n).sum(0), _by_class(sums, TRUE, n).sum(0))


def _balanced_accuracy(sums: Sums, n: int) -> Floats:
    with warnings.catch_warnings():  # a group without a cell has no score
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.asarray(np.nanmean(recall(sums, n), axis=0))


def _kappa(sums: Sums, n: int) -> Floats:
    true, predicted = _by_class(sums, TRUE, n), _by_class(sums, PREDICTED, n)
    by_chance = ratio((true * predicted).sum(0), true.sum(0) ** 2)
    return ratio(_accuracy(sums, n) - by_chance, 1 - by_chance)


def _log_loss(sums: Sums, n: int) -> Floats:
    return ratio(sums[LOG_SCORE], _by_class(sums, TRUE, n).sum(0))


#: Scores over all classes, of the sums and the number of classes.
OF_ALL: dict[str, Callable[[Sums, int], Floats]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "kappa": _kappa,
    "log_loss": _log_loss,
}
#: Scores of each class, along the first axis of the result.
OF_EACH: dict[str, Callable[[Sums, int], Floats]] = {
    "precision": precision,
    "recall": recall,
    "f1": f1,
    "iou": iou,
    "frequency": frequency,
}
#: Scores that need probabilities.
OF_PROBABILITIES = ("brier", "log_loss")
