"""Histograms that merge exactly, and the quantiles read from them.

Bins are as wide as a power of two and start at multiples of it, the finest that fit between the
least and the greatest value. So bins of a part nest in those of the whole, counts are carried over
without loss, and the histogram of merged parts is that of all cells, bit for bit, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError

Floats = NDArray[np.float64]

# Exponents are kept where 2**-exponent is a normal number.
_LEAST_EXPONENT = -1022
# Bins per histogram, and counters in all of them together: 128 MiB.
_MOST_BINS, _FEWEST_BINS, _MOST_COUNTERS = 65_536, 256, 2**24


def default_bins(places: int) -> int:
    """Choose the number of bins for a field of histograms.

    Parameters
    ----------
    places : int
        Histograms there will be: 1 for a variable, levels times months, ...

    Returns
    -------
    int
        A power of two from 256 to 65536, fewer the more histograms there are.

    Raises
    ------
    InvalidValueError
        If even 256 bins each would take more than a gigabyte.

    Examples
    --------
    >>> default_bins(1), default_bins(10_000)
    (65536, 1024)
    """
    if places * _FEWEST_BINS * 8 > 2**30:
        raise InvalidValueError(
            f"quantiles at {places} places would take {places * _FEWEST_BINS * 8 / 2**30:.1f} GB "
            "of counters; keep fewer dims, or take them of a part of the cube at a time"
        )
    bins = _MOST_BINS
    while bins > _FEWEST_BINS and places * bins > _MOST_COUNTERS:
        bins //= 2
    return bins


@dataclass(frozen=True)
class BinGrid:
    """Where the bins of one or many histograms lie.

    Parameters
    ----------
    exponent : ndarray of int64
        Bins are ``2**exponent`` wide.
    start : ndarray of int64
        The first bin begins at ``start * 2**exponent``.
    bins : int
        How many there are.
    """

    exponent: NDArray[np.int64]
    start: NDArray[np.int64]
    bins: int

    @classmethod
    def spanning(cls, low: ArrayLike, high: ArrayLike, bins: int) -> Self:
        """Lay the finest bins that hold every value from `low` to `high`.

        Parameters
        ----------
        low, high : float or ndarray
            Least and greatest value; NaN where there is none.
        bins : int
            At least 2.

        Returns
        -------
        BinGrid
            Bins less than ``2 * (high - low) / (bins - 2)`` wide, or as fine as float64.

        Examples
        --------
        >>> grid = BinGrid.spanning(0.0, 100.0, 256)
        >>> float(grid.width)
        0.5
        """
        least, most = np.nan_to_num(np.asarray(low)), np.nan_to_num(np.asarray(high))
        # no finer than the digits of the values: so bin numbers stay below 2**53
        digits = np.frexp(np.maximum(np.abs(least), np.abs(most)))[1] - 52
        # two powers below what fits for sure, from where the loop goes up
        fit = np.where(most > least, np.frexp((most - least) / bins)[1] - 2, _LEAST_EXPONENT)
        exponent = np.maximum(np.maximum(digits, fit), _LEAST_EXPONENT).astype(np.int64)
        for _ in range(4):
            first, last = _number(least, exponent), _number(most, exponent)
            exponent = exponent + (last - first + 1 > bins)
        return cls(exponent, _number(least, exponent), bins)

    @property
    def width(self) -> Floats:
        """Width of a bin: no quantile is farther off than that."""
        return np.asarray(np.ldexp(1.0, self.exponent))

    def locate(self, values: Floats, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the counter of each value, counting through all histograms.

        Parameters
        ----------
        values : ndarray of float64
            Within the range that the grid spans.
        place : ndarray of int64
            Number of the histogram that each belongs to.

        Returns
        -------
        ndarray of int64
            ``place * bins + bin``.
        """
        inside = _number(values, self.exponent.reshape(-1)[place]) - self.start.reshape(-1)[place]
        return place * self.bins + inside


