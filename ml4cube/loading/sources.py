"""Sources of samples, read chunk by chunk: the interface, and those of stores and Datasets.

A source reads chunks of samples, knows each variable's window and dtype (`variables`) and where
samples lie in their cube (`coords`). Does not use torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import scale_parameters
from ml4cube.cube.chunks.lazy_zarr import LazyZarr, file_behind
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import not_data
from ml4cube.ledger.locations import location_of
from ml4cube.ledger.manifest import NoStoreError
from ml4cube.loading.ring.ring import ChunkSource
from ml4cube.loading.store_files import ShardedArray, sharded_arrays
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import TARGET, ArrayName, Lead
from ml4cube.sampling.cf_encoding import NUMBERED
from ml4cube.splits.folds.samples import whole_axis
from ml4cube.store.format import StoreMetadata, open_axes

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

# Samples in memory are read in pieces of about this size.
_PIECE_BYTES = 4 << 20


class SampleVariable(NamedTuple):
    """One variable of samples."""

    # Cells of the window along each dim of the sample.
    sizes: dict[str, int]
    dtype: np.dtype[Any]

    @property
    def window(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.sizes.values())


class SampleSource(ChunkSource, Protocol):
    """Samples in chunks, with their variables and positions in the cube.

    From `ChunkSource` come `counts`, the number of samples of each chunk, and `starts`, the number
    of the first sample of each chunk, with that of all samples at the end.
    """

    variables: dict[ArrayName, SampleVariable]
    # Variables that are not data, such as a split label; inputs only where a user names them.
    auxiliary: Collection[str] = ()
    # By dim, the position of the targets relative to the inputs; empty where it is the same.
    lead: Lead
    # Cube dim of each sample dim whose name differs from it.
    cube_dims: Mapping[str, str]

    def cube_dim(self, dim: str) -> str:
        """Return the cube dim of a sample dim."""
        return self.cube_dims.get(dim, dim)

    def window_in_cube(self, name: ArrayName) -> dict[str, int]:
        """Return the cells of a variable's windows along dims of the cube."""
        return {self.cube_dim(dim): n for dim, n in self.variables[name].sizes.items()}

    def rows(self, chunk: int) -> Ints:
        """Return the numbers of a chunk's samples."""
        return np.arange(self.starts[chunk], self.starts[chunk + 1])

    def chunks_of(self, samples: Ints) -> Ints:
        """Return the chunk of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples, one array per coordinate."""

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples along cube dims."""

    @cached_property
    def axes(self) -> dict[str, xr.Variable]:
        """The coordinate of every cell along each cube dim where it is known."""
        return {}


def known_scaling(metadata: StoreMetadata | None) -> dict[str, Scaling]:
    """Return the scaling of samples by variable of the cube, as far as it is known."""
    if metadata is None or (method := metadata.recipe.scale_fn) is None:
        return {}
    sizes = {}
    for name, stats in metadata.statistics.items():
        if np.any(stats.count):  # Without a cell that was counted, nothing was scaled.
            offset, scale = scale_parameters(stats, method)
            entries = metadata.places.get(name, ())
            sizes[name] = Scaling(name, offset, scale, entries, method)
    return sizes


def unscaled(
    scaling: Scaling, name: ArrayName, values: NDArray[Any], source: SampleSource, samples: Ints
) -> NDArray[Any]:
    """Undo the scaling of a variable's samples."""
    first_cells = first_cells_of(source, name, samples, scaling.dims)
    return scaling.unscaled(values, first_cells, source.window_in_cube(name))


def first_cells_of(
    source: SampleSource, name: ArrayName, samples: Ints, dims: Collection[str]
) -> dict[str, Ints]:
    """Return the first cells of a variable's windows along dims of the cube.

    Windows begin at the origins of the samples, or later if they are targets at a lead time.
    """
    if not dims:
        return {}
    lead = source.lead if name.role == TARGET else {}
    offsets = {source.cube_dim(dim): dim_lead.offset for dim, dim_lead in lead.items()}
    origins = source.first_cells(samples, dims)
    return {dim: cells + offsets.get(dim, 0) for dim, cells in origins.items()}


