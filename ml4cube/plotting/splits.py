"""`split_map`, `split_timeline`, `fold_bars`: the parts of a split in space and time."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import check_mask
from ml4cube.core.split_plan import EXCLUDED, PARTS
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.plotting.grids import MapGrid
from ml4cube.plotting.maps import (
    GAP_COLOR,
    Scale,
    check_maps,
    draw_group,
    draw_map,
    new_map_panels,
)
from ml4cube.plotting.steps import positions_along, step_name
from ml4cube.plotting.style import (
    PART_COLORS,
    WIDTH,
    drawing,
    figure_of,
    ink_on,
    legend_below,
    new_panels,
)

# The heading, the field and the colours of a map.
_Map = tuple[str, xr.DataArray, Scale]
_PART_LABELS = {**PARTS, "excluded": EXCLUDED}
_ORDER = ("train", "excluded", "val", "test")
_TIMELINE_HEIGHT = 1.1
# A label is drawn as the position of its part among the colours.
_PARTS_SCALE = Scale(ListedColormap(list(PART_COLORS.values())), -0.5, len(PART_COLORS) - 0.5)


def split_map(
    label: xr.DataArray | xr.Dataset,
    *,
    steps: Sequence[int] = (),
    aggregated: bool = False,
    valid: xr.DataArray | None = None,
    title: str = "Split",
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw the parts over time, and maps of single steps or of all steps together.

    Parameters
    ----------
    label : DataArray or Dataset
        A split label, or a cube with a ``split``. Its time dim is the first one with dates, or
        that named ``time``, ``t`` or ``date``; maps need two other dims. Without a time dim, the
        label is the only map.
    steps : sequence of int
        Positions along time to draw as maps.
    aggregated : bool
        Draw a map of each part: the fraction of time that a cell belongs to it. One map if no
        cell changes its part.
    valid : DataArray of bool, optional
        Cells with a value, along dims of `label`; the others are grey and do not count.
    title : str
        Heading.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for the bars over time, and one for each map; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per time step, above the maps.

    Raises
    ------
    InvalidValueError
        If a map is requested and the label does not have two dims apart from time, or a step is
        out of range.

    Examples
    --------
    >>> label = xr.DataArray(np.ones((3, 2, 2), "u1"), dims=("time", "lat", "lon"), name="split")
    >>> len(split_map(label, steps=[0]).axes)
    2
    """
    label = _label_of(label, "label")
    time = find_time_dim(label.coords.values(), label.dims)
    map_dims = [str(dim) for dim in label.dims if dim != time]
    steps = positions_along(steps, label, time)
    if steps or aggregated or time is None:
        _check_map_dims(map_dims, time)
    cells = _counting_cells(label, valid)
    maps = _maps_of(cells, time, map_dims, steps, aggregated)
    grids = check_maps((heading or "label", field) for heading, field, _ in maps)
    n = (time is not None) + len(maps)
    present = [part for part in _ORDER if bool((cells == _PART_LABELS[part]).any())]
    with drawing(ax, n, lambda: _new_panels(grids, maps, time)) as panels:
        _draw_maps(panels[len(panels) - len(maps) :], grids, maps)
        if time is not None:
            _draw_timeline(panels[0], cells, time, map_dims)
        panels[0].set_title(title)
        has_gaps = bool(maps) and valid is not None
        _add_legend(panels[-1], present, has_gaps=has_gaps, own=ax is None)
    return figure_of(panels[0])


def _check_map_dims(map_dims: list[str], time: str | None) -> None:
    if len(map_dims) == 2:
        return
    advice = "select one cell of the others"
    if time is not None:
        advice += ", or leave out steps and aggregated"
    raise InvalidValueError(
        f"label must have two dims apart from time for maps, got {map_dims}; {advice}"
    )


def _new_panels(grids: Sequence[MapGrid], maps: Sequence[_Map], time: str | None) -> list[Axes]:
    """Return axes of a new figure: for the bars over time if there is time, then for the maps."""
    if not maps:
        return new_panels(1, WIDTH, 1.9)
    above = _TIMELINE_HEIGHT * (time is not None)
    bars = any(scale is not _PARTS_SCALE for _, _, scale in maps)
    return new_map_panels(grids, [len(maps)], above, bars)


