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
    combine,
    fingerprint_columns,
    informative,
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


@dataclass(frozen=True)
class Duplicates:
    """Held-out cells that have a bitwise copy in the train part."""

    # Number of such cells in test and validation, gaps in their tiles included.
    cells: int
    # Number of all held-out cells.
    of: int
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
    labels = tiling.sums(label, _label_columns, 5)
    tables: list[Words] = []
    found = {}
    for name in names:
        table = tiling.sums(view.ds[name], fingerprint_columns, COLUMNS)
        found[name] = _find(tiling, table, labels, label)
        tables.append(table)
        if len(tables) > 1:  # combine at once, to hold at most two tables
            tables = [combine(tables)]
    if len(names) > 1:
        found[""] = _find(tiling, tables[0], labels, label)
    return found


def _label_columns(values: NDArray[Any], offsets: Any) -> Iterator[Words]:
    """Yield train, test and validation cells, a hash of their pattern in the tile, all cells."""
    for part in (TRAIN, *HELD_OUT):
        yield (values == part).astype(np.uint64)
    yield next(iter(fingerprint_columns(values, offsets)))
    yield np.ones(values.shape, dtype=np.uint64)


@dataclass(frozen=True)
class _Tiling:
    """Tiles of the inner dims, at every index of the outer dims."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    sizes: dict[str, int]
    tile: dict[str, int]
    run: int  # steps of the first outer dim that are compared together

    @classmethod
    def of(cls, view: CubeView, blocks: Mapping[str, int]) -> _Tiling:
        """Choose tiles of some hundred cells, or the blocks of the split if these are smaller."""
        sizes = view.canonical
        inner = map_dims(view)
        outer = tuple(dim for dim in sizes if dim not in inner)
        time = view.axis_of("time")
        first = str(time.dims[0]) if time is not None else None
        outer = tuple(sorted(outer, key=lambda dim: (dim != first, -sizes[dim], dim)))
        field = math.prod(sizes[dim] for dim in inner)
        fields = math.prod(sizes[dim] for dim in outer)
        cells = min(max(_TILE_CELLS, field * fields // _TILES_AT_MOST), _LARGEST_TILE)
        tile = _tile_sizes({dim: sizes[dim] for dim in inner}, cells)
        # a copied block is found only if tiles begin at the same offset in it and in its copy
        cut = {dim: n for dim, n in blocks.items() if n < sizes.get(dim, 0)}
        block = {dim: _part_of_block(cut.get(dim, 0), tile[dim]) for dim in inner}
        count = fields * math.prod(math.ceil(sizes[dim] / n) for dim, n in block.items())
        if math.prod(block.values()) >= _SMALLEST_TILE and count <= _TILES_AT_MOST:
            tile = block
        run = 1
        if outer and field < _SMALL_FIELD:
            run = min(math.ceil(_SMALL_FIELD / max(field, 1)), max(sizes[outer[0]] // 2, 1))
        return cls(outer, inner, sizes, tile, run)

    @property
    def description(self) -> str:
        """The size of the tiles, in words."""
        run = {self.outer[0]: self.run} if self.run > 1 else {}
        sides = " x ".join(f"{n} {dim}" for dim, n in {**run, **self.tile}.items())
        return f"{'runs' if run else 'tiles'} of {sides or 1} cells"

    def sums(self, array: xr.DataArray, columns: Columns, count: int) -> Words:
        """Return sums of columns over each tile, in one pass: (outer..., tiles..., columns)."""
        bare = xr.DataArray(in_chunks(array).variable).transpose(*self.outer, *self.inner)
        return sum_tiles(bare, self.tile, columns, count)

    def cells_of(self, label: xr.DataArray, tile: tuple[int, ...]) -> NDArray[np.uint8]:
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


def _tile_sizes(sizes: dict[str, int], cells: int) -> dict[str, int]:
    share = min(cells / max(math.prod(sizes.values()), 1), 1.0) ** (1 / max(len(sizes), 1))
    # tiles of about equal size
    return {dim: math.ceil(n / max(round(1 / share), 1)) for dim, n in sizes.items()}


def _part_of_block(block: int, tile: int) -> int:
    """Return the cells of a tile along a dim, which divide a block; `tile` without blocks."""
    parts = [n for n in range(4, min(block, _LONGEST_SIDE) + 1) if block % n == 0]
    usual = [n for n in parts if n <= tile]
    return usual[-1] if usual else min(parts, default=tile)


def _find(tiling: _Tiling, table: Words, labels: Words, label: xr.DataArray) -> Duplicates:
    if tiling.run > 1:
        cells, found, repeats = _equal_runs(tiling, table, labels)
    else:
        cells, found, repeats = _equal_tiles(tiling, table, labels, label)
    first = tiling.outer[0] if tiling.outer else None
    steps = tuple(sorted(set(found))) if first is not None else ()
    of = int(labels[..., 1:3].sum())
    return Duplicates(cells, of, steps, first, repeats, tiling.description)


def _groups(table: Words, good: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
    """Yield the flat positions of each group of equal tiles."""
    flat = table.reshape(-1, COLUMNS)
    rows = np.flatnonzero(good.ravel())
    order = rows[np.lexsort((flat[rows, SECOND], flat[rows, FIRST]))]
    key = flat[order][:, [FIRST, SECOND]]
    new = np.ones(order.size, dtype=bool)
    new[1:] = (key[1:] != key[:-1]).any(axis=1)
    starts = np.flatnonzero(new)
    lengths = np.diff(starts, append=order.size)
    for start, length in zip(starts[lengths > 1], lengths[lengths > 1], strict=True):
        yield order[start : start + length]


def _equal_tiles(
    tiling: _Tiling, table: Words, labels: Words, label: xr.DataArray
) -> tuple[int, list[int], bool]:
    """Return the number of copies, their first positions, and whether train repeats itself."""
    shape = table.shape[:-1]
    counts = labels.reshape(-1, 5)
    size = math.prod(tiling.tile.values()) if tiling.tile else 1
    certain, mixed, steps = 0, [], []
    repeated, fields = 0, math.prod(shape[len(tiling.outer) :])
    good = informative(table)
    for group in _groups(table, good):
        train = counts[group, 0] > 0
        held = counts[group, 1] + counts[group, 2] > 0
        same_location = np.unique(group[train] % fields, return_counts=True)[1]
        repeated += int(same_location[same_location > 1].sum())
        if not (train.any() and held.any()) or (counts[group, 3] == counts[group[0], 3]).all():
            continue
        used = train | held
        whole = counts[group, :3].max(axis=1) == counts[group, 4]
        if whole[used].all():  # every tile is in one part, so counts suffice
            certain += int(counts[group, 1:3].sum())
            steps += np.unravel_index(group[held], shape)[0].tolist()
            continue
        mixed.append(group)
    # extrapolate from a sample if there are very many
    sample = mixed
    if len(mixed) > _GROUPS_AT_MOST:
        chosen = np.random.default_rng(0).choice(len(mixed), _GROUPS_AT_MOST, replace=False)
        sample = [mixed[i] for i in chosen]
    cells = 0
    for group in sample:
        group = group[: max(_LARGEST_TILE * 8 // size, 2)]
        boxes = [
            tiling.cells_of(label, tuple(int(i) for i in np.unravel_index(tile, shape)))
            for tile in group
        ]
        trains = np.sum([box == TRAIN for box in boxes], axis=0)
        for tile, box in zip(group, boxes, strict=True):
            others = trains - (box == TRAIN)
            copies = int((np.isin(box, HELD_OUT) & (others > 0)).sum())
            if copies:
                cells += copies
                steps.append(int(np.unravel_index(tile, shape)[0]))
    cells = round(cells * len(mixed) / max(len(sample), 1))
    trained = int(((counts[:, 0] > 0) & good.ravel()).sum())
    return certain + cells, steps, repeated > trained / 2


def _equal_runs(tiling: _Tiling, table: Words, labels: Words) -> tuple[int, list[int], bool]:
    """Do the same for small fields: compare runs of steps along the first outer dim."""
    steps = table.shape[0]
    lines = table.reshape(steps, -1, COLUMNS)
    counts = labels.reshape(steps, -1, 5)
    windows = steps - tiling.run + 1
    total = np.zeros((windows, *lines.shape[1:]), dtype=np.uint64)
    for k in range(tiling.run):
        part = lines[k : k + windows]
        total[..., :KNOWN] += mix(mix(part[..., :KNOWN]) + np.uint64(k + 1))
        total[..., KNOWN:] += part[..., KNOWN:]
    copied = np.zeros(counts.shape[:2], dtype=bool)
    repeated = np.zeros(counts.shape[:2], dtype=bool)
    for group in _groups(total, informative(total)):
        starts, columns = np.unravel_index(group, total.shape[:-1])
        for k in range(tiling.run):
            here = counts[starts + k, columns]
            trains = here[:, 0] > 0
            if trains.any():
                held = here[:, 1] + here[:, 2] > 0
                copied[(starts + k)[held], columns[held]] = True
                if trains.sum() > 1:
                    repeated[(starts + k)[trains], columns[trains]] = True
    cells = int((counts[..., 1:3].sum(axis=-1) * copied).sum())
    trained = int((counts[..., 0] > 0).sum())
    return cells, np.flatnonzero(copied.any(axis=1)).tolist(), int(repeated.sum()) > trained / 2
