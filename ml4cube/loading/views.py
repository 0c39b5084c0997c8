"""Sources that change the samples of another source: parts of windows, static fields, weights.

Each is a `SampleSource` around a `SampleSource`, so loaders need not know them. It makes some
variables itself (`View._make`); everything else passes through unchanged (`View.read`). Does not
use torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import SizesLike, parse_sizes
from ml4cube.core.rank_shares import Ints
from ml4cube.core.scaling import Scaling
from ml4cube.loading.lead_time import Lead, TargetOptions, base_name, target_name, whole_cells
from ml4cube.loading.ring.slots import Scratch
from ml4cube.loading.sources import SampleSource, SampleVariable, unscaled
from ml4cube.sampling.request import check_known

if TYPE_CHECKING:
    import xarray as xr

Arrays = dict[str, NDArray[Any]]

#: Name of the weights among the variables of a source.
WEIGHT = "@weight"


class View(SampleSource):
    """A source that makes some variables itself, and passes on all else of another source."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.variables = dict(source.variables)
        self.lead, self.cube_dims = source.lead, source.cube_dims
        self.counts, self.slow = source.counts, source.slow
        self._scratch = Scratch()
        # the variables of the other source that each variable made here needs
        self._needs: dict[str, tuple[str, ...]] = {}

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        passed = {name: array for name, array in out.items() if name not in self._needs}
        made = [name for name in out if name in self._needs]
        needed = {stored for name in made for stored in self._needs[name]}
        cells = {
            name: self._scratch.take(name, (int(self.counts[chunk]), *v.window), v.dtype)
            for name, v in self._source.variables.items()
            if name in needed
        }
        self._source.read(chunk, {**passed, **cells})
        for name in passed.keys() & cells.keys():
            passed[name][...] = cells[name]
        for name in made:
            self._make(name, cells, chunk, out[name])

    @abstractmethod
    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        """Write a variable of its own, from those of the other source that it needs."""

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        return self._source.describe(chunk)

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples, one array per coordinate."""
        return self._source.coords(samples)

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples along cube dims."""
        return self._source.first_cells(samples, dims)

    @cached_property
    def axes(self) -> dict[str, xr.Variable]:
        """The coordinate of every cell along each cube dim where it is known."""
        return self._source.axes


class WindowPair(View):
    """Stored windows cut in two: the first cells are inputs, later ones are targets."""

    def __init__(
        self, source: SampleSource, wanted: TargetOptions, sample_size: SizesLike | None
    ) -> None:
        super().__init__(source)
        check_known("to_pred", wanted.targets, source.variables)
        check_known("weights", wanted.scored, source.variables)
        lead = _lead_inside(source, wanted, sample_size)
        inputs = {dim: slice(0, along.input_size) for dim, along in lead.along.items()}
        targets = {d: slice(a.offset, a.offset + a.size) for d, a in lead.along.items()}
        self.lead = lead
        self._pieces: dict[str, tuple[slice, ...]] = {}
        for name in source.variables:
            self._add(name, name, inputs)
        for name in wanted.scored:
            self._add(target_name(name), name, targets)

    def _add(self, name: str, stored: str, cells: Mapping[str, slice]) -> None:
        sizes, dtype = self._source.variables[stored]
        taken = {dim: cells.get(dim, slice(0, n)) for dim, n in sizes.items()}
        kept = {dim: s.stop - s.start for dim, s in taken.items()}
        self.variables[name] = SampleVariable(kept, dtype)
        self._needs[name], self._pieces[name] = (stored,), tuple(taken.values())

    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        out[...] = cells[self._needs[name][0]][(slice(None), *self._pieces[name])]


def _lead_inside(
    source: SampleSource, wanted: TargetOptions, sample_size: SizesLike | None
) -> Lead:
    """Make a lead whose inputs and targets lie inside the stored windows."""
    stored: dict[str, int] = {}
    for variable in source.variables.values():
        stored |= variable.sizes
    offset = whole_cells("target_offset", wanted.target_offset, stored, least=0)
    inputs = {dim: max(1, n - offset.get(dim, 0)) for dim, n in stored.items()}
    if sample_size is not None:
        inputs |= parse_sizes("sample_size", sample_size, stored)
    lead = Lead.parse(wanted.target_offset, wanted.target_size, inputs)
    lead.check_fits(stored, "a stored window")
    return lead


