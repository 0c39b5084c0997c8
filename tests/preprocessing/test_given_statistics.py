"""`standardize(statistics=...)`: numbers of a scaler, a store or other statistics."""

import numpy as np
import pytest
import xarray as xr

from ml4cube import MultiProcSampler, open_store
from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.postprocessing import undo_standardizing
from ml4cube.preprocessing import CubeScaler, Statistics, get_range, normalize, standardize
from ml4cube.splits import assign_block_split


@pytest.fixture
def cube():
    values = np.random.default_rng(0).normal(size=(8, 2, 4)) * [[[1.0], [50.0]]]
    ds = xr.Dataset(
        {"t": (("time", "level", "lat"), values, {"units": "K"})},
        {"level": [500, 850], "lat": np.arange(4.0)},
    )
    return assign_block_split(ds, {"time": 2}, 0.75, seed=1)


def store_of(cube, folder, **arguments):
    paths = {part: str(folder / f"{part}.zarr") for part in ("train_cube", "test_cube")}
    MultiProcSampler(cube, nproc=1, progress=False, **paths, **arguments).run()
    return paths["train_cube"]


def by_hand(cube):
    train = cube.t.where(cube.split == 1)
    dims = ["time", "lat"]
    return (cube.t - train.mean(dims)) / train.std(dims)


def test_statistics_of_a_scaler_a_store_and_its_path_scale_alike(cube, tmp_path):
    scaler = CubeScaler(per=("variable", "level")).fit(cube)
    path = store_of(cube, tmp_path, statistics=scaler)
    for given in (scaler, scaler.statistics_, path, open_store(path)):
        scaled = standardize(cube, statistics=given)
        xr.testing.assert_allclose(scaled.t, by_hand(cube))
        xr.testing.assert_identical(scaled, scaler.transform(cube))
        xr.testing.assert_allclose(undo_standardizing(scaled, scaler.statistics_), cube)


def test_normalize_takes_the_same(cube, tmp_path):
    path = store_of(cube, tmp_path, scale_fn="normalize")
    for given in (CubeScaler("normalize").fit(cube), path, Statistics.from_cube(cube)):
        wanted = normalize(cube, get_range(cube))
        xr.testing.assert_identical(normalize(cube, statistics=given), wanted)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, InvalidTypeError, "stats_dict or statistics"),
        ({"stats_dict": {"t": [0, 1]}, "statistics": 1}, InvalidTypeError, "not both"),
        ({"statistics": {"t": [0, 1]}}, InvalidTypeError, "statistics .*dict"),
        ({"statistics": 3}, InvalidTypeError, "statistics .*int"),
        ({"statistics": "none.zarr"}, StoreError, "none.zarr"),
    ],
)
def test_what_is_no_statistics_is_refused(cube, given, error, words):
    with pytest.raises(error, match=words):
        standardize(cube, **given)


@pytest.mark.parametrize("method", ["normalize", "robust"])
def test_a_scaler_of_another_method_is_refused(cube, method):
    with pytest.raises(InvalidValueError, match=f"'standardize'.*{method!r}"):
        standardize(cube, statistics=CubeScaler(method).fit(cube))


def test_a_store_that_was_not_scaled_is_refused(cube, tmp_path):
    with pytest.raises(InvalidValueError, match="not scaled"):
        standardize(cube, statistics=store_of(cube, tmp_path, scale_fn=None))


def test_a_static_variable_that_scaling_per_pixel_erases_is_named(cube, tmp_path, caplog):
    cube["elevation"] = "lat", [0.0, 100.0, 500.0, 2000.0]
    cube["repeated"] = (cube.t * 0 + cube.elevation).transpose(*cube.t.dims)
    pixel = CubeScaler(per=("variable", "level", "lat"))
    stats = pixel.fit(cube).statistics_
    erased = "['elevation', 'repeated'] keep dims and have no spread"
    for scale in (
        pixel.transform,
        lambda cube: standardize(cube, stats.mean_std()),
        lambda cube: normalize(cube, stats.range()),
        lambda cube: store_of(cube, tmp_path, statistics=stats),
    ):
        caplog.clear()
        scale(cube)
        assert [erased in record.getMessage() for record in caplog.records].count(True) == 1
    caplog.clear()
    pixel.inverse_transform(cube)
    CubeScaler(per=("variable", "level")).fit(cube).transform(cube)
    assert erased not in caplog.text
