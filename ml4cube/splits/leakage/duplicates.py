"""Find bitwise duplicates across the parts of a split in one lazy pass over the cube.

Every time step (and every index of the other outer dims) is cut into tiles of the map. Among tiles
with equal fingerprints, each held-out cell that is train in another tile is counted. A copy that
is smaller than a tile is not found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.fingerprint import (
    COLUMNS,
    FIRST,
    KNOWN,
    SECOND,
    Words,
    are_informative,
    combine,
    fingerprint_columns,
    mix,
)
from ml4cube.core.split_plan import HELD_OUT, TRAIN, SplitPlan
from ml4cube.cube.coordinates import TIME_NAMES
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.splits.cube import CubeView, in_chunks
from ml4cube.splits.label import read_recipe
from ml4cube.splits.tiles import Columns, sum_tiles

# About the most tiles, of 40 bytes each; larger cubes get larger tiles.
_TILES_AT_MOST = 1 << 20
_TILE_CELLS = 256
_LARGEST_TILE = 1 << 16
# Blocks of a split with at least so many cells are used as tiles, large ones in equal pieces.
_SMALLEST_TILE = 16
_LONGEST_SIDE = 32
# Fields of fewer cells than this are compared as runs of steps.
_SMALL_FIELD = 24
# Most groups of equal tiles with mixed labels that are examined cell by cell.
_GROUPS_AT_MOST = 200


# Columns of the label's sums over tiles: cells of each part, a hash of the pattern of labels in the
# tile, all cells.
_TRAIN_CELLS, _TEST_CELLS, _VAL_CELLS, _PATTERN, _CELLS = range(5)
_HELD_OUT_CELLS = slice(_TEST_CELLS, _VAL_CELLS + 1)


@dataclass(frozen=True)
class Duplicates:
    """Held-out cells that have a bitwise copy in the train part."""

    # Number of such cells in test and validation, gaps in their tiles included.
    cells: int
    # Number of all held-out cells.
    held_out_cells: int
    # Positions along the first outer dim that hold such cells.
    steps: tuple[int, ...]
    dim: str | None
    # Whether most train tiles have copies within train: the variable repeats by nature (a
    # climatology, a constant field stored for each step).
    repeats: bool
    # Description of the tiles, for messages.
    tiles: str


def find_duplicates(
    view: CubeView, label: xr.DataArray, names: Iterable[str]
) -> dict[str, Duplicates]:
    """Find held-out cells in tiles that equal tiles with train cells; "" is all variables."""
    names = [
        name
        for name in names
        if set(view.ds[name].dims) == set(view.dims) and view.ds[name].dtype.kind in "biufmM"
    ]
    if not names:
        return {}
    tiling = _Tiling.of(view, _blocks_of(label))
    if set(label.dims) != set(view.dims):
        label = label.broadcast_like(xr.DataArray(view.ds[names[0]].variable))
    labels = tiling.sums(label, _label_columns, _CELLS + 1)
    found = {}
    prints_of_all: Words | None = None
    for name in names:
        prints = tiling.sums(view.ds[name], fingerprint_columns, COLUMNS)
        found[name] = _find(tiling, prints, labels, label)
        # at once, to hold at most two tables
        prints_of_all = prints if prints_of_all is None else combine([prints_of_all, prints])
    if prints_of_all is not None and len(names) > 1:
        found[""] = _find(tiling, prints_of_all, labels, label)
    return found


def _label_columns(values: NDArray[Any], offsets: Any) -> Iterator[Words]:
    """Yield the columns of a label's sums, in the order of their names above."""
    for part in (TRAIN, *HELD_OUT):
        yield (values == part).astype(np.uint64)
    yield next(iter(fingerprint_columns(values, offsets)))
    yield np.ones(values.shape, dtype=np.uint64)


