"""Losses and metrics as sums over samples, exact on any number of ranks."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.checks import refuse_class
from ml4cube.training.measure.means import Mean, warn_if_unknown
from ml4cube.training.ranks.dist import World

logger = logging.getLogger(__name__)

Metric = Callable[[torch.Tensor, torch.Tensor], Any]
_RESERVED = {
    "epoch",
    "train_loss",
    "val_loss",
    "lr",
    "grad_norm",
    "grad_norm_max",
    "seconds",
    "ranks",
}
Bad = tuple[int, float, bool]  # number of a batch, its loss, whether its target has gaps
_ROOM = 512  # values kept before they are summed, so that memory stays flat


class Meter:
    """A weighted mean that reads the device only when asked."""

    # Values stay where they were computed until `flush`, because reading one makes the device wait.

    def __init__(self) -> None:
        self.total = self.weight = 0.0
        self.samples = 0
        self._seen = 0
        self._bad: Bad | None = None
        self._gaps: list[torch.Tensor | None] = []
        self._values: list[torch.Tensor] = []
        self._samples: list[int] = []
        self._weights: list[float | torch.Tensor] = []

    def add(
        self,
        value: torch.Tensor,
        samples: int,
        weight: float | torch.Tensor | None = None,
        gaps: torch.Tensor | None = None,
    ) -> None:
        """Take in the mean of one batch."""
        self._values.append(value)
        self._gaps.append(gaps)
        self._samples.append(samples)
        self._weights.append(samples if weight is None else weight)
        if len(self._values) >= _ROOM:
            self.flush()

    def flush(self) -> Bad | None:
        """Sum what was taken in."""
        if self._values:
            rows = zip(_read(self._values), _read(self._weights), self._gaps, strict=True)
            for value, weight, gaps in rows:
                self.total += value * weight
                self.weight += weight
                if self._bad is None and not math.isfinite(value):
                    self._bad = (self._seen, value, gaps is not None and bool(gaps.isnan()))
                self._seen += 1
            self.samples += sum(self._samples)
            self._values.clear()
            self._gaps.clear()
            self._samples.clear()
            self._weights.clear()
        return self._bad

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        self.flush()
        return {"total": self.total, "weight": self.weight, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the sums."""
        self.total, self.weight = state["total"], state["weight"]
        self.samples = state["samples"]


class Norms:
    """Mean and largest of one number per step, read from the device only when asked."""

    # Values that are not finite are left out: in fp16 they mark steps that were skipped.

    def __init__(self) -> None:
        self._total, self._steps, self._highest = 0.0, 0, 0.0
        self._values: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> None:
        """Take in a step's number."""
        self._values.append(value)
        if len(self._values) >= _ROOM:
            self._flush()

    def columns(self) -> dict[str, float | None]:
        """Return what the History keeps of an epoch."""
        self._flush()
        if not self._steps:
            return {"grad_norm": None, "grad_norm_max": None}
        return {"grad_norm": self._total / self._steps, "grad_norm_max": self._highest}

    def state_dict(self) -> dict[str, float]:
        """Return the sums."""
        self._flush()
        return {"total": self._total, "steps": self._steps, "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the sums."""
        self._total, self._steps = state["total"], state["steps"]
        self._highest = state["highest"]

    def _flush(self) -> None:
        if self._values:
            for value in filter(math.isfinite, _read(self._values)):
                self._total += value
                self._steps += 1
                self._highest = max(self._highest, value)
            self._values.clear()


def _read(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Bring scalars to the host, those of a device all at once."""
    if not isinstance(values[0], torch.Tensor):
        return [float(value) for value in values]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    numbers: list[float] = stacked.to("cpu", torch.float64).tolist()
    return numbers


class Scores:
    """The metrics of one validation pass."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._plain = {
            name: (Mean(f"metrics[{name!r}]", m), Meter())
            for name, m in metrics.items()
            if not _is_object(m)
        }
        # Copies, so that what the user passed keeps the state it had.
        self._objects = {n: _fresh(m, device) for n, m in metrics.items() if _is_object(m)}
        self._updated = False

    def update(self, pred: Any, target: Any, samples: int) -> None:
        """Take in one batch."""
        if not self._updated:
            self._look_for_logits(pred)
        self._updated = True
        for name, (metric, meter) in self._plain.items():
            value = _one_number(name, metric(pred, target, samples))
            meter.add(value, samples, metric.weigh(target))
        for name, metric in self._objects.items():
            if _merges(metric):
                _refuse_structures(name, pred, target)
                metric.update(pred.detach().cpu().numpy(), target.detach().cpu().numpy())
            else:
                metric.update(pred, target)

    def _look_for_logits(self, pred: Any) -> None:
        """Say so where torchmetrics would squash some batches and leave others as they are."""
        names = [name for name, metric in self._objects.items() if _squashes(metric)]
        if not names or not isinstance(pred, torch.Tensor) or not pred.is_floating_point():
            return
        if bool(((pred < 0) | (pred > 1)).any()):
            _warn_of_logits(", ".join(names))

    def compute(self, world: World) -> dict[str, float]:
        """Reduce over all ranks; every rank must call this."""
        result = {}
        for name, (_, meter) in self._plain.items():
            meter.flush()
            parts = world.gather([meter.total, meter.weight])
            weight = sum(part[1] for part in parts)
            result[name] = sum(part[0] for part in parts) / weight if weight else math.nan
        for name, metric in self._objects.items():
            value = _reduce(metric, self._updated, world)
            if isinstance(value, Mapping):
                result.update({f"{name}_{key}": _number(name, i) for key, i in value.items()})
            else:
                result[name] = _number(name, value)
        return result


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics as a dict, or say which of them cannot work."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidTypeError(
            f"metrics={metrics!r} is no mapping; write {{'mae': torch.nn.functional.l1_loss}}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise InvalidTypeError(f"metrics has the name {name!r}; name each by a text")
        refuse_class(f"metrics[{name!r}]", metric)
        if not callable(metric) and not _is_object(metric):
            raise InvalidTypeError(
                f"metrics[{name!r}]={metric!r} is neither a function of (pred, target) nor an "
                "object with update and compute"
            )
        if name in _RESERVED:
            raise InvalidValueError(
                f"metrics has the name {name!r}, a column of the History; choose another name"
            )
        if not _is_object(metric):
            warn_if_unknown(f"metrics[{name!r}]", metric)
    return dict(metrics)


def _one_number(name: str, value: Any) -> torch.Tensor:
    """Return a batch's score as a scalar, without reading it from the device."""
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"metrics[{name!r}] returned {value!r}; return one number per batch"
        ) from None
    if tensor.numel() != 1:
        raise InvalidValueError(
            f"metrics[{name!r}] returned shape {tuple(tensor.shape)} for a batch; return one "
            "number, such as its mean, or give each part a metric of its own"
        )
    return tensor.reshape(())


