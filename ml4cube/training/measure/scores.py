"""Losses and metrics of batches, weighted so that means over batches and ranks are exact.

`BatchMean` is the mean of a function and its weight. `Scores` are the metrics of a validation pass:
functions as means, objects (such as those of torchmetrics) by their own reduction.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.loading.handover import to_device
from ml4cube.training.inputs.batches import StepResult
from ml4cube.training.inputs.checks import refuse_class
from ml4cube.training.inputs.loss_functions import (
    ClassWeights,
    ShapeChecked,
    as_labels,
    is_over_classes,
    reduced,
    setting,
    warn_if_unknown,
)
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.measure.means import Meters
from ml4cube.training.ranks.world import World
from ml4cube.training.state import COLUMNS

logger = logging.getLogger(__name__)


class BatchMean:
    """A loss or metric as a mean over a batch, and the weight of the batch."""

    # The sum of ``mean * weight`` over batches, divided by the sum of ``weight``, equals the loss
    # of all of them in one batch. A loss of torch over classes divides by the weights of the
    # classes that are not ignored, so this is its weight. A loss of a user may have a method
    # `weigh`. The weight of any other loss is its number of samples. A loss that sums is divided by
    # its samples here. With weights of samples or cells, the loss is a `MaskedLoss`.

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._given, reduction = function, setting(function, "reduction")
        self._weigh = getattr(function, "weigh", None)
        self._is_sum = reduction == "sum"
        self._function = ShapeChecked(name, function)
        self._class_weights: ClassWeights | None = None
        if reduction == "mean" and is_over_classes(function):
            self._class_weights = ClassWeights(function)
            self._sum = ShapeChecked(name, reduced(function, "sum"))

    def __call__(self, pred: Any, target: Any, samples: int, weights: Tensor | None = None) -> Any:
        """Return the mean of one batch."""
        if weights is not None:
            return self._masked(pred, target, weights)
        target, class_weights = self._as_classes(target, pred)
        if class_weights is None:
            value = self._function(pred, target)
            if self._is_sum:
                return value / samples
            return value
        # Of a batch in which all targets are ignored, the sum is 0, but the mean would be NaN.
        smallest = torch.finfo(class_weights.dtype).tiny
        return self._sum(pred, target) / class_weights.sum().clamp_min(smallest)

    @property
    def has_weights(self) -> bool:
        """True if batches weigh otherwise than by their number of samples."""
        return self._weigh is not None or self._class_weights is not None

    def weigh(self, target: Any, weights: Tensor | None = None) -> Tensor | None:
        """Return the weight of a batch; None means its number of samples."""
        if weights is not None:
            return self._masked.weigh(target, weights)
        if self._weigh is not None:
            weight: Tensor = self._weigh(target)
            return weight
        _, class_weights = self._as_classes(target)
        if class_weights is None:
            return None
        return class_weights.sum()

    def leaves_gaps_out(self, target: Tensor) -> bool:
        """Return True if cells whose target is NaN do not count."""
        labels, _ = self._as_classes(target)
        return labels is not target or isinstance(self._given, MaskedLoss)

    def _as_classes(self, target: Any, pred: Any = None) -> tuple[Any, Tensor | None]:
        """Return the target as a loss over classes takes it, and the class weights of its cells."""
        if self._class_weights is None:
            return target, None
        labels, _ = as_labels(target, None, self._class_weights.ignored, pred)
        return labels, self._class_weights(labels)

    @cached_property
    def has_cell_values(self) -> bool:
        """True if the function is known to have a value per cell, which can be weighted."""
        if isinstance(self._given, MaskedLoss):
            return True
        function = self._given
        if isinstance(self._given, partial):
            function = self._given.func
        origin = function
        if isinstance(function, nn.Module):
            origin = type(function)
        is_of_torch = getattr(origin, "__module__", "").startswith("torch.nn.")
        return is_of_torch and setting(self._given, "reduction") is not None

    @cached_property  # made at the first batch with weights, because it copies the user's loss
    def _masked(self) -> MaskedLoss:
        if isinstance(self._given, MaskedLoss):
            return self._given
        return MaskedLoss(self._given)


class Scores:
    """The metrics of one validation pass."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._functions = {
            name: BatchMean(f"metrics[{name!r}]", m)
            for name, m in metrics.items()
            if not _is_object(m)
        }
        # Copies, so that the user's own objects are not changed.
        self._objects = {n: _reset_copy(m, device) for n, m in metrics.items() if _is_object(m)}
        self._has_batches = False

    def update(self, result: StepResult, samples: int, meters: Meters) -> None:
        """Add one batch; means of functions go to `meters`."""
        pred, target = _without_half(result.pred), _without_half(result.target)
        if not self._has_batches:
            self._warn_of_logits(pred)
        self._has_batches = True
        for name, function in self._functions.items():
            used = None
            if function.has_cell_values:
                used = result.weights
            mean = _batch_mean(name, function(pred, target, samples, used))
            meters[name].add(mean, samples, function.weigh(target, used))
        for name, metric in self._objects.items():
            if hasattr(metric, "merge"):
                metric.update(_to_numpy(name, pred), _to_numpy(name, target))
            else:
                metric.update(pred, target)

    def compute(self, world: World) -> dict[str, float]:
        """Return what the objects compute over all ranks; every rank must call this."""
        columns: dict[str, float] = {}
        for name, metric in self._objects.items():
            result = _by_index(_compute_over_ranks(metric, self._has_batches, world))
            if isinstance(result, Mapping):
                columns |= {f"{name}_{key}": _to_float(name, v) for key, v in result.items()}
            else:
                columns[name] = _to_float(name, result)
        return columns

    def _warn_of_logits(self, pred: Any) -> None:
        """Warn where torchmetrics would apply a sigmoid to some batches only."""
        names = [name for name, metric in self._objects.items() if _applies_sigmoid(metric)]
        if not names or not isinstance(pred, Tensor) or not pred.is_floating_point():
            return
        if bool(((pred < 0) | (pred > 1)).any()):
            _log_sigmoid_warning(", ".join(names))


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics as a dict, or raise an error that names an invalid one."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidTypeError(
            "metrics must be a mapping such as {'mae': torch.nn.functional.l1_loss}, "
            f"got {metrics!r}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise InvalidTypeError(f"names of metrics must be strings, got {name!r}")
        refuse_class(f"metrics[{name!r}]", metric)
        if not callable(metric) and not _is_object(metric):
            raise InvalidTypeError(
                f"metrics[{name!r}] must be a function of (pred, target) or an object with update "
                f"and compute, got {metric!r}"
            )
        if name in COLUMNS:
            raise InvalidValueError(f"a metric must not be named {name!r}, a column of the History")
        if not _is_object(metric):
            warn_if_unknown(f"metrics[{name!r}]", metric)
    return dict(metrics)


