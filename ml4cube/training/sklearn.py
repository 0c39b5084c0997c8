"""Train scikit-learn estimators batch by batch from a loader, or at once on arrays.

History and loggers are those of the other trainers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from sklearn.base import BaseEstimator, is_classifier, is_clusterer
from sklearn.metrics import mean_squared_error, zero_one_loss

from ml4cube.core.display import Summarized, Summary, counted, one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_choice
from ml4cube.core.same_scaling import check_same_scaling
from ml4cube.training.files.checkpoint import WRITTEN_BY, refuse_foreign, write_bytes
from ml4cube.training.files.paths import absolute_path, check_writable
from ml4cube.training.inputs.checks import check_loader, import_package
from ml4cube.training.inputs.options import check_count
from ml4cube.training.inputs.rollout import refuse_several_steps
from ml4cube.training.measure.scores import check_metrics
from ml4cube.training.measure.summary import data_text, summary_of_run
from ml4cube.training.run.estimators import Array, EstimatorLoop, as_items, column, is_arrays
from ml4cube.training.state import History, best_row

__all__ = ["Trainer", "load_model", "save_model"]

Metric = Callable[[Array, Array], float]
_ONE_STEP = "an estimator is trained on one step; make them without rollout"


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
            batch_training = not is_arrays(train_data)
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
        self.metrics = check_metrics(metrics)
        measured = dict(self.metrics)
        loss = loss or _default_loss(model, supervised=task_type == "supervised")
        if loss is not None:
            measured = {"loss": loss} | measured
        scored = {"train": train_data, "val": test_data}
        if test_data is None:
            del scored["val"]
        elif not score_train:
            del scored["train"]
        self._loop = EstimatorLoop(
            model,
            train_data,
            scored,
            measured,
            _pick_monitor(monitor, scored, measured, patience),
            mode,
            epochs,
            batch_training,
            task_type == "supervised",
            loggers,
            patience,
            classes,
            max_samples,
            mlflow_run,
            progress,
        )

    def _summary(self) -> Summary:
        """Return how far training is, the next call, and what is trained on what."""
        loop, done, fitted = self._loop, len(self.history), "at once"
        if loop.by_batch:
            fitted = "batch by batch"
        facts = {
            "Model": one_line(self.model),
            "Fitted": fitted,
            "Metrics": list(loop.metrics),
            "Training": _shown_data(loop.train_data),
            "Validation": _shown_data(loop.scored.get("val")),
            "Best model": self._path,
        }
        best = best_row(self.history, loop.monitor, loop.mode)
        next_step = "train()"
        if done:
            next_step = "evaluate(data), predict_cube(trainer.model, ...)"
        epochs = f"{done} of {counted(loop.epochs, 'epoch')}"
        return summary_of_run(epochs, loop.monitor, best, next_step, facts, self.history)

    @property
    def model(self) -> BaseEstimator:
        """The estimator; after training, that of the best epoch."""
        return self._loop.model

    @property
    def history(self) -> History:
        """Loss, metrics and timings of every epoch."""
        return self._loop.history

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 1, whose estimator is kept; None before the first has ended."""
        return self._loop.best_epoch

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
        best = self._loop.run(self._save)
        if self._path is not None and hasattr(self._loop.mlflow, "log_artifact"):
            self._loop.mlflow.log_artifact(str(self._path), self._path.name)
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
        return self._loop.score(data)

    def _save(self, model: BaseEstimator) -> None:
        if self._path is not None:
            save_model(self._path, model)


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
    columns = [column(part, name) for part in parts for name in metrics]
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
    if data is None or not is_arrays(data):
        return data_text(data)
    return "arrays " + ", ".join(str(tuple(item.shape)) for item in as_items(data))


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
