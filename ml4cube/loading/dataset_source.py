"""Samples of an xarray Dataset, whatever backs it, and the axes of the cube they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.missing import FILLED_ATTR
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import not_data
from ml4cube.ledger.manifest import NoStoreError
from ml4cube.loading.sources import SampleSource, SampleVariable
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import ArrayName, Lead
from ml4cube.sampling.cf_encoding import NUMBERED
from ml4cube.splits.folds.samples import whole_axis
from ml4cube.store.format import open_axes

if TYPE_CHECKING:
    import xarray as xr

# Samples in memory are read in pieces of about this size.
_PIECE_BYTES = 4 << 20


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
        attrs = {str(name): v.attrs for name, v in ds.data_vars.items()}
        self.filled = {n: str(a[FILLED_ATTR]) for n, a in attrs.items() if FILLED_ATTR in a}
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

    def coords(self, samples: Ints) -> dict[str, NDArray[Any]]:
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
            return even_counts(n, int(stored))
    sample_bytes = sum(ds[name].dtype.itemsize * ds[name].size // max(n, 1) for name in variables)
    return even_counts(n, max(1, _PIECE_BYTES // max(sample_bytes, 1)))


def even_counts(n: int, size: int) -> Ints:
    """Return the samples per chunk where chunks have one size, the last one what is left."""
    starts = np.arange(0, n, size)
    return np.minimum(size, n - starts).astype(np.int64)
