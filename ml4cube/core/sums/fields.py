"""Statistics at every place of a field: per level, per pixel, per month, weighted or not.

Deviations are taken from each place's own mean and corrected once more; blocks are merged by the
formulas of Chan et al. (1979), with weights in the place of counts (West 1979; Pébay et al. 2016).
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import cftime
import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.sums.moments import VariableStatistics, check_exact
from ml4cube.core.sums.quantiles import Floats, Histogram

Ints = NDArray[np.int64]

# Cells summed up at a time: few, since fresh memory for what is made of them costs more than the
# sums, but several of each place, since merging costs as much as summing up three.
_SLAB_CELLS, _LEAST_PER_PLACE = 2**18, 8
# Dates of other calendars are written as whole numbers of these, which lose nothing.
_TICKS = "microseconds since 2000-01-01"


class Moments(NamedTuple):
    """Count, mean, sum of squared deviations, range, gaps, infinities and weight at each place."""

    count: Ints  # type: ignore[assignment]
    mean: Floats
    m2: Floats
    min: Floats
    max: Floats
    gaps: Ints
    infs: Ints
    weight: Floats

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Return the moments of no cells.

        Parameters
        ----------
        shape : sequence of int
            Lengths of the axes that are kept.

        Returns
        -------
        Moments
            Counts of 0 and means of NaN.
        """
        nothing, none = np.zeros(shape, np.int64), np.full(shape, np.nan)
        return cls(
            nothing, none, np.zeros(shape), none.copy(), none.copy(), nothing.copy(),
            nothing.copy(), np.zeros(shape),
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        values: NDArray[Any],
        axes: tuple[int, ...],
        where: NDArray[np.bool_] | None = None,
        weights: Floats | None = None,
    ) -> Moments:
        """Sum up a block along `axes`, a slab at a time.

        Parameters
        ----------
        values : ndarray of float, int or bool
            Left as they are.
        axes : tuple of int
            Axes to sum up along; the others are kept.
        where : ndarray of bool, optional
            Cells to use, of the shape of `values`.
        weights : ndarray of float64, optional
            Of the shape of `values`, not negative; a cell of weight 0 is left out altogether.

        Returns
        -------
        Moments
            Arrays of the shape kept.

        Raises
        ------
        InvalidTypeError
            If `values` are no real numbers.
        InvalidValueError
            If values are too large to be squared, integers too large for float64, or a weight is
            negative or not finite.
        """
        if values.dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"values are of dtype {values.dtype}, statistics need real numbers; "
                "leave the variable out or convert it"
            )
        kept = tuple(n for axis, n in enumerate(values.shape) if axis not in axes)
        total: Moments | None = None
        for slab in _slabs(values.shape, axes):
            chosen = None if where is None else where[slab]
            weighed = None if weights is None else weights[slab]
            found = _slab_moments(values[slab], axes, chosen, weighed)
            total = found if total is None else total.merge(found)
        return cls.empty(kept) if total is None else total

    def merge(self, other: Moments) -> Moments:
        """Combine with the moments of other cells at the same places.

        Parameters
        ----------
        other : Moments
            Of other cells.

        Returns
        -------
        Moments
            Of both.
        """
        weight = self.weight + other.weight
        with np.errstate(invalid="ignore", divide="ignore"):
            share = other.weight / weight
            delta = other.mean - self.mean
            mean = self.mean + delta * share
            m2 = self.m2 + other.m2 + delta * delta * self.weight * share
        for_self, for_other = other.count == 0, self.count == 0
        mean = np.where(for_self, self.mean, np.where(for_other, other.mean, mean))
        m2 = np.where(for_self, self.m2, np.where(for_other, other.m2, m2))
        return Moments(
            np.asarray(self.count + other.count),
            mean,
            m2,
            np.asarray(np.fmin(self.min, other.min)),
            np.asarray(np.fmax(self.max, other.max)),
            np.asarray(self.gaps + other.gaps),
            np.asarray(self.infs + other.infs),
            np.asarray(weight),
        )


