"""Pass 2: which samples go into which shard, in which order, and the task that writes one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, RunError
from ml4cube.core.partition import hash_ids
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics, scale_parameters, scale_values
from ml4cube.datasets.encoding import Compressor
from ml4cube.datasets.extractor import Arrays, Extractor
from ml4cube.datasets.folders import Files, Folder
from ml4cube.datasets.precision import Precision
from ml4cube.datasets.sample_plan import SamplePlan, Sampling, jsonable, shard_bytes
from ml4cube.datasets.store import ArrayLayout, StoreLayout, write_shard
from ml4cube.datasets.windows import CubeReader

ORDERS = ("shuffled", "grid")

_CHUNKS_PER_SHARD = 8
_MAX_CHUNK_SAMPLES = 65_536
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


def scaling_of(statistics: Statistics, scale_fn: str | None) -> dict[str, tuple[float, float]]:
    """Offset and scale of every variable that is scaled.

    Parameters
    ----------
    statistics : Statistics
        Of the train samples.
    scale_fn : {"standardize", "normalize", None}
        How to scale.

    Returns
    -------
    dict of str to (float, float)
        Empty for None.

    Raises
    ------
    InvalidValueError
        If the train part has no finite value of a variable.
    """
    if scale_fn is None:
        return {}
    scaling = {}
    for name, stats in statistics.items():
        try:
            scaling[name] = scale_parameters(stats, scale_fn)
        except InvalidValueError as error:
            raise InvalidValueError(f"variable {name!r} of the train part: {error}") from None
    return scaling


def layout_of(
    sampling: Sampling,
    plan: SamplePlan,
    part: str,
    chunk: int | None,
    scaling: Mapping[str, tuple[float, float]],
    precision: Precision,
    compressor: Compressor,
) -> StoreLayout:
    """Lay out the store of one part.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    plan : SamplePlan
        What every part gets.
    part : str
        The part.
    chunk : int, optional
        Samples of a chunk, if asked for.
    scaling : dict of str to (float, float)
        Offset and scale of scaled variables.
    precision : Precision
        What is kept of the samples.
    compressor : Compressor
        Of every chunk.

    Returns
    -------
    StoreLayout
        Depends on nothing but its arguments, so not on the number of workers.
    """
    spec, n = sampling.spec, plan.samples[part]
    one = max(1, math.ceil(plan.nbytes[part] / max(n, 1)))
    target = max(1, shard_bytes(plan.nbytes[part]) // one)
    if chunk is None:
        chunk = min(max(1, target // _CHUNKS_PER_SHARD), _MAX_CHUNK_SAMPLES)
    chunk = min(chunk, max(n, 1))
    shard = chunk * max(1, min(target, n) // chunk)
    arrays = [
        ArrayLayout(name, _dims(spec, name, window), window, dtype, chunk, attrs)
        for name, (window, dtype) in plan.schema.items()
        for attrs in [
            _variable_attrs(sampling, name, scaling.get(name)) | precision.attrs(name, dtype)
        ]
    ]
    samples = (spec.array_dims[0],)
    index = np.dtype(np.int32 if max(spec.shape) < 2**31 else np.int64).str
    for axis, dim in zip(sampling.extractor.axes, spec.dims, strict=True):
        kind = axis.values.dtype.str if axis.values.dtype.kind != "O" else "O"
        arrays.append(ArrayLayout(axis.name, samples, (), kind, shard, axis.attrs, True))
        note = {"long_name": f"index along {dim} of the sample's first cell"}
        arrays.append(ArrayLayout(f"{dim}_index", samples, (), index, shard, note, True))
    return StoreLayout(n, shard, tuple(arrays), compressor)


def _dims(spec: SampleSpec, name: str, window: tuple[int, ...]) -> tuple[str, ...]:
    """Dims of a stored variable; a callback may have given it a window of its own."""
    if window == spec.window_shape:
        return spec.array_dims
    return (spec.array_dims[0], *(f"{name}_{axis}" for axis in range(1, len(window) + 1)))


def _variable_attrs(
    sampling: Sampling, name: str, scaling: tuple[float, float] | None
) -> dict[str, Any]:
    attrs = jsonable(sampling.ds[name].attrs) if name in sampling.ds else {}
    if scaling is not None:
        attrs |= {"ml4cube_offset": scaling[0], "ml4cube_scale": scaling[1]}
    return attrs


def shard_tasks(
    sampling: Sampling, plan: SamplePlan, part: str, layout: StoreLayout, order: str
) -> Iterator[tuple[int, list[Piece]]]:
    """Say for every shard of a part which samples of which tiles it holds.

    Parameters
    ----------
    sampling : Sampling
        What is sampled.
    plan : SamplePlan
        What every tile gives.
    part : str
        The part.
    layout : StoreLayout
        Layout of the store.
    order : {"shuffled", "grid"}
        Order of tiles.

    Yields
    ------
    (int, list of Piece)
        Number of a shard and what it is made of.
    """
    counts = plan.tile_samples[:, plan.parts.index(part)]
    tiles = np.arange(len(counts))
    if order == "shuffled":
        tiles = np.argsort(hash_ids(sampling.extractor.seed, tiles), kind="stable")
    tiles = tiles[counts[tiles] > 0]
    ends = np.cumsum(counts[tiles])
    for shard in range(layout.shards):
        first, last = layout.bounds(shard)
        here = range(
            int(np.searchsorted(ends, first, side="right")),
            int(np.searchsorted(ends, last, side="left")) + 1,
        )
        pieces = []
        for place in here:
            tile, end = int(tiles[place]), int(ends[place])
            begin = end - int(counts[tile])
            pieces.append(
                Piece(tile, max(first - begin, 0), min(last, end) - begin, int(counts[tile]))
            )
        yield shard, pieces


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
    places = _places(last - first, run, _shard_seed(job, shard))
    filled = 0
    for piece, reader in zip(pieces, readers, strict=True):
        samples = _piece_samples(job, piece, reader.joined(job.common))
        where = places[filled : filled + piece.last - piece.first]
        for name, array in values.items():
            array[where] = samples[name]
        filled += piece.last - piece.first
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


def _places(n: int, run: int, seed: int) -> NDArray[np.intp]:
    """Place of each of `n` samples after runs of `run` of them were mixed."""
    runs = -(-n // run)
    order = np.argsort(hash_ids(seed, np.arange(runs)), kind="stable")
    lengths = np.full(runs, run)
    lengths[-1:] = n - run * (runs - 1)
    starts = np.empty(runs, np.intp)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    places = np.arange(n)
    return np.asarray(starts[places // run] + places % run)


def chunk_samples(chunk_size: Any, spec: SampleSpec) -> int | None:
    """Read the sampler's `chunk_size`.

    Parameters
    ----------
    chunk_size : int or sequence of int, optional
        What the user wrote.
    spec : SampleSpec
        How samples are cut.

    Returns
    -------
    int or None
        Samples of a chunk, None to choose.

    Raises
    ------
    InvalidValueError
        If it would cut windows, or is below 1.
    """
    if chunk_size is None:
        return None
    sizes = (chunk_size,) if isinstance(chunk_size, int | np.integer) else tuple(chunk_size)
    whole = all(s in (-1, n) for s, n in zip(sizes[1:], spec.window_shape, strict=False))
    if (
        not sizes
        or not isinstance(sizes[0], int | np.integer)
        or isinstance(sizes[0], bool)
        or sizes[0] < 1
        or not whole
        or len(sizes) > 1 + len(spec.window_shape)
    ):
        raise InvalidValueError(
            f"chunk_size={chunk_size!r} does not fit samples of shape {spec.window_shape}: give "
            "the number of samples in a chunk, which holds whole windows"
        )
    return int(sizes[0])
