"""Codecs of zarr chunks, for readers that decode them without zarr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        if compressors not in ([], ["blosc"], ["zstd"]):
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
                _decode_zstd(data, out)
            else:
                _copy(data, out)
        except RuntimeError as error:
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


def _blosc_size(data: Bytes) -> int:
    """Return the decoded size that a blosc header declares."""
    header = data[:16].tobytes()
    if len(header) < 16 or len(data) < int.from_bytes(header[12:], "little"):
        raise ValueError("it is truncated")
    return int.from_bytes(header[4:8], "little")


def _decode_zstd(data: Bytes, out: NDArray[Any]) -> None:
    from numcodecs import zstd

    size = _zstd_size(data, out.nbytes)
    if size < out.nbytes:
        # several frames, of writers that compress in pieces
        _copy(np.frombuffer(zstd.decompress(data), np.uint8), out)
    else:
        _check_size(size, out)
        zstd.decompress(data, out)


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
    return size + 256 if size_bytes == 2 else size


def _copy(cells: Bytes, out: NDArray[Any]) -> None:
    _check_size(len(cells), out)
    out.reshape(-1).view(np.uint8)[:] = cells


def _check_size(found: int, out: NDArray[Any]) -> None:
    if found != out.nbytes:
        raise ValueError(f"it holds {found} bytes instead of {out.nbytes}")
