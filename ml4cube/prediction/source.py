"""What is known of the training of a model: one recipe, whatever a user gave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import xarray as xr

from ml4cube.core.errors import InvalidValueError, parse_names
from ml4cube.core.statistics import Statistics
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.dataset_source import stored_axes
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.recipe.recipe import Recipe
from ml4cube.store.metadata import StoreMetadata

# How values are scaled by statistics that do not say it.
_DEFAULT = "standardize"


def fitted_recipe(
    source: Any,
    sizes: Mapping[str, int],
    features: str | Iterable[str] | None,
    targets: str | Iterable[str] | None,
) -> FittedRecipe:
    """Read the argument `store_or_stats`; features and targets are as named, or as in training.

    `sizes` are those of the cube that is predicted. Of what is not known the recipe has none.
    """
    fitted = _read(source, sizes)
    target_names = parse_names("targets", targets) or fitted.recipe.targets
    feature_names = parse_names("features", features)
    if not feature_names:
        feature_names = fitted.recipe.features or ()
        if not isinstance(source, PTXrDataset):
            feature_names = tuple(name for name in feature_names if name not in target_names)
    recipe = replace(fitted.recipe, features=feature_names, targets=target_names)
    return replace(fitted, recipe=recipe)


def _read(source: Any, sizes: Mapping[str, int]) -> FittedRecipe:
    """Return how samples were made; of statistics alone, that of single cells."""
    if isinstance(source, PTXrDataset):
        if source.fitted is None:
            raise InvalidValueError(
                "the data set was made from arrays without metadata; give statistics, features, "
                "targets and sample_size instead"
            )
        return source.fitted
    if isinstance(source, StoreMetadata):
        return source.fitted
    if isinstance(source, xr.Dataset):
        axes = stored_axes(source.encoding.get("source"))
        return replace(StoreMetadata.of(source).fitted, axes=axes)
    if source is not None and not isinstance(source, Mapping | CubeScaler):
        return replace(StoreMetadata.of(source).fitted, axes=stored_axes(source))
    statistics: Mapping[str, Any] = {}
    scale_fn = None
    if isinstance(source, Mapping):
        statistics, scale_fn = source, _DEFAULT
    if isinstance(source, Statistics | CubeScaler):
        statistics, scale_fn = given_statistics(source, _DEFAULT)
    return FittedRecipe(Recipe.parse(sizes, ["any"], scale_fn=scale_fn), statistics)
