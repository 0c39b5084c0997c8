"""`METRICS`: every metric once, as a formula of sums that merge.

Scorecards, `score_cube`, the metrics of batches, insights, filled gaps, the tests and the table in
the docs read it, so a new metric is one entry here, and its oracle in `tests/oracle_metrics.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: Sums by name, arrays of one shape; those of classes have a last axis of classes.
Sums = Mapping[str, NDArray[Any]]

#: What is predicted for a cell: a value, several, or a class.
VALUE, MEMBER, QUANTILE = "value", "member", "quantile"
LABEL, PROBABILITY = "label", "probability"
_VALUES, _CLASSES = (VALUE, MEMBER, QUANTILE), (LABEL, PROBABILITY)
#: Units of a metric.
UNITS, SQUARED_UNITS, NO_UNIT, CELLS = "as the values", "as their squares", "1", "cells"

#: Weighted means, and sums of squares of deviations from them and of their products. They merge
#: without the squares of the values, which have no digit of a spread that is small beside them.
MOMENTS = ("prediction_mean", "truth_mean", "prediction_m2", "truth_m2", "product_m2")
#: Weights of the cells where each class is true, is predicted, and both.
CLASS_SUMS = ("true", "predicted", "hits")


@dataclass(frozen=True, eq=False)
class Cells:
    """What is known of the cells that are scored, 1-D and without gaps."""

    prediction: Floats
    truth: Floats
    # NaN where there is none.
    climatology: Floats | None = None
    # The CRPS of several values, or the absolute error of one, and the variance of members.
    crps: Floats | None = None
    variance: Floats | None = None

    @cached_property
    def error(self) -> Floats:
        """Prediction - truth."""
        return self.prediction - self.truth

    def anomaly(self, values: Floats) -> Floats:
        """Return deviations from the climatology, 0 where there is none."""
        assert self.climatology is not None
        return np.nan_to_num(values - self.climatology)


@dataclass(frozen=True)
class Summand:
    """A number of each cell that is summed up with the cell's weight, or its unweighted maximum."""

    of: Callable[[Cells], Any]
    # The field of `Cells` that it needs, beside prediction and truth.
    needs: str = ""
    is_maximum: bool = False


SUMMANDS = {
    "error": Summand(lambda cells: cells.error),
    "absolute_error": Summand(lambda cells: np.abs(cells.error)),
    "squared_error": Summand(lambda cells: cells.error**2),
    "largest_error": Summand(lambda cells: np.abs(cells.error), is_maximum=True),
    "predicted_anomaly": Summand(
        lambda cells: cells.anomaly(cells.prediction) ** 2, needs="climatology"
    ),
    "true_anomaly": Summand(lambda cells: cells.anomaly(cells.truth) ** 2, needs="climatology"),
    "anomaly_product": Summand(
        lambda cells: cells.anomaly(cells.prediction) * cells.anomaly(cells.truth),
        needs="climatology",
    ),
    "crps": Summand(lambda cells: cells.crps, needs="crps"),
    "variance": Summand(lambda cells: cells.variance, needs="variance"),
}


@dataclass(frozen=True)
class MetricEntry:
    """A metric: its formula, and where it applies."""

    name: str
    long_name: str
    unit: str
    # What it can score.
    predictions: tuple[str, ...]
    # Names of what the formula uses, beside the weight: of `SUMMANDS`, `MOMENTS`, `CLASS_SUMS`.
    sums: tuple[str, ...]
    formula: Callable[[Sums], NDArray[Any]]
    lowest: float = 0.0
    highest: float = np.inf
    # Functions that show it unless told otherwise.
    default_of: tuple[str, ...] = ()
    # Whether the result has an axis of classes, the last one.
    is_per_class: bool = False

    @property
    def needs_climatology(self) -> bool:
        """True if it compares deviations from the climatology."""
        return any(SUMMANDS[name].needs == "climatology" for name in self.sums if name in SUMMANDS)

    @property
    def is_of_pairs(self) -> bool:
        """True if prediction and truth are enough: it scores batches, cubes and filled gaps too."""
        needs = [SUMMANDS[name].needs for name in self.sums if name in SUMMANDS]
        return VALUE in self.predictions and not any(needs)

    @property
    def is_of_dates(self) -> bool:
        """True if a date can be left out of its sums, which the intervals of scorecards need."""
        maxima = [name for name in self.sums if name in SUMMANDS and SUMMANDS[name].is_maximum]
        return not maxima and not self.is_per_class