class Broadcast(View):
    """Static fields and scalars, repeated along the dims of the window that they lack."""

    def __init__(self, source: SampleSource, names: Iterable[str]) -> None:
        super().__init__(source)
        variables = {name: source.variables[name] for name in names}
        sizes = max((v.sizes for v in variables.values()), key=len)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (own, dtype) in variables.items():
            fits = own.items() <= sizes.items() and [d for d in sizes if d in own] == list(own)
            if fits and own != sizes:
                self._needs[name] = (name,)
                self._shapes[name] = tuple(own.get(dim, 1) for dim in sizes)
                self.variables[name] = SampleVariable(sizes, dtype)

    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        out[...] = cells[name].reshape(-1, *self._shapes[name])


class FloatsAsIntegers(View):
    """Floats that are read as integers; gaps are refused, not cast."""

    def __init__(self, source: SampleSource, names: Iterable[str]) -> None:
        super().__init__(source)
        floats = [n for n in names if source.variables[n].dtype.kind == "f"]
        self._needs = {name: (name,) for name in floats}

    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        if not np.isfinite(cells[name]).all():
            raise InvalidValueError(
                f"{name!r} has gaps in {self.describe(chunk)}, which cannot be read as "
                f"{out.dtype}; drop or fill them, or read floats"
            )
        out[...] = cells[name]


class Weighted(View):
    """Samples with one weight each, or one per cell of the target."""

    def __init__(
        self, source: SampleSource, weights: Any, target: str, scaling: Mapping[str, Scaling]
    ) -> None:
        super().__init__(source)
        self._scaling = scaling
        self._classes: NDArray[Any] | None = None
        self._values = np.zeros(0, np.float32)
        like = ""  # the variable that the weights are made of
        if isinstance(weights, str):
            check_known("weights", [weights], source.variables)
            like = weights
        elif isinstance(weights, Mapping):
            if base_name(target) in scaling:
                raise InvalidTypeError(
                    f"weights of classes need a target of classes, but {target!r} was scaled as a "
                    "number; store it as integers, or use scale_fn=None"
                )
            if not weights:
                raise InvalidValueError("weights={} has no class; give {class: weight}")
            self._classes, order = np.unique(np.array(list(weights)), return_index=True)
            self._values = _checked(list(weights.values()))[order]
            like = target
        else:
            self._values = _checked(weights)
            if self._values.shape != (int(self.starts[-1]),):
                raise InvalidValueError(
                    f"weights must be one per sample, of which there are "
                    f"{int(self.starts[-1])}, got shape {self._values.shape}"
                )
        sizes = source.variables[like].sizes if like else {}
        self.variables[WEIGHT] = SampleVariable(sizes, self._values.dtype)
        # as stored: the dtype of the batch may merge classes
        self._needs[WEIGHT] = (like,) if like else ()

    def _make(self, name: str, cells: Arrays, chunk: int, out: NDArray[Any]) -> None:
        if not cells:
            out[...] = self._values[self.rows(chunk)]
            return
        ((stored, values),) = cells.items()
        if self._classes is not None:
            out[...] = self._of_classes(stored, values, chunk)
            return
        scaling = self._scaling.get(base_name(stored))
        if scaling is not None:
            values = unscaled(scaling, stored, values, self._source, self.rows(chunk))
        out[...] = _checked(values, self.describe(chunk))

    def _of_classes(self, name: str, found: NDArray[Any], chunk: int) -> NDArray[np.float32]:
        """Return the weight of each cell, 0 for gaps."""
        assert self._classes is not None
        position = np.searchsorted(self._classes, found).clip(max=len(self._classes) - 1)
        known = self._classes[position] == found
        gaps = found != found
        if not (known | gaps).all():
            raise InvalidValueError(
                f"{name!r} has class {found[~known & ~gaps].flat[0].item()!r} in "
                f"{self.describe(chunk)}, but weights has only {self._classes.tolist()}; give "
                "every class a weight"
            )
        return np.where(known, self._values[position], np.float32(0))


def _checked(weights: ArrayLike, where: str = "") -> NDArray[np.float32]:
    """Return weights as float32; refuse negative and missing ones."""
    try:
        values = np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"weights must be a variable, one number per sample, or {{class: weight}}, got "
            f"{weights!r}"
        ) from error
    wrong = ~(values >= 0) | np.isinf(values)
    if wrong.any():
        raise InvalidValueError(
            f"weights must be finite and not negative, got {values[wrong].flat[0]}"
            + (f" in {where}" if where else "")
        )
    return values
