"""Tools for your own training loop: several GPUs or ranks, gradient accumulation."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ml4cube.core.display import PrintedAsCall, Summarized, Summary
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.inputs.checks import above_zero, bad_loss, check_count, check_model
from ml4cube.training.inputs.outside_model import (
    held_parameters,
    load_outside,
    outside_model,
    state_of,
)
from ml4cube.training.measure.summary import model_text
from ml4cube.training.ranks.dist import World, join
from ml4cube.training.ranks.environment import count_gpus
from ml4cube.training.ranks.strategy import ddp_devices, sum_gradients

logger = logging.getLogger(__name__)


class _ModelWrapper(Summarized):
    """Save and load a model without the prefix of its wrapper in the names of parameters."""

    world: World
    model: nn.Module
    _unwrapped: nn.Module

    def _summary(self) -> Summary:
        """Return the model, its wrapper and the ranks."""
        wrapper = None
        if self.model is not self._unwrapped:
            wrapper = type(self.model).__name__
        facts = {
            "Model": model_text(self._unwrapped),
            "Wrapped by": wrapper,
            "Device": str(self.world.device),
            "Rank": f"{self.world.rank} of {self.world.size}",
            "Next": "train trainer.model in a loop of your own, save_checkpoint(path)",
        }
        return Summary(facts=facts)

    def save_checkpoint(
        self, path: str | Path, epoch: int | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Write model, optimizer and epoch to a file, replaced atomically; every rank."""
        if self.world.is_main:
            content = {
                "model": self._unwrapped.state_dict(),
                "outside": outside_model(self._unwrapped, optimizer, {}),
                "optimizer": state_of(optimizer),
                "epoch": epoch,
            }
            write_file(path, content)
        self.world.barrier()

    def load_checkpoint(self, path: str | Path, optimizer: Optimizer | None = None) -> int | None:
        """Load model and optimizer from a file of `save_checkpoint`, and return the epoch."""
        content = read_file(path)
        self._unwrapped.load_state_dict(content["model"])
        if optimizer is not None and content["optimizer"] is not None:
            tensors = outside_model(self._unwrapped, optimizer, {})
            load_outside(tensors, content.get("outside", {}), str(path))
            optimizer.load_state_dict(content["optimizer"])
        epoch: int | None = content["epoch"]
        return epoch


class MultiGPUTrainer(_ModelWrapper):
    """Distribute each batch over the GPUs of this process.

    With one GPU or none, the model is used as it is. `DistributedTrainer` is faster.
    ``save_checkpoint(path, epoch, optimizer)`` and ``load_checkpoint(path, optimizer)`` write and
    read a file with the keys ``model``, ``optimizer``, ``epoch`` and ``outside``: parameters that
    the optimizer holds besides those of the model.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    gpu_ids : sequence of int, optional
        The GPUs to use. Default: all. Without any GPU, a warning says that the CPU is used.

    Raises
    ------
    InvalidTypeError
        If `model` is not a module.
    InvalidValueError
        If the machine has GPUs, but not those in `gpu_ids`.

    Examples
    --------
    >>> MultiGPUTrainer(nn.Linear(2, 1)).model(torch.ones(4, 2)).shape
    torch.Size([4, 1])
    """

    def __init__(self, model: nn.Module, gpu_ids: Sequence[int] | None = None) -> None:
        check_model(model)
        gpus = range(count_gpus())
        ids = list(gpus)
        if gpu_ids is not None:
            ids = list(gpu_ids)
        self.device = torch.device("cpu")
        if gpus:
            if not ids or any(i not in gpus for i in ids):
                raise InvalidValueError(f"gpu_ids must be among {list(gpus)}, got {ids}")
            self.device = torch.device("cuda", ids[0])
        elif ids:
            logger.warning("gpu_ids=%s, but this machine has no GPU; using the CPU", ids)
        self.world = World.single(self.device)
        self.model = self._unwrapped = model.to(self.device)
        if gpus and len(ids) > 1:
            self.model = DataParallel(self._unwrapped, device_ids=ids)


