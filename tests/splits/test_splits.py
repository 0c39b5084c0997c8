"""Labels on cubes: the same bits whatever the cube's make, one per block, rebuilt from attrs."""

import collections
import datetime
import json

import cftime
import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.cube.chunks.files import LocalFiles
from ml4cube.errors import CubeError, EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.preprocessing import assign_mask, fill_nan_values
from ml4cube.splits import (
    BlockKFold,
    ForwardChaining,
    LeaveRegionOut,
    apply_split,
    assign_block_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    create_split,
    estimate_range,
)
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import label_lookup
from ml4cube.splits.leakage.duplicates import find_duplicates
from ml4cube.splits.validity import valid_mask
from tests import oracle_splits as oracle
from tests.cubes import cell_id_cube, no_compute

SHAPE = {"time": 12, "lat": 9, "lon": 10}
CHUNKINGS = [None, {"time": 5, "lat": 4}, {"time": 1}, {"lat": 9, "lon": 3}]


def label_of(cube, **options):
    return assign_block_split(cube, **options)["split"].transpose(*SHAPE)


@settings(max_examples=25)
@given(
    order=st.permutations(list(SHAPE)),
    chunks=st.sampled_from(CHUNKINGS),
    sizes=st.sampled_from([{"time": 4}, {"lon": 3, "time": 5}, {"lat": 2, "lon": 4, "time": 3}]),
    buffer=st.sampled_from([None, 1, {"time": 1}]),
    seed=st.integers(0, 5),
    scheduler=st.sampled_from(["synchronous", "threads"]),
    counting=st.sampled_from(
        [{}, {"valid": "a"}, {"stratify": {"a": 3}}, {"stratify": "month", "valid": "a"}]
    ),
)
@pytest.mark.filterwarnings("ignore:stratify")
def test_the_make_of_a_cube_changes_no_bit(order, chunks, sizes, buffer, seed, scheduler, counting):
    options = {"block_size": sizes, "split": 0.6, "val": 0.1, "seed": seed, "buffer": buffer}
    options |= counting
    made = {"gaps": 0.3, "seed": seed}
    plain = label_of(cell_id_cube(SHAPE, "float64", **made), **options)
    other = cell_id_cube(SHAPE, "float64", dim_order=tuple(order), dask_chunks=chunks, **made)
    with dask.config.set(scheduler=scheduler):
        made = label_of(other, **options)
        np.testing.assert_array_equal(made.values, plain.values)
        part = {"time": slice(3, 9), "lon": slice(2, 7)}
        np.testing.assert_array_equal(made.isel(part).values, plain.isel(part).values)
    assert made.attrs["ml4cube_split"] == plain.attrs["ml4cube_split"]


def globe(chunks=None):
    lat, lon = np.linspace(80, -80, 9), np.arange(-170.0, 180, 30)
    values = np.zeros((3, lat.size, lon.size))
    cube = xr.Dataset({"a": (tuple(SHAPE), values)}, {"lat": lat, "lon": lon})
    return cube if chunks is None else cube.chunk(chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("along", "chunks"),
    [
        ({"lat": "2300km", "lon": "2300km"}, None),
        ({"lon": "2300.0 KM", "lat": "2300km"}, {"lat": 4}),
        ({"lat": "2300km"}, {"lon": 5}),
        ({"lon": "2300km"}, {"time": 2, "lat": 2, "lon": 7}),
    ],
)
def test_kilometres_are_one_distance_over_both_dims(chunks, along):
    options = {"block_size": {"time": 1, "lat": 3, "lon": 4}, "split": 0.8, "val": 0.1, "seed": 3}
    cube = globe(chunks)
    lat, lon = cube["lat"].values, cube["lon"].values
    expected = oracle.buffered(
        label_of(globe(), **options).values,
        [oracle.near_in_cells(3, 1), lambda i, j: True, lambda i, j: True],
        lambda a, b: oracle.great_circle_km(lat[a[1]], lon[a[2]], lat[b[1]], lon[b[2]]) <= 2300,
    )
    assert {0, 1, 2, 255} == set(np.unique(expected))
    label = label_of(cube, buffer={**along, "time": 1}, **options)
    np.testing.assert_array_equal(label.values, expected)
    recipe = json.loads(label.attrs["ml4cube_split"])
    assert recipe["plan"]["buffer"] == {"lat": "2300km", "time": 1}
    recipe["plan"]["buffer"] = {**along, "time": 1}  # as recipes once held it
    np.testing.assert_array_equal(apply_split(cube, recipe)["split"].values, expected)


