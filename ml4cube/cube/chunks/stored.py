"""Chunks of a zarr array, read and decoded without zarr-python's cost per read.

A read through zarr-python has a fixed cost of milliseconds, as much as decoding a chunk, and asks
for the index of a shard with each of its chunks. Layouts that are not supported are left to zarr.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.cube.chunks.codecs import CHECKSUM_BYTES, Bytes, ChunkCodecs
from ml4cube.cube.chunks.files import Files, LocalFiles, Part, StoreFiles

Index = tuple[int, ...]

# Zarr's offset of a chunk that a shard lacks.
_ABSENT = int(np.iinfo(np.uint64).max)


@dataclass(frozen=True)
class ShardIndex:
    """Where the index of a shard lies, and how many chunks it has along each axis."""

    shape: tuple[int, ...]
    codecs: ChunkCodecs
    is_at_end: bool

    @classmethod
    def of(cls, sharding: Mapping[str, Any], shape: tuple[int, ...]) -> ShardIndex | None:
        """Return the index of a sharding codec; None if it is not supported."""
        codecs = ChunkCodecs.of_v3(sharding["index_codecs"])
        if codecs is None or codecs.compressor is not None:
            return None
        return cls(shape, codecs, sharding.get("index_location", "end") == "end")

    def part(self, key: str) -> Part:
        """Return the bytes of a shard that hold its index."""
        size = int(np.prod(self.shape)) * 16 + CHECKSUM_BYTES * self.codecs.checksum
        if self.is_at_end:
            return Part(key, -size)
        return Part(key, 0, size)

    def decode(self, data: Bytes) -> NDArray[np.uint64]:
        """Return offset and size of each chunk."""
        entries = np.empty((*self.shape, 2), "<u8")
        self.codecs.decode(data, entries)
        return entries


@dataclass(frozen=True)
class ChunkFiles:
    """A reader of boxes of an array. Make one with `ChunkFiles.of`.

    The file with index (1, 0) has the key ``c/1/0`` if `file_name` is ``c/{}/{}``. It is one chunk,
    or a shard of several, which then has an `index`. A chunk has `chunks` cells along each axis;
    cells of absent chunks are `fill`. On disk the index of a shard is read again only if its file
    was replaced; elsewhere with every read, unless the reader is made to keep indices.
    """

    files: Files
    file_name: str
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    codecs: ChunkCodecs
    index: ShardIndex | None
    # Whether indices are kept of files whose replacement would not be noticed.
    keeps_indices: bool = False
    _indices: _Indices = field(default_factory=lambda: _Indices(), compare=False, repr=False)

    @classmethod
    def of(cls, stored: Any) -> ChunkFiles | None:
        """Make a reader of a zarr array; None if its layout is not supported."""
        dtype = np.dtype(stored.dtype)
        if dtype.kind not in "fiub" or dtype.newbyteorder("<") != dtype or not stored.ndim:
            return None
        metadata = stored.metadata.to_dict()
        if metadata.get("storage_transformers"):
            return None
        index = None
        if metadata["zarr_format"] == 2:
            codecs = ChunkCodecs.of_v2(metadata)
        elif metadata["chunk_key_encoding"]["name"] not in ("default", "v2"):
            return None
        elif stored.shards is None:
            codecs = ChunkCodecs.of_v3(metadata["codecs"])
        elif len(metadata["codecs"]) > 1:
            return None
        else:
            sharding = metadata["codecs"][0]["configuration"]
            codecs = ChunkCodecs.of_v3(sharding["codecs"])
            per_shard = (n // m for n, m in zip(stored.shards, stored.chunks, strict=True))
            index = ShardIndex.of(sharding, tuple(per_shard))
            if index is None:
                return None
        if codecs is None:
            return None
        return cls(
            files=_files_of(stored),
            file_name=stored.metadata.encode_chunk_key((0,) * stored.ndim).replace("0", "{}"),
            chunks=tuple(stored.chunks),
            dtype=dtype,
            fill=dtype.type(0 if stored.fill_value is None else stored.fill_value),
            codecs=codecs,
            index=index,
        )

    def keeping_indices(self) -> ChunkFiles:
        """Return a reader of files that are not replaced while it is used."""
        return replace(self, keeps_indices=True, _indices=_Indices())

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells."""
        shape = tuple(s.stop - s.start for s in box)
        result = np.empty(shape, self.dtype)
        touched = [
            range(s.start // n, -(-s.stop // n)) for s, n in zip(box, self.chunks, strict=True)
        ]
        buffer: NDArray[Any] | None = None
        for chunk, data in self._fetch(itertools.product(*touched)):
            origin = [index * n for index, n in zip(chunk, self.chunks, strict=True)]
            # the cells in both chunk and box, by their position in the chunk and in the box
            source = tuple(
                slice(max(s.start - first, 0), min(s.stop - first, n))
                for s, first, n in zip(box, origin, self.chunks, strict=True)
            )
            target = tuple(
                slice(first + cells.start - s.start, first + cells.stop - s.start)
                for s, first, cells in zip(box, origin, source, strict=True)
            )
            if data is None:
                result[target] = self.fill
            elif shape == self.chunks and result[target].shape == shape:
                self._decode(chunk, data, result)
            else:
                if buffer is None:
                    buffer = np.empty(self.chunks, self.dtype)
                self._decode(chunk, data, buffer)
                result[target] = buffer[source]
        return result

    def read_chunk(self, chunk: Index, out: NDArray[Any], take: Callable[[int], Bytes]) -> None:
        """Read a chunk into an array, or its first rows if the array has fewer; none may lack.

        `take` returns an array for its encoded bytes.
        """
        key = self.key_of(chunk)
        place: tuple[int, int | None] | None = (0, None)
        if self.index is not None:
            (places,) = self._indices.of(self.files, self.index, [key], self.keeps_indices)
            place = self._place_of(key, places, chunk, self.index)
        data = None
        if place is not None:
            part = Part(key, *place)
            data = self.files.read_into(part, take)
        if data is None:
            raise ValueError(f"chunk {'/'.join(map(str, chunk))} is missing")
        target = out
        if out.dtype != self.dtype or not out.flags.c_contiguous or out.shape != self.chunks:
            target = np.empty(self.chunks, self.dtype)
        self._decode(chunk, data, target)
        if target is not out:
            out[...] = target[: len(out)]

    def _place_of(
        self, key: str, places: NDArray[np.uint64] | None, chunk: Index, index: ShardIndex
    ) -> tuple[int, int] | None:
        """Return the first byte of a chunk in its shard, and the end; None if it is absent."""
        start, size = _ABSENT, 0
        if places is not None:
            inside = tuple(i % n for i, n in zip(chunk, index.shape, strict=True))
            start, size = places[inside].tolist()
        if start == _ABSENT:
            return None
        if size > self._most_bytes:
            raise ValueError(f"shard {self.files.describe(key)} has a damaged index")
        return start, start + size

    def _fetch(self, chunks: Iterable[Index]) -> Iterator[tuple[Index, Bytes | None]]:
        """Yield the encoded bytes of chunks; None where one is absent."""
        by_file: dict[Index, list[Index]] = {}
        for chunk in chunks:
            by_file.setdefault(self._file(chunk), []).append(chunk)
        groups = [by_file]
        # on disk file by file, so that no more than one is in memory
        if isinstance(self.files, LocalFiles):
            groups = [{file: inside} for file, inside in by_file.items()]
        for group in groups:
            if self.index is None:
                parts = [Part(self._key(file)) for file in group]
                yield from zip(group, self.files.read(parts), strict=True)
            else:
                yield from self._fetch_from_shards(group, self.index)

    def _fetch_from_shards(
        self, shards: Mapping[Index, Sequence[Index]], index: ShardIndex
    ) -> Iterator[tuple[Index, Bytes | None]]:
        keys = [self._key(shard) for shard in shards]
        stretches: list[_Stretch] = []
        all_places = self._indices.of(self.files, index, keys, self.keeps_indices)
        for key, places, chunks in zip(keys, all_places, shards.values(), strict=True):
            present = []
            for chunk in chunks:
                place = self._place_of(key, places, chunk, index)
                if place is None:
                    yield chunk, None
                else:
                    present.append((*place, chunk))
            for start, stop, chunk in sorted(present):
                if not _reaches(stretches, key, start - self.files.gap):
                    stretches.append(_Stretch(key, start, stop, []))
                stretches[-1].stop = max(stretches[-1].stop, stop)
                stretches[-1].chunks.append((chunk, start, stop))
        parts = [Part(stretch.key, stretch.start, stretch.stop) for stretch in stretches]
        for stretch, data in zip(stretches, self.files.read(parts), strict=True):
            if data is None:
                raise ValueError(f"shard {self.files.describe(stretch.key)} was removed")
            for chunk, start, stop in stretch.chunks:
                yield chunk, data[start - stretch.start : stop - stretch.start]

    @property
    def _most_bytes(self) -> int:
        """Bytes that no encoded chunk exceeds: codecs add little to what they cannot compress."""
        return 2 * math.prod(self.chunks) * self.dtype.itemsize + 2**16

    def key_of(self, chunk: Index) -> str:
        """Return the key of the file that holds a chunk."""
        return self._key(self._file(chunk))

    def _file(self, chunk: Index) -> Index:
        """Return the index of the file that holds a chunk."""
        if self.index is None:
            return chunk
        return tuple(i // n for i, n in zip(chunk, self.index.shape, strict=True))

    def _key(self, file: Index) -> str:
        return self.file_name.format(*file)

    def _decode(self, chunk: Index, data: Bytes, out: NDArray[Any]) -> None:
        try:
            self.codecs.decode(data, out)
        except ValueError as error:
            where = self.files.describe(self.key_of(chunk))
            if self.index is not None:
                where = f"{'/'.join(map(str, chunk))} in {where}"
            raise ValueError(f"chunk {where}: {error}") from error


@dataclass
class _Stretch:
    """Bytes of a shard that are read together, and the chunks in them with their first and last."""

    key: str
    start: int
    stop: int
    chunks: list[tuple[Index, int, int]]


def _reaches(stretches: Sequence[_Stretch], key: str, byte: int) -> bool:
    """Return True if the last stretch is of this file and ends at this byte or later."""
    return bool(stretches) and stretches[-1].key == key and stretches[-1].stop >= byte


class _Indices:
    """Indices of shards: each is read once, whatever thread needs it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by key of a shard, its version and its index, which may still be read
        self._entries: dict[str, tuple[object, Future[NDArray[np.uint64] | None]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Indices, ()

    def of(
        self, files: Files, index: ShardIndex, keys: Sequence[str], keep: bool
    ) -> list[NDArray[np.uint64] | None]:
        """Return the index of each shard; None for a shard that is absent.

        Indices of files that may be replaced without notice are only kept if they are to be.
        """
        missing: dict[str, Future[NDArray[np.uint64] | None]] = {}
        with self._lock:
            for key in keys:
                version = files.version(key)
                if version is None and not keep:
                    version = object()  # equals no other
                if key not in self._entries or self._entries[key][0] != version:
                    missing[key] = Future()
                    self._entries[key] = version, missing[key]
            futures = [self._entries[key][1] for key in keys]
        if missing:
            self._read(files, index, missing)
        return [future.result() for future in futures]

    def _read(
        self,
        files: Files,
        index: ShardIndex,
        missing: Mapping[str, Future[NDArray[np.uint64] | None]],
    ) -> None:
        try:
            parts = files.read([index.part(key) for key in missing])
            decoded = [
                _decode_index(files, index, *part) for part in zip(missing, parts, strict=True)
            ]
        except BaseException as error:
            with self._lock:
                self._entries.clear()  # the next read tries again
            for future in missing.values():
                future.set_exception(error)
            raise
        for future, places in zip(missing.values(), decoded, strict=True):
            future.set_result(places)


def _decode_index(
    files: Files, index: ShardIndex, key: str, data: Bytes | None
) -> NDArray[np.uint64] | None:
    # zarr reads an empty file as a shard without chunks
    if data is None or not len(data):
        return None
    try:
        return index.decode(data)
    except ValueError as error:
        raise ValueError(f"the index of shard {files.describe(key)}: {error}") from error


def _files_of(stored: Any) -> Files:
    """Return the files of a zarr array."""
    from zarr.storage import LocalStore

    # a subclass of LocalStore may do more than read files
    if type(stored.store) is LocalStore:
        return LocalFiles(str(stored.store.root / stored.path))
    return StoreFiles.of(stored.store, stored.path)


@dataclass(frozen=True)
class ZarrChunks:
    """Chunks of any zarr array, read by zarr-python."""

    array: Any

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells."""
        return np.asarray(self.array[tuple(box)])


StoredChunks = ChunkFiles | ZarrChunks


def stored_chunks(array: Any) -> StoredChunks:
    """Return the quickest reader of a zarr array."""
    # a worker that gets no zarr array need not import zarr, half of its start-up time
    return ChunkFiles.of(array) or ZarrChunks(array)
