"""Statistics that can be merged, and the scaling arithmetic that uses them, on plain arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, prefixed
from ml4cube.core.sums.fields import FieldStatistics, quantile_of
from ml4cube.core.sums.moments import VariableStatistics as VariableStatistics

# Cells worked on at a time: as float64 they take 1 MiB, which stays in a core's cache.
_PIECE = 131_072

SCALE_FNS = ("standardize", "normalize", None)
#: Scalings of a store; "robust" needs statistics passed by the user.
SCALINGS = ("standardize", "normalize", "robust", None)
QUARTILES = (0.25, 0.5, 0.75)

# CF attributes that hold only for values in their own units.
_OF_VALUES = (
    "units",
    "standard_name",
    "valid_min",
    "valid_max",
    "valid_range",
    "actual_range",
)
_ASIDE = "unscaled_"


def check_decoded(name: str, dtype: Any, attrs: Mapping[str, Any]) -> None:
    """Raise if integers are still packed (`scale_factor` in attrs), or the dtype is pandas' own."""
    check_numpy(name, dtype)
    marks = ("scale_factor", "add_offset", "_FillValue", "missing_value")
    packed = [key for key in marks if key in attrs]
    if not packed or np.dtype(dtype).kind not in "iu":
        return
    raise InvalidValueError(
        f"variable {name!r} has packed {np.dtype(dtype)} values ({packed} in its attrs); open the "
        "source with mask_and_scale=True, or apply xarray.decode_cf"
    )


def check_numpy(name: str, dtype: Any) -> None:
    """Raise for a dtype that only pandas knows, such as ``Int64``, whose gaps numpy misses."""
    if not isinstance(dtype, np.dtype) and getattr(dtype, "kind", "") in ("f", "i", "u", "b", "c"):
        raise InvalidTypeError(
            f"variable {name!r} must have a numpy dtype, got pandas' dtype {dtype}; convert it "
            'with astype("float64")'
        )


def check_real(name: str, dtype: np.dtype[Any]) -> None:
    """Raise InvalidTypeError unless a dtype holds real numbers."""
    check_numpy(name, dtype)
    if dtype.kind not in "fiub":
        raise InvalidTypeError(
            f"variable {name!r} must hold real numbers, got dtype {dtype}; leave it out or convert "
            "it"
        )


def offset_and_scale(
    called: str, entry: Any, scale_fn: str, fields: tuple[type, ...] = ()
) -> tuple[Any, Any]:
    """Return offset and scale of a user's ``[mean, std]`` or ``[min, max]``.

    `fields` are types of labelled arrays that may take the place of a number.
    """
    try:
        if isinstance(entry, str | bytes):
            raise TypeError
        numbers: list[Any] = [one if isinstance(one, fields) else _number(one) for one in entry]
        first, second = numbers
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{called} must be two numbers, got {entry!r}") from None
    shown = f"{called} is [{_shown(first)}, {_shown(second)}]"
    if not np.any(np.isfinite(first) & np.isfinite(second)):
        raise InvalidValueError(
            f"{shown}: the variable is all gaps; drop it, or remove it from the statistics"
        )
    scale = second - first if scale_fn == "normalize" else second
    if np.any(scale < 0):
        raise InvalidValueError(
            f"{shown}; it must be [mean, std] with std >= 0, or [min, max] in this order"
        )
    return first, _not_zero(scale)


def _not_zero(scale: Any) -> Any:
    """Replace a scale of 0 by 1: a constant is only shifted, to 0, and so is restored exactly."""
    return scale + (scale == 0)


def _number(given: Any) -> float:
    """Return a float; strings are refused."""
    if isinstance(given, str | bytes):
        raise TypeError
    return float(given)


def _shown(number: Any) -> str:
    """Return a number, or a phrase for many, for a message."""
    return f"{number.sizes} numbers" if hasattr(number, "sizes") else str(number)


