"""Train scikit-learn estimators batch by batch from a loader, or at once on arrays.

History and loggers are those of the other trainers.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, is_classifier, is_clusterer
from sklearn.metrics import mean_squared_error, zero_one_loss

from ml4cube.core.display import Summarized, Summary, counted, one_line
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    check_choice,
)
from ml4cube.core.same_scaling import check_same_scaling
from ml4cube.progress import write_line
from ml4cube.training.callbacks import LoggerCallback, is_better, no_best_model
from ml4cube.training.files.checkpoint import WRITTEN_BY, refuse_foreign, write_bytes
from ml4cube.training.files.paths import absolute_path, check_writable
from ml4cube.training.inputs.batches import as_pair, set_epoch
from ml4cube.training.inputs.checks import (
    check_count,
    check_loader,
    import_package,
    refuse_several_steps,
)
from ml4cube.training.measure.scores import check_metrics
from ml4cube.training.measure.summary import data_text, summary_of_run
from ml4cube.training.state import History, TrainState, best_row

__all__ = ["Trainer", "load_model", "save_model"]

Array = NDArray[Any]
_ARGUMENTS = {"train": "train_data", "val": "test_data"}
Metric = Callable[[Array, Array], float]
_ONE_STEP = "an estimator is trained on one step; make them without rollout"


class Batch(NamedTuple):
    """Samples as arrays for scikit-learn."""

    x: Array  # (samples, features)
    y: Array  # (samples,) or (samples, targets)
    weights: Array | None  # (samples,)


class Trainer(Summarized):
    """Train an estimator, evaluate it after every epoch, and keep the best.

    Samples are flattened: a window of 3 variables on 8 × 8 cells becomes 192 features. Metrics are
    computed over all samples of a part at once, never as a mean over batches, so every metric of
    scikit-learn is exact.

    Parameters
    ----------
    model : sklearn.base.BaseEstimator
        The estimator; it is trained in place, and `train` returns a copy from the best epoch.
    train_data : iterable or tuple of arrays
        A loader of batches ``(X, y)`` (tensors or arrays, samples first), or arrays ``(X, y)``.
        If unsupervised, X alone is enough.
    test_data : iterable or tuple of arrays, optional
        Validation data. Default: the training data chooses the best epoch.
    metrics : mapping of str to callable or object, optional
        ``metric(y_true, y_pred)`` as in `sklearn.metrics`, or objects with ``update(pred, true)``
        and ``compute()`` such as those of `ml4cube.evaluation.metrics`. Batches ``(X, y, weights)``
        weight the loss and those metrics that take ``sample_weight``.
    model_path : str or Path, optional
        File for the best estimator so far, see `save_model`.
    batch_training : bool, optional
        True: ``partial_fit`` on every batch, epoch by epoch. False: ``fit`` once on all samples,
        which must fit into memory. Default: True for a loader, False for arrays.
    mlflow_run : object, optional
        The mlflow module, or any object with ``log_metric(name, value, step=)``. Scores are logged
        as ``training_<name>`` and ``validation_<name>``, and the model with ``log_artifact``.
    task_type : {"supervised", "unsupervised"}
        If unsupervised, the targets are the inputs: the score is ``metric(X, predict(X))``, or for
        transformers that of ``inverse_transform(transform(X))``.
    epochs : int
        Passes over `train_data` with ``partial_fit``.
    loss : callable, optional
        ``loss(y_true, y_pred)`` → number, for the columns ``train_loss`` and ``val_loss``.
        Default: the misclassified fraction for classifiers; if unsupervised, the mean squared
        error of transformers with ``inverse_transform``, and none for others, such as clusterers;
        else the mean squared error.
    monitor : str, optional
        Column of the History that chooses the best epoch. Default: ``val_loss``, or
        ``train_loss`` without `test_data`.
    mode : {"min", "max"}
        Whether lower or higher values are better.
    patience : int, optional
        Epochs without improvement after which to stop. Default: never.
    classes : sequence, optional
        All classes, in the form that ``partial_fit`` takes. Default: those in `train_data`, which
        is read once before the first epoch; several targets need them given.
    max_samples : int, optional
        Most samples to hold in memory for ``fit`` on a loader.
    score_train : bool
        Whether to evaluate on `train_data` too, in another pass per epoch.
    loggers : object or iterable of object
        Objects with ``log(values, step)``, see `ml4cube.training.loggers`. A step is a batch.
    progress : bool
        Whether to write a line per epoch to stderr.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument is not usable, before any data are read.
    ModuleNotFoundError
        If `model_path` is given and skops is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import SGDRegressor
    >>> x = np.linspace(-1, 1, 64).reshape(-1, 1)
    >>> batches = [(x[i : i + 8], 2 * x[i : i + 8]) for i in range(0, 64, 8)]
    >>> trainer = Trainer(SGDRegressor(random_state=0), batches, batches, epochs=5)
    >>> model = trainer.train()
    >>> trainer.history["val_loss"][-1] < trainer.history["val_loss"][0]
    True
    """

    def __init__(
        self,
        model: BaseEstimator,
        train_data: Any,
        test_data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        model_path: str | Path | None = None,
        batch_training: bool | None = None,
        mlflow_run: Any = None,
        task_type: str = "supervised",
        *,
        epochs: int = 1,
        loss: Metric | None = None,
        monitor: str | None = None,
        mode: str = "min",
        patience: int | None = None,
        classes: Sequence[Any] | None = None,
        max_samples: int | None = None,
        score_train: bool = True,
        loggers: Iterable[Any] = (),
        progress: bool = True,
    ) -> None:
        check_choice("task_type", task_type, ["supervised", "unsupervised"])
        check_choice("mode", mode, ["min", "max"])
        if batch_training is None:
            batch_training = not _is_arrays(train_data)
        _check_model(model, by_batch=batch_training)
        check_count("epochs", epochs)
        check_count("max_samples", max_samples, optional=True)
        check_count("patience", patience, optional=True)
        if batch_training:
            check_loader("train_data", train_data)
        check_same_scaling({"train_data": train_data, "test_data": test_data})
        refuse_several_steps({"train_data": train_data, "test_data": test_data}, _ONE_STEP)
        if not batch_training and epochs > 1:
            raise InvalidTypeError(
                f"epochs must be 1 with batch_training=False, which fits once; got {epochs}"
            )
        if mlflow_run is not None and not callable(getattr(mlflow_run, "log_metric", None)):
            raise InvalidTypeError(
                f"mlflow_run must have log_metric(name, value), got {mlflow_run!r}"
            )
        self._path: Path | None = None
        if model_path is not None:
            self._path = absolute_path("model_path", model_path)
            _skops()
        self.model, self.metrics, self.history = model, check_metrics(metrics), History()
        self.best_epoch: int | None = None
        self._train_data, self._is_supervised = train_data, task_type == "supervised"
        self._scored = {"train": train_data, "val": test_data}
        if test_data is None:
            del self._scored["val"]
        elif not score_train:
            del self._scored["train"]
        self._measured = dict(self.metrics)
        loss = loss or _default_loss(model, supervised=self._is_supervised)
        if loss is not None:
            self._measured = {"loss": loss} | self._measured
        self._monitor = _pick_monitor(monitor, self._scored, self._measured, patience)
        self._mode, self._patience, self._epochs = mode, patience, epochs
        self._by_batch, self._max_samples = batch_training, max_samples
        self._classes: Any = classes  # else those in the training data
        self._loggers, self._mlflow = LoggerCallback(loggers), mlflow_run
        self._shows_progress = progress

    def _summary(self) -> Summary:
        """Return how far training is, the next call, and what is trained on what."""
        done, fitted = len(self.history), "at once"
        if self._by_batch:
            fitted = "batch by batch"
        facts = {
            "Model": one_line(self.model),
            "Fitted": fitted,
            "Metrics": list(self._measured),
            "Training": _shown_data(self._train_data),
            "Validation": _shown_data(self._scored.get("val")),
            "Best model": self._path,
        }
        best = best_row(self.history, self._monitor, self._mode)
        next_step = "train()"
        if done:
            next_step = "evaluate(data), predict_cube(trainer.model, ...)"
        epochs = f"{done} of {counted(self._epochs, 'epoch')}"
        return summary_of_run(epochs, self._monitor, best, next_step, facts, self.history)

    def train(self) -> BaseEstimator:
        """Train for all epochs, or until `patience` runs out.

        Returns
        -------
        sklearn.base.BaseEstimator
            The estimator after the best epoch, or after the last if nothing is monitored.

        Raises
        ------
        EmptyPartError
            If `train_data` or `test_data` is empty.
        InvalidValueError
            If there are more samples than `max_samples`.
        RunError
            If the monitored value is NaN in every epoch.
        """
        if self._path is not None:
            check_writable(self._path)
            refuse_foreign(self._path)
        best = self._train()
        if self._path is not None and hasattr(self._mlflow, "log_artifact"):
            self._mlflow.log_artifact(str(self._path), self._path.name)
        return best

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return loss and metrics over all samples of other data.

        Parameters
        ----------
        data : iterable or tuple of arrays
            As `test_data`.

        Returns
        -------
        dict of str to float
            ``val_loss`` and the metrics.

        Raises
        ------
        EmptyPartError
            If `data` is empty.
        InvalidValueError
            If its samples hold several steps of a forecast.
        """
        refuse_several_steps({"data": data}, _ONE_STEP)
        return self._score(data)

    def _train(self) -> BaseEstimator:
        """Train for all epochs, or until patience runs out; save and return the best estimator."""
        state = TrainState()
        # The attributes of a `TrainingLoop` that LoggerCallback reads.
        loop: Any = SimpleNamespace(world=SimpleNamespace(is_main=True), state=state)
        best, best_value, best_epoch = None, None, 0
        try:
            self._loggers.on_train_start(loop)
            for epoch in range(1, self._epochs + 1):
                row = self._run_epoch(state)
                value = row.get(self._monitor or "")
                if value is None or is_better(value, best_value, self._mode):
                    best, best_value = copy.deepcopy(self.model), value
                    self.best_epoch = best_epoch = epoch
                    if self._path is not None:
                        save_model(self._path, best)
                self._loggers.on_epoch_end(loop, row)
                if self._patience is not None and epoch - best_epoch >= self._patience:
                    break
        finally:
            self._loggers.on_close(loop)
        if best is None:
            raise no_best_model(self._monitor)
        self.model = best
        return best

    def _score(self, data: Any, part: str = "val") -> dict[str, float]:
        """Return loss and metrics over all samples, by column."""
        if not self._measured:  # an estimator such as DBSCAN cannot predict
            return {}
        # Batches with the prediction in place of X, so that not all inputs must fit into memory.
        batches = self._batches(data, part)
        predicted = (Batch(self._predict(x), y, weights) for x, y, weights in batches)
        pred, truth, weights = _concatenate(predicted)
        return {
            _column(part, name): _apply(metric, truth, pred, weights)
            for name, metric in self._measured.items()
        }

    def _run_epoch(self, state: TrainState) -> dict[str, Any]:
        """Train for one epoch, evaluate, and return the row of the History."""
        started = time.perf_counter()
        set_epoch(self._train_data, state.epoch)
        fit = self._fit_at_once
        if self._by_batch:
            fit = self._fit_batches
        samples = fit(state)
        state.epoch += 1
        row: dict[str, Any] = {"epoch": state.epoch}
        for part, data in self._scored.items():
            scores = self._score(data, part)
            self._send_to_mlflow(part, scores, state.epoch)
            row |= scores
        row |= {"samples": samples, "seconds": time.perf_counter() - started}
        self.history.append(row)
        if self._shows_progress:
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
            write_line(f"epoch {state.epoch}/{self._epochs}: {text}")
        return row

    def _send_to_mlflow(self, part: str, scores: Mapping[str, float], epoch: int) -> None:
        if self._mlflow is None:
            return
        prefix = {"train": "training", "val": "validation"}[part]
        for name in self._measured:
            self._mlflow.log_metric(f"{prefix}_{name}", scores[_column(part, name)], step=epoch)

    def _fit_batches(self, state: TrainState) -> int:
        """Train on all batches once, and return the number of samples."""
        if self._classes is None and self._is_supervised and is_classifier(self.model):
            of_batches = [np.unique(batch.y) for batch in self._batches(self._train_data, "train")]
            self._classes = np.unique(np.concatenate(of_batches))
        samples = 0
        for batch in self._batches(self._train_data, "train"):
            arguments = {}
            if state.step == 0 and self._classes is not None:
                arguments["classes"] = self._classes  # only the first call of all takes them
            self._learn(self.model.partial_fit, batch, **arguments)
            samples += len(batch.x)
            state.step += 1
        return samples

    def _fit_at_once(self, state: TrainState) -> int:
        """Fit on all samples at once, and return their number."""
        whole = _concatenate(self._batches(self._train_data, "train"), self._max_samples)
        self._learn(self.model.fit, whole)
        state.step += 1
        return len(whole.x)

    def _learn(self, method: Callable[..., Any], batch: Batch, **arguments: Any) -> None:
        """Call `fit` or `partial_fit` of the estimator."""
        if batch.weights is not None:
            if not _takes_weights(method):
                raise InvalidTypeError(
                    f"batches have weights, but {type(self.model).__name__} takes no sample_weight"
                )
            arguments["sample_weight"] = batch.weights
        targets = (batch.y,)[: self._is_supervised]
        method(batch.x, *targets, **arguments)

    def _predict(self, x: Array) -> Array:
        if hasattr(self.model, "predict"):
            return np.asarray(self.model.predict(x))
        if not self._is_supervised and hasattr(self.model, "inverse_transform"):
            return np.asarray(self.model.inverse_transform(self.model.transform(x)))
        raise InvalidTypeError(
            f"{type(self.model).__name__} cannot be evaluated: it has no predict or "
            "inverse_transform"
        )

    def _batches(self, data: Any, part: str) -> Iterator[Batch]:
        """Yield batches as arrays with one row per sample."""
        is_empty = True
        for items in [data] if _is_arrays(data) else data:
            batch = _as_batch(items, supervised=self._is_supervised)
            if len(batch.x):
                is_empty = False
                yield batch
        if is_empty:
            raise EmptyPartError(f"{_ARGUMENTS[part]} must not be empty")


