"""Plan the writing pass: the layout of a store, and which samples go into which shard."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, check_whole
from ml4cube.core.partition import hash_ids
from ml4cube.core.scaling import ENTRIES_ATTR, Scaling, encode_entries
from ml4cube.core.statistics import scaled_attrs
from ml4cube.cube.reader import CubeReader
from ml4cube.recipe.recipe import Recipe
from ml4cube.sampling.cf_encoding import jsonable, without_epoch
from ml4cube.sampling.plan import SamplePlan
from ml4cube.sampling.sampled_cube import SampledCube
from ml4cube.sampling.shards import Piece
from ml4cube.sampling.tiling import shard_bytes
from ml4cube.store.format import ArrayLayout, StoreLayout
from ml4cube.store.precision import Precision
from ml4cube.store.shard_encoding import Compressor

ORDERS = ("shuffled", "grid")

_CHUNKS_PER_SHARD = 8
_MAX_CHUNK_SAMPLES = 65_536


def layout_of(
    sampled: SampledCube,
    plan: SamplePlan,
    part: str,
    samples_per_chunk: int | None,
    scaling: Mapping[str, Scaling],
    precision: Precision,
    compressor: Compressor,
) -> StoreLayout:
    """Lay out the store of one part, in chunks as a user wants them, or in eight per shard."""
    recipe, n = sampled.recipe, plan.samples[part]
    # All parts have shards of about the same size: small ones would start and end inside tiles,
    # which are then read twice.
    per_shard = max(1, shard_bytes(sum(plan.nbytes.values())) // plan.sample_bytes)
    per_chunk = samples_per_chunk or min(max(1, per_shard // _CHUNKS_PER_SHARD), _MAX_CHUNK_SAMPLES)
    per_chunk = min(per_chunk, max(n, 1))
    per_shard = per_chunk * max(1, min(per_shard, n) // per_chunk)
    arrays = []
    for name, (window, dtype) in plan.schema.items():
        attrs = _variable_attrs(sampled, name, scaling.get(name), window)
        attrs |= precision.attrs(name, dtype)
        dims = _stored_dims(recipe, name, window)
        arrays.append(ArrayLayout(name, dims, window, dtype, per_chunk, attrs))
    sample_dim, index_dtype = recipe.array_dims[:1], sampled.tiled.bound.index_dtype
    for axis, dim in zip(sampled.tiled.axes, recipe.dims, strict=True):
        index_attrs = {"long_name": f"index along {dim} of the sample's first cell"}
        for name, origins_dtype, origins_attrs in (
            (axis.name, axis.values.dtype.str, axis.attrs),
            (f"{dim}_index", index_dtype.str, index_attrs),
        ):
            origins = ArrayLayout(name, sample_dim, (), origins_dtype, per_shard, origins_attrs)
            arrays.append(replace(origins, is_coordinate=True))
    return StoreLayout(n, per_shard, tuple(arrays), compressor)


def _stored_dims(recipe: Recipe, name: str, window: tuple[int, ...]) -> tuple[str, ...]:
    """Return the dims of a stored variable; a callback may have changed its window."""
    if window == recipe.window_shape:
        return recipe.array_dims
    return (recipe.array_dims[0], *recipe.window_of(name, window))


def _variable_attrs(
    sampled: SampledCube, name: str, scaling: Scaling | None, window: tuple[int, ...]
) -> dict[str, Any]:
    attrs = jsonable(without_epoch(sampled.ds[name].attrs)) if name in sampled.ds else {}
    if scaling is None:
        return attrs
    attrs = scaled_attrs(attrs)
    if scaling.entries:
        recipe = sampled.recipe
        window_sizes = recipe.window_of(name, window)
        stored_dims = dict(zip(window_sizes, _stored_dims(recipe, name, window)[1:], strict=True))
        # One item for each cube dim along which scaling varies: the dim, the index into the
        # statistics for each of its cells, the dim of the stored window ("" if the window has
        # one cell), and the cells of the window along it.
        entries = [
            [dim, encoded, stored_dims.get(dim, ""), window_sizes.get(dim, 1)]
            for dim, encoded in encode_entries(scaling.entries)
        ]
        return attrs | {ENTRIES_ATTR: entries}
    return attrs | {"ml4cube_offset": scaling.offset, "ml4cube_scale": scaling.scale}


def shard_tasks(
    sampled: SampledCube,
    plan: SamplePlan,
    part: str,
    layout: StoreLayout,
    order: str,
    own_reader: CubeReader,
    done: Container[int] = (),
) -> Iterator[tuple[str, int, list[Piece]]]:
    """Yield the shards of a part that are not done, with the pieces of tiles they consist of.

    The samples of all tiles, one tile after the other in the store's order, are cut into shards.
    `own_reader` reads what the shards do not share.
    """
    samples_in_tile = plan.tile_samples[:, plan.parts.index(part)]
    tiles = np.arange(len(samples_in_tile))
    if order == "shuffled":
        tiles = np.argsort(hash_ids(sampled.recipe.seed, tiles), kind="stable")
    tiles = tiles[samples_in_tile[tiles] > 0]
    # in the store, one past the last sample of each tile
    tile_ends = np.cumsum(samples_in_tile[tiles])
    for shard in (shard for shard in range(layout.shard_count) if shard not in done):
        shard_start, shard_end = layout.bounds(shard)
        first_tile = int(np.searchsorted(tile_ends, shard_start, side="right"))
        last_tile = int(np.searchsorted(tile_ends, shard_end, side="left"))
        pieces = []
        for position in range(first_tile, last_tile + 1):
            tile, tile_end = int(tiles[position]), int(tile_ends[position])
            n = int(samples_in_tile[tile])
            tile_start = tile_end - n
            first, stop = max(shard_start - tile_start, 0), min(shard_end, tile_end) - tile_start
            cells = sampled.tiled.bound.cells_of(sampled.tiled.tiles.block(tile))
            pieces.append(Piece(tile, first, stop, expected=n, reader=own_reader.narrow(cells)))
        yield part, shard, pieces


def chunk_samples(chunk_size: Any, recipe: Recipe) -> int | None:
    """Return the number of samples in a chunk that `chunk_size` asks for."""
    if chunk_size is None:
        return None
    sizes = (chunk_size,) if isinstance(chunk_size, int | np.integer) else tuple(chunk_size)
    # in a sequence, the window may follow the number of samples
    window = zip(sizes[1:], recipe.window_shape, strict=False)
    has_whole_windows = all(size in (-1, cells) for size, cells in window)
    if not sizes or not has_whole_windows or len(sizes) > 1 + len(recipe.window_shape):
        raise InvalidValueError(
            f"chunk_size must be a number of samples, got {chunk_size!r}; a chunk holds whole "
            f"windows, here of shape {recipe.window_shape}"
        )
    return check_whole("chunk_size", sizes[0], 1)