def ratio(numerator: Any, denominator: Any, otherwise: float = np.nan) -> Floats:
    """Divide where the denominator is above 0."""
    out: Floats = np.full_like(numerator, otherwise, dtype=np.float64)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def _mean(name: str) -> Callable[[Sums], Floats]:
    return lambda sums: ratio(sums[name], sums["weight"])


def _root_mean(name: str) -> Callable[[Sums], Floats]:
    return lambda sums: np.sqrt(ratio(sums[name], sums["weight"]))


def _cosine(product: str, first: str, second: str) -> Callable[[Sums], Floats]:
    """Return the formula of a product over the roots of two sums of squares."""

    def formula(sums: Sums) -> Floats:
        spread = np.sqrt(sums[first]) * np.sqrt(sums[second])
        return np.clip(ratio(sums[product], spread), -1.0, 1.0)  # beyond by rounding only

    return formula


def _r2(sums: Sums) -> Floats:
    return 1.0 - ratio(sums["squared_error"], sums["truth_m2"])


def _accuracy(sums: Sums) -> Floats:
    return ratio(sums["hits"].sum(-1), sums["true"].sum(-1))


def _recall(sums: Sums) -> Floats:
    return ratio(sums["hits"], sums["true"])


def _balanced_accuracy(sums: Sums) -> Floats:
    with warnings.catch_warnings():  # a group without a cell has no score
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.asarray(np.nanmean(_recall(sums), axis=-1))


def _kappa(sums: Sums) -> Floats:
    true, predicted = sums["true"], sums["predicted"]
    by_chance = ratio((true * predicted).sum(-1), true.sum(-1) ** 2)
    return ratio(_accuracy(sums) - by_chance, 1 - by_chance)


def _brier(sums: Sums) -> Floats:
    # The squared errors of the classes of a cell are added up, but each has the cell's weight.
    n_classes: int = sums["true"].shape[-1]
    return n_classes * ratio(sums["squared_error"], sums["weight"])


def _f1(sums: Sums) -> Floats:
    return ratio(2 * sums["hits"], sums["true"] + sums["predicted"])


def _iou(sums: Sums) -> Floats:
    return ratio(sums["hits"], sums["true"] + sums["predicted"] - sums["hits"])


def _frequency(sums: Sums) -> Floats:
    true = sums["true"]
    return ratio(true, np.broadcast_to(true.sum(-1, keepdims=True), true.shape))


_EVERYWHERE = ("evaluate", "score_cube", "fill_gaps")
_CARD, _CUBE = ("evaluate",), ("score_cube",)

