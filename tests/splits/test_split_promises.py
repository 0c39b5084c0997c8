"""What a split promises on real and awkward cubes, end to end, against brute force."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import dask.array as da
import iris_sample_data
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import ml4cube
from ml4cube.errors import EmptyPartError, InvalidValueError
from ml4cube.splits import (
    BlockKFold,
    BlockShuffleSplit,
    ForwardChaining,
    LeaveRegionOut,
    apply_split,
    assign_block_split,
    assign_region_split,
    assign_time_split,
    leakage_report,
)
from ml4cube.splits.cube import CubeView
from tests import oracle_splits as oracle
from tests.cubes import coordinates, dates_after

# --- buffers on the sphere and in time ------------------------------------------------------


@pytest.mark.parametrize("start", [0, 13, 36, 71])
@pytest.mark.parametrize("descending", [False, True])
def test_cells_count_across_the_seam_wherever_the_globe_is_cut_open(start, descending):
    lon = np.roll(np.arange(72) * 5.0, -start)[:: -1 if descending else 1]
    lon = np.where(lon >= 180, lon - 360, lon)
    cube = xr.Dataset({"t": (("lat", "lon"), np.zeros((4, 72)))}, {"lat": np.arange(4), "lon": lon})
    made = assign_block_split(cube, {"lon": 6}, 0.6, buffer=2, seed=start)["split"].values[0]
    plain = assign_block_split(cube, {"lon": 6}, 0.6, seed=start)["split"].values[0]
    steps = np.abs(np.arange(72)[:, None] - np.arange(72))
    near = np.minimum(steps, 72 - steps) <= 2
    expected = np.where((plain == 1) & (near & (plain != 1)).any(axis=1), 255, plain)
    np.testing.assert_array_equal(made, expected)
    # neighbours across the end, and nowhere else
    label = np.full(72, 255, "u1")
    label[0], label[71] = 0, 1
    report = leakage_report(cube.assign(split=("lon", label)))
    assert report.table.found["touching cells"] == 1


@pytest.mark.parametrize("lon", [np.arange(150, 230, 5.0), np.arange(0, 340, 5.0), [0, 90, 180]])
def test_what_does_not_go_round_has_no_seam(lon):
    lon = (np.array(lon) + 180) % 360 - 180
    cube = xr.Dataset({"t": (("lat", "lon"), np.zeros((4, lon.size)))}, {"lon": lon})
    assert CubeView.of(cube).lon_circle() is None


@pytest.mark.parametrize("over", [1, 3])
def test_a_meridian_that_stands_twice_is_refused_where_it_could_train_and_test(over):
    lon = np.arange(36 + over) * 10.0
    cube = xr.Dataset({"t": (("time", "lon"), np.zeros((8, lon.size)))}, {"lon": lon})
    regions = xr.DataArray(np.arange(lon.size) // 9, dims="lon")
    for act in (
        lambda: assign_block_split(cube, {"lon": 4}, 0.6, buffer=1),
        lambda: assign_block_split(cube, {"lon": 4}, 0.6, cyclic=False),
        lambda: assign_region_split(cube, regions, test=[0]),
        lambda: next(BlockKFold(3, {"lon": 4}).split_cube(cube)),
        lambda: next(LeaveRegionOut(regions).split_cube(cube)),
    ):
        with pytest.raises(InvalidValueError, match=r"ds\.isel\(lon=slice\(0, 36\)\)"):
            act()
    assign_block_split(cube, {"time": 2}, 0.6)
    assign_block_split(cube.isel(lon=slice(0, 36)), {"lon": 4}, 0.6, buffer=1)
    # labels by hand, or as they were made before
    label = np.full(lon.size, 255, "u1")
    label[:over], label[-over:] = 1, 0
    label[10:20] = 1
    report = leakage_report(cube.assign(split=("lon", label)))
    assert report.leaks
    assert "meridian that occurs twice" in report.verdict
    assert report.table.found["shared cells"] == 8 * over
    assert report.table.found["separation along lon"] == 0
    label[-over:] = 1
    label[30:34] = 0
    assert leakage_report(cube.assign(split=("lon", label))).table.found["shared cells"] == 0


def scattered_cubes():
    rng = np.random.default_rng(0)
    grid = xr.Dataset(
        {"t": (("time", "lat", "lon"), rng.normal(size=(12, 12, 16)).astype("f4"))},
        {"time": np.arange(12), "lat": np.linspace(-55, 55, 12), "lon": np.arange(16) * 22.5},
    )
    yield "stacked", grid.stack(p=("lat", "lon")), {"p": 16}
    places = {
        "lon": ("station", np.tile([0.0, 90, 180, 270], 10)),
        "lat": ("station", np.repeat(np.linspace(-50, 50, 10), 4)),
    }
    values = rng.normal(size=(12, 40))
    yield "stations", xr.Dataset({"t": (("time", "station"), values)}, places), {"station": 2}
    track = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(72) * np.timedelta64(1, "h"),
        "lon": ("time", np.arange(72) * 10.0 % 360),
    }
    track = xr.Dataset({"t": ("time", rng.normal(size=72))}, track)
    yield "track, no latitude", track, {"time": 6}
    track = track.assign_coords(lat=("time", np.linspace(-80, 80, 72)))
    yield "track", track, {"time": 6}


@pytest.mark.parametrize(
    ("cube", "blocks"), [pytest.param(ds, size, id=name) for name, ds, size in scattered_cubes()]
)
def test_longitudes_of_scattered_places_are_no_axis(cube, blocks):
    labelled = assign_block_split(cube, blocks, 0.5, buffer=1, seed=4)
    assert json.loads(labelled.split.attrs["ml4cube_split"])["plan"]["cyclic"] == []
    assign_block_split(cube, blocks, 0.5, cyclic=False)
    assert len(list(BlockKFold(3, blocks).split_cube(cube))) == 3
    assert leakage_report(labelled).table.found["shared cells"] == 0
    (dim,) = blocks
    with pytest.raises(InvalidValueError, match="cyclic=True needs a longitude along a dim of its"):
        assign_block_split(cube, blocks, 0.5, cyclic=True)
    if "lat" in cube.coords and dim == "time":
        with pytest.raises(InvalidValueError, match=r"lie along 'time', as those of a track"):
            assign_block_split(cube, blocks, 0.5, buffer="100km")


def test_times_in_no_order_or_that_stand_twice_are_not_passed_over():
    rng = np.random.default_rng(0)
    days = np.r_[0:25, 20:40]
    time = np.datetime64("2000-01-01", "ns") + days * np.timedelta64(1, "D")
    cube = xr.Dataset({"t": (("time", "y", "x"), rng.normal(size=(45, 4, 4)))}, {"time": time})
    numbered = cube.assign_coords(time=days)
    for ds in (cube, numbered, cube.isel(time=rng.permutation(45))):
        for keywords in ({"buffer": 1}, {"gap": 1}, {"buffer": {"time": 2}}):
            with pytest.raises(InvalidValueError, match=r"must be sorted; .*ds\.sortby\('time'\)"):
                assign_block_split(ds, {"time": 5}, 0.6, **keywords)
    for ds in (cube, cube.sortby("time"), numbered.isel(time=rng.permutation(45))):
        labelled = assign_block_split(ds, {"time": 5}, 0.6, seed=0)
        part, at = labelled.split.values[:, 0, 0], ds.time.values
        shared = np.isin(at[part == 0], at[part == 1]).sum()
        report = leakage_report(labelled)
        assert shared
        assert report.leaks
        assert "are at a time that occurs twice" in report.verdict
        assert report.table.found["shared cells"] == 16 * shared
        # all places share their times
        table = leakage_report(assign_block_split(ds, {"y": 1, "x": 2}, 0.5)).table
        assert table.found["shared cells"] == 0
    # a buffer in steps counts times
    for ds in (cube.sortby("time"), cube.sortby("time", ascending=False)):
        labels = assign_block_split(ds, {"time": 5}, 0.6, buffer=2, seed=0).split.values[:, 0, 0]
        day = (ds.time.values - time[0]) // np.timedelta64(1, "D")
        assert np.abs(np.subtract.outer(day[labels == 1], day[labels == 0])).min() == 3


def test_radians_are_places_as_degrees_are():
    lat, lon = np.linspace(80, -80, 9), np.arange(-180.0, 180, 30)
    cube = xr.Dataset(
        {"t": (("time", "lat", "lon"), np.random.default_rng(0).normal(size=(4, 9, 12)))},
        {"lat": ("lat", lat, {"units": "degrees_north"}), "lon": lon},
    )
    turned = cube.assign_coords(
        lat=("lat", np.deg2rad(lat), {"units": "radian"}),
        lon=("lon", np.deg2rad(lon), {"units": "Radians"}),
    )
    made = []
    for ds in (cube, turned):
        for buffer in ("2300km", 1):
            label = assign_block_split(ds, {"lat": 3, "lon": 4}, 0.6, buffer=buffer)["split"]
            made.append(label.values)
        assert CubeView.of(ds).lon_circle() == ("lon", 12)
    np.testing.assert_array_equal(made[0], made[2])
    np.testing.assert_array_equal(made[1], made[3])
    assert (made[0] == 255).any()
    split = ("lon", np.array([1] * 6 + [255, 0, 0, 255, 255, 255], "u1"))
    points = xr.Dataset({"t": ("p", [1.0, 1.0])}).assign_coords(
        lat=("p", [70.0, 10.0], {"units": "degrees"}), lon=("p", [100.0, -170.0])
    )
    in_radians = points.assign_coords(
        {n: ("p", np.deg2rad(points[n].values), {"units": "radian"}) for n in ("lat", "lon")}
    )
    found = [
        leakage_report(ds.assign(split=split), deployment=where).distances["space"]
        for ds in (cube, turned)
        for where in (points, in_radians)
    ]
    for other in found[1:]:
        assert other[0] == "km"
        for name, curve in found[0][1].items():
            np.testing.assert_allclose(curve, other[1][name], rtol=1e-9)


@settings(max_examples=25)
@given(
    calendar=st.sampled_from(["standard", "360_day", "noleap"]),
    steps=st.lists(st.integers(0, 45), min_size=8, max_size=16),
    days=st.integers(1, 60),
    order=st.sampled_from([1, -1]),
    seed=st.integers(0, 99),
)
def test_buffers_in_time_on_irregular_axes(calendar, steps, days, order, seed):
    when = np.cumsum(steps)[::order]
    cube = xr.Dataset({"t": (("time", "x"), np.zeros((when.size, 2)))})
    cube["time"] = dates_after("1999-12-01", when, calendar)
    cube = cube.chunk({"time": 3})
    options = {"split": 0.6, "val": 0.2, "seed": seed}
    plain = assign_block_split(cube, {"time": 2}, **options)["split"].transpose("time", "x").values
    near = [lambda i, j: abs(when[i] - when[j]) <= days, lambda i, j: True]
    expected = oracle.buffered(plain, near)
    if not (expected == 1).any():
        with pytest.raises(EmptyPartError):
            assign_block_split(cube, {"time": 2}, buffer=f"{days}D", **options)
        return
    made = assign_block_split(cube, {"time": 2}, gap=f"{days}D", **options)["split"]
    np.testing.assert_array_equal(made.transpose("time", "x").values, expected)


# --- reading nothing ------------------------------------------------------------------------


def unreadable_cube():
    def read(block):
        raise AssertionError("read")

    lazy = da.zeros((12, 6, 8), chunks=(4, 3, 8), dtype="float32")
    data = lazy.map_blocks(read, meta=np.empty((0, 0, 0), "float32"))
    time = np.datetime64("2000-01-01", "ns") + 30 * np.arange(12) * np.timedelta64(1, "D")
    return xr.Dataset({"t": (("time", "lat", "lon"), data)}, {"time": time})


@pytest.mark.filterwarnings("ignore:stratify")
def test_no_cell_is_read_where_all_count():
    cube = unreadable_cube()
    with pytest.raises(AssertionError, match="read"):
        cube["t"].values  # noqa: B018
    zones = xr.DataArray([0, 0, 1, 1, 2, 2], dims="lat")
    sizes = {"time": 3, "lat": 2}
    made = [
        assign_block_split(cube, sizes, 0.6, val=0.2, buffer={"time": 1}),
        assign_block_split(cube, sizes),
        assign_block_split(cube, sizes, stratify="season"),
        assign_block_split(cube, sizes, stratify=zones),
        assign_time_split(cube, 0.6, gap="30D"),
        assign_region_split(cube, zones, test=[1]),
        *BlockKFold(3, sizes).split_cube(cube),
        *BlockShuffleSplit(2, sizes).split_cube(cube),
        *ForwardChaining(3, gap=1).split_cube(cube),
        *LeaveRegionOut(zones, buffer={"lat": 1}, background="train").split_cube(cube),
    ]
    assert "split" not in cube
    list(BlockKFold(3, sizes, cube=cube).split(np.zeros((576, 1))))
    for labelled in made:
        assert labelled["split"].chunks == ((4, 4, 4), (3, 3), (8,))
        assert {0, 1} <= set(np.unique(labelled["split"].values))


# --- the recipe in another process ----------------------------------------------------------

REBUILD = """
import sys
import numpy as np, xarray as xr
from ml4cube.splits import apply_split

