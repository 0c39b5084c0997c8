"""What the optimizer trains besides the model: learned weights of a loss, a second module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidValueError, listed


def modules_in(name: str, owner: Any) -> dict[str, nn.Module]:
    """Return an object, if it is a module, or the modules among its attributes, by name."""
    if isinstance(owner, nn.Module):
        return {name: owner}
    attributes = getattr(owner, "__dict__", {}).items()
    return {f"{name}.{key}": item for key, item in attributes if isinstance(item, nn.Module)}


def state_of(part: Any) -> Any:
    """Return the state of an optimizer or scheduler; None if there is none."""
    if part is None:
        return None
    return part.state_dict()


def held_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer trains: parameters in the order of the model, then the others."""
    held = dict.fromkeys(held_parameters(optimizer))
    of_model = [parameter for parameter in model.parameters() if parameter in held]
    return list(dict.fromkeys([*of_model, *held]))


def trainable(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the trainable parameters of a model and of its loss among `modules`, by name."""
    named = dict(model.named_parameters())
    for prefix, module in modules.items():
        if prefix.split(".")[0] == "loss":
            named |= module.named_parameters(prefix)
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def outside_model(
    model: nn.Module, optimizer: Optimizer | None, modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Return by name the parameters that an optimizer holds and a model does not have.

    With the buffers of those `modules` that have such parameters. Parameters of no module are named
    by their place in the optimizer.
    """
    if optimizer is None:
        return {}
    own = {*model.parameters(), *model.buffers()}
    names = _places_in_groups(optimizer, own)
    for prefix, module in modules.items():
        held = {name: p for name, p in module.named_parameters(prefix) if p in names}
        buffers = {name: b for name, b in module.named_buffers(prefix) if b not in own}
        tensors = {}
        if held:
            tensors = {**held, **buffers}
        names |= {tensor: name for name, tensor in tensors.items()}
    return {name: tensor for tensor, name in names.items()}


def _places_in_groups(optimizer: Optimizer, own: set[Tensor]) -> dict[Tensor, str]:
    """Name the parameters of an optimizer that are not a model's own by their place in it."""
    places = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            # Shares of a model are left behind by an earlier training with strategy="fsdp".
            if parameter not in own and not hasattr(parameter, "full_tensor"):
                places[parameter] = f"parameter {position} of group {number}"
    return places


def load_outside(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: str) -> None:
    """Copy saved values into the tensors of `outside_model`, or refuse those that do not fit."""
    missing = [n for n, t in tensors.items() if n not in saved or saved[n].shape != t.shape]
    if missing:
        raise InvalidValueError(
            f"{source} must hold what the optimizer trains besides the model, {listed(missing)}, "
            f"with the same shapes, got {listed(list(saved))}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
