"""A recipe on one cube: where its windows lie."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid, SizesLike
from ml4cube.core.scaling import Scaling
from ml4cube.recipe.fitted import Fill
from ml4cube.recipe.lead_time import parse_lead
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT, TARGET, DimLead, Lead
from ml4cube.recipe.windows import BoxWindows


class CoordinateChannel(NamedTuple):
    """Values of a channel at every cell along one dim of the cube."""

    dim: str
    values: NDArray[np.float32]


@dataclass(frozen=True)
class BoundRecipe:
    """A recipe on one cube: its cells along each dim of the recipe, how they are prepared."""

    recipe: Recipe
    shape: tuple[int, ...]
    # The windows of targets that lie in other cells than the inputs.
    targets: BoundRecipe | None = None
    # Of targets, cells from the first one of the inputs along each dim.
    offset: tuple[int, ...] = ()
    # By variable, for those of floats whose gaps are filled.
    fills: Mapping[str, Fill] = field(default_factory=dict, compare=False)
    # Offset and scale of every cell by variable, for those that are scaled.
    scaling: Mapping[str, Scaling] = field(default_factory=dict, compare=False)
    # Channels of inputs after the features.
    coordinates: Mapping[str, CoordinateChannel] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(
        cls,
        sizes: Mapping[str, int],
        variables: Sequence[str],
        *,
        scored: Sequence[str] = (),
        target_offset: SizesLike | None = None,
        target_size: SizesLike | None = None,
        **arguments: Any,
    ) -> BoundRecipe:
        """Make a recipe from a user's arguments, those of `Recipe.parse`, and bind it to a cube.

        `scored` are the variables that a loss uses, targets and weights: cut from the same cells as
        the inputs, they are filled only where a mapping names them; from other cells, never.
        """
        shape = tuple(sizes.values())
        if target_offset is None and target_size is None:
            bound = cls(Recipe.parse(sizes, variables, unfilled=scored, **arguments), shape)
            _ = bound.windows  # refuses windows that do not fit the cube
            return bound
        recipe = Recipe.parse(sizes, variables, **arguments)
        inputs = dict(zip(recipe.dims, recipe.size, strict=True))
        of_targets = {"target_offset": target_offset, "target_size": target_size}
        lead = parse_lead(inputs, sizes, "the cube", **of_targets).values()
        target_recipe = replace(
            recipe,
            size=tuple(of_dim.target_size for of_dim in lead),
            variables=tuple(scored),
            window_dims=(),
            array_dims=(),
            fill_method=None,  # Filled targets would be scored like measured ones.
            const=None,
        )
        offset = tuple(of_dim.offset for of_dim in lead)
        return cls(recipe, shape, cls(target_recipe, shape, offset=offset))

    @property
    def features(self) -> tuple[str, ...]:
        """Variables of inputs."""
        return self.recipe.features or ()

    @property
    def channels(self) -> list[str]:
        """Names of the channels of inputs, in their order."""
        return [*self.features, *self.coordinates]

    @property
    def mask(self) -> str | None:
        """Variable outside which floats and dates are gaps."""
        if self.recipe.mask_makes_gaps:
            return self.recipe.filter_var
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """Cells of the cube by dim."""
        return dict(zip(self.recipe.dims, self.shape, strict=True))

    @property
    def windows(self) -> Grid:
        """The grid of all windows that are whole in the cube, with their targets."""
        recipe, cells = self.recipe, self.shape
        if self.targets is not None:
            of_dims = zip(self.shape, self.lead.values(), strict=True)
            cells = tuple(n - of_dim.cells_past_input for n, of_dim in of_dims)
        return Grid(recipe.dims, cells, recipe.size, recipe.stride, ragged=False)

    @property
    def lead(self) -> Lead:
        """Cells of inputs and targets by dim, if these lie in other cells."""
        if self.targets is None:
            return {}
        sizes = self.targets.offset, self.recipe.size, self.targets.recipe.size
        return {
            dim: DimLead(*cells)
            for dim, cells in zip(self.recipe.dims, zip(*sizes, strict=True), strict=True)
        }

    @property
    def by_role(self) -> dict[str, BoundRecipe]:
        """The windows of each role that has cells of its own."""
        if self.targets is None:
            return {INPUT: self}
        return {INPUT: self, TARGET: self.targets}

    def boxes(self, tile: Block) -> dict[str, dict[str, slice]]:
        """Return the cells that a box of neighbouring windows covers, by role."""
        return {role: bound.cells_of(tile) for role, bound in self.by_role.items()}

    @property
    def total(self) -> int:
        """Windows that start inside the cube, including those that exceed its end."""
        of_dims = zip(self.shape, self.recipe.stride, strict=True)
        return math.prod(math.ceil(n / stride) for n, stride in of_dims)

    @property
    def index_dtype(self) -> np.dtype[np.signedinteger]:
        """Dtype of cell indices along all dims."""
        return np.dtype(np.int32 if max(self.shape) < 2**31 else np.int64)

    def starts_of(self, tile: Block) -> list[NDArray[np.intp]]:
        """Return the first cells of a box of neighbouring windows along each dim."""
        of_dims = zip(tile.start, tile.stop, self.recipe.stride, strict=True)
        return [np.arange(first, stop) * stride for first, stop, stride in of_dims]

    def cells_of(self, tile: Block) -> dict[str, slice]:
        """Return the cells that a box of neighbouring windows covers."""
        recipe = self.recipe
        offsets = self.offset or (0,) * len(self.shape)
        ranges = zip(tile.start, tile.stop, recipe.stride, recipe.size, offsets, strict=True)
        cells = [
            slice(first * stride + offset, (stop - 1) * stride + size + offset)
            for first, stop, stride, size, offset in ranges
        ]
        return dict(zip(recipe.dims, cells, strict=True))

    def windows_in(self, tile: Block) -> BoxWindows:
        """Return a box of neighbouring windows, by their position in the cells that it covers."""
        recipe = self.recipe
        return BoxWindows(
            tuple(cells.stop - cells.start for cells in self.cells_of(tile).values()),
            tuple(starts - starts[0] for starts in self.starts_of(tile)),
            recipe.size,
            tuple(recipe.dims.index(dim) for dim in recipe.window_dims),
        )

    def to_json(self) -> str:
        """Write recipe and shape as one JSON object; `from_json` reads it back."""
        return json.dumps({**json.loads(self.recipe.to_json()), "shape": self.shape})

    @classmethod
    def from_json(cls, text: str) -> BoundRecipe:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        shape = tuple(values.pop("shape"))
        return cls(Recipe.from_json(json.dumps(values)), shape)
