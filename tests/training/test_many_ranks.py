"""Three ranks and more, whose sums depend on their order; late ranks; groups of the caller."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ml4cube.errors import RunError
from ml4cube.prediction.cube import predict_cube
from ml4cube.training.addons import mpu
from ml4cube.training.events import Callback
from ml4cube.training.ranks import dist as ranks_dist
from ml4cube.training.ranks import strategy, world
from ml4cube.training.ranks.dist import World, ddp_cleanup, launch
from ml4cube.training.ranks.messages import is_lost_connection, reporting_errors
from ml4cube.training.trainer import Trainer
from tests.distributed_runner import assert_same_on_all_ranks, kept_ranks, on_ranks
from tests.training_parts import At, Save, dataset, resumed_alike, trainer, weights

pytestmark = pytest.mark.slow


class SmallBuckets(DistributedDataParallel):
    """Reduces gradients in many pieces, as those of a large model."""

    def __init__(self, module, **arguments):
        super().__init__(module, bucket_cap_mb=0.01, **arguments)


class Crossed(nn.Module):
    """Uses its layers in another order than it has them, so that DDP arranges them anew."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(40, 1), nn.Linear(3, 40)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in (*self.middle[2:], *self.middle[:2]):
            x = torch.tanh(layer(x)) + x
        return self.last(x)


def goes_on_bit_for_bit(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "DistributedDataParallel", SmallBuckets)

        def fresh(**more):
            torch.manual_seed(5)
            return trainer(ranks=True, model=Crossed(), samples=60, epochs=3, lr=0.01, **more)

        for step in (1, 7):
            path = f"{folder}/{step}.pt"
            position, resumed = resumed_alike(path, fresh, Save(step), At(step + 1))
            assert position["step"] == step
            assert_same_on_all_ranks(weights(resumed.model))


