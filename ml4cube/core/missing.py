"""Gaps in plain arrays: which samples are kept, and what stands in for a gap.

A cell is a gap where its value is not finite (NaN, NaT, +inf or -inf). Arrays of samples are
laid out (samples, *window); points are samples without window dims.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.statistics import check_numpy, scaled_dtype

#: Rules for dropping samples.
DROP_POLICIES = ("auto", "if_all_nan", "masked", None)
#: Ways to fill gaps.
FILL_METHODS = ("sample_mean", "mean", "constant", "noise")

#: Attribute of a variable whose gaps were filled: how.
FILLED_ATTR = "ml4cube_filled"
#: What to do where a cube's targets were filled.
FILL_FEATURES = (
    f"fill the features alone, by fill_nan_values(cube, [...]); if you have made gaps of them "
    f"again, delete the attribute {FILLED_ATTR!r}"
)

#: Why a sample was kept or dropped, as `keep_samples` codes it.
KEPT, GAP, MASK = 0, 1, 2
REASONS = {GAP: "gap", MASK: "mask"}


def find_gaps(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the cells that hold no finite value.

    Parameters
    ----------
    values : ndarray
        Any shape and dtype.

    Returns
    -------
    ndarray of bool
        True at NaN, NaT, +inf and -inf; nowhere for integers, booleans and texts.

    Examples
    --------
    >>> find_gaps(np.array([1.0, np.nan, np.inf]))
    array([False,  True,  True])
    """
    gaps: NDArray[np.bool_] = np.zeros(values.shape, bool)
    if values.dtype.kind in "fc":
        np.logical_not(np.isfinite(values), out=gaps)
    elif values.dtype.kind in "mM":
        np.isnat(values, out=gaps)
    return gaps


def blank(values: NDArray[Any], cells: NDArray[np.bool_]) -> NDArray[Any]:
    """Turn cells into gaps.

    Parameters
    ----------
    values : ndarray
        Left as it is.
    cells : ndarray of bool
        Which; broadcast against `values`.

    Returns
    -------
    ndarray
        A new array: floats and dates keep their dtype, integers and booleans become floats.

    Raises
    ------
    InvalidTypeError
        If the dtype has no gaps, as texts.

    Examples
    --------
    >>> blank(np.array([1, 2], "int16"), np.array([True, False]))
    array([nan,  2.], dtype=float32)
    """
    if values.dtype.kind in "fc":
        gap: Any = values.dtype.type(np.nan)
    elif values.dtype.kind in "mM":
        gap = np.array("NaT", values.dtype)
    elif values.dtype.kind in "iub":
        values = values.astype(scaled_dtype(values.dtype))
        gap = values.dtype.type(np.nan)
    else:
        raise InvalidTypeError(f"values of dtype {values.dtype} have no gaps; leave them out")
    # into a copy: np.where would give values of another byte order back in this one's
    shape = np.broadcast_shapes(values.shape, np.shape(cells))
    blanked = np.array(np.broadcast_to(values, shape))
    np.copyto(blanked, gap, where=cells)
    return blanked


