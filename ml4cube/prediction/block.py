"""One block of the result: cells read and prepared, the model run, results in their units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Block, Grid
from ml4cube.core.missing import bool_mask, find_gaps
from ml4cube.core.statistics import unscale_values
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.geometry import Tile, Windows
from ml4cube.prediction.layout import Expected, Layout, Variable, join_channels
from ml4cube.prediction.models import Members, Result
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.preparation import Arrays, PreparedCells, cut, mask_cells, prepare
from ml4cube.recipe.windows import Index, Placer, every_window

Flags = NDArray[np.bool_]
# Dim of the only number that a variable without a dim of its own has in each cell.
_CHANNEL = ""


@dataclass(frozen=True)
class BlockPredictor:
    """A model, its inputs, and the layout of its results."""

    members: Members
    bound: BoundRecipe
    windows: Windows
    layout: Layout
    reader: CubeReader
    # Variable of the cube with the cells to predict.
    mask: str | None
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
            tile = Tile(self.windows, block)
            if tile.is_empty:
                continue
            inputs = TileInputs(self, tile)
            for batch, index in self._batches(tile, inputs.result_gaps(self.keep_gaps)):
                x = inputs.batch(index)
                feedback = self.windows.feedback
                if feedback is not None:
                    x = feedback.input_of(torch.from_numpy(x), 0).numpy()
                result = self._run(x, (block.id, batch), 0)
                layout = Layout.of(result, expected, x.shape)
                windows = self.windows.collapsed(layout.lacking)
                probe_results: dict[tuple[int, ...], Result] = {}
                if not layout.lacking and feedback is None:  # else it is no whole result
                    probe_results[block.id, batch] = result
                return replace(self, layout=layout, windows=windows, probe_results=probe_results)
        return self

    def cells_of(self, block: Block) -> dict[str, slice]:
        """Return the cells of the cube that are read for a block."""
        return Tile(self.windows, block).cells_read

    def predict(self, block: Block) -> dict[str, tuple[dict[str, slice], xr.Variable]]:
        """Return the variables of the result in a block, in physical units, and its slices."""
        tile = Tile(self.windows, block)
        means, gaps = self._blended(tile)
        variables = to_variables(means, gaps, self, block)
        unused = self.windows.unused_dims
        slices = {axis: entries for axis, entries in block.slices.items() if axis not in unused}
        return {name: (slices, values) for name, values in variables.items()}

    def _blended(self, tile: Tile) -> tuple[NDArray[np.float64], Flags]:
        """Return the results in the block of a tile, and which entries become gaps.

        Their shapes are (members, channels, *block) and (targets, *block).
        """
        n_members, shape = len(self.members), tile.block.shape.values()
        if tile.is_empty:
            gaps = np.ones((len(self.bound.recipe.predicted), *shape), bool)
            return np.full((n_members, self.channels, *shape), np.nan), gaps
        inputs = TileInputs(self, tile)
        gaps = inputs.result_gaps(self.keep_gaps)
        shared = [axis.shared for axis in self.windows.axes]
        placer = Placer(tile.results, shared, n_members * self.channels)
        for batch, index in self._batches(tile, gaps):
            x, key = inputs.batch(index), (tile.block.id, batch)
            channels = [self._results(inputs, x, index, key, m) for m in range(n_members)]
            placer.add(tile.result_index(index), join_channels(channels))
        means = tile.in_block(placer.cells())
        return means.reshape(n_members, self.channels, *shape), tile.in_block(gaps)

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
        feedback, windows = self.windows.feedback, self.windows
        if feedback is None:
            return self.layout.channels(self._run(x, key, member), x.shape)

        def call(cells: torch.Tensor, step: int) -> torch.Tensor:
            one_step = cells.numpy()
            # Every call draws its own random numbers.
            y = self.layout.channels(self._run(one_step, (*key, step), member), one_step.shape)
            return torch.from_numpy(y.reshape(*y.shape[:2], *windows.target_window.values()))

        keep = torch.from_numpy(inputs.always_missing(index))
        steps = list(feedback.forecast(call, torch.from_numpy(x), windows.rollout, keep))
        if not feedback.output_has_axis:
            steps = [step.unsqueeze(feedback.axis) for step in steps]
        return torch.cat(steps, feedback.axis).flatten(2).numpy()

    def _run(self, x: NDArray[Any], key: tuple[int, ...], member: int) -> Result:
        """Run a member on a batch of inputs."""
        if member == 0 and key in self.probe_results:
            return self.probe_results.pop(key)
        try:
            return self.members(x, key, member)
        except Exception as error:
            window = self.windows.input_window
            error.add_note(
                f"the model was given X of shape {x.shape}: features "
                f"{self.bound.channels}, windows "
                f"{window or 'of a single point (sample_size= makes larger ones)'}"
            )
            raise


class TileInputs:
    """The cells of a tile's windows, and the inputs that a model is given of them."""

    def __init__(self, predictor: BlockPredictor, tile: Tile) -> None:
        self._bound, self._windows, self._tile = predictor.bound, predictor.windows, tile
        self._dtype = predictor.members.input_dtype
        cells = _read(predictor.reader, tile)
        self._in_mask = None if predictor.mask is None else bool_mask(cells[predictor.mask])
        self._masked = mask_cells(cells, self._bound.features, self._bound.mask)
        self._gaps = {name: find_gaps(values) for name, values in self._masked.items()}

    def result_gaps(self, keep_gaps: bool) -> Flags:
        """Return which entries of the result become gaps, shape (targets, *box of the result).

        An entry that belongs to several cells of a window is one if all of them are: those at the
        known steps of a forecast, or the targets of a window that becomes one number.
        """
        targets = self._bound.recipe.predicted
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
        tile, windows = self._tile, self._windows
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
        if self._bound.recipe.callback is not None:
            self._refuse_filled(index)
        channels, prepared = self._prepared
        windows = self._tile.inputs
        x = windows.cut(channels, index)
        for name in prepared.by_window:
            unknown = None
            if name in self._fed_back:
                unknown = self._steps(later=True)
            channel = self._bound.features.index(name)
            x[:, channel] = cut(prepared, name, windows, index, unknown)
        return x

    def always_missing(self, index: Index) -> Flags:
        """Return the cells with no value at any input step, one entry per forecast step.

        Shape (windows, targets, *window with as many steps as the results of all calls).
        """
        no_gaps = np.zeros(self._tile.inputs.box, bool)
        gaps = np.stack([self._gaps.get(name, no_gaps) for name in self._bound.recipe.predicted])
        input_steps = (slice(None), slice(None), *self._steps(later=False))
        axis = len(input_steps) - 1
        at_all = self._tile.inputs.cut(gaps, index)[input_steps].all(axis=axis, keepdims=True)
        return np.repeat(at_all, self._windows.n_leads, axis=axis)

    def _steps(self, *, later: bool) -> tuple[slice, ...]:
        """Return the slices of a window with its input steps, or with the later ones."""
        windows = self._windows
        assert windows.lead_dim is not None
        size = windows.dims[windows.lead_dim].known_size
        steps = slice(size, None) if later else slice(size)
        return (*[slice(None)] * windows.gather_order.index(windows.lead_dim), steps)

    @cached_property
    def _fed_back(self) -> set[str]:
        """Features with gaps that a rollout predicts; what the cube has later must not be seen."""
        if self._windows.rollout == 1:
            return set()
        names = self._bound.recipe.predicted
        return {name for name in names if name in self._gaps and self._gaps[name].any()}

    @cached_property
    def _prepared(self) -> tuple[NDArray[Any], PreparedCells]:
        """Inputs in every cell of the box, shape (channels, *box), and as `cut` takes them."""
        bound, tile = self._bound, self._tile
        channels = np.empty((len(bound.channels), *tile.inputs.box), self._dtype)
        out = dict(zip(bound.features, channels, strict=False))
        by_window = set(self._fed_back)
        for name, fill in bound.fills.items():
            if fill.needs_window and self._gaps[name].any():
                by_window.add(name)
        prepared = prepare(self._masked, tile.box, bound, out, by_window)
        of_coords = channels[len(bound.features) :]
        for channel, coord in zip(of_coords, bound.coordinates.values(), strict=True):
            last = len(tile.box) - 1 - list(tile.box).index(coord.dim)
            channel[...] = coord.values[tile.box[coord.dim]].reshape(-1, *[1] * last)
        return channels, prepared

    def _refuse_filled(self, index: Index) -> None:
        """Refuse gaps that training filled before a callback, maybe in other units.

        A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
        """
        callback = self._bound.recipe.callback
        for name, fill in self._bound.fills.items():
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
                    f"callback {callback!r}; fill them in ds before you apply the "
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


