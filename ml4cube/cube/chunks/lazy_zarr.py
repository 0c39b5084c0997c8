"""The zarr array behind a variable that was opened and not loaded.

xarray is imported only where it is needed, so that a worker process that only reads a zarr array
stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class LazyZarr:
    """The zarr array behind one of xarray's lazily indexed arrays. Find it with `LazyZarr.behind`.

    `array` is None for other kinds of files; all else is False or None then. `is_undecoded` is True
    if xarray only indexes it, without scaling, masking or conversion. `box` is the index if that
    selects contiguous cells along each axis. `is_whole` is True if all cells are used,
    `in_this_process` if the store is in its memory, so that other processes cannot read it.
    `absent_are_gaps` is True if absent chunks read as gaps, whatever the fill value.
    """

    array: Any = None
    is_undecoded: bool = False
    box: tuple[slice | int, ...] | None = None
    is_whole: bool = False
    in_this_process: bool = False
    absent_are_gaps: bool = False

    @property
    def is_remote(self) -> bool:
        """True if chunks come from elsewhere than this machine's disk and memory."""
        from zarr.storage import LocalStore

        if self.array is None or self.in_this_process:
            return False
        return not isinstance(self.array.store, LocalStore)

    @classmethod
    def behind(cls, lazy: Any, dtype: np.dtype[Any]) -> LazyZarr:
        """Find the zarr array behind the data of a variable of some dtype, or of None."""
        from xarray.backends.zarr import ZarrArrayWrapper
        from xarray.core.indexing import (
            CopyOnWriteArray,
            ExplicitlyIndexed,
            LazilyIndexedArray,
            MemoryCachedArray,
        )
        from zarr.storage import FsspecStore, MemoryStore

        from ml4cube.cube.chunks.backend import GapsArray

        indexes_only = CopyOnWriteArray | MemoryCachedArray | LazilyIndexedArray
        is_undecoded, absent_are_gaps, keys, inner = True, False, [], lazy
        while isinstance(inner, ExplicitlyIndexed) and hasattr(inner, "array"):
            is_undecoded &= isinstance(inner, indexes_only)
            absent_are_gaps |= isinstance(inner, GapsArray)
            if hasattr(inner, "key"):
                keys.append(inner.key.tuple)
            inner = inner.array
        # a wrapper of another class may change what it reads
        is_undecoded &= type(inner) is ZarrArrayWrapper
        array: Any = getattr(inner, "_array", None)
        store = getattr(array, "store", None)
        if store is None:
            return cls()
        in_this_process = isinstance(store, MemoryStore) or (
            isinstance(store, FsspecStore) and "memory" in store.fs.protocol
        )
        whole = (slice(None),) * array.ndim
        selecting = [key for key in keys if not all(map(_is_everything, key))]
        is_whole = array.shape == lazy.shape and not selecting
        box = whole
        if selecting:
            box = selecting[0]
        if len(selecting) > 1 or len(box) != array.ndim or not all(map(_is_contiguous, box)):
            box = None
        is_undecoded &= array.dtype == dtype
        return cls(array, is_undecoded, box, is_whole, in_this_process, absent_are_gaps)


def _is_everything(key: Any) -> bool:
    """Return True if a key selects all cells."""
    return isinstance(key, slice) and key == slice(None)


def _is_contiguous(key: Any) -> bool:
    """Return True if a key selects contiguous cells."""
    return isinstance(key, int | np.integer) or (isinstance(key, slice) and key.step in (None, 1))


def file_behind(array: Any) -> Any:
    """Return the lazily indexed file that a dask array shows unchanged, as from `open_zarr`."""
    # Reading it directly avoids a graph per region, at a fraction of the cost.
    from xarray.core.indexing import ImplicitToExplicitIndexingAdapter

    # dask's array expressions have no layers
    layers: Any = getattr(array.dask, "layers", {})
    names = {name for name in layers if not name.startswith("rechunk-")}
    original = next((name for name in names if name.startswith("original-")), "")
    # dask.array.from_array, and nothing else, makes exactly these two layers
    if names != {original, original.removeprefix("original-")}:
        return None
    task = layers[original][original]
    adapter = getattr(task, "value", task)
    if not isinstance(adapter, ImplicitToExplicitIndexingAdapter):
        return None
    is_same = adapter.shape == array.shape and adapter.dtype == array.dtype
    if is_same:
        return adapter.array
    return None


def files_in_graph(array: Any) -> Iterator[tuple[Any, list[tuple[slice, ...]]]]:
    """Yield the lazily indexed files that a dask array is computed from, and the boxes it reads."""
    from dask.core import flatten
    from xarray.core.indexing import ImplicitToExplicitIndexingAdapter

    layers: Any = getattr(array.dask, "layers", {})
    originals = {}
    for name in layers:
        task = None
        if name.startswith("original-"):
            task = layers[name][name]
        adapter = getattr(task, "value", task)
        if isinstance(adapter, ImplicitToExplicitIndexingAdapter):
            originals[name.removeprefix("original-")] = adapter.array
    if not originals:
        return
    keys = set(flatten(array.__dask_keys__()))  # type: ignore[no-untyped-call]
    needed = array.dask.cull(keys).layers
    for layer in needed.values():
        # culled layers have other names, but their keys do not change
        key = next(iter(layer), None)
        name = None
        if isinstance(key, tuple):
            name = key[0]
        if name in originals:
            yield originals[name], [_box_of(task) for _, task in layer.items()]


def _box_of(task: Any) -> tuple[slice, ...]:
    """Return the slices in the task that reads a block of a file."""
    for argument in getattr(task, "args", task):
        slices = getattr(argument, "value", argument)
        if isinstance(slices, tuple) and all(isinstance(part, slice) for part in slices):
            return slices
    raise TypeError(f"no slices in {task!r}")


def lazily_indexed(variable: xr.Variable) -> xr.Variable | None:
    """Return a variable without dask; None if dask computes its cells."""
    from xarray import Variable

    # `_data`, because `data` would load a lazily indexed file
    data: Any = variable._data
    lazy = data
    if variable.chunks is not None:
        lazy = file_behind(data)
    if lazy is None:
        return None
    return Variable(variable.dims, lazy)
