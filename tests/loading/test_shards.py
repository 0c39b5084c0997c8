"""Chunks read straight from shard files hold what zarr reads, or raise."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
from fsspec.config import set_conf_env
from fsspec.implementations.local import LocalFileSystem
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.cube.chunks.stored import ChunkFiles
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.ledger.folders import filesystem
from ml4cube.loading.dataset_source import DatasetSource
from ml4cube.loading.store_files import StoreSource
from ml4cube.store.format import open_store
from tests.samplestores import numbered, write_store

BLOSC, CRC = BloscCodec(cname="lz4", shuffle="bitshuffle"), Crc32cCodec()
ZSTD = ZstdCodec(level=1)
RNG = np.random.default_rng(0)


def write(path: Path, values: np.ndarray, **layout: Any) -> ChunkFiles:
    """Write an array with zarr and make a reader of it."""
    array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, **layout)
    array[...] = values
    files = ChunkFiles.of(array)
    assert files is not None
    return files


def read(array: ChunkFiles, chunk: int, out: np.ndarray) -> None:
    array.read_chunk((chunk, 0), out, lambda n: np.empty(n, np.uint8))


@pytest.mark.parametrize("shards", [None, (12, 3)])
@pytest.mark.parametrize("codecs", [[CRC], [BLOSC, CRC]])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "u1", "bool"])
def test_chunks_are_those_of_zarr(tmp_path: Path, shards: Any, codecs: Any, dtype: str) -> None:
    values = (RNG.normal(size=(29, 3)) * 9).astype(dtype)
    array = write(tmp_path / "a", values, chunks=(4, 3), shards=shards, compressors=codecs)
    twin = pickle.loads(pickle.dumps(array))  # noqa: S301
    for chunk in range(8):
        expected = values[4 * chunk : 4 * chunk + 4]
        for kind in (dtype, "f8"):
            out = np.empty((2, *expected.shape), kind)
            read(array, chunk, out[0])
            read(twin, chunk, out[1])
            np.testing.assert_array_equal(out, [expected, expected])


def test_every_flipped_bit_raises(tmp_path: Path) -> None:
    path = tmp_path / "a"
    values = RNG.normal(size=(24, 3))
    array = write(path, values, chunks=(4, 3), shards=(12, 3), compressors=[BLOSC, CRC])
    file = path / "c" / "1" / "0"
    sound = file.read_bytes()
    for place in range(0, len(sound), 5):
        raw = bytearray(sound)
        raw[place] ^= 1 << place % 8
        file.write_bytes(raw)
        fresh = pickle.loads(pickle.dumps(array))  # noqa: S301
        with pytest.raises(ValueError, match="c/1/0"):
            [read(fresh, chunk, np.empty((4, 3))) for chunk in range(3, 6)]


def test_a_chunk_that_was_never_written_is_missing(tmp_path: Path) -> None:
    array = write(
        tmp_path / "a",
        np.where(np.arange(12)[:, None] < 4, 0.0, np.ones((12, 3))),
        chunks=(4, 3),
        shards=(12, 3),
        compressors=[BLOSC],
        config={"write_empty_chunks": False},
    )
    with pytest.raises(ValueError, match="chunk 0/0 is missing"):
        read(array, 0, np.empty((4, 3)))


def test_a_store_is_read_from_its_files_unless_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.open_group(tmp_path, mode="a")
    path = write_store(tmp_path / "train.zarr", 60, ("a", "b"))
    opened = open_store(path)
    grouped = xr.open_zarr(tmp_path, group="train.zarr", consolidated=False)
    turned = opened.isel(samples=slice(None, None, -1))
    unchanged = {
        "path": path,
        "opened": opened,
        "fewer": opened[["b"]],
        "url": path.as_uri(),
        "relative": "train.zarr",
        "relative path": Path("train.zarr"),
        "relative, opened": open_store("./train.zarr/"),
        "renamed": opened.rename(a="c"),
        "by xarray": xr.open_zarr(str(path)),
        "by xarray, path": xr.open_zarr(path),
        "by xarray, relative": xr.open_zarr("train.zarr"),
        "by xarray, relative path": xr.open_zarr(Path("train.zarr")),
        "in a group": grouped,
    }
    for form, ds in unchanged.items():
        assert type(PTXrDataset(ds)._source) is StoreSource, form
    for ds in (opened.assign(a=opened["a"] + 1), turned, opened.copy().load()):
        assert type(PTXrDataset(ds)._source) is DatasetSource
    np.testing.assert_array_equal(PTXrDataset(turned, features="a")[0][0], numbered(60)[-1])


def test_a_store_in_another_file_system(tmp_path: Path) -> None:
    path = write_store(tmp_path / "train.zarr", 60, ("a",))
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/shards/train.zarr", recursive=True)
    data = PTXrDataset("memory://shards/train.zarr", features="a")
    assert isinstance(data._source, StoreSource)
    assert data._source.remote
    loader = prep_dataloader(data, batch_size=7, shuffle=False, drop_last=False, buffer_mb=0.001)
    rows = np.concatenate([x[:, 0].numpy() for x in loader])
    np.testing.assert_array_equal(rows, numbered(60))
    memory.rm("/shards", recursive=True)
    with pytest.raises(StoreError, match="samples 20 to 29"):
        data[25]


def test_a_store_replaced_under_a_reader_is_noticed(tmp_path: Path) -> None:
    """The files of the two stores have equal sizes, and checksums that are right."""
    path = write_store(tmp_path / "train.zarr", 60, ("a",))
    write_store(tmp_path / "other.zarr", 60, ("a",))
    data = PTXrDataset(path, features="a")
    data.take([0])
    path.rename(tmp_path / "old")
    (tmp_path / "other.zarr").rename(path)
    with pytest.raises(StoreError, match=r"/0 was replaced or changed since the store was open"):
        data.take([59])
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    np.testing.assert_array_equal(copy[59][0], numbered(60)[59])


def test_a_store_replaced_before_its_first_read_is_noticed(tmp_path: Path) -> None:
    path = write_store(tmp_path / "train.zarr", 60, ("a",))
    write_store(tmp_path / "other.zarr", 60, ("a",))
    data = PTXrDataset(path)
    path.rename(tmp_path / "old")
    (tmp_path / "other.zarr").rename(path)
    with pytest.raises(StoreError, match=r"c/0/0/0 was replaced or changed since the store was op"):
        data[0]


class Guarded(LocalFileSystem):
    """Local files behind a password."""

    protocol = "guarded"
    cachable = False

    def __init__(self, password: str = "", **options: Any) -> None:
        super().__init__(**options)
        if password != "sesame":
            raise PermissionError("no credentials")


def test_a_store_opened_with_options_is_read_from_its_files(tmp_path: Path) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    path = write_store(tmp_path / "train.zarr", 60, ("a", "b"))
    opened = xr.open_zarr(f"guarded://{path}", storage_options={"password": "sesame"})
    data = PTXrDataset(opened, features="a")
    assert isinstance(data._source, StoreSource)
    np.testing.assert_array_equal(data[59][0], numbered(60)[59])


def test_options_of_the_environment_are_none_of_the_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    filesystem.cache_clear()
    settings: dict[str, Any] = {}
    set_conf_env(settings, {"FSSPEC_GUARDED_PASSWORD": "sesame"})
    monkeypatch.setitem(fsspec.config.conf, "guarded", settings["guarded"])
    path = write_store(tmp_path / "train.zarr", 60, ("a", "b"))
    for source in (f"guarded://{path}", xr.open_zarr(f"guarded://{path}")):
        data = PTXrDataset(source, features="a")
        assert caplog.text == ""
        assert isinstance(data._source, StoreSource)
        np.testing.assert_array_equal(data[59][0], numbered(60)[59])
    filesystem.cache_clear()


def test_samples_whose_store_is_gone_or_damaged_are_refused(tmp_path: Path) -> None:
    path = write_store(tmp_path / "train.zarr", 60, ("a",))
    opened = xr.open_zarr(path)
    (path / "a" / "c" / "0" / "0" / "0").unlink()
    with pytest.raises(StoreError, match=r"a/c/0/0/0"):
        PTXrDataset(opened)
    path.rename(tmp_path / "moved.zarr")
    with pytest.raises(StoreError, match="is missing; make the store again"):
        PTXrDataset(opened)


def test_a_store_without_its_dim_of_samples_is_no_cube(tmp_path: Path) -> None:
    opened = open_store(write_store(tmp_path / "train.zarr", 60, ("a",)))
    for changed in (opened.load().rename(samples="s"), opened.isel(samples=0)):
        with pytest.raises(InvalidValueError, match=r"no dim 'samples'.*isel\(samples=\[0\]\)"):
            PTXrDataset(changed)
