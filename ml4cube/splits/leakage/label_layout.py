"""Layout of a label: profiles and runs of its parts, separation of test cells from train."""

from __future__ import annotations

import math
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

# Most boxes of equal label that are examined at once, and number of sampled test cells.
_BOXES_AT_MOST = 40_000
_WINDOWS = 4
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
    starts: dict[str, Ints]

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
        shape = [sizes[dim] for dim in on_map]
        maps = {c: xr.DataArray(np.zeros(shape, dtype=bool), dims=on_map) for c in codes}
        changes = {dim: np.zeros(sizes[dim], dtype=bool) for dim in dims}
        for box in slabs(sizes):
            # overlap the previous slab by one cell, to find changes between slabs
            wide = {dim: slice(max(s.start - 1, 0), s.stop) for dim, s in box.items()}
            more = np.asarray(bare.isel(wide).values)
            inner = tuple(slice(box[d].start - wide[d].start, None) for d in dims)
            if more.dtype.kind == "f":
                more = np.nan_to_num(more, nan=EXCLUDED)
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
                maps[code][{dim: box[dim] for dim in on_map}] |= cells.any(axis=off_map)
        if wrong := bare.size - sum(counts.values()):
            raise InvalidValueError(
                f"the label must hold 0, 1, 2 or 255, got {wrong} cells with other values"
            )
        starts = {dim: np.flatnonzero(np.r_[True, changes[dim][1:]]) for dim in dims}
        return cls(bare, counts, profiles, maps, starts)

    def shared_cells(self, view: CubeView) -> dict[str, int]:
        """Count held-out cells that are also in train, at a meridian or time that occurs twice."""
        dim, columns = view.lon_circle() or ("", 0)
        repeated: list[tuple[str, str, Any]] = [
            ("on a meridian", dim, [i, i + columns])
            for i in range(self.label.sizes.get(dim, 0) - columns)
        ]
        for dim in self.starts:
            repeated += [("at a time", dim, steps) for steps in view.repeated_times(dim)]
        found: dict[str, int] = {}
        for where, dim, steps in repeated:
            codes = self.label.isel({dim: steps}).transpose(dim, ...).values
            shared = np.isin(codes, HELD_OUT) & (codes == TRAIN).any(axis=0)
            found[where] = found.get(where, 0) + int(shared.sum())
        return found

    def gap_on_one_side(self, dim: str, held_out: int) -> int | None:
        """Return the steps between train and a part wholly on one side of it, else None."""
        if dim not in self.starts:
            return None
        train, held = (np.flatnonzero(self.profiles[code, dim]) for code in (TRAIN, held_out))
        gap = int(max(held[0] - train[-1], train[0] - held[-1])) - 1
        return gap if gap >= 0 else None


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
    unordered: set[str],
    ranges: dict[str, float],
    part: int,
) -> Separation:
    """Measure the separation of test cells from train cells."""
    cyclic, columns = view.lon_circle() or (None, 0)
    period = [columns if dim == cyclic else 0 for dim in known.starts]
    windows = _sample_windows(known, part)
    whole = windows if known is layout else _sample_windows(layout, part)

    def nearest(reach: dict[str, float]) -> tuple[NDArray[np.float64], Ints]:
        # between scenarios, neighbouring indices are not near
        unit = [1e-3 if dim in unordered else reach.get(dim, 1.0) for dim in known.starts]
        found = [window.nearest(unit, period) for window in windows]
        apart, steps = (np.concatenate(values) for values in zip(*found, strict=True))
        return apart, steps

    beside = nearest({})[0] <= 1
    if not beside.any():
        # without a sill no distance is enough, but a buffer is assumed to be wide enough
        ranges = {dim: cells for dim, cells in ranges.items() if not math.isinf(cells)}
    distance, steps = nearest(ranges)
    lengths = np.median(np.concatenate([window.lengths() for window in whole]), axis=0)
    return Separation(
        float(beside.mean()),
        dict(zip(known.starts, np.median(steps, axis=0).tolist(), strict=True)),
        float((distance < 1).mean()),
        dict(zip(layout.starts, lengths.tolist(), strict=True)),
        sum(effective_pieces(window.test, window.volume) for window in whole),
    )


def effective_pieces(part: Bools, sizes: Ints) -> float:
    """Return the inverse Simpson index of the sizes of pieces; boxes that share a side are one."""
    # It is n for n equal pieces, and about 1 for a large piece with some small ones.
    from scipy import ndimage

    number, _ = ndimage.label(part)
    volume = np.bincount(number[part], weights=sizes[part])
    return float(volume.sum() ** 2 / (volume**2).sum()) if part.any() else 0.0


def _sample_windows(layout: Layout, part: int) -> list[_Window]:
    """Return one window with the whole label, or a few that hold test cells if it is large."""
    rng = np.random.default_rng(0)
    chosen = _choose_windows(layout, part, rng)
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
    volume: Ints
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
        low, width = [], []
        for dim, piece in zip(dims, window, strict=True):
            edges = np.append(layout.starts[dim], layout.label.sizes[dim])
            low.append(edges[piece])
            width.append(np.diff(edges[piece.start : piece.stop + 1]))
        codes = np.asarray(layout.label.isel(dict(zip(dims, low, strict=True))).values)
        volume = np.ones(codes.shape, dtype=np.int64)
        for w in np.ix_(*width):
            volume = volume * w
        weight = np.where(codes == part, volume, 0)
        # sample from the middle of a window, because train cells may be just outside of it
        middle = weight.copy()
        for axis, dim in enumerate(dims):
            n = codes.shape[axis]
            if n < layout.starts[dim].size:
                edge = [*range(n // 4), *range(n - n // 4, n)]
                np.moveaxis(middle, axis, 0)[edge] = 0
        points = _draw(middle if middle.any() else weight, low, width, rng, most)
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


def _choose_windows(layout: Layout, part: int, rng: np.random.Generator) -> list[list[slice]]:
    """Return ranges of runs: one with all of them, or a few if there are too many."""
    counts = [starts.size for starts in layout.starts.values()]
    if math.prod(counts) <= _BOXES_AT_MOST:
        return [[slice(0, n) for n in counts]]
    share = (_BOXES_AT_MOST / _WINDOWS / math.prod(counts)) ** (1 / sum(n > 1 for n in counts))
    windows = []
    for _ in range(_WINDOWS):
        window = []
        for dim, starts in layout.starts.items():
            n = max(min(starts.size, 5), int(starts.size * share))
            held = np.flatnonzero(layout.profiles[part, dim])
            centre = int(np.searchsorted(starts, rng.choice(held), side="right")) - 1
            first = min(max(centre - n // 2, 0), starts.size - n)
            window.append(slice(first, first + n))
        windows.append(window)
    return windows


def _draw(
    weight: Ints, low: list[Ints], width: list[Ints], rng: np.random.Generator, most: int
) -> Ints:
    """Return at most `most` random cells of boxes with the given numbers of cells."""
    ends = weight.cumsum()
    # each cell once, unless there are too many to number
    few = ends[-1] <= 2 * SAMPLE
    number = rng.permutation(ends[-1])[:most] if few else rng.integers(ends[-1], size=most)
    box = np.searchsorted(ends, number, side="right")
    rest = number - (ends - weight.ravel())[box]
    cells = []
    for axis, at in enumerate(np.unravel_index(box, weight.shape)):
        rest, inside = np.divmod(rest, width[axis][at])
        cells.append(low[axis][at] + inside)
    return np.stack(cells, axis=1)