class DistributedTrainer(_ModelWrapper):
    """Wrap a model for the process group, and share data out over its ranks.

    ``save_checkpoint(path, epoch, optimizer)``, to be called on every rank, lets rank 0 write a
    file with the keys ``model``, ``optimizer``, ``epoch`` and ``outside`` (parameters that the
    optimizer holds besides those of the model), which is complete when the call returns.
    ``load_checkpoint(path, optimizer)`` reads it.

    Parameters
    ----------
    model : torch.nn.Module
        The model; it is moved to this rank's device.
    rank : int, optional
        The rank of this process, compared with that of torchrun or your own process group.
    world_size : int, optional
        The number of ranks, compared likewise.
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
        self.world = join(device)
        if rank not in (None, self.world.rank) or world_size not in (None, self.world.size):
            raise InvalidValueError(
                f"rank={rank}, world_size={world_size}, but this process is rank "
                f"{self.world.rank} of {self.world.size}; start it with torchrun, or initialize "
                "the process group first"
            )
        self.model = self._unwrapped = model.to(self.world.device)
        if self.world.size > 1:
            device_ids = ddp_devices(self.world)
            self.model = DistributedDataParallel(self._unwrapped, device_ids=device_ids)

    def create_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        *,
        train: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a loader of this rank's share of the samples.

        Parameters
        ----------
        dataset : torch.utils.data.Dataset
            The same on every rank.
        batch_size : int
            Samples per batch and rank.
        shuffle : bool
            Whether to shuffle in every epoch; call ``set_epoch`` with its number.
        train : bool, optional
            True: all ranks get batches of equal number and size, and the few samples that cannot
            be divided evenly are left out. False: every sample comes exactly once over all ranks,
            in order, so ranks may get different numbers of batches; evaluate these with the model
            that you passed, because that of the trainer, ``trainer.model``, may wait for other
            ranks. Default: as `shuffle`.
        **arguments : Any
            Further arguments of `ml4cube.datasets.pytorch.prep_dataloader`; ``drop_last`` is
            False by default.

        Returns
        -------
        iterable
            The loader.

        Raises
        ------
        InvalidTypeError
            If ``shuffle=True`` and ``train=False``.
        """
        if train is None:
            train = shuffle
        if shuffle and not train:
            raise InvalidTypeError("shuffle must be False with train=False")
        arguments = {"drop_last": False, "parallel": self.world.size > 1, **arguments}
        if not train:
            return prep_dataloader(test_ds=dataset, batch_size=batch_size, **arguments)
        return prep_dataloader(dataset, batch_size=batch_size, shuffle=shuffle, **arguments)


class GradientAccumulator(PrintedAsCall):
    """Take one optimizer step over several batches, each weighted by its samples.

    With a model wrapped by DistributedDataParallel, a step is over the batches of all ranks. Every
    sample has the same weight, even if ranks have batches of different sizes or numbers. Gradients
    are reduced once per step; as long as the accumulator exists, backward passes do not reduce
    them. Every rank must call `flush` at the end of its epoch.

    Parameters
    ----------
    model : torch.nn.Module
        The model to train, including its wrapper.
    optimizer : torch.optim.Optimizer
        The optimizer.
    accumulation_steps : int
        Batches per step.
    max_grad_norm : float, optional
        Norm to which gradients are clipped.

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
            raise InvalidValueError(
                f"max_grad_norm must be positive or None, got {max_grad_norm!r}"
            )
        model = getattr(model, "_orig_mod", model)  # compiled after it was wrapped
        self.model, self.optimizer = model, optimizer
        self.accumulation_steps, self.max_grad_norm = accumulation_steps, max_grad_norm
        self._batches, self._samples = 0, 0
        self._world = World.single("cpu")
        if isinstance(model, DistributedDataParallel):
            if model.process_group is not dist.group.WORLD:
                raise InvalidValueError("model must be wrapped for all ranks, not a group of them")
            self._world = World.current(model.device)
            # As `no_sync` does, because the last batch of a step is not known in advance.
            model.require_backward_grad_sync = False
            model.require_forward_param_sync = False  # buffers are synchronized after each step
            weakref.finalize(self, setattr, model, "require_backward_grad_sync", True)

    def step(self, loss: torch.Tensor, samples: int = 1) -> bool:
        """Add the mean loss of a batch, and take a step after `accumulation_steps` batches.

        Parameters
        ----------
        loss : torch.Tensor
            Scalar, with its graph.
        samples : int
            Samples in the batch.

        Returns
        -------
        bool
            Whether the optimizer took a step.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            If `loss` is not a scalar tensor that requires a gradient.
        """
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise bad_loss(loss)
        if self._batches == 0:
            self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss * samples)
        self._batches += 1
        self._samples += samples
        if self._batches < self.accumulation_steps:
            return False
        stepped, _ = self._take_step(ended=False)
        return stepped

    def flush(self) -> bool:
        """Take a step over the remaining batches of an epoch, if there are any.

        On several ranks, every rank must call this after its last batch. It takes part in the
        steps of ranks that have more batches.

        Returns
        -------
        bool
            Whether the optimizer took a step.
        """
        stepped = all_ended = False
        while not all_ended:
            has_stepped, all_ended = self._take_step(ended=True)
            stepped = stepped or has_stepped
        return stepped

    def _take_step(self, *, ended: bool) -> tuple[bool, bool]:
        """Take a step with all ranks; return if it had samples, and if all ranks have `ended`."""
        if self._batches == 0:
            if self._world.size == 1:
                return False, True
            # This rank adds nothing, and not its gradients of the last step once more.
            self.optimizer.zero_grad(set_to_none=True)
        samples, ranks_left = self._world.total([self._samples, not ended])
        if samples:
            # The optimizer may have others than the model, such as learned weights of losses.
            both = [*self.model.parameters(), *held_parameters(self.optimizer)]
            parameters = [p for p in dict.fromkeys(both) if p.requires_grad]
            # The gradients of `loss * samples`, summed over ranks and divided by all samples.
            sum_gradients(parameters, self._world, samples)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            self.optimizer.step()
            if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
                # As the model does without `no_sync`.
                self._world.broadcast_tensors(self.model.buffers())
        self._batches, self._samples = 0, 0
        return samples > 0, not ranks_left
