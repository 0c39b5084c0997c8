"""Parts for loops of your own: wrap a model for several GPUs or ranks, accumulate gradients."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.training.checkpoint import read_file, write_file
from ml4cube.training.checks import bad_loss, check_model
from ml4cube.training.dist import World, ddp_init, pick_device
from ml4cube.training.options import above_zero, check_count

logger = logging.getLogger(__name__)


class _Wrapped:
    """A model, wrapped, whose checkpoints know nothing of the wrapper."""

    model: nn.Module
    _raw: nn.Module

    def _content(self, epoch: int | None, optimizer: Optimizer | None) -> Mapping[str, Any]:
        return {
            "model": self._raw.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "epoch": epoch,
        }

    def load_checkpoint(self, path: str | Path, optimizer: Optimizer | None = None) -> int | None:
        """Take weights, and the optimizer's state, from a file of `save_checkpoint`.

        Parameters
        ----------
        path : str or Path
            The file.
        optimizer : torch.optim.Optimizer, optional
            To load its state too.

        Returns
        -------
        int or None
            The epoch that was saved with it.

        Raises
        ------
        StoreError
            If the file is missing or damaged.
        """
        content = read_file(path)
        self._raw.load_state_dict(content["model"])
        if optimizer is not None and content["optimizer"] is not None:
            optimizer.load_state_dict(content["optimizer"])
        epoch: int | None = content["epoch"]
        return epoch


class MultiGPUTrainer(_Wrapped):
    """Spread each batch over the GPUs of this process.

    On one GPU, or without any, the model is used as it is. `DistributedTrainer` is faster.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    gpu_ids : sequence of int, optional
        Which GPUs; default all. On a machine without GPU they are ignored, with a warning.

    Raises
    ------
    InvalidTypeError
        If `model` is none.
    InvalidValueError
        If there are GPUs, but not those.

    Examples
    --------
    >>> MultiGPUTrainer(nn.Linear(2, 1)).model(torch.ones(4, 2)).shape
    torch.Size([4, 1])
    """

    def __init__(self, model: nn.Module, gpu_ids: Sequence[int] | None = None) -> None:
        check_model(model)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        ids = list(range(count)) if gpu_ids is None else list(gpu_ids)
        if count == 0:
            if ids:
                logger.warning("gpu_ids=%s, but this machine has no GPU; using the CPU", ids)
            self.device = torch.device("cpu")
        elif not ids or any(i not in range(count) for i in ids):
            raise InvalidValueError(f"gpu_ids={ids}, this machine has GPUs {list(range(count))}")
        else:
            self.device = torch.device("cuda", ids[0])
        self._raw = model.to(self.device)
        several = self.device.type == "cuda" and len(ids) > 1
        self.model = DataParallel(self._raw, device_ids=ids) if several else self._raw

    def save_checkpoint(
        self, path: str | Path, epoch: int | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Write ``model`` (without the wrapper's prefix), ``optimizer`` and ``epoch``.

        Parameters
        ----------
        path : str or Path
            The file; an old one is replaced once the new one is whole.
        epoch : int, optional
            To be saved with it.
        optimizer : torch.optim.Optimizer, optional
            To save its state too.
        """
        write_file(path, self._content(epoch, optimizer))


