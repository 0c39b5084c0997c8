"""Statistics that can be merged, and the scaling arithmetic that uses them.

Each block of cells is summed up on its own (float64, corrected two-pass, in pieces that stay in
cache) and blocks are merged by the formulas of Chan et al. (1979) and Pébay (2008). No sum of
squares of raw values is ever formed: it loses every digit of a small spread on a large offset.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice

# Cells worked on at a time: as float64 they take 1 MiB, which stays in a core's cache.
_PIECE = 131_072
# Rows of a dot product: short enough that no BLAS splits one over threads, so that bits do not
# depend on the number of cores.
_ROW = 4_096

SCALE_FNS = ("standardize", "normalize", None)


@dataclass(frozen=True, eq=False)
class VariableStatistics:
    """Moments and range of one variable's finite cells; two of them merge into one.

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
        Cells that are NaN, left out of all the above.
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

    @classmethod
    def of(cls, values: ArrayLike, where: ArrayLike | None = None) -> Self:
        """Sum up one block of cells.

        Parameters
        ----------
        values : array_like of float, int or bool
            Any shape. Integers count as numbers, booleans as 0 and 1.
        where : array_like of bool, optional
            Cells to use, broadcast against `values`; all if not given. What stands in the other
            cells has no influence, not on a bit of the result.

        Returns
        -------
        VariableStatistics
            Of the cells used; gaps and infinities among them are counted.

        Raises
        ------
        InvalidTypeError
            If `values` are no real numbers (dates, texts, complex numbers).
        InvalidValueError
            If finite values are so large that their squares leave float64's range.
        """
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"values are of dtype {array.dtype}, statistics need real numbers; "
                "leave the variable out or convert it"
            )
        if where is None:
            flat = array.ravel(order="K")
        else:
            flat = array[np.broadcast_to(np.asarray(where, bool), array.shape)]
        total = cls()
        guess = _rough_mean(flat)
        work = np.empty(min(flat.size, _PIECE))
        for start in range(0, flat.size, _PIECE):
            stats = cls._of_piece(flat[start : start + _PIECE], guess, work)
            total = total.merge(stats)
            guess = stats.mean if stats.count else guess
        return total

    @classmethod
    def _of_piece(cls, piece: NDArray[Any], guess: float, work: NDArray[np.float64]) -> Self:
        """Sum up at most `_PIECE` cells, 1-D, by deviations from a guess of the mean.

        Where the guess is so far off that digits of the spread would be lost, deviations are
        taken again, from the mean found. `work` is scratch space.
        """
        finite = np.isfinite(piece)
        count = int(np.count_nonzero(finite))
        gaps = infs = 0
        if count < piece.size:
            gaps = int(np.count_nonzero(np.isnan(piece)))
            infs = piece.size - count - gaps
            piece = _selected(piece, finite)
        if count == 0:
            return cls(gaps=gaps, infs=infs)
        low, high = float(piece.min()), float(piece.max())
        if low == high:
            return cls(count, low, 0.0, low, high, gaps, infs)
        x = work[:count]
        np.copyto(x, piece, casting="same_kind")
        with np.errstate(over="ignore", invalid="ignore"):
            x -= guess
            rest, squares = float(x.sum()), _square_sum(x)
            shift = 0.0
            if not rest * rest <= 0.999 * count * squares:
                shift = rest / count
                x -= shift
                rest, squares = float(x.sum()), _square_sum(x)
            m2 = squares - rest * rest / count
        if not math.isfinite(m2):
            raise InvalidValueError(
                f"values from {low:g} to {high:g} are too large to be squared in float64; "
                "is a fill value left undecoded?"
            )
        return cls(count, guess + (shift + rest / count), max(m2, 0.0), low, high, gaps, infs)

    def merge(self, other: VariableStatistics) -> Self:
        """Combine with the statistics of other cells.

        Parameters
        ----------
        other : VariableStatistics
            Of cells that `self` has not seen.

        Returns
        -------
        VariableStatistics
            As if all cells had been summed up together, to rounding. ``a.merge(b)`` and
            ``b.merge(a)`` may differ in the last bit: merge in a fixed order.
        """
        gaps, infs = self.gaps + other.gaps, self.infs + other.infs
        if self.count == 0 or other.count == 0:
            full = other if self.count == 0 else self
            return type(self)(
                full.count, full.mean, full.m2, full.min, full.max, gaps=gaps, infs=infs
            )
        count = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / count
        return type(self)(
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + other.m2 + delta * delta * self.count * share,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
            gaps=gaps,
            infs=infs,
        )

    @property
    def variance(self) -> float:
        """Population variance (divided by `count`), in squared units; NaN where `count` is 0."""
        return self.m2 / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """Population standard deviation, in the variable's units; NaN where `count` is 0."""
        return math.sqrt(self.variance)

    def _key(self) -> tuple[float | None, ...]:
        """Fields with None for NaN, which equals itself and can be written as JSON."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(None if math.isnan(value) else value for value in values)

    def __eq__(self, other: object) -> bool:
        """Whether every field has the same value; NaN equals NaN."""
        if not isinstance(other, VariableStatistics):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        """The same for equal statistics, in every process."""
        # + 0 turns -0.0, which equals 0.0, into 0.0
        return zlib.crc32(repr([v if v is None else v + 0 for v in self._key()]).encode())

    def to_dict(self) -> dict[str, float | None]:
        """Write the fields as plain JSON values, None for NaN.

        Returns
        -------
        dict
            One entry per field.
        """
        return dict(zip((field.name for field in fields(self)), self._key(), strict=True))

    @classmethod
    def from_dict(cls, raw: Mapping[str, float | None]) -> Self:
        """Read what `to_dict` wrote.

        Parameters
        ----------
        raw : mapping
            One entry per field.

        Returns
        -------
        VariableStatistics
            Equal to the one that was written, bit for bit.
        """
        values: dict[str, Any] = {k: math.nan if v is None else v for k, v in raw.items()}
        return cls(**values)


def _rough_mean(flat: NDArray[Any]) -> float:
    """Mean of about a thousand finite cells; 0 where they hold none."""
    some = flat[:: max(flat.size // 1000, 1)].astype(np.float64)
    some = some[np.isfinite(some)]
    with np.errstate(over="ignore"):
        return float(some.mean()) if some.size else 0.0


def _selected(values: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[Any]:
    """Select cells by the faster of two ways that give the same.

    A boolean index is fast where flags come in runs, as land and sea do; `compress` where they
    are scattered.
    """
    changes = np.count_nonzero(where[1:] ^ where[:-1])
    return values[where] if changes < where.size // 32 else values.compress(where)


def _square_sum(x: NDArray[np.float64]) -> float:
    """Sum of squares, the same bits on any number of cores."""
    whole = x.size - x.size % _ROW
    rows = x[:whole].reshape(-1, _ROW)
    return float(np.vecdot(rows, rows).sum()) + float(np.vecdot(x[whole:], x[whole:]))


class Statistics(Mapping[str, VariableStatistics]):
    """Statistics of several variables: an immutable mapping of names to `VariableStatistics`.

    Parameters
    ----------
    variables : mapping of str to VariableStatistics
        One entry per variable.
    part : {"train", "val", "test", "all"}, optional
        Part of the cube that was summed up; None where that is not known.

    Examples
    --------
    >>> a = Statistics.of({"t": np.array([1.0, 2.0])}, part="train")
    >>> b = Statistics.of({"t": np.array([3.0, np.nan])}, part="train")
    >>> whole = a.merge(b)
    >>> whole["t"].count, whole["t"].mean, whole["t"].gaps
    (3, 2.0, 1)
    >>> Statistics.from_json(whole.to_json()) == whole
    True
    """

    __slots__ = ("_part", "_table")

    def __init__(
        self, variables: Mapping[str, VariableStatistics], part: str | None = None
    ) -> None:
        """Copy the mapping, so that nobody changes it from outside."""
        check_choice("part", part, ("train", "val", "test", "all", None))
        self._table = dict(variables)
        self._part = part

    @classmethod
    def empty(cls, names: Iterable[str], part: str | None = None) -> Self:
        """Statistics of no cells, the neutral element of `merge`.

        Parameters
        ----------
        names : iterable of str
            Variables.
        part : str, optional
            Part of the cube that will be summed up.

        Returns
        -------
        Statistics
            Every count is 0.
        """
        return cls({name: VariableStatistics() for name in names}, part)

    @classmethod
    def of(
        cls,
        values: Mapping[str, ArrayLike],
        where: Mapping[str, ArrayLike] | ArrayLike | None = None,
        part: str | None = None,
    ) -> Self:
        """Sum up one block of cells of each variable.

        Parameters
        ----------
        values : mapping of str to array_like
            Cells by variable, any shapes.
        where : array_like of bool, or mapping of str to array_like of bool, optional
            Cells to use, for all variables or by variable (all cells of those it lacks).
        part : str, optional
            Part of the cube that the cells used belong to.

        Returns
        -------
        Statistics
            One entry per variable.

        Raises
        ------
        InvalidTypeError
            If a variable holds no real numbers; the message names it.
        """
        table = {}
        for name, cells in values.items():
            chosen = where.get(name) if isinstance(where, Mapping) else where
            try:
                table[name] = VariableStatistics.of(cells, chosen)
            except (InvalidTypeError, InvalidValueError) as error:
                raise type(error)(f"variable {name!r}: {error}") from None
        return cls(table, part)

    def merge(self, other: Statistics) -> Self:
        """Combine with the statistics of other cells of the same variables.

        Parameters
        ----------
        other : Statistics
            Of cells that `self` has not seen.

        Returns
        -------
        Statistics
            As if all cells had been summed up together, to rounding.

        Raises
        ------
        InvalidValueError
            If variables or parts differ.
        """
        if set(self) != set(other):
            raise InvalidValueError(
                f"cannot merge statistics of {sorted(self)} with those of {sorted(other)}; "
                "give both the same variables"
            )
        if self.part != other.part:
            raise InvalidValueError(
                f"cannot merge statistics of part {self.part!r} with those of {other.part!r}"
            )
        return type(self)({name: self[name].merge(other[name]) for name in self}, self.part)

    @property
    def part(self) -> str | None:
        """Part of the cube that was summed up: train, val, test, all, or None for unknown."""
        return self._part

    @property
    def variables(self) -> tuple[str, ...]:
        """Names, in the order given."""
        return tuple(self._table)

    def mean_std(self) -> dict[str, list[float]]:
        """Mean and population standard deviation by variable.

        Returns
        -------
        dict of str to [float, float]
            ``{variable: [mean, std]}``; NaN for a variable without finite cells.
        """
        return {name: [stats.mean, stats.std] for name, stats in self.items()}

    def range(self) -> dict[str, list[float]]:
        """Least and greatest finite value by variable.

        Returns
        -------
        dict of str to [float, float]
            ``{variable: [min, max]}``; NaN for a variable without finite cells.
        """
        return {name: [stats.min, stats.max] for name, stats in self.items()}

    def to_json(self) -> str:
        """Write as JSON; `from_json` reads it back bit for bit.

        Returns
        -------
        str
            A JSON object.
        """
        table = {name: stats.to_dict() for name, stats in self.items()}
        return json.dumps({"part": self.part, "variables": table}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Statistics
            Equal to the one that was written.

        Raises
        ------
        InvalidValueError
            If the text is not what `to_json` writes.
        """
        try:
            raw = json.loads(text)
            table = {n: VariableStatistics.from_dict(d) for n, d in raw["variables"].items()}
            return cls(table, raw["part"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError(
                f"{text[:80]!r} is no statistics in JSON ({error}); give what to_json() wrote"
            ) from error

    def __getitem__(self, name: str) -> VariableStatistics:
        """Statistics of one variable."""
        try:
            return self._table[name]
        except KeyError:
            raise KeyError(f"no statistics of {name!r}, only of {sorted(self._table)}") from None

    def __iter__(self) -> Iterator[str]:
        """Names of the variables."""
        return iter(self._table)

    def __len__(self) -> int:
        """Number of variables."""
        return len(self._table)

    def __eq__(self, other: object) -> bool:
        """Whether part, variables and every field agree."""
        if not isinstance(other, Statistics):
            return NotImplemented
        return self.part == other.part and self._table == other._table

    def __hash__(self) -> int:
        """The same for equal statistics, in every process."""
        entries = sorted((name, hash(stats)) for name, stats in self.items())
        return zlib.crc32(repr((self.part, entries)).encode())

    def __repr__(self) -> str:
        """Text that evaluates back to an equal object."""
        return f"{type(self).__name__}({self._table!r}, part={self.part!r})"


def scale_parameters(stats: VariableStatistics, scale_fn: str | None) -> tuple[float, float]:
    """Offset and scale so that ``(x - offset) / scale`` is the scaled variable.

    Parameters
    ----------
    stats : VariableStatistics
        Of the training cells.
    scale_fn : {"standardize", "normalize", None}
        To mean 0 and standard deviation 1, to the range 0 to 1, or not at all.

    Returns
    -------
    (float, float)
        Offset, in the variable's units, and scale, never 0: a constant variable is only shifted,
        to 0, and so comes back exactly.

    Raises
    ------
    InvalidValueError
        If `scale_fn` is unknown, or there is no finite cell to scale by.

    Examples
    --------
    >>> scale_parameters(VariableStatistics.of([2.0, 4.0]), "normalize")
    (2.0, 2.0)
    """
    check_choice("scale_fn", scale_fn, SCALE_FNS)
    if scale_fn is None:
        return 0.0, 1.0
    if stats.count == 0:
        raise InvalidValueError(
            f"cannot {scale_fn} by statistics of no finite cell "
            f"({stats.gaps} gaps, {stats.infs} infinities); drop the variable or its gaps"
        )
    if scale_fn == "standardize":
        return stats.mean, stats.std or 1.0
    return stats.min, (stats.max - stats.min) or 1.0


def scaled_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Dtype of a variable once it is scaled.

    Parameters
    ----------
    dtype : dtype
        Of the variable.

    Returns
    -------
    dtype
        The same for floats (in native byte order); the smallest float from float32 up that
        holds every value for integers and booleans.

    Examples
    --------
    >>> scaled_dtype("int16"), scaled_dtype("int32"), scaled_dtype(">f4")
    (dtype('float32'), dtype('float64'), dtype('float32'))
    """
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return kind.newbyteorder("=")
    return np.result_type(kind, np.float32)


def scale_values(
    array: NDArray[Any],
    offset: ArrayLike,
    scale: ArrayLike,
    out_dtype: DTypeLike | None = None,
) -> NDArray[Any]:
    """Compute ``(array - offset) / scale`` in float64 and round once.

    Parameters
    ----------
    array : ndarray
        Values in physical units; gaps stay gaps.
    offset, scale : float or array_like
        From `scale_parameters`, or arrays that broadcast against `array`.
    out_dtype : dtype, optional
        Of the result; that of `scaled_dtype` if not given.

    Returns
    -------
    ndarray
        A new array of the same shape.

    Examples
    --------
    >>> scale_values(np.array([1.0, 3.0], "float32"), 2.0, 0.5)
    array([-2.,  2.], dtype=float32)
    """

    def scale_piece(x: NDArray[np.float64], offset: Any, scale: Any) -> None:
        np.subtract(x, offset, out=x)
        np.divide(x, scale, out=x)

    return _by_pieces(scale_piece, array, offset, scale, out_dtype)


def unscale_values(
    array: NDArray[Any],
    offset: ArrayLike,
    scale: ArrayLike,
    out_dtype: DTypeLike | None = None,
) -> NDArray[Any]:
    """Compute ``array * scale + offset`` in float64 and round once: undo `scale_values`.

    Scaled and back, a float32 comes to within 2 units in the last place of the larger of value
    and offset.

    Parameters
    ----------
    array : ndarray
        Scaled values; gaps stay gaps.
    offset, scale : float or array_like
        As given to `scale_values`.
    out_dtype : dtype, optional
        Of the result; that of `scaled_dtype` if not given.

    Returns
    -------
    ndarray
        A new array of the same shape, in physical units.

    Examples
    --------
    >>> unscale_values(np.array([-2.0, 2.0], "float32"), 2.0, 0.5)
    array([1., 3.], dtype=float32)
    """

    def unscale_piece(x: NDArray[np.float64], offset: Any, scale: Any) -> None:
        np.multiply(x, scale, out=x)
        np.add(x, offset, out=x)

    return _by_pieces(unscale_piece, array, offset, scale, out_dtype)


def _by_pieces(
    work_on: Callable[[NDArray[np.float64], Any, Any], None],
    array: NDArray[Any],
    offset: ArrayLike,
    scale: ArrayLike,
    out_dtype: DTypeLike | None,
) -> NDArray[Any]:
    """Apply `work_on` to float64 copies, of cache size where offset and scale are numbers."""
    array = np.asarray(array)
    out = np.empty(array.shape, scaled_dtype(array.dtype) if out_dtype is None else out_dtype)
    if np.ndim(offset) or np.ndim(scale):
        whole = array.astype(np.float64)
        work_on(whole, offset, scale)
        out[...] = whole
        return out
    source, target = array.reshape(-1), out.reshape(-1)
    work = np.empty(min(source.size, _PIECE))
    for start in range(0, source.size, _PIECE):
        piece = source[start : start + _PIECE]
        x = work[: piece.size]
        np.copyto(x, piece, casting="same_kind")
        work_on(x, offset, scale)
        target[start : start + _PIECE] = x
    return out
