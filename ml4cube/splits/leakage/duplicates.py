"""Bitwise duplicates across the parts of a split, found in one lazy pass over the cube.

Every time step (and every index of the other outer dims) is cut into tiles of the map; tiles get
fingerprints, and of equal tiles each test cell whose twin trains is counted: the model knows it,
whatever lies between them. A copy that fills no tile is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
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
from ml4cube.cube.roles import RECIPE_ATTR
from ml4cube.splits.cube import CubeView, in_chunks
from ml4cube.splits.label import read_recipe

# At most about this many tiles, 40 bytes each, are held; larger cubes get larger tiles.
_TILES_AT_MOST = 1 << 20
_TILE_CELLS = 256
_LARGEST_TILE = 1 << 16
# Blocks of a split are tiles where they have at least so many cells, larger ones in equal parts.
_SMALLEST_TILE = 16
_LONGEST_SIDE = 32
# Fields of fewer cells than this are compared as runs of steps.
_SMALL_FIELD = 24
_CELLS_AT_ONCE = 1 << 18
# Groups of equal tiles with labels of their own that are looked at cell by cell.
_GROUPS_AT_MOST = 200


@dataclass(frozen=True)
class Duplicates:
    """Cells held out from training that have a bitwise twin in the train part."""

    # How many, over test and validation; gaps in such fields are counted with them.
    cells: int
    of: int
    # Positions along the first outer dim that hold some.
    steps: tuple[int, ...]
    dim: str | None
    # Whether most train tiles have twins in train, too: the variable repeats by nature (a
    # climatology, a constant field stored for each step).
    repeats: bool
    # What was compared, for messages.
    tiles: str


def find_duplicates(
    view: CubeView, label: xr.DataArray, names: Iterable[str]
) -> dict[str, Duplicates]:
    """Look for tiles of held-out cells that equal tiles of train cells, bit for bit."""
    names = [
        name
        for name in names
        if set(view.ds[name].dims) == set(view.dims) and view.ds[name].dtype.kind in "biufmM"
    ]
    if not names:
        return {}
    tiling = _Tiling.of(view, _blocks_of(label))
    on_cube = (
        label.broadcast_like(xr.DataArray(view.ds[names[0]].variable))
        if (set(label.dims) != set(view.dims))
        else label
    )
    labels = tiling.sums(on_cube, _label_columns, 5)
    tables: list[Words] = []
    found = {}
    for name in names:
        table = tiling.sums(view.ds[name], fingerprint_columns, COLUMNS)
        found[name] = _judge(tiling, table, labels, on_cube)
        tables.append(table)
        if len(tables) > 1:  # folded as they come, so that two tables are held at most
            tables = [combine(tables)]
    if len(names) > 1:
        found[""] = _judge(tiling, tables[0], labels, on_cube)
    return found


def _label_columns(values: NDArray[Any], offsets: Any) -> Iterator[Words]:
    """Train, test and validation cells, a hash of where they lie in the tile, and all cells."""
    for part in (TRAIN, *HELD_OUT):
        yield (values == part).astype(np.uint64)
    yield next(iter(fingerprint_columns(values, offsets)))
    yield np.ones(values.shape, dtype=np.uint64)


@dataclass(frozen=True)
class _Tiling:
    """Outer dims, of which every index stands alone, and inner dims, which are cut into tiles."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    sizes: dict[str, int]
    tile: dict[str, int]
    run: int  # steps of the first outer dim that are compared together

    @classmethod
    def of(cls, view: CubeView, blocks: Mapping[str, int]) -> _Tiling:
        """Tiles of some hundred cells; the blocks of the split, where they are smaller."""
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
        # copies are found where a tile begins as far into the copy as into what was copied
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
    def said(self) -> str:
        """What is compared, in words."""
        run = {self.outer[0]: self.run} if self.run > 1 else {}
        sides = " x ".join(f"{n} {dim}" for dim, n in {**run, **self.tile}.items())
        return f"{'runs' if run else 'tiles'} of {sides or 1} cells"

    def sums(
        self,
        array: xr.DataArray,
        columns: Callable[[NDArray[Any], Any], Iterator[Words]],
        count: int,
    ) -> Words:
        """Sum what each cell adds over each tile, in one pass: (outer..., tiles..., columns)."""
        bare = xr.DataArray(in_chunks(array).variable).transpose(*self.outer, *self.inner)
        places = [np.arange(self.sizes[dim], dtype=np.int64) for dim in self.inner]
        tiles = [self.tile[dim] for dim in self.inner]
        if bare.chunks is None:
            return _sum_box(np.asarray(bare.values), *places, columns, count, tiles)
        axes = tuple(range(bare.ndim))
        arguments: list[Any] = [bare.data, axes]
        pieces: dict[int, tuple[int, ...]] = {}
        owners = []
        first = len(self.outer)
        for axis, (place, tile) in enumerate(zip(places, tiles, strict=True), first):
            chunks = bare.chunks[axis]
            lazy = da.from_array(place, chunks=(chunks,))  # type: ignore[no-untyped-call]
            arguments += [lazy, (axis,)]
            ends = np.cumsum(chunks)
            parts = [place[end - n : end] // tile for end, n in zip(ends, chunks, strict=True)]
            pieces[axis] = tuple(len(_starts(part)) for part in parts)
            owners.append(np.concatenate([part[_starts(part)] for part in parts]))
        total: Words = da.blockwise(  # type: ignore[no-untyped-call]
            _sum_box_lazily,
            (*axes, bare.ndim),
            *arguments,
            columns=columns,
            count=count,
            tiles=tiles,
            new_axes={bare.ndim: count},
            adjust_chunks=pieces,
            dtype=np.uint64,
            meta=np.empty((0,) * (bare.ndim + 1), dtype=np.uint64),
        ).compute()
        for axis, owner in enumerate(owners, first):  # tiles that chunks had cut
            total = np.add.reduceat(total, _starts(owner), axis=axis)
        return total

    def cells_of(self, label: xr.DataArray, place: tuple[int, ...]) -> NDArray[np.uint8]:
        """Labels of one tile."""
        index: dict[Any, Any] = dict(zip(self.outer, place, strict=False))
        for dim, i in zip(self.inner, place[len(self.outer) :], strict=True):
            index[dim] = slice(i * self.tile[dim], (i + 1) * self.tile[dim])
        return np.asarray(label.isel(index).transpose(*self.inner).values)


def _blocks_of(label: xr.DataArray) -> dict[str, int]:
    """Cells of a block along each dim, as the label's recipe says; empty where there is none."""
    if RECIPE_ATTR not in label.attrs:
        return {}
    plan, _, _ = read_recipe(label.attrs[RECIPE_ATTR])
    if not isinstance(plan, SplitPlan):
        return {}
    return dict(zip(plan.grid.dims, plan.grid.tile, strict=True))


def map_dims(view: CubeView) -> tuple[str, ...]:
    """Dims of a field: latitude and longitude, or else the last two that are no time."""
    lat, lon = view.axis_of("lat"), view.axis_of("lon")
    if lat is not None and lon is not None:
        found = {str(lat.dims[0]), str(lon.dims[0])}
    else:
        time = view.axis_of("time")
        named = set(TIME_NAMES) if time is None else {str(time.dims[0])}
        rest = [dim for dim in view.dims if dim.lower() not in named and dim not in named]
        if len(rest) == len(view.dims) and len(rest) > 2:
            rest = rest[1:]  # nothing is known: the first dim counts fields
        found = set(rest[-2:])
    return tuple(dim for dim in view.canonical if dim in found)


def _tile_sizes(sizes: dict[str, int], cells: int) -> dict[str, int]:
    share = min(cells / max(math.prod(sizes.values()), 1), 1.0) ** (1 / max(len(sizes), 1))
    # as many equal tiles as keep to the size
    return {dim: math.ceil(n / max(round(1 / share), 1)) for dim, n in sizes.items()}


def _part_of_block(block: int, tile: int) -> int:
    """Cells of a tile along a dim that blocks are made up of; as many as usual without blocks."""
    parts = [n for n in range(4, min(block, _LONGEST_SIDE) + 1) if block % n == 0]
    usual = [n for n in parts if n <= tile]
    return usual[-1] if usual else min(parts, default=tile)


def _starts(owner: NDArray[Any]) -> NDArray[np.intp]:
    return np.flatnonzero(np.diff(owner, prepend=-1))


def _sum_box_lazily(
    values: NDArray[Any], *places: NDArray[np.int64], columns: Any, count: int, tiles: list[int]
) -> Words:
    return _sum_box(values, *places, columns, count, tiles)


def _sum_box(values: NDArray[Any], *rest: Any) -> Words:
    """Sums of one box of cells; the last axes are cut into pieces of tiles."""
    *places, columns, count, tiles = rest
    owners = [place // tile for place, tile in zip(places, tiles, strict=True)]
    offsets = [place % tile for place, tile in zip(places, tiles, strict=True)]
    outer = values.ndim - len(places)
    shape = (*values.shape[:outer], *(len(_starts(owner)) for owner in owners), count)
    result = np.zeros(shape, dtype=np.uint64)
    flat = values.reshape(-1, *values.shape[outer:])
    into = result.reshape(-1, *result.shape[outer:])
    at_once = max(_CELLS_AT_ONCE // max(math.prod(flat.shape[1:]), 1), 1)
    for start in range(0, len(flat), at_once):
        part = slice(start, start + at_once)
        for column, cells in enumerate(columns(flat[part], offsets)):
            for axis, owner in enumerate(owners, 1):
                cells = np.add.reduceat(cells, _starts(owner), axis=axis)
            into[part, ..., column] = cells
    return result


def _judge(tiling: _Tiling, table: Words, labels: Words, label: xr.DataArray) -> Duplicates:
    held_out = labels[..., 1:3].sum(axis=-1)
    of = int(held_out.sum())
    first = tiling.outer[0] if tiling.outer else None
    if tiling.run > 1:
        cells, places, repeats = _twin_runs(tiling, table, labels)
    else:
        cells, places, repeats = _twin_tiles(tiling, table, labels, label)
    steps = tuple(sorted(set(places))) if first is not None else ()
    return Duplicates(cells, of, steps, first, repeats, tiling.said)


def _groups(table: Words, good: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
    """Flat positions of tiles that are equal, group by group."""
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


def _twin_tiles(
    tiling: _Tiling, table: Words, labels: Words, label: xr.DataArray
) -> tuple[int, list[int], bool]:
    """Held-out cells with a twin in train, where they lie, and whether train repeats itself."""
    shape = table.shape[:-1]
    counts = labels.reshape(-1, 5)
    size = math.prod(tiling.tile.values()) if tiling.tile else 1
    certain, mixed, places = 0, [], []
    repeated, fields = 0, math.prod(shape[len(tiling.outer) :])
    good = informative(table)
    for group in _groups(table, good):
        train = counts[group, 0] > 0
        held = counts[group, 1] + counts[group, 2] > 0
        same_place = np.unique(group[train] % fields, return_counts=True)[1]
        repeated += int(same_place[same_place > 1].sum())
        if not (train.any() and held.any()) or (counts[group, 3] == counts[group[0], 3]).all():
            continue
        used = train | held
        whole = counts[group, :3].max(axis=1) == counts[group, 4]
        if whole[used].all():  # every tile lies in one part: nothing to look up
            certain += int(counts[group, 1:3].sum())
            places += np.unravel_index(group[held], shape)[0].tolist()
            continue
        mixed.append(group)
    # of very many, some are looked at and stand for all
    looked_at = mixed
    if len(mixed) > _GROUPS_AT_MOST:
        chosen = np.random.default_rng(0).choice(len(mixed), _GROUPS_AT_MOST, replace=False)
        looked_at = [mixed[i] for i in chosen]
    cells = 0
    for group in looked_at:
        group = group[: max(_LARGEST_TILE * 8 // size, 2)]
        boxes = [
            tiling.cells_of(label, tuple(int(i) for i in np.unravel_index(tile, shape)))
            for tile in group
        ]
        trains = np.sum([box == TRAIN for box in boxes], axis=0)
        for tile, box in zip(group, boxes, strict=True):
            others = trains - (box == TRAIN)
            twins = int((np.isin(box, HELD_OUT) & (others > 0)).sum())
            if twins:
                cells += twins
                places.append(int(np.unravel_index(tile, shape)[0]))
    cells = round(cells * len(mixed) / max(len(looked_at), 1))
    trained = int(((counts[:, 0] > 0) & good.ravel()).sum())
    return certain + cells, places, repeated > trained / 2


def _twin_runs(tiling: _Tiling, table: Words, labels: Words) -> tuple[int, list[int], bool]:
    """The same for small fields: runs of steps along the first outer dim, at any shift."""
    steps = table.shape[0]
    lines = table.reshape(steps, -1, COLUMNS)
    counts = labels.reshape(steps, -1, 5)
    windows = steps - tiling.run + 1
    total = np.zeros((windows, *lines.shape[1:]), dtype=np.uint64)
    for k in range(tiling.run):
        part = lines[k : k + windows]
        total[..., :KNOWN] += mix(mix(part[..., :KNOWN]) + np.uint64(k + 1))
        total[..., KNOWN:] += part[..., KNOWN:]
    twin = np.zeros(counts.shape[:2], dtype=bool)
    repeated = np.zeros(counts.shape[:2], dtype=bool)
    for group in _groups(total, informative(total)):
        starts, columns = np.unravel_index(group, total.shape[:-1])
        for k in range(tiling.run):
            here = counts[starts + k, columns]
            trains = here[:, 0] > 0
            if trains.any():
                held = here[:, 1] + here[:, 2] > 0
                twin[(starts + k)[held], columns[held]] = True
                if trains.sum() > 1:
                    repeated[(starts + k)[trains], columns[trains]] = True
    cells = int((counts[..., 1:3].sum(axis=-1) * twin).sum())
    trained = int((counts[..., 0] > 0).sum())
    return cells, np.flatnonzero(twin.any(axis=1)).tolist(), int(repeated.sum()) > trained / 2