@pytest.mark.parametrize(
    ("along", "says"),
    [
        ({"lat": "800km", "lon": "300km"}, "'800km' along 'lat' and '300km' along 'lon'"),
        ({"lat": "800km", "lon": "0km"}, "'800km' along 'lat' and '0km' along 'lon'"),
        ({"lon": "800km", "lat": 2, "time": 1}, "2 along 'lat' and '800km' along 'lon'"),
        ({"lat": "800km", "lon": 0}, "'800km' along 'lat' and 0 along 'lon'"),
    ],
)
def test_kilometres_that_differ_by_dim_are_refused_before_anything_is_read(along, says):
    cube = globe({"lat": 3})
    with (
        dask.config.set(scheduler=no_compute),
        pytest.raises(InvalidValueError, match=f"{says}.*pass that distance once") as caught,
    ):
        assign_block_split(cube, {"lat": 3, "lon": 4}, buffer=along, valid="a")
    assert "{'lat': '800km'}" in str(caught.value)


def dated_globe():
    return globe().assign_coords(time=np.array(["2000-01", "2000-02", "2000-03"], "M8[ns]"))


@pytest.mark.parametrize(
    ("sizes", "asked", "says"),
    [
        ({"lat": 3, "lon": 4}, {"gap": "30D"}, "gap is '30D' along 'time'"),
        ({"lat": 3, "lon": 4, "time": 3}, {"gap": 1}, "gap is 1 along 'time'"),
        ({"lat": 3, "lon": 4}, {"buffer": "30D"}, "buffer is '30D' along 'time'"),
        ({"lat": 3, "lon": 4}, {"buffer": {"lat": 1, "time": 1}}, "buffer is 1 along 'time'"),
        ({"time": 1}, {"buffer": "200km"}, "buffer is '200km' along 'lat' and 'lon'"),
        ({"time": 1, "lat": 3}, {"buffer": {"lon": 2}}, "buffer is 2 along 'lon'"),
    ],
)
def test_a_buffer_that_could_keep_nothing_apart_is_refused(sizes, asked, says):
    with pytest.raises(InvalidValueError, match=f"{says}, but the split is not cut there"):
        assign_block_split(dated_globe(), sizes, **asked)
    with pytest.raises(InvalidValueError, match=says):
        list(BlockKFold(2, sizes, **asked).split_cube(dated_globe()))


def test_a_buffer_of_nothing_and_one_along_one_of_two_cut_dims_are_taken():
    cube = dated_globe()
    plain = assign_block_split(cube, {"lat": 3, "lon": 4}, gap="0D")["split"]
    assert 255 not in plain.values
    assert 255 in assign_block_split(cube, {"lat": 3}, buffer="2300km")["split"].values
    zones = xr.DataArray(np.repeat([0, 1, 2], 3), dims="lat", name="zones")
    with pytest.raises(InvalidValueError, match=r"'30D' along 'time'.* cut along \['lat'\]"):
        assign_region_split(cube, zones, test=[1], buffer="30D")
    with pytest.raises(InvalidValueError, match="'30D' along 'time'"):
        list(LeaveRegionOut(zones, buffer="30D").split_cube(cube))


@pytest.mark.parametrize(
    ("coord", "value", "says"),
    [
        ("lat", np.nan, "-90 to 90 in 'lat', got 1 others \\(nan at 2"),
        ("lat", 90.5, "-90 to 90 in 'lat', got 1 others \\(90.5 at 2"),
        ("lon", np.inf, "-720 to 720 in 'lon', got 1 others \\(inf at 2"),
    ],
)
def test_kilometres_over_coordinates_that_are_no_degrees_are_refused(coord, value, says):
    cube = globe()
    values = cube[coord].values.copy()
    values[2] = value
    cube = cube.assign_coords({coord: values})
    with pytest.raises(InvalidValueError, match=says):
        assign_block_split(cube, {"lat": 3, "lon": 4}, buffer="300km")
    assign_block_split(cube, {"lat": 3, "lon": 4}, buffer=1)


