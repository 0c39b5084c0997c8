"""Windows over a cube, and the cells of the result that they give.

Along most dims the result has the cells of the cube, and windows may overlap. Along the dim of a
lead time it has two axes instead, one for the start and one for the lead, and a dim whose axis the
model's result lacks has one entry per window. Only index arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.cube.coordinates import INIT, LEAD

# Least strides of a block along an overlapping dim, so that few windows are computed twice.
_FEWEST_STRIDES = 4

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class DimWindows:
    """Windows along one dim of a cube."""

    # Cells of the cube.
    cells: int
    # Cells of a window of inputs.
    size: int
    # First cell of every window, ascending.
    starts: Ints
    # First target cell in a window, and number of target cells.
    offset: int
    target_size: int
    # Target cells that neighbouring windows share.
    overlap: int = 0
    # Cells at a window's end that are not known when a forecast starts, except for forcings.
    n_later: int = 0
    # Whether the targets of each window are kept apart: they have a lead time.
    is_lead: bool = False
    # Whether a window gives one value, for no cell in particular.
    is_single: bool = False

    @classmethod
    def covering(
        cls, cells: int, size: int, overlap: int, offset: int = 0, target_size: int | None = None
    ) -> DimWindows:
        """Return windows whose targets lie side by side, but for `overlap`.

        The last one is shifted inward, so that all are whole.
        """
        target_size = size if target_size is None else target_size
        last = cells - size
        regular = np.arange(0, last + 1, target_size - overlap, dtype=np.intp)
        starts = regular if regular[-1] == last else np.append(regular, last)
        return cls(cells, size, starts, offset, target_size, overlap)

    @property
    def stride(self) -> int:
        """Cells of the result from a window to the next one, except the last."""
        return 1 if self.is_apart else self.target_size - self.overlap

    @property
    def is_apart(self) -> bool:
        """Whether every window has entries of its own in the result."""
        return self.is_lead or self.is_single

    @property
    def length(self) -> int:
        """Entries of the result along the dim: cells, or windows."""
        return len(self.starts) if self.is_apart else self.cells

    @property
    def first_targets(self) -> Ints:
        """First entry of the result of every window."""
        return np.arange(len(self.starts)) if self.is_apart else self.starts + self.offset

    @property
    def known_size(self) -> int:
        """Cells of a window that are known when a forecast starts."""
        return self.size - self.n_later

    @property
    def result_size(self) -> int:
        """Entries of a window along the result's axis of the dim."""
        return 1 if self.is_apart else self.target_size

    @property
    def has_overlaps(self) -> bool:
        """Whether an entry of the result belongs to several windows, such as the shifted last."""
        return bool((np.diff(self.first_targets) < self.result_size).any())

    def reaching(self, entries: slice) -> Ints:
        """Return the windows with targets among some entries of the result."""
        first = self.first_targets
        return np.flatnonzero((first < entries.stop) & (first + self.result_size > entries.start))


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows over a cube: those of every dim, in the cube's order."""

    dims: Mapping[str, DimWindows]
    # Dims of a window of inputs and of targets, in the model's order; along others it has one cell.
    input_order: tuple[str, ...]
    target_order: tuple[str, ...]
    # Calls of the model for one forecast, each from the results of the one before.
    rollout: int = 1
    # Position of the dim of the lead time among those of a window with several calls.
    lead_axis: int = 0

    @property
    def lead_dim(self) -> str | None:
        """The dim along which targets have a lead time."""
        return next((dim for dim, along in self.dims.items() if along.is_lead), None)

    @property
    def input_window(self) -> dict[str, int]:
        """Cells of a window of inputs in one call of the model, in its order."""
        return {dim: self.dims[dim].known_size for dim in self.input_order}

    @property
    def target_window(self) -> dict[str, int]:
        """Cells of a window of targets in one call of the model, in its order."""
        size = {dim: self.dims[dim].target_size for dim in self.target_order}
        return {dim: n // self.rollout if self.dims[dim].is_lead else n for dim, n in size.items()}

    @property
    def gather_order(self) -> tuple[str, ...]:
        """Dims of a window of inputs with the steps of all calls of the model."""
        return self._with_lead(self.input_order)

    @property
    def result_order(self) -> tuple[str, ...]:
        """Axes of the result along which a window has several entries, from all calls."""
        order = self._with_lead(self.target_order)
        return tuple(LEAD if dim == self.lead_dim else dim for dim in order)

    def _with_lead(self, order: tuple[str, ...]) -> tuple[str, ...]:
        """Add the dim of the lead time, which windows of one step may lack, to those of several."""
        if self.rollout == 1 or self.lead_dim is None or self.lead_dim in order:
            return order
        return (*order[: self.lead_axis], self.lead_dim, *order[self.lead_axis :])

    @property
    def result_shape(self) -> dict[str, int]:
        """Entries of the result along each of its axes."""
        lengths = {dim: along.length for dim, along in self.dims.items()}
        return self.by_axis(lengths, self.n_leads)

    @property
    def n_leads(self) -> int:
        """Number of lead times; 0 without."""
        return self.dims[self.lead_dim].target_size if self.lead_dim else 0

    def by_axis(self, by_dim: Mapping[str, Any], lead: Any) -> dict[str, Any]:
        """Return what belongs to each dim by axis of the result: start and lead come first."""
        if self.lead_dim is None:
            return dict(by_dim)
        others = {dim: one for dim, one in by_dim.items() if dim != self.lead_dim}
        return {INIT: by_dim[self.lead_dim], LEAD: lead, **others}

    @property
    def unused_dims(self) -> tuple[str, ...]:
        """Dims with one entry in the result, for the only window, which the result drops."""
        return tuple(d for d, along in self.dims.items() if along.is_single and along.length == 1)

    def apart(self, dims: Collection[str]) -> Windows:
        """Return windows whose result has one entry per window along some dims."""
        changed = {
            dim: replace(along, is_single=True) if dim in dims else along
            for dim, along in self.dims.items()
        }
        return replace(self, dims=changed)

    def without(self, dims: Collection[str]) -> Windows:
        """Return windows whose results lack the axes of some dims."""
        several = [dim for dim in dims if self.target_window[dim] > 1]
        order = tuple(dim for dim in self.target_order if dim not in dims)
        return replace(self.apart(several), target_order=order)

    def block_size(self, chunks: Mapping[str, int], most_cells: int) -> dict[str, int]:
        """Choose blocks of whole strides that follow the chunks and, if possible, fit `most_cells`.

        A block that is too large is halved along the dim with the most strides above the fewest.
        A smaller one is doubled while it fits, first along the last dims, in which cells lie side
        by side.
        """
        dims = self.dims
        shape = {dim: along.length for dim, along in dims.items()}
        stride = {dim: along.stride for dim, along in dims.items()}
        fewest = {dim: _FEWEST_STRIDES if along.overlap else 1 for dim, along in dims.items()}
        n_strides = {d: max(-(-chunks.get(d, 1) // stride[d]), fewest[d]) for d in shape}

        def size() -> dict[str, int]:
            return {d: min(n_strides[d] * stride[d], n) for d, n in shape.items()}

        while math.prod(size().values()) > most_cells:
            dim_to_halve = max(n_strides, key=lambda d: n_strides[d] / fewest[d])
            if n_strides[dim_to_halve] <= fewest[dim_to_halve]:
                break
            n_strides[dim_to_halve] = max(n_strides[dim_to_halve] // 2, fewest[dim_to_halve])
        for dim in reversed(shape):
            # All cells between the first and the last window of a block are read.
            if dims[dim].is_apart and (np.diff(dims[dim].starts) > dims[dim].size).any():
                continue
            while size()[dim] < shape[dim] and 2 * math.prod(size().values()) <= most_cells:
                n_strides[dim] *= 2
        return size()


@dataclass(frozen=True)
class Tile:
    """All windows with targets in one block of the result.

    `block` has the dims of the cube; along that of the lead time it counts starts.
    """

    windows: Windows
    block: Block

    @cached_property
    def chosen(self) -> dict[str, Ints]:
        """Windows of the tile along each dim of the cube."""
        slices = self.block.slices
        return {dim: along.reaching(slices[dim]) for dim, along in self.windows.dims.items()}

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows along each dim of the cube."""
        return tuple(len(chosen) for chosen in self.chosen.values())

    @cached_property
    def input_starts(self) -> dict[str, Ints]:
        """First cell of the windows along each dim, in the cube."""
        return {dim: along.starts[self.chosen[dim]] for dim, along in self.windows.dims.items()}

    @property
    def box(self) -> dict[str, slice]:
        """Cells of the cube that the windows cover."""
        return {
            dim: slice(int(starts[0]), int(starts[-1]) + self.windows.dims[dim].size)
            for dim, starts in self.input_starts.items()
        }

    @cached_property
    def target_box(self) -> dict[str, slice]:
        """Entries of the result that the windows and the block cover, by dim of the cube."""
        found = {}
        for dim, entries in self.block.slices.items():
            along = self.windows.dims[dim]
            first = along.first_targets[self.chosen[dim]]
            start = first.min(initial=entries.start)
            stop = (first + along.result_size).max(initial=entries.stop)
            found[dim] = slice(int(start), int(stop))
        return found

    @property
    def target_starts(self) -> dict[str, Ints]:
        """First entry of the windows' targets along each dim of the cube, in `target_box`."""
        return {
            dim: along.first_targets[self.chosen[dim]] - self.target_box[dim].start
            for dim, along in self.windows.dims.items()
        }
