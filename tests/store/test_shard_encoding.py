"""Chunks and shards are the bytes that zarr itself would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec

from ml4cube.core.errors import CubeError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.ledger.local import LocalFolder
from ml4cube.store.format import ArrayLayout, StoreLayout, write_array_metadata, write_shard
from ml4cube.store.shard_encoding import Compressor
from tests.cubes import cell_id_cube
from tests.samplestores import paths

CHOICES: list[Any] = [
    "lz4",
    "zstd",
    None,
    BloscCodec(cname="zlib", clevel=9, shuffle="shuffle", typesize=4),
    BloscCodec(cname="lz4hc", clevel=1, shuffle="noshuffle", typesize=4),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<i8"])
def test_same_bytes_as_zarr(tmp_path: Path, choice: Any, dtype: str) -> None:
    layout = StoreLayout(
        40, 16, (ArrayLayout("v", ("samples", "x"), (3,), dtype, 8),), Compressor.parse(choice)
    )
    values = np.arange(120).reshape(40, 3).astype(dtype)
    ours_folder = LocalFolder(tmp_path / "ours")
    ours_folder.root.mkdir()
    write_array_metadata(ours_folder, layout)
    for shard in range(layout.shard_count):
        first, last = layout.bounds(shard)
        write_shard(ours_folder, layout, shard, {"v": values[first:last]})
    by_zarr = tmp_path / "zarr" / "v"
    by_zarr.mkdir(parents=True)
    (by_zarr / "zarr.json").write_bytes((tmp_path / "ours" / "v" / "zarr.json").read_bytes())
    array = zarr.open_array(by_zarr, mode="r+")
    array[:] = values
    for shard in range(layout.shard_count):
        key = f"v/c/{shard}/0"
        ours, theirs = ((tmp_path / who / key).read_bytes() for who in ("ours", "zarr"))
        assert sorted(ours) == sorted(theirs)  # zarr may put chunks in another order
        assert len(ours) == len(theirs)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "ours" / "v", mode="r")[:], values)


@pytest.mark.parametrize("choice", ["lz5", GzipCodec(), 3, ["lz4", "zstd"]], ids=str)
def test_unknown_compressors_are_refused(choice: Any) -> None:
    with pytest.raises(CubeError, match=r"compressors must be .* got"):
        Compressor.parse(choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shuffle"),
    [({}, "shuffle"), ({"bitround": 10}, "bitshuffle"), ({"compressors": "zstd"}, "bitshuffle")],
    ids=str,
)
def test_values_are_shuffled_by_default(
    tmp_path: Path, options: dict[str, Any], shuffle: str
) -> None:
    cube = cell_id_cube({"time": 24, "lat": 6}, "float32")
    MultiProcSampler(cube, **paths(tmp_path), block_size={"time": 4}, nproc=1, **options).run()
    blosc = zarr.open_array(tmp_path / "train.zarr/a", mode="r").compressors[0]
    assert isinstance(blosc, BloscCodec)
    assert str(getattr(blosc.shuffle, "value", blosc.shuffle)) == shuffle


def test_rounding_is_recorded_and_reaches_the_loader(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    cube = cell_id_cube({"time": 24, "lat": 6}, "float32")
    cube = cube.assign(t=(("time", "lat"), rng.normal(280, 5, (24, 6)).astype("float32")))
    sampler = MultiProcSampler(
        cube, **paths(tmp_path), nproc=1, dtype={"t": "float16"}, bitround={"t": 4, "a": 8}
    )
    plan = sampler.plan()
    assert plan.schema["t"][1] == "<f2"
    train, _ = sampler.get_datasets()
    assert train["t"].dtype == np.float16
    assert train["t"].attrs["ml4cube_keepbits"] == 4
    mean, std = plan.statistics.mean_std()["t"]
    back = train["t"].values.astype(float) * std + mean
    places = (train["time_index"].values, train["lat_index"].values)
    truth = cube["t"].values[places]
    assert np.abs(back - truth).max() <= np.abs((truth - mean) / std).max() * std / 2**5 * 1.01
    batch = next(iter(prep_dataloader(PTXrDataset(train, features="t"), batch_size=16)))
    assert str(batch.dtype) == "torch.float32"


def test_chunks_too_large_for_a_worker_are_refused_unread(tmp_path: Path) -> None:
    """30 KB on disk may be a gigabyte in memory: the metadata tells before anything is read."""
    array = zarr.create_array(
        tmp_path / "bomb.zarr",
        name="t",
        shape=(40_000, 10_000),
        chunks=(40_000, 10_000),
        dtype="float64",
        dimension_names=("y", "x"),
        fill_value=0.0,
    )
    assert array.nbytes == 3_200_000_000
    with pytest.raises(CubeError, match=r"chunks of variable 't'.*3,200 MB.*max_chunk_mb"):
        MultiProcSampler(tmp_path / "bomb.zarr", **paths(tmp_path))
