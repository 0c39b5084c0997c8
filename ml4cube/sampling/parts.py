"""Parts of a cube: how it is split if it has no label, and which of its blocks are used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, caller_level, check_flags, check_positive
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.split_plan import PARTS, check_fractions
from ml4cube.cube.chunks.blocks import source_chunks
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.cube.variables import split_label
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.sampling.tiling import UsedBlocks, block_order
from ml4cube.splits import assign_block_split
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import label_lookup

if TYPE_CHECKING:
    import xarray as xr

# Blocks of which `data_fraq` uses some, in a cube without chunks.
_BLOCKS_WANTED = 64
# How far the fraction of used blocks may be off `data_fraq` without a warning.
_CLOSE_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a cube without a label is split, and how much of a cube is used; checked when made."""

    block_size: SizesLike | None = None
    data_split: float = 0.8
    val_split: float | None = None
    data_fraq: float = 1.0
    rand_chunk: bool = False
    # If `val_split` is None: whether half of what training leaves is for validation.
    has_val: bool = False
    # Or all samples of a cube without a label are for training.
    splits_unlabelled: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_flags({"rand_chunk": self.rand_chunk})
        check_fractions(self.data_split, self.val_split or 0.0, ("data_split", "val_split"))
        check_positive("data_fraq", self.data_fraq, 1)

    def label(self, ds: xr.Dataset, bound: BoundRecipe) -> tuple[xr.Dataset, str]:
        """Return a cube with its split label, or one made for it, and the label's name."""
        label, dims = split_label(ds), bound.recipe.dims
        if label is not None:
            if self.val_split:
                raise InvalidValueError(
                    f"val_split={self.val_split!r} is for a cube without a split label, and this "
                    f"one has {label!r}; drop val_split or the label"
                )
            if not set(ds[label].dims) <= set(dims):
                raise InvalidValueError(
                    f"the split label {label!r} has dims {ds[label].dims}, the cube {dims}"
                )
            return ds, label
        if not self.splits_unlabelled:
            return ds.assign(split=((), np.uint8(PARTS["train"]))), "split"
        val = self.val_split
        if val is None:
            val = (1 - self.data_split) / 2 if self.has_val else 0.0
        fractions = check_fractions(self.data_split, val, ("data_split", "val_split"))
        shares = [self.data_fraq * fraction for fraction in fractions.values()]
        sizes = block_sizes(self.block_size, CubeView.of(ds), shares, bound.windows)
        seed = bound.recipe.seed
        return assign_block_split(ds, sizes, self.data_split, val=val, seed=seed), "split"

    def blocks(self, ds: xr.Dataset, bound: BoundRecipe) -> Grid:
        """Return the blocks of which some are used: as given, or chunks, or a few dozen."""
        shape, recipe = bound.sizes, bound.recipe
        if self.block_size is not None:
            return Grid.blocks(shape, parse_sizes("block_size", self.block_size, shape))
        chunks = largest_chunks(ds, recipe.variables)
        if chunks:
            return Grid.blocks(shape, {d: min(chunks.get(d, n), n) for d, n in shape.items()})
        blocks_per_dim = round(_BLOCKS_WANTED ** (1 / len(shape)))
        sizes = {}
        for dim, n, window in zip(recipe.dims, bound.shape, recipe.size, strict=True):
            windows_per_block = max(1, round(n / blocks_per_dim / window))
            sizes[dim] = min(window * windows_per_block, n)
        return Grid.blocks(shape, sizes)

    def used_blocks(self, ds: xr.Dataset, bound: BoundRecipe) -> UsedBlocks | None:
        """Choose the blocks to use: the first ones in the cube's order, or some at random."""
        blocks = self.blocks(ds, bound)
        wanted = max(1, round(self.data_fraq * len(blocks)))
        if abs(wanted / len(blocks) - self.data_fraq) > _CLOSE_FRACTION:
            warnings.warn(
                f"data_fraq={self.data_fraq:g} uses {wanted} of {len(blocks)} blocks; give smaller "
                "ones by block_size to come closer",
                UserWarning,
                stacklevel=caller_level(),
            )
        if wanted == len(blocks):
            return None
        used = np.zeros(len(blocks), bool)
        used[block_order(blocks, self.rand_chunk, bound.recipe.seed)[:wanted]] = True
        return UsedBlocks(blocks, used.reshape(blocks.counts))


#: What users call the fields.
PART_ARGUMENTS = ("block_size", "data_split", "val_split", "data_fraq", "rand_chunk")


def largest_chunks(ds: xr.Dataset, names: Iterable[str]) -> dict[str, int]:
    """Return the largest chunk of some variables along each dim; nothing if none is chunked."""
    chunks: dict[str, int] = {}
    for name in names:
        for dim, n in source_chunks(ds[name].variable).items():
            chunks[dim] = max(n, chunks.get(dim, 1))
    return chunks


def split_of(label: xr.DataArray) -> dict[str, Any]:
    """Return the recipe of a split label; empty for one made by hand."""
    text = label.attrs.get(RECIPE_ATTR, {})
    recipe: dict[str, Any] = json.loads(text) if isinstance(text, str) else dict(text)
    return recipe


def expects_part(split: Mapping[str, Any], part: str) -> bool:
    """Return True if a split should have a part; a label made by hand should have all."""
    fractions = split.get("plan", {}).get("fractions")
    return fractions is None or part in fractions


def has_no_cells_of(part: str, ds: xr.Dataset, label: str) -> bool:
    """Return True if no cell has the label of a part, as far as known without reading."""
    if label_lookup(ds, label) is not None:
        return not expects_part(split_of(ds[label]), part)
    cells = ds[label]
    return cells.variable._in_memory and not bool((cells.values == PARTS[part]).any())
