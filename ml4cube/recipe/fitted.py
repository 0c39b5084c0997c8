"""A recipe with what its training gave: the statistics that fill and scale, for any cube."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import prefixed
from ml4cube.core.missing import fill_gaps
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics, VariableStatistics
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import Lead


@dataclass(frozen=True)
class Fill:
    """How the gaps of a variable are filled."""

    method: str
    # Of the train cells, for all methods but "constant".
    stats: VariableStatistics | None = None
    const: float | None = None
    seed: int = 0

    @property
    def needs_window(self) -> bool:
        """Whether what a gap is filled with depends on the other cells of its window."""
        return self.method == "sample_mean"

    @property
    def needs_positions(self) -> bool:
        """Whether what a gap is filled with depends on where its cell lies in the cube."""
        return self.method == "noise"

    def filled(
        self, name: str, samples: NDArray[Any], positions: NDArray[np.uint64] | None = None
    ) -> NDArray[Any]:
        """Return samples (samples, *window) without gaps; `positions` number the cells."""
        return fill_gaps(
            samples,
            self.method,
            train_stats=self.stats,
            const=self.const,
            seed=self.seed,
            positions=positions,
            variable=name,
        )


def fills_of(
    recipe: Recipe, floats: Iterable[str], train_cells: Mapping[str, VariableStatistics] | None
) -> dict[str, Fill]:
    """Return how a recipe fills the gaps of variables of floats."""
    stats = train_cells or {}
    fills = {}
    for name in floats:
        method = recipe.fill_of(name)
        if method is not None:
            fills[name] = Fill(method, stats.get(name), recipe.const, recipe.seed)
    return fills


def scaling_of(
    statistics: Statistics,
    scale_fn: str | None,
    sizes: Mapping[str, int],
    coords: Mapping[str, NDArray[Any]],
) -> dict[str, Scaling]:
    """Return offset and scale of every variable, in every cell of a cube with these coordinates."""
    if scale_fn is None:
        return {}
    scaling = {}
    part = ""
    if statistics.part:
        part = f" of the {statistics.part} part"
    for name, stats in statistics.items():
        with prefixed(f"variable {name!r}{part}"):
            scaling[name] = Scaling.of(name, stats, scale_fn, sizes, coords)
    return scaling


@dataclass(frozen=True, eq=False)
class FittedRecipe:
    """How the samples of a training were made: its recipe, and what was learned from its cube."""

    recipe: Recipe
    # Of samples, after the callback: they scale. Or pairs of numbers, as a user gave them.
    statistics: Mapping[str, Any]
    # Of train cells, before the callback: they fill gaps.
    fill: Statistics | None = None
    # Dtype and attributes that each variable of the samples had in the cube; None if unknown.
    variables: Mapping[str, Mapping[str, Any]] | None = None
    # Coordinates of that cube, as far as they are known.
    axes: Mapping[str, Any] = field(default_factory=dict)
    # Coordinates that are inputs, after the features.
    coord_features: tuple[str, ...] = ()
    # By dim of the cube, if targets lie in other cells than inputs, and the dims of their windows.
    lead: Lead = field(default_factory=dict)
    target_dims: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Features and targets."""
        return list(dict.fromkeys((*(self.recipe.features or ()), *self.recipe.targets)))

    def attrs_of(self, name: str) -> Mapping[str, Any]:
        """Return the attributes that a variable had in the cube of the training."""
        attrs: Mapping[str, Any] = (self.variables or {}).get(name, {}).get("attrs", {})
        return attrs

    @property
    def window(self) -> dict[str, int]:
        """Cells of a window of inputs along each dim of the cube."""
        window = dict(zip(self.recipe.dims, self.recipe.size, strict=True))
        return window | {dim: of_dim.input_size for dim, of_dim in self.lead.items()}

    @property
    def shifted(self) -> Lead:
        """The dims along which targets have other cells than inputs."""
        of_dims = self.lead.items()
        return {d: of for d, of in of_dims if (of.offset, of.target_size) != (0, of.input_size)}
