"""Areas of cells: rows of latitude, curvilinear grids, polygons, planes, and unknown ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import honesty_areas
from ml4cube import preprocessing as pp
from ml4cube.core import areas
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import area_weights, evaluate, score_cube
from ml4cube.gap_filling import fill_gaps
from ml4cube.insights import get_insights
from tests.oracle import band_areas, quadrilateral_areas

ROWS = {
    "regular": np.arange(-87.5, 90, 5),
    "with the poles": np.linspace(90, -90, 19),
    "of a region": np.arange(40.0, 60.0),
    "irregular": np.array([-89.0, -70, -65, -10, 0, 1, 2, 30, 88]),
    "in any order": np.array([10.0, -80, 45, 80, 12]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_areas_of_rows_are_those_of_their_bands(rows):
    assert areas.grid_areas(rows, None, "lat") == pytest.approx(band_areas(rows), abs=2e-5)


def test_rows_at_one_latitude_share_its_band_and_bounds_are_used():
    once = areas.band_areas(np.array([0.0, 10.0, 90.0]), "lat")
    twice = areas.band_areas(np.array([10.0, 0.0, 90.0004, 10.0]), "lat")
    assert twice == pytest.approx([once[1] / 2, once[0], once[2], once[1] / 2])
    # a boundary beyond the pole, as of latitudes plus and minus a half step
    edges, sine = np.array([[80.0, 100.0], [0.0, 80.0]]), np.sin(np.deg2rad(80))
    rows = np.array([90.0, 40.0])
    assert areas.band_areas(rows, "lat", edges) == pytest.approx([1 - sine, sine])
    assert areas.band_areas(rows[:1], "lat", np.array([[100.0, 80.0]])) == pytest.approx([1 - sine])
    for wrong in ([[0.0, 80.0], [80.0, 90.0]], [80.0, 90.0], [[80.0, 90.0], [0.0, np.nan]]):
        with pytest.raises(InvalidValueError, match="lat must each lie between their bounds"):
            areas.band_areas(rows, "lat", np.array(wrong))
    with pytest.raises(InvalidValueError, match=r"lat are all 40, .* add bounds"):
        areas.band_areas(np.array([40.0, 40.0]), "lat")


@pytest.mark.parametrize("wrong", [90.1, -91.0, np.nan, np.inf])
def test_values_that_are_no_latitudes_are_refused(wrong):
    with pytest.raises(InvalidValueError, match="lat must be finite, from -90 to 90 degrees"):
        areas.grid_areas(np.array([0.0, wrong]), None, "lat")
    if np.isfinite(wrong):
        with pytest.raises(InvalidValueError, match="lat must be finite, from -90 to 90 degrees"):
            areas.grid_areas(np.full((2, 2), wrong), np.zeros((2, 2)), "lat")


@given(
    st.integers(2, 5), st.integers(2, 5), st.floats(-60, 60), st.floats(0, 360), st.floats(0, 180)
)
def test_areas_between_centres_are_those_of_small_parts(rows, columns, lat, lon, turn):
    """Cells of any orientation, also across the date line."""
    y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    angle = np.deg2rad(turn)
    lats = lat + np.cos(angle) * y - np.sin(angle) * x
    lons = lon + np.sin(angle) * y + np.cos(angle) * x + 0.05 * y * x
    found = areas.quadrilateral_areas(lats, lons)
    np.testing.assert_allclose(found, quadrilateral_areas(lats, lons), rtol=1e-3)


def test_blocks_of_rows_do_not_change_areas(monkeypatch):
    rng = np.random.default_rng(0)
    y, x = np.meshgrid(np.arange(40.0), np.arange(9.0), indexing="ij")
    lats, lons = y + 0.1 * x, x - 0.1 * y
    is_land = rng.random(lats.shape) < 0.2
    lats[is_land] = 9.97e36  # a fill value
    lats = areas.without_fill_values(lats, 90.0, "lat")
    whole = areas.quadrilateral_areas(lats, lons)
    assert (np.isfinite(whole) == ~is_land).all()
    monkeypatch.setattr(areas, "_BLOCK_CELLS", 30)
    monkeypatch.setattr(areas, "_recent", {})
    np.testing.assert_allclose(areas.quadrilateral_areas(lats, lons), whole, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("key", honesty_areas.keys())
def test_means_and_areas_are_within_a_percent_of_exact_ones(key):
    table = honesty_areas.rows({key: honesty_areas.run(key)})
    assert [row["met"] for row in table] == [True, True]


def curvilinear(shape=(4, 5)) -> xr.Dataset:
    rng = np.random.default_rng(0)
    y, x = np.meshgrid(*map(np.arange, shape), indexing="ij")
    return xr.Dataset(
        {"t": (("time", "y", "x"), rng.normal(size=(6, *shape)))},
        {
            "time": np.arange(6).astype("M8[D]"),
            "nav_lat": (("y", "x"), 60.0 + 4 * y + 0.3 * x, {"units": "degrees_north"}),
            "nav_lon": (("y", "x"), 10.0 + 4 * x - 0.5 * y, {"units": "degrees_east"}),
        },
    )


def test_all_stages_weigh_a_curvilinear_grid_by_the_same_areas():
    ds = curvilinear()
    weights = quadrilateral_areas(ds.nav_lat.values, ds.nav_lon.values)
    mean = np.average(ds.t.values.mean(0), weights=weights)
    rule = "spherical quadrilaterals between the centres of nav_lat"
    found = get_insights(ds)
    assert found["mean"].item() == pytest.approx(mean, rel=1e-3)
    assert found.attrs["weights"].endswith(rule)
    statistics = pp.Statistics.from_cube(ds, weights="area")["t"]
    assert statistics.mean == pytest.approx(mean, rel=1e-3)
    assert statistics.weighting == rule
    assert score_cube(ds * 0, ds, metrics="bias").bias.item() == pytest.approx(-mean, rel=1e-3)
    card = evaluate(ds * 0, ds, metrics="bias", split=None, progress=False)
    assert card.scores.bias.item() == pytest.approx(-mean, rel=1e-3)
    assert card.attrs["weights"] == rule
    gappy = ds.assign(t=ds.t.where((ds.time.dt.day != 3) | (ds.y > 1)))
    assert fill_gaps(gappy).scores.attrs["weights"] == f"t: {rule}"


def test_cell_measures_and_named_variables_come_first():
    ds = curvilinear()
    measure = np.random.default_rng(1).uniform(1, 2, (4, 5))
    measure[0, 0] = np.nan  # as on land
    ds["areacello"] = ("y", "x"), measure
    mean = np.average(ds.t.values.mean(0), weights=np.nan_to_num(measure))
    measured = ds.assign(t=ds.t.assign_attrs(cell_measures="volume: v area: areacello"))
    moved = measured.copy()
    moved.t.encoding["cell_measures"] = moved.t.attrs.pop("cell_measures")
    for cube, weights in ((measured, "area"), (moved, "area"), (ds, "areacello")):
        assert pp.get_statistics(cube[["t", "areacello"]], weights=weights)["t"][0] == (
            pytest.approx(mean)
        )
        scores = score_cube(cube[["t"]] * 0, cube, metrics="bias", weights=weights)
        assert scores.bias.item() == pytest.approx(-mean)
        assert scores.attrs["weights"].endswith("areacello")
    # areas that an attribute names are no data
    assert list(pp.get_statistics(measured)) == ["t"]
    with pytest.raises(InvalidValueError, match=r"weights must be .*'areacella'; did you mean"):
        score_cube(ds, ds, weights="areacella")
    with pytest.raises(InvalidTypeError, match="the name of a variable with areas"):
        score_cube(ds, ds, weights=3)


def test_a_prediction_with_other_coordinates_is_weighted_as_the_truth():
    truth = curvilinear()
    prediction = (truth + 1).assign_coords(nav_lat=truth.nav_lat * 0 + 1)
    prediction.t[:, 0] += 1
    given = score_cube(prediction, truth, weights=area_weights(truth))
    for one in (prediction, prediction.drop_vars(["nav_lat", "nav_lon"])):
        assert score_cube(one, truth).rmse.item() == pytest.approx(given.rmse.item())
    assert score_cube(prediction, truth.drop_vars(["nav_lat", "nav_lon"])).attrs["weights"] == (
        "none, no coordinate is a latitude"
    )


def test_cells_of_a_mesh_have_the_areas_of_their_polygons():
    """The octants of the sphere, and a third of one."""
    lat = [[0, 0, 90.0, 90.0], [0, 0, -90.0, -90.0], [0, 0, 90.0, 90.0]]
    lon = [[0, 90.0, 0, 0], [0, 90.0, 0, 0], [90, 120.0, 0, 0]]
    ds = xr.Dataset(
        {"clat_v": (("cell", "v"), lat), "clon_v": (("cell", "v"), lon)},
        {"clat": ("cell", [30.0, -30, 30]), "clon": ("cell", [45.0, 45, 105])},
    ).assign(t=("cell", [1.0, 2.0, 3.0]))
    for name, standard_name in (("clat", "latitude"), ("clon", "longitude")):
        ds[name].attrs = {"standard_name": standard_name, "bounds": f"{name}_v"}
    assert area_weights(ds).values == pytest.approx(np.pi / np.array([2, 2, 6]))


def test_widths_in_longitude_count_where_they_differ():
    lon = np.array([0.0, 10, 20, 40, 80])
    ds = xr.Dataset({"t": (("lat", "lon"), np.ones((2, 5)))}, {"lat": [0.0, 60], "lon": lon})
    found = area_weights(ds)
    assert found.dims == ("lat", "lon")
    assert (found[0] / found[0, 0]).values == pytest.approx([1, 1, 1.5, 3, 4])
    # around the globe, in any order, with a column twice
    around = np.array([180.0, 270, 0, 90, 360])
    whole = area_weights(ds.assign_coords(lon=around))
    assert (whole[0] / whole[0, 0]).values == pytest.approx([1, 1, 0.5, 1, 0.5])
    assert area_weights(ds.assign_coords(lon=around - 180).isel(lon=slice(4))).dims == ("lat",)
    bounded = ds.assign(b=(("lon", "v"), [[355.0, 5], [5, 15], [15, 30], [30, 60], [60, 100]]))
    bounded.lon.attrs["bounds"] = "b"
    widths = area_weights(bounded)[0]
    assert (widths / widths[0]).values == pytest.approx([1, 1, 1.5, 3, 4])


def plane(**attrs) -> xr.Dataset:
    axes = {"x": np.array([0.0, 1e4, 3e4]), "y": np.array([0.0, 1e4])}
    coords = {name: (name, values, {"units": "m"}) for name, values in axes.items()}
    ds = xr.Dataset({"t": (("y", "x"), np.ones((2, 3)))}, coords)
    return ds.assign(crs=xr.DataArray(0, attrs=attrs), t=ds.t.assign_attrs(grid_mapping="crs"))


def test_metres_alone_give_areas_of_the_plane_and_a_warning():
    ds = plane(grid_mapping_name="polar_stereographic")
    with pytest.warns(UserWarning, match="dx dy of .* no latitudes; add latitude and longitude"):
        found = area_weights(ds)
    assert (found / found[0]).values == pytest.approx([1, 1.5, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal_area = area_weights(plane(grid_mapping_name="lambert_azimuthal_equal_area"))
        regular = plane(grid_mapping_name="sinusoidal").isel(x=slice(2))
        assert score_cube(regular, regular).attrs["weights"] == "dx dy of x and y in sinusoidal"
    assert equal_area.values == pytest.approx(found.values)
    assert pp.get_statistics(regular, weights="area")["t"][0] == 1


def test_a_map_whose_areas_are_unknown_has_equal_weights_and_a_warning():
    ds = curvilinear().drop_vars("nav_lon")
    for compute in (lambda: score_cube(ds, ds), lambda: get_insights(ds), lambda: area_weights(ds)):
        with pytest.warns(UserWarning, match="'t' have equal weights, because .* need longitudes"):
            found = compute()
    assert found is None
    unknown = pytest.raises(InvalidValueError, match="need longitudes")
    with pytest.warns(UserWarning, match="equal weights"), unknown:
        pp.get_statistics(ds, weights="area")
    missing = curvilinear()
    missing["nav_lat"][:] = np.nan
    with pytest.warns(UserWarning, match="fewer than two neighbouring cells"):
        assert area_weights(missing) is None
    # stations, and cubes without latitudes, are no maps
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        station = ds.isel(y=0).drop_vars("nav_lat")
        assert score_cube(station, station).attrs["weights"].startswith("none, no coordinate")


@pytest.mark.parametrize("fill", [0.0, -1.0, np.nan, 1e20])
def test_cells_beside_land_without_positions_keep_their_areas(fill):
    """NEMO writes latitude and longitude 0 where land keeps a processor from running."""
    lat, lon = np.meshgrid(np.arange(40.0, 60.0), np.arange(-10.0, 10.0), indexing="ij")
    lat = lat + 0.05 * np.sin(lon)
    whole = areas.grid_areas(lat, lon, "latitudes")
    is_land = np.zeros(lat.shape, bool)
    is_land[5:10, 5:12] = True
    lat[is_land] = lon[is_land] = fill
    found = areas.grid_areas(lat, lon, "latitudes")
    np.testing.assert_allclose(found[~is_land], whole[~is_land], rtol=0.01)
    assert np.isnan(found[is_land]).all()
