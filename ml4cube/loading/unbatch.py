"""A batch back into an xarray Dataset: names, coordinates, units. Nothing here knows torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.shares import Ints
from ml4cube.loading.known_scaling import KnownScaling
from ml4cube.loading.lead import Lead, target_name
from ml4cube.loading.ring.slots import Field
from ml4cube.loading.views import WEIGHT
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr

    from ml4cube.loading.sources import SampleSource

_SUFFIX = target_name("")


def to_dataset(
    source: SampleSource,
    fields: Sequence[Field],
    arrays: Sequence[NDArray[Any]],
    samples: Ints,
    metadata: StoreMetadata | None,
    *,
    unscale: bool,
) -> xr.Dataset:
    """Name what is in a batch, and say where it lies."""
    import xarray as xr

    for field, array in zip(fields, arrays, strict=True):
        if array.shape != (len(samples), *field.shape):
            raise InvalidValueError(
                f"an array of the batch has the shape {array.shape}, {len(samples)} samples of "
                f"{list(field.variables)} have {(len(samples), *field.shape)}"
            )
    scaling = KnownScaling.of(metadata)
    if unscale and metadata is None:
        raise InvalidValueError(
            "unscale=True, but samples made by hand do not say how they were scaled; undo it "
            "with their own statistics"
        )
    lead = source.lead
    cube_dims = metadata.spec.cube_dims if metadata else {}
    inputs = {name for field in fields for name in field.variables if not name.endswith(_SUFFIX)}
    described = metadata.provenance.get("variables", {}) if metadata else {}
    variables: dict[str, Any] = {}
    windows: dict[str, tuple[str, int, int]] = {}
    for field, array in zip(fields, arrays, strict=True):
        for name, values in field.views(array).items():
            base = name.removesuffix(_SUFFIX)
            elsewhere = name.endswith(_SUFFIX)
            dims = _dims(source.dims[name], lead if elsewhere else None)
            for (dim, shown), cells in zip(dims.items(), field.window, strict=True):
                offset = _offset(lead if elsewhere else None, dim)
                windows[shown] = cube_dims.get(dim, dim), cells, offset
            if unscale and name in scaling:
                values = scaling.unscaled(name, values, source, samples)
            shown = f"{base}_target" if elsewhere and base in inputs else base
            if name == WEIGHT:
                shown = "weights" if "weights" not in inputs else "sample_weights"
            scaled = name in scaling and not unscale
            attrs = {} if scaled else dict(described.get(base, {}).get("attrs", {}))
            variables[shown] = xr.Variable((SAMPLE_DIM, *dims.values()), values, attrs)
    ds = xr.Dataset(variables)
    coords = {k: v for k, v in source.coords(samples).items() if k not in ds.variables}
    ds = ds.assign_coords({name: (SAMPLE_DIM, values) for name, values in coords.items()})
    ds = ds.assign_coords({"sample": (SAMPLE_DIM, samples)})
    axes = source.axes()
    if lead is not None:
        for dim, k in zip(lead.dims, lead.offset, strict=True):
            if k and f"{dim}_target" not in windows:
                windows[f"{dim}_target"] = cube_dims.get(dim, dim), 0, k
    for shown, (dim, cells, offset) in windows.items():
        if dim in axes and f"{dim}_index" in coords:
            first = np.asarray(coords[f"{dim}_index"]) + offset
            values = np.asarray(axes[dim].values)
            if not cells:
                ds = ds.assign_coords({shown: (SAMPLE_DIM, values[first])})
            else:
                grid = values[first[:, None] + np.arange(cells)]
                ds = ds.assign_coords({f"{shown}_cells": ((SAMPLE_DIM, shown), grid)})
    return ds


def _dims(dims: tuple[str, ...], lead: Lead | None) -> Mapping[str, str]:
    """Names of a window's dims; those along which targets lie elsewhere get one of their own."""
    if lead is None:
        return {dim: dim for dim in dims}
    moved = {
        dim
        for dim, k, old, new in zip(lead.dims, lead.offset, lead.input_size, lead.size, strict=True)
        if k or old != new
    }
    return {dim: f"{dim}_target" if dim in moved else dim for dim in dims}


def _offset(lead: Lead | None, dim: str) -> int:
    if lead is None or dim not in lead.dims:
        return 0
    return lead.offset[lead.dims.index(dim)]
