"""The examples run as their first lines say, one after the other, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

EXAMPLES = Path(__file__).parent.parent / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder, *arguments, ranks=0):
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_stores_then_training_on_two_ranks(tmp_path):
    creation = str(EXAMPLES / "distributed_dataset_creation.py")
    training = str(EXAMPLES / "distributed_training.py")

    printed = run(tmp_path, creation)
    assert "train" in printed

    report = run(tmp_path, training, "--epochs", "2", ranks=2)
    assert "rank" in report
    stores = tmp_path / "stores"
    assert (stores / "best_model.pt").exists()
    assert list(stores.glob("*.png"))


@pytest.mark.slow
def test_predict_cube(tmp_path):
    run(tmp_path, str(EXAMPLES / "predict_cube.py"))
    written = [xr.open_zarr(path) for path in tmp_path.rglob("*.zarr")]
    assert any("units" in cube[name].attrs for cube in written for name in cube.data_vars)


@pytest.mark.slow
def test_sample_on_a_cluster(tmp_path):
    assert "train and" in run(tmp_path, str(EXAMPLES / "sample_on_cluster.py"))
    shards = (tmp_path / "cluster-stores" / "train.zarr" / "temperature" / "c").rglob("0")
    assert any(shard.is_file() for shard in shards)


@pytest.mark.slow
def test_forecast_with_its_scorecard(tmp_path):
    printed = run(tmp_path, str(EXAMPLES / "forecast.py"), "--epochs", "1")
    for baseline in ("persistence", "damped_persistence", "climatology"):
        assert f" {baseline}" in printed.splitlines()[2]  # a column of the table
    written = xr.open_zarr(tmp_path / "forecast-output" / "forecast.zarr", decode_timedelta=True)
    assert written.anomaly.dims == ("init_time", "lead_time", "latitude", "longitude")
    assert written.sizes["lead_time"] == 6
    assert (tmp_path / "forecast-output" / "scorecard.png").exists()
