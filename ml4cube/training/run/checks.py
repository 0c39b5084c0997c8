"""What a loop is given, looked at before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.files.checkpoint import to_plain


def check_parts(model: Any, optimizer: Any, scheduler: Any, *, on_batch: bool = False) -> None:
    """Refuse a model, an optimizer or a scheduler that cannot train together."""
    check_model(model)
    refuse_class("scheduler", scheduler)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(f"scheduler={scheduler!r} has no step(); give one of torch's")
    if optimizer is None:
        return
    held = model.state_dict().items()
    # Refused here, and not when the first best epoch is to be kept.
    to_plain({n: v for n, v in held if not isinstance(v, torch.Tensor)}, "model.state_dict()")
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"optimizer={optimizer!r} is no torch.optim.Optimizer")
    if _needs_closure(optimizer):
        raise InvalidTypeError(
            f"optimizer is {type(optimizer).__name__}, whose step() computes the loss several "
            "times; use one that takes a step after one backward pass, such as torch.optim.AdamW"
        )
    if on_batch and isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidTypeError(
            "scheduler_step_on_batch=True and ReduceLROnPlateau contradict: it looks at the loss "
            "of an epoch; leave scheduler_step_on_batch out, or take another scheduler"
        )
    its = getattr(scheduler, "optimizer", optimizer)
    if isinstance(its, Optimizer) and its.param_groups is not optimizer.param_groups:
        raise InvalidValueError(
            f"scheduler ({type(scheduler).__name__}) was made with another optimizer "
            f"({type(its).__name__}) than the one given ({type(optimizer).__name__}), whose rates "
            "it would never change; make it with the optimizer that trains"
        )
    mine = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not mine:
        raise InvalidValueError("model has no parameter to train; check requires_grad")
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in mine for p in trained):
        if any(hasattr(p, "full_tensor") for p in trained):  # a DTensor, on which FSDP works
            raise InvalidValueError(
                "optimizer holds shares of another model, as strategy='fsdp' left them: each "
                "training needs a new optimizer and Trainer; with snapshot_path= they go on where "
                "the last one ended"
            )
        raise InvalidValueError(
            "optimizer holds none of the model's parameters; make it from model.parameters() of "
            "the model that is trained"
        )


def check_model(model: Any) -> None:
    """Refuse what is no model."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model={model!r} is no torch.nn.Module; give the model itself")


def bad_loss(loss: Any) -> InvalidTypeError | InvalidValueError:
    """Return the error that says why a loss cannot be trained on."""
    if not isinstance(loss, torch.Tensor):
        return InvalidTypeError(
            f"the loss is a {type(loss).__name__} ({loss!r}), not a tensor, so nothing can be "
            "learned from it; return the tensor itself, without .item() or float()"
        )
    if loss.ndim:
        return InvalidValueError(
            f"loss has shape {tuple(loss.shape)}, one number per batch is needed; use "
            "reduction='mean'"
        )
    return InvalidValueError(
        "the loss does not depend on any parameter that is trained; compute it from what the "
        "model gives, without .detach(), .numpy() or torch.no_grad()"
    )


def refuse_class(argument: str, given: Any) -> None:
    """Refuse a class where an object is meant."""
    if isinstance(given, type):
        raise InvalidTypeError(
            f"{argument}={given.__name__} is a class; give an object of it, {given.__name__}(...)"
        )


def check_loss(argument: str, loss: Any) -> Callable[..., torch.Tensor]:
    """Return a loss function, or refuse what is none."""
    refuse_class(argument, loss)
    if not callable(loss):
        raise InvalidTypeError(
            f"{argument}={loss!r}: training needs a loss function; give e.g. "
            f"{argument}=torch.nn.MSELoss()"
        )
    return cast(Callable[..., torch.Tensor], loss)


def check_loader(name: str, loader: Any) -> None:
    """Refuse a loader, or a dict of loaders, that cannot give every epoch its batches."""
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
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InvalidTypeError(
            f"{name} is a data set ({type(loader).__name__}), whose items are samples; give a "
            "loader of batches, such as prep_dataloader(dataset, batch_size=32)"
        )
    if isinstance(loader, str | Mapping | torch.Tensor | np.ndarray):
        raise InvalidTypeError(
            f"{name} is a {type(loader).__name__}; give a loader of batches, such as "
            "torch.utils.data.DataLoader(dataset, batch_size=32)"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidTypeError(f"{name}={loader!r} cannot be iterated; give a loader of batches")
    if isinstance(loader, Iterator):
        raise InvalidTypeError(
            f"{name} is an iterator, which is used up after one epoch; give a loader or a list"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