def save_model(path: str | Path, model: BaseEstimator) -> None:
    """Write an estimator in the format of skops, which can be loaded without executing code.

    Parameters
    ----------
    path : str or Path
        The file, replaced atomically; missing folders are created.
    model : sklearn.base.BaseEstimator
        The estimator.

    Raises
    ------
    ModuleNotFoundError
        If skops is not installed.
    StoreExistsError
        If there is a file that was not written so.
    StoreError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model.skops", model)
    ...     print([path.name for path in Path(folder).iterdir()])
    ['model.skops']
    """
    path, data = Path(path).expanduser(), BytesIO(_skops().dumps(model))
    refuse_foreign(path)
    with zipfile.ZipFile(data, "a") as archive:
        archive.comment = WRITTEN_BY.encode()
    write_bytes(path, data.getvalue())


def load_model(path: str | Path, trusted: Sequence[str] = ()) -> BaseEstimator:
    """Read an estimator from a file of `save_model`.

    Parameters
    ----------
    path : str or Path
        The file.
    trusted : sequence of str
        Full names of further types that may be loaded, besides those of scikit-learn and numpy.

    Returns
    -------
    sklearn.base.BaseEstimator
        The estimator.

    Raises
    ------
    StoreError
        If the file is missing, damaged, of another format, or has types that are not trusted.
    ModuleNotFoundError
        If skops is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model.skops", model)
    ...     again = load_model(f"{folder}/model.skops")
    >>> bool(np.allclose(again.predict([[2.0]]), 5))
    True
    """
    file, skops = Path(path).expanduser(), _skops()
    if not file.is_file():
        raise StoreError(f"{file} does not exist")
    model = None
    try:
        unknown = sorted(set(skops.get_untrusted_types(file=file)) - set(trusted))
        if not unknown:
            model = skops.load(file, trusted=list(trusted))
    except Exception as error:  # skops raises errors of many types for damaged files
        raise StoreError(f"{file} is damaged or not written by save_model: {error}") from error
    if unknown:
        raise StoreError(f"{file} has untrusted types {unknown}; if you know them, use trusted=")
    return model


