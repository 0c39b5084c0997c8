"""Maps: cells at their place, the aspect of it, limits, colours, names and units; one style."""

import sys
import types
import warnings
from pathlib import Path

import iris_sample_data
import matplotlib
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline
from matplotlib.transforms import Affine2D

from ml4cube import MultiProcSampler
from ml4cube.core.distance.variogram import Variogram
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.plotting import (
    difference_map,
    distance_curves,
    error_maps,
    field_map,
    field_maps,
    fold_bars,
    leakage_figure,
    loss_curve,
    sample_density,
    scorecard_figure,
    spectrum_plot,
    split_map,
    split_timeline,
    time_maps,
    variogram_plot,
)
from ml4cube.plotting import maps as maps_module
from ml4cube.plotting.density import _counts
from ml4cube.plotting.maps import GAP_COLOR, Scale
from ml4cube.plotting.style import units_of
from tests.cubes import cell_id_cube
from tests.test_plotting import hex_of, rendered, titles

SAMPLES = Path(iris_sample_data.path)
WIDE = {"lat": ("lat", [59.0, 60.0, 61.0], {"units": "degrees_north"})}


def on_earth(lat, lon, **attrs):
    values = np.arange(len(lat) * len(lon), dtype=float).reshape(len(lat), len(lon))
    coords = {
        "lat": ("lat", np.array(lat, dtype=float), {"units": "degrees_north"}),
        "lon": ("lon", np.array(lon, dtype=float), {"units": "degrees_east"}),
    }
    return xr.DataArray(values, coords, ("lat", "lon"), name="t", attrs=attrs)


FIELD = on_earth([59, 60, 61], [10, 11, 12, 13], long_name="air temperature", units="K")


def mesh_of(axes):
    (mesh,) = axes.collections
    return mesh


def color_bars(figure):
    meshes = [mesh for axes in figure.axes for mesh in axes.collections if mesh.colorbar]
    return [mesh.colorbar.ax for mesh in meshes if mesh.colorbar.mappable is mesh]


def ratio_on_paper(axes):
    """Height over width of axes as they are drawn."""
    box = axes.get_window_extent()
    return box.height / box.width


# ------------------------------------------------------------------------ aspect and place


@pytest.mark.parametrize(
    ("field", "ratio"),
    [
        (FIELD, 3 / (4 * 0.5)),
        (FIELD.transpose(), 3 / (4 * 0.5)),
        (on_earth(np.arange(-85, 90, 10), np.arange(5, 360, 10)), 0.5),
        (on_earth([-10, 0, 10], [0, 30, 60]), 1 / 3),
        (on_earth(np.deg2rad([59, 60, 61]), np.deg2rad([10, 11, 12, 13])), None),
    ],
)
def test_a_map_has_the_aspect_of_its_place(field, ratio):
    if ratio is None:
        for name in ("lat", "lon"):
            field[name].attrs["units"] = "radians"
        ratio = 3 / (4 * 0.5)
    axes = rendered(field_map(field)).axes[0]
    assert ratio_on_paper(axes) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("units", ["m", "km", "metres", ""])
def test_lengths_are_equal_on_projected_grids(units):
    coords = {
        side: (side, size * np.arange(n), {"standard_name": f"projection_{side}_coordinate"})
        for side, size, n in (("y", 25e3, 4), ("x", 50e3, 6))
    }
    field = xr.DataArray(np.zeros((6, 4)), coords, ("x", "y"))
    for side in "xy":
        field[side].attrs["units"] = units
    axes = rendered(field_map(field)).axes[0]
    assert ratio_on_paper(axes) == pytest.approx(4 * 25 / (6 * 50), rel=0.01)
    if units.startswith("m"):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("x (km)", "y (km)")
        assert axes.get_xlim() == (-25, 275)


