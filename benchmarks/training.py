"""What a step of training costs beside a hand-written DDP loop, and in other libraries.

Writes `benchmarks/results/training.json`. Two gloo ranks, started by torchrun, train the same
model on the same batches in the same order: a bare loop (DistributedDataParallel, loss, backward,
step), our `Trainer` as a user makes it, and Lightning, accelerate and ignite with lean settings.
All run in turns in the same two processes. What counts is the CPU time of rank 0's main thread per
step, ends of epochs included, from batch number `WARM` to the last: what waits for the other rank
is not in it. That all did the same work is checked by the weights they end with.

Run it as ``make bench-training``, which builds an environment that has all of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RESULTS = Path(__file__).parent / "results" / "training.json"
PEERS = {"lightning": "lightning", "accelerate": "accelerate", "ignite": "pytorch-ignite"}
RANKS = 2
WARM = 10  # batches before the clock starts
SETTINGS = {
    "bare": "DistributedDataParallel; zero_grad, loss, backward, step; no loss is kept",
    "ml4cube": "pytorch_distributed.Trainer(best_model_path=..., early_stopping=True) and what it "
    "does of itself: history, best model on file, early stopping, NaN check, progress",
    "lightning": "Trainer(strategy='ddp', logger=False, enable_checkpointing=False, "
    "enable_progress_bar=False, enable_model_summary=False); nothing is logged",
    "accelerate": "Accelerator(cpu=True).prepare(model, optimizer, loader), backward(loss)",
    "ignite": "create_supervised_trainer(ddp, optimizer, loss), no handler attached",
}


@dataclass(frozen=True)
class Job:
    """What is trained: a model, and how much of it."""

    name: str
    batch_size: int
    steps: int  # per epoch and rank
    epochs: int
    turns: int  # for each repeat asked for; short runs are measured more often

    def model(self) -> nn.Module:
        """The model, with the same weights each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if self.name == "tiny":
                return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
            layers: list[nn.Module] = []
            for inside, outside in ((3, 32), (32, 64), (64, 64)):
                layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(64, 1, 3, padding=1))

    def data(self) -> Clocked:
        """Inputs, and a target that can be learnt from them."""
        generator = torch.Generator().manual_seed(1)
        shape = (8,) if self.name == "tiny" else (3, 32, 32)
        x = torch.randn(RANKS * self.steps * self.batch_size, *shape, generator=generator)
        first = WARM * self.batch_size
        last = (self.steps * self.epochs - 1) * self.batch_size
        return Clocked(x, x.mean(1, keepdim=True), first=first, last=last)


class Clocked(TensorDataset):
    """Samples that note the main thread's CPU time when number `first` and `last` are taken.

    A library that fetches a batch ahead does so at both ends, so the steps between are the same.
    """

    def __init__(self, *tensors: torch.Tensor, first: int, last: int) -> None:
        super().__init__(*tensors)
        self.first, self.last, self.taken = first, last, 0
        self.marks: list[float] = []

    def __getitem__(self, index: Any) -> Any:
        if self.taken in (self.first, self.last):
            self.marks.append(time.thread_time())
        self.taken += 1
        return super().__getitem__(index)


Contender = Callable[[Job, nn.Module, Clocked, torch.optim.Optimizer], None]


def shared(job: Job, data: Clocked) -> DataLoader[Any]:
    """This rank's loader. The order is fixed, so that all contenders see the same batches."""
    return DataLoader(data, job.batch_size, sampler=DistributedSampler(data, shuffle=False))


def bare(job: Job, model: nn.Module, data: Clocked, optimizer: torch.optim.Optimizer) -> None:
    """What one writes by hand."""
    loader, loss_of = shared(job, data), nn.MSELoss()
    ddp = DistributedDataParallel(model)
    for epoch in range(job.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(ddp(x), y)
            loss.backward()
            optimizer.step()


def ml4cube(job: Job, model: nn.Module, data: Clocked, optimizer: torch.optim.Optimizer) -> None:
    """Ours, with all that it does of itself."""
    from ml4cube.training.pytorch_distributed import Trainer

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model,
            shared(job, data),
            None,
            optimizer,
            best_model_path=f"{folder}/best.pt",
            early_stopping=True,
            loss=nn.MSELoss(),
            epochs=job.epochs,
            device="cpu",
        ).train()


def lightning(job: Job, model: nn.Module, data: Clocked, optimizer: torch.optim.Optimizer) -> None:
    """Lightning without logger, checkpoints, bar and summary."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = model, nn.MSELoss()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return self.loss(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=job.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), shared(job, data))


def accelerate(job: Job, model: nn.Module, data: Clocked, optimizer: torch.optim.Optimizer) -> None:
    """The hand-written loop with accelerate's four changes; it shares out the batches itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain, loss_of = DataLoader(data, job.batch_size), nn.MSELoss()
    ddp, wrapped, loader = accelerator.prepare(model, optimizer, plain)
    for _ in range(job.epochs):
        for x, y in loader:
            wrapped.zero_grad()
            loss = loss_of(ddp(x), y)
            accelerator.backward(loss)
            wrapped.step()


