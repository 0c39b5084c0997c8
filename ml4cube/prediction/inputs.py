"""Inputs of a model for all windows of a tile: read, masked, filled and scaled as in training."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.missing import bool_mask, find_gaps
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.geometry import Tile
from ml4cube.recipe.preparation import Arrays, PreparedCells, cut, mask_cells, prepare
from ml4cube.recipe.windows import Index

Flags = NDArray[np.bool_]


class TileInputs:
    """The cells of a tile's windows, and the inputs that a model is given of them."""

    def __init__(
        self, spec: PredictionSpec, reader: CubeReader, tile: Tile, dtype: np.dtype[Any]
    ) -> None:
        self._spec, self._tile, self._dtype = spec, tile, dtype
        cells = _read(reader, tile)
        self._in_mask = None if spec.mask is None else bool_mask(cells[spec.mask])
        self._masked = mask_cells(cells, spec.features, spec.preparation.mask)
        self._gaps = {name: find_gaps(values) for name, values in self._masked.items()}

    def result_gaps(self, keep_gaps: bool) -> Flags:
        """Return which entries of the result become gaps, shape (targets, *box of the result).

        An entry that belongs to several cells of a window is one if all of them are: those at the
        known steps of a forecast, or the targets of a window that becomes one number.
        """
        targets = self._spec.targets
        outside: Flags = np.zeros(self._tile.inputs.box, bool)
        if self._in_mask is not None:
            outside = ~self._in_mask
        if not keep_gaps:
            return np.stack([self._to_result(outside)] * len(targets))
        in_all_features: Flags = np.all(np.stack(list(self._gaps.values())), axis=0)
        gaps = [outside | self._gaps.get(name, in_all_features) for name in targets]
        return np.stack([self._to_result(flags) for flags in gaps])

    def _to_result(self, flags: Flags) -> Flags:
        """Return flags of the cells of the box by entry of the result."""
        tile, windows = self._tile, self._spec.windows
        for position, (dim, of_dim) in enumerate(windows.dims.items()):
            if not of_dim.is_per_window:
                entries, start = tile.result_box[dim], tile.box[dim].start
                inside = slice(entries.start - start, entries.stop - start)
                flags = flags[(*[slice(None)] * position, inside)]
                continue
            first, size = of_dim.offset, of_dim.target_size
            if of_dim.is_lead:
                first, size = 0, of_dim.known_size
            are_all = sliding_window_view(flags, size, axis=position).all(axis=-1)
            flags = are_all.take(tile.inputs.starts[position] + first, axis=position)
        if windows.lead_dim is not None:
            flags = np.moveaxis(flags, list(windows.dims).index(windows.lead_dim), 0)[:, None]
        return np.broadcast_to(flags, tile.results.box)

    def batch(self, index: Index) -> NDArray[Any]:
        """Return the inputs of some windows, shape (windows, channels, *window)."""
        if self._spec.callback is not None:
            self._refuse_filled(index)
        channels, prepared = self._prepared
        windows = self._tile.inputs
        x = windows.cut(channels, index)
        for name in prepared.by_window:
            unknown = None
            if name in self._fed_back:
                unknown = self._steps(later=True)
            channel = self._spec.features.index(name)
            x[:, channel] = cut(prepared, name, windows, index, unknown)
        return x

    def always_missing(self, index: Index) -> Flags:
        """Return the cells with no value at any input step, one entry per forecast step.

        Shape (windows, targets, *window with as many steps as the results of all calls).
        """
        no_gaps = np.zeros(self._tile.inputs.box, bool)
        gaps = np.stack([self._gaps.get(name, no_gaps) for name in self._spec.targets])
        input_steps = (slice(None), slice(None), *self._steps(later=False))
        axis = len(input_steps) - 1
        at_all = self._tile.inputs.cut(gaps, index)[input_steps].all(axis=axis, keepdims=True)
        return np.repeat(at_all, self._spec.windows.n_leads, axis=axis)

    def _steps(self, *, later: bool) -> tuple[slice, ...]:
        """Return the slices of a window with its input steps, or with the later ones."""
        windows = self._spec.windows
        assert windows.lead_dim is not None
        size = windows.dims[windows.lead_dim].known_size
        steps = slice(size, None) if later else slice(size)
        return (*[slice(None)] * windows.gather_order.index(windows.lead_dim), steps)

    @cached_property
    def _fed_back(self) -> set[str]:
        """Features with gaps that a rollout predicts; what the cube has later must not be seen."""
        if self._spec.windows.rollout == 1:
            return set()
        return {
            name for name in self._spec.targets if name in self._gaps and self._gaps[name].any()
        }

    @cached_property
    def _prepared(self) -> tuple[NDArray[Any], PreparedCells]:
        """Inputs in every cell of the box, shape (channels, *box), and as `cut` takes them."""
        spec, tile = self._spec, self._tile
        channels = np.empty((len(spec.channels), *tile.inputs.box), self._dtype)
        out = dict(zip(spec.features, channels, strict=False))
        by_window = set(self._fed_back)
        for name, fill in spec.preparation.fills.items():
            if fill.needs_window and self._gaps[name].any():
                by_window.add(name)
        prepared = prepare(self._masked, tile.box, spec.preparation, out, by_window)
        tables = spec.tables.values()
        for channel, table in zip(channels[len(spec.features) :], tables, strict=True):
            last = len(tile.box) - 1 - list(tile.box).index(table.dim)
            channel[...] = table.values[tile.box[table.dim]].reshape(-1, *[1] * last)
        return channels, prepared

    def _refuse_filled(self, index: Index) -> None:
        """Refuse gaps that training filled before a callback, maybe in other units.

        A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
        """
        for name, fill in self._spec.preparation.fills.items():
            gaps = self._tile.inputs.cut_one(self._gaps[name], index)
            if name in self._fed_back:
                gaps = gaps[(slice(None), *self._steps(later=False))]
            gaps = gaps.reshape(len(gaps), -1)
            is_refused = gaps.any()
            if fill.needs_window:
                is_refused = gaps.all(axis=1).any()
            if is_refused:
                raise InvalidValueError(
                    f"{name!r} has gaps, which training filled ({fill.method!r}) before the "
                    f"callback {self._spec.callback!r}; fill them in ds before you apply the "
                    "callback to it, and give mask= to make them gaps again"
                )


def _read(reader: CubeReader, tile: Tile) -> Arrays:
    """Read the box of a tile; cells after the end of the cube repeat its last."""
    inside = tile.cells_read
    cells = reader.read(inside)
    beyond = [(0, tile.box[dim].stop - part.stop) for dim, part in inside.items()]
    if any(after for _, after in beyond):
        cells = {name: np.pad(array, beyond, mode="edge") for name, array in cells.items()}
    return cells
