"""Which samples a rank gets: training loaders are shared out, validation counts each sample once.

What cannot be shared out in training, and is the same on several ranks, is warned of by name.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.inputs.identity import digest
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import capture_rng, kept_rng, restore_rng

_CPU = torch.device("cpu")
# Arguments of a DataLoader that choose samples; the others are its settings.
_CHOOSE_SAMPLES = {"shuffle", "sampler", "batch_sampler", "drop_last"}


class UnsharedData(NamedTuple):
    """The data of a loader that takes no account of other ranks, to be compared between ranks."""

    description: str
    # Digest of the first and last item and of the chosen indices: it differs between ranks that
    # have data of their own.
    content: str


def share_out(loader: Any, world: World) -> bool:
    """Share a loader out if all ranks have the same data, and return True if it was.

    Warn of the data that several ranks have, but that cannot be shared out here. Every rank must
    call this.
    """
    if world.size == 1:
        return False
    with kept_rng(world.device):
        # Random transforms then give the same on all ranks that have the same data.
        restore_rng(world.broadcast(capture_rng(_CPU)), _CPU)
        own_data = find_unshared(loader)
    ranks_with = Counter(data for data in world.gather_objects(own_data) if data is not None)
    same_everywhere = own_data is not None and ranks_with[own_data] == world.size
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
    for data, ranks in ranks_with.items():
        if ranks > 1:
            _warn(
                world,
                f"train_data ({data.description}) is not shared out: {ranks} ranks train on the "
                "same samples in every epoch. Use prep_dataloader(..., parallel=True), give a "
                "DataLoader sampler=DistributedSampler(dataset), or give each rank its own data",
            )
    return False


def find_unshared(loader: Any) -> UnsharedData | None:
    """Describe the data of a loader; None if it is shared out, or may be (a stream, a sampler)."""
    if isinstance(loader, list | tuple):
        return _describe(loader, loader, f"{len(loader)} batches")
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        return None
    if hasattr(loader, "share_out"):  # a loader of ours
        if loader.parallel:
            return None
        return _describe(loader, dataset, f"{loader.num_samples} samples")
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return None
    sampler = getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) or not isinstance(sampler, Sized):
        return None
    # A sampler that is not torch's and takes only some of the samples may share out by itself.
    if type(sampler).__module__ != "torch.utils.data.sampler" and len(sampler) < len(dataset):
        return None
    indices = getattr(sampler, "indices", None)
    return _describe(loader, dataset, f"{len(sampler)} samples", indices)


def _describe(loader: Any, data: Any, count: str, indices: Any = None) -> UnsharedData | None:
    kind = type(loader).__name__
    if data is not loader:
        kind += f" of {type(data).__name__}"
    try:
        content = [_item_digest(data, 0), _item_digest(data, len(data) - 1), digest(indices)]
    except Exception:  # an empty dataset, or one whose items cannot be read one by one
        return None
    return UnsharedData(f"{kind}, {count}", " ".join(content))


def _item_digest(data: Any, index: int) -> str:
    """Return the digest of an item, or "random" if it differs with the same global generators."""
    with kept_rng(_CPU):
        first = digest(data[index])
    second = digest(data[index])
    if first == second:
        return first
    return "random"


def _warn(world: World, message: str) -> None:
    if world.is_main:
        warnings.warn(message, UserWarning, stacklevel=3)


def exact_loader(loader: Any, world: World) -> Any:
    """Return a loader, or a dict of them, that gives every sample exactly once over all ranks."""
    # A loader without a DistributedSampler stays as it is, even if it gives every rank all samples:
    # a mean over all of them is then still exact.
    if isinstance(loader, Mapping):
        return {name: exact_loader(item, world) for name, item in loader.items()}
    if hasattr(loader, "for_validation"):  # a loader of ours may drop samples in training
        return loader.for_validation()
    if not isinstance(loader, DataLoader):
        return loader
    owner: Any = loader
    if type(loader.batch_sampler) is BatchSampler:
        owner = loader.batch_sampler
    sampler, batch_size = owner.sampler, owner.batch_size
    # DistributedSampler pads or drops; a subclass with another __iter__ may do neither.
    if (
        not isinstance(sampler, DistributedSampler)
        or type(sampler).__iter__ is not DistributedSampler.__iter__
    ):
        return loader
    dataset: Any = sampler.dataset
    samples_of_rank = range(world.rank, len(dataset), world.size)
    return with_sampler(loader, samples_of_rank, batch_size=batch_size)


def with_sampler(loader: DataLoader[Any], sampler: Any, **changed: Any) -> DataLoader[Any]:
    """Return a copy of a DataLoader with another sampler and some settings changed."""
    names = inspect.signature(DataLoader).parameters.keys() - _CHOOSE_SAMPLES
    settings = {name: getattr(loader, name) for name in names}
    plain: DataLoader[Any] = DataLoader(sampler=sampler, **settings | changed)
    # The copy may be of a user's subclass, whose __iter__ changes the batches.
    copied = copy.copy(loader)
    vars(copied).update(vars(plain))
    return copied
