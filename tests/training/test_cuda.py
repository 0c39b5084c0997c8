"""What only a GPU can show: copies beside the computing, precision, nccl, resuming, prediction.

Skipped where there is none. nccl needs a GPU for each rank, so one rank stands for several here.
"""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch import nn

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.prediction import predict_cube
from ml4cube.training.pytorch import Trainer
from ml4cube.training.ranks.dist import World, ddp_cleanup, ddp_init
from ml4cube.training.run.epoch_times import StepClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda:0"


def samples(n, channels=3, cells=16):
    rng = np.random.default_rng(0)
    names = [f"v{number:02}" for number in range(channels)] + ["y"]
    shape = (n, cells, cells)
    values = {name: rng.standard_normal(shape, np.float32) for name in names}
    variables = {name: (("samples", "lat", "lon"), array) for name, array in values.items()}
    return PTXrDataset(xr.Dataset(variables), to_pred="y")


def network(channels=3, dropout=0.1):
    torch.manual_seed(0)
    first = nn.Conv2d(channels, 8, 3, padding=1)
    return nn.Sequential(
        first, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(8, 1, 1)
    )


def trainer(folder, epochs=2, **options):
    data = samples(128)
    loaders = prep_dataloader(data, val_ds=data, batch_size=32)
    model = network()
    return Trainer(
        model,
        *loaders,
        torch.optim.AdamW(model.parameters()),
        loss=nn.MSELoss(),
        epochs=epochs,
        metrics={"mae": nn.L1Loss()},
        ema=0.9,
        log_grad_norm=True,
        gradient_clip=1.0,
        save_every=1,
        early_stopping=False,
        seed=1,
        snapshot_path=str(folder / "snapshot.pt"),
        **options,
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_are_those_of_the_cpu(tmp_path, precision, compiled):
    on_gpu = trainer(tmp_path / "gpu", precision=precision, compile=compiled)
    on_gpu.train()
    on_cpu = trainer(tmp_path / "cpu", device="cpu")
    on_cpu.train()
    # Dropout draws other numbers on a GPU.
    assert on_gpu.history["val_loss"] == pytest.approx(on_cpu.history["val_loss"], rel=0.02)


@pytest.mark.parametrize("buffer_mb", [64, 512])
@pytest.mark.parametrize("side", ["loader", "trainer"])
def test_batches_arrive_whole_while_the_gpu_computes(buffer_mb, side):
    """Each batch has 20 MB; its sums are compared with those of the loader without a GPU."""
    data = samples(1500, channels=4, cells=64)
    options = {"batch_size": 256, "buffer_mb": buffer_mb, "seed": 3}
    expected = [
        torch.stack([x.double().sum(), y.double().sum()])
        for x, y in prep_dataloader(data, **options)
    ]
    device = GPU if side == "loader" else None
    load = torch.randn(4096, 4096, device=GPU)
    found = []

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            for _ in range(5):
                load @ load
            return x * self.weight

    def loss(out, y):
        found.append(torch.stack([out.detach().double().sum(), y.double().sum()]))
        return out.mean() * 0

    loader = prep_dataloader(data, device=device, **options)
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    Trainer(model, loader, None, optimizer, loss=loss, epochs=1, device=GPU).train()
    found = [sums.cpu() for sums in found]
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    """With torch's deterministic algorithms, without which no two runs on a GPU are alike."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        trainer(tmp_path / "two", epochs=2).train()
        resumed = trainer(tmp_path / "two", epochs=4)
        resumed.train()
        whole = trainer(tmp_path / "one", epochs=4)
        whole.train()
    finally:
        torch.use_deterministic_algorithms(False)
    weights, of_resumed = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in weights if not torch.equal(weights[name], of_resumed[name])] == []


@pytest.fixture
def group(monkeypatch):
    """A group of one, as torchrun would make it, that takes the ways of many ranks."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}.items():
        monkeypatch.setenv(name, value)
    yield World(0, 2, ddp_init().device)
    ddp_cleanup()


def test_what_is_in_main_memory_does_not_pass_through_the_gpu(group):
    assert group.device == torch.device(GPU)
    before = torch.cuda.memory_allocated()
    assert group.maximum([True, 0.25, 3]) == [1, 0.25, 3]
    assert group.total([1.5]) == [1.5]
    assert group.broadcast({"a": 1}) == {"a": 1}
    assert group.gather_objects({"a": 1})[0] == {"a": 1}
    assert World(0, 2, torch.device("cpu")).total([1.0]) == [1.0]
    cpu_tensor = torch.ones(3)
    group.broadcast_tensors([cpu_tensor, torch.ones(2, dtype=torch.bool)])
    assert group.sum_tensor(cpu_tensor).device.type == "cpu"
    assert torch.cuda.memory_allocated() == before
    assert group.sum_tensor(torch.ones((), device=GPU)).device == torch.device(GPU)
    group.barrier()


def test_a_group_of_the_caller_may_have_nccl_alone(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29534")
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        world = World(0, 2, torch.device(GPU))
        assert world.maximum([0.25]) == [0.25]
        assert world.broadcast([1]) == [1]
        assert world.sum_tensor(torch.ones(2)).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_waiting_for_other_ranks_is_measured_by_events(group):
    model = network().to(GPU)
    spread = nn.parallel.DistributedDataParallel(model, device_ids=[group.device])
    clock = StepClock(group)
    for step in range(4):
        with clock.timed(model, step):
            spread(torch.randn(4, 3, 16, 16, device=GPU)).mean().backward()
            clock.end_backward()
    assert 0 <= clock.waiting_fraction() < 1


CUBE_SHAPE = (24, 48, 48)


@pytest.fixture(scope="module")
def cube():
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(CUBE_SHAPE, np.float32) for name in "ab"}
    values["a"][5, 10:20, 10:20] = np.nan
    coords = {"time": pd.date_range("2000", periods=24), "lat": np.linspace(60, 30, 48)}
    coords["lon"] = np.linspace(0, 30, 48)
    return xr.Dataset({name: (tuple(coords), array) for name, array in values.items()}, coords)


def volumes(dropout=0.0):
    torch.manual_seed(0)
    last = nn.Conv3d(8, 1, 1)
    return nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.Dropout(dropout), last).eval()


