"""Values that attributes call invalid, and xarray does not decode, are a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube.cli.inputs import open_cube
from ml4cube.cli.inspection import inspect
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.preprocessing import get_statistics, standardize
from tests.samplestores import paths

STAGES: dict[str, Callable[[xr.Dataset, Path], Any]] = {
    "statistics": lambda ds, _: get_statistics(ds),
    "per pixel": lambda ds, _: get_statistics(ds, dims="time"),
    "sampler": lambda ds, folder: MultiProcSampler(
        ds, nproc=1, progress=False, block_size={"time": 1}, **paths(folder)
    ).plan(),
}
INVALID = {
    "nodata": ({"nodata": -9999}, "-9999 is no value"),
    "nodata of rasterio": ({"nodatavals": (-9999.0,)}, "-9999 is no value"),
    "upper case": ({"_NoData": np.float32(-9999)}, "-9999 is no value"),
    "valid_range": ({"valid_range": [0.0, 50.0]}, "valid from 0 to 50 .*is from -9999 to 3"),
    "valid_min": ({"valid_min": np.int16(0)}, "valid from 0 to inf"),
    "valid_max": ({"valid_max": 20.5}, "valid from -inf to 20.5"),
}
VALID: dict[str, dict[str, Any]] = {
    "none": {},
    "range": {"valid_range": np.array([-9999.0, 39.0])},
    "minimum": {"valid_min": -9999},
    "another number": {"nodata": -1.0},
    "no number": {"nodata": "none", "valid_range": "0 to 1"},
    "NaN": {"nodata": np.nan, "valid_min": np.nan},
}


def cube(attrs: dict[str, Any]) -> xr.Dataset:
    values = np.arange(40.0, dtype="f4").reshape(10, 4)
    values[:, 1] = -9999
    return xr.Dataset({"t": (("time", "x"), values, attrs)})


def told(stage: str, ds: xr.Dataset, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        STAGES[stage](ds, folder)
    return [str(w.message) for w in caught if "correct the attributes" in str(w.message)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", INVALID)
def test_invalid_values_are_told_once(case: str, stage: str, tmp_path: Path) -> None:
    attrs, words = INVALID[case]
    messages = told(stage, cube(attrs), tmp_path)
    assert len(messages) == 1
    with pytest.warns(UserWarning, match=f"^variable 't', .*{words}"):
        warnings.warn(messages[0], stacklevel=1)


@pytest.mark.parametrize("case", VALID)
def test_valid_values_are_silent(case: str, tmp_path: Path) -> None:
    for stage in STAGES:
        assert told(stage, cube(VALID[case]), tmp_path) == []


def test_a_valid_range_of_packed_values_is_unpacked(tmp_path: Path) -> None:
    ds = xr.Dataset({"t": (("time", "x"), np.arange(260.0, 300.0).reshape(10, 4))})
    ds.t.attrs["valid_range"] = np.array([-1500, 2585], "i2")  # from 258.15 to 299
    ds.t.encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 273.15}
    ds.to_netcdf(tmp_path / "packed.nc")
    with xr.open_dataset(tmp_path / "packed.nc") as packed:
        assert told("statistics", packed, tmp_path) == []
    ds.t.attrs["valid_range"] = np.array([-1500, 2500], "i2")
    ds.to_netcdf(tmp_path / "other.nc")
    with xr.open_dataset(tmp_path / "other.nc") as packed:
        assert "valid from 258.15 to 298.15" in told("statistics", packed, tmp_path)[0]


def test_integers_and_rounded_limits(tmp_path: Path) -> None:
    integers = xr.Dataset({"n": ("x", np.array([255, 3, 4], "u1"), {"nodata": 255})})
    assert len(told("statistics", integers, tmp_path)) == 1
    rounded = xr.Dataset({"t": ("x", np.array([0.1, 0.05], "f4"), {"valid_max": 0.1})})
    assert told("statistics", rounded, tmp_path) == []


def test_scaled_values_have_no_such_attributes(tmp_path: Path) -> None:
    attrs = {"valid_range": [-9999.0, 39.0], "nodata": 0.0}
    ds = cube(attrs).drop_isel(x=1)
    scaled = standardize(ds, get_statistics(ds.where(ds.t != 0)))
    assert told("statistics", scaled, tmp_path) == []


def test_inspect_names_attributes_that_xarray_does_not_apply(tmp_path: Path) -> None:
    cube({"nodata": -9999, "valid_max": 50.0}).to_zarr(tmp_path / "c.zarr", zarr_format=2)
    notes = " ".join(
        inspect(str(tmp_path / "c.zarr"), gaps=False, open_cube=open_cube)
        .run(lambda _: None)
        .values["notes"]
    )
    assert "'t' has attributes for gaps, [-9999.0], which xarray does not apply" in notes
    assert "'t' is valid from -inf to 50" in notes