def _pick_monitor(
    monitor: str | None, parts: Iterable[str], metrics: Iterable[str], patience: int | None
) -> str | None:
    """Return the column that chooses the best epoch; None if nothing is measured."""
    columns = [_column(part, name) for part in parts for name in metrics]
    default = "train_loss"
    if "val" in parts:
        default = "val_loss"
    if monitor is None and default not in columns and patience is None:
        return None
    chosen = monitor or default
    if chosen not in columns:
        raise InvalidValueError(
            f"monitor must be one of the columns {columns}, got {chosen!r}; give loss= or "
            "metrics=, or another monitor"
        )
    return chosen


def _shown_data(data: Any) -> str | None:
    """Return the shapes of arrays, or the number of batches of a loader."""
    if data is None or not _is_arrays(data):
        return data_text(data)
    return "arrays " + ", ".join(str(tuple(item.shape)) for item in _as_items(data))


def _default_loss(model: BaseEstimator, *, supervised: bool) -> Metric | None:
    if is_classifier(model):
        return zero_one_loss  # type: ignore[no-any-return]
    # What others predict of X, such as clusters or outliers, cannot be compared with X.
    has_error = hasattr(model, "inverse_transform") and not hasattr(model, "predict")
    if supervised:
        has_error = not is_clusterer(model)
    return mean_squared_error if has_error else None


