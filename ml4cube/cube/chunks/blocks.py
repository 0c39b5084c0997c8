"""Blocks in which arrays without dask chunks are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ml4cube.core.grid import Grid

if TYPE_CHECKING:
    import xarray as xr

V = TypeVar("V", "xr.Variable", "xr.DataArray")

# Cells read at a time from an array without chunks, or of tiny ones: 8 MiB of float32.
_BLOCK_CELLS = 2**21


def file_chunks(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim of the file, by the file's names; none for memory."""
    chunks = {} if variable._in_memory else variable.encoding.get("preferred_chunks") or {}
    # along each dim one size, or one per chunk
    return {str(dim): int(np.max(sizes)) for dim, sizes in chunks.items()}


def chunk_sizes(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim: of the file, else of dask; none in memory."""
    in_dask = {str(dim): max(chunks) for dim, chunks in variable.chunksizes.items()}
    return file_chunks(variable) or in_dask


def block_shape(variable: xr.Variable) -> dict[str, int]:
    """Return the shape of the blocks in which an array without dask chunks is read."""
    sizes = {str(dim): n for dim, n in variable.sizes.items()}
    chunks = file_chunks(variable)
    block = {dim: min(chunks.get(dim, 1), n) for dim, n in sizes.items()}
    # grow by whole chunks, first along the last dim, in which cells lie side by side
    for dim in reversed(sizes):
        affordable = _BLOCK_CELLS // math.prod(block.values())
        needed = math.ceil(sizes[dim] / block[dim])
        block[dim] = min(block[dim] * max(min(affordable, needed), 1), sizes[dim])
    return block


def read_in_blocks(array: V) -> V:
    """Chunk an array that was opened without dask and is not loaded yet."""
    given: Any = array
    variable: xr.Variable = getattr(given, "variable", given)
    if variable.chunks is not None or variable._in_memory:
        return array
    shape = block_shape(variable)
    if all(shape[str(dim)] == n for dim, n in variable.sizes.items()):
        return array
    return array.chunk(shape)


def blocks(variable: xr.Variable) -> Iterator[dict[str, slice]]:
    """Yield the slices of the blocks in which an array without dask chunks is read."""
    sizes = {str(dim): n for dim, n in variable.sizes.items()}
    for block in Grid.blocks(sizes, block_shape(variable)):
        yield block.slices
