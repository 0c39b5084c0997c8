"""Facts that identify data, the same in every process; names of losses and metrics."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ml4cube.sampling.identity.cube import hash_of
from ml4cube.training.inputs.batches import data_facts, statistics_of

_MAX_VALUES = 1 << 20  # of a larger tensor, about so many values are compared


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
    if isinstance(parts, Sequence):  # a ConcatDataset
        facts: dict[str, Any] = {}
        for number, part in enumerate(parts):
            of_part = _dataset_facts(part).items()
            facts |= {f"{name} of part {number}": fact for name, fact in of_part}
        return facts
    if hasattr(dataset, "dataset"):  # a Subset
        facts, indices = _dataset_facts(dataset.dataset), getattr(dataset, "indices", ())
        return facts | {"indices": digest([facts.get("indices"), np.asarray(indices)])[:12]}
    return _sample_facts(dataset) | _source_facts(getattr(dataset, "metadata", None))


def _sample_facts(dataset: Any) -> dict[str, Any]:
    """Return the facts about the samples of a data set."""
    facts: dict[str, Any] = {}
    if hasattr(dataset, "lead") and hasattr(dataset, "metadata"):  # a PTXrDataset
        weights = dataset.weights
        if weights is not None and not isinstance(weights, str):
            if not isinstance(weights, Mapping):
                weights = np.asarray(weights, float)
            weights = digest(weights)[:12]
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
    return facts


def _source_facts(metadata: Any) -> dict[str, Any]:
    """Return the facts about the source of samples, if their metadata say any."""
    provenance = getattr(metadata, "provenance", None)
    if not isinstance(provenance, Mapping):
        return {}
    # The identity of the sampler's call; a cube that is cut lazily has none.
    call = provenance.get("call") or _json_digest(
        [provenance.get(name) for name in ("variables", "coordinates", "settings")]
        + [getattr(metadata, name, None) for name in ("recipe", "fill")]
    )
    part = getattr(metadata, "part", None)
    return {"source": {"path": provenance.get("source"), "part": part, "call": call[:12]}}


def name_of(function: Any) -> str:
    """Return the name of a loss or metric: of a function, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def digest(value: Any) -> str:
    """Return a digest of the tensors, arrays, numbers and texts in any nested value."""
    return _json_digest(_contents(value))


def _contents(value: Any) -> Any:
    """Return what identifies a value, as nested lists and texts."""
    if isinstance(value, torch.Tensor):
        return _tensor_contents(value)
    if isinstance(value, Mapping):
        return sorted(([str(key), _contents(item)] for key, item in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return [_contents(item) for item in value]
    if hasattr(value, "__array__"):  # also a DataArray
        return hash_of(np.asarray(value))
    if isinstance(value, type(None) | bool | int | float | str | bytes):
        return repr(value)
    return class_name(type(value))


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