def to_variables(
    means: NDArray[np.float64],
    gaps: NDArray[np.bool_],
    predictor: BlockPredictor,
    block: Block,
) -> dict[str, xr.Variable]:
    """Return the variables of a block from its blended results.

    `means` has the shape (members, channels, *block), `gaps` (targets, *block).
    """
    bound, windows = predictor.bound, predictor.windows
    axes = tuple(windows.result_shape)
    variables, first = {}, 0
    for variable in predictor.layout.variables:
        values = means[:, first : first + variable.channels]
        first += variable.channels
        is_gap = gaps.all(axis=0)
        if variable.target is not None:
            values = _in_units(values, variable, bound, windows.target_cells(block.slices))
            is_gap = gaps[bound.recipe.predicted.index(variable.target)]
        np.copyto(values, np.nan, where=is_gap)
        mean = values.mean(axis=0)
        if variable.is_probability and predictor.reduce == "argmax":
            variables[variable.name] = xr.Variable(axes, _most_likely(mean, variable))
            continue
        dims = (_CHANNEL, *axes)
        if variable.dim is not None:
            dims = (variable.dim, *axes)
        variables[variable.name] = xr.Variable(dims, mean)
        if len(values) > 1:
            variables[f"{variable.name}_spread"] = xr.Variable(dims, values.std(axis=0))
    only_entry = dict.fromkeys((_CHANNEL, *windows.unused_dims), 0)
    return {
        name: variable.isel(only_entry, missing_dims="ignore")
        for name, variable in variables.items()
    }


def _in_units(
    values: NDArray[np.float64],
    variable: Variable,
    bound: BoundRecipe,
    cells: Mapping[str, NDArray[np.intp]],
) -> NDArray[np.float64]:
    """Undo the scaling of a target; probabilities of its classes have none."""
    scaling = bound.scaling.get(variable.target or "")
    if scaling is None or variable.is_probability:
        return values
    offset, scale = scaling.at(cells)
    if variable.has_offset:
        return np.asarray(unscale_values(values, offset, scale))
    return np.asarray(values * np.asarray(scale) ** variable.power)


def _most_likely(probabilities: NDArray[Any], variable: Variable) -> NDArray[np.float64]:
    """Return the label of the most likely class, or its position where labels are no numbers."""
    labels = variable.class_values
    has_values = np.isfinite(probabilities).all(axis=0)
    return np.where(has_values, labels[np.nan_to_num(probabilities).argmax(axis=0)], np.nan)