@dataclass(frozen=True)
class _Tiling:
    """Tiles of the inner dims, at every index of the outer dims."""

    # All dims but those of the map; time first.
    outer: tuple[str, ...]
    # Dims of the map.
    inner: tuple[str, ...]
    # Cells of a tile along each inner dim.
    tile: dict[str, int]
    # Steps of the first outer dim that are compared together, because a field has few cells.
    run: int

    @classmethod
    def of(cls, view: CubeView, blocks: Mapping[str, int]) -> _Tiling:
        """Choose tiles of some hundred cells, or the blocks of the split if these are smaller."""
        sizes = view.canonical
        inner = map_dims(view)
        time = view.axis_of("time")
        time_dim = None if time is None else str(time.dims[0])
        outer = [dim for dim in sizes if dim not in inner]
        outer.sort(key=lambda dim: (dim != time_dim, -sizes[dim], dim))
        field_cells = math.prod(sizes[dim] for dim in inner)
        fields = math.prod(sizes[dim] for dim in outer)
        cells = min(max(_TILE_CELLS, field_cells * fields // _TILES_AT_MOST), _LARGEST_TILE)
        tile = _equal_tile_sizes({dim: sizes[dim] for dim in inner}, cells)
        # a copied block is found only if tiles begin at the same offset in it and in its copy
        cut = {dim: n for dim, n in blocks.items() if n < sizes.get(dim, 0)}
        in_blocks = {dim: _divisor_of_block(cut.get(dim, 0), tile[dim]) for dim in inner}
        tiles = fields * math.prod(math.ceil(sizes[dim] / n) for dim, n in in_blocks.items())
        if math.prod(in_blocks.values()) >= _SMALLEST_TILE and tiles <= _TILES_AT_MOST:
            tile = in_blocks
        run = 1
        if outer and field_cells < _SMALL_FIELD:
            run = min(math.ceil(_SMALL_FIELD / field_cells), max(sizes[outer[0]] // 2, 1))
        return cls(tuple(outer), inner, tile, run)

    @property
    def description(self) -> str:
        """The size of the tiles, in words."""
        run = {self.outer[0]: self.run} if self.run > 1 else {}
        sides = " x ".join(f"{n} {dim}" for dim, n in {**run, **self.tile}.items())
        return f"{'runs' if run else 'tiles'} of {sides or 1} cells"

    def sums(self, array: xr.DataArray, columns: Columns, n_columns: int) -> Words:
        """Return sums of columns over each tile, in one pass: (outer..., tiles..., columns)."""
        bare = xr.DataArray(in_chunks(array).variable).transpose(*self.outer, *self.inner)
        return sum_tiles(bare, self.tile, columns, n_columns)

    def labels_of(self, label: xr.DataArray, tile: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the labels of one tile."""
        index: dict[Any, Any] = dict(zip(self.outer, tile, strict=False))
        for dim, i in zip(self.inner, tile[len(self.outer) :], strict=True):
            index[dim] = slice(i * self.tile[dim], (i + 1) * self.tile[dim])
        return np.asarray(label.isel(index).transpose(*self.inner).values)


def _blocks_of(label: xr.DataArray) -> dict[str, int]:
    """Return the block sizes in the label's recipe; empty without one."""
    if RECIPE_ATTR not in label.attrs:
        return {}
    plan, _, _ = read_recipe(label.attrs[RECIPE_ATTR])
    if not isinstance(plan, SplitPlan):
        return {}
    return dict(zip(plan.grid.dims, plan.grid.tile, strict=True))


def map_dims(view: CubeView) -> tuple[str, ...]:
    """Return the dims of a map: latitude and longitude, or else the last two except time."""
    lat, lon = view.axis_of("latitude"), view.axis_of("longitude")
    if lat is not None and lon is not None:
        found = {str(lat.dims[0]), str(lon.dims[0])}
    else:
        time = view.axis_of("time")
        named = set(TIME_NAMES) if time is None else {str(time.dims[0])}
        rest = [dim for dim in view.dims if dim.lower() not in named and dim not in named]
        if len(rest) == len(view.dims) and len(rest) > 2:
            rest = rest[1:]  # without any hint, the first dim counts fields
        found = set(rest[-2:])
    return tuple(dim for dim in view.canonical if dim in found)


def _equal_tile_sizes(sizes: dict[str, int], cells: int) -> dict[str, int]:
    """Return tiles of about `cells` cells and of about equal size, which cover a field."""
    fraction = min(cells / math.prod(sizes.values()), 1.0) ** (1 / max(len(sizes), 1))
    return {dim: math.ceil(n / max(round(1 / fraction), 1)) for dim, n in sizes.items()}


def _divisor_of_block(block: int, tile: int) -> int:
    """Return the side of a tile that divides the side of a block; `tile` if there is none."""
    divisors = [n for n in range(4, min(block, _LONGEST_SIDE) + 1) if block % n == 0]
    return max((n for n in divisors if n <= tile), default=min(divisors, default=tile))


def _find(tiling: _Tiling, prints: Words, labels: Words, label: xr.DataArray) -> Duplicates:
    """Find duplicates from the fingerprints of tiles and the sums of their labels."""
    if tiling.run > 1:
        cells, steps, repeats = _equal_runs(tiling, prints, labels)
    else:
        cells, steps, repeats = _equal_tiles(tiling, prints, labels, label)
    dim = tiling.outer[0] if tiling.outer else None
    if dim is None:
        steps = []
    held_out_cells = int(labels[..., _HELD_OUT_CELLS].sum())
    found = tuple(sorted(set(steps)))
    return Duplicates(cells, held_out_cells, found, dim, repeats, tiling.description)


def _groups(prints: Words, is_informative: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
    """Yield the flat positions of each group of equal tiles."""
    hashes = prints.reshape(-1, COLUMNS)[:, [FIRST, SECOND]]
    tiles = np.flatnonzero(is_informative.ravel())
    tiles = tiles[np.lexsort((hashes[tiles, 1], hashes[tiles, 0]))]
    is_new = np.ones(tiles.size, dtype=bool)
    is_new[1:] = (hashes[tiles[1:]] != hashes[tiles[:-1]]).any(axis=1)
    starts = np.flatnonzero(is_new)
    lengths = np.diff(starts, append=tiles.size)
    for start, length in zip(starts[lengths > 1], lengths[lengths > 1], strict=True):
        yield tiles[start : start + length]


def _equal_tiles(
    tiling: _Tiling, prints: Words, labels: Words, label: xr.DataArray
) -> tuple[int, list[int], bool]:
    """Return the number of copies, their steps of the first dim, and whether train repeats."""
    shape = prints.shape[:-1]
    counts = labels.reshape(-1, labels.shape[-1])
    tiles_of_field = math.prod(shape[len(tiling.outer) :])
    cells, steps = 0, []
    repeated_tiles = 0
    mixed_groups = []
    is_informative = are_informative(prints)
    for group in _groups(prints, is_informative):
        has_train = counts[group, _TRAIN_CELLS] > 0
        has_held_out = (counts[group, _HELD_OUT_CELLS] > 0).any(axis=1)
        repeats = np.unique(group[has_train] % tiles_of_field, return_counts=True)[1]
        repeated_tiles += int(repeats[repeats > 1].sum())
        same_pattern = (counts[group, _PATTERN] == counts[group[0], _PATTERN]).all()
        if same_pattern or not (has_train.any() and has_held_out.any()):
            continue
        in_one_part = counts[group, :_PATTERN].max(axis=1) == counts[group, _CELLS]
        if in_one_part[has_train | has_held_out].all():  # counts suffice
            cells += int(counts[group, _HELD_OUT_CELLS].sum())
            steps += np.unravel_index(group[has_held_out], shape)[0].tolist()
        else:
            mixed_groups.append(group)
    # extrapolate from a sample if there are very many
    sample = mixed_groups
    if len(mixed_groups) > _GROUPS_AT_MOST:
        chosen = np.random.default_rng(0).choice(len(mixed_groups), _GROUPS_AT_MOST, replace=False)
        sample = [mixed_groups[i] for i in chosen]
    cells_in_sample = 0
    for group in sample:
        group = group[: max(_LARGEST_TILE * 8 // math.prod(tiling.tile.values()), 2)]
        indices = [tuple(int(i) for i in np.unravel_index(tile, shape)) for tile in group]
        boxes = [tiling.labels_of(label, index) for index in indices]
        n_train = np.sum([box == TRAIN for box in boxes], axis=0)
        for index, box in zip(indices, boxes, strict=True):
            is_copy = np.isin(box, HELD_OUT) & (n_train > (box == TRAIN))
            if copies := int(is_copy.sum()):
                cells_in_sample += copies
                steps.append(index[0])
    cells += round(cells_in_sample * len(mixed_groups) / max(len(sample), 1))
    train_tiles = int(((counts[:, _TRAIN_CELLS] > 0) & is_informative.ravel()).sum())
    return cells, steps, repeated_tiles > train_tiles / 2


def _equal_runs(tiling: _Tiling, prints: Words, labels: Words) -> tuple[int, list[int], bool]:
    """Do the same for small fields: compare runs of steps along the first outer dim."""
    n_steps = prints.shape[0]
    by_step = prints.reshape(n_steps, -1, COLUMNS)
    counts = labels.reshape(n_steps, -1, labels.shape[-1])
    n_runs = n_steps - tiling.run + 1
    run_prints = np.zeros((n_runs, *by_step.shape[1:]), dtype=np.uint64)
    for k in range(tiling.run):
        step = by_step[k : k + n_runs]
        run_prints[..., :KNOWN] += mix(mix(step[..., :KNOWN]) + np.uint64(k + 1))
        run_prints[..., KNOWN:] += step[..., KNOWN:]
    is_copied = np.zeros(counts.shape[:2], dtype=bool)
    is_repeated = np.zeros(counts.shape[:2], dtype=bool)
    for group in _groups(run_prints, are_informative(run_prints)):
        first_steps, columns = np.unravel_index(group, run_prints.shape[:-1])
        for k in range(tiling.run):
            steps = first_steps + k
            has_train = counts[steps, columns, _TRAIN_CELLS] > 0
            if has_train.any():
                has_held_out = (counts[steps, columns, _HELD_OUT_CELLS] > 0).any(axis=-1)
                is_copied[steps[has_held_out], columns[has_held_out]] = True
                if has_train.sum() > 1:
                    is_repeated[steps[has_train], columns[has_train]] = True
    cells = int((counts[..., _HELD_OUT_CELLS].sum(axis=-1) * is_copied).sum())
    train_tiles = int((counts[..., _TRAIN_CELLS] > 0).sum())
    copied_steps = np.flatnonzero(is_copied.any(axis=1)).tolist()
    return cells, copied_steps, int(is_repeated.sum()) > train_tiles / 2
