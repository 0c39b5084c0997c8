"""Facts that identify data, losses and metrics, the same in every process."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ml4cube.sampling.identity.callback import closure_of, is_installed, source_of
from ml4cube.training.inputs.batches import data_facts, statistics_of

# Besides numbers and texts, the values that their repr identifies.
_BY_REPR = complex | slice | range | date | time | timedelta | PurePath | torch.device | torch.dtype
_MAX_VALUES = 1 << 20  # of a larger tensor, about so many values are compared
_MAX_DEPTH = 4  # levels of objects inside objects that are compared


def data_identity(loader: Any) -> dict[str, Any]:
    """Return the facts that identify the data of a loader, by name."""
    facts = data_facts(loader)
    facts.pop("statistics", None)  # `_dataset_facts` has them by variable
    if "features" in facts:
        facts.pop("variables", None)  # other variables of a store make no difference
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        facts |= _dataset_facts(dataset)
        with suppress(TypeError):  # a stream has no length
            facts["samples"] = len(dataset)
    return facts


def _dataset_facts(dataset: Any) -> dict[str, Any]:
    """Return the facts by name, besides those of `data_facts`."""
    parts = getattr(dataset, "datasets", None)
    facts: dict[str, Any] = {}
    if isinstance(parts, Sequence):  # a ConcatDataset
        for number, part in enumerate(parts):
            of_part = _dataset_facts(part).items()
            facts |= {f"{name} of part {number}": fact for name, fact in of_part}
        return facts
    if hasattr(dataset, "dataset"):  # a Subset
        facts, indices = _dataset_facts(dataset.dataset), getattr(dataset, "indices", ())
        return facts | {"indices": digest([facts.get("indices"), np.asarray(indices)])[:12]}
    if hasattr(dataset, "lead") and hasattr(dataset, "metadata"):  # a PTXrDataset
        weights = dataset.weights
        if weights is not None and not isinstance(weights, str):
            values = weights if isinstance(weights, Mapping) else np.asarray(weights, float)
            weights = digest(values)[:12]
        facts |= {"lead": dataset.lead, "weights": weights}
    if isinstance(dataset, TensorDataset):
        facts["values"] = [_tensor_contents(tensor) for tensor in dataset.tensors]
    channels = getattr(dataset, "channels", None)
    if isinstance(channels, list | tuple):
        facts["channels"] = [str(name) for name in channels]
    statistics = statistics_of(dataset)
    if statistics is not None:
        content = json.loads(statistics)
        facts["statistics"] = content.get("variables", content)  # to name those that differ
    metadata = getattr(dataset, "metadata", None)
    provenance = getattr(metadata, "provenance", None)
    if isinstance(provenance, Mapping):
        # The identity of the sampler's call; a cube that is cut lazily has none.
        call = provenance.get("call") or _json_digest(
            [provenance.get(name) for name in ("variables", "coordinates", "settings")]
            + [getattr(metadata, name, None) for name in ("spec", "fill")]
        )
        part = getattr(metadata, "part", None)
        facts["source"] = {"path": provenance.get("source"), "part": part, "call": call[:12]}
    return facts


def identity(value: Any) -> str:
    """Return the name of a loss or metric, with a digest of its source and settings.

    Two functions are the same if their source, defaults and closures are, or their names in an
    installed library; two objects, if their classes' names and attributes are. Tensors are compared
    by value; a module with parameters is trained, so only its layers are compared.
    """
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name} ({digest(value)[:12]})"


def digest(value: Any) -> str:
    """Return a digest of the content of any object."""
    return _json_digest(_contents(value))


def _contents(value: Any, depth: int = 0) -> Any:
    """Return what identifies an object, as nested lists and texts."""
    if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
        return repr(value)
    if isinstance(value, nn.Parameter):
        return ["parameter", list(value.shape)]
    if isinstance(value, torch.Tensor):
        return _tensor_contents(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), content]
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic | _BY_REPR):
        return repr(value)
    if isinstance(value, type) or is_installed(value):
        return class_name(value)
    if depth == _MAX_DEPTH:
        return class_name(type(value))

    def inner(item: Any) -> Any:
        return _contents(item, depth + 1)

    if isinstance(value, Mapping):
        return sorted(([str(key), inner(item)] for key, item in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(inner, value), key=repr)
    if isinstance(value, types.FunctionType):
        source = source_of(value.__code__, value.__globals__)  # None if it is not known
        text = None if source is None else ast.unparse(source)
        defaults = [inner(value.__defaults__), inner(value.__kwdefaults__)]
        closure = {name: inner(item) for name, item in closure_of(value)}
        return [value.__qualname__, text, defaults, closure]
    if isinstance(value, types.MethodType):
        return [inner(value.__func__), class_name(type(value.__self__))]
    if isinstance(value, functools.partial):
        return [inner(value.func), inner(value.args), inner(value.keywords)]
    if not hasattr(value, "__dict__") and hasattr(value, "__array__"):  # a DataArray
        return [class_name(type(value)), inner(np.asarray(value))]
    attributes = getattr(value, "__dict__", {})
    if not isinstance(value, nn.Module):
        return [class_name(type(value)), inner(attributes)]
    # Without what every module has, such as hooks.
    attributes = {name: v for name, v in attributes.items() if name not in vars(nn.Module())}
    parts = [attributes, dict(value.named_buffers(recurse=False)), dict(value.named_children())]
    return [class_name(type(value)), *map(inner, parts)]


def _tensor_contents(tensor: torch.Tensor) -> list[Any]:
    values = tensor.detach().reshape(-1)
    values = values[:: max(1, values.numel() // _MAX_VALUES)].cpu().contiguous()
    data = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


def class_name(kind: Any) -> str:
    """Return the full name of a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
