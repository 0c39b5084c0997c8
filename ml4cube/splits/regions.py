"""assign_region_split: leave whole regions of a map out as test or validation part."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_whole,
)
from ml4cube.core.grid import Grid
from ml4cube.core.missing import find_gaps
from ml4cube.core.partition import partition
from ml4cube.core.split_plan import (
    EXCLUDED,
    PARTS,
    TRAIN,
    Labels,
    SplitPlan,
    check_fractions,
    labels_of,
)
from ml4cube.splits.buffers import BufferLike, CyclicLike, cut_dims, plan_buffer
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.label import CountInBlocks, add_label
from ml4cube.splits.validity import Counts, ValidLike, on_cube

# The map is held in memory, and its labels, one byte per cell, go into the recipe.
MAX_MAP_CELLS = 1 << 25
MAX_RECIPE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class RegionMap:
    """The region of every cell of a map."""

    # One block for each cell of the map, over the cube's sorted dims.
    grid: Grid
    # For each cell of the map, an index into `ids`; -1 for cells without a region.
    region: NDArray[np.intp]
    # Sorted ids of the regions.
    ids: NDArray[Any]
    name: str

    @classmethod
    def of(cls, regions: str | xr.DataArray, view: CubeView) -> RegionMap:
        """Read a map of regions."""
        if isinstance(regions, str):
            check_choice("regions", regions, map(str, view.ds.variables))
            regions = view.ds[regions]
        if not isinstance(regions, xr.DataArray):
            raise InvalidTypeError(
                "regions must be the name of a variable or a DataArray of region ids on dims of "
                f"the cube, got {type(regions).__name__}"
            )
        bare = on_cube(regions, view, "regions")
        dims = [dim for dim in view.sorted_sizes if dim in bare.dims]
        if not dims:
            raise InvalidValueError(f"regions must have dims of the cube {view.dims}, got none")
        if bare.size > MAX_MAP_CELLS:
            raise InvalidValueError(
                f"regions has {bare.size} cells along {tuple(bare.dims)}, but the recipe can hold "
                f"{MAX_MAP_CELLS}; drop dims along which the map does not change, or use a "
                "coarser map"
            )
        name = "regions"
        if regions.name is not None:
            name = str(regions.name)
        values = bare.transpose(*dims).values.ravel()
        has_id = pd.notnull(values) if values.dtype.kind in "OT" else ~find_gaps(values)
        ids_of_cells = values[has_id]
        if values.dtype == object:  # A mask with gaps still is a mask.
            is_mask = pd.api.types.infer_dtype(ids_of_cells) == "boolean"
            ids_of_cells = ids_of_cells.astype(bool if is_mask else str)
        ids, index = np.unique(ids_of_cells, return_inverse=True)
        if not ids.size:
            raise InvalidValueError(f"{name!r} must have region ids, got only gaps")
        region = np.full(values.size, -1, dtype=np.intp)
        region[has_id] = index.ravel()
        grid = Grid.blocks(view.sorted_sizes, dict.fromkeys(dims, 1))
        return cls(grid, region, ids, name)

    def find(self, argument: str, wanted: Any) -> list[int]:
        """Return the indices of regions, given by one id or several."""
        is_one = isinstance(wanted, str | bytes) or not isinstance(wanted, Iterable)
        indices: list[int] = []
        for id in [wanted] if is_one else wanted:
            # Ids of several types are held as texts.
            matches = np.flatnonzero(self.ids == (str(id) if self.ids.dtype.kind == "U" else id))
            if not matches.size:
                choices = textwrap.shorten(", ".join(map(str, self.ids.tolist())), 200)
                raise InvalidValueError(
                    f"{argument}: unknown region {id!r}; {self.name!r} has {choices}"
                )
            indices.append(int(matches[0]))
        return indices

    def sum(self, counts: Counts) -> Counts:
        """Return the sum over each region of one count per cell of the map."""
        has_id = self.region >= 0
        sums = np.bincount(self.region[has_id], counts[has_id], minlength=self.ids.size)
        return sums.astype(np.int64)

    def label(self, region_labels: Labels, background: str) -> Labels:
        """Return for every cell of the map the label of its region, or that of the background."""
        without_region = np.uint8(TRAIN if background == "train" else EXCLUDED)
        return np.where(self.region < 0, without_region, region_labels[self.region])


def assign_region_split(
    ds: Cube,
    regions: str | xr.DataArray,
    split: float | None = None,
    *,
    test: Any = None,
    val: Any = None,
    seed: int = 42,
    background: str = "excluded",
    buffer: BufferLike | None = None,
    cyclic: CyclicLike | None = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole regions to train, validation and test: those named, or some at random.

    A model for regions without data must be tested in regions it was not trained on. Name the
    regions to leave out (``test=["Sahel"]``), or let the seed draw whole regions until
    `split` and `val` are met as closely as regions allow.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims.
    regions : str or DataArray
        Region ids of any type (numbers, texts) on any of the cube's dims, or the name of a
        variable or coordinate that holds them; gaps belong to no region. Or a mask of bools:
        the true cells are the test part, unless `split`, `test` or `val` is given.
    split : float, optional
        Fraction of the cells for training, where regions are drawn; 0.8 by default. Not
        together with `test`.
    test : id or list of ids, optional
        Regions of the test part. Regions in neither `test` nor `val` are train.
    val : float, or id or list of ids
        With `test`, regions of the validation part; without it, the fraction of the cells for
        validation. By default there is none.
    seed : int
        Seed of the draw; the part of a region depends only on it, the region's rank among the
        sorted ids and the numbers of cells.
    background : {"excluded", "train"}
        Part of the cells without a region.
    buffer : int, str, timedelta or mapping, optional
        Distance kept between train and the other parts, taken from train, as for
        `assign_block_split`. Cells count along the dims of the map.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    valid : str, list of str or DataArray, optional
        Cells that count for the fractions, as for `assign_block_split`.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the label added, as `assign_block_split` does. The recipe holds the
        label of every cell of the map, compressed, so that it rebuilds the label without the
        map. Maps of more than 33 million cells, or of more than 4 MiB compressed, are refused.

    Raises
    ------
    EmptyPartError
        If a requested part would hold no valid cell.
    InvalidValueError
        If a region is unknown or named twice, the map is not on the cube's cells or too large,
        or a fraction is out of range.
    InvalidTypeError
        If an argument has the wrong type.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((20, 6)))})
    >>> biome = xr.DataArray(["bog", "bog", "fen", "fen", "heath", None], dims="lat")
    >>> ds = assign_region_split(ds, biome, test=["fen"])
    >>> ds.split.isel(time=0).values.tolist()
    [1, 1, 0, 0, 1, 255]
    """
    seed = check_whole("seed", seed)
    check_choice("background", background, ("excluded", "train"))
    drawn_fractions = _check_parts(split, test, val)

    def assign_regions(view: CubeView, count: CountInBlocks) -> tuple[SplitPlan, Counts]:
        region_map = RegionMap.of(regions, view)
        is_drawn, tested = drawn_fractions is not None, test
        if is_drawn and region_map.ids.dtype.kind == "b" and split is None and not val:
            is_drawn, tested = False, True  # The true cells of a mask are the test part.
        apart = plan_buffer(buffer, None, cyclic, view, cut_dims(region_map.grid))
        weights, _ = count(region_map.grid, None)
        if is_drawn and drawn_fractions is not None:
            fractions, what = drawn_fractions, f"regions of {region_map.name!r}"
            parts = partition(region_map.sum(weights), list(fractions.values()), seed, what=what)
            region_labels = labels_of(fractions)[parts]
            labels = region_map.label(region_labels, background)
        else:
            region_labels = _label_named(region_map, tested, [] if val is None else val)
            labels = region_map.label(region_labels, background)
            fractions = _fractions(labels, weights)
        plan = SplitPlan(
            region_map.grid,
            labels.tobytes(),
            seed if is_drawn else None,
            tuple(fractions.items()),
            *apart,
            _note(region_map, region_labels),
        )
        check_recipe_size(plan, region_map.name)
        return plan, weights

    return add_label(ds, assign_regions, "assign_region_split", name, valid)


