"""How a model lies on the ranks: whole on each, its gradients averaged.

Everything that depends on it stands here, so another way of spreading a model is another class
with these methods. Methods marked "every rank" are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ml4cube.training.files.shard_files import read_shards
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import spread_weights

if TYPE_CHECKING:
    from ml4cube.training.run.feed import Portion


class Strategy:
    """The model is whole on every rank, and gradients are averaged over the ranks.

    Parameters
    ----------
    world : World
        The ranks.
    find_unused_parameters : bool
        Whether some parameters may get no gradient in a step.
    """

    lockstep = False  # whether ranks must run the model equally often in every step

    def __init__(self, world: World, *, find_unused_parameters: bool = False) -> None:
        self.world = world
        self.find_unused_parameters = find_unused_parameters

    def trainable(self, model: nn.Module) -> tuple[bool, ...]:
        """Say which parameters are trained now, as far as this rank knows.

        Parameters
        ----------
        model : torch.nn.Module
            The model that is trained.

        Returns
        -------
        tuple of bool
            One per parameter.
        """
        return tuple(parameter.requires_grad for parameter in model.parameters())

    def agree(self, model: nn.Module) -> None:
        """Let every rank train the parameters that rank 0 trains; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that is trained.
        """
        flags = self.world.share(self.trainable(model))
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)

    def place(self, model: nn.Module) -> nn.Module:
        """Bring the model to the device, before anything is loaded into it.

        Parameters
        ----------
        model : torch.nn.Module
            As the user gave it.

        Returns
        -------
        torch.nn.Module
            The same model.
        """
        return model.to(self.world.device)

    def shard(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Return the model that is trained, before anything is loaded into it; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        optimizer : torch.optim.Optimizer or None
            Over its parameters.

        Returns
        -------
        torch.nn.Module
            The same model; asked again, nothing changes.
        """
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the user's own model with the weights that training came to; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was trained.

        Returns
        -------
        torch.nn.Module
            The same model.
        """
        return model

    def wrap(self, model: nn.Module, forward: nn.Module) -> nn.Module:
        """Return what training calls; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        forward : torch.nn.Module
            The same, compiled perhaps.

        Returns
        -------
        torch.nn.Module
            Averages, in its backward pass, the gradients of the parameters that are trained now;
            to be wrapped anew when others are.
        """
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
        """Return a context whose backward passes keep their gradients on their rank.

        Parameters
        ----------
        module : torch.nn.Module
            From `wrap`.

        Returns
        -------
        context manager
            For all batches of a window but its last.
        """
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        """Shorten the gradients to a norm; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        norm : float
            Largest norm over all parameters.

        Returns
        -------
        torch.Tensor
            The norm before, on the device.
        """
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    def grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of the gradients; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.

        Returns
        -------
        torch.Tensor
            Over all parameters, on the device.
        """
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def align(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, before the model is evaluated; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        """
        self.world.spread(model.buffers())

    def in_step(
        self, portions: Iterable[Portion], is_called: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield what is to be evaluated; ranks may have unequal numbers of batches.

        Parameters
        ----------
        portions : iterable of Portion
            Those of this rank.
        is_called : callable
            Whether this rank is wanted elsewhere.

        Yields
        ------
        Portion or None
            Where `samples` is 0, the forward pass is run but does not count. None, once and
            last, where evaluation is cut off.
        """
        for portion in portions:
            if portion.samples:
                yield portion
                if is_called():
                    yield None
                    return

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict; every rank, rank 0's answer is used.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.

        Returns
        -------
        dict
            Whole tensors under the names that the model itself gives.
        """
        return model.state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict; every rank, rank 0's answer is used.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        optimizer : torch.optim.Optimizer
            Its optimizer.

        Returns
        -------
        dict
            Whole tensors.
        """
        return optimizer.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take back what `model_state` returned; every rank, with the same state.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        state : mapping
            Whole tensors.
        """
        model.load_state_dict(state)

    def load_optimizer(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Take back what `optimizer_state` returned; every rank, with the same state.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        optimizer : torch.optim.Optimizer
            Its optimizer.
        state : mapping
            Whole tensors.
        """
        optimizer.load_state_dict(dict(state))

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors laid out as the model's parameters in one piece each; every rank.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor
            Such as an average of the weights.

        Returns
        -------
        dict
            Whole tensors; rank 0's are used.
        """
        return dict(tensors)

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this rank holds of tensors, whole ones or the model's own.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor
            Named as the model's.

        Returns
        -------
        dict
            Plain tensors; of the model's own, they share memory.
        """
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def share_model(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Load a state that only rank 0 holds into the models of all ranks; every rank.

        Parameters
        ----------
        model : torch.nn.Module
            The model that was placed.
        state : mapping or None
            Whole tensors; None on the other ranks.
        """
        if self.world.is_main and state is not None:
            model.load_state_dict(state)
        spread_weights(model, self.world)

    def save_parts(
        self, path: str | Path, model: nn.Module, optimizer: Optimizer
    ) -> dict[str, Any]:
        """Return what a snapshot holds of model and optimizer; every rank, rank 0's is used.

        Parameters
        ----------
        path : str or Path
            Where the snapshot will be written.
        model : torch.nn.Module
            The model that was placed.
        optimizer : torch.optim.Optimizer
            Its optimizer.

        Returns
        -------
        dict
            What `load_parts` takes.
        """
        return {
            "model": self.model_state(model),
            "optimizer": self.optimizer_state(model, optimizer),
        }

    def saved(self, path: str | Path) -> None:
        """Tidy up once the snapshot is written; every rank.

        Parameters
        ----------
        path : str or Path
            The snapshot.
        """

    def load_parts(
        self, path: str | Path, content: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Take back model and optimizer from a snapshot, whichever strategy wrote it; every rank.

        Parameters
        ----------
        path : str or Path
            The snapshot.
        content : mapping
            What it holds.
        model : torch.nn.Module
            The model that was placed.
        optimizer : torch.optim.Optimizer
            Its optimizer.
        """
        whole = read_shards(path, content["shards"]) if "shards" in content else content
        self.load_model(model, whole["model"])
        self.load_optimizer(model, optimizer, whole["optimizer"])
