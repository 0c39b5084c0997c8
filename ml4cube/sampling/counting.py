"""Pass 1 in a worker: what becomes of the windows of some tiles, and the train statistics.

Imports nothing that a worker does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ml4cube.core.errors import RunError
from ml4cube.core.grid import Block
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.absent_chunks import AbsentChunks
from ml4cube.cube.reader import CubeReader
from ml4cube.sampling.extractor import OUTCOMES, Extractor, float_statistics

#: Schema of samples: window shape and dtype of every stored variable.
Schema = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class TileCount:
    """What pass 1 learns of one tile."""

    id: int
    # Windows of each of `OUTCOMES`.
    outcomes: tuple[int, ...]
    # Of its train samples; None if it has none.
    statistics: Statistics | None
    # Of its samples; None if it has none.
    schema: Schema | None
    # Chunks that begin in the tile and are not in the source, by variable.
    absent: Mapping[str, AbsentChunks] = field(default_factory=dict)
    # Variables whose gaps in the tile are filled.
    filled: tuple[str, ...] = ()


def count_tiles(
    shared: tuple[Extractor, CubeReader], tiles: list[tuple[int, CubeReader]]
) -> list[TileCount]:
    """Count what becomes of the windows of some tiles."""
    extractor, common = shared
    return [_count_tile(extractor, id, reader.joined(common)) for id, reader in tiles]


def count_outcomes(
    shared: tuple[Extractor, CubeReader], tiles: list[tuple[int, CubeReader]]
) -> list[TileCount]:
    """Count what becomes of the windows of some tiles, without making samples."""
    extractor, common = shared
    found = []
    for id, reader in tiles:
        tile = extractor.tiles.block(id)
        codes = extractor.outcomes(reader.joined(common).read(extractor.cells_of(tile)), tile)
        counts = np.bincount(codes, minlength=len(OUTCOMES))
        found.append(TileCount(id, tuple(int(n) for n in counts), None, None))
    return found


def _count_tile(extractor: Extractor, id: int, reader: CubeReader) -> TileCount:
    tile = extractor.tiles.block(id)
    region = extractor.cells_of(tile)
    cells = reader.read(region)
    absent = reader.absent(cells, region, extractor.owned_by(tile))
    codes = extractor.outcomes(cells, tile)
    counts = np.bincount(codes, minlength=len(OUTCOMES))
    statistics, schema = None, None
    for part in PARTS.values():
        # with a callback all parts are run through it now, so that it fails before writing
        if counts[part] and (part == PARTS["train"] or extractor.callback or schema is None):
            samples = extractor.samples(cells, tile, np.flatnonzero(codes == part))
            schema = same_schema(
                schema, {n: (v.shape[1:], v.dtype.str) for n, v in samples.items()}
            )
            if part == PARTS["train"]:
                statistics = float_statistics(samples)
    filled = extractor.filled_in(cells) if counts[: len(PARTS)].any() else ()
    return TileCount(id, tuple(int(n) for n in counts), statistics, schema, absent, filled)


def same_schema(known: Schema | None, found: Schema | None) -> Schema | None:
    """Refuse samples that differ in variables, shapes or dtypes."""
    if known is not None and found is not None and known != found:
        raise RunError(
            f"the callback returned {found} for some samples and {known} for others; return the "
            "same variables, window shapes and dtypes for all"
        )
    return found if known is None else known


def train_cells(
    shared: tuple[Extractor, CubeReader], boxes: list[tuple[Block, CubeReader]]
) -> list[tuple[int, Statistics]]:
    """Sum up the raw train cells of some boxes of cells."""
    extractor, common = shared
    return [(box.id, extractor.train_cells(reader.joined(common), box)) for box, reader in boxes]
