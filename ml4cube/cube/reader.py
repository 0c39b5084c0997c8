"""Read any cube as plain arrays, region by region, in any process.

xarray is imported only where it is needed, so that a worker process that only reads a
zarr array stays small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import CubeError, InvalidValueError, StoreError
from ml4cube.cube.chunks.blocks import chunks_behind, shards_behind
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, file_behind
from ml4cube.cube.chunks.stored import ChunkFiles, StoredChunks, stored_chunks
from ml4cube.cube.variables import repeats_dim

if TYPE_CHECKING:
    import xarray as xr

Slices = Mapping[str, slice]

# Regions of a remote cube that are read at a time, and the bytes of their cells.
_MOST_WAITING, _WAITING_BYTES = 32, 2**28

# More layers than computations have on one file: of these a graph may have a million tasks.
_MANY_LAYERS = 32


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of the cells of one variable; picklable."""

    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    # Whether any process can read all cells from it. Of others, tasks are sent their own cells.
    is_shared: bool = True
    # Whether cells come from elsewhere, so that reading them is mostly waiting.
    is_remote: bool = False

    def read(self, slices: Slices) -> NDArray[Any]:
        """Read the cells inside `slices` of the whole cube."""
        raise NotImplementedError

    def narrow(self, slices: Slices) -> Source:
        """Return a source of only the cells inside `slices`, to be sent to a task."""
        # a copy, so that pickling sends only these cells, not the array they are a view of
        cells, origin = np.array(self.read(slices)), tuple(slices[d].start for d in self.dims)
        return _MemorySource(dims=self.dims, dtype=self.dtype, array=cells, origin=origin)

    def for_one_run(self) -> Source:
        """Return a source for the tasks of one run, in which its files are not replaced."""
        return self


@dataclass(frozen=True, kw_only=True)
class _MemorySource(Source):
    """Cells in memory, from `origin` on."""

    array: Any
    origin: tuple[int, ...]
    is_shared: bool = False

    def read(self, slices: Slices) -> NDArray[Any]:
        cells: NDArray[Any] = self._part(slices)
        return cells

    def _part(self, slices: Slices) -> Any:
        origins = zip(self.dims, self.origin, strict=True)
        box = tuple(slice(slices[d].start - o, slices[d].stop - o) for d, o in origins)
        return self.array[box]


@dataclass(frozen=True, kw_only=True)
class _DaskSource(_MemorySource):
    """Cells of a dask array, from `origin` on, computed in the calling thread."""

    def read(self, slices: Slices) -> NDArray[Any]:
        return np.asarray(self._part(slices).compute(scheduler="synchronous"))

    def narrow(self, slices: Slices) -> Source:
        from dask.base import optimize

        # optimizing drops the other tasks of the graph, so that only a few KB are sent
        (part,) = optimize(self._part(slices))  # type: ignore[no-untyped-call]
        return replace(self, array=part, origin=tuple(slices[d].start for d in self.dims))


@dataclass(frozen=True, kw_only=True)
class _HeldSource(_MemorySource):
    """Cells that a dask cluster holds, as after `persist`; fetched from there by this process."""

    def read(self, slices: Slices) -> NDArray[Any]:
        return np.asarray(self._part(slices).compute())


@dataclass(frozen=True, kw_only=True)
class _LazySource(Source):
    """Cells of one of xarray's lazily indexed file arrays."""

    array: Any

    def read(self, slices: Slices) -> NDArray[Any]:
        from xarray import Variable

        indexers = {dim: slices[dim] for dim in self.dims}
        return np.asarray(Variable(self.dims, self.array).isel(indexers).values)


@dataclass(frozen=True, kw_only=True)
class _ZarrSource(Source):
    """Cells of `stored` that need no CF decoding, read without xarray, which is slow to import."""

    stored: StoredChunks
    # Along each axis of `stored` the first cell, and whether it is the only one: then the source
    # has no such dim.
    first: tuple[int, ...]
    is_single: tuple[bool, ...]

    def for_one_run(self) -> Source:
        if isinstance(self.stored, ChunkFiles):
            return replace(self, stored=self.stored.keeping_indices())
        return self

    def read(self, slices: Slices) -> NDArray[Any]:
        dims = iter(self.dims)
        box: list[slice] = []
        for first, is_single in zip(self.first, self.is_single, strict=True):
            cells = slice(0, 1)
            if not is_single:
                cells = slices[next(dims)]
            box.append(slice(first + cells.start, first + cells.stop))
        single_axes = tuple(np.flatnonzero(self.is_single).tolist())
        return self.stored.read(box).squeeze(single_axes)


@dataclass(frozen=True, kw_only=True)
class ComputedSource(Source):
    """Cells computed by a function of an array of positions along each dim."""

    function: Callable[..., NDArray[Any]]

    def read(self, slices: Slices) -> NDArray[Any]:
        return self.function(*(np.arange(slices[d].start, slices[d].stop) for d in self.dims))


