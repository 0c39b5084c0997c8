"""Plan the writing pass: the layout of a store, and which samples go into which shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, check_whole
from ml4cube.core.partition import hash_ids
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.scaling import ENTRIES_ATTR, Scaling, encode_entries
from ml4cube.core.statistics import scaled_attrs
from ml4cube.sampling.cf_encoding import jsonable, without_epoch
from ml4cube.sampling.plan import SamplePlan
from ml4cube.sampling.request import Sampling, shard_bytes
from ml4cube.sampling.shards import Piece
from ml4cube.store.format import ArrayLayout, StoreLayout
from ml4cube.store.precision import Precision
from ml4cube.store.shard_encoding import Compressor

ORDERS = ("shuffled", "grid")

_CHUNKS_PER_SHARD = 8
_MAX_CHUNK_SAMPLES = 65_536


def layout_of(
    sampling: Sampling,
    plan: SamplePlan,
    part: str,
    chunk: int | None,
    scaling: Mapping[str, Scaling],
    precision: Precision,
    compressor: Compressor,
) -> StoreLayout:
    """Lay out the store of one part; `chunk` is the number of samples that a user wants in each."""
    spec, n = sampling.spec, plan.samples[part]
    # All parts have shards of about the same size: small ones would start and end inside tiles,
    # which are then read twice.
    wanted = max(1, shard_bytes(sum(plan.nbytes.values())) // plan.sample_bytes)
    if chunk is None:
        chunk = min(max(1, wanted // _CHUNKS_PER_SHARD), _MAX_CHUNK_SAMPLES)
    chunk = min(chunk, max(n, 1))
    shard = chunk * max(1, min(wanted, n) // chunk)
    arrays = []
    for name, (window, dtype) in plan.schema.items():
        attrs = _variable_attrs(sampling, name, scaling.get(name), window)
        attrs |= precision.attrs(name, dtype)
        arrays.append(ArrayLayout(name, _dims(spec, name, window), window, dtype, chunk, attrs))
    sample_dim = spec.array_dims[:1]
    index_dtype = sampling.extractor.index_dtype.str
    for axis, dim in zip(sampling.extractor.axes, spec.dims, strict=True):
        dtype = axis.values.dtype.str
        arrays.append(ArrayLayout(axis.name, sample_dim, (), dtype, shard, axis.attrs, True))
        attrs = {"long_name": f"index along {dim} of the sample's first cell"}
        arrays.append(ArrayLayout(f"{dim}_index", sample_dim, (), index_dtype, shard, attrs, True))
    return StoreLayout(n, shard, tuple(arrays), compressor)


def _dims(spec: SampleSpec, name: str, window: tuple[int, ...]) -> tuple[str, ...]:
    """Return the dims of a stored variable; a callback may have changed its window."""
    if window == spec.window_shape:
        return spec.array_dims
    return (spec.array_dims[0], *spec.window_of(name, window))


def _variable_attrs(
    sampling: Sampling, name: str, scaling: Scaling | None, window: tuple[int, ...]
) -> dict[str, Any]:
    attrs = jsonable(without_epoch(sampling.ds[name].attrs)) if name in sampling.ds else {}
    if scaling is None:
        return attrs
    attrs = scaled_attrs(attrs)
    if scaling.entries:
        spec = sampling.spec
        window_sizes = spec.window_of(name, window)
        stored_dims = dict(zip(window_sizes, _dims(spec, name, window)[1:], strict=True))
        # each with the stored dim that it lies along and the length of that; "" and 1 if none
        entries = [
            [*entry, stored_dims.get(entry[0], ""), window_sizes.get(entry[0], 1)]
            for entry in encode_entries(scaling.entries)
        ]
        return attrs | {ENTRIES_ATTR: entries}
    return attrs | {"ml4cube_offset": scaling.offset, "ml4cube_scale": scaling.scale}


def shard_tasks(
    sampling: Sampling, plan: SamplePlan, part: str, layout: StoreLayout, order: str
) -> Iterator[tuple[int, list[Piece]]]:
    """Yield every shard of a part, with the pieces of tiles that it consists of.

    The samples of all tiles, one tile after the other in the store's order, are cut into shards.
    """
    counts = plan.tile_samples[:, plan.parts.index(part)]
    tiles = np.arange(len(counts))
    if order == "shuffled":
        tiles = np.argsort(hash_ids(sampling.extractor.seed, tiles), kind="stable")
    tiles = tiles[counts[tiles] > 0]
    # in the store, one past the last sample of each tile
    tile_ends = np.cumsum(counts[tiles])
    for shard in range(layout.shard_count):
        shard_start, shard_end = layout.bounds(shard)
        first_tile = int(np.searchsorted(tile_ends, shard_start, side="right"))
        last_tile = int(np.searchsorted(tile_ends, shard_end, side="left"))
        pieces = []
        for position in range(first_tile, last_tile + 1):
            tile, tile_end = int(tiles[position]), int(tile_ends[position])
            n = int(counts[tile])
            tile_start = tile_end - n
            first, stop = max(shard_start - tile_start, 0), min(shard_end, tile_end) - tile_start
            pieces.append(Piece(tile, first, stop, n))
        yield shard, pieces


def chunk_samples(chunk_size: Any, spec: SampleSpec) -> int | None:
    """Return the number of samples in a chunk that `chunk_size` asks for."""
    if chunk_size is None:
        return None
    sizes = (chunk_size,) if isinstance(chunk_size, int | np.integer) else tuple(chunk_size)
    window = zip(sizes[1:], spec.window_shape, strict=False)
    has_whole_windows = all(size in (-1, cells) for size, cells in window)
    if not sizes or not has_whole_windows or len(sizes) > 1 + len(spec.window_shape):
        raise InvalidValueError(
            f"chunk_size must be a number of samples, got {chunk_size!r}; a chunk holds whole "
            f"windows, here of shape {spec.window_shape}"
        )
    check_whole("chunk_size", sizes[0], 1)
    return int(sizes[0])
