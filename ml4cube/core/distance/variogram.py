"""Autocorrelation along one dim: empirical variogram, and the range of a model fitted to it.

The semivariance at lag h is half the mean squared difference of values that are h apart (Matheron
1963, *Principles of geostatistics*, Economic Geology 58, eq. 1). It grows from the nugget to the
sill. The lag where it stops growing is the range, beyond which values are not correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Lags looked at along one dim: every one up to this number, then fewer and fewer.
_DENSE_LAGS = 24
_SPARSE_LAGS = 24
FEWEST_LAGS = 3
# Pairs that a class must have to count (Journel and Huijbregts 1978, *Mining Geostatistics*).
_FEWEST_PAIRS = 30
# A less usual model is preferred if its misfit is less than this share of the other's.
_CLEARLY_BETTER = 0.35
_RANGES_TRIED = 80
# Share of the longest lag, half the length of the dim, up to which a range counts: a third of the
# length. Fields smaller than their range, less a plane, may seem to have one of a fifth or more;
# the interval of such a range has no upper end.
_SEEN = 2 / 3


@dataclass(frozen=True, eq=False)
class Variogram:
    """Semivariances along one dim and the model fitted to them.

    Lags are in cells, the sill includes the nugget, and `range` is the practical range: the lag at
    which the model reaches 95 % of its sill, at least one cell. Without a model they are NaN and
    `reason` says why. `rising` is True if there is no sill because the semivariance still rises at
    the longest range that can be seen. `interval` are the ends of the 90 % interval of the range.
    """

    lags: Floats
    semivariance: Floats
    pairs: NDArray[np.int64]
    model: str | None = None
    nugget: float = np.nan
    sill: float = np.nan
    range: float = np.nan
    reason: str = ""
    rising: bool = False
    interval: tuple[float, float] = (np.nan, np.nan)

    @property
    def longest_seen(self) -> float:
        """The longest range that can be seen, in cells."""
        return _SEEN * float(self.lags[self.pairs >= _FEWEST_PAIRS].max(initial=1.0))

    @property
    def seen_range(self) -> float:
        """The range; inf if it lies beyond the longest lag."""
        if self.range <= self.lags.max(initial=0.0):
            return self.range
        return float("inf")

    def at(self, lag: Floats) -> Floats:
        """Return the semivariance of the model; NaN without one."""
        if self.model is None:
            return np.full(np.shape(lag), np.nan)
        shape = _MODELS[self.model](np.asarray(lag, dtype=float) / self.range)
        return np.asarray(self.nugget + (self.sill - self.nugget) * shape)


def _spherical(h: Floats) -> Floats:
    s = np.minimum(0.8114 * h, 1.0)
    return np.asarray(1.5 * s - 0.5 * s**3)


def _matern_3_2(h: Floats) -> Floats:
    s = 4.7439 * h
    return np.asarray(1 - (1 + s) * np.exp(-s))


def _matern_5_2(h: Floats) -> Floats:
    s = 5.9183 * h
    return np.asarray(1 - (1 + s + s**2 / 3) * np.exp(-s))


# Shapes from 0 to 1 of the distance in units of the practical range, at which they are 0.95:
# Cressie 1993, *Statistics for Spatial Data*, section 2.3.1; Stein 1999, *Interpolation of Spatial
# Data*, section 2.7, for those of Matérn with smoothness 3/2 and 5/2.
_MODELS: dict[str, Callable[[Floats], Floats]] = {
    "linear": lambda h: np.minimum(0.95 * h, 1.0),
    "spherical": _spherical,
    "exponential": lambda h: np.asarray(1 - np.exp(-2.9957 * h)),
    "matern-3/2": _matern_3_2,
    "matern-5/2": _matern_5_2,
    "gaussian": lambda h: np.asarray(1 - np.exp(-2.9957 * h**2)),
}


class Semivariances(NamedTuple):
    """Mean distance, semivariance and number of pairs of each class of distance."""

    lags: Floats
    semivariance: Floats
    pairs: NDArray[np.int64]

    @property
    def classes(self) -> NDArray[np.int64]:
        """Distance in whole cells of each class."""
        return np.maximum(np.floor(self.lags + 0.5), 1).astype(np.int64)


def semivariances(lines: Floats, positions: Floats) -> Semivariances:
    """Return mean distance, semivariance and number of pairs of each class of distance.

    `lines` has the shape (lines, cells), and pairs with a NaN do not count. `positions` are those
    of the cells, ascending, in units of a cell; classes are one cell wide, so the axis may be
    irregular. The longest distance is half the length of the dim; few pairs lie farther apart.
    """
    # A step is a difference of index. Its pairs are those of all cells with that difference.
    longest = 0.0
    if positions.size:
        longest = float(positions[-1] - positions[0]) / 2
    steps = _steps(positions, longest)
    farthest = np.floor(longest + 0.5)

    # Called twice for each step, because the classes of all pairs take much memory.
    def class_of_pairs(step: int) -> tuple[Floats, NDArray[np.bool_]]:
        # Two cells at nearly one position, on an irregular axis, are a pair of neighbours.
        class_ = np.maximum(np.floor(positions[step:] - positions[:-step] + 0.5), 1.0)
        return class_, class_ <= farthest

    # The classes that occur, because an axis with a wide hole might have very many.
    occurring = [np.unique(class_[is_used]) for class_, is_used in map(class_of_pairs, steps)]
    classes = np.unique(np.concatenate([np.empty(0), *occurring]))
    squares, distances = np.zeros(classes.size), np.zeros(classes.size)
    pairs = np.zeros(classes.size, dtype=np.int64)
    for step in steps:
        distance = positions[step:] - positions[:-step]
        difference = lines[:, step:] - lines[:, :-step]
        is_finite = np.isfinite(difference)
        square = np.where(is_finite, difference, 0.0) ** 2
        count = is_finite.sum(axis=0)
        class_, is_used = class_of_pairs(step)
        index = np.searchsorted(classes, class_[is_used])
        np.add.at(squares, index, square.sum(axis=0)[is_used])
        np.add.at(distances, index, (distance * count)[is_used])
        np.add.at(pairs, index, count[is_used])
    has_pairs = pairs > 0
    mean_square = squares[has_pairs] / pairs[has_pairs]
    return Semivariances(distances[has_pairs] / pairs[has_pairs], mean_square / 2, pairs[has_pairs])


def pool(first: Semivariances, second: Semivariances) -> Semivariances:
    """Return the semivariances of two directions as of one, weighted by their pairs."""
    classes = np.concatenate([first.classes, second.classes])
    distinct, class_index = np.unique(classes, return_inverse=True)
    pairs = np.concatenate([first.pairs, second.pairs])
    lags = np.concatenate([first.lags, second.lags])
    values = np.concatenate([first.semivariance, second.semivariance])

    def total(weights: NDArray[Any]) -> Floats:
        return np.asarray(np.bincount(class_index, weights, distinct.size), dtype=np.float64)

    count = total(pairs)
    return Semivariances(
        total(lags * pairs) / count, total(values * pairs) / count, count.astype(np.int64)
    )


def differ(first: Semivariances, second: Semivariances, cells: float, patches: float) -> bool:
    """Return whether two directions of a field of this range differ by more than chance allows.

    `patches` is the number of independent ones: the cells of the field over those of a range.
    """
    # The log ratio of the semivariances up to a quarter of the range has in isotropic fields a
    # standard deviation of 1.0 over the root of the patches if the field is smooth (gaussian), 0.25
    # if rough (exponential): 40 fields each of 3 to 100 patches. A ratio of ranges of 3 makes it
    # 2.0 and 0.85.
    _, of_first, of_second = np.intersect1d(first.classes, second.classes, return_indices=True)
    near = first.classes[of_first] <= max(cells / 4, 1)
    total_of_first = float(first.semivariance[of_first][near].sum())
    total_of_second = float(second.semivariance[of_second][near].sum())
    if not (total_of_first > 0 and total_of_second > 0):
        return True
    return bool(abs(np.log(total_of_first / total_of_second)) > 2 / np.sqrt(max(patches, 1)))


def _steps(positions: Floats, longest: float) -> list[int]:
    """Return the differences of index to use: all short ones, and fewer of the long ones."""
    n = positions.size
    if n < 2:
        return []
    reach = np.searchsorted(positions, positions + longest + 0.5) - np.arange(n)
    last = min(max(int(reach.max()), 1), n - 1)
    if last <= _DENSE_LAGS + _SPARSE_LAGS:
        return list(range(1, last + 1))
    far = np.geomspace(_DENSE_LAGS + 1, last, _SPARSE_LAGS).round().astype(int)
    return [*range(1, _DENSE_LAGS + 1), *sorted({int(step) for step in far})]


def fit_variogram(
    lags: Floats,
    semivariance: Floats,
    pairs: NDArray[np.int64],
    variance: float | None = None,
) -> Variogram:
    """Fit models from linear and spherical to Matérn and gaussian, and keep the best."""
    # Weighted least squares: each class counts by its pairs over the square of the model's
    # semivariance there (Cressie 1985, *Fitting variogram models by weighted least squares*,
    # Mathematical Geology 17), found by fitting three times. The sill must be reached within the
    # lags, else there is none. If it is, the model is fitted again without the lags beyond the
    # range, which have few pairs, and with the variance of the values as one more estimate of the
    # sill, unless it is far from the sill, as where whole lines differ. On synthetic fields, half
    # as many ranges are then wrong by over 25 %.
    bare = Variogram(lags, semivariance, pairs)
    longest = float(lags.max(initial=0.0))
    enough = pairs >= _FEWEST_PAIRS
    lags, semivariance, pairs = lags[enough], semivariance[enough], pairs[enough]
    if lags.size < FEWEST_LAGS:
        distances = "1 distance has"
        if lags.size != 1:
            distances = f"{lags.size} distances have"
        return replace(bare, reason=f"no sill: only {distances} {_FEWEST_PAIRS} pairs of values")
    largest = float(semivariance.max())
    if not largest > 0:
        return replace(bare, reason="no sill: all values along it are equal")
    scaled = semivariance / largest  # so that sums of squares neither overflow nor vanish
    count = pairs.astype(float)
    best = _best(lags, scaled, count)
    seen = bare.longest_seen
    if best.range > seen:
        reason = f"no sill: semivariance still rises at {seen:.3g} cells, the longest range to see"
        return replace(bare, reason=reason, rising=True)
    for _ in range(2):
        near = lags <= max(best.range, lags[min(FEWEST_LAGS, lags.size - 1)])
        anchor = np.nan if variance is None else variance / largest
        if not 0.75 <= anchor / (best.nugget + best.partial) <= 1.33:
            break
        again = _best(
            np.append(lags[near], 100 * longest),  # where every model has its sill
            np.append(scaled[near], anchor),
            np.append(count[near], 0.3 * count[near].sum()),
        )
        if again.range > seen:
            break
        best = again
    nugget, sill = best.nugget * largest, (best.nugget + best.partial) * largest
    return replace(bare, model=best.model, nugget=nugget, sill=sill, range=max(best.range, 1.0))


def nearest_model(lags: Floats, semivariance: Floats, pairs: NDArray[np.int64]) -> Variogram | None:
    """Return the model nearest to all semivariances, though its range may lie beyond the lags.

    None if fewer than three lags have enough pairs, or all values are equal. Unlike that of
    `fit_variogram`, its sill may be a guess: ask for no lag far beyond the longest one.
    """
    enough = pairs >= _FEWEST_PAIRS
    lags, semivariance, pairs = lags[enough], semivariance[enough], pairs[enough]
    largest = float(semivariance.max(initial=0.0))
    if lags.size < FEWEST_LAGS or not largest > 0:
        return None
    best = _best(lags, semivariance / largest, pairs.astype(float))
    return Variogram(
        lags,
        semivariance,
        pairs,
        model=best.model,
        nugget=best.nugget * largest,
        sill=(best.nugget + best.partial) * largest,
        range=best.range,
    )


def with_interval(variogram: Variogram, length: float, lines: float, n_dims: int) -> Variogram:
    """Return the variogram with the 90 % interval of its range.

    `length` is that of the dim, in cells, and `lines` the number of independent ones. A range that
    is that of `n_dims` dims changes the number of lines too. A dim without a sill has an interval
    from the shortest range that would not be seen.
    """
    if not (variogram.rising or variogram.model):
        return variogram
    cells = variogram.longest_seen if variogram.rising else variogram.range
    # All true ranges of which the estimate lies between the quantiles 0.05 and 0.95.
    # Beyond a third of the length nothing is known.
    true = np.geomspace(cells / 3, max(length / 3, cells), 400)
    ranges_in_length = length / true
    lines_if_true = np.maximum(lines * (cells / true) ** (n_dims - 1), 1)
    below, above = _errors(ranges_in_length, lines_if_true)
    log_ratio = np.log(cells / true)
    is_possible = (log_ratio <= above) & ((log_ratio >= -below) | variogram.rising)
    low = float(true[is_possible].min(initial=cells))
    high = np.inf if is_possible[-1] else float(true[is_possible].max(initial=cells))
    return replace(variogram, interval=(max(low, 1.0), max(high, 1.0)))


def _errors(ranges_in_length: Floats, lines: Floats) -> tuple[Floats, Floats]:
    """Return how far the log of an estimate is below and above the true one, in 90 % of runs."""
    # Fitted to quantiles of simulated exponential fields (benchmarks/honesty_ranges.py), 40 to 150
    # for each number; a dim without a sill counts as an estimate above.
    #   ranges in the length     3            5            7           10           20
    #   one dim             -1.85, above  -1.53, above  -1.34, .20  -1.21, .13  -.92, .25
    #   two dims             -.83, above   -.56, .10     -.43, .09   -.34, .12  -.08, .08
    #   three dims           -.51, above   -.22, .14     -.13, .09   -.08, .15
    # Gaussian fields have errors that are smaller, but for +.48 with 7 ranges in one dim.
    below = 3.3 / (ranges_in_length**0.45 * lines**0.65)
    return np.hypot(below, 0.05), np.hypot(np.minimum(below / 2, 0.35), 0.08)


class _Fit(NamedTuple):
    loss: float
    model: str
    range: float
    nugget: float
    partial: float  # the sill without the nugget


def _best(lags: Floats, gamma: Floats, pairs: Floats) -> _Fit:
    """Return the best model of the semivariances `gamma`.

    Less usual models (with a nugget, or a sharp bend) need a clearly better fit.
    """

    def best_of(models: Iterable[str], has_nugget: bool) -> _Fit:
        return min(_fit_model(name, lags, gamma, pairs, has_nugget) for name in models)

    best = best_of([name for name in _MODELS if name != "linear"], has_nugget=False)
    linear, with_nugget = best_of(["linear"], has_nugget=False), best_of(_MODELS, has_nugget=True)
    for less_usual in (linear, with_nugget):
        if less_usual.loss < best.loss * _CLEARLY_BETTER:
            best = less_usual
    return best


def _fit_model(name: str, lags: Floats, gamma: Floats, pairs: Floats, has_nugget: bool) -> _Fit:
    """Fit one model, with or without a nugget."""
    expected = np.maximum(gamma, 1e-3 * gamma.max())
    for _ in range(3):
        weights = pairs / expected**2
        weights = weights / weights.sum()
        tried = np.geomspace(0.3 * lags.min(), 4 * lags.max(), _RANGES_TRIED)
        for _ in range(3):  # three grids, each within the two steps around the last one's best
            loss, nuggets, partial = _solve(name, tried, lags, gamma, weights, has_nugget)
            i = int(np.argmin(loss))
            fit = _Fit(float(loss[i]), name, float(tried[i]), float(nuggets[i]), float(partial[i]))
            tried = np.geomspace(tried[max(i - 1, 0)], tried[min(i + 1, tried.size - 1)], 15)
        fitted = fit.nugget + fit.partial * _MODELS[name](lags / fit.range)
        expected = np.maximum(fitted, 1e-3 * gamma.max())
    return fit


def _solve(
    name: str, ranges: Floats, lags: Floats, gamma: Floats, weights: Floats, has_nugget: bool
) -> tuple[Floats, Floats, Floats]:
    """Return loss, best nugget and best partial sill, neither below 0, for every range tried."""
    shape = _MODELS[name](lags[None, :] / ranges[:, None])
    nuggets = np.zeros(ranges.size)
    # Without a nugget, gamma over shape is a line through zero.
    partial = ((shape * gamma) @ weights) / np.maximum((shape**2) @ weights, 1e-300)
    if has_nugget:
        mean_shape, mean_gamma = shape @ weights, float(gamma @ weights)
        across = (shape * gamma) @ weights - mean_shape * mean_gamma
        spread = (shape**2) @ weights - mean_shape**2
        slope = np.where(spread > 1e-14, across / np.maximum(spread, 1e-14), 0.0)
        slope = np.maximum(slope, 0.0)  # at worst nothing but nugget
        intercept = mean_gamma - slope * mean_shape
        nuggets = np.maximum(intercept, 0.0)
        partial = np.where(intercept > 0, slope, partial)
    residual = gamma[None, :] - nuggets[:, None] - partial[:, None] * shape
    return (residual**2) @ weights, nuggets, partial
