"""Find bitwise duplicates across the parts of a split in one lazy pass over the cube.

Every time step (and every index of the other outer dims) is cut into tiles of the map. Among tiles
with equal fingerprints, each held-out cell that is train in another tile is counted. A copy that
is smaller than a tile is not found. Tiles of maps with few cells may be equal by chance, so they
count as equal only in runs of several steps that are all equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.fingerprint import (
    COLUMNS,
    FIRST,
    SECOND,
    Words,
    are_informative,
    combine,
    fingerprint_columns,
)
from ml4cube.core.split_plan import HELD_OUT, TRAIN, SplitPlan
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.splits.cube import CubeView
from ml4cube.splits.distances import sample_of
from ml4cube.splits.label import read_recipe
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.findings import Findings, percent
from ml4cube.splits.tiles import Columns, sum_tiles

Ints = NDArray[np.intp]

# About the most tiles, of 40 bytes each; larger cubes get larger tiles.
_TILES_AT_MOST = 1 << 20
_TILE_CELLS = 256
_LARGEST_TILE = 1 << 16
# Blocks of a split with at least so many cells are used as tiles, large ones in equal pieces.
_SMALLEST_TILE = 16
_LONGEST_SIDE = 32
# Fields of fewer cells than this are compared as runs of steps.
_SMALL_FIELD = 24
# Most tiles with copies whose cells are compared one by one.
_TILES_COMPARED = 200


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
    # First outer dim, and the first and last position along it that hold such cells.
    span: tuple[str, int, int] | None
    # Whether most train tiles have copies within train: the variable repeats by nature (a
    # climatology, a constant field stored for each step).
    repeats: bool
    # Description of the tiles, for messages.
    tiles: str


def check_duplicates(case: Case, findings: Findings) -> None:
    """Judge copies in all variables together, and in each that does not repeat by nature."""
    copies = find_duplicates(case.view, case.layout.label, case.names)
    by_variable = {name: duplicates for name, duplicates in copies.items() if name}
    judged = [duplicates for duplicates in by_variable.values() if not duplicates.repeats]
    if copies:
        judged.append(copies.get("") or next(iter(copies.values())))
    worst = max(judged, key=lambda duplicates: duplicates.cells, default=None)
    cells, status = 0, "unknown"
    if worst is not None:
        _judge(worst, case, findings)
        cells, status = worst.cells, _status(worst, "leak")
    meaning = f"held-out cells in {findings.compared or 'tiles'} that are bitwise equal in train"
    findings.row("duplicate cells", cells, "cells", meaning, 0, status)
    if len(by_variable) < 2:
        return
    for name, duplicates in by_variable.items():
        meaning, status = "its copies", _status(duplicates, "leak")
        if duplicates.repeats:
            meaning = "the variable also repeats within train"
            status = _status(duplicates, "warning")
        findings.row(f"duplicate cells of {name}", duplicates.cells, "cells", meaning, 0, status)


def _status(duplicates: Duplicates, of_copies: str) -> str:
    if duplicates.cells:
        return of_copies
    return "ok"


def _judge(worst: Duplicates, case: Case, findings: Findings) -> None:
    """Note which fraction of the held-out cells are copies, and that they are a leak."""
    findings.compared = worst.tiles
    parts = ""
    if case.part == "test" and findings.rows["val cells"]["found"]:
        parts = " (test and val)"
    fraction = worst.cells / max(worst.held_out_cells, 1)
    findings.shares[f"bitwise copies of train{parts}"] = fraction
    if worst.cells:
        text = f"{percent(fraction)} of the held-out cells are bitwise copies of train cells"
        findings.say(text + _format_span(worst.span, case.view), "leak")


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
    by_variable = {}
    prints_of_all: Words | None = None
    for name in names:
        prints = tiling.sums(view.ds[name], fingerprint_columns, COLUMNS)
        by_variable[name] = _find(tiling, prints, labels, label)
        # Combined at once, to hold at most two tables.
        prints_of_all = prints if prints_of_all is None else combine([prints_of_all, prints])
    if prints_of_all is not None and len(names) > 1:
        by_variable[""] = _find(tiling, prints_of_all, labels, label)
    return by_variable


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
    # Steps of a run along the first outer dim; 1 if single tiles have enough cells.
    run: int

    @classmethod
    def of(cls, view: CubeView, blocks: Mapping[str, int]) -> _Tiling:
        """Choose tiles of some hundred cells, or the blocks of the split if these are smaller."""
        sizes = view.sorted_sizes
        inner = tuple(sorted(view.dims_of_map))
        outer = [dim for dim in sizes if dim not in inner]
        outer.sort(key=lambda dim: (dim != view.dim_of_time, -sizes[dim], dim))
        field_cells = math.prod(sizes[dim] for dim in inner)
        fields = math.prod(sizes[dim] for dim in outer)
        cells = min(max(_TILE_CELLS, field_cells * fields // _TILES_AT_MOST), _LARGEST_TILE)
        tile = _equal_tile_sizes({dim: sizes[dim] for dim in inner}, cells)
        # A copied block is found only if tiles begin at the same offset in it and in its copy
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
        run = {}
        if self.run > 1:
            run = {self.outer[0]: self.run}
        sides = " x ".join(f"{n} {dim}" for dim, n in {**run, **self.tile}.items())
        return f"{'runs' if run else 'tiles'} of {sides or 1} cells"

    def sums(self, array: xr.DataArray, columns: Columns, n_columns: int) -> Words:
        """Return sums of columns over each tile, in one pass: (outer..., tiles..., columns)."""
        return sum_tiles(array, self.outer, self.tile, columns, n_columns)

    def labels_of(self, label: xr.DataArray, tiles: Sequence[Ints]) -> NDArray[np.uint8]:
        """Return the labels of tiles of equal size, at an index for each axis: (tiles, cells)."""
        labels = []
        for index in zip(*tiles, strict=True):
            box: dict[Any, Any] = dict(zip(self.outer, index, strict=False))
            for dim, i in zip(self.inner, index[len(self.outer) :], strict=True):
                box[dim] = slice(i * self.tile[dim], (i + 1) * self.tile[dim])
            labels.append(label.isel(box).transpose(*self.inner).values.ravel())
        return np.stack(labels)


def _blocks_of(label: xr.DataArray) -> dict[str, int]:
    """Return the block sizes in the label's recipe; empty without one."""
    if RECIPE_ATTR not in label.attrs:
        return {}
    plan, _, _ = read_recipe(label.attrs[RECIPE_ATTR])
    if not isinstance(plan, SplitPlan):
        return {}
    return dict(zip(plan.grid.dims, plan.grid.tile, strict=True))


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
    shape = prints.shape[:-1]
    tiles_of_map = math.prod(shape[len(tiling.outer) :])
    prints = _prints_of_runs(prints, tiling.run)
    # Flat positions of the first tile of each run to compare, and of its tiles relative to that.
    first_tiles = np.flatnonzero(are_informative(prints))
    offsets = math.prod(shape[1:]) * np.arange(tiling.run)
    counts = labels.reshape(-1, labels.shape[-1])
    has_train = counts[:, _TRAIN_CELLS] > 0
    held_out_cells = counts[:, _HELD_OUT_CELLS].sum(axis=1)
    in_one_part = counts[:, :_PATTERN].max(axis=1) == counts[:, _CELLS]

    is_compared, is_repeated = np.zeros((2, len(counts)), dtype=bool)
    for offset in offsets:
        is_compared[first_tiles + offset] = True
    copied_cells = np.zeros(len(counts))
    mixed_groups = []  # with tiles of several parts, whose cells are compared one by one
    for tiles in _equal_tiles(prints.reshape(-1, COLUMNS), first_tiles, offsets):
        train, held_out = tiles[has_train[tiles]], tiles[held_out_cells[tiles] > 0]
        if train.size > 1:
            is_repeated[_repeated(train, tiles_of_map)] = True
        # If all tiles have the same cells in train, none of these is the copy of a held-out cell.
        same_pattern = (counts[tiles, _PATTERN] == counts[tiles[0], _PATTERN]).all()
        if same_pattern or not (train.size and held_out.size):
            continue
        if in_one_part[train].all() and in_one_part[held_out].all():
            copied_cells[held_out] = held_out_cells[held_out]
        else:
            mixed_groups.append(tiles)
    mixed_tiles = np.unique(np.concatenate([*mixed_groups, np.zeros(0, dtype=np.intp)]))
    cells = np.delete(copied_cells, mixed_tiles).sum()
    # Of many mixed tiles, a sample stands for all. A tile may be in several groups.
    sample = sample_of(mixed_tiles, _TILES_COMPARED, np.random.default_rng(0))
    _count_in_groups(copied_cells, mixed_groups, sample, tiling, label, shape)
    if in_sample := held_out_cells[sample].sum():
        cells += copied_cells[sample].sum() / in_sample * held_out_cells[mixed_tiles].sum()

    steps = np.flatnonzero(copied_cells.reshape(shape[0], -1).any(axis=1))
    span = None
    if steps.size and tiling.outer:
        span = (tiling.outer[0], int(steps[0]), int(steps[-1]))
    return Duplicates(
        cells=round(cells),
        held_out_cells=int(held_out_cells.sum()),
        span=span,
        repeats=bool(is_repeated.sum() > has_train[is_compared].sum() / 2),
        tiles=tiling.description,
    )


