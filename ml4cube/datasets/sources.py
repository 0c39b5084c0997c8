"""Where the samples of a data set come from, chunk by chunk. Nothing here knows torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.shard import Ints
from ml4cube.datasets.windows import CubeReader

if TYPE_CHECKING:
    import xarray as xr

# Samples in memory are handed on in pieces of about this size.
_PIECE_BYTES = 4 << 20


class DatasetSource:
    """Samples of an xarray Dataset, whatever backs it: numpy, dask, a lazily opened file.

    Parameters
    ----------
    ds : Dataset
        Variables with a dim of samples.
    variables : iterable of str
        Those that will be read.
    dim : str
        The dim of samples.
    """

    slow = False

    def __init__(self, ds: xr.Dataset, variables: Iterable[str], dim: str) -> None:
        self._dim = dim
        self._readers = {name: CubeReader.of(ds[[name]], [name]) for name in variables}
        self.counts = _chunk_counts(ds, list(self._readers), dim)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable.

        Parameters
        ----------
        chunk : int
            Which chunk.
        out : mapping of str to ndarray, shape (samples, ...)
            Where to write; values are cast.
        """
        rows = slice(int(self._starts[chunk]), int(self._starts[chunk + 1]))
        for name, target in out.items():
            reader = self._readers[name]
            slices = {d: slice(0, n) for d, n in zip(reader.dims, reader.shape, strict=True)}
            values = reader.read({**slices, self._dim: rows})[name]
            target[...] = np.moveaxis(values, reader.dims.index(self._dim), 0)

    def describe(self, chunk: int) -> str:
        """Name a chunk for an error message.

        Parameters
        ----------
        chunk : int
            Which chunk.

        Returns
        -------
        str
            Its samples.
        """
        return f"{self._dim} {self._starts[chunk]} to {self._starts[chunk + 1] - 1}"


def _chunk_counts(ds: xr.Dataset, variables: list[str], dim: str) -> Ints:
    """Samples per chunk: the chunks of the file or of dask, else pieces of a few MB."""
    n = ds.sizes[dim]
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