_ENTRIES = (
    MetricEntry(
        "rmse", "root mean squared error", UNITS, _VALUES,
        ("squared_error",), _root_mean("squared_error"), default_of=_EVERYWHERE,
    ),
    MetricEntry(
        "mse", "mean squared error", SQUARED_UNITS, _VALUES,
        ("squared_error",), _mean("squared_error"),
    ),
    MetricEntry(
        "mae", "mean absolute error", UNITS, _VALUES,
        ("absolute_error",), _mean("absolute_error"), default_of=_EVERYWHERE,
    ),
    MetricEntry(
        "bias", "mean of prediction - truth", UNITS, _VALUES,
        ("error",), _mean("error"), lowest=-np.inf, default_of=_EVERYWHERE,
    ),
    MetricEntry(
        "r2", "1 - squared error / squared deviation of the truth from its mean", NO_UNIT, _VALUES,
        ("squared_error", *MOMENTS), _r2, lowest=-np.inf, highest=1.0, default_of=_CUBE,
    ),
    MetricEntry(
        "correlation", "Pearson's correlation", NO_UNIT, _VALUES,
        MOMENTS, _cosine("product_m2", "prediction_m2", "truth_m2"),
        lowest=-1.0, highest=1.0, default_of=_CUBE,
    ),
    MetricEntry(
        "std_ratio", "standard deviation of the prediction / that of the truth", NO_UNIT, _VALUES,
        MOMENTS, lambda sums: np.sqrt(ratio(sums["prediction_m2"], sums["truth_m2"])),
    ),
    MetricEntry(
        "max_error", "largest absolute error, unweighted", UNITS, _VALUES,
        ("largest_error",), lambda sums: np.where(sums["count"] > 0, sums["largest_error"], np.nan),
    ),
    MetricEntry(
        "acc", "anomaly correlation", NO_UNIT, _VALUES,
        ("predicted_anomaly", "true_anomaly", "anomaly_product"),
        _cosine("anomaly_product", "predicted_anomaly", "true_anomaly"),
        lowest=-1.0, highest=1.0, default_of=_CARD,
    ),
    MetricEntry(
        "crps", "continuous ranked probability score", UNITS, (MEMBER, QUANTILE),
        ("crps",), _mean("crps"), default_of=_CARD,
    ),
    MetricEntry(
        "spread_ratio", "spread of the members / error of their mean", NO_UNIT, (MEMBER,),
        ("variance", "squared_error"),
        lambda sums: np.sqrt(ratio(sums["variance"], sums["squared_error"])), default_of=_CARD,
    ),
    MetricEntry(
        "accuracy", "share of the cells with the true class", NO_UNIT, _CLASSES,
        CLASS_SUMS, _accuracy, highest=1.0, default_of=_CARD,
    ),
    MetricEntry(
        "balanced_accuracy", "mean recall of the true classes", NO_UNIT, _CLASSES,
        CLASS_SUMS, _balanced_accuracy, highest=1.0, default_of=_CARD,
    ),
    MetricEntry(
        "kappa", "Cohen's kappa", NO_UNIT, _CLASSES,
        CLASS_SUMS, _kappa, lowest=-1.0, highest=1.0, default_of=_CARD,
    ),
    MetricEntry(
        "brier", "mean squared error of the probabilities, summed over classes", NO_UNIT,
        (PROBABILITY,), ("squared_error", *CLASS_SUMS), _brier, default_of=_CARD,
    ),
    MetricEntry(
        "log_loss", "mean of -log(probability of the true class)", NO_UNIT,
        (PROBABILITY,), ("log_score", *CLASS_SUMS),
        lambda sums: ratio(sums["log_score"], sums["true"].sum(-1)), default_of=_CARD,
    ),
    MetricEntry(
        "precision", "share of what is predicted as the class that is of it", NO_UNIT, _CLASSES,
        CLASS_SUMS, lambda sums: ratio(sums["hits"], sums["predicted"]),
        highest=1.0, is_per_class=True,
    ),
    MetricEntry(
        "recall", "share of the class that is predicted as it", NO_UNIT, _CLASSES,
        CLASS_SUMS, _recall, highest=1.0, is_per_class=True,
    ),
    MetricEntry(
        "f1", "harmonic mean of precision and recall", NO_UNIT, _CLASSES,
        CLASS_SUMS, _f1, highest=1.0, is_per_class=True,
    ),
    MetricEntry(
        "iou", "intersection over union, the Jaccard index", NO_UNIT, _CLASSES,
        CLASS_SUMS, _iou, highest=1.0, is_per_class=True,
    ),
    MetricEntry(
        "frequency", "share of the cells whose true class it is", NO_UNIT, _CLASSES,
        CLASS_SUMS, _frequency, highest=1.0, is_per_class=True,
    ),
    MetricEntry(
        "count", "cells that are scored", CELLS, (*_VALUES, *_CLASSES),
        (), lambda sums: sums["count"], default_of=_EVERYWHERE,
    ),
    MetricEntry(
        "unpredicted", "cells with a truth but no prediction", CELLS, (*_VALUES, *_CLASSES),
        (), lambda sums: sums["unpredicted"], default_of=_EVERYWHERE,
    ),
    MetricEntry(
        "gaps", "cells without a truth", CELLS, (*_VALUES, *_CLASSES), (), lambda sums: sums["gaps"]
    ),
)  # fmt: skip

#: All metrics by name.
METRICS = {entry.name: entry for entry in _ENTRIES}
#: Those that score batches, cubes and filled gaps; those of scorecards; and those of each class.
PAIR_METRICS = tuple(name for name, entry in METRICS.items() if entry.is_of_pairs)
SCORECARD_METRICS = tuple(name for name, entry in METRICS.items() if entry.is_of_dates)
PER_CLASS_METRICS = tuple(name for name, entry in METRICS.items() if entry.is_per_class)
#: Skills of a prediction over a baseline, 1 - sum / sum of the baseline, by name.
SKILLS = {"skill": "squared_error", "crps_skill": "crps"}


def defaults_of(function: str) -> tuple[str, ...]:
    """Return the names of the metrics that a function shows unless told otherwise."""
    return tuple(name for name, entry in METRICS.items() if function in entry.default_of)


def sums_of(names: Any) -> tuple[str, ...]:
    """Return the names of all sums that metrics need, each once."""
    return tuple(dict.fromkeys(name for metric in names for name in METRICS[metric].sums))


def squared(units: str) -> str:
    """Return squared units, as in "K²" and "(m s-1)²"."""
    if not units:
        return ""
    return f"{units}²" if units.isalpha() else f"({units})²"
