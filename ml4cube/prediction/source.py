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
from ml4cube.sampling.rescaling import scaling_of
from ml4cube.store.format import StoreMetadata


@dataclass(frozen=True, eq=False)
class Source:
    """How the training data of a model were made, as far as it is known."""

    # As the argument `store_or_stats` gave it, unless it has metadata: statistics, or nothing.
    statistics: Any = None
    metadata: StoreMetadata | None = None
    data: PTXrDataset | None = None
    # Coordinates of the cube of the training.
    axes: Mapping[str, xr.Variable] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any) -> Self:
        """Read the argument `store_or_stats`; refuse samples that a cube cannot give."""
        if isinstance(source, StoreMetadata):
            return cls(metadata=source)
        if isinstance(source, xr.Dataset):
            axes = stored_axes(source.encoding.get("source"))
            return cls(metadata=StoreMetadata.of(source), axes=axes)
        if source is None or isinstance(source, Mapping | CubeScaler):
            return cls(statistics=source)
        if not isinstance(source, PTXrDataset):
            return cls(metadata=StoreMetadata.of(source), axes=stored_axes(source))
        if source.metadata is None:
            raise InvalidValueError(
                "the data set was made from arrays without metadata; give statistics, features, "
                "targets and sample_size instead"
            )
        return cls(metadata=source.metadata, data=source, axes=source._source.axes)

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
    def callback(self) -> str | None:
        """Name of the function that changed the samples before they were scaled."""
        return None if self.metadata is None else self.metadata.recipe.callback

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
        if self.metadata is None:
            return None, None
        recipe = self.metadata.recipe
        name = recipe.filter_var
        if name not in cube.variables:
            return None, None
        of_results, of_features = None, None
        if recipe.apply_mask:
            of_results = name
        if recipe.mask_makes_gaps:
            of_features = name
        return of_results, of_features

    def fills(self, floats: Iterable[str]) -> dict[str, Fill]:
        """Return how gaps of variables of floats were filled."""
        if self.metadata is None:
            return {}
        return fills_of(self.metadata.recipe, floats, self.metadata.fill)

    def scaling(self, cube: xr.Dataset, names: Iterable[str]) -> dict[str, Scaling]:
        """Return offset and scale of every scaled variable, in every cell of a cube."""
        are_pairs = isinstance(self.statistics, Mapping) and not isinstance(
            self.statistics, Statistics
        )
        if are_pairs:
            return {
                name: Scaling(name, *offset_and_scale(f"store_or_stats[{name!r}]", pair, _DEFAULT))
                for name, pair in _used(self.statistics, names).items()
            }
        source = self.metadata or self.statistics
        if source is None or (self.metadata and self.metadata.recipe.scale_fn is None):
            return {}
        statistics, scale_fn = given_statistics(source, _DEFAULT)
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
