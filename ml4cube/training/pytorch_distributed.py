"""Train on many ranks, with or without torchrun, on GPUs or CPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError
from ml4cube.training import pytorch
from ml4cube.training.ranks.dist import (
    DEFAULT_TIMEOUT_S,
    World,
    ddp_cleanup,
    ddp_init,
    join,
    launch,
)

__all__ = ["Trainer", "ddp_init", "dist_train"]


class Trainer(pytorch.Trainer):
    """Train on all ranks of the process group, with the same arguments as on one device.

    `ddp_init` is called if you have not done so. Without torchrun there is one rank.

    Validation is exact: every sample counts once, on any number of ranks. A `DistributedSampler`,
    which pads, is replaced in validation by an exact one. A loader of all samples is evaluated in
    full on every rank, which gives the same result.

    Training samples are shared out. A loader of `prep_dataloader` made without ``parallel=True``
    is shared out, with a warning, if all ranks have the same data. Any other loader is used as it
    is, and a warning names it if ranks train on the same samples. An epoch ends on all ranks when
    one of them has no batch left.

    Parameters
    ----------
    *args : Any
        As for `ml4cube.training.pytorch.Trainer`.
    **kwargs : Any
        As for `ml4cube.training.pytorch.Trainer`; `device` defaults to the GPU of this rank.

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

    _first_call = "dist_train(trainer), or train()"

    def train(self) -> nn.Module:
        """Train on all ranks; every rank must call this.

        A second call continues training, as in `ml4cube.training.pytorch.Trainer`.

        Returns
        -------
        torch.nn.Module
            The model with the weights of the best epoch, the same on every rank.
        """
        # Tells torchrun, which reports the error of the rank that failed first. Torch's `record`
        # does so too, but goes on after ``sys.exit(0)``, as if the model were trained.
        errors = get_error_handler()
        errors.initialize()
        try:
            return super().train()
        except Exception as error:
            errors.record_exception(error)
            raise

    def _make_world(self, device: str | torch.device | None) -> World:
        """Return the ranks of the process group, which is made if there is none."""
        return join(device)


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
        A trainer: call its `train`, and destroy the process group that `ddp_init` made. A
        function: run it on `nproc` new local processes that form one group; create loaders, model
        and Trainer inside it. It may be a lambda, or be defined in a notebook.
    nproc : int, optional
        Number of ranks; only with a function.
    *args : Any
        Arguments of the function.
    backend : {"gloo", "nccl"}, optional
        As for `ddp_init`; only with a function.
    timeout : float or timedelta
        As for `ddp_init`; only with a function.
    **kwargs : Any
        Keyword arguments of the function.

    Returns
    -------
    object
        The trained model, or the result of the function on rank 0.

    Raises
    ------
    InvalidTypeError
        If `target` is neither, or the other arguments do not fit it.
    RunError
        If a rank failed.

    Examples
    --------
    >>> dist_train(lambda x: 2 * x, 1, 21)
    42
    """
    if isinstance(target, pytorch.Trainer):
        if (nproc, backend, timeout) != (None, None, DEFAULT_TIMEOUT_S) or args or kwargs:
            raise InvalidTypeError(
                "dist_train(trainer) takes no other arguments; use a function to start processes"
            )
        failed = True
        try:
            trained = target.train()
            failed = False
        finally:
            ddp_cleanup(failed=failed)
        return trained
    if not callable(target):
        raise InvalidTypeError(f"target must be a Trainer or a function, got {one_line(target)}")
    if nproc is None:
        raise InvalidTypeError("dist_train(fn) needs nproc, the number of ranks, such as nproc=2")
    return launch(target, nproc, *args, backend=backend, timeout=timeout, **kwargs)
