"""A damaged source: one clear error that names the place, or a count; mended, the run completes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from ml4cube.core.errors import CubeError, InvalidValueError, StoreError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.store.format import open_store
from tests.cubes import cell_id_cube
from tests.faults.test_sampling_faults import tree
from tests.samplestores import paths

SHAPE = {"time": 24, "lat": 8}
CHUNK = {"time": 4, "lat": 8}
CHUNK_CELLS = 32


def write_cube(folder: Path, dtype: str, zarr_format: int = 3, **encoding: Any) -> Path:
    """A cube of chunks that each hold a part of the blocks of a split."""
    cube = cell_id_cube(SHAPE, dtype, dask_chunks=CHUNK) + 1
    path = folder / "cube.zarr"
    cube.astype(dtype).to_zarr(
        path,
        encoding={"a": {"chunks": tuple(CHUNK.values()), **encoding}},
        zarr_format=zarr_format,  # type: ignore[arg-type]
        consolidated=False,
    )
    return path


def chunk_file(cube: Path, number: int = 1) -> Path:
    return cube / "a" / "c" / str(number) / "0"


def sampler(cube: Any, folder: Path, **options: Any) -> MultiProcSampler:
    given: dict[str, Any] = {"nproc": 1, "sample_size": {"lat": 2}, "data_split": 0.5}
    return MultiProcSampler(cube, **paths(folder), **{**given, "scale_fn": None, **options})


def all_samples(folder: Path) -> np.ndarray:
    parts = [open_store(folder / f"{part}.zarr")["a"].values for part in ("train", "test")]
    return np.sort(np.concatenate(parts).ravel())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "nproc"), [("flipped", 1), ("cut", 1), ("emptied", 1), ("flipped", 2)]
)
def test_a_damaged_chunk_of_a_checksummed_source(tmp_path: Path, fault: str, nproc: int) -> None:
    codecs = [BloscCodec(typesize=4, cname="lz4"), Crc32cCodec()]
    cube = write_cube(tmp_path, "float32", compressors=codecs)
    file = chunk_file(cube)
    good = file.read_bytes()
    flipped = bytes([good[-8] ^ 16])
    damaged = {"flipped": good[:-8] + flipped + good[-7:], "cut": good[:-9], "emptied": b""}
    file.write_bytes(damaged[fault])
    out = tmp_path / "out"
    with pytest.raises(
        StoreError,
        match=r"variable 'a' cannot be read at time \d+:\d+, lat 0:8: .*damaged or not reachable",
    ):
        sampler(cube, out, nproc=nproc).run()
    assert not list(out.glob("*.zarr"))
    file.write_bytes(good)
    sampler(cube, out, nproc=nproc).run()
    sampler(cube, tmp_path / "undisturbed").run()
    assert tree(out) == tree(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "fill", "reads_as", "zarr_format"),
    [
        ("float64", np.nan, "nan", 3),
        ("float32", 0.0, "0.0", 3),
        ("int16", 7, "7", 3),
        ("int32", 0, "0", 2),
    ],
)
def test_a_missing_chunk_is_counted_and_told(
    tmp_path: Path, dtype: str, fill: float, reads_as: str, zarr_format: int
) -> None:
    """Gaps are dropped and counted; what looks like values is kept, with a warning."""
    cube = write_cube(tmp_path, dtype, zarr_format)
    # as other writers than xarray make it: a fill value that means nothing
    shutil.rmtree(cube / "a")
    array = zarr.open_group(cube, mode="r+", zarr_format=zarr_format).create_array(  # type: ignore[arg-type]
        "a",
        shape=tuple(SHAPE.values()),
        chunks=tuple(CHUNK.values()),
        dtype=dtype,
        fill_value=fill,
        **({"dimension_names": list(SHAPE)} if zarr_format == 3 else {}),
        attributes={"_ARRAY_DIMENSIONS": list(SHAPE)} if zarr_format == 2 else {},
    )
    array[:] = np.arange(1, 193).reshape(24, 8) * 11
    key = "c/1/0" if zarr_format == 3 else "1.0"
    (cube / "a" / key).unlink()
    if zarr_format == 2:
        reads_as = "nan"  # there xarray takes the fill value for "no value"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = sampler(cube, tmp_path / "out")
        plan = made.plan()
        made.run()
    assert {name: (f.number, f.reads_as) for name, f in plan.absent.items()} == {"a": (1, reads_as)}
    found = (
        f"1 chunk is missing from the source ('{key}', time 4:8, lat 0:8) and reads as {reads_as}"
    )
    assert f"'a': {found}" in str(plan)
    told = [str(one.message) for one in caught if "missing_chunks" in str(one.message)]
    if reads_as == "nan":
        assert not told
        assert plan.dropped["gap"] == CHUNK_CELLS // 2
    else:
        assert len(told) == 1
        assert told[0].startswith(f"variable 'a': {found}")
        samples = all_samples(tmp_path / "out")
        assert (samples == fill).sum() == CHUNK_CELLS
    attrs = open_store(tmp_path / "out/train.zarr").attrs
    assert attrs["provenance"]["absent_chunks"] == {"a": 1}
    with pytest.raises(
        StoreError,
        match=f"variable 'a': 1 chunk is missing from the source .'{key}'.*reads as {reads_as}",
    ):
        sampler(cube, tmp_path / "strict", missing_chunks="raise").run()
    assert not list((tmp_path / "strict").glob("*"))


def test_absent_chunks_are_counted_once_however_tiles_overlap(tmp_path: Path) -> None:
    """A cube so large that its windows are cut in several tiles, which end inside chunks."""
    cube = cell_id_cube({"time": 24, "lat": 4096}, "int32", dask_chunks={"time": 24, "lat": 4096})
    cube = (cube + 1).assign(height=("time", np.arange(1, 25)))  # repeated along lat
    path = tmp_path / "cube.zarr"
    encoding = {"a": {"chunks": (4, 500)}, "height": {"chunks": (4,)}}
    cube.to_zarr(path, encoding=encoding, consolidated=False)
    absent = {"a": ("0/0", "2/1", "3/1", "5/8"), "height": ("0", "3")}
    for name, chunks in absent.items():
        for chunk in chunks:
            (path / name / "c" / chunk).unlink()
    made = sampler(path, tmp_path / "out", sample_size={"time": 3, "lat": 3}, overlap={"time": 0.5})
    found = made.plan().absent
    assert {name: f.number for name, f in found.items()} == {"a": 4, "height": 2}


def test_a_whole_source_is_not_suspected(tmp_path: Path) -> None:
    """Chunks of one value that are there, and arrays that no store is behind."""
    cube = write_cube(tmp_path, "int32")
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_group(cube)["a"][4:8] = 0
    assert chunk_file(cube).exists()
    assert sampler(cube, tmp_path / "out", missing_chunks="raise").plan().absent == {}
    loaded = xr.open_zarr(cube, consolidated=False).load()
    assert sampler(loaded, tmp_path / "out", missing_chunks="raise").plan().absent == {}


def test_strictness_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    cube = xr.open_zarr(write_cube(tmp_path, "int32"), consolidated=False)
    with pytest.raises(
        InvalidValueError, match=r"missing_chunks='raise' is not possible for \['a'"
    ):
        sampler(cube + 1, tmp_path / "out", missing_chunks="raise")
    with pytest.raises(
        CubeError, match=r"missing_chunks must be 'warn', 'raise' or 'drop', got 'fill'"
    ):
        sampler(cube, tmp_path / "out", missing_chunks="fill")
