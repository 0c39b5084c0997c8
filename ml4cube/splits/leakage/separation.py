"""Separation of test cells from train cells, and where they lie relative to these.

Labels consist of boxes within which no label changes, bounded by the runs along each dim. Distances
are measured from sampled test cells to whole boxes, so their cost depends on the number of boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.distance.separation import nearest_box, run_lengths
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, PARTS, TEST, TRAIN, VAL
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.splits.distances import SAMPLE, Cells, sample_of
from ml4cube.splits.label import read_recipe
from ml4cube.splits.label_layout import Bools, Ints, Layout
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.findings import Findings, listed_and, percent, rounded

# Most boxes of equal label that are examined at once, and windows into a label with more boxes.
_BOXES_AT_MOST = 40_000
_WINDOWS = 4
# A station touches train if one of its four nearest stations is train, like the cells of a grid.
_NEIGHBOURS = 4
# Test cells scattered among train are single cells among their neighbours if more than this
# fraction of them touch a train cell.
_MAX_NEAR = 0.5
# Fewer effective pieces than this are regions; this many or more are scattered among train.
_SCATTERED_PIECES = 3.5
# A label with at least this many runs along each dim is ragged: it does not consist of a few
# regions, even if it is connected, as half of all cells are when assigned one by one.
_RAGGED_RUNS = 5


def check_counts(case: Case, findings: Findings) -> None:
    """Count the cells of each part, and those that the cube has twice."""
    layout, valued, view = case.layout, case.valued, case.view
    cells_per_label = valued.cells_per_label(view)
    for part, code in {"train": TRAIN, "val": VAL, "test": TEST}.items():
        meaning = f"cells labelled {part} with a value"
        findings.row(f"{part} cells", valued.counts[code] * cells_per_label, "cells", meaning)
    excluded = layout.counts[EXCLUDED] * layout.cells_per_label(view)
    findings.row("excluded cells", excluded, "cells", "cells labelled excluded")
    if gaps := valued.counts[EXCLUDED] * cells_per_label - excluded:
        meaning = "cells of the parts that are ignored because they have no value"
        findings.row("cells without a value", gaps, "cells", meaning)
    held_out = sum(valued.counts[code] for code in HELD_OUT)
    repeated = valued.shared_cells(view)
    shared = sum(repeated.values())
    meaning = "held-out cells whose location and time are also in train, because a meridian "
    meaning += "(0 and 360) or a time occurs twice in the cube"
    status = "leak" if shared else "ok"
    findings.row("shared cells", shared * cells_per_label, "cells", meaning, 0, status)
    for where, cells in repeated.items():
        if cells:
            findings.leaks.append(
                f"{percent(cells / held_out)} of the held-out cells are {where} that occurs twice "
                "in the cube and is also in train"
            )


def check_neighbours(case: Case, findings: Findings) -> None:
    """Describe how near the test cells are to train cells along the dims that are cut."""
    part, separation = case.part, separate(case)
    gaps = _gaps_on_one_side(case)
    fraction = separation.touching
    findings.shares["touch a train cell"] = fraction
    status = "ok"
    if math.isnan(fraction):
        status = "unknown"
    elif fraction > _MAX_NEAR and not gaps and _is_scattered(case, separation):
        status = "warning"
        findings.scattered.append(
            f"{percent(fraction)} of the {part} cells touch a train cell and lie scattered among "
            "train cells, as if dealt at random, so the score holds for gaps between train cells "
            "only"
        )
    unit, meaning = f"fraction of {part} cells", "cells next to a train cell"
    findings.row("touching cells", fraction, unit, meaning, _MAX_NEAR, status)
    if case.axes.time_dim in gaps:
        meaning = f"steps between train and {part}, which is wholly on one side of it"
        name = f"gap along {case.axes.time_dim}"
        findings.row(name, gaps[case.axes.time_dim], "steps", meaning)
    for dim in case.ordered:
        meaning = f"median length of runs of {part} cells"
        findings.row(f"block along {dim}", separation.run_length[dim], "cells", meaning)
        meaning = f"median distance from {part} cells to the nearest train cell, estimated"
        findings.row(f"separation along {dim}", separation.cells_to_train[dim], "cells", meaning)
    meaning = f"separate pieces of the {part} part, weighted by size"
    findings.row("pieces", separation.pieces, "", meaning)
    recipe = case.layout.label.attrs.get(RECIPE_ATTR)
    if recipe is not None:
        meaning = "the function in the label's recipe, which it is"
        findings.row("made by", read_recipe(recipe)[1], "", meaning)
    apart = [
        f"{rounded(separation.cells_to_train[dim])} cells along {dim}"
        for dim in case.ordered
        if not math.isnan(separation.cells_to_train[dim])
    ]
    if apart:
        findings.tested = f"its {part} cells lie {listed_and(apart)} from train (medians)"


def _gaps_on_one_side(case: Case) -> dict[str | None, int]:
    """Return the steps to train along the dims along which the part is wholly on one side of it."""
    circle = case.view.lon_circle()
    gaps: dict[str | None, int] = {}
    for dim in case.ordered:
        gap = case.layout.gap_on_one_side(dim, PARTS[case.part])
        around = circle is not None and dim == circle.dim  # no longitude is on one side
        if gap is not None and not around:
            gaps[dim] = gap
    return gaps


def _is_scattered(case: Case, separation: Separation) -> bool:
    """Return whether test cells are in many pieces, or have ragged borders."""
    if case.axes.station_dim in case.cut:
        return True  # the order of stations, and so their pieces, mean nothing
    runs = math.prod(starts.size for starts in case.layout.run_starts.values())
    return separation.pieces >= _SCATTERED_PIECES or runs >= _RAGGED_RUNS ** len(case.cut)


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


def separate(case: Case) -> Separation:
    """Measure the separation of test cells from train cells, both with a value."""
    layout, valued, part = case.layout, case.valued, PARTS[case.part]
    circle = case.view.lon_circle()
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
    unit = np.where([dim in case.unordered for dim in valued.run_starts], 1e-3, 1.0).tolist()
    nearest = [window.nearest(unit, period) for window in windows]
    distances, cells = (np.concatenate(values) for values in zip(*nearest, strict=True))
    lengths = np.concatenate([window.run_lengths(label_period) for window in labelled_windows])
    touching = float((distances <= 1).mean())
    if case.axes.station_dim in case.cut:
        touching = max(touching, _stations_near_train(case.comparison.test, case.comparison.train))
    return Separation(
        touching=touching,
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


def _stations_near_train(cells: Cells, train: Cells) -> float:
    """Return the fraction of stations with a train station among their nearest stations."""
    stations, train_stations = cells.locations(), train.locations()
    labelled = np.union1d(stations, train_stations)
    if stations.size == 0 or labelled.size < 2:
        return float("nan")
    sample = sample_of(stations, SAMPLE, np.random.default_rng(0))
    count = min(_NEIGHBOURS + 1, labelled.size)
    places = cells.axes.places
    _, nearest = places.nearest(labelled, places, sample, count)
    is_other_train = np.isin(nearest, train_stations) & (nearest != sample[:, None])
    return float(is_other_train.any(axis=1).mean())
