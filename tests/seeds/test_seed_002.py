"""ml4xcube's road: a cube becomes stores, stores become loaders, loaders train a model."""

import shutil

import numpy as np
import pytest
import torch
import xarray as xr

from tests.seeds import block
from tests.seeds.running import run_script

# `train_data` and `test_data` are never defined in the blocks; they stand for the
# arrays of the opened stores.
SUPPLIED = """
import xarray as xr
train_data = xr.open_zarr("train.zarr").data_vars
test_data = xr.open_zarr("test.zarr").data_vars
batch_size, save_every, best_model_path = 64, 2, "best_model.pt"
"""
AFTERWARDS = """
import torch.distributed
rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
trained = dist_train(trainer)
# one write, so that lines of two ranks do not mix
import sys
sys.stdout.write(f"rank {rank} epochs {len(trainer.history.to_dict()['train_loss'])}\\n")
"""


def write_cube(folder):
    values = np.random.default_rng(0).normal(280, 5, size=(12, 20, 20)).astype("float32")
    values[:, :3, :3] = np.nan
    cube = xr.Dataset({"temperature": (("time", "lat", "lon"), values)})
    cube.chunk({"time": 3, "lat": 10, "lon": 10}).to_zarr(folder / "sample_data.zarr")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The first block, run once for all that train on what it wrote."""
    folder = tmp_path_factory.mktemp("sampled")
    write_cube(folder)
    run_script(folder, block("002_1"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_the_three_blocks_run_one_after_the_other(sampled, tmp_path, ranks):
    folder = tmp_path / "own"  # a run that has been there before would be resumed
    shutil.copytree(sampled, folder)
    train, test = (xr.open_zarr(folder / name) for name in ("train.zarr", "test.zarr"))
    valid = 12 * 20 * 20 - 12 * 3 * 3
    assert train.sizes["samples"] + test.sizes["samples"] == valid
    assert abs(float(train["temperature"].mean())) < 1e-4  # standardized on the train part

    printed = run_script(
        folder, SUPPLIED + block("002_2") + block("002_3") + AFTERWARDS, ranks=ranks
    )

    for rank in range(max(ranks, 1)):
        assert f"rank {rank} epochs" in printed
    saved = torch.load(folder / "best_model.pt", weights_only=True)
    assert set(saved) == {"weight", "bias"}


@pytest.mark.slow
def test_windows_and_overlap_as_the_text_says(tmp_path):
    write_cube(tmp_path)
    call = block("002_1").replace(
        "nproc       = 5,",
        "nproc       = 2, sample_size=[('time', 1), ('lat', 3), ('lon', 3)],"
        " overlap=[('time', 0.), ('lat', 0.33), ('lon', 0.33)],",
    )
    run_script(tmp_path, call)
    train = xr.open_zarr(tmp_path / "train.zarr")
    assert dict(train.sizes).keys() == {"samples", "lat", "lon"}
    assert train.sizes["lat"] == train.sizes["lon"] == 3
