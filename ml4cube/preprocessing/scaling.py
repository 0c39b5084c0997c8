"""`standardize` and `normalize`, and what they and the samplers take as ``statistics=``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.statistics import SCALE_FNS, scale_values
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.rescaling import rescale
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.store.metadata import StoreMetadata

GivenStatistics = core.Statistics | CubeScaler | xr.Dataset | str | os.PathLike[str]


def standardize(
    ds: cubes.Cube,
    stats_dict: Mapping[str, Sequence[float]] | core.Statistics | None = None,
    filter_var: str | None = None,
    *,
    statistics: GivenStatistics | None = None,
) -> Any:
    """Scale each variable to mean 0 and standard deviation 1: ``(x - mean) / std``.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        Not changed; a lazy cube stays lazy.
    stats_dict : mapping of str to [mean, std], or Statistics
        From `get_statistics`, also per level, per pixel or by month. Variables that it lacks are
        not scaled.
    filter_var : str, optional
        Name of a mask, which is never scaled, nor are split labels.
    statistics : Statistics, CubeScaler, or sample store or its path
        Instead of `stats_dict`: the scaling of a fitted scaler or of another store.

    Returns
    -------
    Dataset, DataArray or dict
        Of the kind given, with its coordinates and attributes. ``units`` is ``"1"``, and
        ``unscaled_units`` has the old ones until the scaling is undone (likewise
        ``standard_name`` and ranges such as ``valid_max``). Floats keep their dtype, integers
        become float32 or float64. Gaps stay gaps. If std is 0, only the mean is subtracted.

    Raises
    ------
    InvalidValueError
        If no variable has statistics, the statistics of one are NaN (a part that is all gaps),
        they lack coordinates or dates of the data, or `statistics` are of another scaling.
    InvalidTypeError
        If a variable with statistics holds no real numbers, or not exactly one of `stats_dict`
        and `statistics` is given.

    Examples
    --------
    >>> import numpy as np
    >>> standardize({"t": np.array([1.0, 3.0])}, {"t": [2.0, 0.5]})
    {'t': array([-2.,  2.])}
    """
    return _scale(ds, "standardize", "stats_dict", stats_dict, statistics, filter_var)


def normalize(
    ds: cubes.Cube,
    range_dict: Mapping[str, Sequence[float]] | core.Statistics | None = None,
    filter_var: str | None = None,
    *,
    statistics: GivenStatistics | None = None,
) -> Any:
    """Scale each variable to the range 0 to 1: ``(x - min) / (max - min)``.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        Not changed; a lazy cube stays lazy.
    range_dict : mapping of str to [min, max], or Statistics
        From `get_range`. Variables that it lacks are not scaled.
    filter_var : str, optional
        Name of a mask, which is never scaled, nor are split labels.
    statistics : Statistics, CubeScaler, or sample store or its path
        Instead of `range_dict`: the scaling of a fitted scaler or of another store.

    Returns
    -------
    Dataset, DataArray or dict
        As from `standardize`. Values outside the range, as test data may have, lie outside 0 to
        1. If min equals max, only min is subtracted.

    Raises
    ------
    InvalidValueError
        If no variable has a range, the range of one is NaN (a part that is all gaps), or
        `statistics` are of another scaling.
    InvalidTypeError
        If a variable with a range holds no real numbers, or not exactly one of `range_dict` and
        `statistics` is given.

    Examples
    --------
    >>> import numpy as np
    >>> normalize({"t": np.array([1.0, 3.0])}, {"t": [1.0, 5.0]})
    {'t': array([0. , 0.5])}
    """
    return _scale(ds, "normalize", "range_dict", range_dict, statistics, filter_var)


def _scale(
    ds: cubes.Cube, scale_fn: str, argument: str, pairs: Any, statistics: Any, mask: str | None
) -> Any:
    """Scale by the user's pairs of numbers, or else by `statistics`."""
    if (pairs is None) == (statistics is None):
        raise InvalidTypeError(f"{scale_fn} needs either {argument} or statistics, not both")
    if statistics is not None:
        argument = "statistics"
        pairs, given_scale_fn = given_statistics(statistics, scale_fn)
        if given_scale_fn != scale_fn:
            raise InvalidValueError(
                f"statistics must be those of {scale_fn!r}, got a scaling by {given_scale_fn!r}"
            )
    return rescale(ds, pairs, argument, scale_fn, scale_values, mask)


def given_statistics(given: Any, scale_fn: str | None) -> tuple[core.Statistics, str]:
    """Return the statistics in the argument ``statistics=``, and the ``scale_fn`` they are for."""
    if scale_fn is None:
        raise InvalidValueError(
            "statistics= are for scaling, but scale_fn=None asks for no scaling; drop one of them"
        )
    if isinstance(given, core.Statistics):
        return given, scale_fn
    statistics: core.Statistics
    if isinstance(given, CubeScaler):
        statistics, given_scale_fn = given.fitted_statistics(), given.method
    else:
        metadata = _metadata_of(given)
        if metadata.recipe.scale_fn is None:
            raise InvalidValueError(
                "statistics= is a store that was not scaled (scale_fn=None); give its "
                "StoreMetadata.of(...).statistics, or a CubeScaler"
            )
        statistics, given_scale_fn = metadata.statistics, metadata.recipe.scale_fn
    default = SCALE_FNS[0]
    if scale_fn not in (given_scale_fn, default):
        raise InvalidValueError(
            f"scale_fn={scale_fn!r}, but statistics= scales by {given_scale_fn!r}; drop scale_fn, "
            "or give Statistics alone"
        )
    return statistics, given_scale_fn


def _metadata_of(source: Any) -> StoreMetadata:
    """Return the metadata of a store, a path or a PTXrDataset."""
    found = getattr(source, "metadata", source)
    if isinstance(found, StoreMetadata):
        return found
    try:
        return StoreMetadata.of(source)
    except InvalidTypeError:
        raise InvalidTypeError(
            "statistics must be Statistics (from Statistics.from_cube), a fitted CubeScaler, or a "
            f"sample store or its path, got {type(source).__name__}"
        ) from None
