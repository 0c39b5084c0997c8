"""Train scikit-learn estimators: batch by batch from a loader, or at once on arrays.

The History, early stopping and loggers are those of the other trainers; the weights of an
estimator are its attributes, so there is no loop of torch underneath.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, is_classifier, is_clusterer
from sklearn.metrics import mean_squared_error, zero_one_loss

from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    check_choice,
)
from ml4cube.core.joining import check_joined
from ml4cube.progress import write_line
from ml4cube.training.callbacks import EarlyStopping, LoggerCallback, is_better
from ml4cube.training.files.checkpoint import write_bytes
from ml4cube.training.inputs.batches import as_pair, set_epoch
from ml4cube.training.inputs.checks import check_loader
from ml4cube.training.inputs.options import check_count, check_path
from ml4cube.training.measure.scores import check_metrics
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import History, TrainState

__all__ = ["Trainer", "load_model", "save_model"]

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Metric = Callable[[Array, Array], float]


class Trainer:
    """Train an estimator, look at it after every epoch, and keep the best.

    Samples are flattened: a window of 3 variables on 8 × 8 cells becomes 192 features. What is
    measured is computed over all samples of a part at once, never as a mean of batches, so any
    metric of scikit-learn is exact.

    Parameters
    ----------
    model : sklearn.base.BaseEstimator
        The estimator; it is trained in place, and `train` returns a copy from the best epoch.
    train_data : iterable or tuple of arrays
        A loader of batches ``(X, y)`` (tensors or arrays, samples first), or arrays ``(X, y)``.
        Without supervision X alone will do.
    test_data : iterable or tuple of arrays, optional
        What to validate on; without, the training data decides.
    metrics : mapping of str to callable or object, optional
        ``metric(y_true, y_pred)`` as in `sklearn.metrics`, or objects with ``update(pred, true)``
        and ``compute()`` such as those of `ml4cube.evaluation.metrics`.
    model_path : str or Path, optional
        File for the best estimator so far, see `save_model`.
    batch_training : bool, optional
        True: ``partial_fit`` on every batch, epoch by epoch. False: ``fit`` once on all samples,
        which must fit into memory. Default: True for a loader, False for arrays.
    mlflow_run : object, optional
        MLflow itself, or anything with ``log_metric(name, value, step=)``; scores are logged as
        ``training_<name>`` and ``validation_<name>``, and the model with ``log_artifact``.
    task_type : {"supervised", "unsupervised"}
        Without supervision the targets are the inputs: an estimator that predicts is scored on
        ``metric(X, predict(X))``, another on what ``inverse_transform`` gives back.
    epochs : int
        Passes over `train_data` with ``partial_fit``.
    loss : callable, optional
        ``loss(y_true, y_pred)`` → number, the columns ``train_loss`` and ``val_loss``. Default:
        the share of wrong classes for classifiers, none for clusterers, else the mean squared
        error.
    monitor : str, optional
        Which column of the History decides what is best. Default ``val_loss``, or ``train_loss``
        without `test_data`.
    mode : {"min", "max"}
        Which way is better.
    patience : int, optional
        Epochs without improvement after which to stop; None never stops.
    classes : sequence, optional
        All classes there are. Default: those of `train_data`, read once before the first epoch.
    max_samples : int, optional
        With ``fit`` on a loader, how many samples to hold in memory at most.
    score_train : bool
        Whether to measure on `train_data` too, in one more pass per epoch.
    loggers : object or iterable of object
        Each with ``log(values, step)``; see `ml4cube.training.loggers`. A step is a batch.
    progress : bool
        Whether to write a line to stderr for every epoch.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work, before anything is read.
    ModuleNotFoundError
        If `model_path` is given and skops is not installed.

    Examples
    --------
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
        self._by_batch = not _is_arrays(train_data) if batch_training is None else batch_training
        _check_model(model, by_batch=self._by_batch)
        for name, value in (("epochs", epochs), ("max_samples", max_samples)):
            check_count(name, value, optional=name == "max_samples")
        if self._by_batch:
            check_loader("train_data", train_data)
        check_joined({"train_data": train_data, "test_data": test_data})
        if not self._by_batch and epochs > 1:
            raise InvalidTypeError(
                f"epochs={epochs} and batch_training=False contradict: fit() sees all samples once"
            )
        if mlflow_run is not None and not callable(getattr(mlflow_run, "log_metric", None)):
            raise InvalidTypeError(f"mlflow_run={mlflow_run!r} has no log_metric(name, value)")
        check_path("model_path", model_path)
        if model_path is not None:
            _skops()
        self.model, self.metrics = model, check_metrics(metrics)
        self.history = History()
        self.best_epoch: int | None = None
        self._supervised = task_type == "supervised"
        self._data = {"train": train_data} | ({} if test_data is None else {"val": test_data})
        self._parts = [p for p in self._data if p == "val" or score_train or test_data is None]
        self._loss = _default_loss(model) if loss is None else loss
        self._monitor = self._pick_monitor(monitor, patience)
        self._mode, self._epochs, self._progress = mode, epochs, progress
        self._path = None if model_path is None else Path(model_path)
        self._classes: Any = classes
        self._max_samples, self._mlflow = max_samples, mlflow_run
        stopping: list[Any] = []
        if patience is not None and self._monitor is not None:
            stopping.append(EarlyStopping(patience, mode, self._monitor))
        self._callbacks: list[Any] = [*stopping, LoggerCallback(loggers)]

    def train(self) -> BaseEstimator:
        """Train to the end.

        Returns
        -------
        sklearn.base.BaseEstimator
            The estimator as it was after the best epoch; where nothing is monitored, after the
            last.

        Raises
        ------
        EmptyPartError
            If `train_data` or `test_data` gives no sample.
        InvalidValueError
            If there are more samples than `max_samples`.
        """
        run = _Run(World.single("cpu"), TrainState())
        best, value = copy.deepcopy(self.model), None
        try:
            for callback in self._callbacks:
                callback.on_train_start(run)
            while run.state.epoch < self._epochs and run.reason is None:
                row = self._run_epoch(run)
                watched = None if self._monitor is None else row[self._monitor]
                if watched is None or is_better(watched, value, self._mode):
                    best, value, self.best_epoch = copy.deepcopy(self.model), watched, row["epoch"]
                    if self._path is not None:
                        save_model(self._path, best)
                for callback in self._callbacks:
                    callback.on_check(run, row)
                    callback.on_epoch_end(run, row)
        finally:
            for callback in self._callbacks:
                callback.on_close(run)
        self.model = best
        if self._path is not None and hasattr(self._mlflow, "log_artifact"):
            self._mlflow.log_artifact(str(self._path), self._path.name)
        return best

    def _pick_monitor(self, monitor: str | None, patience: int | None) -> str | None:
        """Return the column that decides, or say that there is none."""
        names = [*([] if self._loss is None else ["loss"]), *self.metrics]
        known = [_column(part, name) for part in self._parts for name in names]
        default = _column("val" if "val" in self._parts else "train", "loss")
        if monitor is None and default not in known and patience is None:
            return None
        if (monitor or default) not in known:
            raise InvalidValueError(
                f"monitor={monitor or default!r} is no column of the History, which will have "
                f"{known}; give loss= or metrics=, or another monitor"
            )
        return monitor or default

    def _run_epoch(self, run: _Run) -> dict[str, Any]:
        started = time.perf_counter()
        set_epoch(self._data["train"], run.state.epoch)
        samples = self._partial_fit(run) if self._by_batch else self._fit(run)
        row: dict[str, Any] = {"epoch": run.state.epoch + 1}
        for part in self._parts:
            row |= self._score(part)
        row |= {"samples": samples, "seconds": time.perf_counter() - started}
        run.state.epoch += 1
        self.history.append(row)
        if self._mlflow is not None:
            self._log_scores(row, run.state.epoch)
        if self._progress:
            scores = {name: value for name, value in row.items() if isinstance(value, float)}
            told = ", ".join(f"{name} {value:.6g}" for name, value in scores.items())
            write_line(f"epoch {row['epoch']}/{self._epochs}: {told}")
        return row

    def _log_scores(self, row: Mapping[str, Any], epoch: int) -> None:
        names = [*([] if self._loss is None else ["loss"]), *self.metrics]
        for part, long in (("train", "training"), ("val", "validation")):
            for name in names if part in self._parts else ():
                self._mlflow.log_metric(f"{long}_{name}", row[_column(part, name)], step=epoch)

    def _partial_fit(self, run: _Run) -> int:
        """One pass over the training data, a batch at a time."""
        if self._classes is None and self._supervised and is_classifier(self.model):
            found = [np.unique(batch.y) for batch in self._batches(self._data["train"], "train")]
            self._classes = np.unique(np.concatenate(found)) if found else None
        known = {} if self._classes is None else {"classes": self._classes}
        samples = 0
        for batch in self._batches(self._data["train"], "train"):
            first = known if samples == 0 and run.state.epoch == 0 else {}
            self.model.partial_fit(batch.x, *self._rest(batch), **self._weighted(batch), **first)
            samples += len(batch.x)
            run.state.step += 1
        return samples

    def _fit(self, run: _Run) -> int:
        """Fit once, on all samples."""
        whole = _joined(self._batches(self._data["train"], "train"), self._max_samples)
        self.model.fit(whole.x, *self._rest(whole), **self._weighted(whole))
        run.state.step += 1
        return len(whole.x)

    def _rest(self, batch: Batch) -> tuple[Array, ...]:
        return (batch.y,) if self._supervised else ()

    def _weighted(self, batch: Batch) -> dict[str, Array]:
        if batch.weights is None:
            return {}
        method = self.model.partial_fit if self._by_batch else self.model.fit
        if "sample_weight" not in inspect.signature(method).parameters:
            raise InvalidTypeError(
                f"batches bring weights, but {type(self.model).__name__} takes no sample_weight"
            )
        return {"sample_weight": batch.weights}

    def evaluate(self, data: Any) -> dict[str, float]:
        """Measure loss and metrics over all samples of other data.

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
            If it gives no sample.
        """
        return self._measure(data, "val")

    def _score(self, part: str) -> dict[str, float]:
        return self._measure(self._data[part], part)

    def _measure(self, data: Any, part: str) -> dict[str, float]:
        """Loss and metrics over all samples, by the names that they have for a part."""
        streamed = {n: copy.deepcopy(m) for n, m in self.metrics.items() if hasattr(m, "update")}
        plain = {n: m for n, m in self.metrics.items() if n not in streamed}
        if self._loss is not None:
            plain = {"loss": self._loss, **plain}
        truths, preds = [], []
        for batch in self._batches(data, part):
            pred = self._predict(batch.x)
            truth = batch.y if self._supervised else batch.x
            for metric in streamed.values():
                metric.update(pred, truth)
            if plain:  # targets are small beside inputs, and a metric may need them all
                truths.append(truth)
                preds.append(pred)
        whole = (np.concatenate(truths), np.concatenate(preds)) if truths else ((), ())
        values = {name: metric(*whole) for name, metric in plain.items()}
        values |= {name: metric.compute() for name, metric in streamed.items()}
        return {_column(part, name): float(value) for name, value in values.items()}

    def _predict(self, x: Array) -> Array:
        if hasattr(self.model, "predict"):
            return np.asarray(self.model.predict(x))
        if not self._supervised and hasattr(self.model, "inverse_transform"):
            return np.asarray(self.model.inverse_transform(self.model.transform(x)))
        raise InvalidTypeError(
            f"{type(self.model).__name__} neither predicts nor gives its inputs back; there is "
            "nothing to measure"
        )

    def _batches(self, data: Any, part: str) -> Iterator[Batch]:
        """Batches as arrays of one row per sample."""
        seen = 0
        for batch in [data] if _is_arrays(data) else data:
            found = _as_batch(batch, supervised=self._supervised)
            seen += len(found.x)
            if len(found.x):
                yield found
        if not seen:
            name = {"train": "train_data", "val": "test_data"}[part]
            raise EmptyPartError(f"{name} gave no sample; give a part that is not empty")


