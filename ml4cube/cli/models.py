"""`train`, `predict` and `evaluate`: from sample stores to scored predictions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ml4cube.cli.arguments import arguments_of
from ml4cube.cli.by_name import Names
from ml4cube.cli.command import Command
from ml4cube.cli.configuration import check_known, read_file
from ml4cube.cli.cubes import open_cube, read_statistics
from ml4cube.cli.files import BEST, CONFIG, SNAPSHOT, check_free, check_ours
from ml4cube.cli.task import NOTHING, Keep, Report, Task
from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError

if TYPE_CHECKING:
    import torch

    from ml4cube.datasets.pytorch import PTXrDataset

HISTORY = "history.json"  # of a run

Recipe = str | Mapping[str, Any]

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


def samples_of(store: str, data: Mapping[str, Any] | None) -> PTXrDataset:
    """Open the samples of a store; its targets are predicted unless `data` names others."""
    from ml4cube.datasets.pytorch import PTXrDataset
    from ml4cube.datasets.store import StoreMetadata

    options = _options("data", data, PTXrDataset, {"ds"})
    options.setdefault("to_pred", list(StoreMetadata.of(store).targets) or None)
    return PTXrDataset(store, **options)


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
    module = _model(model, names)
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
    options = _options("loader", loader, prep_dataloader, set_by_command)
    for name in options.keys() & {"augment", "callback"}:
        options[name] = names.make(f"loader.{name}", options[name])
    made = prep_dataloader(
        train_data, batch_size=batch_size, parallel=True, val_ds=val_data, **options
    )
    if isinstance(made, tuple):
        return made
    return (made, None)


def _options(
    name: str, options: Any, function: Callable[..., Any], given: set[str]
) -> dict[str, Any]:
    """Return arguments for a function, checked, without those that it is given anyway."""
    if options is not None and not isinstance(options, Mapping):
        raise InvalidTypeError(f"{name} must be a mapping of arguments, got {options!r}")
    check_known(name, options or {}, arguments_of(function).keys() - given)
    return dict(options or {})


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
    has_weights = has[SNAPSHOT] or has[BEST]
    before = recipes
    if has[CONFIG] and has_weights:
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


def predict(
    cube: str,
    /,
    *,
    out: str,
    run: str | None = None,
    model: Recipe | None = None,
    weights: str | None = None,
    store_or_stats: str | None = None,
    variables: str | Sequence[str] | None = None,
    engine: str | None = None,
    names: Names,
    **arguments: Any,
) -> Task:
    """Predict a cube with a trained model, on its grid and in physical units.

    With --run, a folder of ml4cube train, model, weights and scaling are those of that run.
    Under torchrun the ranks share the blocks.

    Parameters
    ----------
    cube : path or URL
        Cube with all features.
    out : path or URL
        Where to write the prediction: .zarr, or .nc. A killed run goes on from where it stopped.
    run : path, optional
        Folder of the run.
    model : module:name, or mapping with class and arguments, optional
        Class, or function that returns a module. Default: that of the run.
    weights : path, optional
        Weights or snapshot that training wrote. Default: the weights of the best epoch of the run.
    store_or_stats : path or URL, optional
        Sample store that the model was trained on, or statistics as ml4cube stats writes them.
        Default: the store of the run.
    variables : str or list of str, optional
        Variables of the cube to open, a mask too. Default: all.
    engine : str, optional
        How xarray opens the cube, such as cfgrib or rasterio. Default: as its ending says.
    """
    from ml4cube.prediction import predict_cube
    from ml4cube.training.pytorch_distributed import ddp_init

    source = read_statistics(store_or_stats)
    if run is not None:
        trained = _configuration_of(run)
        model, weights = model or trained["model"], weights or f"{run}/{BEST}"
        if not isinstance(source, str | None):
            raise InvalidTypeError(
                "store_or_stats must be a sample store with run, whose features and windows "
                f"statistics lack, got {store_or_stats}"
            )
        source = source or trained["train_store"]
        if isinstance(source, str):
            source = samples_of(source, trained["data"])
    check_ours(f"{out}.yaml")
    if model is None or weights is None:
        raise InvalidTypeError("predict needs run, or model and weights; see --help")
    ddp_init()
    module = _model(model, names)
    _load_weights(module, weights)
    ds = open_cube(cube, variables, engine=engine)

    def work(keep: Keep) -> Report:
        predicted = predict_cube(module, ds, source, out=out, **arguments)
        keep(f"{out}.yaml")
        return Report.of(out=out, variables=list(predicted.data_vars), sizes=dict(predicted.sizes))

    plan = Report.of(model=model, weights=weights, sizes=dict(ds.sizes), out=out)
    return Task(lambda: plan, work)


def _configuration_of(run: str) -> dict[str, Any]:
    """Return the arguments of `train` in the folder of a run."""
    if "://" not in run and not os.path.isfile(f"{run}/{CONFIG}"):
        raise InvalidValueError(f"run must be a folder of ml4cube train, {run} has no {CONFIG}")
    trained = read_file(f"{run}/{CONFIG}")
    if lacking := [name for name in ("model", "train_store", "data") if name not in trained]:
        raise InvalidValueError(f"{run}/{CONFIG} is not of ml4cube train: it lacks {lacking}")
    return trained


def _model(recipe: Recipe, names: Names) -> torch.nn.Module:
    from ml4cube.training import torch

    module = names.make("model", recipe, call=True)
    if not isinstance(module, torch.nn.Module):
        raise InvalidTypeError(
            f"model must be, or return, a torch.nn.Module, {recipe!r} gave {one_line(module)}"
        )
    return module


def _load_weights(module: Any, path: str) -> None:
    """Load the weights of a file that training wrote: those of the best epoch, or a snapshot."""
    from ml4cube.training.files.checkpoint import read_file as read_weights

    content = read_weights(path)
    try:
        module.load_state_dict(content["model"] if "ml4cube_snapshot" in content else content)
    except RuntimeError as error:
        raise InvalidTypeError(f"{path} has the weights of another model: {error}") from None


def evaluate(
    prediction: str,
    truth: str,
    /,
    *,
    variables: str | Sequence[str] | None = None,
    recipe: str | None = None,
    engine: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
    **arguments: Any,
) -> Task:
    """Compare a predicted cube, and baselines beside it, with the true cube.

    Parameters
    ----------
    prediction : path or URL
        The predicted cube.
    truth : path or URL
        The true cube, with a split label if it has one.
    variables : str or list of str, optional
        Variables of the truth to open. Default: all.
    recipe : path or URL, optional
        Recipe of the split label of the truth, as ml4cube split writes it.
    engine : str, optional
        How xarray opens the truth, such as cfgrib or rasterio. Default: as its ending says.
    out : path or URL, ending in .json, optional
        Where to write the scorecard; ml4cube.evaluation.Scorecard.from_json reads its text.
    overwrite : bool
        Replace a scorecard at out.
    """
    from ml4cube.evaluation import evaluate as compare

    if out is not None:
        check_free(out, overwrite)
    cube = open_cube(prediction)
    true_cube = open_cube(truth, variables, recipe, engine=engine)

    def work(keep: Keep) -> Report:
        card = compare(cube, true_cube, **arguments)
        if out is not None:
            keep(f"{out}.yaml", {out: card.to_json()})
        rows = card.table.to_dict("records")
        return Report({"scores": rows, "verdict": card.verdict, "out": out}, repr(card))

    plan = Report.of(predicted=list(cube.data_vars), true=list(true_cube.data_vars), out=out)
    return Task(lambda: plan, work)


TRAIN = Command(
    train,
    "ml4cube.training.pytorch:Trainer",
    without=["train_data", "test_data", "best_model_path", "snapshot_path", "model_path"],
    epilog=_UNDER_TORCHRUN,
)
PREDICT = Command(predict, "ml4cube.prediction:predict_cube", without=["ds"])
EVALUATE = Command(evaluate, "ml4cube.evaluation:evaluate", without=["data", "predict"])
