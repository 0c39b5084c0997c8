"""Validation over ranks: every sample counts exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ml4cube.training.ranks.dist import World

_KEPT = (
    "dataset",
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def exact_loader(loader: Any, world: World) -> Any:
    """Return a loader, or a dict of them, that gives every sample exactly once over all ranks."""
    # Loaders that shard without padding and loaders that give every rank all samples are returned
    # as they are: sums weighted by samples are exact for both. Our own loaders, made for training,
    # drop samples to make ranks and batches equal. A `DistributedSampler` pads or drops.
    if isinstance(loader, Mapping):
        return {name: exact_loader(item, world) for name, item in loader.items()}
    if hasattr(loader, "for_validation"):
        return loader.for_validation()
    if not isinstance(loader, DataLoader):
        return loader
    sampler, size = loader.sampler, loader.batch_size
    if type(loader.batch_sampler) is BatchSampler:
        sampler, size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
    # One that iterates in a way of its own, as that of `ml4cube.datasets`, need not pad.
    if (
        not isinstance(sampler, DistributedSampler)
        or type(sampler).__iter__ is not DistributedSampler.__iter__
    ):
        return loader
    return resampled(loader, dealt(sampler.dataset, world), batch_size=size)


def dealt(dataset: Any, world: World) -> range:
    """Return the samples of a rank: uneven by one at most, never padded."""
    return range(world.rank, len(dataset), world.size)


def resampled(loader: DataLoader[Any], sampler: Any, **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader like another one, but for its sampler and some settings."""
    settings = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(sampler=sampler, **settings | changed)
