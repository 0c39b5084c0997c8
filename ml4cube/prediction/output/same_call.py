"""Identify a prediction: a killed run of the same call goes on, and a finished one is opened."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import pickle
from collections.abc import Iterable, Mapping
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch
import xarray as xr
from torch.nn.parallel import DistributedDataParallel

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.ledger.call import HASHED, CallId
from ml4cube.ledger.locations import Location, paths_of
from ml4cube.sampling.identity.callback import UnknownCallbackError, identity_of, is_installed
from ml4cube.sampling.identity.cube import SourceChangedError, SourceState, hash_of
from ml4cube.sampling.identity.provenance import versions

logger = logging.getLogger(__name__)

#: After these, the same call would fail again, or go on from blocks of another cube.
NOT_RESUMED = (InvalidTypeError, InvalidValueError, StoreExistsError, SourceChangedError)


def source_state(
    cube: xr.Dataset, names: Iterable[str], location: Location | None
) -> SourceState | None:
    """Return what identifies the variables that are read; None where nothing is published."""
    if location is None:
        return None
    variables = {name: cube.variables[name] for name in names}
    return SourceState.of(variables, frozenset(paths_of(location)))


def call_of(
    model: Any, template: xr.Dataset, settings: Mapping[str, Any], source: SourceState
) -> CallId | None:
    """Collect all that decides about the bytes of a predicted cube.

    `source` is what is read; `settings` are picklable. The result is None where something cannot be
    identified without reading the cube.
    """
    try:
        if None in source.identities.values():
            raise UnknownCallbackError(f"only the cells identify {source.identities}")
        return CallId.of(
            {
                "model": {"weights and code": _hash_of_object(model)},
                "source": {f"cells of {n!r}": cells for n, cells in source.identities.items()},
                "result": {f"{n!r}": _described(v) for n, v in template.variables.items()},
                "attributes": {str(name): repr(value) for name, value in template.attrs.items()},
                "settings": {name: _plain_or_hash(value) for name, value in settings.items()},
                "versions": {**versions(), "torch": torch.__version__},
            }
        )
    except Exception as error:  # pickling an object may raise any
        logger.info("this prediction cannot be compared with an earlier one: %s", error)
        return None


def _described(variable: xr.Variable) -> str:
    """Return what identifies a variable of the template; targets have no values yet."""
    values = variable.shape if variable.chunks is not None else hash_of(variable.values)
    return repr([variable.dims, str(variable.dtype), values, variable.attrs, variable.encoding])


def _plain_or_hash(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return f"{HASHED}{_hash_of_object(value)}"


def _unwrapped(model: torch.nn.Module) -> Any:
    """Return the module inside a wrapper of torch, which cannot be pickled, or has a new state."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    return getattr(model, "_orig_mod", model)  # of torch.compile


def _hash_of_object(value: Any) -> str:
    """Hash an object by its values, and the user's functions and classes by their source code."""
    digest = hashlib.sha256()
    _Pickler(_Sink(digest)).dump(value)
    return digest.hexdigest()


class _Sink:
    """A file that passes everything on to a hash."""

    def __init__(self, digest: Any) -> None:
        self.write = digest.update


class _Pickler(pickle.Pickler):
    """Pickles hashes of tensors, and source code instead of names of functions and classes."""

    def persistent_id(self, value: Any) -> Any:
        """Return what to pickle for a set, whose order is another in every process."""
        if type(value) in (set, frozenset):
            return sorted(map(_hash_of_object, value))
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what to pickle for a value; NotImplemented for the default."""
        if isinstance(value, torch.Tensor):
            return str, (_hash_of_tensor(value),)
        if isinstance(value, torch.nn.Module) and _unwrapped(value) is not value:
            return list, ([_unwrapped(value)],)
        if isinstance(value, torch.export.ExportedProgram):
            tensors = {**value.state_dict, **value.constants}
            return list, ([str(value.graph_module.code), str(value.graph_signature), tensors],)
        if isinstance(value, FunctionType) and not is_installed(value):
            return str, (identity_of(value),)
        if isinstance(value, type) and not is_installed(value):
            return list, (_class_contents(value),)
        return NotImplemented


def _class_contents(kind: type) -> list[Any]:
    """Return what identifies a class of the user: its source, its attributes, and what these use.

    The source does not show what values attributes were given, by another variable or later.
    """
    # `__init__` shows in the attributes of the object; other special methods are mostly made by
    # libraries, as are the descriptors of slots and the registry of abstract classes
    special = {"__call__", "__getattr__"}
    members = {
        name: _functions_of(member)
        for name, member in vars(kind).items()
        if (name in special or not name.startswith("__"))
        and not isinstance(member, MemberDescriptorType)
        and name != "_abc_impl"
    }
    return [kind.__qualname__, inspect.getsource(kind), list(kind.__bases__), members]


def _functions_of(member: Any) -> Any:
    """Return the functions behind methods and properties, which cannot be pickled."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return [member.fget, member.fset, member.fdel]
    return member.func if isinstance(member, functools.cached_property) else member


def _hash_of_tensor(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    kind = tensor.dtype, tensor.device.type, tuple(tensor.shape)  # devices round differently
    return f"{kind} {hash_of(content.numpy())}"
