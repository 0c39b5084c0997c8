"""Work on a variable block by block: on threads, or where dask reads it, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.preprocessing import cubes

T = TypeVar("T")
Slices = dict[str, slice]
Work = Callable[..., T]


def threads() -> int:
    """Count the cores this process may use, up to eight.

    Returns
    -------
    int
        At least 1.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


def each_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], work: Work[T]
) -> Iterator[tuple[Slices, T]]:
    """Run `work` on each block of a variable, a few blocks at a time.

    Parameters
    ----------
    variable : Variable
        In memory, lazily opened, or of dask.
    others : sequence of Variable or None
        Of the same dims, cut alike.
    work : callable
        Called as ``work(slices, values, *others)`` with arrays, and None for None. Where dask is
        in use it must be picklable.

    Yields
    ------
    slices : dict of str to slice
        Where the block lies.
    result : object
        What `work` returned. Blocks come in a fixed order, that of the array.
    """
    if variable.size == 0:
        return
    if cubes.is_lazy(variable, *others):
        yield from _each_dask_block(variable, others, work)
        return

    def read(slices: Slices) -> T:
        cut = [None if one is None else one.isel(slices).values for one in others]
        return work(slices, variable.isel(slices).values, *cut)

    # reading, decoding and summing release the GIL
    count = threads()
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[tuple[Slices, Future[T]]] = deque()
        for slices in cubes.blocks(variable):
            waiting.append((slices, pool.submit(read, slices)))
            if len(waiting) > 2 * count:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _each_dask_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], work: Work[T]
) -> Iterator[tuple[Slices, T]]:
    """Run `work` where dask computes the blocks; a few results come back at a time."""
    import dask

    if variable.chunks is None:
        variable = variable.chunk(cubes.block_shape(variable))
    chunks = variable.chunks or ()
    named = dict(zip(variable.dims, chunks, strict=True))
    arrays = [variable, *(None if one is None else one.chunk(named) for one in others)]
    parts = [None if one is None else one.data.to_delayed() for one in arrays]
    task = dask.delayed(work, pure=False)  # type: ignore[attr-defined]
    indices = iter(np.ndindex(*(len(sizes) for sizes in chunks)))
    starts = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in chunks]
    while batch := list(islice(indices, 4 * threads())):
        places = [_place(variable, starts, index) for index in batch]
        tasks = [
            task(slices, *(None if part is None else part[index] for part in parts))
            for slices, index in zip(places, batch, strict=True)
        ]
        results = dask.compute(*tasks)  # type: ignore[attr-defined,no-untyped-call]
        yield from zip(places, results, strict=True)


def _place(
    variable: xr.Variable, starts: Sequence[NDArray[np.int64]], index: tuple[int, ...]
) -> Slices:
    """Slices of a dask block."""
    return {
        str(dim): slice(int(edges[i]), int(edges[i + 1]))
        for dim, edges, i in zip(variable.dims, starts, index, strict=True)
    }
