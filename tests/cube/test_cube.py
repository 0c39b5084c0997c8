"""Every stage has one answer to what the data of a cube are, and which dims it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import InvalidValueError
from ml4cube.evaluation.metrics import score_cube
from ml4cube.plotting import fold_bars
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import CubeScaler, assign_mask, get_statistics
from ml4cube.splits import assign_block_split, create_split, leakage_report
from tests.samplestores import paths

TIME = np.arange("2001-01-01", "2001-01-09", dtype="M8[D]").astype("M8[ns]")


def numbered(**sizes: int) -> xr.DataArray:
    """Return an array whose cells are numbered."""
    n = int(np.prod(list(sizes.values())))
    return xr.DataArray(np.arange(n, dtype="f4").reshape(*sizes.values()), dims=list(sizes))


def series() -> xr.Dataset:
    return xr.Dataset({"t": numbered(time=8)}, {"time": TIME})


def grid(**more: xr.DataArray) -> xr.Dataset:
    return xr.Dataset({"t": numbered(y=4, x=6), **more})


def with_attr(key: str, value: str) -> xr.Dataset:
    ds = series().assign({value: numbered(time=8, side=2)})
    ds.time.attrs[key] = value
    return ds


def curvilinear() -> xr.Dataset:
    ds = xr.Dataset({"t": numbered(time=3, j=4, i=5)})
    ds["vertices_latitude"] = numbered(j=4, i=5, vertices=4)
    ds["vertices_longitude"] = numbered(j=4, i=5, vertices=4)
    return ds.assign_coords(
        lat=(("j", "i"), np.linspace(40, 60, 20).reshape(4, 5), {"units": "degrees_north"}),
        lon=(("j", "i"), np.linspace(0, 20, 20).reshape(4, 5), {"units": "degrees_east"}),
    )


def nemo() -> xr.Dataset:
    ds = xr.Dataset({"sst": numbered(time_counter=3, y=4, x=5)})
    ds["time_counter_bounds"] = numbered(time_counter=3, axis_nbounds=2)
    ds["deptht_bounds"] = numbered(deptht=4, axis_nbounds=2)
    return ds.assign(bounds_nav_lat=numbered(y=4, x=5, nvertex=4))


def masked() -> xr.Dataset:
    ds = xr.Dataset({"t": numbered(lat=4, lon=5), "u": 2 * numbered(lat=4, lon=5)})
    ds = assign_mask(ds, numbered(lat=4, lon=5) >= 0, "land")
    return ds.assign(filter_mask=numbered(time=3, lat=4, lon=5) >= 0)


def texts() -> xr.DataArray:
    return xr.DataArray(np.full((4, 6, 3), "b"), dims=("y", "x", "letter"))


def decoded_bounds() -> xr.Dataset:
    ds = with_attr("bounds", "edges")
    ds["t"].attrs["grid_mapping"] = "crs"
    ds["crs"] = ("one", [0])
    return xr.decode_cf(ds, decode_coords="all")


CUBES = {
    "series beside bounds": (series().assign(time_bnds=numbered(time=8, bnds=2)), "time", "t"),
    "corners of cells": (grid(lat_bnds=numbered(y=4, x=6, c=4)), "y x", "t"),
    "corners, dim first": (grid(lat_bnds=numbered(c=4, y=4, x=6)), "y x", "t"),
    "corners named by their dim": (grid(clat=numbered(y=4, x=6, nv=4)), "y x", "t"),
    "bounds of a point": (series().assign(lat_bnds=numbered(lat=1, bnds=2)), "time", "t"),
    "texts": (grid(code=texts()), "y x", "t"),
    "objects": (grid(code=texts().astype(object)), "y x", "t"),
    "CF bounds": (with_attr("bounds", "edges"), "time", "t"),
    "CF climatology": (with_attr("climatology", "span"), "time", "t"),
    "bounds among the coordinates": (decoded_bounds(), "time", "t"),
    "bounds that were coordinates": (decoded_bounds().reset_coords(["edges", "crs"]), "time", "t"),
    "grid mapping": (
        grid(crs=xr.DataArray([1], dims="one", attrs={"grid_mapping_name": "x"})), "y x", "t",
    ),
    "scalars": (grid(k=xr.DataArray(3.0), name=xr.DataArray("a")), "y x", "t"),
    "static": (
        xr.Dataset({"height": numbered(y=4, x=6), "t": numbered(time=2, y=4, x=6)}),
        "time y x", "height t",
    ),
    "dims in other order": (
        grid(u=numbered(x=6, y=4)).assign(flag=numbered(y=4) > 1), "y x", "t u flag",
    ),
    "bounds of what has all dims": (
        xr.Dataset({"t": numbered(lat=4), "t_bounds": numbered(lat=4)}), "lat", "t t_bounds",
    ),
    "curvilinear": (curvilinear(), "time j i", "t"),
    "coordinates in other chunks": (
        curvilinear().chunk(j=2).assign_coords(lat=curvilinear().lat.chunk(j=3)), "time j i", "t",
    ),
    "NEMO": (nemo(), "time_counter y x", "sst"),
    "masks": (masked(), "lat lon", "t u"),
    "vertical levels": (
        xr.Dataset({"t": numbered(time=2, vert=5, lat=4), "ps": numbered(time=2, lat=4)}),
        "time vert lat", "t ps",
    ),
    "many vertices are a mesh": (
        xr.Dataset({"t": numbered(time=2, vertex=30)}), "time vertex", "t",
    ),
    "few vertices, too, where there is nothing else": (
        xr.Dataset({"t": numbered(time=2, vertex=5)}), "time vertex", "t",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CUBES)
def test_every_stage_has_the_same_data_and_dims(name: str, tmp_path: Path) -> None:
    ds, dims, data = CUBES[name][0], CUBES[name][1].split(), CUBES[name][2].split()
    cells = int(np.prod([ds.sizes[dim] for dim in dims]))

    split = assign_block_split(ds, dict.fromkeys(dims, 1), 0.5, seed=1)
    assert list(split.split.dims) == dims
    assert split.split.size == cells
    assert list(get_statistics(split, split=None)) == data
    assert list(CubeScaler().fit(ds).statistics_) == data
    assert set(leakage_report(split).table.index)  # finds what to compare
    assert len(fold_bars({"a": split}).axes[0].texts) == 2  # bars of train and test

    stores = MultiProcSampler(
        split, nproc=1, filter_var=None, drop_nan=None, progress=False, **paths(tmp_path)
    ).get_datasets()
    assert [list(store.data_vars) for store in stores] == [data, data]
    assert sum(store.sizes["samples"] for store in stores) == cells
    main = data[-1] if name == "static" else data[0]

    samples = PTXrDataset(ds, scale_fn=None, filter_var=None, drop_nan=None)
    assert len(samples) == cells
    whole = samples.take(np.arange(cells))
    assert list(whole) == data
    assert sorted(whole[main].ravel().tolist()) == sorted(ds[main].values.ravel().tolist())

    predicted = predict_cube(torch.nn.Identity(), ds)
    assert list(predicted.data_vars)[: len(data)] == data
    assert set(predicted[main].dims) == set(dims)
    assert list(score_cube(ds, ds, weights=None).variable.values) == data

    X_train, X_test, _, _ = create_split(split, main, feature_vars=data, filter_var=None)
    assert sorted([*X_train[:, 0], *X_test[:, 0]]) == sorted(
        ds[data[0]].broadcast_like(ds[main]).values.ravel().tolist()
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"u": numbered(y=4, x_u=6)}, r"'t' with dims \('y', 'x'\) and 'u' .*grid, ds\[\['t'\]\]"),
        ({"u": numbered(y_b=5, x_b=7), "h": numbered(y=4)}, r"grid, ds\[\['t', 'h'\]\]"),
    ],
)
def test_two_grids_are_refused_with_the_variables_of_one(more: Any, says: str) -> None:
    ds = grid(**more)
    for work in (assign_block_split, MultiProcSampler, PTXrDataset):
        with pytest.raises(InvalidValueError, match=f"dims of the cube are ambiguous.*{says}"):
            work(ds)
    assert list(get_statistics(ds)) == list(ds)  # each variable has its own


def test_a_cube_without_data_is_refused_by_name() -> None:
    for act in (assign_block_split, PTXrDataset, assign_mask):
        with pytest.raises(
            InvalidValueError, match=r"no data variable .* 'code' \(<U1 .*'k' \(a sc"
        ):
            act(
                grid(code=texts(), k=xr.DataArray(3.0)).drop_vars("t"),
                *[True][: act is assign_mask],
            )


@pytest.mark.parametrize("apply_mask", [True, False])
def test_a_named_mask_is_never_data(apply_mask: bool) -> None:
    """It holds numbers, so that only its name identifies it; its gaps drop no sample."""
    ds = grid(land=numbered(y=4, x=6) % 2).where(numbered(y=4, x=6) > 5)
    ds["t"] = numbered(y=4, x=6)
    samples = PTXrDataset(ds, filter_var="land", apply_mask=apply_mask, scale_fn=None)
    assert list(samples.take([0])) == ["t"]
    assert len(samples) == (9 if apply_mask else 24)
