"""Latitudes and longitudes are the same coordinates in every room."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ml4cube import preprocessing as pp
from ml4cube.core.angles import cosines
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.evaluation.metrics import area_weights
from ml4cube.splits.cube import CubeView

LATITUDES = [
    ("lat", {}, "plain"),
    ("Latitude", {"units": "degrees"}, "plain"),
    ("nav_lat", {}, "plain"),
    ("y", {"units": "Degrees_North"}, "plain"),
    ("y", {"units": "degreeN "}, "plain"),
    ("y", {"standard_name": "Latitude", "units": "radian"}, "plain"),
    ("rlat", {"standard_name": "latitude"}, "plain"),
    ("rlat", {}, "rotated"),
    ("RLat", {"units": "degrees_north"}, "rotated"),
    ("lat", {"standard_name": "grid_latitude"}, "rotated"),
    ("y", {"standard_name": "projection_y_coordinate", "units": "degrees"}, "none"),
    ("lon", {"units": "degrees_east"}, "none"),
]
LONGITUDES = [
    ("lon", {}, "plain"),
    ("Long", {}, "plain"),
    ("longitude", {}, "plain"),
    ("nav_lon", {}, "plain"),
    ("x", {"units": "degrees_E"}, "plain"),
    ("x", {"standard_name": "longitude"}, "plain"),
    ("rlon", {"units": "degrees_east"}, "rotated"),
    ("x", {"standard_name": "grid_longitude"}, "rotated"),
    ("x", {"units": "degrees"}, "none"),
    ("lat", {"units": "degrees_north"}, "none"),
]


@pytest.mark.parametrize(
    ("known", "name", "attrs", "kind"),
    [(is_latitude, *row) for row in LATITUDES] + [(is_longitude, *row) for row in LONGITUDES],
)
def test_what_is_a_latitude_or_longitude(known, name, attrs, kind):
    assert known(name, attrs) == (kind == "plain")
    assert known(name, attrs, rotated=True) == (kind != "none")


@pytest.mark.parametrize(("name", "attrs", "kind"), LATITUDES)
def test_every_room_finds_the_same_latitude(name, attrs, kind):
    """Areas and features may be of a rotated grid; places of a split are those on Earth."""
    lat = np.array([0.0, 60.0])
    if attrs.get("units") == "radian":
        lat = np.deg2rad(lat)
    ds = xr.Dataset({"a": (name, [1.0, 4.0])}, {name: (name, lat, attrs)})
    assert (CubeView.of(ds).axis_of("lat") is not None) == (kind == "plain")
    if kind == "none":
        assert area_weights(ds) is None
        with pytest.raises(InvalidValueError, match="needs latitudes"):
            pp.get_statistics(ds, weights="area")
        with pytest.raises(InvalidValueError, match="fits no coordinate"):
            PTXrDataset(ds, features="a", coord_features="lat", scale_fn=None)
        return
    assert area_weights(ds).values == pytest.approx([1.0, 0.5])
    assert pp.get_statistics(ds, weights="area")["a"][0] == pytest.approx(2.0)
    X = PTXrDataset(ds, features="a", coord_features="lat", scale_fn=None).take([0, 1])
    assert sorted(X[:, 2].tolist()) == pytest.approx([0.5, 1.0])


def test_areas_of_a_rotated_grid_are_those_of_its_own_latitudes():
    """Its cells have other sizes than cells of a regular grid at the same place on Earth."""
    places = {"standard_name": "latitude", "units": "degrees_north"}
    rotated = xr.Dataset(
        {"a": (("rlat", "rlon"), [[1.0, 1.0], [4.0, 4.0]])},
        {
            "lat": (("rlat", "rlon"), [[80.0, 70.0], [50.0, 40.0]], places),
            "rlat": ("rlat", [0.0, 60.0], {"standard_name": "grid_latitude", "units": "degrees"}),
        },
    )
    for ds in (rotated, rotated.isel(rlon=0)):  # of one meridian, both lie along one dim
        assert pp.get_statistics(ds, weights="area")["a"][0] == pytest.approx(2.0)
        assert area_weights(ds).values == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    ("latitudes", "units"),
    [
        ([0.0, 60.0, -90.0005], "degrees_north"),
        (xr.DataArray([0, 60, 90], dims="lat"), None),
        (np.deg2rad([0.0, -60.0, 90.0]), "radian"),
    ],
)
def test_cosines_of_latitudes(latitudes, units):
    found = cosines(latitudes, units, "lat")
    assert found == pytest.approx([1.0, 0.5, 0.0])
    assert (found >= 0).all()


@pytest.mark.parametrize("wrong", [90.1, -91.0, np.nan, np.inf])
def test_cosines_of_what_is_no_latitude(wrong):
    with pytest.raises(InvalidValueError, match="lat must be finite, from -90 to 90 degrees"):
        cosines([0.0, wrong], None, "lat")
