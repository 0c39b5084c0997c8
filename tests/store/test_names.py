"""Names that a zarr store or a netCDF file cannot hold are refused before any work."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidValueError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.store.names import check_netcdf_attributes, check_writable_names

LOST = ["a/b", "/a", "a\\b", "a\0b", "a\nb", "a\x7fb", ".", "...", "__a", "zarr.json", "a" * 256]
LOST_IN_NETCDF = ["-a", " a", "a ", "+a", ".zarray"]
ODD = [
    "a b",
    "a#b",
    "a?b",
    "a*b",
    "a[0]",
    "a%2Fb",
    "a:b",
    "é",
    "気温",
    "1a",
    "_a",
    "a.",
    "c",
    "a" * 240,
]


def cube(name: str, role: str) -> xr.Dataset:
    ds = xr.Dataset(
        {"t": (("time", "x"), np.arange(24.0).reshape(6, 4))},
        {"x": [0.0, 1, 2, 3], "time": np.arange(6)},
    )
    if role == "coordinate":
        return ds.assign_coords({name: ("x", np.arange(4.0))})
    return ds.rename({"t" if role == "variable" else "x": name})


def predicted(ds: xr.Dataset, out: Path, model: Any = None, **more: Any) -> xr.Dataset:
    pytest.importorskip("torch")
    from ml4cube.prediction import predict_cube

    return predict_cube(model or unchanged, ds, out=out, progress=False, **more)


def unchanged(x: Any) -> Any:
    return x


def never_called(x: Any) -> Any:
    raise AssertionError("the model has run")


@pytest.mark.parametrize("role", ["variable", "coordinate", "dim"])
@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_names_that_predictions_cannot_have_are_refused_before_the_model_runs(
    role: str, suffix: str, tmp_path: Path
) -> None:
    for name in LOST + (LOST_IN_NETCDF if suffix == "nc" else []):
        with pytest.raises(InvalidValueError, match=r"^names of variables, coordinates and dims"):
            predicted(cube(name, role), tmp_path / f"p.{suffix}", never_called)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_odd_names_come_back_from_predictions(suffix: str, tmp_path: Path) -> None:
    for number, name in enumerate(ODD):
        ds = (
            cube(name, "variable")
            .rename(x=f"{name}x")
            .assign_coords({f"{name}y".replace(" ", ""): 1.0})
        )
        found = predicted(ds, tmp_path / f"{number}.{suffix}")
        assert set(found.variables) == set(ds.variables)
        np.testing.assert_array_equal(found[name], ds[name])


def test_names_of_outputs_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def doubled(x: Any) -> Any:
        return np.concatenate([x, x], axis=1)

    with pytest.raises(InvalidValueError, match=r"got 'a/b'; rename"):
        predicted(cube("t", "variable"), tmp_path / "p.zarr", doubled, outputs={"a/b": [1, 2]})
    with pytest.raises(InvalidValueError, match=r"got 't_a/b'; rename"):
        predicted(cube("t", "variable"), tmp_path / "p.zarr", doubled, outputs=["a/b", "std"])
    assert not list(tmp_path.iterdir())


def test_attributes_that_netcdf_cannot_have_are_refused(tmp_path: Path) -> None:
    for holder in ("cube", "x"):
        for name in ("a/b", "CLASS", "a "):
            ds = cube("t", "variable")
            (ds if holder == "cube" else ds[holder]).attrs[name] = "v"
            with pytest.raises(InvalidValueError, match=r"^names of attributes for netCDF"):
                predicted(ds, tmp_path / "p.nc")
    assert not list(tmp_path.iterdir())
    assert predicted(ds, tmp_path / "p.zarr").x.attrs["a "] == "v"


@pytest.mark.parametrize("role", ["variable", "dim"])
def test_names_that_samples_cannot_have_are_refused_before_a_cell_is_read(
    role: str, tmp_path: Path
) -> None:
    for name in LOST:
        with pytest.raises(InvalidValueError, match=r"^names of variables, coordinates and dims"):
            sampler(cube(name, role), tmp_path)
    # the names of coordinates are those of dims with an ending
    with pytest.raises(InvalidValueError, match=r"^names of variables, coordinates and dims"):
        sampler(cube("a" * 252, "dim"), tmp_path)


def test_a_callback_may_not_add_names_that_samples_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"got 'a\\\\b'; rename them"):
        sampler(cube("t", "variable"), tmp_path, callback=with_backslash).run()
    assert not list(tmp_path.iterdir())


def with_backslash(samples: dict[str, Any]) -> dict[str, Any]:
    return samples | {"a\\b": samples["t"]}


@pytest.mark.slow
def test_odd_names_come_back_from_samples(tmp_path: Path) -> None:
    for number, name in enumerate(ODD):
        ds = cube(name, "variable").rename(x=f"{name}x")
        train, _ = sampler(ds, tmp_path / str(number), scale_fn=None).get_datasets()
        assert f"{name}x" in train.coords
        assert train[name].isin(ds[name]).all()


def sampler(ds: xr.Dataset, folder: Path, **more: Any) -> MultiProcSampler:
    folder.mkdir(exist_ok=True)
    return MultiProcSampler(
        ds,
        train_cube=folder / "train.zarr",
        test_cube=folder / "test.zarr",
        block_size={"time": 1},
        nproc=1,
        progress=False,
        **more,
    )


@given(st.text(max_size=8) | st.text("ab./\\_ -\x7f\n", max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_name_is_refused_or_comes_back(name: str) -> None:
    try:
        check_writable_names([name])
    except InvalidValueError:
        return
    ds = xr.Dataset({name: ("x", [1.0, 2.0])}, attrs={name: "v"})
    store: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ds.to_zarr(store, consolidated=False)
        xr.testing.assert_identical(xr.open_zarr(store, consolidated=False).load(), ds)
    try:
        check_writable_names([name], netcdf=True)
        check_netcdf_attributes([name])
    except InvalidValueError:
        return
    with xr.open_dataset(bytes(ds.to_netcdf())) as found:
        xr.testing.assert_identical(found.load(), ds)
