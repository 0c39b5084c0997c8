"""Back to physical units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import plain
from ml4cube.core.statistics import (
    check_real,
    offset_and_scale,
    scaled_dtype,
    unscale_values,
    unscaled_attrs,
)
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.rescaling import labelled, no_zero, rescale_at_places

Pairs = Mapping[str, Sequence[float]] | core.Statistics


def undo_standardizing(x: Any, xmean: float | Pairs, xstd: float | None = None) -> Any:
    """Take standardization back: ``x * std + mean``.

    Parameters
    ----------
    x : array, DataArray, Dataset or dict of arrays
        Standardized values; left as they are. A lazy cube stays lazy.
    xmean : float, or mapping of str to [mean, std], or Statistics
        Mean that was used; for a Dataset or dict those of every variable, as `get_statistics`
        gives them.
    xstd : float, optional
        Standard deviation that was used; only with a single mean.

    Returns
    -------
    array, DataArray, Dataset or dict
        Of the kind given, in physical units, with the same dtype, coordinates and attributes,
        ``units`` as they were before scaling.
        Gaps stay gaps. A std of 0 is what `standardize` takes it for: values were only shifted.

    Raises
    ------
    InvalidTypeError
        If the numbers do not suit the kind of `x`, or it holds no real numbers.
    InvalidValueError
        If a number is NaN or infinite, a std is negative, or no variable has statistics.

    Examples
    --------
    >>> import numpy as np
    >>> undo_standardizing(np.array([-2.0, 2.0]), 2.0, 0.5)
    array([1., 3.])
    """
    if isinstance(xmean, core.Statistics):
        xmean = _pairs(xmean, lambda stats: (stats.mean, stats.std))
    return _undo(x, xmean, xstd, ("xmean", "xstd"), lambda mean, std: no_zero(std))


def undo_normalizing(x: Any, xmin: float | Pairs, xmax: float | None = None) -> Any:
    """Take normalization back: ``x * (max - min) + min``.

    Parameters
    ----------
    x : array, DataArray, Dataset or dict of arrays
        Normalized values; left as they are. A lazy cube stays lazy.
    xmin : float, or mapping of str to [min, max], or Statistics
        Least value that was used; for a Dataset or dict the ranges of every variable, as
        `get_range` gives them.
    xmax : float, optional
        Greatest value that was used; only with a single least value.

    Returns
    -------
    array, DataArray, Dataset or dict
        Of the kind given, in physical units, with the same dtype, coordinates and attributes,
        ``units`` as they were before scaling.
        Gaps stay gaps. Where min equals max, values were only shifted, as `normalize` does.

    Raises
    ------
    InvalidTypeError
        If the numbers do not suit the kind of `x`, or it holds no real numbers.
    InvalidValueError
        If a number is NaN or infinite, a least value is above the greatest, or no variable has a
        range.

    Examples
    --------
    >>> import numpy as np
    >>> undo_normalizing(np.array([0.0, 0.5]), 1.0, 5.0)
    array([1., 3.])
    """
    if isinstance(xmin, core.Statistics):
        xmin = _pairs(xmin, lambda stats: (stats.min, stats.max))
    return _undo(x, xmin, xmax, ("xmin", "xmax"), lambda low, high: no_zero(high - low))


def _pairs(statistics: core.Statistics, numbers: Any) -> dict[str, list[Any]]:
    """Two numbers of each variable, with dims and coordinates where there are many."""
    return {name: [labelled(s, one) for one in numbers(s)] for name, s in statistics.items()}


def _undo(x: Any, first: Any, second: Any, arguments: tuple[str, str], spread: Any) -> Any:
    """Unscale one array, or every variable that has statistics."""
    if isinstance(first, Mapping):
        if second is not None:
            raise InvalidTypeError(
                f"{arguments[1]}={second!r} beside a mapping of pairs; leave it out"
            )
        return _undo_each(x, first, arguments[0], spread)
    if isinstance(x, Mapping):
        raise InvalidTypeError(
            f"x is a {type(x).__name__} of several variables; give {arguments[0]} as a mapping "
            f"{{variable: [..., ...]}}, not {first!r}"
        )
    name = str(x.name) if isinstance(x, xr.DataArray) and x.name is not None else "x"
    return _undo_array(name, x, *_parameters(", ".join(arguments), (first, second), spread))


def _undo_each(x: Any, pairs: Mapping[str, Any], argument: str, spread: Any) -> Any:
    """Unscale every variable that has statistics."""
    if isinstance(x, xr.DataArray):
        name = next(iter(pairs)) if x.name is None and len(pairs) == 1 else x.name
        if name not in pairs:
            raise InvalidValueError(f"{argument} has {list(pairs)}, x is called {x.name!r}")
        numbers = _parameters(f"{argument}[{name!r}]", pairs[str(name)], spread)
        return _undo_array(str(name), x, *numbers)
    if not isinstance(x, Mapping):
        raise InvalidTypeError(
            f"x is a {type(x).__name__}, but {argument} names variables {list(pairs)}; "
            "give a Dataset or a dict of arrays, or two numbers"
        )
    found = [name for name in pairs if name in x]
    if not found:
        raise InvalidValueError(f"{argument} has {list(pairs)}, x has none of them: {list(x)}")
    parameters = {name: _parameters(f"{argument}[{name!r}]", pairs[name], spread) for name in found}
    undone = {name: _undo_array(name, x[name], *parameters[name]) for name in found}
    if not isinstance(x, xr.Dataset):
        return {**x, **undone}
    # coordinates of the arrays would be merged, at which xarray warns of a MultiIndex
    return x.assign({name: array.variable for name, array in undone.items()})


def _parameters(called: str, entry: Any, spread: Any) -> tuple[Any, Any]:
    """Offset and scale, each a number or one at each place."""
    return offset_and_scale(called, entry, spread, (xr.DataArray,))


def _undo_array(name: str, x: Any, offset: Any, scale: Any) -> Any:
    """Unscale one array of any kind, lazily if it is lazy."""
    x = x if isinstance(x, xr.DataArray) or hasattr(x, "dask") else plain(x)
    check_real(name, x.dtype)
    if isinstance(offset, xr.DataArray) or isinstance(scale, xr.DataArray):
        return _undo_at_places(name, x, xr.DataArray(offset), xr.DataArray(scale))
    if not isinstance(x, xr.DataArray):
        if hasattr(x, "dask"):
            return x.map_blocks(unscale_values, offset, scale, dtype=scaled_dtype(x.dtype))
        return unscale_values(x, offset, scale)
    undone: xr.DataArray = xr.apply_ufunc(
        unscale_values,
        read_in_blocks(x),
        kwargs={"offset": offset, "scale": scale},
        dask="parallelized",
        output_dtypes=[scaled_dtype(x.dtype)],
        keep_attrs=True,
    )
    undone.attrs = unscaled_attrs(undone.attrs)
    return undone


def _undo_at_places(name: str, x: Any, offset: xr.DataArray, scale: xr.DataArray) -> xr.DataArray:
    """Unscale an array with dims by the numbers of each place."""
    offset, scale = xr.broadcast(offset, scale)
    dims = [str(dim) for dim in offset.dims]
    if not isinstance(x, xr.DataArray):
        raise InvalidTypeError(
            f"the statistics of {name!r} keep dims {dims}, but x is a {type(x).__name__} without "
            "names of dims; give a DataArray or Dataset"
        )
    labels = {dim: offset.indexes[dim].values for dim in dims if dim in offset.indexes}
    undone = rescale_at_places(x, unscale_values, offset.values, scale.values, dims, labels)
    undone.attrs = unscaled_attrs(undone.attrs)
    return undone
