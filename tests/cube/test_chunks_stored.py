"""Chunks read straight from disk are what zarr reads, or an error that names the file."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    TransposeCodec,
    ZstdCodec,
)

from ml4cube.cube.chunks.files import LocalFiles, StoreFiles
from ml4cube.cube.chunks.stored import ChunkFiles

V3: dict[str, Any] = {
    "none": None,
    "checksum": [Crc32cCodec()],
    "zstd": [ZstdCodec(level=1)],
    "zstd, checksums": [ZstdCodec(level=3, checksum=True), Crc32cCodec()],
    "blosc": [BloscCodec(typesize=4, cname="lz4", shuffle="bitshuffle")],
    "gzip, checksum": [GzipCodec(level=1), Crc32cCodec()],
    "blosc, checksum": [BloscCodec(typesize=4, cname="zstd", shuffle="shuffle"), Crc32cCodec()],
}
V2: dict[str, Any] = {
    "v2 none": None,
    "v2 zstd": numcodecs.Zstd(1),
    "v2 blosc": numcodecs.Blosc("zlib"),
    "v2 gzip": numcodecs.GZip(1),
    "v2 zlib": numcodecs.Zlib(1),
}
DTYPES = ["<f4", "<f8", "|u1", "<i2", "|b1"]


def make(folder: Any, codec: str, dtype: str, shape: Any, chunks: Any, **more: Any) -> zarr.Array:
    old = codec.startswith("v2")
    compressors = V2[codec] if old else V3[codec]
    version: Any = 2 if old else 3
    return zarr.create_array(
        folder,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        zarr_format=version,
        compressors=compressors,
        overwrite=True,
        **more,
    )


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), codec=st.sampled_from([*V3, *V2]), dtype=st.sampled_from(DTYPES))
def test_same_cells_as_zarr(tmp_path: Path, data: Any, codec: str, dtype: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    separator: Any = data.draw(st.sampled_from([".", "/"]))
    name: Any = "v2" if codec.startswith("v2") else data.draw(st.sampled_from(["default", "v2"]))
    keys: Any = {"name": name, "separator": separator}
    fill = data.draw(st.sampled_from([0, 1]))
    more: dict[str, Any] = {}
    if not codec.startswith("v2") and data.draw(st.booleans()):
        more["shards"] = {
            "shape": tuple(n * data.draw(st.integers(1, 3)) for n in chunks),
            "index_location": data.draw(st.sampled_from(["start", "end"])),
        }
    place: Any = tmp_path / "a"
    if data.draw(st.booleans()):  # as behind a URL
        place = zarr.storage.MemoryStore()
    array = make(
        place, codec, dtype, shape, chunks, fill_value=fill, chunk_key_encoding=keys, **more
    )
    # chunks of nothing but the fill value are not written, and must read as it
    array[...] = np.random.default_rng(3).integers(0, 2, shape).astype(dtype)
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
    reader = ChunkFiles.of(array)
    assert reader is not None
    for _ in range(2):  # the second time with the indices of shards at hand
        cells = reader.read(box)
        assert cells.dtype == array.dtype
        np.testing.assert_array_equal(cells, array[box])


@pytest.mark.parametrize("codec", [*V3, *V2])
@pytest.mark.parametrize("fault", ["emptied", "cut"])
def test_a_damaged_chunk_is_named(tmp_path: Path, codec: str, fault: str) -> None:
    array = make(tmp_path / "a", codec, "<f4", (40, 9), (20, 9))
    array[...] = np.random.default_rng(3).normal(size=(40, 9))
    file = tmp_path / "a" / ("1.0" if codec.startswith("v2") else "c/1/0")
    file.write_bytes(b"" if fault == "emptied" else file.read_bytes()[:-7])
    reader = ChunkFiles.of(array)
    assert reader is not None
    reader.read((slice(0, 20), slice(0, 9)))
    with pytest.raises(ValueError, match=f"chunk {file}: "):
        reader.read((slice(0, 40), slice(0, 9)))


OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded and compressed": {"shards": (8,), "filters": [TransposeCodec(order=(0,))]},
    "two compressors": {"compressors": [BloscCodec(), ZstdCodec()]},
    "checksum before compression": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "transposed": {"filters": [TransposeCodec(order=(0,))]},
    "big-endian": {"serializer": BytesCodec(endian="big")},
    "big-endian, version 2": {"dtype": ">f4", "zarr_format": 2},
    "filters": {"filters": [numcodecs.Delta("<f4")], "zarr_format": 2},
    "text": {"dtype": str},
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_other_layouts_are_left_to_zarr(tmp_path: Path, case: str) -> None:
    plain: Any = {"store": tmp_path / "a", "shape": (8,), "chunks": (4,), "dtype": "<f4"}
    assert ChunkFiles.of(zarr.create_array(**plain | OTHER_LAYOUTS[case])) is None


def test_an_array_that_is_gone_is_an_error_and_not_filled(tmp_path: Path) -> None:
    """As on a machine of a cluster that does not see the disk."""
    array = make(tmp_path / "a", "zstd", "<i2", (4, 4), (2, 2))
    array[:] = 7
    disk = ChunkFiles.of(array)
    assert disk is not None
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no folder"):
        disk.read([slice(0, 4), slice(1, 3)])


class Counting(zarr.storage.MemoryStore):
    """Remembers the requests for chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, Any]] = []

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if "/c/" in f"/{key}":
            self.requests.append((key, byte_range))
        return await super().get(key, prototype, byte_range)


def sharded(store: Any, shape: Any = (24, 8), **more: Any) -> tuple[zarr.Array, np.ndarray]:
    array = make(store, "zstd", "<f4", shape, (2, 4), shards=(8, 8), **more)
    cells = np.random.default_rng(1).normal(size=shape).astype("f4")
    array[...] = cells
    return array, cells


