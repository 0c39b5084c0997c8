"""`PredictionSpec`: what a model takes and returns, from the arguments of `predict_cube`.

Names, windows, scaling, mask and fill method are those of the sample store (or data set) that the
model was trained on, unless they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.missing import check_mask
from ml4cube.core.sample_spec import SampleSpec, parse_names
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics, check_decoded, offset_and_scale
from ml4cube.cube.variables import cube_dims, cube_variables
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.sources import stored_axes
from ml4cube.prediction.blending import Cover
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.sampling.rescaling import scaling_of
from ml4cube.store.format import StoreMetadata


@dataclass(frozen=True)
class PredictionSpec:
    """Inputs and outputs of a model on one cube: names, windows, scaling, mask."""

    features: tuple[str, ...]
    targets: tuple[str, ...]
    cover: Cover
    # Dims along which a window has several cells, in the model's order.
    window_dims: tuple[str, ...]
    # Offset and scale of every scaled variable, by name.
    scaling: Mapping[str, Scaling]
    # Variable of the cube with the cells to predict.
    mask: str | None
    # Variable of the cube outside which features are gaps, as they were in training.
    feature_mask: str | None
    # Metadata of the store that the model was trained on, if one was given.
    metadata: StoreMetadata | None

    @classmethod
    def of(
        cls,
        cube: xr.Dataset,
        source: Any,
        features: str | Iterable[str] | None,
        targets: str | Iterable[str] | None,
        sample_size: SizesLike | None,
        overlap: SizesLike | float | None,
        mask: str | None,
    ) -> Self:
        """Take from the source what was not given, and check everything against the cube."""
        if isinstance(source, PTXrDataset):
            features = source.features if features is None else features
            targets = (source.targets or source.features) if targets is None else targets
        metadata, axes = _read_source(source)
        target_names = parse_names("targets", targets) or (metadata.targets if metadata else ())
        feature_names = parse_names("features", features)
        if not feature_names and metadata:
            feature_names = tuple(n for n in metadata.features if n not in target_names)
        if not feature_names:
            feature_names = _all_features(cube, target_names, mask)
        names = (*feature_names, *target_names)
        if metadata:
            _check_store(metadata, cube, names)
        shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
        # Without a store, the model was trained on points unless `sample_size` is given.
        trained_on = metadata.spec if metadata else SampleSpec.parse(shape, names)
        cover, window_dims = _windows(shape, trained_on, sample_size, overlap)
        feature_mask = None
        if metadata and metadata.spec.filter_var in cube.variables:
            if metadata.spec.mask_makes_gaps:
                feature_mask = metadata.spec.filter_var
            if metadata.spec.apply_mask and mask is None:
                mask = metadata.spec.filter_var
        spec = cls(
            features=feature_names,
            targets=target_names or feature_names,
            cover=cover,
            window_dims=window_dims,
            scaling=_scaling(source if metadata is None else metadata, cube, names),
            mask=mask,
            feature_mask=feature_mask,
            metadata=metadata,
        )
        spec._check_variables(cube)
        if spec.store_settings.get("callback") is None:  # a callback may change units
            spec._warn_of_units(cube)
        spec._warn_of_direction(cube, axes)
        return spec

    @property
    def store_settings(self) -> Mapping[str, Any]:
        """Arguments of the call that made the store."""
        return self.metadata.provenance.get("settings", {}) if self.metadata else {}

    @property
    def source_attrs(self) -> dict[str, dict[str, Any]]:
        """Attributes of the variables of the cube that the store was made from."""
        variables = self.metadata.provenance.get("variables", {}) if self.metadata else {}
        return {name: dict(variable.get("attrs", {})) for name, variable in variables.items()}

    def _check_variables(self, cube: xr.Dataset) -> None:
        used = [("features", name) for name in self.features]
        used += [("mask", name) for name in (self.mask, self.feature_mask) if name is not None]
        for argument, name in used:
            if name not in cube.variables:
                raise InvalidValueError(
                    f"{argument}: unknown variable {name!r}; the cube has {list(cube.data_vars)}"
                )
            if not set(cube[name].dims) <= set(self.cover.shape):
                raise InvalidValueError(
                    f"{argument} must lie along {tuple(self.cover.shape)}, got {name!r} with "
                    f"dims {cube[name].dims}"
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
        for dim in self.window_dims:
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
    coordinate_features = source.channels[len(source.features) :]
    if coordinate_features or source.shifted:
        found = "a target offset"
        if coordinate_features:
            found = f"coordinate features ({', '.join(coordinate_features)})"
        raise InvalidValueError(
            f"the data set has {found}, which predict_cube does not support; run the model over "
            "PTXrDataset.take and use its to_dataset"
        )
    return source.metadata, source._source.axes


def _all_features(cube: xr.Dataset, targets: tuple[str, ...], mask: str | None) -> tuple[str, ...]:
    """Return all numeric variables except targets, mask and split label."""
    names, _ = cube_variables(cube, mask)
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


def _windows(
    shape: dict[str, int],
    spec: SampleSpec,
    sample_size: SizesLike | None,
    overlap: SizesLike | float | None,
) -> tuple[Cover, tuple[str, ...]]:
    """Return the windows over a cube, and their dims in the model's order."""
    trained_size = dict(zip(spec.dims, spec.size, strict=True))
    if sample_size is not None:
        given = parse_sizes("sample_size", sample_size, shape)
        size = {dim: given.get(dim, 1) for dim in shape}
    else:
        too_long = {dim: n for dim, n in trained_size.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {shape}; predict a "
                "larger cube, or give sample_size if the model takes smaller windows"
            )
        size = {dim: trained_size[dim] for dim in shape}
    if sample_size is None and overlap is None:
        trained_overlap = dict(zip(spec.dims, spec.overlap, strict=True))
        shared_cells = {dim: trained_overlap[dim] for dim in shape}
    else:
        shared_cells = parse_overlap("overlap", overlap, size)
    # The model takes dims in the order of the store, also those that it keeps with one cell.
    kept = {dim for dim in spec.window_dims if trained_size[dim] == 1}
    order = dict.fromkeys((*spec.window_dims, *spec.dims))
    window_dims = tuple(dim for dim in order if size[dim] > 1 or dim in kept)
    return Cover(shape, size, shared_cells), window_dims


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
