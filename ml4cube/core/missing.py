"""Gaps in plain arrays: where they are, and how they are filled.

A cell is a gap where its value is not finite (NaN, NaT, +inf or -inf). Arrays of samples have the
shape (samples, *window); points are samples without window dims.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_choice,
    check_numpy,
)
from ml4cube.core.fingerprint import GOLDEN, mix, mix_number
from ml4cube.core.statistics import VariableStatistics, scaled_dtype

#: Rules for dropping samples.
DROP_POLICIES = ("auto", "if_all_nan", "masked", None)
#: Ways to fill gaps.
FILL_METHODS = ("sample_mean", "mean", "constant", "noise")

#: Attribute of a variable with filled gaps: the method.
FILLED_ATTR = "ml4cube_filled"
#: Advice where a cube's targets were filled.
FILL_FEATURES = (
    f"fill the features only, with fill_nan_values(cube, [...]); if the gaps are NaN again, delete "
    f"the attribute {FILLED_ATTR!r}"
)


def find_gaps(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the cells that are NaN, NaT or infinite; integers, booleans and strings have none."""
    gaps: NDArray[np.bool_] = np.zeros(values.shape, bool)
    if values.dtype.kind in "fc":
        np.logical_not(np.isfinite(values), out=gaps)
    elif values.dtype.kind in "mM":
        np.isnat(values, out=gaps)
    return gaps


def set_gaps(values: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[Any]:
    """Return a copy with gaps where `where` is True; integers and booleans become floats."""
    if values.dtype.kind in "fc":
        gap: Any = values.dtype.type(np.nan)
    elif values.dtype.kind in "mM":
        gap = np.array("NaT", values.dtype)
    elif values.dtype.kind in "iub":
        values = values.astype(scaled_dtype(values.dtype))
        gap = values.dtype.type(np.nan)
    else:
        raise InvalidTypeError(f"values of dtype {values.dtype} cannot have gaps; leave them out")
    # Into a copy, because np.where would change a foreign byte order.
    shape = np.broadcast_shapes(values.shape, np.shape(where))
    result = np.array(np.broadcast_to(values, shape))
    np.copyto(result, gap, where=where)
    return result


def check_mask(subject: str, dtype: np.dtype[Any]) -> None:
    """Raise InvalidTypeError unless a mask holds booleans or numbers."""
    check_numpy(subject, dtype)
    if dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"{subject} must hold booleans or numbers (0 and NaN are outside), got dtype {dtype}; "
            "compare it, as in ds.land == 'yes'"
        )


