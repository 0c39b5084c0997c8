"""Pass 1: read the cube once; count the samples of each part and the drops by reason."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, Table
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidValueError,
    caller_level,
)
from ml4cube.core.grid import Grid
from ml4cube.core.sample_facts import outcome_table
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.absent_chunks import AbsentChunks
from ml4cube.cube.engine import Engine
from ml4cube.cube.reader import CubeReader
from ml4cube.preprocessing.cubes import check_no_fill_value
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.counting import (
    CountJob,
    TileCount,
    agreed_schema,
    count_tiles,
    count_train_cells,
)
from ml4cube.sampling.outcomes import OUTCOMES, REASONS, deciding_variables
from ml4cube.sampling.parts import expects_part
from ml4cube.sampling.rescaling import select_statistics
from ml4cube.sampling.sampled_cube import SampledCube
from ml4cube.sampling.samples import Schema, variables_read
from ml4cube.sampling.selection import check_targets
from ml4cube.sampling.tiling import MIB, ORIGIN_BYTES, TiledRecipe, sample_bytes
from ml4cube.store.precision import Precision

# Bytes of the samples of one counting task, and the most tasks of one pass.
_COUNT_BYTES = 16 * MIB
_MAX_TASKS = 20_000


@dataclass(frozen=True, repr=False)
class SamplePlan(Summarized):
    """The result of sampling, known before anything is written."""

    parts: tuple[str, ...]
    # ``total`` windows, samples of each part, and drops by reason: ``edge`` (would pass the cube's
    # end), ``straddle`` (in two parts), ``buffer`` (touches excluded cells), ``mask``, ``gap``,
    # ``unused`` (in an unused block). Parts and reasons add up to the total.
    accounting: Mapping[str, int]
    # Of the float variables: those given, or those of the train samples before scaling.
    statistics: Statistics
    # Window shape and dtype of every stored variable.
    schema: Schema
    # Of a stored sample, along all dims.
    origin_bytes: int
    # Number of samples of each tile (a box of windows) and part.
    tile_samples: NDArray[np.int64]
    # Chunks that are missing from the source, by variable.
    absent: Mapping[str, AbsentChunks]
    # Windows that span missing dates; they are also counted by part or reason.
    over_missing_dates: int
    # Variables of the cube that are not sampled, with the reason.
    left_out: Mapping[str, str]
    # Variables with gaps that are filled, with the method.
    filled: Mapping[str, str]

    def stored_as(self, precision: Precision) -> SamplePlan:
        """Return the plan with the dtypes that samples have on disk."""
        precision.check_names(self.dtypes)
        schema = {
            name: (window, precision.dtype(name, dtype))
            for name, (window, dtype) in self.schema.items()
        }
        return replace(self, schema=schema)

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of every stored variable."""
        return {name: dtype for name, (_, dtype) in self.schema.items()}

    @property
    def samples(self) -> dict[str, int]:
        """Samples of each part."""
        return {part: self.accounting[part] for part in self.parts}

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample with its origin, before compression."""
        arrays = self.schema.values()
        values = sum(math.prod(window) * np.dtype(dtype).itemsize for window, dtype in arrays)
        return values + self.origin_bytes

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the samples of each part, before compression."""
        return {part: n * self.sample_bytes for part, n in self.samples.items()}

    @property
    def dropped(self) -> dict[str, int]:
        """Windows that give no sample, by reason."""
        return {name: self.accounting[name] for name in ("edge", *REASONS)}

    def _summary(self) -> Summary:
        """Return what every part gets, what is dropped, and what to know about the source."""
        notes = [f"{name!r}: {chunks}" for name, chunks in self.absent.items()]
        if self.over_missing_dates:
            notes.append(f"{self.over_missing_dates:,} windows span missing dates")
        notes += [f"filled: gaps of {name!r} ({how!r})" for name, how in self.filled.items()]
        notes += [f"left out: {name!r} {why}" for name, why in self.left_out.items()]
        variables = {
            name: " ".join([" × ".join(map(str, window)), np.dtype(dtype).name]).strip()
            for name, (window, dtype) in self.schema.items()
        }
        return Summary(
            f"{sum(self.samples.values()):,} samples of {self.accounting['total']:,} windows",
            {"Variables": variables},
            {
                "Windows": outcome_table(self.accounting, self.parts, self.sample_bytes),
                "Notes": Table.listing(notes),
                "Statistics": self.statistics,
            },
        )


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
    tiled, recipe, dtypes = sampled.tiled, sampled.recipe, sampled.reader.cells.dtypes
    if recipe.fills_from_train:
        tiled = replace(tiled, fill=fill_statistics(sampled, engine, tiles_per_task))
    looks_at_samples = makes_samples(sampled) or not is_lazy
    names = deciding_variables(tiled, dtypes)
    if looks_at_samples:
        names[INPUT] = tuple(dict.fromkeys((*names[INPUT], *variables_read(recipe))))
    shared_reader, own_reader = sampled.reader.cells.split(engine.shares_memory)
    job = CountJob(tiled, shared_reader, names, looks_at_samples)
    counts = _Counts(np.zeros((len(tiled.tiles), len(OUTCOMES)), np.int64))
    own_readers = {role: own_reader.only(names[role]) for role in names}
    tasks = (
        [(id, _narrowed(own_readers, tiled, id)) for id in ids]
        for ids in _divide(len(tiled.tiles), sampled, tiles_per_task)
    )
    for results in engine.run_in_order(count_tiles, job, tasks):
        counts.add(results)
        note(len(results))
    outcomes = counts.outcomes.sum(axis=0)
    accounting = accounting_of(tiled.bound.total, outcomes, parts)
    warn_of_nothing_to_fill(recipe, accounting)
    if not is_lazy or not outcomes[: len(PARTS)].any():
        _check_parts(sampled, accounting, outcomes, parts)
    schema = counts.schema or {  # nothing was sampled
        name: (recipe.window_shape, dtypes[name].str) for name in recipe.variables
    }
    check_targets(recipe, schema, sampled.ds)
    scaled = recipe.scaled_variables({name: dtype for name, (_, dtype) in schema.items()})
    statistics = counts.statistics
    if statistics is None:
        statistics = Statistics.empty(scaled if looks_at_samples else [], part="train")
    _check_no_fill_values(statistics, sampled)
    if sampled.given is not None:
        statistics = select_statistics(sampled.given, scaled)
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


