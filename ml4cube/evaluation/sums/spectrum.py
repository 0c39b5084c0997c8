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


def power_of_rows(
    values: Floats, weights: Floats, leads: NDArray[np.intp], n_leads: int
) -> tuple[Floats, Floats]:
    """Return the power of the rows of some maps, (maps, leads, wavenumbers), and their weight.

    `values` has the shape (maps, steps, ..., cells of a row), `leads` the lead of each step. A row
    counts if all maps have a value in each of its cells, with the mean of its cells' weights. The
    power of all wavenumbers adds up to the mean square of the row (Parseval).
    """
    n = values.shape[-1]
    complete = np.asarray(np.isfinite(values).all(axis=(0, -1)))
    row_weight = np.broadcast_to(weights, values.shape[1:]).mean(-1)
    sums, weight = np.zeros((len(values), n_leads, n // 2 + 1)), np.zeros(n_leads)
    for lead in np.unique(leads):
        here = complete & (leads == lead).reshape(-1, *(1,) * (complete.ndim - 1))
        w = row_weight[here]
        weight[lead] = w.sum()
        for i, of_map in enumerate(values):
            power = np.abs(np.fft.rfft(of_map[here], axis=-1) / n) ** 2
            power[:, 1 : (n + 1) // 2] *= 2  # these stand for the negative wavenumbers too
            sums[i, lead] = w @ power
    return sums, weight
