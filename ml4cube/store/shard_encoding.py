"""Encode samples as the bytes of a shard: chunks, compressed, with checksums and an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, check_choice, listed

# Offset and size, in the index, of a chunk that a shard does not have.
_NO_CHUNK = np.iinfo(np.uint64).max
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")  # 0, 1 and 2 in numcodecs
_COMPRESSORS = ("lz4", "zstd")


@dataclass(frozen=True)
class Compressor:
    """The compressor of every chunk of a store."""

    # Arguments of `zarr.codecs.BloscCodec`; `cname` None stores chunks uncompressed.
    cname: str | None = "lz4"
    clevel: int = 5
    shuffle: str = "shuffle"

    @classmethod
    def parse(cls, compressors: Any, rounded: bool = False) -> Compressor:
        """Make a compressor from the sampler's `compressors`; `rounded` if low bits were zeroed."""
        from zarr.codecs import BloscCodec

        if compressors is None:
            return cls(cname=None)
        if isinstance(compressors, BloscCodec):
            return cls(compressors.cname.value, int(compressors.clevel), compressors.shuffle.value)
        if not isinstance(compressors, str):
            raise InvalidTypeError(
                f"compressors must be {listed(_COMPRESSORS, 'or')}, a zarr.codecs.BloscCodec or "
                f"None, got {compressors!r}"
            )
        check_choice("compressors", compressors, _COMPRESSORS)
        # Shuffled by byte, values decode 1.6 to 1.9 times as fast (make bench-codecs). By bit, they
        # compress better: chosen for zeroed bits, and for zstd, which users ask for small files.
        by_bit = rounded or compressors == "zstd"
        return cls(cname=compressors, shuffle="bitshuffle" if by_bit else "shuffle")

    def codecs(self, itemsize: int) -> list[Any]:
        """Return zarr's codecs: the compressor, then a checksum."""
        from zarr.codecs import BloscCodec, Crc32cCodec

        if self.cname is None:
            return [Crc32cCodec()]
        blosc: Any = BloscCodec(
            typesize=itemsize,
            cname=self.cname,  # type: ignore[arg-type]
            clevel=self.clevel,
            shuffle=self.shuffle,  # type: ignore[arg-type]
        )
        return [blosc, Crc32cCodec()]

    def compress(self, data: Any, itemsize: int) -> bytes:
        """Compress one chunk and append its checksum."""
        from numcodecs import blosc  # type: ignore[import-untyped]

        if self.cname is None:
            return with_checksum(bytes(memoryview(data).cast("B")))
        shuffle = _SHUFFLES.index(self.shuffle)
        return with_checksum(
            blosc.compress(data, self.cname.encode(), self.clevel, shuffle, typesize=itemsize)
        )


def encode_shard(
    samples: NDArray[Any],
    compressor: Compressor,
    *,
    stored_dtype: np.dtype[Any],
    fill: Any,
    samples_per_chunk: int,
    samples_per_shard: int,
) -> list[bytes]:
    """Encode one shard as zarr's sharding codec does, or as a plain chunk if it is one chunk.

    The last chunk is padded with the fill value. Dates are stored as int64.
    """
    if samples.dtype.kind == "M":
        samples = samples.view(np.int64)
    if missing := -len(samples) % samples_per_chunk:
        padding = np.full((missing, *samples.shape[1:]), fill, dtype=stored_dtype)
        samples = np.concatenate([samples, padding])
    chunks = [
        _encode_chunk(samples[start : start + samples_per_chunk], compressor, stored_dtype)
        for start in range(0, len(samples), samples_per_chunk)
    ]
    if samples_per_chunk == samples_per_shard:
        return chunks
    return _with_index(chunks, samples_per_shard // samples_per_chunk)


def _encode_chunk(samples: NDArray[Any], compressor: Compressor, dtype: np.dtype[Any]) -> bytes:
    if dtype.kind == "O":
        from numcodecs import VLenUTF8

        return compressor.compress(VLenUTF8().encode(samples), 1)
    # at most one copy for dtype, byte order and memory layout
    stored = np.ascontiguousarray(samples, dtype=dtype)
    return compressor.compress(stored, stored.itemsize)


def with_checksum(data: bytes) -> bytes:
    """Append the CRC-32C of the data."""
    import google_crc32c

    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def _with_index(chunks: list[bytes], chunk_count: int) -> list[bytes]:
    """Append the index of a shard of `chunk_count` chunks, the last of which may be missing."""
    index = np.full((chunk_count, 2), _NO_CHUNK, dtype="<u8")
    sizes = np.array([len(chunk) for chunk in chunks], dtype="<u8")
    index[: len(chunks), 0] = np.cumsum(sizes) - sizes
    index[: len(chunks), 1] = sizes
    return [*chunks, with_checksum(index.tobytes())]
