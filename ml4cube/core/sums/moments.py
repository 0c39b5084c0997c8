"""Moments and range of plain arrays: one pass, float64, mergeable.

A block is summed up as deviations from a shift, a part at a time that stays in cache. Where digits
of the spread would be lost, deviations are taken again from the mean. Blocks are merged by the
formulas of Chan et al. (1979) and Pébay (2008). A sum of squares of raw values is never used where
the spread is small compared to the offset, because it has no digit of the spread left.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidValueError, check_real
from ml4cube.core.sums.mergeable import Mergeable

# Most cells that share a shift: a piece.
_CELLS_PER_SHIFT = 2_097_152
# Cells converted to float64 at a time (a part): 1 MiB, the size of a core's own cache. Fewer would
# cost more: each numpy call has overhead, and with several threads it hands over the GIL.
_CELLS_IN_CACHE = 131_072
# Cells of a dot product (a row): so few that no BLAS splits it over threads, and the bits do not
# depend on the number of cores.
_CELLS_PER_DOT = 1_024
_ONES = np.ones(_CELLS_PER_DOT)
_HUGE_PAGE = 2 * 2**20  # bytes, on x86 and most others
# Up to here float64 holds every integer.
_LARGEST_EXACT = 2**53


@dataclass(frozen=True, eq=False)
class VariableStatistics(Mergeable):
    """Moments and range of one variable's finite cells.

    Parameters
    ----------
    count : int
        Finite cells.
    mean : float
        Mean of the finite cells, in the variable's units; NaN where `count` is 0.
    m2 : float
        Sum of squared deviations from the mean.
    min, max : float
        Range of the finite cells; NaN where `count` is 0.
    gaps : int
        Cells that are NaN, left out of the above.
    infs : int
        Cells that are +inf or -inf, left out as well.

    Examples
    --------
    >>> stats = VariableStatistics.of(np.array([1.0, np.nan, 3.0, np.inf]))
    >>> stats
    VariableStatistics(count=2, mean=2.0, m2=2.0, min=1.0, max=3.0, gaps=1, infs=1)
    >>> stats.std
    1.0
    """

    count: int = 0
    mean: float = math.nan
    m2: float = 0.0
    min: float = math.nan
    max: float = math.nan
    gaps: int = 0
    infs: int = 0

    @staticmethod
    def of(values: ArrayLike, where: ArrayLike | None = None) -> VariableStatistics:
        """Sum up one block of cells.

        Parameters
        ----------
        values : array_like of float, int or bool
            Any shape. Booleans count as 0 and 1.
        where : array_like of bool, optional
            Cells to use, broadcast against `values`; all by default. The other cells do not change
            a bit of the result.

        Returns
        -------
        VariableStatistics
            Of the cells used, with the number of gaps and infinities among them.

        Raises
        ------
        InvalidTypeError
            If `values` are not real numbers.
        InvalidValueError
            If values are too large to be squared in float64, or integers too large to be exact in
            float64.
        """
        array = np.asarray(values)
        check_real("values", array.dtype)
        flat = _used(array, where)
        scratch = _Scratch.of(flat)
        starts = range(0, max(flat.size, 1), _CELLS_PER_SHIFT)  # no cells are one piece, too
        with np.errstate(over="ignore", invalid="ignore"):
            pieces = (_of_piece(flat[i : i + _CELLS_PER_SHIFT], scratch) for i in starts)
            return reduce(VariableStatistics.merge, pieces)

    def merge(self, other: VariableStatistics) -> Self:
        """Merge with the statistics of other cells.

        Parameters
        ----------
        other : VariableStatistics
            Of cells that `self` does not include.

        Returns
        -------
        VariableStatistics
            Equal to those of all cells together, to rounding. ``a.merge(b)`` and ``b.merge(a)`` may
            differ in the last bit: merge in a fixed order.

        Raises
        ------
        InvalidValueError
            If `other` is of another type, such as `FieldStatistics`.
        """
        if type(other) is not type(self):
            raise InvalidValueError(
                "cannot merge statistics of whole variables with those that have dims, a "
                "climatology or weights; compute both in the same way"
            )
        gaps, infs = self.gaps + other.gaps, self.infs + other.infs
        if not self.count or not other.count:
            return replace(self if self.count else other, gaps=gaps, infs=infs)
        count = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / count
        mean = self.mean + delta * share
        m2 = self.m2 + other.m2 + delta * delta * self.count * share
        low, high = min(self.min, other.min), max(self.max, other.max)
        return type(self)(count, mean, m2, low, high, gaps, infs)

    @property
    def variance(self) -> float:
        """Population variance (divided by `count`), in squared units; NaN where `count` is 0."""
        if self.count:
            return self.m2 / self.count
        return math.nan

    @property
    def std(self) -> float:
        """Population standard deviation, in the variable's units; NaN where `count` is 0."""
        return math.sqrt(self.variance)

    def __eq__(self, other: object) -> bool:
        """Return True if all fields are equal; NaN equals NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return Mergeable.to_dict(self) == Mergeable.to_dict(other)

    def __hash__(self) -> int:
        """Return the same number for equal statistics."""
        return hash(json.dumps(Mergeable.to_dict(self)))


def _of_piece(piece: NDArray[Any], scratch: _Scratch) -> VariableStatistics:
    """Sum up at most `_CELLS_PER_SHIFT` cells, 1-D, by deviations from a shift."""
    # The shift, 0 or the least cell, replaces gaps, which then add nothing. If it is so far from
    # the mean that digits of the spread would be lost, deviations are taken again, from the mean.
    if piece.dtype.kind == "f":
        piece = piece.astype(scratch.dtype, copy=False)
    low, high, gaps = scratch.range_of(piece)
    if math.isinf(low) or math.isinf(high):
        finite = _of_piece(piece[np.isfinite(piece)], scratch)
        return replace(finite, gaps=gaps, infs=piece.size - gaps - finite.count)
    count = piece.size - gaps
    if count == 0 or low == high:
        return VariableStatistics(count, low, 0.0, low, high, gaps)
    # Cells whose range is about their size need no shift, which saves a pass.
    shift = low
    if low >= 0 and high < 10 * (high - low):
        shift = 0.0
    total, squares = scratch.sums(piece, shift, has_gaps=gaps > 0, shift_is_least=True)
    if math.isnan(total):  # signaling NaNs survive a maximum
        return _of_piece(piece + 0, scratch)
    if not total * total <= 0.9999 * count * squares:
        shift += total / count
        total, squares = scratch.sums(piece, shift, has_gaps=gaps > 0, shift_is_least=False)
    m2 = squares - total * total / count
    if not math.isfinite(m2):
        raise_too_large(low, high)
    return VariableStatistics(count, shift + total / count, max(m2, 0.0), low, high, gaps)


def _used(array: NDArray[Any], where: ArrayLike | None) -> NDArray[Any]:
    """Return the cells to use, 1-D."""
    if where is not None:
        flags = np.broadcast_to(np.asarray(where, bool), array.shape)
        if not flags.all():
            used: NDArray[Any] = array[flags]
            return used
    return array.ravel(order="K")


def raise_too_large(low: float, high: float) -> NoReturn:
    """Raise InvalidValueError for values whose squares exceed float64."""
    raise InvalidValueError(
        f"values from {low:g} to {high:g} are too large to be squared in float64; "
        "is a fill value not decoded?"
    )


def check_exact(least: int, greatest: int) -> None:
    """Raise for integers that float64 rounds: their spread may be less than the rounding."""
    if least < -_LARGEST_EXACT or greatest > _LARGEST_EXACT:
        raise InvalidValueError(
            f"integers must be at most 2**53 to be exact in float64, got {max(-least, greatest)}; "
            "is a fill value not decoded? Otherwise subtract an offset (values - values.min()), "
            "or convert with astype('float64') if the last digits do not matter"
        )


class _Scratch:
    """Buffers that are reused for all parts and all blocks of a thread."""

    # New memory costs a page fault every 4 KiB, which together took longer than the sums. All
    # buffers are one allocation, large enough for numpy to request a huge page, which saves more.

    _kept = threading.local()

    @classmethod
    def of(cls, flat: NDArray[Any]) -> _Scratch:
        """Return this thread's buffers, or new ones if the dtype differs."""
        native = flat.dtype.newbyteorder("=")
        dtype = np.dtype(np.float32 if native == np.float32 else np.float64)
        kept: _Scratch | None = getattr(cls._kept, "scratch", None)
        if kept is None or kept.dtype != dtype:
            kept = cls._kept.scratch = cls(dtype)
        return kept

    def __init__(self, dtype: np.dtype[Any]) -> None:
        """Allocate buffers for a part, and for the sums of a piece's rows."""
        memory = np.empty(3 * _HUGE_PAGE, np.uint8)
        memory = memory[-memory.ctypes.data % _HUGE_PAGE :]  # from the start of a huge page on
        bytes_per_cell = [8, dtype.itemsize, 1]
        x, filler, flags, _ = np.split(memory, np.cumsum(bytes_per_cell) * _CELLS_IN_CACHE)
        self.dtype = dtype
        self.x = x.view(np.float64)
        self.rows = self.x.reshape(-1, _CELLS_PER_DOT)
        self.flags = flags.view(bool)
        self.filler: NDArray[Any] = filler.view(dtype)
        self.filler.fill(0)
        self.totals = np.empty(_CELLS_PER_SHIFT // _CELLS_PER_DOT)
        self.squares = np.empty(_CELLS_PER_SHIFT // _CELLS_PER_DOT)
        # Only saves a pass: the results are the same with either value.
        self.gaps_expected = True

    def range_of(self, piece: NDArray[Any]) -> tuple[float, float, int]:
        """Return the least and greatest number, NaN if there is none, and the number of gaps."""
        if piece.size == 0:
            return math.nan, math.nan, 0
        if piece.dtype.kind != "f":
            least, greatest = int(piece.min()), int(piece.max())
            check_exact(least, greatest)
            return float(least), float(greatest), 0
        # + 0.0 turns -0.0, which minimum and maximum may return instead of 0.0, into 0.0.
        if not self.gaps_expected:
            high = float(np.maximum.reduce(piece)) + 0.0
            if not math.isnan(high):
                return float(np.minimum.reduce(piece)) + 0.0, high, 0
        gaps, lows, highs = 0, [], []
        for part in _parts(piece):
            # + 0 makes NaNs quiet: next to signaling ones (R's NA), fmin may miss numbers.
            quiet = np.add(part, 0, out=self.x.view(self.dtype)[: part.size])
            gaps += int(np.count_nonzero(np.isnan(quiet, out=self.flags[: part.size])))
            lows.append(np.fmin.reduce(quiet))
            highs.append(np.fmax.reduce(quiet))
        self.gaps_expected = gaps > 0
        return float(np.fmin.reduce(lows)) + 0.0, float(np.fmax.reduce(highs)) + 0.0, gaps

    def sums(
        self, piece: NDArray[Any], shift: float, *, has_gaps: bool, shift_is_least: bool
    ) -> tuple[float, float]:
        """Return the sums of the cells less `shift`, and of their squares, without gaps.

        `shift_is_least` says that no cell is less than `shift`, a number of the piece's dtype.
        """
        # Then a maximum with the shift replaces gaps, which is far cheaper than selecting them. The
        # bits are the same on any number of cores.
        replace_by_maximum = has_gaps and shift_is_least
        replace_one_by_one = has_gaps and not shift_is_least
        if replace_by_maximum and self.filler[0] != shift:
            self.filler.fill(shift)
        done = 0
        for part in _parts(piece):
            x, rows = self.x, self.rows
            if part.size < _CELLS_IN_CACHE:
                rows = rows[: math.ceil(part.size / _CELLS_PER_DOT)]
                x[part.size : rows.size] = 0.0  # the rest of the last row
                x = x[: part.size]
            if replace_by_maximum:
                np.fmax(part, self.filler[: part.size], out=x)
            else:
                x[:] = part
            if shift:
                x -= shift
            if replace_one_by_one:
                x[np.isnan(part)] = 0.0
            end = done + len(rows)
            np.vecdot(rows, _ONES, out=self.totals[done:end])
            np.vecdot(rows, rows, out=self.squares[done:end])
            done = end
        return float(np.add.reduce(self.totals[:done])), float(np.add.reduce(self.squares[:done]))


def _parts(piece: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Cut a piece into parts that fit into cache."""
    for start in range(0, piece.size, _CELLS_IN_CACHE):
        yield piece[start : start + _CELLS_IN_CACHE]
