"""Apply a function to a variable block by block, on threads or by dask, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.cube.chunks.blocks import block_shape, blocks
from ml4cube.cube.chunks.opened import straight
from ml4cube.preprocessing import cubes

T = TypeVar("T")
Slices = dict[str, slice]
Work = Callable[..., T]


def threads() -> int:
    """Return the number of cores that this process may use, at most eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


def each_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], work: Work[T]
) -> Iterator[tuple[Slices, T]]:
    """Run `work` on each block of a variable, a few blocks at a time."""
    if variable.size == 0:
        return
    variable = straight(variable)
    run = partial(_run, work, variable.dims, [None if one is None else one.dims for one in others])
    if cubes.is_lazy(variable, *others):
        yield from _each_dask_block(variable, others, run)
        return

    def read(slices: Slices) -> T:
        cut = [_cut(one, slices) for one in others]
        return run(slices, variable.isel(slices).values, *cut)

    # reading, decoding and summing release the GIL
    count = threads()
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[tuple[Slices, Future[T]]] = deque()
        for slices in blocks(variable):
            waiting.append((slices, pool.submit(read, slices)))
            if len(waiting) > 2 * count:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _cut(one: xr.Variable | None, slices: Slices) -> NDArray[Any] | None:
    """Return the part of a variable that lies in a block."""
    if one is None:
        return None
    return np.asarray(one.isel({dim: slices[str(dim)] for dim in one.dims}).values)


def _run(
    work: Work[T],
    dims: tuple[Hashable, ...],
    dims_of_others: Sequence[tuple[Hashable, ...] | None],
    slices: Slices,
    values: NDArray[Any],
    *others: NDArray[Any] | None,
) -> T:
    """Run `work` with every array broadcast to the shape of the block."""
    full = [
        None if array is None or known is None else _broadcast(array, known, dims, values.shape)
        for array, known in zip(others, dims_of_others, strict=True)
    ]
    return work(slices, values, *full)


def _broadcast(
    array: NDArray[Any],
    known: tuple[Hashable, ...],
    dims: tuple[Hashable, ...],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """Broadcast an array along the dims it lacks, as a read-only view."""
    present = [dim for dim in dims if dim in known]
    ordered = array.transpose([known.index(dim) for dim in present])
    lacking = tuple(i for i, dim in enumerate(dims) if dim not in known)
    return np.broadcast_to(np.expand_dims(ordered, lacking), shape)


def _each_dask_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], run: Work[T]
) -> Iterator[tuple[Slices, T]]:
    """Run in dask's workers, which return a few results at a time."""
    import dask

    if variable.chunks is None:
        variable = variable.chunk(block_shape(variable))
    chunks = dict(zip(variable.dims, variable.chunks or (), strict=True))
    values = variable.data.to_delayed()
    cut = [_delayed_parts(one, chunks) for one in others]
    task = dask.delayed(run, pure=False)  # type: ignore[attr-defined]
    indices = iter(np.ndindex(*values.shape))
    starts = {dim: np.concatenate([[0], np.cumsum(sizes)]) for dim, sizes in chunks.items()}
    while batch := list(islice(indices, max(4 * threads(), 16))):
        block_slices, tasks = [], []
        for index in batch:
            at = dict(zip(variable.dims, index, strict=True))
            block_slices.append(
                {str(d): slice(int(starts[d][i]), int(starts[d][i + 1])) for d, i in at.items()}
            )
            parts = [
                None if part is None else part[tuple(at[dim] for dim in dims)] for part, dims in cut
            ]
            tasks.append(task(block_slices[-1], values[index], *parts))
        results = dask.compute(*tasks)  # type: ignore[attr-defined,no-untyped-call]
        yield from zip(block_slices, results, strict=True)


def _delayed_parts(
    one: xr.Variable | None, chunks: Mapping[Hashable, tuple[int, ...]]
) -> tuple[NDArray[np.object_] | None, tuple[Hashable, ...]]:
    """Chunk a variable like the blocks, along the dims it has."""
    if one is None:
        return None, ()
    return one.chunk({dim: chunks[dim] for dim in one.dims}).data.to_delayed(), one.dims
