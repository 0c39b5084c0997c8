"""Shard models that do not fit on one GPU: every rank holds a part of each parameter (FSDP2).

The user's own model stays whole, in main memory. A copy of it is sharded and trained, and its
weights are copied back at the end. A shard is a range of rows along the first dim, as in torch's
`fully_shard`. Snapshots hold whole tensors, gathered in main memory of rank 0.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.loading.handover import to_device
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.steps import Portion
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.strategy import Strategy, spread_weights

logger = logging.getLogger(__name__)

DEFAULT_GROUP = 1_000_000  # parameters per group
_LISTS = nn.ModuleList | nn.ModuleDict


def make_strategy(world: World, options: Options) -> Strategy:
    """Return the strategy named in the options."""
    _check_groups(options.shard_modules)
    is_sharded = options.strategy == "fsdp" and world.size > 1  # one rank has nothing to shard
    return Sharded(world, options) if is_sharded else Strategy(world, options)


class Sharded(Strategy):
    """Every rank holds a shard of each parameter, of its gradient and of the optimizer's state."""

    # Modules are gathered in groups: while a group computes, it is whole on every rank, and freed
    # afterwards. So a rank needs the memory of the model divided by the number of ranks, plus that
    # of the largest group. Every rank must use the same modules in every step.

    is_sharded = True

    def __init__(self, world: World, options: Options) -> None:
        super().__init__(world, options)
        _fully_shard()
        self._own_model: nn.Module | None = None  # the user's
        self._groups: list[Any] = []  # modules of the sharded copy
        self._parameters: dict[str, Any] = {}  # of the sharded copy
        self._flags: tuple[bool, ...] = ()  # requires_grad of each parameter, when last checked

    def place(self, model: nn.Module) -> nn.Module:
        """Leave the model in main memory, because it may not fit on a device."""
        scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
        if scalars:
            raise InvalidTypeError(
                f"strategy='fsdp' cannot shard the scalar parameters {scalars}; use shape (1,)"
            )
        return model.cpu()

    def shard(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Shard a copy of the model, and give its parameters to the optimizer; every rank."""
        if self._own_model is not None:
            return model
        spread_weights(model, self.world)  # like DDP, start from the weights of rank 0
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        sharded = copy.deepcopy(model)
        fully_shard = _fully_shard()
        groups = pick_groups(sharded, self.options.shard_modules)
        self._groups = [*groups.values(), sharded]
        for module in self._groups:
            fully_shard(module, mesh=mesh)
        self._parameters = dict(sharded.named_parameters())
        logger.info("model sharded in %d groups: %s", len(groups) + 1, [*groups, "the rest"])
        if optimizer is not None:
            _move_optimizer(optimizer, model, self._parameters)
        self._own_model = model
        return sharded

    def trainable(self, model: nn.Module) -> tuple[bool, ...]:
        """Return which parameters are trained, after copying changes between both models."""
        if self._own_model is None:
            return super().trainable(model)
        own = super().trainable(self._own_model)
        for parameter, flag, before in zip(
            model.parameters(), own, self._flags or own, strict=True
        ):
            if flag != before:
                parameter.requires_grad_(flag)
        self._flags = super().trainable(model)
        for parameter, flag in zip(self._own_model.parameters(), self._flags, strict=True):
            parameter.requires_grad_(flag)
        return self._flags

    def wrap(self, model: nn.Module, forward: nn.Module) -> nn.Module:
        """Return the model, which communicates by itself."""
        return forward

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Do not reduce gradients over ranks in the body."""
        for group in self._groups:
            group.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for group in self._groups:
                group.set_requires_gradient_sync(True, recurse=False)

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        """Clip the gradients by their norm over all ranks, and return what it was; every rank."""
        return _gather_shards(super().clip(model, norm))

    def in_step(
        self, portions: Iterable[Portion], is_called: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield equally many portions on every rank, filled up with portions of no samples."""
        source = (portion for portion in portions if portion.samples)
        filler: Portion | None = None
        try:
            while True:
                portion = next(source, None)
                any_left, needs_filler, stop = self.world.maximum(
                    [portion is not None, portion is None and filler is None, is_called()]
                )
                if stop:
                    yield None
                if stop or not any_left:
                    return
                if needs_filler:
                    # A rank that never had a batch gets one of another rank to run the model on.
                    own = None if portion is None else to_device(portion.batch, torch.device("cpu"))
                    batches = self.world.gather_objects(own)
                    batch = next(batch for batch in batches if batch is not None)
                    filler = filler or Portion(to_device(batch, self.world.device), 0, 0.0)
                if portion is not None:
                    filler = portion._replace(samples=0, weight=0.0)
                yield portion or filler
        finally:
            for group in self._groups:  # gathered parameters will soon be out of date
                group.reshard()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Gather the model in main memory of rank 0, one tensor after the other."""
        return dict(self._gather(model.state_dict()))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Gather the optimizer's state in main memory of rank 0, one tensor after the other."""
        _check_state(optimizer)
        return dict(self._gather(optimizer.state_dict()))

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of whole tensors; every rank, with the same state."""
        own = model.state_dict()
        model.load_state_dict({name: _shard(value, own.get(name)) for name, value in state.items()})

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of whole tensors; every rank, with the same state."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sharded: dict[int, dict[str, Any]] = {}
        for index, entry in state["state"].items():
            shards = {name: _shard(value, parameters[index]) for name, value in entry.items()}
            whole = {name: v for name, v in entry.items() if shards[name] is v}  # such as counters
            sharded[index] = shards | copy.deepcopy(whole)
        optimizer.load_state_dict({**state, "state": sharded})

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather tensors of which every rank has its `parts`; every rank."""
        shards = {n: _from_local(value, self._parameters.get(n)) for n, value in tensors.items()}
        return dict(self._gather(shards))

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's shards of tensors, which are whole or already sharded."""
        return {
            name: _local(_shard(value.detach(), self._parameters.get(name)))
            for name, value in tensors.items()
        }

    def share_model(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Load this rank's shards of a state that only rank 0 has; every rank."""
        if self._own_model is None:
            return super().share_model(model, state)
        super().share_model(self._own_model, state)
        return self.load_model(model, self._own_model.state_dict())

    def finish(self, model: nn.Module) -> nn.Module:
        """Copy the weights to the user's own model in main memory; every rank."""
        if self._own_model is None:
            return model
        targets, extra = self._own_model.state_dict(), {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                targets[name].copy_(_gather_shards(value))
            else:
                extra[name] = value
        self._own_model.load_state_dict({**targets, **extra})
        return self._own_model

    def _gather(self, value: Any) -> Any:
        """Gather all tensors in main memory of rank 0; other ranks get None."""
        if isinstance(value, torch.Tensor):
            whole = _gather_shards(value.detach())
            return whole.to("cpu", copy=True) if self.world.is_main else None
        if isinstance(value, Mapping):
            return {key: self._gather(item) for key, item in value.items()}
        return value


def _check_groups(shard_modules: Any) -> None:
    classes = shard_modules if isinstance(shard_modules, Sequence) else [shard_modules]
    are_classes = all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)
    is_size = type(shard_modules) is int and shard_modules >= 1
    if shard_modules is not None and not are_classes and not is_size:
        raise InvalidTypeError(
            "shard_modules must be a number of parameters, a class of modules or a list of them, "
            f"got {shard_modules!r}"
        )


def pick_groups(model: nn.Module, shard_modules: Any = None) -> dict[str, nn.Module]:
    """Return the modules that are gathered on their own; the others form one more group."""
    containers = [m for m in model.modules() if isinstance(m, _LISTS | nn.Sequential)]
    members = {id(member) for container in containers for member in container.children()}
    classes = tuple(shard_modules) if isinstance(shard_modules, Sequence) else shard_modules
    by_size = shard_modules is None or isinstance(shard_modules, int)
    if not by_size and not any(isinstance(module, classes) for module in model.modules()):
        raise InvalidValueError(f"the model has no such module as shard_modules={shard_modules!r}")
    found: dict[str, nn.Module] = {}
    grouped: set[nn.Parameter] = set()
    for name, module in reversed(list(model.named_modules())):  # those inside a module before it
        left = set(module.parameters()) - grouped
        if by_size:
            # Lists and dicts of modules are never called themselves.
            may_be_group = id(module) in members and not isinstance(module, _LISTS)
            may_be_group &= sum(p.numel() for p in left) >= (shard_modules or DEFAULT_GROUP)
        else:
            may_be_group = name != "" and isinstance(module, classes)
        if may_be_group and not _has_tied_parameters(model, module):
            found[name] = module
            grouped |= left
    return found


def _has_tied_parameters(model: nn.Module, module: nn.Module) -> bool:
    """Return True if a module shares a parameter with modules outside of it."""
    mine = {id(p) for p in module.parameters()}
    inside = {id(m) for m in module.modules()}
    return any(
        id(p) in mine
        for other in model.modules()
        if id(other) not in inside
        for p in other.parameters(recurse=False)
    )


def _move_optimizer(
    optimizer: Optimizer, model: nn.Module, sharded: Mapping[str, nn.Parameter]
) -> None:
    """Replace the parameters of a model in its optimizer by those of the sharded copy."""
    new: dict[torch.Tensor, nn.Parameter] = {
        parameter: sharded[name] for name, parameter in model.named_parameters()
    }
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in new]:
        state = optimizer.state.pop(old)
        optimizer.state[new[old]] = {n: _shard(value, new[old]) for n, value in state.items()}


def _check_state(optimizer: Optimizer) -> None:
    """Refuse state of another shape than its parameter, which could not be sharded again."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if _is_sharded(value) and value.shape != parameter.shape:
                raise InvalidTypeError(
                    f"{type(optimizer).__name__} keeps {name!r} in another shape than its "
                    "parameter, which strategy='fsdp' cannot save; use another optimizer"
                )


def _fully_shard() -> Any:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise InvalidValueError(
            f"strategy='fsdp' needs torch 2.6 or newer, got {torch.__version__}"
        ) from None
    return fully_shard


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "full_tensor")


def _gather_shards(value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor; every rank."""
    whole: torch.Tensor = value.full_tensor() if _is_sharded(value) else value  # type: ignore[attr-defined]
    return whole


def _local(value: Any) -> Any:
    """Return this rank's shard as a plain tensor."""
    return value.to_local() if _is_sharded(value) else value


def _shard(whole: Any, like: Any) -> Any:
    """Return this rank's shard of a whole tensor, if `like` is sharded and of the same shape."""
    if _is_sharded(whole) or not _is_sharded(like) or not isinstance(whole, torch.Tensor):
        return whole
    if whole.shape != like.shape:
        return whole
    mesh = like.device_mesh
    pieces, rank = whole.chunk(mesh.size()), mesh.get_local_rank()
    return _from_local(pieces[rank] if rank < len(pieces) else whole[:0], like)


def _from_local(local: Any, like: Any) -> Any:
    """Return a sharded tensor of this rank's shard, if `like` is sharded."""
    if _is_sharded(local) or not _is_sharded(like) or not isinstance(local, torch.Tensor):
        return local
    from torch.distributed.tensor import DTensor

    shard = local.to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