def _slabs(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cut a block along a summed axis, the first that will do, into slabs quick to work on."""
    size = math.prod(shape)
    places = size // max(math.prod(shape[axis] for axis in axes), 1)
    cells = max(_SLAB_CELLS, _LEAST_PER_PLACE * places)
    whole = [slice(None)] * len(shape)
    if not axes or size <= cells:
        if size:
            yield tuple(whole)
        return
    fine_enough = [a for a in axes if size // shape[a] <= cells]
    axis = fine_enough[0] if fine_enough else max(axes, key=lambda a: shape[a])
    slabs = -(-shape[axis] // max(shape[axis] * cells // size, 1))
    for ends in pairwise(shape[axis] * slab // slabs for slab in range(slabs + 1)):
        yield (*whole[:axis], slice(*ends), *whole[axis + 1 :])


def _slab_moments(
    values: NDArray[Any],
    axes: tuple[int, ...],
    where: NDArray[np.bool_] | None,
    weights: Floats | None,
) -> Moments:
    """Sum up one slab: mean first, then deviations from it, then what rounding left of them."""
    with np.errstate(invalid="ignore", over="ignore"):
        # asarray here and below: numpy makes numbers, which cannot be written to, of no dims
        x = np.array(values, np.float64)
        # without signaling NaNs (R's NA), beside which fmin may forget numbers, and without -0.0
        x += 0.0
    used = where
    if weights is not None:
        least_weight = check_weights(weights)
        if least_weight == 0:
            used = weights > 0 if used is None else used & (weights > 0)
    if values.dtype.kind in "iu" and values.dtype.itemsize > 4:
        among = True if used is None else used
        least, greatest = (f(values, initial=0, where=among) for f in (np.min, np.max))
        check_exact(int(least), int(greatest))
    all_cells = math.prod(x.shape[axis] for axis in axes)
    cells: Any = all_cells
    if used is not None:
        cells = used.sum(axes)
        x[~used] = np.nan
    low, high = _range(x, axes)
    infs = np.zeros(low.shape, np.int64)
    if (np.isinf(low) | np.isinf(high)).any():
        unbounded = np.isinf(x)
        infs = np.asarray(unbounded.sum(axes))
        x[unbounded] = np.nan
        low, high = _range(x, axes)
    left_out = np.asarray(np.isnan(x))
    count = np.asarray(all_cells - left_out.sum(axes))
    gaps = np.asarray(cells - count - infs)
    x[left_out] = 0.0
    # by weights, a buffer that is filled anew once x has changed; without any, x itself
    weight, weighted = count.astype(np.float64), x
    if weights is not None:
        weighted = np.multiply(weights, ~left_out, out=np.empty_like(x))
        weight = np.asarray(weighted.sum(axes))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if weights is not None:
            np.multiply(weights, x, out=weighted)
        mean = np.asarray(weighted.sum(axes)) / weight
        x -= np.expand_dims(mean, axes)
        x[left_out] = 0.0
        if weights is not None:
            np.multiply(weights, x, out=weighted)
        rest = weighted.sum(axes)
        x *= weighted
        m2 = x.sum(axes) - rest * rest / weight
        mean = mean + rest / weight
    # a constant is its own mean, exactly
    constant = low == high
    mean = np.where(constant, low, mean)
    m2 = np.where((count == 0) | constant, 0.0, np.maximum(m2, 0.0))
    if not np.isfinite(m2).all():
        raise InvalidValueError(
            f"values from {np.nanmin(low):g} to {np.nanmax(high):g} are too large to be squared in "
            "float64; is a fill value left undecoded?"
        )
    return Moments(count, mean, m2, low, high, gaps, infs, weight)


def _range(x: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Least and greatest number along `axes`, NaN where there is none."""
    low, high = np.fmin.reduce(x, axes), np.fmax.reduce(x, axes)
    return np.asarray(low), np.asarray(high)


def check_weights(weights: Floats) -> float:
    """Refuse weights that are negative or not finite.

    Parameters
    ----------
    weights : ndarray
        Any shape.

    Returns
    -------
    float
        The least.

    Raises
    ------
    InvalidValueError
        If there are such.
    """
    least = float(np.min(weights, initial=np.inf))
    if not (least >= 0 and np.max(weights, initial=0.0) < np.inf):
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        raise InvalidValueError(
            f"{wrong.sum()} of {wrong.size} weights are negative or not finite "
            f"({np.isnan(weights).sum()} of them NaN); give finite ones that are not negative "
            "(0 leaves a cell out)"
        )
    return least


@dataclass(frozen=True, eq=False)
class FieldStatistics(VariableStatistics):
    """`VariableStatistics` at every place of a field: each number is an array over `dims`.

    Parameters
    ----------
    count, mean, m2, min, max, gaps, infs : ndarray, shape (*dims)
        As in `VariableStatistics`. With weights, `mean` and `m2` are weighted sums; cells of
        weight 0 are left out.
    weight : ndarray of float64, shape (*dims)
        Sum of the weights; the count where there are none.
    dims : tuple of str
        Names of the dims kept; a climatology's own (``"month"``) comes first.
    labels : mapping of str to ndarray
        Coordinate values along dims that have some.
    histogram : Histogram, optional
        What quantiles are read from.
    weighting : {"area", "given"}, optional
        What the weights were, where there were any.

    Examples
    --------
    >>> m = Moments.of(np.array([[1.0, 3.0], [5.0, np.nan]]), axes=(1,))
    >>> stats = FieldStatistics(*m, dims=("level",))
    >>> stats.mean, stats.std, stats.gaps
    (array([2., 5.]), array([1., 0.]), array([0, 1]))
    """

    count: Ints = field(default_factory=lambda: np.zeros((), np.int64))  # type: ignore[assignment]
    mean: Floats = field(default_factory=lambda: np.full((), np.nan))  # type: ignore[assignment]
    m2: Floats = field(default_factory=lambda: np.zeros(()))  # type: ignore[assignment]
    min: Floats = field(default_factory=lambda: np.full((), np.nan))  # type: ignore[assignment]
    max: Floats = field(default_factory=lambda: np.full((), np.nan))  # type: ignore[assignment]
    gaps: Ints = field(default_factory=lambda: np.zeros((), np.int64))  # type: ignore[assignment]
    infs: Ints = field(default_factory=lambda: np.zeros((), np.int64))  # type: ignore[assignment]
    weight: Floats = field(default_factory=lambda: np.zeros(()))
    dims: tuple[str, ...] = ()
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    histogram: Histogram | None = None
    weighting: str | None = None

    @property
    def moments(self) -> Moments:
        """The numbers as they are merged."""
        return Moments(
            self.count, self.mean, self.m2, self.min, self.max, self.gaps, self.infs, self.weight
        )

    def merge(self, other: VariableStatistics) -> Self:
        """Combine with the statistics of other cells of the same field.

        Parameters
        ----------
        other : FieldStatistics
            With the same dims in any order, the same labels and kind of weights, and a histogram
            if this one has one.

        Returns
        -------
        FieldStatistics
            As if all cells had been summed up together: moments to rounding, counts and
            unweighted quantiles exactly.

        Raises
        ------
        InvalidValueError
            If dims, labels, weights or histograms do not fit.
        """
        if isinstance(other, FieldStatistics) and set(other.dims) == set(self.dims):
            other = other._transposed(self.dims)
        mine = self._form()
        theirs = other._form() if isinstance(other, FieldStatistics) else "one number each"
        if not isinstance(other, FieldStatistics) or mine != theirs:
            raise InvalidValueError(
                f"cannot merge statistics of {mine} with those of {theirs}; compute both with "
                "the same dims, coordinates, climatology, weights and quantiles"
            )
        moments = self.moments.merge(other.moments)
        histogram = self.histogram
        if histogram is not None and other.histogram is not None:
            histogram = histogram.merge(other.histogram)
        return type(self)(*moments, self.dims, self.labels, histogram, self.weighting)

    def _transposed(self, dims: tuple[str, ...]) -> Self:
        """Put the dims in another order."""
        order = [self.dims.index(dim) for dim in dims]
        moments = Moments._make(values.transpose(order) for values in self.moments)
        histogram = self.histogram and self.histogram.transposed(order)
        return type(self)(*moments, dims, self.labels, histogram, self.weighting)

    def _form(self) -> str:
        """What two of them must share to be merged, as text."""
        labels = {
            dim: zlib.crc32(json.dumps(encoded(values)).encode())
            for dim, values in sorted(self.labels.items())
        }
        sizes = dict(zip(self.dims, self.mean.shape, strict=True))
        bins = self.histogram.bins if self.histogram else "no"
        weights = f"{self.weighting} weights" if self.weighting else "no weights"
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
        """Read a quantile of the cells at each place.

        Parameters
        ----------
        probability : float
            From 0 to 1; 0.5 is the median.

        Returns
        -------
        ndarray of float64, shape (*dims)
            Off by less than `quantile_error` from that of numpy's ``method="inverted_cdf"``, or
            that itself where the error is 0; NaN where there is no cell.

        Raises
        ------
        InvalidValueError
            If there is no histogram, or `probability` is not between 0 and 1.
        """
        return self._counted().quantile(probability, self.min, self.max)

    @property
    def quantile_error(self) -> Floats:
        """Bound on the error of `quantile` at each place: a bin's width.

        0 where it is exactly that of numpy's ``method="inverted_cdf"``, the least value with the
        asked share of the cells at or below it.
        """
        return self._counted().width

    def _counted(self) -> Histogram:
        """The histogram, or an error that says how to get one."""
        if self.histogram is None:
            raise InvalidValueError(
                "these statistics have no histogram; compute them with quantiles=(0.25, 0.5, 0.75)"
            )
        return self.histogram

    def __eq__(self, other: object) -> bool:
        """Whether every number, dim, label and bin is the same; NaN equals NaN."""
        if not isinstance(other, FieldStatistics):
            return NotImplemented
        return self._entry() == other._entry()

    def __hash__(self) -> int:
        """The same for equal statistics, in every process."""
        return zlib.crc32(json.dumps(self._entry(), sort_keys=True).encode())

    def to_dict(self) -> dict[str, Any]:
        """Write as plain JSON values; arrays as base64 of their bytes.

        Returns
        -------
        dict
            One entry per field.

        Raises
        ------
        InvalidTypeError
            If labels are objects that JSON does not hold, such as intervals.
        """
        entry = self._entry()
        for dim, labels in entry["labels"].items():
            if labels["dtype"] == "object":
                raise InvalidTypeError(
                    f"labels along {dim!r} are objects such as {self.labels[dim].flat[0]!r}, which "
                    "JSON does not hold; give the dim numbers, dates or texts before you compute "
                    "statistics, or pickle them"
                )
        return entry

    def _entry(self) -> dict[str, Any]:
        """What two of them must share to be equal, as plain values."""
        arrays = {name: encoded(values) for name, values in self.moments._asdict().items()}
        labels = {dim: encoded(values) for dim, values in self.labels.items()}
        entry: dict[str, Any] = {"dims": list(self.dims), "labels": labels, **arrays}
        if self.weighting is not None:
            entry["weighting"] = self.weighting
        if self.histogram is not None:
            entry["histogram"] = {
                "bins": self.histogram.bins,
                "exponent": encoded(self.histogram.exponent),
                "edges": encoded(self.histogram.edges),
                "counts": encoded(self.histogram.counts),
            }
        return entry

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Parameters
        ----------
        raw : mapping
            One entry per field.

        Returns
        -------
        FieldStatistics
            Equal to the one that was written, bit for bit.
        """
        moments = Moments(**{name: decoded(raw[name]) for name in Moments._fields})
        labels = {str(dim): decoded(values) for dim, values in raw["labels"].items()}
        histogram = None
        if "histogram" in raw:
            part = raw["histogram"]
            exponent, edges, counts = (decoded(part[k]) for k in ("exponent", "edges", "counts"))
            histogram = Histogram(exponent, edges, counts, int(part["bins"]))
        # what was written before weights were named tells no more than that there were some
        unnamed = None if np.array_equal(moments.weight, moments.count) else "given"
        weighting = raw.get("weighting", unnamed)
        return cls(*moments, tuple(raw["dims"]), labels, histogram, weighting)


def encoded(values: NDArray[Any]) -> dict[str, Any]:
    """Return an array as JSON values.

    Parameters
    ----------
    values : ndarray
        Numbers, dates, texts or objects.

    Returns
    -------
    dict
        Its compressed bytes, or a list for texts and objects.
    """
    values = np.asarray(values)
    entry: dict[str, Any] = {"shape": list(values.shape)}
    if values.dtype.kind in "OUT":
        listed = values.ravel().tolist()
        if listed and all(isinstance(value, cftime.datetime) for value in listed):
            ticks = np.asarray(cftime.date2num(values, _TICKS, listed[0].calendar), np.int64)
            return {**encoded(ticks), "calendar": listed[0].calendar}
        texts = all(isinstance(value, str) for value in listed)
        shown = [str(value) for value in listed]
        return {**entry, "dtype": "text" if texts else "object", "values": shown}
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    if little.dtype.kind == "f":
        # one NaN and one zero, so that equal arrays have equal bytes
        little = np.where(np.isnan(little), np.array(np.nan, little.dtype), little + 0)
    content = zlib.compress(little.tobytes(), 1)
    return {**entry, "dtype": values.dtype.newbyteorder("<").str, "zlib": _text(content)}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def decoded(entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array that `encoded` was given.

    Parameters
    ----------
    entry : mapping
        JSON values.

    Returns
    -------
    ndarray
        The array.
    """
    shape = tuple(entry["shape"])
    if entry["dtype"] == "text":
        return np.array(entry["values"], dtype=str).reshape(shape)
    content = zlib.decompress(base64.b64decode(entry["zlib"]))
    dtype = np.dtype(entry["dtype"])
    values = np.frombuffer(content, dtype).reshape(shape)
    if "calendar" in entry:
        dates: NDArray[Any] = cftime.num2date(values, _TICKS, entry["calendar"])
        return dates
    return values.astype(dtype.newbyteorder("="))
