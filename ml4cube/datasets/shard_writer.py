"""Pass 2 in a worker: makes one shard and writes it.

Imports nothing that a worker does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import RunError
from ml4cube.core.partition import hash_ids
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import scale_values
from ml4cube.datasets.extractor import Arrays, Extractor
from ml4cube.datasets.folders import Files, Folder
from ml4cube.datasets.precision import Precision
from ml4cube.datasets.store import ArrayLayout, StoreLayout, write_shard
from ml4cube.datasets.windows import CubeReader

# Samples this small are mixed in runs: a run is far shorter than a chunk, and copying runs is
# as fast as copying whole tiles.
_RUN_BYTES = 4096
_MAX_RUN = 64


@dataclass(frozen=True)
class Piece:
    """Samples of one tile that go into one shard.

    Parameters
    ----------
    tile : int
        Id of the tile.
    first, last : int
        Range among the tile's samples of the part.
    expected : int
        Samples of the part that the tile had when they were counted.
    """

    tile: int
    first: int
    last: int
    expected: int


@dataclass(frozen=True)
class ShardJob:
    """All that writing the shards of one part has in common; picklable.

    Parameters
    ----------
    extractor : Extractor
        Makes the samples.
    part : str
        The part.
    root : Folder
        Folder of the store under way.
    layout : StoreLayout
        Its layout.
    scaling : dict of str to (float, float)
        Offset and scale of every variable that is scaled.
    mix : bool
        Whether samples are mixed inside a shard.
    precision : Precision
        What is kept of the samples.
    common : CubeReader
        Reads what all tiles have in common.
    """

    extractor: Extractor
    part: str
    root: Folder
    layout: StoreLayout
    scaling: Mapping[str, tuple[float, float]]
    mix: bool
    precision: Precision
    common: CubeReader


def make_shard(
    job: ShardJob, task: tuple[int, list[Piece], list[CubeReader]]
) -> tuple[str, int, Files]:
    """Make one shard and write it, in a worker; doing it again gives the same bytes.

    Parameters
    ----------
    job : ShardJob
        What all shards of the part have in common.
    task : tuple
        Number of the shard, its pieces, and a reader of what only each piece's tile needs.

    Returns
    -------
    (str, int, dict)
        The part, the shard, and the files written.

    Raises
    ------
    RunError
        If the cube changed since the samples were counted.
    """
    shard, pieces, readers = task
    first, last = job.layout.bounds(shard)
    values: Arrays = {
        array.name: np.empty((last - first, *array.window), _memory_dtype(array))
        for array in job.layout.arrays
    }
    run = _run_length(job.layout) if job.mix else last - first
    order = _run_order(last - first, run, _shard_seed(job, shard))
    starts = _run_starts(last - first, run, order)
    windows = any(array.ndim > 1 for array in values.values())
    filled = 0
    for piece, reader in zip(pieces, readers, strict=True):
        samples = _piece_samples(job, piece, reader.joined(job.common))
        here = slice(filled, filled + piece.last - piece.first)
        place = np.arange(here.start, here.stop if windows else here.start)
        where = starts[place // run] + place % run
        for name, array in values.items():
            array[where if array.ndim > 1 else here] = samples[name]
        filled = here.stop
    for name, array in values.items():
        if array.ndim == 1:
            # numbers one by one are mixed when all are there, in runs: several times as fast
            values[name] = _mixed(array, run, order)
    return job.part, shard, write_shard(job.root, job.layout, shard, values)


def _memory_dtype(array: ArrayLayout) -> np.dtype[Any]:
    return np.dtype(object if array.dtype == "O" else array.dtype)


def _piece_samples(job: ShardJob, piece: Piece, reader: CubeReader) -> Arrays:
    extractor = job.extractor
    tile = extractor.tiles.block(piece.tile)
    cells = reader.read(extractor.cells_of(tile))
    keep = np.flatnonzero(extractor.outcomes(cells, tile) == PARTS[job.part])
    if len(keep) != piece.expected:
        raise RunError(
            f"block {piece.tile} gave {piece.expected} {job.part} samples when they were counted "
            f"and {len(keep)} now: the cube changed meanwhile; run again with resume=False"
        )
    chosen = slice(piece.first, piece.last)
    if extractor.callback is None:
        samples = extractor.samples(cells, tile, keep[chosen])
    else:
        # the callback sees the same samples together as when the statistics were made
        made = extractor.samples(cells, tile, keep)
        samples = {name: values[chosen] for name, values in made.items()}
    for name, (offset, scale) in job.scaling.items():
        samples[name] = scale_values(samples[name], offset, scale, samples[name].dtype)
    samples = {name: job.precision.apply(name, values) for name, values in samples.items()}
    return samples | extractor.origins(tile, keep[chosen])


def _run_length(layout: StoreLayout) -> int:
    one = sum(array.sample_bytes for array in layout.arrays if not array.coordinate)
    return min(max(_RUN_BYTES // max(one, 1), 1), _MAX_RUN)


def _shard_seed(job: ShardJob, shard: int) -> int:
    return int(hash_ids(job.extractor.seed, [1 + len(PARTS) * shard + PARTS[job.part]])[0])


def _run_order(n: int, run: int, seed: int) -> NDArray[np.intp]:
    """The order in which runs of `run` of `n` samples come after they were mixed."""
    return np.argsort(hash_ids(seed, np.arange(-(-n // run))), kind="stable")


def _run_starts(n: int, run: int, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where each run begins after runs were put into an order."""
    runs = len(order)
    lengths = np.full(runs, run)
    lengths[-1:] = n - run * (runs - 1)
    starts = np.empty(runs, np.intp)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    return starts


def _mixed(values: NDArray[Any], run: int, order: NDArray[np.intp]) -> NDArray[Any]:
    """Put runs into an order, the last of which may be shorter than the others."""
    whole = len(values) // run
    runs, rest = values[: whole * run].reshape(whole, run), values[whole * run :]
    if not len(rest):
        return runs[order].reshape(-1)
    place = int(np.flatnonzero(order == whole)[0])
    before, after = runs[order[:place]], runs[order[place + 1 :]]
    return np.concatenate([before.reshape(-1), rest, after.reshape(-1)])
