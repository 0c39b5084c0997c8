"""Codecs of zarr chunks, for readers that decode them without zarr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

#: Bytes of a CRC-32C.
CHECKSUM = 4


@dataclass(frozen=True)
class ChunkCodecs:
    """Codecs of little-endian cells, with an optional compressor and checksum."""

    # Name of the compressor.
    compressor: str | None
    checksum: bool

    @classmethod
    def of_v3(cls, codecs: Sequence[Mapping[str, Any]]) -> ChunkCodecs | None:
        """Return the codecs of a zarr v3 array; None if they are not supported."""
        names = [codec["name"] for codec in codecs]
        if names[:1] != ["bytes"]:
            return None
        endian = (codecs[0].get("configuration") or {}).get("endian", "little")
        checksum = names[1:][-1:] == ["crc32c"]
        compressors = names[1 : -1 if checksum else None]
        if endian not in ("little", None) or compressors not in ([], ["blosc"], ["zstd"]):
            return None
        return cls(compressors[0] if compressors else None, checksum)

    @classmethod
    def of_v2(cls, metadata: Mapping[str, Any]) -> ChunkCodecs | None:
        """Return the codecs of a zarr v2 array; None if they are not supported."""
        compressor = metadata["compressor"]
        if compressor is not None and not isinstance(compressor, Mapping):
            compressor = compressor.get_config()
        name = None if compressor is None else compressor["id"]
        if metadata["filters"] or metadata["order"] != "C" or name not in (None, "blosc", "zstd"):
            return None
        return cls(name, checksum=False)

    def decode(self, data: Bytes, out: NDArray[Any]) -> None:
        """Decode a whole chunk; raise ValueError if it is damaged."""
        data = without_checksum(data) if self.checksum else data
        # sizes are checked first, because decoding leaves the rest of a larger output unchanged
        try:
            if self.compressor == "blosc":
                from numcodecs import blosc  # type: ignore[import-untyped]

                _check_size(_blosc_size(data), out)
                blosc.decompress(data, out)
            elif self.compressor == "zstd":
                from numcodecs import zstd

                _check_size(_zstd_size(data, out.nbytes), out)
                zstd.decompress(data, out)
            else:
                _check_size(len(data), out)
                out.reshape(-1).view(np.uint8)[:] = data
        except RuntimeError as error:
            raise ValueError(str(error)) from error


def without_checksum(data: Bytes) -> Bytes:
    """Verify and remove the CRC-32C at the end."""
    import google_crc32c

    # slices of arrays are views, slices of bytes are copies
    body, stored = data[:-CHECKSUM], data[-CHECKSUM:].tobytes()
    if len(stored) < CHECKSUM or google_crc32c.value(body) != int.from_bytes(stored, "little"):
        raise ValueError("wrong checksum")
    return body


def _blosc_size(data: Bytes) -> int:
    """Return the decoded size that a blosc header declares."""
    header = data[:16].tobytes()
    if len(header) < 16 or len(data) < int.from_bytes(header[12:], "little"):
        raise ValueError("it is truncated")
    return int.from_bytes(header[4:8], "little")


def _zstd_size(data: Bytes, wanted: int) -> int:
    """Return the decoded size that zstd frames declare together, or `wanted` if one does not."""
    # Most chunks are one frame, of which only the header is read. Writers that compress in pieces
    # make several, with skippable ones between them.
    found, start = 0, 0
    while start < len(data):
        declared, blocks = _zstd_header(data, start)
        # decoding stops at the end of the output
        if declared is None or (not start and declared == wanted):
            return wanted
        found += declared
        start = _zstd_end(data, start, blocks)
    if start > len(data) or not len(data):
        raise ValueError("it is truncated")
    return found


def _zstd_header(data: Bytes, start: int) -> tuple[int | None, int]:
    """Return the decoded size that a frame declares, and the end of its header (RFC 8878, 3.1)."""
    header = data[start : start + 18].tobytes()
    if len(header) >= 8 and header[1:4] == b"\x2a\x4d\x18" and header[0] >> 4 == 5:
        return 0, start + 8  # a skippable frame
    if header[:4] != b"\x28\xb5\x2f\xfd" or len(header) < 6:
        raise ValueError("it is not a zstd frame, or truncated")
    flags = header[4]
    single = bool(flags & 0x20)
    length = (int(single), 2, 4, 8)[flags >> 6]
    begin = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(header[begin : begin + length], "little") + 256 * (length == 2)
    return size if length else None, start + begin + length


def _zstd_end(data: Bytes, start: int, blocks: int) -> int:
    """Return the end of a frame, given its start and that of its blocks."""
    if data[start] != 0x28:
        return blocks + int.from_bytes(data[start + 4 : start + 8].tobytes(), "little")
    last = 0
    while not last:
        block = int.from_bytes(data[blocks : blocks + 3].tobytes(), "little")
        last, repeated = (block & 1) or blocks >= len(data), (block >> 1 & 3) == 1
        blocks += 3 + (1 if repeated else block >> 3)
    return blocks + CHECKSUM * bool(data[start + 4] & 4)


def _check_size(found: int, out: NDArray[Any]) -> None:
    if found != out.nbytes:
        raise ValueError(f"it holds {found} bytes instead of {out.nbytes}")
