"""Plan the writing pass: the layout of a store, and which samples go into which shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, check_whole
from ml4cube.core.partition import hash_ids
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.scaling import ENTRIES_ATTR, Scaling, encode_entries
from ml4cube.core.statistics import scaled_attrs
from ml4cube.sampling.plan import SamplePlan
from ml4cube.sampling.request import Sampling, jsonable, shard_bytes, without_epoch
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
    """Lay out the store of one part."""
    spec, n = sampling.spec, plan.samples[part]
    sample_bytes = max(1, math.ceil(plan.nbytes[part] / max(n, 1)))
    # All parts have shards of about the same size: small ones would start and end inside tiles,
    # which are then read twice.
    wanted = max(1, shard_bytes(sum(plan.nbytes.values())) // sample_bytes)
    if chunk is None:
        chunk = min(max(1, wanted // _CHUNKS_PER_SHARD), _MAX_CHUNK_SAMPLES)
    chunk = min(chunk, max(n, 1))
    shard = chunk * max(1, min(wanted, n) // chunk)
    arrays = []
    for name, (window, dtype) in plan.schema.items():
        attrs = _variable_attrs(sampling, name, scaling.get(name), window)
        attrs |= precision.attrs(name, dtype)
        arrays.append(ArrayLayout(name, _dims(spec, name, window), window, dtype, chunk, attrs))
    samples = (spec.array_dims[0],)
    index = sampling.extractor.index_dtype.str
    for axis, dim in zip(sampling.extractor.axes, spec.dims, strict=True):
        kind = axis.values.dtype.str if axis.values.dtype.kind != "O" else "O"
        arrays.append(ArrayLayout(axis.name, samples, (), kind, shard, axis.attrs, True))
        note = {"long_name": f"index along {dim} of the sample's first cell"}
        arrays.append(ArrayLayout(f"{dim}_index", samples, (), index, shard, note, True))
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
        # each with the stored dim that it lies along and the length of that; "" and 1 if none
        spec = sampling.spec
        stored = zip(
            _dims(spec, name, window)[1:], spec.window_of(name, window).items(), strict=True
        )
        kept = {dim: (shown, n) for shown, (dim, n) in stored}
        written = encode_entries(scaling.entries)
        return attrs | {ENTRIES_ATTR: [[*one, *kept.get(one[0], ("", 1))] for one in written]}
    return attrs | {"ml4cube_offset": scaling.offset, "ml4cube_scale": scaling.scale}


def shard_tasks(
    sampling: Sampling, plan: SamplePlan, part: str, layout: StoreLayout, order: str
) -> Iterator[tuple[int, list[Piece]]]:
    """Yield every shard of a part, with the pieces of tiles that it consists of."""
    counts = plan.tile_samples[:, plan.parts.index(part)]
    tiles = np.arange(len(counts))
    if order == "shuffled":
        tiles = np.argsort(hash_ids(sampling.extractor.seed, tiles), kind="stable")
    tiles = tiles[counts[tiles] > 0]
    ends = np.cumsum(counts[tiles])
    for shard in range(layout.shards):
        first, last = layout.bounds(shard)
        pieces = []
        # tiles with samples from first to last
        for position in range(
            int(np.searchsorted(ends, first, side="right")),
            int(np.searchsorted(ends, last, side="left")) + 1,
        ):
            tile, end = int(tiles[position]), int(ends[position])
            n = int(counts[tile])
            start = end - n
            pieces.append(Piece(tile, max(first - start, 0), min(last, end) - start, n))
        yield shard, pieces


def chunk_samples(chunk_size: Any, spec: SampleSpec) -> int | None:
    """Return the number of samples in a chunk that `chunk_size` asks for."""
    if chunk_size is None:
        return None
    sizes = (chunk_size,) if isinstance(chunk_size, int | np.integer) else tuple(chunk_size)
    whole = all(s in (-1, n) for s, n in zip(sizes[1:], spec.window_shape, strict=False))
    if not sizes or not whole or len(sizes) > 1 + len(spec.window_shape):
        raise InvalidValueError(
            f"chunk_size must be a number of samples, got {chunk_size!r}; a chunk holds whole "
            f"windows, here of shape {spec.window_shape}"
        )
    check_whole("chunk_size", sizes[0], 1)
    return int(sizes[0])
