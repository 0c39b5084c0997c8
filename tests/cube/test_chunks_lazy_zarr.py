"""Cells read directly from chunks equal what xarray reads; other variables are left alone."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core.indexing import LazilyIndexedArray

from ml4cube.cube.chunks.stored import ChunkFiles
from ml4cube.cube.reader import CubeReader
from ml4cube.preprocessing import Statistics
from tests.cubes import cell_id_cube

SIZES = {"time": 7, "lat": 5, "lon": 6}
CHUNKS = {"time": 3, "lat": 4, "lon": 6}


def stored(path: Path, *, version: Any = 3, **more: Any) -> xr.Dataset:
    """Write a cube of known cells with gaps, and return it."""
    ds = cell_id_cube(SIZES, "float32", gaps=0.2)
    encoding = {"a": {"chunks": tuple(CHUNKS.values()), **more.pop("encoding", {})}}
    ds.to_zarr(path, encoding=encoding, zarr_format=version, consolidated=False, **more)
    return ds


def opened(path: Path, **how: Any) -> xr.Variable:
    return xr.open_zarr(path, consolidated=False, **{"chunks": None, **how})["a"].variable


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    path = tmp_path_factory.mktemp("opened") / "cube.zarr"
    return path, stored(path)


@settings(max_examples=80)
@given(data=st.data(), lazy=st.booleans())
def test_any_box_of_a_box_gives_the_same_cells(
    cube: tuple[Path, xr.Dataset], data: Any, lazy: bool
) -> None:
    path, ds = cube
    box: dict[Any, Any] = {}
    for dim, n in SIZES.items():
        start = data.draw(st.integers(0, n - 1))
        some = st.just(slice(start, data.draw(st.integers(start + 1, n))))
        box[dim] = data.draw(st.one_of(some, st.integers(-n, n - 1)))
    variable, expected = (
        one.isel(box) for one in (opened(path, chunks={} if lazy else None), ds["a"].variable)
    )
    assume(expected.ndim)
    region = {}
    for dim, n in expected.sizes.items():
        start = data.draw(st.integers(0, n - 1))
        region[dim] = slice(start, data.draw(st.integers(start + 1, n)))
    cells = reader_of(variable).read(region)["a"]
    np.testing.assert_array_equal(cells, expected.isel(region).values, strict=True)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunks", [None, {}, {"time": 2}], ids=["no dask", "dask", "other chunks"])
def test_plain_chunks_are_read_without_zarr(tmp_path: Path, version: int, chunks: Any) -> None:
    ds = stored(tmp_path / "c.zarr", version=version)
    reader = reader_of(opened(tmp_path / "c.zarr", chunks=chunks))
    assert reads_chunks(reader)
    sent = pickle.loads(pickle.dumps(reader))  # noqa: S301, our own bytes
    np.testing.assert_array_equal(sent.read(whole(ds))["a"], ds["a"].values)


def whole(ds: xr.Dataset) -> dict[str, slice]:
    return {str(dim): slice(0, n) for dim, n in ds.sizes.items()}


def reader_of(variable: xr.Variable) -> CubeReader:
    return CubeReader.of_variables({"a": variable})


def reads_chunks(reader: CubeReader) -> bool:
    return isinstance(getattr(reader.sources["a"], "stored", None), ChunkFiles)


BOXES: dict[str, Callable[[xr.Variable], xr.Variable]] = {
    "cut": lambda a: a[2:, 1],
    "cut twice": lambda a: a[1:, :, 1:5][:, 1:3],
    "a step": lambda a: a.isel(time=3),
    "in other chunks": lambda a: a.chunk(time=5, lat=1).chunk(time=1),
}


@pytest.mark.parametrize("case", BOXES)
def test_a_box_of_an_opened_file_is_read_from_chunks(tmp_path: Path, case: str) -> None:
    stored(tmp_path / "c.zarr")
    assert reads_chunks(reader_of(BOXES[case](opened(tmp_path / "c.zarr"))))


class Kelvin(ZarrArrayWrapper):
    """A wrapper that changes the cells of the zarr array that it reads."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) + np.float32(273)


def _changed_by_a_backend(path: Path) -> xr.Variable:
    array = zarr.open_array(path / "a", mode="r")
    return xr.Variable(tuple(SIZES), LazilyIndexedArray(Kelvin(array)))  # type: ignore[no-untyped-call]


def _of_a_multi_index(path: Path) -> xr.Variable:
    return xr.open_zarr(path, consolidated=False).stack(place=("lat", "lon"))["lat"].variable


