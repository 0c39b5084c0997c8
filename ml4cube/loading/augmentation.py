"""Flip and Rotate90: changes of a batch that keep its grid a grid.

An augmentation takes a batch and a random generator and returns a batch. These know which axis
of which tensor is which dim of the cube, so that X, y and weights of a sample are turned alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch
from ml4cube.core.sample_spec import parse_names
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.loading.lead import Lead
from ml4cube.loading.tensors import PTXrDataset

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor

Layout = tuple[Mapping[str, int], ...]
Augment = Callable[[Any, torch.Generator], Any]


def bound(augment: Any, data: Any) -> Augment | None:
    """Tell augmentations which axes a data set's batches have, and make one of several."""
    if augment is None:
        return None
    steps = list(augment) if isinstance(augment, list | tuple) else [augment]
    ready: list[Augment] = []
    for step in steps:
        if not callable(step):
            raise InvalidTypeError(
                f"augment={step!r} cannot be called; give a function of a batch and a generator"
            )
        ready.append(step.bind(data) if hasattr(step, "bind") else step)

    return _InTurn(tuple(ready))


@dataclass(frozen=True)
class _InTurn:
    """Several augmentations, one after the other."""

    steps: tuple[Augment, ...]

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        for step in self.steps:
            batch = step(batch, generator)
        return batch

    @property
    def keeps_samples(self) -> bool:
        """Whether all promise to; a user's own may leave out samples."""
        return all(getattr(step, "keeps_samples", False) for step in self.steps)


class _Turn:
    """What turns samples along dims; made ready for a data set by `bind`."""

    dims: tuple[str, ...]
    keeps_samples = True

    def __init__(self, p: float) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
            raise InvalidValueError(f"p={p!r} is no probability; give a number from 0 to 1")
        self.p = float(p)
        self._layout: Layout = ()

    def bind(self, data: Any) -> Any:
        """Return one that knows the dims of a data set's batches."""
        if not isinstance(data, PTXrDataset):
            raise InvalidTypeError(
                f"{type(self).__name__} needs to know dims, and a {type(data).__name__} has none; "
                "give a PTXrDataset, or write the augmentation for its tensors"
            )
        layout = tuple(
            dict(zip(dims, field.window, strict=True))
            for dims, field in zip(data.layout, data._fields, strict=True)
        )
        twin = self._for(layout)
        twin._check_lead(data._source.lead)
        twin._layout = layout
        return twin

    def _check_lead(self, lead: Lead | None) -> None:
        """Refuse windows of X and y that would each be turned about a centre of its own."""
        if lead is None:
            return
        for dim, k, old, new in zip(
            lead.dims, lead.offset, lead.input_size, lead.size, strict=True
        ):
            if dim in self.dims and 2 * k + new != old:
                raise InvalidValueError(
                    f"{type(self).__name__}(dims={list(self.dims)}): along {dim!r} the targets "
                    f"({new} cells, {k} from the first of {old} of the inputs) have another "
                    "centre, about which they would be turned; choose other dims"
                )

    def _for(self, layout: Layout) -> Any:
        raise NotImplementedError

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        """Turn each sample of a batch by chance, X and y and weights alike."""
        if not self._layout:
            raise InvalidTypeError(
                f"{type(self).__name__} knows no dims yet; give it to prep_dataloader by augment="
            )
        tensors = _tensors(batch)
        turned = self._turned(tensors, generator)
        if isinstance(batch, Tensor):
            return turned[0]
        if isinstance(batch, Mapping):
            return dict(zip(batch, turned, strict=True))
        return tuple(turned)

    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        raise NotImplementedError

    def _axis(self, number: int, dim: str) -> int:
        """Axis of a dim in a tensor, counted from its end."""
        dims = list(self._layout[number])
        return dims.index(dim) - len(dims)


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _pick(chosen: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Sample by sample one or the other."""
    return torch.where(chosen.reshape(-1, *(1 for _ in range(yes.ndim - 1))), yes, no)


class Flip(_Turn):
    """Mirrors samples along dims of their window, each dim by chance.

    A target that lacks the dim, such as one class of a whole window, stays as it is. Leave out
    dims along which vectors point (u along longitude): a mirrored wind would blow backwards.

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

    def _for(self, layout: Layout) -> Flip:
        known = {dim for axes in layout for dim in axes}
        missing = [dim for dim in self.dims if dim not in known]
        if missing or not self.dims:
            raise InvalidValueError(
                f"Flip(dims={list(self.dims)}): samples have the dims {sorted(known)}; choose some "
                "of these"
            )
        return Flip(self.dims, self.p)

    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        for dim in self.dims:
            first = tensors[0]
            draws = torch.rand(len(first), generator=generator, device=first.device)
            tensors = [
                _pick(draws < self.p, tensor.flip(self._axis(number, dim)), tensor)
                if dim in self._layout[number]
                else tensor
                for number, tensor in enumerate(tensors)
            ]
        return tensors


class Rotate90(_Turn):
    """Turns samples by a quarter, a half or three quarters, in the plane of two dims.

    A quarter turn makes one dim the other, so both must have equal sizes. On a grid of latitude
    and longitude it also swaps what is near the pole with what is east: that has to be asked for.

    Parameters
    ----------
    dims : pair of str
        Dims of the cube.
    p : float
        Probability that a sample is turned at all.
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
            raise InvalidValueError(f"dims={dims!r}; a rotation needs two dims, in this order")
        self.geographic = geographic
        swapped = all(  # dims are known by name only, as yet
            any(alike(dim, {}, rotated=True) for dim in self.dims)
            for alike in (is_latitude, is_longitude)
        )
        if swapped and not geographic:
            raise InvalidValueError(
                f"Rotate90(dims={list(self.dims)}) would turn latitude into longitude; use Flip, "
                "or geographic=True if that is meant"
            )

    def _for(self, layout: Layout) -> Rotate90:
        for number, axes in enumerate(layout):
            found = {dim: axes[dim] for dim in self.dims if dim in axes}
            if (number == 0 and len(found) != 2) or len(found) == 1 or len({*found.values()}) > 1:
                raise InvalidValueError(
                    f"Rotate90(dims={list(self.dims)}): the samples have {dict(axes)}; both dims "
                    "must be there and of one size. Use Flip for windows that are not square"
                )
        return Rotate90(self.dims, self.p, geographic=self.geographic)

    def _turned(self, tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        first = tensors[0]
        draws = torch.rand(len(first), generator=generator, device=first.device)
        turns = 1 + torch.randint(3, (len(first),), generator=generator, device=first.device)
        turns = torch.where(draws < self.p, turns, 0)
        return [
            self._rotated(number, tensor, turns) if self.dims[0] in self._layout[number] else tensor
            for number, tensor in enumerate(tensors)
        ]

    def _rotated(self, number: int, tensor: Tensor, turns: Tensor) -> Tensor:
        plane = [self._axis(number, dim) for dim in self.dims]
        result = tensor
        for k in (1, 2, 3):
            result = _pick(turns == k, torch.rot90(tensor, k, plane), result)
        return result
