"""Decoding a chunk gives the cells that were encoded, or an error."""

from __future__ import annotations

import gzip
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from ml4cube.core.errors import StoreError
from ml4cube.cube.chunks.bounded import bounded_decoding
from ml4cube.cube.chunks.codecs import ChunkCodecs
from ml4cube.cube.opening import as_dataset
from ml4cube.store.shard_encoding import with_checksum

CELLS = np.arange(64, dtype="<f4").reshape(8, 8) // 3
PACK: dict[str | None, Any] = {
    None: lambda cells: cells.tobytes(),
    "zstd": numcodecs.Zstd(1).encode,
    "blosc": numcodecs.Blosc("lz4").encode,
    "gzip": numcodecs.GZip(1).encode,
    "zlib": numcodecs.Zlib(1).encode,
}
UNSIZED = b"\x28\xb5\x2f\xfd\x00\x58"  # a frame that declares no size: window of 2 MiB


def packed(codecs: ChunkCodecs, cells: Any = CELLS) -> np.ndarray:
    data = bytes(PACK[codecs.compressor](cells))
    return np.frombuffer(with_checksum(data) if codecs.checksum else data, np.uint8)


every = pytest.mark.parametrize(
    "codecs", [ChunkCodecs(name, checksum) for name in PACK for checksum in (False, True)], ids=str
)


@every
def test_cells_come_back(codecs: ChunkCodecs) -> None:
    out = np.full_like(CELLS, -1)
    codecs.decode(packed(codecs), out)
    np.testing.assert_array_equal(out, CELLS)


@every
@pytest.mark.parametrize("rows", [7, 9])
def test_more_or_fewer_cells_are_refused(codecs: ChunkCodecs, rows: int) -> None:
    with pytest.raises(
        ValueError, match=rf"it holds (256|more than 224) bytes( instead of {rows * 32}|$)"
    ):
        codecs.decode(packed(codecs), np.empty((rows, 8), "<f4"))


@every
@settings(max_examples=80)
@given(data=st.data())
def test_damage_is_an_error_or_changes_cells_but_not_their_number(
    codecs: ChunkCodecs, data: Any
) -> None:
    """Whatever the bytes are, nothing is written outside the cells of the chunk."""
    sound = packed(codecs)
    broken = sound[: data.draw(st.integers(0, len(sound)))].copy()
    places = st.integers(0, max(len(broken) - 1, 0))
    for place in data.draw(st.lists(places, min_size=1, max_size=4)) if len(broken) else []:
        broken[place] = data.draw(st.integers(0, 255))
    buffer = np.full((10, 8), -1, "<f4")
    try:
        codecs.decode(broken, buffer[1:9])
        assert not codecs.checksum or np.array_equal(buffer[1:9], CELLS)
    except ValueError:
        pass
    assert (buffer[[0, 9]] == -1).all()


@pytest.mark.parametrize("compressor", PACK)
def test_any_flipped_bit_is_refused_where_there_is_a_checksum(compressor: str | None) -> None:
    codecs = ChunkCodecs(compressor, checksum=True)
    sound = packed(codecs)
    for place in range(len(sound)):
        broken = sound.copy()
        broken[place] ^= 1
        with pytest.raises(ValueError, match="wrong checksum"):
            codecs.decode(broken, np.empty((8, 8), "<f4"))


def test_a_chunk_of_another_size_is_refused_before_it_expands() -> None:
    zeros = np.zeros(2**27, np.uint8)
    for name in ("zstd", "blosc"):
        codecs = ChunkCodecs(name, checksum=False)
        with pytest.raises(ValueError, match="it holds 134217728 bytes instead of 256"):
            codecs.decode(packed(codecs, zeros), np.empty((8, 8), "<f4"))


def unsized(raw: bytes) -> bytes:
    """A frame of raw blocks."""
    blocks = [raw[start : start + 70_000] for start in range(0, len(raw) or 1, 70_000)]
    heads = [(len(b) << 3 | (b is blocks[-1])).to_bytes(3, "little") for b in blocks]
    return UNSIZED + b"".join(h + b for h, b in zip(heads, blocks, strict=True))


SKIPPED = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
FRAMES = {
    "plain": numcodecs.Zstd(1).encode,
    "with a checksum": numcodecs.Zstd(3, checksum=True).encode,
    "without a size": unsized,
    "after a skippable one": lambda raw: SKIPPED + numcodecs.Zstd(1).encode(raw),
    "before a skippable one": lambda raw: numcodecs.Zstd(1).encode(raw) + SKIPPED,
}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([*FRAMES]), st.integers(0, 400_000)), min_size=1))
def test_several_frames_are_read_as_one_and_others_refused(frames: list[tuple[str, int]]) -> None:
    """Tools that compress in pieces make them (pzstd, streams that are flushed)."""
    assume(any(n for _, n in frames))  # there are no chunks of no bytes
    rng = np.random.default_rng(len(frames))
    # what compresses, what does not, and what repeats, each a kind of block
    pieces = [rng.integers(0, 1 + 127 * (n % 3), n).astype("u1").tobytes() for _, n in frames]
    data = b"".join(FRAMES[kind](p) for (kind, _), p in zip(frames, pieces, strict=True))
    whole, buffer = b"".join(pieces), np.frombuffer(data, np.uint8)
    codecs = ChunkCodecs("zstd", checksum=False)
    out = np.full(len(whole), 7, np.uint8)
    codecs.decode(buffer, out)
    assert out.tobytes() == whole
    for wrong in {len(whole) - 1, len(whole) + 1, max(n for _, n in frames)} - {len(whole), -1}:
        with pytest.raises(ValueError, match=r"instead of|too small|expected to"):
            codecs.decode(buffer, np.empty(wrong, np.uint8))
    if len(data) > 1:
        with pytest.raises(ValueError, match=r".+"):
            codecs.decode(buffer[:-1], np.empty(len(whole), np.uint8))