def _draw_maps(panels: Sequence[Axes], grids: Sequence[MapGrid], maps: Sequence[_Map]) -> None:
    for axes, grid, (heading, _, scale) in zip(panels, grids, maps, strict=True):
        if scale is _PARTS_SCALE:
            draw_map(axes, grid, scale)
            axes.set_title(heading)
        else:
            draw_group([axes], [grid], [heading], scale)


def _maps_of(
    cells: xr.DataArray, time: str | None, map_dims: list[str], steps: list[int], aggregated: bool
) -> list[_Map]:
    """Return the heading, the field and the colours of each map."""
    labels: dict[str, xr.DataArray] = {}
    percentages: dict[str, xr.DataArray] = {}
    if time is None:
        labels[""] = cells
    elif aggregated:
        greatest, least = cells.max(time), cells.min(time)
        if bool((greatest == least).where(greatest.notnull(), True).all()):
            labels["all steps"] = greatest
        else:
            percentages = _percentages(cells, [time])
    labels |= {step_name(cells, str(time), step): cells.isel({time: step}) for step in steps}
    maps = [(heading, _color_index(field), _PARTS_SCALE) for heading, field in labels.items()]
    for part, field in percentages.items():
        ramp = LinearSegmentedColormap.from_list(part, ["white", PART_COLORS[part]])
        if (field > 0).any():
            maps.append((f"fraction of time in {part}", field, Scale(ramp, 0, 100, "%")))
    return [(heading, field.transpose(*map_dims), scale) for heading, field, scale in maps]


def split_timeline(
    label: xr.DataArray | xr.Dataset,
    *,
    valid: xr.DataArray | None = None,
    title: str = "Split over time",
    ax: Axes | None = None,
) -> Figure:
    """Draw the parts over time.

    Parameters
    ----------
    label : DataArray or Dataset
        A split label with a time dim, or a cube with a ``split``.
    valid : DataArray of bool, optional
        Cells that count, along dims of `label`.
    title : str
        Heading.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per time step.

    Raises
    ------
    InvalidValueError
        If there is no time dim.

    Examples
    --------
    >>> label = xr.DataArray([1, 1, 255, 0], dims="time", name="split")
    >>> len(split_timeline(label).axes)
    1
    """
    label = _label_of(label, "label")
    if find_time_dim(label.coords.values(), label.dims) is None:
        raise InvalidValueError(f"label must have a time dim, got {label.dims}")
    return split_map(label, valid=valid, title=title, ax=None if ax is None else [ax])


def fold_bars(
    folds: Sequence[xr.DataArray | xr.Dataset] | Mapping[str, xr.DataArray | xr.Dataset],
    *,
    valid: xr.DataArray | None = None,
    title: str = "Cells of each fold",
    ax: Axes | None = None,
) -> Figure:
    """Draw the fraction of cells in each part, for every fold.

    Parameters
    ----------
    folds : sequence or mapping of str to DataArray or Dataset
        Labels, or cubes with a ``split``; the keys of a mapping name the folds.
    valid : DataArray of bool, optional
        Cells that count, along dims of the labels.
    title : str
        Heading.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per fold.

    Raises
    ------
    InvalidValueError
        If there is no fold, or a cube has no split label.
    InvalidTypeError
        If a fold is neither a label nor a cube.

    Examples
    --------
    >>> fold = xr.DataArray([1, 1, 1, 0], dims="x", name="split")
    >>> [text.get_text() for text in fold_bars({"a": fold}).axes[0].texts]
    ['75 %', '25 %']
    """
    if isinstance(folds, Mapping):
        named = dict(folds)
    else:
        named = {f"fold {number}": fold for number, fold in enumerate(folds, 1)}
    if not named:
        raise InvalidValueError("folds must have at least one label, got none")
    shares: dict[str, dict[str, float]] = {}
    for name, fold in named.items():
        label = _label_of(fold, name)
        percentages = _percentages(_counting_cells(label, valid), label.dims)
        shares[name] = {part: float(share.fillna(0)) for part, share in percentages.items()}
    present = [part for part in _ORDER if any(share[part] for share in shares.values())]
    height = 0.9 + 0.28 * len(named)
    with drawing(ax, 1, lambda: new_panels(1, 5.0, height)) as (axes,):
        rows = np.arange(len(named))
        left = np.zeros(len(named))
        for part in present:
            width = np.array([share[part] for share in shares.values()])
            bars = axes.barh(
                rows, width, left=left, color=PART_COLORS[part], edgecolor="white", height=0.8
            )
            # The number does not fit a smaller bar.
            numbers = np.where(width >= 5, [f"{value:.0f} %" for value in width], "")
            ink = ink_on(part != "val")
            axes.bar_label(bars, numbers.tolist(), label_type="center", color=ink, fontsize=7)
            left = left + width
        axes.set(xlim=(0, 100), xlabel="fraction of cells (%)", title=title)
        axes.set_yticks(rows, list(named))
        axes.invert_yaxis()
        _add_legend(axes, present, has_gaps=False, own=ax is None)
    return figure_of(axes)


