"""Distribute a model over ranks: by default, each has the whole model (DDP).

`Strategy` contains everything that depends on it, so another way is another class with the same
methods. Methods marked "every rank" are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidValueError
from ml4cube.training.files.checkpoint import to_plain
from ml4cube.training.inputs.batches import Portion
from ml4cube.training.inputs.options import Options
from ml4cube.training.ranks.dist import World


def broadcast_model(model: nn.Module, world: World) -> None:
    """Give the model of every rank the state of rank 0's; every rank."""
    state = model.state_dict()
    world.broadcast_tensors(v for v in state.values() if isinstance(v, Tensor))
    extra_state = {name: v for name, v in state.items() if not isinstance(v, Tensor)}
    if extra_state and world.size > 1:
        model.load_state_dict({**state, **world.broadcast(to_plain(extra_state))})


def sum_gradients(tensors: Sequence[Tensor], world: World, divisor: float) -> None:
    """Give tensors the gradients of all ranks, summed and divided; every rank."""
    has_gradient = world.maximum([tensor.grad is not None for tensor in tensors])
    for tensor, on_any_rank in zip(tensors, has_gradient, strict=True):
        if on_any_rank:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            tensor.grad.copy_(world.sum_tensor(tensor.grad)).div_(divisor)


def ddp_devices(world: World) -> list[torch.device] | None:
    """Return the argument `device_ids` of DistributedDataParallel."""
    if world.device.type != "cuda":
        return None
    return [world.device]


class Strategy:
    """Every rank has the whole model, and gradients are averaged over ranks."""

    is_sharded = False  # if so, all ranks must call the model equally often in a step

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.options = world, options
        # Trained parameters, by index, in the order in which the first backward pass since they
        # were wrapped gave their gradients.
        self.gradient_order: list[int] = []

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, before anything is loaded into it."""
        return model.to(self.world.device)

    def shard(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Return the model to train, before anything is loaded into it; every rank."""
        return model

    def unshard(self, model: nn.Module) -> nn.Module:
        """Return the user's model, with the trained weights; every rank."""
        return model

    def check_same(self, tensors: Mapping[str, Any]) -> None:
        """Refuse models that differ between ranks, which would wait for one another; every rank."""
        own = {n: tuple(t.shape) for n, t in tensors.items() if isinstance(t, Tensor)}
        for rank, shapes in enumerate(self.world.gather_objects(own)):
            differing = [n for n in {**own, **shapes} if own.get(n) != shapes.get(n)]
            if differing:
                name, *others = differing
                more = ""
                if others:
                    more = f", and {len(others)} more"
                raise InvalidValueError(
                    f"the model must be the same on all ranks, but {name} has the shape "
                    f"{own.get(name)} on rank {self.world.rank} and {shapes.get(name)} on rank "
                    f"{rank}{more} (None: there is none); make it by the same arguments everywhere"
                )

    def trainable_flags(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return for each parameter of the model to train whether it is trained on this rank."""
        return [parameter.requires_grad for parameter in parameters]

    def sync_trainable(self, parameters: Sequence[nn.Parameter]) -> None:
        """Freeze and unfreeze parameters as rank 0 has them; every rank."""
        flags = self.world.broadcast(self.trainable_flags(parameters))
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to all ranks, before evaluation; every rank."""
        self.world.broadcast_tensors(model.buffers())

    def wrap(self, model: nn.Module, compiled: nn.Module) -> nn.Module:
        """Return the module to call in training, made from the compiled model; every rank."""
        if self.world.size == 1 or not any(p.requires_grad for p in model.parameters()):
            return compiled
        ddp = DistributedDataParallel(
            compiled,
            device_ids=ddp_devices(self.world),
            process_group=self.world.group(self.world.device),
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        if not self.options.find_unused_parameters:
            self._order_buckets(ddp, list(model.parameters()))
        return ddp

    def _order_buckets(self, ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
        """Make DDP reduce gradients as before an interruption; every rank."""
        # After its first backward pass, DDP arranges gradients anew, in the order in which they
        # came. Sums over three and more ranks depend on that to rounding. So a resumed run has to
        # start with the order of the run before it.
        trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
        if trained.keys() != set(self.gradient_order):
            order: list[int] = []
            self.gradient_order = order
            for i, parameter in trained.items():
                _once(parameter, partial(order.append, i))
            return
        gradients = [parameter.grad for parameter in parameters]
        ddp.reducer.prepare_for_backward([])
        for i in self.gradient_order:
            torch.autograd.backward(trained[i], torch.zeros_like(trained[i]))
        ddp.reducer._rebuild_buckets()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients."""
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def check_outside(self, names: Collection[str]) -> None:
        """Refuse parameters outside the model, by name, if they cannot be trained."""

    def average_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Average gradients over ranks, of tensors that are not the model's; every rank."""
        if self.world.size > 1 and tensors:
            sum_gradients(tensors, self.world, self.world.size)

    def clip(self, parameters: Iterable[Tensor], norm: float) -> Tensor:
        """Clip the gradients by their norm, and return what it was; every rank."""
        return nn.utils.clip_grad_norm_(parameters, norm)

    def in_lockstep(
        self, portions: Iterable[Portion], must_cut: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield the portions to evaluate, and a last None if `must_cut` ends the pass early.

        Ranks may have different numbers of them; those of a sharded model all yield as many.
        """
        for portion in portions:
            if portion.samples:  # a step of the user may count none
                yield portion
                if must_cut():
                    yield None
                    return

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict on rank 0; every rank."""
        return model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict on rank 0; every rank."""
        return optimizer.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a state of `model_state`; every rank, with the same state."""
        model.load_state_dict(state)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state of `optimizer_state`; every rank, with the same state."""
        optimizer.load_state_dict(dict(state))

    def local_shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of the model's tensors, or of whole tensors of these names."""
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def gather_tensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return on rank 0 the whole tensors of all ranks' `local_shards`; every rank."""
        return dict(shards)

    def load_from_main(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Load a state that only rank 0 has into the models of all ranks; every rank."""
        if self.world.is_main and state is not None:
            model.load_state_dict(state)
        broadcast_model(model, self.world)


def _once(parameter: nn.Parameter, act: Callable[[], None]) -> None:
    """Call a function when the gradient of a parameter has been computed for the first time."""

    def hook(_: Tensor) -> None:
        handle.remove()
        act()

    handle: Any = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
