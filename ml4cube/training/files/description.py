"""What a run is made of, as a snapshot keeps it, and what to do where two runs differ."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.run.batches import data_facts, loader_seed

if TYPE_CHECKING:
    from ml4cube.training.run.loop import Loop

_SETTINGS = (
    "gradient_accumulation_steps",
    "gradient_clip",
    "precision",
    "scheduler_step_on_batch",
    "seed",
    "limit_train_batches",
    "limit_val_batches",
    "ema",
)
# Where one of these differs, the place inside an epoch means nothing any more.
_PLACE = {"batch_size", "seed", "loader seed", "ranks"}
_NOT_OPTIONS = ("params", "param_names")
_OF_EVERY_MODULE = set(vars(nn.Module()))
_LEAST = 1 << 20  # values of a tensor that are looked at
_DEEP = 4  # objects inside of objects that are looked into
_LONG = 60  # letters of a value in a message
# By optimizer, how its last run left it, and what was asked of that run.
_LIVE: WeakKeyDictionary[Optimizer, tuple[Asked, Asked]] = WeakKeyDictionary()


@dataclass
class Difference:
    """What is different in a run that goes on from a snapshot."""

    # What it is a snapshot of, where it is one of another run.
    kinds: list[str] = field(default_factory=list)
    # What makes it another run.
    refused: list[str] = field(default_factory=list)
    # What is now as the new run has it.
    changed: list[str] = field(default_factory=list)
    # What can no longer be compared with before: "loss", "validation", names of metrics.
    stale: set[str] = field(default_factory=set)
    # The callbacks that now judge by something else.
    monitors: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    @property
    def moves_place(self) -> bool:
        """Whether the epoch under way must begin anew."""
        return bool(self.names & _PLACE)

    def is_stale(self, column: str) -> bool:
        """Whether values of a column cannot be compared with those before."""
        if column.startswith("train_"):
            return "loss" in self.stale
        if "validation" in self.stale or ("loss" in self.stale and column.startswith("val_")):
            return True
        return any(
            column == name or column.startswith((f"{name}/", f"{name}_")) for name in self.stale
        )


@dataclass(frozen=True)
class Asked:
    """What a user may change in objects that are made before the run: as it was asked for."""

    # The options of the optimizer's groups of parameters.
    groups: list[dict[str, Any]]
    scheduler: Any
    # Names of the parameters that are trained.
    trained: list[str]

    @classmethod
    def now(cls, loop: Loop) -> Asked:
        """Look at what a run has now."""
        groups = [
            {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in loop.optimizer.param_groups
        ]
        scheduler = None if loop.scheduler is None else loop.scheduler.state_dict()
        trained = [name for name, p in loop.model.named_parameters() if p.requires_grad]
        return cls(copy.deepcopy(groups), copy.deepcopy(scheduler), trained)

    def unless(self, left: Asked | None, before: Asked | None) -> Asked:
        """Take what was asked for before, where nothing has changed since that run was left."""
        if left is None or before is None:
            return self
        names = ("groups", "scheduler", "trained")
        same = {n for n in names if _plain(getattr(self, n)) == _plain(getattr(left, n))}
        return Asked(*(getattr(before if n in same else self, n) for n in names))

    def plain(self) -> dict[str, Any]:
        """Return values that can be saved and compared."""
        return {name: _plain(value) for name, value in vars(self).items()}


def ask(loop: Loop) -> Asked:
    """Return what the user asks for, in a run that is about to start."""
    now, (left, before) = Asked.now(loop), _LIVE.get(loop.optimizer, (None, None))
    asked = now.unless(left, before)
    _LIVE[loop.optimizer] = (now, asked)
    return asked


def leave(loop: Loop) -> None:
    """Remember how a run leaves its optimizer, for the next run of the same one."""
    _, asked = _LIVE[loop.optimizer]
    _LIVE[loop.optimizer] = (Asked.now(loop), asked)


def describe(loop: Loop, asked: Asked) -> dict[str, Any]:
    """Describe a run, in values that a snapshot can hold."""
    loader = loop.feed.loader
    settings = {name: getattr(loop.options, name) for name in _SETTINGS}
    settings["batch_size"] = _batch_size(loader)
    settings["loader seed"] = loader_seed(loader)
    settings["ranks"] = loop.world.size
    settings["scheduler"] = None if loop.scheduler is None else _class_of(loop.scheduler)
    monitors = {
        name: [callback.monitor, getattr(callback, "mode", "min")]
        for name, callback in named_callbacks(loop.callbacks).items()
        if hasattr(callback, "monitor")
    }
    if isinstance(loop.scheduler, ReduceLROnPlateau):
        monitors["ReduceLROnPlateau"] = [loop.monitor, loop.scheduler.mode]
    judges = {
        "loss": [identity(part) for part in loss_parts(loop.step)],
        "validation": _validation(loop.val_loader),
        "metrics": {name: identity(metric) for name, metric in loop.metrics.items()},
        "monitors": monitors,
    }
    described: dict[str, Any] = to_plain(
        {
            "data": facts_of(loader),
            "optimizer": _class_of(loop.optimizer),
            "parameters": group_names(loop.model, loop.optimizer),
            "settings": settings,
            "judges": judges,
            "asked": asked.plain(),
        },
        "description",
    )
    return described


def named_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Name callbacks by class and, where a class comes twice, by their number."""
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


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference:
    """Say what makes a run another one than that of a snapshot, and what only changes it."""
    found = Difference()
    data = _told("", _differing(old["data"], new["data"], common=True))
    found.kinds, found.refused = ["other data"] if data else [], data
    for name, kind in (
        ("parameters", "another model, or of an optimizer of other parameters"),
        ("optimizer", "another optimizer"),
    ):
        if old[name] != new[name]:
            found.kinds.append(kind)
            found.refused.append(_say(name, old[name], new[name]))
    settings = _differing(old["settings"], new["settings"])
    for name in ("batch_size", "loader seed"):  # a loader of another kind may not know them
        if None in settings.get(name, ()):
            settings.pop(name, None)
    found.names |= settings.keys()
    found.changed += _told("", settings)
    _compare_asked(old["asked"], new["asked"], found, same_kind="scheduler" not in settings)
    _compare_judges(old["judges"], new["judges"], found)
    if "limit_val_batches" in settings:
        found.stale.add("validation")
    return found


