"""Layout of a label: profiles and runs of its parts, separation of test cells from train.

Labels consist of boxes within which no label changes, bounded by the runs along each dim. Distances
are measured from sampled test cells to whole boxes, so their cost depends on the number of boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.separation import nearest_box, run_lengths
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, PARTS, TRAIN
from ml4cube.splits.cube import CubeView
from ml4cube.splits.validity import slabs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Most boxes of equal label that are examined at once, and windows into a label with more boxes.
_BOXES_AT_MOST = 40_000
_WINDOWS = 4
#: Test cells, or locations, that are sampled.
SAMPLE = 1000


@dataclass(frozen=True, eq=False)
class Layout:
    """Summary of a label, made in one pass over slabs of bounded size."""

    label: xr.DataArray
    # Number of cells of each code; cells without a label (NaN) count as excluded.
    counts: dict[int, int]
    # For each code and dim, which positions hold a cell of the code.
    profiles: dict[tuple[int, str], Bools]
    # For each code, which cells of the map have the code at any index of the other dims.
    maps: dict[int, xr.DataArray]
    # First position of each run along each dim within which no label changes.
    run_starts: dict[str, Ints]

    @classmethod
    def of(cls, label: xr.DataArray, map_dims: tuple[str, ...]) -> Layout:
        """Summarise a label."""
        bare = xr.DataArray(label.variable).transpose(*sorted(map(str, label.dims)))
        sizes = {str(dim): n for dim, n in bare.sizes.items()}
        layout = cls._without_cells(bare, map_dims)
        changes = {dim: np.zeros(n, dtype=bool) for dim, n in sizes.items()}
        for box in slabs(sizes):
            # Overlap the previous slab by one cell, to find changes between slabs.
            wide_box = {dim: slice(max(s.start - 1, 0), s.stop) for dim, s in box.items()}
            wide = bare.isel(wide_box).compute().fillna(EXCLUDED)
            _mark_changes(changes, wide, wide_box)
            inner = {dim: slice(s.start - wide_box[dim].start, None) for dim, s in box.items()}
            layout._add_cells(wide.isel(inner), box)
        if wrong := bare.size - sum(layout.counts.values()):
            raise InvalidValueError(
                f"the label must hold 0, 1, 2 or 255, got {wrong} cells with other values"
            )
        for dim, is_change in changes.items():
            layout.run_starts[dim] = np.flatnonzero(np.r_[True, is_change[1:]])
        return layout

    @classmethod
    def _without_cells(cls, label: xr.DataArray, map_dims: tuple[str, ...]) -> Layout:
        codes = (*PARTS.values(), EXCLUDED)
        sizes = {str(dim): n for dim, n in label.sizes.items()}
        profiles = {(c, dim): np.zeros(n, dtype=bool) for c in codes for dim, n in sizes.items()}
        map_sizes = {dim: n for dim, n in sizes.items() if dim in map_dims}
        empty_map = np.zeros(tuple(map_sizes.values()), dtype=bool)
        maps = {code: xr.DataArray(empty_map.copy(), dims=tuple(map_sizes)) for code in codes}
        return cls(label, dict.fromkeys(codes, 0), profiles, maps, {})

    def _add_cells(self, labels: xr.DataArray, box: dict[str, slice]) -> None:
        """Add the cells of a box to counts, profiles and maps."""
        for code, map_of_code in self.maps.items():
            cells = labels == code
            if not cells.any():
                continue
            self.counts[code] += int(cells.sum())
            for dim in box:
                others = [other for other in box if other != dim]
                self.profiles[code, dim][box[dim]] |= cells.any(others).values
            on_map = {dim: s for dim, s in box.items() if dim in map_of_code.dims}
            map_of_code[on_map] |= cells.any([dim for dim in box if dim not in on_map])

    def cells_per_label(self, view: CubeView) -> int:
        """Return the cells of a cube with one label: all along the dims that the label lacks."""
        return math.prod(n for dim, n in view.sizes.items() if dim not in self.run_starts)

    def shared_cells(self, view: CubeView) -> dict[str, int]:
        """Count held-out cells that are also in train, at a meridian or time that occurs twice."""
        repeated: list[tuple[str, str, Any]] = []
        if circle := view.lon_circle():
            repeated += [
                ("on a meridian", circle.dim, [i, i + circle.columns])
                for i in range(self.label.sizes.get(circle.dim, 0) - circle.columns)
            ]
        for dim in self.run_starts:
            repeated += [("at a time", dim, steps) for steps in view.repeated_times(dim)]
        shared_cells: dict[str, int] = {}
        for where, dim, positions in repeated:
            labels = self.label.isel({dim: positions}).transpose(dim, ...).values
            is_shared = np.isin(labels, HELD_OUT) & (labels == TRAIN).any(axis=0)
            shared_cells[where] = shared_cells.get(where, 0) + int(is_shared.sum())
        return shared_cells

    def gap_on_one_side(self, dim: str, held_out: int) -> int | None:
        """Return the steps between train and a part wholly on one side of it, else None."""
        train, test = (np.flatnonzero(self.profiles[code, dim]) for code in (TRAIN, held_out))
        gap = int(max(test[0] - train[-1], train[0] - test[-1])) - 1
        if gap >= 0:
            return gap
        return None


def _mark_changes(changes: dict[str, Bools], labels: xr.DataArray, box: dict[str, slice]) -> None:
    """Mark the positions along each dim, after the first of the box, where some label changes."""
    for dim, s in box.items():
        changed = (labels.diff(dim) != 0).any([other for other in box if other != dim])
        changes[dim][s.start + 1 : s.stop] |= changed.values


@dataclass(frozen=True, eq=False)
class Separation:
    """Distances in cells from test cells to train cells, for a seeded sample of test cells."""

    # Fraction of test cells next to a train cell.
    touching: float
    # Median number of cells along each dim to the nearest train cell.
    cells_to_train: dict[str, float]
    # Median length of runs of test cells along each dim, in cells.
    run_length: dict[str, float]
    # Number of separate pieces of the test part, small ones counting less.
    pieces: float


def separate(
    layout: Layout,
    valued: Layout,
    view: CubeView,
    unordered: set[str],
    part: int,
) -> Separation:
    """Measure the separation of test cells from train cells, both with a value (`valued`)."""
    circle = view.lon_circle()
    columns = {}
    if circle:
        columns = {circle.dim: circle.columns}
    period, label_period = (
        [columns.get(dim, 0) for dim in of.run_starts] for of in (valued, layout)
    )
    windows = _sample_windows(valued, part)
    # With gaps inside, the runs and pieces of the test part would be shorter than its label's.
    labelled_windows = windows
    if valued is not layout:
        labelled_windows = _sample_windows(layout, part)

    # Neighbours along an unordered dim, such as scenarios, are a thousand units apart.
    unit = np.where([dim in unordered for dim in valued.run_starts], 1e-3, 1.0).tolist()
    nearest = [window.nearest(unit, period) for window in windows]
    distances, cells = (np.concatenate(values) for values in zip(*nearest, strict=True))
    lengths = np.concatenate([window.run_lengths(label_period) for window in labelled_windows])
    return Separation(
        touching=float((distances <= 1).mean()),
        cells_to_train=dict(zip(valued.run_starts, np.median(cells, axis=0).tolist(), strict=True)),
        run_length=dict(zip(layout.run_starts, np.median(lengths, axis=0).tolist(), strict=True)),
        pieces=sum(window.effective_pieces(label_period) for window in labelled_windows),
    )


def effective_pieces(part: Bools, sizes: Ints, cyclic_axes: Sequence[int] = ()) -> float:
    """Count the pieces of a part, made of boxes that share a side; small ones count less.

    This is the inverse Simpson index of their sizes: n for n equal pieces, and about 1 for a large
    piece with some small ones. `sizes` are the cells of each box. The first boxes along cyclic axes
    follow the last.
    """
    from scipy import ndimage
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    number, n = ndimage.label(part)
    for axis in cyclic_axes:
        first, last = number.take(0, axis).ravel(), number.take(-1, axis).ravel()
        meet = (first > 0) & (last > 0)
        pairs = (first[meet], last[meet])
        same = coo_array((np.ones(meet.sum()), pairs), shape=(n + 1, n + 1))
        number = connected_components(same, directed=False)[1][number]
    volume = np.bincount(number[part], weights=sizes[part])
    if part.any():
        return float(volume.sum() ** 2 / (volume**2).sum())
    return 0.0


def _sample_windows(layout: Layout, part: int) -> list[_Window]:
    """Return one window with the whole label, or a few that hold test cells if it is large."""
    rng = np.random.default_rng(0)
    chosen = _choose_windows(layout, part, rng)
    return [_Window.of(runs, layout, part, rng, SAMPLE // len(chosen)) for runs in chosen]


@dataclass(frozen=True, eq=False)
class _Window:
    """Part of a label: boxes of equal label, and test cells drawn from them."""

    # First cell and number of cells of the boxes along each dim.
    low: list[Ints]
    width: list[Ints]
    # For each box, whether it is in the test part, in the train part, and its number of cells.
    is_test: Bools
    is_train: Bools
    cells: Ints
    # Sampled test cells, (points, dims), and the index of the box of each along every dim.
    points: Ints
    point_boxes: tuple[Ints, ...]

    @classmethod
    def of(
        cls, runs: list[slice], layout: Layout, part: int, rng: np.random.Generator, n_points: int
    ) -> _Window:
        """Make the window of some runs along each dim."""
        dims = tuple(layout.run_starts)
        low, width = [], []
        for dim, some in zip(dims, runs, strict=True):
            edges = np.append(layout.run_starts[dim], layout.label.sizes[dim])
            low.append(edges[some])
            width.append(np.diff(edges[some.start : some.stop + 1]))
        labels = np.asarray(layout.label.isel(dict(zip(dims, low, strict=True))).values)
        cells = functools.reduce(np.multiply.outer, width, np.ones((), dtype=np.int64))
        test_cells = np.where(labels == part, cells, 0)
        # Sample from the middle of a window, because train cells may be just outside of it.
        in_middle = test_cells.copy()
        for axis, dim in enumerate(dims):
            n = labels.shape[axis]
            if n < layout.run_starts[dim].size:
                edge = [*range(n // 4), *range(n - n // 4, n)]
                np.moveaxis(in_middle, axis, 0)[edge] = 0
        weight = test_cells
        if in_middle.any():
            weight = in_middle
        points, boxes = _draw(weight, low, width, rng, n_points)
        return cls(low, width, labels == part, labels == TRAIN, cells, points, boxes)

    def nearest(self, unit: list[float], period: list[int]) -> tuple[NDArray[np.float64], Ints]:
        """Return the distance of each point to the nearest train box, and the cells along dims."""
        boxes = np.nonzero(self.is_train)
        low = np.stack([self.low[axis][i] for axis, i in enumerate(boxes)], axis=1)
        width = np.stack([self.width[axis][i] for axis, i in enumerate(boxes)], axis=1)
        return nearest_box(self.points, low, low + width - 1, unit, period)

    def run_lengths(self, period: list[int]) -> Ints:
        """Return the length of the run of test cells around each point, along each dim."""
        by_axis = run_lengths(self.is_test, self.width, period)
        return np.stack([lengths[self.point_boxes] for lengths in by_axis], axis=1)

    def effective_pieces(self, period: list[int]) -> float:
        """Count the pieces of the test part."""
        whole = [a for a, n in enumerate(period) if n and self.width[a].sum() >= n]
        return effective_pieces(self.is_test, self.cells, whole)


def _choose_windows(layout: Layout, part: int, rng: np.random.Generator) -> list[list[slice]]:
    """Return ranges of runs: one with all of them, or a few if there are too many."""
    counts = [starts.size for starts in layout.run_starts.values()]
    if math.prod(counts) <= _BOXES_AT_MOST:
        return [[slice(0, n) for n in counts]]
    share = (_BOXES_AT_MOST / _WINDOWS / math.prod(counts)) ** (1 / sum(n > 1 for n in counts))
    windows = []
    for _ in range(_WINDOWS):
        window = []
        for dim, starts in layout.run_starts.items():
            n = max(min(starts.size, 5), int(starts.size * share))
            test = np.flatnonzero(layout.profiles[part, dim])
            centre = int(np.searchsorted(starts, rng.choice(test), side="right")) - 1
            first = min(max(centre - n // 2, 0), starts.size - n)
            window.append(slice(first, first + n))
        windows.append(window)
    return windows


def _draw(
    weight: Ints, low: list[Ints], width: list[Ints], rng: np.random.Generator, most: int
) -> tuple[Ints, tuple[Ints, ...]]:
    """Draw at most `most` cells, as often from a box as its weight says; return their boxes too."""
    ends = weight.cumsum()
    # Each cell is drawn once at most, unless there are too many to number.
    few = ends[-1] <= 2 * SAMPLE
    number = rng.permutation(ends[-1])[:most] if few else rng.integers(ends[-1], size=most)
    box = np.searchsorted(ends, number, side="right")
    number_in_box = number - (ends - weight.ravel())[box]
    boxes = np.unravel_index(box, weight.shape)
    cells = []
    for axis, i in enumerate(boxes):
        number_in_box, offset = np.divmod(number_in_box, width[axis][i])
        cells.append(low[axis][i] + offset)
    return np.stack(cells, axis=1), boxes