def makes_samples(sampled: SampledCube) -> bool:
    """Return True if planning needs samples: for statistics, or the variables of a callback."""
    needs_statistics = sampled.recipe.scale_fn is not None and sampled.given is None
    return needs_statistics or sampled.tiled.callback is not None


def _check_no_fill_values(statistics: Statistics, sampled: SampledCube) -> None:
    # attributes name the fill value of the source, not of what a callback makes
    if sampled.tiled.callback:
        return
    for name in statistics:
        if name in sampled.ds:
            check_no_fill_value(name, statistics[name], sampled.ds[name])


def warn_of_nothing_to_fill(recipe: Recipe, accounting: Mapping[str, int]) -> None:
    """Warn if samples were dropped for gaps that `fill_method` should fill."""
    dropped = accounting["gap"]
    if dropped and recipe.fill_method and recipe.drop_nan == "auto":
        warnings.warn(
            f"fill_method fills nothing, because drop_nan='auto' drops every sample with a gap "
            f"({dropped} of {accounting['total']} windows); give drop_nan='if_all_nan' or None to "
            "keep and fill them",
            stacklevel=caller_level(),
        )


def _narrowed(
    readers: Mapping[str, CubeReader], tiled: TiledRecipe, tile: int
) -> dict[str, CubeReader]:
    """Return the readers of each role, narrowed to the cells of a tile."""
    boxes = tiled.bound.boxes(tiled.tiles.block(tile))
    return {role: readers[role].narrow(box) for role, box in boxes.items()}


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
    recipe, tiles = sampled.recipe, sampled.tiled.tiles
    shape = sampled.tiled.bound.sizes
    # like tiles, but windows of neighbouring tiles share cells, and boxes do not
    size = {
        dim: min(windows * stride, shape[dim])
        for dim, windows, stride in zip(recipe.dims, tiles.tile, recipe.stride, strict=True)
    }
    boxes = Grid.blocks(shape, size)
    shared_reader, own_reader = sampled.reader.cells.split(engine.shares_memory)
    tasks = (
        [(boxes.block(id), own_reader.narrow(boxes.block(id).slices)) for id in ids]
        for ids in _divide(len(boxes), sampled, boxes_per_task)
    )
    shared = sampled.tiled, shared_reader
    results = engine.run_in_order(count_train_cells, shared, tasks)
    return functools.reduce(Statistics.merge, itertools.chain.from_iterable(results))


def accounting_of(total: int, outcomes: NDArray[np.int64], parts: Iterable[str]) -> dict[str, int]:
    """Return the number of all windows, of samples of each part, and of drops by reason.

    `outcomes` are those of all windows inside the cube; the others pass its end.
    """
    counts = dict(zip(OUTCOMES, outcomes.tolist(), strict=True))
    names = (*parts, *REASONS)
    edge = total - sum(counts.values())
    return {"total": total, "edge": edge, **{name: counts[name] for name in names}}


def _check_parts(
    sampled: SampledCube,
    accounting: Mapping[str, int],
    outcomes: NDArray[np.int64],
    parts: tuple[str, ...],
) -> None:
    """Refuse empty parts that should have samples, and samples of parts without a store."""
    for part, label in PARTS.items():
        if part not in parts and outcomes[label]:
            raise InvalidValueError(
                f"the split has {int(outcomes[label])} samples in the {part} part; give "
                f"{part}_cube a path"
            )
    empty = [part for part in parts if not accounting[part]]
    wanted = [part for part in empty if expects_part(sampled.split, part)]
    if wanted or len(empty) == len(parts):
        refuse_empty(accounting, wanted or empty, parts)


def refuse_empty(
    accounting: Mapping[str, int], empty: Sequence[str], parts: Sequence[str] = tuple(PARTS)
) -> NoReturn:
    """Raise an error that says why parts hold no sample."""
    drops = {k: n for k, n in accounting.items() if n and k not in ("total", *parts)}
    raise EmptyPartError(
        f"the {' and the '.join(empty)} part would hold no sample: "
        f"{sum(accounting[p] for p in parts)} of {accounting['total']} windows remain, dropped are "
        f"{drops}; use smaller windows or more blocks, or change drop_nan, the mask or "
        "the split"
    )
