"""`sample_density`: how many samples cover each cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.plotting.maps import SEQUENTIAL, Scale, check_maps, draw_maps

Ints = NDArray[np.int64]


def sample_density(
    store: xr.Dataset,
    cube: xr.Dataset | xr.DataArray | None = None,
    *,
    dims: Sequence[str] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw a map of how many samples of a store cover each cell.

    Cells without a sample are grey. A map that is uneven shows where samples were dropped, for
    their gaps or as part of a buffer, and which places count most in the loss.

    Parameters
    ----------
    store : Dataset
        An opened store, as by `open_store` or `MultiProcSampler.get_datasets`.
    cube : Dataset or DataArray, optional
        The cube that was sampled, or `open_axes` of the store, for the coordinates of the map;
        default: cells are drawn at their positions.
    dims : sequence of str, optional
        The two dims of the map, (row, column); default: latitude and longitude, else the last
        two. Samples along the others are added up.
    title : str
        Heading; default: the part of the store.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidTypeError
        If `store` is not an opened store.
    InvalidValueError
        If the store has no sample, the dims are not two of it, or the cube has other sizes.

    Examples
    --------
    >>> spec = {"dims": ["lat", "lon"], "shape": [2, 4], "size": [2, 2]}
    >>> store = xr.Dataset(attrs={"spec": spec, "part": "train"}).assign_coords(
    ...     lat_index=("samples", [0, 0]), lon_index=("samples", [0, 1])
    ... )
    >>> sample_density(store).axes[0].collections[0].get_array()[0].tolist()
    [1.0, 2.0, 1.0, None]
    """
    if not isinstance(store, xr.Dataset) or "spec" not in store.attrs:
        raise InvalidTypeError(
            f"store must be an opened sample store, as by open_store, got {type(store).__name__}"
        )
    spec = store.attrs["spec"]
    shape, size = (dict(zip(spec["dims"], spec[key], strict=True)) for key in ("shape", "size"))
    rows, columns = _map_dims(list(shape), dims)
    if not store.sizes[SAMPLE_DIM]:
        raise InvalidValueError("store must have at least one sample, got none")
    first_rows, first_columns = (store[f"{dim}_index"].values for dim in (rows, columns))
    covered = _counts(
        (first_rows, first_columns), (shape[rows], shape[columns]), (size[rows], size[columns])
    )
    counts = xr.DataArray(covered, dims=(rows, columns))
    if cube is not None:
        counts = counts.assign_coords(_coordinates(cube, counts))
    grids = check_maps([("samples", counts.where(counts > 0))])
    part = store.attrs.get("part", "a store")
    # All counts are shown: a rare one is what one looks for.
    scale = Scale(SEQUENTIAL, 0.0, float(counts.max()), "samples per cell")
    return draw_maps([title or f"Samples of {part}"], grids, scale, "", ax)


def _map_dims(dims: list[str], chosen: Sequence[str] | None) -> tuple[str, str]:
    """Return the two dims that were chosen, else latitude and longitude, else the last two."""
    if chosen is not None:
        if isinstance(chosen, str) or len(set(chosen)) != 2 or not set(chosen) <= set(dims):
            raise InvalidValueError(f"dims must be two of {dims}, got {chosen!r}")
        rows, columns = chosen
        return rows, columns
    if len(dims) < 2:
        raise InvalidValueError(f"store must have two dims for a map, got {dims}")
    lat = [dim for dim in dims if is_latitude(dim, {}, rotated=True)]
    lon = [dim for dim in dims if is_longitude(dim, {}, rotated=True)]
    if lat and lon:
        return lat[0], lon[0]
    return dims[-2], dims[-1]


def _counts(first: tuple[Ints, Ints], shape: tuple[int, int], size: tuple[int, int]) -> Ints:
    """Return the number of windows that cover each cell, by sums over their corners."""
    changes = np.zeros((shape[0] + 1, shape[1] + 1), dtype=np.int64)
    for row, column, sign in ((0, 0, 1), (size[0], 0, -1), (0, size[1], -1), (*size, 1)):
        np.add.at(changes, (first[0] + row, first[1] + column), sign)
    counts: Ints = changes.cumsum(0).cumsum(1)[:-1, :-1]
    return counts


def _coordinates(cube: xr.Dataset | xr.DataArray, counts: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the coordinates of a cube along the dims of a map."""
    wrong = {
        dim: cube.sizes.get(dim) for dim, n in counts.sizes.items() if cube.sizes.get(dim) != n
    }
    if wrong:
        raise InvalidValueError(
            f"cube must have the sizes of the store, {dict(counts.sizes)}, got {wrong}"
        )
    return {
        str(name): coord
        for name, coord in cube.coords.items()
        if coord.dims and set(coord.dims) <= set(counts.dims)
    }