class DistributedTrainer(_Wrapped):
    """Keep the model of all ranks equal: wrap it for the process group, and share the data.

    Parameters
    ----------
    model : torch.nn.Module
        The model; it is moved to this rank's device.
    rank : int, optional
        Which rank this process is, to be checked against what torchrun or your own process
        group says.
    world_size : int, optional
        How many there are, checked likewise.
    device : str or torch.device, optional
        Default: the GPU of this rank, else the CPU.

    Raises
    ------
    InvalidValueError
        If rank or world size are not those of the process group.

    Examples
    --------
    >>> trainer = DistributedTrainer(nn.Linear(2, 1), rank=0, world_size=1)
    >>> trainer.world.size
    1
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        check_model(model)
        ddp_init()
        self.world = World.current(pick_device(device))
        asked = (rank, world_size)
        found = (self.world.rank, self.world.size)
        if any(a is not None and a != f for a, f in zip(asked, found, strict=True)):
            raise InvalidValueError(
                f"rank={rank}, world_size={world_size}, but this process is rank {found[0]} of "
                f"{found[1]}; start it under torchrun, or make the process group first"
                + ("" if "RANK" in os.environ or dist.is_initialized() else " (there is none)")
            )
        self._raw = model.to(self.world.device)
        self.model = self._raw
        if self.world.size > 1:
            cuda = self.world.device.type == "cuda"
            self.model = DistributedDataParallel(
                self._raw, device_ids=[self.world.device] if cuda else None
            )

    def create_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        *,
        train: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a loader that gives this rank its share of every epoch.

        Parameters
        ----------
        dataset : torch.utils.data.Dataset
            The same on every rank.
        batch_size : int
            Samples per batch and rank.
        shuffle : bool
            Whether each epoch has an order of its own; call ``set_epoch`` to choose it.
        train : bool, optional
            True: every rank gets as many batches, of as many samples, so that it can be trained
            on; of samples that cannot be shared out evenly, fewer than one per rank are left
            out. False: every sample comes exactly once over all ranks, in order, so that ranks
            may differ in their batches: run them through the model that was given, since `model`
            may wait for other ranks. Default: what `shuffle` says.
        **arguments : Any
            As of `ml4cube.datasets.pytorch.prep_dataloader`; ``drop_last`` is False.

        Returns
        -------
        iterable
            The loader.

        Raises
        ------
        InvalidTypeError
            If samples are to be shuffled and evaluated.
        """
        train = shuffle if train is None else train
        if shuffle and not train:
            raise InvalidTypeError("shuffle=True and train=False contradict; give one of them")
        arguments = {"drop_last": False, "parallel": self.world.size > 1, **arguments}
        name = "train_ds" if train else "test_ds"
        return prep_dataloader(
            **{name: dataset}, batch_size=batch_size, shuffle=shuffle, **arguments
        )

    def save_checkpoint(
        self, path: str | Path, epoch: int | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Write ``model``, ``optimizer`` and ``epoch``, on rank 0; every rank must call this.

        Parameters
        ----------
        path : str or Path
            The file; on return it is whole, on every rank's view of it.
        epoch : int, optional
            To be saved with it.
        optimizer : torch.optim.Optimizer, optional
            To save its state too.
        """
        if self.world.is_main:
            write_file(path, self._content(epoch, optimizer))
        self.world.maximum([0.0])  # nobody goes on before it is there


class GradientAccumulator:
    """Take one optimizer step over several batches, each weighted by its samples.

    Parameters
    ----------
    model : torch.nn.Module
        Whose gradients to clip.
    optimizer : torch.optim.Optimizer
        What takes the step.
    accumulation_steps : int
        Batches per step.
    max_grad_norm : float, optional
        Largest norm of the gradients.

    Raises
    ------
    InvalidValueError
        If `accumulation_steps` or `max_grad_norm` is not positive.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulator = GradientAccumulator(model, optimizer, accumulation_steps=2)
    >>> [accumulator.step(model(torch.ones(4, 1)).mean(), samples=4) for _ in range(3)]
    [False, True, False]
    >>> accumulator.flush()
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accumulation_steps: int = 4,
        max_grad_norm: float | None = None,
    ) -> None:
        check_count("accumulation_steps", accumulation_steps)
        if max_grad_norm is not None and not above_zero(max_grad_norm):
            raise InvalidValueError(f"max_grad_norm={max_grad_norm!r} is not positive; or use None")
        self.model, self.optimizer = model, optimizer
        self.accumulation_steps, self.max_grad_norm = accumulation_steps, max_grad_norm
        self._batches, self._samples = 0, 0

    def step(self, loss: torch.Tensor, samples: int = 1) -> bool:
        """Take in the mean loss of a batch, and step if the window is full.

        Parameters
        ----------
        loss : torch.Tensor
            Scalar, with its graph.
        samples : int
            Samples it is the mean of.

        Returns
        -------
        bool
            Whether the optimizer took a step.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            If `loss` is nothing to learn from: no tensor, no scalar, or without a graph.
        """
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise bad_loss(loss)
        if self._batches == 0:
            self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss * samples)
        self._batches += 1
        self._samples += samples
        return self.flush() if self._batches == self.accumulation_steps else False

    def flush(self) -> bool:
        """Step over what was taken in, if anything: the last, shorter window of an epoch.

        Returns
        -------
        bool
            Whether the optimizer took a step.
        """
        if self._batches == 0:
            return False
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._samples)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self._batches, self._samples = 0, 0
        return True