def test_one_label_per_block_and_fractions_within_a_block():
    cube = cell_id_cube({"time": 40, "lat": 30, "lon": 30}, "float64")
    made = assign_block_split(cube, [("lat", 3), ("time", 4), ("lon", 3)], 0.7, val=0.1)["split"]
    label = made.transpose("time", "lat", "lon").values
    blocks = label.reshape(10, 4, 10, 3, 10, 3).transpose(0, 2, 4, 1, 3, 5).reshape(1000, -1)
    assert (blocks == blocks[:, :1]).all()
    for code, share in {1: 0.7, 2: 0.1, 0: 0.2}.items():
        assert abs((label == code).mean() - share) <= 0.001
    assert list(made.attrs["flag_values"]) == [1, 0, 2, 255]
    assert made.attrs["flag_meanings"] == "train test val excluded"
    assert made.dtype == np.uint8
    assert ((label == True) == (label == 1)).all()  # noqa: E712 - as users write it
    assert ((label == False) == (label == 0)).all()  # noqa: E712


@pytest.mark.parametrize("valid", [None, xr.DataArray([True, False, True], dims="x")])
def test_a_short_last_block_counts_by_its_cells(valid):
    cube = cell_id_cube({"time": 9, "x": 3}, "float64")
    for seed in range(8):
        label = assign_block_split(cube, {"time": 4}, 5 / 9, valid=valid, seed=seed)["split"]
        assert float((label == 1).mean()) == 5 / 9


