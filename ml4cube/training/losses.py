"""Losses for cubes: over the cells that have a value, each weighted, exact over any batches.

The formula, for cells c with loss l, weight w and mask m (0 where the target has a gap)::

    loss = sum(w * m * l) / sum(w * m)

A batch then counts in an epoch, in an accumulated step and among the batches of other ranks by
its ``sum(w * m)``, and not by its samples; so the loss of all of them is the same formula over all
their cells, however they are cut into batches and ranks. Weights of classes, which torch's losses
have in l, are in w as well below the line, as torch divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ml4cube.core.angles import cell_areas
from ml4cube.core.errors import InvalidValueError
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.measure.means import Classes, Paired, is_over_classes, reduced, setting


class MaskedLoss:
    """The mean of a loss over the cells whose target has a value.

    Where the target is NaN (or a loss's own ``ignore_index``), prediction and target count
    nothing, and no gradient reaches the prediction, not even one of 0 × NaN. A batch without a
    single value has loss 0.

    Parameters
    ----------
    loss : callable
        A loss of torch, module or function, or your own ``loss(pred, target)`` that returns one
        value per cell of the target.
    weights : array, optional
        What cells weigh, 0 or more; broadcast to the target as numpy does, from the right, such
        as `area_weights`. Weights that a batch brings are multiplied with them.

    Raises
    ------
    InvalidTypeError
        If `loss` cannot be called.
    InvalidValueError
        If a weight is negative or no number, or none is positive.

    Examples
    --------
    >>> from torch import nn
    >>> loss = MaskedLoss(nn.MSELoss())
    >>> target = torch.tensor([1.0, float("nan")])
    >>> loss(torch.tensor([3.0, 5.0]), target).item()
    4.0
    """

    def __init__(self, loss: Callable[..., Any], weights: Any = None) -> None:
        self.loss = check_loss("loss", loss)
        self._cellwise = Paired("loss", reduced(loss, "none"))
        self._classes = Classes(loss) if is_over_classes(loss) else None
        own = setting(loss, "ignore_index")
        self._ignored = own if self._classes is None else self._classes.ignored
        self._weights = None if weights is None else _checked(weights)

    def __call__(
        self, pred: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean over the cells that count."""
        mask = self._mask(target)
        if mask is not None:
            target = torch.where(mask, target, torch.zeros_like(target))
            if pred.shape == target.shape:
                # Twice masked: what the loss does with these cells reaches no gradient.
                pred = torch.where(mask, pred, torch.zeros_like(pred))
        values = self._cellwise(pred, target)
        if not isinstance(values, torch.Tensor) or values.shape != target.shape:
            shape = tuple(getattr(values, "shape", ()))
            raise InvalidValueError(
                f"the loss {self.loss!r} gives shape {shape} for targets of shape "
                f"{tuple(target.shape)}; give one that returns a value per cell, or takes "
                "reduction='none'"
            )
        values = values if values.dtype == torch.float64 else values.float()
        counts = self._counts(target, mask, weights).to(values.dtype)
        if mask is not None:
            values = torch.where(mask, values, torch.zeros_like(values))
        total = self._total(counts, target).clamp_min(torch.finfo(values.dtype).tiny)
        return (values * counts).sum() / total

    def weigh(self, target: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return what a batch counts among others: the weights of its cells that have a value.

        Parameters
        ----------
        target : torch.Tensor
            Its targets.
        weights : torch.Tensor, optional
            Its own weights.

        Returns
        -------
        torch.Tensor
            A scalar, which is not read from the device.
        """
        return self._total(self._counts(target, self._mask(target), weights), target)

    def _total(self, counts: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What the mean divides by; the values of a loss have the weights of classes already."""
        classes = None if self._classes is None else self._classes(target)
        return (counts if classes is None else counts * classes).sum()

    def _mask(self, target: torch.Tensor) -> torch.Tensor | None:
        if target.is_floating_point():
            return ~target.isnan()
        return None if self._ignored is None else target != self._ignored

    def _counts(
        self, target: torch.Tensor, mask: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor:
        counts = torch.ones(target.shape, device=target.device)
        if self._weights is not None:
            if self._weights.device != target.device:
                self._weights = self._weights.to(target.device)
            counts = counts * self._weights
        if weights is not None:
            counts = counts * weights.reshape(*weights.shape, *(1,) * (target.ndim - weights.ndim))
        if counts.shape != target.shape:
            raise InvalidValueError(
                f"weights do not fit targets of shape {tuple(target.shape)}; together they have "
                f"shape {tuple(counts.shape)}"
            )
        return counts if mask is None else torch.where(mask, counts, torch.zeros_like(counts))


def masked(loss: Callable[..., Any]) -> MaskedLoss:
    """Return the mean of a loss over the cells whose target has a value.

    Parameters
    ----------
    loss : callable
        As of `MaskedLoss`.

    Returns
    -------
    MaskedLoss
        Usable as ``loss=`` and in ``metrics=`` of every trainer.

    Examples
    --------
    >>> masked(torch.nn.functional.l1_loss)(torch.ones(2), torch.tensor([0.5, float("nan")])).item()
    0.5
    """
    return MaskedLoss(loss)


def area_weights(latitude: Any, axis: int = -2, *, bounds: Any = None) -> torch.Tensor:
    """Return what the cells of a grid weigh: their area, up to a factor.

    Of one latitude per row, it is the area of the row's band between its bounds, which without
    `bounds` lie halfway to the next rows and never beyond a pole; of a latitude per cell, its
    cosine. Cells of a target of shape ``(sample, ..., lat, lon)`` then weigh their area, if every
    sample has these latitudes. For windows from all over a cube, let the batch bring the weights.

    Parameters
    ----------
    latitude : array, shape (rows,) or (rows, columns)
        Degrees north; those of a DataArray may be radians, if its ``units`` say so.
    axis : int
        Which axis of the target the rows are, counted from its end.
    bounds : array, shape (rows, 2), optional
        Edges of each row, in the same units.

    Returns
    -------
    torch.Tensor
        float32, of shape ``(rows, 1, ...)`` or ``(rows, columns, 1, ...)``; for `MaskedLoss`.

    Raises
    ------
    InvalidValueError
        If a latitude is beyond a pole or no number, all rows lie at one latitude and have no
        bounds, bounds are none of these rows, or `axis` does not leave room for the columns.

    Examples
    --------
    >>> area_weights([-60.0, 0.0, 60.0]).flatten().tolist()
    [0.5, 1.0, 0.5]
    >>> loss = MaskedLoss(torch.nn.MSELoss(), weights=area_weights([0.0, 60.0]))
    >>> loss(torch.zeros(1, 2, 1), torch.tensor([[[0.0], [3.0]]])).item()
    3.0
    """
    dims = np.ndim(latitude)
    if dims not in (1, 2):
        raise InvalidValueError(
            f"latitude has shape {np.shape(latitude)}; give one per row, or one per cell"
        )
    if -axis < dims:
        raise InvalidValueError(
            f"axis={axis} must be at most {-dims} for latitudes of shape {np.shape(latitude)}: "
            "rows are counted from the end, e.g. -2 for (..., lat, lon)"
        )
    units = getattr(latitude, "attrs", {}).get("units")
    weights = cell_areas(latitude, units, "latitude", bounds)
    # sin of a pole is not 1 to the last digit
    weights = weights.round(12).reshape(*weights.shape, *(1,) * (-axis - dims))
    return torch.from_numpy(weights).float()


def _checked(weights: Any) -> torch.Tensor:
    tensor = torch.as_tensor(np.asarray(weights), dtype=torch.float32)
    if not bool((tensor >= 0).all()) or not bool((tensor > 0).any()):
        raise InvalidValueError(
            "weights must be 0 or more, and one at least above 0; look for NaN and negative ones"
        )
    return tensor