def _compare_asked(
    old: Mapping[str, Any], new: Mapping[str, Any], found: Difference, *, same_kind: bool
) -> None:
    for number, (before, after) in enumerate(zip(old["groups"], new["groups"], strict=False)):
        where = f" of parameter group {number}" if len(new["groups"]) > 1 else ""
        changed = _differing(before, after)
        if not same_kind or "lr" in changed:
            changed.pop("initial_lr", None)  # which schedulers set
        found.names |= changed.keys()
        found.changed += [_say(name + where, *values) for name, values in changed.items()]
    if same_kind and old["scheduler"] is not None:
        changed = _differing(old["scheduler"], new["scheduler"])
        # What follows from the learning rates has been said.
        told = {k: v for k, v in changed.items() if k not in ("base_lrs", "_last_lr")}
        found.changed += _told("scheduler's ", told)
    if old["trained"] != new["trained"]:
        found.names.add("trained")
        found.changed.append(_say("parameters to train", old["trained"], new["trained"]))


def _compare_judges(old: Mapping[str, Any], new: Mapping[str, Any], found: Difference) -> None:
    if old["loss"] != new["loss"]:
        found.stale.add("loss")
        found.changed.append(_say("loss", _short_names(old["loss"]), _short_names(new["loss"])))
    sets = _differing(old["validation"], new["validation"], common=True)
    if old["validation"].keys() != new["validation"].keys():
        sets["sets"] = (sorted(old["validation"]), sorted(new["validation"]))
    for name, (before, after) in sets.items():
        found.stale.add("validation")
        if isinstance(before, Mapping):
            parts = _told("validation data's ", _differing(before, after, common=True))
            found.changed += parts
        else:
            found.changed.append(_say(f"validation {name}".rstrip(), before, after))
    for name, values in _differing(old["metrics"], new["metrics"]).items():
        found.stale.add(name)
        found.changed.append(_say(f"metric {name!r}", *map(_short_name, values)))
    for name, (before, after) in _differing(old["monitors"], new["monitors"], common=True).items():
        found.monitors.add(name)
        found.changed.append(_say(f"monitor of {name.split('.')[0]}", before, after))


def merged(old: Any, saved: Any, new: Any) -> Any:
    """Return a state in which the user's changes are honoured and all else goes on."""
    maps = all(isinstance(v, Mapping) and not isinstance(v, Counter) for v in (old, saved, new))
    if maps:
        both = old.keys() & new.keys()
        return {k: merged(old[k], v, new[k]) if k in both else v for k, v in saved.items()}
    nested = isinstance(saved, list) and any(isinstance(item, Mapping) for item in saved)
    if nested and len(old) == len(saved) == len(new):
        return [merged(*items) for items in zip(old, saved, new, strict=True)]
    began = _plain(old)
    return new if began != _plain(new) and _plain(saved) == began else saved


