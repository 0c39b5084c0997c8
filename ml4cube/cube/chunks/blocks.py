"""Blocks in which arrays without dask chunks are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ml4cube.cube.chunks.lazy_zarr import file_behind

if TYPE_CHECKING:
    import xarray as xr

V = TypeVar("V", "xr.Variable", "xr.DataArray")

# Cells read at a time from an array without chunks, or of tiny ones: 8 MiB of float32.
BLOCK_CELLS = 2**21


def file_chunks(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim of the file, by the file's names; none for memory."""
    if variable._in_memory:
        return {}
    return _chunks_in_encoding(variable)


def chunks_behind(variable: xr.Variable) -> dict[str, int | tuple[int, ...]]:
    """Return the largest chunk along each dim of the file that holds or held a variable.

    What dask computes has the lengths of dask's.
    """
    if variable.chunks is not None and file_behind(variable.data) is None:
        return {str(dim): chunks for dim, chunks in variable.chunksizes.items()}
    return {**_chunks_in_encoding(variable)}


def shards_behind(variable: xr.Variable) -> dict[str, int]:
    """Return the cells of a shard along each dim of the file; none if it has no shards."""
    shards = variable.encoding.get("shards") or ()
    if len(shards) != variable.ndim:
        return {}
    return dict(zip(map(str, variable.dims), map(int, shards), strict=True))


def _chunks_in_encoding(variable: xr.Variable) -> dict[str, int]:
    chunks = variable.encoding.get("preferred_chunks") or {}
    # along each dim one size, or one per chunk
    return {str(dim): int(np.max(sizes)) for dim, sizes in chunks.items()}


def source_chunks(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim, of dask or the file; nothing if not known."""
    if variable.chunks is not None:
        return {str(d): max(sizes) for d, sizes in variable.chunksizes.items()}
    in_file = file_chunks(variable)
    dims = [str(dim) for dim in variable.dims]
    # if dims were renamed, it is not known which one a chunk size belongs to
    if in_file.keys() >= set(dims):
        return {dim: in_file[dim] for dim in dims}
    return {}


def chunk_sizes(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim: of the file, else of dask; none in memory."""
    in_dask = {str(dim): max(chunks) for dim, chunks in variable.chunksizes.items()}
    return file_chunks(variable) or in_dask


def block_shape(
    sizes: Mapping[str, int],
    chunks: Mapping[str, int],
    uncut: Collection[str] = (),
    budget: int | None = None,
) -> dict[str, int]:
    """Return the shape of blocks of whole chunks that are read at a time."""
    block = {dim: min(chunks.get(dim, 1), n) for dim, n in sizes.items()}
    block |= {dim: sizes[dim] for dim in uncut}
    # grow by whole chunks, first along the last dim, in which cells lie side by side
    for dim in reversed(list(sizes)):
        affordable = (budget or BLOCK_CELLS) // math.prod(block.values())
        needed = math.ceil(sizes[dim] / block[dim])
        block[dim] = min(block[dim] * max(min(affordable, needed), 1), sizes[dim])
    return block


def read_in_blocks(array: V) -> V:
    """Chunk an array that was opened without dask and is not loaded yet."""
    given: Any = array
    variable: xr.Variable = getattr(given, "variable", given)
    if variable.chunks is not None or variable._in_memory:
        return array
    sizes = {str(dim): n for dim, n in variable.sizes.items()}
    shape = block_shape(sizes, file_chunks(variable))
    if shape == sizes:
        return array
    return array.chunk(shape)
