"""`PredictionSpec`: what a model takes and returns, from the arguments of `predict_cube`.

Names, windows, lead time, scaling, mask and fill method are those of the sample store (or data set)
that the model was trained on, unless they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import check_mask
from ml4cube.core.sample_spec import parse_names
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import (
    Statistics,
    VariableStatistics,
    check_decoded,
    offset_and_scale,
)
from ml4cube.cube.classes import class_names, holds_classes
from ml4cube.cube.masks_and_labels import RECIPE_ATTR, check_codes
from ml4cube.cube.variables import (
    check_left_out,
    cube_dims,
    cube_variables,
    not_data,
    split_label,
)
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.coordinate_features import Table, coordinate_tables
from ml4cube.loading.sources import stored_axes
from ml4cube.prediction.options import PredictionOptions
from ml4cube.prediction.windows.geometry import Windows
from ml4cube.prediction.windows.placing import place_windows
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.recipe.preparation import Fill, Preparation
from ml4cube.sampling.rescaling import scaling_of
from ml4cube.store.format import StoreMetadata
from ml4cube.training.inputs.rollout import Rollout


@dataclass(frozen=True)
class PredictionSpec:
    """Inputs and targets of a model on one cube: names, windows, scaling, mask."""

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
    # Metadata of the store that the model was trained on, if one was given.
    metadata: StoreMetadata | None

    @property
    def channels(self) -> list[str]:
        """Names of the channels of the inputs, in their order."""
        return [*self.features, *self.tables]

    @classmethod
    def of(cls, cube: xr.Dataset, source: Any, options: PredictionOptions) -> Self:
        """Take from the source what was not given, and check everything against the cube."""
        features, targets, mask = options.features, options.targets, options.mask
        data = source if isinstance(source, PTXrDataset) else None
        if data is not None:
            features = data.features if features is None else features
            targets = (data.targets or None) if targets is None else targets
        metadata, stored = _read_source(source)
        target_names = parse_names("targets", targets)
        if not target_names and metadata and data is None:
            target_names = metadata.targets
        feature_names = parse_names("features", features)
        if not feature_names and metadata:
            feature_names = tuple(n for n in metadata.features if n not in target_names)
        if not feature_names:
            feature_names = _all_features(cube, target_names, mask)
        names = tuple(dict.fromkeys((*feature_names, *target_names)))
        if metadata:
            _check_store(metadata, cube, names)
        forcings = [n for n in feature_names if n not in (target_names or feature_names)]
        forcing_dims = {str(d) for n in forcings if n in cube.variables for d in cube[n].dims}
        windows, axes = place_windows(cube, data or metadata, options, forcing_dims)
        feature_mask = None
        if metadata and metadata.spec.filter_var in cube.variables:
            if metadata.spec.mask_makes_gaps:
                feature_mask = metadata.spec.filter_var
            if metadata.spec.apply_mask and mask is None:
                mask = metadata.spec.filter_var
        scaling = _scaling(source if metadata is None else metadata, _grid(windows, axes), names)
        # Samples leave integers as they are, `standardize` does not.
        scaled = [name for name in feature_names if name in scaling and name in cube.variables]
        unclear = [name for name in scaled if holds_classes(cube[name])]
        if unclear and metadata is None:
            raise InvalidValueError(
                f"store_or_stats has statistics of {unclear}, which hold integers or classes, so "
                "it is unclear whether the model got them scaled; give the store or the data set "
                "that it was trained on, or make the integers floats (astype('float32'))"
            )
        spec = cls(
            features=feature_names,
            targets=target_names or feature_names,
            are_targets_named=bool(target_names),
            classes=_classes(cube, metadata, [n for n in target_names if n not in scaling]),
            windows=windows,
            rollout=Rollout.of(data) if data is not None and windows.rollout > 1 else None,
            axes=axes,
            tables=coordinate_tables(data.coord_features if data else None, axes),
            preparation=Preparation(
                {dim: cube.sizes[dim] for dim in cube_dims(cube)},
                feature_mask,
                _fills(metadata, cube, feature_names),
                scaling,
            ),
            mask=mask,
            metadata=metadata,
        )
        spec._check_variables(cube)
        if spec.callback is None:  # which may change units
            spec._warn_of_units(cube)
        spec._warn_of_direction(cube, stored)
        return spec

    @property
    def callback(self) -> str | None:
        """Name of the function that changed the samples of the training before they were scaled."""
        return None if self.metadata is None else _settings(self.metadata).get("callback")

    @property
    def read_variables(self) -> list[str]:
        """Variables of the cube that are read."""
        masks = filter(None, (self.mask, self.preparation.mask))
        return list(dict.fromkeys((*self.features, *masks)))

    @property
    def source_attrs(self) -> dict[str, dict[str, Any]]:
        """Attributes of the variables of the cube that the store was made from."""
        variables = self.metadata.provenance.get("variables", {}) if self.metadata else {}
        return {name: dict(variable.get("attrs", {})) for name, variable in variables.items()}

    def _check_variables(self, cube: xr.Dataset) -> None:
        used = [("features", name) for name in self.features]
        used += [("mask", name) for name in (self.mask, self.preparation.mask) if name is not None]
        for argument, name in used:
            if name not in cube.variables:
                raise InvalidValueError(
                    f"{argument}: unknown variable {name!r}; the cube has {list(cube.data_vars)}"
                )
            if not set(cube[name].dims) <= set(self.windows.dims):
                kind = not_data(cube).get(name)
                raise InvalidValueError(
                    f"{argument} must lie along {tuple(self.windows.dims)}, got {name!r} with "
                    f"dims {cube[name].dims}{f', which is {kind}' if kind else ''}"
                )
            if argument == "mask":
                check_mask("mask", cube[name].dtype)
        for name in self.features:
            if cube[name].dtype.kind not in "fiub":
                raise InvalidTypeError(
                    f"features must be numbers, got {name!r} of dtype {cube[name].dtype}"
                )
            check_decoded(name, cube[name])

    def _warn_of_units(self, cube: xr.Dataset) -> None:
        """Warn if a feature has other units than in training."""
        for name in self.features:
            now = cube[name].attrs.get("units")
            then = self.source_attrs.get(name, {}).get("units")
            if now is not None and then is not None and str(now).strip() != str(then).strip():
                warnings.warn(
                    f"features: {name!r} has units {now!r} in this cube and had {then!r} in "
                    "training; unless both mean the same unit, convert the cube, or every "
                    "prediction is wrong",
                    stacklevel=4,
                )

    def _warn_of_direction(self, cube: xr.Dataset, axes: Mapping[str, xr.Variable]) -> None:
        """Warn if windows have another direction than in training, as from north to south."""
        for dim in self.windows.input_order:
            if dim not in axes or dim not in cube.coords:
                continue
            now, then = _rises(cube[dim].values), _rises(axes[dim].values)
            if now is not None and then is not None and now != then:
                words = {True: "rises", False: "falls"}
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


def _read_source(source: Any) -> tuple[StoreMetadata | None, Mapping[str, xr.Variable]]:
    """Return the metadata of a store or data set, and the coordinates of its cube, if known.

    Refuse samples that a cube cannot give.
    """
    if isinstance(source, StoreMetadata):
        return source, {}
    if isinstance(source, xr.Dataset):
        return StoreMetadata.of(source), stored_axes(source.encoding.get("source"))
    if isinstance(source, Mapping | CubeScaler | None):
        return None, {}  # statistics alone, or no scaling
    if not isinstance(source, PTXrDataset):
        return StoreMetadata.of(source), stored_axes(source)
    if source.metadata is None:
        raise InvalidValueError(
            "the data set was made from arrays without metadata; give statistics, features, "
            "targets and sample_size instead"
        )
    return source.metadata, source._source.axes


def _all_features(cube: xr.Dataset, targets: tuple[str, ...], mask: str | None) -> tuple[str, ...]:
    """Return all numeric variables except targets, mask and split label."""
    names, left_out = cube_variables(cube, mask)
    check_left_out(cube, left_out)
    label = split_label(cube)
    if label is not None and RECIPE_ATTR not in cube[label].attrs:
        check_codes(label, cube[label].variable)  # else it may be data
    found = tuple(n for n in names if n not in targets and cube[n].dtype.kind in "fiub")
    if not found:
        raise InvalidValueError(
            f"no feature is left for the targets {list(targets)}; the cube has "
            f"{list(cube.data_vars)}"
        )
    return found


def _check_store(metadata: StoreMetadata, cube: xr.Dataset, names: Iterable[str]) -> None:
    """Refuse a store without one of the variables, or with other dims than the cube."""
    if unknown := [name for name in names if name not in metadata.variables]:
        raise InvalidValueError(
            f"unknown variables {unknown}; the store has {list(metadata.variables)}; rename "
            "variables of the cube, or give statistics"
        )
    if set(metadata.spec.dims) != set(cube_dims(cube)):
        raise InvalidValueError(
            f"the dims of the cube must be those of the store, {metadata.spec.dims}, got "
            f"{cube_dims(cube)}; rename them"
        )


def _classes(
    cube: xr.Dataset, metadata: StoreMetadata | None, targets: Iterable[str]
) -> dict[str, dict[float, str]]:
    """Return the targets that hold classes in the cube, or else in that of the training."""
    known = metadata.provenance.get("variables", {}) if metadata else {}
    found = {}
    for name in targets:
        stored = known.get(name, {})
        variable = xr.Variable((), np.zeros((), stored.get("dtype", "f4")), stored.get("attrs"))
        variable = cube[name].variable if name in cube.data_vars else variable
        if holds_classes(variable):
            found[name] = class_names(variable)
    return found


def _settings(metadata: StoreMetadata) -> Mapping[str, Any]:
    """Return the arguments of the call that made a store."""
    settings: Mapping[str, Any] = metadata.provenance.get("settings", {})
    return settings


def _fills(
    metadata: StoreMetadata | None, cube: xr.Dataset, features: Iterable[str]
) -> dict[str, Fill]:
    """Return how training filled the gaps of features."""
    if metadata is None:
        return {}
    stats: Mapping[str, VariableStatistics] = metadata.fill or {}
    fills = {}
    seed = _settings(metadata).get("seed", 0)
    for name in features:
        method = metadata.spec.fill_of(name)
        if method is not None and name in cube.variables and cube[name].dtype.kind == "f":
            fills[name] = Fill(method, stats.get(name), metadata.spec.const, seed)
    return fills


def _grid(windows: Windows, axes: Mapping[str, xr.Variable]) -> xr.Dataset:
    """Return a Dataset with the cells of a cube, and the later ones of forecasts."""
    sizes = {d: len(axes[d]) if d in axes else one.cells for d, one in windows.dims.items()}
    cells = np.broadcast_to(np.zeros(()), tuple(sizes.values()))
    return xr.Dataset({"": (tuple(sizes), cells)}, axes)


def _scaling(source: Any, cube: xr.Dataset, names: Iterable[str]) -> dict[str, Scaling]:
    """Return offset and scale of every scaled variable, in every cell of the cube."""
    if source is None or (isinstance(source, StoreMetadata) and source.spec.scale_fn is None):
        return {}
    are_pairs = isinstance(source, Mapping) and not isinstance(source, Statistics)
    scale_fn = "standardize"
    statistics = source
    if not are_pairs:
        statistics, scale_fn = given_statistics(source, scale_fn)
    # Statistics of unused variables need not match this cube.
    used = {name: statistics[name] for name in names if name in statistics}
    if statistics and not used:
        raise InvalidValueError(
            f"store_or_stats has statistics of {list(statistics)}, but not of the features or "
            f"targets {list(names)}"
        )
    if are_pairs:
        return {
            name: Scaling(name, *offset_and_scale(f"store_or_stats[{name!r}]", pair, scale_fn))
            for name, pair in used.items()
        }
    return scaling_of(Statistics(used, statistics.part), scale_fn, cube, cube_dims(cube))
