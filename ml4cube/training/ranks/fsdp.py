"""Shard models that do not fit on one GPU: every rank holds a part of each parameter (FSDP2).

The user's own model stays whole, in main memory. A copy of it is sharded and trained, and its
weights are copied back at the end. A shard is a range of rows along the first dim, as in torch's
`fully_shard`. Snapshots hold whole tensors, gathered in main memory of rank 0.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, listed
from ml4cube.loading.handover import to_device
from ml4cube.training.inputs.batches import Portion
from ml4cube.training.inputs.options import DTYPES, Options
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.strategy import Strategy, broadcast_model

logger = logging.getLogger(__name__)

_GROUP_SIZE = 1_000_000  # parameters, at least
_LISTS = nn.ModuleList | nn.ModuleDict  # which are never called themselves, only their members


def make_strategy(world: World, options: Options) -> Strategy:
    """Return the strategy named in the options."""
    _size_or_classes(options.shard_modules)  # refuses anything else, also on one rank
    is_sharded = options.strategy == "fsdp" and world.size > 1  # one rank has nothing to shard
    if is_sharded:
        return Sharded(world, options)
    return Strategy(world, options)


class Sharded(Strategy):
    """Every rank holds a shard of each parameter, of its gradient and of the optimizer's state."""

    # While a group of modules computes, it is whole on every rank; afterwards it is freed. So a
    # rank needs the memory of the model divided by the number of ranks, plus that of the largest
    # group. Every rank must use the same modules in every step.

    is_sharded = True

    def __init__(self, world: World, options: Options) -> None:
        super().__init__(world, options)
        _import_fully_shard()  # fails before training starts
        self._user_model: nn.Module | None = None  # set when a copy of it is sharded
        self._user_parameters: list[nn.Parameter] = []
        # Of the sharded copy: modules that are gathered on their own, parameters by name, and
        # which of these were trainable when last compared with the user's model.
        self._groups: list[Any] = []
        self._parameters: dict[str, Any] = {}
        self._flags: list[bool] = []

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
        if self._user_model is not None:
            return model
        broadcast_model(model, self.world)  # like DDP, start from the weights of rank 0
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        sharded = copy.deepcopy(model)
        groups = pick_groups(sharded, self.options.shard_modules)
        self._groups = [*groups.values(), sharded]
        fully_shard, policy_of = _import_fully_shard()
        half = DTYPES[self.options.precision]
        for module in self._groups:
            # Parameters travel in half precision, their gradients do not. The rest gets the input
            # of the model, which must keep its digits, and BatchNorm computes in float32.
            policy = policy_of()
            if half and module is not sharded and not _has_batch_norm(module):
                policy = policy_of(half, torch.float32)
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self._parameters = dict(sharded.named_parameters())
        self._user_parameters = list(model.parameters())
        self._flags = super().trainable_flags(self._user_parameters)
        logger.info("model sharded in %d groups: %s", len(groups) + 1, [*groups, "the rest"])
        if optimizer is not None:
            _move_optimizer(optimizer, model, self._parameters)
        self._user_model = model
        return sharded

    def trainable_flags(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return for each parameter whether it is trained, here and in the user's model."""
        # Users may freeze parameters of their model as well as those of the sharded copy.
        flags = super().trainable_flags(self._user_parameters)
        for parameter, flag, previous in zip(parameters, flags, self._flags, strict=True):
            if flag != previous:
                parameter.requires_grad_(flag)
        self._flags = super().trainable_flags(parameters)
        for parameter, flag in zip(self._user_parameters, self._flags, strict=True):
            parameter.requires_grad_(flag)
        return self._flags

    def wrap(self, model: nn.Module, compiled: nn.Module) -> nn.Module:
        """Return the compiled model, which communicates by itself."""
        return compiled

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which backward passes do not reduce gradients."""
        for group in self._groups:
            group.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for group in self._groups:
                group.set_requires_gradient_sync(True, recurse=False)

    def check_outside(self, names: Collection[str]) -> None:
        """Refuse parameters outside the model."""
        if names:
            raise InvalidTypeError(
                f"with strategy='fsdp' the optimizer must hold parameters of the model alone, got "
                f"{listed(names)} besides; make these part of the model, or use strategy='ddp'"
            )

    def clip(self, parameters: Iterable[Tensor], norm: float) -> Tensor:
        """Clip the gradients by their norm over all ranks, and return what it was; every rank."""
        return _whole_tensor(super().clip(parameters, norm))

    def in_lockstep(
        self, portions: Iterable[Portion], must_cut: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield equally many portions on every rank, filled up with portions of no samples."""
        remaining = (portion for portion in portions if portion.samples)
        filler: Portion | None = None  # the last batch of this rank, to run the model on
        try:
            while True:
                portion = next(remaining, None)
                any_left, any_without_filler, any_must_cut = self.world.maximum(
                    [portion is not None, portion is None and filler is None, must_cut()]
                )
                if any_must_cut:
                    yield None
                    return
                if not any_left:
                    return
                if any_without_filler:
                    # A rank that never had a batch takes one of another rank.
                    cpu = torch.device("cpu")
                    batch = None
                    if portion is not None:
                        batch = to_device(portion.batch, cpu)
                    batches = self.world.gather_objects(batch)
                    batch = next(batch for batch in batches if batch is not None)
                    filler = filler or Portion(to_device(batch, self.world.device), 0, 0.0)
                if portion is not None:
                    filler = portion._replace(samples=0, weight=0.0)
                yield portion or filler
        finally:
            for group in self._groups:  # or the next pass would use the gathered, older parameters
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
        targets = model.state_dict()
        model.load_state_dict(
            {name: _shard_like(targets.get(name), v) for name, v in state.items()}
        )

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of whole tensors; every rank, with the same state."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sharded: dict[int, dict[str, Any]] = {}
        for index, entry in state["state"].items():
            shards = {name: _shard_like(parameters[index], v) for name, v in entry.items()}
            unsharded = {name: v for name, v in entry.items() if shards[name] is v}  # e.g. counters
            sharded[index] = shards | copy.deepcopy(unsharded)
        optimizer.load_state_dict({**state, "state": sharded})

    def local_shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of tensors, which are whole or already sharded."""
        shards = {n: _shard_like(self._parameters.get(n), v.detach()) for n, v in tensors.items()}
        for name, shard in shards.items():
            if _is_sharded(shard):
                shards[name] = shard.to_local()
        return shards

    def gather_tensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors of which each rank has its `local_shards`; every rank."""
        tensors = {n: _from_local(self._parameters.get(n), s) for n, s in shards.items()}
        return dict(self._gather(tensors))

    def load_from_main(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Load this rank's shards of a state that only rank 0 has; every rank."""
        if self._user_model is None:
            super().load_from_main(model, state)
        else:
            super().load_from_main(self._user_model, state)
            self.load_model(model, self._user_model.state_dict())

    def unshard(self, model: nn.Module) -> nn.Module:
        """Copy the weights to the user's model in main memory; every rank."""
        if self._user_model is None:
            return model
        targets, extra_state = self._user_model.state_dict(), {}
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                targets[name].copy_(_whole_tensor(value))
            else:
                extra_state[name] = value
        self._user_model.load_state_dict({**targets, **extra_state})
        return self._user_model

    def _gather(self, value: Any) -> Any:
        """Gather all tensors in main memory of rank 0; other ranks get None."""
        if isinstance(value, Tensor):
            whole = _whole_tensor(value.detach())
            if not self.world.is_main:
                return None
            return whole.to("cpu", copy=True)
        if isinstance(value, Mapping):
            return {key: self._gather(item) for key, item in value.items()}
        return value


def _size_or_classes(shard_modules: Any) -> int | tuple[type[nn.Module], ...]:
    """Return the least number of parameters of a group, or the classes of modules that form one."""
    if shard_modules is None:
        return _GROUP_SIZE
    if type(shard_modules) is int and shard_modules >= 1:
        return shard_modules
    classes = (shard_modules,)
    if isinstance(shard_modules, Sequence):
        classes = tuple(shard_modules)
    if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise InvalidTypeError(
            "shard_modules must be a number of parameters, a class of modules or a list of them, "
            f"got {shard_modules!r}"
        )
    return classes


def pick_groups(model: nn.Module, shard_modules: Any = None) -> dict[str, nn.Module]:
    """Return the modules that are gathered on their own; the others form one more group.

    These are the modules of the classes given, or members of lists and sequences of modules that
    have enough parameters.
    """
    chosen = _size_or_classes(shard_modules)
    if isinstance(chosen, tuple) and not any(isinstance(m, chosen) for m in model.modules()):
        raise InvalidValueError(f"the model has no such module as shard_modules={shard_modules!r}")
    members = _members_of_containers(model)
    groups: dict[str, nn.Module] = {}
    grouped: set[nn.Parameter] = set()
    for name, module in reversed(list(model.named_modules())):  # a module after its submodules
        ungrouped = set(module.parameters()) - grouped
        if isinstance(chosen, tuple):
            fits = name != "" and isinstance(module, chosen)
        else:
            fits = module in members and sum(p.numel() for p in ungrouped) >= chosen
        if fits and not _has_tied_parameters(model, module):
            groups[name] = module
            grouped |= ungrouped
    return groups


def _members_of_containers(model: nn.Module) -> set[nn.Module]:
    """Return the members of lists and sequences of modules, without lists inside them."""
    members: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, _LISTS | nn.Sequential):
            members.update(m for m in container.children() if not isinstance(m, _LISTS))
    return members


def _has_tied_parameters(model: nn.Module, module: nn.Module) -> bool:
    """Return True if a module shares a parameter with modules outside of it."""
    parameters, submodules = set(module.parameters()), set(module.modules())
    others = (other for other in model.modules() if other not in submodules)
    return any(p in parameters for other in others for p in other.parameters(recurse=False))


def _move_optimizer(
    optimizer: Optimizer, model: nn.Module, sharded: Mapping[str, nn.Parameter]
) -> None:
    """Replace the parameters of a model in its optimizer by those of the sharded copy."""
    replacements: dict[Tensor, nn.Parameter] = {
        parameter: sharded[name] for name, parameter in model.named_parameters()
    }
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(p, p) for p in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in replacements]:
        new, state = replacements[old], optimizer.state.pop(old)
        optimizer.state[new] = {name: _shard_like(new, value) for name, value in state.items()}


