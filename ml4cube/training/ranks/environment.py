"""What the environment says about this process: its rank, its device, and how ranks communicate.

torchrun says it in variables such as RANK and LOCAL_RANK; those of SLURM's srun are translated into
these. The choices are functions of variables and counts alone, so that they can be tested for
machines that are not at hand.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ml4cube.core.errors import InvalidValueError

Device = TypeVar("Device")

_PORTS = 15_000  # the first of as many, below those that systems give to outgoing connections


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task that srun started beside others; else none."""
    # In a batch script or an allocation, SLURM_NTASKS counts tasks that may never be started; only
    # srun sets the number of those that it starts.
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", 1))
    if "RANK" in environ or tasks == 1:
        return {}
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    defaults = {
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_PORTS + (job + step) % _PORTS),
    }
    tasks_of_nodes = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_nodes[int(environ["SLURM_NODEID"])]),
        **{name: environ.get(name, value) for name, value in defaults.items()},
    }


def refuse_mpirun(environ: Mapping[str, str]) -> None:
    """Refuse processes that mpirun started, which would not know of one another."""
    size = int(environ.get("OMPI_COMM_WORLD_SIZE", 1))
    if size > 1 and "RANK" not in environ:
        raise InvalidValueError(
            f"mpirun started {size} processes, which do not know their ranks; start them by "
            "torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; "
            "to train alone, unset OMPI_COMM_WORLD_SIZE"
        )


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: node01 of ``node[01-03,07],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def tasks_per_node(counts: str) -> list[int]:
    """Return the tasks of each node from what SLURM writes: 4, 4, 3 of ``4(x2),3``."""
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in matches for _ in range(int(nodes or 1))]


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process among those on this machine; None if it is not known."""
    variables = {**environ, **slurm_variables(environ)}
    if "LOCAL_RANK" not in variables:
        return None
    return int(variables["LOCAL_RANK"])


def choose_device(
    wanted: torch.device | None,
    environ: Mapping[str, str],
    *,
    gpus: int,
    current: int,
    size: int,
) -> torch.device:
    """Choose the device of a rank, on a machine with so many GPUs.

    `current` is the GPU that torch uses by default, `size` the number of ranks. A process that sees
    one GPU uses it, whether it is the only one of the machine or was assigned to this rank.
    """
    if wanted is not None and wanted.type != "cuda":
        return wanted
    if wanted is None and gpus == 0:
        return torch.device("cpu")
    if wanted is not None and (wanted.index or 0) >= gpus:
        raise InvalidValueError(
            f"device={str(wanted)!r}, but this machine has {gpus} GPUs; use device='cpu'"
        )
    if wanted is not None and wanted.index is not None:
        return wanted
    rank_here = local_rank(environ)
    if rank_here is not None:
        return torch.device("cuda", rank_here % gpus)
    if wanted is None and gpus > 1 and size > 1:
        raise _unknown(gpus, "GPUs")
    return torch.device("cuda", current)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    # torch may count GPUs that it cannot use, with a driver that is too old for example.
    return torch.cuda.device_count() * torch.cuda.is_available()


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device to compute on."""
    wanted = None
    try:
        if device is not None:
            wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidValueError(
            f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}"
        ) from None
    current = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device()
    size = _world_size()
    return choose_device(wanted, os.environ, gpus=count_gpus(), current=current, size=size)


def device_of_rank(device: Any) -> Any:
    """Return a device as it is given, or of several that of this rank."""
    if isinstance(device, str) or not isinstance(device, Sequence):
        return device
    if not device:
        raise InvalidValueError("device must name a device, got []; give e.g. 'cpu', or None")
    return pick_of(device)


def pick_of(devices: Sequence[Device]) -> Device:
    """Return the device of this rank, of a list for the ranks of this machine."""
    rank_here = local_rank()
    if rank_here is None and len(devices) > 1 and _world_size() > 1:
        raise _unknown(len(devices), "devices")
    return devices[(rank_here or 0) % len(devices)]


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return 1


def _unknown(count: int, things: str) -> InvalidValueError:
    return InvalidValueError(
        f"which of {count} {things} this rank is to use is not known, because LOCAL_RANK is not "
        "set; set it, or call torch.cuda.set_device and give device='cuda'"
    )


def gpu_name(device: torch.device) -> str:
    """Return a name of a GPU that no other one has, on any machine; of other devices none."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(wanted: str | None, gpus: Sequence[str]) -> tuple[str, str | None]:
    """Choose the backend of all ranks by the names of their GPUs.

    Also return why it is not nccl, if there are GPUs.
    """
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    times = Counter(gpus)
    sharing = [rank for rank, gpu in enumerate(gpus) if times[gpu] > 1]
    obstacle = None
    if without:
        obstacle = f"ranks {without} have no GPU"
    elif sharing:
        obstacle = f"ranks {sharing} share GPUs"
    elif not dist.is_nccl_available():
        obstacle = "this torch has no nccl"
    if wanted == "nccl" and obstacle is not None:
        raise InvalidValueError(
            f"backend='nccl' needs a GPU for every rank, but {obstacle}; use backend='gloo'"
        )
    has_gpus = len(without) < len(gpus)
    return wanted or ("gloo" if obstacle else "nccl"), obstacle if has_gpus else None
