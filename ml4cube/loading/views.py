"""Sources that change what another source gives: parts of windows, static fields, weights.

Each is a `SampleSource` around a `SampleSource`; so loaders know nothing of them. Nothing here
knows torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import SizesLike, parse_pairs, parse_sizes
from ml4cube.core.shares import Ints
from ml4cube.loading.known_scaling import KnownScaling
from ml4cube.loading.lead import Lead, LeadArguments, target_name

if TYPE_CHECKING:
    import xarray as xr

    from ml4cube.loading.sources import SampleSource

Arrays = dict[str, NDArray[Any]]

#: The weights among the variables of a source.
WEIGHT = "@weight"


class Scratch(threading.local):
    """Arrays that the same thread uses again; none travel to another process."""

    def __init__(self) -> None:
        """Nothing held yet."""
        self._arrays: Arrays = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty one."""
        return Scratch, ()

    def take(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Lend an array until the next call for the same name."""
        held = self._arrays.get(name)
        if held is None or held.shape[1:] != shape[1:] or len(held) < shape[0]:
            held = self._arrays[name] = np.empty(shape, dtype)
        return held[: shape[0]]


class View:
    """A source that gives what another one gives; the base of the others."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.schema = dict(source.schema)
        self.dims = dict(source.dims)
        self.lead = source.lead
        self._starts = np.concatenate([[0], np.cumsum(source.counts)])
        self._scratch = Scratch()

    @property
    def counts(self) -> Ints:
        """Samples in each chunk."""
        return self._source.counts

    @property
    def slow(self) -> bool:
        """Whether a read mostly waits."""
        return self._source.slow

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        self._source.read(chunk, out)

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message."""
        return self._source.describe(chunk)

    def coords(self, samples: Ints) -> Arrays:
        """Look up where samples come from."""
        return self._source.coords(samples)

    def places(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Look up where samples begin."""
        return self._source.places(samples, dims)

    def axes(self) -> dict[str, xr.Variable]:
        """Coordinate values of every cell along each cube dim, as far as they are known."""
        return self._source.axes()

    def _rows(self, chunk: int) -> Ints:
        """Numbers of a chunk's samples."""
        return np.arange(self._starts[chunk], self._starts[chunk + 1])

    def _room(self, chunk: int, name: str) -> NDArray[Any]:
        """An array for a variable of the other source."""
        window, dtype = self._source.schema[name]
        return self._scratch.take(name, (int(self.counts[chunk]), *window), dtype)


class WindowPair(View):
    """Stored windows taken apart: the first cells are inputs, later ones are targets."""

    def __init__(
        self, source: SampleSource, wanted: LeadArguments, sample_size: SizesLike | None
    ) -> None:
        super().__init__(source)
        stored = _stored_sizes(source)
        lead = _lead_inside(stored, wanted, sample_size)
        pairs = zip(lead.dims, lead.offset, lead.input_size, lead.size, strict=True)
        inputs = {dim: slice(0, size) for dim, _, size, _ in pairs}
        targets = {
            d: slice(k, k + n) for d, k, n in zip(lead.dims, lead.offset, lead.size, strict=True)
        }
        self.lead = lead
        self._pieces: dict[str, tuple[str, tuple[slice, ...]]] = {}
        for name in source.schema:
            self._add(name, name, inputs)
        for name in wanted.elsewhere(source.schema):
            self._add(target_name(name), name, targets)

    def _add(self, name: str, stored: str, cells: Mapping[str, slice]) -> None:
        (window, dtype), dims = self._source.schema[stored], self._source.dims[stored]
        taken = tuple(cells.get(d, slice(0, n)) for d, n in zip(dims, window, strict=True))
        kept = tuple(s.stop - s.start for s in taken)
        self.schema[name] = kept, dtype
        self.dims[name] = dims
        self._pieces[name] = stored, taken

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        whole = {stored: self._room(chunk, stored) for stored, _ in map(self._pieces.get, out)}  # type: ignore[misc]
        self._source.read(chunk, whole)
        for name, target in out.items():
            stored, taken = self._pieces[name]
            target[...] = whole[stored][(slice(None), *taken)]


def _stored_sizes(source: SampleSource) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, (window, _) in source.schema.items():
        sizes |= dict(zip(source.dims[name], window, strict=True))
    return sizes


def _lead_inside(
    stored: Mapping[str, int], wanted: LeadArguments, sample_size: SizesLike | None
) -> Lead:
    """A lead that stored windows hold."""
    written = {
        "target_offset": wanted.offset,
        "target_size": wanted.size,
        "sample_size": sample_size,
    }
    asked = {
        argument: _pairs(argument, given, stored)
        for argument, given in written.items()
        if given is not None
    }
    for dim in {dim for given in asked.values() for dim in given}:
        if dim not in stored:
            raise InvalidValueError(
                f"target_offset={wanted.offset!r}: the stored samples have no dim {dim!r}, only "
                f"{stored}, so no sample holds its own target; sample the cube with a window of "
                f"several cells along {dim!r}, or give the cube itself, which is cut as it is read"
            )
    offset = asked.get("target_offset", {})
    whole = {dim: n - int(offset.get(dim, 0)) for dim, n in stored.items()}
    if sample_size is not None:
        whole |= parse_sizes("sample_size", sample_size, stored)
    for dim, n in stored.items():
        if whole[dim] < 1:
            raise InvalidValueError(
                f"target_offset={wanted.offset!r} passes the stored window of {n} cells along "
                f"{dim!r}; give less, or sample longer windows"
            )
    lead = Lead.parse(wanted.offset, wanted.size, whole)
    for dim, size, reach in zip(lead.dims, lead.input_size, lead.reach, strict=True):
        if size + reach > stored[dim]:
            raise InvalidValueError(
                f"inputs and targets together span {size + reach} cells along {dim!r}, a stored "
                f"window has {stored[dim]}; choose a smaller target_offset, target_size or "
                "sample_size, or sample longer windows"
            )
    return lead


def _pairs(argument: str, given: SizesLike, stored: Mapping[str, int]) -> dict[str, Any]:
    try:
        return dict(given)
    except (TypeError, ValueError):
        return parse_pairs(argument, given, tuple(stored))  # says what is wrong


class Broadcast(View):
    """Variables that lack dims of a window, repeated along them: static fields, one value."""

    def __init__(self, source: SampleSource, names: Iterable[str]) -> None:
        super().__init__(source)
        names = list(names)
        largest = max(names, key=lambda name: len(source.schema[name][0]))
        window, dims = source.schema[largest][0], source.dims[largest]
        sizes = dict(zip(dims, window, strict=True))
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            (own, dtype), own_dims = source.schema[name], source.dims[name]
            has = dict(zip(own_dims, own, strict=True))
            if not has.items() <= sizes.items() or tuple(d for d in dims if d in has) != own_dims:
                found = {name: source.schema[name][0] for name in names}
                raise InvalidValueError(
                    f"variables with different windows cannot be stacked: {found}; choose some "
                    "with features="
                )
            if own != window:
                self._shapes[name] = tuple(has.get(d, 1) for d in dims)
                self.schema[name], self.dims[name] = (window, dtype), dims

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        small = {name: self._room(chunk, name) for name in out if name in self._shapes}
        self._source.read(chunk, {**out, **small})
        for name, values in small.items():
            out[name][...] = values.reshape(-1, *self._shapes[name])


class Whole(View):
    """Floats that are read as whole numbers: a gap is none, so it is refused and not cast."""

    def __init__(self, source: SampleSource, names: Iterable[str]) -> None:
        super().__init__(source)
        self._floats = [n for n in names if np.dtype(source.schema[n][1]).kind == "f"]

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        floats = {name: self._room(chunk, name) for name in self._floats if name in out}
        self._source.read(chunk, {**out, **floats})
        for name, values in floats.items():
            if not np.isfinite(values).all():
                raise InvalidValueError(
                    f"{name!r} has gaps in {self.describe(chunk)}, and is to be read as "
                    f"{out[name].dtype}, which knows none; drop or fill them, or read floats"
                )
            out[name][...] = values


class Weighted(View):
    """Samples with a weight each, or with one per cell of the target."""

    def __init__(
        self,
        source: SampleSource,
        weights: Any,
        target: str,
        scaling: KnownScaling,
    ) -> None:
        super().__init__(source)
        self._target, self._variable, self._scaling = target, "", scaling
        self._classes: NDArray[Any] | None = None
        self._values = np.zeros(0, np.float32)
        window: tuple[int, ...] = ()
        dims: tuple[str, ...] = ()
        if isinstance(weights, str):
            if weights not in source.schema:
                raise InvalidValueError(
                    f"weights names {weights!r}, the samples have {list(source.schema)}; choose "
                    "of these"
                )
            self._variable = weights
            window, dims = source.schema[weights][0], source.dims[weights]
        elif isinstance(weights, Mapping):
            if target in scaling:
                raise InvalidTypeError(
                    f"weights of classes need classes, and {target!r} was scaled as a number; "
                    "store it as integers, or use scale_fn=None"
                )
            if not weights:
                raise InvalidValueError("weights={} knows no class; give {class: weight}")
            self._classes, order = np.unique(np.array(list(weights)), return_index=True)
            self._values = _checked(list(weights.values()))[order]
            window, dims = source.schema[target][0], source.dims[target]
        else:
            self._values = _checked(weights)
            if self._values.shape != (int(self._starts[-1]),):
                raise InvalidValueError(
                    f"weights has the shape {self._values.shape}, there are "
                    f"{int(self._starts[-1])} samples; give one weight per sample"
                )
        self.schema[WEIGHT], self.dims[WEIGHT] = (window, "<f4"), dims

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        inner = {name: array for name, array in out.items() if name != WEIGHT}
        if WEIGHT not in out:
            self._source.read(chunk, inner)
            return
        needed = self._variable or (self._target if self._classes is not None else "")
        wanted = inner.get(needed)
        if needed and (wanted is None or wanted.dtype != np.dtype(self._source.schema[needed][1])):
            # as stored: what is handed over may tell fewer classes apart
            inner[needed] = self._room(chunk, needed)
        self._source.read(chunk, inner)
        if wanted is not None and wanted is not inner[needed]:
            wanted[...] = inner[needed]
        if self._variable:
            values = inner[needed]
            if needed in self._scaling:
                rows = self._rows(chunk)
                values = self._scaling.unscaled(needed, values, self._source, rows)
            out[WEIGHT][...] = _checked(values, self.describe(chunk))
        elif self._classes is not None:
            out[WEIGHT][...] = self._of_classes(inner[needed], chunk)
        else:
            out[WEIGHT][...] = self._values[self._rows(chunk)]

    def _of_classes(self, found: NDArray[Any], chunk: int) -> NDArray[np.float32]:
        """Weight of each cell; a cell without a class has none."""
        assert self._classes is not None
        place = np.searchsorted(self._classes, found).clip(max=len(self._classes) - 1)
        known = self._classes[place] == found
        gaps = found != found
        if not (known | gaps).all():
            raise InvalidValueError(
                f"{self._target!r} holds {found[~known & ~gaps].flat[0].item()!r} in "
                f"{self.describe(chunk)}, weights knows {self._classes.tolist()}; give every "
                "class a weight"
            )
        return np.where(known, self._values[place], np.float32(0))


def _checked(weights: ArrayLike, where: str = "") -> NDArray[np.float32]:
    """Weights as float32, none negative, none missing."""
    try:
        values = np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"weights={weights!r} holds no numbers; give a variable, one number per sample, or "
            "{class: weight}"
        ) from error
    wrong = ~(values >= 0) | np.isinf(values)
    if wrong.any():
        raise InvalidValueError(
            f"weights holds {values[wrong].flat[0]} {'in ' + where if where else ''}; weights "
            "are finite and not negative"
        )
    return values