def _label_of(fold: xr.DataArray | xr.Dataset, name: str) -> xr.DataArray:
    if isinstance(fold, xr.Dataset):
        if "split" not in fold:
            raise InvalidValueError(f"{name} must have a 'split', got {list(fold.data_vars)}")
        return fold["split"]
    if not isinstance(fold, xr.DataArray):
        raise InvalidTypeError(f"{name} must be a split label or a cube, got {type(fold).__name__}")
    return fold


def _counting_cells(label: xr.DataArray, valid: object) -> xr.DataArray:
    """Return the label with gaps for cells that do not count."""
    if valid is None:
        return label
    if not isinstance(valid, xr.DataArray):
        raise InvalidTypeError(f"valid must be a DataArray of bool, got {type(valid).__name__}")
    check_aligned("valid", valid, label)
    check_mask("valid", valid.dtype)
    # Without coordinates: if these differ by rounding, xarray would count cells as valid.
    bare = xr.DataArray(valid.variable)
    return label.where((bare != 0) & bare.notnull())


def _percentages(cells: xr.DataArray, dims: Collection[Hashable]) -> dict[str, xr.DataArray]:
    """Return the percentage of the cells along dims in each part; NaN where none counts."""
    counts = cells.notnull().sum(dims)
    return {
        part: (100 * (cells == _PART_LABELS[part]).sum(dims) / counts.where(counts > 0)).compute()
        for part in _ORDER
    }


def _color_index(field: xr.DataArray) -> xr.DataArray:
    """Return the position of each cell's part among the colours; NaN where none counts."""
    index = xr.full_like(field, np.nan, dtype="float64")
    for position, part in enumerate(PART_COLORS):
        index = index.where(field != _PART_LABELS[part], position)
    return index


def _draw_timeline(axes: Axes, cells: xr.DataArray, time: str, map_dims: list[str]) -> None:
    """Draw a stacked bar per time step."""
    steps = np.arange(cells.sizes[time])
    # White lines between many steps would cover the bars.
    edges: dict[str, Any] = {"edgecolor": "white", "lw": 0.4}
    bottom = np.zeros(steps.size)
    for part, share in _percentages(cells, map_dims).items():
        height = share.fillna(0).values
        color = PART_COLORS[part]
        if steps.size > 120:
            edges = {"edgecolor": color, "lw": 0.0}
        axes.bar(steps, height, bottom=bottom, width=1.0, color=color, **edges)
        bottom = bottom + height
    axes.set(xlim=(-0.5, steps.size - 0.5), ylim=(0, 100), yticks=[0, 50, 100], ylabel="cells (%)")
    ticks = np.unique(np.linspace(0, steps.size - 1, min(7, steps.size)).round().astype(int))
    names = [step_name(cells, time, i) for i in ticks]
    # The hour is written below the day.
    axes.set_xticks(ticks, [re.sub(r" (?=\d+:)", "\n", name) for name in names])


def _add_legend(axes: Axes, parts: Sequence[str], *, has_gaps: bool, own: bool) -> None:
    """Draw the colours of parts below a figure of our own, or below the last axes given."""
    handles = [Patch(color=PART_COLORS[part], label=part) for part in parts]
    if has_gaps:
        handles.append(Patch(color=GAP_COLOR, label="no data"))
    if own:
        figure_of(axes).legend(handles=handles, loc="outside lower center", ncols=5)
    else:
        legend_below(axes, handles=handles, ncols=5)
