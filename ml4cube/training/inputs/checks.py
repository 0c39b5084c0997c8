"""Checks of models, optimizers, losses and loaders, made before anything starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.same_scaling import check_same_scaling, datasets_in
from ml4cube.loading.loaders import EpochLoader
from ml4cube.loading.tensors import PTXrDataset
from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.inputs.batches import sets_by_argument
from ml4cube.training.inputs.outside_model import held_parameters

COUNT = "an int of 1 or more"


def above_zero(value: Any) -> bool:
    """Return True for a number above zero."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def is_count(value: Any) -> bool:
    """Return True for an integer of 1 or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_count(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuse anything but a count of 1 or more."""
    if not is_count(value) and not (optional and value is None):
        raise InvalidValueError(f"{name} must be {COUNT}, got {value!r}")


def check_trainable(model: Any, optimizer: Any, scheduler: Any, options: Any) -> None:
    """Refuse a model, an optimizer or a scheduler that cannot train together."""
    check_model(model)
    refuse_class("scheduler", scheduler)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(
            f"scheduler must have a method step(), like those of torch, got {scheduler!r}"
        )
    if optimizer is not None:
        _check_optimizer(model, optimizer)
        _check_scheduler(scheduler, optimizer, options)
        _check_optimized(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer that the loop cannot step."""
    # Extra state that no snapshot can hold is refused here, not when the first one is written.
    state = model.state_dict().items()
    to_plain({n: v for n, v in state if not isinstance(v, Tensor)}, "model.state_dict()")
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer must be a torch.optim.Optimizer, got {one_line(optimizer)}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidTypeError(
            "optimizer must take a step after one backward pass, as torch.optim.AdamW does, got "
            f"{type(optimizer).__name__}, whose step() computes the loss several times"
        )


def _check_scheduler(scheduler: Any, optimizer: Optimizer, options: Any) -> None:
    """Refuse a scheduler of another optimizer, or that contradicts the options."""
    if options.scheduler_step_on_batch and isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidTypeError(
            "scheduler_step_on_batch=True and ReduceLROnPlateau contradict, because it needs the "
            "loss of an epoch; leave scheduler_step_on_batch out, or use another scheduler"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != options.mode:
        raise InvalidValueError(
            f"mode={options.mode!r} and ReduceLROnPlateau(mode={scheduler.mode!r}) contradict: the "
            "rate would fall while the monitored column improves; give both the same mode"
        )
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if isinstance(scheduled, Optimizer) and scheduled.param_groups is not optimizer.param_groups:
        raise InvalidValueError(
            f"scheduler ({type(scheduler).__name__}) must be made with the optimizer that trains "
            f"({type(optimizer).__name__}), got one made with another ({type(scheduled).__name__})"
        )


def _check_optimized(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds none of the model's parameters."""
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not trainable:
        raise InvalidValueError("model has no parameter to train; check requires_grad")
    optimized = held_parameters(optimizer)
    if trainable.isdisjoint(optimized):
        if any(hasattr(p, "full_tensor") for p in optimized):  # a DTensor, on which FSDP works
            raise InvalidValueError(
                "optimizer holds shares of the model that an earlier training with "
                "strategy='fsdp' left; make a new optimizer and Trainer for each training. With "
                "snapshot_path=, training continues where the last one ended"
            )
        raise InvalidValueError(
            "optimizer holds none of the model's parameters; make it from model.parameters()"
        )


def check_model(model: Any) -> None:
    """Refuse anything but a torch module."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model must be a torch.nn.Module, got {one_line(model)}")


def bad_loss(loss: Any) -> InvalidTypeError | InvalidValueError:
    """Return the error for a loss that cannot be trained on."""
    if not isinstance(loss, Tensor):
        return InvalidTypeError(
            f"the loss must be a tensor, got a {type(loss).__name__} ({loss!r}); return the tensor "
            "itself, without .item() or float()"
        )
    if loss.ndim:
        return InvalidValueError(
            f"the loss must be one number per batch, got shape {tuple(loss.shape)}; use "
            "reduction='mean'"
        )
    return InvalidValueError(
        "the loss does not depend on any parameter that is trained; compute it from the model's "
        "output, without .detach(), .numpy() or torch.no_grad()"
    )


def refuse_class(argument: str, value: Any) -> None:
    """Refuse a class given in place of an object."""
    if isinstance(value, type):
        raise InvalidTypeError(
            f"{argument}={value.__name__} is a class; give an object of it, {value.__name__}(...)"
        )


def import_package(module: str, package: str, what: str) -> Any:
    """Import a module; if it is missing, raise an error that names the package to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed (no module {error.name!r}); run "
            f"`pip install {package}`",
            name=error.name,
        ) from error


