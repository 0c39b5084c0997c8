"""Models that outgrow one GPU: every rank holds a share of each parameter (FSDP2).

The user's own model stays whole, in main memory; a copy of it is cut into shares and trained,
and what came of it is brought back at the end. A share is a run of rows of the first dim, as
torch's `fully_shard` cuts them.

Snapshots are then written by all ranks, see `ml4cube.training.ranks.shard_files`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.batches import to_device
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.steps import Portion
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.shard_files import (
    agreed,
    read_shards,
    remove_old,
    row_range,
    write_shards,
)
from ml4cube.training.ranks.strategy import Strategy, spread_weights

logger = logging.getLogger(__name__)

DEFAULT_GROUP = 1_000_000  # parameters


def make_strategy(world: World, options: Options) -> Strategy:
    """Return the strategy that the options name."""
    if options.strategy == "fsdp":
        return Sharded(world, shard_modules=options.shard_modules)
    return Strategy(world, find_unused_parameters=options.find_unused_parameters)


class Sharded(Strategy):
    """Every rank holds a share of each parameter, of its gradient and of the optimizer's state."""

    # Parameters that are used together are fetched together: while one group of modules computes,
    # it is whole on every rank, and given up again afterwards. So memory per rank is the model's
    # divided by the ranks, plus the largest group.
    # Every rank must use the same modules in every step.

    lockstep = True

    def __init__(self, world: World, *, shard_modules: Any = None) -> None:
        super().__init__(world)
        check_groups(shard_modules)
        _fully_shard()
        self.shard_modules = shard_modules
        self._whole: nn.Module | None = None  # the user's own model
        self._cut: list[Any] = []  # the modules of the copy that is trained, those of groups
        self._shares: dict[str, Any] = {}  # its parameters
        self._flags: tuple[bool, ...] = ()  # whether each is trained, as last seen

    def place(self, model: nn.Module) -> nn.Module:
        """Leave the model in main memory: it need not fit a device."""
        self._check(model)
        return model.cpu() if self.world.size > 1 else super().place(model)

    def shard(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Cut a copy of the model into shares, and hand them to the optimizer; every rank."""
        if self.world.size == 1 or self._whole is not None:
            return model
        spread_weights(model, self.world)  # as DDP does: rank 0's weights count
        # Shares of a model that never was on this device: it may not fit there.
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        cut = copy.deepcopy(model)
        fully_shard = _fully_shard()
        groups = pick_groups(cut, self.shard_modules)
        for module in [*groups.values(), cut]:
            fully_shard(module, mesh=mesh)
        self._cut = [*groups.values(), cut]
        self._shares = dict(cut.named_parameters())
        logger.info("model cut into %d groups: %s", len(groups) + 1, [*groups, "the rest"])
        if optimizer is not None:
            _move_optimizer(optimizer, model, cut)
        self._whole = model
        return cut

    def trainable(self, model: nn.Module) -> tuple[bool, ...]:
        """Say which are trained, be they frozen or unfrozen in the user's own model or its copy."""
        if self._whole is None:
            return super().trainable(model)
        whole = super().trainable(self._whole)
        changed = zip(model.parameters(), whole, self._flags or whole, strict=True)
        for parameter, flag, before in changed:
            if flag != before:
                parameter.requires_grad_(flag)
        self._flags = super().trainable(model)
        for parameter, flag in zip(self._whole.parameters(), self._flags, strict=True):
            parameter.requires_grad_(flag)
        return self._flags

    def wrap(self, model: nn.Module, forward: nn.Module) -> nn.Module:
        """Return the model: it fetches and averages by itself."""
        return forward

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Keep gradients of whole groups on their rank."""
        for part in self._cut:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in self._cut:
                part.set_requires_gradient_sync(True, recurse=False)

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        """Shorten the gradients to a norm over the shares of all ranks; every rank."""
        return _whole(nn.utils.clip_grad_norm_(model.parameters(), norm))

    def in_step(
        self, portions: Iterable[Portion], is_called: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        """Yield as many portions on every rank, stand-ins of no samples where they have run out."""
        if self.world.size == 1:
            yield from super().in_step(portions, is_called)
            return
        source = (portion for portion in portions if portion.samples)
        try:
            yield from self._together(source, is_called)
        finally:
            self._give_up()

    def _together(
        self, source: Iterator[Portion], is_called: Callable[[], bool]
    ) -> Iterator[Portion | None]:
        spare: Portion | None = None
        while True:
            portion = next(source, None)
            here, missing, stop = self.world.maximum(
                [portion is not None, portion is None and spare is None, is_called()]
            )
            if stop:
                yield None
            if stop or not here:
                return
            if missing:
                # A rank without any batch of its own needs one to run its part of the model on.
                own = None if portion is None else to_device(portion.batch, torch.device("cpu"))
                found = self.world.gather_objects(own)
                lent = next(batch for batch in found if batch is not None)
                spare = spare or Portion(to_device(lent, self.world.device), 0, 0.0)
            if portion is not None:
                spare = portion._replace(samples=0, weight=0.0)
            yield portion or spare

    def grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of the gradients over the shares of all ranks; every rank."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return _whole(nn.utils.get_total_norm(gradients))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Gather the model, one tensor after the other; rank 0 keeps them, in main memory."""
        return dict(self._gather(model.state_dict()))

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Gather the optimizer's state, one tensor after the other; rank 0 keeps it."""
        _check_state(optimizer)
        return dict(self._gather(optimizer.state_dict()))

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take this rank's shares out of whole tensors; every rank, with the same state."""
        own = model.state_dict()
        model.load_state_dict({name: _share(value, own.get(name)) for name, value in state.items()})

    def load_optimizer(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Take this rank's shares out of whole tensors; every rank, with the same state."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        cut = {
            index: {
                name: _share(value, parameters[index])
                if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape
                else value
                for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": cut})

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather tensors of which every rank holds its `parts`; every rank."""
        named = {
            name: _from_local(value, self._shares.get(name)) for name, value in tensors.items()
        }
        return dict(self._gather(named))

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's shares of tensors, whole ones or the model's own."""
        return {
            name: _local(_share(value.detach(), self._shares.get(name)))
            for name, value in tensors.items()
        }

    def share_model(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Give every rank its shares of what only rank 0 holds whole; every rank."""
        if self.world.size == 1:
            super().share_model(model, state)
            return
        own, extra = model.state_dict(), {}
        for name, target in own.items():
            if not isinstance(target, torch.Tensor):
                extra[name] = self.world.share(None if state is None else state[name])
                continue
            value = torch.empty(target.shape, dtype=target.dtype)
            if self.world.is_main and state is not None:
                value.copy_(state[name])
            self.world.spread([value])
            _local(target).copy_(_local(_share(value, target)))
        if extra:
            model.load_state_dict({**own, **extra})

    def save_parts(
        self, path: str | Path, model: nn.Module, optimizer: Optimizer
    ) -> dict[str, Any]:
        """Write what this rank holds into a file of its own, and say where all are; every rank."""
        if self.world.size == 1:
            return super().save_parts(path, model, optimizer)
        _check_state(optimizer)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {"shards": write_shards(path, self.world, _local(states), _rows(states))}

    def saved(self, path: str | Path) -> None:
        """Remove the shards of earlier snapshots; every rank, once the main file is written."""
        if self.world.is_main and self.world.size > 1:
            remove_old(path)

    def load_parts(
        self, path: str | Path, content: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Take this rank's shares from a snapshot of any number of ranks; every rank."""
        if self.world.size == 1 or "shards" not in content:
            super().load_parts(path, content, model, optimizer)
            return
        with agreed(self.world) as outcome:
            outcome.append(read_shards(path, content["shards"], self.world.rank, self.world.size))
        (found,) = outcome
        own = model.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        model.load_state_dict({n: _from_local(v, own.get(n)) for n, v in found["model"].items()})
        rows = (content["shards"]["rows"]["optimizer"] or {}).get("state", {})
        state = {
            index: {
                name: _from_local(v, parameters[index]) if name in rows.get(index, ()) else v
                for name, v in entry.items()
            }
            for index, entry in found["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**found["optimizer"], "state": state})

    def finish(self, model: nn.Module) -> nn.Module:
        """Bring the weights back into the user's own model, whole, in main memory; every rank."""
        if self._whole is None:
            return model
        targets, extra = self._whole.state_dict(), {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                targets[name].copy_(_whole(value))
            else:
                extra[name] = value
        if extra:
            self._whole.load_state_dict({**targets, **extra})
        return self._whole

    def _give_up(self) -> None:
        """Give up parameters fetched for a forward pass: they will not be what they were."""
        for part in self._cut:
            part.reshard()

    def _gather(self, value: Any) -> Any:
        """Whole tensors, in main memory, on rank 0; on the others nothing is kept."""
        if isinstance(value, torch.Tensor):
            whole = _whole(value.detach())
            return whole.to("cpu", copy=True) if self.world.is_main else None
        if isinstance(value, Mapping):
            return {key: self._gather(item) for key, item in value.items()}
        return value

    def _check(self, model: nn.Module) -> None:
        scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
        if scalars and self.world.size > 1:
            raise InvalidTypeError(
                f"strategy='fsdp' cannot cut the scalar parameters {scalars}; "
                "give them the shape (1,)"
            )


def check_groups(shard_modules: Any) -> None:
    """Refuse what `pick_groups` cannot read."""
    if isinstance(shard_modules, int) and not isinstance(shard_modules, bool):
        if shard_modules < 1:
            raise InvalidValueError(f"shard_modules={shard_modules} parameters; use 1 or more")
        return
    classes = shard_modules if isinstance(shard_modules, Sequence) else [shard_modules]
    fits = all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)
    if shard_modules is not None and not fits:
        raise InvalidTypeError(
            f"shard_modules={shard_modules!r} is neither a number of parameters nor a class of "
            "modules nor a list of them"
        )


def pick_groups(model: nn.Module, shard_modules: Any = None) -> dict[str, nn.Module]:
    """Say which modules are fetched and given up on their own; what is left forms a last group."""
    if shard_modules is None or isinstance(shard_modules, int):
        least = DEFAULT_GROUP if shard_modules is None else shard_modules
        return _pick_by_size(model, least)
    classes = tuple(shard_modules) if isinstance(shard_modules, Sequence) else shard_modules
    found = {
        name: module
        for name, module in sorted(model.named_modules(), key=lambda item: -item[0].count("."))
        if name and isinstance(module, classes)
    }
    if not found:
        raise InvalidValueError(
            f"shard_modules={shard_modules!r}: the model has no such module inside"
        )
    return {n: m for n, m in found.items() if not _shares(model, m)}


def _pick_by_size(model: nn.Module, least: int) -> dict[str, nn.Module]:
    picked: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str, callable_: bool) -> int:
        """Parameters of the module that belong to no group inside it."""
        inside = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        left = sum(p.numel() for p in module.parameters(recurse=False))
        for key, child in module.named_children():
            left += visit(child, f"{name}.{key}" if name else key, inside)
        # Lists and dicts of modules are never called themselves.
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if callable_ and not is_list and left >= least and not _shares(model, module):
            picked[name] = module
            return 0
        return left

    visit(model, "", False)
    return picked


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module has a parameter in common with what lies outside of it."""
    mine = {id(p) for p in module.parameters()}
    inside = {id(m) for m in module.modules()}
    return any(
        id(p) in mine
        for other in model.modules()
        if id(other) not in inside
        for p in other.parameters(recurse=False)
    )


def _move_optimizer(optimizer: Optimizer, model: nn.Module, cut: nn.Module) -> None:
    """Let an optimizer of the whole model's parameters work on the shares of its copy."""
    names = {id(p): name for name, p in model.named_parameters()}
    shares = dict(cut.named_parameters())
    for group in optimizer.param_groups:
        olds = group["params"]
        group["params"] = [shares[names[id(p)]] if id(p) in names else p for p in olds]
        for old, new in zip(olds, group["params"], strict=True):
            if old is not new and old in optimizer.state:
                optimizer.state[new] = {
                    name: _share(value, new)
                    if isinstance(value, torch.Tensor) and value.shape == new.shape
                    else value
                    for name, value in optimizer.state.pop(old).items()
                }


def _rows(state: Any) -> Any:
    """How many rows each cut tensor has in whole; nothing for those that are not cut."""
    if not isinstance(state, Mapping):
        return state.shape[0] if _is_cut(state) else None
    below = {key: _rows(item) for key, item in state.items()}
    return {key: rows for key, rows in below.items() if rows is not None} or None


def _check_state(optimizer: Optimizer) -> None:
    """Refuse state that is cut otherwise than its parameter, which could not be cut anew."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if _is_cut(value) and value.shape != parameter.shape:
                raise InvalidTypeError(
                    f"{type(optimizer).__name__} keeps {name!r} in another shape than its "
                    "parameter, which strategy='fsdp' cannot save; take another optimizer"
                )


def _fully_shard() -> Any:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise InvalidValueError(
            f"strategy='fsdp' needs torch 2.6 or newer, here is {torch.__version__}"
        ) from None
    return fully_shard


def _is_cut(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "full_tensor")


def _whole(value: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that lies on all ranks; collective."""
    whole: torch.Tensor = value.full_tensor() if _is_cut(value) else value  # type: ignore[attr-defined]
    return whole


def _local(value: Any) -> Any:
    """What this rank holds of tensors."""
    if isinstance(value, Mapping):
        return {key: _local(item) for key, item in value.items()}
    return value.to_local() if _is_cut(value) else value


def _share(whole: Any, like: Any) -> Any:
    """This rank's share of a whole tensor, cut like another."""
    if _is_cut(whole) or not _is_cut(like) or not isinstance(whole, torch.Tensor):
        return whole
    if whole.shape != like.shape:
        return whole
    mesh = like.device_mesh
    start, stop = row_range(like.shape[0], mesh.get_local_rank(), mesh.size())
    return _from_local(whole[start:stop], like)


def _from_local(local: Any, like: Any) -> Any:
    if _is_cut(local) or not _is_cut(like) or not isinstance(local, torch.Tensor):
        return local
    from torch.distributed.tensor import DTensor

    share = local.to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        share, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
