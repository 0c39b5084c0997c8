"""Statistics, scaling, masks and gaps on cubes and samples."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube import preprocessing as pp
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.core.missing import bool_mask
from ml4cube.cube.variables import data_variables, split_label
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.postprocessing import undo_standardizing
from ml4cube.splits import assign_block_split, create_split, estimate_range, leakage_report
from tests import oracle
from tests.cubes import cell_id_cube, no_compute

SHAPE = {"time": 10, "lat": 6, "lon": 8}
ORDERS = [("time", "lat", "lon"), ("lon", "time", "lat")]


def split_cube(**options: Any) -> xr.Dataset:
    """Cube with gaps: 6 steps train, 1 buffer, 1 val, 2 test."""
    cube = cell_id_cube(SHAPE, **{"gaps": 0.2, "names": ("a", "b"), **options})
    label = np.array([1] * 6 + [255, 2] + [0] * 2, "uint8")
    return cube.assign(split=("time", label, {"flag_meanings": "test train val excluded"}))


def assert_stats(found: list[float], cells: np.ndarray) -> None:
    expected = oracle.moments(cells)
    np.testing.assert_allclose(found, [float(expected["mean"]), float(expected["std"])], 1e-12)


# --- statistics -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, {}, {"time": 3, "lat": 4, "lon": 5}, {"time": 1}])
@pytest.mark.parametrize("order", ORDERS)
def test_statistics_are_those_of_the_train_part(chunks: Any, order: Any) -> None:
    ds = split_cube(dask_chunks=chunks, dim_order=order)
    plain = split_cube()
    stats = pp.get_statistics(ds)
    assert list(stats) == ["a", "b"]
    for name in stats:
        assert_stats(stats[name], plain[name].values[:6])
        everything = pp.get_statistics(ds, split=None)[name]
        assert_stats(everything, plain[name].values)
        assert_stats(pp.get_statistics(ds, split="test")[name], plain[name].values[8:])
        low, high = pp.get_range(ds, split="val")[name]
        val = plain[name].values[7]
        assert (low, high) == (np.nanmin(val), np.nanmax(val))


def test_labels_masks_and_auxiliary_variables_are_left_out() -> None:
    ds = split_cube()
    ds["static"] = (("lat", "lon"), np.arange(48.0).reshape(6, 8))
    ds["time_bnds"] = (("time", "nv"), np.zeros((10, 2)))
    ds["edges"] = (("lat", "nv"), np.zeros((6, 2)))
    ds.lat.attrs["bounds"] = "edges"
    ds["crs"] = ((), 0, {"grid_mapping_name": "latitude_longitude"})
    ds["when"] = ("time", ds.time.values)
    ds["flag"] = (("time", "lat", "lon"), np.ones((10, 6, 8), bool))
    ds = pp.assign_mask(ds, np.ones((6, 8)), "land")
    assert list(pp.get_statistics(ds)) == ["a", "b", "static", "flag"]
    assert pp.get_statistics(ds)["flag"] == [1, 0]
    assert list(pp.get_range(ds, exclude_vars=["a", "flag"])) == ["b", "static"]
    with pytest.raises(InvalidTypeError, match=r"'when'.*real numbers"):
        pp.Statistics.from_cube(ds, ["when"])


def test_a_variable_without_a_cut_dim_counts_the_cells_with_a_copy_in_train() -> None:
    ds = cell_id_cube({"time": 4, "lat": 3})
    ds["split"] = (("time", "lat"), np.array([[1, 0, 0], [1, 1, 0]] * 2, "uint8"))
    ds["height"] = ("lat", np.array([1.0, 3.0, 1000.0]))
    for cube in (ds, ds.chunk(time=1)):
        assert pp.get_statistics(cube)["height"] == [2.0, 1.0]


def test_a_label_is_known_by_its_attribute_and_a_bool_one_works() -> None:
    ds = split_cube()
    expected = pp.get_statistics(ds)
    renamed = ds.rename(split="parts")
    renamed.parts.attrs["ml4cube_split"] = "{}"
    assert pp.get_statistics(renamed) == expected
    assert pp.get_statistics(ds.assign(split=ds.split == 1)) == expected


def test_what_is_computed_with_a_mask_or_a_label_is_data() -> None:
    cube = cell_id_cube(SHAPE)[["a"]].astype("f4")
    masked = pp.assign_mask(cube, np.arange(48).reshape(6, 8) % 3 > 0, "land")
    masked["on_land"] = masked.a * masked.land
    assert masked.on_land.attrs["ml4cube_role"] == "mask"  # xarray keeps it
    assert list(pp.get_statistics(masked)) == ["a", "on_land"]
    scaled = pp.standardize(masked, {"on_land": [1.0, 2.0]}, "land")
    assert (scaled.on_land == (masked.on_land - 1) / 2).all()

    labelled = assign_block_split(cube, {"time": 5}, name="part")
    labelled["a_train"] = labelled.a * (labelled.part == 1)
    labelled["is_train"] = labelled.part == 1
    assert list(pp.get_statistics(labelled)) == ["a", "a_train", "is_train"]
    assert split_label(labelled) == "part"
    with pytest.raises(InvalidValueError, match="'a_train' is a variable of the cube"):
        assign_block_split(labelled, {"time": 5}, name="a_train")
    derived = labelled[["a_train"]]
    assert set(assign_block_split(derived, {"time": 5})) == {"a_train", "split"}


def test_masks_and_labels_are_known_after_renaming_aligning_and_storing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cube = cell_id_cube(SHAPE)[["a"]].astype("f4")
    ds = pp.assign_mask(cube, np.arange(48).reshape(6, 8) % 3 > 0, "land")
    ds = assign_block_split(ds, {"time": 5}, name="part")
    renamed = ds.rename(land="coast", part="fold")
    aligned = ds.assign_coords(time=range(10)).reindex(time=range(12))
    assert {aligned.land.dtype.kind, aligned.part.dtype.kind} == {"f"}
    stored = []
    for version in (2, 3):
        ds.to_zarr(tmp_path / f"{version}.zarr", zarr_format=version, consolidated=False)
        stored.append(xr.open_zarr(tmp_path / f"{version}.zarr", consolidated=False))
    for kind in ("NETCDF4", "NETCDF3_64BIT"):
        ds.to_netcdf(tmp_path / f"{kind}.nc", format=kind)
        stored.append(xr.open_dataset(tmp_path / f"{kind}.nc"))
    for other in (renamed, aligned, *stored):
        assert data_variables(other) == ["a"]
        assert split_label(other) in ("part", "fold")
        other.close()
    assert "treated as data" not in caplog.text
    # nothing tells it from data computed with the label, so it is said
    assert split_label(aligned.rename(part="fold")) is None
    assert "'fold' of float32 is treated as data" in caplog.text


def test_masked_cells_of_samples_are_gaps() -> None:
    filled = np.array([[1.0, 2.0, 9.96921e36], [4.0, 5.0, 6.0]])
    masked = {"t": np.ma.masked_values(filled, 9.96921e36)}
    assert pp.get_range(masked) == {"t": [1, 6]}
    assert pp.drop_nan_values(masked)["t"].tolist() == [[4, 5, 6]]
    scaled = pp.standardize(masked, {"t": [0.0, 1.0]})
    for found in (scaled, undo_standardizing(masked, {"t": [0.0, 1.0]})):
        assert not np.ma.isMaskedArray(found["t"])
        np.testing.assert_array_equal(found["t"], np.where(filled > 1e36, np.nan, filled))
    # a flag that is masked allows nothing
    flags = np.ma.masked_array([True, True, True], [False, True, False])
    found = pp.apply_filter(masked | {"filter_mask": flags})["t"]
    np.testing.assert_array_equal(np.isnan(found), [[False, True, True], [False, True, False]])
    cube = xr.Dataset({"t": (("y", "x"), filled)})
    assert pp.assign_mask(cube, flags, stack_dim="y").filter_mask.values.sum() == 4


def test_the_train_part_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ml4cube"):
        pp.get_statistics(split_cube())
    assert "only the train part" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "ml4cube"):
        assert pp.Statistics.from_cube(cell_id_cube(SHAPE)).part == "all"
    assert "train" not in caplog.text


@pytest.mark.parametrize(("dtype", "packed"), [("i2", True), ("u1", True), ("i2", False)])
def test_integers_count_as_numbers_but_packed_ones_are_refused(dtype: str, packed: bool) -> None:
    ds = cell_id_cube({"time": 5, "lat": 4}, dtype=dtype)
    if not packed:
        assert_stats(pp.get_statistics(ds)["a"], ds.a.values)
        return
    ds.a.attrs |= {"scale_factor": 0.1, "add_offset": 3.0}
    fills = {"method": "constant", "const": 0}
    for act in (
        pp.get_statistics,
        lambda d: pp.standardize(d, {"a": [0, 1]}),
        pp.fill_nan_values,
        pp.drop_nan_values,
        lambda d: pp.drop_nan_values(d, mode="if_all_nan"),
        lambda d: pp.apply_filter(pp.assign_mask(d, d.a > 3)),
        lambda d: pp.fill_nan_values(d, ["a"], **fills),
        lambda d: pp.fill_nan_values(d["a"], **fills),
        lambda d: estimate_range(d, "a"),
        lambda d: assign_block_split(d, {"time": 1}, stratify={"a": 2}),
    ):
        with pytest.raises(InvalidValueError, match=r"'a'.*packed.*scale_factor"):
            act(ds)


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "boolean"])
@pytest.mark.parametrize(
    "work",
    [
        pp.get_statistics,
        lambda ds: pp.Statistics.from_cube(ds, ["x"]),
        pp.drop_nan_values,
        lambda ds: pp.drop_nan_values(ds, ["x"]),
        pp.fill_nan_values,
        lambda ds: pp.fill_nan_values(ds, ["x"]),
        lambda ds: pp.standardize(ds, {"x": [0, 1]}),
        lambda ds: undo_standardizing(ds, {"x": [0, 1]}),
        lambda ds: undo_standardizing(ds.x, 0, 1),
        lambda ds: pp.assign_mask(ds[["t"]], ds.x),
        lambda ds: pp.apply_filter(ds.assign(filter_mask=ds.t == 1)),
        lambda ds: assign_block_split(ds, {"index": 1}, stratify="x"),
        lambda ds: assign_block_split(ds, {"index": 1}, stratify={"x": 2}),
        lambda ds: estimate_range(ds, "x"),
        lambda ds: leakage_report(ds.assign(split=("index", [1, 1, 0])), var="x"),
    ],
)
def test_numbers_of_dtypes_of_pandas_are_refused(work: Any, dtype: str) -> None:
    frame = pd.DataFrame({"x": pd.array([1, None, 0], dtype), "t": [1.0, 2.0, 3.0]})
    with pytest.raises(InvalidTypeError, match=rf'pandas\' dtype {dtype}.*astype\("float64"\)'):
        work(frame.to_xarray())


def test_categories_of_pandas_are_left_out() -> None:
    ds = pd.DataFrame({"x": pd.Categorical(["a", "b"]), "t": [1.0, np.nan]}).to_xarray()
    assert list(pp.get_statistics(ds)) == ["t"]
    for work in (pp.drop_nan_values, pp.fill_nan_values, pp.CubeScaler().fit_transform):
        assert work(ds).x.variable.identical(ds.x.variable)
    with pytest.raises(InvalidTypeError, match=r"'x' must hold real numbers, got dtype category"):
        pp.standardize(ds, {"x": [0, 1]})
    # numbers of pandas that are not asked for do no harm
    frame = pd.DataFrame({"id": pd.array([1, 2, 3], dtype="Int64"), "t": [1.0, np.nan, 3.0]})
    done = pp.drop_nan_values(frame.to_xarray(), ["t"])
    assert pp.accounting(done) == {"total": 3, "kept": 2, "gap": 1}
    assert pp.fill_nan_values(frame.to_xarray(), ["t"]).t.values.tolist() == [1.0, 2.0, 3.0]


def test_a_multiindex_is_kept_without_a_warning() -> None:
    ds = split_cube()[["a"]].stack(p=("lat", "lon"))
    masked = pp.assign_mask(ds, ds.a.isel(time=0) > 3)
    stats = pp.get_statistics(ds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cube in (masked, masked.chunk()):
            for done in (
                pp.drop_nan_values(cube),
                pp.apply_filter(cube),
                pp.fill_nan_values(cube),
                pp.standardize(cube, stats),
                undo_standardizing(cube, stats),
            ):
                assert done.indexes["p"].equals(ds.indexes["p"])


@pytest.mark.parametrize("dtype", ["complex128", "m8[ns]", "O"])
def test_what_is_left_out_for_its_dtype_is_named(dtype: str) -> None:
    values = np.zeros(3).astype(dtype)
    with pytest.raises(InvalidValueError, match=re.escape(f"'z' ({values.dtype}, 1 dims)")):
        pp.get_statistics({"z": values})


@pytest.mark.parametrize("name", ["x", "height"])
def test_an_array_called_like_its_dim_or_coordinate_is_refused(name: str) -> None:
    array = xr.DataArray(np.ones(3), {"height": 2.0}, ["x"], name)
    for work in (pp.get_statistics, pp.drop_nan_values, pp.fill_nan_values, pp.CubeScaler().fit):
        with pytest.raises(InvalidValueError, match=rf"dim or coordinate '{name}'.*with ds.rename"):
            work(array)


def test_parts_without_cells_or_weight_are_refused() -> None:
    ds = split_cube()
    with pytest.raises(EmptyPartError, match="part 'train'"):
        pp.get_statistics(ds.isel(time=slice(6, None)))
    with pytest.raises(EmptyPartError, match="only cells of weight 0"):
        pp.get_statistics(ds, weights=xr.DataArray(np.zeros(6), dims="lat"))
    for empty in (ds.isel(time=slice(0)), {"a": np.zeros((0, 4)), "b": np.zeros((0, 4))}):
        with pytest.raises(EmptyPartError, match=r"no cell, its shape is \("):
            pp.get_statistics(empty, split=None)


# --- scaling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, {"time": 4, "lat": 3}])
@pytest.mark.parametrize("kind", ["Dataset", "DataArray", "dict"])
def test_scaling_keeps_everything_but_the_values(chunks: Any, kind: str) -> None:
    ds = split_cube(dask_chunks=chunks)
    before = ds.compute().copy(deep=True)
    stats, ranges = pp.get_statistics(ds), pp.get_range(ds)
    given: Any = {"Dataset": ds, "DataArray": ds.a, "dict": {n: ds[n].values for n in ds}}[kind]
    with dask.config.set(scheduler=no_compute):
        scaled, unit = pp.standardize(given, stats), pp.normalize(given, ranges)
    if kind == "DataArray":
        given, scaled, unit = given.to_dataset(), scaled.to_dataset(), unit.to_dataset()
    assert list(scaled) == list(given)
    for name in set(given) - {"split"}:
        mean, std = stats[name]
        low, high = ranges[name]
        cells = before[name].values.astype("f8")
        np.testing.assert_array_equal(np.asarray(scaled[name]), ((cells - mean) / std).astype("f4"))
        np.testing.assert_array_equal(
            np.asarray(unit[name]), ((cells - low) / (high - low)).astype("f4")
        )
        assert scaled[name].dtype == np.float32
        if kind != "dict":
            assert scaled[name].attrs == {**before[name].attrs, "unscaled_units": "1"}
            assert scaled[name].chunks == given[name].chunks
    if kind != "dict":
        assert scaled.coords.to_dataset().identical(given.coords.to_dataset())
        assert scaled.attrs == given.attrs
    if "split" in given:
        np.testing.assert_array_equal(np.asarray(scaled["split"]), before.split.values)
    xr.testing.assert_identical(ds.compute(), before)


def test_statistics_objects_and_missing_variables_are_understood() -> None:
    ds = split_cube()
    stats = pp.Statistics.from_cube(ds)
    xr.testing.assert_identical(pp.standardize(ds, stats), pp.standardize(ds, stats.mean_std()))
    xr.testing.assert_identical(pp.normalize(ds, stats), pp.normalize(ds, stats.range()))
    only_a = pp.standardize(ds, {"a": [1.0, 2.0], "other": [0.0, 1.0]})
    xr.testing.assert_identical(only_a.b, ds.b)
    unnamed = ds.a.rename(None)
    np.testing.assert_array_equal(pp.standardize(unnamed, {"a": [1.0, 2.0]}), only_a.a)
    with pytest.raises(InvalidValueError, match="no variable in common"):
        pp.standardize(ds, {"c": [0.0, 1.0]})
    with pytest.raises(InvalidTypeError, match=r"\['a'\] must be two numbers, got 3"):
        pp.standardize(ds, {"a": 3})  # type: ignore[dict-item]


# --- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, {"time": 4, "lat": 3}])
def test_a_static_mask_in_any_form_becomes_one_on_all_dims(chunks: Any) -> None:
    ds = split_cube(dask_chunks=chunks)
    land = np.arange(48).reshape(6, 8) % 3 > 0
    expected = np.broadcast_to(land, (10, 6, 8))
    named = xr.DataArray(land.T, dims=("lon", "lat"))
    floats = np.where(land, 2.0, np.nan)
    for mask in (land, named, floats, np.array(expected), dask.array.from_array(land)):
        masked = pp.assign_mask(ds, mask)
        np.testing.assert_array_equal(masked.filter_mask.values, expected)
        assert masked.filter_mask.dims == ds.a.dims
        assert masked.filter_mask.dtype == bool
        if chunks is not None or not hasattr(mask, "dask"):
            assert masked.filter_mask.chunks == ds.a.chunks
        assert "filter_mask" not in ds
    assert "sea" in pp.assign_mask(ds, ~land, mask_name="sea")
    by_time = pp.assign_mask(ds, np.ones((10, 8)), stack_dim="lat")
    assert bool(by_time.filter_mask.all())


@pytest.mark.parametrize("dtype", ["c8", "m8[ns]", "g"])
def test_a_cube_of_numbers_that_samples_cannot_hold_takes_a_mask(dtype: str) -> None:
    ds = xr.Dataset({"z": (("y", "x"), np.ones((2, 3), int).astype(dtype))})
    masked = pp.apply_filter(pp.assign_mask(ds, np.array([True, False, True]), stack_dim="y"))
    assert masked.z.isnull().values.tolist() == [[False, True, False]] * 2


def test_a_mask_over_time_counts_where_a_static_variable_is_listed() -> None:
    mask, height = np.ones((4, 3, 2), bool), np.ones((3, 2))
    mask[0], height[1, 1] = False, np.nan
    ds = xr.Dataset({"a": (("t", "y", "x"), np.ones((4, 3, 2))), "height": (("y", "x"), height)})
    ds["filter_mask"] = (("t", "y", "x"), mask)
    done = pp.drop_nan_values(ds, ["height"], mode="masked")
    assert done.a.isnull().sum(("y", "x")).values.tolist() == [6, 1, 1, 1]
    assert pp.accounting(done) == {"total": 24, "kept": 15, "gap": 3, "mask": 6}


SAMPLES = {"a": np.ones((4, 4, 4))}


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda ds: pp.standardize(ds, {"a": [0, 1]}, filter_var="maks"),
            "filter_var must be .* got 'maks'",
        ),
        (
            lambda ds: pp.normalize({"a": np.ones(2)}, {"a": [0, 1]}, "maks"),
            "filter_var must be .* got 'maks'",
        ),
        (lambda ds: pp.standardize(ds, {"a": [0, -1]}), "with std >= 0"),
        (lambda ds: pp.normalize(ds, {"a": [1, 0]}), "in this order"),
        (
            lambda ds: pp.apply_filter(ds, drop_sample="yes"),
            "drop_sample must be True or False, got 'yes'",
        ),
        (
            lambda ds: pp.fill_nan_values(ds, ["a"], "constant", "0"),
            "const must be a real number, got '0'",
        ),
        (lambda ds: pp.fill_nan_values(ds, method="constant", const=1j), "const must be a real"),
        (lambda ds: pp.fill_nan_values(ds, method="constant", const=10**400), "1329 bits"),
        (lambda ds: pp.fill_nan_values(ds, seed="7"), "seed must be an integer, got '7'"),
        (lambda ds: undo_standardizing(ds.a, "0", 1), "must be two numbers"),
        (
            lambda ds: pp.Statistics.from_cube(ds, quantiles=0.5),
            r"quantiles must be a sequence.*0.5",
        ),
        (lambda ds: pp.Statistics.from_cube(ds).merge(3), "other must be Statistics, got int"),
        (lambda ds: pp.Statistics.from_json(None), "text must be the str .* got NoneType"),
        (lambda ds: pp.get_statistics(ds, split="trian"), "split must be .*did you mean 'train'"),
        (lambda ds: pp.get_statistics(ds, ["c"]), "exclude_vars must be .* got 'c'"),
        (lambda ds: pp.get_statistics(ds, ["a", "b"]), "no variable is left"),
        (lambda ds: pp.get_statistics(ds.drop_vars("split"), split="test"), "needs a split label"),
        (lambda ds: pp.get_statistics(ds.a.values), "ndarray"),
        (
            lambda ds: pp.get_statistics(ds.assign(split=("time", ["train"] * 10))),
            "'split' must hold numbers .train 1.*<U5",
        ),
        (
            lambda ds: pp.get_statistics(ds.assign(split=("time", np.full(10, None)))),
            "'split' must hold numbers.*object",
        ),
        (
            lambda ds: pp.get_statistics(ds.assign(split=("y", np.ones(6, "u1")))),
            r"has the dims \['y'\]",
        ),
        (lambda ds: pp.get_statistics(ds.a.to_dataset("lat")), "must be strings, got .*; rename"),
        (lambda ds: pp.assign_mask(ds.a.to_dataset("lat"), 1), "must be strings, got .*; rename"),
        (lambda ds: assign_block_split(ds.a.to_dataset("lat"), {"time": 1}), "must be strings"),
        (lambda ds: pp.get_statistics(ds[["split"]].assign(z=1.0)), r"'z' \(float64, 0 dims\)"),
        (lambda ds: pp.drop_nan_values(ds, ["a"], "if_all_nam"), "did you mean 'if_all_nan'"),
        (lambda ds: pp.drop_nan_values(ds, ["c"]), "vars must be .*, got 'c'"),
        (lambda ds: pp.drop_nan_values(ds, ["a"], "masked"), "needs the mask"),
        (lambda ds: pp.apply_filter(SAMPLES | {"filter_mask": np.ones((4, 5))}), "give one value"),
        (lambda ds: pp.apply_filter(SAMPLES | {"filter_mask": np.ones((4, 4))}), "full shape"),
        (lambda ds: pp.assign_mask(ds, np.ones((8, 6))), "transpose it"),
        (lambda ds: pp.assign_mask(ds, ds), r"must be one variable.*\['a', 'b', 'split'\]"),
        (lambda ds: pp.assign_mask(ds, np.ones((6, 8)), stack_dim="z"), "stack_dim must be .*'z'"),
        (lambda ds: pp.assign_mask(ds, xr.DataArray([1, 1], dims="level")), "mask .*'level'"),
        (lambda ds: pp.assign_mask(ds, (ds.lat > 0).assign_coords(lat=ds.lat + 1)), "other 'lat'"),
        (lambda ds: pp.fill_nan_values(ds, ["a"], "constant"), "const must be a number"),
        (lambda ds: pp.fill_nan_values(ds, ["a"], "means"), "did you mean 'mean'"),
        (lambda ds: pp.fill_nan_values(ds, method={"aa": None}), "method must be .* got 'aa'"),
        (lambda ds: pp.fill_nan_values({"a": ["x", "y"]}, ["a"]), "numbers.*'a'"),
        (lambda ds: pp.get_range({"a": [1], "b": [1, 2]}), "equal first lengths"),
        (
            lambda ds: pp.fill_nan_values(ds, statistics=pp.Statistics.empty(["b"])),
            "statistics must have 'a'",
        ),
        (
            lambda ds: pp.fill_nan_values(ds, statistics=pp.Statistics.from_cube(ds, dims="time")),
            "must not keep dims, as those of 'a'",
        ),
        (
            lambda ds: create_split(ds, "a", stack_axis="x"),
            "stack_axis must be an integer, got 'x'",
        ),
        (
            lambda ds: create_split(ds, "a", filter_var="maks"),
            "filter_var: unknown variable 'maks'",
        ),
    ],
)
def test_options_of_the_wrong_kind_are_named(act: Any, says: str) -> None:
    with pytest.raises((InvalidTypeError, InvalidValueError), match=says):
        act(split_cube())


@pytest.mark.parametrize(
    ("name", "error"),
    [(name, InvalidValueError) for name in ("a", "split", "lat", "height", "level")]
    + [(name, InvalidTypeError) for name in (0, "", ("land",))],
)
def test_a_mask_takes_no_place_of_other_variables(name: Any, error: Any) -> None:
    ds = split_cube().assign_coords(height=1.0).expand_dims(level=1)
    with pytest.raises(error, match="mask_name must be"):
        pp.assign_mask(ds, np.ones((6, 8)), name)
    land = pp.assign_mask(ds.isel(level=0), np.ones((6, 8)), "land")
    assert not pp.assign_mask(land, ~land.land, "land").land.any()
    flags = split_cube().assign(land=("lat", np.arange(6) > 2))
    with pytest.raises(InvalidValueError, match="mask_name must be"):
        pp.assign_mask(flags, flags.land, "land")


@pytest.mark.parametrize("dtype", ["M8[s]", "c8", "U3", object, "i2", "?", ">f4"])
def test_masks_blank_the_numbers_of_samples_in_any_form(dtype: Any) -> None:
    samples = {"x": np.ones((3, 2)).astype(int).astype(dtype), "t": np.ones((3, 2))}
    samples["filter_mask"] = np.array([[True, False]] * 3)
    ds = xr.Dataset({name: (("samples", "w"), values) for name, values in samples.items()})
    found, lazy = pp.apply_filter(samples), pp.apply_filter(ds.chunk()).compute()
    for name in samples:
        np.testing.assert_array_equal(lazy[name], found[name])
        assert lazy[name].dtype == found[name].dtype
    # texts cannot have gaps
    blanked = [False, dtype not in ("U3", object)] * 3
    assert (lazy.x.isnull().values.ravel() == blanked).all()


def test_masks_of_texts_are_refused() -> None:
    ds = split_cube()
    words = np.where(np.arange(6) < 3, "yes", "no")
    for texts in (words, words.astype(object)):
        ds["filter_mask"] = ("lat", texts)
        for act in (
            lambda: pp.assign_mask(ds, ds.filter_mask),
            lambda: pp.apply_filter(ds),
            lambda: pp.apply_filter({"a": np.ones((6, 2)), "filter_mask": ds.filter_mask.values}),
            lambda: pp.drop_nan_values(ds, mode="masked"),
            lambda: MultiProcSampler(ds, drop_nan="masked"),
        ):
            with pytest.raises(InvalidTypeError, match="must hold booleans or numbers"):
                act()


def test_a_mask_turns_the_cells_of_a_cube_into_gaps_lazily() -> None:
    land = np.arange(48).reshape(6, 8) % 3 > 0
    ds = split_cube().assign(k=(("lat", "lon"), np.arange(48, dtype="i2").reshape(6, 8)))
    ds["filter_mask"] = (("lat", "lon"), land)
    lazy = ds.chunk(time=4, lat=3)
    with dask.config.set(scheduler=no_compute):
        result = pp.apply_filter(lazy)
    for done in (result, pp.apply_filter(ds)):
        for name in "ab":
            np.testing.assert_array_equal(done[name], np.where(land, ds[name], np.float32(np.nan)))
            assert done[name].attrs == ds[name].attrs
            assert done[name].dtype == np.float32
        assert done.k.dtype == np.float32
        assert (done.k.notnull() == land).all()
        xr.testing.assert_identical(
            done.split.drop_vars(set(done.coords) - set(ds.coords)).compute(), ds.split
        )
        counts = pp.accounting(done)
        assert counts == {
            "total": 480,
            "kept": int(land.sum()) * 10,
            "mask": int((~land).sum()) * 10,
        }
    assert pp.apply_filter(ds, None) is ds
    with pytest.raises(InvalidValueError, match=r"filter_var must be .* got 'land'"):
        pp.apply_filter(ds, "land")


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("drop_sample", [True, False])
def test_masks_apply_to_samples_of_any_dims(ndim: int, drop_sample: bool) -> None:
    rng = np.random.default_rng(ndim)
    shape = (7, 2, 3, 2, 2)[:ndim]
    mask = rng.random(shape) < (0.5 if ndim == 1 else 0.9)
    samples = {"a": rng.random(shape), "filter_mask": mask, "split": np.arange(7) % 2}
    samples = {"point": np.arange(7.0), **samples}
    result = pp.apply_filter(samples, drop_sample=drop_sample)
    whole = mask.reshape(7, -1).all(axis=1)
    if drop_sample or ndim == 1:
        for name in ("a", "point", "split"):
            np.testing.assert_array_equal(result[name], samples[name][whole])
        assert result.accounting["kept"] + result.accounting.get("mask", 0) == 7
        assert result.accounting["kept"] == whole.sum()
    else:
        np.testing.assert_array_equal(result["a"], np.where(mask, samples["a"], np.nan))
        inside = mask.reshape(7, -1).any(axis=1)
        np.testing.assert_array_equal(result["point"], np.where(inside, np.arange(7), np.nan))
    assert np.isfinite(samples["a"]).all()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"samples": np.ones(2)}, r"not be named \['samples'\]"),
        ({"accounting_total": np.ones(2)}, r"not be named \['accounting_total'\]"),
        ({"b": np.ones((2, 2, 3)), "filter_mask": np.ones((2, 3, 2), bool)}, "filter_mask has"),
        ({"b": np.ones((2, 3)), "filter_mask": np.ones((2, 3, 2), bool)}, "filter_mask has"),
        ({"b": np.ones((2, 3)), "split": np.ones((2, 3, 2), "u1")}, "split has"),
    ],
)
def test_samples_that_are_refused(more: dict[str, Any], said: str) -> None:
    samples = {"a": np.ones((2, 3, 2)), **more}
    for stage in (pp.apply_filter, pp.drop_nan_values, pp.fill_nan_values, pp.get_statistics):
        with pytest.raises(InvalidValueError, match=said):
            stage(samples)


def test_a_value_per_sample_is_told_from_one_per_cell_of_an_equally_long_window() -> None:
    samples = {"a": np.arange(9.0).reshape(3, 3), "filter_mask": np.array([True, False, True])}
    samples["split"] = np.array([1, 0, 0], "u1")
    blanked = pp.apply_filter(samples)["a"]
    np.testing.assert_array_equal(blanked, [[0, 1, 2], [np.nan] * 3, [6, 7, 8]])
    assert pp.get_statistics(samples)["a"][0] == 1  # of the only train sample: 0, 1, 2
    with pytest.raises(InvalidValueError, match="ambiguous"):
        pp.apply_filter({"a": np.ones((3, 3, 3)), "filter_mask": np.ones((3, 3), bool)})


@pytest.mark.parametrize("stage", [pp.apply_filter, pp.drop_nan_values, pp.fill_nan_values])
def test_samples_that_come_back_are_copies(stage: Any) -> None:
    samples = {"a": np.ones((2, 3)), "b": np.ones(2, "M8[s]")}
    for values in stage(samples).values():
        values[...] = values[0] + 1
    assert (samples["a"] == 1).all()


# --- dropping ---------------------------------------------------------------------------------


def test_integers_save_no_sample_of_gaps_unless_they_are_listed() -> None:
    samples = {"t": np.array([[np.nan, np.nan], [1.0, np.nan]]), "kind": np.ones((2, 2), int)}
    kept = pp.drop_nan_values(samples, mode="if_all_nan")
    np.testing.assert_array_equal(kept["t"], samples["t"][1:])
    assert len(pp.drop_nan_values(samples, ["t", "kind"], mode="if_all_nan")["t"]) == 2


@pytest.mark.parametrize(("kind", "gap"), [("M8[ns]", "NaT"), ("m8[ns]", "NaT"), ("c8", np.nan)])
@pytest.mark.parametrize("lazy", [False, True])
def test_gaps_of_dates_and_complex_numbers_drop_cells(kind: str, gap: Any, lazy: bool) -> None:
    ds = cell_id_cube(SHAPE)[["a"]].astype("f4")
    values = np.ones(ds.a.shape).astype(kind)
    values[0] = gap
    ds["when"] = (ds.a.dims, values)
    dropped = pp.drop_nan_values(ds.chunk(time=3) if lazy else ds, ["when"])
    assert pp.accounting(dropped) == {"total": 480, "kept": 432, "gap": 48}
    assert dropped.a.isnull().all(("lat", "lon")).values.tolist() == [True] + [False] * 9
    assert dropped.when.dtype == ds.when.dtype


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gaps_of_a_static_variable_drop_its_cells_at_all_times(lazy: bool, masked: bool) -> None:
    ds = cell_id_cube(SHAPE)[["a"]].astype("f4")
    ds["elev"] = ("lat", [np.nan, 1, 1, 1, 1, 1], {"units": "m"})
    ds["p"] = (ds.a + xr.DataArray(np.ones(2), dims="level")).transpose("lat", "level", ...)
    ds["q"] = ("lon", np.ones(8))
    cube = ds.chunk(time=3) if lazy else ds
    if masked:
        cube = pp.apply_filter(pp.assign_mask(cube, ds.a.isel(time=0) != ds.a[0, 0, 0]))
    dropped = pp.drop_nan_values(cube, ["elev"])
    outside = 10 * 2 * masked
    counts = {"total": 960, "kept": 800, **({"mask": outside} if masked else {})}
    assert pp.accounting(dropped) == {**counts, "gap": 160 - outside}
    for name in "ap":
        assert dropped[name].chunksizes == cube[name].chunksizes
        assert dropped[name].dims == ds[name].dims
        expected = ds[name].where(ds.elev.notnull())
        np.testing.assert_array_equal(dropped[name], expected.transpose(*ds[name].dims))
    assert dropped.q.notnull().all()


@pytest.mark.parametrize("form", [{"weights": "area"}, {"quantiles": (0.5,)}])
@pytest.mark.parametrize("method", ["mean", "sample_mean", "noise"])
def test_weighted_statistics_and_those_with_quantiles_fill(form: Any, method: str) -> None:
    ds = cell_id_cube(SHAPE, gaps=0.2)[["a"]]
    stats = pp.Statistics.from_cube(ds, **form)
    filled = pp.fill_nan_values(ds, method=method, statistics=stats).a.values[ds.a.isnull()]
    low, high = (float(stats["a"].mean),) * 2 if method != "noise" else stats.range()["a"]
    assert np.float32(low) <= filled.min() <= filled.max() <= np.float32(high)


def made_with_others() -> xr.Dataset:
    """A cube with a variable of each role."""
    ds = split_cube().assign(crs=0, time_bnds=(("time", "nv"), np.zeros((10, 2))))
    ds = ds.assign_coords(height=(("lat", "lon"), np.ones((6, 8))))
    return pp.assign_mask(pp.assign_mask(ds, np.ones((6, 8))), np.ones((6, 8)), "land")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("time", "a coordinate"),
        ("height", r"a coordinate.*ds.reset_coords\(\)"),
        ("filter_mask", "a mask"),
        ("land", "a mask"),
        ("split", "the split label"),
        ("crs", "a scalar"),
        ("time_bnds", "bounds of cells"),
    ],
)
@pytest.mark.parametrize("work", [pp.drop_nan_values, pp.fill_nan_values])
def test_what_is_no_data_variable_is_named(work: Any, name: str, what: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"'{name}' \({what}"):
        work(made_with_others(), [name, "a"] if what.startswith("a coordinate") else [name])


@pytest.mark.parametrize("bounds", [float, "M8[s]"])
@pytest.mark.parametrize("lazy", [False, True])
def test_all_data_vars_may_be_listed(bounds: Any, lazy: bool) -> None:
    ds = made_with_others()
    ds["time_bnds"] = ds.time_bnds.astype(bounds)
    ds["crs"] = ((), np.array(b"", "S1"), {"grid_mapping_name": "latitude_longitude"})
    for name in ("a", "split", "filter_mask"):
        ds[name] = ds[name].where(ds.time != ds.time[3])
    ds = ds.chunk() if lazy else ds
    for work in (pp.drop_nan_values, functools.partial(pp.fill_nan_values, split=None)):
        found, expected = work(ds, list(ds.data_vars)), work(ds)
        xr.testing.assert_identical(found, expected)
        for name in set(ds.data_vars) - {"a", "b"}:
            xr.testing.assert_identical(found[name].variable, ds[name].variable)
    gaps = int(ds.a.isnull().sum() + ds.b.isnull().sum())
    assert pp.accounting(pp.fill_nan_values(ds, list(ds.data_vars)))["filled"] == gaps


@pytest.mark.parametrize("texts", [np.array(["a", "b"]), np.array(["a", None], object)])
def test_gaps_of_texts_are_not_known(texts: np.ndarray) -> None:
    samples = {"t": np.array([1.0, np.nan]), "name": texts}
    with pytest.raises(InvalidTypeError, match=r"vars must be variables of numbers.*'name'"):
        pp.drop_nan_values(samples, ["name"])
    assert pp.drop_nan_values(samples).accounting["gap"] == 1


def by_name(ds: xr.Dataset) -> xr.Dataset:
    """Drop for the gaps of what began as ``t``."""
    return pp.drop_nan_values(ds, ["t" if "t" in ds else "u"])


STEPS: dict[str, Any] = {
    "drop": by_name,
    "drop_any": pp.drop_nan_values,
    "drop_all": functools.partial(pp.drop_nan_values, mode="if_all_nan"),
    "filter": pp.apply_filter,
    "fill": functools.partial(pp.fill_nan_values, method="constant", const=0),
    # dask cannot coarsen what is empty
    "isel": lambda ds: ds.isel(x=slice(1, None)) if ds.sizes["x"] > 1 else ds,
    "mean": lambda ds: ds.mean("time") if "time" in ds.dims else ds,
    "coarsen": lambda ds: ds.coarsen(x=2, boundary="pad").mean(),
    "rename": lambda ds: ds.rename({"t": "u"} if "t" in ds else {"u": "t"}),
    "drop_vars": lambda ds: ds.drop_vars("filter_mask", errors="ignore"),
}


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(list(STEPS)), min_size=2, max_size=7),
    st.integers(0, 2**16),
    st.booleans(),
    st.booleans(),
)
def test_counts_add_up_through_any_chain(
    chain: list[str], seed: int, lazy: bool, static: bool
) -> None:
    rng = np.random.default_rng(seed)
    t = np.where(rng.random((3, 8)) < 0.4, np.nan, 1.0)
    ds = xr.Dataset({"t": (("time", "x"), t)})
    if static:
        ds["elev"] = ("x", np.where(rng.random(8) < 0.2, np.nan, 1.0))
    ds = pp.assign_mask(ds, rng.random((3, 8)) < 0.6)
    ds = ds.chunk(time=2) if lazy else ds
    for i, step in enumerate(chain):
        ds = STEPS[step](ds)
        counts = pp.accounting(ds)
        reasons = {name: n for name, n in counts.items() if name not in ("total", "filled")}
        assert sum(reasons.values()) == counts.get("total", 0)
        assert all(n >= 0 for n in counts.values())
        if step.startswith("drop_a") or step == "drop":
            assert counts["total"] == ds["t" if "t" in ds else "u"].size
        if step == "drop" and "fill" not in chain[:i]:
            assert counts["kept"] == int(ds["t" if "t" in ds else "u"].notnull().sum())


@pytest.mark.parametrize(
    ("chain", "counts"),
    [
        (("drop", "isel", "drop"), {"total": 21, "kept": 10, "gap": 11}),
        (("filter", "drop", "isel", "drop"), {"total": 21, "kept": 6, "gap": 6, "mask": 9}),
        (("drop", "mean", "drop"), {"total": 8, "kept": 8, "gap": 0}),
        (("drop", "fill", "filter"), {"total": 24, "kept": 12, "gap": 0, "mask": 12}),
        (("filter", "drop_vars", "drop"), {"total": 24, "kept": 6, "gap": 18, "mask": 0}),
        (("drop", "rename", "filter"), {"total": 24, "kept": 12, "gap": 0, "mask": 12}),
        (("drop", "filter", "filter"), {"total": 24, "kept": 6, "gap": 12, "mask": 6}),
    ],
)
def test_counts_are_of_the_cells_that_there_are(chain: Any, counts: dict[str, int]) -> None:
    cells = np.arange(24).reshape(3, 8)
    ds = xr.Dataset({"t": (("time", "x"), np.where((cells + cells // 8) % 2, np.nan, 1.0))})
    ds = pp.assign_mask(ds, cells % 4 > 1)
    for step in chain:
        ds = STEPS[step](ds)
    found = pp.accounting(ds)
    found.pop("filled", None)
    assert found == counts


def test_variables_on_other_dims_are_counted_each_by_itself() -> None:
    a, b = np.full((20, 10), np.nan), np.ones((20, 2))
    a[0], b[0] = 1, np.nan
    ds = xr.Dataset({"a": (("time", "station"), a), "b": (("time", "gauge"), b)})
    both = pp.drop_nan_values(pp.drop_nan_values(ds, ["a"]), ["b"])
    assert pp.accounting(both) == {"total": 40, "kept": 38, "gap": 2}


def test_counts_end_with_the_samples_that_they_are_of() -> None:
    first, second = np.array([1.0] + [np.nan] * 3), np.array([np.nan] * 4 + [1.0] * 2)
    dropped = pp.drop_nan_values(xr.Dataset({"t": ("samples", first)}))
    other = dropped.isel(samples=[0] * 6).assign(t=("samples", second))
    counts = {"total": 6, "kept": 2, "gap": 4}
    assert pp.accounting(pp.drop_nan_values(other)) == counts
    whole = pp.fill_nan_values(other.assign(t=("samples", np.ones(6))))
    assert pp.accounting(pp.drop_nan_values(whole)) == {"total": 6, "kept": 6, "filled": 0}
    samples = pp.drop_nan_values({"t": first})
    samples["t"] = second
    assert pp.drop_nan_values(samples).accounting == counts


def test_samples_dropped_in_two_stages_are_counted_by_each() -> None:
    samples = {"a": np.where(np.arange(10) % 4, 1.0, np.nan), "filter_mask": np.arange(10) > 2}
    assert pp.apply_filter(samples, None).accounting == {"total": 10, "kept": 10}
    dropped = pp.drop_nan_values(pp.apply_filter(samples, drop_sample=True), ["a"])
    assert dropped.accounting == {"total": 10, "kept": 5, "mask": 3, "gap": 2}


def test_no_samples_are_counted_as_none() -> None:
    empty = {"t": np.empty((0, 3)), "filter_mask": np.empty(0, bool)}
    for work in (pp.drop_nan_values, pp.apply_filter):
        assert work(empty).accounting == {"total": 0, "kept": 0}
        filled = pp.fill_nan_values(empty, method="constant", const=0)
        assert work(filled).accounting == {"total": 0, "kept": 0, "filled": 0}


@pytest.mark.parametrize("lazy", [False, True])
def test_gaps_of_a_static_variable_drop_all_samples(lazy: bool) -> None:
    ds = xr.Dataset(
        {"t": (("samples", "x"), np.ones((3, 4))), "elev": ("x", [np.nan, 1.0, 1.0, 1.0])}
    )
    ds = ds.chunk(samples=2) if lazy else ds
    dropped = pp.drop_nan_values(ds, ["elev"])
    assert dropped.sizes == {"samples": 0, "x": 4}
    assert pp.accounting(dropped) == {"total": 3, "kept": 0, "gap": 3}
    assert pp.drop_nan_values(ds, ["elev"], "if_all_nan").sizes["samples"] == 3


@pytest.mark.parametrize("act", [pp.drop_nan_values, pp.apply_filter])
@pytest.mark.parametrize("form", [xr.Dataset, xr.DataArray])
@pytest.mark.parametrize("pieces", [(0, 1), (1, 1)], ids=["unequal", "equal"])
@pytest.mark.parametrize("dim", ["x", "member"])
def test_joined_pieces_have_no_counts_until_the_whole_is_counted(
    dim: str, pieces: tuple[int, ...], form: Any, act: Any
) -> None:
    t = np.array([[1.0, np.nan, 3.0, 4.0], [1.0, 2.0, np.inf, np.nan]])
    land = np.array([[1, 1, 0, 1], [0, 1, 0, 1]], bool)
    each = [xr.Dataset({"t": ("x", t[i])}).assign_coords(land=("x", land[i])) for i in pieces]
    if form is xr.DataArray:
        each = [ds.t for ds in each]
    act = functools.partial(act, filter_var="land")
    join = functools.partial(xr.concat, dim=dim, coords="different", compat="equals")
    joined, whole = join(list(map(act, each))), act(join(each))
    assert pp.accounting(joined) == {}
    for step in (pp.drop_nan_values, functools.partial(pp.apply_filter, filter_var="land")):
        assert pp.accounting(step(joined)) == pp.accounting(step(whole))


@pytest.mark.parametrize("act", [pp.apply_filter, pp.drop_nan_values])
def test_what_is_cut_reduced_or_renamed_keeps_its_counts(act: Any) -> None:
    ds = act(pp.assign_mask(split_cube()[["a"]], np.arange(48).reshape(6, 8) % 3 > 0))
    counts = pp.accounting(ds)
    others = [
        ds.isel(time=slice(3)),
        ds.isel(time=0).assign(climate=("month", np.zeros(500))),
        ds.mean("time").assign(climate=("month", np.zeros(9))),
        ds.expand_dims(member=1),
        ds.rename(lon="lat", lat="lon", a="t"),
        ds.stack(place=("time", "lat")),
        ds.assign(levels=ds.a.expand_dims(level=3)),
    ]
    for other in others:
        for form in (other, other.drop_vars("filter_mask")):  # so that nothing can be recounted
            assert pp.accounting(form) == counts


@pytest.mark.parametrize("pieces", [(0, 1), (1, 1)], ids=["unequal", "equal"])
def test_joined_samples_are_counted_from_there_on(pieces: tuple[int, ...]) -> None:
    t = np.array([[1.0, np.nan, 3.0, 4.0], [np.nan, np.nan, 1.0, 1.0]])
    each = [pp.drop_nan_values(xr.Dataset({"t": ("samples", t[i])})) for i in pieces]
    joined = xr.concat(each, "samples", coords="different", compat="equals")
    n = joined.sizes["samples"]
    assert pp.accounting(joined) == {}
    assert pp.accounting(pp.drop_nan_values(joined)) == {"total": n, "kept": n}


@pytest.mark.parametrize("mode", ["auto", "if_all_nan", "masked"])
def test_gaps_on_grids_of_their_own_are_refused_before_any_work(mode: str) -> None:
    ds = xr.Dataset(
        {"t": (("time", "lat"), np.ones((4, 3))), "s": (("time", "depth"), np.ones((4, 2)))}
    )
    ds["filter_mask"] = ("time", np.ones(4, bool))
    ds["deep"] = ("depth", [np.nan, 1.0])
    with dask.config.set(scheduler=no_compute):
        for cube in (ds, ds.chunk()):
            with pytest.raises(InvalidValueError, match=r"no variable has all.*one grid in vars"):
                pp.drop_nan_values(cube, mode=mode)
    assert pp.accounting(pp.drop_nan_values(ds, ["s", "deep"]))["kept"] == 4


@pytest.mark.parametrize(
    ("mode", "kept"), [("auto", [2, 4]), ("if_all_nan", [0, 1, 2, 4]), ("masked", [2])]
)
def test_windows_of_different_dims_are_judged_each_by_itself(mode: str, kept: list[int]) -> None:
    a = np.array([[1, np.nan], [np.nan] * 2, [1, 1], [np.nan] * 2, [1, 1]])
    b = np.array([[np.nan] * 3, [1] * 3, [1] * 3, [np.nan] * 3, [1] * 3])
    mask = np.array([True, True, True, True, False])
    found = pp.drop_nan_values({"a": a, "b": b, "filter_mask": mask, "id": np.arange(5)}, mode=mode)
    assert found["id"].tolist() == kept


# --- filling ----------------------------------------------------------------------------------


def test_means_come_from_the_train_part_unless_told_otherwise() -> None:
    samples = {"a": np.array([1.0, 3.0, np.nan, 100.0]), "split": np.array([1, 1, 0, 0])}
    assert pp.fill_nan_values(samples, ["a"], "mean")["a"][2] == 2
    assert pp.fill_nan_values(samples, ["a"], "mean", split=None)["a"][2] == pytest.approx(104 / 3)
    assert np.isnan(samples["a"][2])


UNREAD = [
    lambda ds: pp.standardize(ds, {"a": [1.0, 3.0]}),
    lambda ds: pp.CubeScaler("robust").fit(ds).transform(ds)[["a"]],
    lambda ds: pp.CubeScaler(per="lat").fit(ds).inverse_transform(ds)[["a"]],
    lambda ds: pp.fill_nan_values(ds, ["a"], "sample_mean"),
    lambda ds: pp.fill_nan_values(ds, ["a"], "noise"),
    lambda ds: pp.assign_mask(ds[["a"]], ds["mask"]),
    lambda ds: pp.apply_filter(ds, "mask"),
    lambda ds: pp.drop_nan_values(ds, ["a"]),
    lambda ds: undo_standardizing(ds, {"a": [1.0, 3.0]}),
    lambda ds: undo_standardizing(ds["a"], 1.0, 3.0).to_dataset(),
]


@pytest.mark.slow
@pytest.mark.parametrize("act", UNREAD)
def test_a_cube_opened_without_dask_is_not_read_as_a_whole(
    act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = cell_id_cube({"time": 12, "lat": 6, "lon": 4}, "float32", gaps=0.2)
    ds["mask"] = ds["a"].fillna(1) % 3 != 0
    ds.chunk({"time": 3}).to_zarr(tmp_path / "c.zarr", consolidated=False)
    expected = act(ds)
    monkeypatch.setattr("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 100)  # a file chunk has 72 cells
    with xr.open_zarr(tmp_path / "c.zarr", chunks=None, consolidated=False) as unread:
        made = act(unread)
        assert not unread["a"].variable._in_memory
        for name in made.data_vars:
            if not np.array_equal(expected[name], ds.get(name), equal_nan=True):
                assert made[name].chunksizes["time"] == (3, 3, 3, 3)
            np.testing.assert_array_equal(made[name], expected[name])
            assert made[name].dtype == expected[name].dtype
        assert pp.accounting(made) == pp.accounting(expected)


@pytest.mark.parametrize("chunks", [None, {"time": 4}])
def test_a_label_averaged_with_its_cube_is_refused(chunks: Any) -> None:
    ds = split_cube()  # 6 steps of train, then 255, 2, 0, 0: the mean of a 2 and a 0 is train's
    ds = ds.chunk(chunks) if chunks else ds
    with pytest.raises(
        InvalidValueError, match=r"got other numbers.*averaged.*drop_vars\('split'\)"
    ):
        pp.get_statistics(ds.isel(time=slice(1, 9)).coarsen(time=2).mean(keep_attrs=True))
    # floats that hold the codes, with gaps where a cube was aligned, are a label
    aligned = ds.assign(split=ds.split.where(ds.split != 255))
    assert aligned.split.dtype.kind == "f"
    assert pp.get_statistics(aligned) == pp.get_statistics(ds)


@pytest.mark.parametrize("chunks", [None, {"time": 4}])
@pytest.mark.parametrize("dims", [None, "time"])
@pytest.mark.parametrize("key", ["_FillValue", "missing_value"])
@pytest.mark.parametrize("fill", [-9999.0, 9.969209968386869e36, np.array([1e20])])
def test_fill_values_that_were_not_decoded_are_refused(
    fill: Any, key: str, dims: Any, chunks: Any
) -> None:
    ds = cell_id_cube({"time": 12, "lat": 6, "lon": 4}, "float32", gaps=0.2)
    ds["a"].attrs[key] = fill
    left_in = ds.fillna({"a": float(np.ravel(fill)[0])})
    if chunks:
        ds, left_in = ds.chunk(chunks), left_in.chunk(chunks)
    pp.get_statistics(ds, dims=dims)  # gaps are NaN, as after ds.where; the attribute has stayed
    with pytest.raises(InvalidValueError, match=f"'a'.*{key}.*decode_cf"):
        pp.get_statistics(left_in, dims=dims)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds["a"].attrs[key] = 1e300  # no float32 is as large
        pp.get_statistics(ds, dims=dims)
    integers = xr.Dataset({"a": ("x", np.array([1, -9999]), {"missing_value": -9999})})
    with pytest.raises(InvalidValueError, match="missing_value"):
        pp.get_statistics(integers)


def test_filled_cells_stay_counted_when_cells_are_dropped() -> None:
    small = xr.Dataset({"h": (("y", "x"), np.array([[1.0, np.nan], [3.0, 4.0]]))})
    done = pp.drop_nan_values(pp.fill_nan_values(small, ["h"], "constant", 0).where(small.h > 1))
    counts = pp.accounting(done)
    assert counts == {"total": 4, "kept": 2, "gap": 2, "filled": 1}
    with_series = done.assign(t=(("t", "y", "x"), np.ones((3, 2, 2))))
    assert pp.accounting(with_series) == counts
    assert pp.accounting(done.assign_coords(x=[1, 2]).x) == counts


def test_a_counted_piece_can_be_joined_with_an_uncounted_one() -> None:
    cube = xr.Dataset({"a": ("x", [1.0, np.nan, 3.0, 4.0])})
    pieces = [pp.drop_nan_values(cube.isel(x=slice(2)), ["a"]), cube.isel(x=slice(2, 4))]
    assert xr.concat(pieces, "x").sizes == {"x": 4}


def test_a_mask_has_one_meaning_in_core_and_on_cubes() -> None:
    mask = np.array([0.0, -0.0, 1.0, -2.5, np.nan, np.inf])
    cube = xr.Dataset({"t": ("x", np.ones(mask.size)), "filter_mask": ("x", mask)})
    for of_any_kind in (cube, cube.chunk(x=4)):
        kept = pp.apply_filter(of_any_kind).t.notnull().values
        assert kept.tolist() == bool_mask(mask).tolist() == [False, False, True, True, False, False]
