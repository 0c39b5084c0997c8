"""Apply a function to a variable block by block, on threads or by dask, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise, product
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.cube.chunks.blocks import block_shape, blocks
from ml4cube.cube.chunks.lazy_zarr import read_directly

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
    variable = read_directly(variable)
    run = partial(_run, work, [None if one is None else one.dims for one in (variable, *others)])
    if any(one is not None and one.chunks is not None for one in (variable, *others)):
        yield from _each_dask_block(variable, others, run)
        return

    def read(slices: Slices) -> T:
        return run(*(_cut(one, slices) for one in (variable, *others)))

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
    work: Work[T], dims: Sequence[tuple[Hashable, ...] | None], *arrays: NDArray[Any] | None
) -> T:
    """Run `work` with every array broadcast to the shape of the first, the block."""
    block, whole = arrays[0], dims[0]
    assert block is not None
    assert whole is not None
    sizes = dict(zip(whole, block.shape, strict=True))
    full = [
        None if array is None else xr.Variable(known or (), array).set_dims(sizes).values  # type: ignore[no-untyped-call]
        for array, known in zip(arrays, dims, strict=True)
    ]
    return work(*full)


def _each_dask_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], run: Work[T]
) -> Iterator[tuple[Slices, T]]:
    """Run in dask's workers, which return a few results at a time."""
    import dask
    import dask.array

    if variable.chunks is None:
        variable = variable.chunk(block_shape(variable))
    dims = variable.dims
    chunks = dict(zip(dims, variable.chunks or (), strict=True))
    arguments: list[Any] = []
    for one in (variable, *others):
        if one is None:
            arguments += [None, None]
        else:
            array = one.chunk({dim: chunks[dim] for dim in one.dims}).data
            arguments += [array, [dims.index(dim) for dim in one.dims]]
    # one object instead of each block
    found = dask.array.blockwise(  # type: ignore[no-untyped-call]
        run, range(len(dims)), *arguments, dtype=object, meta=np.empty(0)
    )
    ends = [pairwise(np.cumsum([0, *sizes]).tolist()) for sizes in chunks.values()]
    blocks_of = zip(product(*ends), found.to_delayed().ravel(), strict=True)
    while batch := list(islice(blocks_of, max(4 * threads(), 16))):
        tasks = [task for _, task in batch]
        results = dask.compute(*tasks)  # type: ignore[attr-defined,no-untyped-call]
        for (parts, _), result in zip(batch, results, strict=True):
            yield {str(d): slice(*part) for d, part in zip(dims, parts, strict=True)}, result
