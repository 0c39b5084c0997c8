"""Chunks of a zarr array on this machine's disk, decoded without zarr-python's cost per read.

A read through zarr-python has a fixed cost of milliseconds, as much as decoding a chunk, and a
sampler reads every chunk twice. Layouts that are not known here are left to zarr.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHECKSUM = 4


@dataclass(frozen=True)
class DiskChunks:
    """Reads boxes of an array; picklable. Make one with `DiskChunks.of`.

    Parameters
    ----------
    folder : str
        Where the chunks lie, with the beginning that all their names share.
    separator : str
        Between the positions in a chunk's name.
    chunks : tuple of int
        Cells of a chunk along each axis.
    dtype : dtype
        Dtype of the cells.
    fill : scalar
        What cells of a chunk are that is not there.
    compressor : {"blosc", "zstd", None}
        How chunks are compressed.
    checksum : bool
        Whether a CRC-32C follows.
    """

    folder: str
    separator: str
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    compressor: str | None
    checksum: bool

    @classmethod
    def of(cls, stored: Any) -> DiskChunks | None:
        """Make a reader of a zarr array.

        Parameters
        ----------
        stored : zarr.Array
            The array, of zarr v2 or v3.

        Returns
        -------
        DiskChunks or None
            None if it does not lie on this machine's disk, or its layout is not known here.
        """
        from zarr.storage import LocalStore

        if not isinstance(stored.store, LocalStore) or stored.shards is not None:
            return None
        dtype = np.dtype(stored.dtype)
        if dtype.kind not in "fiub" or dtype.newbyteorder("<") != dtype or not stored.ndim:
            return None
        metadata = stored.metadata.to_dict()
        layout = _layout_v2(metadata) if metadata["zarr_format"] == 2 else _layout_v3(metadata)
        if layout is None:
            return None
        prefix, separator, codecs = layout
        folder = f"{stored.store.root / stored.path}/{prefix}"
        fill = dtype.type(0 if stored.fill_value is None else stored.fill_value)
        return cls(folder, separator, tuple(stored.chunks), dtype, fill, *codecs)

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box of cells.

        Parameters
        ----------
        box : sequence of slice
            One with start and stop, inside the array, for every axis.

        Returns
        -------
        ndarray
            The cells; a new array.

        Raises
        ------
        ValueError
            If a chunk is damaged; the message names its file.
        """
        shape = tuple(s.stop - s.start for s in box)
        cells = np.empty(shape, self.dtype)
        ranges = [
            range(s.start // n, -(-s.stop // n)) for s, n in zip(box, self.chunks, strict=True)
        ]
        room: NDArray[Any] | None = None
        for chunk in itertools.product(*ranges):
            data = self._file(chunk)
            firsts = [c * n for c, n in zip(chunk, self.chunks, strict=True)]
            inside = tuple(
                slice(max(s.start - first, 0), min(s.stop - first, n))
                for s, first, n in zip(box, firsts, self.chunks, strict=True)
            )
            place = tuple(
                slice(first + i.start - s.start, first + i.stop - s.start)
                for s, first, i in zip(box, firsts, inside, strict=True)
            )
            if data is None:
                cells[place] = self.fill
            elif shape == self.chunks and cells[place].shape == shape:
                self._decode(chunk, data, cells)
            else:
                room = np.empty(self.chunks, self.dtype) if room is None else room
                self._decode(chunk, data, room)
                cells[place] = room[inside]
        return cells

    def _path(self, chunk: tuple[int, ...]) -> str:
        return self.folder + self.separator.join(map(str, chunk))

    def _file(self, chunk: tuple[int, ...]) -> bytes | None:
        try:
            with open(self._path(chunk), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _decode(self, chunk: tuple[int, ...], data: bytes, out: NDArray[Any]) -> None:
        """Decode a whole chunk; one that would give more or fewer bytes than it holds raises."""
        from numcodecs import blosc, zstd  # type: ignore[import-untyped]

        try:
            if self.checksum:
                data = _checked(data)
            # sizes are checked first, since decoding into too much room leaves the rest as it was
            if self.compressor == "blosc":
                _check_size(_blosc_size(data), out)
                blosc.decompress(data, out)
                return
            if self.compressor == "zstd":
                size = _zstd_size(data)
                if size is not None:
                    _check_size(size, out)
                    zstd.decompress(data, out)
                    return
                data = zstd.decompress(data)
            _check_size(len(data), out)
            out[...] = np.frombuffer(data, self.dtype).reshape(out.shape)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"chunk {self._path(chunk)}: {error}") from error


def _layout_v3(metadata: dict[str, Any]) -> tuple[str, str, tuple[str | None, bool]] | None:
    """Beginning of the chunks' names, their separator and codecs; None if unknown here."""
    names = [codec["name"] for codec in metadata["codecs"]]
    endian = (metadata["codecs"][0].get("configuration") or {}).get("endian", "little")
    if names[:1] != ["bytes"] or endian not in ("little", None):
        return None
    checksum = names[1:][-1:] == ["crc32c"]
    compressors = names[1 : -1 if checksum else None]
    if compressors not in ([], ["blosc"], ["zstd"]) or metadata.get("storage_transformers"):
        return None
    keys = metadata["chunk_key_encoding"]
    if keys["name"] not in ("default", "v2"):
        return None
    default = keys["name"] == "default"
    separator = (keys.get("configuration") or {}).get("separator", "/" if default else ".")
    prefix = f"c{separator}" if default else ""
    return prefix, separator, (compressors[0] if compressors else None, checksum)


def _layout_v2(metadata: dict[str, Any]) -> tuple[str, str, tuple[str | None, bool]] | None:
    compressor = metadata["compressor"]
    if compressor is not None and not isinstance(compressor, dict):
        compressor = compressor.get_config()
    name = None if compressor is None else compressor["id"]
    if metadata["filters"] or metadata["order"] != "C" or name not in (None, "blosc", "zstd"):
        return None
    return "", metadata["dimension_separator"], (name, False)


def _checked(data: bytes) -> bytes:
    import google_crc32c

    body, stored = data[:-_CHECKSUM], int.from_bytes(data[-_CHECKSUM:], "little")
    if len(data) < _CHECKSUM or google_crc32c.value(body) != stored:
        raise ValueError("its checksum is wrong")
    return body


def _blosc_size(data: bytes) -> int:
    """Bytes that a blosc buffer declares to hold, by its header."""
    if len(data) < 16 or len(data) < int.from_bytes(data[12:16], "little"):
        raise ValueError("it is cut off")
    return int.from_bytes(data[4:8], "little")


def _zstd_size(data: bytes) -> int | None:
    """Bytes that a zstd frame declares to hold, if it does (RFC 8878, 3.1.1.1)."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        raise ValueError("it is no zstd frame, or cut off")
    flags = data[4]
    single = bool(flags & 0x20)
    length = (int(single), 2, 4, 8)[flags >> 6]
    if not length:
        return None
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(data[start : start + length], "little")
    return size + 256 if length == 2 else size


def _check_size(found: int, out: NDArray[Any]) -> None:
    if found != out.nbytes:
        raise ValueError(f"it holds {found} bytes, {out.nbytes} are wanted")
