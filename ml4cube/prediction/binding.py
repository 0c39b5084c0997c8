"""What a model takes and returns on one cube, from the arguments of `predict_cube`.

Names, windows, lead time, scaling, mask and fill method are those of the sample store (or data set)
that the model was trained on, unless they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, parse_names
from ml4cube.core.missing import check_mask
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import check_decoded
from ml4cube.cube import variables as cube_variables
from ml4cube.cube.classes import class_names, holds_classes
from ml4cube.cube.masks_and_labels import RECIPE_ATTR, check_codes
from ml4cube.loading.coordinate_features import Table, coordinate_tables
from ml4cube.prediction.placing import WindowOptions, place_windows
from ml4cube.prediction.source import Source
from ml4cube.prediction.windows import Windows
from ml4cube.recipe.preparation import Preparation
from ml4cube.training.inputs.rollout import Rollout


@dataclass(frozen=True)
class PredictionSpec:
    """Inputs and targets of a model on one cube: names, windows, preparation, mask."""

    features: tuple[str, ...]
    targets: tuple[str, ...]
    # Whether the targets were named, and are not the features.
    are_targets_named: bool
    # Targets that are classes, which are not scaled, with the labels and names that are known.
    classes: Mapping[str, Mapping[float, str]]
    windows: Windows
    # How results become inputs; None if the model is called once for a forecast.
    rollout: Rollout | None
    # Axes of the cube, that of a lead time with the dates of forecasts beyond its end.
    axes: Mapping[str, xr.Variable]
    # Channels of the inputs after the features.
    tables: Mapping[str, Table]
    # How training masked, filled and scaled the cells.
    preparation: Preparation
    # Variable of the cube with the cells to predict.
    mask: str | None
    # Name of the function that changed the samples of the training before they were scaled.
    callback: str | None
    # Attributes of the variables in the cube of the training.
    source_attrs: Mapping[str, Mapping[str, Any]]

    @property
    def channels(self) -> list[str]:
        """Names of the channels of the inputs, in their order."""
        return [*self.features, *self.tables]

    @property
    def read_variables(self) -> list[str]:
        """Variables of the cube that are read."""
        masks = filter(None, (self.mask, self.preparation.mask))
        return list(dict.fromkeys((*self.features, *masks)))


def bind(
    cube: xr.Dataset,
    source: Source,
    features: str | Iterable[str] | None,
    targets: str | Iterable[str] | None,
    mask: str | None,
    options: WindowOptions,
) -> PredictionSpec:
    """Take from the source what was not given, and check everything against the cube."""
    feature_names, target_names = _names(cube, source, features, targets, mask)
    names = tuple(dict.fromkeys((*feature_names, *target_names)))
    _check_source(source, cube, names)
    present = [name for name in feature_names if name in cube.variables]
    forcings = [name for name in present if name not in (target_names or feature_names)]
    forcing_dims = {str(dim) for name in forcings for dim in cube[name].dims}
    windows, axes = place_windows(cube, source, options, forcing_dims)
    rollout = None
    if windows.rollout > 1 and source.data is not None:
        rollout = Rollout.of(source.data)
        windows = replace(windows, lead_axis=rollout.axis - 2)  # after samples and channels
    scaling = source.scaling(_grid(windows, axes), names)
    mask_of_results, mask_of_features = source.masks(cube)
    if mask is None:
        mask = mask_of_results
    spec = PredictionSpec(
        features=feature_names,
        targets=target_names or feature_names,
        are_targets_named=bool(target_names),
        classes=_classes(cube, source, set(target_names) - set(scaling)),
        windows=windows,
        rollout=rollout,
        axes=axes,
        tables=coordinate_tables(source.coord_features, axes),
        preparation=_preparation(cube, source, present, mask_of_features, scaling),
        mask=mask,
        callback=source.recipe.callback,
        source_attrs=source.attrs,
    )
    _check_features(spec, cube)
    _check_masks(spec, cube)
    if spec.callback is None:  # which may change units
        _warn_of_units(spec, cube)
    _warn_of_direction(spec, cube, source.axes)
    return spec


def _preparation(
    cube: xr.Dataset,
    source: Source,
    features: Iterable[str],
    mask: str | None,
    scaling: Mapping[str, Scaling],
) -> Preparation:
    """Return how training masked, filled and scaled the cells of features that the cube has."""
    if source.metadata is None:
        _refuse_unclear(cube, [name for name in features if name in scaling])
    floats = [name for name in features if cube[name].dtype.kind == "f"]
    shape = {dim: cube.sizes[dim] for dim in cube_variables.cube_dims(cube)}
    return Preparation(shape, mask, source.fills(floats), scaling)


def _names(
    cube: xr.Dataset,
    source: Source,
    features: str | Iterable[str] | None,
    targets: str | Iterable[str] | None,
    mask: str | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of features and targets; no targets if they are the features."""
    target_names = parse_names("targets", targets) or source.targets
    feature_names = parse_names("features", features) or source.features(target_names)
    return feature_names or _all_features(cube, target_names, mask), target_names


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


