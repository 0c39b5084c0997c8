"""Learning-rate schedulers for a fixed number of iterations.

An iteration is one call of ``step()``: an epoch, or an optimizer step with
``scheduler_step_on_batch=True``. Every rate depends on the iteration number alone, so a resumed
run has exactly the rates of an uninterrupted one.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from ml4cube.core.display import PrintedAsCall
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.options import above_zero, check_count

__all__ = [
    "CosineAnnealingScheduler",
    "CosineRestartScheduler",
    "LinearScheduler",
    "PolynomialScheduler",
    "SchedulerBase",
    "SchedulerChain",
    "WarmUpScheduler",
]


class SchedulerBase(PrintedAsCall, LRScheduler, ABC):
    """Base class for your own schedulers: override `get_lr`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        Length of the schedule in iterations.
    eta_min : float
        Lowest learning rate, the same for all parameter groups.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Raises
    ------
    InvalidTypeError
        If `optimizer` is not a torch optimizer.
    InvalidValueError
        If `total_iters` is below 1, or `eta_min` negative or not finite.

    Examples
    --------
    >>> import torch
    >>> class Halving(SchedulerBase):
    ...     def get_lr(self):
    ...         return [max(self.eta_min, lr * 0.5**self.last_epoch) for lr in self.base_lrs]
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    >>> scheduler = Halving(optimizer, total_iters=10)
    >>> optimizer.step(); scheduler.step()
    >>> scheduler.get_last_lr()
    [0.4]
    """

    def __init__(
        self, optimizer: Optimizer, total_iters: int, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidTypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
        check_count("total_iters", total_iters)
        if eta_min == math.inf or not (eta_min == 0 or above_zero(eta_min)):
            raise InvalidValueError(f"eta_min must be 0 or a positive number, got {eta_min!r}")
        self.total_iters, self.eta_min = int(total_iters), float(eta_min)
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of every parameter group at iteration `last_epoch`.

        Returns
        -------
        list of float
            One rate per parameter group, computed from `base_lrs`.
        """


class _FactorScheduler(SchedulerBase):
    """A scheduler whose rate is ``eta_min + (lr - eta_min) * factor``."""

    @abstractmethod
    def _factor(self, iteration: int) -> float:
        """Return the factor of an iteration, from 0 to `total_iters`."""

    def get_lr(self) -> list[Any]:
        """Return the rate of every parameter group; it stays constant after the end."""
        factor = self._factor(min(self.last_epoch, self.total_iters))
        return [self.eta_min + (base - self.eta_min) * factor for base in self.base_lrs]


class CosineAnnealingScheduler(_FactorScheduler):
    """Decrease the rate to `eta_min` along half a cosine, then keep it.

    The rate at iteration t of T is ``eta_min + (lr - eta_min) (1 + cos(π t/T)) / 2``
    (Loshchilov and Hutter 2017, SGDR, eq. 5, one cycle).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        T, the iterations until `eta_min` is reached.
    eta_min : float
        Learning rate at the end, the same for all parameter groups.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = CosineAnnealingScheduler(optimizer, total_iters=2)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step(); scheduler.step()
    >>> rates
    [1.0, 0.5, 0.0, 0.0]
    """

    def _factor(self, iteration: int) -> float:
        return (1 + math.cos(math.pi * (iteration / self.total_iters))) / 2


class LinearScheduler(_FactorScheduler):
    """Decrease the rate to `eta_min` linearly, then keep it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        Iterations until `eta_min` is reached.
    eta_min : float
        Learning rate at the end, the same for all parameter groups.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = LinearScheduler(optimizer, total_iters=4, eta_min=0.2)
    >>> optimizer.step(); scheduler.step()
    >>> round(scheduler.get_last_lr()[0], 3)
    0.8
    """

    def _factor(self, iteration: int) -> float:
        return 1 - iteration / self.total_iters


