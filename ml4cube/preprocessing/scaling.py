"""Scaling of cubes and samples by statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.statistics import scale_values, scaled_dtype
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.samples import Samples

Parameters = Mapping[str, tuple[Any, Any]]
Rescale = Callable[..., Any]


def standardize(
    ds: cubes.Cube,
    stats_dict: Mapping[str, Sequence[float]] | core.Statistics,
    filter_var: str | None = None,
) -> Any:
    """Scale each variable to mean 0 and standard deviation 1: ``(x - mean) / std``.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        Left as it is; a lazy cube stays lazy.
    stats_dict : mapping of str to [mean, std], or Statistics
        From `get_statistics`. Variables that it lacks are not scaled.
    filter_var : str, optional
        Name of a mask, never scaled, like split labels.

    Returns
    -------
    Dataset, DataArray or dict
        Of the kind given, with its coordinates and attributes. Floats keep their dtype, integers
        become float32 or float64. Gaps stay gaps. Where std is 0 only the mean is taken off.

    Raises
    ------
    InvalidValueError
        If no variable has statistics, or the statistics of one are NaN (a part that is all gaps).

    Examples
    --------
    >>> import numpy as np
    >>> standardize({"t": np.array([1.0, 3.0])}, {"t": [2.0, 0.5]})
    {'t': array([-2.,  2.])}
    """
    if isinstance(stats_dict, core.Statistics):
        stats_dict = stats_dict.mean_std()
    return rescale(ds, pairs(stats_dict, "stats_dict", _spread_of_std), scale_values, filter_var)


def normalize(
    ds: cubes.Cube,
    range_dict: Mapping[str, Sequence[float]] | core.Statistics,
    filter_var: str | None = None,
) -> Any:
    """Scale each variable to the range 0 to 1: ``(x - min) / (max - min)``.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        Left as it is; a lazy cube stays lazy.
    range_dict : mapping of str to [min, max], or Statistics
        From `get_range`. Variables that it lacks are not scaled.
    filter_var : str, optional
        Name of a mask, never scaled, like split labels.

    Returns
    -------
    Dataset, DataArray or dict
        Of the kind given, with its coordinates and attributes. Floats keep their dtype, integers
        become float32 or float64. Gaps stay gaps. Values beyond the range, as test data may
        have, lie beyond 0 to 1. Where min equals max only min is taken off.

    Raises
    ------
    InvalidValueError
        If no variable has a range, or the range of one is NaN (a part that is all gaps).

    Examples
    --------
    >>> import numpy as np
    >>> normalize({"t": np.array([1.0, 3.0])}, {"t": [1.0, 5.0]})
    {'t': array([0. , 0.5])}
    """
    if isinstance(range_dict, core.Statistics):
        range_dict = range_dict.range()
    return rescale(ds, pairs(range_dict, "range_dict", _spread_of_range), scale_values, filter_var)


def _spread_of_std(_mean: float, std: float) -> float:
    """Divisor of `standardize`."""
    return std or 1.0


def _spread_of_range(low: float, high: float) -> float:
    """Divisor of `normalize`."""
    return (high - low) or 1.0


def pairs(
    given: Mapping[str, Sequence[float]], argument: str, spread: Callable[[float, float], float]
) -> Parameters:
    """Turn a user's ``{variable: [a, b]}`` into offsets and scales.

    Parameters
    ----------
    given : mapping of str to [float, float]
        What the user gave.
    argument : str
        Name of the argument, for messages.
    spread : callable
        Gives the scale from the two numbers.

    Returns
    -------
    dict of str to (offset, scale)
        Scales are never 0.

    Raises
    ------
    InvalidTypeError
        If it is no mapping of pairs of numbers.
    InvalidValueError
        If a number is NaN or infinite.
    """
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"{argument} is a {type(given).__name__}; give {{variable: [a, b]}}")
    parameters = {}
    for name, entry in given.items():
        try:
            first, second = (float(number) for number in entry)
        except (TypeError, ValueError):
            raise InvalidTypeError(f"{argument}[{name!r}] is {entry!r}; give two numbers") from None
        if not (math.isfinite(first) and math.isfinite(second)):
            raise InvalidValueError(
                f"{argument}[{name!r}] is [{first}, {second}], as of a variable that is all "
                "gaps; drop the variable or take it out of the statistics"
            )
        parameters[name] = (first, spread(first, second))
    return parameters


def rescale(
    ds: cubes.Cube, parameters: Parameters, arithmetic: Rescale, filter_var: str | None = None
) -> Any:
    """Apply `scale_values` or `unscale_values` to every variable that has parameters.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays
        Left as it is.
    parameters : mapping of str to (offset, scale)
        By variable.
    arithmetic : callable
        `scale_values` or `unscale_values`.
    filter_var : str, optional
        Name of a mask.

    Returns
    -------
    Dataset, DataArray or dict
        Of the kind given.

    Raises
    ------
    InvalidValueError
        If no variable has parameters.
    """
    cubes.check_cube(ds)
    if not isinstance(ds, xr.Dataset | xr.DataArray):
        scaled = {
            name: arithmetic(np.asarray(ds[name]), *parameters[name])
            for name in _to_scale(ds, parameters, {"split", filter_var})
        }
        return Samples({**ds, **scaled}, getattr(ds, "accounting", None))
    if isinstance(ds, xr.DataArray) and ds.name is None and len(parameters) == 1:
        parameters = {cubes.UNNAMED: next(iter(parameters.values()))}
    cube = cubes.as_dataset(ds)
    apart = {n for n, v in cube.data_vars.items() if cubes.is_mask(str(n), v, filter_var)}
    wanted = _to_scale(cube.data_vars, parameters, apart | {cubes.split_label(cube)})
    scaled_vars = {
        name: rescale_array(cube[name], *parameters[name], arithmetic) for name in wanted
    }
    return cubes.like_given(cube.assign(scaled_vars), ds)


def _to_scale(present: Mapping[Any, Any], parameters: Parameters, apart: set[Any]) -> list[str]:
    """Variables that are there, have parameters and are no label or mask."""
    found = [str(name) for name in present if name in parameters and name not in apart]
    if not found:
        raise InvalidValueError(
            f"there are statistics of {sorted(parameters)}, but the data are {list(present)}; "
            "no variable would be scaled"
        )
    return found


def rescale_array(array: xr.DataArray, offset: Any, scale: Any, arithmetic: Rescale) -> Any:
    """Scale one variable of a cube, lazily if it is lazy.

    Parameters
    ----------
    array : DataArray
        Left as it is.
    offset, scale : float
        Of the variable.
    arithmetic : callable
        `scale_values` or `unscale_values`.

    Returns
    -------
    DataArray
        With the attributes of `array`.
    """
    cubes.check_decoded(str(array.name), array)
    return xr.apply_ufunc(
        arithmetic,
        array,
        kwargs={"offset": offset, "scale": scale},
        dask="parallelized",
        output_dtypes=[scaled_dtype(array.dtype)],
        keep_attrs=True,
    )