def _check_model(model: Any, *, by_batch: bool) -> None:
    name = type(model).__name__
    if isinstance(model, type) or not hasattr(model, "fit"):
        raise InvalidTypeError(
            f"model must be an estimator object of scikit-learn, got {one_line(model)}"
        )
    if by_batch and not hasattr(model, "partial_fit"):
        raise InvalidTypeError(
            f"{name} has no partial_fit, so it cannot be trained batch by batch; use another "
            "estimator (SGDRegressor, MLPClassifier, MiniBatchKMeans ...), or "
            "batch_training=False to fit all samples at once, in memory"
        )


def _skops() -> Any:
    return import_package("skops.io", "skops", "saving estimators")


def _column(part: str, name: str) -> str:
    """Return the column of a metric; only the loss has a prefix for the validation data."""
    if part == "train" or name == "loss":
        return f"{part}_{name}"
    return name


def _is_arrays(data: Any) -> bool:
    """Return True if the data are arrays and not a loader of batches."""
    items = _as_items(data)
    return len(items) in (1, 2, 3) and all(hasattr(item, "shape") for item in items)


def _as_items(data: Any) -> Sequence[Any]:
    """Return the arrays of a tuple, or of a single one."""
    if isinstance(data, tuple):
        return data
    return (data,)


def _as_batch(batch: Any, *, supervised: bool) -> Batch:
    """Return a batch ``(X, y)``, ``(X, y, weights)`` or X as arrays; unsupervised, y is X."""
    if isinstance(batch, Mapping):  # variables are stacked as channels
        batch = as_pair(batch)
    if isinstance(batch, list):
        batch = tuple(batch)
    arrays = [_as_array(item) for item in _as_items(batch)]
    if len(arrays) not in (1, 2, 3):
        raise InvalidTypeError(
            f"a batch must be (X, y), (X, y, weights) or X, got {len(arrays)} items"
        )
    if supervised and len(arrays) == 1:
        raise InvalidTypeError(
            "a batch must be (X, y), got X alone; use task_type='unsupervised' to train without y"
        )
    x, y, weights, *_ = [*arrays, None, None]
    if y is not None and len(x) != len(y):
        raise InvalidValueError(
            f"a batch must have as many targets as samples, got {len(y)} and {len(x)}"
        )
    if weights is not None and weights.ndim != 1:
        raise InvalidTypeError(f"weights must have one value per sample, got shape {weights.shape}")
    x = _flatten(x)
    if not supervised:
        return Batch(x, x, weights)
    y = _flatten(y)
    if y.shape[1] == 1:  # scikit-learn expects one target as one dim
        y = y[:, 0]
    return Batch(x, y, weights)