def _prints_of_runs(prints: Words, run: int) -> Words:
    """Return the fingerprints of runs of so many tiles, one beginning at each."""
    if run == 1:
        return prints
    n_runs = len(prints) - run + 1
    return combine([prints[k : k + n_runs] for k in range(run)])


def _repeated(tiles: Ints, tiles_of_map: int) -> Ints:
    """Return those of equal tiles that have another one at their location."""
    _, location, repeats = np.unique(tiles % tiles_of_map, return_inverse=True, return_counts=True)
    return tiles[repeats[location] > 1]


def _count_in_groups(
    copied_cells: NDArray[np.float64],
    groups: list[Ints],
    sample: Ints,
    tiling: _Tiling,
    label: xr.DataArray,
    shape: tuple[int, ...],
) -> None:
    """Count the copied cells of sampled tiles, and of others compared with them, cell by cell."""
    is_in_sample = np.zeros(len(copied_cells), dtype=bool)
    is_in_sample[sample] = True
    tiles_at_once = max(_LARGEST_TILE * 8 // math.prod(tiling.tile.values()), 2)
    for tiles in groups:
        if is_in_sample[tiles].any():
            compared = tiles[np.argsort(~is_in_sample[tiles], kind="stable")][:tiles_at_once]
            copies = _count_copied(tiling.labels_of(label, np.unravel_index(compared, shape)))
            copied_cells[compared] = np.maximum(copied_cells[compared], copies)


def _equal_tiles(prints: Words, first_tiles: Ints, offsets: Ints) -> Iterator[Ints]:
    """Yield groups of equal tiles: those with the same offset in runs of equal `prints`.

    `first_tiles` are the flat positions of the runs that are compared.
    """
    hashes = prints[first_tiles][:, [FIRST, SECOND]]
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    is_new = (hashes[order[1:]] != hashes[order[:-1]]).any(axis=1)
    starts = np.flatnonzero(np.r_[True, is_new])
    lengths = np.diff(starts, append=order.size)
    seen = set()  # runs overlap, so that two of them may give the same group
    for start, length in zip(starts[lengths > 1], lengths[lengths > 1], strict=True):
        for offset in offsets:
            tiles = first_tiles[order[start : start + length]] + offset
            if (key := tiles.tobytes()) not in seen:
                seen.add(key)
                yield tiles


def _count_copied(labels: NDArray[np.uint8]) -> Ints:
    """Count the held-out cells of each of some equal tiles (tiles, cells) that train elsewhere."""
    is_train_somewhere = (labels == TRAIN).any(axis=0)
    return np.asarray((np.isin(labels, HELD_OUT) & is_train_somewhere).sum(axis=1))


def _format_span(span: tuple[str, int, int] | None, view: CubeView) -> str:
    """Return the first and last position of duplicates along a dim, in brackets."""
    if span is None:
        return ""
    dim, *positions = span
    coord = view.ds[dim]  # without a coordinate, the positions
    ends = [str(coord.values[i]) for i in positions]
    if is_time(coord):
        ends = [end[:10] for end in ends]  # the day
    return f" ({dim} {' to '.join(dict.fromkeys(ends))})"
