"""Whole locations in one part; kilometres on any map; both against brute force."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import haversine_distances

from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.splits import (
    LeaveLocationOut,
    LeaveLocationTimeOut,
    apply_split,
    assign_block_split,
    assign_location_split,
    assign_region_split,
)


def cube(kind="map", steps=6, **coords):
    """A cube of random values: a map without coordinates, or stations."""
    sizes = {"time": steps, "y": 5, "x": 7} if kind == "map" else {"time": steps, "station": 12}
    values = np.random.default_rng(0).normal(size=tuple(sizes.values()))
    times = pd.date_range("2000", periods=steps)
    return xr.Dataset({"a": (tuple(sizes), values)}, {"time": times, **coords})


# ------------------------------------------------------------------ whole locations


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from(["map", "stations"]), st.floats(0.2, 0.8), st.booleans()
)
def test_a_location_has_one_part_at_all_times(seed, kind, split, has_val):
    ds = cube(kind)
    val = 0.15 if has_val else 0.0
    label = assign_location_split(ds, split, val=val, seed=seed).split
    assert (label == label.isel(time=0)).all()
    places = label.isel(time=0).values.ravel()
    parts = {1: split, 2: val, 0: 1 - split - val}
    for code, fraction in parts.items():
        assert abs((places == code).sum() - fraction * places.size) < 1.5
    lazy = assign_location_split(
        ds.chunk(time=2).transpose(..., "time"), split, val=val, seed=seed
    ).split
    xr.testing.assert_equal(lazy.transpose(*label.dims).load(), label)
    again = apply_split(ds, label.attrs["ml4cube_split"])
    xr.testing.assert_identical(again.split, label)


def test_fractions_are_of_locations_with_values():
    ds = cube("stations")
    ds.a[:, :6] = np.nan
    label = assign_location_split(ds, 0.5, valid="a").split.isel(time=0).values[6:]
    assert (label == 1).sum() == (label == 0).sum() == 3
    with pytest.raises(EmptyPartError, match="no location has a valid cell"):
        assign_location_split(ds.where(False), valid="a")


def test_cubes_without_locations_are_refused():
    series = xr.Dataset({"a": ("time", np.zeros(5))}, {"time": pd.date_range("2000", periods=5)})
    words = r"must have dims of locations, got \('time',\); name them by dims=, or use assign_time"
    with pytest.raises(InvalidValueError, match=words):
        assign_location_split(series)
    with pytest.raises(InvalidValueError, match=r"dims: unknown \['lat'\]; the cube has \('time'"):
        assign_location_split(cube(), dims=["lat"])
    with pytest.raises(InvalidTypeError, match="n_splits"):
        LeaveLocationOut(2.5)
    with pytest.raises(InvalidValueError, match="n_splits"):
        LeaveLocationTimeOut(1)
    rows = assign_location_split(cube(), 0.6, dims="y").split
    assert (rows == rows.isel(time=0, x=0)).all()


@pytest.mark.parametrize("kind", ["map", "stations"])
def test_folds_of_locations_partition_them(kind):
    ds = cube(kind)
    folds = LeaveLocationOut(3, cube=ds, seed=5)
    X = np.zeros((ds.a.size, 1))
    tested = np.zeros(ds.a.size, int)
    labels = [labelled.split for labelled in folds.split_cube()]
    assert folds.get_n_splits() == len(labels) == 3
    for (train, test), label in zip(folds.split(X), labels, strict=True):
        assert (label == label.isel(time=0)).all()
        assert np.array_equal(np.flatnonzero(label.values.ravel() == 1), train)
        assert np.array_equal(np.flatnonzero(label.values.ravel() == 0), test)
        tested[test] += 1
    assert (tested == 1).all()


@pytest.mark.parametrize("kind", ["map", "stations"])
def test_folds_of_locations_and_times_share_neither(kind):
    ds = cube(kind, steps=9)
    folds = LeaveLocationTimeOut(3, cube=ds, gap=1)
    X = np.zeros((ds.a.size, 1))
    seen = np.zeros(ds.a.shape, int)
    for (train, test), labelled in zip(folds.split(X), folds.split_cube(), strict=True):
        label = labelled.split.values.reshape(9, -1)
        assert set(np.unique(label)) == {0, 1, 255}
        assert np.array_equal(np.flatnonzero(label.ravel() == 1), train)
        assert np.array_equal(np.flatnonzero(label.ravel() == 0), test)
        train_times, train_places = np.nonzero(label == 1)
        test_times, test_places = np.nonzero(label == 0)
        assert not np.isin(test_places, train_places).any()
        assert np.abs(np.subtract.outer(test_times, train_times)).min() == 2  # the gap
        seen += (label == 0).reshape(seen.shape)
    assert seen.max() == 1
    assert (seen.sum(axis=0) == 3).all()  # each place in one period, each period at some place
    assert (seen.reshape(9, -1).sum(axis=1) > 0).all()


# ------------------------------------------------------------------ buffers in kilometres


def placed(kind):
    """A map or stations, and the kilometres between all pairs of its places."""
    rng = np.random.default_rng(3)
    if kind in ("metres", "kilometres", "projected stations"):
        y, x = np.meshgrid(np.arange(6) * 20.0, np.arange(8) * 20.0, indexing="ij")
        unit, scale = ("km", 1.0) if kind == "kilometres" else ("m", 1000.0)
        if kind == "projected stations":
            x, y = rng.uniform(0, 160, 48), rng.uniform(0, 120, 48)
            coords = {"x": ("station", x * scale), "y": ("station", y * scale)}
        else:
            coords = {"y": y[:, 0] * scale, "x": x[0] * scale}
        ds = xr.Dataset(coords=coords)
        for axis in ("x", "y"):
            ds[axis].attrs["units"] = unit
        points = np.stack([x.ravel(), y.ravel()], axis=1)
        km = np.linalg.norm(points[:, None] - points[None], axis=-1)
    else:
        lat, lon = np.meshgrid(np.linspace(60, 61, 6), np.linspace(5, 8, 8), indexing="ij")
        if kind == "stations":
            lat, lon = rng.uniform(60, 61, 48), rng.uniform(5, 8, 48)
            ds = xr.Dataset(coords={"lat": ("station", lat), "lon": ("station", lon)})
        elif kind == "rotated":
            ds = xr.Dataset(coords={"rlat": lat[:, 0], "rlon": lon[0]})
        elif kind == "curvilinear":
            lon = lon + rng.uniform(0, 0.1, lon.shape)
            ds = xr.Dataset(coords={"lat": (("y", "x"), lat), "lon": (("y", "x"), lon)})
        else:
            ds = xr.Dataset(coords={"lat": lat[:, 0], "lon": lon[0]})
        radians = np.deg2rad(np.stack([lat.ravel(), lon.ravel()], axis=1))
        km = 6371.0 * haversine_distances(radians)
    sizes = {"stations": 48, "projected stations": 48}
    names = {"metres": ("y", "x"), "kilometres": ("y", "x"), "curvilinear": ("y", "x")}
    dims = names.get(kind, ("rlat", "rlon") if kind == "rotated" else ("lat", "lon"))
    if kind in sizes:
        return ds.assign(a=(("time", "station"), rng.normal(size=(3, 48)))), km
    return ds.assign(a=(("time", *dims), rng.normal(size=(3, 6, 8)))), km


KINDS = [
    "grid", "rotated", "curvilinear", "stations", "metres", "kilometres", "projected stations",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_in_kilometres_are_those_of_brute_force(kind):
    ds, km = placed(kind)
    bare = assign_location_split(ds, 0.85, seed=1).split.isel(time=0).values.ravel()
    for lazy in (ds, ds.chunk(dict.fromkeys(ds.a.dims, 3))):
        labelled = assign_location_split(lazy, 0.85, seed=1, buffer="25km")
        label = labelled.split.isel(time=0).values.ravel()
        near = (km[:, bare == 0] <= 25).any(axis=1) & (bare == 1)
        assert near.any()
        assert ((label == 1) & (bare == 1)).any()
        assert np.array_equal(label == 255, near)
        assert np.array_equal(label[~near], bare[~near])
        again = apply_split(ds, labelled.split.attrs["ml4cube_split"])
        assert np.array_equal(again.split.values, labelled.split.values)


def test_blocks_and_regions_have_buffers_in_kilometres_on_a_projected_map():
    ds, km = placed("metres")
    for labelled in (
        assign_block_split(ds, {"y": 2, "x": 2, "time": 1}, 0.8, seed=2, buffer="20km"),
        assign_region_split(ds, ds.x > 120_000, buffer={"y": "20km"}),
    ):
        for step in range(3):
            label = labelled.split.isel(time=step).values.ravel()
            assert (label == 255).any()
            assert km[np.ix_(label == 0, label == 1)].min() > 20


def test_kilometres_need_places():
    with pytest.raises(
        InvalidValueError, match="'9km' needs latitude and longitude, or x and y in metres"
    ):
        assign_location_split(cube(), buffer="9km")
    ds, _ = placed("metres")
    with pytest.raises(InvalidValueError, match="kilometres are one distance over both"):
        assign_location_split(ds, buffer={"y": "9km", "x": "20km"})
    for unit in ("", "degrees", "miles"):
        for axis in ("x", "y"):
            ds[axis].attrs["units"] = unit
        with pytest.raises(InvalidValueError, match="x and y in metres or kilometres"):
            assign_location_split(ds, buffer="9km")
