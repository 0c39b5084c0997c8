"""Intervals of scores: how much a score varies with its dates, which depend on one another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_real_number, check_whole

Floats = NDArray[np.float64]

_LEAST_DATES = 15
# Independent dates that a cosine needs, so that errors look independent at its period.
_DATES_OF_COSINE = 5
# With more than eight cosines intervals are hardly narrower, and miss slow changes.
_LEAST_COSINES, _MOST_COSINES = 2, 8


@dataclass(frozen=True)
class Intervals:
    """How intervals are computed: their level, and dates that depend on one another (None: seen).

    A score varies as the sum of what each date adds to it does, and this sum as its slow cosines
    show (the equal-weighted cosine estimator, with quantiles of Student's t for their number).
    """

    level: float
    block_length: int | None

    def __post_init__(self) -> None:
        """Refuse what gives no interval."""
        check_real_number("level", self.level)
        if not 0 < self.level < 1:
            raise InvalidValueError(f"level must be between 0 and 1, got {self.level}")
        if self.block_length is not None:
            check_whole("block_length", self.block_length, 1)

    def around(
        self, without: Floats, is_used: NDArray[np.bool_], longest_lead: Floats
    ) -> tuple[Floats, Floats]:
        """Return half the width of intervals, and the independent dates that there seem to be.

        `without` holds scores without one date, (dates, *scores); `is_used`, which date is in which
        score; `longest_lead`, that of each score in steps. The width is NaN where dates are few.
        """
        is_used = np.broadcast_to(is_used, without.shape)
        dates_first = np.argsort(~is_used, axis=0, kind="stable")
        without, n_dates = np.take_along_axis(without, dates_first, 0), is_used.sum(0)
        longest_lead = np.broadcast_to(longest_lead, n_dates.shape)
        half_width, independent = np.full((2, *n_dates.shape), np.nan)
        for n in np.unique(n_dates[n_dates > 1]):
            scores = n_dates == n
            half_width[scores], independent[scores] = self._of_series(
                without[:n, scores], longest_lead[scores]
            )
        return half_width, independent

    def _of_series(self, without: Floats, longest_lead: Floats) -> tuple[Floats, Floats]:
        """Return the same for scores, (dates, scores), that all have all of the dates."""
        from scipy import fft, special  # take long to import

        n = len(without)
        with np.errstate(invalid="ignore"):  # infinite skills
            added = (n - 1) * (without.mean(0) - without)
        independent = np.minimum(_independent(added), n / longest_lead)
        cosines = np.minimum(independent / _DATES_OF_COSINE, _MOST_COSINES).astype(np.intp)
        if n < _LEAST_DATES:
            cosines[:] = 0
        if self.block_length is not None:
            cosines[:] = min(n // self.block_length, n - 1)
        power = (fft.dct(added, axis=0, norm="ortho")[1:] ** 2).cumsum(0)
        power = np.take_along_axis(power, cosines.clip(min=1)[None] - 1, 0)[0]
        quantile = special.stdtrit(cosines, (1 + self.level) / 2)
        half_width = quantile * np.sqrt(power / cosines.clip(min=1) / n)
        half_width[cosines < _LEAST_COSINES] = np.nan
        independent[np.isnan(added).any(0)] = np.nan
        return half_width, independent


def _independent(added: Floats) -> Floats:
    """Return how many independent dates have the information of a first-order autoregression."""
    n = len(added)
    with np.errstate(invalid="ignore"):
        correlation = (added[1:] * added[:-1]).sum(0) / (added**2).sum(0)
    correlation += (1 + 3 * correlation) / n  # less biased (Marriott and Pope 1954)
    correlation = np.nan_to_num(correlation).clip(0, 1)  # 0 of what does not vary
    return np.asarray(n * (1 - correlation) / (1 + correlation))