def test_cells_without_coordinates_are_squares_and_sections_fill_the_panel():
    bare = rendered(field_map(xr.DataArray(np.zeros((3, 6)), dims=("a", "b")))).axes[0]
    assert ratio_on_paper(bare) == pytest.approx(0.5, rel=0.01)
    assert bare.get_xlabel() == "b (cell)"
    dates = {"time": xr.date_range("2000", periods=5)}
    section = xr.DataArray(np.zeros((3, 5)), WIDE | dates, ("lat", "time"))
    assert rendered(field_map(section)).axes[0].get_aspect() == "auto"


def test_a_rotated_grid_is_drawn_along_its_own_axes():
    field = xr.open_dataset(SAMPLES / "rotated_pole.nc").air_pressure_at_sea_level.squeeze(
        drop=True
    )
    axes = rendered(field_map(field)).axes[0]
    assert axes.get_xlabel() == "grid longitude (°)"
    expected = np.ptp(axes.get_ylim()) / np.ptp(axes.get_xlim())  # around the rotated equator
    assert ratio_on_paper(axes) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("lon", "ends"),
    [
        ([170, 175, -180, -175], (-192.5, -172.5)),
        ([175, 180, 185], (172.5, 187.5)),
        ([350, 355, 0, 5], (-12.5, 7.5)),
        ([5, 0, 355, 350], (-12.5, 7.5)),
        ([0, 90, 180, 270], (-45, 315)),
    ],
)
def test_longitudes_that_jump_are_joined(lon, ends):
    field = on_earth([0, 1], lon)
    axes = rendered(field_map(field)).axes[0]
    assert axes.get_xlim() == ends
    for at, tick in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        number, _, hemisphere = tick.get_text().partition("°")
        assert (float(number) * (-1 if hemisphere == "W" else 1) - at) % 360 == 0
        assert (hemisphere == "") == (number in ("0", "180"))
    corners, shown = mesh_of(axes).get_coordinates(), mesh_of(axes).get_array()
    middles = (corners[0, 1:, 0] + corners[0, :-1, 0]) / 2
    for middle, value in zip(middles, shown.reshape(2, -1)[0], strict=True):
        assert field.isel(lat=0, lon=int(value)).lon % 360 == middle % 360


def curved(shape, lat0, lon0, turn):
    """A grid turned against the meridians, about a place."""
    rows, columns = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    lat = lat0 + 0.5 * rows * np.cos(turn) + 0.5 * columns * np.sin(turn)
    lon = lon0 + 0.8 * columns * np.cos(turn) - 0.8 * rows * np.sin(turn)
    coords = {"nav_lat": (("y", "x"), lat), "nav_lon": (("y", "x"), (lon + 180) % 360 - 180)}
    return xr.DataArray(np.arange(rows.size).reshape(shape), coords, ("y", "x"))


@settings(max_examples=25)
@given(
    st.tuples(st.integers(2, 5), st.integers(2, 5)),
    st.floats(-60, 60),
    st.floats(-180, 180),
    st.floats(0, 6.2),
)
def test_cells_of_a_curvilinear_grid_are_at_their_place(shape, lat0, lon0, turn):
    field = curved(shape, lat0, lon0, turn)
    axes = field_map(field).axes[0]
    corners = mesh_of(axes).get_coordinates()
    assert np.ptp(axes.get_xlim()) < 10
    for i, j in np.ndindex(*shape):
        outline = corners[[i, i, i + 1, i + 1], [j, j + 1, j + 1, j]]
        lon, lat = float(field.nav_lon[i, j]), float(field.nav_lat[i, j])
        turned = lon + 360 * round((outline[:, 0].mean() - lon) / 360)
        np.testing.assert_allclose(outline.mean(0), [turned, lat], atol=1e-6)
        assert Outline(outline).contains_point((turned, lat))
    assert mesh_of(axes).get_array().ravel().tolist() == field.values.ravel().tolist()