class PolynomialScheduler(_FactorScheduler):
    """Decrease the rate to `eta_min` as ``(1 - t/T)**power``, then keep it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        T, the iterations until `eta_min` is reached.
    eta_min : float
        Learning rate at the end, the same for all parameter groups.
    power : float
        Exponent; above 1 the rate decreases fastest at the beginning.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Raises
    ------
    InvalidValueError
        If `power` is not positive.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = PolynomialScheduler(optimizer, total_iters=2, power=2.0)
    >>> optimizer.step(); scheduler.step()
    >>> scheduler.get_last_lr()
    [0.25]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        eta_min: float = 0.0,
        power: float = 2.0,
        last_epoch: int = -1,
    ) -> None:
        if not above_zero(power) or power == math.inf:
            raise InvalidValueError(f"power must be a positive number, got {power!r}")
        self.power = float(power)
        super().__init__(optimizer, total_iters, eta_min, last_epoch)

    def _factor(self, iteration: int) -> float:
        return float((1 - iteration / self.total_iters) ** self.power)


class CosineRestartScheduler(CosineAnnealingScheduler):
    """Repeat `CosineAnnealingScheduler` in cycles of equal length.

    These are the warm restarts of Loshchilov and Hutter (2017, SGDR) with a constant period.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        Iterations of all cycles together.
    eta_min : float
        Learning rate at the end, the same for all parameter groups. It is reached only after the
        last cycle, because every other one is followed by the first iteration of the next.
    cycles : int
        Number of cycles.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Raises
    ------
    InvalidValueError
        If `cycles` is below 1 or more than `total_iters`.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = CosineRestartScheduler(optimizer, total_iters=4, cycles=2)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step(); scheduler.step()
    >>> rates
    [1.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        eta_min: float = 0.0,
        cycles: int = 4,
        last_epoch: int = -1,
    ) -> None:
        check_count("cycles", cycles)
        check_count("total_iters", total_iters)
        if cycles > total_iters:
            raise InvalidValueError(
                f"cycles must be at most total_iters={total_iters}, got {cycles}"
            )
        self.cycles = int(cycles)
        super().__init__(optimizer, total_iters, eta_min, last_epoch)

    def _factor(self, iteration: int) -> float:
        if iteration < self.total_iters:
            # The same fraction of `total_iters` as of a cycle that has passed. Computed in
            # integers, because floats would round the remainder.
            iteration = iteration * self.cycles % self.total_iters
        return super()._factor(iteration)


class WarmUpScheduler(_FactorScheduler):
    """Increase the rate from `eta_min` to the initial one linearly, then keep it.

    Iteration t of T, counted from 1, has t/T of the increase: no step has a rate of zero, and
    iteration T has the initial rate.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer; the initial rates are those it had when its first scheduler was made.
    total_iters : int
        T, the iterations until the initial rate is reached.
    eta_min : float
        Learning rate from which the increase starts, the same for all parameter groups.
    last_epoch : int
        Index, from 0, of the last iteration (not epoch) that an earlier run with this optimizer
        took; -1 if there was none.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = WarmUpScheduler(optimizer, total_iters=4)
    >>> scheduler.get_last_lr()
    [0.25]
    """

    def _factor(self, iteration: int) -> float:
        return min(1.0, iteration / self.total_iters + 1 / self.total_iters)  # counted from 1


class SchedulerChain(PrintedAsCall, SequentialLR):
    """Run schedulers one after the other, each for its `total_iters`.

    Parameters
    ----------
    *schedulers : LRScheduler
        Schedulers of one optimizer, of this module or of torch, but no chain of them. All but the
        last must have ``total_iters``.

    Raises
    ------
    InvalidTypeError
        If one of them is not a scheduler, or is a chain.
    InvalidValueError
        If there is none, they have different optimizers, or one before the last has no
        ``total_iters``.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = SchedulerChain(
    ...     WarmUpScheduler(optimizer, total_iters=2),
    ...     CosineAnnealingScheduler(optimizer, total_iters=2),
    ... )
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step(); scheduler.step()
    >>> rates
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(self, *schedulers: LRScheduler) -> None:
        if not schedulers:
            raise InvalidValueError("SchedulerChain() needs at least one scheduler")
        for scheduler in schedulers:
            # SequentialLR cannot start another SequentialLR at a milestone.
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, SequentialLR):
                raise InvalidTypeError(
                    "SchedulerChain takes schedulers one by one, as in SchedulerChain(first, "
                    f"second), and no chain of them; got {scheduler!r}"
                )
        if len({id(scheduler.optimizer) for scheduler in schedulers}) > 1:
            raise InvalidValueError(
                "the schedulers of a SchedulerChain must have the same optimizer"
            )
        lengths: list[int] = []
        for number, scheduler in enumerate(schedulers[:-1], start=1):
            length = getattr(scheduler, "total_iters", None)
            if not isinstance(length, int):
                raise InvalidValueError(
                    f"scheduler {number} of the chain, {type(scheduler).__name__}, has no "
                    "total_iters; only the last one may have none"
                )
            lengths.append(length)
        self.total_iters = sum(lengths) + getattr(schedulers[-1], "total_iters", 0)
        milestones = list(itertools.accumulate(lengths))
        super().__init__(schedulers[0].optimizer, list(schedulers), milestones)
