"""Flip and Rotate90: augmentations that keep the samples of a batch on a grid.

An augmentation takes a batch and a random generator and returns a batch. These two know the dim
of every axis of the tensors, so that X, y and weights of a sample are turned alike.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ml4cube.core.display import PrintedAsCall
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch, parse_names
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.loading.handover import Augment
from ml4cube.loading.sources import SampleSource
from ml4cube.loading.tensors import PTXrDataset

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor

# Cells along each dim of a window, for each tensor of a batch; dims in the order of the axes.
Layout = tuple[Mapping[str, int], ...]


def bind_augmentations(
    augment: Augment | Sequence[Augment] | None, data: object
) -> tuple[Augment, ...]:
    """Bind augmentations to the axes of a data set's batches."""
    if augment is None:
        return ()
    steps = augment if isinstance(augment, list | tuple) else [augment]
    ready: list[Augment] = []
    for step in steps:
        if not callable(step):
            raise InvalidTypeError(
                f"augment must be a function of a batch and a generator, got {step!r}"
            )
        ready.append(step.bind(data) if hasattr(step, "bind") else step)
    return tuple(ready)


class _Turn(PrintedAsCall, ABC):
    """Base of augmentations along dims, which `bind` prepares for a data set."""

    dims: tuple[str, ...]
    keeps_samples = True

    def __init__(self, p: float) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
            raise InvalidValueError(f"p must be a probability from 0 to 1, got {p!r}")
        self.p = float(p)
        self._layout: Layout = ()

    def bind(self, data: object) -> Self:
        """Return a copy that knows the dims of a data set's batches."""
        if not isinstance(data, PTXrDataset):
            raise InvalidTypeError(
                f"{type(self).__name__} needs a PTXrDataset, which knows its dims, got a "
                f"{type(data).__name__}; write an augmentation for its tensors"
            )
        source, bound = data._source, copy.copy(self)
        bound._layout = tuple(source.variables[f.names[0]].sizes for f in data._fields)
        bound._check(source)
        return bound

    def _check(self, source: SampleSource) -> None:
        """Refuse dims that cannot be turned, as those of X and y with different centres."""
        for dim, (offset, input_size, target_size) in source.lead.items():
            if dim in self.dims and 2 * offset + target_size != input_size:
                raise InvalidValueError(
                    f"{type(self).__name__}(dims={list(self.dims)}): along {dim!r} the centre of "
                    f"the targets ({target_size} cells, {offset} after the first of the "
                    f"{input_size} of the inputs) is not that of the inputs; choose other dims"
                )

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        """Turn each sample of a batch at random, X and y and weights alike."""
        if not self._layout:
            raise InvalidTypeError(
                f"{type(self).__name__} does not know the dims yet; use prep_dataloader(augment=)"
            )
        tensors = _tensors(batch)
        turned = self._turned(tensors, generator)
        if isinstance(batch, Tensor):
            return turned[0]
        if isinstance(batch, Mapping):
            return dict(zip(batch, turned, strict=True))
        return tuple(turned)

    @abstractmethod
    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        """Return the tensors of a batch, each sample turned at random."""

    def _axis(self, number: int, dim: str) -> int:
        """Return the axis of a dim in a tensor, counted from the end."""
        dims = list(self._layout[number])
        return dims.index(dim) - len(dims)


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch)


