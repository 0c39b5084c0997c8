"""Our loaders in the loops of other libraries, on two ranks: every sample exactly once an epoch.

Lightning, accelerate and ignite are used as their users use them, with nothing switched off. Each
trains three epochs and validates, over a `PTXrDataset` and over a TensorDataset, whose samples are
their own numbers; what each rank was given is gathered and compared with what
`prep_dataloader` promises. Ends with an error that names what failed.

Run it as ``make bench-loaders_in_trainers``, in the environment of ``make bench-training``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import xarray as xr
from torch import nn
from torch.utils.data import TensorDataset

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

RANKS, SAMPLES, BATCH, EPOCHS = 2, 203, 8, 3

Numbers = list[list[int]]  # of the samples that this rank was given, by epoch


def numbers(batch: Any) -> list[int]:
    """Which samples a batch holds: their first feature says it."""
    return [int(number) for number in batch[0].flatten()]


def make_loaders(form: str) -> tuple[Any, Any]:
    """Loaders for training and validation, over samples that are their own numbers."""
    own = torch.arange(float(SAMPLES))
    data: Any = TensorDataset(own[:, None], own[:, None])
    if form == "store":
        columns = {name: ("samples", own.numpy()) for name in ("x", "y")}
        data = PTXrDataset(xr.Dataset(columns), to_pred="y")
    train, val = prep_dataloader(data, val_ds=data, batch_size=BATCH, parallel=True)
    return train, val


def lightning(train: Any, val: Any) -> tuple[Numbers, Numbers]:
    """A Trainer whose `use_distributed_sampler` is left on."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)
            self.trained: Numbers = []
            self.checked: Numbers = []

        def on_train_epoch_start(self) -> None:
            self.trained.append([])

        def on_validation_epoch_start(self) -> None:
            self.checked.append([])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.trained[-1] += numbers(batch)
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.checked[-1] += numbers(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        ).fit(module, train, val)
    return module.trained, module.checked


def accelerate(train: Any, val: Any) -> tuple[Numbers, Numbers]:
    """Everything is given to `prepare`, loaders too."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    made = model, torch.optim.SGD(model.parameters(), 1e-6), train, val
    prepared, optimizer, train, val = accelerator.prepare(*made)
    trained, checked = [], []
    for epoch in range(EPOCHS):
        train.set_epoch(epoch)
        trained.append([])
        for x, y in train:
            trained[-1] += numbers((x, y))
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(prepared(x), y))
            optimizer.step()
        checked.append([number for batch in val for number in numbers(batch)])
    return trained, checked


def ignite(train: Any, val: Any) -> tuple[Numbers, Numbers]:
    """Two engines."""
    from ignite.engine import Engine, Events, create_supervised_trainer

    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    engine = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    evaluator = Engine(lambda _, batch: checked[-1].extend(numbers(batch)))
    trained: Numbers = []
    checked: Numbers = []

    @engine.on(Events.EPOCH_STARTED)
    def begin(engine: Engine) -> None:
        trained.append([])

    @engine.on(Events.ITERATION_STARTED)
    def note(engine: Engine) -> None:
        trained[-1].extend(numbers(engine.state.batch))

    @engine.on(Events.EPOCH_COMPLETED)
    def validate(engine: Engine) -> None:
        checked.append([])
        evaluator.run(val)

    engine.run(train, max_epochs=EPOCHS)
    return trained, checked


LIBRARIES: dict[str, Callable[[Any, Any], tuple[Numbers, Numbers]]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "ignite": ignite,
}


def faults(trained: list[Numbers], checked: list[Numbers]) -> list[str]:
    """What was not as promised, of what each rank was given in each epoch."""
    found, orders = [], set()
    whole = SAMPLES // (BATCH * RANKS) * BATCH * RANKS
    for epoch, ranks in enumerate(zip(*trained, strict=True)):
        seen = [number for rank in ranks for number in rank]
        orders.add(tuple(seen))
        if len(seen) != whole or len(set(seen)) != whole:
            found.append(
                f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} different ones; "
                f"{whole} were promised, each once"
            )
        if len({len(rank) for rank in ranks}) > 1:
            found.append(f"epoch {epoch}: ranks had {[len(rank) for rank in ranks]} samples")
    if len(orders) < EPOCHS or len(trained[0]) != EPOCHS:
        found.append(f"{len(trained[0])} epochs had {len(orders)} different orders")
    for epoch, ranks in enumerate(zip(*checked, strict=True)):
        if sorted(number for rank in ranks for number in rank) != list(range(SAMPLES)):
            found.append(f"validation {epoch}: not every sample exactly once")
    if len(checked[0]) != EPOCHS:
        found.append(f"{len(checked[0])} validations in {EPOCHS} epochs")
    return found


def check_on_this_rank() -> None:
    """Every library with every form of data; rank 0 prints, all end with an error if one failed."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    failed = False
    for name, run in LIBRARIES.items():
        for form in ("store", "tensors"):
            given: list[Any] = [None] * RANKS
            dist.all_gather_object(given, run(*make_loaders(form)))
            trained, checked = zip(*given, strict=True)
            found = faults(list(trained), list(checked))
            failed |= bool(found)
            if dist.get_rank() == 0:
                print(f"{name}, {form}: " + ("; ".join(found) or "as promised"), flush=True)
    dist.destroy_process_group()
    sys.exit(int(failed))


def main() -> None:
    """Start two ranks."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; run make bench-loaders_in_trainers")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    # keeps benchmarks/statistics.py from hiding the standard library's module of that name
    alone = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, *launch, __file__], env=alone, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    check_on_this_rank() if "RANK" in os.environ else main()
