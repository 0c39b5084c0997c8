"""Samples of a store, read straight from its shard files.

A read through zarr-python takes milliseconds at least, which is slow if every chunk of a store is
read in every epoch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from ml4cube.core.errors import StoreError
from ml4cube.cube.chunks.codecs import CHECKSUM_BYTES, Bytes, ChunkCodecs
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, file_behind
from ml4cube.ledger.locations import location_of
from ml4cube.ledger.manifest import read_manifest
from ml4cube.loading.dataset_source import DatasetSource, even_counts
from ml4cube.loading.ring.arrays import Scratch
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import ArrayName
from ml4cube.store.format import read_metadata

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

# Zarr's offset of a chunk that a shard lacks.
_ABSENT = np.iinfo(np.uint64).max


def sharded_arrays(path: str, names: Mapping[str, str]) -> dict[str, ShardedArray]:
    """Make a reader of each variable of a sample store, whose array in the store is given."""
    fs, root = url_to_fs(path)
    files = read_manifest(path)
    local = isinstance(fs, LocalFileSystem)
    arrays = {}
    for name, stored in names.items():
        sizes = {
            key.removeprefix(f"{stored}/"): size
            for key, (size, _) in files.items()
            if key.startswith(f"{stored}/c/")
        }
        metadata = read_metadata(path, files, f"{stored}/zarr.json")
        where = f"{root.rstrip('/')}/{stored}"
        arrays[name] = ShardedArray(where, None if local else fs, metadata, sizes)
        if local:
            arrays[name].note_files()
    return arrays


class ShardedArray:
    """Reader of chunks along the first axis of an array; picklable, for any thread."""

    def __init__(
        self, root: str, fs: Any, metadata: Mapping[str, Any], file_sizes: Mapping[str, int]
    ) -> None:
        """Make a reader from an array's ``zarr.json``, as a store's format has it.

        `root` is the path of the array inside the fsspec file system `fs`, None for local files;
        `file_sizes` are the bytes of its files by their path inside the array.
        """
        self.root, self.fs = root, fs
        self.file_sizes, self._metadata = file_sizes, metadata
        self.shape = tuple(metadata["shape"])
        self.dtype = np.dtype(metadata["data_type"]).newbyteorder("<")
        # In samples. A shard is a file.
        shard_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        self.chunk_size = self.shard_size = shard_shape[0]
        encoding = metadata["codecs"]
        if encoding[0]["name"] == "sharding_indexed":
            sharding = encoding[0]["configuration"]
            encoding, self.chunk_size = sharding["codecs"], sharding["chunk_shape"][0]
        codecs = ChunkCodecs.of_v3(encoding)
        assert codecs is not None, encoding
        self.codecs = codecs
        # By number of a shard: offset and size of each of its chunks in the file.
        self._indices: dict[int, NDArray[np.uint64]] = {}
        # By path inside the array: inode, time of change and size of a local file.
        self._identities: dict[str, tuple[int, ...]] = {}
        self._scratch = Scratch()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedArray, (self.root, self.fs, self._metadata, self.file_sizes)

    def note_files(self) -> None:
        """Remember the present local files, to refuse others that replace them."""
        # A copy in another process remembers files from their first read on.
        for key in self.file_sizes:
            try:
                self._check_same(key, os.stat(f"{self.root}/{key}"))
            except FileNotFoundError:
                raise StoreError(f"{self.root}/{key} is missing; make the store again") from None

    def read(self, chunk: int, out: NDArray[Any]) -> None:
        """Fetch and decode one chunk."""
        self.decode(chunk, self.fetch(chunk), out)

    def fetch(self, chunk: int) -> Bytes:
        """Read the encoded bytes of a chunk."""
        shard, chunk_in_shard = divmod(chunk, self.shard_size // self.chunk_size)
        key = self._key(shard)
        offset, size = 0, self.file_sizes[key]
        if self.chunk_size != self.shard_size:
            if shard not in self._indices:
                self._indices[shard] = self._read_index(key)
            offset, size = self._indices[shard][chunk_in_shard].tolist()
        if offset == _ABSENT or offset + size > self.file_sizes[key]:
            raise StoreError(f"{self.describe(chunk)} is missing; make the store again")
        return self._read_range(key, offset, size)

    def decode(self, chunk: int, data: Bytes, out: NDArray[Any]) -> None:
        """Decode the fetched bytes of a chunk."""
        direct = out.dtype == self.dtype and out.flags.c_contiguous and len(out) == self.chunk_size
        window = self.shape[1:]
        target = out
        if not direct:
            target = self._scratch.take("chunk", (self.chunk_size, *window), self.dtype)
        _decode(self.describe(chunk), self.codecs, data, target)
        if not direct:
            out[...] = target[: len(out)]

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        first = chunk * self.chunk_size
        last = min(first + self.chunk_size, self.shape[0]) - 1
        return f"samples {first} to {last} in {self.root}/{self._key(first // self.shard_size)}"

    def _key(self, shard: int) -> str:
        """Return the path of a shard inside the array."""
        return "/".join(["c", str(shard), *("0" for _ in self.shape[1:])])

    def _read_index(self, key: str) -> NDArray[np.uint64]:
        """Return offset and size of every chunk in a shard, which end its file."""
        index = np.empty((self.shard_size // self.chunk_size, 2), "<u8")
        size = index.nbytes + CHECKSUM_BYTES
        if self.file_sizes[key] < size:
            raise StoreError(f"{self.root}/{key} is too short; make the store again")
        data = self._read_range(key, self.file_sizes[key] - size, size)
        _decode(f"the index of {self.root}/{key}", ChunkCodecs(None, checksum=True), data, index)
        return index

    def _read_range(self, key: str, offset: int, size: int) -> Bytes:
        """Return bytes of a file, valid until the next read by the same thread."""
        path = f"{self.root}/{key}"
        if self.fs is not None:
            raw = np.frombuffer(self.fs.cat_file(path, start=offset, end=offset + size), np.uint8)
        else:
            # Used again, because page faults of a new array take as long as reading. Larger than
            # needed, so that it soon has the size of the largest chunk.
            raw = self._scratch.take("file", (size + size // 4,), np.dtype(np.uint8))[:size]
            with open(path, "rb") as file:
                self._check_same(key, os.fstat(file.fileno()))
                file.seek(offset)
                raw = raw[: file.readinto(raw.data)]
        if len(raw) != size:
            raise StoreError(f"{path} is shorter than it was when it was opened")
        return raw

    def _check_same(self, key: str, status: os.stat_result) -> None:
        """Refuse a file that replaced the one read before, because samples of both would mix."""
        identity = self._identities.setdefault(
            key, (status.st_ino, status.st_mtime_ns, self.file_sizes[key])
        )
        if identity != (status.st_ino, status.st_mtime_ns, status.st_size):
            raise StoreError(
                f"{self.root}/{key} was replaced or changed since the store was opened; "
                "open it again"
            )


def _decode(what: str, codecs: ChunkCodecs, data: Bytes, out: NDArray[Any]) -> None:
    try:
        codecs.decode(data, out)
    except ValueError as error:
        raise StoreError(f"{what} cannot be decoded: {error}; make the store again") from error


class StoreSource(DatasetSource):
    """Samples of a sample store as it was opened, read straight from its shard files."""

    def __init__(self, ds: xr.Dataset, recipe: Recipe, arrays: Mapping[str, ShardedArray]) -> None:
        super().__init__(ds, recipe)
        self._arrays = dict(arrays)
        first = next(iter(self._arrays.values()))
        self.remote = first.fs is not None
        self.counts = even_counts(ds.sizes[self._dim], first.chunk_size)

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        if not self.remote or len(out) == 1:
            for name, target in out.items():
                self._arrays[name.variable].read(chunk, target)
            return
        # Remote reads mostly wait, so ask for all variables at once.
        arrays = [self._arrays[name.variable] for name in out]
        with ThreadPoolExecutor(len(arrays), thread_name_prefix="ml4cube-fetch") as threads:
            fetched = list(threads.map(lambda array: array.fetch(chunk), arrays))
        for array, data, target in zip(arrays, fetched, out.values(), strict=True):
            array.decode(chunk, data, target)

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        return next(iter(self._arrays.values())).describe(chunk)


def open_samples(ds: xr.Dataset, recipe: Recipe | None) -> DatasetSource:
    """Choose how to read samples: a store straight from its files, unless it was changed."""
    from zarr.storage import StorePath

    if recipe is None:  # made by hand
        return DatasetSource(ds)
    names = [str(n) for n, v in ds.data_vars.items() if v.dtype.kind in "fiub"]
    arrays = [_array_behind(ds[name].variable) for name in names]
    if not arrays or None in arrays or not ds.sizes[recipe.array_dims[0]]:
        return DatasetSource(ds, recipe)
    groups = [
        location_of("store", StorePath(array.store, array.path.rpartition("/")[0]))
        for array in arrays
    ]
    # A location that needs storage options is not a str.
    if not isinstance(groups[0], str) or any(group != groups[0] for group in groups):
        logger.warning(
            "samples that were opened with storage options, or from several stores, are read "
            "through xarray, which is slower; give PTXrDataset the path or URL of one store"
        )
        return DatasetSource(ds, recipe)
    stored = {name: array.basename for name, array in zip(names, arrays, strict=True)}
    return StoreSource(ds, recipe, sharded_arrays(groups[0], stored))


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
