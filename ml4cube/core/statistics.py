"""Mergeable statistics of several variables, and scaling of plain arrays by them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ml4cube.core.climatology import DAY, GROUPS, smooth_days
from ml4cube.core.display import Summarized, Summary, Table, counted, shown
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_numpy,
    prefixed,
)
from ml4cube.core.sums.fields import FieldStatistics, quantile_of
from ml4cube.core.sums.moments import VariableStatistics as VariableStatistics

# Cells scaled at a time: as float64 they take 1 MiB, which stays in a core's cache.
_CELLS_AT_ONCE = 131_072
# Numbers of a variable that are printed.
_SHOWN = ("count", "mean", "std", "min", "max", "gaps", "infs")

#: Scalings by statistics that the package computes itself.
SCALE_FNS = ("standardize", "normalize", None)
#: All scalings; "robust" needs statistics that the user passes.
SCALINGS = ("standardize", "normalize", "robust", None)
QUARTILES = (0.25, 0.5, 0.75)

#: Attributes with numbers that mean a gap, and that xarray does not decode.
NODATA = ("nodata", "no_data", "nodata_value", "nodatavals", "fill_value")
# CF attributes that hold only for values in their own units, and the prefix of their names while
# values are scaled.
_ATTRS_OF_UNSCALED = (
    *NODATA,
    "units",
    "standard_name",
    "valid_min",
    "valid_max",
    "valid_range",
    "actual_range",
)
_UNSCALED = "unscaled_"


class Statistics(Summarized, Mapping[str, VariableStatistics]):
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
            where_here = where.get(name) if isinstance(where, Mapping) else where
            with prefixed(f"variable {name!r}"):
                table[name] = VariableStatistics.of(cells, where_here)
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
            table = {}
            for name, fields in raw["variables"].items():
                kind = FieldStatistics if "dims" in fields else VariableStatistics
                table[name] = kind.from_dict(fields)
            return cls(table, raw["part"])
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
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

    def _summary(self) -> Summary:
        """Return the numbers of every variable; those of fields as ranges."""
        rows = [(name, *_shown_numbers(stats)) for name, stats in self.items()]
        dims = {name: stats.dims for name, stats in self.items() if hasattr(stats, "dims")}
        per = dict.fromkeys(" × ".join(of_variable) for of_variable in dims.values() if of_variable)
        part = "" if self.part in (None, "all") else f" of the {self.part} part"
        return Summary(
            f"{counted(len(self), 'variable')}{part}",
            {"Separate for each": list(per)},
            {"Variables": Table(("", *_SHOWN), rows)},
        )


def _shown_numbers(stats: VariableStatistics) -> list[object]:
    """Return the numbers of a variable; of a field their ranges, unless that takes long."""
    if np.size(stats.count) > _CELLS_AT_ONCE:
        return [f"{np.size(stats.count):,} fields", *[None] * (len(_SHOWN) - 1)]
    names: list[object] = []
    for name in _SHOWN:
        ends = [f.reduce(getattr(stats, name), axis=None) for f in (np.fmin, np.fmax)]
        names.append(" to ".join(dict.fromkeys(map(shown, ends))))
    return names


def check_decoded(name: str, variable: Any) -> None:
    """Raise if a Variable or DataArray holds packed integers, or has a dtype of pandas' own."""
    check_numpy(f"variable {name!r}", variable.dtype)
    packing = ("scale_factor", "add_offset", "_FillValue", "missing_value")
    packed = [key for key in packing if key in variable.attrs]
    if packed and variable.dtype.kind in "iu":
        raise InvalidValueError(
            f"variable {name!r} has packed {variable.dtype} values ({packed} in its attrs); open "
            "the source with mask_and_scale=True, or apply xarray.decode_cf"
        )


def offset_and_scale(argument: str, pair: Any, scale_fn: str) -> tuple[Any, Any]:
    """Return offset and scale of a user's ``[mean, std]`` or ``[min, max]``.

    Both are numbers or DataArrays. The scale is never 0.
    """
    try:
        if isinstance(pair, bytes):  # its items are integers
            raise TypeError
        first, second = map(_number, pair)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{argument} must be two numbers, got {pair!r}") from None
    shown = f"{argument} is [{_shown(first)}, {_shown(second)}]"
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


def _number(value: Any) -> Any:
    """Return a float, or a DataArray as it is; texts are refused."""
    if isinstance(value, str | bytes):
        raise TypeError
    if hasattr(value, "sizes"):
        return value
    return float(value)


def _shown(numbers: Any) -> str:
    """Return a number, or the sizes of an array, for a message."""
    if hasattr(numbers, "sizes"):
        return f"{numbers.sizes} numbers"
    return str(numbers)


