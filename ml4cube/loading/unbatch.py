"""Turn a batch back into an xarray Dataset. Does not use torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.loading.ring.arrays import Field
from ml4cube.loading.sources import SampleSource, known_scaling, unscaled
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.roles import INPUT, WEIGHT, ArrayName, DimLead
from ml4cube.store.metadata import StoreMetadata

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

    _check_shapes(fields, arrays, len(samples))
    scaling = known_scaling(metadata)
    described = {}
    if metadata:
        described = metadata.provenance.get("variables", {})
    inputs = {n.variable for field in fields for n in field.names if n.role == INPUT}
    variables: dict[str, Any] = {}
    windows: dict[str, _WindowDim] = {}
    for field, array in zip(fields, arrays, strict=True):
        for name, values in field.views(array).items():
            cube_name, dims = name.variable, _window_dims(source, name)
            windows |= dims
            is_scaled = cube_name in scaling
            if unscale and is_scaled:
                values = unscaled(scaling[cube_name], name, values, source, samples)
                is_scaled = False
            attrs = {}
            if not is_scaled:
                attrs = dict(described.get(cube_name, {}).get("attrs", {}))
            variables[_shown_name(name, inputs)] = xr.Variable((SAMPLE_DIM, *dims), values, attrs)
    ds = xr.Dataset(variables)
    coords = {k: v for k, v in source.coords(samples).items() if k not in ds.variables}
    ds = ds.assign_coords({name: (SAMPLE_DIM, values) for name, values in coords.items()})
    ds = ds.assign_coords({"sample": (SAMPLE_DIM, samples)})
    # Where targets have no axis along a dim, the coordinate still says where they lie.
    for dim, lead in source.lead.items():
        if lead.offset:
            no_cells = _WindowDim(source.cube_dim(dim), 0, lead.offset)
            windows.setdefault(f"{dim}_target", no_cells)
    return ds.assign_coords(_coords_of_cells(source, windows, coords))


def _check_shapes(fields: Sequence[Field], arrays: Sequence[NDArray[Any]], n: int) -> None:
    """Refuse arrays of another shape than those of the fields of n samples."""
    for field, array in zip(fields, arrays, strict=True):
        if array.shape != (n, *field.shape):
            raise InvalidValueError(
                f"the array of {[name.variable for name in field.names]} must have the shape "
                f"{(n, *field.shape)} for {n} samples, got {array.shape}"
            )


def _shown_name(name: ArrayName, inputs: Collection[str]) -> str:
    """Return the name that a variable of a batch has in the Dataset."""
    if name.role == INPUT or name.variable not in inputs:
        return name.variable
    if name.role == WEIGHT:
        return "sample_weights"
    return f"{name.variable}_target"


class _WindowDim(NamedTuple):
    """A dim of windows, as it is in the cube."""

    cube_dim: str
    # Number of cells of a window; 0 if its arrays lack the dim.
    cells: int
    # Cells from the sample's origin to the first cell of the window.
    offset: int


def _window_dims(source: SampleSource, name: ArrayName) -> dict[str, _WindowDim]:
    """Return the dims of a variable in a Dataset; those where targets differ get another name."""
    lead = {} if name.role == INPUT else source.lead
    dims = {}
    for dim, cells in source.variables[name].sizes.items():
        along = lead.get(dim, DimLead(0, cells, cells))
        differs = along.offset or along.input_size != along.target_size
        shown = f"{dim}_target" if differs else dim
        dims[shown] = _WindowDim(source.cube_dim(dim), cells, along.offset)
    return dims


def _coords_of_cells(
    source: SampleSource, windows: Mapping[str, _WindowDim], origins: Arrays
) -> dict[str, Any]:
    """Return the coordinates of the cells of every window, along dims where they are known."""
    found: dict[str, Any] = {}
    for shown, window in windows.items():
        axis, index = source.axes.get(window.cube_dim), origins.get(f"{window.cube_dim}_index")
        if axis is None or index is None:
            continue
        first_cells, values = index + window.offset, np.asarray(axis.values)
        if window.cells:
            cells = first_cells[:, None] + np.arange(window.cells)
            found[f"{shown}_cells"] = ((SAMPLE_DIM, shown), values[cells])
        else:
            found[shown] = (SAMPLE_DIM, values[first_cells])
    return found