class DatasetSource(SampleSource):
    """Samples of an xarray Dataset, whatever backs it: numpy, dask, a lazily opened file."""

    remote: bool = False

    def __init__(self, ds: xr.Dataset, recipe: Recipe | None = None) -> None:
        self._dim = dim = recipe.array_dims[0] if recipe else SAMPLE_DIM
        self.cube_dims = recipe.cube_dims if recipe else {}
        self.lead: Lead = {}
        self._first_cells: dict[str, Ints] = {}
        self._coords = ds.drop_vars(list(ds.data_vars))
        self.variables = {
            ArrayName(str(name)): SampleVariable(
                {str(d): n for d, n in v.sizes.items() if d != dim}, v.dtype
            )
            for name, v in ds.data_vars.items()
            if dim in v.dims
        }
        self.auxiliary = [*not_data(ds)]
        readable = [n.variable for n, v in self.variables.items() if v.dtype.kind in "fiub"]
        self._readers = {
            name: CubeReader.of(ds, [name], tuple(map(str, ds[name].dims))) for name in readable
        }
        self.counts = _chunk_counts(ds, readable, dim)

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        rows = slice(int(self.starts[chunk]), int(self.starts[chunk + 1]))
        for name, target in out.items():
            reader = self._readers[name.variable]
            slices = {d: slice(0, n) for d, n in zip(reader.dims, reader.shape, strict=True)}
            values = reader.read({**slices, self._dim: rows})[name.variable]
            target[...] = np.moveaxis(values, reader.dims.index(self._dim), 0)

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        return f"{self._dim} {self.starts[chunk]} to {self.starts[chunk + 1] - 1}"

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples, one array per coordinate."""
        names = [name for name, c in self._coords.coords.items() if c.dims == (self._dim,)]
        if not len(samples):  # xarray cannot decode an empty array of dates of other calendars.
            return {str(name): np.zeros(0, self._coords[name].dtype) for name in names}
        chosen = self._coords[names].isel({self._dim: samples}, missing_dims="ignore")
        return {str(name): np.asarray(chosen[name].values) for name in names}

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples along cube dims."""
        for dim in dims:
            if dim not in self._first_cells:
                index = self._coords[f"{dim}_index"].values
                self._first_cells[dim] = np.asarray(index, np.int64)
        return {dim: self._first_cells[dim][samples] for dim in dims}

    @cached_property
    def axes(self) -> dict[str, xr.Variable]:
        """The coordinate of every cell along each cube dim where it is known."""
        coords = self._coords.coords
        stored = stored_axes(self._coords.encoding.get("source"))
        on_dim = {}
        indices = [n for n in map(str, coords) if n.endswith("_index")]
        for name in indices:
            dim = name.removesuffix("_index")
            origin = coords.get(f"{dim}_origin", coords.get(dim))
            if origin is None or coords[name].dims != (self._dim,):
                continue
            if origin.attrs.get("long_name") == NUMBERED:
                continue  # The dim has no coordinate.
            window = max((self.window_in_cube(v).get(dim, 1) for v in self.variables), default=1)
            index, axis = np.asarray(coords[name].values), stored.get(dim)
            if axis is None or not _has_origins(axis, index, window, np.asarray(origin.values)):
                axis = _axis_from_origins(dim, index, origin.variable, window)
            if axis is not None:
                on_dim[dim] = axis
        return on_dim


def stored_axes(path: Any) -> dict[str, xr.Variable]:
    """Return the coordinates of the cube in a store; nothing without a store."""
    if path is None:
        return {}
    try:
        axes = open_axes(path)
    except NoStoreError:
        return {}
    coords = {str(name): c.variable.load() for name, c in axes.coords.items()}
    return {name: c for name, c in coords.items() if c.attrs.get("long_name") != NUMBERED}


def _has_origins(axis: xr.Variable, index: Ints, window: int, origins: NDArray[Any]) -> bool:
    """Return True if a stored axis agrees with the origins; a user may have changed those."""
    if not len(index) or index.max() + window > len(axis):
        return False
    return bool((np.asarray(axis.values)[index] == origins).all())


