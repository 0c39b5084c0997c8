"""Parts for loops of your own: wrap a model for several GPUs or ranks, accumulate gradients."""

from __future__ import annotations

import logging
import os
import weakref
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
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.inputs.checks import bad_loss, check_model
from ml4cube.training.inputs.options import above_zero, check_count
from ml4cube.training.ranks.dist import World, ddp_init, pick_device

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
        """Take weights, and the optimizer's state, from a file of `save_checkpoint`."""
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

    On several ranks, with a model wrapped by DistributedDataParallel, a step is over the batches
    of all ranks: every sample counts alike, also where ranks have batches of unequal sizes, or
    unequal numbers of them. Gradients travel between ranks once a step; as long as the accumulator
    lives, backward passes of the model leave them on their rank. Every rank calls `flush` at the
    end of its epoch.

    Parameters
    ----------
    model : torch.nn.Module
        The model that is trained, as it is called.
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
        self._ranks = _ranks_of(model)
        if isinstance(model, DistributedDataParallel):
            # What `no_sync` does: whichever batch is the last of a step is only known afterwards.
            model.require_backward_grad_sync = False
            model.require_forward_param_sync = False  # buffers travel with the gradients
            weakref.finalize(self, setattr, model, "require_backward_grad_sync", True)

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
        return self._finish(ended=False)[0] if self._batches == self.accumulation_steps else False

    def flush(self) -> bool:
        """Step over what was taken in, if anything: the last, shorter window of an epoch.

        With a model on several ranks, every rank must call this once its batches are used up; it
        waits for ranks that have more, and takes their steps with them.

        Returns
        -------
        bool
            Whether the optimizer took a step.
        """
        stepped, all_ended = self._finish(ended=True)
        while not all_ended:
            more, all_ended = self._finish(ended=True)
            stepped = stepped or more
        return stepped

    def _finish(self, *, ended: bool) -> tuple[bool, bool]:
        """Take a step with all ranks; whether there was anything, and whether all have ended."""
        if self._batches == 0 and self._ranks is None:
            return False, True
        if self._batches == 0:
            self.optimizer.zero_grad(set_to_none=True)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        held = [p.grad is not None for p in parameters]
        samples, going, *used = _added_up([self._samples, not ended, *held], self._ranks)
        stepped = samples > 0
        if stepped:
            for parameter, anywhere in zip(parameters, used, strict=True):
                if anywhere:
                    self._share(parameter, samples)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            self._share_buffers()
        self._batches, self._samples = 0, 0
        return stepped, not going

    def _share(self, parameter: nn.Parameter, samples: float) -> None:
        """Give a parameter the gradient of all samples, on all ranks."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self._ranks is not None:
            wire = parameter.grad.contiguous()
            dist.all_reduce(wire, group=self._ranks)
            parameter.grad.copy_(wire)
        parameter.grad.div_(samples)

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as the model would when it is called."""
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            first = dist.get_global_rank(self._ranks, 0)
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=first, group=self._ranks)


def _ranks_of(model: nn.Module) -> Any:
    """The process group over which a model is spread; None for one on its own."""
    several = isinstance(model, DistributedDataParallel)
    return model.process_group if several else None


def _added_up(numbers: Sequence[float], ranks: Any) -> list[float]:
    if ranks is None:
        return [float(number) for number in numbers]
    on_gpu = dist.get_backend(ranks) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    wire = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=device)
    dist.all_reduce(wire, group=ranks)
    added: list[float] = wire.tolist()
    return added
