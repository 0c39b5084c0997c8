"""Inputs of a model for all windows of a tile: read, masked, filled and scaled as in training."""

from __future__ import annotations

from collections.abc import Mapping
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
from ml4cube.prediction.blending import BoxWindows
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows import Ints, Tile

Flags = NDArray[np.bool_]


class TileInputs:
    """The cells of a tile's windows, and the inputs that a model is given of them."""

    def __init__(self, spec: PredictionSpec, reader: CubeReader, tile: Tile) -> None:
        self._spec, self._tile = spec, tile
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

        An entry that belongs to a whole window is one if all known inputs of the window are.
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
                windows = sliding_window_view(flags, along.known_size, axis=axis).all(axis=-1)
                flags = windows.take(self.windows.starts[axis], axis=axis)
            else:
                first, entries = self._box[dim].start, self._tile.target_box[dim]
                inside = slice(entries.start - first, entries.stop - first)
                flags = flags[(*[slice(None)] * axis, inside)]
        return flags

    def batch(self, index: tuple[Ints, ...]) -> NDArray[np.float64]:
        """Return the inputs of some windows, shape (windows, channels, *window)."""
        positions = self.windows.positions(index)
        channels = (*self._spec.features, *self._spec.tables)
        x = np.empty((len(positions), len(channels), positions.shape[1]))
        for channel, name in enumerate(channels):
            if name in self._filled:
                x[:, channel] = self._filled_and_scaled(name, positions)
            else:
                x[:, channel] = self._scaled[name].reshape(-1)[positions]
        return x.reshape(*x.shape[:2], *self.windows.shape)

    def known_gaps(self, index: tuple[Ints, ...]) -> Flags:
        """Return the cells of windows that are gaps at all known steps, by target and call.

        Shape (windows, targets, *window with as many steps as the results of all calls).
        """
        windows, positions = self._spec.windows, self.windows.positions(index)
        assert windows.lead_dim is not None
        axis, along = (
            1 + windows.gather_order.index(windows.lead_dim),
            windows.dims[windows.lead_dim],
        )
        known = (*[slice(None)] * axis, slice(0, along.known_size))
        no_gaps = np.zeros(self.shape, bool)
        found = []
        for name in self._spec.targets:
            gaps = self._gaps.get(name, no_gaps).reshape(-1)[positions]
            gaps = gaps.reshape(-1, *self.windows.shape)[known]
            always = np.logical_and.reduce(gaps, axis=axis, keepdims=True)
            found.append(np.repeat(always, along.target_size, axis=axis))
        return np.stack(found, axis=1)

    @cached_property
    def _filled(self) -> dict[str, str]:
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
    def _scaling(self) -> dict[str, tuple[Any, Any]]:
        """Offset and scale of each feature: numbers, or one for each cell of the box."""
        scaling = {}
        for name in self._spec.scaling.keys() & self._values.keys():
            # The values show whether any cell lacks statistics, which is refused.
            offset, scale = self._spec.scaling[name].in_box(self._box, self._values[name])
            scaling[name] = offset, scale
        return scaling

    @cached_property
    def _scaled(self) -> Mapping[str, NDArray[np.float64]]:
        """Channels that are not filled, scaled, in the shape of the box."""
        scaled = {}
        for name, values in self._values.items():
            offset, scale = self._scaling.get(name, (0.0, 1.0))
            if name not in self._filled:
                scaled[name] = scale_values(values, offset, scale, np.float64)
        for name, table in self._spec.tables.items():
            of_dim = [-1 if dim == table.dim else 1 for dim in self._box]
            values = table.values[self._box[table.dim]].reshape(of_dim)
            scaled[name] = np.broadcast_to(values, self.shape)
        return scaled

    def _filled_and_scaled(self, name: str, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the values of a feature in some windows, gaps filled as in training, scaled."""
        samples = self._fill(name, self._values[name].reshape(-1)[positions], positions)
        offset, scale = (
            np.broadcast_to(number, self.shape).reshape(-1)[positions]
            if np.ndim(number)
            else number
            for number in self._scaling.get(name, (0.0, 1.0))
        )
        return scale_values(samples, offset, scale, np.float64)

    def _fill(self, name: str, samples: NDArray[Any], positions: NDArray[np.intp]) -> NDArray[Any]:
        metadata, settings = self._spec.metadata, self._spec.store_settings
        assert metadata is not None
        method = self._filled[name]
        if settings.get("callback") is not None:
            _check_filled(name, samples, method, settings["callback"])
        ids = None
        if method == "noise":
            shape = {dim: along.cells for dim, along in self._spec.windows.dims.items()}
            ids = cell_ids(shape, self._box).reshape(-1)[positions]
        # `fill` has the statistics of train cells, before any callback; older stores lack it
        known = (metadata.fill or metadata.statistics).get(name)
        return fill_gaps(
            samples,
            method,
            train_stats=known,
            const=metadata.spec.const,
            seed=settings.get("seed", 0),
            positions=ids,
            variable=name,
        )


def _check_filled(name: str, samples: NDArray[Any], method: str, callback: str) -> None:
    """Refuse gaps that training filled before a callback, maybe in other units.

    A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
    """
    gaps = find_gaps(samples)
    if (gaps.all(axis=1) if method == "sample_mean" else gaps).any():
        raise InvalidValueError(
            f"{name!r} has gaps, which training filled ({method!r}) before the callback "
            f"{callback!r}; fill them in ds before you apply the callback to it, and give mask= to "
            "make them gaps again"
        )
