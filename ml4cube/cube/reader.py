"""Read any cube as plain arrays, region by region, in any process.

xarray is imported only where a Dataset is taken apart, so that a worker process that only reads a
zarr array stays small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.cube.absent_chunks import AbsentChunks, absent_chunks
from ml4cube.cube.chunks.disk import DiskChunks
from ml4cube.cube.chunks.opened import Opened, file_behind
from ml4cube.cube.variables import cube_dims, cube_variables, repeats_dim

if TYPE_CHECKING:
    import xarray as xr

Slices = Mapping[str, slice]


class Source(Protocol):
    """Source of the cells of one variable; picklable."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims of the variable."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the cells that `take` returns."""

    def take(self, slices: Slices) -> NDArray[Any]:
        """Read the cells inside `slices` of the whole cube."""

    @property
    def sent_whole(self) -> bool:
        """True if `narrow` returns the source itself."""

    @property
    def stored(self) -> Any:
        """The zarr array with exactly these cells, or its files; None if unknown."""

    @property
    def hides_chunks(self) -> bool:
        """True if absent chunks of a file behind it would not be noticed."""

    def narrow(self, slices: Slices) -> Source:
        """Return a source of only the cells inside `slices`, cheap to pickle."""


@dataclass(frozen=True)
class _MemorySource:
    """Cells in memory, from `origin` on."""

    dims: tuple[str, ...]
    values: NDArray[Any]
    origin: tuple[int, ...]
    sent_whole = False
    stored = None
    hides_chunks = False

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.values.dtype)

    def take(self, slices: Slices) -> NDArray[Any]:
        return self.values[_shifted(slices, self.dims, self.origin)]

    def narrow(self, slices: Slices) -> _MemorySource:
        # a copy, so that pickling sends only these cells, not the array they are a view of
        return _MemorySource(self.dims, self.take(slices).copy(), _starts(slices, self.dims))


@dataclass(frozen=True)
class _DaskSource:
    """Cells of a dask array, from `origin` on, computed in the calling thread."""

    dims: tuple[str, ...]
    array: Any
    origin: tuple[int, ...]
    sent_whole = False
    stored = None
    hides_chunks = True

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.array.dtype)
        return dtype

    def take(self, slices: Slices) -> NDArray[Any]:
        part = self.array[_shifted(slices, self.dims, self.origin)]
        values: NDArray[Any] = np.asarray(part.compute(scheduler="synchronous"))
        return values

    def narrow(self, slices: Slices) -> _DaskSource:
        from dask.base import optimize

        # optimizing drops the other tasks of the graph, so that only a few KB are sent
        part = self.array[_shifted(slices, self.dims, self.origin)]
        (part,) = optimize(part)  # type: ignore[no-untyped-call]
        return _DaskSource(self.dims, part, _starts(slices, self.dims))


@dataclass(frozen=True)
class _LazySource:
    """Cells of one of xarray's lazily indexed file arrays."""

    dims: tuple[str, ...]
    array: Any
    dtype: np.dtype[Any]
    here_only: bool
    stored: Any
    hides_chunks: bool

    @property
    def sent_whole(self) -> bool:
        return not self.here_only

    def take(self, slices: Slices) -> NDArray[Any]:
        from xarray import Variable

        indexers = {dim: slices[dim] for dim in self.dims}
        return np.asarray(Variable(self.dims, self.array).isel(indexers).values)

    def narrow(self, slices: Slices) -> Source:
        if self.here_only:
            # in another process that memory would be empty, and read as gaps
            return _MemorySource(self.dims, self.take(slices), _starts(slices, self.dims))
        return self


@dataclass(frozen=True)
class _ZarrSource:
    """Cells of a zarr array that need no decoding, read without xarray, which is slow to import."""

    dims: tuple[str, ...]
    array: Any
    sent_whole = True
    hides_chunks = False

    @property
    def stored(self) -> Any:
        return self.array

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.array.dtype)
        return dtype

    def take(self, slices: Slices) -> NDArray[Any]:
        box = tuple(slices[dim] for dim in self.dims)
        if isinstance(self.array, DiskChunks):
            return self.array.read(box)
        return np.asarray(self.array[box])

    def narrow(self, slices: Slices) -> _ZarrSource:
        return self


@dataclass(frozen=True)
class ComputedSource:
    """Cells computed from their positions."""

    dims: tuple[str, ...]
    # Called with an array of positions along each dim; returns the values.
    function: Callable[..., NDArray[Any]]
    dtype: np.dtype[Any]
    sent_whole = True
    stored = None
    hides_chunks = False

    def take(self, slices: Slices) -> NDArray[Any]:
        return self.function(*(np.arange(slices[d].start, slices[d].stop) for d in self.dims))

    def narrow(self, slices: Slices) -> ComputedSource:
        return self


def _shifted(slices: Slices, dims: Sequence[str], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(slices[d].start - o, slices[d].stop - o) for d, o in zip(dims, origin, strict=True)
    )


def _starts(slices: Slices, dims: Sequence[str]) -> tuple[int, ...]:
    return tuple(slices[dim].start for dim in dims)


def _source(variable: xr.Variable) -> Source:
    from dask.base import is_dask_collection

    dims = tuple(str(dim) for dim in variable.dims)
    # `_data`, because `data` would load a lazily indexed file
    if is_dask_collection(variable._data):
        file = file_behind(variable._data)
        if file is not None:
            return _file_source(dims, file, np.dtype(variable.dtype))
        return _DaskSource(dims, variable._data, (0,) * variable.ndim)
    if variable._in_memory:
        return _MemorySource(dims, np.asarray(variable.values), (0,) * variable.ndim)
    return _file_source(dims, variable._data, np.dtype(variable.dtype))