def _assigned(path: Path) -> xr.Variable:
    variable = opened(path)
    variable[0] = 5.0
    return variable


LEFT_ALONE: dict[str, tuple[dict[str, Any], Callable[[Path], xr.Variable]]] = {
    "loaded": ({}, lambda path: opened(path).load()),
    "assigned to": ({}, _assigned),
    "cells picked": ({}, lambda path: opened(path).isel(time=[0, 6])),
    "every other cell": ({}, lambda path: opened(path).isel(time=slice(None, None, 2))),
    "transposed, then cut": ({}, lambda path: opened(path).transpose("lon", ...)[1:]),
    "persisted": ({}, lambda path: xr.open_zarr(path)["a"].persist().variable),
    "cut by dask": ({}, lambda path: opened(path, chunks={})[1:]),
    "computed by dask": ({}, lambda path: opened(path, chunks={}) + 1),
    "changed by a backend": ({}, _changed_by_a_backend),
    "of a MultiIndex": ({}, _of_a_multi_index),
    "packed": ({"encoding": {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1}}, opened),
    "a fill value of its own": ({"encoding": {"_FillValue": -1.0}}, opened),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_variables_that_are_not_plain_chunks_are_left_alone(tmp_path: Path, case: str) -> None:
    more, act = LEFT_ALONE[case]
    stored(tmp_path / "c.zarr", **more)
    variable = act(tmp_path / "c.zarr")
    assert not reads_chunks(reader_of(variable))


def test_a_store_of_the_user_is_asked_for_every_byte(tmp_path: Path) -> None:
    """Its class may count, encrypt or fetch what is read."""
    ds = stored(tmp_path / "c.zarr")
    asked: list[str] = []

    class Mine(zarr.storage.LocalStore):
        async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
            asked.append(key)
            return await super().get(key, *args, **kwargs)

    for store in (Mine(tmp_path / "c.zarr"), zarr.storage.LoggingStore(Mine(tmp_path / "c.zarr"))):
        variable = opened(store)  # type: ignore[arg-type]
        asked.clear()
        cells = reader_of(variable).read(whole(ds))["a"]
        np.testing.assert_array_equal(cells, ds["a"].values)
        assert sorted(asked) == [f"a/c/{t}/{y}/0" for t in range(3) for y in range(2)]


DECODED: dict[str, dict[str, Any]] = {
    "packed": {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1},
    "a fill value of its own": {"_FillValue": -1.0},
    "packed in shards": {"dtype": "int16", "scale_factor": 0.5, "shards": (6, 4, 6)},
}


@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize("select", BOXES)
def test_cells_that_xarray_decodes_are_read_without_zarr(
    tmp_path: Path, case: str, select: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path / "c.zarr", encoding=DECODED[case])
    variable = BOXES[select](opened(tmp_path / "c.zarr"))
    expected = variable.copy().load().values
    monkeypatch.setattr(zarr.Array, "__getitem__", None)
    reader = reader_of(variable)
    box = {str(dim): slice(0, n) for dim, n in variable.sizes.items()}
    np.testing.assert_array_equal(reader.read(box)["a"], expected, strict=True)
    corner = {dim: slice(n - 1, n) for dim, n in variable.sizes.items()}
    sent = pickle.loads(pickle.dumps(reader))  # noqa: S301, our own bytes
    cells = sent.read({str(dim): of_dim for dim, of_dim in corner.items()})["a"]
    np.testing.assert_array_equal(cells.ravel(), expected.ravel()[-1:], strict=True)


@pytest.mark.parametrize("chunks", [None, {}, {"time": 2}], ids=["no dask", "dask", "other chunks"])
@pytest.mark.parametrize(
    "asked", [{}, {"dims": "time"}, {"quantiles": (0.5,)}], ids=["plain", "by pixel", "quantiles"]
)
def test_statistics_read_each_chunk_once_and_keep_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: Any, asked: dict[str, Any]
) -> None:
    stored(tmp_path / "c.zarr")
    ds = xr.open_zarr(tmp_path / "c.zarr", consolidated=False, chunks=chunks)
    decoded: Counter[Any] = Counter()
    real = ChunkFiles._decode

    def counting(self: Any, chunk: Any, *rest: Any) -> None:
        decoded[chunk] += 1
        real(self, chunk, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(ChunkFiles, "_decode", counting)
        ours = Statistics.from_cube(ds, **asked)
    assert decoded == Counter({(t, y, 0): 1 for t in range(3) for y in range(2)})
    monkeypatch.setattr(ChunkFiles, "of", lambda array: None)
    assert Statistics.from_cube(ds, **asked) == ours
