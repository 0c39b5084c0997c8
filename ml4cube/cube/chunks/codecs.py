"""Codecs of zarr chunks, for readers that decode them without zarr."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

CHECKSUM_BYTES = 4  # of a CRC-32C


@dataclass(frozen=True)
class ChunkCodecs:
    """Codecs of little-endian cells, with an optional compressor and checksum."""

    compressor: str | None
    checksum: bool

    @classmethod
    def of_v3(cls, codecs: Sequence[Mapping[str, Any]]) -> ChunkCodecs | None:
        """Return the codecs of a zarr v3 array; None if they are not supported."""
        first, *others = [codec["name"] for codec in codecs]
        checksum = others[-1:] == ["crc32c"]
        compressors = others[:-1] if checksum else others
        endian = (codecs[0].get("configuration") or {}).get("endian", "little")
        if first != "bytes" or endian not in ("little", None):
            return None
        if len(compressors) > 1 or not {*compressors} <= {"blosc", "zstd", "gzip"}:
            return None
        return cls(compressors[0] if compressors else None, checksum)

    @classmethod
    def of_v2(cls, metadata: Mapping[str, Any]) -> ChunkCodecs | None:
        """Return the codecs of a zarr v2 array; None if they are not supported."""
        compressor = metadata["compressor"]
        if compressor is not None and not isinstance(compressor, Mapping):
            compressor = compressor.get_config()
        name = None if compressor is None else compressor["id"]
        if metadata["filters"] or metadata["order"] != "C" or name not in (None, *_DECODERS):
            return None
        return cls(name, checksum=False)

    def decode(self, data: Bytes, out: NDArray[Any]) -> None:
        """Decode a whole chunk; raise ValueError if it is damaged."""
        if self.checksum:
            data = without_checksum(data)
        decoder = _copy if self.compressor is None else _DECODERS[self.compressor]
        try:
            decoder(data, out)
        except (RuntimeError, zlib.error) as error:
            raise ValueError(str(error)) from error


def without_checksum(data: Bytes) -> Bytes:
    """Verify and remove the CRC-32C at the end."""
    import google_crc32c

    # slices of arrays are views, slices of bytes are copies
    body, stored = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:].tobytes()
    if len(stored) < CHECKSUM_BYTES or google_crc32c.value(body) != int.from_bytes(
        stored, "little"
    ):
        raise ValueError("wrong checksum")
    return body


# Sizes are checked first, because decoding leaves the rest of a larger output unchanged, and no
# more is decoded than fits, because a small chunk can inflate to more than the memory.


def _decode_blosc(data: Bytes, out: NDArray[Any]) -> None:
    from numcodecs import blosc  # type: ignore[import-untyped]

    _check_size(_blosc_size(data), out)
    blosc.decompress(data, out)


def _blosc_size(data: Bytes) -> int:
    """Return the decoded size that a blosc header declares."""
    header = data[:16].tobytes()
    if len(header) < 16 or len(data) < int.from_bytes(header[12:], "little"):
        raise ValueError("it is truncated")
    return int.from_bytes(header[4:8], "little")


def _decode_zstd(data: Bytes, out: NDArray[Any]) -> None:
    from numcodecs import zstd

    size = _zstd_size(data, out.nbytes)
    if size >= out.nbytes:
        _check_size(size, out)
    zstd.decompress(data, out)
    if size < out.nbytes:
        # several frames, of writers that compress in pieces, which may hold less than fits
        _copy(np.frombuffer(zstd.decompress(data), np.uint8), out)


def _zstd_size(data: Bytes, default: int) -> int:
    """Return the decoded size that the first frame declares, or `default` if it declares none."""
    # RFC 8878, section 3.1.1: magic number, flags, window (unless it is a single segment), size
    header = data[:14].tobytes()
    if header[:4] != b"\x28\xb5\x2f\xfd" or len(header) < 6:
        return 0  # no frame, which zstd reports
    flags = header[4]
    is_single_segment = flags >> 5 & 1
    size_bytes = (is_single_segment, 2, 4, 8)[flags >> 6]
    if not size_bytes:
        return default
    begin = 6 - is_single_segment
    size = int.from_bytes(header[begin : begin + size_bytes], "little")
    # in two bytes, sizes count from 256 on
    if size_bytes == 2:
        return size + 256
    return size


def _decode_deflate(data: Bytes, out: NDArray[Any], wbits: int) -> None:
    cells, filled, rest = out.reshape(-1).view(np.uint8), 0, data.tobytes()
    while rest:  # gzip may have several members, and zeros at the end
        stream = zlib.decompressobj(wbits)
        piece = stream.decompress(rest, len(cells) - filled + 1)
        if filled + len(piece) > len(cells):
            raise ValueError(f"it holds more than {out.nbytes} bytes")
        if not stream.eof:
            raise ValueError("it is truncated")
        cells[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled, rest = filled + len(piece), stream.unused_data.lstrip(b"\0")
    _check_size(filled, out)


def _copy(cells: Bytes, out: NDArray[Any]) -> None:
    _check_size(len(cells), out)
    out.reshape(-1).view(np.uint8)[:] = cells


def _check_size(size: int, out: NDArray[Any]) -> None:
    if size != out.nbytes:
        raise ValueError(f"it holds {size} bytes instead of {out.nbytes}")


_DECODERS: Mapping[str, Callable[[Bytes, NDArray[Any]], None]] = {
    "blosc": _decode_blosc,
    "zstd": _decode_zstd,
    "gzip": functools.partial(_decode_deflate, wbits=zlib.MAX_WBITS | 16),
    "zlib": functools.partial(_decode_deflate, wbits=zlib.MAX_WBITS),
}