def _check_source(source: Source, cube: xr.Dataset, names: Iterable[str]) -> None:
    """Refuse a store without one of the variables, or with other dims than the cube."""
    metadata, dims = source.metadata, cube_variables.cube_dims(cube)
    if metadata is None:
        return
    if unknown := [name for name in names if name not in metadata.variables]:
        raise InvalidValueError(
            f"unknown variables {unknown}; the store has {list(metadata.variables)}; rename "
            "variables of the cube, or give statistics"
        )
    if set(metadata.recipe.dims) != set(dims):
        raise InvalidValueError(
            f"the dims of the cube must be those of the store, {metadata.recipe.dims}, got "
            f"{dims}; rename them"
        )


def _refuse_unclear(cube: xr.Dataset, scaled: Iterable[str]) -> None:
    """Refuse statistics alone of integers: samples leave them as they are, `standardize` not."""
    unclear = [name for name in scaled if holds_classes(cube[name])]
    if unclear:
        raise InvalidValueError(
            f"store_or_stats has statistics of {unclear}, which hold integers or classes, so "
            "it is unclear whether the model got them scaled; give the store or the data set "
            "that it was trained on, or make the integers floats (astype('float32'))"
        )


def _check_features(spec: PredictionSpec, cube: xr.Dataset) -> None:
    for name in spec.features:
        _check_variable(spec, cube, "features", name)
    for name in spec.features:
        if cube[name].dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"features must be numbers, got {name!r} of dtype {cube[name].dtype}"
            )
        check_decoded(name, cube[name])


def _check_masks(spec: PredictionSpec, cube: xr.Dataset) -> None:
    for name in filter(None, (spec.mask, spec.preparation.mask)):
        _check_variable(spec, cube, "mask", name)
        check_mask("mask", cube[name].dtype)


def _check_variable(spec: PredictionSpec, cube: xr.Dataset, argument: str, name: str) -> None:
    """Refuse a variable that the cube lacks, or has along other dims."""
    if name not in cube.variables:
        raise InvalidValueError(
            f"{argument}: unknown variable {name!r}; the cube has {list(cube.data_vars)}"
        )
    if not set(cube[name].dims) <= set(spec.windows.dims):
        reason = ""
        if kind := cube_variables.not_data(cube).get(name):
            reason = f", which is {kind}"
        raise InvalidValueError(
            f"{argument} must lie along {tuple(spec.windows.dims)}, got {name!r} with "
            f"dims {cube[name].dims}{reason}"
        )


def _warn_of_units(spec: PredictionSpec, cube: xr.Dataset) -> None:
    """Warn if a feature has other units than in training."""
    for name in spec.features:
        now = cube[name].attrs.get("units")
        then = spec.source_attrs.get(name, {}).get("units")
        if now is not None and then is not None and str(now).strip() != str(then).strip():
            warnings.warn(
                f"features: {name!r} has units {now!r} in this cube and had {then!r} in "
                "training; unless both mean the same unit, convert the cube, or every "
                "prediction is wrong",
                stacklevel=4,
            )


def _warn_of_direction(
    spec: PredictionSpec, cube: xr.Dataset, axes: Mapping[str, xr.Variable]
) -> None:
    """Warn if windows have another direction than in training, as from north to south."""
    words = {True: "rises", False: "falls"}
    for dim in spec.windows.input_order:
        if dim not in axes or dim not in cube.coords:
            continue
        now, then = _rises(cube[dim].values), _rises(axes[dim].values)
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


def _classes(
    cube: xr.Dataset, source: Source, targets: Iterable[str]
) -> dict[str, dict[float, str]]:
    """Return the targets that hold classes in the cube, or else in that of the training."""
    classes = {}
    for name in sorted(targets):
        if name in cube.data_vars:
            variable = cube[name].variable
        else:
            trained = source.variables.get(name, {})
            dtype = trained.get("dtype", "f4")
            variable = xr.Variable((), np.zeros((), dtype), trained.get("attrs"))
        if holds_classes(variable):
            classes[name] = class_names(variable)
    return classes


def _grid(windows: Windows, axes: Mapping[str, xr.Variable]) -> xr.Dataset:
    """Return a Dataset with the cells of a cube, and the later ones of forecasts."""
    sizes = {dim: of_dim.cells for dim, of_dim in windows.dims.items()}
    sizes |= {dim: len(axis) for dim, axis in axes.items()}
    cells = np.broadcast_to(np.zeros(()), tuple(sizes.values()))
    return xr.Dataset({"": (tuple(sizes), cells)}, axes)