class Complex(nn.Module):
    """Has complex weights, as Fourier neural operators."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(8, 1), nn.Parameter(torch.rand(3, 8, dtype=torch.cfloat))

    def forward(self, x):
        return self.last((x.to(torch.cfloat) @ self.first).real)


def goes_on_with_complex_weights(folder):
    def fresh(**more):
        torch.manual_seed(5)
        return trainer(ranks=True, model=Complex(), **more)

    resumed_alike(f"{folder}/snapshot.pt", fresh, Save(2), At(3))


def test_complex_weights_can_be_resumed(tmp_path):
    on_ranks(2, goes_on_with_complex_weights, str(tmp_path))


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_resumed_run_ends_alike_bit_for_bit(tmp_path, ranks):
    on_ranks(ranks, goes_on_bit_for_bit, str(tmp_path))


def waits_for_a_late_rank(folder):
    """In a group whose collectives wait for two seconds, one rank is six seconds late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp_cleanup()  # the group that met with more patience
    store = dist.FileStore(f"{folder}/store", size)
    limit = timedelta(seconds=2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    values = np.arange(64.0).reshape(8, 8)
    cube = xr.Dataset({"t": (("lat", "lon"), values)})
    calls = []

    def model(x):
        if rank == 0 and not calls:  # which has the only block
            time.sleep(6)
        calls.append(1)
        return x

    predicted = predict_cube(model, cube, out=f"{folder}/out.zarr", progress=False)
    dist.destroy_process_group()
    assert (predicted.t.values == values).all()


def test_prediction_waits_for_a_late_rank(tmp_path):
    with kept_ranks():
        launch(waits_for_a_late_rank, 2, str(tmp_path), backend="gloo")


def exchanges_beside_a_group_without_cpu(folder):
    """As a group of nccl alone; here the other backend is gloo, which has no GPU to use."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp_cleanup()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=size)
    assert "cpu:" not in dist.get_backend_config()
    ranks = World.current("cpu")
    assert ranks.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert ranks.broadcast([rank]) == [0]
    assert ranks.total([rank, 1]) == [1, 2]
    assert ranks.sum_tensor(torch.ones(2)).tolist() == [2, 2]
    own = torch.full((2,), float(rank))
    ranks.broadcast_tensors([own])
    assert own.tolist() == [0, 0]
    assert_alike_trained(trainer(ranks=True, epochs=1))
    dist.destroy_process_group()


def assert_alike_trained(run):
    model = weights(run.train())
    assert World.current("cpu").gather_objects(model) == [model, model]


def test_a_group_of_the_caller_may_lack_the_cpu(tmp_path):
    with kept_ranks():
        launch(exchanges_beside_a_group_without_cpu, 2, str(tmp_path), backend="gloo")


# ------------------------------------------------------------------ without other ranks


def test_ranks_meet_although_entries_of_dead_ones_are_left(monkeypatch):
    """Rank 0 answers what it finds, until every rank of this start has confirmed."""
    monkeypatch.setattr(ranks_dist, "_ANSWER_S", 0.05)
    store, limit = dist.HashStore(), timedelta(seconds=30)
    for rank in (1, 2):
        store.set(f"entry/{rank}", json.dumps([f"dead-{rank}", "old"]))
    with ThreadPoolExecutor(3) as pool:
        main = pool.submit(ranks_dist.meet, store, 0, 3, "zero", limit)
        store.wait(["start/dead-1"], limit)  # rank 0 has believed it
        others = [
            pool.submit(ranks_dist.meet, store, rank, 3, f"new {rank}", limit) for rank in (2, 1)
        ]
        found = [future.result() for future in (main, *others)]
        again = [pool.submit(ranks_dist.meet, store, rank, 3, rank, limit) for rank in range(3)]
        later = [future.result() for future in again]
    assert found == [(found[0][0], ["zero", "new 1", "new 2"])] * 3
    assert later == [(later[0][0], [0, 1, 2])] * 3
    assert found[0][0] != later[0][0]


def test_a_rank_that_never_comes_is_named():
    store = dist.HashStore()
    store.set("entry/1", json.dumps(["dead", None]))
    with pytest.raises(RunError, match="rank 1 has not started in time"):
        ranks_dist.meet(store, 0, 2, None, timedelta(seconds=0.1))


def test_an_exit_within_training_ends_the_program():
    """As that of a handler of SIGTERM; what comes after would take the model for a trained one."""

    class Exit(Callback):
        def on_step_end(self, loop):
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        trainer(ranks=True, train=DataLoader(dataset(8), batch_size=4), callbacks=[Exit()]).train()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (dist.DistStoreError("wait timeout after 2000ms, keys: /a"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), True),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed"),
            True,
        ),
        (RuntimeError("Gloo connectFullMesh failed with timed out connecting"), True),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed"), False),
        (RuntimeError("the server said: connection reset"), False),
        (TimeoutError("gloo"), False),
    ],
)
def test_errors_that_say_that_ranks_are_lost(error, is_lost):
    assert is_lost_connection(error) == is_lost
    with pytest.raises(type(error)) as raised, reporting_errors(World.single("cpu")):
        raise error
    assert raised.value is error  # one process has lost none


def test_after_a_failure_nothing_waits_for_other_ranks(monkeypatch, tmp_path):
    """Destroying a group of nccl does; the end of the process aborts it instead."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    destroy, destroyed = dist.destroy_process_group, []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(1))
    for backends, times in (("cpu:gloo,cuda:nccl", 0), ("cpu:gloo,cuda:gloo", 1)):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        monkeypatch.setattr(world.Joined, "group", dist.group.WORLD)
        ddp_cleanup(failed=True)
        assert len(destroyed) == times
    destroy()


def test_the_gpu_of_a_rank_is_that_of_torch(monkeypatch):
    """Also one that is given, as by MultiGPUAddon; a process without ranks changes nothing."""
    used = []
    monkeypatch.setattr(world, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    World.current("cuda:3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    World.current("cpu")
    assert used == []
    assert World.current("cuda:3").device == torch.device("cuda:3")
    assert used == [torch.device("cuda:3")]


def test_ranks_of_an_add_on_get_the_devices_that_are_given(monkeypatch):
    started = {}

    def launch(fn, nproc, *arguments, device_of_rank, **settings):
        started.update(nproc=nproc, devices=device_of_rank)
        raise InterruptedError

    monkeypatch.setattr(mpu, "launch", launch)
    model = nn.Linear(3, 1)
    run = Trainer.add_on(mpu.MultiGPUAddon)(
        model,
        device=["cpu", "cpu:0"],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
    )
    with pytest.raises(InterruptedError):
        run.run(1, [(torch.ones(4, 3), torch.ones(4, 1))] * 2)
    assert started == {"nproc": 2, "devices": [torch.device("cpu"), torch.device("cpu:0")]}
