"""What a store, a data set or statistics tell of the training of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import xarray as xr

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics, offset_and_scale
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.sources import stored_axes
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.recipe.preparation import Fill, fills_of
from ml4cube.recipe.recipe import Recipe
from ml4cube.sampling.rescaling import scaling_of
from ml4cube.store.format import StoreMetadata


@dataclass(frozen=True, eq=False)
class Source:
    """How the training data of a model were made, as far as it is known."""

    # Of single cells, neither filled nor masked, where nothing is known.
    recipe: Recipe
    # Whatever scales: metadata, statistics, a scaler or pairs by variable; None if nothing does.
    scaler: Any
    metadata: StoreMetadata | None = None
    data: PTXrDataset | None = None
    # Coordinates of the cube of the training.
    axes: Mapping[str, xr.Variable] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any, sizes: Mapping[str, int]) -> Self:
        """Read the argument `store_or_stats`; refuse samples that a cube cannot give.

        `sizes` are those of the cube that is predicted.
        """
        data: PTXrDataset | None = None
        axes: Mapping[str, xr.Variable] = {}
        metadata: StoreMetadata | None
        if isinstance(source, StoreMetadata):
            metadata = source
        elif isinstance(source, PTXrDataset):
            metadata, data, axes = source.metadata, source, source._source.axes
        elif isinstance(source, xr.Dataset):
            metadata = StoreMetadata.of(source)
            axes = stored_axes(source.encoding.get("source"))
        elif source is None or isinstance(source, Mapping | CubeScaler):
            return cls(Recipe.parse(sizes, ["any"]), source)
        else:
            metadata, axes = StoreMetadata.of(source), stored_axes(source)
        if metadata is None:
            raise InvalidValueError(
                "the data set was made from arrays without metadata; give statistics, features, "
                "targets and sample_size instead"
            )
        scaler = None
        if metadata.recipe.scale_fn is not None:
            scaler = metadata
        return cls(metadata.recipe, scaler, metadata, data, axes)

    @property
    def targets(self) -> tuple[str, ...]:
        """Variables that the model was trained to predict; empty if unknown."""
        if self.data is not None:
            return self.data.targets
        return () if self.metadata is None else self.metadata.targets

    def features(self, targets: Collection[str]) -> tuple[str, ...]:
        """Return the variables that the model predicts some targets from; empty if unknown."""
        if self.data is not None:
            return self.data.features
        if self.metadata is None:
            return ()
        return tuple(name for name in self.metadata.features if name not in targets)

    @property
    def coord_features(self) -> tuple[str, ...]:
        """Coordinates that are inputs, after the features."""
        return () if self.data is None else self.data.coord_features

    @property
    def variables(self) -> Mapping[str, Mapping[str, Any]]:
        """Dtypes and attributes that the variables had in the cube of the training."""
        return {} if self.metadata is None else self.metadata.provenance.get("variables", {})

    @property
    def attrs(self) -> dict[str, dict[str, Any]]:
        """Attributes that the variables had in the cube of the training."""
        return {name: dict(variable.get("attrs", {})) for name, variable in self.variables.items()}

    def masks(self, cube: xr.Dataset) -> tuple[str | None, str | None]:
        """Return the variables of a cube outside which results and features are gaps."""
        name = self.recipe.filter_var
        of_results, of_features = None, None
        if name in cube.variables and self.recipe.apply_mask:
            of_results = name
        if name in cube.variables and self.recipe.mask_makes_gaps:
            of_features = name
        return of_results, of_features

    def fills(self, floats: Iterable[str]) -> dict[str, Fill]:
        """Return how gaps of variables of floats were filled."""
        stats = None
        if self.metadata is not None:
            stats = self.metadata.fill
        return fills_of(self.recipe, floats, stats)

    def scaling(self, cube: xr.Dataset, names: Iterable[str]) -> dict[str, Scaling]:
        """Return offset and scale of every scaled variable, in every cell of a cube."""
        if self.scaler is None:
            return {}
        if isinstance(self.scaler, Mapping) and not isinstance(self.scaler, Statistics):
            return {
                name: Scaling(name, *offset_and_scale(f"store_or_stats[{name!r}]", pair, _DEFAULT))
                for name, pair in _used(self.scaler, names).items()
            }
        statistics, scale_fn = given_statistics(self.scaler, _DEFAULT)
        used = Statistics(_used(statistics, names), statistics.part)
        return scaling_of(used, scale_fn, cube, [str(dim) for dim in cube.dims])


# How values are scaled by statistics that do not say it.
_DEFAULT = "standardize"


def _used(statistics: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the statistics of some variables; others need not match the cube."""
    used = {name: statistics[name] for name in names if name in statistics}
    if statistics and not used:
        raise InvalidValueError(
            f"store_or_stats has statistics of {list(statistics)}, but not of the features or "
            f"targets {list(names)}"
        )
    return used
