"""Pass 1 in a worker: count the outcomes of windows and sum up the train statistics.

Imports nothing that a worker does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ml4cube.core.errors import RunError
from ml4cube.core.grid import Block
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.reader import CubeReader
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.outcomes import OUTCOMES, CellsByRole, as_labels, classify, gaps_of, mask_of
from ml4cube.sampling.samples import Schema, make_samples, schema_of, train_statistics
from ml4cube.sampling.tiling import TiledRecipe


@dataclass(frozen=True)
class CountJob:
    """What all counting tasks share; picklable."""

    tiled: TiledRecipe
    # Reads the variables that are not sent with each tile.
    shared_reader: CubeReader
    # Variables to read, by role.
    names: Mapping[str, tuple[str, ...]]
    looks_at_samples: bool


@dataclass(frozen=True)
class TileCount:
    """The result of pass 1 for one tile."""

    id: int
    # Number of windows, in the order of `OUTCOMES`.
    outcomes: tuple[int, ...]
    # Of the train samples; None if there are none.
    statistics: Statistics | None = None
    # Of the inputs of samples; None if there are none.
    schema: Schema | None = None
    # Variables whose gaps in the tile are filled.
    filled: tuple[str, ...] = ()


def count_tiles(job: CountJob, tiles: list[tuple[int, dict[str, CubeReader]]]) -> list[TileCount]:
    """Count the outcomes of the windows of some tiles, and look at their samples.

    Each tile has a reader for every role.
    """
    return [_count_tile(job, id, cells) for id, cells in _read_tiles(job, tiles)]


def _read_tiles(
    job: CountJob, tiles: Sequence[tuple[int, dict[str, CubeReader]]]
) -> Iterator[tuple[int, CellsByRole]]:
    """Yield tiles and their cells by role; several are read at a time where that is waiting."""
    bound, grid = job.tiled.bound, job.tiled.tiles

    def read(_: None, task: tuple[int, dict[str, CubeReader]]) -> tuple[int, CellsByRole]:
        id, readers = task
        cells = {}
        for role, box in bound.boxes(grid.block(id)).items():
            reader = readers[role].joined(job.shared_reader)
            cells[role] = reader.only(job.names[role]).read(box)
        return id, cells

    threads = job.tiled.threads(job.shared_reader)
    yield from threads.run_in_order(read, None, tiles)


def _count_tile(job: CountJob, id: int, cells: CellsByRole) -> TileCount:
    tiled = job.tiled
    tile = tiled.tiles.block(id)
    outcomes = classify(tiled, cells, tile)
    counts = np.bincount(outcomes, minlength=len(OUTCOMES)).tolist()
    if not job.looks_at_samples:
        return TileCount(id, tuple(counts))
    statistics, schema = None, None
    for part in PARTS.values():
        is_train = part == PARTS["train"]
        # the callback sees the samples of all parts, so that it fails before anything is written
        if counts[part] and (is_train or tiled.callback or schema is None):
            samples = make_samples(tiled, cells[INPUT], tile, np.flatnonzero(outcomes == part))
            schema = agreed_schema(schema, schema_of(samples))
            if is_train:
                statistics = train_statistics(tiled.recipe, samples)
    filled: tuple[str, ...] = ()
    if any(counts[: len(PARTS)]):
        filled = _filled_variables(tiled.recipe, cells[INPUT])
    return TileCount(id, tuple(counts), statistics, schema, filled)


def _filled_variables(recipe: Recipe, cells: Arrays) -> tuple[str, ...]:
    """Return the variables with gaps that are filled in a tile."""
    if not recipe.fill_method or recipe.drop_nan == "auto":  # drops every sample with a gap
        return ()
    mask = mask_of(recipe, cells)
    names = [n for n in recipe.variables if recipe.fill_of(n) and cells[n].dtype.kind == "f"]
    return tuple(name for name in names if gaps_of(recipe, cells[name], mask).any())


def agreed_schema(known: Schema | None, found: Schema | None) -> Schema | None:
    """Return the schema of all samples; refuse variables, shapes or dtypes that differ."""
    if known is not None and found is not None and known != found:
        raise RunError(
            f"the callback returned {found} for some samples and {known} for others; return the "
            "same variables, window shapes and dtypes for all"
        )
    if known is None:
        return found
    return known


def count_train_cells(
    shared: tuple[TiledRecipe, CubeReader], boxes: list[tuple[Block, CubeReader]]
) -> list[Statistics]:
    """Return the statistics of the raw train cells of some boxes of cells."""
    tiled, shared_reader = shared

    def read(_: None, task: tuple[Block, CubeReader]) -> Arrays:
        box, reader = task
        return reader.joined(shared_reader).read(box.slices)

    statistics = []
    threads = tiled.threads(shared_reader)
    for cells in threads.run_in_order(read, None, boxes):
        counted = as_labels(cells[tiled.label], tiled.label) == PARTS["train"]
        mask = mask_of(tiled.recipe, cells)
        if mask is not None and tiled.recipe.apply_mask:
            counted &= mask
        names = [name for name in tiled.recipe.variables if cells[name].dtype.kind == "f"]
        floats = {name: cells[name] for name in names}
        statistics.append(Statistics.of(floats, counted, part="train"))
    return statistics