def save_model(path: str | Path, model: BaseEstimator) -> None:
    """Write an estimator so that loading it runs no code of the file: the format of skops.

    Parameters
    ----------
    path : str or Path
        The file; folders are made, an old one is replaced once the new one is whole.
    model : sklearn.base.BaseEstimator
        The estimator.

    Raises
    ------
    ModuleNotFoundError
        If skops is not installed.
    StoreError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from sklearn.linear_model import LinearRegression
    >>> model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model.skops", model)
    ...     print([path.name for path in Path(folder).iterdir()])
    ['model.skops']
    """
    write_bytes(path, _skops().dumps(model))


def load_model(path: str | Path, trusted: Sequence[str] = ()) -> BaseEstimator:
    """Read what `save_model` wrote.

    Parameters
    ----------
    path : str or Path
        The file.
    trusted : sequence of str
        Full names of types outside of scikit-learn and numpy that the file may hold.

    Returns
    -------
    sklearn.base.BaseEstimator
        The estimator.

    Raises
    ------
    StoreError
        If the file is missing, of another format, or holds types that are not trusted.
    ModuleNotFoundError
        If skops is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from sklearn.linear_model import LinearRegression
    >>> model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model.skops", model)
    ...     again = load_model(f"{folder}/model.skops")
    >>> bool(np.allclose(again.predict([[2.0]]), 5))
    True
    """
    file, skops = Path(path), _skops()
    if not file.is_file():
        raise StoreError(f"{file} does not exist; give the path of a file of save_model")
    try:
        strange = sorted(set(skops.get_untrusted_types(file=file)) - set(trusted))
        if strange:
            raise StoreError(
                f"{file} holds types that are not trusted: {strange}; if you know them, name them "
                "in trusted="
            )
        return skops.load(file, trusted=list(trusted))
    except StoreError:
        raise
    except Exception as error:  # skops has no errors of its own for what it cannot read
        raise StoreError(f"{file} is damaged or not of save_model: {error}") from error


