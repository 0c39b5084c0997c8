"""Find predictors that hold what is to be predicted: the target, or means over the test steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.splits.leakage.coarse_fields import Floats, Steps, anomalies

# A predictor of which the target explains more than this holds the target.
_EXPLAINED = 0.999
_LONGEST_LAG = 12
# Rows of the regression, and how many there must be for each of its columns.
_ROWS_AT_MOST = 40_000
_ROWS_PER_COLUMN = 20
# Relative to the variance, what rounding and averaging leave.
_ROUNDING = 1e-6
# A mean over all steps is this much nearer than that of train.
_MUCH_NEARER = 0.01


@dataclass(frozen=True)
class HeldTarget:
    """How a predictor holds the target."""

    # Steps by which the predictor is ahead of the target; None if it sums several steps.
    lag: int | None


def find_target(target: Floats, predictor: Floats, steps: Steps) -> HeldTarget | None:
    """Regress a predictor on the target at the same, earlier and later steps.

    Both are (steps, cells). Earlier values of the target are known when it is predicted, so a
    predictor that they explain is none of those found.
    """
    n = len(target)
    longest = min(_LONGEST_LAG, (n - 1) // 8)
    lags = np.arange(-longest, longest + 1)
    middle = slice(longest, n - longest)
    basis = steps.basis[middle]
    varies = np.ones(target.shape[1], dtype=bool)
    for values in (target, predictor):
        varies &= _variance(anomalies(values, steps.basis)) > _ROUNDING * _variance(values)
    cells = np.flatnonzero(varies)
    most = max(_ROWS_AT_MOST // n, 1)
    if cells.size > most:
        cells = cells[np.linspace(0, cells.size - 1, most).astype(int)]
    # Without season and trend in the same steps, so that a sum of lagged targets stays one
    response = anomalies(predictor[middle, cells], basis).ravel()
    lagged = [np.roll(target[:, cells], -lag, axis=0)[middle] for lag in lags]
    columns = np.stack([anomalies(values, basis).ravel() for values in lagged], axis=1)
    is_finite = np.isfinite(response) & np.isfinite(columns).all(axis=1)
    response, columns = response[is_finite], columns[is_finite]
    if response.size < _ROWS_PER_COLUMN * lags.size:
        return None
    if _explained(response, columns) <= _EXPLAINED:
        return None
    if _explained(response, columns[:, lags < 0]) > _EXPLAINED:
        return None
    single = [_explained(response, columns[:, [i]]) for i in range(lags.size)]
    best = int(np.argmax(single))
    # The other steps may help by chance, so it is a sum only without a step that holds almost all.
    is_single = 1 - single[best] < 2 * (1 - _EXPLAINED)
    return HeldTarget(int(lags[best]) if is_single else None)


def is_mean_of_all_steps(target: Floats, predictor: Floats, steps: Steps) -> bool:
    """Return whether a predictor is the target's mean, or annual cycle, over all steps.

    That of the train steps alone is what may be known.
    """
    is_finite = np.isfinite(target) & np.isfinite(predictor)
    for season in {tuple(steps.season), (0,) * len(steps.season)}:
        seasons = np.array(season)
        if _spread_within(predictor, seasons) > _ROUNDING:
            continue
        of_all = _means(target, seasons, np.ones(len(target), dtype=bool))
        of_train = _means(target, seasons, steps.train)
        is_known = is_finite & np.isfinite(of_all) & np.isfinite(of_train)
        if is_known.sum() < _ROWS_PER_COLUMN:
            continue
        unlike = [
            1
            - _explained(
                predictor[is_known], np.stack([np.ones(is_known.sum()), mean[is_known]], 1)
            )
            for mean in (of_all, of_train)
        ]
        if unlike[0] < _ROUNDING and unlike[0] < _MUCH_NEARER * unlike[1]:
            return True
    return False


def is_centred_by_all_steps(target: Floats, steps: Steps) -> bool:
    """Return whether the means over all steps are 0 and those of the train steps are not.

    Values that are alike in all cells, such as the sine of the hour, may have the mean 0 by nature.
    """
    if target.shape[1] > 1 and (target == target[:, :1]).all():
        return False
    spread = float(np.sqrt(np.nanmax(_variance(target), initial=0.0)))
    if spread == 0 or not steps.train.any():
        return False
    one_season = np.zeros(len(target), dtype=np.intp)
    of_all = np.abs(_means(target, one_season, np.ones(len(target), dtype=bool))[0])
    of_train = np.abs(_means(target, one_season, steps.train)[0])
    return bool(
        np.nanmax(of_all, initial=0.0) < 1e-5 * spread and np.nanmedian(of_train) > 1e-3 * spread
    )


def _variance(values: Floats) -> Floats:
    """Return the variance of each cell, 0 without values."""
    is_finite = np.isfinite(values)
    counts = np.maximum(is_finite.sum(axis=0), 1)
    filled = np.where(is_finite, values, 0.0)
    mean = filled.sum(axis=0) / counts
    variance: Floats = np.where(is_finite, (values - mean) ** 2, 0.0).sum(axis=0) / counts
    return variance


def _explained(response: Floats, columns: Floats) -> float:
    """Return the fraction of the variance that a linear regression explains."""
    centred = response - response.mean()
    total = float(centred @ centred)
    if columns.shape[1] == 0 or total == 0:
        return 0.0
    columns = columns - columns.mean(axis=0)
    rest = centred - columns @ np.linalg.lstsq(columns, centred, rcond=None)[0]
    return 1 - float(rest @ rest) / total


def _means(values: Floats, season: NDArray[np.intp], use: NDArray[np.bool_]) -> Floats:
    """Return the mean of each season's steps in use, at every step of the season."""
    means = np.full(values.shape, np.nan)
    for number in np.unique(season):
        of_season = season == number
        some = values[of_season & use]
        is_finite = np.isfinite(some)
        counts = is_finite.sum(axis=0)
        sums = np.where(is_finite, some, 0.0).sum(axis=0)
        means[of_season] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _spread_within(values: Floats, season: NDArray[np.intp]) -> float:
    """Return the variance within seasons over all variance, over all cells."""
    within = values - _means(values, season, np.ones(len(values), dtype=bool))
    total = float(np.nanvar(values))
    if total > 0:
        return float(np.nanmean(within**2)) / total
    return np.inf
