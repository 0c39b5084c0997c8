"""The loop of scikit-learn estimators: fit batch by batch or at once, score, keep the best.

It is a loop of its own, because estimators have no parameters that torch could train.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, is_classifier

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.progress import write_line
from ml4cube.training.callbacks import LoggerCallback, is_better, no_best_model
from ml4cube.training.inputs.batches import as_pair, set_epoch
from ml4cube.training.ranks.world import World
from ml4cube.training.state import History, TrainState

Array = NDArray[Any]
_ARGUMENTS = {"train": "train_data", "val": "test_data"}


class Batch(NamedTuple):
    """Samples as arrays for scikit-learn."""

    x: Array  # (samples, features)
    y: Array  # (samples,) or (samples, targets)
    weights: Array | None  # (samples,)


@dataclass
class EstimatorLoop:
    """An estimator, what it is fitted and scored on, and how far that is."""

    model: BaseEstimator
    train_data: Any
    scored: dict[str, Any]  # data by part, "train" or "val"
    metrics: dict[str, Any]
    monitor: str | None  # the column that chooses the best epoch
    mode: str
    epochs: int
    by_batch: bool
    is_supervised: bool
    loggers: Any  # as users give them; then a LoggerCallback
    patience: int | None = None
    classes: Any = None
    max_samples: int | None = None
    mlflow: Any = None
    shows_progress: bool = True
    history: History = field(default_factory=History)
    best_epoch: int | None = None

    def __post_init__(self) -> None:
        self.loggers = LoggerCallback(self.loggers)

    def run(self, save: Callable[[BaseEstimator], None]) -> BaseEstimator:
        """Train for all epochs, or until patience runs out; save and return the best estimator."""
        state = TrainState()
        # The attributes of a `TrainingLoop` that LoggerCallback reads.
        loop: Any = SimpleNamespace(world=World.single("cpu"), state=state)
        best, best_value, best_epoch = None, None, 0
        try:
            self.loggers.on_train_start(loop)
            for epoch in range(1, self.epochs + 1):
                row = self._run_epoch(state)
                value = row.get(self.monitor or "")
                if value is None or is_better(value, best_value, self.mode):
                    best, best_value = copy.deepcopy(self.model), value
                    self.best_epoch = best_epoch = epoch
                    save(best)
                self.loggers.on_epoch_end(loop, row)
                if self.patience is not None and epoch - best_epoch >= self.patience:
                    break
        finally:
            self.loggers.on_close(loop)
        if best is None:
            raise no_best_model(self.monitor)
        self.model = best
        return best

    def score(self, data: Any, part: str = "val") -> dict[str, float]:
        """Return loss and metrics over all samples, by column."""
        if not self.metrics:  # an estimator such as DBSCAN cannot predict
            return {}
        # Batches with the prediction in place of X, so that not all inputs must fit into memory.
        batches = self._batches(data, part)
        predicted = (Batch(self._predict(x), y, weights) for x, y, weights in batches)
        pred, truth, weights = _concatenate(predicted)
        return {
            column(part, name): _score(metric, truth, pred, weights)
            for name, metric in self.metrics.items()
        }

    def _run_epoch(self, state: TrainState) -> dict[str, Any]:
        """Train for one epoch, evaluate, and return the row of the History."""
        started = time.perf_counter()
        set_epoch(self.train_data, state.epoch)
        fit = self._fit_at_once
        if self.by_batch:
            fit = self._fit_batches
        samples = fit(state)
        state.epoch += 1
        row: dict[str, Any] = {"epoch": state.epoch}
        for part, data in self.scored.items():
            scores = self.score(data, part)
            self._send_to_mlflow(part, scores, state.epoch)
            row |= scores
        row |= {"samples": samples, "seconds": time.perf_counter() - started}
        self.history.append(row)
        if self.shows_progress:
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
            write_line(f"epoch {state.epoch}/{self.epochs}: {text}")
        return row

    def _send_to_mlflow(self, part: str, scores: Mapping[str, float], epoch: int) -> None:
        if self.mlflow is None:
            return
        prefix = {"train": "training", "val": "validation"}[part]
        for name in self.metrics:
            self.mlflow.log_metric(f"{prefix}_{name}", scores[column(part, name)], step=epoch)

    def _fit_batches(self, state: TrainState) -> int:
        """Train on all batches once, and return the number of samples."""
        if self.classes is None and self.is_supervised and is_classifier(self.model):
            of_batches = [np.unique(batch.y) for batch in self._batches(self.train_data, "train")]
            self.classes = np.unique(np.concatenate(of_batches))
        samples = 0
        for batch in self._batches(self.train_data, "train"):
            arguments = {}
            if state.step == 0 and self.classes is not None:
                arguments["classes"] = self.classes  # only the first call of all takes them
            self._learn(self.model.partial_fit, batch, **arguments)
            samples += len(batch.x)
            state.step += 1
        return samples

    def _fit_at_once(self, state: TrainState) -> int:
        """Fit on all samples at once, and return their number."""
        whole = _concatenate(self._batches(self.train_data, "train"), self.max_samples)
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
        targets = (batch.y,)[: self.is_supervised]
        method(batch.x, *targets, **arguments)

    def _predict(self, x: Array) -> Array:
        if hasattr(self.model, "predict"):
            return np.asarray(self.model.predict(x))
        if not self.is_supervised and hasattr(self.model, "inverse_transform"):
            return np.asarray(self.model.inverse_transform(self.model.transform(x)))
        raise InvalidTypeError(
            f"{type(self.model).__name__} cannot be evaluated: it has no predict or "
            "inverse_transform"
        )

    def _batches(self, data: Any, part: str) -> Iterator[Batch]:
        """Yield batches as arrays with one row per sample."""
        is_empty = True
        for items in [data] if is_arrays(data) else data:
            batch = _as_batch(items, supervised=self.is_supervised)
            if len(batch.x):
                is_empty = False
                yield batch
        if is_empty:
            raise EmptyPartError(f"{_ARGUMENTS[part]} must not be empty")


def column(part: str, name: str) -> str:
    """Return the column of a metric; only the loss has a prefix for the validation data."""
    if part == "train" or name == "loss":
        return f"{part}_{name}"
    return name


def is_arrays(data: Any) -> bool:
    """Return True if the data are arrays and not a loader of batches."""
    items = as_items(data)
    return len(items) in (1, 2, 3) and all(hasattr(item, "shape") for item in items)


def as_items(data: Any) -> Sequence[Any]:
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
    arrays = [_as_array(item) for item in as_items(batch)]
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


def _score(metric: Any, truth: Array, pred: Array, weights: Array | None) -> float:
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