@pytest.mark.slow
def test_a_global_ocean_grid_covers_the_earth_once():
    ds = xr.open_dataset(SAMPLES / "NEMO" / "nemo_1m_20150101-20150201_grid-T.nc")
    field = ds["tos"].squeeze(drop=True).load()
    axes = rendered(field_map(field.where(field != 0))).axes[0]
    assert np.ptp(axes.get_xlim()) <= 360
    mesh = mesh_of(axes)
    corners, shown = mesh.get_coordinates(), np.asarray(mesh.get_alpha()) > 0
    ends = np.stack([corners[:-1, :-1, 0], corners[1:, 1:, 0], corners[1:, :-1, 0]])
    assert np.ptp(ends, axis=0)[shown].max() < 180  # no cell across the whole map
    assert shown.mean() > 0.98
    middles = (corners[:-1, :-1] + corners[1:, 1:] + corners[1:, :-1] + corners[:-1, 1:]) / 4
    regular = shown & (np.abs(field.nav_lat.values) < 50)
    assert regular.sum() > 50_000
    assert np.abs(middles[..., 1] - field.nav_lat.values)[regular].max() < 0.5
    apart = (middles[..., 0] - field.nav_lon.values + 180) % 360 - 180
    assert np.abs(apart)[regular].max() < 0.5


# ------------------------------------------------------------------------ colours and names


@settings(max_examples=50)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 8), st.integers(1, 30)),
        elements=st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, np.nan, np.inf])),
    ),
    st.sampled_from([None, 0.0, 3.0]),
)
def test_limits_are_robust_and_the_colour_bar_says_what_is_beyond(values, center):
    scale = Scale.of([xr.DataArray(values)], "", center)
    known = np.sort(values[np.isfinite(values)])
    assert scale.low < scale.high
    tiny = 1e-12 * (abs(scale.low) + abs(scale.high))  # limits are rounded
    below, above = known < scale.low - tiny, known > scale.high + tiny
    assert (scale.extend in ("min", "both")) == below.any()
    assert (scale.extend in ("max", "both")) == above.any()
    beyond = int((below | above).sum())
    assert beyond <= 0.04 * len(known) + 2
    if center is not None:
        assert scale.high - center == pytest.approx(center - scale.low)


def test_one_outlier_does_not_wash_out_a_map():
    field = on_earth(np.arange(10), np.arange(20)) / 200
    field[3, 4] = 1e6
    axes = rendered(field_map(field)).axes[0]
    assert mesh_of(axes).get_clim()[1] < 1.01
    assert mesh_of(axes).colorbar.extend == "both"


def test_differences_and_anomalies_diverge_at_zero():
    figure = rendered(difference_map(FIELD, FIELD.transpose() * 0 + 9))
    low, high = mesh_of(figure.axes[0]).get_clim()
    assert low == -high
    assert mesh_of(figure.axes[0]).cmap.name.startswith("RdBu")
    assert color_bars(figure)[0].get_ylabel() == "difference in air temperature (K)"
    anomaly = (FIELD - 2).assign_attrs(standard_name="air_temperature_anomaly", units="K")
    steps = anomaly.expand_dims(time=[0.0]).assign_coords(time=np.array(["2000"], "M8[ns]"))
    for figure in (field_map(anomaly), field_maps({"one": anomaly}), time_maps(steps)):
        low, high = mesh_of(rendered(figure).axes[0]).get_clim()
        assert low == -high
    assert mesh_of(field_map(FIELD, center=5.0).axes[0]).norm(5.0) == 0.5
    assert mesh_of(field_map(FIELD).axes[0]).cmap.name == "viridis"


def test_a_lazy_field_is_computed_once():
    computed = []
    chunked = FIELD.chunk()
    counting = chunked.data.map_blocks(
        lambda values: computed.append(1) or values, meta=np.empty((0, 0))
    )
    lazy = chunked.copy(data=counting)
    field_map(lazy)
    assert computed == [1]


def test_missing_cells_are_grey():
    axes = rendered(field_map(FIELD.where(FIELD > 0))).axes[0]
    assert hex_of(mesh_of(axes).get_facecolors()[0]) == hex_of(GAP_COLOR)


