"""Pass 1: read the cube once; count the samples of each part and the drops by reason."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.engine import Engine
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.counting import (
    CountJob,
    TileCount,
    agreed_schema,
    count_tiles,
    count_train_cells,
)
from ml4cube.sampling.outcomes import OUTCOMES, deciding_variables
from ml4cube.sampling.plan import (
    SamplePlan,
    accounting_of,
    check_parts,
    warn_of_nothing_to_fill,
)
from ml4cube.sampling.rescaling import check_no_fill_values, select_statistics
from ml4cube.sampling.sampled_cube import SampledCube
from ml4cube.sampling.samples import Schema, variables_read
from ml4cube.sampling.selection import check_targets
from ml4cube.sampling.tiling import MIB, ORIGIN_BYTES, TiledRecipe, sample_bytes

# Bytes of the samples of one counting task, and the most tasks of one pass.
_COUNT_BYTES = 16 * MIB
_MAX_TASKS = 20_000


@dataclass
class _Counts:
    """What the tasks of a pass have counted so far."""

    # Of each tile, windows by outcome.
    outcomes: NDArray[np.int64]
    statistics: Statistics | None = None
    schema: Schema | None = None
    # Variables with filled gaps.
    filled: set[str] = field(default_factory=set)

    def add(self, results: Iterable[TileCount]) -> None:
        """Add the results of one task."""
        for result in results:
            self.outcomes[result.id] = result.outcomes
            self.filled.update(result.filled)
            self.schema = agreed_schema(self.schema, result.schema)
            if result.statistics is None:
                continue
            earlier, self.statistics = self.statistics, result.statistics
            if earlier is not None:
                self.statistics = earlier.merge(result.statistics)


def make_plan(
    sampled: SampledCube,
    engine: Engine,
    parts: Iterable[str],
    *,
    tiles_per_task: int | None = None,
    note: Callable[[int], object] = lambda _: None,
    is_lazy: bool = False,
) -> tuple[TiledRecipe, SamplePlan]:
    """Read the cube and count the outcomes of all windows.

    `note` is called with the number of tiles that a task has counted. With `is_lazy`, for samples
    that are cut as they are read, parts may be empty; and if neither statistics nor a callback need
    samples, only what decides on outcomes is read: filled gaps of other variables are not counted,
    and the statistics are empty.
    """
    parts = tuple(parts)
    tiled, recipe = sampled.tiled, sampled.recipe
    if recipe.fills_from_train:
        tiled = replace(tiled, fill=fill_statistics(sampled, engine, tiles_per_task))
    looks_at_samples = makes_samples(sampled) or not is_lazy
    names = deciding_variables(tiled, sampled.reader.cells.dtypes)
    if looks_at_samples:
        names[INPUT] = tuple(dict.fromkeys((*names[INPUT], *variables_read(recipe))))
    shared_reader, own_reader = sampled.reader.cells.split(engine.shares_memory)
    job = CountJob(tiled, shared_reader, names, looks_at_samples)
    counts = _Counts(np.zeros((len(tiled.tiles), len(OUTCOMES)), np.int64))
    own_readers = {role: own_reader.only(names[role]) for role in names}
    tasks = _tasks(sampled, own_readers, tiles_per_task)
    for results in engine.run_in_order(count_tiles, job, tasks):
        counts.add(results)
        note(len(results))
    outcomes = counts.outcomes.sum(axis=0)
    accounting = accounting_of(tiled.bound.total, outcomes, parts)
    warn_of_nothing_to_fill(recipe, accounting)
    if not is_lazy or not outcomes[: len(PARTS)].any():
        check_parts(sampled.split, accounting, outcomes, parts)
    schema, statistics = _schema_and_statistics(sampled, counts, looks_at_samples)
    return tiled, SamplePlan(
        parts=parts,
        accounting=accounting,
        statistics=statistics,
        schema=schema,
        origin_bytes=ORIGIN_BYTES * len(recipe.dims),
        # The label of a part is its column: the parts come first in `OUTCOMES`.
        tile_samples=counts.outcomes[:, [PARTS[part] for part in parts]],
        absent=dict(sorted(sampled.reader.absent.items())),
        over_missing_dates=sampled.over_missing_dates,
        left_out=sampled.left_out,
        filled={name: str(recipe.fill_of(name)) for name in sorted(counts.filled)},
    )


def _schema_and_statistics(
    sampled: SampledCube, counts: _Counts, looks_at_samples: bool
) -> tuple[Schema, Statistics]:
    """Return what the samples of all tiles are, and the statistics to scale them by."""
    recipe, dtypes = sampled.recipe, sampled.reader.cells.dtypes
    schema = counts.schema
    if schema is None:  # nothing was sampled
        schema = {name: (recipe.window_shape, dtypes[name].str) for name in recipe.variables}
    check_targets(recipe, schema, sampled.ds)
    scaled = recipe.scaled_variables({name: dtype for name, (_, dtype) in schema.items()})
    statistics = counts.statistics
    if statistics is None:
        statistics = Statistics.empty(scaled if looks_at_samples else [], part="train")
    if sampled.tiled.callback is None:
        check_no_fill_values(statistics, sampled.ds)
    if sampled.given is not None:
        statistics = select_statistics(sampled.given, scaled)
    return schema, statistics


def makes_samples(sampled: SampledCube) -> bool:
    """Return True if planning needs samples: for statistics, or the variables of a callback."""
    needs_statistics = sampled.recipe.scale_fn is not None and sampled.given is None
    return needs_statistics or sampled.tiled.callback is not None


def _tasks(
    sampled: SampledCube, readers: Mapping[str, Any], tiles_per_task: int | None
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield the tiles of each task, with the readers of each role, narrowed to their cells."""
    tiled = sampled.tiled
    for ids in _divide(len(tiled.tiles), sampled, tiles_per_task):
        task = []
        for id in ids:
            boxes = tiled.bound.boxes(tiled.tiles.block(id))
            task.append((id, {role: readers[role].narrow(box) for role, box in boxes.items()}))
        yield task


def _divide(n_tiles: int, sampled: SampledCube, tiles_per_task: int | None) -> Iterator[range]:
    """Divide tiles into tasks, by default of some megabytes of samples each."""
    if tiles_per_task is None:
        windows_per_tile = math.prod(sampled.tiled.tiles.tile)
        tile_bytes = windows_per_tile * sample_bytes(sampled.recipe, sampled.reader.cells.dtypes)
        tiles_per_task = max(1, _COUNT_BYTES // tile_bytes)
    tiles_per_task = max(tiles_per_task, math.ceil(n_tiles / _MAX_TASKS))
    for first in range(0, n_tiles, tiles_per_task):
        yield range(first, min(first + tiles_per_task, n_tiles))


def fill_statistics(
    sampled: SampledCube, engine: Engine, boxes_per_task: int | None = None
) -> Statistics:
    """Return the statistics of the raw train cells, each counted once."""
    boxes = sampled.tiled.boxes
    shared_reader, own_reader = sampled.reader.cells.split(engine.shares_memory)
    tasks = (
        [(boxes.block(id), own_reader.narrow(boxes.block(id).slices)) for id in ids]
        for ids in _divide(len(boxes), sampled, boxes_per_task)
    )
    shared = sampled.tiled, shared_reader
    results = engine.run_in_order(count_train_cells, shared, tasks)
    return functools.reduce(Statistics.merge, itertools.chain.from_iterable(results))
