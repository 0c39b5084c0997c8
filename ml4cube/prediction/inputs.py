"""Inputs of a model for all windows of a tile: read, masked, filled and scaled as in training."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import cell_ids
from ml4cube.core.missing import bool_mask, fill_gaps, find_gaps, set_gaps
from ml4cube.core.statistics import scale_values
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.blending import BoxWindows, Index
from ml4cube.prediction.windows.geometry import DimWindows, Tile

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
        self._values = {name: cells[name] for name in spec.features}
        if spec.feature_mask is not None:
            outside = ~bool_mask(cells[spec.feature_mask])
            for name, array in self._values.items():
                if array.dtype.kind == "f":
                    self._values[name] = set_gaps(array, outside)

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

    @cached_property
    def _gaps(self) -> dict[str, Flags]:
        return {name: find_gaps(values) for name, values in self._values.items()}

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
        x = self.windows.cut(self._channels, index)
        for channel, name in enumerate(self._spec.features):
            if name in self._by_window:
                x[:, channel] = self._filled_and_scaled(name, index)
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

    @cached_property
    def _fill_methods(self) -> dict[str, str]:
        """Features with gaps in the box that are filled, with the method of each."""
        metadata = self._spec.metadata
        methods = {name: metadata.spec.fill_of(name) if metadata else None for name in self._values}
        return {
            name: method
            for name, method in methods.items()
            if method is not None
            and self._values[name].dtype.kind == "f"
            and self._gaps[name].any()
        }

    @cached_property
    def _by_window(self) -> frozenset[str]:
        """Features of which every window is filled by itself, and maybe refused."""
        has_callback = self._spec.store_settings.get("callback") is not None
        methods = self._fill_methods
        filled = {n for n in methods if has_callback or methods[n] == "sample_mean"}
        return frozenset(filled | self._unknown_later)

    @cached_property
    def _unknown_later(self) -> set[str]:
        """Features with gaps that a rollout predicts; what the cube has later must not be seen."""
        if self._spec.windows.rollout == 1:
            return set()
        return {n for n in self._values if n in self._spec.targets and self._gaps[n].any()}

    @cached_property
    def _scaling(self) -> dict[str, tuple[Any, Any]]:
        """Offset and scale of each feature: numbers, or one for each cell of the box."""
        # The values show whether any cell lacks statistics, which is refused.
        return {
            name: self._spec.scaling[name].in_box(self._box, values)
            for name, values in self._values.items()
            if name in self._spec.scaling
        }

    @cached_property
    def _channels(self) -> NDArray[Any]:
        """Inputs in every cell of the box, filled and scaled: shape (channels, *box)."""
        spec = self._spec
        channels = np.empty((len(spec.channels), *self.shape), self._dtype)
        for channel, (name, values) in zip(channels, self._values.items(), strict=False):
            if name in self._fill_methods and name not in self._by_window:
                # As one sample, because every cell is filled by itself.
                values = self._fill(name, values[None], self._ids[None])[0]
            offset, scale = self._scaling.get(name, (0.0, 1.0))
            channel[...] = scale_values(values, offset, scale, self._dtype)
        for channel, table in zip(
            channels[len(spec.features) :], spec.tables.values(), strict=True
        ):
            of_dim = [-1 if dim == table.dim else 1 for dim in self._box]
            channel[...] = table.values[self._box[table.dim]].reshape(of_dim)
        return channels

    @property
    def _ids(self) -> NDArray[np.uint64]:
        """Number in the cube of each cell of the box."""
        shape = {dim: along.cells for dim, along in self._spec.windows.dims.items()}
        return cell_ids(shape, self._box)

    def _filled_and_scaled(self, name: str, index: Index) -> NDArray[Any]:
        """Return a feature in some windows, gaps filled as in training, and scaled."""

        def cut(values: NDArray[Any]) -> NDArray[Any]:
            windows: NDArray[Any] = self.windows.cut(values[None], index)[:, 0]
            return windows

        samples = cut(self._values[name])
        if name in self._unknown_later:
            axis, along = self._lead_axis(1)
            samples[(*[slice(None)] * axis, slice(along.known_size, None))] = np.nan
        if name in self._fill_methods:
            samples = self._fill(name, samples, cut(self._ids))
        offset, scale = (
            cut(np.broadcast_to(number, self.shape)) if np.ndim(number) else number
            for number in self._scaling.get(name, (0.0, 1.0))
        )
        return scale_values(samples, offset, scale, self._dtype)

    def _fill(self, name: str, samples: NDArray[Any], ids: NDArray[np.uint64]) -> NDArray[Any]:
        metadata, settings = self._spec.metadata, self._spec.store_settings
        assert metadata is not None
        method = self._fill_methods[name]
        if settings.get("callback") is not None:
            known = samples
            if name in self._unknown_later:
                axis, along = self._lead_axis(1)
                known = np.moveaxis(samples, axis, 1)[:, : along.known_size]
            _check_filled(name, known, method, settings["callback"])
        # `fill` has the statistics of train cells, before any callback; older stores lack it
        train_stats = (metadata.fill or metadata.statistics).get(name)
        return fill_gaps(
            samples,
            method,
            train_stats=train_stats,
            const=metadata.spec.const,
            seed=settings.get("seed", 0),
            positions=ids,
            variable=name,
        )


def _check_filled(name: str, samples: NDArray[Any], method: str, callback: str) -> None:
    """Refuse gaps that training filled before a callback, maybe in other units.

    A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
    """
    gaps = find_gaps(samples).reshape(len(samples), -1)
    if (gaps.all(axis=1) if method == "sample_mean" else gaps).any():
        raise InvalidValueError(
            f"{name!r} has gaps, which training filled ({method!r}) before the callback "
            f"{callback!r}; fill them in ds before you apply the callback to it, and give mask= to "
            "make them gaps again"
        )