def merged_group(
    old: Mapping[str, Any], saved: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a group of parameters, with the user's changes honoured."""
    group: dict[str, Any] = merged(old, saved, new)
    asked, began, now = new["lr"], old["lr"], saved["lr"]
    if asked != began and _plain(now) != began:
        group["lr"] = now * asked / began if began else asked
    return group


# ------------------------------------------------------------------------------- data


def facts_of(loader: Any) -> dict[str, Any]:
    """Return what tells one loader's data from others."""
    dataset = getattr(loader, "dataset", None)
    facts = {name: value for name, value in data_facts(loader).items() if name != "statistics"}
    if "features" in facts:
        facts.pop("variables", None)  # what else a store has makes no difference
    if dataset is None:
        return facts
    facts |= _of_dataset(dataset)
    with suppress(TypeError):  # of one that streams
        facts["samples"] = len(dataset)
    return facts


def _of_dataset(dataset: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    inner = getattr(dataset, "datasets", None)
    if isinstance(inner, Sequence):  # a ConcatDataset
        for number, part in enumerate(inner):
            facts |= {f"{name} of part {number}": v for name, v in _of_dataset(part).items()}
        return facts
    if hasattr(dataset, "dataset"):  # a Subset
        return _of_dataset(dataset.dataset)
    if isinstance(dataset, TensorDataset):
        facts["values"] = [_of_tensor(tensor) for tensor in dataset.tensors]
    channels = getattr(dataset, "channels", None)
    if isinstance(channels, list | tuple):
        facts["channels"] = [str(name) for name in channels]
    metadata = getattr(dataset, "metadata", None)
    statistics = getattr(dataset, "statistics", None) or getattr(metadata, "statistics", None)
    to_json = getattr(statistics, "to_json", None)
    if callable(to_json):
        known = json.loads(to_json())
        facts["statistics"] = known.get("variables", known)
    provenance = getattr(metadata, "provenance", None)
    if isinstance(provenance, Mapping):
        facts["source"] = _source(provenance, getattr(metadata, "part", None))
    return facts


def _source(provenance: Mapping[str, Any], part: str | None) -> dict[str, Any]:
    """Where samples come from; the path is told, and the call or what is known decides."""
    call = provenance.get("call") or _digest(
        [provenance.get(name) for name in ("variables", "coordinates", "settings")]
    )
    return {"path": provenance.get("source"), "part": part, "call": call[:12]}


def _validation(loader: Any) -> dict[str, Any]:
    if loader is None:
        return {}
    sets = loader if isinstance(loader, Mapping) else {"": loader}
    return {name: facts_of(item) for name, item in sets.items()}


def _batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


# --------------------------------------------------------------- losses and metrics


def loss_parts(step: Any) -> list[Any]:
    """Return what decides about the loss of a step."""
    parts = getattr(step, "loss_parts", None)
    if parts is not None:
        return list(parts())
    return [getattr(step, "loss", step)]


def identity(value: Any) -> list[str]:
    """Tell one loss or metric from another, the same in every process."""
    return [_name(value), _digest(_canonical(value, 0))]


def _canonical(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, nn.Parameter):
        return ["parameter", list(value.shape)]
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if depth == _DEEP:
        return _name(value)
    inner: Callable[[Any], Any] = functools.partial(_canonical, depth=depth + 1)
    if isinstance(value, Mapping):
        return sorted(([str(key), inner(item)] for key, item in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted((inner(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if isinstance(value, functools.partial):
        return [inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, types.MethodType):
        return [inner(value.__func__), _class_of(value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or () if _is_set(cell)]
        return [_name(value), _code(value.__code__), inner(value.__defaults__), cells]
    if isinstance(value, nn.Module):
        if next(value.parameters(), None) is not None:  # a model, which is trained
            return repr(value)
        settings = {k: v for k, v in vars(value).items() if k not in _OF_EVERY_MODULE}
        parts = [settings, dict(value.named_buffers(recurse=False)), dict(value.named_children())]
        return [_class_of(value), *map(inner, parts)]
    return [_class_of(value), inner(getattr(value, "__dict__", {}))]


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _code(code: types.CodeType) -> list[Any]:
    constants = [
        _code(c) if isinstance(c, types.CodeType) else repr(c)
        for c in code.co_consts
        if not isinstance(c, frozenset)  # in no fixed order
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Type, shape and a hash; of a large one, of values here and there."""
    values = tensor.detach().reshape(-1)
    values = values[:: max(1, values.numel() // _LEAST)].cpu().contiguous()
    data = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


# ------------------------------------------------------------------------------ words


def _differing(
    old: Mapping[str, Any], new: Mapping[str, Any], *, common: bool = False
) -> dict[str, tuple[Any, Any]]:
    """What differs, or with `common` what differs of what both have."""
    names = [name for name in old if name in new] if common else list({**old, **new})
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _told(prefix: str, differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [_say(prefix + name, *values) for name, values in differing.items()]


def _say(what: str, old: Any, new: Any) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        parts = _differing(old, new)
        return "; ".join(_say(f"{what} ({name})", *pair) for name, pair in parts.items())
    before, after = _shown(old), _shown(new)
    return f"{what}: {before} → {after}" if before != after else f"{what} ({before}) has changed"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _short_name(entry: Sequence[str] | None) -> str:
    return "none" if entry is None else entry[0]


def _short_names(entries: Iterable[Sequence[str]]) -> str:
    return ", ".join(map(_short_name, entries))


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Plain values that can be compared: tensors become lists, other objects their names."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    simple = value is None or isinstance(value, bool | int | float | str)
    return value if simple else _name(value)
