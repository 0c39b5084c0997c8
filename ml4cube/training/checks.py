"""What a loop is given, looked at before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, InvalidValueError


def check_parts(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Refuse a model, an optimizer or a scheduler that cannot train together.

    Parameters
    ----------
    model : Any
        Should be a torch.nn.Module.
    optimizer : Any
        Should be an optimizer over its parameters; None for a model that is only evaluated.
    scheduler : Any
        None, or something with ``step()``.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        Saying which one, and what to give instead.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model={model!r} is no torch.nn.Module; give the model itself")
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(f"scheduler={scheduler!r} has no step(); give one of torch's")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"optimizer={optimizer!r} is no torch.optim.Optimizer")
    mine = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not mine:
        raise InvalidValueError("model has no parameter to train; check requires_grad")
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise InvalidValueError(
            "optimizer holds none of the model's parameters; make it from model.parameters() of "
            "the model that is trained"
        )


def check_loader(name: str, loader: Any) -> None:
    """Refuse a loader, or a dict of loaders, that cannot give every epoch its batches.

    Parameters
    ----------
    name : str
        What it is called in messages.
    loader : Any
        Should be iterable as often as there are epochs.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If it is not.
    """
    if isinstance(loader, Mapping) and name == "test_data":
        if not loader:
            raise InvalidValueError(f"{name} is an empty dict; give {{'name': loader}}, or None")
        for key, item in loader.items():
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidValueError(
                    f"{name} has the name {key!r}; name each set by a text without '/'"
                )
            check_loader(f"{name}[{key!r}]", item)
        return
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidTypeError(f"{name}={loader!r} cannot be iterated; give a loader of batches")
    if isinstance(loader, Iterator):
        raise InvalidTypeError(
            f"{name} is an iterator, which is used up after one epoch; give a loader or a list"
        )
