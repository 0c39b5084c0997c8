"""Blocks predicted by the ranks, or by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError
from ml4cube.core.grid import Grid
from ml4cube.cube.engine import DaskCluster, Engine, check_client
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.block import BlockPredictor
from ml4cube.prediction.output.memory import Block, Output
from ml4cube.progress import Stage
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import RankEngine, all_ranks_or_none


def check_cluster(client: Any, world: World) -> None:
    """Refuse what is no cluster, and a cluster beside several ranks."""
    check_client(client)
    if client is not None and world.size > 1:
        raise InvalidTypeError(
            f"client must be None in a group of {world.size} ranks, which share the blocks already"
        )


def predict_blocks(
    predictor: BlockPredictor,
    blocks: Grid,
    output: Output,
    world: World,
    client: Any,
    progress: bool,
    check_source: Callable[[], None],
) -> xr.Dataset:
    """Predict all blocks, by the ranks or the workers of a cluster.

    `check_source` is called before the result is published.
    """
    _keep_freed_memory()
    engine: Engine = RankEngine(world)
    if client is not None:
        engine = DaskCluster(client)
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
