"""Prediction of one block of the result at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.inputs import Flags, TileInputs
from ml4cube.prediction.models import Members, Result
from ml4cube.prediction.results.finishing import finished
from ml4cube.prediction.results.layout import Expected, Layout
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.geometry import Tile
from ml4cube.recipe.placer import Placer
from ml4cube.recipe.windows import BoxWindows, Index, every_window


@dataclass(frozen=True)
class BlockPredictor:
    """A model, its inputs, and the layout of its results."""

    members: Members
    spec: PredictionSpec
    layout: Layout
    reader: CubeReader
    keep_gaps: bool
    reduce: str | None
    batch_size: int
    # The first results of the first member, by block and batch, from which the layout is known.
    first: dict[tuple[int, ...], Result] = field(default_factory=dict)

    def find_layout(self, blocks: Grid, expected: Expected) -> BlockPredictor:
        """Return a predictor with the layout of the first result, if there are not only gaps."""
        for block in map(blocks.block, range(len(blocks))):
            tile = _Tile(self, block)
            for batch, index in tile.batches():
                x = tile.inputs.batch(index)
                if self.spec.rollout is not None:
                    x = self.spec.rollout.input_of(torch.from_numpy(x), 0).numpy()
                result = self._run(x, (block.id, batch), 0)
                layout = Layout.of(result, expected, x.shape)
                windows = self.spec.windows.without(layout.lacking)
                is_same = not layout.lacking and self.spec.rollout is None
                return replace(
                    self,
                    layout=layout,
                    spec=replace(self.spec, windows=windows),
                    first={(block.id, batch): result} if is_same else {},
                )
        return self

    def cells_of(self, block: Block) -> dict[str, slice]:
        """Return the cells of the cube that are read for a block."""
        tile = Tile(self.spec.windows, block)
        sizes = zip(self.reader.dims, self.reader.shape, strict=True)
        if 0 in tile.counts:
            return {dim: slice(0, 0) for dim, _ in sizes}
        return {dim: slice(tile.box[dim].start, min(tile.box[dim].stop, n)) for dim, n in sizes}

    def predict(self, block: Block) -> dict[str, tuple[dict[str, slice], xr.Variable]]:
        """Return the variables of the result in a block, in physical units, and its slices."""
        tile = _Tile(self, block)
        n_members = len(self.members)
        n_channels = sum(variable.channels for variable in self.layout.variables)
        placer = tile.placer(n_members * n_channels)
        for batch, index in tile.batches():
            x = tile.inputs.batch(index)
            channels = [
                self._predict_windows(tile, x, index, (block.id, batch), member)
                for member in range(n_members)
            ]
            values = channels[0] if n_members == 1 else np.concatenate(channels, axis=1)
            placer.add(tile.result_index(index), values)
        means = tile.in_block(placer.cells())
        means = means.reshape(n_members, n_channels, *means.shape[1:])
        gaps = tile.in_block(tile.gaps)
        windows = self.spec.windows
        slices = windows.by_axis(block.slices, slice(0, windows.n_leads))
        slices = {dim: s for dim, s in slices.items() if dim not in windows.unused_dims}
        variables = finished(means, gaps, self.spec, self.layout, block, self.reduce)
        return {name: (slices, values) for name, values in variables.items()}

    def _predict_windows(
        self, tile: _Tile, x: NDArray[Any], index: Index, key: tuple[int, int], member: int
    ) -> NDArray[Any]:
        """Return the channels of some windows, shape (windows, channels, entries)."""
        rollout, windows = self.spec.rollout, self.spec.windows
        if rollout is None:
            return self.layout.channels(self._run(x, key, member), x.shape)

        def call(given: torch.Tensor, step: int) -> torch.Tensor:
            one_step = given.numpy()
            # Every call draws its own random numbers.
            y = self.layout.channels(self._run(one_step, (*key, step), member), one_step.shape)
            return torch.from_numpy(y.reshape(*y.shape[:2], *windows.target_window.values()))

        keep = torch.from_numpy(tile.inputs.known_gaps(index))
        steps = list(rollout.forecast(call, torch.from_numpy(x), windows.rollout, keep))
        if not rollout.output_has_axis:
            steps = [step.unsqueeze(rollout.axis) for step in steps]
        y = torch.cat(steps, rollout.axis).numpy()
        return y.reshape(*y.shape[:2], -1)

    def _run(self, x: NDArray[Any], key: tuple[int, ...], member: int) -> Result:
        """Run a member on a batch of inputs."""
        if member == 0 and (first := self.first.pop(key, None)) is not None:
            return first
        try:
            return self.members(x, key, member)
        except Exception as error:
            window = self.spec.windows.input_window
            error.add_note(
                f"the model was given X of shape {x.shape}: features "
                f"{self.spec.channels}, windows "
                f"{window or 'of a single point (sample_size= makes larger ones)'}"
            )
            raise


class _Tile:
    """The windows of a block: their inputs, and where their results belong."""

    def __init__(self, predictor: BlockPredictor, block: Block) -> None:
        spec = predictor.spec
        self._windows, self._tile = spec.windows, Tile(spec.windows, block)
        self._batch_size = predictor.batch_size
        self._targets = len(spec.targets)
        self.is_empty = 0 in self._tile.counts
        if not self.is_empty:
            dtype = predictor.members.input_dtype
            self.inputs = TileInputs(spec, predictor.reader, self._tile, dtype)
        self._keep_gaps = predictor.keep_gaps

    @cached_property
    def gaps(self) -> Flags:
        """Entries of the result that become gaps, shape (targets, *box of the result)."""
        if self.is_empty:
            return np.ones((self._targets, *self.results.box), bool)
        flags = self.inputs.result_gaps(self._keep_gaps)
        windows = self._windows
        if windows.lead_dim is None:
            return flags
        axis = 1 + list(windows.dims).index(windows.lead_dim)
        flags = np.expand_dims(np.moveaxis(flags, axis, 1), 2)
        return np.broadcast_to(flags, (self._targets, *self.results.box))

    @cached_property
    def results(self) -> BoxWindows:
        """Windows of the result in the box of the result."""
        windows, tile = self._windows, self._tile
        box = {dim: cells.stop - cells.start for dim, cells in tile.target_box.items()}
        size = {dim: along.result_size for dim, along in windows.dims.items()}
        axes = windows.by_axis(box, windows.n_leads)
        starts = windows.by_axis(tile.target_starts, np.zeros(1, np.intp))
        sizes = windows.by_axis(size, windows.n_leads)
        order = tuple(list(axes).index(axis) for axis in windows.result_order)
        return BoxWindows(
            tuple(axes.values()), tuple(starts.values()), tuple(sizes.values()), order
        )

    def placer(self, channels: int) -> Placer:
        """Return what blends the results of the windows."""
        overlap = {dim: along.overlap for dim, along in self._windows.dims.items()}
        return Placer(self.results, list(self._windows.by_axis(overlap, 0).values()), channels)

    def result_index(self, index: Index) -> Index:
        """Return the numbers of windows along each axis of the result."""
        by_dim = dict(zip(self._windows.dims, index, strict=True))
        return tuple(self._windows.by_axis(by_dim, np.zeros_like(index[0])).values())

    def batches(self) -> Iterator[tuple[int, Index]]:
        """Yield batches of windows with an entry to predict: their number and their index."""
        if self.is_empty:
            return
        index = every_window(self._tile.counts)
        predictable = np.logical_or.reduce(~self.gaps)
        if not predictable.all():
            chosen = self.results.with_any(predictable)[self.result_index(index)]
            index = tuple(along[chosen] for along in index)
        # Windows that do not overlap are side by side, to be added in one go.
        order = np.argsort(self.results.group_of(self.result_index(index)), kind="stable")
        for batch, first in enumerate(range(0, len(order), self._batch_size)):
            part = order[first : first + self._batch_size]
            yield batch, tuple(along[part] for along in index)

    def in_block(self, values: NDArray[Any]) -> NDArray[Any]:
        """Cut the block out of the box of the result, of arrays (..., *box)."""
        tile, windows = self._tile, self._windows
        inner = {
            dim: slice(cells.start - box.start, cells.stop - box.start)
            for (dim, cells), box in zip(
                tile.block.slices.items(), tile.target_box.values(), strict=True
            )
        }
        return values[(..., *windows.by_axis(inner, slice(None)).values())]