class Statistics(Mapping[str, VariableStatistics]):
    """Statistics of several variables: an immutable mapping of names to `VariableStatistics`.

    Parameters
    ----------
    variables : mapping of str to VariableStatistics
        One entry per variable.
    part : {"train", "val", "test", "all"}, optional
        Part of the cube; None if unknown.

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
        """Copy the mapping."""
        check_choice("part", part, ("train", "val", "test", "all", None))
        self._table = dict(variables)
        self._part = part

    @classmethod
    def empty(cls, names: Iterable[str], part: str | None = None) -> Self:
        """Return statistics of no cells.

        Parameters
        ----------
        names : iterable of str
            Variables.
        part : str, optional
            Part of the cube.

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
            Cells to use, for all variables or by variable; all cells of variables not in it.
        part : str, optional
            Part of the cube.

        Returns
        -------
        Statistics
            One entry per variable.

        Raises
        ------
        InvalidTypeError
            If a variable does not hold real numbers; the message names it.
        """
        table = {}
        for name, cells in values.items():
            chosen = where.get(name) if isinstance(where, Mapping) else where
            with prefixed(f"variable {name!r}"):
                table[name] = VariableStatistics.of(cells, chosen)
        return cls(table, part)

    def merge(self, other: Statistics) -> Self:
        """Merge with the statistics of other cells of the same variables.

        Parameters
        ----------
        other : Statistics
            Of cells that `self` does not include.

        Returns
        -------
        Statistics
            Equal to those of all cells together, to rounding.

        Raises
        ------
        InvalidTypeError
            If `other` has another type.
        InvalidValueError
            If variables or parts differ.
        """
        if not isinstance(other, Statistics):
            raise InvalidTypeError(f"other must be Statistics, got {type(other).__name__}")
        if set(self) != set(other):
            raise InvalidValueError(
                f"cannot merge statistics of {sorted(self)} with those of {sorted(other)}; both "
                "must have the same variables"
            )
        if self.part != other.part:
            raise InvalidValueError(
                f"cannot merge statistics of part {self.part!r} with those of {other.part!r}"
            )
        return type(self)({name: self[name].merge(other[name]) for name in self}, self.part)

    @property
    def part(self) -> str | None:
        """Part of the cube: train, val, test, all, or None if unknown."""
        return self._part

    @property
    def variables(self) -> tuple[str, ...]:
        """Names in the order given."""
        return tuple(self._table)

    def mean_std(self) -> dict[str, list[float]]:
        """Return mean and population standard deviation by variable.

        Returns
        -------
        dict of str to [float, float]
            ``{variable: [mean, std]}``; NaN for a variable without finite cells.
        """
        return {name: [stats.mean, stats.std] for name, stats in self.items()}

    def range(self) -> dict[str, list[float]]:
        """Return the least and greatest finite value by variable.

        Returns
        -------
        dict of str to [float, float]
            ``{variable: [min, max]}``; NaN for a variable without finite cells.
        """
        return {name: [stats.min, stats.max] for name, stats in self.items()}

    def to_json(self) -> str:
        """Return the statistics as JSON, exact to the last bit.

        Returns
        -------
        str
            A JSON object.

        Raises
        ------
        InvalidTypeError
            If labels of a dim are not numbers, dates or strings.
        """
        table = {name: stats.to_dict() for name, stats in self.items()}
        return json.dumps({"part": self.part, "variables": table}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON of `to_json`.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Statistics
            Equal to the original.

        Raises
        ------
        InvalidTypeError
            If `text` is not a str.
        InvalidValueError
            If `text` is not JSON of `to_json`.
        """
        if not isinstance(text, str):
            raise InvalidTypeError(
                f"text must be the str that to_json() returned, got {type(text).__name__}"
            )
        try:
            raw = json.loads(text)
            table = {name: _entry(fields) for name, fields in raw["variables"].items()}
            return cls(table, raw["part"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError(
                f"text must be what to_json() returned, got {text[:80]!r} ({error})"
            ) from error

    def __getitem__(self, name: str) -> VariableStatistics:
        """Statistics of one variable."""
        try:
            return self._table[name]
        except KeyError:
            raise KeyError(
                f"no statistics of {name!r}; there are those of {sorted(self._table)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        """Names of the variables."""
        return iter(self._table)

    def __len__(self) -> int:
        """Number of variables."""
        return len(self._table)

    def __eq__(self, other: object) -> bool:
        """Return True if part, variables and every field are equal."""
        if not isinstance(other, Statistics):
            return NotImplemented
        return self.part == other.part and self._table == other._table

    def __hash__(self) -> int:
        """Return the same number for equal statistics."""
        return hash((self.part, frozenset(self.items())))

    def __repr__(self) -> str:
        """Return an expression that evaluates to an equal object."""
        return f"{type(self).__name__}({self._table!r}, part={self.part!r})"


def _entry(fields: Mapping[str, Any]) -> VariableStatistics:
    """Read the statistics of one variable, with or without dims."""
    kind = FieldStatistics if "dims" in fields else VariableStatistics
    return kind.from_dict(fields)


def scale_parameters(stats: VariableStatistics, scale_fn: str | None) -> tuple[Any, Any]:
    """Return offset and scale so that ``(x - offset) / scale`` is the scaled variable.

    The scale is never 0. Arrays are NaN where the statistics have no cell.
    """
    check_choice("scale_fn", scale_fn, SCALINGS)
    if scale_fn is None:
        return 0.0, 1.0
    if not np.any(stats.count):
        raise InvalidValueError(
            f"cannot {scale_fn} a variable that is all gaps, without a finite cell; drop it, or "
            "remove it from the statistics"
        )
    if scale_fn == "standardize":
        offset, scale = stats.mean, stats.std
    elif scale_fn == "normalize":
        offset, scale = stats.min, stats.max - stats.min
    else:
        offset, scale = _median_and_spread(stats)
    if np.ndim(offset):
        return offset, _not_zero(scale)
    return float(offset), _not_zero(float(scale))


def _median_and_spread(stats: VariableStatistics) -> tuple[Any, Any]:
    """Return median and interquartile range; 1 where both quartiles are in one bin."""
    low, median, high = (quantile_of(stats, probability) for probability in QUARTILES)
    spread = high - low
    # in one bin: more than half of the cells (such as dry days) have about the same value
    apart = spread > stats.quantile_error  # type: ignore[attr-defined]
    return median, np.where(apart | np.isnan(spread), spread, 1.0)


def scaled_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the same float dtype, or the smallest float from float32 that holds every integer."""
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
    """Compute ``(array - offset) / scale`` in float64 and round once."""
    return _by_pieces(array, ((np.subtract, offset), (np.divide, scale)), out_dtype)


def unscale_values(
    array: NDArray[Any],
    offset: ArrayLike,
    scale: ArrayLike,
    out_dtype: DTypeLike | None = None,
) -> NDArray[Any]:
    """Compute ``array * scale + offset`` in float64 and round once.

    Scaled and back, a float32 is within 2 units in the last place of the larger of value and
    offset.
    """
    return _by_pieces(array, ((np.multiply, scale), (np.add, offset)), out_dtype)


def scaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return attributes of scaled values: units of 1, the others renamed ``unscaled_<name>``."""
    result: dict[Any, Any] = {"units": "1"} if "units" in attrs else {}
    for name, value in attrs.items():
        result[_ASIDE + str(name) if _is_of_values(name) else name] = value
    return result


def unscaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes that `scaled_attrs` was given."""
    if not any(str(name).startswith(_ASIDE) for name in attrs):
        return dict(attrs)
    aside = {n.removeprefix(_ASIDE): v for n, v in attrs.items() if str(n).startswith(_ASIDE)}
    return {n: v for n, v in attrs.items() if not _is_of_values(n)} | aside


def _is_of_values(name: Any) -> bool:
    """Return True if an attribute holds only for unscaled values, or was renamed already."""
    return name in _OF_VALUES or str(name).startswith(_ASIDE)


# signaling NaNs (R's NA) are ordinary gaps and need no warning
@np.errstate(invalid="ignore")
def _by_pieces(
    array: NDArray[Any],
    steps: Sequence[tuple[np.ufunc, ArrayLike]],
    out_dtype: DTypeLike | None,
) -> NDArray[Any]:
    """Apply operations to float64 copies, of cache size where the operands are numbers."""
    array = np.asarray(array)
    out = np.empty(array.shape, scaled_dtype(array.dtype) if out_dtype is None else out_dtype)
    if any(np.ndim(operand) for _, operand in steps):
        whole = array.astype(np.float64)
        for operation, operand in steps:
            operation(whole, operand, out=whole)
        out[...] = whole
        return out
    source, target = array.reshape(-1), out.reshape(-1)
    work = np.empty(min(source.size, _PIECE))
    for start in range(0, source.size, _PIECE):
        piece = source[start : start + _PIECE]
        x = work[: piece.size]
        np.copyto(x, piece, casting="same_kind")
        for operation, operand in steps:
            operation(x, operand, out=x)
        target[start : start + _PIECE] = x
    return out
