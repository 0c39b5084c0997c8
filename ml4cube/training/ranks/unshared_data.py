"""Share a training loader out over the ranks, or warn that ranks train on the same samples."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.inputs.identity import digest
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import kept_rng


class Unshared(NamedTuple):
    """The data of a loader that takes no account of other ranks."""

    kind: str
    # Digest of its first and last item and of the chosen indices: it differs between ranks that
    # have data of their own.
    content: str


def share_out(loader: Any, world: World) -> bool:
    """Share a training loader out over ranks that have the same data; every rank."""
    if world.size == 1:
        return False
    with kept_rng(world.device):
        mine = unshared(loader)
    found = world.gather_objects(mine)
    same_everywhere = mine is not None and found.count(mine) == world.size
    if same_everywhere and hasattr(loader, "share_out"):
        batches = len(loader)
        loader.share_out()
        _warn(
            world,
            f"train_data was made without parallel=True; its {batches} batches are now shared "
            f"out over {world.size} ranks, {len(loader)} each. A scheduler made for {batches} "
            "steps is too long: use prep_dataloader(..., parallel=True)",
        )
        return True
    for same in {data for data in found if data is not None and found.count(data) > 1}:
        _warn(
            world,
            f"train_data ({same.kind}) is not shared out: {found.count(same)} ranks train on the "
            "same samples in every epoch. Use prep_dataloader(..., parallel=True), give a "
            "DataLoader sampler=DistributedSampler(dataset), or give each rank its own data",
        )
    return False


def _warn(world: World, message: str) -> None:
    if world.is_main:
        warnings.warn(message, UserWarning, stacklevel=3)


def unshared(loader: Any) -> Unshared | None:
    """Return the data of a loader, or None where it may differ between ranks, as in streams."""
    if isinstance(loader, list | tuple):
        return _describe(loader, loader, len(loader), "batches")
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        return None
    if hasattr(loader, "share_out"):
        if loader.parallel:
            return None
        return _describe(loader, dataset, loader.num_samples, "samples")
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) or not isinstance(sampler, Sized):
        return None
    # A user's sampler may share out by itself, but not if it takes every sample.
    if type(sampler).__module__ != "torch.utils.data.sampler" and len(sampler) < len(dataset):
        return None
    return _describe(loader, dataset, len(sampler), "samples", getattr(sampler, "indices", None))


def _describe(loader: Any, data: Any, count: int, unit: str, chosen: Any = None) -> Unshared | None:
    kind = type(loader).__name__
    if data is not loader:
        kind += f" of {type(data).__name__}"
    try:
        content = [_item(data, 0), _item(data, len(data) - 1), digest(chosen)]
    except Exception:  # an empty dataset, or one whose items cannot be read one by one
        return None
    return Unshared(f"{kind}, {count} {unit}", " ".join(content))


def _item(data: Any, index: int) -> str:
    """Return the digest of an item, or "drawn" if it differs from call to call."""
    first, second = digest(data[index]), digest(data[index])
    return first if first == second else "drawn"
