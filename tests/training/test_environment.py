"""Ranks and devices as the environment says, on machines that are not at hand."""

import pytest
import torch

from ml4cube.errors import InvalidValueError
from ml4cube.training.ranks.environment import (
    choose_backend,
    choose_device,
    first_host,
    pick_of,
    refuse_mpirun,
    slurm_variables,
    tasks_per_node,
)

# What srun sets for the last of seven tasks on two nodes.
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


def test_a_task_of_srun_is_a_rank():
    assert slurm_variables(TASK) == {
        "RANK": "6",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "node02",
        "MASTER_PORT": "16236",
    }
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert slurm_variables(TASK | own).items() >= own.items()
    other_step = slurm_variables(TASK | {"SLURM_STEP_ID": "3"})
    assert other_step["MASTER_PORT"] != slurm_variables(TASK)["MASTER_PORT"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # in a batch script or an allocation, where the tasks have not been started
        {n: v for n, v in TASK.items() if not n.startswith("SLURM_STEP")},
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell
        TASK | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun, started by srun on each node
    ],
)
def test_other_processes_of_a_job_are_no_ranks(environ):
    assert slurm_variables(environ) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,07]", "node01"),
        ("node[007,009-012],login", "node007"),
        ("a1,b[2-3]", "a1"),
        ("rack[0-1]node[3-4]-ib,x", "rack0node3-ib"),
        ("gpu-a-[5]", "gpu-a-5"),
        ("c.example.org", "c.example.org"),
    ],
)
def test_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_nodes():
    assert tasks_per_node("2") == [2]
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("1,16(x3)") == [1, 16, 16, 16]


@pytest.mark.parametrize(
    ("wanted", "environ", "gpus", "size", "device"),
    [
        (None, {}, 0, 1, "cpu"),
        (None, {"LOCAL_RANK": "3"}, 0, 4, "cpu"),
        ("cpu", {"LOCAL_RANK": "3"}, 4, 4, "cpu"),
        (None, {"LOCAL_RANK": "3"}, 4, 8, "cuda:3"),
        ("cuda", {"LOCAL_RANK": "3"}, 4, 8, "cuda:3"),
        ("cuda:1", {"LOCAL_RANK": "3"}, 4, 8, "cuda:1"),
        # every rank sees its own GPU, by CUDA_VISIBLE_DEVICES or --gpus-per-task
        (None, {"LOCAL_RANK": "3"}, 1, 8, "cuda:0"),
        (None, {"LOCAL_RANK": "0"}, 1, 8, "cuda:0"),
        (None, {}, 1, 8, "cuda:2"),
        (None, {"LOCAL_RANK": "3"}, 2, 4, "cuda:1"),  # shared; said with the backend
        (None, {}, 4, 1, "cuda:2"),  # as torch.cuda.set_device chose
        ("cuda", {}, 4, 8, "cuda:2"),
        (None, {}, 4, 8, "which of 4 GPUs this rank is to use is not known"),
        ("cuda:4", {}, 4, 8, "device='cuda:4', but this machine has 4 GPUs; use device='cpu'"),
        ("cuda", {"LOCAL_RANK": "0"}, 0, 2, "this machine has 0 GPUs"),
    ],
)
def test_the_device_of_a_rank(wanted, environ, gpus, size, device):
    def choose():
        found = None if wanted is None else torch.device(wanted)
        return str(choose_device(found, environ, gpus=gpus, current=2, size=size))

    if " " in device:
        with pytest.raises(InvalidValueError, match=device):
            choose()
    else:
        assert choose() == device


def test_a_list_of_devices_is_by_local_rank(monkeypatch):
    devices = ["cuda:2", "cuda:3"]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert pick_of(devices) == "cuda:2"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert pick_of(["cpu"]) == "cpu"
    with pytest.raises(InvalidValueError, match="which of 2 devices this rank is to use is not"):
        pick_of(devices)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert pick_of([*devices, "cuda:5"]) == "cuda:5"  # before ddp_init read SLURM's variables
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "7")
    assert pick_of(devices) == "cuda:3"


@pytest.mark.parametrize(
    ("wanted", "gpus", "backend", "obstacle"),
    [
        (None, ["", ""], "gloo", None),
        (None, ["a", "b"], "nccl", None),
        ("gloo", ["a", "b"], "gloo", None),
        (None, ["a", "a", "b"], "gloo", "ranks [0, 1] share GPUs"),
        (None, ["a", "", "b"], "gloo", "ranks [1] have no GPU"),
    ],
)
def test_all_ranks_choose_the_same_backend(monkeypatch, wanted, gpus, backend, obstacle):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_backend(wanted, gpus) == (backend, obstacle)


@pytest.mark.parametrize(("gpus", "why"), [("aa", "share GPUs"), (["", ""], "have no GPU")])
def test_nccl_is_refused_where_it_cannot_work(gpus, why):
    with pytest.raises(InvalidValueError, match=rf"but ranks \[0, 1\] {why}; use backend='gloo'"):
        choose_backend("nccl", list(gpus))


def test_processes_of_mpirun_are_refused_unless_they_know_their_rank():
    of_mpirun = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    with pytest.raises(InvalidValueError, match=r"mpirun started 2 processes.* torchrun or srun"):
        refuse_mpirun(of_mpirun)
    refuse_mpirun(of_mpirun | {"RANK": "1"})
    refuse_mpirun({"OMPI_COMM_WORLD_SIZE": "1"})
    refuse_mpirun({})
