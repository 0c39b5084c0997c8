"""Statistics with dims: per level, per pixel, per month, weighted or not.

Deviations are taken from each entry's own mean and corrected once more; blocks are merged by the
formulas of Chan et al. (1979), with weights instead of counts (West 1979; Pébay et al. 2016).
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_real
from ml4cube.core.sums.mergeable import Mergeable, encoded
from ml4cube.core.sums.moments import VariableStatistics, check_exact, raise_too_large
from ml4cube.core.sums.quantiles import Floats, Histogram, Ints

# Cells summed up at a time, which stay in cache, and the least entries of these, so that merging
# costs little.
_SLAB_CELLS, _LEAST_ENTRIES = 2**18, 2**10


@dataclass(frozen=True, eq=False)
class Moments(Mergeable):
    """Count, mean, sum of squared deviations, range, gaps, infinities and weight of each entry."""

    count: Ints
    mean: Floats
    m2: Floats
    min: Floats
    max: Floats
    gaps: Ints
    infs: Ints
    weight: Floats

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Iterate over the arrays."""
        return iter(vars(self).values())

    def map(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Self:
        """Return what a function makes of each array."""
        return type(self)(*map(change, self))

    def merge_at(self, index: Any, other: Moments) -> None:
        """Merge the moments of other cells into the entries at an index, in place."""
        index = (*np.index_exp[index], ...)  # makes a single entry a view, too
        entries = self.map(lambda array: array[index])
        for array, merged in zip(entries, entries.merge(other), strict=True):
            array[...] = merged

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Return the moments of no cells."""
        numbers: dict[str, Any] = {name: np.zeros(shape) for name in ("m2", "weight")}
        numbers |= {name: np.zeros(shape, np.int64) for name in ("count", "gaps", "infs")}
        return cls(**numbers, **{name: np.full(shape, np.nan) for name in ("mean", "min", "max")})

    @classmethod
    def of(
        cls,
        values: NDArray[Any],
        axes: tuple[int, ...],
        where: NDArray[np.bool_] | None = None,
        weights: Floats | None = None,
    ) -> Moments:
        """Sum up a block along `axes`, a slab at a time; cells of weight 0 are left out."""
        check_real("values", values.dtype)
        kept_axes = [axis for axis in range(values.ndim) if axis not in axes]
        total = cls.empty([values.shape[axis] for axis in kept_axes])
        for slab in slabs(values.shape, axes):
            where_here = None if where is None else where[slab]
            weights_here = None if weights is None else weights[slab]
            moments = _slab_moments(values[slab], axes, where_here, weights_here)
            total.merge_at(tuple(slab[axis] for axis in kept_axes), moments)
        return total

    def merge(self, other: Moments) -> Moments:
        """Merge with the moments of other cells of the same entries."""
        weight = self.weight + other.weight
        with np.errstate(invalid="ignore", divide="ignore"):
            share = other.weight / weight
            delta = other.mean - self.mean
            mean = self.mean + delta * share
            m2 = self.m2 + other.m2 + delta * delta * self.weight * share
        only_self, only_other = other.count == 0, self.count == 0
        mean = np.where(only_self, self.mean, np.where(only_other, other.mean, mean))
        m2 = np.where(only_self, self.m2, np.where(only_other, other.m2, m2))
        count, gaps = self.count + other.count, self.gaps + other.gaps
        low, high = np.fmin(self.min, other.min), np.fmax(self.max, other.max)
        merged = (count, mean, m2, low, high, gaps, self.infs + other.infs, weight)
        return Moments(*map(np.asarray, merged))


def slabs(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cut a block that is summed along some axes into slabs of a size that is fast to process."""
    if 0 in shape:
        return
    most = max(_SLAB_CELLS // math.prod(shape[axis] for axis in axes), _LEAST_ENTRIES)
    lengths, size = [1] * len(shape), 1
    # the entries first; of these, and of their cells, those that lie side by side
    for axis in sorted(range(len(shape)), key=lambda axis: (axis in axes, -axis)):
        if axis in axes:
            most = _SLAB_CELLS
        lengths[axis] = min(shape[axis], max(most // size, 1))
        size *= lengths[axis]
    starts = (range(0, n, length) for n, length in zip(shape, lengths, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(first, first + n) for first, n in zip(corner, lengths, strict=True))


def _slab_moments(
    values: NDArray[Any],
    axes: tuple[int, ...],
    used: NDArray[np.bool_] | None,
    weights: Floats | None,
) -> Moments:
    """Sum up one slab: mean first, then deviations from it, then what rounding left of them."""
    # `asarray`, here and below, because sums over all axes are numbers, which take no assignment.
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.array(values, np.float64)
        # Without signaling NaNs (R's NA), next to which fmin may miss numbers, and without -0.0.
        x += 0.0
    if weights is not None and check_weights(weights) == 0:
        used = weights > 0 if used is None else used & (weights > 0)
    if values.dtype.kind in "iu" and values.dtype.itemsize > 4:
        where_used = True if used is None else used
        least = np.min(values, initial=0, where=where_used)
        greatest = np.max(values, initial=0, where=where_used)
        check_exact(int(least), int(greatest))
    cells_per_entry = math.prod(x.shape[axis] for axis in axes)
    used_cells: Any = cells_per_entry
    if used is not None:
        used_cells = used.sum(axes)
        x[~used] = np.nan

    # Count, range, gaps and infinities.
    low, high = _range(x, axes)
    infs = np.zeros(low.shape, np.int64)
    if (np.isinf(low) | np.isinf(high)).any():
        unbounded = np.isinf(x)
        infs = np.asarray(unbounded.sum(axes))
        x[unbounded] = np.nan
        low, high = _range(x, axes)
    left_out = np.asarray(np.isnan(x))
    count = np.asarray(cells_per_entry - left_out.sum(axes))
    gaps = np.asarray(used_cells - count - infs)

    # Mean and squared deviations.
    x[left_out] = 0.0
    # Without weights x itself, else a buffer for weights * x that is filled after each change of x.
    weighted_x = x
    weight = count.astype(np.float64)
    if weights is not None:
        weighted_x = np.multiply(weights, ~left_out, out=np.empty_like(x))
        weight = np.asarray(weighted_x.sum(axes))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if weights is not None:
            np.multiply(weights, x, out=weighted_x)
        mean = np.asarray(weighted_x.sum(axes)) / weight
        x -= np.expand_dims(mean, axes)
        x[left_out] = 0.0
        if weights is not None:
            np.multiply(weights, x, out=weighted_x)
        left_by_rounding = weighted_x.sum(axes)
        x *= weighted_x
        m2 = x.sum(axes) - left_by_rounding * left_by_rounding / weight
        mean = mean + left_by_rounding / weight
    # A constant is its own mean, exactly.
    is_constant = low == high
    mean = np.where(is_constant, low, mean)
    m2 = np.where((count == 0) | is_constant, 0.0, np.maximum(m2, 0.0))
    if not np.isfinite(m2).all():
        raise_too_large(np.nanmin(low), np.nanmax(high))
    return Moments(count, mean, m2, low, high, gaps, infs, weight)


def _range(x: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return the least and greatest number along `axes`, NaN where there is none."""
    low, high = np.fmin.reduce(x, axes), np.fmax.reduce(x, axes)
    return np.asarray(low), np.asarray(high)


def check_weights(weights: Floats) -> float:
    """Return the least weight; raise if one is negative or not finite."""
    least = float(np.min(weights, initial=np.inf))
    if not (least >= 0 and np.max(weights, initial=0.0) < np.inf):
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        raise InvalidValueError(
            f"weights must be finite and not negative (0 leaves a cell out), got {wrong.sum()} "
            f"wrong ones of {wrong.size} ({np.isnan(weights).sum()} of them NaN)"
        )
    return least


@dataclass(frozen=True, eq=False)
class FieldStatistics(VariableStatistics):
    """Statistics with dims: each number is an array over `dims`.

    Parameters
    ----------
    count, mean, m2, min, max, gaps, infs : ndarray, shape (*dims)
        As in `VariableStatistics`. With weights, `mean` and `m2` are weighted, and cells of weight
        0 are left out.
    weight : ndarray of float64, shape (*dims)
        Sum of the weights; the count without weights.
    dims : tuple of str
        Names of the dims; that of a climatology (``"month"``) comes first.
    labels : mapping of str to ndarray
        Coordinate values along dims that have some.
    histogram : Histogram, optional
        Source of the quantiles.
    weighting : str, optional
        The rule by which cells are weighted, if they are.

    Examples
    --------
    >>> m = Moments.of(np.array([[1.0, 3.0], [5.0, np.nan]]), axes=(1,))
    >>> stats = FieldStatistics(*m, dims=("level",))
    >>> stats.mean, stats.std, stats.gaps
    (array([2., 5.]), array([1., 0.]), array([0, 1]))
    """

    # `field()` takes the defaults of `VariableStatistics` away.
    count: Ints = field()  # type: ignore[assignment]
    mean: Floats = field()  # type: ignore[assignment]
    m2: Floats = field()  # type: ignore[assignment]
    min: Floats = field()  # type: ignore[assignment]
    max: Floats = field()  # type: ignore[assignment]
    gaps: Ints = field()  # type: ignore[assignment]
    infs: Ints = field()  # type: ignore[assignment]
    weight: Floats
    dims: tuple[str, ...] = ()
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    histogram: Histogram | None = None
    weighting: str | None = None

    @property
    def moments(self) -> Moments:
        """Fields that are merged cell by cell."""
        return Moments(*(getattr(self, field.name) for field in fields(Moments)))

    def merge(self, other: VariableStatistics) -> Self:
        """Merge with the statistics of other cells.

        Parameters
        ----------
        other : FieldStatistics
            With the same dims in any order, and the same labels, kind of weights and number of
            bins.

        Returns
        -------
        FieldStatistics
            Equal to those of all cells together: moments to rounding, counts and unweighted
            quantiles exactly.

        Raises
        ------
        InvalidValueError
            If dims, labels, weights or histograms differ.
        """
        if isinstance(other, FieldStatistics) and set(other.dims) == set(self.dims):
            other = other._transposed(self.dims)
        mine = self._layout()
        theirs = other._layout() if isinstance(other, FieldStatistics) else "one number each"
        if not isinstance(other, FieldStatistics) or mine != theirs:
            raise InvalidValueError(
                f"cannot merge statistics of {mine} with those of {theirs}; compute both with the "
                "same dims, coordinates, climatology, weights and quantiles"
            )
        moments = self.moments.merge(other.moments)
        histogram = self.histogram
        if histogram is not None and other.histogram is not None:
            histogram = histogram.merge(other.histogram)
        return replace(self, **vars(moments), histogram=histogram)

    def _transposed(self, dims: tuple[str, ...]) -> Self:
        """Return the same statistics with the dims in another order."""
        order = [self.dims.index(dim) for dim in dims]
        moments = self.moments.map(lambda values: values.transpose(order))
        histogram = self.histogram and self.histogram.transposed(order)
        return replace(self, **vars(moments), dims=dims, histogram=histogram)

    def _layout(self) -> str:
        """Describe everything that must be equal to merge."""
        labels = {
            dim: zlib.crc32(json.dumps(encoded(values)).encode())
            for dim, values in sorted(self.labels.items())
        }
        sizes = dict(zip(self.dims, self.mean.shape, strict=True))
        bins = self.histogram.bins if self.histogram else "no"
        weights = f"weights by {self.weighting}" if self.weighting else "no weights"
        return f"{sizes} (labels {labels}, {bins} bins, {weights})"

    @property
    def variance(self) -> Floats:  # type: ignore[override]
        """Population variance (divided by the weight); NaN where `count` is 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.m2 / np.where(self.count, self.weight, np.nan))

    @property
    def std(self) -> Floats:  # type: ignore[override]
        """Population standard deviation; NaN where `count` is 0."""
        return np.asarray(np.sqrt(self.variance))

    def quantile(self, probability: float) -> Floats:
        """Return a quantile of the cells of each entry.

        Parameters
        ----------
        probability : float
            From 0 to 1; 0.5 is the median.

        Returns
        -------
        ndarray of float64, shape (*dims)
            Within `quantile_error` of numpy's ``method="inverted_cdf"``; NaN where there is no
            cell.

        Raises
        ------
        InvalidValueError
            If there is no histogram, or `probability` is not between 0 and 1.
        """
        return quantile_of(self, probability)

    @property
    def quantile_error(self) -> Floats:
        """Bound on the error of `quantile`: the width of a bin, or 0 where it is exact."""
        return _histogram_of(self).width

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; arrays are compressed and base64-encoded.

        Returns
        -------
        dict
            One entry per field.

        Raises
        ------
        InvalidTypeError
            If labels are objects that JSON cannot hold, such as intervals.
        """
        for dim, labels in self.labels.items():
            if encoded(labels)["dtype"] == "object":
                raise InvalidTypeError(
                    f"labels along {dim!r} must be numbers, dates or strings to be written as "
                    f"JSON, got {labels.flat[0]!r}; pickle the statistics instead"
                )
        return super().to_dict()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read the dict that `to_dict` returned.

        Parameters
        ----------
        raw : mapping
            One entry per field.

        Returns
        -------
        FieldStatistics
            Equal to the original, bit for bit.
        """
        stats = super().from_dict(raw)
        if stats.histogram is None:
            return stats
        return replace(stats, histogram=Histogram.from_dict(raw["histogram"]))


def quantile_of(stats: VariableStatistics, probability: float) -> Floats:
    """Return a quantile of each entry, from the histogram of its cells."""
    return _histogram_of(stats).quantile(probability, stats.min, stats.max)


def _histogram_of(stats: VariableStatistics) -> Histogram:
    """Return the histogram; raise if there is none."""
    histogram: Histogram | None = getattr(stats, "histogram", None)
    if histogram is None:
        raise InvalidValueError(
            "these statistics have no histogram; compute them with quantiles=(0.25, 0.5, 0.75), or "
            "with CubeScaler(method='robust')"
        )
    return histogram
