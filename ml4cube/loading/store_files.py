"""Samples of a store, read straight from its files into the arrays of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import StoreError
from ml4cube.cube.chunks.codecs import Bytes
from ml4cube.cube.chunks.files import LocalFiles
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, file_behind
from ml4cube.cube.chunks.stored import ChunkFiles
from ml4cube.loading.dataset_source import DatasetSource, even_counts
from ml4cube.loading.ring.arrays import Scratch
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import ArrayName

if TYPE_CHECKING:
    import xarray as xr


class StoreSource(DatasetSource):
    """Samples of a sample store as it was opened, read straight from its files."""

    def __init__(self, ds: xr.Dataset, recipe: Recipe, arrays: Mapping[str, ChunkFiles]) -> None:
        super().__init__(ds, recipe)
        self._arrays = arrays
        first = next(iter(arrays.values()))
        self.remote = not isinstance(first.files, LocalFiles)
        self.counts = even_counts(ds.sizes[self._dim], first.chunks[0])
        # By description of a file: what changes if it is replaced.
        self._versions: dict[str, object] = {}
        self._scratch = Scratch()
        chunks_per_file = 1 if first.index is None else first.index.shape[0]
        for chunk in range(0, len(self.counts), chunks_per_file):
            for array in self._arrays.values():
                self._check_same(array, chunk)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the files, which a copy in another process notes when it reads them."""
        return {**self.__dict__, "_versions": {}}

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""

        def read(name: ArrayName) -> None:
            array = self._arrays[name.variable]
            array.read_chunk(_index(array, chunk), out[name], self._bytes)
            self._check_same(array, chunk)

        if not self.remote or len(out) == 1:
            for name in out:
                read(name)
            return
        # Remote reads mostly wait, so ask for all variables at once.
        with ThreadPoolExecutor(len(out), thread_name_prefix="ml4cube-fetch") as threads:
            list(threads.map(read, out))

    def _bytes(self, n: int) -> Bytes:
        """Return an array of bytes, valid until this thread asks again; larger than needed."""
        return self._scratch.take("file", (n + n // 4,), np.uint8)[:n]

    def _check_same(self, array: ChunkFiles, chunk: int) -> None:
        """Refuse a file that replaced the one before, because samples of both would mix."""
        if self.remote:
            return
        key = array.key_of(_index(array, chunk))
        path, version = array.files.describe(key), array.files.version(key)
        if version is None:
            raise StoreError(f"{path} is missing; make the store again")
        if self._versions.setdefault(path, version) != version:
            raise StoreError(
                f"{path} was replaced or changed since the store was opened; open it again"
            )

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        array = next(iter(self._arrays.values()))
        path = array.files.describe(array.key_of(_index(array, chunk)))
        return f"samples {self.starts[chunk]} to {self.starts[chunk + 1] - 1} in {path}"


def _index(array: ChunkFiles, chunk: int) -> tuple[int, ...]:
    """Return the position of a chunk, which holds whole windows."""
    return (chunk,) + (0,) * (len(array.chunks) - 1)


def open_samples(ds: xr.Dataset, recipe: Recipe | None) -> DatasetSource:
    """Choose how to read samples: a store straight from its files, unless it was changed."""
    names = [str(n) for n, v in ds.data_vars.items() if v.dtype.kind in "fiub"]
    if recipe is None or not names or not ds.sizes[recipe.array_dims[0]]:
        return DatasetSource(ds, recipe)
    arrays: dict[str, ChunkFiles] = {}
    for name in names:
        array = _array_behind(ds[name].variable)
        files = None if array is None else ChunkFiles.of(array)
        if files is None or files.chunks[1:] != array.shape[1:]:
            return DatasetSource(ds, recipe)
        arrays[name] = files.keeping_indices()  # nothing replaces the files of a store
    if len({array.chunks[0] for array in arrays.values()}) > 1:
        return DatasetSource(ds, recipe)
    return StoreSource(ds, recipe, arrays)


def _array_behind(variable: xr.Variable) -> Any:
    """Return the zarr array that a dask variable shows unchanged, or None."""
    if variable.chunks is None:
        return None
    file = file_behind(variable.data)  # None unless dask reads a file and does nothing else
    zarr = LazyZarr.behind(file, np.dtype(variable.dtype))
    # Nothing is sliced, decoded or cast between array and variable.
    if zarr.is_undecoded and zarr.is_whole:
        return zarr.array
    return None
