"""Layout of a label: profiles and runs of its parts, separation of test cells from train."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.separation import nearest_box, pieces, run_lengths
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, PARTS, TEST, TRAIN
from ml4cube.splits.cube import CubeView
from ml4cube.splits.validity import slabs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Most boxes of equal label that are examined at once, and number of sampled test cells.
_BOXES_AT_MOST = 40_000
_WINDOWS = 4
SAMPLE = 1000


@dataclass(frozen=True, eq=False)
class Layout:
    """Summary of a label, made in one pass over slabs of bounded size."""

    label: xr.DataArray
    # Number of cells of each code; other values count as excluded.
    counts: dict[int, int]
    # For each code and dim, which positions hold a cell of the code.
    profiles: dict[tuple[int, str], Bools]
    # For each code, which cells of the map (`map_dims`) have the code at any index of the other
    # dims.
    maps: dict[int, Bools]
    map_dims: tuple[str, ...]
    # First position of each run along each dim within which no label changes.
    starts: dict[str, Ints]
    # Number of cells with another value, such as gaps of a label made by hand.
    unknown: int = 0
    # Dims of the map, including those that the label lacks.
    wanted: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: xr.DataArray, map_dims: tuple[str, ...]) -> Layout:
        """Summarise a label."""
        dims = tuple(sorted(str(dim) for dim in label.dims))
        bare = xr.DataArray(label.variable).transpose(*dims)
        sizes = {dim: bare.sizes[dim] for dim in dims}
        on_map = tuple(dim for dim in dims if dim in map_dims)
        codes = (*PARTS.values(), EXCLUDED)
        counts = dict.fromkeys(codes, 0)
        profiles = {(c, dim): np.zeros(sizes[dim], dtype=bool) for c in codes for dim in dims}
        maps = {c: np.zeros([sizes[dim] for dim in on_map], dtype=bool) for c in codes}
        changes = {dim: np.zeros(sizes[dim], dtype=bool) for dim in dims}
        unknown = 0
        for box in slabs(sizes):
            # overlap the previous slab by one cell, to find changes between slabs
            wide = {dim: slice(max(s.start - 1, 0), s.stop) for dim, s in box.items()}
            more = np.asarray(bare.isel(wide).values)
            inner = tuple(slice(box[d].start - wide[d].start, None) for d in dims)
            known = more == EXCLUDED
            for code in PARTS.values():
                known |= more == code  # in place: slabs are large
            if not known.all():
                unknown += int((~known[inner]).sum())
                more = np.where(known, more, EXCLUDED)  # NaN differs from NaN
            del known
            values = more[inner]
            for axis, dim in enumerate(dims):
                others = tuple(a for a in range(len(dims)) if a != axis)
                changed = (np.diff(more, axis=axis) != 0).any(axis=others)
                changes[dim][wide[dim].start + 1 : box[dim].stop] |= changed
            for code in codes:
                cells = values == code
                if not cells.any():
                    continue
                counts[code] += int(cells.sum())
                for axis, dim in enumerate(dims):
                    others = tuple(a for a in range(len(dims)) if a != axis)
                    profiles[code, dim][box[dim]] |= cells.any(axis=others)
                off_map = tuple(a for a, dim in enumerate(dims) if dim not in on_map)
                maps[code][tuple(box[dim] for dim in on_map)] |= cells.any(axis=off_map)
        starts = {dim: np.flatnonzero(np.r_[True, changes[dim][1:]]) for dim in dims}
        return cls(bare, counts, profiles, maps, on_map, starts, unknown, map_dims)

    def repeated_meridian(self, view: CubeView) -> int:
        """Count the held-out cells of a repeated meridian whose other copy is train."""
        dim, columns = view.lon_turn() or ("", 0)
        if dim not in self.label.dims:
            return 0
        copies = self.label.sizes[dim] - columns
        first = np.asarray(self.label.isel({dim: slice(0, copies)}).values)
        second = np.asarray(self.label.isel({dim: slice(columns, None)}).values)
        pairs = ((first, second), (second, first))
        return sum(int(((a == TRAIN) & np.isin(b, HELD_OUT)).sum()) for a, b in pairs)

    def repeated_times(self, view: CubeView) -> int:
        """Count the held-out cells of a repeated time whose location is train at another step."""
        found = 0
        for dim in self.starts:
            for steps in view.repeated_times(dim):
                codes = self.label.isel({dim: steps}).transpose(dim, ...).values
                found += int((np.isin(codes, HELD_OUT) & (codes == TRAIN).any(axis=0)).sum())
        return found

    def gap_on_one_side(self, dim: str, held_out: int) -> int | None:
        """Return the steps between train and a part wholly on one side of it, else None."""
        if dim not in self.starts:
            return None
        train = np.flatnonzero(self.profiles[TRAIN, dim])
        held = np.flatnonzero(self.profiles[held_out, dim])
        if not train.size or not held.size:
            return None
        if held[0] > train[-1]:
            return int(held[0] - train[-1] - 1)
        if held[-1] < train[0]:
            return int(train[0] - held[-1] - 1)
        return None


@dataclass(frozen=True, eq=False)
class Separation:
    """Distances in cells from test cells to train cells, for a seeded sample of test cells."""

    # Fraction of test cells next to a train cell.
    touching: float
    # Median number of cells along each dim to the nearest train cell.
    steps: dict[str, float]
    # Fraction of test cells within the range of a train cell.
    near: float
    # Median length of runs of test cells along each dim, in cells.
    block: dict[str, float]
    # Number of separate pieces of the test part, small ones counting less.
    pieces: float


def separate(
    layout: Layout,
    known: Layout,
    view: CubeView,
    units: Callable[[bool], dict[str, float]],
    part: int = TEST,
) -> Separation:
    """Measure the separation of test cells from train cells."""
    dims = tuple(known.starts)
    cyclic, columns = view.lon_turn() or (None, 0)
    period = [columns if dim == cyclic else 0 for dim in dims]
    windows = _sample_windows(known, part)
    whole = windows if known is layout else _sample_windows(layout, part)
    # between scenarios, neighbouring indices are not near
    far = [1e-3 if np.isnan(cells) else 1.0 for cells in units(False).values()]
    beside = np.concatenate([window.nearest(far, period)[0] for window in windows]) <= 1
    unit = [1e-3 if np.isnan(cells) else cells for cells in units(bool(beside.any())).values()]
    nearest = [window.nearest(unit, period) for window in windows]
    ranges = np.concatenate([distance for distance, _ in nearest])
    steps = np.median(np.concatenate([steps for _, steps in nearest]), axis=0)
    lengths = np.median(np.concatenate([window.lengths() for window in whole]), axis=0)
    return Separation(
        float(beside.mean()),
        dict(zip(dims, steps.tolist(), strict=True)),
        float((ranges < 1).mean()),
        dict(zip(layout.starts, lengths.tolist(), strict=True)),
        float(sum(pieces(window.test, window.volume) for window in whole)),
    )


def _sample_windows(layout: Layout, part: int) -> list[_Window]:
    """Return one window with the whole label, or a few that hold test cells if it is large."""
    rng = np.random.default_rng(0)
    chosen = _choose_windows(list(layout.starts.values()), layout, part, rng)
    most = SAMPLE // len(chosen)
    windows = [_Window.at(slices, layout, part, rng, most) for slices in chosen]
    return [window for window in windows if len(window.points)]


@dataclass(frozen=True, eq=False)
class _Window:
    """Part of a label: boxes of equal label, and test cells drawn from them."""

    low: list[Ints]
    width: list[Ints]
    test: Bools
    train: Bools
    volume: NDArray[np.float64]
    points: Ints

    @classmethod
    def at(
        cls,
        window: list[slice],
        layout: Layout,
        part: int,
        rng: np.random.Generator,
        most: int,
    ) -> _Window:
        dims = tuple(layout.starts)
        runs = [layout.starts[dim] for dim in dims]
        low, width = [], []
        for starts, piece, dim in zip(runs, window, dims, strict=True):
            edges = np.append(starts, layout.label.sizes[dim])[piece.start : piece.stop + 1]
            low.append(edges[:-1])
            width.append(np.diff(edges))
        codes = np.asarray(layout.label.isel(dict(zip(dims, low, strict=True))).values)
        volume = np.ones(codes.shape)
        for axis, w in enumerate(width):
            volume = volume * w.reshape([-1 if a == axis else 1 for a in range(codes.ndim)])
        points = _draw(codes == part, volume, low, width, window, runs, rng)[:most]
        return cls(low, width, codes == part, codes == TRAIN, volume, points)

    def nearest(self, unit: list[float], period: list[int]) -> tuple[NDArray[np.float64], Ints]:
        """Return the distance of each point to the nearest train box, and the steps to it."""
        boxes = np.nonzero(self.train)
        first = np.stack([self.low[a][i] for a, i in enumerate(boxes)], axis=1)
        wide = np.stack([self.width[a][i] for a, i in enumerate(boxes)], axis=1)
        return nearest_box(self.points, first, first + wide - 1, unit, period)

    def lengths(self) -> Ints:
        """Return the length of the run of test cells around each point, along each dim."""
        where = tuple(
            np.searchsorted(low, self.points[:, a], side="right") - 1
            for a, low in enumerate(self.low)
        )
        return np.stack([run[where] for run in run_lengths(self.test, self.width)], axis=1)


def _choose_windows(
    runs: list[Ints], layout: Layout, part: int, rng: np.random.Generator
) -> list[list[slice]]:
    """Return ranges of runs: one with all of them, or a few if there are too many."""
    counts = [starts.size for starts in runs]
    if math.prod(counts) <= _BOXES_AT_MOST:
        return [[slice(0, n) for n in counts]]
    share = (_BOXES_AT_MOST / _WINDOWS / math.prod(counts)) ** (1 / sum(n > 1 for n in counts))
    windows = []
    for _ in range(_WINDOWS):
        window = []
        for starts, dim in zip(runs, layout.starts, strict=True):
            n = max(min(starts.size, 5), int(starts.size * share))
            held = np.flatnonzero(layout.profiles[part, dim])
            centre = int(np.searchsorted(starts, rng.choice(held), side="right")) - 1
            first = min(max(centre - n // 2, 0), starts.size - n)
            window.append(slice(first, first + n))
        windows.append(window)
    return windows


def _draw(
    test: Bools,
    volume: NDArray[np.float64],
    low: list[Ints],
    width: list[Ints],
    window: list[slice],
    runs: list[Ints],
    rng: np.random.Generator,
) -> Ints:
    """Return test cells in random order, each once, or a random sample of many."""
    # Sample from the middle of a window, because train cells may be just outside of it.
    weight = np.where(test, volume, 0.0)
    middle = weight.copy()
    for axis, (w, starts) in enumerate(zip(window, runs, strict=True)):
        if w.stop - w.start < starts.size:
            n = w.stop - w.start
            edge = np.ones(n, dtype=bool)
            edge[n // 4 : n - n // 4] = False
            np.moveaxis(middle, axis, 0)[edge] = 0.0
    weight = middle if middle.any() else weight
    if not weight.any():
        return np.zeros((0, test.ndim), dtype=np.int64)
    if weight.sum() <= 2 * SAMPLE:
        boxes = [
            [lows[i] + np.arange(n[i]) for lows, n, i in zip(low, width, box, strict=True)]
            for box in zip(*np.nonzero(weight), strict=True)
        ]
        each = [np.stack(np.meshgrid(*box), axis=-1).reshape(-1, len(box)) for box in boxes]
        return rng.permutation(np.concatenate(each))
    weight = (weight / weight.sum()).ravel()
    drawn = np.unravel_index(rng.choice(weight.size, 2 * SAMPLE, p=weight), test.shape)
    cells = [
        low[a][i] + (rng.random(i.size) * width[a][i]).astype(np.int64) for a, i in enumerate(drawn)
    ]
    return np.stack(cells, axis=1)
