"""How a model lies on the ranks: whole on each, its gradients averaged.

Everything that depends on it stands here, so another way of spreading a model is another class
with these methods. Methods marked "every rank" are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.inputs.steps import Portion
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.shard_files import read_shards


def spread_weights(model: nn.Module, world: World) -> None:
    """Give the model of every rank the state of rank 0's; every rank."""
    state = model.state_dict()
    extra = {name: v for name, v in state.items() if not isinstance(v, torch.Tensor)}
    world.spread(state[name] for name in state if name not in extra)
    if extra and world.size > 1:
        model.load_state_dict({**state, **world.share(to_plain(extra))})


class Strategy:
    """The model is whole on every rank, and gradients are averaged over the ranks."""

    lockstep = False  # whether ranks must run the model equally often in every step

    def __init__(self, world: World, *, find_unused_parameters: bool = False) -> None:
        self.world = world
        self.find_unused_parameters = find_unused_parameters

    def trainable(self, model: nn.Module) -> tuple[bool, ...]:
        """Say which parameters are trained now, as far as this rank knows."""
        return tuple(parameter.requires_grad for parameter in model.parameters())

    def agree(self, model: nn.Module) -> None:
        """Let every rank train the parameters that rank 0 trains; every rank."""
        flags = self.world.share(self.trainable(model))
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)

    def place(self, model: nn.Module) -> nn.Module:
        """Bring the model to the device, before anything is loaded into it."""
        return model.to(self.world.device)

    def shard(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Return the model that is trained, before anything is loaded into it; every rank."""
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the user's own model with the weights that training came to; every rank."""
        return model

    def wrap(self, model: nn.Module, forward: nn.Module) -> nn.Module:
        """Return what training calls; every rank."""
        if self.world.size == 1 or not any(self.trainable(model)):
            return forward
        cuda = self.world.device.type == "cuda"
        return DistributedDataParallel(
            forward,
            device_ids=[self.world.device] if cuda else None,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
        )

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes keep their gradients on their rank."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        """Shorten the gradients to a norm; every rank."""
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    def grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of the gradients; every rank."""
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def align(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, before the model is evaluated; every rank."""
        self.world.spread(model.buffers())

    def in_step(
        self, portions: Iterable[Portion], is_called: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield what is to be evaluated; ranks may have unequal numbers of batches."""
        for portion in portions:
            if portion.samples:
                yield portion
                if is_called():
                    yield None
                    return

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict; every rank, rank 0's answer is used."""
        return model.state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict; every rank, rank 0's answer is used."""
        return optimizer.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take back what `model_state` returned; every rank, with the same state."""
        model.load_state_dict(state)

    def load_optimizer(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Take back what `optimizer_state` returned; every rank, with the same state."""
        optimizer.load_state_dict(dict(state))

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors laid out as the model's parameters in one piece each; every rank."""
        return dict(tensors)

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this rank holds of tensors, whole ones or the model's own."""
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def share_model(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Load a state that only rank 0 holds into the models of all ranks; every rank."""
        if self.world.is_main and state is not None:
            model.load_state_dict(state)
        spread_weights(model, self.world)

    def save_parts(
        self, path: str | Path, model: nn.Module, optimizer: Optimizer
    ) -> dict[str, Any]:
        """Return what a snapshot holds of model and optimizer; every rank, rank 0's is used."""
        return {
            "model": self.model_state(model),
            "optimizer": self.optimizer_state(model, optimizer),
        }

    def saved(self, path: str | Path) -> None:
        """Tidy up once the snapshot is written; every rank."""

    def load_parts(
        self, path: str | Path, content: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Load model and optimizer from a snapshot, whichever strategy wrote it; every rank."""
        whole = read_shards(path, content["shards"]) if "shards" in content else content
        self.load_model(model, whole["model"])
        self.load_optimizer(model, optimizer, whole["optimizer"])
