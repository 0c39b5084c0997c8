"""A recipe on one cube: where its windows lie."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.windows import BoxWindows


@dataclass(frozen=True)
class BoundRecipe:
    """A recipe and the cells of one cube along each of its dims; picklable."""

    recipe: Recipe
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse windows that do not fit the cube."""
        _ = self.windows

    @classmethod
    def parse(
        cls, sizes: Mapping[str, int], variables: Sequence[str], **arguments: Any
    ) -> BoundRecipe:
        """Make a recipe from a user's arguments, those of `Recipe.parse`, and bind it to a cube."""
        return cls(Recipe.parse(sizes, variables, **arguments), tuple(sizes.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Cells of the cube by dim."""
        return dict(zip(self.recipe.dims, self.shape, strict=True))

    @property
    def windows(self) -> Grid:
        """The grid of all whole windows of the cube."""
        recipe = self.recipe
        return Grid(recipe.dims, self.shape, recipe.size, recipe.stride, ragged=False)

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
        of_dims = zip(recipe.dims, tile.start, tile.stop, recipe.stride, recipe.size, strict=True)
        return {
            dim: slice(first * stride, (stop - 1) * stride + size)
            for dim, first, stop, stride, size in of_dims
        }

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