def test_of_a_shard_the_index_is_read_once_and_neighbours_together() -> None:
    store = Counting()
    array, cells = sharded(store)
    reader = ChunkFiles.of(array)
    assert reader is not None
    reader = reader.keeping_indices()
    store.requests.clear()
    with ThreadPoolExecutor(8) as pool:
        rows = list(
            pool.map(lambda i: reader.read((slice(i, i + 2), slice(0, 8))), range(0, 24, 2))
        )
    np.testing.assert_array_equal(np.concatenate(rows), cells)
    keys = [key for key, _ in store.requests]
    # of each of three shards the index, and once for each of four rows of two chunks
    assert {key: keys.count(key) for key in keys} == {f"c/{i}/0": 1 + 4 for i in range(3)}
    store.requests.clear()
    np.testing.assert_array_equal(reader.read((slice(0, 24), slice(0, 8))), cells)
    assert len(store.requests) == 3


def test_a_failed_read_of_an_index_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    array, cells = sharded(store)
    reader = ChunkFiles.of(array)
    assert reader is not None
    whole = (slice(0, 24), slice(0, 8))
    with monkeypatch.context() as broken:

        async def fails(*args: Any, **kwargs: Any) -> None:
            raise ConnectionResetError("reset")

        broken.setattr(Counting, "get", fails)
        with pytest.raises(ConnectionResetError):
            reader.read(whole)
    np.testing.assert_array_equal(reader.read(whole), cells)


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_shard_that_is_replaced_is_read_anew(tmp_path: Path, place: str) -> None:
    store: Any = tmp_path / "a" if place == "disk" else Counting()
    array, _ = sharded(store)
    reader = ChunkFiles.of(array)
    assert reader is not None
    whole = (slice(0, 24), slice(0, 8))
    reader.read(whole)
    other = np.random.default_rng(2).integers(0, 9, (24, 8)).astype("f4")
    array[...] = other
    np.testing.assert_array_equal(reader.read(whole), other)


@pytest.mark.parametrize("place", ["disk", "store"])
def test_absent_chunks_of_shards_are_filled(tmp_path: Path, place: str) -> None:
    store: Any = tmp_path / "a" if place == "disk" else Counting()
    array, cells = sharded(store, fill_value=5)
    array[8:16] = cells[8:16] = 5  # a shard of nothing but the fill value is not written
    array[2:4, :4] = cells[2:4, :4] = 5
    reader = ChunkFiles.of(array)
    assert reader is not None
    np.testing.assert_array_equal(reader.read((slice(0, 24), slice(0, 8))), cells)


@pytest.mark.parametrize("fault", ["cut", "flipped in the index", "index of another size"])
def test_a_damaged_shard_is_named(tmp_path: Path, fault: str) -> None:
    array, _ = sharded(tmp_path / "a")
    file = tmp_path / "a" / "c" / "1" / "0"
    data = bytearray(file.read_bytes())
    if fault == "cut":
        data = data[:-9]
    elif fault == "index of another size":
        data = data[-20:]
    else:
        data[-30] ^= 1
    file.write_bytes(data)
    reader = ChunkFiles.of(array)
    assert reader is not None
    reader.read((slice(0, 8), slice(0, 8)))
    with pytest.raises(ValueError, match=rf"the index of shard {file}: "):
        reader.read((slice(0, 24), slice(0, 8)))


def test_a_damaged_chunk_of_a_shard_is_named(tmp_path: Path) -> None:
    array, _ = sharded(tmp_path / "a")
    file = tmp_path / "a" / "c" / "1" / "0"
    data = bytearray(file.read_bytes())
    data[:4] = b"none"
    file.write_bytes(data)
    reader = ChunkFiles.of(array)
    assert reader is not None
    with pytest.raises(ValueError, match=rf"chunk \d+/\d+ in {file}: "):
        reader.read((slice(0, 24), slice(0, 8)))


def test_a_shard_that_is_replaced_while_threads_ask_for_it_keeps_none_waiting(
    tmp_path: Path,
) -> None:
    array, _ = sharded(tmp_path / "a")
    reader = ChunkFiles.of(array)
    assert reader is not None
    version = itertools.count()
    together = threading.Barrier(2)

    def changing(self: Any, key: str) -> object:
        return next(version)  # as if it was replaced before each read

    def slowly(self: Any, parts: Any) -> Any:
        if parts[0].start < 0:  # of an index
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(timeout=5)
        return read(self, parts)

    read = LocalFiles.read
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(LocalFiles, "version", changing)
        patch.setattr(LocalFiles, "read", slowly)
        box = (slice(0, 8), slice(0, 8))
        one, other = (pool.submit(reader.read, box) for _ in range(2))
        np.testing.assert_array_equal(one.result(timeout=30), other.result(timeout=30))


@pytest.mark.parametrize("how", ["as options", "as positional arguments", "set later"])
def test_connections_are_added_where_options_tell_all_of_a_file_system(how: str) -> None:
    s3fs = pytest.importorskip("s3fs")
    arguments: Any = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    if how == "as positional arguments":
        fs = s3fs.S3FileSystem(False, *arguments.values(), asynchronous=True)
    else:
        fs = s3fs.S3FileSystem(**arguments, asynchronous=True)
    if how == "set later":
        fs = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True)
        fs.key = "k"
    store = zarr.storage.FsspecStore(fs, path="b/c", allowed_exceptions=(KeyError,))
    files = StoreFiles.of(store, "a")
    assert files.store.fs.key == "k"
    assert files.store.path == "b/c"
    if how == "set later":
        assert files.store.fs is fs
    else:
        assert files.store.fs.config_kwargs["max_pool_connections"] == 64
        assert files.store.allowed_exceptions == (KeyError,)
