"""Gaps, distribution and season of one variable, from its sums."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.climatology import GROUPS, group_numbers
from ml4cube.core.sums.fields import Moments
from ml4cube.core.sums.quantiles import Histogram
from ml4cube.cube.classes import MOST_CLASSES, as_text, class_names, holds_classes
from ml4cube.cube.coordinates import dates_along
from ml4cube.insights.sums import Floats, SummedVariable
from ml4cube.splits.cube import microseconds

#: Probabilities of the quantiles.
PROBABILITIES = (0.0, 0.005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.995, 1.0)
# Bins of a histogram, between the quantiles of two probabilities.
_BINS, _LOWEST, _HIGHEST = 40, 0.005, 0.995
# The longest step of each cycle, in days.
_LONGEST_STEP = {"month": 45.0, "season": 135.0}
_MICROSECONDS_PER_DAY = 86_400_000_000


def distribution_of(sums: SummedVariable) -> dict[str, Any]:
    """Return gaps, and the distribution of the values."""
    total = merged_steps(sums.sums.steps)
    gaps = gap_fraction(total, sums.weight_of_step.sum())
    classes = _class_fractions(sums.array, sums.sums.histogram)
    no_quantile = ("probability", [np.nan] * len(PROBABILITIES))
    if classes is not None:
        of_classes = {str(n): v for n, v in classes.variables.items()}
        no_number = {"mean": np.nan, "std": np.nan, "quantile": no_quantile}
        return {"gap_fraction": gaps, **no_number, **of_classes}
    quantiles = [np.nan] * len(PROBABILITIES)
    fractions, edges = _no_bins()
    if total.count:
        histogram = sums.sums.histogram
        quantiles = [float(histogram.quantile(p, total.min, total.max)) for p in PROBABILITIES]
        low, high = (quantiles[PROBABILITIES.index(p)] for p in (_LOWEST, _HIGHEST))
        fractions, edges = _in_equal_bins(histogram, low, high)
    return {
        "gap_fraction": gaps,
        "mean": total.mean,
        "std": np.sqrt(total.m2 / total.weight) if total.count else np.nan,
        "quantile": ("probability", quantiles),
        "histogram": ("bin", fractions),
        "bin_edge": ("edge", edges),
        **_season(sums),
    }


def _class_fractions(array: xr.DataArray, histogram: Histogram) -> xr.Dataset | None:
    """Return the fraction and the name of each class; None if the values are numbers."""
    if not holds_classes(array):
        return None
    used = ~np.isnan(histogram.edges)
    values, counts = histogram.edges[used], histogram.counts[used]
    if histogram.width > 0 or len(values) > MOST_CLASSES:
        return None
    names = class_names(array)
    return xr.Dataset(
        {
            "class_fraction": ("class", counts / (counts.sum() or math.nan)),
            "class_name": ("class", [names.get(v, as_text(v)) for v in values.tolist()]),
        },
        {"class": values},
    )


def merged_steps(steps: Moments) -> Moments:
    """Merge the moments of all steps."""
    steps = steps.map(np.atleast_1d)
    if not len(steps.count):
        return Moments.empty(())
    while (n := len(steps.count)) > 1:
        first, second, rest = (
            steps.map(itemgetter(part))
            for part in (slice(n // 2), slice(n // 2, n // 2 * 2), slice(n // 2 * 2, n))
        )
        merged = first.merge(second)
        steps = Moments(*(np.concatenate(parts) for parts in zip(merged, rest, strict=True)))
    return steps.map(itemgetter(0))


def gap_fraction(moments: Moments, weight: Any) -> Floats:
    """Return the fraction of a weight that belongs to gaps; exactly 0 without gaps."""
    has_gap = moments.gaps + moments.infs > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(has_gap, (1 - moments.weight / weight).clip(0, 1), 0.0)


def _in_equal_bins(histogram: Histogram, low: float, high: float) -> tuple[Floats, Floats]:
    """Return the fractions of cells in equal bins, and the edges of these."""
    least = 4 * _BINS * np.spacing(max(abs(low), abs(high)))
    if high - low <= least:
        half = max(0.5, least)
        low, high = low - half, high + half
    used = ~np.isnan(histogram.edges)
    counts = histogram.counts[used]
    centers = histogram.edges[used] + histogram.width / 2
    shares, edges = np.histogram(centers, _BINS, (low, high), weights=counts)
    return shares / counts.sum(), edges


def _no_bins() -> tuple[Floats, Floats]:
    return np.full(_BINS, np.nan), np.full(_BINS + 1, np.nan)


def _season(sums: SummedVariable) -> dict[str, Any]:
    """Return the mean of each month or season, and the spread of the steps' means in it."""
    by, groups = cycle_of(sums.array, sums.time_dim)
    if by is None:
        return {}
    means, spreads = [], []
    for group in range(len(GROUPS[by])):
        steps = sums.sums.steps.map(itemgetter(groups == group))
        of_steps = steps.mean[steps.count > 0]
        means.append(float(merged_steps(steps).mean))
        spreads.append(float(of_steps.std()) if of_steps.size else np.nan)
    return {by: (by, GROUPS[by]), f"mean_by_{by}": (by, means), f"std_by_{by}": (by, spreads)}


def cycle_of(array: xr.DataArray, time_dim: str | None) -> tuple[str | None, NDArray[Any]]:
    """Return the cycle that the time steps show, if any, and the group of each step."""
    dates = None
    if time_dim is not None:
        dates = dates_along(array.coords.values(), time_dim)
    if dates is not None and dates.size > 1 and not bool(dates.isnull().any()):
        step = np.median(np.abs(np.diff(microseconds(dates)))) / _MICROSECONDS_PER_DAY
        for by, longest in _LONGEST_STEP.items():
            if step <= longest:
                return by, group_numbers(dates.values, by)
    return None, np.empty(0)
