"""Classify the windows of a tile by part, mask and gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Block
from ml4cube.core.missing import bool_mask, find_gaps, window_all, window_any
from ml4cube.core.split_plan import EXCLUDED, PARTS
from ml4cube.cube.absent_chunks import ABSENT
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT, TARGET
from ml4cube.sampling.tiling import TiledRecipe

#: Cells of the inputs, and of targets that lie elsewhere, by role.
CellsByRole = dict[str, Arrays]

#: Outcomes of windows, by code; the code of a part is its label.
OUTCOMES = ("test", "train", "val", "straddle", "buffer", "mask", "gap", "unused")
REASONS = OUTCOMES[3:]
_CODES = {name: code for code, name in enumerate(OUTCOMES)}
assert all(_CODES[part] == label for part, label in PARTS.items())


def classify(tiled: TiledRecipe, cells: CellsByRole, tile: Block) -> NDArray[np.uint8]:
    """Return the outcome code of each window of a tile.

    Inputs and targets must be samples of the same part; they are dropped together, for the
    reason of the inputs, else for that of the targets.
    """
    counts = tuple(tile.shape.values())
    inputs = _outcomes(tiled.recipe, cells[INPUT], tiled.label, counts)
    if tiled.used_blocks is not None:
        inputs[~tiled.used_blocks.are_used(tiled.bound.starts_of(tile))] = _CODES["unused"]
    if tiled.bound.targets is None:
        return inputs.reshape(-1)
    targets = _outcomes(tiled.bound.targets.recipe, cells[TARGET], tiled.label, counts)
    pairs = np.where(inputs == targets, inputs, _CODES["straddle"])
    pairs = np.where(targets >= len(PARTS), targets, pairs)
    return np.where(inputs >= len(PARTS), inputs, pairs).astype(np.uint8).reshape(-1)


def deciding_variables(
    tiled: TiledRecipe, dtypes: Mapping[str, np.dtype[Any]]
) -> dict[str, tuple[str, ...]]:
    """Return the variables that `classify` needs, by role: the label, the mask, those with gaps.

    Among them are the cells of absent chunks, if a variable without gaps has any.
    """
    names = {}
    for role, bound in tiled.bound.by_role.items():
        recipe = bound.recipe
        checked = () if recipe.drop_nan is None else recipe.variables
        with_gaps = [name for name in checked if dtypes[name].kind in "fM"]
        masks = [] if recipe.filter_var is None else [recipe.filter_var]
        absent = [ABSENT] if ABSENT in dtypes else []
        names[role] = (*with_gaps, tiled.label, *masks, *absent)
    return names


def _outcomes(
    recipe: Recipe, cells: Arrays, label: str, counts: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Return the outcome codes of windows of one role."""
    labels = as_labels(cells[label], label)
    windows_all = partial(window_all, size=recipe.size, stride=recipe.stride)
    windows_any = partial(window_any, size=recipe.size, stride=recipe.stride)
    first = labels.flat[0]
    if (labels == first).all():
        codes = np.full(counts, _CODES["buffer"] if first == EXCLUDED else first, np.uint8)
    else:
        codes = np.full(counts, _CODES["straddle"], np.uint8)
        for part in PARTS.values():
            codes[windows_all(labels == part)] = part
        codes[windows_any(labels == EXCLUDED)] = _CODES["buffer"]
    for reason, dropped in _dropped(recipe, cells, windows_all, windows_any):
        codes[dropped & (codes < len(PARTS))] = _CODES[reason]
    return codes


def _dropped(
    recipe: Recipe, cells: Arrays, windows_all: Any, windows_any: Any
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield reasons to drop windows, in order of precedence, and which windows each drops."""
    mask = mask_of(recipe, cells)
    if mask is not None and recipe.mask_drops_samples:
        yield "mask", ~windows_all(mask)
    if ABSENT in cells:
        yield "gap", windows_any(cells[ABSENT])
    if recipe.drop_nan == "masked":
        yield "mask", ~windows_any(mask)
    names = [n for n in recipe.variables if n in cells and cells[n].dtype.kind in "fM"]
    if recipe.drop_nan is None or not names:
        return
    gaps = [gaps_of(recipe, cells[name], mask) for name in names]
    if recipe.drop_nan == "if_all_nan":
        yield "gap", windows_all(np.logical_and.reduce(gaps))
        return
    any_gap = np.logical_or.reduce(gaps)
    if recipe.drop_nan == "masked":
        any_gap &= mask
    if any_gap.any():
        yield "gap", windows_any(any_gap)


def mask_of(recipe: Recipe, cells: Arrays) -> NDArray[np.bool_] | None:
    """Return the mask, False where it has a gap."""
    if recipe.filter_var is None:
        return None
    return bool_mask(cells[recipe.filter_var])


def gaps_of(
    recipe: Recipe, values: NDArray[Any], mask: NDArray[np.bool_] | None
) -> NDArray[np.bool_]:
    """Return the gaps of a variable, with those that the mask makes."""
    gaps = find_gaps(values)
    if mask is not None and recipe.mask_makes_gaps:
        return gaps | ~mask
    return gaps


def as_labels(label: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Return labels as uint8; a gap in the label excludes its cell."""
    if label.dtype == np.uint8 and label.size and label.min() == label.max() in PARTS.values():
        return label
    gaps = find_gaps(label)
    valid = gaps | np.isin(label, (*PARTS.values(), EXCLUDED))
    if not valid.all():
        raise InvalidValueError(
            f"the split label {name!r} must be 1 (train), 0 (test), 2 (val) or 255 (excluded), got "
            f"{label[~valid].flat[0]!r}; rename it if it is data"
        )
    return np.where(gaps, EXCLUDED, label).astype(np.uint8)