def _source(variable: xr.Variable) -> Source:
    from dask.base import is_dask_collection

    dims, dtype = tuple(str(dim) for dim in variable.dims), np.dtype(variable.dtype)
    origin = (0,) * variable.ndim
    if variable._in_memory:
        cells = np.asarray(variable.values)
        return _MemorySource(dims=dims, dtype=cells.dtype, array=cells, origin=origin)
    data: Any = variable._data  # because `data` would load a lazily indexed file
    file = data
    if is_dask_collection(data):
        file = file_behind(data)
    if file is None:
        kind: type[_MemorySource] = _DaskSource
        if _is_persisted(data):
            kind = _HeldSource
        return kind(dims=dims, dtype=dtype, array=_in_one_layer(data), origin=origin)
    return _file_source(dims, file, dtype)


def _in_one_layer(data: Any) -> Any:
    """Put the graph of an array joined from many files into one layer.

    With every block that is read, dask goes through all layers.
    """
    from dask.array import Array
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    layers = getattr(data.dask, "layers", {})
    if len(layers) <= _MANY_LAYERS:
        return data
    layer = MaterializedLayer(data.dask.to_dict())
    graph = HighLevelGraph({data.name: layer}, {data.name: set()})
    return Array(graph, data.name, data.chunks, meta=data._meta)  # type: ignore[no-untyped-call]


def _file_source(dims: tuple[str, ...], file: Any, dtype: np.dtype[Any]) -> Source:
    """Return a source of a lazily indexed file: zarr itself where xarray adds nothing."""
    zarr = LazyZarr.behind(file, dtype)
    if zarr.box is not None and zarr.is_undecoded and not zarr.in_this_process:
        first, is_single = [], []
        for key, n in zip(zarr.box, zarr.array.shape, strict=True):
            cells = range(n)[key]
            is_single.append(isinstance(cells, int))
            first.append(cells if isinstance(cells, int) else cells.start)
        return _ZarrSource(
            dims=dims,
            dtype=dtype,
            is_remote=zarr.is_remote,
            stored=stored_chunks(zarr.array),
            first=tuple(first),
            is_single=tuple(is_single),
        )
    if zarr.in_this_process:  # it would be empty in another process, and read as gaps
        return _LazySource(dims=dims, dtype=dtype, array=file, is_shared=False)
    from ml4cube.cube.chunks.backend import read_directly

    direct = read_directly(file)
    return _LazySource(dims=dims, dtype=dtype, array=direct, is_remote=zarr.is_remote)


def _is_persisted(data: Any) -> bool:
    """Return True if values in a dask graph are held by a cluster."""
    from dask.highlevelgraph import MaterializedLayer

    # by its name, because distributed may not be installed
    future = "distributed.client", "Future"
    return any(
        (type(task).__module__, type(task).__name__) == future
        for layer in getattr(data.dask, "layers", {}).values()
        if isinstance(layer, MaterializedLayer)
        for task in layer.values()
    )


