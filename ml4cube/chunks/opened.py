"""What lies behind a variable that was opened and not read, and a shorter way to its cells.

xarray is imported where it is needed and nowhere else, so that a worker process that only reads a
zarr array stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.chunks.disk import DiskChunks

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Opened:
    """What one of xarray's lazily indexed file arrays reads from. Make one with `Opened.of`.

    Parameters
    ----------
    stored : zarr.Array or None
        The zarr array whose cells these are, one by one; None if unsure.
    plain : bool
        Whether they are those cells as they are: nothing is scaled, masked or converted.
    here_only : bool
        Whether they lie in the memory of this process, where no other finds them.
    hides_chunks : bool
        Whether they come from zarr, but not one by one.
    """

    stored: Any
    plain: bool
    here_only: bool
    hides_chunks: bool

    @classmethod
    def of(cls, array: Any, dtype: np.dtype[Any]) -> Opened:
        """Look behind an array.

        Parameters
        ----------
        array : ExplicitlyIndexed
            What a Variable holds that was opened without dask, or what `file_behind` found.
        dtype : dtype
            Of its cells.

        Returns
        -------
        Opened
            What was found; nothing is read.
        """
        from xarray.core.indexing import CopyOnWriteArray, LazilyIndexedArray, MemoryCachedArray
        from zarr.storage import FsspecStore, MemoryStore

        plain, whole, inner = True, True, array
        while hasattr(inner, "array"):
            if isinstance(inner, LazilyIndexedArray):
                whole &= all(isinstance(k, slice) and k == slice(None) for k in inner.key.tuple)
            else:
                plain &= isinstance(inner, CopyOnWriteArray | MemoryCachedArray)
            inner = inner.array
        stored: Any = getattr(inner, "_array", None)  # of xarray's ZarrArrayWrapper
        store = getattr(stored, "store", None)
        here_only = isinstance(store, MemoryStore)
        if isinstance(store, FsspecStore):
            here_only = "memory" in store.fs.protocol
        in_zarr = store is not None
        one_to_one = in_zarr and not here_only and whole and stored.shape == array.shape
        return cls(
            stored if one_to_one else None,
            one_to_one and plain and stored.dtype == dtype,
            here_only,
            in_zarr and not one_to_one,
        )


def file_behind(array: Any) -> Any:
    """Find the lazily indexed file that a dask array shows unchanged, as `open_zarr` makes it.

    Reading it directly spares a graph per region: the same cells at a fraction of the cost.

    Parameters
    ----------
    array : dask.array.Array
        Of a cube that was opened.

    Returns
    -------
    ExplicitlyIndexed or None
        None if dask computes something.
    """
    from xarray.core.indexing import ImplicitToExplicitIndexingAdapter

    layers = array.dask.layers
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
    """Read a variable's chunks without zarr-python, where they lie on this machine's disk.

    Parameters
    ----------
    variable : Variable
        In memory, lazily opened, or of dask.

    Returns
    -------
    Variable
        The same cells, dims, attributes and encoding, in the same chunks where they are of dask;
        the variable itself where xarray or dask do more than read zarr, or `DiskChunks` does not
        know the layout.

    Examples
    --------
    >>> import tempfile, xarray as xr
    >>> path = f"{tempfile.mkdtemp()}/cube.zarr"
    >>> ds = xr.Dataset({"t": (("y", "x"), np.arange(6.0).reshape(2, 3))})
    >>> _ = ds.to_zarr(path, consolidated=False)
    >>> variable = xr.open_zarr(path, consolidated=False)["t"].variable
    >>> quick = straight(variable)
    >>> quick is variable, quick.chunks == variable.chunks, quick.equals(ds["t"].variable)
    (False, True, True)
    """
    from dask.base import is_dask_collection
    from xarray import Variable
    from xarray.core.indexing import LazilyIndexedArray

    from ml4cube.chunks.backend import ChunksArray

    # `_data`, since asking for `data` would load a lazily indexed file
    given: Any = variable._data
    of_dask = is_dask_collection(given)
    if variable._in_memory and not of_dask:
        return variable
    file = file_behind(given) if of_dask else given
    found = None if file is None else Opened.of(file, np.dtype(variable.dtype))
    chunks = DiskChunks.of(found.stored) if found is not None and found.plain else None
    if chunks is None:
        return variable
    data = LazilyIndexedArray(ChunksArray(chunks, variable.shape))
    quick = Variable(variable.dims, data, variable.attrs, variable.encoding)
    if not of_dask:
        return quick
    # named after the array given, so that nobody's cache takes one state of a file for another
    return quick.chunk(variable.chunksizes, name=f"straight-{given.name}")