def _check_parts(split: float | None, test: Any, val: Any) -> dict[str, float] | None:
    """Return the fractions of the parts if regions are drawn at random, None if they are named."""
    if test is None and not isinstance(val, str | Iterable):
        return check_fractions(0.8 if split is None else split, 0.0 if val is None else val)
    if test is None or split is not None or isinstance(val, float):
        raise InvalidValueError(
            "either test and val must name regions, or split and val must be the fractions by "
            f"which they are drawn, got split={split!r}, test={test!r} and val={val!r}; if a "
            "region's id is a number, use val=[id]"
        )
    return None


def _label_named(regions: RegionMap, test: Any, val: Any) -> Labels:
    """Return the label of every region, where the user names those left out."""
    region_labels = np.full(regions.ids.size, TRAIN, dtype=np.uint8)
    for part, named in (("test", test), ("val", val)):
        for index in regions.find(part, named):
            if region_labels[index] != TRAIN:
                raise InvalidValueError(
                    f"region {regions.ids[index].item()!r} must be named once, but is named twice "
                    f"in test={test!r} and val={val!r}"
                )
            region_labels[index] = PARTS[part]
    if not (region_labels == PARTS["test"]).any():
        raise EmptyPartError(f"test must name at least one region, got {test!r}")
    return region_labels


def _fractions(labels: Labels, weights: Counts) -> dict[str, float]:
    """Return the fraction of the valid cells in each part; refuse an empty part."""
    parts = [part for part, code in PARTS.items() if part == "train" or (labels == code).any()]
    cells = {part: int(weights[labels == PARTS[part]].sum()) for part in parts}
    if empty := [part for part, n in cells.items() if not n]:
        raise EmptyPartError(
            f"the {' and the '.join(empty)} part would hold no valid cell; name other regions, or "
            "use background='train' to train on cells without a region"
        )
    return {part: n / sum(cells.values()) for part, n in cells.items()}


def _note(regions: RegionMap, region_labels: Labels) -> str:
    """Describe the regions that are left out."""
    parts = []
    for part in ("test", "val"):
        ids = [str(id) for id in regions.ids[region_labels == PARTS[part]].tolist()]
        if ids:
            more = ""
            if len(ids) > 30:
                more = f" and {len(ids) - 30} more"
            parts.append(f"{part}: {', '.join(ids[:30])}{more}")
    return f"regions of {regions.name}, {'; '.join(parts)}"


def check_recipe_size(plan: SplitPlan, name: str) -> None:
    """Refuse a plan whose recipe is too long for an attribute."""
    size = len(plan.to_json())
    if size > MAX_RECIPE_BYTES:
        raise InvalidValueError(
            f"the map {name!r} takes {math.ceil(size / 2**20)} MiB in the recipe, but at most "
            f"{MAX_RECIPE_BYTES >> 20} MiB are allowed; use a coarser map, or drop dims along "
            "which it hardly changes"
        )
