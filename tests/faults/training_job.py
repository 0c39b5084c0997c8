"""The training run that the fault tests disturb: ``training_job.py FOLDER PLAN`` under torchrun.

It has all that a resumed run can get wrong: dropout, momentum, BatchNorm, bf16, a scheduler that
moves each step, accumulation with a partial last window, a shuffled order, averaged weights. The
plan (JSON) says where a rank does itself harm, or leaves a mark and dwells so that a test can.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.callbacks import Callback
from ml4cube.training.pytorch_distributed import Trainer, ddp_init, dist_train
from ml4cube.training.ranks import messages
from ml4cube.training.ranks.dist import World
from tests.training_parts import dataset

EPOCHS, STEPS, BATCHES = 6, 7, 13  # of a rank in an epoch; two batches to a step
COLUMNS = ("epoch", "train_loss", "val_loss", "mae", "lr")
DWELL_S = 1.0


def model() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )


class Harm:
    """What the plan says is to happen: ``[{"when", "number", "rank", "act", "attempt"}, ...]``."""

    def __init__(self, folder: Path, plan: dict[str, Any], rank: int) -> None:
        self.folder, self.rank = folder, rank
        # How often a rank was harmed: agents count their restarts each for itself.
        self.attempt = len(list(folder.glob("harmed-*")))
        self.todo = [
            harm
            for harm in plan.get("harm", [])
            if harm["rank"] in (rank, "all") and harm.get("attempt", 0) == self.attempt
        ]

    def at(self, when: str, number: int) -> None:
        """Do what the plan has for this moment."""
        for harm in list(self.todo):
            if harm["when"] == when and harm["number"] == number:
                self.todo.remove(harm)
                getattr(self, harm["act"])()

    def kill(self) -> None:
        """As the system does when memory is short; and the attempt that was killed is marked."""
        (self.folder / f"harmed-{self.attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        """An error in user code."""
        (self.folder / f"harmed-{self.attempt}").touch()
        raise ZeroDivisionError("division by zero, as planned")

    def dwell(self) -> None:
        """Leave a mark and stay here for a while, so that a signal comes now."""
        self.mark()
        time.sleep(DWELL_S)

    def mark(self) -> None:
        """Tell the test this process's id, whole at once."""
        path = self.folder / f"mark-{self.rank}"
        path.with_suffix(".tmp").write_text(str(os.getpid()))
        path.with_suffix(".tmp").replace(path)


class Steps(Callback):
    """The moments "step"."""

    def __init__(self, harm: Harm, pace_s: float) -> None:
        self.harm, self.pace_s = harm, pace_s

    def on_step_end(self, loop: Any) -> None:
        time.sleep(self.pace_s)
        self.harm.at("step", loop.state.step)


class Watched(TensorDataset):
    """The moments "validation": the number-th sample this process takes."""

    def __init__(self, source: TensorDataset, harm: Harm) -> None:
        super().__init__(*source.tensors)
        self.harm, self.taken = harm, 0

    def __getitem__(self, index: Any) -> Any:
        self.taken += 1
        self.harm.at("validation", self.taken)
        return super().__getitem__(index)


def watch_saves(harm: Harm) -> None:
    """The moments "saving": the number-th sync of a file, when it is written but not yet named."""
    sync, done = os.fsync, [0]

    def watched(handle: int) -> None:
        done[0] += 1
        harm.at("saving", done[0])
        sync(handle)

    os.fsync = watched


def abort_when_lost(folder: Path) -> None:
    """End the process, as torch does under nccl, instead of an error that other ranks are lost."""
    is_lost = messages.is_lost_connection

    def abort(error: BaseException | None) -> bool:
        if is_lost(error):
            (folder / "aborted").touch()
            os.abort()
        return False

    messages.is_lost_connection = abort


def share(source: TensorDataset, *, shuffle: bool) -> DistributedSampler[Any]:
    """This rank's samples, padded as torch does."""
    world = World.current("cpu")
    return DistributedSampler(source, world.size, world.rank, shuffle=shuffle, seed=3)


def make_trainer(folder: Path, harm: Harm, plan: dict[str, Any]) -> Trainer:
    """The run, always the same."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    train, val = dataset(104, seed=1), Watched(dataset(37, seed=2), harm)
    disk = folder / f"disk-{harm.rank}" if plan.get("apart") else folder  # of each node
    return Trainer(
        net,
        DataLoader(train, batch_size=4, sampler=share(train, shuffle=True)),
        DataLoader(val, batch_size=5, sampler=share(val, shuffle=False)),
        optimizer,
        save_every=1,
        best_model_path=folder / "best.pt",
        snapshot_path=disk / "snapshot.pt",
        loss=nn.MSELoss(),
        metrics={"mae": nn.functional.l1_loss},
        epochs=EPOCHS,
        gradient_accumulation_steps=2,
        gradient_clip=1.0,
        precision="bf16",
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * STEPS),
        scheduler_step_on_batch=True,
        seed=7,
        device="cpu",
        ema=0.9,
        max_time=plan.get("max_time"),
        strategy=plan.get("strategy", "ddp"),
        shard_modules=nn.Linear if plan.get("strategy") == "fsdp" else None,
        callbacks=[Steps(harm, plan.get("pace_s", 0.0))],
    )


def main(folder: Path, plan: dict[str, Any]) -> None:
    """Train, and write what came out."""
    torch.set_num_threads(1)
    world = ddp_init(timeout=plan.get("timeout", 60))
    ddp_init()  # finds the group that is there
    harm = Harm(folder, plan, world.rank)
    watch_saves(harm)
    trainer = make_trainer(folder, harm, plan)
    if plan.get("abort"):
        abort_when_lost(folder)
    trained = dist_train(trainer)
    assert not dist.is_initialized()
    history = trainer.history.to_dict()
    result = {
        "weights": {name: tensor.tolist() for name, tensor in trained.state_dict().items()},
        "losses": {name: history.get(name) for name in COLUMNS},
        "best_epoch": trainer.best_epoch,
    }
    (folder / f"result-{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
