"""Pass 1 in a worker: count the outcomes of windows and sum up the train statistics.

Imports nothing that a worker does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml4cube.core.errors import RunError
from ml4cube.core.grid import Block
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.reader import CubeReader
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.extractor import OUTCOMES, Extractor, Schema


@dataclass(frozen=True)
class CountJob:
    """What all counting tasks share; picklable."""

    extractor: Extractor
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
    return [_count_tile(job, id, readers) for id, readers in tiles]


def _count_tile(job: CountJob, id: int, readers: Mapping[str, CubeReader]) -> TileCount:
    extractor = job.extractor
    tile = extractor.tiles.block(id)
    cells = {}
    for role, box in extractor.boxes(tile).items():
        reader = readers[role].joined(job.shared_reader)
        cells[role] = reader.only(job.names[role]).read(box)
    outcomes = extractor.outcomes(cells, tile)
    counts = np.bincount(outcomes, minlength=len(OUTCOMES)).tolist()
    if not job.looks_at_samples:
        return TileCount(id, tuple(counts))
    statistics, schema = None, None
    for part in PARTS.values():
        is_train = part == PARTS["train"]
        # the callback sees the samples of all parts, so that it fails before anything is written
        if counts[part] and (is_train or extractor.callback or schema is None):
            samples = extractor.samples(cells[INPUT], tile, np.flatnonzero(outcomes == part))
            found = {name: (v.shape[1:], v.dtype.str) for name, v in samples.items()}
            schema = agreed_schema(schema, found)
            if is_train:
                statistics = extractor.statistics(samples)
    filled = extractor.filled_in(cells[INPUT]) if any(counts[: len(PARTS)]) else ()
    return TileCount(id, tuple(counts), statistics, schema, filled)


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
    shared: tuple[Extractor, CubeReader], boxes: list[tuple[Block, CubeReader]]
) -> list[Statistics]:
    """Return the statistics of the raw train cells of some boxes of cells."""
    extractor, shared_reader = shared
    return [
        extractor.train_cell_statistics(reader.joined(shared_reader), box) for box, reader in boxes
    ]