def check_loss(argument: str, loss: Any) -> Callable[..., Tensor]:
    """Return a loss function, or refuse anything else."""
    refuse_class(argument, loss)
    if not callable(loss):
        raise InvalidTypeError(
            f"{argument} must be a loss function such as torch.nn.MSELoss(), got {one_line(loss)}"
        )
    return cast(Callable[..., Tensor], loss)


def check_loaders(train: Any, val: Any, snapshot_path: Any) -> None:
    """Refuse data that cannot train a model, or that do not fit together."""
    for name, loader in (("train_data", train), ("test_data", val)):
        if loader is not None:
            check_loader(name, loader)
    refuse_kept_workers(train, snapshot_path)
    check_same_scaling({"train_data": train, **sets_by_argument("test_data", val)})


def refuse_kept_workers(loader: Any, snapshot_path: Any) -> None:
    """Refuse workers that outlive an epoch, if the run is to be resumed."""
    # Their random state goes on from epoch to epoch, and those of a resumed run begin anew.
    is_foreign = isinstance(loader, DataLoader) and not isinstance(loader, EpochLoader)
    if is_foreign and loader.persistent_workers and snapshot_path is not None:
        raise InvalidValueError(
            f"train_data must not have persistent_workers=True with snapshot_path="
            f"{str(snapshot_path)!r}, because no snapshot holds the random state of its workers; "
            "leave persistent_workers out, or make the loader by prep_dataloader(..., "
            "persistent_workers=True)"
        )


def check_loader(name: str, loader: Any) -> None:
    """Refuse a loader, or a dict of loaders, that cannot give every epoch its batches."""
    if isinstance(loader, Mapping) and name == "test_data":
        if not loader:
            raise InvalidValueError(f"{name} must be {{'name': loader}} or None, got an empty dict")
        for key, item in loader.items():
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidValueError(
                    f"{name}: the names of sets must be strings without '/', got {key!r}"
                )
            check_loader(f"{name}[{key!r}]", item)
        return
    is_data = isinstance(loader, str | Mapping | Tensor | np.ndarray | Dataset)
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not is_iterable or (is_data and not isinstance(loader, IterableDataset)):
        raise InvalidTypeError(
            f"{name} must be a loader of batches, got {one_line(loader)}; make one, such as "
            "by prep_dataloader(dataset, batch_size=32)"
        )
    if isinstance(loader, Iterator):
        raise InvalidTypeError(
            f"{name} must be a loader or a list, got an iterator, which is used up after one epoch"
        )


def refuse_several_steps(data: Mapping[str, Any], advice: str) -> None:
    """Refuse data, given by argument, whose samples hold several steps of a forecast."""
    for argument, loader in data.items():
        for dataset in sample_data_in(loader):
            if dataset.rollout > 1:
                raise InvalidValueError(
                    f"{argument} must have samples of one step, got PTXrDataset(..., "
                    f"rollout={dataset.rollout}), whose X holds the true later steps; {advice}"
                )


def sample_data_in(loader: Any) -> Iterable[PTXrDataset]:
    """Return the PTXrDatasets that a loader takes its samples from."""
    return datasets_in(loader, lambda data: isinstance(data, PTXrDataset))
