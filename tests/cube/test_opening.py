"""Paths mean the same for reading and writing; arrays without a name have the default one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.cli.files import check_free, read_text, write_texts
from ml4cube.cube.opening import as_dataset
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import InvalidTypeError, StoreExistsError
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import (
    CubeScaler,
    drop_nan_values,
    get_range,
    get_statistics,
    normalize,
    standardize,
)
from ml4cube.store.format import open_axes, open_store, verify_store
from ml4cube.store.metadata import StoreMetadata


@pytest.fixture
def ds() -> xr.Dataset:
    values = np.arange(48.0, dtype="f4").reshape(8, 6)
    return xr.Dataset({"t": (("time", "x"), values)}, {"x": np.arange(6.0)})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    (tmp_path / "elsewhere").mkdir(parents=True)
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def sampler(cube: Any, **more: Any) -> MultiProcSampler:
    return MultiProcSampler(cube, nproc=1, progress=False, block_size={"time": 2}, **more)


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
@pytest.mark.parametrize("prefix", ["~/", ""])
def test_a_path_is_that_of_the_moment_of_the_call(
    suffix: str, prefix: str, ds: xr.Dataset, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / f"cube.{suffix}"
    (ds.to_zarr if suffix == "zarr" else ds.to_netcdf)(path)
    given: Any = f"{prefix}cube.{suffix}"
    sampling = sampler(given, train_cube=f"{prefix}a.zarr", test_cube=f"{prefix}b.zarr")
    opened, as_path = as_dataset(given), as_dataset(Path(given))
    stats = get_statistics(given)
    monkeypatch.chdir(home.parent / "elsewhere")
    np.testing.assert_array_equal(opened.t, ds.t)
    np.testing.assert_array_equal(as_path.t, ds.t)
    assert stats == get_statistics(ds)
    sampling.run()
    assert not list((home.parent / "elsewhere").iterdir())
    monkeypatch.chdir(home)
    store = f"{prefix}a.zarr"
    train = open_store(store)
    assert train.encoding["source"] == str(home / "a.zarr")
    assert StoreMetadata.of(store) == StoreMetadata.of(home / "a.zarr")
    assert open_axes(store).x.size == 6
    verify_store(store)
    assert len(PTXrDataset(store)) == train.sizes["samples"]
    scaled = sampler(given, statistics=store, train_cube="c.zarr", test_cube="d.zarr")
    assert scaled.cube.given == StoreMetadata.of(store).statistics
    predicted = predict_cube(torch.nn.Identity(), given, store, out=f"{prefix}p.{suffix}")
    assert (home / f"p.{suffix}").exists()
    np.testing.assert_allclose(predicted.t, ds.t, atol=1e-4)
    assert not (home / "~").exists()


def test_texts_of_the_command_line_are_in_the_home_folder(home: Path) -> None:
    write_texts({"~/a.json": "{}"})
    assert (home / "a.json").read_text() == read_text("~/a.json") == "{}"
    with pytest.raises(StoreExistsError, match=r"a\.json exists"):
        check_free("~/a.json", overwrite=False)
    check_free("~/b.json", overwrite=False)


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_an_array_saved_without_a_name_is_a_cube(suffix: str, ds: xr.Dataset) -> None:
    array = ds.t.rename(None)
    (array.to_zarr if suffix == "zarr" else array.to_netcdf)(f"array.{suffix}")
    assert get_statistics(f"array.{suffix}") == get_statistics(array)
    assert list(get_range(f"array.{suffix}")) == ["data"]
    train, _ = sampler(f"array.{suffix}", train_cube="a.zarr", test_cube="b.zarr").get_datasets()
    assert list(train.data_vars) == ["data"]
    assert list(predict_cube(torch.nn.Identity(), f"array.{suffix}").data_vars) == ["data"]


def test_every_function_of_a_cube_takes_a_path(ds: xr.Dataset) -> None:
    ds.to_zarr("c.zarr")
    pairs = get_statistics(ds)
    assert get_statistics("c.zarr") == pairs == get_statistics(Path("c.zarr"))
    assert get_range("c.zarr") == get_range(ds)
    xr.testing.assert_equal(standardize("c.zarr", pairs), standardize(ds, pairs))
    xr.testing.assert_equal(normalize("c.zarr", get_range(ds)), normalize(ds, get_range(ds)))
    xr.testing.assert_equal(drop_nan_values("c.zarr"), drop_nan_values(ds))
    assert CubeScaler().fit("c.zarr").statistics_ == CubeScaler().fit(ds).statistics_
    with pytest.raises(InvalidTypeError, match=r"a path, .*got ndarray"):
        get_statistics(ds.t.values)  # type: ignore[arg-type]