def bool_mask(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask as booleans: False where it is 0, False or NaN."""
    check_mask("the mask", mask.dtype)
    return np.asarray((mask != 0) & ~find_gaps(mask))


def masked_to_gaps(values: Any) -> NDArray[Any]:
    """Return an array, with gaps where a masked array of numpy is masked, as xarray does."""
    array = np.asarray(values)
    if np.ma.is_masked(values):
        return set_gaps(array, np.ma.getmaskarray(values))
    return array


def window_all(
    flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> NDArray[np.bool_]:
    """Return True for every whole window whose cells are all flagged, in the order of the grid."""
    # One dim at a time: a window is the product of its sides.
    result = flags
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        if (length, step) != (1, 1):
            result = _all_along(result, axis, length, step)
    return result


def window_any(
    flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> NDArray[np.bool_]:
    """Return True for every whole window with a flagged cell, in the order of the grid."""
    return ~window_all(~flags, size, stride)


def _all_along(flags: NDArray[np.bool_], axis: int, length: int, step: int) -> NDArray[np.bool_]:
    """Return True for every run of `length` flags along an axis that are all set.

    Runs start `step` cells apart.
    """
    flags = flags.swapaxes(axis, 0)
    runs = max((flags.shape[0] - length) // step + 1, 0)
    # from the first start to the last one
    span = 0
    if runs:
        span = (runs - 1) * step + 1
    # How often all flags are read: each of `length` passes reads one in `step`, or, by doubling,
    # every pass reads all of them twice.
    one_by_one, by_doubling = length / step, 2 * math.log2(length + 1)
    if one_by_one <= by_doubling:
        result = flags[:span:step].copy()
        for offset in range(1, length):
            result &= flags[offset : offset + span : step]
    else:
        # all_set[i] is True if the flags of the `doubled` cells from i on are all set.
        all_set, doubled = flags, 1
        while doubled * 2 <= length:
            shorter = max(len(all_set) - doubled, 0)
            all_set = all_set[:shorter] & all_set[doubled:]
            doubled *= 2
        # Two such stretches that overlap make one of `length`.
        rest = length - doubled
        result = all_set[:span:step] & all_set[rest : rest + span : step]
    return result.swapaxes(0, axis)


def fill_gaps(
    values: NDArray[Any],
    method: str,
    *,
    variable: str,
    train_stats: VariableStatistics | None = None,
    const: object = None,
    seed: int = 0,
    positions: NDArray[np.uint64] | None = None,
) -> NDArray[Any]:
    """Return a copy of one variable, shape (samples, *window), with its gaps filled.

    "sample_mean" takes the mean of the sample's finite cells, or that of the train cells if there
    are none; "mean" takes that of the train cells, "constant" takes `const`. "noise" draws
    uniformly from the range of the train cells, as a function of `seed`, `variable` and the cell's
    position in the cube (`positions`, of the shape of `values`) alone.
    """
    check_choice("fill_method", method, FILL_METHODS)
    filled = np.array(values)
    gaps = find_gaps(filled)
    if not gaps.any():
        return filled
    if filled.dtype.kind != "f":
        raise InvalidTypeError(
            f"variable {variable!r} must be of a float dtype to fill its gaps, got {filled.dtype}; "
            "drop those samples"
        )

    def checked(argument: str, value: object) -> float:
        return _finite_number(argument, value, method, variable, filled.dtype)

    def of_train(argument: str, attribute: str) -> float:
        # float(), because weighted statistics, and those with quantiles, hold arrays without dims.
        statistic = None
        if train_stats is not None:
            statistic = float(getattr(train_stats, attribute))
        return checked(argument, statistic)

    if method == "constant":
        filled[gaps] = checked("const", const)
    elif method == "mean":
        filled[gaps] = of_train("mean", "mean")
    elif method == "sample_mean":
        means, has_cells = _sample_means(filled, gaps)
        if not has_cells.all():
            means[~has_cells] = of_train("mean", "mean")
        # In place, because np.where would change a foreign byte order.
        np.copyto(filled, means.astype(filled.dtype), where=gaps)
    else:
        assert positions is not None
        low, high = of_train("low", "min"), of_train("high", "max")
        drawn = low + (high - low) * uniform_noise(positions[gaps], seed, variable)
        filled[gaps] = np.clip(drawn.astype(filled.dtype), low, high)
    return filled


def warn_of_filled(argument: str, filled: Mapping[str, str], advice: str) -> None:
    """Warn that a loss or score would treat filled gaps as measured values."""
    if not filled:
        return
    filled_names = " and ".join(f"{name!r} ({method!r})" for name, method in filled.items())
    warnings.warn(
        f"{argument}: gaps of {filled_names} were filled, so losses and scores treat filled "
        f"values as measured ones; {advice}",
        stacklevel=caller_level(),
    )


def _finite_number(
    argument: str, value: Any, method: str, variable: str, dtype: np.dtype[Any]
) -> float:
    """Return a number that a method needs; raise if it is None or not finite in `dtype`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise InvalidValueError(
            f"fill_method={method!r} needs {argument} for variable {variable!r}, got {value!r}; "
            "the train part may be all gaps"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(dtype.type(value))
    if not finite:
        raise InvalidValueError(
            f"{argument} must be finite in {dtype}, the dtype of variable {variable!r}, got "
            f"{value!r}"
        )
    return float(value)


def _sample_means(
    values: NDArray[Any], gaps: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the mean of each sample's finite cells, and whether it has any."""
    axes = tuple(range(1, values.ndim))
    count = (~gaps).sum(axis=axes, keepdims=True)
    total = np.where(gaps, 0.0, values).sum(axis=axes, keepdims=True, dtype=np.float64)
    return total / np.maximum(count, 1), count > 0


def uniform_noise(positions: NDArray[np.uint64], seed: int, variable: str) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position, by hashing position, `seed` and `variable`."""
    start = np.uint64(mix_number(seed * GOLDEN + zlib.crc32(variable.encode())))
    bits = mix(positions.astype(np.uint64) * np.uint64(GOLDEN) + start)
    # The highest 53 of the 64 bits, which float64 holds exactly.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
