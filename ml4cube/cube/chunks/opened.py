"""What lies behind a variable that was opened and not read, and a shorter way to its cells.

xarray is imported where it is needed and nowhere else, so that a worker process that only reads a
zarr array stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.cube.chunks.disk import DiskChunks

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Opened:
    """What one of xarray's lazily indexed file arrays reads from. Make one with `Opened.of`."""

    # The zarr array that is read; None if it is another kind of file.
    zarr: Any
    # Whether xarray only indexes it: nothing is scaled, masked or converted.
    plain: bool
    # How it is indexed, if that is a box of cells.
    box: tuple[slice | int, ...] | None
    # Whether every cell is there, in its place.
    whole: bool
    # Whether it lies in the memory of this process, where no other finds it.
    here_only: bool

    @classmethod
    def of(cls, array: Any, dtype: np.dtype[Any]) -> Opened:
        """Look behind an array."""
        from xarray.backends.zarr import ZarrArrayWrapper
        from xarray.core.indexing import (
            CopyOnWriteArray,
            ExplicitlyIndexed,
            LazilyIndexedArray,
            MemoryCachedArray,
        )
        from zarr.storage import FsspecStore, MemoryStore

        only_index = CopyOnWriteArray | MemoryCachedArray | LazilyIndexedArray
        plain, keys, inner = True, [], array
        while isinstance(inner, ExplicitlyIndexed) and hasattr(inner, "array"):
            plain &= isinstance(inner, only_index)
            keys += [inner.key.tuple] if hasattr(inner, "key") else []
            inner = inner.array
        # a wrapper of another class may change what it reads
        plain &= type(inner) is ZarrArrayWrapper
        stored: Any = getattr(inner, "_array", None)
        store = getattr(stored, "store", None)
        if store is None:
            return cls(None, False, None, False, False)
        here_only = isinstance(store, MemoryStore)
        if isinstance(store, FsspecStore):
            here_only = "memory" in store.fs.protocol
        whole = stored.shape == array.shape and all(
            isinstance(k, slice) and k == slice(None) for key in keys for k in key
        )
        box = keys[0] if len(keys) == 1 and all(map(_is_run, keys[0])) else None
        return cls(stored, plain and stored.dtype == dtype, box, whole, here_only)

    @property
    def stored(self) -> Any:
        """The zarr array whose cells these are, one by one; None if unsure, or out of reach."""
        return self.zarr if self.whole and not self.here_only else None

    @property
    def hides_chunks(self) -> bool:
        """Whether the cells come from zarr, but `stored` does not tell from which chunks."""
        return self.zarr is not None and self.stored is None


def _is_run(key: Any) -> bool:
    """Whether cells side by side are asked for."""
    return isinstance(key, int | np.integer) or (isinstance(key, slice) and key.step in (None, 1))


def file_behind(array: Any) -> Any:
    """Find the lazily indexed file that a dask array shows unchanged, as `open_zarr` makes it."""
    # Reading it directly spares a graph per region: the same cells at a fraction of the cost.
    from xarray.core.indexing import ImplicitToExplicitIndexingAdapter

    # dask's array expressions have none
    layers: Any = getattr(array.dask, "layers", {})
    original = f"original-{array.name}"
    # dask.array.from_array, and nothing else, makes exactly these two layers
    if set(layers) != {original, array.name}:
        return None
    held = layers[original][original]
    held = getattr(held, "value", held)
    if not isinstance(held, ImplicitToExplicitIndexingAdapter):
        return None
    same = held.shape == array.shape and held.dtype == array.dtype
    return held.array if same else None


def straight(variable: xr.Variable) -> xr.Variable:
    """Read a variable's chunks without zarr-python, where they lie on this machine's disk."""
    # It is to be read box by box: cells picked from it would cost all those between them.
    from dask.base import is_dask_collection
    from xarray import Variable
    from xarray.core.indexing import BasicIndexer, LazilyIndexedArray

    from ml4cube.cube.chunks.backend import ChunksArray

    # `_data`, since asking for `data` would load a lazily indexed file
    given: Any = variable._data
    of_dask = is_dask_collection(given)
    if variable._in_memory and not of_dask:
        return variable
    file = file_behind(given) if of_dask else given
    found = None if file is None else Opened.of(file, np.dtype(variable.dtype))
    if found is None or not found.plain or found.box is None:
        return variable
    chunks = DiskChunks.of(found.zarr)
    if chunks is None:
        return variable
    data = LazilyIndexedArray(ChunksArray(chunks, found.zarr.shape), BasicIndexer(found.box))
    quick = Variable(variable.dims, data, variable.attrs, variable.encoding)
    if not of_dask:
        return quick
    # named after the array given, so that nobody's cache takes one state of a file for another
    return quick.chunk(variable.chunksizes, name=f"straight-{given.name}")
