"""Pictures of what happened: each function returns a Figure and shows or saves nothing.

Figures are made with the object interface, so no display is needed and no global state of the
drawing library is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, PARTS

# Okabe and Ito's colours, which people with colour-blindness can tell apart
_PART_COLORS = {"train": "#0072B2", "val": "#E69F00", "test": "#D55E00", "excluded": "#999999"}
_PART_LABELS = {**PARTS, "excluded": EXCLUDED}
_GAP_COLOR = "0.82"


def loss_curve(
    train: Sequence[float],
    val: Sequence[float] | None = None,
    *,
    title: str = "Training and validation loss",
) -> Figure:
    """Draw the losses of a training run over its epochs, and mark the best one.

    Parameters
    ----------
    train : sequence of float
        Mean training loss of each epoch.
    val : sequence of float, optional
        Mean validation loss of each epoch. Gaps (NaN, None) are left out of the line.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidValueError
        If there is no epoch, or the two differ in length.

    Examples
    --------
    >>> figure = loss_curve([1.0, 0.5, 0.4], [1.1, 0.6, 0.7])
    >>> len(figure.axes)
    1
    """
    if not len(train):
        raise InvalidValueError("train holds no epoch; draw after training")
    if val is not None and len(val) != len(train):
        raise InvalidValueError(
            f"val has {len(val)} epochs, train has {len(train)}; give equal numbers"
        )
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    epochs = range(1, len(train) + 1)
    axes.plot(epochs, _gaps(train), color="tab:blue", label="training")
    if val is not None:
        axes.plot(epochs, _gaps(val), color="tab:orange", label="validation")
    judged = _gaps(train if val is None else val)
    known = [(value, epoch) for value, epoch in zip(judged, epochs, strict=True) if value == value]
    if known:
        best, epoch = min(known)
        axes.plot(
            [epoch], [best], "o", color="black", ms=5, label=f"best: {best:.4g} (epoch {epoch})"
        )
    drawn = [value for values in (train, val or []) for value in _gaps(values) if value == value]
    if drawn and 0 < 10 * min(drawn) < max(drawn):  # less than a decade reads better without
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="mean loss per sample", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def split_map(
    label: xr.DataArray,
    *,
    steps: Sequence[int] = (),
    valid: xr.DataArray | None = None,
    title: str = "Split",
) -> Figure:
    """Draw which part every time step belongs to, and maps of single steps.

    Parameters
    ----------
    label : DataArray
        A split label with a time dim (its first dim of dates, or the one called ``time``) and
        up to two others.
    steps : sequence of int
        Positions along time to draw as maps.
    valid : DataArray of bool, optional
        Cells that hold a value, along dims of `label`; the others are left grey and do not
        count.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        A bar per time step, its height shared by the parts, above the maps.

    Raises
    ------
    InvalidValueError
        If there is no time dim, or maps are wanted of a label without two other dims.

    Examples
    --------
    >>> label = xr.DataArray(np.ones((3, 2, 2), "u1"), dims=("time", "lat", "lon"), name="split")
    >>> len(split_map(label, steps=[0]).axes)
    2
    """
    time = _time_dim(label)
    rest = [str(dim) for dim in label.dims if dim != time]
    if len(steps) and len(rest) != 2:
        raise InvalidValueError(
            f"maps need two dims beside {time!r}, the label has {rest}; leave out steps"
        )
    cells = label if valid is None else label.where(valid.broadcast_like(label))
    figure = Figure(figsize=(8, 2.0 + 1.35 * len(steps)), layout="constrained")
    heights = [1.5] + [1.0] * len(steps)
    rows = figure.subplots(1 + len(steps), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_timeline(rows[0], cells, time, rest)
    rows[0].set_title(title)
    colors = ListedColormap(list(_PART_COLORS.values()))
    codes = list(_PART_COLORS)
    for axes, step in zip(rows[1:], steps, strict=True):
        part = cells.isel({time: step}).transpose(*rest)
        number = xr.full_like(part, np.nan, dtype="float64")
        for code, name in enumerate(codes):
            number = number.where(part != _PART_LABELS[name], code)
        _draw_field(
            axes,
            number,
            cmap=colors,
            norm=BoundaryNorm(np.arange(len(codes) + 1) - 0.5, len(codes)),
        )
        axes.set_title(_step_name(label, time, step), fontsize=9, loc="left")
        axes.label_outer()
    if len(steps):
        rows[-1].tick_params(labelbottom=True)
        rows[-1].set_xlabel(_axis_name(cells.isel({time: 0}).transpose(*rest), 1), fontsize=9)
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in _PART_COLORS.items()]
        + ([] if valid is None else [Patch(color=_GAP_COLOR, label="no data")]),
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    return figure


def _time_dim(label: xr.DataArray) -> str:
    for dim in label.dims:
        values = label.coords.get(dim)
        if dim == "time" or (values is not None and values.dtype.kind == "M"):
            return str(dim)
    raise InvalidValueError(f"the label has dims {label.dims}, none of which is a time")


def _draw_timeline(axes: Axes, cells: xr.DataArray, time: str, rest: list[str]) -> None:
    known = cells.notnull().sum(rest)
    below = np.zeros(cells.sizes[time])
    steps = np.arange(cells.sizes[time])
    for name, color in _PART_COLORS.items():
        share = ((cells == _PART_LABELS[name]).sum(rest) / known.where(known > 0)).fillna(0).values
        axes.bar(steps, share, bottom=below, width=1.0, color=color, edgecolor="white", lw=0.4)
        below = below + share
    axes.set(
        xlim=(-0.5, len(steps) - 0.5), ylim=(0, 1), ylabel="share of cells", yticks=[0, 0.5, 1]
    )
    places = np.unique(np.linspace(0, len(steps) - 1, min(7, len(steps))).round().astype(int))
    axes.set_xticks(places, [_step_name(cells, time, i) for i in places])


def _step_name(array: xr.DataArray, time: str, step: int) -> str:
    if time not in array.coords:
        return f"step {step}"
    value = array[time].values[step]
    return str(value)[:7] if not isinstance(value, int | float | np.number) else f"{value}"


def field_maps(
    fields: Mapping[str, xr.DataArray],
    errors: Mapping[str, xr.DataArray] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw maps of one quantity under one another, and their errors on a scale of their own.

    Gaps, such as land, stay grey. All fields share one colour scale, and all errors share
    another one that is symmetric about zero.

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
        If there is no field, or one has not two dims.

    Examples
    --------
    >>> truth = xr.DataArray(np.arange(6.0).reshape(2, 3), dims=("lat", "lon"))
    >>> len(field_maps({"truth": truth}, {"error": truth - 2}).axes)  # two maps, two scales
    4
    """
    errors = errors or {}
    if not fields:
        raise InvalidValueError("fields holds no map; give at least one")
    for name, field in [*fields.items(), *errors.items()]:
        if field.ndim != 2:
            raise InvalidValueError(f"{name!r} has dims {field.dims}; give maps of two dims")
    figure = Figure(figsize=(9, 0.6 + 1.35 * (len(fields) + len(errors))), layout="constrained")
    panels = figure.subplots(len(fields) + len(errors), 1, squeeze=False, sharex=True)[:, 0]
    units = next(iter(fields.values())).attrs.get("units", "")
    shown = np.concatenate([np.ravel(field.values) for field in fields.values()])
    low, high = np.nanpercentile(shown, [0.5, 99.5])
    _draw_group(figure, panels[: len(fields)], fields, units, vmin=low, vmax=high, cmap="viridis")
    if errors:
        wrong = np.concatenate([np.ravel(field.values) for field in errors.values()])
        reach = float(np.nanpercentile(np.abs(wrong), 99.5)) or 1.0
        _draw_group(
            figure, panels[len(fields) :], errors, f"error ({units})" if units else "error",
            vmin=-reach, vmax=reach, cmap="RdBu_r",
        )  # fmt: skip
    panels[-1].set_xlabel(_axis_name(next(iter(fields.values())), 1))
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_group(
    figure: Figure, panels: Any, maps: Mapping[str, xr.DataArray], label: str, **style: Any
) -> None:
    """Draw maps that share a colour scale, with one colour bar for all."""
    for axes, (name, field) in zip(panels, maps.items(), strict=True):
        mesh = _draw_field(axes, field, **style)
        axes.set_title(name, fontsize=9, loc="left")
    figure.colorbar(mesh, ax=list(panels), label=label, extend="both", aspect=12 * len(maps))


def _draw_field(axes: Axes, field: xr.DataArray, **style: Any) -> Any:
    row, column = (str(dim) for dim in field.dims)
    axes.set_facecolor(_GAP_COLOR)
    x, y = (
        field[dim].values if dim in field.coords else np.arange(field.sizes[dim])
        for dim in (column, row)
    )
    mesh = axes.pcolormesh(x, y, np.ma.masked_invalid(field.values), shading="nearest", **style)
    axes.set_ylabel(_axis_name(field, 0), fontsize=8)
    axes.tick_params(labelsize=8)
    return mesh


def _axis_name(field: xr.DataArray, axis: int) -> str:
    dim = str(field.dims[axis])
    units = field[dim].attrs.get("units", "") if dim in field.coords else ""
    sign = {"degrees_north": "°N", "degrees_east": "°E"}.get(units, units)
    return f"{dim} ({sign})" if sign else dim
