"""Chunks of a zarr array on local disk, decoded without zarr-python's cost per read.

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
    """A reader of boxes of an array. Make one with `DiskChunks.of`."""

    folder: str
    # Start of all chunk names.
    prefix: str
    # Between the numbers of a chunk's name.
    separator: str
    # Cells of a chunk along each axis.
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    # Value of the cells of absent chunks.
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
        layout = _layout_v2(metadata) if metadata["zarr_format"] == 2 else _layout_v3(metadata)
        if layout is None:
            return None
        prefix, separator, codecs = layout
        folder = str(stored.store.root / stored.path)
        fill = dtype.type(0 if stored.fill_value is None else stored.fill_value)
        return cls(folder, prefix, separator, tuple(stored.chunks), dtype, fill, codecs)

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells."""
        shape = tuple(s.stop - s.start for s in box)
        cells = np.empty(shape, self.dtype)
        ranges = [
            range(s.start // n, -(-s.stop // n)) for s, n in zip(box, self.chunks, strict=True)
        ]
        buffer: NDArray[Any] | None = None
        for chunk in itertools.product(*ranges):
            data = self._file(chunk)
            firsts = [c * n for c, n in zip(chunk, self.chunks, strict=True)]
            inside = tuple(
                slice(max(s.start - first, 0), min(s.stop - first, n))
                for s, first, n in zip(box, firsts, self.chunks, strict=True)
            )
            target = tuple(
                slice(first + i.start - s.start, first + i.stop - s.start)
                for s, first, i in zip(box, firsts, inside, strict=True)
            )
            if data is None:
                cells[target] = self.fill
            elif shape == self.chunks and cells[target].shape == shape:
                self._decode(chunk, data, cells)
            else:
                buffer = np.empty(self.chunks, self.dtype) if buffer is None else buffer
                self._decode(chunk, data, buffer)
                cells[target] = buffer[inside]
        return cells

    def key(self, chunk: tuple[int, ...]) -> str:
        """Return the name of a chunk."""
        return self.prefix + self.separator.join(map(str, chunk))

    def has(self, chunk: tuple[int, ...]) -> bool:
        """Return True if a chunk exists; others read as the fill value."""
        return os.path.exists(self._path(chunk))

    def _path(self, chunk: tuple[int, ...]) -> str:
        return f"{self.folder}/{self.key(chunk)}"

    def _file(self, chunk: tuple[int, ...]) -> Bytes | None:
        try:
            with open(self._path(chunk), "rb") as file:
                return np.frombuffer(file.read(), np.uint8)
        except FileNotFoundError:
            return None

    def _decode(self, chunk: tuple[int, ...], data: Bytes, out: NDArray[Any]) -> None:
        try:
            self.codecs.decode(data, out)
        except ValueError as error:
            raise ValueError(f"chunk {self._path(chunk)}: {error}") from error


def _layout_v3(metadata: dict[str, Any]) -> tuple[str, str, ChunkCodecs] | None:
    """Return prefix and separator of chunk names, and the codecs; None if not supported."""
    codecs = ChunkCodecs.of_v3(metadata["codecs"])
    keys = metadata["chunk_key_encoding"]
    known = keys["name"] in ("default", "v2") and not metadata.get("storage_transformers")
    if codecs is None or not known:
        return None
    default = keys["name"] == "default"
    separator = (keys.get("configuration") or {}).get("separator", "/" if default else ".")
    return f"c{separator}" if default else "", separator, codecs


def _layout_v2(metadata: dict[str, Any]) -> tuple[str, str, ChunkCodecs] | None:
    codecs = ChunkCodecs.of_v2(metadata)
    return None if codecs is None else ("", metadata["dimension_separator"], codecs)
