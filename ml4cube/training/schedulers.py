"""Learning rates as functions of the iteration, over the schedulers of torch.

An iteration is one call of ``step()``: an epoch, or an optimizer step with
``scheduler_step_on_batch=True``. Every rate is computed from the iteration's number alone, so a
resumed run has the same rates as an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.inputs.options import above_zero

__all__ = [
    "CosineAnnealingScheduler",
    "CosineRestartScheduler",
    "LinearScheduler",
    "PolynomialScheduler",
    "SchedulerBase",
    "SchedulerChain",
    "WarmUpScheduler",
]


class SchedulerBase(LRScheduler, ABC):
    """Base of schedulers of your own: override `get_lr`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set; what they are now is what they start from.
    total_iters : int
        Iterations until the end of the curve.
    eta_min : float
        Lowest rate.
    last_epoch : int
        The iteration before the first one; -1 starts at the beginning.

    Raises
    ------
    InvalidTypeError
        If `optimizer` is none.
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
            raise InvalidTypeError(f"optimizer={optimizer!r} is no torch.optim.Optimizer")
        if isinstance(total_iters, bool) or not isinstance(total_iters, int) or total_iters < 1:
            raise InvalidValueError(
                f"total_iters={total_iters!r} is not a number of iterations; use 1 or more"
            )
        if eta_min == math.inf or not (eta_min == 0 or above_zero(eta_min)):
            raise InvalidValueError(
                f"eta_min={eta_min!r} is not a learning rate; use 0 or a positive number"
            )
        self.total_iters, self.eta_min = total_iters, float(eta_min)
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of every parameter group at iteration `last_epoch`.

        Returns
        -------
        list of float
            Computed from `base_lrs`, `last_epoch`, `total_iters` and `eta_min`.
        """


class _Curve(SchedulerBase):
    """A curve between `eta_min` (height 0) and the optimizer's rate (height 1)."""

    @abstractmethod
    def _height(self, share: float) -> float:
        """Height of the curve after a share, 0 to 1, of all iterations."""

    def get_lr(self) -> list[Any]:
        """Return the rate of every parameter group; past the end, that of the end."""
        height = self._height(min(self.last_epoch, self.total_iters) / self.total_iters)
        return [self.eta_min + (base - self.eta_min) * height for base in self.base_lrs]


class CosineAnnealingScheduler(_Curve):
    """From the optimizer's rate down to `eta_min` along half a cosine, where it stays.

    The rate at iteration t of T is ``eta_min + (lr - eta_min) (1 + cos(π t/T)) / 2``
    (Loshchilov and Hutter 2017, SGDR, eq. 5, one cycle).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set.
    total_iters : int
        T.
    eta_min : float
        The rate from iteration T on.
    last_epoch : int
        The iteration before the first one.

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

    def _height(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2


class LinearScheduler(_Curve):
    """From the optimizer's rate down to `eta_min` along a straight line, where it stays.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set.
    total_iters : int
        Iterations until `eta_min` is reached.
    eta_min : float
        The last rate.
    last_epoch : int
        The iteration before the first one.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = LinearScheduler(optimizer, total_iters=4, eta_min=0.2)
    >>> optimizer.step(); scheduler.step()
    >>> round(scheduler.get_last_lr()[0], 3)
    0.8
    """

    def _height(self, share: float) -> float:
        return 1 - share


class PolynomialScheduler(_Curve):
    """From the optimizer's rate down to `eta_min` along ``(1 - t/T)**power``, where it stays.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set.
    total_iters : int
        T.
    eta_min : float
        The last rate.
    power : float
        Above 1 falls fast at first, below 1 fast at last.
    last_epoch : int
        The iteration before the first one.

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
            raise InvalidValueError(f"power={power!r} is not positive; use e.g. 2.0")
        self.power = float(power)
        super().__init__(optimizer, total_iters, eta_min, last_epoch)

    def _height(self, share: float) -> float:
        return float((1 - share) ** self.power)


class CosineRestartScheduler(_Curve):
    """Several cosine cycles of equal length, each from the optimizer's rate to `eta_min`.

    Loshchilov and Hutter (2017), SGDR, with cycles that do not grow.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set.
    total_iters : int
        Iterations of all cycles together.
    eta_min : float
        The rate that every cycle falls towards, and from the last one's end on.
    cycles : int
        How many.
    last_epoch : int
        The iteration before the first one.

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
        if isinstance(cycles, bool) or not isinstance(cycles, int) or cycles < 1:
            raise InvalidValueError(f"cycles={cycles!r} is not a count; use 1 or more")
        if isinstance(total_iters, int) and cycles > total_iters:
            raise InvalidValueError(
                f"cycles={cycles} is more than total_iters={total_iters}; use fewer cycles"
            )
        self.cycles = cycles
        super().__init__(optimizer, total_iters, eta_min, last_epoch)

    def _height(self, share: float) -> float:
        within = 1.0 if share >= 1 else share * self.cycles % 1.0
        return (1 + math.cos(math.pi * within)) / 2


class WarmUpScheduler(_Curve):
    """From near `eta_min` up to the optimizer's rate along a straight line, where it stays.

    The first iteration has a T-th of the way behind it, so that no step is wasted on a rate of
    zero, and the last of the T has it all.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose rates are set.
    total_iters : int
        T.
    eta_min : float
        Where the line starts.
    last_epoch : int
        The iteration before the first one.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = WarmUpScheduler(optimizer, total_iters=4)
    >>> scheduler.get_last_lr()
    [0.25]
    """

    def _height(self, share: float) -> float:
        return min(1.0, share + 1 / self.total_iters)


class SchedulerChain(SequentialLR):
    """One scheduler after the other, each for its own `total_iters`.

    Parameters
    ----------
    *schedulers : LRScheduler
        Of one optimizer. All but the last must say how long they last (``total_iters``); those
        of torch may take part.

    Raises
    ------
    InvalidTypeError
        If one is no scheduler.
    InvalidValueError
        If there is none, they have several optimizers, or one but the last has no end.

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
        links = list(itertools.chain.from_iterable(map(_links, schedulers)))
        if not links:
            raise InvalidValueError("SchedulerChain() has nothing to chain; give schedulers")
        if len({id(link.optimizer) for link in links}) > 1:
            raise InvalidValueError(
                "SchedulerChain got schedulers of several optimizers; give each chain one"
            )
        lengths: list[int] = []
        for number, link in enumerate(links[:-1], start=1):
            length = getattr(link, "total_iters", None)
            if not isinstance(length, int):
                raise InvalidValueError(
                    f"scheduler {number} of the chain, {type(link).__name__}, has no total_iters, "
                    "so nobody knows when the next one's turn is; put it last"
                )
            lengths.append(length)
        self.total_iters = sum(lengths) + getattr(links[-1], "total_iters", 0)
        super().__init__(links[0].optimizer, links, list(itertools.accumulate(lengths)))


def _links(scheduler: Any) -> list[LRScheduler]:
    """Return what a scheduler consists of: a chain is as long as its links."""
    if not isinstance(scheduler, LRScheduler):
        raise InvalidTypeError(
            f"SchedulerChain got {scheduler!r}, which is no scheduler; give them one by one, as in "
            "SchedulerChain(first, second)"
        )
    return list(scheduler._schedulers) if isinstance(scheduler, SchedulerChain) else [scheduler]
