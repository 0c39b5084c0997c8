"""Coordinates are matched, and their roles found, by the same rules everywhere."""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from ml4cube import preprocessing as pp
from ml4cube.core.axes import has_distances, same_coordinate
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import dates_along, is_category, role_of, time_dims
from ml4cube.evaluation.metrics import score_cube
from ml4cube.prediction import predict_cube
from ml4cube.splits import assign_block_split

LAT = np.linspace(-10, 10, 8) / 7
DAYS = np.arange("2001-01-01", "2001-01-09", dtype="M8[D]").astype("M8[ns]")
NOLEAP = np.array([cftime.datetime(2001, 1, 1, calendar="noleap")])
STANDARD = np.array([cftime.datetime(2001, 1, 1, calendar="standard")])


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        (LAT.astype("f4"), LAT, True),
        (LAT, LAT.astype("f4"), True),
        (LAT + 1e-3, LAT, False),
        (LAT[::-1], LAT, False),
        (LAT[:4], LAT, False),
        (np.arange(4), np.arange(4.0), True),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), True),
        (np.array([np.nan, 1.0]), np.array([0.0, 1.0]), False),
        (5e6 + 10 * np.arange(8.0), (5e6 + 10 * np.arange(8.0)).astype("f4"), True),
        (5e6 + 10 * np.arange(8.0) + 10, 5e6 + 10 * np.arange(8.0), False),
        (5e6 + 30 * np.arange(8.0) + 5, 5e6 + 30 * np.arange(8.0), False),
        (5e6 + 10 * np.arange(8.0) + 2, 5e6 + 10 * np.arange(8.0), False),
        ((2e7 - 463.3127 * np.arange(8)).astype("f4"), 2e7 - 463.3127 * np.arange(8), True),
        (np.linspace(-180, 180, 9001, dtype="f4"), np.linspace(-180, 180, 9001), True),
        ((150 + 7e-5 * np.arange(9)).astype("f4"), 150 + 7e-5 * np.arange(9), True),
        (150 + 7e-5 * np.arange(1, 10), 150 + 7e-5 * np.arange(9), False),
        (np.array([-np.inf, 1, np.inf]), np.array([-np.inf, 1, np.inf]), True),
        (np.array([-np.inf, 1, np.inf]), np.array([np.inf, 1, np.inf]), False),
        ((-90 + 0.1 * np.arange(9)).astype("f4"), -90 + 0.1 * np.arange(9), True),
        (np.array([-90, 1e-5, 90], "f4"), np.array([-90.0, 0.0, 90.0]), True),
        (DAYS, DAYS.astype("M8[s]"), True),
        (DAYS, DAYS + np.timedelta64(1, "s"), False),
        (np.array(["NaT", "2001"], "M8[s]"), np.array(["NaT", "2001"], "M8[s]"), True),
        (DAYS[:1], NOLEAP, False),
        (DAYS[:1].astype("M8[s]"), NOLEAP, False),
        (NOLEAP, STANDARD, False),
        (np.array(["a", np.nan], object), np.array(["a", np.nan], object), True),
        (np.array(["a", "b"]), np.array(["a", "b"], object), True),
        (np.array(["a", "b"]), np.array([0.0, 1.0]), False),
    ],
)
def test_coordinates_are_the_same_but_for_rounding(given, wanted, same):
    assert same_coordinate(given, wanted) is same


@pytest.mark.parametrize(
    "match",
    [
        lambda ds, a: assign_block_split(ds, {"lat": 2}, 0.5, valid=a == 1),
        lambda ds, a: pp.assign_mask(ds, a == 1),
        lambda ds, a: pp.get_statistics(ds, weights=a),
        lambda ds, a: score_cube(ds, ds, weights=a),
        lambda ds, a: predict_cube(torch.nn.Identity(), ds, mask=a == 1),
    ],
    ids=["valid", "mask", "weights", "scores", "predicted"],
)
def test_coordinates_rounded_by_a_store_are_accepted_and_others_refused(match: Any) -> None:
    ds = xr.Dataset({"a": (("time", "lat"), np.arange(24.0).reshape(3, 8))}, {"lat": LAT})
    ones = xr.DataArray(np.ones(8), dims="lat")
    match(ds, ones)
    match(ds, ones.assign_coords(lat=LAT.astype("f4")))
    for other in (LAT[::-1], LAT + 0.1):
        with pytest.raises(InvalidValueError, match=r"(other .*'lat'|values of 'lat')"):
            match(ds, ones.assign_coords(lat=other))


NUMBERS = np.arange(8)


