"""`field_maps`: maps of one quantity and of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError

GAP_COLOR = "0.82"


def field_maps(
    fields: Mapping[str, xr.DataArray],
    errors: Mapping[str, xr.DataArray] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw maps of one quantity, and of their errors on a separate colour scale.

    Gaps, such as land, are grey. All fields share one colour scale, and all errors another one
    that is symmetric about zero.

    Parameters
    ----------
    fields : mapping of str to DataArray
        Heading and map, dims (row, column), all in the units of the first.
    errors : mapping of str to DataArray, optional
        Heading and map of differences.
    title : str
        Heading of the figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per map.

    Raises
    ------
    InvalidValueError
        If there is no field, or one does not have two dims.

    Examples
    --------
    >>> truth = xr.DataArray(np.arange(6.0).reshape(2, 3), dims=("lat", "lon"))
    >>> len(field_maps({"truth": truth}, {"error": truth - 2}).axes)  # two maps, two scales
    4
    """
    errors = errors or {}
    if not fields:
        raise InvalidValueError("fields must have at least one map, got none")
    for name, field in [*fields.items(), *errors.items()]:
        if field.ndim != 2:
            raise InvalidValueError(f"{name!r} must have two dims, got {field.dims}")
    figure = Figure(figsize=(9, 0.6 + 1.35 * (len(fields) + len(errors))), layout="constrained")
    panels = figure.subplots(len(fields) + len(errors), 1, squeeze=False, sharex=True)[:, 0]
    units = next(iter(fields.values())).attrs.get("units", "")
    low, high = np.nanpercentile(_finite_values(fields), [0.5, 99.5])
    _draw_group(figure, panels[: len(fields)], fields, units, vmin=low, vmax=high, cmap="viridis")
    if errors:
        largest = float(np.nanpercentile(np.abs(_finite_values(errors)), 99.5)) or 1.0
        _draw_group(
            figure, panels[len(fields) :], errors, f"error ({units})" if units else "error",
            vmin=-largest, vmax=largest, cmap="RdBu_r",
        )  # fmt: skip
    panels[-1].set_xlabel(axis_name(next(iter(fields.values())), 1))
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _finite_values(maps: Mapping[str, xr.DataArray]) -> NDArray[np.float64]:
    """Return all values of maps, with NaN for infinite ones, such as the logarithm of no rain."""
    values = np.concatenate([np.ravel(field.values) for field in maps.values()])
    return np.where(np.isfinite(values), values, np.nan)


def _draw_group(
    figure: Figure, panels: Any, maps: Mapping[str, xr.DataArray], label: str, **style: Any
) -> None:
    """Draw maps with a common colour scale and colour bar."""
    for axes, (name, field) in zip(panels, maps.items(), strict=True):
        mesh = draw_field(axes, field, **style)
        axes.set_title(name, fontsize=9, loc="left")
    figure.colorbar(mesh, ax=list(panels), label=label, extend="both", aspect=12 * len(maps))


def draw_field(axes: Axes, field: xr.DataArray, **style: Any) -> Any:
    """Draw a field of two dims along its coordinates, gaps in grey."""
    row, column = (str(dim) for dim in field.dims)
    axes.set_facecolor(GAP_COLOR)
    # Beside coordinates out of order, such as 90, 180, -90, a cell would cover the others.
    centers = {dim: _axis_values(field, dim) for dim in (row, column)}
    field = field.isel({dim: np.argsort(values, kind="stable") for dim, values in centers.items()})
    x, y = (_edges(np.sort(centers[dim])) for dim in (column, row))
    mesh = axes.pcolormesh(x, y, np.ma.masked_invalid(field.values), **style)
    axes.set_ylabel(axis_name(field, 0), fontsize=8)
    axes.tick_params(labelsize=8)
    return mesh


def _axis_values(field: xr.DataArray, dim: str) -> Any:
    """Return the coordinates of a dim if they can be drawn, else positions."""
    coord = field.coords.get(dim)
    if coord is None or coord.dtype.kind not in "fiuM" or coord.isnull().any():
        return np.arange(field.sizes[dim])
    return coord.values


def _edges(centers: NDArray[Any]) -> NDArray[Any]:
    """Return the edges of cells, halfway between centers; a single cell is 1 or a day wide."""
    one = np.timedelta64(24, "h") if centers.dtype.kind == "M" else 1
    half = (np.diff(centers) if len(centers) > 1 else np.array([one])) / 2
    return np.concatenate([centers[:1] - half[:1], centers[:-1] + half, centers[-1:] + half[-1:]])


def axis_name(field: xr.DataArray, axis: int) -> str:
    """Return the name of a dim with its units."""
    dim = str(field.dims[axis])
    units = field[dim].attrs.get("units", "") if dim in field.coords else ""
    sign = {"degrees_north": "°N", "degrees_east": "°E"}.get(units, units)
    return f"{dim} ({sign})" if sign else dim
