"""Undo the scaling: return values to physical units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xarray as xr

from ml4cube.core.errors import InvalidTypeError
from ml4cube.core.statistics import offset_and_scale, unscale_values
from ml4cube.preprocessing.rescaling import Pairs, rescale, rescale_array


def undo_standardizing(x: Any, xmean: float | Pairs, xstd: float | None = None) -> Any:
    """Undo `standardize`: ``x * std + mean``.

    Parameters
    ----------
    x : array, DataArray, Dataset or dict of arrays
        Standardized values; not changed. A lazy cube stays lazy.
    xmean : float, or mapping of str to [mean, std], or Statistics
        Mean that was used; for a Dataset or dict those of every variable, as from
        `get_statistics`.
    xstd : float, optional
        Standard deviation that was used; only with a single mean.

    Returns
    -------
    array, DataArray, Dataset or dict
        Of the kind given, in physical units, with the same dtype (float16 becomes float32, as it
        ends at 65504 and has three digits), coordinates and attributes, and ``units`` as before
        scaling. Gaps stay gaps. If std is 0, only the mean is added.

    Raises
    ------
    InvalidTypeError
        If `x` and `xmean` do not go together, or `x` holds no real numbers.
    InvalidValueError
        If a number is NaN or infinite, a std is negative, or no variable has statistics.

    Examples
    --------
    >>> import numpy as np
    >>> undo_standardizing(np.array([-2.0, 2.0]), 2.0, 0.5)
    array([1., 3.])
    """
    return _undo(x, xmean, xstd, ("xmean", "xstd"), "standardize")


def undo_normalizing(x: Any, xmin: float | Pairs, xmax: float | None = None) -> Any:
    """Undo `normalize`: ``x * (max - min) + min``.

    Parameters
    ----------
    x : array, DataArray, Dataset or dict of arrays
        Normalized values; not changed. A lazy cube stays lazy.
    xmin : float, or mapping of str to [min, max], or Statistics
        Minimum that was used; for a Dataset or dict the ranges of every variable, as from
        `get_range`.
    xmax : float, optional
        Maximum that was used; only with a single minimum.

    Returns
    -------
    array, DataArray, Dataset or dict
        Of the kind given, in physical units, with the same dtype (float16 becomes float32, as it
        ends at 65504 and has three digits), coordinates and attributes, and ``units`` as before
        scaling. Gaps stay gaps. If min equals max, only min is added.

    Raises
    ------
    InvalidTypeError
        If `x` and `xmin` do not go together, or `x` holds no real numbers.
    InvalidValueError
        If a number is NaN or infinite, a minimum is above the maximum, or no variable has a
        range.

    Examples
    --------
    >>> import numpy as np
    >>> undo_normalizing(np.array([0.0, 0.5]), 1.0, 5.0)
    array([1., 3.])
    """
    return _undo(x, xmin, xmax, ("xmin", "xmax"), "normalize")


def _undo(x: Any, first: Any, second: Any, arguments: tuple[str, str], scale_fn: str) -> Any:
    """Undo the scaling of one array by two numbers, or of every variable that has such a pair."""
    if not isinstance(first, Mapping):
        if isinstance(x, Mapping):
            raise InvalidTypeError(
                f"{arguments[0]} must be a mapping {{variable: [a, b]}} for a {type(x).__name__}, "
                f"got {first!r}"
            )
        offset, scale = offset_and_scale(", ".join(arguments), (first, second), scale_fn)
        name = x.name if isinstance(x, xr.DataArray) and x.name is not None else "x"
        return rescale_array(str(name), x, offset, scale, unscale_values)
    if second is not None:
        raise InvalidTypeError(
            f"{arguments[1]} must be left out if {arguments[0]} is a mapping, got {second!r}"
        )
    if not isinstance(x, Mapping | xr.DataArray):
        raise InvalidTypeError(
            f"x must be a Dataset, a named DataArray or a dict of arrays if {arguments[0]} is a "
            f"mapping, got {type(x).__name__}"
        )
    return rescale(x, first, arguments[0], scale_fn, unscale_values)
