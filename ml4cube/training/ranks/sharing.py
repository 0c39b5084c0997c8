"""Whether ranks share out what they train on: our loaders are made to, others are warned of."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.ranks.dist import World
from ml4cube.training.state import kept_rng

logger = logging.getLogger(__name__)


class Whole(NamedTuple):
    """What a rank takes that knows nothing of the others."""

    # Of what class it is, and what it loads.
    kind: str
    # Samples, or batches of a list, that this rank takes in an epoch.
    items: int
    # Stands for what the first and the last of them hold, and for which are chosen: ranks with data
    # of their own differ here.
    content: str


def share_out(loader: Any, world: World) -> bool:
    """Share a training loader out among ranks that hold the same data; every rank."""
    if world.size == 1:
        return False
    with kept_rng(world.device):
        mine = whole_of(loader)
    found = world.gather_objects(mine)
    several = [whole for whole in set(found) if whole is not None and found.count(whole) > 1]
    if not several:
        return False
    if found.count(mine) == world.size and hasattr(loader, "share_out"):
        loader.share_out()
        if world.is_main:
            logger.info("train_data was made without parallel=True; its samples are shared out")
        return True
    if world.is_main:
        for whole in several:
            warnings.warn(
                f"train_data ({whole.kind}) is not shared out: {found.count(whole)} ranks each "
                f"train on the same {whole.items} in every epoch. Make it by prep_dataloader(..., "
                "parallel=True), give a DataLoader sampler=DistributedSampler(dataset), or give "
                "each rank data of its own",
                UserWarning,
                stacklevel=2,
            )
    return False


def whole_of(loader: Any) -> Whole | None:
    """Return what a rank takes, if nothing in its loader knows of other ranks."""
    if isinstance(loader, list | tuple):
        return _whole(loader, loader, len(loader), "batches") if loader else None
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__") or not len(dataset):
        return None
    if hasattr(loader, "share_out"):
        if loader.parallel:
            return None
        return _whole(loader, dataset, loader.num_samples, "samples")
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) or not isinstance(sampler, Sized):
        return None
    # Those of torch know of no ranks; one of a user's own, that takes as many as there are, shares
    # nothing.
    if type(sampler).__module__ != "torch.utils.data.sampler" and len(sampler) < len(dataset):
        return None
    return _whole(loader, dataset, len(sampler), "samples", getattr(sampler, "indices", None))


def _whole(loader: Any, data: Any, count: int, unit: str, chosen: Any = None) -> Whole | None:
    kind = type(loader).__name__
    if data is not loader:
        kind += f" of {type(data).__name__}"
    try:
        content = [_item(data, 0), _item(data, len(data) - 1), _digest(chosen)]
    except Exception:  # of a data set whose items are not asked for one by one
        return None
    return Whole(f"{kind}, {count} {unit}", count, " ".join(content))


def _item(data: Any, index: int) -> str:
    """Stands for what an item holds; one that is drawn anew each time stands for none."""
    first, second = _digest(data[index]), _digest(data[index])
    return first if first == second else "drawn"


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple | np.ndarray):
        digest.update(str(len(value)).encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, str | bytes | int | float | bool | None | np.generic):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
