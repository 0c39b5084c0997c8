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
from ml4cube.prediction.windows.geometry import DimWindows, Tile
from ml4cube.recipe.preparation import PreparedCells, cut, mask_cells, prepare
from ml4cube.recipe.windows import BoxWindows, Index

Flags = NDArray[np.bool_]


class TileInputs:
    """The cells of a tile's windows, and the inputs that a model is given of them."""

    def __init__(
        self, spec: PredictionSpec, reader: CubeReader, tile: Tile, dtype: np.dtype[Any]
    ) -> None:
        self._spec, self._tile, self._dtype = spec, tile, dtype
        self._box = {dim: slice(s.start, s.stop) for dim, s in tile.box.items()}
        self.shape = tuple(cells.stop - cells.start for cells in self._box.values())
        cells = self._read(reader)
        self._in_mask = None if spec.mask is None else bool_mask(cells[spec.mask])
        self._masked = mask_cells(cells, spec.features, spec.preparation.mask)
        self._gaps = {name: find_gaps(values) for name, values in self._masked.items()}

    def _read(self, reader: CubeReader) -> dict[str, NDArray[Any]]:
        """Read the box; cells after the end of the cube, which forecasts reach, repeat its last."""
        inside = {
            dim: slice(cells.start, min(cells.stop, n))
            for (dim, cells), n in zip(self._box.items(), reader.shape, strict=True)
        }
        beyond = [
            (0, cells.stop - part.stop)
            for cells, part in zip(self._box.values(), inside.values(), strict=True)
        ]
        cells = reader.read(inside)
        if any(after for _, after in beyond):
            cells = {name: np.pad(array, beyond, mode="edge") for name, array in cells.items()}
        return cells

    @cached_property
    def windows(self) -> BoxWindows:
        """Windows of inputs in the box; of a rollout with all of its steps."""
        windows, box = self._spec.windows, self._box
        dims = list(box)
        starts = (s - box[d].start for d, s in self._tile.input_starts.items())
        size = tuple(windows.dims[dim].size for dim in dims)
        order = tuple(dims.index(dim) for dim in windows.gather_order)
        return BoxWindows(self.shape, tuple(starts), size, order)

    def result_gaps(self, keep_gaps: bool) -> Flags:
        """Return which entries of the result become gaps, shape (targets, *target_box).

        An entry that belongs to several cells of a window is one if all of them are: those at the
        known steps of a forecast, or the targets of a window that becomes one number.
        """
        targets, no_gaps = self._spec.targets, np.zeros(self.shape, bool)
        outside = no_gaps if self._in_mask is None else ~self._in_mask
        if not keep_gaps:
            return np.stack([self._to_result(outside)] * len(targets))
        in_all_features: Flags = np.all(np.stack(list(self._gaps.values())), axis=0)
        gaps = (np.logical_or(outside, self._gaps.get(name, in_all_features)) for name in targets)
        return np.stack([self._to_result(flags) for flags in gaps])

    def _to_result(self, flags: Flags) -> Flags:
        """Return the flags of the box by entry of the result."""
        for axis, (dim, along) in enumerate(self._spec.windows.dims.items()):
            if along.is_apart:
                first, size = along.offset, along.target_size
                if along.is_lead:
                    first, size = 0, along.known_size
                windows = sliding_window_view(flags, size, axis=axis).all(axis=-1)
                flags = windows.take(self.windows.starts[axis] + first, axis=axis)
            else:
                first, entries = self._box[dim].start, self._tile.target_box[dim]
                inside = slice(entries.start - first, entries.stop - first)
                flags = flags[(*[slice(None)] * axis, inside)]
        return flags

    def batch(self, index: Index) -> NDArray[Any]:
        """Return the inputs of some windows, shape (windows, channels, *window)."""
        if self._spec.callback is not None:
            self._refuse_filled(index)
        channels, prepared = self._prepared
        x = self.windows.cut(channels, index)
        for name in prepared.by_window:
            unknown = self._later if name in self._predicted_gappy else None
            x[:, self._spec.features.index(name)] = cut(
                prepared, name, self.windows, index, unknown
            )
        return x

    def known_gaps(self, index: Index) -> Flags:
        """Return the cells of windows that are gaps at all known steps, by target and call.

        Shape (windows, targets, *window with as many steps as the results of all calls).
        """
        no_gaps = np.zeros(self.shape, bool)
        gaps = np.stack([self._gaps.get(name, no_gaps) for name in self._spec.targets])
        axis, along = self._lead_axis(2)
        known = (*[slice(None)] * axis, slice(0, along.known_size))
        always = self.windows.cut(gaps, index)[known].all(axis=axis, keepdims=True)
        return np.repeat(always, along.target_size, axis=axis)

    def _lead_axis(self, first: int) -> tuple[int, DimWindows]:
        """Return the axis of the lead time in arrays whose window begins at axis `first`."""
        windows = self._spec.windows
        assert windows.lead_dim is not None
        return first + windows.gather_order.index(windows.lead_dim), windows.dims[windows.lead_dim]

    @property
    def _later(self) -> tuple[slice, ...]:
        """Cells of a window that are not known when a forecast starts."""
        axis, along = self._lead_axis(0)
        return (*[slice(None)] * axis, slice(along.known_size, None))

    @cached_property
    def _predicted_gappy(self) -> set[str]:
        """Features with gaps that a rollout predicts; what the cube has later must not be seen."""
        if self._spec.windows.rollout == 1:
            return set()
        return {
            name for name in self._spec.targets if name in self._gaps and self._gaps[name].any()
        }

    @cached_property
    def _prepared(self) -> tuple[NDArray[Any], PreparedCells]:
        """Inputs in every cell of the box, shape (channels, *box), and as `cut` takes them."""
        spec = self._spec
        channels = np.empty((len(spec.channels), *self.shape), self._dtype)
        out = dict(zip(spec.features, channels, strict=False))
        by_window = set(self._predicted_gappy)
        for name, fill in spec.preparation.fills.items():
            if fill.needs_window and self._gaps[name].any():
                by_window.add(name)
        prepared = prepare(self._masked, self._box, spec.preparation, out, by_window)
        tables = spec.tables.values()
        for channel, table in zip(channels[len(spec.features) :], tables, strict=True):
            of_dim = [-1 if dim == table.dim else 1 for dim in self._box]
            channel[...] = table.values[self._box[table.dim]].reshape(of_dim)
        return channels, prepared

    def _refuse_filled(self, index: Index) -> None:
        """Refuse gaps that training filled before a callback, maybe in other units.

        A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
        """
        for name, fill in self._spec.preparation.fills.items():
            gaps = self.windows.cut_one(self._gaps[name], index)
            if name in self._predicted_gappy:
                axis, along = self._lead_axis(1)
                gaps = np.moveaxis(gaps, axis, 1)[:, : along.known_size]
            gaps = gaps.reshape(len(gaps), -1)
            refused = gaps.all(axis=1) if fill.needs_window else gaps
            if refused.any():
                raise InvalidValueError(
                    f"{name!r} has gaps, which training filled ({fill.method!r}) before the "
                    f"callback {self._spec.callback!r}; fill them in ds before you apply the "
                    "callback to it, and give mask= to make them gaps again"
                )