def _pick(chosen: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Choose one or the other for each sample."""
    return torch.where(chosen.reshape(-1, *(1 for _ in range(yes.ndim - 1))), yes, no)


class Flip(_Turn):
    """Mirror samples along dims of their window, each dim at random.

    A target that lacks the dim, such as one class of a whole window, stays as it is. Leave out
    dims along which vectors point (u along longitude), because their sign would be wrong.

    Parameters
    ----------
    dims : str or sequence of str
        Dims of the cube.
    p : float
        Probability for each dim.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> cube = xr.Dataset({"a": (("y", "x"), np.arange(6.0).reshape(2, 3))})
    >>> data = PTXrDataset(cube, features="a", sample_size={"x": 3}, scale_fn=None)
    >>> Flip("x", p=1).bind(data)(data.take([0]), torch.Generator())
    tensor([[[2., 1., 0.]]])
    """

    def __init__(self, dims: str | Sequence[str], p: float = 0.5) -> None:
        super().__init__(p)
        self.dims = parse_names("dims", dims)

    def _check(self, source: SampleSource) -> None:
        dims = {dim for axes in self._layout for dim in axes}
        missing = [dim for dim in self.dims if dim not in dims]
        if missing or not self.dims:
            raise InvalidValueError(
                f"Flip(dims={list(self.dims)}): unknown dims; the samples have {sorted(dims)}"
            )
        super()._check(source)

    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        for dim in self.dims:
            first = tensors[0]
            draws = torch.rand(len(first), generator=generator, device=first.device)
            for number, tensor in enumerate(tensors):
                if dim in self._layout[number]:
                    flipped = tensor.flip(self._axis(number, dim))
                    tensors[number] = _pick(draws < self.p, flipped, tensor)
        return tensors


class Rotate90(_Turn):
    """Rotate samples by 90, 180 or 270 degrees in the plane of two dims.

    A rotation by 90 degrees swaps the dims, so both must have the same size. On a grid of
    latitude and longitude this needs ``geographic=True``.

    Parameters
    ----------
    dims : pair of str
        Dims of the cube.
    p : float
        Probability that a sample is rotated.
    geographic : bool
        Whether latitude may be turned into longitude.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> cube = xr.Dataset({"a": (("y", "x"), np.arange(4.0).reshape(2, 2))})
    >>> data = PTXrDataset(cube, features="a", sample_size={"y": 2, "x": 2}, scale_fn=None)
    >>> turn = Rotate90(("y", "x"), p=1).bind(data)
    >>> turned = turn(data.take([0]), torch.Generator().manual_seed(1))
    >>> any(torch.equal(turned, torch.rot90(data.take([0]), k, (-2, -1))) for k in (1, 2, 3))
    True
    """

    def __init__(self, dims: Sequence[str], p: float = 0.75, *, geographic: bool = False) -> None:
        super().__init__(p)
        self.dims = parse_names("dims", dims)
        if len(self.dims) != 2:
            raise InvalidValueError(f"dims must be two dims, got {dims!r}")
        self._geographic = geographic
        self._check_geographic({})  # only the names of dims are known yet

    def _check(self, source: SampleSource) -> None:
        for number, axes in enumerate(self._layout):
            coordinates = {dim: axes[dim] for dim in self.dims if dim in axes}
            if (
                (number == 0 and len(coordinates) != 2)
                or len(coordinates) == 1
                or len({*coordinates.values()}) > 1
            ):
                raise InvalidValueError(
                    f"Rotate90(dims={list(self.dims)}): samples must have both dims, of one size, "
                    f"and have {dict(axes)}; use Flip for windows that are not square"
                )
        super()._check(source)
        along = {dim: source.axes.get(source.cube_dim(dim)) for dim in self.dims}
        self._check_geographic({dim: v.attrs for dim, v in along.items() if v is not None})

    def _check_geographic(self, attrs: Mapping[str, Mapping[Any, Any]]) -> None:
        """Refuse latitude and longitude, by the names of dims and their attributes."""
        has_latitude, has_longitude = (
            any(is_role(dim, attrs.get(dim, {}), rotated=True) for dim in self.dims)
            for is_role in (is_latitude, is_longitude)
        )
        if has_latitude and has_longitude and not self._geographic:
            raise InvalidValueError(
                f"Rotate90(dims={list(self.dims)}) would swap latitude and longitude; use Flip, "
                "or geographic=True if you want that"
            )

    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        first = tensors[0]
        draws = torch.rand(len(first), generator=generator, device=first.device)
        turns = 1 + torch.randint(3, (len(first),), generator=generator, device=first.device)
        turns = torch.where(draws < self.p, turns, 0)
        for number, tensor in enumerate(tensors):
            if self.dims[0] in self._layout[number]:
                tensors[number] = self._rotated(number, tensor, turns)
        return tensors

    def _rotated(self, number: int, tensor: Tensor, turns: Tensor) -> Tensor:
        plane = [self._axis(number, dim) for dim in self.dims]
        result = tensor
        for k in (1, 2, 3):
            result = _pick(turns == k, torch.rot90(tensor, k, plane), result)
        return result
