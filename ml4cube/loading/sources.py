"""Samples that are read chunk by chunk: the interface of their sources, and their scaling.

A source reads chunks of samples, knows each variable's window and dtype (`variables`) and where
samples lie in their cube (`coords`). Does not use torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Grid
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import variable_facts
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import scale_parameters
from ml4cube.loading.ring.ring import ChunkSource
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.roles import TARGET, ArrayName, Lead
from ml4cube.store.metadata import StoreMetadata, store_facts

if TYPE_CHECKING:
    import xarray as xr


class SampleVariable(NamedTuple):
    """One variable of samples."""

    # Cells of the window along each dim of the sample.
    sizes: dict[str, int]
    dtype: np.dtype[Any]

    @property
    def window(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.sizes.values())


class SampleSource(ChunkSource, Protocol):
    """Samples in chunks, with their variables and positions in the cube.

    From `ChunkSource` come `counts`, the number of samples of each chunk, and `starts`, the number
    of the first sample of each chunk, with that of all samples at the end.
    """

    variables: dict[ArrayName, SampleVariable]
    # Variables that are not data, such as a split label; inputs only where a user names them.
    auxiliary: Collection[str] = ()
    # Of samples made by hand: variables whose gaps were filled, and how.
    filled: Mapping[str, str] = {}
    # Whether samples are cut from a cube as they are read.
    is_cut: bool = False
    # By dim, the position of the targets relative to the inputs; empty where it is the same.
    lead: Lead
    # Cube dim of each sample dim whose name differs from it.
    cube_dims: Mapping[str, str]

    def cube_dim(self, dim: str) -> str:
        """Return the cube dim of a sample dim."""
        return self.cube_dims.get(dim, dim)

    def window_in_cube(self, name: ArrayName) -> dict[str, int]:
        """Return the cells of a variable's windows along dims of the cube."""
        return {self.cube_dim(dim): n for dim, n in self.variables[name].sizes.items()}

    def rows(self, chunk: int) -> Ints:
        """Return the numbers of a chunk's samples."""
        return np.arange(self.starts[chunk], self.starts[chunk + 1])

    def chunks_of(self, samples: Ints) -> Ints:
        """Return the chunk of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples, one array per coordinate."""

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples along cube dims."""

    @cached_property
    def axes(self) -> dict[str, xr.Variable]:
        """The coordinate of every cell along each cube dim where it is known."""
        return {}


def known_scaling(metadata: StoreMetadata | None) -> dict[str, Scaling]:
    """Return the scaling of samples by variable of the cube, as far as it is known."""
    if metadata is None or (method := metadata.recipe.scale_fn) is None:
        return {}
    sizes = {}
    for name, stats in metadata.statistics.items():
        if np.any(stats.count):  # Without a cell that was counted, nothing was scaled.
            offset, scale = scale_parameters(stats, method)
            entries = metadata.places.get(name, ())
            sizes[name] = Scaling(name, offset, scale, entries, method)
    return sizes


def scaling_of(
    metadata: StoreMetadata, names: Iterable[str], has_samples: bool
) -> dict[str, Scaling]:
    """Return the scaling of some variables of a store."""
    scaling, stored = known_scaling(metadata), [n for n in names if n in metadata.variables]
    if not has_samples:  # Variables without a known scaling may have one in other parts.
        return {name: scaling[name] for name in stored if name in scaling}
    return {name: scaling.get(name, Scaling(name, 0.0, 1.0)) for name in stored}


def unscaled(
    scaling: Scaling, name: ArrayName, values: NDArray[Any], source: SampleSource, samples: Ints
) -> NDArray[Any]:
    """Undo the scaling of a variable's samples."""
    first_cells = first_cells_of(source, name, samples, scaling.dims)
    return scaling.unscaled(values, first_cells, source.window_in_cube(name))


def first_cells_of(
    source: SampleSource, name: ArrayName, samples: Ints, dims: Collection[str]
) -> dict[str, Ints]:
    """Return the first cells of a variable's windows along dims of the cube.

    Windows begin at the origins of the samples, or later if they are targets at a lead time.
    """
    if not dims:
        return {}
    lead = source.lead if name.role == TARGET else {}
    offsets = {source.cube_dim(dim): dim_lead.offset for dim, dim_lead in lead.items()}
    origins = source.first_cells(samples, dims)
    return {dim: cells + offsets.get(dim, 0) for dim, cells in origins.items()}


def blocks_of(
    source: SampleSource, metadata: StoreMetadata | None, samples: Ints
) -> tuple[Ints, str]:
    """Return the block of each sample, and the kind of blocks."""
    plan = {}
    if metadata:
        plan = metadata.split.get("plan", {})
    if "grid" not in plan or source.is_cut:
        return source.chunks_of(samples), "chunks"
    grid = Grid.from_json(json.dumps(plan["grid"]))
    first = source.first_cells(samples, grid.dims)
    windows = [first[dim] // n for dim, n in zip(grid.dims, grid.stride, strict=True)]
    return np.ravel_multi_index(windows, grid.counts).astype(np.int64), "blocks of the split"


def facts_of(
    metadata: StoreMetadata | None, features: Collection[str], targets: Collection[str]
) -> dict[str, object]:
    """Return what samples are, used with these variables, by label."""
    if metadata is None:
        return variable_facts(features, targets, {})
    return store_facts(metadata, features, targets)