for path in sys.argv[1:]:
    ds = xr.open_zarr(path, consolidated=False)
    labels = [name for name in ds.data_vars if name.startswith("label")]
    assert len(labels) == 9, labels
    bare = ds.drop_vars(labels).transpose("lon", "time", "lat").chunk({"lon": 3, "time": -1})
    for name in labels:
        assert ds[name].dtype == np.uint8
        made = apply_split(bare, ds[name].attrs["ml4cube_split"])["split"]
        np.testing.assert_array_equal(made.transpose(*ds[name].dims).values, ds[name].values)
        assert made.attrs["ml4cube_split"] == ds[name].attrs["ml4cube_split"]
print("rebuilt")
"""


@pytest.mark.slow
def test_recipes_rebuild_labels_in_another_process_from_reopened_stores(tmp_path):
    rng = np.random.default_rng(0)
    time = xr.date_range("2000-01-01", periods=12, freq="MS", calendar="360_day", use_cftime=True)
    cube = xr.Dataset(
        {
            "t": (("time", "lat", "lon"), rng.random((12, 6, 12)).astype("float32")),
            "biome": (("lat", "lon"), rng.integers(0, 4, (6, 12))),
        },
        {
            "time": time,
            "lat": ("lat", np.linspace(50, 80, 6), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(0.0, 360, 30), {"units": "degrees_east"}),
        },
    ).chunk({"time": 5, "lat": 3})
    zones = xr.DataArray(list("aabbcc"), dims="lat")
    sizes = {"time": 4, "lat": 2, "lon": 4}
    labels = [
        assign_block_split(cube, sizes, 0.7, val=0.1, buffer={"time": "30D", "lat": "600km"}),
        assign_block_split(cube, sizes, stratify={"t": 3}, valid="t"),
        assign_time_split(cube, 0.6, val=0.2, gap="30D"),
        assign_region_split(cube, zones, test="b", buffer="700km"),
        assign_region_split(cube, "biome", 0.6, seed=1),
        next(BlockKFold(3, sizes, buffer=1).split_cube(cube)),
        next(BlockShuffleSplit(3, sizes, gap="30D").split_cube(cube)),
        next(ForwardChaining(3, gap=1).split_cube(cube)),
        next(LeaveRegionOut("biome").split_cube(cube)),
    ]
    for number, made in enumerate(labels):
        cube[f"label{number}"] = made["split"]
    paths = []
    for zarr_format in (2, 3):
        paths.append(str(tmp_path / f"cube{zarr_format}.zarr"))
        cube.to_zarr(paths[-1], zarr_format=zarr_format, consolidated=False)
    makers = {json.loads(cube[f"label{i}"].attrs["ml4cube_split"])["made_by"] for i in range(9)}
    assert len(makers) == 7
    done = subprocess.run(
        [sys.executable, "-c", REBUILD, *paths], capture_output=True, text=True, check=False
    )
    assert done.stdout == "rebuilt\n", done.stderr


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
def test_a_recipe_is_refused_where_cells_lie_elsewhere(calendar: str) -> None:
    time = xr.date_range("2000-01-01", periods=12, freq="MS", calendar=calendar, use_cftime=None)
    ds = xr.Dataset(
        {"t": (("time", "lat"), np.zeros((12, 6)))},
        {"time": time, "lat": np.linspace(50, 60, 6, dtype="float32")},
    )
    recipe = assign_block_split(ds, {"time": 3}).split.attrs["ml4cube_split"]
    as_float64 = ds.assign_coords(lat=ds.lat.astype("float64"))
    xr.testing.assert_equal(
        apply_split(as_float64, recipe).split.drop_vars("lat"),
        apply_split(ds, recipe).split.drop_vars("lat"),
    )
    assert "split" in apply_split(ds.drop_vars(["lat", "time"]), recipe)
    for other, message in (
        (ds.isel(lat=slice(None, None, -1)), "'lat' runs from 50.0 to 60.0"),
        (ds.assign_coords(lat=ds.lat + 1), "here it runs from 51.0 to 61.0"),
        (ds.isel(time=slice(None, None, -1)), "'time' runs from 2000-01-01"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_split(other, recipe)


def test_a_recipe_is_refused_one_step_away_on_an_axis_of_large_numbers() -> None:
    hours = ("time", np.arange(1_000_000, 1_000_048), {"units": "hours since 1900-01-01"})
    ds = xr.Dataset({"t": ("time", np.zeros(48))}, {"time": hours})
    recipe = assign_block_split(ds, {"time": 12}).split.attrs["ml4cube_split"]
    assert "split" in apply_split(ds, recipe)
    with pytest.raises(ValueError, match="here it runs from 1000001"):
        apply_split(ds.assign_coords(time=ds.time + 1), recipe)


def test_a_cube_with_periods_as_times_is_split() -> None:
    months = pd.period_range("2000-01", periods=12, freq="M")
    ds = xr.Dataset({"t": ("time", np.zeros(12))}, {"time": months})
    label = assign_block_split(ds, {"time": 3}).split
    recipe = label.attrs["ml4cube_split"]
    assert json.loads(recipe)["ends"] == {"time": ["2000-01", "2000-12"]}
    assert (apply_split(ds, recipe).split.values == label.values).all()


# --- blocks that nobody chose ---------------------------------------------------------------


def field(**sizes):
    """A cube of these sizes, coordinates for time, lat and lon, and no others."""
    made = coordinates({dim: n for dim, n in sizes.items() if dim in ("time", "lat", "lon")})
    return xr.Dataset({"t": (tuple(sizes), np.zeros(tuple(sizes.values()), "float32"))}, made)


def curvilinear():
    lat, lon = np.meshgrid(np.linspace(40, 60, 50), np.linspace(0, 30, 80), indexing="ij")
    places = {"nav_lat": (("south", "west"), lat), "nav_lon": (("south", "west"), lon)}
    return field(time=4, depth=30, south=50, west=80).assign_coords(places)


def iris(name):
    with xr.open_dataset(f"{iris_sample_data.path}/{name}.nc") as ds:
        return ds[[var for var, v in ds.data_vars.items() if v.ndim == 3]].load()


def stations():
    lat, lon = np.linspace(-40, 40, 90), np.linspace(0, 80, 90)
    cube = field(time=400, station=90)
    return cube.assign_coords(lat=("station", lat), lon=("station", lon))


def no_coordinates():
    return field(time=2, level=30, lat=60, lon=80).drop_vars(["time", "lat", "lon"])


# a cube, and the dims along which it is cut
UNASKED = {
    "ostia": (lambda: iris("ostia_monthly"), {"longitude"}),
    "A1B": (lambda: iris("A1B_north_america"), {"time"}),
    "two months": (lambda: field(time=2, level=3, lat=241, lon=480), {"lat", "lon"}),
    "no coordinates": (no_coordinates, {"lat", "lon"}),
    "members": (lambda: field(member=12, time=3, level=20, lat=40, lon=90), {"lat", "lon"}),
    "series": (lambda: field(time=3650), {"time"}),
    "stations": (stations, {"time"}),
    "curvilinear": (curvilinear, {"south", "west"}),
    "Sentinel": (lambda: field(time=70, band=13, y=64, x=64), {"y", "x"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNASKED)
def test_blocks_that_nobody_chose_seldom_touch_train_for_any_chunks(name):
    make, expected = UNASKED[name]
    cube = make()
    var = next(iter(cube.data_vars))
    step = cube.chunk({dim: 1 if n < 100 else 10 for dim, n in list(cube.sizes.items())[:1]})
    found = []
    for seed, split, val in ((0, 0.8, 0.0), (1, 0.8, 0.1), (2, 0.5, 0.0)):
        made = []
        for chunked in (step, cube, cube.chunk().transpose(*reversed(cube[var].dims))):
            with pytest.warns(UserWarning, match="no block_size is given") as told:
                labelled = assign_block_split(chunked, split=split, val=val, seed=seed)
            assert len(told) == 1
            made.append(labelled["split"].transpose(*cube[var].dims).values)
        assert all((labels == made[0]).all() for labels in made[1:])
        wraps = ["lon" in dim and np.ptp(cube[dim].values) > 300 for dim in cube[var].dims]
        found.append(oracle.touching(made[0], wraps))
        assert abs((made[0] == 1).mean() - split) < 0.05
        cut = {
            dim
            for axis, dim in enumerate(cube[var].dims)
            if (made[0] != made[0].take([0], axis)).any()
        }
        assert cut == expected
    assert max(found) <= 0.3
    if name in ("ostia", "A1B", "two months"):  # our own report measures the same
        rows = leakage_report(labelled, var=var).table
        assert rows.loc["touching cells", "found"] == pytest.approx(found[-1], abs=0.03)


def test_blocks_of_places_in_no_order_are_not_said_to_lie_apart():
    rng = np.random.default_rng(0)
    places = {"lat": ("cell", rng.uniform(-90, 90, 60)), "lon": ("cell", rng.uniform(0, 360, 60))}
    mesh = xr.Dataset({"a": ("cell", rng.normal(size=60))}, places)
    with pytest.warns(UserWarning, match=r"stations along 'cell'.*assign_region_split") as told:
        assign_block_split(mesh)
    assert "touch another" not in str(told[0].message)  # nobody knows
    assert "suggest_block_size" not in str(told[0].message)  # which refuses such a cube


def test_the_warning_names_the_blocks_and_a_line_that_chooses_by_the_data():
    ds = iris("ostia_monthly")
    with pytest.warns(UserWarning, match="range of autocorrelation was not estimated") as told:
        assign_block_split(ds)
    said = str(told[0].message)
    assert told[0].filename == __file__
    assert "10 blocks of {'longitude': 44} cells, whole along 'time', 'latitude'" in said
    line = said.partition("block_size=")[2].partition(")")[0] + ")"
    assert line == "ml4cube.splits.suggest_block_size(ds, 'surface_temperature')"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = eval(line, {"ml4cube": ml4cube, "ds": ds})
        assign_block_split(ds, sizes)
        assign_block_split(ds, split=1.0)  # one part alone needs no blocks
    with pytest.warns(UserWarning, match="no block_size is given"):
        assert len(list(BlockKFold(4).split_cube(ds))) == 4


@pytest.mark.parametrize("cells", [24, 25, 40])
def test_the_warning_says_how_many_cells_touch_around_the_globe(cells):
    lon = np.arange(cells) * 360 / cells
    with pytest.warns(UserWarning, match="no block_size") as caught:
        made = assign_block_split(xr.Dataset({"t": ("lon", np.zeros(cells))}, {"lon": lon}))
    grid = json.loads(made.split.attrs["ml4cube_split"])["plan"]["grid"]
    block = np.arange(cells) // grid["tile"][0]
    touches = (block != np.roll(block, 1)) | (block != np.roll(block, -1))
    most = max(touches[block == b].mean() for b in block)
    assert f"Up to {most:.0%} of" in str(caught[0].message)


def test_default_blocks_of_a_store_promise_nothing_about_neighbours():
    samples = xr.Dataset({"t": (("samples", "time"), np.arange(400.0).reshape(100, 4))})
    with pytest.warns(UserWarning, match="by their order in the store") as told:
        assign_block_split(samples)
    assert "touch" not in str(told[0].message)