def scale_parameters(stats: VariableStatistics, scale_fn: str) -> tuple[Any, Any]:
    """Return offset and scale so that ``(x - offset) / scale`` is the scaled variable.

    The scale is never 0. Arrays are NaN where the statistics have no cell.
    """
    check_choice("scale_fn", scale_fn, filter(None, SCALINGS))
    if not np.any(stats.count):
        raise InvalidValueError(
            f"cannot {scale_fn} a variable that is all gaps, without a finite cell; drop it, or "
            "remove it from the statistics"
        )
    if scale_fn == "standardize":
        offset, scale = usual_mean_and_std(stats)
    elif is_daily(stats):
        raise InvalidValueError(
            f"by='dayofyear' needs 'standardize', got {scale_fn!r}, which needs more values than a "
            "day of the year has; use 'month' or 'season'"
        )
    elif scale_fn == "normalize":
        offset, scale = stats.min, stats.max - stats.min
    else:
        offset, scale = _median_and_spread(stats)
    if np.ndim(offset):
        return offset, _not_zero(scale)
    return float(offset), _not_zero(float(scale))


def is_daily(stats: VariableStatistics) -> bool:
    """Return True for a climatology of each day of the year."""
    if not isinstance(stats, FieldStatistics) or DAY not in stats.dims:
        return False
    return bool(stats.mean.shape[stats.dims.index(DAY)] == len(GROUPS[DAY]))


def usual_mean_and_std(stats: VariableStatistics) -> tuple[Any, Any]:
    """Return mean and standard deviation, smooth if they are those of each day of the year."""
    if not is_daily(stats):
        return stats.mean, stats.std
    assert isinstance(stats, FieldStatistics)
    axis = stats.dims.index(DAY)
    moments = (np.moveaxis(a, axis, 0) for a in (stats.mean, stats.variance, stats.weight))
    mean, variance = smooth_days(*moments)
    return np.moveaxis(mean, 0, axis), np.moveaxis(np.sqrt(variance), 0, axis)


def _median_and_spread(stats: VariableStatistics) -> tuple[Any, Any]:
    """Return median and interquartile range; 1 where both quartiles are in one bin."""
    low, median, high = (quantile_of(stats, probability) for probability in QUARTILES)
    spread = high - low
    # Then at least half of the cells (such as dry days) have about the same value.
    in_one_bin = spread <= stats.quantile_error  # type: ignore[attr-defined]
    return median, np.where(in_one_bin, 1.0, spread)


def scaled_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the same float dtype, or the smallest float from float32 that holds every integer."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return dtype.newbyteorder("=")
    return np.result_type(dtype, np.float32)


def unscaled_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `scaled_dtype`, but at least float32: float16 ends at 65504, less than pressures."""
    return np.result_type(scaled_dtype(dtype), np.float32)


def scale_values(
    array: NDArray[Any],
    offset: ArrayLike,
    scale: ArrayLike,
    out_dtype: DTypeLike | None = None,
) -> NDArray[Any]:
    """Compute ``(array - offset) / scale`` in float64 and round once."""
    return _apply_in_float64(array, ((np.subtract, offset), (np.divide, scale)), out_dtype)


def unscale_values(array: NDArray[Any], offset: ArrayLike, scale: ArrayLike) -> NDArray[Any]:
    """Compute ``array * scale + offset`` in float64 and round once.

    Scaled and back, a float32 is within 2 units in the last place of the larger of value and
    offset.
    """
    operations = ((np.multiply, scale), (np.add, offset))
    return _apply_in_float64(array, operations, unscaled_dtype(np.asarray(array).dtype))


def scaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return attributes of scaled values: units of 1, the others renamed ``unscaled_<name>``."""
    result: dict[Any, Any] = {"units": "1"} if "units" in attrs else {}
    for name, value in attrs.items():
        result[_UNSCALED + str(name) if _is_of_unscaled(name) else name] = value
    return result


def unscaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes that `scaled_attrs` was given."""
    renamed = {name: value for name, value in attrs.items() if str(name).startswith(_UNSCALED)}
    if not renamed:
        return dict(attrs)
    kept = {name: value for name, value in attrs.items() if not _is_of_unscaled(name)}
    return kept | {name.removeprefix(_UNSCALED): value for name, value in renamed.items()}


def _is_of_unscaled(name: Any) -> bool:
    """Return True if an attribute holds only for unscaled values, or was renamed already."""
    return name in _ATTRS_OF_UNSCALED or str(name).startswith(_UNSCALED)


# Signaling NaNs (R's NA) are ordinary gaps and need no warning.
@np.errstate(invalid="ignore")
def _apply_in_float64(
    array: NDArray[Any],
    operations: Sequence[tuple[np.ufunc, ArrayLike]],
    out_dtype: DTypeLike | None = None,
) -> NDArray[Any]:
    """Apply operations to float64 copies, of cache size where the operands are numbers."""
    array = np.asarray(array)
    out = np.empty(array.shape, scaled_dtype(array.dtype) if out_dtype is None else out_dtype)
    if any(np.ndim(operand) for _, operand in operations):
        x = array.astype(np.float64)
        for operation, operand in operations:
            operation(x, operand, out=x)
        out[...] = x
        return out
    source, target = array.reshape(-1), out.reshape(-1)
    buffer = np.empty(min(source.size, _CELLS_AT_ONCE))
    for start in range(0, source.size, _CELLS_AT_ONCE):
        cells = source[start : start + _CELLS_AT_ONCE]
        x = buffer[: cells.size]
        np.copyto(x, cells, casting="same_kind")
        for operation, operand in operations:
            operation(x, operand, out=x)
        target[start : start + _CELLS_AT_ONCE] = x
    return out
