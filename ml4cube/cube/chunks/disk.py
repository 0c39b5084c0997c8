"""Chunks of a zarr array: on local disk decoded without zarr-python's cost per read, else by zarr.

A read through zarr-python has a fixed cost of milliseconds, as much as decoding a chunk, and a
sampler reads every chunk twice. Layouts that are not supported are left to zarr.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.cube.chunks.codecs import Bytes, ChunkCodecs


@dataclass(frozen=True)
class DiskChunks:
    """A reader of boxes of an array. Make one with `DiskChunks.of`.

    The chunk with index (1, 0) is the file ``{folder}/c/1/0`` if `file_name` is ``c/{}/{}``. It has
    `chunks` cells along each axis; cells of absent chunks are `fill`.
    """

    folder: str
    file_name: str
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    codecs: ChunkCodecs

    @classmethod
    def of(cls, stored: Any) -> DiskChunks | None:
        """Make a reader of a zarr array; None if its layout is not supported."""
        from zarr.storage import LocalStore

        # a subclass of LocalStore may do more than read files
        if type(stored.store) is not LocalStore or stored.shards is not None:
            return None
        dtype = np.dtype(stored.dtype)
        if dtype.kind not in "fiub" or dtype.newbyteorder("<") != dtype or not stored.ndim:
            return None
        metadata = stored.metadata.to_dict()
        if metadata["zarr_format"] == 2:
            codecs = ChunkCodecs.of_v2(metadata)
        elif metadata["chunk_key_encoding"]["name"] in ("default", "v2"):
            codecs = ChunkCodecs.of_v3(metadata["codecs"])
        else:
            codecs = None
        if codecs is None or metadata.get("storage_transformers"):
            return None
        folder = str(stored.store.root / stored.path)
        file_name = stored.metadata.encode_chunk_key((0,) * stored.ndim).replace("0", "{}")
        fill = dtype.type(0 if stored.fill_value is None else stored.fill_value)
        return cls(folder, file_name, tuple(stored.chunks), dtype, fill, codecs)

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells."""
        shape = tuple(s.stop - s.start for s in box)
        result = np.empty(shape, self.dtype)
        touched = [
            range(s.start // n, -(-s.stop // n)) for s, n in zip(box, self.chunks, strict=True)
        ]
        buffer: NDArray[Any] | None = None
        for chunk in itertools.product(*touched):
            data = self._read_file(chunk)
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

    def _path(self, chunk: tuple[int, ...]) -> str:
        return f"{self.folder}/{self.file_name.format(*chunk)}"

    def _read_file(self, chunk: tuple[int, ...]) -> Bytes | None:
        try:
            with open(self._path(chunk), "rb") as file:
                return np.frombuffer(file.read(), np.uint8)
        except FileNotFoundError:
            # such as on a machine of a cluster that does not see the disk: not cells to be filled
            if not os.path.isdir(self.folder):
                raise FileNotFoundError(f"there is no folder {self.folder}") from None
            return None

    def _decode(self, chunk: tuple[int, ...], data: Bytes, out: NDArray[Any]) -> None:
        try:
            self.codecs.decode(data, out)
        except ValueError as error:
            raise ValueError(f"chunk {self._path(chunk)}: {error}") from error


@dataclass(frozen=True)
class ZarrChunks:
    """Chunks of any zarr array, read by zarr-python."""

    array: Any

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells."""
        return np.asarray(self.array[tuple(box)])


StoredChunks = DiskChunks | ZarrChunks


def stored_chunks(array: Any) -> StoredChunks:
    """Return the quickest reader of a zarr array."""
    # a worker that gets no zarr array need not import zarr, half of its start-up time
    return DiskChunks.of(array) or ZarrChunks(array)
