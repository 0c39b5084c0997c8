"""Offset and scale of samples, from statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import xarray as xr

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.core.scaling import Entries, Scaling
from ml4cube.core.statistics import SCALE_FNS, Statistics
from ml4cube.preprocessing.cubes import check_no_fill_value
from ml4cube.preprocessing.rescaling import warn_of_erased
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.recipe.fitted import scaling_of
from ml4cube.recipe.recipe import Recipe
from ml4cube.sampling.samples import Schema


def parse_statistics(statistics: Any, scale_fn: str | None) -> tuple[Statistics | None, str | None]:
    """Return the statistics that a user gave, if any, and the ``scale_fn`` they are for."""
    check_choice("scale_fn", scale_fn, SCALE_FNS)
    if statistics is None:
        return None, scale_fn
    return given_statistics(statistics, scale_fn)


def select_statistics(given: Statistics, names: Iterable[str]) -> Statistics:
    """Return the statistics of some variables; refuse a variable without."""
    names = list(names)
    if missing := [name for name in names if name not in given]:
        raise InvalidValueError(
            f"statistics= has {list(given)}, but the samples also have {missing}; add statistics "
            "of these, or drop them from the cube"
        )
    return Statistics({name: given[name] for name in names}, given.part)


def check_statistics(
    given: Statistics, recipe: Recipe, cube: xr.Dataset, *, may_be_others: bool
) -> None:
    """Refuse statistics that cannot scale the variables of a cube, before any work."""
    scaled = recipe.scaled_variables({name: cube[name].dtype for name in recipe.variables})
    if may_be_others:  # What a callback makes is known later.
        scaled = [name for name in scaled if name in given]
    chosen = select_statistics(given, scaled)
    scaling_in(cube, chosen, recipe)
    warn_of_erased(chosen, str(recipe.scale_fn))


def check_no_fill_values(statistics: Statistics, cube: xr.Dataset) -> None:
    """Refuse statistics of variables of a cube whose extremes are the source's fill value."""
    for name in statistics:
        if name in cube:
            check_no_fill_value(name, statistics[name], cube[name])


def scaling_in(cube: xr.Dataset, statistics: Statistics, recipe: Recipe) -> dict[str, Scaling]:
    """Return offset and scale of every variable that is scaled, in every cell of a cube."""
    sizes = {dim: cube.sizes[dim] for dim in recipe.dims}
    coords = {dim: cube[dim].values for dim in recipe.dims if dim in cube.indexes}
    return scaling_of(statistics, recipe.scale_fn, sizes, coords)


def scaling_of_samples(
    statistics: Statistics, schema: Schema, recipe: Recipe, cube: xr.Dataset
) -> dict[str, Scaling]:
    """Return the scaling of every variable; refuse one that does not fit a callback's windows."""
    scaling = scaling_in(cube, statistics, recipe)
    size = dict(zip(recipe.dims, recipe.size, strict=True))
    for name, of_variable in scaling.items():
        window, _ = schema[name]
        varies = [dim for dim in of_variable.dims if size[dim] > 1]
        if varies and window != recipe.window_shape:
            raise InvalidValueError(
                f"the callback changes the windows of {name!r} to {window}, so they cannot be "
                f"matched with statistics along {varies}; give statistics without these dims"
            )
    return scaling


def entries_of(scaling: Mapping[str, Scaling]) -> dict[str, Entries]:
    """Return the scaling of every cell, of variables whose scaling differs between cells."""
    return {name: one.entries for name, one in scaling.items() if one.entries}