def _axis_from_origins(
    dim: str, index: Ints, origins: xr.Variable, window: int
) -> xr.Variable | None:
    """Return the coordinate values of all cells from those of some, or None if unknown."""
    import xarray as xr

    if not len(index):
        return None
    values, n = np.asarray(origins.values), int(index.max()) + window
    if window == 1:  # No sample uses the cells between, so any value does.
        cells, first = np.unique(index, return_index=True)
        axis: NDArray[Any] | None = values[first][np.searchsorted(cells, np.arange(n))]
    else:
        axis = whole_axis(index, values, n)
    if axis is None:
        return None
    return xr.Variable(dim, axis, origins.attrs)


def _chunk_counts(ds: xr.Dataset, variables: list[str], dim: str) -> Ints:
    """Return the samples per chunk: chunks of the file or of dask, else pieces of a few MB."""
    n = ds.sizes.get(dim, 0)
    for name in variables:
        v = ds[name].variable
        if dim in v.chunksizes:
            return np.asarray(v.chunksizes[dim], np.int64)
        stored = v.encoding.get("preferred_chunks", {}).get(dim)
        if stored and not v._in_memory:
            return _even_counts(n, int(stored))
    sample_bytes = sum(ds[name].dtype.itemsize * ds[name].size // max(n, 1) for name in variables)
    return _even_counts(n, max(1, _PIECE_BYTES // max(sample_bytes, 1)))


def _even_counts(n: int, size: int) -> Ints:
    """Return the samples per chunk where chunks have one size, the last one what is left."""
    starts = np.arange(0, n, size)
    return np.minimum(size, n - starts).astype(np.int64)


class StoreSource(DatasetSource):
    """Samples of a sample store as it was opened, read straight from its shard files."""

    def __init__(self, ds: xr.Dataset, recipe: Recipe, arrays: Mapping[str, ShardedArray]) -> None:
        super().__init__(ds, recipe)
        self._arrays = dict(arrays)
        first = next(iter(self._arrays.values()))
        self.remote = first.fs is not None
        self.counts = _even_counts(ds.sizes[self._dim], first.chunk_size)

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        if not self.remote or len(out) == 1:
            for name, target in out.items():
                self._arrays[name.variable].read(chunk, target)
            return
        # Remote reads mostly wait, so ask for all variables at once.
        arrays = [self._arrays[name.variable] for name in out]
        with ThreadPoolExecutor(len(arrays), thread_name_prefix="ml4cube-fetch") as threads:
            fetched = list(threads.map(lambda array: array.fetch(chunk), arrays))
        for array, data, target in zip(arrays, fetched, out.values(), strict=True):
            array.decode(chunk, data, target)

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        return next(iter(self._arrays.values())).describe(chunk)


def source_of_store(ds: xr.Dataset, recipe: Recipe) -> DatasetSource:
    """Choose how to read an opened store: straight from its files, unless it was changed."""
    from zarr.storage import StorePath

    names = [str(n) for n, v in ds.data_vars.items() if v.dtype.kind in "fiub"]
    arrays = [_array_behind(ds[name].variable) for name in names]
    if not arrays or None in arrays or not ds.sizes[recipe.array_dims[0]]:
        return DatasetSource(ds, recipe)
    groups = [
        location_of("store", StorePath(array.store, array.path.rpartition("/")[0]))
        for array in arrays
    ]
    # A location that needs storage options is not a str.
    if not isinstance(groups[0], str) or any(group != groups[0] for group in groups):
        logger.warning(
            "samples that were opened with storage options, or from several stores, are read "
            "through xarray, which is slower; give PTXrDataset the path or URL of one store"
        )
        return DatasetSource(ds, recipe)
    stored = {name: array.basename for name, array in zip(names, arrays, strict=True)}
    return StoreSource(ds, recipe, sharded_arrays(groups[0], stored))


def _array_behind(variable: xr.Variable) -> Any:
    """Return the zarr array that a dask variable shows unchanged, or None."""
    if variable.chunks is None:
        return None
    file = file_behind(variable.data)  # None unless dask reads a file and does nothing else
    zarr = LazyZarr.behind(file, np.dtype(variable.dtype))
    # Nothing is sliced, decoded or cast between array and variable.
    if zarr.is_undecoded and zarr.is_whole:
        return zarr.array
    return None
