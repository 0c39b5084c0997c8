"""Changes between a run and the one that left its snapshot.

A snapshot belongs to a run with the same training data, the same class of optimizer and the same
parameters. Everything else may change: it is listed, and the run continues with what users request
now. A callback whose monitored column is computed in another way is reset.

What users request of an optimizer, such as a learning rate, is changed by schedulers in training. A
snapshot therefore holds both, the requests and the state that training reached, and
`apply_requests` applies changed requests to that state.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.inputs.batches import loader_seed, named_sets
from ml4cube.training.inputs.identity import class_name, data_identity, identity

_COMPARED_OPTIONS = (
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
)
# Settings without which the position inside an epoch has no meaning.
POSITION_SETTINGS = {"batch_size", "seed", "loader seed", "ranks"}
_MAX_LETTERS = 60  # of a value in a message


class Changes(NamedTuple):
    """The differences of a run from the one that left its snapshot."""

    # Changes that make it another run, in words.
    refused: list[str]
    # Changes that the run continues with, in words, by name of the setting.
    changed: dict[str, str]
    # Names of callbacks, or "ReduceLROnPlateau", whose best value so far no longer counts.
    reset: set[str]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare the descriptions of two runs."""
    refused = [
        _describe_change(name, value, new["fixed"][name])
        for name, value in old["fixed"].items()
        # A fact that only one loader has, such as a length, cannot be compared.
        if name in new["fixed"] and value != new["fixed"][name]
    ]
    changed = {
        name: _describe_change(name, old["settings"].get(name), new["settings"].get(name))
        for name in {**old["settings"], **new["settings"]}
        if old["settings"].get(name) != new["settings"].get(name)
    }
    if "scheduler" in changed:  # another class, with other settings
        changed = {name: text for name, text in changed.items() if "scheduler's" not in name}
    old_monitors, new_monitors = old["judged"], new["judged"]
    reset = {name for name, facts in new_monitors.items() if old_monitors.get(name, facts) != facts}
    for name in sorted(reset):
        columns = (old_monitors[name]["monitor"], new_monitors[name]["monitor"])
        if columns[0] != columns[1]:
            changed[name] = _describe_change(f"monitor of {name.split('.')[0]}", *columns)
    return Changes(refused, changed, reset)