def check_mask(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse a mask that does not say yes or no.

    Parameters
    ----------
    name : str
        What the user calls it.
    dtype : dtype
        Of its values.

    Raises
    ------
    InvalidTypeError
        If it holds neither booleans nor numbers.

    Examples
    --------
    >>> check_mask("land", np.dtype(bool))
    """
    check_numpy(name, dtype)
    if dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"{name} is of dtype {dtype}; a mask holds booleans, or numbers, of which 0 and NaN "
            "are outside; compare it, as in ds.land == 'yes'"
        )


def flags_of(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which cells a mask lets count.

    Parameters
    ----------
    mask : ndarray of bool or numbers
        A mask.

    Returns
    -------
    ndarray of bool
        False where it is 0, False or NaN.

    Raises
    ------
    InvalidTypeError
        If it holds neither booleans nor numbers.

    Examples
    --------
    >>> flags_of(np.array([1.0, 0.0, np.nan]))
    array([ True, False, False])
    """
    check_mask("the mask", mask.dtype)
    return np.asarray((mask != 0) & ~find_gaps(mask))


def plain(values: Any) -> NDArray[Any]:
    """Read an array, turning what numpy masks into gaps, as xarray does.

    Parameters
    ----------
    values : array_like
        Masked or not.

    Returns
    -------
    ndarray
        Not copied if it was an array without masked cells; see `blank` for the dtype.

    Raises
    ------
    InvalidTypeError
        If cells are masked of a dtype that has no gaps, as texts.

    Examples
    --------
    >>> plain(np.ma.masked_equal([1.0, -999.0], -999.0))
    array([ 1., nan])
    """
    array = np.asarray(values)
    return blank(array, np.ma.getmaskarray(values)) if np.ma.is_masked(values) else array


def window_all(
    flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> NDArray[np.bool_]:
    """Tell for each window whether all of its cells are flagged.

    Parameters
    ----------
    flags : ndarray of bool
        Flags of cells, any number of dims.
    size : sequence of int
        Window size along each dim.
    stride : sequence of int
        Cells from one window's start to the next one's along each dim.

    Returns
    -------
    ndarray of bool
        One flag per whole window; empty along a dim that is shorter than the window.

    Examples
    --------
    >>> window_all(np.array([True, True, True, False, True]), (2,), (1,))
    array([ True,  True, False, False])
    """
    return _window_reduce(np.logical_and, flags, size, stride)


def window_any(
    flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> NDArray[np.bool_]:
    """Tell for each window whether any of its cells is flagged.

    Parameters
    ----------
    flags : ndarray of bool
        Flags of cells, any number of dims.
    size : sequence of int
        Window size along each dim.
    stride : sequence of int
        Cells from one window's start to the next one's along each dim.

    Returns
    -------
    ndarray of bool
        One flag per whole window; empty along a dim that is shorter than the window.

    Examples
    --------
    >>> window_any(np.array([False, False, True, False]), (2,), (2,))
    array([False,  True])
    """
    return _window_reduce(np.logical_or, flags, size, stride)


def _window_reduce(
    operation: np.ufunc, flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> NDArray[np.bool_]:
    """Reduce windows one dim at a time: a box is the product of its sides."""
    if not len(size) == len(stride) == flags.ndim or min((*size, *stride), default=1) < 1:
        raise InvalidValueError(
            f"windows of size {tuple(size)} and stride {tuple(stride)} do not fit "
            f"{flags.ndim} dims; give one number of at least 1 per dim"
        )
    result = flags.astype(bool)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        if (length, step) != (1, 1):
            result = _reduce_axis(operation, result, axis, length, step)
    return result


def _reduce_axis(
    operation: np.ufunc, flags: NDArray[np.bool_], axis: int, length: int, step: int
) -> NDArray[np.bool_]:
    """Reduce runs of `length` cells, `step` apart, along one axis."""
    moved = flags.swapaxes(axis, 0)
    count = max((moved.shape[0] - length) // step + 1, 0)
    span = (count - 1) * step + 1 if count else 0
    if length / step <= 2 * math.log2(length + 1):
        result = moved[:span:step].copy()
        for offset in range(1, length):
            operation(result, moved[offset : offset + span : step], out=result)
    else:
        # long, dense windows: runs of 1, 2, 4 ... cells, the last two of them overlapping
        run, reach = moved, 1
        while reach * 2 <= length:
            run = operation(run[:-reach], run[reach:]) if run.shape[0] > reach else run[:0]
            reach *= 2
        result = operation(run[:span:step], run[length - reach : length - reach + span : step])
    return result.swapaxes(0, axis)


def keep_samples(
    gaps: Mapping[str, NDArray[np.bool_]],
    mask: NDArray[np.bool_] | None,
    policy: str | None,
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Decide for each sample, by itself, whether it is kept.

    Parameters
    ----------
    gaps : mapping of str to ndarray of bool, shape (samples, *window)
        Gaps of the variables that count, from `find_gaps`.
    mask : ndarray of bool, shape (samples, *window), optional
        Cells that matter; used by ``"masked"`` only.
    policy : {"auto", "if_all_nan", "masked", None}
        ``"auto"`` drops a sample with any gap, ``"if_all_nan"`` one whose listed variables
        are all gaps in every cell, ``"masked"`` one without a mask-true cell or with a gap
        in a mask-true cell, None drops none.

    Returns
    -------
    keep : ndarray of bool, shape (samples,)
        Samples that stay.
    reason : ndarray of uint8, shape (samples,)
        0 kept, 1 (`GAP`) dropped for gaps, 2 (`MASK`) dropped for lack of a mask-true cell.

    Raises
    ------
    InvalidValueError
        If the policy is unknown, ``"masked"`` has no mask, no variable is given, or numbers
        of samples differ.

    Examples
    --------
    >>> gaps = {"t": np.array([[True, False], [True, True], [False, False]])}
    >>> keep_samples(gaps, None, "auto")[0]
    array([False, False,  True])
    >>> keep_samples(gaps, None, "if_all_nan")[0]
    array([ True, False,  True])
    """
    check_choice("drop_nan", policy, DROP_POLICIES)
    lengths = {name: flags.shape[0] for name, flags in gaps.items()}
    if len(set(lengths.values())) != 1:
        raise InvalidValueError(
            f"keeping samples needs variables with equal numbers of samples, found {lengths}"
        )
    n = next(iter(lengths.values()))
    reason = np.full(n, KEPT, np.uint8)
    if policy == "auto":
        for flags in gaps.values():
            reason[_any_cell(flags)] = GAP
    elif policy == "if_all_nan":
        reason[np.all([~_any_cell(~flags) for flags in gaps.values()], axis=0)] = GAP
    elif policy == "masked":
        if mask is None:
            raise InvalidValueError(
                "drop_nan='masked' needs a mask, found none; give one or choose 'auto'"
            )
        for flags in gaps.values():
            if mask.shape != flags.shape:
                raise InvalidValueError(
                    f"the mask has shape {mask.shape}, a variable {flags.shape}; broadcast it"
                )
            reason[_any_cell(flags & mask)] = GAP
        reason[~_any_cell(mask)] = MASK
    return reason == KEPT, reason


def _any_cell(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether any cell of each sample is flagged."""
    return np.asarray(flags.any(axis=tuple(range(1, flags.ndim))))


def fill_gaps(
    values: NDArray[Any],
    method: str,
    *,
    mean: float | None = None,
    const: object = None,
    low: float | None = None,
    high: float | None = None,
    seed: int = 0,
    positions: NDArray[np.uint64] | None = None,
    variable: str = "",
) -> NDArray[Any]:
    """Put numbers in the place of gaps.

    Parameters
    ----------
    values : ndarray, shape (samples, *window)
        One variable; left as it is. Only floats have gaps to fill.
    method : {"sample_mean", "mean", "constant", "noise"}
        ``"sample_mean"`` takes the mean of the sample's finite cells, and `mean` where a sample
        has none; ``"mean"`` takes `mean`, ``"constant"`` takes `const`, ``"noise"`` draws
        evenly between `low` and `high`.
    mean : float, optional
        Mean of the training cells.
    const : float, optional
        Value for ``"constant"``.
    low, high : float, optional
        Range of the training cells, for ``"noise"``.
    seed : int
        Seeds the noise.
    positions : ndarray of uint64, the shape of `values`, optional
        Where each cell stands in the cube. The noise of a cell depends on `seed`, `variable`
        and position alone, not on the block it was read with. Counts through `values` if not
        given.
    variable : str
        Name, mixed into the seed so that variables do not share their noise.

    Returns
    -------
    ndarray
        A new array of the same dtype, without gaps.

    Raises
    ------
    InvalidValueError
        If the method is unknown, or lacks the number it needs, finite in the values' dtype.
    InvalidTypeError
        If `const` is no real number, or the values are of a kind that cannot be filled.

    Examples
    --------
    >>> x = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]])
    >>> fill_gaps(x, "sample_mean", mean=5.0)
    array([[1., 2., 3.],
           [5., 5., 5.]])
    """
    check_choice("fill_method", method, FILL_METHODS)
    filled = np.array(values)
    gaps = find_gaps(filled)
    if not gaps.any():
        return filled
    if filled.dtype.kind != "f":
        raise InvalidTypeError(
            f"gaps of {_named(variable)} are of dtype {filled.dtype}, only floats can be filled; "
            "drop those samples"
        )
    if method == "mean":
        filled[gaps] = _given(mean, "mean", method, variable, filled.dtype)
    elif method == "constant":
        filled[gaps] = _given(const, "const", method, variable, filled.dtype)
    elif method == "sample_mean":
        # into what is there: np.where would give values of another byte order back in this one's
        np.copyto(filled, _sample_means(filled, gaps, mean, variable), where=gaps)
    else:
        least = _given(low, "low", method, variable, filled.dtype)
        most = _given(high, "high", method, variable, filled.dtype)
        where = np.arange(gaps.size, dtype=np.uint64).reshape(gaps.shape)
        cells = (where if positions is None else positions)[gaps]
        drawn = least + (most - least) * uniform_noise(cells, seed, variable)
        filled[gaps] = np.clip(drawn.astype(filled.dtype), least, most)
    return filled


def warn_of_filled(
    argument: str, filled: Mapping[str, str], advice: str, stacklevel: int = 4
) -> None:
    """Warn that a loss or score would take filled gaps for measured values.

    Parameters
    ----------
    argument : str
        The argument that names the variables, for the message.
    filled : mapping of str to str
        Variables whose gaps were filled, with the method; nothing is said if there is none.
    advice : str
        What to do.
    stacklevel : int
        Of the user's call.
    """
    if not filled:
        return
    found = " and ".join(f"{name!r} ({method!r})" for name, method in filled.items())
    warnings.warn(
        f"{argument}: any gaps of {found} were filled, so the loss and every score take invented "
        f"values for measured ones; {advice}",
        stacklevel=stacklevel,
    )


def check_real_number(argument: str, value: object) -> None:
    """Refuse what is no real number, or one that no float holds.

    Parameters
    ----------
    argument : str
        Name of the argument, for messages.
    value : object
        What was given.

    Raises
    ------
    InvalidTypeError
        If it is no real number.
    InvalidValueError
        If it is a whole number beyond the range of floats.

    Examples
    --------
    >>> check_real_number("const", np.float32(0.5))
    """
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        raise InvalidTypeError(
            f"{argument}={value!r} is a {type(value).__name__}; give a number that is real"
        )
    try:
        float(value)
    except OverflowError:
        raise InvalidValueError(
            f"{argument} is a whole number of {int(value).bit_length()} bits, which no float "
            "holds; give a number in the range of the variable"
        ) from None


def _given(value: Any, argument: str, method: str, variable: str, dtype: np.dtype[Any]) -> float:
    """Return a number that a method needs, or say that it is missing or would be a gap itself."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise InvalidValueError(
            f"fill_method={method!r} needs {argument} for {_named(variable)}, found {value!r}; "
            "give a number (the training part may be all gaps)"
        )
    check_real_number(argument, value)
    with np.errstate(over="ignore"):
        finite = np.isfinite(dtype.type(value))
    if not finite:
        raise InvalidValueError(
            f"{argument}={value!r} is not finite in {dtype}, which {_named(variable)} is of, so it "
            "would be a gap; give a number in its range"
        )
    return float(value)


def _named(variable: str) -> str:
    """Name a variable in a message."""
    return f"variable {variable!r}" if variable else "the variable"


def _sample_means(
    values: NDArray[Any], gaps: NDArray[np.bool_], mean: float | None, variable: str
) -> NDArray[Any]:
    """Mean of each sample's finite cells, `mean` where it has none; broadcasts to `values`."""
    axes = tuple(range(1, values.ndim))
    count = (~gaps).sum(axis=axes, keepdims=True)
    total = np.where(gaps, 0.0, values).sum(axis=axes, keepdims=True, dtype=np.float64)
    means = total / np.maximum(count, 1)
    if (count == 0).any():
        means[count == 0] = _given(mean, "mean", "sample_mean", variable, values.dtype)
    result: NDArray[Any] = means.astype(values.dtype)
    return result


def uniform_noise(positions: NDArray[np.uint64], seed: int, variable: str) -> NDArray[np.float64]:
    """Draw one number from [0, 1) for each position, by hashing it (SplitMix64).

    Parameters
    ----------
    positions : ndarray of uint64
        Any shape.
    seed : int
        Seeds the draw.
    variable : str
        Mixed into the seed.

    Returns
    -------
    ndarray of float64
        The same shape; a number depends on its own position, `seed` and `variable` alone.

    Examples
    --------
    >>> p = np.arange(3, dtype=np.uint64)
    >>> bool((uniform_noise(p, 1, "t")[1:] == uniform_noise(p[1:], 1, "t")).all())
    True
    """
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(variable.encode())) % 2**64)
    start = _mixed(np.asarray(key).reshape(1))
    bits = _mixed(positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start[0])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of SplitMix64 (Steele et al. 2014), on arrays: multiplication wraps silently."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
