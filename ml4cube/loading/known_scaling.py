"""How the samples of a source are scaled, each at its place. Nothing here knows torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.scaling import Scaling
from ml4cube.core.shares import Ints
from ml4cube.core.statistics import scale_parameters
from ml4cube.loading.lead import Lead, target_name
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    from ml4cube.loading.sources import SampleSource

_SUFFIX = target_name("")


@dataclass(frozen=True)
class KnownScaling:
    """How samples are scaled, as far as that is known."""

    # By variable of the cube.
    scaling: Mapping[str, Scaling]
    # Dim of the cube behind each dim of a sample, where it has another name.
    cube_dims: Mapping[str, str]

    @classmethod
    def of(cls, metadata: StoreMetadata | None) -> KnownScaling:
        """Read it from what is known about samples."""
        if metadata is None:
            return cls({}, {})
        found = {}
        if (how := metadata.spec.scale_fn) is not None:
            for name, stats in metadata.statistics.items():
                if not np.any(stats.count):
                    continue  # of no cell, by which nothing was scaled
                offset, scale = scale_parameters(stats, how)
                found[name] = Scaling(name, offset, scale, metadata.places.get(name, ()), how)
        return cls(found, metadata.spec.cube_dims)

    def __contains__(self, name: str) -> bool:
        """Whether a variable of a source, or a target that lies elsewhere, is scaled."""
        return name.removesuffix(_SUFFIX) in self.scaling

    def dims(self, name: str) -> tuple[str, ...]:
        """Dims of the cube along which the scaling of a variable of a source differs."""
        return self.scaling[name.removesuffix(_SUFFIX)].dims

    def scaled(
        self,
        name: str,
        values: NDArray[Any],
        source: SampleSource,
        first: Mapping[str, NDArray[Any]],
    ) -> NDArray[Any]:
        """Scale samples of a source."""
        scaling = self.scaling[name.removesuffix(_SUFFIX)]
        windows = self._windows(name, values.shape[1:], source, first)
        return scaling.scaled(values, *windows, values.dtype)

    def unscaled(
        self, name: str, values: NDArray[Any], source: SampleSource, samples: Ints
    ) -> NDArray[Any]:
        """Undo the scaling of samples of a source."""
        scaling = self.scaling[name.removesuffix(_SUFFIX)]
        first = source.places(samples, scaling.dims) if scaling.dims else {}
        return scaling.unscaled(values, *self._windows(name, values.shape[1:], source, first))

    def _windows(
        self,
        name: str,
        shape: tuple[int, ...],
        source: SampleSource,
        first: Mapping[str, NDArray[Any]],
    ) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """First cells of a variable's windows and their sizes, by dim of the cube."""
        own = source.dims[name]
        window = {self.cube_dims.get(d, d): n for d, n in zip(own, shape, strict=True)}
        moved = dict(first)
        lead: Lead | None = source.lead if name.endswith(_SUFFIX) else None
        if lead is not None:
            for dim, offset in zip(lead.dims, lead.offset, strict=True):
                dim = self.cube_dims.get(dim, dim)
                if dim in moved:
                    moved[dim] = moved[dim] + offset
        return moved, window
