"""Scaling of an array by statistics per level, pixel or month; lazy for lazy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.scaling import (
    PLACES_ATTR,
    apply_in_cells,
    decoded_places,
    match_places,
)
from ml4cube.core.statistics import scaled_dtype
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.core.sums.moments import VariableStatistics
from ml4cube.cube.chunks.blocks import read_in_blocks


def rescale_at_places(
    array: xr.DataArray,
    arithmetic: Callable[..., Any],
    offset: NDArray[Any],
    scale: NDArray[Any],
    dims: Sequence[str],
    labels: Mapping[str, NDArray[Any]],
) -> xr.DataArray:
    """Scale an array by the statistics of each cell, or undo that."""
    array = read_in_blocks(array)
    name = str(array.name)
    if PLACES_ATTR in array.attrs:
        entries = _of_samples(array, offset.shape)
    else:
        coords = {str(d): array.indexes[d].values for d in array.dims if d in array.indexes}
        sizes = {str(dim): n for dim, n in array.sizes.items()}
        places = match_places(name, dims, offset, labels, sizes, coords)
        entries = [xr.Variable((dim,), along) for dim, along in places]
    if array.chunks is not None:
        chunks = array.chunksizes
        entries = [one.chunk({d: chunks[d] for d in one.dims}) for one in entries]
    result: xr.DataArray = xr.apply_ufunc(
        partial(apply_in_cells, arithmetic, offset, scale),
        array,
        *entries,
        dask="parallelized",
        output_dtypes=[scaled_dtype(array.dtype)],
        keep_attrs="override",
    )
    return result


def _of_samples(array: xr.DataArray, shape: tuple[int, ...]) -> list[xr.Variable]:
    """Return the entry of the statistics for each cell of a store's samples, by their origins."""
    name, places = array.name, array.attrs[PLACES_ATTR]
    if len(places) != len(shape):
        raise InvalidValueError(
            f"the samples of {name!r} were scaled by statistics along {[p[0] for p in places]}, "
            f"got statistics of shape {shape}; use those of the store (StoreMetadata.of(...))"
        )
    entries = []
    for axis, ((dim, along), (_, _, kept, cells)) in enumerate(
        zip(decoded_places(places), places, strict=True)
    ):
        index = array.coords.get(f"{dim}_index")
        if index is None or (kept and array.sizes.get(kept) != cells):
            raise InvalidValueError(
                f"the origins of the samples of {name!r} along {dim!r} are unknown: they need the "
                f"coordinate '{dim}_index'{f' and all {cells} cells along {kept!r}' * bool(kept)}; "
                "undo the scaling before you select or rename"
            )
        first = index.variable
        cell = first + xr.Variable((kept,), np.arange(cells)) if kept else first
        found = along[np.asarray(cell.values, np.intp)]
        if found.size and found.max() >= shape[axis]:
            raise InvalidValueError(
                f"the samples of {name!r} were scaled by other statistics, longer than "
                f"{shape[axis]} along {dim!r}; use those of the store (StoreMetadata.of(...))"
            )
        entries.append(xr.Variable(cell.dims, found))
    return entries


def labelled(stats: VariableStatistics, values: Any) -> Any:
    """Return statistics as a number, or as a DataArray with their dims and coordinates."""
    if not isinstance(stats, FieldStatistics) or not stats.dims:
        return float(values)
    coords = {dim: (dim, labels) for dim, labels in stats.labels.items()}
    return xr.DataArray(values, coords, stats.dims)
