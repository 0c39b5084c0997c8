"""Scaling of cubes and samples by statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import plain
from ml4cube.core.statistics import scale_values, scaled_attrs, scaled_dtype, unscaled_attrs
from ml4cube.cube import roles
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.rescaling import no_zero, rescale_at_places
from ml4cube.cube.variables import is_mask, split_label
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.samples import Samples
from ml4cube.preprocessing.statistics import Statistics

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
        From `get_statistics`, also per level, per pixel or by month. Variables that it lacks are
        not scaled.
    filter_var : str, optional
        Name of a mask, never scaled, like split labels.

    Returns
    -------
    Dataset, DataArray or dict
        Of the kind given, with its coordinates and attributes; ``units`` become ``"1"``, and the
        old ones ``unscaled_units``, until the scaling is undone (the same goes for
        ``standard_name`` and ranges such as ``valid_max``). Floats keep their dtype, integers
        become float32 or float64. Gaps stay gaps. Where std is 0 only the mean is taken off.

    Raises
    ------
    InvalidValueError
        If no variable has statistics, the statistics of one are NaN (a part that is all gaps), or
        they are not of the data's coordinates or dates.
    InvalidTypeError
        If a variable with statistics holds no real numbers.

    Examples
    --------
    >>> import numpy as np
    >>> standardize({"t": np.array([1.0, 3.0])}, {"t": [2.0, 0.5]})
    {'t': array([-2.,  2.])}
    """
    if isinstance(stats_dict, core.Statistics):
        stats_dict = Statistics.of_core(stats_dict).mean_std()
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
        Of the kind given, with its coordinates and attributes; ``units`` become ``"1"``, and the
        old ones ``unscaled_units``, until the scaling is undone (the same goes for
        ``standard_name`` and ranges such as ``valid_max``). Floats keep their dtype, integers
        become float32 or float64. Gaps stay gaps. Values beyond the range, as test data may
        have, lie beyond 0 to 1. Where min equals max only min is taken off.

    Raises
    ------
    InvalidValueError
        If no variable has a range, or the range of one is NaN (a part that is all gaps).
    InvalidTypeError
        If a variable with a range holds no real numbers.

    Examples
    --------
    >>> import numpy as np
    >>> normalize({"t": np.array([1.0, 3.0])}, {"t": [1.0, 5.0]})
    {'t': array([0. , 0.5])}
    """
    if isinstance(range_dict, core.Statistics):
        range_dict = Statistics.of_core(range_dict).range()
    return rescale(ds, pairs(range_dict, "range_dict", _spread_of_range), scale_values, filter_var)


def _spread_of_std(_mean: Any, std: Any) -> Any:
    """Divisor of `standardize`."""
    return no_zero(std)


def _spread_of_range(low: Any, high: Any) -> Any:
    """Divisor of `normalize`."""
    return no_zero(high - low)


def pairs(
    given: Mapping[str, Sequence[Any]], argument: str, spread: Callable[[Any, Any], Any]
) -> Parameters:
    """Turn a user's ``{variable: [a, b]}`` into offsets and scales."""
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"{argument} is a {type(given).__name__}; give {{variable: [a, b]}}")
    return {
        name: core.offset_and_scale(f"{argument}[{name!r}]", entry, spread, (xr.DataArray,))
        for name, entry in given.items()
    }


def rescale(
    ds: cubes.Cube, parameters: Parameters, arithmetic: Rescale, filter_var: str | None = None
) -> Any:
    """Apply `scale_values` or `unscale_values` to every variable that has parameters."""
    cubes.check_cube(ds)
    if not isinstance(ds, xr.Dataset | xr.DataArray):
        cubes.has_mask(ds, filter_var)
        wanted = _to_scale(ds, parameters, {"split", filter_var})
        arrays = {name: plain(ds[name]) for name in wanted}
        for name, array in arrays.items():
            core.check_real(name, array.dtype)
        scaled = {
            name: arithmetic(array, *_numbers(name, parameters[name]))
            for name, array in arrays.items()
        }
        return Samples({**ds, **scaled}, getattr(ds, "accounting", None))
    if isinstance(ds, xr.DataArray) and ds.name is None and len(parameters) == 1:
        parameters = {roles.DATA_VAR: next(iter(parameters.values()))}
    cube = as_dataset(ds)
    cubes.has_mask(cube.variables, filter_var)
    apart = {n for n in cube.data_vars if is_mask(n, cube, filter_var)}
    wanted = _to_scale(cube.data_vars, parameters, apart | {split_label(cube)})
    scaled_vars = {
        name: rescale_array(cube[name], *parameters[name], arithmetic) for name in wanted
    }
    told = scaled_attrs if arithmetic is scale_values else unscaled_attrs
    for array in scaled_vars.values():
        array.attrs = told(array.attrs)
    return cubes.like_given(cubes.with_arrays(cube, scaled_vars), ds)


def _numbers(name: str, pair: tuple[Any, Any]) -> tuple[float, float]:
    """Parameters of an array without names of dims: two numbers, no more."""
    if any(isinstance(one, xr.DataArray) for one in pair):
        raise InvalidTypeError(
            f"statistics of {name!r} keep dims, but a dict of arrays has no names of dims; give a "
            "Dataset"
        )
    return pair


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
    """Scale one variable of a cube, lazily if it is lazy."""
    core.check_real(str(array.name), array.dtype)
    cubes.check_decoded(str(array.name), array)
    if not isinstance(offset, xr.DataArray) and not isinstance(scale, xr.DataArray):
        return xr.apply_ufunc(
            arithmetic,
            read_in_blocks(array),
            kwargs={"offset": offset, "scale": scale},
            dask="parallelized",
            output_dtypes=[scaled_dtype(array.dtype)],
            keep_attrs="override",
        )
    offset, scale = xr.broadcast(xr.DataArray(offset), xr.DataArray(scale))
    dims = [str(dim) for dim in offset.dims]
    labels = {dim: offset.indexes[dim].values for dim in dims if dim in offset.indexes}
    return rescale_at_places(array, arithmetic, offset.values, scale.values, dims, labels)
