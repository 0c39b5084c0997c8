"""The zarr array behind a variable that was opened and not loaded.

xarray is imported only where it is needed, so that a worker process that only reads a zarr array
stays small.
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
    """The source of one of xarray's lazily indexed file arrays. Make one with `Opened.of`."""

    # The zarr array; None for other kinds of files.
    zarr: Any
    # Whether xarray only indexes it, without scaling, masking or conversion.
    plain: bool
    # The index, if it is a box of cells.
    box: tuple[slice | int, ...] | None
    # Whether all cells are used, without indexing.
    whole: bool
    # Whether it is in the memory of this process, so that others cannot read it.
    here_only: bool

    @classmethod
    def of(cls, array: Any, dtype: np.dtype[Any]) -> Opened:
        """Find the source of an array."""
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
        """The zarr array with exactly these cells; None if unknown, or not accessible elsewhere."""
        return self.zarr if self.whole and not self.here_only else None

    @property
    def hides_chunks(self) -> bool:
        """Return True if the cells come from zarr, but it is unknown from which chunks."""
        return self.zarr is not None and self.stored is None


def _is_run(key: Any) -> bool:
    """Return True if a key selects contiguous cells."""
    return isinstance(key, int | np.integer) or (isinstance(key, slice) and key.step in (None, 1))


def file_behind(array: Any) -> Any:
    """Return the lazily indexed file that a dask array shows unchanged, as from `open_zarr`."""
    # Reading it directly avoids a graph per region, at a fraction of the cost.
    from xarray.core.indexing import ImplicitToExplicitIndexingAdapter

    # dask's array expressions have no layers
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
    """Return a variable that reads its chunks without zarr-python, if they are on local disk."""
    # Only for reading box by box: selecting single cells would read all cells between them.
    from dask.base import is_dask_collection
    from xarray import Variable
    from xarray.core.indexing import BasicIndexer, LazilyIndexedArray

    from ml4cube.cube.chunks.backend import ChunksArray

    # `_data`, because `data` would load a lazily indexed file
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
    # named after the given array, so that no cache confuses two states of a file
    return quick.chunk(variable.chunksizes, name=f"straight-{given.name}")