def describe(run: Any, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a run, in values that a snapshot can hold and `compare` compares."""
    loader, options = run.feed.loader, run.options
    losses = ", ".join(map(identity, run.step.loss_parts))
    metrics = {name: identity(metric) for name, metric in run.metrics.items()}
    val_sets = {} if run.val_loader is None else named_sets(run.val_loader)
    validation = {name: data_identity(val_set) for name, val_set in val_sets.items()}
    settings = {name: getattr(options, name) for name in _COMPARED_OPTIONS}
    settings |= {
        "batch_size": _batch_size(loader),
        "loader seed": loader_seed(loader),
        "ranks": run.world.size,
        "scheduler": None if run.scheduler is None else class_name(type(run.scheduler)),
        **_settings_of(requested),
        "loss": losses,
        **{f"metric {name!r}": value for name, value in metrics.items()},
        **{f"validation data {name}".strip(): facts for name, facts in validation.items()},
    }

    def facts_of_column(column: str, mode: str) -> dict[str, Any]:
        is_train, is_loss = column.startswith("train_"), column.startswith(("train_", "val_"))
        return {
            "monitor": f"{column} ({mode})",
            "loss": losses if is_loss else None,
            "validation": None if is_train else [validation, options.limit_val_batches],
            # Only where it is given, as in snapshots of earlier versions.
            **({"rollout": options.rollout} if is_train and options.rollout_steps else {}),
            "metrics": [
                value
                for name, value in metrics.items()
                if column == name or column.startswith((f"{name}/", f"{name}_"))
            ],
        }

    description: dict[str, Any] = to_plain(
        {
            # What makes it the same run.
            "fixed": {
                **data_identity(loader),
                "optimizer": class_name(type(run.optimizer)),
                # Callbacks of an earlier run in this process may have added groups.
                "parameters": group_names(run)[: len(requested["groups"])],
            },
            "settings": settings,
            # What the monitored columns are computed from.
            "judged": {name: facts_of_column(*column) for name, column in _monitors(run).items()},
            "requested": {name: _plain(value) for name, value in requested.items()},
        },
        "description",
    )
    return description


def _monitors(run: Any) -> dict[str, tuple[str, str]]:
    """Return column and mode of all that monitor a column, by name."""
    monitors = {
        name: (callback.monitor, getattr(callback, "mode", "min"))
        for name, callback in named_callbacks(run.callbacks).items()
        if hasattr(callback, "monitor")
    }
    if isinstance(run.scheduler, ReduceLROnPlateau):
        monitors["ReduceLROnPlateau"] = (run.monitor, run.scheduler.mode)
    return monitors


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


# ---------------------------------------------- optimizer, scheduler, trained parameters


def current_settings(run: Any) -> dict[str, Any]:
    """Return what optimizer, scheduler and parameters, which users make, are set to now."""
    groups = [_options_of(group) for group in run.optimizer.param_groups]
    scheduler = None if run.scheduler is None else run.scheduler.state_dict()
    trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
    return copy.deepcopy({"groups": groups, "scheduler": scheduler, "trained": trained})


def new_requests(
    current: Mapping[str, Any], at_end: Mapping[str, Any], requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what users request: current settings, if changed since the end of the last run.

    Settings that are still those `at_end` of it are as training left them. What users had
    `requested` of that run then still holds.
    """
    return {
        name: requested[name] if at_end and _plain(at_end[name]) == _plain(value) else value
        for name, value in current.items()
    }


def apply_requests(
    run: Any, requested: Mapping[str, Any], content: Mapping[str, Any], changes: Changes
) -> None:
    """Apply what users request now to parameter groups, scheduler and frozen parameters."""
    old, groups = content["run"]["requested"], run.optimizer.param_groups
    same_scheduler = "scheduler" not in changes.changed
    rates = zip(_requested_rates(old), _requested_rates(requested), strict=False)
    for group, old_options, options, (old_lr, new_lr) in zip(
        groups, old["groups"], requested["groups"], rates, strict=False
    ):
        merged = _merged(_options_of(group), old_options, options)
        is_scheduled = _plain(group["lr"]) != old_options["lr"]
        if is_scheduled and new_lr != old_lr:
            merged["lr"] = group["lr"] * new_lr / old_lr if old_lr else new_lr
        # A scheduler of another class starts from the rate that it set when it was made.
        group.update(merged if same_scheduler else options)
    if run.scheduler is not None and same_scheduler:
        state = _merged(content["scheduler"], old["scheduler"], requested["scheduler"])
        if "_last_lr" in state:
            state["_last_lr"] = [group["lr"] for group in groups]
        run.scheduler.load_state_dict(state)
    # Callbacks may have frozen others than users requested.
    is_requested = "parameters to train" in changes.changed
    trained = requested["trained"] if is_requested else content["trained"]
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_(name in trained)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group of an optimizer without its parameters."""
    return {name: v for name, v in group.items() if name not in ("params", "param_names")}


def _merged(saved: Any, old: Any, new: Any) -> Any:
    """Return a saved state, to which a request that has changed from `old` to `new` is applied."""
    # A Counter, such as the milestones of MultiStepLR, is one setting.
    if all(isinstance(v, Mapping) and not isinstance(v, Counter) for v in (saved, old, new)):
        both = old.keys() & new.keys()
        return {k: _merged(v, old[k], new[k]) if k in both else v for k, v in saved.items()}
    if isinstance(saved, list) and len(saved) == len(old) == len(new):
        return [_merged(*values) for values in zip(saved, old, new, strict=True)]
    # Values that training changes, such as counters, are not settings.
    is_setting = _plain(saved) == _plain(old)
    return new if is_setting and _plain(new) != _plain(old) else saved


def _requested_rates(requested: Mapping[str, Any]) -> list[float]:
    """Return the learning rate of each group that users gave, before a scheduler changed it."""
    groups = requested["groups"]
    first_rates = _plain([group["lr"] for group in groups])
    set_by_scheduler = _plain((requested["scheduler"] or {}).get("_last_lr")) == first_rates
    name = "initial_lr" if set_by_scheduler else "lr"
    return [_plain(group.get(name, group["lr"])) for group in groups]


def _settings_of(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return requests by their names in messages, without what derives from the learning rate."""
    groups, scheduler = requested["groups"], requested["scheduler"] or {}
    settings = {
        name if len(groups) == 1 else f"{name} of parameter group {number}": _plain(value)
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "initial_lr"
    }
    derived = ("base_lrs", "_last_lr")
    settings |= {f"scheduler's {n}": _plain(v) for n, v in scheduler.items() if n not in derived}
    return settings | {"parameters to train": requested["trained"]}


# ------------------------------------------------------------------------------ messages


def _describe_change(name: str, old: Any, new: Any) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        changes = (_describe_change(f"{name} ({k})", old.get(k), new.get(k)) for k in keys)
        return "; ".join(changes)
    before, after = _shortened(old), _shortened(new)
    return f"{name}: {before} → {after}" if before != after else f"{name} ({before}) has changed"


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."


def _batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _plain(value: Any) -> Any:
    """Return values that can be compared: tensors become lists."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
