"""Windows over a cube, and the entries of the result that they give.

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
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.recipe.roles import DimLead
from ml4cube.recipe.windows import BoxWindows, Index, Ints
from ml4cube.training.inputs.rollout import Rollout

# Least strides of a block along an overlapping axis, so that few windows are computed twice.
_FEWEST_STRIDES = 4


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
    shared: int = 0
    # Cells at a window's end that are not known when a forecast starts, except for forcings.
    n_later: int = 0
    # Whether the targets have a lead time.
    is_lead: bool = False
    # Whether a window gives one value, for no cell in particular.
    is_single: bool = False

    @classmethod
    def covering(cls, cells: int, lead: DimLead, shared: int) -> DimWindows:
        """Return windows whose targets lie side by side, but for some `shared` cells.

        The last one is shifted inward, so that all are whole.
        """
        last = cells - lead.input_size
        regular = np.arange(0, last + 1, lead.target_size - shared, dtype=np.intp)
        starts = regular if regular[-1] == last else np.append(regular, last)
        return cls(cells, lead.input_size, starts, lead.offset, lead.target_size, shared)

    @classmethod
    def starting(cls, cells: int, lead: DimLead, inits: Ints, rollout: int) -> DimWindows:
        """Return windows of forecasts, by the last steps of their inputs."""
        later, starts = (rollout - 1) * lead.target_size, inits - (lead.input_size - 1)
        size, target_size = lead.input_size + later, lead.target_size + later
        return cls(cells, size, starts, lead.offset, target_size, n_later=later, is_lead=True)

    @property
    def cells_beyond(self) -> int:
        """Cells by which the last targets extend past the end of the cube."""
        return int(self.starts[-1]) + self.offset + self.target_size - self.cells

    @property
    def is_per_window(self) -> bool:
        """Whether every window has entries of its own in the result."""
        return self.is_lead or self.is_single

    @property
    def known_size(self) -> int:
        """Cells of a window that are known when a forecast starts."""
        return self.size - self.n_later

    def target_cells(self, entries: slice) -> Ints:
        """Return the cell of the cube, of several the first one, of entries of the result."""
        if self.is_per_window:
            return self.starts[entries] + self.offset
        return np.arange(entries.start, entries.stop)


@dataclass(frozen=True, eq=False)
class ResultAxis:
    """One axis of the result, and the entries along it that windows have."""

    name: str
    # Dim of the windows; None for lead times, which are the same in all windows.
    dim: str | None
    # Entries of the result.
    length: int
    # First entry of every window, ascending.
    first: Ints
    # Entries of a window, and those that neighbouring windows share.
    size: int
    shared: int = 0

    @classmethod
    def of(cls, dim: str, windows: DimWindows) -> list[ResultAxis]:
        """Return the axes for a dim of the cube: two for one with a lead time."""
        if not windows.is_per_window:
            first = windows.starts + windows.offset
            return [cls(dim, dim, windows.cells, first, windows.target_size, windows.shared)]
        count = len(windows.starts)
        numbers = np.arange(count)
        if not windows.is_lead:
            return [cls(dim, dim, count, numbers, 1)]
        leads = windows.target_size
        return [
            cls(INIT, dim, count, numbers, 1),
            cls(LEAD, None, leads, np.zeros(1, np.intp), leads),
        ]

    @property
    def stride(self) -> int:
        """Entries from a window to the next one, except the last."""
        return self.size - self.shared

    @property
    def has_overlaps(self) -> bool:
        """Whether an entry belongs to several windows, such as the shifted last."""
        return bool((np.diff(self.first) < self.size).any())

    def reaching(self, entries: slice) -> Ints:
        """Return the windows that have some of the entries."""
        return np.flatnonzero(
            (self.first < entries.stop) & (self.first + self.size > entries.start)
        )


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows over a cube: those of every dim, in the cube's order."""

    dims: Mapping[str, DimWindows]
    # Dims of a window of inputs and of targets, in the model's order; along others it has one cell.
    input_order: tuple[str, ...]
    target_order: tuple[str, ...]
    # Coordinates of the cube, along a lead time with the dates of forecasts beyond its end.
    coords: Mapping[str, xr.Variable]
    # Calls of the model for one forecast, and how each gets its inputs from the one before.
    rollout: int = 1
    feedback: Rollout | None = None

    @cached_property
    def axes(self) -> tuple[ResultAxis, ...]:
        """Axes of the result: start and lead come first."""
        axes: list[ResultAxis] = []
        for dim, windows in self.dims.items():
            of_dim = ResultAxis.of(dim, windows)
            axes = of_dim + axes if windows.is_lead else axes + of_dim
        return tuple(axes)

    @property
    def lead_dim(self) -> str | None:
        """The dim along which targets have a lead time."""
        return next((dim for dim, windows in self.dims.items() if windows.is_lead), None)

    @property
    def n_leads(self) -> int:
        """Number of lead times; 0 without."""
        return 0 if self.lead_dim is None else self.dims[self.lead_dim].target_size

    @property
    def input_window(self) -> dict[str, int]:
        """Cells of a window of inputs in one call of the model, in its order."""
        return {dim: self.dims[dim].known_size for dim in self.input_order}

    @property
    def target_window(self) -> dict[str, int]:
        """Cells of a window of targets in one call of the model, in its order."""
        window = {dim: self.dims[dim].target_size for dim in self.target_order}
        if self.lead_dim in window:
            window[self.lead_dim] //= self.rollout
        return window

    @property
    def gather_order(self) -> tuple[str, ...]:
        """Dims of a window of inputs with the steps of all calls of the model."""
        return self._with_lead(self.input_order)

    @property
    def result_order(self) -> tuple[str, ...]:
        """Axes of the result along which a window has several entries, from all calls."""
        names = {self.lead_dim: LEAD}
        return tuple(names.get(dim, dim) for dim in self._with_lead(self.target_order))

    def _with_lead(self, order: tuple[str, ...]) -> tuple[str, ...]:
        """Add the dim of the lead time, which windows of one step may lack, to those of several."""
        if self.feedback is None or self.lead_dim is None or self.lead_dim in order:
            return order
        position = self.feedback.axis - 2  # after samples and channels
        return (*order[:position], self.lead_dim, *order[position:])

    @property
    def result_shape(self) -> dict[str, int]:
        """Entries of the result along each of its axes."""
        return {axis.name: axis.length for axis in self.axes}

    @property
    def unused_dims(self) -> tuple[str, ...]:
        """Dims with one entry in the result, for the only window, which the result drops."""
        return tuple(d for d, w in self.dims.items() if w.is_single and len(w.starts) == 1)

    @property
    def lost_dims(self) -> set[str]:
        """Dims of the cube that the result lacks, or has with other entries."""
        return {dim for dim, windows in self.dims.items() if windows.is_per_window}

    def single(self, dims: Collection[str]) -> Windows:
        """Return windows whose result has one entry per window along some dims."""
        changed = {dim: replace(self.dims[dim], is_single=True) for dim in dims}
        return replace(self, dims={**self.dims, **changed})

    def collapsed(self, dims: Collection[str]) -> Windows:
        """Return windows whose results lack the axes of some dims."""
        several = [dim for dim in dims if self.target_window[dim] > 1]
        order = tuple(dim for dim in self.target_order if dim not in dims)
        return replace(self.single(several), target_order=order)

    def target_cells(self, entries: Mapping[str, slice]) -> dict[str, Ints]:
        """Return the cell of the cube of some entries of the result, along each of its dims.

        The arrays broadcast to the axes of the result.
        """
        cells: dict[str, Ints] = {}
        last = len(self.axes) - 1
        for position, axis in enumerate(self.axes):
            shape = (-1, *[1] * (last - position))
            if axis.dim is not None:
                cells[axis.dim] = self.dims[axis.dim].target_cells(entries[axis.name])
                cells[axis.dim] = cells[axis.dim].reshape(shape)
            elif self.lead_dim is not None:
                cells[self.lead_dim] = cells[self.lead_dim] + np.arange(axis.length).reshape(shape)
        return cells

    def block_size(self, chunks: Mapping[str, int], most_entries: int) -> dict[str, int]:
        """Choose blocks of whole strides that follow the chunks and, if possible, fit.

        A block that is too large is halved along the axis with the most strides above the fewest.
        A smaller one is doubled while it fits, first along the last axes, in which cells lie side
        by side.
        """
        shape = self.result_shape
        stride = {axis.name: axis.stride for axis in self.axes}
        fewest = dict.fromkeys(shape, 1)
        fewest |= {axis.name: _FEWEST_STRIDES for axis in self.axes if axis.shared}
        n_strides = {a: max(-(-chunks.get(a, 1) // stride[a]), fewest[a]) for a in shape}

        def size() -> dict[str, int]:
            return {a: min(n_strides[a] * stride[a], n) for a, n in shape.items()}

        while math.prod(size().values()) > most_entries:
            largest = max(n_strides, key=lambda a: n_strides[a] / fewest[a])
            if n_strides[largest] <= fewest[largest]:
                break
            n_strides[largest] = max(n_strides[largest] // 2, fewest[largest])
        for axis in reversed(self.axes):
            if self._leaves_gaps(axis):
                continue
            while (
                size()[axis.name] < axis.length and 2 * math.prod(size().values()) <= most_entries
            ):
                n_strides[axis.name] *= 2
        return size()

    def _leaves_gaps(self, axis: ResultAxis) -> bool:
        """Whether cells between windows are of no use, all of which a block reads."""
        windows = self.dims.get(axis.dim or "")
        if windows is None or not windows.is_per_window:
            return False
        return bool((np.diff(windows.starts) > windows.size).any())


@dataclass(frozen=True)
class Tile:
    """All windows with entries in one block of the result."""

    windows: Windows
    block: Block

    @cached_property
    def chosen(self) -> dict[str, Ints]:
        """Windows of the tile along each dim of the cube."""
        entries = self.block.slices
        reaching = {axis.dim: axis.reaching(entries[axis.name]) for axis in self.windows.axes}
        return {dim: reaching[dim] for dim in self.windows.dims}

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows along each dim of the cube."""
        return tuple(len(chosen) for chosen in self.chosen.values())

    @property
    def is_empty(self) -> bool:
        """Whether no window has an entry in the block."""
        return 0 in self.counts

    @cached_property
    def box(self) -> dict[str, slice]:
        """Cells of the cube that the windows cover."""
        box = {}
        for dim, windows in self.windows.dims.items():
            starts = windows.starts[self.chosen[dim]]
            box[dim] = slice(int(starts[0]), int(starts[-1]) + windows.size)
        return box

    @property
    def cells_read(self) -> dict[str, slice]:
        """Cells of `box` that the cube has; forecasts reach beyond its end."""
        if self.is_empty:
            return dict.fromkeys(self.windows.dims, slice(0, 0))
        dims = self.windows.dims
        return {
            d: slice(cells.start, min(cells.stop, dims[d].cells)) for d, cells in self.box.items()
        }

    @cached_property
    def inputs(self) -> BoxWindows:
        """Windows of inputs in `box`; of a rollout with all of its steps."""
        dims, box = self.windows.dims, self.box
        shape = tuple(cells.stop - cells.start for cells in box.values())
        starts = tuple(dims[dim].starts[self.chosen[dim]] - box[dim].start for dim in dims)
        size = tuple(windows.size for windows in dims.values())
        order = tuple(list(dims).index(dim) for dim in self.windows.gather_order)
        return BoxWindows(shape, starts, size, order)

    @cached_property
    def _first(self) -> dict[str, Ints]:
        """First entry of the windows along each axis of the result."""
        first = {axis.name: axis.first for axis in self.windows.axes}
        for axis in self.windows.axes:
            if axis.dim is not None:
                first[axis.name] = axis.first[self.chosen[axis.dim]]
        return first

    @cached_property
    def result_box(self) -> dict[str, slice]:
        """Entries of the result that the windows and the block cover."""
        box = {}
        for axis, entries in zip(self.windows.axes, self.block.slices.values(), strict=True):
            first = self._first[axis.name]
            start = first.min(initial=entries.start)
            stop = (first + axis.size).max(initial=entries.stop)
            box[axis.name] = slice(int(start), int(stop))
        return box

    @cached_property
    def results(self) -> BoxWindows:
        """Windows of results in `result_box`."""
        box, axes = self.result_box, self.windows.axes
        shape = tuple(entries.stop - entries.start for entries in box.values())
        starts = tuple(self._first[name] - entries.start for name, entries in box.items())
        order = tuple(list(box).index(name) for name in self.windows.result_order)
        return BoxWindows(shape, starts, tuple(axis.size for axis in axes), order)

    def result_index(self, index: Index) -> Index:
        """Return the numbers of windows along each axis of the result."""
        by_dim = dict(zip(self.chosen, index, strict=True))
        same = np.zeros_like(index[0])
        return tuple(by_dim.get(axis.dim or "", same) for axis in self.windows.axes)

    def in_block(self, values: NDArray[Any]) -> NDArray[Any]:
        """Cut the block out of the box of the result, of arrays (..., *box)."""
        boxes = zip(self.block.slices.values(), self.result_box.values(), strict=True)
        inner = [slice(part.start - box.start, part.stop - box.start) for part, box in boxes]
        index: Any = (..., *inner)
        in_block: NDArray[Any] = values[index]
        return in_block
