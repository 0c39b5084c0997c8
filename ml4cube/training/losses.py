"""Losses over the cells of a cube that have a value, weighted, independent of the batches.

The formula, for cells c with loss l, weight w and mask m (0 where the target has a gap)::

    loss = sum(w * m * l) / sum(w * m * k)

k is the class weight of the target in losses of torch that have class weights, which l contains
already, and 1 in all others. A batch has the weight ``sum(w * m * k)``, not its number of samples,
when batches are averaged over an epoch, an accumulated step or several ranks. So the result is
this formula over all cells, however they are divided into batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from ml4cube.core.angles import in_degrees
from ml4cube.core.areas import grid_areas
from ml4cube.core.axes import is_time
from ml4cube.core.display import PrintedAsCall, one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.cube.classes import MOST_CLASSES, class_names
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.loading.tensors import PTXrDataset
from ml4cube.training.inputs.checks import check_loss
from ml4cube.training.inputs.loss_functions import (
    ClassWeights,
    ShapeChecked,
    as_labels,
    is_over_classes,
    reduced,
    setting,
)

# Samples that are read at once to count classes.
_COUNTED_AT_ONCE = 256


class MaskedLoss(PrintedAsCall):
    """The mean of a loss over the cells whose target has a value.

    Cells whose target is NaN or infinite (or the loss's own ``ignore_index``) are left out, and
    no gradient reaches their predictions, not even one of 0 × NaN. A batch without a single value
    has loss 0. Losses of torch over classes take targets of one channel, (N, 1, *window), which may
    be floats with gaps, with predictions (N, classes, *window).

    Parameters
    ----------
    loss : callable
        A loss of torch, module or function, or your own ``loss(pred, target)`` that returns one
        value per cell of the target.
    weights : array, optional
        Weights of the cells, 0 or more, broadcast to the target as numpy does, from the right;
        for example `area_weights`. They are multiplied by the weights in a batch.

    Raises
    ------
    InvalidTypeError
        If `loss` is not callable.
    InvalidValueError
        If a weight is negative or NaN, or none is positive.

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
        # The loss per cell; it refuses predictions that would be broadcast against the target.
        self._cellwise = ShapeChecked("loss", reduced(loss, "none"))
        # If the loss is over classes: the class weights of targets, 0 for ignored ones.
        self._classes = None
        if is_over_classes(loss):
            self._classes = ClassWeights(loss)
        if self._classes is None:
            self._ignored_class = setting(loss, "ignore_index")
        else:
            self._ignored_class = self._classes.ignored  # -100, as in torch, if the loss says none
        self._weights = None
        if weights is not None:
            self._weights = _as_weights(weights)

    def __call__(self, pred: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean over the cells that have a value."""
        if self._classes is not None:
            target, weights = as_labels(target, weights, self._classes.ignored, pred)
        gaps = self._gaps(target)
        if gaps is not None:
            target = torch.where(gaps, 0, target)
            # Filled before the loss as well as after it, so that 0 * NaN reaches no gradient.
            if pred.shape == target.shape:
                pred = torch.where(gaps, 0, pred)
            elif self._classes is not None and pred.ndim == target.ndim + 1:
                pred = torch.where(gaps.unsqueeze(min(target.ndim, 1)), 0, pred)  # (N, classes, …)
        values = self._cellwise(pred, target)
        if not isinstance(values, Tensor) or values.shape != target.shape:
            shape = tuple(getattr(values, "shape", ()))
            raise InvalidValueError(
                f"the loss {self.loss!r} must return one value per cell of the target "
                f"{tuple(target.shape)}, or take reduction='none'; got shape {shape}"
            )
        if values.dtype != torch.float64:
            values = values.float()
        cell_weights = self._cell_weights(target, gaps, weights).to(values.dtype)
        if gaps is not None:
            values = torch.where(gaps, 0, values)
        total = self._total(cell_weights, target).clamp_min(torch.finfo(values.dtype).tiny)
        return (values * cell_weights).sum() / total

    def weigh(self, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weight of a batch: the sum of the weights of its cells that have a value.

        Parameters
        ----------
        target : torch.Tensor
            The targets of the batch.
        weights : torch.Tensor, optional
            The weights in the batch.

        Returns
        -------
        torch.Tensor
            A scalar on the device of the target.
        """
        if self._classes is not None:
            target, weights = as_labels(target, weights, self._classes.ignored)
        return self._total(self._cell_weights(target, self._gaps(target), weights), target)

    def _total(self, cell_weights: Tensor, target: Tensor) -> Tensor:
        """Return the denominator of the mean, with the class weights that the loss contains."""
        if self._classes is not None:
            class_weights = self._classes(target)
            if class_weights is not None:
                cell_weights = cell_weights * class_weights
        return cell_weights.sum()

    def _gaps(self, target: Tensor) -> Tensor | None:
        """Return which cells have no value; None if all have one."""
        if target.is_floating_point():
            return ~target.isfinite()
        if self._ignored_class is None:
            return None
        is_ignored: Tensor = target == self._ignored_class
        return is_ignored

    def _cell_weights(self, target: Tensor, gaps: Tensor | None, weights: Tensor | None) -> Tensor:
        """Return the product of all weights of every cell, 0 where it has no value."""
        combined = torch.ones(target.shape, device=target.device)
        if self._weights is not None:
            self._weights = self._weights.to(target.device)
            combined = combined * self._weights
        if weights is not None:  # the weights in the batch, per sample or per cell
            missing_dims = (1,) * (target.ndim - weights.ndim)
            combined = combined * weights.reshape(*weights.shape, *missing_dims)
        if combined.shape != target.shape:
            raise InvalidValueError(
                f"weights must broadcast to the target's shape {tuple(target.shape)}, "
                f"got {tuple(combined.shape)}"
            )
        if gaps is None:
            return combined
        return torch.where(gaps, 0, combined)


class CrossEntropy(MaskedLoss):
    """Cross entropy of the classes of a target, over the cells that have one.

    For one target of labels, such as land cover, as `PTXrDataset` gives it: floats or integers of
    shape (N, 1, *window), NaN in gaps. The model returns logits, (N, classes, *window), without a
    softmax, which `predict_cube` applies.

    Parameters
    ----------
    classes : sequence of float, or mapping
        Labels in the order of the model's channels, as in CF's ``flag_values``. A mapping
        ``{label: weight}``, as from `balanced_weights`, gives each class a weight too.
    weights : array, optional
        Weights of the cells, as in `MaskedLoss`; for example `area_weights`.

    Raises
    ------
    InvalidValueError
        If there are fewer than two labels or one is there twice, or a weight is negative. In
        training, if a target has another label.

    Notes
    -----
    The mean has the weights w of cells and classes: ``sum(w * -log(p)) / sum(w)``. Class weights
    change what probabilities the model learns: frequent classes get lower ones than they have.

    Examples
    --------
    >>> loss = CrossEntropy([10, 20, 30])
    >>> target = torch.tensor([[[20.0, float("nan")]]])
    >>> round(loss(torch.zeros(1, 3, 2), target).item(), 4)
    1.0986
    """

    def __init__(self, classes: Sequence[float] | Mapping[float, float], weights: Any = None):
        super().__init__(nn.CrossEntropyLoss(), weights)
        self.classes = classes
        labels = np.array([*classes], dtype=np.float64)
        if labels.size < 2 or np.unique(labels).size < labels.size:
            raise InvalidValueError(f"classes must be two or more distinct labels, got {classes!r}")
        self._order = torch.from_numpy(labels.argsort())
        self._labels = torch.from_numpy(labels)[self._order]
        self._of_classes = None
        if isinstance(classes, Mapping):
            self._of_classes = _as_weights([*classes.values()])

    def __call__(self, pred: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean over the cells that have a class."""
        n = len(self._labels)
        if pred.ndim < 2 or pred.shape[1] != n:
            raise InvalidValueError(
                f"the model must return one channel for each of the {n} classes, (N, {n}, ...), "
                f"got {tuple(pred.shape)}"
            )
        return super().__call__(pred, self._positions(target), weights)

    def weigh(self, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weight of a batch, as `MaskedLoss.weigh`."""
        return super().weigh(self._positions(target), weights)

    def _positions(self, target: Tensor) -> Tensor:
        """Return the position of each label among the classes; gaps stay gaps."""
        self._labels, self._order = (t.to(target.device) for t in (self._labels, self._order))
        values = target.double().contiguous()
        nearest = torch.searchsorted(self._labels, values).clamp_max(len(self._labels) - 1)
        is_gap, is_known = ~values.isfinite(), self._labels[nearest] == values
        if bool((unknown := ~is_gap & ~is_known).any()):
            raise InvalidValueError(
                f"the target has the label {values[unknown][0].item():g}, but classes are "
                f"{[*self.classes]}; add it, or make it a gap, as with ds.where"
            )
        positions = self._order[nearest]
        has_gaps = target.is_floating_point()
        if has_gaps:
            return torch.where(is_gap, torch.nan, positions)
        return positions

    def _cell_weights(self, target: Tensor, gaps: Tensor | None, weights: Tensor | None) -> Tensor:
        combined = super()._cell_weights(target, gaps, weights)
        if self._of_classes is None:
            return combined
        self._of_classes = self._of_classes.to(target.device)
        return combined * self._of_classes[target.clamp_min(0)]  # gaps are negative and weigh 0


def balanced_weights(data: Any) -> dict[float, float]:
    """Return the weight of each class by which all classes count alike in a loss.

    ``cells / (classes * cells of the class)``, as in scikit-learn's ``class_weight="balanced"``.

    Parameters
    ----------
    data : PTXrDataset
        Training data with one target of classes; all samples are read once.

    Returns
    -------
    dict of float to float
        Weights by label, for `CrossEntropy` or the `weights` of `PTXrDataset`. In the order of
        ``flag_values``, which `predict_cube` gives to the model's channels; others in increasing
        order.

    Raises
    ------
    InvalidTypeError
        If `data` is not a PTXrDataset with one target.
    InvalidValueError
        If it has more than 64 different values, or none, or one that is no whole number.

    Examples
    --------
    >>> import xarray as xr
    >>> from ml4cube.datasets.pytorch import PTXrDataset
    >>> cube = xr.Dataset({"a": ("x", np.ones(4)), "cover": ("x", [10, 10, 10, 20])})
    >>> balanced_weights(PTXrDataset(cube, to_pred="cover"))
    {10.0: 0.6666666666666666, 20.0: 2.0}
    """
    if not isinstance(data, PTXrDataset) or len(data.targets) != 1:
        raise InvalidTypeError(f"data must be a PTXrDataset with one target, got {one_line(data)}")
    counts: dict[float, int] = {}
    for start in range(0, len(data), _COUNTED_AT_ONCE):
        target = data.take(range(start, min(start + _COUNTED_AT_ONCE, len(data))))[1]
        labels, numbers = target[target.isfinite()].unique(return_counts=True)
        for label, number in zip(labels.tolist(), numbers.tolist(), strict=True):
            counts[label] = counts.get(label, 0) + number
        if len(counts) > MOST_CLASSES:
            break
    if not 0 < len(counts) <= MOST_CLASSES:
        raise InvalidValueError(
            f"the target must have 1 to {MOST_CLASSES} classes, {data.targets[0]!r} has "
            f"{'more' if counts else 'no value'}"
        )
    if any(not float(label).is_integer() for label in counts):
        raise InvalidValueError(
            f"labels must be whole numbers, {data.targets[0]!r} has {[*counts]}; if it was scaled, "
            "give it CF's flag_values or an integer dtype, or use scale_fn=None"
        )
    cells = sum(counts.values())
    listed = _listed_labels(data)
    order = sorted(counts, key=lambda c: (listed.index(c) if c in listed else len(listed), c))
    return {float(c): cells / (len(counts) * counts[c]) for c in order}


def _listed_labels(data: PTXrDataset) -> list[float]:
    """Return the labels that the flags of the target list, in their order."""
    variables = {}
    if data.metadata:
        variables = data.metadata.provenance.get("variables", {})
    attrs = variables.get(data.targets[0], {}).get("attrs")
    return [*class_names(xr.Variable((), 0.0, attrs))]


def masked(loss: Callable[..., Any]) -> MaskedLoss:
    """Return `MaskedLoss` of a loss, without weights.

    Parameters
    ----------
    loss : callable
        As in `MaskedLoss`.

    Returns
    -------
    MaskedLoss
        For ``loss=`` and ``metrics=`` of every trainer.

    Examples
    --------
    >>> masked(torch.nn.functional.l1_loss)(torch.ones(2), torch.tensor([0.5, float("nan")])).item()
    0.5
    """
    return MaskedLoss(loss)


def area_weights(
    latitude: Any, axis: int = -2, *, longitude: Any = None, bounds: Any = None
) -> Tensor:
    """Return the relative areas of the cells of a grid, for `MaskedLoss`.

    With one latitude per row, the area is that of the latitude band between the row's bounds.
    Without `bounds` these lie halfway to the next rows, and never beyond a pole. With latitude and
    longitude of each cell, it is that of the spherical quadrilateral between the centres around it,
    and 0 where a position is missing. `ml4cube.evaluation.area_weights` knows other grids: give its
    values to `MaskedLoss`. All samples must have these latitudes; where windows come from different
    latitudes, put the weights into the batches.

    Parameters
    ----------
    latitude : array, shape (rows,) or (rows, columns)
        Degrees north, or radians if the ``units`` of a DataArray say so.
    axis : int
        The axis of the rows in the target, counted from its end.
    longitude : array, shape (rows, columns), optional
        Degrees east of each cell, or radians, beside latitudes of each cell.
    bounds : array, shape (rows, 2), optional
        Bounds of each row, in the same units.

    Returns
    -------
    torch.Tensor
        float32, of shape ``(rows, 1, ...)`` or ``(rows, columns, 1, ...)``.

    Raises
    ------
    InvalidValueError
        If the latitude of a row is NaN, one lies beyond a pole, all rows have the same latitude and
        no bounds, latitudes of cells have no longitudes, the bounds do not fit the rows, or `axis`
        leaves no axis for the columns.

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
            f"latitude must have one value per row or per cell, got shape {np.shape(latitude)}"
        )
    if -axis < dims:
        raise InvalidValueError(
            f"axis must be at most {-dims} for latitudes of shape {np.shape(latitude)}, for "
            f"example -2 for (..., lat, lon); got {axis}"
        )
    units = getattr(latitude, "attrs", {}).get("units")
    lons = None
    if longitude is not None:
        lons = in_degrees(longitude, units)
    edges = None
    if bounds is not None:
        edges = in_degrees(bounds, units)
    weights = np.nan_to_num(grid_areas(in_degrees(latitude, units), lons, "latitude", edges))
    trailing_dims = (1,) * (-axis - dims)
    return torch.from_numpy(weights.reshape(*weights.shape, *trailing_dims)).float()


def target_weights(data: Any, weights: Mapping[Any, float]) -> Tensor:
    """Return weights of target variables, and of their levels, for `MaskedLoss`.

    Multiply them by `area_weights` to weight by area too.

    Parameters
    ----------
    data : PTXrDataset
        Data set with the targets.
    weights : mapping of str or tuple to float
        ``{"t2m": 2.0}`` for a variable, ``{("t", 500): 0.1}`` for its cells where the one dim of
        y that is neither time, latitude nor longitude has this coordinate, instead of the weight
        of the variable. All others have the weight 1.

    Returns
    -------
    torch.Tensor, shape (targets, *window)
        float32, with one cell along dims of the window in which weights do not differ.

    Raises
    ------
    InvalidTypeError
        If `data` is not a PTXrDataset with targets.
    InvalidValueError
        If a variable is no target, a level is in none or several dims of y, the windows of
        samples have different levels, or a weight is negative or NaN.

    Examples
    --------
    >>> import xarray as xr
    >>> from ml4cube.datasets.pytorch import PTXrDataset
    >>> t = (("time", "level", "lat"), np.ones((4, 2, 3)))
    >>> cube = xr.Dataset({"t": t, "q": t, "z": t}, {"level": [500, 850]})
    >>> size = {"level": 2, "lat": 3}
    >>> data = PTXrDataset(cube, to_pred=["t", "q"], sample_size=size, scale_fn=None)
    >>> weights = target_weights(data, {"q": 2.0, ("t", 500): 0.5})
    >>> weights.shape, weights.flatten().tolist()
    (torch.Size([2, 2, 1]), [0.5, 1.0, 2.0, 2.0])
    >>> loss = MaskedLoss(torch.nn.MSELoss(), weights * area_weights([0.0, 30.0, 60.0], axis=-1))
    """
    if not isinstance(data, PTXrDataset) or not data.targets:
        raise InvalidTypeError(f"data must be a PTXrDataset with to_pred, got {one_line(data)}")
    if not isinstance(weights, Mapping):
        raise InvalidTypeError(f"weights must be a mapping such as {{'t2m': 2.0}}, got {weights!r}")
    levels = [key for key in weights if isinstance(key, tuple)]
    dims = list(data.step_sizes[1])
    combined = torch.ones(len(data.targets), *(1 for _ in dims))
    for key in sorted(weights, key=levels.__contains__):  # first those of whole variables
        name, *level = key if isinstance(key, tuple) else (key,)
        check_choice("weights: target", name, data.targets)
        cells: tuple[Any, ...] = (data.targets.index(name),)
        if level:
            dim, position = _find_level(data, level[0])
            axis = 1 + dims.index(dim)
            if combined.shape[axis] == 1:
                combined = combined.repeat_interleave(data.step_sizes[1][dim], axis)
            cells += (*(slice(None) for _ in dims[: axis - 1]), position)
        combined[cells] = weights[key]
    return _as_weights(combined)


def _find_level(data: PTXrDataset, level: Any) -> tuple[str, int]:
    """Return the dim and the position at which windows of y have a level."""
    levels, matches = _levels(data), []
    for dim, values in levels.items():
        for position in np.flatnonzero(values == level)[:1]:
            matches.append((dim, int(position)))
    if len(matches) != 1:
        listed = {dim: values.tolist() for dim, values in levels.items()}
        raise InvalidValueError(
            f"weights: level {level!r} must be in one dim of the windows of y, found in "
            f"{[dim for dim, _ in matches]}; they have {listed}"
        )
    return matches[0]


def _levels(data: PTXrDataset) -> dict[str, Any]:
    """Return the coordinates of y along its dims that are neither time, latitude nor longitude."""
    later = [dim for dim, (offset, _) in (data.lead or {}).items() if offset]
    sample, every = data.to_dataset(data.take([0]), [0]), data.coords(range(len(data)))
    levels = {}
    for dim in data.step_sizes[1]:
        cells = sample.get(f"{dim}_cells")
        if cells is None or dim in later or is_time(cells):
            continue
        if is_latitude(dim, {}) or is_longitude(dim, {}):
            continue
        if np.ptp(every[f"{dim}_index"]):
            raise InvalidValueError(
                f"weights of levels need windows with the same cells along {dim!r}, which "
                "those of these samples do not have; give PTXrDataset weights= of cells"
            )
        levels[dim] = cells.values[0]
    return levels


def _as_weights(weights: Any) -> Tensor:
    if not isinstance(weights, Tensor):  # numpy has no arrays of bfloat16, or on a GPU
        weights = np.asarray(weights)
    tensor = torch.as_tensor(weights, dtype=torch.float32).detach()
    if not bool((tensor >= 0).all()) or not bool((tensor > 0).any()):
        raise InvalidValueError("weights must be 0 or more, and at least one positive, and not NaN")
    return tensor