WINDOWS = {
    "features": ["a", "b"],
    "targets": "b",
    "sample_size": [("time", 4), ("lat", 16), ("lon", 16)],
    "progress": False,
}


@pytest.mark.parametrize("overlap", [None, {"lat": 0.5, "lon": 0.5}])
def test_predictions_are_those_of_the_cpu(cube, overlap):
    model = volumes()
    there = predict_cube(copy.deepcopy(model), cube, device="cpu", overlap=overlap, **WINDOWS)
    here = predict_cube(model.to(GPU), cube, overlap=overlap, **WINDOWS)
    assert next(model.parameters()).device == torch.device(GPU)
    # Convolutions of a GPU multiply in TF32, with 10 bits.
    xr.testing.assert_allclose(here.load(), there.load(), atol=5e-3)


def test_dropout_draws_the_same_numbers_from_the_same_seed(cube):
    model = volumes(0.5).to(GPU)
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    seeds = (1, 1, 2)
    one, same, other = (
        predict_cube(model, cube, samples=4, seed=seed, **WINDOWS).load() for seed in seeds
    )
    xr.testing.assert_allclose(one, same, rtol=0, atol=1e-6)
    assert not np.allclose(one["b_spread"], other["b_spread"], equal_nan=True)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (one["b_spread"].mean() > 0).item()


def test_a_list_of_models_on_cpu_and_gpu_gives_their_mean(cube):
    models = [volumes(), volumes().to(GPU)]
    found = predict_cube(models, cube, **WINDOWS).load()
    alone = predict_cube(models[0], cube, **WINDOWS).load()
    xr.testing.assert_allclose(found[["b"]], alone, atol=5e-3)
    assert [next(model.parameters()).device.type for model in models] == ["cpu", "cuda"]