def _number(values: Floats, exponent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of the bin that a value lies in; exact, since scaling by a power of two is."""
    scaled = np.asarray(values, np.float64) * np.ldexp(1.0, -exponent)
    return np.asarray(np.floor(scaled), np.int64)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Cells per bin, at every place of a field.

    Parameters
    ----------
    grid : BinGrid
        Of the shape of the field.
    counts : ndarray of int64 or float64, shape (*field, bins)
        Cells, or their weights.
    """

    grid: BinGrid
    counts: NDArray[Any]

    def on(self, grid: BinGrid) -> NDArray[Any]:
        """Count by wider bins, without loss.

        Parameters
        ----------
        grid : BinGrid
            Spanning at least the cells counted, with as many bins.

        Returns
        -------
        ndarray, shape (*field, bins)
            Counts in the bins of `grid`.
        """
        flat = self.counts.reshape(-1, self.grid.bins)
        place, old = np.nonzero(flat)
        number = self.grid.start.reshape(-1)[place] + old
        coarser = (grid.exponent - self.grid.exponent).reshape(-1)[place]
        new = (number >> np.minimum(coarser, 62)) - grid.start.reshape(-1)[place]
        counts = np.zeros_like(flat)
        np.add.at(counts, (place, new), flat[place, old])
        return counts.reshape(self.counts.shape)

    def merge(self, other: Histogram, low: ArrayLike, high: ArrayLike) -> Histogram:
        """Combine with the histogram of other cells.

        Parameters
        ----------
        other : Histogram
            Of the same field, with as many bins.
        low, high : float or ndarray
            Range of all cells together.

        Returns
        -------
        Histogram
            That of all cells; with counts of cells the same bits in any order.

        Raises
        ------
        InvalidValueError
            If numbers of bins or shapes differ.
        """
        if self.counts.shape != other.counts.shape:
            raise InvalidValueError(
                f"cannot merge histograms of shapes {self.counts.shape} and {other.counts.shape}"
            )
        grid = BinGrid.spanning(low, high, self.grid.bins)
        return Histogram(grid, self.on(grid) + other.on(grid))

    def quantile(self, probability: float, low: ArrayLike, high: ArrayLike) -> Floats:
        """Read a quantile, between the edges of the bin that holds it.

        Parameters
        ----------
        probability : float
            From 0 to 1.
        low, high : float or ndarray
            Range of the cells, which the result does not leave.

        Returns
        -------
        ndarray of float64, shape (*field)
            Less than a bin's width off a value that has a share `probability` of the cells at
            or below it; NaN where there is no cell.

        Raises
        ------
        InvalidValueError
            If `probability` is not between 0 and 1.
        """
        if not 0 <= probability <= 1:
            raise InvalidValueError(f"a quantile of {probability!r}; give a number from 0 to 1")
        flat = self.counts.reshape(-1, self.grid.bins)
        found = np.empty(len(flat))
        # a few at a time: running sums take as much room as the counts
        for start in range(0, len(flat), max(2**20 // self.grid.bins, 1)):
            rows = slice(start, start + max(2**20 // self.grid.bins, 1))
            found[rows] = _bin_of_quantile(flat[rows], probability)
        position = self.grid.start + found.reshape(self.grid.start.shape)
        value = np.clip(position * self.grid.width, low, high)
        return np.where(np.isnan(low), np.nan, value)


def _bin_of_quantile(counts: NDArray[Any], probability: float) -> Floats:
    """Bin, with the part of it that is needed, up to which a share of each row's cells lies."""
    below = np.cumsum(counts, axis=1, dtype=np.float64)
    wanted = probability * below[:, -1:]
    # the first bin that is not empty and reaches the share wanted
    index = np.argmax((below >= wanted) & (counts > 0), axis=1)
    rows = np.arange(len(counts))
    inside = counts[rows, index].astype(np.float64)
    before = below[rows, index] - inside
    part = (wanted[:, 0] - before) / np.where(inside > 0, inside, 1.0)
    return np.asarray(index + np.clip(part, 0.0, 1.0))
