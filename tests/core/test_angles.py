"""Latitudes, longitudes and areas of cells are the same in all folders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube import preprocessing as pp
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.evaluation import evaluate
from ml4cube.evaluation.metrics import area_weights, score_cube
from ml4cube.splits.cube import CubeView
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.losses import area_weights as loss_weights
from tests.oracle import band_areas, quadrilateral_areas

LATITUDES = [
    ("lat", {}, "plain"),
    ("Latitude", {"units": "degrees"}, "plain"),
    ("nav_lat", {}, "plain"),
    ("y", {"units": "Degrees_North"}, "plain"),
    ("y", {"units": "degreeN "}, "plain"),
    ("y", {"standard_name": "Latitude", "units": "radian"}, "plain"),
    ("lat", {"units": "radians"}, "plain"),
    ("lat", {"units": "rad"}, "plain"),
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
def test_all_folders_find_the_same_latitude(name, attrs, kind):
    """Areas may be of a rotated grid; a split takes positions on Earth, as do features if asked."""
    lat = np.array([0.0, 60.0])
    if attrs.get("units", "").startswith("rad"):
        lat = np.deg2rad(lat)
    ds = xr.Dataset({"a": (name, [1.0, 4.0])}, {name: (name, lat, attrs)})
    assert (CubeView.of(ds).axis_of("latitude") is not None) == (kind == "plain")
    if kind == "none":
        assert area_weights(ds) is None
        with pytest.raises(InvalidValueError, match="needs a latitude"):
            pp.get_statistics(ds, weights="area")
    if kind == "none" or (kind == "rotated" and name != "lat"):
        with pytest.raises(InvalidValueError, match="matches no coordinate"):
            PTXrDataset(ds, features="a", coord_features="lat", scale_fn=None)
    if kind == "none":
        return
    assert area_weights(ds).values == pytest.approx([1.0, 0.5])
    assert pp.get_statistics(ds, weights="area")["a"][0] == pytest.approx(2.0)
    feature = name if kind == "rotated" else "lat"
    X = PTXrDataset(ds, features="a", coord_features=feature, scale_fn=None).take([0, 1])
    assert sorted(X[:, 2].tolist()) == pytest.approx([0.5, 1.0])


def test_areas_of_a_rotated_grid_are_those_of_its_own_latitudes():
    """Its cells have other sizes than cells of a regular grid at the same position on Earth."""
    on_earth = {"standard_name": "latitude", "units": "degrees_north"}
    rotated = xr.Dataset(
        {"a": (("rlat", "rlon"), [[1.0, 1.0], [4.0, 4.0]])},
        {
            "lat": (("rlat", "rlon"), [[80.0, 70.0], [50.0, 40.0]], on_earth),
            "rlat": ("rlat", [0.0, 60.0], {"standard_name": "grid_latitude", "units": "degrees"}),
        },
    )
    for ds in (rotated, rotated.isel(rlon=0)):  # of one meridian, both lie along one dim
        assert pp.get_statistics(ds, weights="area")["a"][0] == pytest.approx(2.0)
        assert area_weights(ds).values == pytest.approx([1.0, 0.5])


def grids() -> dict[str, tuple[xr.Dataset, np.ndarray]]:
    """Cubes of three kinds of grid, each with the true weight of each of its cells."""
    rng = np.random.default_rng(3)
    rows = np.array([-90.0, -60, 10, 20, 80])
    shape = (len(rows), 4)
    cells = {"a": (("time", "y", "x"), rng.normal(size=(3, *shape)))}
    rectilinear = xr.Dataset(cells).rename(y="lat").assign_coords(lat=rows)
    edges = np.stack([[-90, -80, 0, 15, 70], [-80.0, 0, 15, 70, 90]], -1)
    bounded = rectilinear.assign(lat_bnds=(("lat", "bnds"), edges))
    bounded.lat.attrs["bounds"] = "lat_bnds"
    lat, lon = np.meshgrid(np.linspace(50, 60, 5), np.linspace(0, 9, 4), indexing="ij")
    lon = lon + lat / 20
    curvilinear = xr.Dataset(cells, {"nav_lat": (("y", "x"), lat), "nav_lon": (("y", "x"), lon)})
    sines = np.sin(np.deg2rad(edges))
    return {
        "rows": (rectilinear, np.broadcast_to(band_areas(rows)[:, None], shape)),
        "bounds": (bounded, np.broadcast_to(sines[:, 1:] - sines[:, :1], shape)),
        "curvilinear": (curvilinear, quadrilateral_areas(lat, lon)),
    }


@pytest.mark.parametrize("kind", grids())
def test_statistics_scores_and_losses_weigh_by_the_same_areas(kind):
    ds, weights = grids()[kind]
    ds["a"][0, 1, 1] = np.nan
    values = ds["a"].values
    weights = np.where(np.isnan(values), 0, weights)
    mean = np.nansum(values * weights) / weights.sum()
    square = np.nansum(values**2 * weights) / weights.sum()
    assert pp.get_statistics(ds, weights="area")["a"][0] == pytest.approx(mean, rel=1e-3)
    pairs = [(ds[["a"]], ds), (ds.reset_coords()[["a"]], ds)]
    if kind != "bounds":  # an array does not hold them
        pairs.append((ds["a"], ds["a"]))
    for prediction, truth in pairs:
        scores = score_cube(prediction * 0, truth, metrics=["rmse", "bias"])
        assert scores["rmse"].item() == pytest.approx(square**0.5, rel=1e-3)
        assert scores["bias"].item() == pytest.approx(-mean, rel=1e-3)
        expected = "area of the bands of lat"
        if kind == "curvilinear":
            expected = "spherical quadrilaterals between the centres of nav_lat"
        assert scores.attrs["weights"] == expected
    latitude = ds["nav_lat" if kind == "curvilinear" else "lat"]
    bounds = ds["lat_bnds"] if kind == "bounds" else None
    longitude = ds["nav_lon"] if kind == "curvilinear" else None
    of_loss = loss_weights(latitude, longitude=longitude, bounds=bounds)
    loss = MaskedLoss(torch.nn.MSELoss(), weights=of_loss)
    target = torch.from_numpy(values)
    assert loss(torch.zeros_like(target), target).item() == pytest.approx(square, rel=1e-3)


def test_scores_take_the_bounds_of_the_truth():
    """Arithmetic changes the bounds of a prediction, and a selection of variables drops them."""
    truth = grids()["bounds"][0].assign_coords(time=np.arange(3).astype("M8[D]"))
    bare, prediction = truth[["a"]], truth * 1.1
    prediction.a[:, 0] += 1
    prediction.lat.attrs = truth.lat.attrs
    expected = score_cube(prediction[["a"]], truth).rmse.item()
    halfway = score_cube(prediction[["a"]], bare).rmse.item()
    assert halfway != pytest.approx(expected)
    unnamed = prediction.assign_coords(lat=truth.lat.drop_attrs())  # names no bounds
    assert score_cube(unnamed, truth).rmse.item() == pytest.approx(expected)
    for true, rmse in ((truth, expected), (bare, halfway)):
        assert score_cube(prediction, true).rmse.item() == pytest.approx(rmse)
        card = evaluate(prediction, true, metrics="rmse", split=None, progress=False)
        assert card.scores.rmse.item() == pytest.approx(rmse)


def test_unknown_areas_are_refused_or_noted_in_the_scores():
    rng = np.random.default_rng(0)
    values = (("time", "station"), rng.normal(size=(4, 6)))
    where = {n: ("station", rng.uniform(-80, 80, 6)) for n in ("lat", "lon")}
    stations = xr.Dataset({"a": values}, where)
    one_row = xr.Dataset({"a": (("time", "lat"), np.ones((4, 1)))}, {"lat": [40.0]})
    for ds, reason in ((stations, "points along 'station'"), (one_row, "are all 40")):
        with pytest.raises(InvalidValueError, match=reason):
            pp.get_statistics(ds, weights="area")
        assert area_weights(ds) is None
        scores = score_cube(ds * 0, ds, metrics="rmse")
        assert scores["rmse"].item() == pytest.approx(float((ds["a"] ** 2).mean() ** 0.5))
        assert scores.attrs["weights"].startswith("none, ")
        assert reason in scores.attrs["weights"]
    plain = stations.drop_vars(["lat", "lon"])
    assert score_cube(plain, plain).attrs["weights"] == "none, no coordinate is a latitude"
    assert score_cube(plain, plain, weights=None).attrs["weights"] == "none"
    both = one_row.assign(b=("time", np.ones(4))).assign_coords(lat=[3.0])
    both = xr.concat([both, both.assign_coords(lat=[5.0])], "lat", data_vars="minimal")
    assert score_cube(both, both).attrs["weights"] == (
        "a: area of the bands of lat; b: none, no coordinate is a latitude"
    )
