"""A variable read directly from its chunks equals what xarray reads; others are left alone."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core.indexing import LazilyIndexedArray

from ml4cube.cube.chunks.disk import DiskChunks
from ml4cube.cube.chunks.lazy_zarr import read_directly
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


def keys(n: int) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.integers(-n, n - 1),
        # xarray itself cannot read an empty selection backwards
        st.slices(n).filter(lambda k: (k.step or 1) > 0 or len(range(n)[k]) > 0),
        st.lists(st.integers(0, n - 1), max_size=4).map(lambda k: np.array(k, int)),
    )


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    path = tmp_path_factory.mktemp("opened") / "cube.zarr"
    return path, stored(path)


@settings(max_examples=80)
@given(data=st.data(), lazy=st.booleans(), vectorized=st.booleans())
def test_any_selection_gives_the_same_cells(
    cube: tuple[Path, xr.Dataset], data: Any, lazy: bool, vectorized: bool
) -> None:
    path, ds = cube
    quick = read_directly(opened(path, chunks={} if lazy else None))
    index: dict[Any, Any]
    if vectorized and not lazy:
        places = [
            data.draw(st.lists(st.integers(0, n - 1), min_size=3, max_size=3)) for n in (7, 5)
        ]
        index = {d: xr.Variable("p", k) for d, k in zip(("time", "lat"), places, strict=True)}
    else:
        index = {dim: data.draw(keys(n)) for dim, n in SIZES.items()}
    expected = ds["a"].variable.isel(index)
    order = data.draw(st.permutations(expected.dims))
    expected, found = expected.transpose(*order), quick.isel(index).transpose(*order)
    assert found.dims == expected.dims
    np.testing.assert_array_equal(found.values, expected.values, strict=True)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunks", [None, {}, {"time": 2}], ids=["no dask", "dask", "rechunked"])
def test_nothing_but_the_reader_changes(tmp_path: Path, version: int, chunks: Any) -> None:
    ds = stored(tmp_path / "c.zarr", version=version)
    with_attrs = opened(tmp_path / "c.zarr", chunks=chunks)
    quick = read_directly(with_attrs)
    assert quick is not with_attrs
    assert (quick.dims, quick.chunks, quick.dtype) == (
        with_attrs.dims,
        with_attrs.chunks,
        with_attrs.dtype,
    )
    assert (quick.attrs, quick.encoding) == (with_attrs.attrs, with_attrs.encoding)
    assert quick.identical(with_attrs)
    sent = pickle.loads(pickle.dumps(quick))  # noqa: S301, our own bytes
    assert sent.equals(ds["a"].variable)


BOXES: dict[str, Callable[[xr.Variable], xr.Variable]] = {
    "cut": lambda a: a[2:, 1],
    "cut twice": lambda a: a[1:, :, 1:5][:, 1:3],
    "a step": lambda a: a.isel(time=3),
}


@pytest.mark.parametrize("case", BOXES)
def test_a_box_of_an_opened_file_is_read_from_chunks(tmp_path: Path, case: str) -> None:
    ds = stored(tmp_path / "c.zarr")
    variable = BOXES[case](opened(tmp_path / "c.zarr"))
    quick = read_directly(variable)
    assert quick is not variable
    assert quick.identical(BOXES[case](ds["a"].variable))


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
    "sharded": ({"encoding": {"shards": (6, 4, 6)}}, opened),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_variables_that_are_not_plain_chunks_are_left_alone(tmp_path: Path, case: str) -> None:
    more, act = LEFT_ALONE[case]
    stored(tmp_path / "c.zarr", **more)
    variable = act(tmp_path / "c.zarr")
    assert read_directly(variable) is variable


def test_variables_of_other_kinds_of_stores_are_left_alone(tmp_path: Path) -> None:
    """A class of the user may count, encrypt or fetch what is read."""
    stored(tmp_path / "c.zarr")

    class Mine(zarr.storage.LocalStore):
        pass

    for store in (Mine(tmp_path / "c.zarr"), zarr.storage.LoggingStore(Mine(tmp_path / "c.zarr"))):
        variable = opened(store)  # type: ignore[arg-type]
        assert read_directly(variable) is variable


@pytest.mark.parametrize("chunks", [None, {}], ids=["no dask", "dask"])
@pytest.mark.parametrize(
    "asked", [{}, {"dims": "time"}, {"quantiles": (0.5,)}], ids=["plain", "by pixel", "quantiles"]
)
def test_statistics_read_each_chunk_once_and_keep_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: Any, asked: dict[str, Any]
) -> None:
    stored(tmp_path / "c.zarr")
    ds = xr.open_zarr(tmp_path / "c.zarr", consolidated=False, chunks=chunks)
    decoded: Counter[Any] = Counter()
    real = DiskChunks._decode

    def counting(self: Any, chunk: Any, *rest: Any) -> None:
        decoded[chunk] += 1
        real(self, chunk, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(DiskChunks, "_decode", counting)
        ours = Statistics.from_cube(ds, **asked)
    assert decoded == Counter({(t, y, 0): 1 for t in range(3) for y in range(2)})
    monkeypatch.setattr("ml4cube.preprocessing.blocks.read_directly", lambda variable: variable)
    assert Statistics.from_cube(ds, **asked) == ours
