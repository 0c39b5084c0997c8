"""Chunks read straight from disk are what zarr reads, or an error that names the file."""

from __future__ import annotations

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

from ml4cube.cube.chunks.disk import DiskChunks

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


def make(folder: Path, codec: str, dtype: str, shape: Any, chunks: Any, **more: Any) -> zarr.Array:
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
    array = make(
        tmp_path / "a", codec, dtype, shape, chunks, fill_value=fill, chunk_key_encoding=keys
    )
    # chunks of nothing but the fill value are not written, and must read as it
    array[...] = np.random.default_rng(3).integers(0, 2, shape).astype(dtype)
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
    reader = DiskChunks.of(array)
    assert reader is not None
    found = reader.read(box)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array[box])


@pytest.mark.parametrize("codec", [*V3, *V2])
@pytest.mark.parametrize("fault", ["emptied", "cut"])
def test_a_damaged_chunk_is_named(tmp_path: Path, codec: str, fault: str) -> None:
    array = make(tmp_path / "a", codec, "<f4", (40, 9), (20, 9))
    array[...] = np.random.default_rng(3).normal(size=(40, 9))
    file = tmp_path / "a" / ("1.0" if codec.startswith("v2") else "c/1/0")
    file.write_bytes(b"" if fault == "emptied" else file.read_bytes()[:-7])
    reader = DiskChunks.of(array)
    assert reader is not None
    reader.read((slice(0, 20), slice(0, 9)))
    with pytest.raises(ValueError, match=f"chunk {file}: "):
        reader.read((slice(0, 40), slice(0, 9)))


OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"shards": (8,)},
    "two compressors": {"compressors": [BloscCodec(), ZstdCodec()]},
    "checksum before compression": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "transposed": {"filters": [TransposeCodec(order=(0,))]},
    "big-endian": {"serializer": BytesCodec(endian="big")},
    "big-endian, version 2": {"dtype": ">f4", "zarr_format": 2},
    "filters": {"filters": [numcodecs.Delta("<f4")], "zarr_format": 2},
    "text": {"dtype": str},
    "memory": {"store": {}},
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_other_layouts_are_left_to_zarr(tmp_path: Path, case: str) -> None:
    plain: Any = {"store": tmp_path / "a", "shape": (8,), "chunks": (4,), "dtype": "<f4"}
    assert DiskChunks.of(zarr.create_array(**plain | OTHER_LAYOUTS[case])) is None


def test_an_array_that_is_gone_is_an_error_and_not_filled(tmp_path: Path) -> None:
    """As on a machine of a cluster that does not see the disk."""
    array = make(tmp_path / "a", "zstd", "<i2", (4, 4), (2, 2))
    array[:] = 7
    disk = DiskChunks.of(array)
    assert disk is not None
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no folder"):
        disk.read([slice(0, 4), slice(1, 3)])