def _check_state(optimizer: Optimizer) -> None:
    """Refuse state of another shape than its parameter, which could not be sharded again."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if _is_sharded(value) and value.shape != parameter.shape:
                raise InvalidTypeError(
                    f"{type(optimizer).__name__} keeps {name!r} in another shape than its "
                    "parameter, which strategy='fsdp' cannot save; use another optimizer"
                )


def _import_fully_shard() -> tuple[Any, Any]:
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise InvalidValueError(
            f"strategy='fsdp' needs torch 2.6 or newer, got {torch.__version__}"
        ) from None
    return fully_shard, MixedPrecisionPolicy


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules())


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "full_tensor")


def _whole_tensor(value: Tensor) -> Tensor:
    """Gather a tensor, if it is sharded; every rank."""
    whole: Tensor = value.full_tensor() if _is_sharded(value) else value  # type: ignore[attr-defined]
    return whole


def _shard_like(like: Any, value: Any) -> Any:
    """Return this rank's shard of a whole tensor; anything not of the shape of `like` as it is."""
    is_whole = isinstance(value, Tensor) and not _is_sharded(value)
    if not is_whole or not _is_sharded(like) or value.shape != like.shape:
        return value
    mesh = like.device_mesh
    pieces, rank = value.chunk(mesh.size()), mesh.get_local_rank()
    return _from_local(like, pieces[rank] if rank < len(pieces) else value[:0])


def _from_local(like: Any, shard: Tensor) -> Tensor:
    """Return the sharded tensor of which this rank has a shard, if `like` is sharded."""
    if not _is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    copied = shard.to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        copied, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
