"""What is left out and may be data is a warning; what describes the cube is left out in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate, score_cube
from ml4cube.insights import get_insights
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import drop_nan_values, fill_nan_values, get_range, get_statistics
from ml4cube.splits import assign_block_split, create_split, leakage_report
from tests.cube.test_cube import CUBES, numbered
from tests.samplestores import paths

TIMES = np.arange("2001-01-01", "2001-01-09", dtype="M8[D]").astype("M8[ns]")


def cube(**more: xr.DataArray) -> xr.Dataset:
    data = {"t": numbered(time=8, lat=4, lon=6)}
    return xr.Dataset({**data, **more}, {"time": TIMES, "lat": np.arange(4.0)})


def split_cube(**more: xr.DataArray) -> xr.Dataset:
    return assign_block_split(cube(**more), {"time": 2}, 0.5, seed=1)


STAGES: dict[str, Callable[[xr.Dataset], Any]] = {
    "statistics": lambda ds: get_statistics(ds, split=None),
    "range": lambda ds: get_range(ds, split=None),
    "sampler": lambda ds: MultiProcSampler(ds, nproc=1),
    "samples as they are read": lambda ds: PTXrDataset(ds, scale_fn=None),
    "arrays": lambda ds: XrDataset(ds, scale_fn=None),
    "create_split": lambda ds: create_split(ds, "t", feature_vars=None, exclude_vars=()),
    "prediction": lambda ds: predict_cube(torch.nn.Identity(), ds),
    "scores": lambda ds: score_cube(ds, ds, weights=None),
    "evaluation": lambda ds: evaluate(ds, ds, progress=False, split=None),
    "insights": get_insights,
    "drop": lambda ds: drop_nan_values(ds),
    "fill": lambda ds: fill_nan_values(ds, method="mean"),
    "leakage": leakage_report,
}


def doubts(stage: str, ds: xr.Dataset) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        STAGES[stage](ds)
    return [str(w.message) for w in caught if "may be data" in str(w.message)]


@pytest.mark.parametrize("stage", STAGES)
def test_data_along_a_dim_of_vertices_are_left_out_with_one_warning(stage: str) -> None:
    for dim in ("nv", "nvert", "bnds"):
        ds = split_cube(u=numbered(time=8, lat=4, lon=6), flux=numbered(time=8, lat=4, **{dim: 3}))
        (message,) = doubts(stage, ds)
        assert f"'flux' is taken for bounds of cells by its dim '{dim}'" in message
        assert "give the dim a coordinate" in message


@pytest.mark.parametrize("stage", STAGES)
def test_what_describes_a_cube_is_left_out_in_silence(stage: str) -> None:
    ds = split_cube(
        u=numbered(time=8, lat=4, lon=6),
        time_bnds=numbered(time=8, bnds=2),
        lat_vertices=numbered(lat=4, nv=4),
        edges=numbered(lat=4) + xr.DataArray([-0.5, 0.5], dims="side"),
        crs=xr.DataArray([0], dims="one", attrs={"grid_mapping_name": "latitude_longitude"}),
        height=xr.DataArray(2.0),
        code=xr.DataArray(np.full((4, 3), b"x"), dims=("lat", "strlen")),
        names=xr.DataArray(np.array(["a"] * 4, object), dims="lat"),
        filter_mask=numbered(lat=4) >= 0,
    )
    ds.lat.attrs["bounds"] = "edges"
    assert doubts(stage, ds) == []


def test_only_one_of_the_known_cubes_is_in_doubt() -> None:
    found = [name for name, (ds, _, _) in CUBES.items() if doubts("statistics", ds)]
    assert found == ["corners named by their dim"]


def test_numbers_on_other_dims_are_left_out_of_samples_with_a_warning() -> None:
    profiles = {f"p{i}": numbered(depth=7) for i in range(5)}
    ds = split_cube(**profiles)
    for stage in ("sampler", "samples as they are read", "arrays", "prediction"):
        (message,) = doubts(stage, ds)
        assert "'p0' has dims ('depth',) outside the cube's ('time', 'lat', 'lon')" in message
        assert message.endswith("; and 2 more")
    assert doubts("statistics", ds) == []  # has some of each


def test_a_coordinate_makes_vertices_a_dim_of_the_cube(tmp_path: Path) -> None:
    ds = cube(flux=numbered(time=8, lat=4, lon=6, nv=3)).assign_coords(nv=[0, 1, 2])
    assert doubts("statistics", ds) == []
    assert list(get_statistics(ds)) == ["t", "flux"]
    assert MultiProcSampler(ds, nproc=1, **paths(tmp_path)).cube.recipe.variables == (
        "t",
        "flux",
    )


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("argument", ["to_pred", "features"])
def test_asking_for_what_is_left_out_gives_the_reason(argument: str) -> None:
    ds = split_cube(flux=numbered(time=8, lat=4, nv=3), p=numbered(depth=7))
    reasons = {
        "flux": r"but 'flux' is taken for bounds of cells by its dim 'nv' \(give the dim a coord",
        "p": r"but 'p' has dims \('depth',\) outside the cube's",
    }
    for name, reason in reasons.items():
        for make in (MultiProcSampler, PTXrDataset):
            with pytest.raises(InvalidValueError, match=rf"^{argument} must name .*{reason}"):
                make(ds, scale_fn=None, **{argument: name})
    reasons = {"split": "'split' is the split label", "lat": "'lat' is a coordinate"}
    for name, reason in reasons.items():
        with pytest.raises(InvalidValueError, match=rf"^{argument} must name .*{reason}"):
            MultiProcSampler(ds, **{argument: name})
    with pytest.raises(InvalidValueError, match=r"got 'flux' .*which is taken for bounds"):
        predict_cube(torch.nn.Identity(), ds, features="flux")


DATA_NAMED_SPLIT = {
    "units": numbered(time=8, lat=4, lon=6).assign_attrs(units="K"),
    "standard name": numbered(time=8, lat=4, lon=6).astype(int).assign_attrs(standard_name="x"),
    "other numbers": numbered(time=8, lat=4, lon=6),
    "other integers": numbered(time=8, lat=4, lon=6).astype("int16"),
}


@pytest.mark.parametrize("stage", [s for s in STAGES if s not in ("range", "drop", "leakage")])
@pytest.mark.parametrize("kind", DATA_NAMED_SPLIT)
def test_data_named_split_are_refused(stage: str, kind: str) -> None:
    ds = cube(u=numbered(time=8, lat=4, lon=6), split=DATA_NAMED_SPLIT[kind])
    with pytest.raises(InvalidValueError, match=r"the split label 'split' must .*rename it"):
        STAGES[stage](ds)


READERS: dict[str, Callable[[xr.Dataset], Any]] = {
    "statistics": get_statistics,
    "sampler": lambda ds: MultiProcSampler(ds, nproc=1, progress=False).plan(),
    "prediction": STAGES["prediction"],
}


@pytest.mark.parametrize("reader", READERS)
def test_data_named_split_are_refused_when_they_are_read(reader: str, tmp_path: Path) -> None:
    cube(split=DATA_NAMED_SPLIT["other integers"]).to_zarr(tmp_path / "c.zarr", zarr_format=2)
    ds = xr.open_zarr(tmp_path / "c.zarr")
    with pytest.raises(InvalidValueError, match=r"the split label 'split' must .*rename it"):
        READERS[reader](ds)


def test_texts_named_split_are_refused() -> None:
    ds = cube(split=xr.DataArray(["train"] * 8, dims="time"))
    for stage in ("statistics", "sampler", "prediction"):
        with pytest.raises(InvalidTypeError, match=r"'split' must hold numbers .*rename it"):
            STAGES[stage](ds)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "bool"])
def test_labels_made_by_hand_are_labels(dtype: str) -> None:
    by_hand = xr.DataArray(np.array([1, 1, 1, 0, 0, 1, 1, 0], dtype), dims="time")
    ds = cube(split=by_hand)
    assert get_statistics(ds)["t"][0] == pytest.approx(78.7)
    assert list(predict_cube(torch.nn.Identity(), ds).data_vars) == ["t"]
