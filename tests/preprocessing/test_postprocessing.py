"""Scaling taken back, on every kind of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from ml4cube import postprocessing as post
from ml4cube import preprocessing as pp
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.store import StoreMetadata
from tests.cubes import cell_id_cube


@pytest.mark.parametrize("lazy", [False, True])
def test_undoing_gives_back_the_cube(lazy: bool) -> None:
    ds = cell_id_cube({"time": 6, "lat": 5}, gaps=0.2, names=("a", "b"))
    ds["constant"] = ds.a * 0 + 273.15
    cube = ds.chunk(time=2) if lazy else ds
    stats = pp.Statistics.from_cube(cube)
    for do, undo, pairs in [
        (pp.standardize, post.undo_standardizing, stats.mean_std()),
        (pp.normalize, post.undo_normalizing, stats.range()),
    ]:
        scaled = do(cube, pairs)
        for back in (undo(scaled, pairs), undo(scaled, stats)):
            assert isinstance(back, xr.Dataset)
            assert back.a.chunks == cube.a.chunks
            assert back.a.attrs == ds.a.attrs
            for name in ds:
                np.testing.assert_allclose(back[name], ds[name], atol=1e-5, rtol=0)
                assert back[name].dtype == np.float32
            np.testing.assert_array_equal(back.constant, ds.constant)
        one = undo(scaled.a, *pairs["a"])
        xr.testing.assert_identical(one.compute(), undo(scaled, pairs).a.compute())
        xr.testing.assert_identical(undo(scaled.a, pairs).compute(), one.compute())
        array = scaled.a.values
        np.testing.assert_array_equal(undo(array, *pairs["a"]), one)
        np.testing.assert_array_equal(undo({"a": array, "x": array}, pairs)["a"], one)
        np.testing.assert_array_equal(undo({"a": array, "x": array}, pairs)["x"], array)


def test_the_samples_of_a_store_are_undone_whatever_its_chunks(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 30, "lat": 5, "lon": 4}, "float64")
    store, _ = MultiProcSampler(
        ds, nproc=1, data_split=1.0, chunk_size=7, progress=False,
        train_cube=tmp_path / "train.zarr", test_cube=tmp_path / "test.zarr",
    ).get_datasets()  # fmt: skip
    back = post.undo_standardizing(store, StoreMetadata.of(store).statistics)
    np.testing.assert_allclose(np.sort(back.a.values), np.sort(ds.a.values, axis=None))


def test_a_dask_array_stays_lazy() -> None:
    lazy = cell_id_cube({"time": 4}).chunk(time=2).a.data
    assert post.undo_normalizing(lazy, 1.0, 3.0).chunks == lazy.chunks


ONES = np.ones(2)
BY_LEVEL = xr.DataArray([0.0, 1.0], dims="level")


@pytest.mark.parametrize(
    ("x", "first", "second", "error", "words"),
    [
        (ONES, {"a": [0, 1]}, None, InvalidTypeError, "xm.* is a mapping, got ndarray"),
        ({"a": ONES}, 0.0, 1.0, InvalidTypeError, "mapping"),
        ({"a": ONES}, {"b": [0, 1]}, None, InvalidValueError, "no variable in common"),
        ({"a": ONES}, {"a": [0, 1]}, 1.0, InvalidTypeError, "left out"),
        (ONES, 0.0, None, InvalidTypeError, "two numbers"),
        (ONES, BY_LEVEL, 1.0, InvalidTypeError, "keep dims.*ndarray"),
        (ONES, 0.0, float("nan"), InvalidValueError, "all gaps"),
        (
            {"a": ONES},
            {"a": [0]},
            None,
            InvalidTypeError,
            r"\['a'\] must be two numbers, got \[0\]",
        ),
        ({"a": ONES}, {"a": [1, 2, 3]}, None, InvalidTypeError, "must be two numbers"),
        (xr.DataArray(ONES, name="a"), {"a": None}, None, InvalidTypeError, "must be two numbers"),
        ({"a": ONES}, {"a": "12"}, None, InvalidTypeError, "must be two numbers"),
        ({"a": ONES}, {"a": ["1", "2"]}, None, InvalidTypeError, "must be two numbers"),
        ({"a": ONES}, {"a": b"ab"}, None, InvalidTypeError, "must be two numbers"),
        ({"a": ONES}, {"a": [b"1", b"2"]}, None, InvalidTypeError, "must be two numbers"),
        ({"a": ONES}, {"a": [1, -1]}, None, InvalidValueError, "std >= 0, or .min, max."),
        (ONES, 1, -1, InvalidValueError, "std >= 0, or .min, max."),
    ],
)
def test_numbers_that_do_not_suit_are_refused(
    x: object, first: object, second: object, error: type, words: str
) -> None:
    for undo in (post.undo_standardizing, post.undo_normalizing):
        with pytest.raises(error, match=words):
            undo(x, first, second)
    # scaling says the same of pairs
    if isinstance(x, dict) and isinstance(first, dict) and "a" in first and second is None:
        for scale in (pp.standardize, pp.normalize):
            with pytest.raises(error, match=words):
                scale({"a": ONES}, first)


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "m8[s]", "U3", object])
def test_only_real_numbers_are_scaled_and_scaled_back(dtype: str | type) -> None:
    values = np.zeros(3, dtype)
    cube = xr.Dataset({"z": ("x", values)})
    pairs = {"z": [0, 1]}
    for work in (pp.standardize, pp.normalize, post.undo_standardizing, post.undo_normalizing):
        for form in (cube, cube.chunk(x=1), cube.z, {"z": values}):
            with pytest.raises(InvalidTypeError, match=r"'z' must hold real numbers"):
                work(form, pairs)
    for array in (values, cube.chunk().z.data, cube.z.rename(None)):
        with pytest.raises(InvalidTypeError, match=r"'x' must hold real numbers"):
            post.undo_standardizing(array, 0, 1)


@pytest.mark.parametrize("lazy", [False, True])
def test_half_precision_is_not_too_narrow_for_physical_units(lazy: bool) -> None:
    scaled = xr.DataArray(np.array([-1.5, 0.0, 1.5], "float16"), dims="x", name="sp")
    scaled = scaled.chunk(x=2) if lazy else scaled
    for pressure in (
        post.undo_standardizing(scaled, 101325.0, 1000.0),
        post.undo_normalizing(scaled, {"sp": [101325.0, 102325.0]}),
    ):
        assert pressure.dtype == pressure.values.dtype == np.float32
        np.testing.assert_array_equal(pressure, [99825.0, 101325.0, 102825.0])