@pytest.mark.parametrize(
    ("coords", "dims", "found"),
    [
        ({"time": DAYS, "obs": NUMBERS}, "obs time", "time"),
        ({"when": DAYS, "time": NUMBERS}, "time when", "when"),
        ({"time": NUMBERS, "init": ("time", DAYS), "built": ("st", DAYS)}, "st time", "time"),
        ({"time": ("obs", DAYS), "t": NUMBERS}, "t obs", "obs"),
        ({"when": ("obs", DAYS, {"standard_name": "time"}), "t": NUMBERS}, "t obs", "obs"),
        ({"time_origin": ("samples", DAYS)}, "samples time", "samples"),
        ({"time": NUMBERS, "built": ("st", DAYS)}, "st time", "time"),
        ({"time": NUMBERS, "date": ("st", DAYS)}, "st time", "time"),
        ({"built": ("st", DAYS)}, "st time", "time"),
        ({"y": NUMBERS, "n": ("n", NUMBERS, {"axis": "T"})}, "n y", "n"),
        ({"run": DAYS, "time": DAYS}, "run time", "time"),
        ({"run": DAYS, "valid": DAYS}, "run valid", "run valid"),
        ({"time": ("st", DAYS), "valid": ("x", DAYS, {"axis": "T"})}, "st x", "st x"),
        ({"time": DAYS - DAYS[0]}, "x time", "time"),
        # dates on which stations began are not time steps
        ({"built": ("st", DAYS)}, "st level", ""),
        ({"lat": NUMBERS, "start": DAYS[0]}, "lat x", ""),
    ],
)
def test_the_dim_of_time_is_found_by_three_rules(coords, dims, found):
    coords = xr.Dataset(coords=coords).coords
    assert time_dims(coords.values(), dims.split()) == found.split()
    assert time_dims(list(coords.values())[::-1], dims.split()) == found.split()


@pytest.mark.parametrize(
    ("coords", "found"),
    [
        ({"obs": DAYS, "start": ("obs", DAYS)}, "obs"),
        ({"obs": NUMBERS, "time": ("obs", DAYS[::-1]), "start": ("obs", DAYS)}, "time"),
        ({"w": ("obs", DAYS[[0] * 8], {"standard_name": "time"}), "start": ("obs", DAYS)}, "w"),
        ({"start": ("obs", DAYS[::-1])}, "start"),
        ({"start": ("obs", DAYS), "end": ("obs", DAYS)}, None),
        ({"start": ("obs", DAYS[[0, 1, 1, 2, 3, 4, 5, 6]])}, None),
        ({"start": ("obs", DAYS[[1, 0, 2, 3, 4, 5, 6, 7]])}, None),
        ({"start": ("obs", DAYS[[7, 0, 2, 1, 3, 4, 5, 6]])}, None),  # all after the first are less
        ({"obs": NUMBERS, "start": DAYS[0]}, None),
        ({"start": ("obs", np.concatenate([NOLEAP, STANDARD]))}, None),  # cannot be compared
    ],
)
def test_dates_along_a_dim(coords, found):
    values = list(xr.Dataset(coords=coords).coords.values())
    for order in (values, values[::-1]):
        assert getattr(dates_along(order, "obs"), "name", None) == found


@pytest.mark.parametrize(
    ("name", "attrs", "role"),
    [
        ("lev", {"axis": "Z"}, "vertical"),
        ("plev", {"standard_name": "air_pressure"}, "vertical"),
        ("depth", {"positive": "Down"}, "vertical"),
        ("y", {"long_name": "Latitude"}, "latitude"),
        ("x", {"_CoordinateAxisType": "Lon"}, "longitude"),
        ("rlat", {"units": "degrees_north"}, None),
        ("y", {"units": np.array(["m", "m"])}, None),
        ("y", {"units": 1}, None),
        ("time", {"units": "days since 2000-01-01"}, None),
    ],
)
def test_the_role_of_numbers(name, attrs, role):
    assert role_of(xr.DataArray([1.0], dims=name, name=name, attrs=attrs)) == role
    assert role_of(xr.DataArray(DAYS, dims=name, name=name, attrs=attrs)) == "time"
    assert role_of(xr.DataArray(["a"], dims=name, name=name, attrs=attrs)) is None


@pytest.mark.parametrize(
    ("values", "measured", "category"),
    [
        (NUMBERS, True, False),
        (DAYS, True, False),
        (NOLEAP, True, False),
        (np.array(["a", "b"]), False, True),
        (np.array(["a", None], object), False, True),
        (pd.interval_range(0, 2), False, True),
        (pd.period_range("2000", periods=2, freq="M"), False, False),
        (np.array([True, False]), False, False),
        (np.array([], "U1"), False, False),
    ],
)
def test_numbers_dates_texts_periods_and_intervals_are_told_apart(values, measured, category):
    coord = xr.DataArray(values, dims="x")
    assert has_distances(coord) is measured
    assert is_category("x", coord) is category
    assert is_category("Time", coord) is False
    assert is_category("Member", coord) is is_category("member", None) is True