@pytest.mark.parametrize(
    ("attrs", "label"),
    [
        ({"long_name": "net radiation", "units": "W m-2"}, "net radiation (W m⁻²)"),
        ({"standard_name": "air_temperature", "units": "degC"}, "air temperature (°C)"),
        ({"long_name": "rain", "units": "kg m**-2 s^-1"}, "rain (kg m⁻² s⁻¹)"),
        ({"units": "1"}, "t"),
        ({}, "t"),
    ],
)
def test_names_and_units_are_those_of_cf(attrs, label):
    figure = rendered(field_map(FIELD.drop_attrs().assign_attrs(attrs)))
    assert color_bars(figure)[0].get_ylabel() == label


@pytest.mark.parametrize("units", ["K²", "1e-3", "H2O", "mm day", "days since 2000-01-01"])
def test_other_units_stay(units):
    assert units_of(FIELD.assign_attrs(units=units)) == units


# ------------------------------------------------------------------------ several panels


@pytest.mark.slow
def test_maps_over_time_share_limits_and_one_colour_bar():
    field = cell_id_cube({"time": 30, "lat": 4, "lon": 6}).a
    figure = rendered(time_maps(field, range(0, 30, 29)))
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert titles(panels) == ["2000-01-01", "2000-01-30"]
    assert len({mesh_of(axes).get_clim() for axes in panels}) == len(color_bars(figure)) == 1
    np.testing.assert_array_equal(np.ravel(mesh_of(panels[1]).get_array()), np.ravel(field[-1]))
    names = titles(time_maps(field).axes[:6])  # six of thirty, evenly spaced
    assert names[::5] == ["2000-01-01", "2000-01-30"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 5])
def test_panels_do_not_overlap(n):
    for shape in ((3, 40), (10, 20), (20, 5)):
        field = on_earth(np.arange(shape[0]), np.arange(shape[1])).expand_dims(time=n)
        figure = rendered(time_maps(field, range(n)))
        boxes = [axes.get_window_extent() for axes in figure.axes]
        assert not any(
            a.x0 < b.x1 - 1 and b.x0 < a.x1 - 1 and a.y0 < b.y1 - 1 and b.y0 < a.y1 - 1
            for i, a in enumerate(boxes)
            for b in boxes[:i]
        )
        assert max(box.height * box.width for box in boxes) > 400


def test_errors_of_models_share_limits_and_skill_is_at_most_one():
    rmse = xr.concat([abs(FIELD), 3 * abs(FIELD)], "model").assign_coords(model=["p", "q_r"])
    skill = xr.concat([FIELD / 6 - 1.5], "baseline").assign_coords(baseline=["clim"])
    maps = xr.Dataset({"t_rmse": rmse.assign_attrs(units="K"), "t_skill": skill})
    figure = rendered(error_maps(maps))
    assert titles(figure.axes[:2]) == ["p", "q r"]
    assert {mesh_of(axes).get_clim()[0] for axes in figure.axes[:2]} == {0}
    assert color_bars(figure)[0].get_ylabel() == "RMSE (K)"
    axes = rendered(error_maps(maps, "t", metric="skill")).axes[0]
    assert axes.get_title(loc="left") == "over clim"
    assert mesh_of(axes).get_clim() == (-1, 1)
    assert mesh_of(axes).colorbar.extend == "min"


