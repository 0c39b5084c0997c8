"""Where the samples of a data set come from, chunk by chunk. Nothing here knows torch.

A source reads chunks of samples, knows each variable's window and dtype (`schema`) and where
samples lie in their cube (`coords`). `open_source` chooses the one that fits what a user gave.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_choice
from ml4cube.core.grid import SizesLike
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.shares import Ints
from ml4cube.core.split_plan import PARTS
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.loading.cube_source import CUTTING_OPTIONS, cut_cube
from ml4cube.loading.lead import Lead, LeadArguments
from ml4cube.loading.ring.ring import ChunkSource
from ml4cube.loading.shard_files import ShardedArray, sharded_arrays
from ml4cube.loading.views import WindowPair
from ml4cube.sampling.counting import Schema
from ml4cube.sampling.extractor import Arrays
from ml4cube.sampling.request import NUMBERED
from ml4cube.store.format import NoStoreError, StoreMetadata, open_axes, open_store

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

# Samples in memory are handed on in pieces of about this size.
_PIECE_BYTES = 4 << 20

# How far origins may lie off a line for the cells between to be known: as far as numbers that
# were float32 once, and dates that were days as floats.
_ROUNDED = 8 * float(np.finfo(np.float32).eps)
_ROUNDED_NS = 1e6


class SampleSource(ChunkSource, Protocol):
    """A source of chunks that knows what is in them."""

    @property
    def schema(self) -> Schema:
        """Window shape and dtype of every variable."""
        ...

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """Dims of every variable's window."""
        ...

    @property
    def lead(self) -> Lead | None:
        """Where targets lie, if elsewhere than the inputs."""
        ...

    def coords(self, samples: Ints) -> Arrays:
        """Coordinates of samples, one array per coordinate."""
        ...

    def places(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Index of the first cell of samples along cube dims."""
        ...

    def axes(self) -> dict[str, xr.Variable]:
        """Coordinate values of every cell along each cube dim, as far as they are known."""
        ...


class DatasetSource:
    """Samples of an xarray Dataset, whatever backs it: numpy, dask, a lazily opened file."""

    slow: bool = False
    lead: Lead | None = None

    def __init__(self, ds: xr.Dataset, dim: str) -> None:
        self._dim = dim
        self._places: dict[str, Ints] = {}
        self._axes: dict[str, xr.Variable] | None = None
        self._coords = ds.drop_vars(list(ds.data_vars))
        names = [str(name) for name, v in ds.data_vars.items() if dim in v.dims]
        self.schema: Schema = {
            name: (tuple(n for d, n in ds[name].sizes.items() if d != dim), ds[name].dtype.str)
            for name in names
        }
        self.dims = {name: tuple(str(d) for d in ds[name].dims if d != dim) for name in names}
        readable = [name for name in names if ds[name].dtype.kind in "fiub"]
        self._readers = {name: CubeReader.of(ds[[name]], [name]) for name in readable}
        self.counts = _chunk_counts(ds, readable, dim)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        rows = slice(int(self._starts[chunk]), int(self._starts[chunk + 1]))
        for name, target in out.items():
            reader = self._readers[name]
            slices = {d: slice(0, n) for d, n in zip(reader.dims, reader.shape, strict=True)}
            values = reader.read({**slices, self._dim: rows})[name]
            target[...] = np.moveaxis(values, reader.dims.index(self._dim), 0)

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message."""
        return f"{self._dim} {self._starts[chunk]} to {self._starts[chunk + 1] - 1}"

    def coords(self, samples: Ints) -> Arrays:
        """Look up where samples come from."""
        along = [name for name, c in self._coords.coords.items() if c.dims == (self._dim,)]
        chosen = self._coords[along].isel({self._dim: samples} if along else {})
        return {str(name): np.asarray(chosen[name].values) for name in along}

    def places(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Look up where samples begin."""
        for dim in dims:
            if dim not in self._places:
                self._places[dim] = np.asarray(self._coords[f"{dim}_index"].values, np.int64)
        return {dim: self._places[dim][samples] for dim in dims}

    def axes(self) -> dict[str, xr.Variable]:
        """Return coordinate values along each cube dim, of the store or of where samples begin."""
        if self._axes is None:
            self._axes = self._find_axes()
        return self._axes

    def _find_axes(self) -> dict[str, xr.Variable]:
        stored = _stored_axes(self._coords.encoding.get("source"))
        found = {}
        for name in map(str, self._coords.coords):
            dim = name.removesuffix("_index")
            origin = next((n for n in (f"{dim}_origin", dim) if n in self._coords.coords), None)
            numbered = origin and self._coords[origin].attrs.get("long_name") == NUMBERED
            if origin and name != dim and not numbered and self._coords[name].dims == (self._dim,):
                window = [s[0][ds.index(dim)] for s, ds in self._windows_along(dim)]
                index = np.asarray(self._coords[name].values)
                origins, last = self._coords[origin].variable, max(window, default=1) - 1
                axis = stored.get(dim)
                if axis is None or not _fits(axis, index, last, np.asarray(origins.values)):
                    axis = _axis_of(dim, index, origins, last + 1)
                found.update({dim: axis} if axis is not None else {})
        return found

    def _windows_along(self, dim: str) -> list[tuple[Any, tuple[str, ...]]]:
        return [(self.schema[n], dims) for n, dims in self.dims.items() if dim in dims]


def _stored_axes(place: Any) -> dict[str, xr.Variable]:
    """The axes that a store holds; none where there is no store."""
    if place is None:
        return {}
    try:
        axes = open_axes(place)
    except NoStoreError:
        return {}
    return {str(name): c.variable.load() for name, c in axes.coords.items()}


def _fits(axis: xr.Variable, index: Ints, last: int, origins: NDArray[Any]) -> bool:
    """Whether samples begin where an axis says, which they do not if the user moved them."""
    if not len(index) or index.max() + last >= len(axis):
        return False
    return bool((np.asarray(axis.values)[index] == origins).all())


def _axis_of(dim: str, index: Ints, origins: xr.Variable, window: int) -> xr.Variable | None:
    """Coordinate values of all cells, from those of some; None where they cannot be known."""
    import xarray as xr

    if not len(index):
        return None
    places, first = np.unique(index, return_index=True)
    values = np.asarray(origins.values)[first]
    cells = np.arange(places[-1] + window)
    if len(places) == len(cells):
        return xr.Variable(dim, values, origins.attrs)
    if window == 1:  # cells between are never asked for
        nearest = np.searchsorted(places, cells).clip(max=len(places) - 1)
        return xr.Variable(dim, values[nearest], origins.attrs)
    if len(places) < 2 or values.dtype.kind not in "fiuM":
        return None
    start, numbers = values[0], values
    if values.dtype.kind == "M":
        numbers = (values - start).astype("timedelta64[ns]").astype(np.int64)
    step = (float(numbers[-1]) - float(numbers[0])) / (places[-1] - places[0])
    expected = float(numbers[0]) + step * (places - places[0])
    rounding = _ROUNDED_NS if values.dtype.kind == "M" else _ROUNDED * np.abs(numbers).max()
    if np.abs(expected - numbers).max() > rounding:
        return None
    line = float(numbers[0]) + step * (cells - places[0])
    if values.dtype.kind == "M":
        along = start + np.round(line).astype("timedelta64[ns]")
    else:
        along = np.round(line) if values.dtype.kind in "iu" else line
    along = along.astype(values.dtype)
    along[places] = values
    return xr.Variable(dim, along, origins.attrs)


def _chunk_counts(ds: xr.Dataset, variables: list[str], dim: str) -> Ints:
    """Samples per chunk: the chunks of the file or of dask, else pieces of a few MB."""
    n = ds.sizes.get(dim, 0)
    for name in variables:
        v = ds[name].variable
        if dim in v.chunksizes:
            return np.asarray(v.chunksizes[dim], np.int64)
        stored = v.encoding.get("preferred_chunks", {}).get(dim)
        if stored and not v._in_memory:
            return _even(n, int(stored))
    sample_bytes = sum(ds[name].dtype.itemsize * ds[name].size // max(n, 1) for name in variables)
    return _even(n, max(1, _PIECE_BYTES // max(sample_bytes, 1)))


def _even(n: int, size: int) -> Ints:
    starts = np.arange(0, n, size)
    return np.minimum(size, n - starts).astype(np.int64)


class StoreSource(DatasetSource):
    """Samples of a sample store as it was opened, read straight from its shard files."""

    def __init__(self, ds: xr.Dataset, dim: str, arrays: Mapping[str, ShardedArray]) -> None:
        super().__init__(ds, dim)
        self._arrays = dict(arrays)
        first = next(iter(self._arrays.values()))
        self.slow = first.fs is not None
        self.counts = _even(ds.sizes[dim], first.chunk)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        if not self.slow or len(out) == 1:
            for name, target in out.items():
                self._arrays[name].read(chunk, target)
            return
        # a remote read mostly waits: ask for all variables at once
        arrays = [self._arrays[name] for name in out]
        with ThreadPoolExecutor(len(arrays), thread_name_prefix="ml4cube-fetch") as threads:
            fetched = list(threads.map(lambda array: array.fetch(chunk), arrays))
        for array, data, target in zip(arrays, fetched, out.values(), strict=True):
            array.decode(chunk, data, target)

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message."""
        return next(iter(self._arrays.values())).describe(chunk)


def _of_store(ds: xr.Dataset, dim: str) -> DatasetSource:
    """Choose how to read an opened store: straight from its files unless it was changed."""
    names = [str(n) for n, v in ds.data_vars.items() if v.dtype.kind in "fiub"]
    path = ds.encoding.get("source")
    lazy = all(ds[name].variable.chunks is not None for name in names)
    if names and lazy and isinstance(path, str) and ds.sizes[dim]:
        # the name of a dask array says how it was made, so equal names mean equal values
        for fresh in _opened_anew(path):
            if all(name in fresh and _key(ds, name) == _key(fresh, name) for name in names):
                arrays = sharded_arrays(path, names)
                return DatasetSource(ds, dim) if arrays is None else StoreSource(ds, dim, arrays)
    return DatasetSource(ds, dim)


def _opened_anew(path: str) -> Iterator[xr.Dataset]:
    """Open a store in the ways that users do: by us, and by xarray with either form of its path."""
    # None where the path alone does not lead to the store.
    import xarray as xr

    if _is_elsewhere(path):
        logger.warning(
            "samples opened from %s are read through xarray, which is slower and checks less: the "
            "path alone does not lead to them (they are a group in there, or options are needed); "
            "give PTXrDataset the path of the group, or a zarr store",
            path,
        )
        return
    yield open_store(path)
    forms: list[Any] = [path]
    if "://" not in path:
        relative = os.path.relpath(path)
        forms += [relative, Path(path), Path(relative)]
    for form in forms:
        yield xr.open_zarr(form)


def _is_elsewhere(path: str) -> bool:
    """Whether a path is not that of a store of ours, but samples were opened from there."""
    try:
        fs, root = url_to_fs(path)
        found = json.loads(fs.cat_file(f"{root.rstrip('/')}/zarr.json"))
    except FileNotFoundError:
        raise StoreError(
            f"{path}, from which the samples were opened, is not there any more; open them where "
            "they are now"
        ) from None
    except Exception:  # whatever a file system raises where options are missing
        return True
    return "ml4cube_format" not in found.get("attributes", {})


def _key(ds: xr.Dataset, name: str) -> tuple[Any, ...]:
    """What a lazy variable's values come from."""
    variable = ds[name].variable
    return variable.dims, variable.shape, variable.data.name


def open_source(
    ds: Any,
    *,
    part: str | None = None,
    sample_size: SizesLike | None = None,
    overlap: SizesLike | float | None = None,
    block_size: SizesLike | None = None,
    lead: LeadArguments | None = None,
    unfilled: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[SampleSource, StoreMetadata | None]:
    """Open samples in any form: a store, a Dataset made by hand, or a cube to be cut."""
    import xarray as xr

    options = dict(options or {})
    check_choice("part", part, (*PARTS, None))
    for name in options:
        if name not in CUTTING_OPTIONS:
            raise InvalidTypeError(
                f"{name}={options[name]!r} is no argument; beside those of PTXrDataset, cubes take "
                f"sample_size, overlap, block_size, {', '.join(CUTTING_OPTIONS)}"
            )
    sizes = {"sample_size": sample_size, "overlap": overlap, "block_size": block_size}
    asked = [*(name for name, given in sizes.items() if given is not None), *options]
    asked = [name for name in asked if name != "progress"]  # of which a store needs none
    if lead is not None and asked == ["sample_size"] and _holds_samples(ds):
        asked = []  # it says how many cells of a stored window are inputs
    opened = isinstance(ds, xr.Dataset | xr.DataArray)
    ds = as_dataset(ds) if opened or asked else _opened_store(ds)
    metadata = StoreMetadata.of(ds) if "ml4cube_format" in ds.attrs else None
    dim = metadata.spec.array_dims[0] if metadata else SAMPLE_DIM
    if metadata and dim not in ds.dims:
        raise InvalidValueError(
            f"ds is a sample store by its attrs, but has no dim {dim!r}, only {list(ds.dims)}; "
            f"rename the dim back, or take one sample by isel({dim}=[0])"
        )
    if dim not in ds.dims:
        return cut_cube(ds, part or "train", sizes, lead, unfilled, options)
    if part is not None and (metadata is None or metadata.part != part):
        found = f"the store of {metadata.part!r}" if metadata else "samples made by hand"
        raise InvalidValueError(f"part={part!r} was asked for, but ds is {found}; open another")
    if asked:
        raise InvalidTypeError(
            f"{', '.join(asked)} cut a cube, and ds holds samples already (dim {dim!r}); leave "
            "them out"
        )
    source = _of_store(ds, dim) if metadata else DatasetSource(ds, dim)
    return (source if lead is None else WindowPair(source, lead, sample_size)), metadata


def _opened_store(source: Any) -> xr.Dataset:
    """Open a store; where there is none, say what there is."""
    try:
        return open_store(source)
    except NoStoreError:
        if isinstance(source, str | os.PathLike):
            fs, root = url_to_fs(os.fspath(source))
            if not fs.exists(root):
                raise StoreError(f"{source} does not exist: no sample store, no cube") from None
        try:
            found = as_dataset(source)
        except StoreError:
            found = None
        if found is not None and "ml4cube_format" not in found.attrs and found.sizes:
            raise StoreError(
                f"{source} is no sample store but a cube with dims {dict(found.sizes)}; give "
                "sample_size= (or scale_fn=, ...) with the path, or the cube opened by xarray, to "
                "cut it as it is read"
            ) from None
        raise


def _holds_samples(ds: Any) -> bool:
    """Whether samples were cut already."""
    import xarray as xr

    if isinstance(ds, xr.Dataset):
        return SAMPLE_DIM in ds.dims or "ml4cube_format" in ds.attrs
    try:
        return not isinstance(ds, xr.DataArray) and StoreMetadata.of(ds) is not None
    except NoStoreError:
        return False
