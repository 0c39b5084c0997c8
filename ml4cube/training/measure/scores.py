"""Sums of losses and metrics, exact on any number of ranks.

`Meter` is the mean of one quantity, `Meters` are those of several by name, `Norms` are those of
gradients, and `Scores` are the metrics of a validation pass: functions as means, objects (such as
those of torchmetrics) by their own reduction.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.loading.handover import to_device
from ml4cube.training.inputs.checks import refuse_class
from ml4cube.training.inputs.loss_functions import warn_if_unknown
from ml4cube.training.inputs.steps import Weight
from ml4cube.training.measure.means import BatchMean
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import COLUMNS

logger = logging.getLogger(__name__)

_BUFFER_SIZE = 512  # batches whose means are on the device before they are summed on the host


class NonFiniteLoss(NamedTuple):
    """The first batch or step whose loss is NaN or infinite."""

    number: int  # from 0
    loss: float
    target_has_gaps: bool


class Sums(NamedTuple):
    """The sums of a weighted mean on one rank: ``total`` is the sum of value times weight."""

    samples: int = 0
    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean; None without samples that count."""
        if not self.weight:
            return None
        return self.total / self.weight


def add_up(ranks: Iterable[Sums]) -> Sums:
    """Return the sums of several ranks together."""
    return Sums(*map(sum, zip(*ranks, strict=True)))


class Meter:
    """A weighted mean of batch means."""

    # Values stay on the device until `flush`, because reading one makes the host wait.

    def __init__(self) -> None:
        self.total = self.weight = 0.0
        self.samples = 0
        self._batches_summed = 0
        self._bad: NonFiniteLoss | None = None
        # Mean and weight of a batch, and NaN (or another number) if its target has gaps (or not).
        self._buffer: list[tuple[torch.Tensor, Weight, torch.Tensor | None]] = []

    def add(
        self,
        value: torch.Tensor,
        samples: int,
        weight: Weight | None = None,
        gaps: torch.Tensor | None = None,
    ) -> None:
        """Add the mean of one batch, whose weight is by default its number of samples."""
        self.samples += samples
        self._buffer.append((value, samples if weight is None else weight, gaps))
        if len(self._buffer) >= _BUFFER_SIZE:
            self.flush()

    def flush(self) -> NonFiniteLoss | None:
        """Sum the buffered batches; return the first batch whose mean is not finite."""
        if self._buffer:
            values, weights, gaps = zip(*self._buffer, strict=True)
            for value, weight, gap in zip(_to_host(values), _to_host(weights), gaps, strict=True):
                self.total += value * weight
                self.weight += weight
                if self._bad is None and not math.isfinite(value):
                    has_gaps = gap is not None and bool(gap.isnan())
                    self._bad = NonFiniteLoss(self._batches_summed, value, has_gaps)
                self._batches_summed += 1
            self._buffer.clear()
        return self._bad

    def sums(self) -> Sums:
        """Return the sums."""
        self.flush()
        return Sums(self.samples, self.total, self.weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums by name."""
        return self.sums()._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self.samples, self.total, self.weight = Sums(**state)


class Meters:
    """Weighted means of several quantities, by name."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._meters: dict[str, Meter] = {}

    def add(
        self, name: str, value: torch.Tensor, samples: int, weight: torch.Tensor | None = None
    ) -> None:
        """Add the mean of one quantity over a batch."""
        self._meters.setdefault(name, Meter()).add(value, samples, weight)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce over all ranks, whose quantities may differ; every rank must call this."""
        sums_by_name: dict[str, list[Sums]] = {}
        own_sums = {name: meter.sums() for name, meter in self._meters.items()}
        for rank_sums in world.gather_objects(own_sums):
            for name, sums in rank_sums.items():
                sums_by_name.setdefault(name, []).append(sums)
        means = {}
        for name, ranks in sums_by_name.items():
            mean = add_up(ranks).mean
            if mean is None:
                mean = math.nan
            means[self._prefix + name] = mean
        return means

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sums, by name."""
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the sums."""
        for name, sums in state.items():
            self._meters.setdefault(name, Meter()).load_state_dict(sums)


class Norms:
    """Mean and maximum of the gradient norms of an epoch."""

    def __init__(self) -> None:
        self._mean = Meter()
        self._maximum: float | torch.Tensor = 0.0  # stays on the device, as in a Meter

    def add(self, norm: torch.Tensor) -> None:
        """Add the norm of one step, unless it is not finite: fp16 skips such steps."""
        finite = norm.nan_to_num(0.0, 0.0, 0.0)
        self._mean.add(finite, 1, norm.isfinite())
        self._maximum = finite.clamp_min(self._maximum)

    def columns(self) -> dict[str, float | None]:
        """Return the columns for the History."""
        mean = self._mean.sums().mean
        maximum = None
        if mean is not None:
            maximum = float(self._maximum)
        return {"grad_norm": mean, "grad_norm_max": maximum}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the maximum."""
        return {"mean": self._mean.state_dict(), "highest": float(self._maximum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and the maximum."""
        self._mean.load_state_dict(state["mean"])
        self._maximum = state["highest"]


class Scores:
    """The metrics of one validation pass."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._functions = {
            name: BatchMean(f"metrics[{name!r}]", m)
            for name, m in metrics.items()
            if not _is_object(m)
        }
        self._means = Meters()  # of the functions
        # Copies, so that the user's own objects are not changed.
        self._objects = {n: _reset_copy(m, device) for n, m in metrics.items() if _is_object(m)}
        self._has_batches = False

    def update(
        self, pred: Any, target: Any, samples: int, weights: torch.Tensor | None = None
    ) -> None:
        """Add one batch, and the weights of its samples or cells."""
        if not self._has_batches:
            self._warn_of_logits(pred)
        self._has_batches = True
        for name, function in self._functions.items():
            used = None
            if function.has_cell_values:
                used = weights
            mean = _batch_mean(name, function(pred, target, samples, used))
            self._means.add(name, mean, samples, function.weigh(target, used))
        for name, metric in self._objects.items():
            if hasattr(metric, "merge"):
                metric.update(_to_numpy(name, pred), _to_numpy(name, target))
            else:
                metric.update(pred, target)

    def compute(self, world: World) -> dict[str, float]:
        """Reduce over all ranks; every rank must call this."""
        columns = self._means.compute(world)
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
        if not names or not isinstance(pred, torch.Tensor) or not pred.is_floating_point():
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


def _to_host(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Return numbers as they are, or scalar tensors after reading all at once from the device."""
    if not isinstance(values[0], torch.Tensor):
        return [float(value) for value in values]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    # In two steps, because some devices have no float64.
    numbers: list[float] = stacked.cpu().double().tolist()
    return numbers


def _batch_mean(name: str, value: Any) -> torch.Tensor:
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


def _to_numpy(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
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


def _merge(parts: list[Any], reduction: Callable[[torch.Tensor], Any] | None) -> Any:
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
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return {str(i): item for i, item in enumerate(value.flatten().tolist())}
    return value