def ignite(job: Job, model: nn.Module, data: Clocked, optimizer: torch.optim.Optimizer) -> None:
    """An Engine, no handler attached."""
    from ignite.engine import create_supervised_trainer

    engine = create_supervised_trainer(DistributedDataParallel(model), optimizer, nn.MSELoss())
    engine.run(shared(job, data), max_epochs=job.epochs)


CONTENDERS: dict[str, Contender] = {
    "bare": bare,
    "ml4cube": ml4cube,
    "lightning": lightning,
    "accelerate": accelerate,
    "ignite": ignite,
}


def run_one(job: Job, name: str) -> tuple[float, torch.Tensor]:
    """CPU milliseconds per step, and all weights at the end."""
    model, data = job.model(), job.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.distributed.barrier()
    gc.collect()
    CONTENDERS[name](job, model, data, optimizer)
    assert data.taken == job.steps * job.epochs * job.batch_size, (name, data.taken)
    begin, end = data.marks
    steps = job.steps * job.epochs - 1 - WARM
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return 1000 * (end - begin) / steps, weights


def measure(job: Job, repeats: int) -> dict[str, Any]:
    """All contenders in turns, in an order that moves on; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names, right = list(CONTENDERS), None
    for turn in range(repeats * job.turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cost, weights = run_one(job, name)
            right = weights if right is None else right
            torch.testing.assert_close(weights, right, rtol=1e-3, atol=1e-5)
            if turn:
                found[name].append(cost)
    rows = {
        name: {"min_ms": min(costs), "median_ms": statistics.median(costs)}
        for name, costs in found.items()
    }
    return {
        "job": asdict(job),
        "cpu_per_step": rows,
        "over_bare": {
            name: {
                "min": rows[name]["min_ms"] / rows["bare"]["min_ms"],
                "median": rows[name]["median_ms"] / rows["bare"]["median_ms"],
            }
            for name in CONTENDERS
        },
    }


def run_rank(repeats: int, out: Path) -> None:
    """One of the ranks, under torchrun."""
    from ml4cube.training.ranks.dist import ddp_cleanup, ddp_init

    warnings.simplefilter("ignore")  # advice on worker counts and the like, for every run anew
    for name in ("lightning.pytorch", "accelerate", "ignite"):
        importlib.import_module(name)  # sets the level of its own logger
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = ddp_init(backend="gloo")
    jobs = (Job("tiny", 8, 400, 2, turns=3), Job("cnn", 16, 16, 2, turns=1))
    measured = {job.name: measure(job, repeats) for job in jobs}
    if world.is_main:
        out.write_text(json.dumps(measured))
    ddp_cleanup()


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """The figures that are promised, from minima; peers are compared on the tiny model."""
    tiny = {name: row["min"] for name, row in measured["tiny"]["over_bare"].items()}
    return {
        "cpu_over_bare_tiny": round(tiny["ml4cube"], 3),
        "cpu_over_bare_cnn": round(measured["cnn"]["over_bare"]["ml4cube"]["min"], 3),
        **{f"{name}_over_ours": round(tiny[name] / tiny["ml4cube"], 3) for name in PEERS},
    }


def report(measured: dict[str, Any], repeats: int, out: Path) -> None:
    """Print the table and write the figures."""
    for job, found in measured.items():
        print(f"\n{job:10s}    CPU ms per step         over the bare loop")
        print(f"{'':10s}      min    median            min    median")
        for name, row in found["cpu_per_step"].items():
            over = found["over_bare"][name]
            print(
                f"{name:10s} {row['min_ms']:8.3f}  {row['median_ms']:8.3f}"
                f"       {over['min']:8.3f}  {over['median']:8.3f}"
            )
    summary = summarize(measured)
    print("\n" + json.dumps(summary, indent=1))
    for name, text in SETTINGS.items():
        print(f"{name:10s} {text}")
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    versions = {name: version(name) for name in ("torch", *PEERS.values())}
    full = {
        **summary,
        "peers_compared_on": "tiny",
        "measured": measured,
        "settings": {"ranks": RANKS, "repeats": repeats, "warm_batches": WARM, **SETTINGS},
        "machine": machine,
        "versions": {"python": platform.python_version(), **versions},
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(full, indent=1) + "\n")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank", action="store_true", help="internal")
    args = parser.parse_args()
    if args.rank:
        run_rank(args.repeats, args.out)
        return
    missing = [package for name, package in PEERS.items() if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed here; run `make bench-training`")
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "measured.json"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", __file__, "--rank"]
        command += ["--repeats", str(args.repeats), "--out", str(part)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONSAFEPATH": "1",
        }
        subprocess.run(command, check=True, env=environment)
        report(json.loads(part.read_text()), args.repeats, args.out)


if __name__ == "__main__":
    main()
