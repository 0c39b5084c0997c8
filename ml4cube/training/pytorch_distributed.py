"""Train on many ranks, with or without torchrun, on GPUs or CPUs: one world wider."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training import pytorch
from ml4cube.training.ranks.dist import DEFAULT_TIMEOUT_S, World, ddp_cleanup, ddp_init, launch

__all__ = ["Trainer", "ddp_init", "dist_train"]


class Trainer(pytorch.Trainer):
    """Train on all ranks of the process group; the same arguments as on one device.

    Where `ddp_init` was not called, it is called here. Without torchrun there is one rank.

    Validation is exact: every sample counts once, however many ranks there are. A loader that
    is sharded without padding is evaluated as it is; a `DistributedSampler`, which pads, is
    replaced for validation by an exact one; a loader that gives every rank all samples is
    evaluated in full by every rank, which is exact as well.

    Training samples are shared out: a loader of `prep_dataloader` made without ``parallel=True`` is
    made to share, where all ranks hold the same data. Any other loader is used as it is; where
    ranks train on the same samples, a warning names it. An epoch ends for all ranks when one of
    them has no batch left.

    Parameters
    ----------
    *args : Any
        As of `ml4cube.training.pytorch.Trainer`.
    **kwargs : Any
        As of `ml4cube.training.pytorch.Trainer`; `device` defaults to the GPU of this rank.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), epochs=3)
    >>> model = dist_train(trainer)
    >>> [row["rank"] for row in trainer.history["ranks"][-1]]
    [0]
    """

    def train(self) -> nn.Module:
        """Train on all ranks; every rank must call this.

        Called again, it goes on as that of `ml4cube.training.pytorch.Trainer` does.

        Returns
        -------
        torch.nn.Module
            The model with the weights of the best epoch, the same on every rank.
        """
        # torchrun reports the error of the first rank that failed; this is how it learns of it.
        return cast(nn.Module, record(super().train)())

    def _make_world(self, device: str | torch.device | None) -> World:
        ddp_init()
        return World.current(device)


def dist_train(
    target: pytorch.Trainer | Callable[..., Any],
    nproc: int | None = None,
    *args: Any,
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT_S,
    **kwargs: Any,
) -> Any:
    """Train with a trainer and clean up, or run a function on several local ranks.

    Parameters
    ----------
    target : Trainer or callable
        A trainer: it trains, and the process group that `ddp_init` made is taken down. A
        function: it is run on `nproc` fresh local processes that form one group; write the
        loaders, the model and the Trainer inside it. It may be a lambda or stand in a notebook.
    nproc : int, optional
        Number of ranks; only with a function.
    *args : Any
        Passed to the function.
    backend : {"gloo", "nccl"}, optional
        As for `ddp_init`; only with a function.
    timeout : float or timedelta
        As for `ddp_init`; only with a function.
    **kwargs : Any
        Passed to the function.

    Returns
    -------
    object
        The trained model, or what the function returned on rank 0.

    Raises
    ------
    InvalidTypeError
        If `target` is neither, or arguments do not go with it.
    RunError
        If a rank failed.

    Examples
    --------
    >>> dist_train(lambda x: 2 * x, 1, 21)
    42
    """
    if isinstance(target, pytorch.Trainer):
        if nproc is not None or args or kwargs or backend is not None:
            raise InvalidTypeError(
                "dist_train(trainer) takes nothing else: the trainer holds its world already; "
                "give a function to start ranks from here"
            )
        try:
            return target.train()
        finally:
            ddp_cleanup()
    if not callable(target):
        raise InvalidTypeError(f"target={target!r} is neither a Trainer nor a function")
    if nproc is None:
        raise InvalidTypeError("dist_train(fn) needs nproc, the number of ranks; give e.g. nproc=2")
    return launch(target, nproc, *args, backend=backend, timeout=timeout, **kwargs)
