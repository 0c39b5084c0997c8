"""Learning-rate schedulers for a fixed number of iterations.

An iteration is one call of ``step()``: an epoch, or an optimizer step with
``scheduler_step_on_batch=True``. Every rate depends on the iteration number alone, so a resumed
run has exactly the rates of an uninterrupted one. Those of `torch.optim.lr_scheduler` work too;
its ``SequentialLR`` runs one after another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ml4cube.core.display import PrintedAsCall
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.checks import above_zero, check_count

__all__ = ["CosineAnnealingScheduler", "WarmUpScheduler"]


class _FactorScheduler(PrintedAsCall, LRScheduler, ABC):
    """A scheduler whose rate is ``eta_min + (lr - eta_min) * factor``."""

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

    Raises
    ------
    InvalidTypeError
        If `optimizer` is not a torch optimizer.
    InvalidValueError
        If `total_iters` is below 1, or `eta_min` negative or not finite.

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

    Raises
    ------
    InvalidTypeError
        If `optimizer` is not a torch optimizer.
    InvalidValueError
        If `total_iters` is below 1, or `eta_min` negative or not finite.

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
