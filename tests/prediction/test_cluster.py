"""predict_cube on a dask cluster: the same bytes as in this process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

from ml4cube.cube.engine import DaskCluster
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import InvalidTypeError, RunError
from ml4cube.prediction import predict_cube
from tests.clusters import local_cluster
from tests.cubes import cell_id_cube
from tests.faults.test_sampling_faults import tree

BATCH = {"batch_size": 4}


@pytest.fixture(scope="module")
def client():
    from distributed import Client

    cluster = local_cluster(2, processes=True)
    with cluster, Client(cluster) as client:
        yield client


def forecast(out, client=None, model=None, **options):
    cube = cell_id_cube({"time": 9, "lat": 6, "lon": 8}, gaps=0.1, names=("a", "b"))
    data = PTXrDataset(
        cube,
        "a",
        ["a", "b"],
        sample_size={"lat": 3, "lon": 4},
        target_offset={"time": 1},
        fill_method={"a": "mean", "b": "mean"},
        drop_nan=None,
    )
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Dropout(0.5), nn.Conv2d(8, 1, 1))
    return predict_cube(
        model or made, cube, data, out=out, overlap=0.5, client=client, progress=False, **options
    )


@pytest.fixture
def one_thread():
    """As in dask's workers; another number of threads changes last bits of a convolution."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_workers_write_the_bytes_of_one_process(tmp_path, client, one_thread, monkeypatch):
    monkeypatch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (100, 100))
    for name, given in (("here", None), ("cluster", client)):
        forecast(tmp_path / f"{name}.zarr", given, samples=3, rollout=2)
    assert tree(tmp_path / "here.zarr") == tree(tmp_path / "cluster.zarr")
    here, there = (forecast(None, given) for given in (None, client.scheduler.address))
    np.testing.assert_array_equal(here.a, there.a)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stored", "in memory", "on a GPU"])
def test_an_active_client_predicts_what_it_can_read(tmp_path, client, monkeypatch, where):
    runs = []
    run = DaskCluster.run
    monkeypatch.setattr(DaskCluster, "run", lambda *given: runs.append(1) or run(*given))
    cube = cell_id_cube({"time": 8, "lat": 4}, "float32")
    expected = predict_cube(lambda x: 2 * x, cube, features="a", out=None, progress=False)
    assert not runs
    if where != "in memory":
        cube.to_zarr(tmp_path / "c.zarr")
        cube = xr.open_zarr(tmp_path / "c.zarr", chunks=None)
    if where == "on a GPU":
        monkeypatch.setattr("ml4cube.prediction.run.device_of", lambda *given: torch.device("meta"))
    found = predict_cube(lambda x: 2 * x, cube, features="a", out=None, progress=False, **BATCH)
    xr.testing.assert_identical(found.a, expected.a)
    assert len(runs) == (where == "stored")


@pytest.mark.slow
def test_an_error_of_a_worker_ends_the_prediction(tmp_path, client, monkeypatch):
    monkeypatch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (100, 100))
    calls = []

    def model(x):
        calls.append(1)  # once in this process, for the layout of the results
        return x[:, :1] if len(calls) == 1 else 1 / 0

    with pytest.raises(RunError, match=r"ZeroDivisionError: division by zero .raised in a worker"):
        forecast(tmp_path / "cube.zarr", client, model)
    assert not (tmp_path / "cube.zarr").exists()


def test_a_bad_client_is_named(tmp_path):
    with pytest.raises(InvalidTypeError, match=r"client must be a dask\.distributed Client"):
        forecast(tmp_path / "cube.zarr", 3)