def _as_array(item: Any) -> Array:
    if isinstance(item, torch.Tensor):
        return item.numpy(force=True)
    return np.asarray(item)


def _flatten(array: Array) -> Array:
    """Return an array, which may be empty, with one row per sample."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _concatenate(batches: Iterable[Batch], max_samples: int | None = None) -> Batch:
    """Return all samples as one batch; refuse more than `max_samples`."""
    read: list[Batch] = []
    samples = 0
    for batch in batches:
        read.append(batch)
        samples += len(batch.x)
        if max_samples is not None and samples > max_samples:
            raise InvalidValueError(
                f"train_data has more than max_samples={max_samples}; increase it, or use an "
                "estimator with partial_fit and batch_training=True"
            )
    xs, ys, weights = zip(*read, strict=True)
    whole = Batch(np.concatenate(xs), np.concatenate(ys), None)
    if all(of_batch is None for of_batch in weights):
        return whole
    for number, batch in enumerate(read):  # samples without a weight have weight 1
        if batch.weights is None:
            read[number] = batch._replace(weights=np.ones(len(batch.x)))
    return whole._replace(weights=np.concatenate([batch.weights for batch in read]))


def _apply(metric: Any, truth: Array, pred: Array, weights: Array | None) -> float:
    """Return a metric over all samples, weighted if it takes weights."""
    if hasattr(metric, "update"):
        metric = copy.deepcopy(metric)  # the user's object stays empty
        metric.update(pred, truth)
        return float(metric.compute())
    if weights is not None and _takes_weights(metric):
        return float(metric(truth, pred, sample_weight=weights))
    return float(metric(truth, pred))


def _takes_weights(function: Callable[..., Any]) -> bool:
    return "sample_weight" in inspect.signature(function).parameters