class Batch(NamedTuple):
    """Samples as scikit-learn takes them."""

    x: Array
    # Shape ``(samples,)`` or ``(samples, targets)``.
    y: Array
    weights: Array | None


@dataclass
class _Run:
    """What callbacks of the other trainers see of a run."""

    world: World
    state: TrainState
    reason: str | None = None
    resumed: bool = False

    def stop(self, reason: str) -> None:
        self.reason = reason


def _column(part: str, name: str) -> str:
    """Name a value in the History: a metric is of the validation data unless it says otherwise."""
    return f"{part}_{name}" if part == "train" or name == "loss" else name


def _as_batch(batch: Any, *, supervised: bool) -> Batch:
    if isinstance(batch, Mapping):  # variables, to be stacked and given back
        batch = as_pair(batch)
    items = batch if isinstance(batch, tuple | list) else (batch,)
    arrays = [np.asarray(i.numpy(force=True) if isinstance(i, torch.Tensor) else i) for i in items]
    if len(arrays) not in (1, 2, 3):
        raise InvalidTypeError(
            f"a batch has {len(arrays)} items; give (X, y), (X, y, weights), or X alone"
        )
    if supervised and len(arrays) == 1:
        raise InvalidTypeError(
            "a batch holds X alone; give (X, y), or task_type='unsupervised' to learn without y"
        )
    x, y = _rows(arrays[0]), _rows(arrays[min(1, len(arrays) - 1)])
    weights = arrays[2] if len(arrays) == 3 else None
    if len(x) != len(y):
        raise InvalidValueError(f"a batch has {len(x)} samples and {len(y)} targets")
    if weights is not None and weights.ndim != 1:
        raise InvalidTypeError(
            f"weights have shape {weights.shape}; an estimator takes one per sample"
        )
    flat = y[:, 0] if y.shape[1] == 1 else y
    return Batch(x, flat, weights)


