"""`predict` and `evaluate`: from a trained model to a cube, and its scores."""

from __future__ import annotations

import os
from typing import Any

from ml4cube.cli.by_name import Names
from ml4cube.cli.command import Command
from ml4cube.cli.configuration import read_file
from ml4cube.cli.files import BEST, CONFIG, check_free, check_ours
from ml4cube.cli.inputs import OpenCube, Recipe, model_of, read_statistics, samples_of
from ml4cube.cli.inputs import open_cube as open_predicted
from ml4cube.cli.task import Keep, Report, Task
from ml4cube.core.errors import InvalidTypeError, InvalidValueError


def predict(
    cube: str,
    /,
    *,
    out: str,
    run: str | None = None,
    model: Recipe | None = None,
    weights: str | None = None,
    store_or_stats: str | None = None,
    names: Names,
    open_cube: OpenCube,
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
    module = model_of(model, names)
    _load_weights(module, weights)
    ds = open_cube(cube)

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
    out: str | None = None,
    overwrite: bool = False,
    open_cube: OpenCube,
    **arguments: Any,
) -> Task:
    """Compare a predicted cube, and baselines beside it, with the true cube.

    Parameters
    ----------
    prediction : path or URL
        The predicted cube.
    truth : path or URL
        The true cube, with a split label if it has one.
    out : path or URL, ending in .json, optional
        Where to write the scorecard; ml4cube.evaluation.Scorecard.from_json reads its text.
    overwrite : bool
        Replace a scorecard at out.
    """
    from ml4cube.evaluation import evaluate as compare

    if out is not None:
        check_free(out, overwrite)
    cube = open_predicted(prediction)
    true_cube = open_cube(truth)

    def work(keep: Keep) -> Report:
        card = compare(cube, true_cube, **arguments)
        if out is not None:
            keep(f"{out}.yaml", {out: card.to_json()})
        rows = card.table.to_dict("records")
        return Report({"scores": rows, "verdict": card.verdict, "out": out}, repr(card))

    plan = Report.of(predicted=list(cube.data_vars), true=list(true_cube.data_vars), out=out)
    return Task(lambda: plan, work)


PREDICT = Command(predict, "ml4cube.prediction:predict_cube", without=["ds", "recipe", "client"])
EVALUATE = Command(evaluate, "ml4cube.evaluation:evaluate", without=["data", "predict", "cube"])
