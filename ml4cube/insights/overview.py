"""`get_insights`: what a cube holds, as a Dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, listed
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.sums.pairs import PairSums
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.chunks.blocks import chunk_sizes
from ml4cube.cube.coordinates import find_time_dim, is_category
from ml4cube.cube.opening import as_dataset
from ml4cube.insights.chunks import window_reads
from ml4cube.insights.distribution import (
    PROBABILITIES,
    cycle_of,
    distribution_of,
    gap_fraction,
    merged_steps,
)
from ml4cube.insights.sums import Floats, Pair, SummedVariable, sum_up
from ml4cube.preprocessing.statistics import chosen_variables
from ml4cube.splits.ranges import ranges_of

# Names of the result's own coordinates.
_COORDS = (
    "variable", "other_variable", "dim", "probability", "bin", "edge", "class", "units",
    "long_name",
)  # fmt: skip
# Variables of the result in the units of each variable.
_IN_UNITS = ("mean", "std", "quantile", "bin_edge", "class_name")
# Units and long names of what is not in the units of each variable.
_ATTRS = {
    "cells": ("1", "number of cells"),
    "gap_fraction": ("1", "fraction of cells that are gaps"),
    "histogram": ("1", "fraction of known cells in the bin"),
    "class_fraction": ("1", "fraction of known cells in the class"),
    "correlation": ("1", "correlation of two variables"),
    "pairs": ("1", "cells where both variables are known"),
    "range": ("1", "range of autocorrelation in cells"),
    "chunk_size": ("1", "cells of a chunk along the dim"),
    "chunks_per_window": ("1", "mean number of chunks with cells of a window"),
    "most_chunks_per_window": ("1", "largest number of chunks with cells of a window"),
    "read_amplification": ("1", "cells in these chunks per cell of the window, mean"),
}


def get_insights(
    ds: Any,
    variables: Iterable[str] | None = None,
    *,
    sample_size: SizesLike | None = None,
    overlap: SizesLike | float | None = None,
    missing_chunks: str = "warn",
) -> xr.Dataset:
    """Describe what a cube holds: gaps, distribution, season, correlation, range and chunks.

    Each variable is read once, a few blocks at a time; one with fewer dims than others again beside
    these, for correlations; and a sample of at most 2 million cells for each range of
    autocorrelation. Memory grows with the number of places and of time steps, not
    with their product. All cells count, whatever their part.

    Parameters
    ----------
    ds : Dataset, DataArray, path, zarr store or group
        A cube of any dims and calendar, lazy or not.
    variables : iterable of str, optional
        Default: every data variable that holds real numbers.
    sample_size : mapping of str to int, or pairs, optional
        Windows that will be read, as for `MultiProcSampler`; dims that it lacks have size 1.
    overlap : mapping of str to float, pairs or float, optional
        Fraction of a window that neighbours share, by dim or for all.
    missing_chunks : {"warn", "raise"}
        What to do about chunks that the cube's zarr store lacks and that read as values: warn, or
        refuse them.

    Returns
    -------
    Dataset
        With the dim ``variable``, and the coordinates ``units`` and ``long_name`` along it:

        - ``cells``: number of cells; ``gap_fraction``: fraction of them that are NaN or infinite
        - ``mean``, ``std`` (population), ``quantile`` (``probability``)
        - ``histogram`` (``bin``): fraction of the known cells in equal bins between the quantiles
          0.005 and 0.995, with ``bin_edge`` (``edge``)
        - ``class_fraction`` (``class``), for booleans and integers of at most 64 different values:
          fraction of the known cells with each value, and ``class_name``, from CF's
          ``flag_meanings``. Such variables have no mean, quantile, histogram, season, correlation
          or range (NaN)
        - ``mean_by_month`` (``month``), or ``mean_by_season`` (``season``) for steps of up to a
          season, and ``std_by_month`` or ``std_by_season``: the standard deviation of the means of
          the time steps in it
        - ``correlation`` and ``pairs`` (``other_variable``): Pearson's, over the cells where both
          are known, and their number; NaN if neither variable has all dims of the other
        - ``range`` (``dim``): range of autocorrelation in cells, as `estimate_range`, and
          ``range_reason``, why there is none
        - ``chunk_size`` (``dim``): cells; NaN in memory
        - with `sample_size`: ``chunks_per_window`` and ``most_chunks_per_window``: chunks with
          cells of a window, in the mean and at most; ``read_amplification``: cells in these chunks
          per cell of the window, in the mean over windows

        and for each variable

        - ``<variable>_gaps_by_place``: fraction of its time steps that are gaps
        - ``<variable>_gaps_by_time``, ``<variable>_mean_by_time``: of all places

        Means, fractions and correlations of all places, and quantiles, are weighted by the area of
        cells if it is known; the attribute ``weights`` describes how.

    Raises
    ------
    InvalidValueError
        If a variable or dim is unknown, no variable is left, one holds packed integers that were
        not decoded, or has no dim or no cell, or the cube has a dim of the result, such as
        ``bin``.
    InvalidTypeError
        If a variable given by name holds no real numbers.

    Notes
    -----
    The histogram, and quantiles of more than 65536 different values, are exact to a bin of
    `Statistics.from_cube`. The time to read grows with the number of pairs of variables.

    Examples
    --------
    >>> ds = xr.Dataset({"t": (("time", "x"), np.array([[1.0, np.nan], [3.0, 5.0]]))})
    >>> found = get_insights(ds)
    >>> found.gap_fraction.sel(variable="t").item(), found["mean"].sel(variable="t").item()
    (0.25, 3.0)
    >>> found.t_gaps_by_time.values
    array([0.5, 0. ])
    """
    cube = as_dataset(ds)
    names = chosen_variables(cube, variables, ())
    sizes = {str(dim): cube.sizes[dim] for name in names for dim in cube[name].dims}
    if overlap is not None and sample_size is None:
        raise InvalidTypeError(f"overlap needs sample_size, got overlap={overlap!r} alone")
    window = None
    if sample_size is not None:
        window = parse_sizes("sample_size", sample_size, sizes)
    shared = parse_overlap("overlap", overlap, window or {})
    _check(cube, names)
    heed_absent_chunks(cube, names, missing_chunks, choices=("warn", "raise"))
    sums, pair_sums = sum_up(cube, names)
    described: dict[str, dict[str, Any]] = {}
    for name, variable_sums in sums.items():
        of_variable = described[name] = {
            "cells": variable_sums.array.size,
            **distribution_of(variable_sums),
        }
        of_variable |= _ranges(cube, name, list(sizes), is_number="histogram" in of_variable)
        chunks = chunk_sizes(cube.variables[name])
        of_variable["chunk_size"] = "dim", [float(chunks.get(dim, np.nan)) for dim in sizes]
        if window is not None:
            of_variable |= window_reads(cube.variables[name], window, shared)._asdict()
    numbers = [name for name, of_variable in described.items() if "histogram" in of_variable]
    result = xr.concat(
        [xr.Dataset(of_variable) for of_variable in described.values()],
        xr.Variable("variable", names),
        data_vars="all", coords="minimal", compat="override", join="outer",
    )  # fmt: skip
    result = result.assign(_correlations(names, numbers, pair_sums, sums))
    for variable_sums in sums.values():
        result = result.assign(
            _maps_and_series(variable_sums, str(variable_sums.array.name) in numbers)
        )
    return _documented(result, cube, sums, window)


def _check(cube: xr.Dataset, names: Iterable[str]) -> None:
    """Refuse variables without cells, and names that the result has itself."""
    arrays = [cube[name] for name in names]
    for array in arrays:
        if not array.size or not array.ndim:
            raise InvalidValueError(
                f"variables must have dims and cells, got {array.name!r} with {dict(array.sizes)}"
            )
    used = {str(name) for array in arrays for name in (*array.dims, *array.coords)}
    cycles = {cycle_of(a, find_time_dim(a.coords.values(), a.dims))[0] for a in arrays}
    if taken := sorted(used & {*_COORDS, *_ATTRS, *_IN_UNITS, *cycles}):
        raise InvalidValueError(
            f"dims and coordinates must not be named {listed(taken, 'or')}, which the result has; "
            f"rename them, as with ds.rename({taken[0]}='{taken[0]}_')"
        )


def _ranges(cube: xr.Dataset, name: str, dims: list[str], *, is_number: bool) -> dict[str, Any]:
    """Return the range of autocorrelation along each dim, and why there is none."""
    array = cube[name]
    reasons = dict.fromkeys(dims, f"{name!r} lacks the dim")
    for dim in map(str, array.dims):
        reasons[dim] = "" if is_number else "no range: the values are classes"
        if is_category(dim, array.coords.get(dim)):
            reasons[dim] = f"no range: {dim!r} lists categories"
    wanted = [dim for dim, reason in reasons.items() if not reason]
    by_dim: Mapping[str, float] = {}
    if wanted:
        estimated = ranges_of(array, wanted)
        reasons |= estimated.reasons
        by_dim = estimated
    ranges = [by_dim.get(dim, np.nan) for dim in dims]
    return {
        "dim": ("dim", dims),
        "range": ("dim", ranges),
        "range_reason": ("dim", list(reasons.values())),
    }


def _correlations(
    names: list[str],
    numbers: list[str],
    pair_sums: Mapping[Pair, PairSums],
    sums: Mapping[str, SummedVariable],
) -> dict[str, Any]:
    """Return the correlation of each pair of variables, and its number of cells."""
    correlation, pairs = (np.full((len(names), len(names)), fill) for fill in (np.nan, 0))
    for name in numbers:
        i = names.index(name)
        pairs[i, i] = sums[name].sums.steps.count.sum()
        # of a constant there is none
        correlation[i, i] = 1.0 if merged_steps(sums[name].sums.steps).m2 > 0 else np.nan
    for pair, of_pair in pair_sums.items():
        if set(pair) <= set(numbers):
            i, j = (names.index(name) for name in pair)
            correlation[[i, j], [j, i]] = of_pair.score("correlation").item()
            pairs[[i, j], [j, i]] = of_pair.count.item()
    dims = ("variable", "other_variable")
    return {
        "other_variable": names,
        "correlation": (dims, correlation),
        "pairs": (dims, pairs.astype(np.int64)),
    }


def _maps_and_series(sums: SummedVariable, is_number: bool) -> dict[str, xr.DataArray]:
    """Return the gaps of each place, and gaps and means of each time step."""
    name, time_dim = str(sums.array.name), sums.time_dim
    gaps = {"units": "1", "long_name": f"fraction of gaps of {name}"}
    result = {}
    if sums.place_dims:
        known = sums.sums.known
        fractions = 1 - known / (sums.array.size // known.size)
        result["gaps_by_place"] = _like(sums.array, sums.place_dims, fractions, gaps)
    if time_dim is not None:
        fractions = gap_fraction(sums.sums.steps, sums.weight_of_step)
        result["gaps_by_time"] = _like(sums.array, [time_dim], fractions, gaps)
        if is_number:
            mean = {
                "units": str(sums.array.attrs.get("units", "")),
                "long_name": f"mean of {name}",
            }
            result["mean_by_time"] = _like(sums.array, [time_dim], sums.sums.steps.mean, mean)
    return {f"{name}_{key}": array for key, array in result.items()}


def _like(
    array: xr.DataArray, dims: list[str], values: Floats, attrs: Mapping[str, str]
) -> xr.DataArray:
    """Return values along some dims of an array, with its coordinates along them."""
    coords = {
        name: coord
        for name, coord in array.coords.items()
        if coord.ndim and set(coord.dims) <= set(dims)
    }
    return xr.DataArray(values, coords, dims, attrs=attrs)


def _documented(
    result: xr.Dataset,
    cube: xr.Dataset,
    sums: Mapping[str, SummedVariable],
    window: Mapping[str, int] | None,
) -> xr.Dataset:
    """Add coordinates and attributes."""
    if "class_name" in result:
        result["class_name"] = result["class_name"].fillna("").astype(str)
    for name, (units, long_name) in _ATTRS.items():
        if name in result:
            result[name].attrs = {"units": units, "long_name": long_name}
    attrs = [cube[name].attrs for name in sums]
    long_names = [
        str(attributes.get("long_name", attributes.get("standard_name", "")))
        for attributes in attrs
    ]
    descriptions = {variable_sums.weighting for variable_sums in sums.values()}
    by_variable = "; ".join(
        f"{name}: {variable_sums.weighting}" for name, variable_sums in sums.items()
    )
    result.attrs = {"weights": descriptions.pop() if len(descriptions) == 1 else by_variable}
    if window is not None:
        result.attrs["sample_size"] = ", ".join(f"{dim} {n}" for dim, n in window.items())
    if "title" in cube.attrs:
        result.attrs["title"] = str(cube.attrs["title"])
    return result.assign_coords(
        probability=list(PROBABILITIES),
        units=("variable", [str(attributes.get("units", "")) for attributes in attrs]),
        long_name=("variable", long_names),
    )
