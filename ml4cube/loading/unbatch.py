"""Turn a batch back into an xarray Dataset. Does not use torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.loading.lead_time import DimLead, base_name, is_target
from ml4cube.loading.ring.arrays import Field
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
    if unscale and metadata is None:
        raise InvalidValueError(
            "unscale=True, but the scaling of samples made by hand is not known; undo it with "
            "their own statistics"
        )
    scaling = known_scaling(metadata)
    described = metadata.provenance.get("variables", {}) if metadata else {}
    inputs = {name for field in fields for name in field.variables if not is_target(name)}
    variables: dict[str, Any] = {}
    windows: dict[str, _WindowDim] = {}
    for field, array in zip(fields, arrays, strict=True):
        for name, values in field.views(array).items():
            base, dims = base_name(name), _window_dims(source, name)
            windows |= dims
            if unscale and base in scaling:
                values = unscaled(scaling[base], name, values, source, samples)
            shown = f"{base}_target" if is_target(name) and base in inputs else base
            if name == WEIGHT:
                shown = "weights" if "weights" not in inputs else "sample_weights"
            is_scaled = base in scaling and not unscale
            attrs = {} if is_scaled else dict(described.get(base, {}).get("attrs", {}))
            variables[shown] = xr.Variable((SAMPLE_DIM, *dims), values, attrs)
    ds = xr.Dataset(variables)
    coords = {k: v for k, v in source.coords(samples).items() if k not in ds.variables}
    ds = ds.assign_coords({name: (SAMPLE_DIM, values) for name, values in coords.items()})
    ds = ds.assign_coords({"sample": (SAMPLE_DIM, samples)})
    for dim, along in source.lead.items():
        if along.offset and f"{dim}_target" not in windows:  # targets without cells along the dim
            windows[f"{dim}_target"] = _WindowDim(source.cube_dims.get(dim, dim), 0, along.offset)
    for shown, window in windows.items():
        if window.cube_dim in source.axes and f"{window.cube_dim}_index" in coords:
            axis = np.asarray(source.axes[window.cube_dim].values)
            first = np.asarray(coords[f"{window.cube_dim}_index"]) + window.offset
            if window.cells:
                cells = axis[first[:, None] + np.arange(window.cells)]
                ds = ds.assign_coords({f"{shown}_cells": ((SAMPLE_DIM, shown), cells)})
            else:
                ds = ds.assign_coords({shown: (SAMPLE_DIM, axis[first])})
    return ds


class _WindowDim(NamedTuple):
    """A dim of windows, as it is in the cube."""

    cube_dim: str
    # Number of cells of a window.
    cells: int
    # Cells from the sample's origin to the first cell of the window.
    offset: int


def _window_dims(source: SampleSource, name: str) -> dict[str, _WindowDim]:
    """Return the dims of a variable in a Dataset; those where targets differ get another name."""
    lead = source.lead if is_target(name) else {}
    dims = {}
    for dim, cells in source.variables[name].sizes.items():
        along = lead.get(dim, DimLead(0, cells, cells))
        differs = along.offset or along.input_size != along.target_size
        shown = f"{dim}_target" if differs else dim
        dims[shown] = _WindowDim(source.cube_dims.get(dim, dim), cells, along.offset)
    return dims