@dataclass(frozen=True)
class CubeReader:
    """A reader of regions of a cube as plain arrays; picklable for every kind of cube.

    Make one with `CubeReader.of`. All arrays that it reads have `dims`, those of the cube.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    sources: Mapping[str, Source]
    # The largest chunk along each dim of the first variable, or the lengths of all, of dask's.
    chunks: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    # The cells of a shard of it along each dim; empty without shards.
    shards: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, ds: xr.Dataset, names: Iterable[str], dims: Sequence[str]) -> CubeReader:
        """Make a reader of some variables of a cube, as arrays with `dims`, those of the cube."""
        variables = {name: ds[name].variable for name in names}
        return cls.of_variables(variables, {dim: ds.sizes[dim] for dim in dims})

    @classmethod
    def of_variables(
        cls,
        variables: Mapping[str, xr.Variable | None],
        sizes: Mapping[Any, int] | None = None,
    ) -> CubeReader:
        """Make a reader of variables, without those that are None.

        Arrays have the dims of `sizes`, by default those of the first variable.
        """
        present = {name: variable for name, variable in variables.items() if variable is not None}
        for name, variable in present.items():
            if repeats_dim(variable):
                raise InvalidValueError(
                    f"{name!r} must have every dim once, got {variable.dims}; rename one of the "
                    "two or leave the variable out"
                )
        first = next(iter(present.values()), None)
        chunks: dict[str, int | tuple[int, ...]] = {}
        shards: dict[str, int] = {}
        if first is not None:
            chunks, shards, sizes = chunks_behind(first), shards_behind(first), sizes or first.sizes
        assert sizes is not None
        sources = {name: _source(variable) for name, variable in present.items()}
        return cls(tuple(map(str, sizes)), tuple(sizes.values()), sources, chunks, shards)

    @property
    def is_in_memory(self) -> bool:
        """True if the cells of the first variable are in memory."""
        return type(next(iter(self.sources.values()), None)) is _MemorySource

    def reads_at_a_time(self, n_cells: int) -> int:
        """Return how many regions of so many cells to read at a time: several if that is waiting.

        Their cells fit into 256 MB.
        """
        if not any(source.is_remote for source in self.sources.values()):
            return 1
        region_bytes = n_cells * sum(dtype.itemsize for dtype in self.dtypes.values())
        return min(max(_WAITING_BYTES // max(region_bytes, 1), 1), _MOST_WAITING)

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each variable."""
        return {name: source.dtype for name, source in self.sources.items()}

    def narrow(self, slices: Slices) -> Self:
        """Return a reader of only one region, to be sent to a task."""
        return replace(self, sources={n: s.narrow(slices) for n, s in self.sources.items()})

    def only(self, names: Iterable[str]) -> Self:
        """Return a reader of those of its variables that have some names."""
        return replace(self, sources={n: self.sources[n] for n in names if n in self.sources})

    def split(self, shares_memory: bool) -> tuple[Self, Self]:
        """Split into what is sent once to all tasks of an engine, and what each gets cells of.

        A task narrows the second to its cells; where it runs, the first is joined to it.
        """
        shared, own = {}, {}
        for name, source in self.sources.items():
            if shares_memory or source.is_shared:
                shared[name] = source.for_one_run()
            else:
                own[name] = source
        return replace(self, sources=shared), replace(self, sources=own)

    def joined(self, shared: CubeReader) -> Self:
        """Add the sources of `shared`."""
        return replace(self, sources={**shared.sources, **self.sources})

    def read(self, slices: Slices) -> dict[str, NDArray[Any]]:
        """Read one region of every variable."""
        computed = self._compute_together(slices)
        cells = {}
        for name, source in self.sources.items():
            if name not in computed:
                with reading(name, slices):
                    computed[name] = source.read(slices)
            cells[name] = self._with_all_dims(source, computed[name], slices)
        return cells

    def read_steps(
        self, dim: str, steps: NDArray[np.intp], slices: Slices
    ) -> dict[str, NDArray[Any]]:
        """Read some steps along a dim, in increasing order; `slices` are those of other dims.

        Steps of which no chunk lies between are read at once.
        """
        longest = int(np.max(self.chunks.get(dim, 1)))
        runs = np.split(steps, np.flatnonzero(np.diff(steps) > longest) + 1)
        parts = []
        for run in runs:
            box = {**slices, dim: slice(int(run[0]), int(run[-1]) + 1)}
            cells = self.read({name: box[name] for name in self.dims})
            if len(run) < box[dim].stop - box[dim].start:
                axis = self.dims.index(dim)
                cells = {name: np.take(c, run - run[0], axis) for name, c in cells.items()}
            parts.append(cells)
        if len(parts) == 1:
            return parts[0]
        axis = self.dims.index(dim)
        return {name: np.concatenate([p[name] for p in parts], axis) for name in self.sources}

    def _compute_together(self, slices: Slices) -> dict[str, NDArray[Any]]:
        """Compute several variables of dask at once, which may need the same cells."""
        lazy = {name: s for name, s in self.sources.items() if type(s) is _DaskSource}
        if len(lazy) < 2:
            return {}
        from dask.base import compute  # slow to import, where no worker may need it

        parts = [source._part(slices) for source in lazy.values()]
        try:
            values = compute(*parts, scheduler="synchronous")  # type: ignore[no-untyped-call]
        except Exception:  # read one by one, for an error that names a variable
            return {}
        return dict(zip(lazy, map(np.asarray, values), strict=True))

    def _with_all_dims(self, source: Source, values: NDArray[Any], slices: Slices) -> NDArray[Any]:
        """Return cells with all dims of the cube: repeated along those that the source lacks."""
        if source.dims == self.dims:
            return values
        values = values.transpose([source.dims.index(d) for d in self.dims if d in source.dims])
        lacking_axes = tuple(axis for axis, d in enumerate(self.dims) if d not in source.dims)
        values = np.expand_dims(values, lacking_axes)
        shape = tuple(slices[d].stop - slices[d].start for d in self.dims)
        if values.shape == shape:
            return values
        return np.broadcast_to(values, shape)


@contextlib.contextmanager
def reading(name: str, slices: Slices) -> Iterator[None]:
    """Raise StoreError with variable and region where reading fails."""
    try:
        yield
    except CubeError:
        raise
    except Exception as error:
        region = ", ".join(f"{d} {s.start}:{s.stop}" for d, s in slices.items())
        raise StoreError(
            f"variable {name!r} cannot be read at {region}: {type(error).__name__}: {error}; the "
            "source may be damaged or not reachable"
        ) from error
