"""Which run a snapshot belongs to, and what a call asks of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.ledger.call import CallId, Fields, differing, shortened
from ml4cube.training.inputs.batches import loader_seed, named_sets
from ml4cube.training.inputs.identity import class_name, data_identity, name_of

# A `run` is a Loop, which cannot be named here, because it makes its Snapshot.

_ASKED_OPTIONS = (
    "gradient_accumulation_steps",
    "gradient_clip",
    "precision",
    "scheduler_step_on_batch",
    "seed",
    "limit_train_batches",
    "limit_val_batches",
    "ema",
    "rollout",
    "rollout_gradient",
    "version",
)
# They follow from the learning rate that a scheduler was made with.
_DERIVED = ("params", "param_names", "initial_lr", "base_lrs", "_last_lr")


def run_id(run: Any) -> CallId:
    """Identify a run: its training data, parameters and class of optimizer."""
    facts = data_identity(run.feed.loader)
    statistics = facts.pop("statistics", {})
    parameters: dict[str, torch.Tensor] = dict(run.model.named_parameters())
    # Also those that a callback adds to the optimizer later.
    for prefix, module in run.step.modules.items():
        parameters |= {n: p for n, p in module.named_parameters(prefix) if p.requires_grad}
    parameters |= {n: p for n, p in run.outside().items() if p.requires_grad}
    fields = {
        "data": facts,
        "statistics": statistics,
        "parameters": {name: list(tensor.shape) for name, tensor in parameters.items()},
        "optimizer": {"class": class_name(type(run.optimizer))},
    }
    return CallId.of(as_json(fields))


def asked(run: Any) -> Fields:
    """Return what a call asks of a run that every call may ask anew."""
    loader, options = run.feed.loader, run.options
    settings = {name: getattr(options, name) for name in _ASKED_OPTIONS}
    settings |= {
        "batch_size": _batch_size(loader),
        "loader seed": loader_seed(loader),
        "ranks": run.world.size,
        "scheduler": scheduler_class(run),
        "loss": ", ".join(map(name_of, run.step.loss_parts)),
    }
    fields: dict[str, Any] = {
        "settings": settings,
        "metrics": {name: name_of(metric) for name, metric in run.validation.metrics.items()},
    }
    if run.validation.loader is not None:
        for name, val_set in named_sets(run.validation.loader).items():
            fields[f"validation data {name}".strip()] = data_identity(val_set)
    for name, (column, mode) in monitors(run).items():
        fields[name] = {"monitor": f"{column} ({mode})"}
    return shortened(as_json(fields))


def trained_settings(run: Any) -> Fields:
    """Return what optimizer, scheduler and parameters are set to, which training may change."""
    fields = {f"parameter group {n}": group for n, group in enumerate(run.optimizer.param_groups)}
    if run.scheduler is not None:
        fields["scheduler"] = run.scheduler.state_dict()
    settings: dict[str, Any] = {"parameters": {"trained": trained_parameters(run)}}
    for kind, part in fields.items():
        settings[kind] = {name: value for name, value in part.items() if name not in _DERIVED}
    return shortened(as_json(settings))


def scheduler_class(run: Any) -> str | None:
    """Return the full name of the scheduler's class."""
    return None if run.scheduler is None else class_name(type(run.scheduler))


def asked_in_vain(now: Fields, before: Fields, reached: Fields) -> dict[str, dict[str, str]]:
    """Return the settings, in words, that a call asks for, and that its snapshot does not have.

    They were `before` at the start of training, which then `reached` others. A call with an
    optimizer that was trained asks for what was reached.
    """
    asks: dict[str, dict[str, str]] = {}
    for kind, part in differing(before, now).items():
        for name, words in part.items():
            old, trained = (fields.get(kind, {}).get(name) for fields in (before, reached))
            is_counter = kind == "scheduler" and old != trained
            if now.get(kind, {}).get(name) != trained and not is_counter:
                asks.setdefault(kind, {})[name] = words
    return asks


def trained_parameters(run: Any) -> list[str]:
    """Name the parameters of the model that are not frozen."""
    return [name for name, p in run.model.named_parameters() if p.requires_grad]


def judged_anew(run: Any, changed: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield what compares epochs by a column that is no longer computed as before.

    `changed` are the fields of `asked` that have changed.
    """
    settings, metrics = changed.get("settings", {}), changed.get("metrics", {})
    data = [kind for kind in changed if kind.startswith("validation data")]
    for name, (column, _) in monitors(run).items():
        decisive = {"version"}
        if column.startswith(("train_", "val_")):
            decisive.add("loss")
        decisive.add("rollout" if column.startswith("train_") else "limit_val_batches")
        is_new = decisive & settings.keys() or (data and not column.startswith("train_"))
        is_new = is_new or any(
            column == m or column.startswith((f"{m}/", f"{m}_")) for m in metrics
        )
        if is_new or name in changed:
            yield name


def monitors(run: Any) -> dict[str, tuple[str, str]]:
    """Return column and mode of all that monitor a column, by name."""
    columns = {
        name: (callback.monitor, getattr(callback, "mode", "min"))
        for name, callback in named_callbacks(run.callbacks).items()
        if hasattr(callback, "monitor")
    }
    if isinstance(run.scheduler, ReduceLROnPlateau):
        columns["ReduceLROnPlateau"] = (run.monitor, run.scheduler.mode)
    return columns


def named_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Name callbacks by their class and a number that counts those of a class."""
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind}.{counts[kind]}"] = callback
        counts[kind] += 1
    return named


def group_names(run: Any) -> list[list[str]]:
    """Name the parameters of each group of the optimizer."""
    tensors = {**run.outside(), **dict(run.model.named_parameters())}
    names = {tensor: name for name, tensor in tensors.items()}
    return [[names[p] for p in group["params"]] for group in run.optimizer.param_groups]


def as_json(value: Any) -> Any:
    """Return values as a JSON file would hold them; tensors become lists."""
    return json.loads(json.dumps(value, default=_plain, skipkeys=True))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
