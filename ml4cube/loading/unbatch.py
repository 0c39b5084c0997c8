"""Turn a batch back into an xarray Dataset. Does not use torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.loading.lead_time import base_name, is_target
from ml4cube.loading.ring.slots import Field
from ml4cube.loading.sources import SampleSource, known_scaling, unscaled
from ml4cube.loading.views import WEIGHT
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr


def to_dataset(
    source: SampleSource,
    fields: Sequence[Field],
    arrays: Sequence[NDArray[Any]],
    samples: Ints,
    metadata: StoreMetadata | None,
    *,
    unscale: bool,
) -> xr.Dataset:
    """Make a Dataset of a batch, with names, coordinates and units."""
    import xarray as xr

    for field, array in zip(fields, arrays, strict=True):
        if array.shape != (len(samples), *field.shape):
            raise InvalidValueError(
                f"the array of {list(field.variables)} must have the shape "
                f"{(len(samples), *field.shape)} for {len(samples)} samples, got {array.shape}"
            )
    scaling = known_scaling(metadata)
    if unscale and metadata is None:
        raise InvalidValueError(
            "unscale=True, but the scaling of samples made by hand is not known; undo it with "
            "their own statistics"
        )
    lead = source.lead.along if source.lead is not None else {}
    cube_dims = source.cube_dims
    inputs = {name for field in fields for name in field.variables if not is_target(name)}
    described = metadata.provenance.get("variables", {}) if metadata else {}
    variables: dict[str, Any] = {}
    # by dim of the Dataset: dim of the cube, cells of the window, offset to the sample's origin
    windows: dict[str, tuple[str, int, int]] = {}
    for field, array in zip(fields, arrays, strict=True):
        for name, values in field.views(array).items():
            base, dims = base_name(name), []
            for dim, cells in source.variables[name].sizes.items():
                offset, old, new = lead[dim] if is_target(name) and dim in lead else (0, 0, 0)
                dims.append(f"{dim}_target" if offset or old != new else dim)
                windows[dims[-1]] = cube_dims.get(dim, dim), cells, offset
            if unscale and base in scaling:
                values = unscaled(scaling[base], name, values, source, samples)
            shown = f"{base}_target" if is_target(name) and base in inputs else base
            if name == WEIGHT:
                shown = "weights" if "weights" not in inputs else "sample_weights"
            scaled = base in scaling and not unscale
            attrs = {} if scaled else dict(described.get(base, {}).get("attrs", {}))
            variables[shown] = xr.Variable((SAMPLE_DIM, *dims), values, attrs)
    ds = xr.Dataset(variables)
    coords = {k: v for k, v in source.coords(samples).items() if k not in ds.variables}
    ds = ds.assign_coords({name: (SAMPLE_DIM, values) for name, values in coords.items()})
    ds = ds.assign_coords({"sample": (SAMPLE_DIM, samples)})
    axes = source.axes
    for dim, along in lead.items():
        if along.offset and f"{dim}_target" not in windows:
            windows[f"{dim}_target"] = cube_dims.get(dim, dim), 0, along.offset
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
