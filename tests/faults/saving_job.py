"""Saves that are cut off: ``saving_job.py FOLDER CASES OFFSETS`` writes, as JSON, what was found.

A case is a pair of a target (the file that is being written) and of how the save ends:

- ``kill``: a file-size limit at which the system kills the process inside the write;
- ``limit``: the same limit, but the write fails, as on a full disk;
- ``sync``, ``rename``: SIGKILL before the number-th of them.

Each try is a forked child of this one process, which has computed nothing itself, so that many
offsets cost little.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer would import, in every child anew
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import StoreError
from ml4cube.training.callbacks import Callback, ModelCheckpoint
from ml4cube.training.files.checkpoint import read_file
from ml4cube.training.pytorch import Trainer
from tests.training_parts import dataset

CUT_SHORT = 3  # exit code of a child whose save failed with an error


class From(Callback):
    """Call a function when an epoch starts."""

    def __init__(self, epoch: int, action: Callable[[], None]) -> None:
        self.epoch, self.action = epoch, action

    def on_epoch_start(self, loop: Any) -> None:
        if loop.state.epoch + 1 == self.epoch:
            self.action()


def train(folder: Path, target: str, epochs: int, action: Callable[[], None] | None) -> None:
    """Train to `epochs`, going on from the snapshot; at the start of the second, act."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2000), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2000, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    callbacks: list[Callback] = [] if action is None else [From(2, action)]
    if target == "top-1":
        callbacks.append(ModelCheckpoint(folder / "top", monitor="train_loss", save_top_k=1))
    Trainer(
        net,
        DataLoader(dataset(64, seed=1), batch_size=8, shuffle=True),
        None,
        optimizer,
        save_every=1,
        best_model_path=folder / "best.pt" if target == "best" else None,
        snapshot_path=folder / "snapshot.pt",
        loss=nn.MSELoss(),
        epochs=epochs,
        seed=1,
        device="cpu",
        callbacks=callbacks,
    ).train()


def limit(size: int, *, fatal: bool) -> None:
    """Let no file grow beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fatal else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def die_before(name: str, number: int) -> None:
    """Kill this process instead of the number-th call of a function of `os`."""
    whole, calls = getattr(os, name), [0]

    def counted(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **more)

    setattr(os, name, counted)


ENDS: dict[str, Callable[[int], None]] = {
    "kill": lambda size: limit(size, fatal=True),
    "limit": lambda size: limit(size, fatal=False),
    "sync": lambda number: die_before("fsync", number),
    "rename": lambda number: die_before("replace", number),
}


def in_child(work: Callable[[], None], said: Path) -> int:
    """Run in a fork; the exit code, or minus the signal that ended it. An error goes to a file."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            said.write_text(f"{type(error).__name__}: {error}")
            os._exit(CUT_SHORT if isinstance(error, StoreError) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files(folder: Path) -> dict[str, Any]:
    """All files of a run that have their name, read and verified."""
    return {str(path.relative_to(folder)): read_file(path) for path in folder.rglob("[!.]*.pt")}


def plain(content: Any) -> Any:
    """Tensors as lists, and nothing that depends on the clock or on chance."""
    if isinstance(content, torch.Tensor):
        return content.tolist()
    if isinstance(content, dict):
        left_out = ("seconds", "ranks", "history", "run")
        return {str(k): plain(v) for k, v in content.items() if k not in left_out}
    return [plain(v) for v in content] if isinstance(content, list | tuple) else content


def try_case(folder: Path, target: str, how: str, offsets: list[int]) -> dict[str, Any]:
    """Try all offsets; then finish, and compare with a run that nothing disturbed."""
    calm, run, said = folder / "calm", folder / "run", folder / "said.txt"
    folder.mkdir()
    assert in_child(lambda: train(calm, target, 3, None), said) == 0, said.read_text()
    assert in_child(lambda: train(run, target, 1, None), said) == 0, said.read_text()
    tries = []
    for where in (1, 2) if how in ("sync", "rename") else offsets:
        said.write_text("")

        def work(where: int = where) -> None:
            train(run, target, 2, lambda: ENDS[how](where))

        code = in_child(work, said)
        found = files(run)
        epoch = found["snapshot.pt"]["state"]["epoch"]
        tries.append([where, code, epoch, sorted(found), said.read_text()])
    assert in_child(lambda: train(run, target, 3, None), said) == 0, said.read_text()
    ended = {name: plain(content) for name, content in files(run).items()}
    undisturbed = {name: plain(content) for name, content in files(calm).items()}
    return {
        "tries": tries,
        "as_undisturbed": ended == undisturbed,
        "left_aside": [path.name for path in run.rglob(".*")],
    }


def main(folder: Path, cases: list[list[str]], offsets: list[int]) -> None:
    """Try all cases."""
    found = {
        f"{target} {how}": try_case(folder / f"{target}-{how}", target, how, offsets)
        for target, how in cases
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
