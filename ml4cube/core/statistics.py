"""Statistics that can be merged, and the scaling arithmetic that uses them.

`Statistics` maps names of variables to their moments (`core.moments`); what scales a variable by
them, and back, is here too, on plain arrays.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.core.sums.moments import VariableStatistics as VariableStatistics

# Cells worked on at a time: as float64 they take 1 MiB, which stays in a core's cache.
_PIECE = 131_072

SCALE_FNS = ("standardize", "normalize", None)
#: What a store may be scaled by; quartiles come of statistics that are given.
SCALINGS = ("standardize", "normalize", "robust", None)
QUARTILES = (0.25, 0.5, 0.75)

# Attributes of CF conventions that hold for values in their own units only.
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
    """Refuse packed integers whose scale is still in the attributes, and pandas' own dtypes.

    Parameters
    ----------
    name : str
        Name of the variable.
    dtype : dtype
        Of its values.
    attrs : mapping
        Its attributes.

    Raises
    ------
    InvalidValueError
        If it was opened without decoding: its numbers are not the values.
    InvalidTypeError
        If it holds numbers of an extension dtype of pandas, as ``Int64``.

    Examples
    --------
    >>> check_decoded("t2m", "float32", {"scale_factor": 0.1})
    """
    check_numpy(name, dtype)
    marks = ("scale_factor", "add_offset", "_FillValue", "missing_value")
    packed = [key for key in marks if key in attrs]
    if not packed or np.dtype(dtype).kind not in "iu":
        return
    raise InvalidValueError(
        f"variable {name!r} holds packed {np.dtype(dtype)} values: {packed} still in its attrs; "
        "open the source with mask_and_scale=True, or apply xarray.decode_cf"
    )


def check_numpy(name: str, dtype: Any) -> None:
    """Refuse numbers of a dtype that only pandas knows, as ``Int64``, whose gaps numpy misses.

    Parameters
    ----------
    name : str
        Name of the variable.
    dtype : dtype
        Of its values.

    Raises
    ------
    InvalidTypeError
        If it is an extension dtype of numbers or booleans.

    Examples
    --------
    >>> check_numpy("t2m", np.dtype("float32"))
    """
    if not isinstance(dtype, np.dtype) and getattr(dtype, "kind", "") in ("f", "i", "u", "b", "c"):
        raise InvalidTypeError(
            f"variable {name!r} is of pandas' dtype {dtype}, whose gaps numpy does not know; "
            'convert it by astype("float64")'
        )


def check_real(name: str, dtype: DTypeLike) -> None:
    """Refuse to scale what holds no real numbers.

    Parameters
    ----------
    name : str
        Name of the variable.
    dtype : dtype
        Of its values.

    Raises
    ------
    InvalidTypeError
        If it is complex, or holds dates, texts or other objects.

    Examples
    --------
    >>> check_real("t2m", "float32")
    """
    check_numpy(name, dtype)
    kind = getattr(dtype, "kind", None) or np.dtype(dtype).kind
    if kind not in "fiub":
        raise InvalidTypeError(
            f"variable {name!r} is of dtype {dtype}, only real numbers can be scaled; "
            "leave it out of the statistics or convert it"
        )


def offset_and_scale(
    called: str, entry: Any, spread: Callable[[Any, Any], Any], fields: tuple[type, ...] = ()
) -> tuple[Any, Any]:
    """Turn a user's ``[mean, std]`` or ``[min, max]`` into an offset and a scale.

    Parameters
    ----------
    called : str
        What the two are called in messages.
    entry : sequence of two numbers
        What the user gave.
    spread : callable
        Gives the scale from the two; not 0.
    fields : tuple of type
        Types of labelled arrays that may stand for a number, one value at each place.

    Returns
    -------
    offset, scale : float or one of `fields`
        The first of the two, and the scale.

    Raises
    ------
    InvalidTypeError
        If it is no pair of numbers.
    InvalidValueError
        If a number is NaN or infinite, of a field, if all are; or a scale is negative.

    Examples
    --------
    >>> offset_and_scale("range_dict['t']", [1, 5], lambda low, high: high - low)
    (1.0, 4.0)
    """
    try:
        if isinstance(entry, str | bytes):
            raise TypeError
        numbers: list[Any] = [one if isinstance(one, fields) else _number(one) for one in entry]
        first, second = numbers
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{called} is {entry!r}; give two numbers") from None
    shown = f"{called} is [{_shown(first)}, {_shown(second)}]"
    if not np.any(np.isfinite(first) & np.isfinite(second)):
        raise InvalidValueError(
            f"{shown}, as of a variable that is all gaps; drop the variable or take it out of the "
            "statistics"
        )
    scale = spread(first, second)
    if np.any(scale < 0):
        raise InvalidValueError(
            f"{shown}; give [mean, std] with a std that is not negative, or [min, max] in this "
            "order"
        )
    return first, scale


def _number(given: Any) -> float:
    """A number; a text is none, though it may look like one."""
    if isinstance(given, str | bytes):
        raise TypeError
    return float(given)


def _shown(number: Any) -> str:
    """A number in a message, or what stands for many."""
    return f"{number.sizes} numbers" if hasattr(number, "sizes") else str(number)


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
        InvalidTypeError
            If `other` is something else.
        InvalidValueError
            If variables or parts differ.
        """
        if not isinstance(other, Statistics):
            raise InvalidTypeError(
                f"cannot merge statistics with a {type(other).__name__}; give Statistics"
            )
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

        Raises
        ------
        InvalidTypeError
            If labels of a dim that is kept are neither numbers, dates nor texts.
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
        InvalidTypeError
            If it is no text.
        InvalidValueError
            If the text is not what `to_json` writes.
        """
        if not isinstance(text, str):
            raise InvalidTypeError(
                f"text is a {type(text).__name__}; give the str that to_json() wrote"
            )
        try:
            raw = json.loads(text)
            table = {name: _entry(fields) for name, fields in raw["variables"].items()}
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


def _entry(fields: Mapping[str, Any]) -> VariableStatistics:
    """Read statistics of one variable, with or without dims."""
    kind = FieldStatistics if "dims" in fields else VariableStatistics
    return kind.from_dict(fields)


def scale_parameters(stats: VariableStatistics, scale_fn: str | None) -> tuple[Any, Any]:
    """Offset and scale so that ``(x - offset) / scale`` is the scaled variable.

    Parameters
    ----------
    stats : VariableStatistics
        Of the training cells.
    scale_fn : {"standardize", "normalize", "robust", None}
        To mean 0 and standard deviation 1, to the range 0 to 1, to median 0 and interquartile
        range 1 (statistics with quantiles), or not at all.

    Returns
    -------
    offset, scale : float or ndarray
        Offset, in the variable's units, and scale, never 0: a constant variable is only shifted,
        to 0, and so comes back exactly. Arrays of the shape of the statistics where these keep
        dims, NaN at places without a cell.

    Raises
    ------
    InvalidValueError
        If `scale_fn` is unknown, or there is no finite cell to scale by.

    Examples
    --------
    >>> scale_parameters(VariableStatistics.of([2.0, 4.0]), "normalize")
    (2.0, 2.0)
    """
    check_choice("scale_fn", scale_fn, SCALINGS)
    if scale_fn is None:
        return 0.0, 1.0
    if not np.any(stats.count):
        raise InvalidValueError(
            f"cannot {scale_fn} by statistics of no finite cell "
            f"({np.sum(stats.gaps)} gaps, {np.sum(stats.infs)} infinities); drop the variable or "
            "its gaps"
        )
    if scale_fn == "standardize":
        offset, scale = stats.mean, stats.std
    elif scale_fn == "normalize":
        offset, scale = stats.min, stats.max - stats.min
    else:
        offset, scale = _median_and_spread(stats)
    if np.ndim(offset):
        return offset, np.where(scale == 0, 1.0, scale)
    return float(offset), float(scale) or 1.0


def _median_and_spread(stats: VariableStatistics) -> tuple[Any, Any]:
    """Median and interquartile range; 1 where the histogram cannot tell the quartiles apart."""
    if not isinstance(stats, FieldStatistics):
        raise InvalidValueError(
            "statistics without a histogram know no quartiles; compute them with "
            "quantiles=(0.25, 0.5, 0.75), or by CubeScaler(method='robust')"
        )
    low, median, high = (stats.quantile(probability) for probability in QUARTILES)
    spread = high - low
    # in one bin: more than half of the cells (dry days, say) have about the same value
    apart = spread > stats.quantile_error
    return median, np.where(apart | np.isnan(spread), spread, 1.0)


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


def scaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes of values that were scaled: in units of 1, and the others put aside.

    Parameters
    ----------
    attrs : mapping
        Attributes of the values before; those of CF that tell of their units or range count.

    Returns
    -------
    dict
        Those as ``unscaled_<name>``, from which `unscaled_attrs` takes them back; ``units`` of
        ``"1"`` if there were any; all others.

    Examples
    --------
    >>> scaled_attrs({"units": "K", "long_name": "air temperature"})
    {'units': '1', 'unscaled_units': 'K', 'long_name': 'air temperature'}
    """
    result: dict[Any, Any] = {"units": "1"} if "units" in attrs else {}
    for name, value in attrs.items():
        result[_ASIDE + str(name) if _is_of_values(name) else name] = value
    return result


def unscaled_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes of values whose scaling was taken back.

    Parameters
    ----------
    attrs : mapping
        Attributes of the scaled values.

    Returns
    -------
    dict
        What `scaled_attrs` was given; the same attributes if it put none aside.

    Examples
    --------
    >>> unscaled_attrs({"units": "1", "unscaled_units": "K"}), unscaled_attrs({"units": "K"})
    ({'units': 'K'}, {'units': 'K'})
    """
    if not any(str(name).startswith(_ASIDE) for name in attrs):
        return dict(attrs)
    aside = {n.removeprefix(_ASIDE): v for n, v in attrs.items() if str(n).startswith(_ASIDE)}
    return {n: v for n, v in attrs.items() if not _is_of_values(n)} | aside


def _is_of_values(name: Any) -> bool:
    """Whether an attribute tells of values as they are before scaling, or did so once more."""
    return name in _OF_VALUES or str(name).startswith(_ASIDE)


# signaling NaNs (R's NA) are gaps like others, nothing to warn of
@np.errstate(invalid="ignore")
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