def _rows(array: Array) -> Array:
    """One row per sample, whatever shape a sample has."""
    return array.reshape(len(array), -1)


def _joined(batches: Iterator[Batch], most: int | None) -> Batch:
    held: list[Batch] = []
    samples = 0
    for batch in batches:
        held.append(batch)
        samples += len(batch.x)
        if most is not None and samples > most:
            raise InvalidValueError(
                f"train_data has more than max_samples={most}; raise it, or take an estimator "
                "with partial_fit and batch_training=True"
            )
    weights = [batch.weights for batch in held if batch.weights is not None]
    return Batch(
        np.concatenate([batch.x for batch in held]),
        np.concatenate([batch.y for batch in held]),
        np.concatenate(weights) if weights else None,
    )


def _is_arrays(data: Any) -> bool:
    """Whether this is ``(X, y)`` or X in memory, and not a loader of batches."""
    items = data if isinstance(data, tuple) else (data,)
    return len(items) in (1, 2, 3) and all(hasattr(item, "shape") for item in items)


def _default_loss(model: BaseEstimator) -> Metric | None:
    if is_classifier(model):
        return zero_one_loss  # type: ignore[no-any-return]
    return None if is_clusterer(model) else mean_squared_error


def _check_model(model: Any, *, by_batch: bool) -> None:
    name = type(model).__name__
    if isinstance(model, type) or not hasattr(model, "fit"):
        raise InvalidTypeError(f"model={model!r} is no estimator of scikit-learn; give an object")
    if by_batch and not hasattr(model, "partial_fit"):
        raise InvalidTypeError(
            f"{name} has no partial_fit, so it cannot learn batch by batch; take one that has "
            "(SGDRegressor, MLPClassifier, MiniBatchKMeans ...), or set batch_training=False to "
            "fit it once on all samples, held in memory"
        )


def _skops() -> Any:
    try:
        import skops.io
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "saving estimators needs skops, which is not installed; run `pip install skops`, or "
            "leave model_path out and save the returned estimator yourself",
            name=error.name,
        ) from error
    return skops.io
