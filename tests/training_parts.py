"""Small models, data and scripts that the training tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training import pytorch, pytorch_distributed
from ml4cube.training.callbacks import Callback

ROOT = Path(__file__).parents[1]


def dataset(samples: int, seed: int = 0) -> TensorDataset:
    """Random inputs of three numbers and a noisy linear target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(samples, 1, generator=generator))


def loader(samples: int = 22, batch_size: int = 4, seed: int = 0, **arguments: Any) -> Any:
    """Batches of such data."""
    return DataLoader(dataset(samples, seed), batch_size=batch_size, **arguments)


def network(seed: int = 0, *, norm: bool = False) -> nn.Module:
    """A small model whose training depends on random numbers and, with `norm`, on buffers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(3, 8), *middle, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def trainer(
    *,
    samples: int = 40,
    model: nn.Module | None = None,
    ranks: bool = False,
    train: Any = None,
    val: Any = ...,
    schedule: bool = True,
    lr: float = 0.01,
    **arguments: Any,
) -> pytorch.Trainer:
    """A Trainer with dropout, momentum, a scheduler, and loaders shuffled anew each epoch."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if schedule:
        arguments.setdefault("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    data = dataset(samples)
    if train is None:
        train = (
            DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=1))
            if ranks
            else DataLoader(data, batch_size=4, shuffle=True)
        )
    if val is ...:
        val = DataLoader(dataset(17, seed=1), batch_size=5)
    kind = pytorch_distributed.Trainer if ranks else pytorch.Trainer
    arguments = {"loss": nn.MSELoss(), "seed": 3, "device": "cpu", "epochs": 3, **arguments}
    return kind(model, train, val, optimizer, **arguments)


def trained(**arguments: Any) -> pytorch.Trainer:
    """Such a Trainer that has trained."""
    run = trainer(**arguments)
    run.train()
    return run


def weights(model: nn.Module | str | Path) -> dict[str, list[Any]]:
    """All values of a model, or of its file, comparable and small enough to send."""
    is_model = isinstance(model, nn.Module)
    state = model.state_dict() if is_model else torch.load(model, weights_only=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


def squared_error(model: nn.Module, data: TensorDataset | None = None) -> float:
    """The loss of a model over the validation data of `trainer`, or other data, at once."""
    x, y = (data or dataset(17, seed=1)).tensors
    with torch.no_grad():
        return nn.functional.mse_loss(model.eval()(x), y).item()


def losses(trained: Any) -> dict[str, list[Any]]:
    """The columns of the History that do not depend on the clock."""
    columns = trained.history.to_dict()
    return {name: v for name, v in columns.items() if name not in ("seconds", "ranks")}


def assert_end_alike(run: pytorch.Trainer, whole: pytorch.Trainer) -> None:
    """Train both; weights and losses are the same, bit for bit."""
    assert weights(run.train()) == weights(whole.train())
    assert losses(run) == losses(whole)


class Stateful:
    """A loader as that of torchdata: its state after the last batch is that of the next pass."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.given, self.start = batches, 0, 0
        self.told: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin at once."""
        start, self.start = self.start, 0
        return self.give(start)

    def give(self, start: int) -> Iterator[Any]:
        """Go on after so many batches."""
        for number, batch in enumerate(self.batches[start:], start + 1):
            self.given = number
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        """How many batches of a pass were given."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass begin after so many."""
        self.told, self.given, self.start = state, state["given"], state["given"]


class Standing(Stateful):
    """Its state after the last batch is the end of that pass."""

    def __iter__(self) -> Iterator[Any]:
        """Begin when the first batch is asked for."""
        self.given, self.start = self.start, 0
        for batch in self.batches[self.given :]:
            self.given += 1
            yield batch


class Interrupt(RuntimeError):
    """Stands for whatever ends a process in the middle."""


def interrupt() -> None:
    """End a run as a kill would."""
    raise Interrupt


def hooks(**functions: Any) -> Callback:
    """A callback made of functions, by the names of its methods."""
    return type("Hooks", (Callback,), {n: staticmethod(f) for n, f in functions.items()})()


class At(Callback):
    """Call a function once, when a step has been taken; by default, end the run there."""

    def __init__(self, step: int, action: Any = interrupt) -> None:
        self.step, self.action = step, action

    def on_step_end(self, loop: Any) -> None:
        """Act when it is time."""
        if loop.state.step == self.step:
            self.action()


class Save(Callback):
    """Ask for a snapshot at a step, as a signal does."""

    def __init__(self, step: int, *, meet: bool = True) -> None:
        self.step, self.meet = step, meet

    def on_step_end(self, loop: Any) -> None:
        """Ask, and let the loop look at once if that is wanted."""
        loop.requests.signals.must_save |= loop.state.step == self.step
        if self.meet:
            meet_now(loop)


def resumed_alike(
    path: Any, fresh: Any, *callbacks: Callback, **settings: Any
) -> tuple[dict[str, Any], pytorch.Trainer]:
    """Interrupt a run by callbacks and go on from its snapshot: it ends as if undisturbed.

    Return where the snapshot stood, and the resumed run.
    """
    whole = fresh()
    with pytest.raises(Interrupt):
        fresh(snapshot_path=path, callbacks=[*callbacks], **settings).train()
    position = torch.load(path, weights_only=True)["state"]
    resumed = fresh(snapshot_path=path, **settings)
    assert_end_alike(resumed, whole)
    assert resumed.best_epoch == whole.best_epoch
    return position, resumed


class Thaw(Callback):
    """Freezes and unfreezes layers, on rank 0 by an own choice that others do not make."""

    def __init__(self, model: Any, only_main: bool = False) -> None:
        self.model, self.only_main = model, only_main

    def on_epoch_start(self, loop: Any) -> None:
        """Choose for an epoch."""
        if self.only_main and not loop.world.is_main:
            return
        self.model[0].requires_grad_(loop.state.epoch >= 1)
        self.model[3].requires_grad_(loop.state.epoch != 2)

    def on_step_end(self, loop: Any) -> None:
        """Freeze inside the last epoch."""
        if loop.state.epoch == 3 and loop.state.batch == 2 and not self.only_main:
            self.model[3].requires_grad_(False)


class Counting(nn.Linear):
    """Counts its calls in training, in a state of its own that is no tensor."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__(3, 1)
        self.calls: dict[str, Any] = {"train": calls, "name": "counting"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.calls["train"] += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what goes into the state dict."""
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.calls = dict(state)


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what unpickling calls."""
        return os.mkdir, (str(self.mark),)


def meet_now(loop: Any) -> None:
    """Let the ranks look for signals after this step, so that a test says where; all call this."""
    loop.requests._next_step = 0
