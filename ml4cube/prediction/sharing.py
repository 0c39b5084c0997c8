"""Blocks of a prediction: chosen by the first results, shared by ranks or a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.cube.chunks.blocks import source_chunks
from ml4cube.cube.engine import Engine, check_client, choose_engine
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import cube_variables
from ml4cube.prediction.block import BlockPredictor
from ml4cube.prediction.layout import Expected
from ml4cube.prediction.output.memory import Block, Output
from ml4cube.progress import Stage
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import RankEngine, all_ranks_or_none

# A block is a 16th of the cube, within these if windows are not larger.
_BLOCK_CELLS = (2**14, 2**20)
_BYTES_PER_CELL = 64  # of a block, with its inputs and sums, that the most cells allow


def probe(
    predictor: BlockPredictor, cube: xr.Dataset, expected: Expected, world: World
) -> BlockPredictor:
    """Return the predictor with the layout of the first result, which rank 0 makes."""
    probed = predictor
    with all_ranks_or_none(world):
        if world.is_main:
            blocks = choose_blocks(predictor, cube)
            probed = predictor.find_layout(blocks, expected)
            if probed is not predictor:  # else there are only gaps
                _check_layout(probed)
            if choose_blocks(probed, cube) != blocks:  # whose first batch has other windows
                probed.probe_results.clear()
    layout, windows = world.broadcast((probed.layout, probed.windows))
    return replace(probed, layout=layout, windows=windows)


def _check_layout(predictor: BlockPredictor) -> None:
    """Refuse results that cannot become the cube that was asked for."""
    layout, windows = predictor.layout, predictor.windows
    lacking = {dim for dim in layout.lacking if windows.dims[dim].is_single}
    if windows.lead_dim in lacking:
        raise InvalidValueError(
            f"the model must return {windows.n_leads} steps along {windows.lead_dim!r}, as the "
            "targets of the data set have, got results without that axis"
        )
    several = [v.name for v in layout.variables if v.name != v.target or v.channels > 1]
    if windows.rollout > 1 and (several or lacking):
        raise InvalidValueError(
            f"rollout={windows.rollout} needs a model that returns one number per target and cell, "
            f"to be its next input, got {several or f'none along {lacking}'}"
        )
    if predictor.reduce == "argmax" and not any(v.is_probability for v in layout.variables):
        raise InvalidValueError(
            "reduce='argmax' needs a model that returns one number for each class, got one for "
            f"{[variable.name for variable in layout.variables]}"
        )
    _refuse_means_of_labels(predictor)
    _refuse_unscalable(predictor, lacking)


def _refuse_unscalable(predictor: BlockPredictor, lacking: set[str]) -> None:
    """Refuse one value for a whole window along a dim along which the scaling differs."""
    for variable in predictor.layout.variables:
        scaling = predictor.bound.scaling.get(variable.target or "")
        if scaling is not None and (both := lacking & set(scaling.dims)):
            raise InvalidValueError(
                f"{variable.target!r} was scaled per {sorted(both)}, and the model returns one "
                "value for a whole window along it, which cannot be unscaled"
            )


def _refuse_means_of_labels(predictor: BlockPredictor) -> None:
    """Refuse labels of classes where a cell has several results."""
    labels = [variable.name for variable in predictor.layout.variables if variable.is_label]
    overlap = any(axis.has_overlaps for axis in predictor.windows.axes)
    if labels and (overlap or len(predictor.members) > 1):
        raise InvalidValueError(
            f"the model must return a number for each class of {labels}, got labels, which would "
            "be averaged over members and windows that overlap; choose with reduce='argmax'"
        )


def choose_blocks(predictor: BlockPredictor, cube: xr.Dataset) -> Grid:
    """Choose the blocks that are predicted and written, near the cube's chunks."""
    windows = predictor.windows
    fewest, most = _BLOCK_CELLS
    # Inputs as read and scaled, with flags of gaps; sums, weights and means of results.
    n_leads = max(windows.n_leads, 1)
    n_inputs = math.prod(windows.dims[dim].size for dim in windows.lost_dims)
    n_bytes = 9 * n_inputs * len(predictor.bound.features)
    n_bytes += 24 * len(predictor.members) * predictor.channels * n_leads
    # Of all leads together.
    cells = math.prod(windows.result_shape.values()) // n_leads
    cells = min(max(cells // 16, fewest), most)
    cells = max(cells * _BYTES_PER_CELL // max(n_bytes, _BYTES_PER_CELL), 1)
    variables = (cube[name].variable for name in cube_variables(cube)[0])
    largest = max(variables, key=lambda variable: variable.ndim)
    chunks = {d: n for d, n in source_chunks(largest).items() if d not in windows.lost_dims}
    return Grid.blocks(windows.result_shape, windows.block_size(chunks, cells * n_leads))


def engine_for(client: Any, world: World, device: torch.device, reader: CubeReader) -> Engine:
    """Choose where blocks are predicted: by the ranks, or on a cluster that is given or active.

    A model on a GPU, or a cube in memory, goes to a cluster only if that is given.
    """
    check_client(client)
    ranks = RankEngine(world)
    if world.size > 1:
        if client is not None:
            raise InvalidTypeError(
                f"client must be None in a group of {world.size} ranks, which share the blocks "
                "already"
            )
        return ranks
    if client is None and (device.type != "cpu" or reader.is_in_memory):
        return ranks
    return choose_engine(ranks, client)


def predict_blocks(
    predictor: BlockPredictor,
    blocks: Grid,
    output: Output,
    world: World,
    engine: Engine,
    progress: bool,
    check_source: Callable[[], None],
) -> xr.Dataset:
    """Predict all blocks.

    `check_source` is called before the result is published.
    """
    _keep_freed_memory()
    try:
        done = output.begin()
        ids = [id for id in range(len(blocks)) if id not in done]
        shared, own = predictor.reader.split(engine.shares_memory)
        job = replace(predictor, reader=shared), blocks, output.writer
        tasks = ((id, own.narrow(predictor.cells_of(blocks.block(id)))) for id in ids)
        show = progress and world.is_main
        with Stage("predicting", len(ids), "blocks", show=show) as stage, engine:
            for _, block in engine.run(_predict_block, job, tasks):
                if block is not None:
                    output.collect(block)
                stage.update()
        with all_ranks_or_none(world):
            if world.is_main:
                check_source()
                output.publish()
    except BaseException as error:
        if world.is_main:
            output.discard(error)
        raise
    return output.result()


def _keep_freed_memory() -> None:
    """Make glibc keep up to 64 MB that are freed, or a model gets new pages for every batch.

    It keeps twice the size of the largest array that was freed, of those up to 32 MB. Other
    allocators do not care. The array is never touched, so it takes no memory itself.
    """
    np.empty(2**25 - 2**16, np.uint8)


def _predict_block(
    job: tuple[BlockPredictor, Grid, Callable[[int, Block], None] | None],
    task: tuple[int, CubeReader],
) -> Block | None:
    """Predict a block and write it; return it if it can only be written by the caller."""
    predictor, blocks, write = job
    id, own_cells = task
    predictor = replace(predictor, reader=own_cells.joined(predictor.reader))
    block = predictor.predict(blocks.block(id))
    if write is None:
        return block
    write(id, block)
    return None
