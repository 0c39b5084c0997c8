"""Samples as PyTorch tensors: `PTXrDataset` and the loaders of `prep_dataloader`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ml4cube.core.errors import InvalidTypeError, needs_torch
from ml4cube.core.same_scaling import check_same_scaling
from ml4cube.loading.augmentation import Flip, Rotate90
from ml4cube.loading.epochs import LoaderOptions
from ml4cube.loading.handover import Augment, Collate
from ml4cube.loading.loaders import (
    EpochLoader,
    MapLoader,
    SampleLoader,
    ShareSampler,
    make_loader,
)
from ml4cube.loading.tensors import PTXrDataset

with needs_torch("ml4cube.datasets.pytorch"):
    from torch.utils.data import IterableDataset

__all__ = [
    "EpochLoader",
    "Flip",
    "MapLoader",
    "PTXrDataset",
    "Rotate90",
    "SampleLoader",
    "ShareSampler",
    "prep_dataloader",
    "prepare_dataloader",
]


def prep_dataloader(
    train_ds: Any = None,
    test_ds: Any = None,
    batch_size: int = 1,
    callback: Collate | None = None,
    num_workers: int = 0,
    parallel: bool = False,
    shuffle: bool = True,
    drop_last: bool = True,
    *,
    val_ds: Any = None,
    seed: int = 42,
    buffer_mb: float = 512,
    workers: str = "threads",
    persistent_workers: bool = False,
    augment: Augment | Sequence[Augment] | None = None,
    device: Any = None,
) -> Any:
    """Make loaders for training, testing and validation data.

    Parameters
    ----------
    train_ds : PTXrDataset or map-style data set, optional
        Samples to train on.
    test_ds : PTXrDataset or map-style data set, optional
        Samples to test on.
    batch_size : int
        Samples in a batch of one rank.
    callback : callable, optional
        Makes a batch from a list of items; by default tensors are stacked.
    num_workers : int
        For a `PTXrDataset`: decode threads, 0 to choose. For other data sets: worker
        processes, 0 for none. They are never forked and never run the calling script again, so
        no ``if __name__ == "__main__"`` is needed.
    parallel : bool
        Whether the ranks of the process group share the samples. Rank and world are read
        when an epoch begins; without an initialised group there is one rank.
    shuffle : bool
        Whether the training samples are shuffled, differently in each epoch.
    drop_last : bool
        Whether a last training batch that is not full is dropped. With ``False`` it is kept,
        of equal size on all ranks, so that less than one sample per rank is left out.
    val_ds : PTXrDataset or map-style data set, optional
        Samples to validate on.
    seed : int
        Seed of the shuffle. The order is a function of the seed and the epoch alone: the
        same global batches for any number of ranks, threads and processes.
    buffer_mb : float
        For a `PTXrDataset`: memory of each loader for decoded samples, on every rank. The order
        depends on it where the samples do not fit.
    workers : {"threads", "processes"}
        "processes" loads a `PTXrDataset` in `num_workers` processes instead of threads: for
        a slow `callback` in Python, else slower.
    persistent_workers : bool
        Whether worker processes are kept alive from epoch to epoch, which saves their start. Each
        batch seeds the generators of torch, numpy and Python in its worker by seed, epoch and
        position, so that transforms draw the same numbers in either case, and in a resumed run.
    augment : callable or sequence of callable, optional
        Changes training batches, after `callback`: takes a batch and a `torch.Generator` and
        returns a batch. The generator is seeded by seed, epoch and the position of the batch,
        so that a resumed run draws the same numbers. `Flip` and `Rotate90` respect the grid.
        One of your own that never leaves out or adds a sample may have an attribute
        ``keeps_samples = True``; ranks then need not communicate about it in every step.
    device : torch.device or str, optional
        Device of the batches, also to augment them; by default main memory, pinned if there
        is a GPU.

    Returns
    -------
    SampleLoader or MapLoader, or tuple of them
        One loader, or one for each data set given: train, test, val. Test and validation
        loaders are never shuffled and never drop samples: every sample comes exactly once
        over all ranks, without padding, so that ranks may differ in their batches.

    Raises
    ------
    InvalidTypeError
        If there is no data set, or one has no length or cannot be indexed.
    InvalidValueError
        If a number cannot work, there are fewer training samples than one global batch, or a
        variable is scaled in different ways in data sets that know how they are scaled, also
        inside a ``ConcatDataset``.

    Examples
    --------
    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0))
    >>> train, test = prep_dataloader(data, data, batch_size=4)
    >>> [len(x) for (x,) in train], [x.tolist() for (x,) in test]
    ([4, 4], [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]])
    """
    given = {"train_ds": train_ds, "test_ds": test_ds, "val_ds": val_ds}
    options = LoaderOptions(
        batch_size=batch_size,
        callback=callback,
        num_workers=num_workers,
        parallel=parallel,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
        buffer_mb=buffer_mb,
        workers=workers,
        persistent_workers=persistent_workers,
        augment=augment,
        device=device,
    )
    check_same_scaling(given)
    loaders = []
    for name, data in given.items():
        if data is not None:
            _check_dataset(name, data)
            loaders.append(make_loader(data, options, train=name == "train_ds"))
    if not loaders:
        raise InvalidTypeError("no data set was given; give train_ds, test_ds or val_ds")
    return loaders[0] if len(loaders) == 1 else tuple(loaders)


prepare_dataloader = prep_dataloader


def _check_dataset(argument: str, data: Any) -> None:
    import xarray as xr

    if isinstance(data, str | os.PathLike | xr.Dataset | xr.DataArray):
        raise InvalidTypeError(
            f"{argument} must be a data set, got a {type(data).__name__}; give "
            f"PTXrDataset({argument}), which makes samples of a store or a cube"
        )
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise InvalidTypeError(
            f"{argument} must be a PTXrDataset, a TensorDataset or another map-style data set, "
            f"got a {type(data).__name__}, which has no length or cannot be indexed"
        )
