"""Climatologies and damped anomalies of train cells, from one pass each over a tile's dates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import xarray as xr

from ml4cube.core.climatology import Climatology, ClimatologySums, Design
from ml4cube.core.grid import Block
from ml4cube.core.metric_registry import ratio
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.evaluation.cells.cell_reader import CellReader, Floats, LoadedCells, Steps, Tile
from ml4cube.evaluation.cells.climatology import ClimatologyOptions, given_climatology
from ml4cube.evaluation.cells.timing import Timing

#: Name of the flags of train cells beside the truth.
TRAIN = "is train"


def train_values(loaded: LoadedCells, steps: Steps) -> Floats:
    """Return the values of the truth at some steps, NaN in all but train cells."""
    at = dict.fromkeys(loaded.steps, steps)
    values, is_train = loaded.at(at), loaded.beside(TRAIN, at)
    if values.ndim > is_train.ndim:  # of each class
        is_train = is_train[:, np.newaxis]
    return np.where(is_train & np.isfinite(values), values, np.nan)


def train_climatology(
    truth: CellReader, tile: Tile, options: ClimatologyOptions, dates: xr.DataArray
) -> Climatology:
    """Return the climatology of the train cells of a tile, or the given one."""
    if options.design is None:
        assert options.means is not None
        return given_climatology(options.means[truth.name], dates, tile)
    sum_up = partial(_climatology_sums, truth, options.design)
    blocks = _blocks_of_steps(truth, tile, options.train.steps)
    sums = reduce(ClimatologySums.merge, scan(_of_train(truth), sum_up, blocks))
    return replace(sums.climatology(options.design), are_shares=truth.classes is not None)


def _of_train(truth: CellReader) -> CubeReader:
    return truth.reader.only([truth.name, TRAIN])


def _blocks_of_steps(truth: CellReader, tile: Tile, steps: Steps) -> list[Block]:
    """Cut the time from the first to the last of some steps into blocks of a tile."""
    (time_dim,) = truth.step_dims
    cells = {dim: part for dim, part in tile.items() if dim in truth.reader.dims}
    within = {time_dim: slice(int(steps[0]), int(steps[-1]) + 1), **cells}
    return blocks_of(truth.reader, uncut=cells, within=within)


def _climatology_sums(
    truth: CellReader, design: Design, block: Block, cells: Cells
) -> ClimatologySums:
    (time_dim,) = truth.step_dims
    part = block.slices[time_dim]
    steps = np.arange(part.start, part.stop)
    values = train_values(truth.loaded(cells, {time_dim: steps}), steps)
    return ClimatologySums.of(design, steps, values)


def damping(
    truth: CellReader, tile: Tile, train: Steps, climatology: Climatology, timing: Timing
) -> Floats:
    """Return rho of each lead and cell: the slope of later on earlier train anomalies.

    rho = sum(a(t) a(t + lead)) / sum(a(t)^2), over all pairs of train cells; 0 without any.
    """
    pairs = [timing.pairs(lead) for lead in range(timing.leads.size)]
    sum_up = partial(_products_of_anomalies, truth, climatology, pairs)
    blocks = _blocks_of_steps(truth, tile, train)
    products, squares = reduce(np.add, scan(_of_train(truth), sum_up, blocks))
    return np.nan_to_num(ratio(products, squares))


def _products_of_anomalies(
    truth: CellReader,
    climatology: Climatology,
    pairs: Sequence[tuple[Steps, Steps]],
    block: Block,
    cells: Cells,
) -> Floats:
    """Return the products of later and earlier anomalies, and the squares of earlier ones.

    Shape (2, leads, *cells), of the pairs whose later step is in the block.
    """
    (time_dim,) = truth.step_dims
    part = block.slices[time_dim]
    in_block = []
    for first, second in pairs:
        here = (second >= part.start) & (second < part.stop)
        in_block.append((first[here], second[here]))
    start = min(first.min(initial=part.start) for first, _ in in_block)
    if start < part.start:
        before = _of_train(truth).read({**block.slices, time_dim: slice(start, part.start)})
        cells = {name: np.concatenate([before[name], cells[name]]) for name in cells}
    steps = np.arange(start, part.stop)
    values = train_values(truth.loaded(cells, {time_dim: steps}), steps)
    anomalies = values - climatology.at(steps)
    sums = np.zeros((2, len(pairs), *anomalies.shape[1:]))
    for lead, (first, second) in enumerate(in_block):
        earlier, later = anomalies[first - start], anomalies[second - start]
        both = np.isfinite(earlier) & np.isfinite(later)
        sums[0, lead] = np.where(both, earlier * later, 0.0).sum(0)
        sums[1, lead] = np.where(both, earlier**2, 0.0).sum(0)
    return sums