def _refuse_structures(name: str, pred: Any, target: Any) -> None:
    """Refuse predictions and targets that are no tensors, for metrics that take arrays."""
    for what, value in (("prediction", pred), ("target", target)):
        if not isinstance(value, torch.Tensor):
            held = f" of {list(value)}" if isinstance(value, Mapping) else ""
            raise InvalidTypeError(
                f"metrics[{name!r}] compares tensors, but the {what} is a "
                f"{type(value).__name__}{held}; give a function metric(pred, target) that picks "
                "what to compare, such as lambda pred, target: l1_loss(pred['a'], target)"
            )


def _number(name: str, value: Any) -> float:
    """Return what a metric object computed, if it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"metrics[{name!r}].compute() gave a {type(value).__name__}, which the History cannot "
            "hold; give a metric of one number, of a vector, or a dict of numbers"
        ) from None


def _is_object(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _squashes(metric: Any) -> bool:
    """Whether a metric of torchmetrics puts a batch through a sigmoid if it looks like logits."""
    members = metric.values() if hasattr(metric, "items") else [metric]
    return any(
        type(member).update.__module__.startswith("torchmetrics.classification")
        and (hasattr(member, "threshold") or hasattr(member, "thresholds"))
        for member in members
    )


@functools.cache
def _warn_of_logits(names: str) -> None:
    logger.warning(
        "metrics %s of torchmetrics get numbers beyond 0 to 1: torchmetrics squashes each batch "
        "that has such numbers and no other, so the result depends on how samples are cut into "
        "batches; give probabilities, for example by a metric whose update() takes pred.sigmoid()",
        names,
    )


def _merges(metric: Any) -> bool:
    return hasattr(metric, "merge")


def _fresh(metric: Any, device: torch.device) -> Any:
    metric = copy.deepcopy(metric)
    if hasattr(metric, "reset"):
        metric.reset()
    return metric.to(device) if hasattr(metric, "to") else metric


def _reduce(metric: Any, updated: bool, world: World) -> Any:
    if world.size == 1:
        return _scalar(metric.compute())
    if _merges(metric):
        first, *others = world.gather_objects(metric)
        for other in others:
            merged = first.merge(other)
            first = first if merged is None else merged
        return first.compute()
    if hasattr(metric, "items"):  # a collection: its members may share state, so one by one
        members = dict(metric.items(keep_base=False, copy_state=True))
        return {name: _reduce(member, updated, world) for name, member in members.items()}
    if not hasattr(metric, "metric_state"):
        raise InvalidTypeError(
            f"metric {metric!r} cannot be reduced over {world.size} ranks; give it a method "
            "merge(other), or use a torchmetrics object"
        )
    # Not torchmetrics' own sync: it hangs when a rank has had no sample.
    states = [s for s in world.gather_objects(_state(metric) if updated else None) if s]
    for name, parts in zip(states[0], zip(*(s.values() for s in states), strict=True), strict=True):
        setattr(metric, name, _merge(parts, metric._reductions[name]))
    metric._update_count = max(metric._update_count, 1)
    # The states are those of all ranks now: compute() would gather and add them up once more.
    metric.sync_on_compute = metric._to_sync = False
    return _scalar(metric.cpu().compute())


def _state(metric: Any) -> dict[str, Any]:
    return {
        name: [v.cpu() for v in value] if isinstance(value, list) else value.cpu()
        for name, value in metric.metric_state.items()
    }


def _merge(parts: tuple[Any, ...], reduction: Callable[[torch.Tensor], Any] | None) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(parts)
    return stacked if reduction is None else reduction(stacked)


def _scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return {str(i): item for i, item in enumerate(value.flatten().tolist())}
    return value
