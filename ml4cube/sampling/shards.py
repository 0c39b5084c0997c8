"""Pass 2 in a worker: make one shard and write it.

Imports nothing that a worker does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import RunError
from ml4cube.core.partition import hash_ids
from ml4cube.core.scaling import Scaling
from ml4cube.core.split_plan import PARTS
from ml4cube.cube.reader import CubeReader
from ml4cube.ledger.draft import WriteErrors
from ml4cube.ledger.folders import Files, Folder
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.outcomes import classify
from ml4cube.sampling.samples import make_samples, scale_samples
from ml4cube.sampling.tiling import TiledRecipe
from ml4cube.store.format import StoreLayout, write_shard
from ml4cube.store.precision import Precision

# Small samples are mixed in runs of up to so many bytes and samples, far shorter than a chunk:
# neighbours are copied together.
_RUN_BYTES = 4096
_MAX_RUN = 64


@dataclass(frozen=True)
class Piece:
    """Samples of one tile that go into one shard."""

    tile: int
    # Range among the tile's samples of the part, `stop` excluded.
    first: int
    stop: int
    # Samples of the part in the tile, as counted in pass 1.
    expected: int
    # Reads what `ShardJob.shared_reader` does not.
    reader: CubeReader


@dataclass(frozen=True)
class ShardJob:
    """The settings for writing the shards of one part; picklable."""

    tiled: TiledRecipe
    part: str
    # The unfinished store.
    folder: Folder
    write_errors: WriteErrors
    layout: StoreLayout
    # The scaled variables.
    scaling: Mapping[str, Scaling]
    is_shuffled: bool
    precision: Precision
    # Reads the variables that are not sent with each task.
    shared_reader: CubeReader


def make_shard(
    jobs: Mapping[str, ShardJob], task: tuple[str, int, list[Piece]]
) -> tuple[str, int, Files]:
    """Make one shard and write it; doing it again gives the same bytes."""
    part, shard, pieces = task
    job = jobs[part]
    first, stop = job.layout.bounds(shard)
    values: Arrays = {
        array.name: np.empty((stop - first, *array.window), array.dtype)
        for array in job.layout.arrays
    }
    positions = np.arange(stop - first)  # in the shard, of the samples of all pieces
    if job.is_shuffled:
        positions = _mixed_positions(job.layout, stop - first, _shard_seed(job, shard))

    def read(_: None, piece: Piece) -> Arrays:
        box = job.tiled.bound.cells_of(job.tiled.tiles.block(piece.tile))
        return piece.reader.joined(job.shared_reader).read(box)

    threads = job.tiled.threads(job.shared_reader)
    cells_of_pieces = threads.run_in_order(read, None, pieces)
    for piece, cells in zip(pieces, cells_of_pieces, strict=True):
        samples = _piece_samples(job, piece, cells)
        positions_of_piece, positions = np.split(positions, [piece.stop - piece.first])
        for name, array in values.items():
            array[positions_of_piece] = samples[name]
    with job.write_errors:
        return part, shard, write_shard(job.folder, job.layout, shard, values)


def _piece_samples(job: ShardJob, piece: Piece, cells: Arrays) -> Arrays:
    tiled = job.tiled
    tile = tiled.tiles.block(piece.tile)
    keep = np.flatnonzero(classify(tiled, {INPUT: cells}, tile) == PARTS[job.part])
    if len(keep) != piece.expected:
        raise RunError(
            f"tile {piece.tile} has {len(keep)} {job.part} samples, but had {piece.expected} when "
            "they were counted: the cube has changed since; run again with resume=False"
        )
    chosen = slice(piece.first, piece.stop)
    if tiled.callback is None:
        samples = make_samples(tiled, cells, tile, keep[chosen])
    else:
        # the callback gets the same samples at once as when the statistics were made
        of_tile = make_samples(tiled, cells, tile, keep)
        samples = {name: values[chosen] for name, values in of_tile.items()}
    origins = tiled.origins(tile, keep[chosen])
    samples = scale_samples(tiled.recipe, samples, job.scaling, origins)
    samples = {name: job.precision.apply(name, values) for name, values in samples.items()}
    return samples | origins


def _shard_seed(job: ShardJob, shard: int) -> int:
    """Return a seed that differs between shards and parts; stores depend on the formula."""
    return int(hash_ids(job.tiled.recipe.seed, [1 + len(PARTS) * shard + PARTS[job.part]])[0])


def _mixed_positions(layout: StoreLayout, n: int, seed: int) -> NDArray[np.intp]:
    """Return where each sample of a shard goes: runs of neighbouring samples are mixed."""
    sample_bytes = sum(array.sample_bytes for array in layout.arrays if not array.is_coordinate)
    run = min(max(_RUN_BYTES // max(sample_bytes, 1), 1), _MAX_RUN)
    whole_runs = n // run
    starts = run * np.argsort(hash_ids(seed, np.arange(whole_runs)), kind="stable")
    positions = np.arange(n)  # samples after the last whole run stay last
    positions[: whole_runs * run] = (starts[:, np.newaxis] + np.arange(run)).reshape(-1)
    return positions
