"""`ds.ml4cube` passes a cube on to the functions that take one."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import ml4cube.accessor  # noqa: F401  # it registers itself
from ml4cube.errors import InvalidValueError
from ml4cube.gap_filling import fill_gaps
from ml4cube.insights import get_insights
from ml4cube.preprocessing import get_statistics
from ml4cube.splits import assign_block_split, assign_time_split, leakage_report


@pytest.fixture
def cube():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(30, 6, 8))
    values[4:6, 2] = np.nan
    coords = {"time": pd.date_range("2000", periods=30), "lat": np.arange(6.0)}
    return xr.Dataset({"t": (("time", "lat", "lon"), values)}, coords | {"lon": np.arange(8.0)})


def test_splits_and_what_describes_a_cube(cube):
    blocks = {"lat": 2, "lon": 2}
    split = cube.ml4cube.split("block", blocks, split=0.7)
    xr.testing.assert_identical(split, assign_block_split(cube, blocks, split=0.7))
    xr.testing.assert_identical(cube.ml4cube.split("time", 0.7), assign_time_split(cube, 0.7))
    assert split.ml4cube.statistics() == get_statistics(split)
    assert str(split.ml4cube.leakage(var="t")) == str(leakage_report(split, var="t"))
    xr.testing.assert_identical(cube.ml4cube.insights(), get_insights(cube))
    for filled, expected in zip(
        cube.ml4cube.fill_gaps("t", "linear"), fill_gaps(cube, "t", "linear"), strict=True
    ):
        xr.testing.assert_identical(filled, expected)
    with pytest.raises(InvalidValueError, match="method must be"):
        cube.ml4cube.split("blocks")


def test_from_a_cube_to_a_score(cube, tmp_path):
    torch = pytest.importorskip("torch")
    split = cube.ml4cube.split("time", 0.7)
    paths = {"train_cube": tmp_path / "train.zarr", "test_cube": tmp_path / "test.zarr"}
    split.ml4cube.sampler(sample_size={"lat": 3}, **paths).run()
    assert paths["train_cube"].exists()
    predicted = cube.ml4cube.predict(
        torch.nn.Identity(), {"t": [1.0, 2.0]}, sample_size={"lat": 3}, progress=False
    )
    np.testing.assert_allclose(predicted.t, cube.t, rtol=1e-5, equal_nan=True)
    card = predicted.ml4cube.evaluate(split, baselines=[], progress=False)
    assert float(card.scores["rmse"].sel(model="prediction").max()) < 1e-5
