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


def threads() -> int:
    """Return the number of cores that this process may use, at most eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


def each_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], function: Callable[..., T]
) -> Iterator[tuple[Slices, T]]:
    """Yield the slices and the result of each block of a variable, computed a few at a time.

    The function takes the block, and the same cells of the others, which may lack dims.
    """
    if variable.size == 0:
        return
    variable = read_directly(variable)  # Still lazy, but its chunks are read without zarr.
    variables = (variable, *others)
    other_dims = [() if other is None else other.dims for other in others]
    of_block = partial(_apply, function, variable.dims, other_dims)
    if any(one is not None and one.chunks is not None for one in variables):
        yield from _each_dask_block(variable, others, of_block)
        return

    def read(slices: Slices) -> T:
        arrays: list[Any] = [_cut(one, slices) for one in variables]
        return of_block(*arrays)

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


def _cut(variable: xr.Variable | None, slices: Slices) -> NDArray[Any] | None:
    """Read the part of a variable that lies in a block."""
    if variable is None:
        return None
    return np.asarray(variable.isel({dim: slices[str(dim)] for dim in variable.dims}).values)


def _apply(
    function: Callable[..., T],
    dims: tuple[Hashable, ...],
    other_dims: Sequence[tuple[Hashable, ...]],
    block: NDArray[Any],
    *others: NDArray[Any] | None,
) -> T:
    """Apply a function to a block and other arrays, broadcast to its shape."""
    sizes = dict(zip(dims, block.shape, strict=True))
    return function(
        block,
        *(
            None if array is None else xr.Variable(known, array).set_dims(sizes).values  # type: ignore[no-untyped-call]
            for known, array in zip(other_dims, others, strict=True)
        ),
    )


def _each_dask_block(
    variable: xr.Variable, others: Sequence[xr.Variable | None], of_block: Callable[..., T]
) -> Iterator[tuple[Slices, T]]:
    """Compute in dask's workers, which return a few results at a time."""
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
    # an array with one object, the result, in place of each block
    results = dask.array.blockwise(  # type: ignore[no-untyped-call]
        of_block, range(len(dims)), *arguments, dtype=object, meta=np.empty(0)
    )
    bounds_along = [pairwise(np.cumsum([0, *sizes]).tolist()) for sizes in chunks.values()]
    tasks = zip(product(*bounds_along), results.to_delayed().ravel(), strict=True)
    while batch := list(islice(tasks, max(4 * threads(), 16))):
        computed = dask.compute(*(task for _, task in batch))  # type: ignore[attr-defined,no-untyped-call]
        for (bounds, _), result in zip(batch, computed, strict=True):
            yield {str(d): slice(*bound) for d, bound in zip(dims, bounds, strict=True)}, result