def twice(times):
    return np.repeat(xr.date_range("2000", periods=times // 2, use_cftime=False).values, 2)


@pytest.mark.parametrize(
    ("sizes", "coords", "buffer", "change"),
    [
        ({"time": 40}, {"time": twice(40)}, 1, lambda ds: ds.drop_vars("time")),
        (
            {"y": 16, "x": 18},
            {"lat": ("y", np.linspace(-80, 80, 16)), "lon": ("x", np.arange(18) * 10.0)},
            {"y": "900km"},
            lambda ds: ds.assign_coords(lat=ds.lat * 0.3),
        ),
        ({"x": 40}, {}, 1, lambda ds: ds.drop_attrs()),
    ],
)
def test_labels_are_looked_up_only_where_they_are_those_of_the_cube(sizes, coords, buffer, change):
    values = np.random.default_rng(0).normal(size=tuple(sizes.values()))
    ds = xr.Dataset({"a": (tuple(sizes), values)}, coords).chunk({next(iter(sizes)): 8})
    ds = assign_block_split(ds, dict.fromkeys(sizes, 8), 0.6, buffer=buffer)
    assert label_lookup(change(ds), "split") is None
    positions = [np.arange(n) for n in sizes.values()]
    # chunks of other variables and a label that is in memory change none
    for same in (ds, ds.assign(a=ds.a.load()), ds.assign(a=ds.a.chunk(3)), ds.persist()):
        np.testing.assert_array_equal(label_lookup(same, "split")(*positions), ds.split.values)


@pytest.mark.parametrize("calendar", ["standard", "360_day"])
@pytest.mark.parametrize("gap", [None, 2, "61D", np.timedelta64(61, "D")])
def test_time_split_is_forward_with_a_gap(calendar, gap):
    cube = cell_id_cube({"time": 20, "x": 3}, "float64")
    cube["time"] = xr.date_range("2000-01-01", periods=20, freq="MS", calendar=calendar)
    made = assign_time_split(cube, 0.6, val=0.2, gap=gap)["split"]
    rows = made.transpose("time", ...).values.reshape(20, -1)
    assert (rows == rows[:, :1]).all()
    steps = rows[:, 0].tolist()
    lost = 0 if gap is None else 2
    assert steps == [1] * (12 - lost) + [255] * lost + [2] * 4 + [0] * 4


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("gap", [None, 1, "1D"])
def test_cells_of_one_time_share_a_part_also_where_it_stands_twice(descending, gap):
    days = np.array([0, 1, 2, 2, 2, 3, 4, 5, 5, 6])[:: -1 if descending else 1]
    time = np.datetime64("2000-01-01", "ns") + days * np.timedelta64(1, "D")
    cube = xr.Dataset({"t": (("time", "x"), np.zeros((10, 2)))}, {"time": time})
    made = assign_time_split(cube, 0.6, val=0.2, gap=gap)["split"]
    part = {
        day: set(made.transpose("time", "x").values[days == day].ravel().tolist())
        for day in range(7)
    }
    lost = {1} if gap is None else {255}
    # 12 of 20 cells lie up to day 3; the cut at 16 is as near to 14 as to 18: the earlier one
    assert part == {0: {1}, 1: {1}, 2: {1}, 3: lost, 4: {2}, 5: {0}, 6: {0}}
    again = apply_split(cube.chunk({"time": 3}), made.attrs["ml4cube_split"])["split"]
    np.testing.assert_array_equal(again.values, made.values)
    assert (assign_time_split(cube, 1.0, gap=gap)["split"] == 1).all()


def test_a_time_split_counts_valid_cells():
    cube = cell_id_cube({"time": 10, "x": 3}, "float64")
    label = assign_time_split(cube, 0.5, valid=cube["time"] > cube["time"][3])["split"]
    assert label.isel(x=0).values.tolist() == [1] * 7 + [0] * 3
    valid = cube["time"].isin(cube["time"][[4, 5]])
    with pytest.raises(EmptyPartError, match="takes every valid cell of the train part"):
        assign_time_split(cube, 0.5, gap=1, valid=valid)


def test_random_split_warns_and_is_the_same_for_any_chunking():
    cube = cell_id_cube(SHAPE, "float64")
    with pytest.warns(UserWarning, match="neighbour"):
        plain = assign_rand_split(cube, 0.7, val=0.1)["split"]
    with pytest.warns(UserWarning, match="neighbour"):
        other = assign_rand_split(cube.chunk({"lon": 3}), 0.7, val=0.1)["split"]
    np.testing.assert_array_equal(plain.values, other.values)
    assert abs((plain.values == 1).mean() - 0.7) < 0.001


@pytest.mark.parametrize("as_arrays", [False, True])
def test_create_split_shares_every_cell_out(as_arrays):
    cube = cell_id_cube({"time": 10, "x": 4}, "float64", names=("a", "b", "c"))
    made = assign_block_split(cube, {"time": 2}, 0.6)
    data = {name: made[name].values for name in made.data_vars} if as_arrays else made
    X_train, X_test, y_train, y_test = create_split(data, "a", exclude_vars=["c"])
    assert X_train.shape[-1] == X_test.shape[-1] == 1  # b alone
    assert sorted(np.ravel(y_train)) == sorted(made["a"].values[made["split"].values == 1])
    assert sorted([*np.ravel(y_train), *np.ravel(y_test)]) == sorted(made["a"].values.ravel())
    for axis in (3, -4, 9):
        axes = "-3 to 2" if as_arrays else "-2 to 1"
        with pytest.raises(InvalidValueError, match=f"must be from {axes}, got {axis}"):
            create_split(data, "a", stack_axis=axis)


@pytest.mark.parametrize("like", [(3,), (2, 3), (4, 2, 3)])
def test_a_mask_of_samples_may_lack_dims_in_create_split(like):
    rng = np.random.default_rng(0)
    cells, mask = rng.random((4, 2, 3)), rng.random(like) < 0.7
    data = {"a": cells, "b": 2 * cells, "split": np.array([1, 0, 1, 0]), "filter_mask": mask}
    whole = data | {"filter_mask": np.broadcast_to(mask, (4, 2, 3))}
    for part, right in zip(create_split(data, "b"), create_split(whole, "b"), strict=True):
        np.testing.assert_array_equal(part, right)
    with pytest.raises(InvalidValueError, match=r"got \(2, 4\) for 'filter_mask'"):
        create_split(data | {"filter_mask": np.ones((2, 4))}, "b")


def test_a_gap_of_the_mask_is_outside_it_in_create_split():
    made = assign_block_split(
        cell_id_cube({"time": 6, "x": 4}, "float64", names=("a", "b")), {"time": 2}, 0.5
    )
    mask = xr.DataArray([1.0, np.nan, 0.0, 1.0], dims="x")  # bools after a reindexing
    found, right = (create_split(made.assign(filter_mask=m), "a") for m in (mask, mask == 1))
    for part, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_samples_come_first_in_create_split_whatever_the_order_of_dims():
    labels = np.tile([1, 0, 1, 1], (2, 1))
    data = np.arange(8.0).reshape(2, 4)
    ds = xr.Dataset({"a": (("x", "samples"), data), "b": (("x", "samples"), data)})
    ds = ds.assign(split=(("x", "samples"), labels))
    for found, right in zip(create_split(ds, "b"), create_split(ds.transpose(), "b"), strict=True):
        np.testing.assert_array_equal(found, right)
    with pytest.raises(InvalidTypeError, match="'split' must hold numbers"):
        create_split(ds.assign(split=(("x", "samples"), np.full((2, 4), "train"))), "b")


def test_create_split_of_a_cube_gives_one_row_for_each_valid_cell_of_a_part():
    cube = cell_id_cube({"time": 6, "lat": 4, "lon": 5}, "float64", names=("a", "b"))
    cube["height"] = cube.b[0].drop_vars("time") * 10
    cube["b"] = cube.b.where(cube.a % 7 != 0)
    cube["filter_mask"] = cube.a[0].drop_vars("time") % 5 != 0
    made = assign_block_split(cube, {"time": 2, "lon": 2}, 0.5, val=0.2)
    # other labels and masks are no features
    made = assign_block_split(made, {"time": 2}, 0.6, name="fold2")
    made = assign_mask(made, cube["a"] >= 0, "land")
    X_train, X_test, y_train, y_test = create_split(made.transpose(), "a")
    split = made.split.transpose(*cube.a.dims)
    for part, X, y in ((1, X_train, y_train), (0, X_test, y_test)):
        expected = [
            (cube.b.values[t, i, k], cube.height.values[i, k], cube.a.values[t, i, k])
            for k in range(5) for i in range(4) for t in range(6)
            if split.values[t, i, k] == part
            and cube.filter_mask.values[i, k]
            and cube.a.values[t, i, k] % 7
        ]  # fmt: skip
        assert len(expected) > 5
        assert np.concatenate([X, y], axis=1).tolist() == [list(row) for row in expected]
    samples = made.rename(time="samples")
    assert create_split(samples, "a")[0].shape[1:] == (4, 5, 2)


@pytest.mark.parametrize(
    "target",
    [
        np.array(["x", None, "y", np.nan, "x", "y"], object),
        np.array(["2000", "NaT", "2001", "NaT", "2002", "2003"], "M8[D]"),
        np.array([1, np.nan + 1j, 2, np.inf, 3, 4], complex),
        np.ma.masked_equal([1, -999, 2, -999, 3, 4], -999),
    ],
)
def test_create_split_drops_rows_with_gaps_of_any_kind(target):
    data = {"a": np.arange(6.0), "c": target, "split": [1, 1, 1, 1, 0, 0]}
    X_train, X_test, y_train, y_test = create_split(data, "c")
    assert (X_train.ravel().tolist(), X_test.ravel().tolist()) == ([0, 2], [4, 5])
    np.testing.assert_array_equal(y_train.ravel(), target[[0, 2]])
    np.testing.assert_array_equal(y_test.ravel(), target[4:])


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
@pytest.mark.parametrize("values", [np.array("2000", "M8[s]"), "text", np.array("a", object)])
def test_create_split_takes_numbers(shape, values):
    data = {"a": np.full(shape, values), "b": np.arange(8.0)[: np.prod(shape)].reshape(shape)}
    data |= {"c": data["b"], "split": np.array([1, 1, 0, 0])}
    says = r"'a' must hold numbers, got .*exclude_vars=\['a'\]"
    with pytest.raises(InvalidTypeError, match=says):
        create_split(data, "b")
    with pytest.raises(InvalidTypeError, match=says):
        create_split(data, ["a", "b"])
    assert create_split(data, "b", exclude_vars=["a"])[0].dtype == float
    if len(shape) == 1:  # classes of points may have names
        assert create_split(data, "a")[3].tolist() == data["a"][2:, None].tolist()


def test_data_called_split_is_not_overwritten():
    ds = cell_id_cube({"time": 4, "lat": 8})
    ds["split"] = ds.a / 2
    with pytest.raises(InvalidValueError, match=r"'split' is a variable .*float32.*rename it"):
        assign_block_split(ds, {"lat": 2})
    plain = ds.assign(split=("lat", np.arange(8) < 5))
    assert assign_block_split(plain, {"lat": 2}).split.dtype == np.uint8


@pytest.mark.parametrize(
    "act",
    {
        "valid": lambda ds: assign_block_split(ds, {"time": 2, "lat": 3}, valid="a"),
        "quantiles": lambda ds: assign_block_split(ds, {"lat": 3, "lon": 2}, stratify={"a": 2}),
        "classes": lambda ds: assign_block_split(ds, {"lat": 3, "lon": 2}, stratify="a"),
        "folds": lambda ds: next(BlockKFold(2, {"lat": 3}, valid="a").split_cube(ds)),
        "duplicates": lambda ds: find_duplicates(
            CubeView.of(ds), (ds["time"] < 6).astype("u1"), ["a"]
        ),
        "range": lambda ds: estimate_range(ds, "a"),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_cube_opened_without_dask_is_read_chunk_by_chunk(act, tmp_path, monkeypatch):
    ds = cell_id_cube({"time": 12, "lat": 6, "lon": 4}, "float32", gaps=0.2)
    ds["a"] = ds["a"] % 7
    ds["time"] = np.arange(12)
    ds.chunk({"time": 5, "lat": 4, "lon": 3}).to_zarr(tmp_path / "c.zarr", consolidated=False)
    monkeypatch.setattr("ml4cube.splits.cube._CELLS_IN_CHUNK", 130)  # two chunks have 120 cells
    monkeypatch.setattr("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 130)
    reads = collections.Counter()
    get = zarr.storage.LocalStore.get

    async def counted(self, key, *args, **kwargs):
        reads[key] += 1
        return await get(self, key, *args, **kwargs)

    direct = LocalFiles._read

    def counted_directly(self, part):
        reads[f"a/{part.key}"] += 1
        return direct(self, part)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", counted)
    monkeypatch.setattr(LocalFiles, "_read", counted_directly)
    with xr.open_zarr(tmp_path / "c.zarr", chunks=None, consolidated=False) as unread:
        made = act[1](unread)
        assert not unread["a"].variable._in_memory
        if isinstance(made, xr.Dataset):
            made["split"].load()
    assert [n for key, n in reads.items() if key.startswith("a/c/")] == [1] * 12
    whole = act[1](ds)
    same = whole.equals(made) if isinstance(made, xr.Dataset) else whole == made
    assert same


def test_a_cube_without_time_is_told_how_to_name_its_dim():
    with pytest.raises(InvalidValueError, match=r"cannot tell the time dim.* e\.g\. dim='x'"):
        assign_time_split(xr.DataArray(np.zeros(4), dims="x"))
    two = xr.DataArray(np.zeros((2, 2)), {"run": DAYS[:2], "init": DAYS[:2]}, ("run", "init"))
    with pytest.raises(InvalidValueError, match=r"'run'.* may all be it; name it, e\.g\. dim="):
        assign_time_split(two)


def observed(dates):
    """A cube of observations, whose dates stand beside a dim without a coordinate of its own."""
    return xr.Dataset({"a": ("obs", np.arange(float(len(dates))))}, {"time": ("obs", dates)})


DAYS = np.datetime64("2000-01-01") + np.arange(10)


@pytest.mark.parametrize(
    ("dates", "expected"),
    [
        (DAYS, [1] * 7 + [0] * 3),
        (DAYS[::-1], [0] * 3 + [1] * 7),
        (DAYS.repeat(2)[:10], [1] * 6 + [0] * 4),
        (DAYS[::-1].repeat(2)[10:], [0] * 4 + [1] * 6),
    ],
    ids=["ascending", "descending", "twice", "twice, descending"],
)
@pytest.mark.parametrize("own", [False, True], ids=["bare dim", "numbered dim"])
def test_dates_beside_a_dim_order_it(dates, expected, own):
    cube = observed(dates)
    cube = cube.assign_coords(obs=np.arange(10) + 100) if own else cube
    assert assign_time_split(cube, 0.7).split.values.tolist() == expected
    for train, test in ForwardChaining(2, cube=cube).split(np.zeros((10, 1))):
        assert dates[train].max() < dates[test].min()


def test_dates_beside_a_dim_that_are_in_no_order_are_refused():
    cube = observed(DAYS[[3, 0, 5, 2, 7, 9, 1, 4, 6, 8]])
    with pytest.raises(InvalidValueError, match=r"'time' must be sorted.*sortby\('time'\)"):
        assign_time_split(cube)
    # blocks of soundings, and what lies beside them, need no order
    label = assign_block_split(cube, {"obs": 2}, 0.6, buffer=1).split
    bare = assign_block_split(cube.drop_vars("time"), {"obs": 2}, 0.6, buffer=1).split
    assert label.values.tolist() == bare.values.tolist()


def test_dates_of_something_else_are_no_times():
    stations = xr.Dataset(
        {"a": (("time", "station"), np.zeros((10, 10)))},
        {"time": DAYS, "installed": ("station", DAYS[[3, 0, 5, 2, 7, 9, 1, 4, 6, 8]])},
    )
    label = assign_block_split(stations, {"station": 3}, 0.5, buffer=1)
    xr.testing.assert_equal(
        label.split.drop_vars("installed"),
        assign_block_split(stations.drop_vars("installed"), {"station": 3}, 0.5, buffer=1).split,
    )
    assert set(assign_time_split(stations).split.dims) == {"time"} | {"station"} & set(label.dims)
    lead = xr.Dataset({"a": ("lead", np.zeros(10))}, {"start": ("lead", DAYS[:1].repeat(10))})
    for cube in (lead, lead.assign_coords(lead=np.arange(10) * 6)):
        assert assign_time_split(cube, 0.7, dim="lead").split.values.tolist() == [1] * 7 + [0] * 3
    numbered = lead.rename(lead="time").assign_coords(time=np.arange(10)[::-1])
    numbered = numbered.assign_coords(start=("time", DAYS[[3, 0, 5, 2, 7, 9, 1, 4, 6, 8]]))
    assert assign_time_split(numbered, 0.7).split.values.tolist() == [0] * 3 + [1] * 7
    dated = numbered.assign_coords(time=np.arange(10), start=("time", DAYS))
    label = assign_time_split(dated, 0.7, gap="2D").split
    assert label.values.tolist() == [1] * 5 + [255] * 2 + [0] * 3
    some = DAYS.copy()
    some[3] = np.datetime64("NaT")
    gappy = xr.Dataset({"a": ("obs", np.zeros(10))}, {"obs": np.arange(10), "time": ("obs", some)})
    assert assign_time_split(gappy, 0.7, dim="obs").split.values.tolist() == [1] * 7 + [0] * 3
    with pytest.raises(InvalidValueError, match="missing dates"):
        assign_time_split(gappy.drop_vars("obs"), 0.7)


@pytest.mark.parametrize("gap", [4, 10, "10D"])
@pytest.mark.parametrize("own", [False, True])
def test_a_gap_that_takes_all_of_train_is_refused(gap, own):
    cube = observed(DAYS.repeat(2)[:10])
    cube = cube.swap_dims(obs="time") if own else cube
    with pytest.raises(EmptyPartError, match="smaller gap"):
        assign_time_split(cube, 0.6, gap=gap)


@pytest.mark.parametrize(
    ("step", "gap", "taken"),
    [
        (np.timedelta64(25, "us"), datetime.timedelta(microseconds=50), 2),
        (np.timedelta64(25, "us"), np.timedelta64(50_000, "ns"), 2),
        (np.timedelta64(25, "us"), "50us", 2),
        (np.timedelta64(1, "s"), pd.Timedelta("1.5s"), 1),
        (np.timedelta64(1, "h"), "90min", 1),
        (np.timedelta64(1, "h"), "1.5 Hours", 1),
        (np.timedelta64(1, "D"), "1w", 7),
        (np.timedelta64(1, "s"), np.timedelta64(999_999_999_500, "ns"), 10),
        (100 * 360, datetime.timedelta(days=72_000), 2),
        (100 * 360, "400000 days", 11),
        (100 * 360, np.timedelta64(400_000, "D"), 11),
    ],
)
def test_gaps_of_any_length_are_kept(step, gap, taken):
    if isinstance(step, int):
        times = np.array([cftime.Datetime360Day(y, 1, 1) for y in range(1, 10_000, 100)])
    else:
        times = np.datetime64("2000-01-01", "us") + np.arange(100) * step
    cube = xr.Dataset({"a": ("time", np.arange(100.0))}, {"time": times})
    if taken == 10:
        with pytest.raises(EmptyPartError, match="smaller gap"):
            assign_time_split(cube, gap=gap)
        return
    split = assign_time_split(cube, gap=gap)
    assert int((split.split == 255).sum()) == taken
    xr.testing.assert_equal(apply_split(cube, split.split.attrs["ml4cube_split"]), split)


@pytest.mark.parametrize("target", ["a", "b"])
def test_create_split_refuses_packed_integers(target):
    ds = xr.Dataset({"a": ("y", np.zeros(4)), "b": ("y", np.zeros(4, "int16"))})
    ds["b"].attrs = {"scale_factor": 0.1, "_FillValue": -9999}
    with pytest.raises(InvalidValueError, match="'b' has packed int16 values"):
        create_split(assign_block_split(ds, {"y": 1}), target)


def test_create_split_warns_of_a_target_whose_gaps_were_filled():
    cube = cell_id_cube({"time": 80}, gaps=0.1, names=("a", "b"))
    cube = fill_nan_values(assign_block_split(cube, {"time": 4}), ["b"], method="constant", const=0)
    with pytest.warns(UserWarning, match=r"to_pred: gaps of 'b' \('constant'\) were filled"):
        create_split(cube, to_pred="b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": {"latitude": 3}}, "latitude"),
        ({"block_size": {"lat": 0}}, "lat"),
        ({"block_size": {"lat": 2.5}}, r"2\.5"),
        ({"block_size": 4}, "block_size"),
        ({"buffer": -1}, "-1"),
        ({"gap": -1}, "^gap along 'time' must be 0 or more, got -1"),
        ({"gap": "-1s"}, "must be 0 or more"),
        ({"buffer": {"height": 1}}, "height"),
        ({"valid": "nothing"}, "nothing"),
        ({"cyclic": 3}, "cyclic must be a name or a list of names, got 3"),
        ({"cyclic": "long"}, "cyclic must be 'time', 'lat' or 'lon', got 'long'"),
        ({"gap": "2D", "cyclic": "time"}, "cyclic dim 'time' must be in cells, got '2D'"),
        ({"valid": 3}, "valid must be the name .* got int"),
        ({"valid": np.ones((3, 9, 12), bool)}, "valid must be .* DataArray of bools, got ndarray"),
    ],
)
def test_bad_arguments_are_named(options, says):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=says) as caught:
        assign_block_split(dated_globe(), **{"block_size": {"time": 1}, **options})
    assert isinstance(caught.value, CubeError)


@pytest.mark.parametrize(
    "asked",
    [
        *("5", "-3", "500m", "1.5M", "P1M", "1h30m", "1 month", "30parsec", "107000000000D", 1.5),
        *(np.timedelta64(5), np.timedelta64("NaT", "D"), np.timedelta64(1, "M")),
    ],
)
def test_a_buffer_whose_unit_is_a_guess_is_refused(asked):
    cube, blocks = dated_globe(), {"time": 1, "lat": 3}
    for act, says in (
        (lambda: assign_block_split(cube, blocks, buffer=asked), "buffer"),
        (lambda: assign_block_split(cube, blocks, buffer={"time": asked}), "buffer along 'time'"),
        (lambda: assign_block_split(cube, blocks, gap=asked), "gap along 'time'"),
        (lambda: assign_time_split(cube, gap=asked), "gap along 'time'"),
        (lambda: next(ForwardChaining(2, asked).split_cube(cube)), "gap along 'time'"),
    ):
        with pytest.raises(InvalidTypeError, match=f"^{says} must be cells .*; units of time"):
            act()


@pytest.mark.parametrize("chunks", [None, {"y": 2}])
def test_false_cells_of_a_mask_with_gaps_are_not_valid(chunks):
    mask = xr.DataArray(np.array([True, False, None, True], object), dims="y")
    ds = xr.Dataset({"a": (("y", "x"), np.zeros((4, 2))), "mask": mask})
    if chunks:
        ds = ds.chunk(chunks)
    found = valid_mask("mask", CubeView.of(ds))
    assert found.values.tolist() == [True, False, False, True]
