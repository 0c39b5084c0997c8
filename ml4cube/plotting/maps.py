"""Maps: their colours, panels, colour bars, ticks and coastlines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from matplotlib.transforms import Affine2DBase, ScaledTranslation, blended_transform_factory

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.plotting.grids import Floats, MapGrid
from ml4cube.plotting.style import WIDTH, drawing, figure_of, new_axes, new_figure

#: Colour of missing cells.
GAP_COLOR = "0.85"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
# Percentiles of the values between which the colours change.
_ROBUST = (2, 98)
# Inches of what a figure has beside its maps, and the most that these may be high.
_TITLE, _TICKS, _HEADING, _COLOR_BAR, _BAR_BELOW, _MOST_HEIGHT = 0.4, 0.4, 0.35, 0.9, 0.55, 5.8
# Lower maps have their colour bar below them.
_LEAST_BAR = 0.9
_MOST_COLUMNS = 4
# Degrees between ticks.
_STEPS = (*(k * 10.0**e for e in range(-6, 1) for k in (1, 2, 5)), 10, 15, 30, 60, 90, 180)


@dataclass(frozen=True)
class Scale:
    """The colours of maps, their limits, and the label of the colour bar."""

    colors: str | Colormap
    low: float
    high: float
    label: str = ""
    extend: str = "neither"

    @classmethod
    def of(
        cls,
        grids: Iterable[MapGrid],
        label: str,
        center: float | None = None,
        colors: str = DIVERGING,
    ) -> Scale:
        """Return a scale with robust limits, the same for all maps, symmetric about a center."""
        flat = [np.ravel(grid.values) for grid in grids]
        values = np.concatenate([np.empty(0), *flat])
        values = values[np.isfinite(values)]
        if not values.size:
            values = np.array([center or 0.0])
        least, largest = float(values.min()), float(values.max())
        if center is None:
            colors = SEQUENTIAL
            low, high = (float(limit) for limit in np.percentile(values, _ROBUST))
            if low == high:  # nearly all values are the same, such as no rain
                low, high = least, largest
        else:
            distance = np.abs(values - center)
            half = float(np.percentile(distance, _ROBUST[1]) or distance.max())
            low, high = center - half, center + half
        if low == high:
            low, high = low - 0.5, high + 0.5
        tiny = 1e-12 * (abs(low) + abs(high))  # the limits are rounded
        beyond = least < low - tiny, largest > high + tiny
        ends = {(False, False): "neither", (True, False): "min", (False, True): "max"}
        return cls(colors, low, high, label, ends.get(beyond, "both"))


def check_maps(fields: Iterable[tuple[str, xr.DataArray]]) -> list[MapGrid]:
    """Return the cells of each map; refuse what is no field of numbers along two dims."""
    fields = list(fields)
    for name, field in fields:
        if not isinstance(field, xr.DataArray):
            raise InvalidTypeError(f"{name!r} must be a DataArray, got {type(field).__name__}")
        if field.ndim != 2 or not field.size:
            raise InvalidValueError(
                f"{name!r} must have two dims, with cells, got {dict(field.sizes)}"
            )
        if field.dtype.kind not in "fiub":
            raise InvalidTypeError(f"{name!r} must hold numbers, got {field.dtype}")
    return [MapGrid.of(field) for _, field in fields]


def draw_map(axes: Axes, grid: MapGrid, scale: Scale) -> QuadMesh:
    """Draw a map, its missing cells in grey, with coastlines if cartopy has them on disk."""
    # axes of cartopy transform degrees to their projection, and have limits and ticks of their own
    projected: dict[str, Any] = {}
    if hasattr(axes, "projection"):
        if not grid.is_geographic:
            raise InvalidValueError("ax must be plain axes: the map has no latitude and longitude")
        from cartopy.crs import PlateCarree

        projected = {"transform": PlateCarree()}
    colors = matplotlib.colormaps.get_cmap(scale.colors)
    mesh = axes.pcolormesh(
        grid.x, grid.y, np.ma.masked_invalid(grid.values), cmap=colors.with_extremes(bad=GAP_COLOR),
        vmin=scale.low, vmax=scale.high, rasterized=True, **projected,
    )  # fmt: skip
    if grid.x.ndim == 2:
        # others would cover the map
        mesh.set_alpha(grid.is_whole().astype(float))  # type: ignore[arg-type]
    shapes: tuple[Any, ...] = ()
    if grid.is_geographic:
        shapes = _coastlines()
    if projected:
        look = {"facecolor": "none", "edgecolor": "0.2", "linewidth": 0.5}
        axes.add_geometries(shapes, projected["transform"], **look)  # type: ignore[attr-defined]
        return mesh
    if shapes:
        axes.plot(*_lines_around_the_earth(shapes), color="0.2", lw=0.5)
    _set_axes(axes, grid)
    return mesh


def _set_axes(axes: Axes, grid: MapGrid) -> None:
    axes.set(xlim=(grid.x.min(), grid.x.max()), ylim=(grid.y.min(), grid.y.max()))
    if grid.aspect is not None:
        axes.set_aspect(grid.aspect)
    axes.spines[:].set_visible(True)
    width, height = inches_of(axes, grid.ratio)
    for axis, label, signs, n_ticks in zip(
        (axes.xaxis, axes.yaxis), grid.labels, (("E", "W"), ("N", "S")),
        (width / 0.6, height / 0.25), strict=True,
    ):  # fmt: skip
        if label is None:
            step = _step_of_degrees(*axis.get_view_interval(), int(np.clip(n_ticks, 1, 7)))
            axis.set_major_locator(MultipleLocator(step))
            axis.set_major_formatter(FuncFormatter(partial(_degrees, *signs)))
        else:
            axis.set_label_text(label)


def inches_of(axes: Axes, ratio: float) -> tuple[float, float]:
    """Return about how wide and high a map will be, before it is laid out."""
    box = axes.get_position()
    width, height = _inches_of_parent(axes) * (box.width, box.height)
    return min(width, height / ratio), min(height, width * ratio)


def _inches_of_parent(axes: Axes) -> Floats:
    """Return the width and height of the figure or subfigure that axes are in."""
    figure: Any = axes.figure
    return np.asarray(figure.bbox.size) / figure_of(axes).dpi


def _step_of_degrees(low: float, high: float, n: int) -> float:
    """Return the step that has at most so many multiples in a range, and at least one."""
    multiples = {step: int(high // step - -(-low // step)) + 1 for step in _STEPS}
    for step, count in multiples.items():
        if 1 <= count <= n:
            return step
    return max(step for step, count in multiples.items() if count)


def _degrees(positive: str, negative: str, value: float, _: int | None = None) -> str:
    """Format degrees as 30°E, 180° and 45°S."""
    turned = round((value + 180) % 360 - 180, 6)
    if abs(turned) in (0, 180):
        return f"{abs(turned):g}°"
    if turned > 0:
        return f"{turned:g}°{positive}"
    return f"{-turned:g}°{negative}"


def new_map_panels(
    grids: Sequence[MapGrid], groups: Sequence[int], above: float = 0.0, bars: bool = True
) -> list[Axes]:
    """Return axes of a new figure for groups of so many maps, each in rows of its own.

    The first axes are above the maps, as wide as all of them, if they are to have a height.
    There is room for colour bars unless maps have none.
    """
    ratio = max(grid.ratio for grid in grids)
    columns, width, height = _panel_size(ratio, groups)
    counts = [-(-n // columns) for n in groups]
    heights = [above] * bool(above) + [height] * sum(counts)
    # low maps have their colour bar below them
    below = _BAR_BELOW * sum(n * (height - _TITLE) < _LEAST_BAR for n in counts) * bars
    figure = new_figure(
        columns * width + _COLOR_BAR, sum(heights) + below + _HEADING, layout="compressed"
    )
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    places = _places(groups, columns, first_row=int(bool(above)))
    first = []
    if above:
        first.append(new_axes(figure, cells[0, :]))
    panels = [new_axes(figure, cells[place]) for place in places]
    if all(_is_same_place(grid, grids[0]) for grid in grids):
        _hide_inner_labels(panels, places)
    return first + panels


def _places(groups: Sequence[int], columns: int, first_row: int) -> list[tuple[int, int]]:
    """Return the row and column of each map."""
    places: list[tuple[int, int]] = []
    row = first_row
    for n in groups:
        start = 0
        if places and n < columns:  # a row of errors is below the last of the fields
            start = columns - n
        places += [(row + i // columns, start + i % columns) for i in range(n)]
        row += -(-n // columns)
    return places


def _hide_inner_labels(panels: Sequence[Axes], places: Sequence[tuple[int, int]]) -> None:
    """Leave the labels of x to the lowest maps, and those of y to the leftmost."""
    for axes, (row, column) in zip(panels, places, strict=True):
        if (row + 1, column) in places:
            axes.tick_params(labelbottom=False)
            axes.xaxis.label.set_visible(False)
        if (row, column - 1) in places:
            axes.tick_params(labelleft=False)
            axes.yaxis.label.set_visible(False)


def _is_same_place(grid: MapGrid, other: MapGrid) -> bool:
    return grid.labels == other.labels and all(
        ours.dtype.kind != "M" and np.allclose([ours.min(), ours.max()], [its.min(), its.max()])
        for ours, its in ((grid.x, other.x), (grid.y, other.y))
    )


def _panel_size(ratio: float, groups: Sequence[int]) -> tuple[int, float, float]:
    """Return columns of maps, and the inches of a panel with its title and ticks."""

    def size(columns: int) -> tuple[float, float]:
        rows = sum(-(-n // columns) for n in groups)
        width = (WIDTH - _COLOR_BAR) / columns
        height = (width - _TICKS) * ratio + _TITLE
        if rows * height <= _MOST_HEIGHT:
            return width, height
        height = _MOST_HEIGHT / rows
        return max((height - _TITLE) / ratio, 0.5) + _TICKS, height

    choices = range(1, min(_MOST_COLUMNS, max(groups)) + 1)
    widths = {columns: size(columns)[0] for columns in choices}
    # not much smaller than possible, without holes, and rather wide than high
    fits = [columns for columns in choices if widths[columns] > 0.6 * max(widths.values())]
    even = [columns for columns in fits if all(n % columns == 0 or n < columns for n in groups)]
    columns = (even or fits)[-1]
    return columns, *size(columns)


def draw_maps(
    names: Sequence[str],
    grids: Sequence[MapGrid],
    scale: Scale,
    title: str,
    ax: Axes | Sequence[Axes] | None,
) -> Figure:
    """Draw maps of one quantity with one colour scale, in axes of a user or in a new figure."""
    n = len(grids)
    with drawing(ax, n, lambda: new_map_panels(grids, [n]), title) as panels:
        draw_group(panels, grids, names, scale)
    return figure_of(panels[0])


def draw_group(
    panels: Sequence[Axes], grids: Sequence[MapGrid], names: Sequence[str], scale: Scale
) -> None:
    """Draw maps with one colour scale and one colour bar, below low maps and beside others."""
    for axes, grid, name in zip(panels, grids, names, strict=True):
        mesh = draw_map(axes, grid, scale)
        axes.set_title(name)
    n_rows = len({round(axes.get_position().y0, 3) for axes in panels})
    height = n_rows * inches_of(panels[0], grids[0].ratio)[1]
    is_low = height < _LEAST_BAR
    where: dict[str, Any] = {"ax": list(panels), "pad": 0.02}
    if is_low:
        location, letters = "bottom", 70
        where |= {"shrink": 0.6, "aspect": 40, "fraction": 0.5}
    else:
        location, letters = "right", max(16, int(14 * height))
        where |= {"aspect": 9 * height}
    if len(panels) == 1:
        where = {"cax": _bar_axes(panels[0], is_low)}
    figure: Any = panels[0].figure
    bar = figure.colorbar(
        mesh, label="\n".join(textwrap.wrap(scale.label, letters)), extend=scale.extend,
        location=location, ticks=MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]), **where,
    )  # fmt: skip
    bar.ax.tick_params(labelsize=7, width=0.6, length=2.5)
    bar.outline.set_linewidth(0.6)


def _bar_axes(axes: Axes, is_low: bool) -> Axes:
    """Return axes for a colour bar along the map as it will be, whatever the room around it."""
    inches, frame = figure_of(axes).dpi_scale_trans, cast("Affine2DBase", axes.transAxes)
    if figure_of(axes).get_layout_engine() is None:  # else it makes room
        box, (width, height) = axes.get_position(original=True), _inches_of_parent(axes)
        right, bottom = 0.8 / width, 0.0
        if is_low:
            right, bottom = 0.0, _BAR_BELOW / height
        axes.set_position((box.x0, box.y0 + bottom, box.width - right, box.height - bottom))
    if is_low:
        below = inches + ScaledTranslation(0, 0, frame)
        where = blended_transform_factory(axes.transAxes, below)
        return axes.inset_axes((0.2, -0.42, 0.6, 0.09), transform=where)
    beside = inches + ScaledTranslation(1, 0, frame)
    where = blended_transform_factory(beside, axes.transAxes)
    return axes.inset_axes((0.08, 0, 0.1, 1), transform=where)


@cache
def _coastlines() -> tuple[Any, ...]:
    """Return the coastlines of Natural Earth, if cartopy is installed and has them on disk.

    Nothing is downloaded: the nodes of many clusters have no network.
    """
    try:
        import cartopy
        from cartopy.io.shapereader import Reader
    except ImportError:
        return ()
    for resolution in ("50m", "110m", "10m"):
        for folder in ("pre_existing_data_dir", "data_dir"):
            path = Path(cartopy.config[folder]) / "shapefiles" / "natural_earth" / "physical"
            path = path / f"ne_{resolution}_coastline.shp"
            if path.is_file():
                return tuple(Reader(path).geometries())
    return ()


def _lines_around_the_earth(shapes: Iterable[Any]) -> tuple[Floats, Floats]:
    """Return x and y of lines and collections of lines, for longitudes from -540 to 540."""
    lines = [line for shape in shapes for line in getattr(shape, "geoms", [shape])]
    cut = np.full((1, 2), np.nan)
    once = np.concatenate([part for line in lines for part in (np.asarray(line.coords), cut)])
    x = np.concatenate([once[:, 0] + turn for turn in (-360, 0, 360)])
    return x, np.tile(once[:, 1], 3)
