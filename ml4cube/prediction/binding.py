"""The recipe of a training bound to the cube that is predicted, and checked against it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import check_mask
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics, check_decoded, offset_and_scale
from ml4cube.cube import variables as cube_variables
from ml4cube.cube.classes import class_names, holds_classes
from ml4cube.cube.masks_and_labels import RECIPE_ATTR, check_codes
from ml4cube.loading.coordinate_features import coordinate_tables
from ml4cube.prediction.geometry import Windows
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.fitted import FittedRecipe, fills_of, scaling_of


def check_fits(cube: xr.Dataset, fitted: FittedRecipe, mask: str | None) -> FittedRecipe:
    """Refuse samples that a cube cannot give; name the features where they are not known."""
    recipe, dims = fitted.recipe, cube_variables.cube_dims(cube)
    if not recipe.features:
        features = _all_features(cube, recipe.targets, mask)
        fitted = replace(fitted, recipe=replace(recipe, features=features))
    if fitted.variables is not None:
        if unknown := [name for name in fitted.names if name not in fitted.variables]:
            raise InvalidValueError(
                f"unknown variables {unknown}; the store has {list(fitted.variables)}; rename "
                "variables of the cube, or give statistics"
            )
        if set(recipe.dims) != set(dims):
            raise InvalidValueError(
                f"the dims of the cube must be those of the store, {recipe.dims}, got {dims}; "
                "rename them"
            )
    for name in fitted.recipe.features or ():
        _check_variable(cube, dims, "features", name)
        if cube[name].dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"features must be numbers, got {name!r} of dtype {cube[name].dtype}"
            )
        check_decoded(name, cube[name])
    return fitted


def _all_features(cube: xr.Dataset, targets: tuple[str, ...], mask: str | None) -> tuple[str, ...]:
    """Return all numeric variables except targets, mask and split label."""
    names, left_out = cube_variables.cube_variables(cube, mask)
    cube_variables.check_left_out(cube, left_out)
    label = cube_variables.split_label(cube)
    if label is not None and RECIPE_ATTR not in cube[label].attrs:
        check_codes(label, cube[label].variable)  # else it may be data
    features = tuple(n for n in names if n not in targets and cube[n].dtype.kind in "fiub")
    if not features:
        raise InvalidValueError(
            f"no feature is left for the targets {list(targets)}; the cube has "
            f"{list(cube.data_vars)}"
        )
    return features


def bind(
    cube: xr.Dataset, fitted: FittedRecipe, windows: Windows, mask: str | None
) -> tuple[BoundRecipe, str | None]:
    """Return the recipe on a cube, and the mask of the results: `mask`, or that of the recipe."""
    recipe = fitted.recipe
    if recipe.filter_var not in cube.variables:
        recipe = replace(recipe, filter_var=None)
    if mask is None and recipe.apply_mask:
        mask = recipe.filter_var
    scaling, features = _scaling(fitted, windows), recipe.features or ()
    if fitted.variables is None:
        _refuse_unclear(cube, [name for name in features if name in scaling])
    floats = [name for name in features if cube[name].dtype.kind == "f"]
    bound = BoundRecipe(
        recipe,
        tuple(cube.sizes[dim] for dim in recipe.dims),
        fills=fills_of(recipe, floats, fitted.fill),
        scaling=scaling,
        coordinates=coordinate_tables(fitted.coord_features, windows.coords),
    )
    for name in filter(None, (mask, bound.mask)):
        _check_variable(cube, tuple(windows.dims), "mask", name)
        check_mask("mask", cube[name].dtype)
    if recipe.callback is None:  # which may change units
        _warn_of_units(cube, fitted)
    _warn_of_direction(cube, fitted, windows)
    return bound, mask


def _scaling(fitted: FittedRecipe, windows: Windows) -> dict[str, Scaling]:
    """Return offset and scale of the scaled variables, in every cell and later ones of forecasts.

    Statistics of other variables need not match the cube.
    """
    statistics, scale_fn = fitted.statistics, fitted.recipe.scale_fn
    if scale_fn is None:
        return {}
    names = fitted.names
    used = {name: statistics[name] for name in names if name in statistics}
    if statistics and not used:
        raise InvalidValueError(
            f"store_or_stats has statistics of {list(statistics)}, but not of the features or "
            f"targets {names}"
        )
    if isinstance(statistics, Statistics):
        sizes = {dim: of_dim.cells for dim, of_dim in windows.dims.items()}
        sizes |= {dim: len(axis) for dim, axis in windows.coords.items()}
        coords = {dim: axis.to_index().values for dim, axis in windows.coords.items()}
        return scaling_of(Statistics(used, statistics.part), scale_fn, sizes, coords)
    scaling = {}
    for name, pair in used.items():
        numbers = offset_and_scale(f"store_or_stats[{name!r}]", pair, scale_fn)
        scaling[name] = Scaling(name, *numbers)
    return scaling


def _refuse_unclear(cube: xr.Dataset, scaled: Iterable[str]) -> None:
    """Refuse statistics alone of integers: samples leave them as they are, `standardize` not."""
    unclear = [name for name in scaled if holds_classes(cube[name])]
    if unclear:
        raise InvalidValueError(
            f"store_or_stats has statistics of {unclear}, which hold integers or classes, so "
            "it is unclear whether the model got them scaled; give the store or the data set "
            "that it was trained on, or make the integers floats (astype('float32'))"
        )


def _check_variable(cube: xr.Dataset, dims: tuple[str, ...], argument: str, name: str) -> None:
    """Refuse a variable that the cube lacks, or has along other dims."""
    if name not in cube.variables:
        raise InvalidValueError(
            f"{argument}: unknown variable {name!r}; the cube has {list(cube.data_vars)}"
        )
    if not set(cube[name].dims) <= set(dims):
        reason = ""
        if kind := cube_variables.not_data(cube).get(name):
            reason = f", which is {kind}"
        raise InvalidValueError(
            f"{argument} must lie along {dims}, got {name!r} with dims {cube[name].dims}{reason}"
        )


def _warn_of_units(cube: xr.Dataset, fitted: FittedRecipe) -> None:
    """Warn if a feature has other units than in training."""
    for name in fitted.recipe.features or ():
        now = cube[name].attrs.get("units")
        then = fitted.attrs_of(name).get("units")
        if now is not None and then is not None and str(now).strip() != str(then).strip():
            warnings.warn(
                f"features: {name!r} has units {now!r} in this cube and had {then!r} in "
                "training; unless both mean the same unit, convert the cube, or every "
                "prediction is wrong",
                stacklevel=4,
            )


def _warn_of_direction(cube: xr.Dataset, fitted: FittedRecipe, windows: Windows) -> None:
    """Warn if windows have another direction than in training, as from north to south."""
    words = {True: "rises", False: "falls"}
    for dim in windows.input_order:
        if dim not in fitted.axes or dim not in cube.coords:
            continue
        now, then = _rises(cube[dim].values), _rises(fitted.axes[dim].values)
        if now is not None and then is not None and now != then:
            warnings.warn(
                f"ds: {dim!r} {words[now]} in this cube and {words[then]} in training, so the "
                f"model gets every window mirrored; turn the cube by "
                f"ds.isel({dim}=slice(None, None, -1))",
                stacklevel=4,
            )


def _rises(coordinate: NDArray[Any]) -> bool | None:
    """Return True if most steps of a coordinate go up, so that longitudes may wrap around."""
    up = int((coordinate[1:] > coordinate[:-1]).sum())
    down = int((coordinate[1:] < coordinate[:-1]).sum())
    return None if up == down else up > down


def classes_of_targets(
    cube: xr.Dataset, fitted: FittedRecipe, scaled: Iterable[str]
) -> dict[str, dict[float, str]]:
    """Return the targets that hold classes in the cube, or else in that of the training.

    Of each, the labels and names that are known.
    """
    classes = {}
    for name in sorted({*fitted.recipe.targets}.difference(scaled)):
        if name in cube.data_vars:
            variable = cube[name].variable
        else:
            trained = (fitted.variables or {}).get(name, {})
            dtype = trained.get("dtype", "f4")
            variable = xr.Variable((), np.zeros((), dtype), trained.get("attrs"))
        if holds_classes(variable):
            classes[name] = class_names(variable)
    return classes