def _batch_mean(name: str, value: Any) -> Tensor:
    """Return what a function gave for a batch, which must be one number, as a scalar tensor."""
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"metrics[{name!r}] must return one number per batch, got {value!r}"
        ) from None
    if tensor.numel() != 1:
        raise InvalidValueError(
            f"metrics[{name!r}] must return one number per batch, such as a mean, got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.reshape(())


def _without_half(value: Any) -> Any:
    """Convert half precision to float32, in which metrics are computed."""
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _to_numpy(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        names = ""
        if isinstance(value, Mapping):
            names = f" of {list(value)}"
        raise InvalidTypeError(
            f"metrics[{name!r}] compares tensors, got a {type(value).__name__}{names}; use a "
            "function that selects one, such as lambda pred, target: l1_loss(pred['a'], target)"
        )
    return value.detach().cpu().numpy()


def _to_float(name: str, value: Any) -> float:
    """Return what a metric object computed, which must be one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"metrics[{name!r}].compute() must return a number, a vector or a dict of numbers, "
            f"got a {type(value).__name__}"
        ) from None


def _is_object(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _applies_sigmoid(metric: Any) -> bool:
    """Return True if a metric of torchmetrics applies a sigmoid to batches outside 0 to 1."""
    members = [metric]
    if hasattr(metric, "items"):
        members = metric.values()
    return any(
        type(member).update.__module__.startswith("torchmetrics.classification")
        and (hasattr(member, "threshold") or hasattr(member, "thresholds"))
        for member in members
    )


@functools.cache  # once per set of metrics, not in every epoch
def _log_sigmoid_warning(names: str) -> None:
    logger.warning(
        "metrics %s of torchmetrics get predictions outside 0 to 1: torchmetrics applies a sigmoid "
        "to each batch with such numbers and to no other, so the result depends on the batches; "
        "pass probabilities, for example by a metric whose update() takes pred.sigmoid()",
        names,
    )


def _reset_copy(metric: Any, device: torch.device) -> Any:
    metric = copy.deepcopy(metric)
    if hasattr(metric, "reset"):
        metric.reset()
    for part in _torchmetrics_in(metric):
        # Ranks that each train a model of their own must not be reduced, and the sync of
        # torchmetrics hangs if a rank has no sample: `_compute_over_ranks` reduces instead.
        part.sync_on_compute = part._to_sync = False
    if hasattr(metric, "to"):
        return metric.to(device)
    return metric


def _compute_over_ranks(metric: Any, has_batches: bool, world: World) -> Any:
    """Return the result of a metric object over all ranks: a number, a vector or a dict."""
    if world.size == 1:
        return metric.compute()
    if hasattr(metric, "merge"):
        # Other ranks may not have the GPU of this one.
        whole, *others = world.gather_objects(metric.cpu() if hasattr(metric, "cpu") else metric)
        for other in others:
            merged = whole.merge(other)
            whole = whole if merged is None else merged  # None: merged in place
        return whole.compute()
    parts = _torchmetrics_in(metric)
    if not parts:
        raise InvalidTypeError(
            f"metric {metric!r} must have merge(other) or be of torchmetrics, to be reduced over "
            f"{world.size} ranks"
        )
    if hasattr(metric, "items"):  # a collection, whose members may share a state
        metric.items(copy_state=True)
    own_states = None
    if has_batches:
        own_states = [_cpu_state(part) for part in parts]
    states = [s for s in world.gather_objects(own_states) if s is not None]
    for part, *states_of_part in zip(parts, *states, strict=True):
        for name, reduction in part._reductions.items():
            setattr(part, name, _merge([state[name] for state in states_of_part], reduction))
        part._update_count = max(part._update_count, 1)
    return metric.cpu().compute()


def _torchmetrics_in(metric: Any) -> list[Any]:
    """Return a metric of torchmetrics and those inside it: a wrapper's or collection's members."""
    if not isinstance(metric, nn.Module):
        return []
    return [module for module in metric.modules() if hasattr(module, "_reductions")]


def _cpu_state(metric: Any) -> dict[str, Any]:
    on_cpu = to_device(metric.metric_state, torch.device("cpu"))
    return dict(on_cpu)


def _merge(parts: list[Any], reduction: Callable[[Tensor], Any] | None) -> Any:
    """Merge what ranks have of one state of torchmetrics: a list of tensors, or one tensor."""
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(parts)
    if reduction is None:
        return stacked
    return reduction(stacked)


def _by_index(value: Any) -> Any:
    """Return the entries of a vector by their index; anything else as it is."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return {str(i): item for i, item in enumerate(value.flatten().tolist())}
    return value
