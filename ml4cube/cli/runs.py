"""`train`: a model trained on sample stores, and the folder of its run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ml4cube.cli.by_name import Names
from ml4cube.cli.command import Command
from ml4cube.cli.configuration import read_file
from ml4cube.cli.files import BEST, CONFIG, HISTORY, SNAPSHOT, check_ours
from ml4cube.cli.inputs import Recipe, model_of, options_of, samples_of
from ml4cube.cli.task import NOTHING, Keep, Report, Task
from ml4cube.core.errors import InvalidValueError, StoreExistsError

_UNDER_TORCHRUN = """\b
On several GPUs of one machine, and on several nodes:
  torchrun --nproc-per-node=4 -m ml4cube train --config train.yaml
  torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \\
    -m ml4cube train --config train.yaml

\b
As a job of SLURM, which goes on from its snapshot if it is started again:
  #!/bin/bash
  #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=12:00:00
  HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=4 --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-backend=c10d --rdzv-endpoint="$HOST:29400" -m ml4cube train --config train.yaml
"""


def train(
    train_store: str,
    val_store: str | None = None,
    /,
    *,
    model: Recipe,
    optimizer: Recipe,
    loss: Recipe,
    run: str = "run",
    metrics: Mapping[str, Recipe] | None = None,
    scheduler: Recipe | None = None,
    batch_size: int = 32,
    data: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    seed: int | None = 42,
    save_every: int = 1,
    early_stopping: bool | Recipe = True,
    callbacks: Recipe | Sequence[Recipe] = (),
    loggers: Recipe | Sequence[Recipe] = (),
    names: Names,
    **arguments: Any,
) -> Task:
    """Train a model on sample stores, on one device or under torchrun.

    The model is a class or function of your own module, module:name, in the working directory or
    installed. Optimizer, loss and the like are names of classes. Arguments of a class are further
    keys: --optimizer AdamW --set optimizer.lr=0.01, in a file optimizer: {class: AdamW, lr: 0.01}.
    The same command goes on from the snapshot of a run that was stopped.

    Parameters
    ----------
    train_store : path or URL
        Samples to train on.
    val_store : path or URL, optional
        Samples to validate on.
    model : module:name, or mapping with class and arguments
        Class, or function that returns a module.
    optimizer : name, or mapping with class and arguments
        Class of torch.optim, or module:name.
    loss : name, or mapping with class and arguments
        Class of torch.nn or ml4cube.training.losses, or module:name of a class or function.
    run : path
        Folder for the configuration, the weights of the best epoch, the snapshot and the history.
    metrics : mapping of str to name, or to mapping with class and arguments, optional
        Metrics by the name of their column, as for loss; also of ml4cube.evaluation.metrics.
    scheduler : name, or mapping with class and arguments, optional
        Class of torch.optim.lr_scheduler or ml4cube.training.schedulers, or module:name.
    batch_size : int
        Samples in a batch of one rank.
    data : mapping, optional
        Arguments of ml4cube.datasets.pytorch.PTXrDataset, such as coord_features. By default the
        targets of the store are predicted.
    loader : mapping, optional
        Further arguments of ml4cube.datasets.pytorch.prep_dataloader, such as augment.
    seed : int, optional
        Seed of the initial weights, of dropout, and of loaders without a seed of their own.
    save_every : int
        Epochs between snapshots.
    early_stopping : bool, or mapping with class and arguments
        Whether to stop when the validation loss no longer improves.
    callbacks : name, mapping with class and arguments, or list of these
        Classes of ml4cube.training.callbacks, or module:name.
    loggers : name, mapping with class and arguments, or list of these
        Classes of ml4cube.training.loggers, or module:name.
    """
    from ml4cube.training.pytorch_distributed import Trainer, ddp_init, dist_train
    from ml4cube.training.seeding import seed_everything

    folder = os.path.abspath(os.path.expanduser(run))  # also if a callback changes the directory
    _check_folder(folder, {"model": model, "data": data})
    world = ddp_init()
    train_data = samples_of(train_store, data)
    val_data = None
    if val_store is not None:
        val_data = samples_of(val_store, data)
    loaders = _loaders(train_data, val_data, batch_size, loader, names)
    if seed is not None:
        seed_everything(seed)
    module = model_of(model, names)
    stepped = names.make("optimizer", optimizer, module.parameters(), call=True)

    recorder = _recorder(folder, {"train_store": train_store, "val_store": val_store})
    others = names.make("callbacks", callbacks)
    trainer = Trainer(
        module,
        *loaders,
        stepped,
        best_model_path=f"{folder}/{BEST}",
        snapshot_path=f"{folder}/{SNAPSHOT}",
        loss=names.make("loss", loss),
        metrics=names.make("metrics", metrics),
        scheduler=None
        if scheduler is None
        else names.make("scheduler", scheduler, stepped, call=True),
        seed=seed,
        save_every=save_every,
        early_stopping=names.make("early_stopping", early_stopping),
        callbacks=[*(others if isinstance(others, list) else [others]), recorder],
        loggers=names.make("loggers", loggers),
        **arguments,
    )

    def plan() -> Report:
        return Report.of(
            features=train_data.channels,
            targets=train_data.targets,
            train_samples=len(train_data),
            val_samples=0 if val_data is None else len(val_data),
            batches_per_epoch=len(loaders[0]),
            parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
            ranks=world.size,
            device=str(world.device),
            run=run,
        )

    def work(keep: Keep) -> Report:
        recorder.keep = keep
        dist_train(trainer)
        is_dry = bool(arguments.get("fast_dev_run"))  # which leaves out the recorder
        if world.is_main and recorder.epochs:
            trainer.history.to_json(f"{folder}/{HISTORY}")
        exit_code = NOTHING
        if recorder.epochs or is_dry:
            exit_code = 0
        result = Report.of(
            epochs=len(trainer.history),
            best_epoch=trainer.best_epoch,
            best_value=trainer.best_loss,
            run=run,
        )
        return replace(result, exit_code=exit_code)

    return Task(plan, work)


def _loaders(
    train_data: Any,
    val_data: Any,
    batch_size: int,
    loader: Mapping[str, Any] | None,
    names: Names,
) -> tuple[Any, Any]:
    """Make the loaders for training and validation, the second None without samples."""
    from ml4cube.datasets.pytorch import prep_dataloader

    set_by_command = {"train_ds", "test_ds", "val_ds", "batch_size", "parallel"}
    options = options_of("loader", loader, prep_dataloader, set_by_command)
    for name in options.keys() & {"augment", "callback"}:
        options[name] = names.make(f"loader.{name}", options[name])
    made = prep_dataloader(
        train_data, batch_size=batch_size, parallel=True, val_ds=val_data, **options
    )
    if isinstance(made, tuple):
        return made
    return (made, None)


def _recorder(run: str, stores: Mapping[str, str | None]) -> Any:
    """Return a callback that writes the configuration of a run, and counts its epochs."""
    from ml4cube.training.callbacks import Callback

    class Recorder(Callback):
        writes = True
        epochs = 0
        keep: Keep

        def on_epoch_start(self, loop: Any) -> None:
            """Write it only now: a snapshot of another run would have been refused."""
            if loop.world.is_main and not self.epochs:
                os.makedirs(run, exist_ok=True)
                self.keep(f"{run}/{CONFIG}", **{n: _absolute(path) for n, path in stores.items()})

        def on_epoch_end(self, loop: Any, row: dict[str, Any]) -> None:
            self.epochs += 1

    return Recorder()


def _check_folder(run: str, recipes: Mapping[str, Any]) -> None:
    """Refuse a folder of another model or other data, or one that would lose its weights."""
    if any(os.path.exists(f"{run}/{name}") for name in ("zarr.json", ".zgroup", ".zarray")):
        raise StoreExistsError(f"{run} is a zarr store, not a folder of a run; give another --run")
    has = {name: os.path.exists(f"{run}/{name}") for name in (CONFIG, BEST, SNAPSHOT, HISTORY)}
    check_ours(f"{run}/{CONFIG}")
    # A run that was killed before its first snapshot has no history yet, and starts over.
    is_unfinished = has[CONFIG] and not has[HISTORY]
    if has[BEST] and not has[SNAPSHOT] and not is_unfinished:
        raise StoreExistsError(
            f"{run} has {BEST}, but no {SNAPSHOT} to go on from; give another --run, or move it "
            "away"
        )
    if has[HISTORY] and not (has[CONFIG] or has[SNAPSHOT]):
        raise StoreExistsError(
            f"{run} has {HISTORY}, but is no folder of a run; give another --run, or move it away"
        )
    if has[CONFIG] and (has[SNAPSHOT] or has[BEST]):
        _check_same(run, recipes)


def _check_same(run: str, recipes: Mapping[str, Any]) -> None:
    """Refuse another model or other data than those of a run."""
    before = read_file(f"{run}/{CONFIG}")
    for name, recipe in recipes.items():
        if before.get(name) != recipe:
            raise InvalidValueError(
                f"{run} was trained with {name} {before.get(name)!r}, got {recipe!r}; give another "
                "--run"
            )


def _absolute(store: str | None) -> str | None:
    if store is None or "://" in store:
        return store
    return os.path.abspath(store)


TRAIN = Command(
    train,
    "ml4cube.training.pytorch:Trainer",
    without=["train_data", "test_data", "best_model_path", "snapshot_path", "model_path"],
    epilog=_UNDER_TORCHRUN,
)
