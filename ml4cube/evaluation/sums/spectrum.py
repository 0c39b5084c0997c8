"""Power spectra of maps: along the rows of a map, averaged over rows and times."""

from __future__ import annotations

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.cube.coordinates import role_of

Floats = NDArray[np.float64]

_LEAST_CELLS = 4


def spectrum_dim(truth: xr.DataArray, time_dim: str) -> str | None:
    """Return the dim of the rows: that of a 1-D longitude, else the last one but time."""
    dims = [str(dim) for dim in truth.dims if dim != time_dim]
    longitudes = [
        str(coord.dims[0])
        for coord in truth.coords.values()
        if coord.ndim == 1 and coord.dims[0] in dims and role_of(coord) == "longitude"
    ]
    dims = longitudes or dims
    if not dims or truth.sizes[dims[-1]] < _LEAST_CELLS:
        return None
    return dims[-1]


def add_power(sums: Floats, row_weights: Floats, values: Floats, weights: Floats) -> None:
    """Add the power of the rows of some maps to sums, shape (maps, leads, wavenumbers).

    `values` has the shape (maps, samples, leads, ..., cells of a row). A row counts if all maps
    have a value in each of its cells, with the mean of its cells' weights. The power of all
    wavenumbers adds up to the mean square of the row (Parseval).
    """
    n = values.shape[-1]
    complete = np.asarray(np.isfinite(values).all(axis=(0, -1)))
    row_weight = np.broadcast_to(weights, values.shape[1:]).mean(-1)
    for lead in range(values.shape[2]):
        here = complete[:, lead]
        if not here.any():
            continue
        w = row_weight[:, lead][here]
        row_weights[lead] += w.sum()
        for i, of_map in enumerate(values[:, :, lead]):
            power = np.abs(np.fft.rfft(of_map[here], axis=-1) / n) ** 2
            power[:, 1 : (n + 1) // 2] *= 2  # these stand for the negative wavenumbers too
            sums[i, lead] += w @ power
