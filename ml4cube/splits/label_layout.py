"""Layout of a label: counts, profiles and maps of its parts, and runs within which none changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, PARTS, TRAIN
from ml4cube.splits.cube import CubeView
from ml4cube.splits.validity import slabs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


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
