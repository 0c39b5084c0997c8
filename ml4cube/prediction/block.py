"""Prediction of one block of the result at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Block, Grid
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.inputs import Flags, TileInputs
from ml4cube.prediction.models import Members, Result
from ml4cube.prediction.results.finishing import to_variables
from ml4cube.prediction.results.layout import Expected, Layout, join_channels
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.prediction.windows.geometry import Tile
from ml4cube.recipe.placer import Placer
from ml4cube.recipe.windows import Index, every_window


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
    # Results of the first member by which the layout was found, by block and batch.
    probe_results: dict[tuple[int, ...], Result] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        """Numbers of one member for each cell."""
        return sum(variable.channels for variable in self.layout.variables)

    def find_layout(self, blocks: Grid, expected: Expected) -> BlockPredictor:
        """Return a predictor with the layout of the first result, if there are not only gaps."""
        for block in map(blocks.block, range(len(blocks))):
            tile = Tile(self.spec.windows, block)
            if tile.is_empty:
                continue
            inputs = self._inputs(tile)
            for batch, index in self._batches(tile, inputs.result_gaps(self.keep_gaps)):
                x = inputs.batch(index)
                if self.spec.rollout is not None:
                    x = self.spec.rollout.input_of(torch.from_numpy(x), 0).numpy()
                result = self._run(x, (block.id, batch), 0)
                layout = Layout.of(result, expected, x.shape)
                spec = replace(self.spec, windows=self.spec.windows.collapsed(layout.lacking))
                probe_results: dict[tuple[int, ...], Result] = {}
                if not layout.lacking and self.spec.rollout is None:  # else it is no whole result
                    probe_results[block.id, batch] = result
                return replace(self, layout=layout, spec=spec, probe_results=probe_results)
        return self

    def cells_of(self, block: Block) -> dict[str, slice]:
        """Return the cells of the cube that are read for a block."""
        return Tile(self.spec.windows, block).cells_read

    def predict(self, block: Block) -> dict[str, tuple[dict[str, slice], xr.Variable]]:
        """Return the variables of the result in a block, in physical units, and its slices."""
        tile = Tile(self.spec.windows, block)
        means, gaps = self._blended(tile)
        variables = to_variables(means, gaps, self.spec, self.layout, block, self.reduce)
        unused = self.spec.windows.unused_dims
        slices = {axis: entries for axis, entries in block.slices.items() if axis not in unused}
        return {name: (slices, values) for name, values in variables.items()}

    def _blended(self, tile: Tile) -> tuple[NDArray[np.float64], Flags]:
        """Return the results in the block of a tile, and which entries become gaps.

        Their shapes are (members, channels, *block) and (targets, *block).
        """
        n_members, shape = len(self.members), tile.block.shape.values()
        if tile.is_empty:
            gaps = np.ones((len(self.spec.targets), *shape), bool)
            return np.full((n_members, self.channels, *shape), np.nan), gaps
        inputs = self._inputs(tile)
        gaps = inputs.result_gaps(self.keep_gaps)
        overlap = [axis.overlap for axis in self.spec.windows.axes]
        placer = Placer(tile.results, overlap, n_members * self.channels)
        for batch, index in self._batches(tile, gaps):
            x, key = inputs.batch(index), (tile.block.id, batch)
            channels = [self._results(inputs, x, index, key, m) for m in range(n_members)]
            placer.add(tile.result_index(index), join_channels(channels))
        means = tile.in_block(placer.cells())
        return means.reshape(n_members, self.channels, *shape), tile.in_block(gaps)

    def _inputs(self, tile: Tile) -> TileInputs:
        """Read the inputs of a tile."""
        return TileInputs(self.spec, self.reader, tile, self.members.input_dtype)

    def _batches(self, tile: Tile, gaps: Flags) -> Iterator[tuple[int, Index]]:
        """Yield batches of windows with an entry to predict: their number and their index."""
        index = every_window(tile.counts)
        predictable: Flags = np.any(~gaps, axis=0)
        if not predictable.all():
            chosen = tile.results.with_any(predictable)[tile.result_index(index)]
            index = tuple(numbers[chosen] for numbers in index)
        # Windows that do not overlap are side by side, to be added in one go.
        order = np.argsort(tile.results.group_of(tile.result_index(index)), kind="stable")
        for batch, first in enumerate(range(0, len(order), self.batch_size)):
            part = order[first : first + self.batch_size]
            yield batch, tuple(numbers[part] for numbers in index)

    def _results(
        self,
        inputs: TileInputs,
        x: NDArray[Any],
        index: Index,
        key: tuple[int, int],
        member: int,
    ) -> NDArray[Any]:
        """Return the channels of some windows, shape (windows, channels, entries)."""
        rollout, windows = self.spec.rollout, self.spec.windows
        if rollout is None:
            return self.layout.channels(self._run(x, key, member), x.shape)

        def call(cells: torch.Tensor, step: int) -> torch.Tensor:
            one_step = cells.numpy()
            # Every call draws its own random numbers.
            y = self.layout.channels(self._run(one_step, (*key, step), member), one_step.shape)
            return torch.from_numpy(y.reshape(*y.shape[:2], *windows.target_window.values()))

        keep = torch.from_numpy(inputs.always_missing(index))
        steps = list(rollout.forecast(call, torch.from_numpy(x), windows.rollout, keep))
        if not rollout.output_has_axis:
            steps = [step.unsqueeze(rollout.axis) for step in steps]
        return torch.cat(steps, rollout.axis).flatten(2).numpy()

    def _run(self, x: NDArray[Any], key: tuple[int, ...], member: int) -> Result:
        """Run a member on a batch of inputs."""
        if member == 0 and key in self.probe_results:
            return self.probe_results.pop(key)
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