def _file_source(dims: tuple[str, ...], array: Any, dtype: np.dtype[Any]) -> Source:
    """Return a source of a lazily indexed file: zarr itself where xarray adds nothing."""
    found = Opened.of(array, dtype)
    if found.plain and found.stored is not None:
        # without the zarr array a worker need not import zarr, half of its start-up time
        return _ZarrSource(dims, DiskChunks.of(found.stored) or found.stored)
    return _LazySource(dims, array, dtype, found.here_only, found.stored, found.hides_chunks)


def is_on_cluster(value: Any) -> bool:
    """Return True if a value in a dask graph is held by a cluster."""
    # by its name, because distributed may not be installed; called for millions of values
    kind = type(value)
    return kind.__name__ == "Future" and kind.__module__ == "distributed.client"


def _is_persisted(data: Any) -> bool:
    from dask.base import is_dask_collection
    from dask.highlevelgraph import MaterializedLayer

    return is_dask_collection(data) and any(
        is_on_cluster(task)
        for layer in data.dask.layers.values()
        if isinstance(layer, MaterializedLayer)
        for task in layer.values()
    )


@dataclass(frozen=True)
class CubeReader:
    """A reader of regions of a cube as plain arrays; picklable for every kind of cube."""

    # Make one with `CubeReader.of`.

    # Dims of the cube; arrays that are read have all of them, in this order.
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    sources: Mapping[str, Source]

    @classmethod
    def of(cls, ds: xr.Dataset, variables: Iterable[str] | None = None) -> CubeReader:
        """Make a reader of some variables of a cube."""
        dims = cube_dims(ds)
        names = list(variables) if variables is not None else cube_variables(ds)[0]
        for name in names:
            if repeats_dim(ds[name].variable):
                raise InvalidValueError(
                    f"{name!r} must have every dim once, got {ds[name].dims}; rename one of the "
                    "two or leave the variable out"
                )
            if _is_persisted(ds[name].variable._data):
                raise InvalidValueError(
                    f"{name!r} is held by a dask cluster, where it cannot be read by regions; pass "
                    "the cube from before persist(), or compute() it"
                )
        shape = tuple(ds.sizes[dim] for dim in dims)
        return cls(dims, shape, {name: _source(ds[name].variable) for name in names})

    @property
    def variables(self) -> tuple[str, ...]:
        """Names in the order given."""
        return tuple(self.sources)

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each variable."""
        return {name: source.dtype for name, source in self.sources.items()}

    def narrow(self, slices: Slices) -> Self:
        """Return a reader of only one region, cheap to pickle."""
        return replace(self, sources={n: s.narrow(slices) for n, s in self.sources.items()})

    def only(self, names: Iterable[str]) -> CubeReader:
        """Return a reader of some of the variables."""
        return replace(self, sources={name: self.sources[name] for name in names})

    def common(self) -> CubeReader:
        """Return a reader of the sources that all regions share, to be sent only once."""
        whole = {n: source for n, source in self.sources.items() if source.sent_whole}
        return CubeReader(self.dims, self.shape, whole)

    def own(self, slices: Slices) -> Self:
        """Return a reader of one region without the sources of `common`."""
        narrow = self.narrow(slices)
        own = {n: s for n, s in narrow.sources.items() if not self.sources[n].sent_whole}
        return replace(narrow, sources=own)

    def joined(self, common: CubeReader) -> Self:
        """Add the sources of `common`."""
        return replace(self, sources={**common.sources, **self.sources})

    def read(self, slices: Slices) -> dict[str, NDArray[Any]]:
        """Read one region of every variable."""
        return {name: self._read_one(name, slices) for name in self.sources}

    def absent(
        self, cells: Mapping[str, NDArray[Any]], slices: Slices, owned: Slices
    ) -> dict[str, AbsentChunks]:
        """Return the variables with absent chunks in their zarr source."""
        found = {}
        for name, source in self.sources.items():
            if source.stored is None:
                continue
            lacking = [slice(None) if d in source.dims else slice(0, 1) for d in self.dims]
            origin = {dim: slices[dim].start for dim in self.dims}
            with _reading(name, slices):
                absent = absent_chunks(
                    source.stored, source.dims, cells[name][tuple(lacking)], origin, owned
                )
            if absent is not None:
                found[name] = absent
        return found

    def _read_one(self, name: str, slices: Slices) -> NDArray[Any]:
        source = self.sources[name]
        with _reading(name, slices):
            values = source.take(slices)
        if source.dims == self.dims:
            return values
        order = [d for d in self.dims if d in source.dims]
        values = values.transpose([source.dims.index(d) for d in order])
        lacking = tuple(i for i, dim in enumerate(self.dims) if dim not in source.dims)
        values = np.expand_dims(values, lacking)
        full = tuple(slices[d].stop - slices[d].start for d in self.dims)
        return values if values.shape == full else np.broadcast_to(values, full)


@contextlib.contextmanager
def _reading(name: str, slices: Slices) -> Iterator[None]:
    """Raise StoreError with variable and region where reading fails."""
    try:
        yield
    except Exception as error:
        place = ", ".join(f"{d} {s.start}:{s.stop}" for d, s in slices.items())
        raise StoreError(
            f"variable {name!r} cannot be read at {place}: {type(error).__name__}: {error}; the "
            "source is damaged or not reachable"
        ) from error
