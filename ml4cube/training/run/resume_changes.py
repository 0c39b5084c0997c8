"""Changes between a run and the one that left its snapshot.

A snapshot belongs to a run with the same training data, the same class of optimizer and the same
parameters. Everything else may change: it is listed, and the run continues with what is asked for
now. A callback whose monitored column is computed in another way is reset.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.inputs.batches import loader_seed
from ml4cube.training.inputs.identity import class_name, data_identity, identity
from ml4cube.training.run.engine import Engine, named_sets

_OPTIONS = (
    "gradient_accumulation_steps",
    "gradient_clip",
    "precision",
    "scheduler_step_on_batch",
    "seed",
    "limit_train_batches",
    "limit_val_batches",
    "ema",
)
# If one of these differs, the position inside an epoch means nothing any more.
POSITION = {"batch_size", "seed", "loader seed", "ranks"}
_LONG = 60  # letters of a value in a message


class Changes(NamedTuple):
    """The differences of a run from the one that left its snapshot."""

    # What makes it another run, in words.
    refused: list[str]
    # Names of what changed and is honoured, with old and new values in words.
    changed: dict[str, str]
    # Callbacks that are reset.
    stale: set[str]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare the descriptions of two runs."""
    before, now = old["fixed"], new["fixed"]
    refused = [
        _say(name, value, now[name])
        for name, value in before.items()
        if name in now and value != now[name]  # a stream knows less of its data
    ]
    before, now = old["settings"], new["settings"]
    changed = {
        name: _say(name, before.get(name), now.get(name))
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    }
    if "scheduler" in changed:  # one of another class starts over
        changed = {name: text for name, text in changed.items() if "scheduler's" not in name}
    before, now = old["judged"], new["judged"]
    stale = {name for name, facts in now.items() if before.get(name, facts) != facts}
    for name in sorted(stale):
        first, second = before[name]["monitor"], now[name]["monitor"]
        if first != second:
            changed[name] = _say(f"monitor of {name.split('.')[0]}", first, second)
    return Changes(refused, changed, stale)


def describe(run: Engine, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a run, in values that a snapshot can hold and `compare` compares."""
    loader, options = run.feed.loader, run.options
    losses = ", ".join(map(identity, run.step.loss_parts))
    metrics = {name: identity(metric) for name, metric in run.metrics.items()}
    validated = {} if run.val_loader is None else named_sets(run.val_loader)
    validation = {name: data_identity(one) for name, one in validated.items()}
    settings = {name: getattr(options, name) for name in _OPTIONS}
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
    judged = {
        name: {
            "monitor": f"{column} ({mode})",
            "loss": losses if column.startswith(("train_", "val_")) else None,
            "validation": None
            if column.startswith("train_")
            else [validation, options.limit_val_batches],
            "metrics": [value for n, value in metrics.items() if column.startswith(n)],
        }
        for name, (column, mode) in judges(run).items()
    }
    described: dict[str, Any] = to_plain(
        {
            "fixed": {
                **data_identity(loader),
                "optimizer": class_name(type(run.optimizer)),
                "parameters": group_names(run.model, run.optimizer),
            },
            "settings": settings,
            "judged": judged,
            "requested": {name: _plain(value) for name, value in requested.items()},
        },
        "description",
    )
    return described


def judges(run: Engine) -> dict[str, tuple[str, str]]:
    """Return column and mode of all that judge a run by a column, by name."""
    found = {
        name: (callback.monitor, getattr(callback, "mode", "min"))
        for name, callback in named_callbacks(run.callbacks).items()
        if hasattr(callback, "monitor")
    }
    if isinstance(run.scheduler, ReduceLROnPlateau):
        found["ReduceLROnPlateau"] = (run.monitor, run.scheduler.mode)
    return found


def named_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Name callbacks by their class and a number, if a class comes twice."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        twins = sum(name.startswith(f"{kind}.") for name in named)
        named[f"{kind}.{twins}"] = callback
    return named


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name the parameters of each group of an optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return [[names.get(id(p), "?") for p in group["params"]] for group in groups]


# ---------------------------------------------- optimizer, scheduler, trained parameters


def requests(run: Engine) -> dict[str, Any]:
    """Return what users set in objects that they make before the run, as it is now."""
    groups = [
        {name: v for name, v in group.items() if name not in ("params", "param_names")}
        for group in run.optimizer.param_groups
    ]
    scheduler = None if run.scheduler is None else run.scheduler.state_dict()
    trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
    return copy.deepcopy({"groups": groups, "scheduler": scheduler, "trained": trained})


def new_requests(
    now: Mapping[str, Any], left: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is asked for now; what an earlier run left so was not asked for again."""
    return {
        name: before[name] if left and _plain(left[name]) == _plain(value) else value
        for name, value in now.items()
    }


def merged(old: Any, saved: Any, new: Any) -> Any:
    """Return a saved state with the user's changes from `old` to `new`."""
    if all(isinstance(v, Mapping) and not isinstance(v, Counter) for v in (old, saved, new)):
        both = old.keys() & new.keys()
        return {k: merged(old[k], v, new[k]) if k in both else v for k, v in saved.items()}
    if isinstance(saved, list) and len(old) == len(saved) == len(new):
        return [merged(*items) for items in zip(old, saved, new, strict=True)]
    began = _plain(old)
    # Values that training changes, such as counters, are not settings.
    return new if began != _plain(new) and _plain(saved) == began else saved


def merged_group(
    old: Mapping[str, Any], saved: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a group of parameters with the user's changes."""
    group: dict[str, Any] = merged(old, saved, new)
    asked, began, now = new["lr"], old["lr"], saved["lr"]
    if asked != began and _plain(now) != began:  # a scheduler has moved it: scale
        group["lr"] = now * asked / began if began else asked
    return group


def _settings_of(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requests by name, without what schedulers derive from the learning rate."""
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


# ------------------------------------------------------------------------------ words


def _say(what: str, old: Any, new: Any) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = {name: (old.get(name), new.get(name)) for name in {**old, **new}}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        return "; ".join(_say(f"{what} ({name})", *pair) for name, pair in differing.items())
    before, after = _shown(old), _shown(new)
    return f"{what}: {before} → {after}" if before != after else f"{what} ({before}) has changed"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _plain(value: Any) -> Any:
    """Return values that can be compared: tensors become lists, other objects their names."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", type(value).__name__)
