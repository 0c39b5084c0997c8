"""assign_region_split: whole regions of a map are left out as test or validation part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_seed,
)
from ml4cube.core.grid import Grid
from ml4cube.core.partition import partition
from ml4cube.core.split_plan import EXCLUDED, PARTS, TRAIN, SplitPlan, check_fractions
from ml4cube.splits.assign import check_train_left
from ml4cube.splits.buffers import BufferLike, parse_buffer, parse_cyclic, resolve_buffer
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import Cube, check_name, with_label
from ml4cube.splits.validity import ValidLike, count_by_block, on_cube, valid_mask

# The map is held in memory and its labels, one byte a cell, go into the recipe.
MAX_MAP_CELLS = 1 << 25
MAX_RECIPE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class RegionMap:
    """Which region every cell of a map belongs to."""

    # One block for each cell of the map, over the cube's sorted dims.
    grid: Grid
    # Place in `ids`; -1 for cells without a region.
    region: NDArray[np.intp]
    ids: NDArray[Any]
    called: str

    @classmethod
    def of(cls, regions: str | xr.DataArray, view: CubeView) -> RegionMap:
        """Read a map of regions."""
        if isinstance(regions, str):
            if regions not in view.ds:
                raise InvalidValueError(
                    f"regions={regions!r} is no variable of the cube, it has "
                    f"{list(view.ds.variables)}"
                )
            regions = view.ds[regions]
        if not isinstance(regions, xr.DataArray):
            raise InvalidTypeError(
                f"regions is a {type(regions).__name__}; give the name of a variable, or a "
                "DataArray of region ids on dims of the cube"
            )
        bare = on_cube(regions, view, "regions")
        dims = [dim for dim in view.canonical if dim in bare.dims]
        if not dims:
            raise InvalidValueError(f"regions has no dim of the cube, which has {view.dims}")
        if bare.size > MAX_MAP_CELLS:
            raise InvalidValueError(
                f"regions has {bare.size} cells, along {tuple(bare.dims)}; the recipe can hold "
                f"{MAX_MAP_CELLS}: leave out dims along which the map does not change, or use a "
                "coarser map"
            )
        called = "regions" if regions.name is None else str(regions.name)
        values = bare.transpose(*dims).values.ravel()
        there = _has_region(values)
        words = values[there]
        ids, which = np.unique(words.astype(str) if words.dtype == object else words, False, True)
        if not ids.size:
            raise InvalidValueError(f"{called!r} is all gaps; give region ids")
        region = np.full(values.size, -1, dtype=np.intp)
        region[there] = which.ravel()
        grid = Grid.blocks(view.canonical, dict.fromkeys(dims, 1))
        return cls(grid, region, ids, called)

    @property
    def dims(self) -> list[str]:
        """Dims of the map."""
        return [dim for dim, tile in zip(self.grid.dims, self.grid.tile, strict=True) if tile == 1]

    def places(self, argument: str, wanted: Any) -> list[int]:
        """Find regions by their ids."""
        single = isinstance(wanted, str | bytes) or not isinstance(wanted, Iterable)
        found = []
        for id in [wanted] if single else list(wanted):
            place = self._place(id)
            if place is None:
                known = ", ".join(map(str, self.ids[:20].tolist()))
                more = f", ... ({self.ids.size} in all)" if self.ids.size > 20 else ""
                raise InvalidValueError(
                    f"{argument} names region {id!r}, {self.called!r} has {known}{more}"
                )
            found.append(place)
        return found

    def _place(self, id: Any) -> int | None:
        # texts and dates keep their length and unit: cut to those of the map, "ASIA" would be "AS"
        whole = self.ids.dtype.kind in "USmM"
        try:
            given = np.asarray(id).astype(self.ids.dtype.kind if whole else self.ids.dtype)
        except (TypeError, ValueError, OverflowError):
            return None
        if self.ids.dtype.kind in "biu" and given != id:  # 2.5 is not region 2
            return None
        same = np.flatnonzero(self.ids == given)
        return int(same[0]) if same.size else None

    def weigh(self, mask: xr.DataArray | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count the valid cells of each cell of the map, and of each region."""
        cells = count_by_block(mask, self.grid).ravel()
        return cells, self.sum(cells)

    def sum(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add up what the cells of each region hold."""
        inside = self.region >= 0
        held = np.bincount(self.region[inside], cells[inside], minlength=self.ids.size)
        return held.astype(np.int64)

    def label(self, of_region: NDArray[np.uint8], background: int) -> NDArray[np.uint8]:
        """Give every cell of the map the label of its region."""
        return np.where(self.region < 0, np.uint8(background), of_region[self.region])


def _has_region(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind in "fc":
        return np.asarray(np.isfinite(values))
    if values.dtype.kind in "mM":
        return np.asarray(~np.isnat(values))
    if values.dtype == object:
        return np.array([value is not None and value == value for value in values], dtype=bool)
    return np.ones(values.shape, dtype=bool)


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
    cyclic: Any = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole regions to train, validation and test: those named, or some at random.

    A model that is to work where there are no data must be tested where it saw none. Name
    the regions to leave out (``test=["Sahel"]``), or let the seed draw whole regions until
    `split` and `val` of the cells are met as closely as regions allow.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims.
    regions : str or DataArray
        Region ids of any type (numbers, texts) on any of the cube's dims, or the name of a
        variable or coordinate that holds them; gaps belong to no region. Or a mask of bools:
        the true cells are the test part, if nothing else is asked for.
    split : float, optional
        Fraction of the cells for training, where regions are drawn; 0.8 by default. Not
        together with `test`.
    test : id or list of ids, optional
        Regions of the test part. All regions named in neither `test` nor `val` are train.
    val : float, or id or list of ids
        With `test`, regions of the validation part; without, the fraction of the cells for
        validation. By default there is none.
    seed : int
        Seed of the draw; which region gets which part depends on it, the region's place
        among the sorted ids and the numbers of cells alone.
    background : {"excluded", "train"}
        What becomes of cells without a region.
    buffer : int, str, timedelta or mapping, optional
        What must lie between train and the other parts, taken from train, as for
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
        map; maps of more than 33 million cells, or that take more than 4 MiB compressed, are
        refused.

    Raises
    ------
    EmptyPartError
        If a part that is asked for would hold no valid cell.
    InvalidValueError
        If a region is unknown or named twice, the map does not lie on the cube or is too
        large, or a fraction is out of range.
    InvalidTypeError
        If an argument is of the wrong kind.

    Examples
    --------
    >>> ds = xr.Dataset({"t2m": (("time", "lat"), np.zeros((20, 6)))})
    >>> biome = xr.DataArray(["bog", "bog", "fen", "fen", "heath", None], dims="lat")
    >>> ds = assign_region_split(ds, biome, test=["fen"])
    >>> ds.split.isel(time=0).values.tolist()
    [1, 1, 0, 0, 1, 255]
    """
    view = CubeView.of(ds)
    check_name(name, view)
    seed = check_seed(seed)
    check_choice("background", background, ("excluded", "train"))
    drawn, fractions = _check_wishes(split, test, val)
    region_map = RegionMap.of(regions, view)
    if drawn and region_map.ids.dtype.kind == "b" and split is None and not val:
        drawn, test = False, True
    keep_away = parse_buffer(buffer, None, view, region_map.dims)
    wraps = parse_cyclic(cyclic, view, region_map.dims)
    reaches = resolve_buffer(keep_away, wraps, view)
    mask = None if valid is None else valid_mask(valid, view)
    cells, weights = region_map.weigh(mask)
    if drawn:
        of_region = _draw(region_map, weights, fractions, seed)
    else:
        of_region = _named(region_map, test, [] if val is None else val)
    labels = region_map.label(of_region, TRAIN if background == "train" else EXCLUDED)
    shares = _shares(labels, cells, list(fractions) if drawn else None)
    plan = SplitPlan(
        grid=region_map.grid,
        labels=labels.tobytes(),
        seed=int(seed) if drawn else None,
        fractions=tuple((fractions if drawn else shares).items()),
        buffer=keep_away,
        cyclic=wraps,
        note=_note(region_map, of_region),
    )
    check_recipe_size(plan, region_map.called)
    check_train_left(plan, reaches, cells, mask)
    return with_label(view, plan, reaches, name, "assign_region_split")


def _check_wishes(split: float | None, test: Any, val: Any) -> tuple[bool, dict[str, float]]:
    """Whether regions are drawn, and by which fractions."""
    if test is not None:
        if split is not None:
            raise InvalidValueError(
                f"split={split!r} and test={test!r} exclude one another: name the test regions, "
                "or let split draw them"
            )
        if isinstance(val, float):
            raise InvalidValueError(
                f"val={val!r} is a fraction, and test names regions; name those of val as well, "
                f"as in val=[{val!r}]"
            )
        return False, {}
    if isinstance(val, str | Iterable):
        raise InvalidValueError(
            f"val={val!r} names regions, test names none; name both, or give val as a fraction"
        )
    return True, check_fractions(0.8 if split is None else split, 0.0 if val is None else val)


def _draw(
    regions: RegionMap, weights: NDArray[np.int64], fractions: dict[str, float], seed: int
) -> NDArray[np.uint8]:
    usable = int((weights > 0).sum())
    if usable < len(fractions):
        raise EmptyPartError(
            f"{len(fractions)} parts are asked for ({', '.join(fractions)}), and {usable} of "
            f"{weights.size} regions of {regions.called!r} hold valid cells; use a map of more "
            "regions or fewer parts"
        )
    part = partition(weights, list(fractions.values()), seed)
    return np.array([PARTS[name] for name in fractions], dtype=np.uint8)[part]


def _named(regions: RegionMap, test: Any, val: Any) -> NDArray[np.uint8]:
    of_region = np.full(regions.ids.size, TRAIN, dtype=np.uint8)
    for argument, wanted in (("test", test), ("val", val)):
        for place in regions.places(argument, wanted):
            if of_region[place] != TRAIN:
                raise InvalidValueError(
                    f"region {regions.ids[place].item()!r} is named twice in test={test!r} and "
                    f"val={val!r}; a region has one part"
                )
            of_region[place] = PARTS[argument]
    if not (of_region == PARTS["test"]).any():
        raise EmptyPartError(f"test={test!r} names no region; name one or more")
    return of_region


def _shares(
    labels: NDArray[np.uint8], cells: NDArray[np.int64], parts: Sequence[str] | None
) -> dict[str, float]:
    """Share of the valid cells of each part; none may be empty."""
    wanted = parts or [p for p, code in PARTS.items() if p == "train" or (labels == code).any()]
    held = {part: int(cells[labels == PARTS[part]].sum()) for part in wanted}
    if empty := [part for part, n in held.items() if not n]:
        raise EmptyPartError(
            f"the {' and the '.join(empty)} part would hold no valid cell; name other regions, or "
            "take cells without a region into train with background='train'"
        )
    return {part: n / sum(held.values()) for part, n in held.items()}


def _note(regions: RegionMap, of_region: NDArray[np.uint8]) -> str:
    """Say in words which regions are left out."""
    said = []
    for part in ("test", "val"):
        ids = [str(id) for id in regions.ids[of_region == PARTS[part]].tolist()]
        if ids:
            more = f" and {len(ids) - 30} more" if len(ids) > 30 else ""
            said.append(f"{part}: {', '.join(ids[:30])}{more}")
    return f"regions of {regions.called}, {'; '.join(said)}"


def check_recipe_size(plan: SplitPlan, called: str) -> None:
    """Refuse a plan whose recipe is too long for an attribute."""
    size = len(plan.to_json())
    if size > MAX_RECIPE_BYTES:
        raise InvalidValueError(
            f"the map {called!r} takes {math.ceil(size / 2**20)} MiB in the recipe, which may "
            f"take {MAX_RECIPE_BYTES >> 20}; use a coarser map, or one without dims along which "
            "it hardly changes"
        )