def zeros_in_unsized_zstd(n_bytes: int) -> bytes:
    """A frame without a size, of blocks that repeat one byte."""
    n_blocks = n_bytes >> 17
    blocks = [(1 << 17) << 3 | 1 << 1 | (n == n_blocks - 1) for n in range(n_blocks)]
    return UNSIZED + b"".join(block.to_bytes(3, "little") + b"\0" for block in blocks)


def zeros_in_deflate(n_bytes: int, wbits: int) -> bytes:
    stream = zlib.compressobj(1, wbits=wbits)
    pieces = [stream.compress(bytes(1 << 20)) for _ in range(n_bytes >> 20)]
    return b"".join([*pieces, stream.flush()])


SMALL = np.zeros(50, "u1").tobytes()
BOMBS = {
    "gzip": lambda n: zeros_in_deflate(n, 31),
    "gzip, second member": lambda n: numcodecs.GZip(1).encode(SMALL) + zeros_in_deflate(n, 31),
    "zlib": lambda n: zeros_in_deflate(n, 15),
    "zstd": zeros_in_unsized_zstd,
    "zstd, second frame": lambda n: numcodecs.Zstd(1).encode(SMALL) + zeros_in_unsized_zstd(n),
    "blosc": lambda n: numcodecs.Blosc("zstd").encode(np.zeros(n, "u1")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_no_chunk_inflates_beyond_its_size(kind: str) -> None:
    """300 MB in a few kB or MB are refused before they are in memory."""
    data = np.frombuffer(BOMBS[kind](300 << 20), np.uint8)
    assert len(data) < 5e6
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"instead of|too small|more than 100 bytes"):
        ChunkCodecs(kind.partition(",")[0], checksum=False).decode(data, np.empty(100, "u1"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_gzip_of_several_members_and_zeros_at_the_end_is_read() -> None:
    members = [numcodecs.GZip(1).encode(CELLS[rows]) for rows in (slice(3), slice(3, None))]
    out = np.empty_like(CELLS)
    data = np.frombuffer(b"".join([*map(bytes, members), bytes(20)]), np.uint8)
    ChunkCodecs("gzip", checksum=False).decode(data, out)
    np.testing.assert_array_equal(out, CELLS)
    assert gzip.decompress(data.tobytes()) == CELLS.tobytes()


FORMATS = {
    "gzip": {"zarr_format": 3, "compressors": [GzipCodec()]},
    "zstd": {"zarr_format": 3, "compressors": [ZstdCodec()]},
    "blosc": {"zarr_format": 3, "compressors": [BloscCodec()]},
    "gzip, shards": {"zarr_format": 3, "compressors": [GzipCodec()], "shards": (20, 2)},
    "none": {"zarr_format": 3, "compressors": []},
    "zlib, format 2": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "big-endian, format 2": {"zarr_format": 2, "compressors": numcodecs.GZip(), "dtype": ">f8"},
    "fill, format 2": {"zarr_format": 2, "fill_value": 5.0},
    "columns first, format 2": {"zarr_format": 2, "compressors": numcodecs.GZip(), "order": "F"},
}


@pytest.mark.parametrize("order_in_memory", ["C", "F"])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_zarr_reads_is_as_it_was_written(
    tmp_path: Path, kind: str, order_in_memory: str
) -> None:
    values = np.arange(51.0).reshape(17, 3)
    options = {"dtype": "<f8", "chunks": (5, 2)} | FORMATS[kind]
    with zarr.config.set({"array.write_empty_chunks": False}):
        array = zarr.create_array(tmp_path / "cube.zarr", name="x", shape=values.shape, **options)
        array[:] = values
        array.attrs["_ARRAY_DIMENSIONS"] = ["x", "y"]
    with zarr.config.set({"array.order": order_in_memory}):
        with bounded_decoding():
            opened = zarr.open_group(tmp_path / "cube.zarr", mode="r")["x"]
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(opened))[:], values)  # noqa: S301
        np.testing.assert_array_equal(opened[3:11:2], values[3:11:2])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [None, (4,)])
def test_no_coordinate_inflates_beyond_its_size(tmp_path: Path, shards: Any) -> None:
    """A cube is refused when it is opened, before 300 MB are in memory."""
    path, bomb = tmp_path / "cube.zarr", zeros_in_deflate(300 << 20, 31)
    zarr.create_group(path).create_array(
        "x",
        shape=(4,),
        chunks=(4,),
        shards=shards,
        dtype="f8",
        compressors=[GzipCodec()],
        dimension_names=["x"],
    )
    if shards is not None:
        bomb += with_checksum(struct.pack("<QQ", 0, len(bomb)))
    (path / "x/c").mkdir()
    (path / "x/c/0").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(StoreError, match=r"cannot be opened as a cube.* more than 32 bytes"):
        as_dataset(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
