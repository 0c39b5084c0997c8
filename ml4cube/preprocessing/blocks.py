"""Apply a function to a variable block by block, on threads or by dask, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise, product
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import CubeError
from ml4cube.cube.chunks.blocks import block_shape, blocks
from ml4cube.cube.chunks.lazy_zarr import read_directly
from ml4cube.cube.reader import reading

T = TypeVar("T")
Slices = dict[str, slice]


def threads() -> int:
    """Return the number of cores that this process may use, at most eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


def each_block(
    name: str,
    variable: xr.Variable,
    others: Mapping[str, xr.Variable | None],
    function: Callable[..., T],
) -> Iterator[tuple[Slices, T]]:
    """Yield the slices and the result of each block of a variable, computed a few at a time.

    The function takes the block, and by name the same cells of the others, which may lack dims.
    Those that are None are left out. If one cannot be read, the error has its name.
    """
    if variable.size == 0:
        return
    variable = read_directly(variable)  # Still lazy, but its chunks are read without zarr.
    given = {key: other for key, other in others.items() if other is not None}
    variables = {name: variable, **given}
    dims_of = {key: other.dims for key, other in given.items()}
    of_block = partial(_apply, function, variable.dims, dims_of)
    if any(one.chunks is not None for one in variables.values()):
        yield from _each_dask_block(variables, of_block)
        return

    def read(slices: Slices) -> T:
        return of_block(*(_cut(key, one, slices) for key, one in variables.items()))

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


def _cut(name: str, variable: xr.Variable, slices: Slices) -> NDArray[Any]:
    """Read the part of a variable that lies in a block."""
    box = {str(dim): slices[str(dim)] for dim in variable.dims}
    with reading(name, box):
        return np.asarray(variable.isel(box).values)


def _apply(
    function: Callable[..., T],
    dims: tuple[Hashable, ...],
    dims_of: Mapping[str, tuple[Hashable, ...]],
    block: NDArray[Any],
    *others: NDArray[Any],
) -> T:
    """Apply a function to a block and other arrays, broadcast to its shape."""
    sizes = dict(zip(dims, block.shape, strict=True))
    arrays = {}
    for (name, known), array in zip(dims_of.items(), others, strict=True):
        arrays[name] = xr.Variable(known, array).set_dims(sizes).values  # type: ignore[no-untyped-call]
    return function(block, **arrays)


def _each_dask_block(
    variables: Mapping[str, xr.Variable], of_block: Callable[..., T]
) -> Iterator[tuple[Slices, T]]:
    """Compute the blocks of the first variable in dask's workers, a few results at a time."""
    import dask
    import dask.array

    first = next(iter(variables.values()))
    dims = first.dims
    if first.chunks is None:
        first = first.chunk(block_shape(first))
    chunks = dict(zip(dims, first.chunks or (), strict=True))
    arguments: list[Any] = []
    for one in variables.values():
        array = one.chunk({dim: chunks[dim] for dim in one.dims}).data
        arguments += [array, [dims.index(dim) for dim in one.dims]]
    # an array with one object, the result, in place of each block
    results = dask.array.blockwise(  # type: ignore[no-untyped-call]
        of_block, range(len(dims)), *arguments, dtype=object, meta=np.empty(0)
    )
    bounds_along = [pairwise(np.cumsum([0, *sizes]).tolist()) for sizes in chunks.values()]
    tasks = zip(product(*bounds_along), results.to_delayed().ravel(), strict=True)
    while batch := list(islice(tasks, max(4 * threads(), 16))):
        boxes = [
            {str(d): slice(*bound) for d, bound in zip(dims, bounds, strict=True)}
            for bounds, _ in batch
        ]
        try:
            computed = dask.compute(*(task for _, task in batch))  # type: ignore[attr-defined,no-untyped-call]
        except CubeError:
            raise
        except Exception:
            _find_unreadable(variables, boxes)
            raise
        yield from zip(boxes, computed, strict=True)


def _find_unreadable(variables: Mapping[str, xr.Variable], boxes: Sequence[Slices]) -> None:
    """Read blocks again, one by one, for an error that names a variable and its cells."""
    for box in boxes:
        for name, variable in variables.items():
            _cut(name, variable, box)
