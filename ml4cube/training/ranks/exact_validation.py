"""Validation over ranks: every sample counts exactly once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.ranks.dist import World

# Arguments of a DataLoader that choose samples; the others are its settings.
_CHOOSE_SAMPLES = {"shuffle", "sampler", "batch_sampler", "drop_last"}


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