@settings(max_examples=30)
@given(st.data())
def test_sample_density_counts_windows_one_by_one(data):
    shape, size = (6, 7), (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    starts = data.draw(
        st.lists(
            st.tuples(*(st.integers(0, n - k) for n, k in zip(shape, size, strict=True))),
            min_size=1, max_size=12,
        )
    )  # fmt: skip
    expected = np.zeros(shape, dtype=int)
    for row, column in starts:
        expected[row : row + size[0], column : column + size[1]] += 1
    rows, columns = np.transpose(starts)
    np.testing.assert_array_equal(_counts((rows, columns), shape, size), expected)


@pytest.mark.slow
def test_sample_density_of_a_store(tmp_path):
    cube = cell_id_cube({"time": 12, "lat": 8, "lon": 12})
    sampler = MultiProcSampler(
        cube, train_cube=tmp_path / "train.zarr", test_cube=tmp_path / "test.zarr",
        sample_size={"lat": 4, "lon": 4}, block_size={"lat": 4, "lon": 4}, nproc=1,
    )  # fmt: skip
    sampler.run()
    train, test = sampler.get_datasets()[:2]
    shown = [
        np.ma.filled(mesh_of(rendered(sample_density(store, cube)).axes[0]).get_array(), 0)
        for store in (train, test)
    ]
    assert (sum(shown) == 12).all()
    axes = sample_density(train, cube).axes[0]
    assert axes.get_xlim() == (0, 360)
    assert axes.get_title(loc="left") == "Samples of train"


# ------------------------------------------------------------------------ one style, axes given

LABEL = xr.DataArray(
    np.ones((2, 3, 4), "u1"), {**FIELD.coords, "time": [0, 1]}, ("time", "lat", "lon"), name="split"
)
SPEC = {"dims": ["lat", "lon"], "shape": [3, 4], "size": [2, 2]}
STORE = xr.Dataset(attrs={"spec": SPEC}).assign_coords(
    lat_index=("samples", [0]), lon_index=("samples", [0])
)
POWER = xr.DataArray(
    np.ones((2, 5)), {"source": ["truth", "prediction"]}, ("source", "wavenumber"), name="t"
)
SKILL = xr.DataArray([[0.4]], {"variable": ["t"], "baseline": ["clim"]}, ("variable", "baseline"))
SCORES = xr.Dataset({"skill": SKILL, "skill_low": SKILL - 0.1, "skill_high": SKILL + 0.1})
SKILL_MAP = xr.Dataset({"t_skill": (FIELD / 9).expand_dims(baseline=["clim"])})
ONE = Variogram(np.arange(1.0, 4), np.ones(3), np.ones(3, int), "linear", 0, 1, 1)
PLOTS = {
    "field_map": (1, lambda ax: field_map(FIELD, ax=ax)),
    "difference_map": (1, lambda ax: difference_map(FIELD, FIELD / 2, ax=ax)),
    "field_maps": (2, lambda ax: field_maps({"a": FIELD}, {"b": FIELD - 1}, ax=ax)),
    "time_maps": (2, lambda ax: time_maps(LABEL, ax=ax)),
    "error_maps": (1, lambda ax: error_maps(SKILL_MAP, metric="skill", ax=ax)),
    "sample_density": (1, lambda ax: sample_density(STORE, FIELD, ax=ax)),
    "split_map": (2, lambda ax: split_map(LABEL, steps=[0], ax=ax)),
    "split_timeline": (1, lambda ax: split_timeline(LABEL, ax=ax)),
    "fold_bars": (1, lambda ax: fold_bars([LABEL], ax=ax)),
    "distance_curves": (1, lambda ax: distance_curves({"test": [1.0, 2]}, ax=ax)),
    "leakage_figure": (
        2, lambda ax: leakage_figure("ok", False, {"space": ("km", {"a": [1]})}, {"b": 0.1}, ax=ax)
    ),
    "variogram_plot": (1, lambda ax: variogram_plot({"x": ONE}, ax=ax)),
    "loss_curve": (1, lambda ax: loss_curve([2.0, 1.0], ax=ax)),
    "spectrum_plot": (1, lambda ax: spectrum_plot(POWER, ax=ax)),
    "scorecard_figure": (
        3, lambda ax: scorecard_figure(SCORES, SKILL_MAP, xr.Dataset({"t": POWER}), ax=ax)
    ),
}  # fmt: skip


def test_every_public_plot_is_among_those_checked():
    import ml4cube.plotting

    public = {name for name, found in vars(ml4cube.plotting).items() if callable(found)}
    assert public - {"plot_insights"} == set(PLOTS)  # which is a page of its own


@pytest.mark.parametrize("name", PLOTS)
def test_plots_draw_into_the_axes_they_are_given(name, monkeypatch):
    n, draw = PLOTS[name]
    mine = Figure(figsize=(4 * n, 4), layout="constrained")
    part, _ = mine.subfigures(2, 1)
    panels = part.subplots(1, n, squeeze=False)[0]
    made = []
    monkeypatch.setattr(Figure, "__init__", lambda *_, **__: made.append(1))
    assert draw(panels[0] if n == 1 else panels) is mine
    monkeypatch.undo()
    assert not made
    assert all(axes.has_data() for axes in panels)
    assert not mine.get_suptitle()
    rendered(mine)


@pytest.mark.parametrize("name", PLOTS)
def test_wrong_axes_are_refused_before_anything_is_drawn(name):
    n, draw = PLOTS[name]
    panels = Figure().subplots(1, n + 1)
    with pytest.raises(InvalidValueError, match=rf"ax must be .*, got {n + 1}"):
        draw(panels)
    assert not any(axes.has_data() for axes in panels)
    with pytest.raises(InvalidTypeError, match="ax must be matplotlib axes, got Figure"):
        draw(Figure())


@pytest.mark.parametrize("name", PLOTS)
def test_the_settings_of_the_user_are_kept_and_do_not_change_the_style(name):
    with warnings.catch_warnings(), matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        warnings.simplefilter("error")
        before = dict(matplotlib.rcParams)
        figure = rendered(PLOTS[name][1](None))
        assert dict(matplotlib.rcParams) == before
        for axes in figure.axes:
            for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
                assert tick.get_fontsize() <= 8


@pytest.mark.parametrize("layout", ["constrained", None])
@pytest.mark.parametrize("lat", [[0, 10, 20, 30], [0, 2]])
def test_a_colour_bar_is_along_the_map_and_inside_the_figure(layout, lat):
    figure = Figure(figsize=(6, 4), layout=layout)
    axes, _ = figure.subplots(1, 2)
    field_map(on_earth(lat, np.arange(0, 60, 10)), ax=axes)
    rendered(figure)
    of_map, bar = axes.get_window_extent(), color_bars(figure)[0].get_window_extent()
    if len(lat) > 2:
        assert of_map.y0 <= bar.y0 < bar.y1 <= of_map.y1
        assert bar.height > 0.85 * of_map.height  # the rest are its arrows
        assert bar.x0 > of_map.x1
    else:
        assert of_map.x0 < bar.x0 < bar.x1 < of_map.x1
        assert bar.y1 < of_map.y0
    assert 0 < bar.x0 < bar.x1 < figure.bbox.x1
    assert bar.y0 > 0


# ------------------------------------------------------------------------ cartopy


@pytest.fixture
def cartopy(monkeypatch, tmp_path):
    """What is used of cartopy: where its data are, a reader of lines, and a projection."""
    coast = types.SimpleNamespace(coords=[(10.0, 59.0), (12.0, 61.0)])
    many = types.SimpleNamespace(geoms=[coast, coast])
    package = types.ModuleType("cartopy")
    package.config = {"pre_existing_data_dir": "", "data_dir": tmp_path}
    reader = types.ModuleType("cartopy.io.shapereader")
    reader.Reader = lambda path: types.SimpleNamespace(geometries=lambda: iter([many]))
    crs = types.ModuleType("cartopy.crs")
    crs.PlateCarree = lambda: Affine2D()
    for name, module in (
        ("cartopy", package), ("cartopy.io", types.ModuleType("cartopy.io")),
        ("cartopy.io.shapereader", reader), ("cartopy.crs", crs),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    maps_module._coastlines.cache_clear()
    yield tmp_path / "shapefiles" / "natural_earth" / "physical" / "ne_110m_coastline.shp"
    maps_module._coastlines.cache_clear()


def test_coastlines_are_drawn_if_cartopy_has_them_on_disk(cartopy):
    assert not field_map(FIELD).axes[0].lines  # nothing is downloaded
    cartopy.parent.mkdir(parents=True)
    cartopy.touch()
    maps_module._coastlines.cache_clear()
    axes = rendered(field_map(FIELD)).axes[0]
    (line,) = axes.lines
    points = np.transpose(line.get_data()).tolist()
    assert [10, 59] in points
    assert [370, 59] in points
    assert axes.get_xlim() == (9.5, 13.5)
    assert not field_map(FIELD.drop_vars(["lat", "lon"])).axes[0].lines


def test_axes_of_cartopy_keep_their_projection(cartopy):
    class Projected(Axes):
        projection = "some"

        def add_geometries(self, shapes, crs, **_):
            self.added = list(shapes), crs

    axes = Figure().add_subplot(axes_class=Projected)
    field_map(FIELD, ax=axes)
    assert isinstance(axes.added[1], Affine2D)
    assert axes.get_aspect() == "auto"
    with pytest.raises(InvalidValueError, match="ax must be plain axes"):
        field_map(FIELD.drop_vars(["lat", "lon"]), ax=axes)


# ------------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    ("draw", "error", "says"),
    [
        (lambda: field_map(FIELD[0]), InvalidValueError, "must have two dims"),
        (lambda: field_map(FIELD[:0]), InvalidValueError, "must have two dims, with cells"),
        (lambda: field_map(FIELD.values), InvalidTypeError, "must be a DataArray, got ndarray"),
        (lambda: field_map(FIELD.astype(str)), InvalidTypeError, "must hold numbers, got <U"),
        (lambda: field_maps({}), InvalidValueError, "at least one map"),
        (lambda: difference_map(FIELD, FIELD[:2]), InvalidValueError, "reference has 2 cells"),
        (
            lambda: difference_map(FIELD, FIELD.assign_attrs(units="degC")),
            InvalidValueError, "the same units, got K and °C",
        ),
        (lambda: time_maps(FIELD), InvalidValueError, "field must have a time dim"),
        (lambda: time_maps(FIELD.values), InvalidTypeError, "field must be a DataArray"),
        (lambda: time_maps(LABEL, [2]), InvalidValueError, r"from 0 to 1, got \[2\]"),
        (lambda: time_maps(LABEL, []), InvalidValueError, "at least one position"),
        (lambda: error_maps(xr.Dataset()), InvalidValueError, "maps must have a rmse"),
        (lambda: error_maps(SKILL_MAP, "u", metric="skill"), InvalidValueError, "variable must be"),
        (lambda: error_maps(SKILL_MAP, metric="mae"), InvalidValueError, "metric must be"),
        (lambda: sample_density(xr.Dataset()), InvalidTypeError, "an opened sample store"),
        (lambda: sample_density(STORE, FIELD[:2]), InvalidValueError, "sizes of the store"),
        (lambda: sample_density(STORE, dims=["lat"]), InvalidValueError, "dims must be two of"),
        (
            lambda: sample_density(STORE.isel(samples=[])), InvalidValueError, "at least one sample"
        ),
        (lambda: spectrum_plot(POWER * 0), InvalidValueError, "power must be above 0"),
        (lambda: spectrum_plot(POWER[0]), InvalidValueError, "must have the dims 'source'"),
        (lambda: loss_curve({"epoch": [1]}), InvalidValueError, "must have a 'train_loss'"),
        (lambda: field_map(curved((1, 3), 0, 0, 0)), InvalidValueError, "two cells along each dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(draw, error, says):
    with pytest.raises(error, match=says):
        draw()


def test_colours_of_half_precision_do_not_overflow():
    field = xr.DataArray(np.array([[-60000, 60000], [30000, -30000]], "f2"), dims=["lat", "lon"])
    colors = []
    for dtype in ("f2", "f8"):
        mesh = field_map(field.astype(dtype)).axes[0].collections[0]
        colors.append(mesh.to_rgba(mesh.get_array()))
    np.testing.assert_array_equal(*colors)
