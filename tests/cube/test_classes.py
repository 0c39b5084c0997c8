"""One rule says which variables hold classes; statistics, samples and fills leave these alone."""

import warnings

import netCDF4
import numpy as np
import pytest
import xarray as xr

from ml4cube.cube.classes import class_names, holds_classes
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.gap_filling import fill_gaps
from ml4cube.preprocessing import CubeScaler, Statistics, get_range, get_statistics, standardize
from ml4cube.splits import assign_time_split

FLAGS = {"flag_values": np.array([10, 20, 30], "i1"), "flag_meanings": "water land ice"}


def cube():
    """A temperature, and land cover with gaps as xarray decodes it."""
    rng = np.random.default_rng(0)
    t = rng.normal(280, 9, (12, 4, 6)).astype("float32")
    cover = rng.choice([10.0, 20.0, 30.0], t.shape).astype("float32")
    cover[rng.random(t.shape) < 0.1] = np.nan
    dims = ("time", "lat", "lon")
    return xr.Dataset({"t": (dims, t, {"units": "K"}), "cover": (dims, cover, FLAGS)})


@pytest.mark.parametrize(
    ("dtype", "attrs", "expected"),
    [
        ("float32", {}, False),
        ("int16", {}, True),
        ("bool", {"units": "K"}, True),
        ("float32", FLAGS, True),
        ("float32", {"flag_meanings": "a b"}, True),
        ("float32", {"flag_masks": np.array([1, 2])}, True),
        ("float32", FLAGS | {"units": "1"}, True),
        # what xarray computes from a temperature and land cover has the attributes of both
        ("float32", FLAGS | {"units": "K"}, False),
        ("datetime64[ns]", {}, False),
    ],
)
def test_classes_are_known_by_dtype_or_flags(dtype, attrs, expected):
    assert holds_classes(xr.Variable("x", np.zeros(2, dtype), attrs)) == expected


def test_names_are_those_of_the_flags_and_numbers_where_some_lack():
    assert class_names(cube().cover) == {10.0: "water", 20.0: "land", 30.0: "ice"}
    few = xr.Variable("x", [0.5, 1.0], {"flag_values": [0.5, 1.0], "flag_meanings": "low"})
    assert class_names(few) == {0.5: "low", 1.0: "1"}
    assert class_names(xr.Variable("x", [True])) == {0.0: "False", 1.0: "True"}
    assert class_names(xr.Variable("x", [1])) == {}


def test_statistics_leave_out_what_has_flags_and_say_so():
    with pytest.warns(UserWarning, match=r"\['cover'\] hold classes .* and have no statistics"):
        found = get_statistics(cube())
    assert list(found) == ["t"]
    assert list(get_range(cube())) == ["t"]
    assert list(Statistics.from_cube(cube(), ["cover"])) == ["cover"]  # if asked for by name
    scaled = standardize(cube(), found)
    xr.testing.assert_identical(scaled.cover, cube().cover)
    scaler = CubeScaler().fit(cube())
    xr.testing.assert_identical(scaler.transform(cube()).cover, cube().cover)
    with pytest.raises(InvalidValueError, match=r"\['cover'\] hold classes by flag_values or"):
        get_statistics(cube()[["cover"]])


def test_features_that_are_not_scaled_are_named():
    made = assign_time_split(cube(), 0.7)
    with pytest.warns(UserWarning, match=r"\['cover'\] hold classes .* and are not scaled"):
        PTXrDataset(made, "t", features=["cover"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* hold classes")
        PTXrDataset(made, "cover", features=["t"])
        PTXrDataset(made, "t", features=["cover"], scale_fn=None)


def test_samples_of_labels_are_not_scaled(tmp_path):
    labels = {10.0, 20.0, 30.0}
    made = assign_time_split(cube(), 0.6)
    cut = {"sample_size": {"lat": 2, "lon": 3}, "drop_nan": "if_all_nan"}
    lazy = PTXrDataset(made, "cover", **cut)
    store = str(tmp_path / "train.zarr")
    paths = {"train_cube": store, "test_cube": str(tmp_path / "test.zarr")}
    MultiProcSampler(made, to_pred="cover", nproc=1, progress=False, **paths, **cut).run()
    for data in (lazy, PTXrDataset(store, "cover")):
        assert list(data.statistics) == ["t"]
        target = data.take(range(len(data)))[1]
        assert set(target[target.isfinite()].tolist()) == labels
    (_, train), _ = XrDataset(made, to_pred="cover", **cut).get_datasets()
    assert set(np.unique(train[np.isfinite(train)])) == labels


@pytest.mark.parametrize("method", ["mean", "sample_mean", "noise"])
def test_gaps_of_labels_are_not_filled_with_numbers_that_are_none(method):
    message = f"'cover' holds classes by its flags, and '{method}' would fill its gaps"
    with pytest.raises(InvalidValueError, match=message):
        PTXrDataset(cube(), "t", fill_method=method)
    filled = PTXrDataset(cube(), "t", fill_method={"cover": "constant"}, const=20.0)
    assert set(filled.take(range(len(filled)))[0].unique().tolist()) == {10.0, 20.0, 30.0}
    PTXrDataset(cube(), "cover", fill_method=method)  # targets stay as they are


def test_gaps_of_labels_are_not_interpolated():
    with pytest.raises(InvalidTypeError, match=r"got 'cover' of dtype float32, .* classes by its"):
        fill_gaps(cube(), variables="cover")


def test_flags_of_unsigned_bytes_in_netcdf_are_those_of_the_decoded_variable(tmp_path):
    with netCDF4.Dataset(tmp_path / "cover.nc", "w") as file:
        file.createDimension("x", 3)
        variable = file.createVariable("cover", "i1", ("x",))
        variable.set_auto_maskandscale(False)
        flags = np.array([10, -126, -56], "i1")
        variable.setncatts({"_Unsigned": "true", "flag_values": flags, "flag_meanings": "a b c"})
        variable[:] = flags
    with xr.open_dataset(tmp_path / "cover.nc") as ds:
        assert class_names(ds["cover"]) == {10.0: "a", 130.0: "b", 200.0: "c"}
