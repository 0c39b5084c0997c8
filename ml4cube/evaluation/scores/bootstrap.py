"""Block bootstrap: blocks of consecutive samples are drawn with replacement."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_real_number, check_whole
from ml4cube.evaluation.cells.timing import date_keys

Floats = NDArray[np.float64]

_LEAST_BLOCKS = 5


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are computed: their level, draws, and the samples of a block (None: a rule)."""

    level: float
    n_boot: int
    block_length: int | None
    seed: int

    def __post_init__(self) -> None:
        """Refuse what gives no interval."""
        check_real_number("level", self.level)
        if not 0 < self.level < 1:
            raise InvalidValueError(f"level must be between 0 and 1, got {self.level}")
        check_whole("n_boot", self.n_boot, 0)
        check_whole("seed", self.seed, 0)
        if self.block_length is not None:
            check_whole("block_length", self.block_length, 1)

    def length(self, samples: xr.DataArray, leads: xr.DataArray | None) -> int:
        """Return the samples of a block: the longest lead, and the cube root of all, or more.

        Leads are numbers in the unit of `date_keys`.
        """
        if self.block_length is not None:
            return self.block_length
        n = samples.size
        length: int = max(1, round(float(n) ** (1 / 3)))
        if leads is not None and n > 1:
            # forecasts whose dates overlap have errors in common
            longest, step = leads.values.max(), np.median(np.diff(date_keys(samples.values)[0]))
            # months differ in length
            length = max(length, math.ceil(float(longest / step) - 0.25))
        return length

    def too_few(self, samples: xr.DataArray, leads: xr.DataArray | None) -> str:
        """Return why there are no intervals, an empty string if there are."""
        n, length = samples.size, self.length(samples, leads)
        if not self.n_boot:
            return "n_boot is 0"
        few = f"{n} dates are fewer than {_LEAST_BLOCKS} blocks of {length}"
        return few if n < _LEAST_BLOCKS * length else ""

    def draw(self, samples: xr.DataArray, leads: xr.DataArray | None) -> Draws | None:
        """Draw blocks; None if the samples are too few.

        The last sample is followed by the first one, so that all have the same chance (Politis and
        Romano 1992).
        """
        if self.too_few(samples, leads):
            return None
        n, length = samples.size, self.length(samples, leads)
        rng = np.random.default_rng(self.seed)
        starts = rng.integers(n, size=(self.n_boot, math.ceil(n / length)))
        drawn = (starts[:, :, None] + np.arange(length)) % n
        drawn = drawn.reshape(self.n_boot, -1)[:, :n]
        flat = (np.arange(self.n_boot)[:, None] * n + drawn).ravel()
        counts = np.bincount(flat, minlength=self.n_boot * n).reshape(-1, n).astype(np.float64)
        return Draws(counts, _tail(self.level, n / length))


@dataclass(frozen=True, eq=False)
class Draws:
    """How often each draw has each sample, shape (draws, samples)."""

    counts: Floats
    # Fraction of draws beyond each end of an interval.
    tail: float

    def interval(self, scores: Floats) -> Floats:
        """Return the two ends, the first axis, of the interval of the scores of all draws."""
        with warnings.catch_warnings():  # a group without a value has no interval either
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            return np.asarray(np.nanquantile(scores, [self.tail, 1 - self.tail], axis=0))


def _tail(level: float, n_blocks: float) -> float:
    """Return the fraction of draws beyond each end.

    It is smaller than (1 - level) / 2 since few blocks differ less than the many that they stand
    for: by the factor sqrt(n / (n - 1)), and as Student's t does from a normal variable (Hesterberg
    2015, What teachers should know about the bootstrap, The American Statistician 69).
    """
    from scipy import stats  # takes long to import

    t = stats.t.ppf((1 + level) / 2, n_blocks - 1)
    return float(stats.norm.cdf(-t * math.sqrt(n_blocks / (n_blocks - 1))))
