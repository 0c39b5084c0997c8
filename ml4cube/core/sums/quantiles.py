"""Histograms that merge exactly, and the quantiles read from them.

Bins are as wide as a power of two and start at multiples of it. Only bins that hold cells are kept,
and they are the finest of which not more than `bins` hold cells. So a few outliers (a fill value
left undecoded) cost a bin each and leave the others as fine as they were, bins of a part nest in
those of the whole, and the histogram of merged parts is that of all cells, bit for bit, in any
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.sums.mergeable import Mergeable

Floats = NDArray[np.float64]
Reals = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
_Bins = tuple[Floats, NDArray[Any]]  # edges and counts, (*field, width)

# Bins this narrow hold one value each, but for values as small as they are, 2e-308; 2**-exponent
# is still a normal number.
_LEAST_EXPONENT = -1022
# Bins per histogram, and in all of them together: an edge and a count each, 128 MiB.
_MOST_BINS, _FEWEST_BINS, _MOST_IN_ALL = 65_536, 256, 2**23
_BYTES_PER_BIN = 16
# Cells sorted together.
_SORTED_CELLS = 2**17
# Cells counted together without sorting, so few that temporaries stay in cache, and the number of
# counters per bin.
_CELLS_COUNTED, _COUNTERS_PER_BIN = 2**17, 4


def default_bins(entries: int) -> int:
    """Return the number of bins for `entries` histograms: a power of two from 256 to 65536."""
    gigabytes = entries * _FEWEST_BINS * _BYTES_PER_BIN / 2**30
    if gigabytes > 2:
        raise InvalidValueError(
            f"quantiles of {entries} entries would need {gigabytes:.1f} GB of memory; keep fewer "
            "dims, or compute them for a part of the cube at a time"
        )
    bins = _MOST_BINS
    while bins > _FEWEST_BINS and entries * bins > _MOST_IN_ALL:
        bins //= 2
    return bins


@dataclass(frozen=True, eq=False)
class Histogram(Mergeable):
    """Cells per bin, for every entry of a field.

    Bins are ``2**exponent`` wide; at the least exponent each holds one value. `edges` (*field, n)
    are the lower edges of the bins that hold a cell, rising, NaN after the last. `counts` (*field,
    n) are the cells in each bin (int64) or their weights (float64), 0 after the last. `bins`, at
    least 3, is the most bins per entry.
    """

    exponent: Ints
    edges: Floats
    counts: NDArray[Any]
    bins: int

    @classmethod
    def empty(cls, field: tuple[int, ...], bins: int, dtype: Any = np.int64) -> Self:
        """Return histograms of no cells."""
        return cls.gathered(field, bins, (), dtype)

    @classmethod
    def of(cls, values: Reals, bins: int, weights: Floats | None = None) -> Self:
        """Count the cells of each entry of `values` (*field, cells), finite or NaN (left out).

        Cells of weight 0 must be NaN, because a bin without weight would count as one in use.
        """
        field, n = values.shape[:-1], values.shape[-1]
        rows = values.reshape(math.prod(field), n)
        weight_rows = None
        if weights is not None:
            weight_rows = weights.reshape(rows.shape)
        dtype = np.int64 if weights is None else np.float64
        at_once = max(_SORTED_CELLS // max(n, 1), 1)
        parts = []
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            empty = cls.empty((len(rows[some]),), bins, dtype)
            some_weights = None
            if weight_rows is not None:
                some_weights = weight_rows[some]
            parts.append(((some, ...), empty._with_rows(rows[some], some_weights)))
        whole = cls.gathered((len(rows),), bins, parts, dtype)
        shape = (*field, whole.edges.shape[-1])
        exponent = whole.exponent.reshape(field)
        return cls(exponent, whole.edges.reshape(shape), whole.counts.reshape(shape), bins)

    @classmethod
    def gathered(
        cls,
        field: tuple[int, ...],
        bins: int,
        parts: Sequence[tuple[tuple[Any, ...], Histogram]],
        dtype: Any = np.int64,
    ) -> Self:
        """Join the histograms of parts of a field, each with its index, ending in ``...``."""
        width = max([part.edges.shape[-1] for _, part in parts], default=1)
        whole = cls(
            np.full(field, _LEAST_EXPONENT, np.int64),
            np.full((*field, width), np.nan),
            np.zeros((*field, width), dtype),
            bins,
        )
        for index, part in parts:
            used = (*index, slice(part.edges.shape[-1]))
            whole.exponent[index] = part.exponent
            whole.edges[used] = part.edges
            whole.counts[used] = part.counts
        return whole

    def _with_rows(self, cells: Reals, weights: Floats | None) -> Self:
        """Count the cells of each row of an empty histogram."""
        n, total = cells.shape[-1], self
        if n > _SORTED_CELLS:  # there is only one row then
            # Several times as fast as sorting, if it works.
            counted = self._by_counters(cells[0], None if weights is None else weights[0])
            if counted is not None:
                return counted
        for start in range(0, n, _SORTED_CELLS):
            part = (slice(None), slice(start, start + _SORTED_CELLS))
            total = total._with_cells(cells[part], None if weights is None else weights[part])
        return total

    def _with_cells(self, cells: Reals, weights: Floats | None) -> Self:
        """Count more cells of each row, by sorting them."""
        edges = _lower_edges(cells, self.exponent)
        if weights is None:
            edges = np.sort(edges, axis=-1)
            collapsed = _collapsed(edges, (~np.isnan(edges)).astype(np.int64))
        else:
            collapsed = _sorted_and_collapsed(edges, np.where(np.isnan(edges), 0.0, weights))
        return self._fitted(self.exponent, *_joined([(self.edges, self.counts), collapsed]))

    @np.errstate(invalid="ignore")
    def _by_counters(self, values: Reals, weights: Floats | None) -> Self | None:
        """Count the cells of a single row without sorting them."""
        # Counters from the least to the greatest cell are finer than bins need to be. If more of
        # them hold cells than there may be bins, they are merged until they fit. If each holds one
        # value, they are the bins. Otherwise finer ones might fit: return None.
        parts = [slice(i, i + _CELLS_COUNTED) for i in range(0, values.size, _CELLS_COUNTED)]
        low, high = math.nan, math.nan
        for part in parts:
            quiet = values[part] + 0  # next to signaling NaNs (R's NA), fmin may miss numbers
            low = np.fmin(low, float(np.fmin.reduce(quiet)))
            high = np.fmax(high, float(np.fmax.reduce(quiet)))
        if not 0 < high - low < math.inf:
            return None
        finest_width = (high - low) / (_COUNTERS_PER_BIN * self.bins - 2)
        exponent = max(math.frexp(finest_width)[1], _LEAST_EXPONENT + 1)
        width = math.ldexp(1.0, exponent)
        if max(-low, high) >= 2**51 * width:  # float64 cannot tell such bins apart
            return None
        ends = _lower_edges(np.array([[low, high]]), np.full(1, exponent))[0] / width
        first, last = ends.astype(int).tolist()
        counts = np.zeros(last - first + 2, self.counts.dtype)  # counter 0 is for gaps
        # The value that each counter counts, while all its cells have the same value.
        value, one_value_each = np.full(counts.size, np.nan), True
        for part in parts:
            cells = values[part]
            bins = np.multiply(cells, 1.0 / width, dtype=np.float64)
            np.floor(bins, out=bins)
            if width > 1 and first < 0:  # tiny negative values give -0.0
                bins[(bins == 0) & (cells < 0)] = -1
            bins -= first - 1  # the first bin has counter 1
            bins[np.isnan(bins)] = 0
            counter = bins.astype(np.intp)
            counts += np.bincount(counter, None if weights is None else weights[part], counts.size)
            if one_value_each:
                before = value[counter]
                value[counter] = cells
                same = (np.isnan(before) | (before == cells)) & (value[counter] == cells)
                one_value_each = bool((same | (counter == 0)).all())
        counts = counts[1:]
        used = np.flatnonzero(counts)
        if one_value_each:
            exact = _lower_edges(value[np.newaxis, used + 1], self.exponent)
            return self._fitted(self.exponent, *_collapsed(exact, counts[np.newaxis, used]))
        if used.size <= self.bins:
            return None
        while used.size > self.bins:
            # in twos, of which the first is an even multiple of their width
            counts = np.pad(counts, (first % 2, (first + counts.size) % 2))
            counts = counts[::2] + counts[1::2]
            first, exponent, used = first // 2, exponent + 1, np.flatnonzero(counts)
        edges = np.ldexp((used + first).astype(np.float64), exponent)
        row = edges[np.newaxis], counts[np.newaxis, used]
        return type(self)(np.full(1, exponent), *row, self.bins)

    def _fitted(self, exponent: Ints, edges: Floats, counts: NDArray[Any]) -> Self:
        """Double the width of bins until not too many hold cells."""
        too_many = np.asarray((~np.isnan(edges)).sum(-1) > self.bins)
        if too_many.any():
            # Bisection between an exponent that is too fine, and one at which all bins fit.
            rows, too_fine = edges[too_many], exponent[too_many]
            # Halved, so that it does not overflow.
            extent = np.nanmax(rows, -1) / 2 - rows[:, 0] / 2 + np.ldexp(0.5, too_fine)
            fitting = np.maximum(np.frexp(extent / (self.bins - 2))[1] + 1, too_fine + 1)
            step = 1  # small steps first: the widths sought are only slightly narrower
            while (fitting - too_fine > 1).any():
                tried = np.maximum((too_fine + fitting) // 2, fitting - step)
                step *= 2
                fits = _begin_bins(_lower_edges(rows, tried)).sum(-1) <= self.bins
                fitting = np.where(fits, tried, fitting)
                too_fine = np.where(fits, too_fine, tried)
            exponent = exponent.copy()
            exponent[too_many] = fitting
            edges, counts = _collapsed(_lower_edges(edges, exponent), counts)
        return type(self)(exponent, edges, counts, self.bins)

    @property
    def width(self) -> Floats:
        """Width of a bin, which bounds the error of quantiles; 0 where they are exact."""
        return np.where(self.exponent == _LEAST_EXPONENT, 0.0, np.ldexp(1.0, self.exponent))

    def merge(self, other: Histogram) -> Self:
        """Merge with the histogram of other cells; exact in any order if not weighted."""
        mine, theirs = (self.exponent.shape, self.bins), (other.exponent.shape, other.bins)
        if mine != theirs:
            raise InvalidValueError(f"cannot merge histograms of (shape, bins) {mine} and {theirs}")
        exponent = np.asarray(np.maximum(self.exponent, other.exponent))
        parts = [(_lower_edges(each.edges, exponent), each.counts) for each in (self, other)]
        return self._fitted(exponent, *_joined(parts))

    def transposed(self, order: Sequence[int]) -> Self:
        """Transpose the axes of the field."""
        edges, counts = (values.transpose(*order, -1) for values in (self.edges, self.counts))
        return type(self)(self.exponent.transpose(order), edges, counts, self.bins)

    def quantile(self, probability: float, low: ArrayLike, high: ArrayLike) -> Floats:
        """Return a quantile, interpolated in its bin and clipped to the range of the cells."""
        if not 0 <= probability <= 1:
            raise InvalidValueError(f"probability must be from 0 to 1, got {probability!r}")
        columns = self.edges.shape[-1]
        edges, counts = self.edges.reshape(-1, columns), self.counts.reshape(-1, columns)
        width = self.width.reshape(-1)
        quantiles = np.empty(len(edges))
        # A few at a time: cumulative sums need as much memory as the counts.
        at_once = max(2**20 // columns, 1)
        for start in range(0, len(edges), at_once):
            some = slice(start, start + at_once)
            index, fraction = _bin_of_quantile(counts[some], probability)
            quantiles[some] = edges[some][np.arange(len(index)), index] + fraction * width[some]
        return np.asarray(np.clip(quantiles.reshape(self.exponent.shape), low, high))


def _lower_edges(values: Reals, exponent: Ints) -> Floats:
    """Return the lower edge of the bin of each value; exact, since widths are powers of two."""
    with np.errstate(over="ignore", invalid="ignore"):
        width = np.ldexp(1.0, exponent)[..., np.newaxis]
        edges = np.floor(values / width) * width
        # Except that tiny negative values give -0.0.
        edges = np.where((edges == 0) & (values < 0), -width, edges)
        # Values so large are multiples of the width.
        return np.asarray(np.where(np.abs(values) >= width * 2.0**53, values, edges) + 0.0)


def _joined(parts: Sequence[_Bins]) -> _Bins:
    """Concatenate and merge bins of the same entries."""
    filled = [part for part in parts if not np.isnan(part[0]).all()]
    if len(filled) < 2:
        return _collapsed(*(filled or parts)[0])
    edges, counts = (np.concatenate(arrays, axis=-1) for arrays in zip(*filled, strict=True))
    return _sorted_and_collapsed(edges, counts)


def _sorted_and_collapsed(edges: Floats, counts: NDArray[Any]) -> _Bins:
    """Sort each entry by its edges and add up the counts of equal ones."""
    order = np.argsort(edges, axis=-1, kind="stable")
    return _collapsed(np.take_along_axis(edges, order, -1), np.take_along_axis(counts, order, -1))


def _collapsed(edges: Floats, counts: NDArray[Any]) -> _Bins:
    """Add up the counts of equal edges of each entry, which rise, with NaN after the last."""
    begin_bins = _begin_bins(edges)
    bins_per_entry = np.asarray(begin_bins.sum(-1))
    width = max(int(bins_per_entry.max(initial=0)), 1)
    is_used = np.arange(width) < bins_per_entry[..., np.newaxis]
    fewer = np.full(is_used.shape, np.nan)
    sums = np.zeros(is_used.shape, counts.dtype)
    if is_used.any():
        fewer[is_used] = edges[begin_bins]
        sums[is_used] = np.add.reduceat(counts.ravel(), np.flatnonzero(begin_bins))
    return fewer, sums


def _begin_bins(edges: Floats) -> NDArray[np.bool_]:
    """Mark the first of equal edges of each entry, which rise, with NaN after the last."""
    marked: NDArray[np.bool_] = ~np.isnan(edges)
    marked[..., 1:] &= edges[..., 1:] != edges[..., :-1]
    return marked


def _bin_of_quantile(counts: NDArray[Any], probability: float) -> tuple[NDArray[np.intp], Floats]:
    """Return the bin of a quantile in each row, and the fraction of the bin below it."""
    cumulative = np.cumsum(counts, axis=1, dtype=np.float64)
    wanted = probability * cumulative[:, -1:]
    # The first bin that is not empty and reaches the share wanted.
    index = np.argmax((cumulative >= wanted) & (counts > 0), axis=1)
    rows = np.arange(len(counts))
    in_bin = counts[rows, index].astype(np.float64)
    before_bin = cumulative[rows, index] - in_bin
    fraction = (wanted[:, 0] - before_bin) / np.where(in_bin > 0, in_bin, 1.0)
    return index, np.asarray(np.clip(fraction, 0.0, 1.0))
