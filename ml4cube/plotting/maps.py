"""Maps: where the cells of a field are, in which aspect and in which colours they are drawn."""

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
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from matplotlib.transforms import Affine2DBase, ScaledTranslation, blended_transform_factory
from numpy.typing import NDArray

from ml4cube.core.angles import in_degrees
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.plotting.style import (
    WIDTH,
    figure_of,
    label_of,
    name_of,
    new_axes,
    new_figure,
    units_of,
    with_units,
)

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
# Beyond it the aspect of a map around a pole would have no limit.
_MOST_LATITUDE = 80.0

Floats = NDArray[np.float64]


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
        fields: Iterable[xr.DataArray],
        label: str,
        center: float | None = None,
        colors: str = DIVERGING,
    ) -> Scale:
        """Return a scale with robust limits, the same for all fields, symmetric about a center."""
        flat = [np.ravel(field.values).astype(np.float64) for field in fields]
        values = np.concatenate([np.empty(0), *flat])
        values = values[np.isfinite(values)]
        if not values.size:
            values = np.zeros(1) if center is None else np.full(1, center)
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
        ends = {(False, False): "neither", (True, False): "min", (False, True): "max"}
        return cls(colors, low, high, label, ends.get((least < low, largest > high), "both"))


@dataclass(frozen=True)
class MapGrid:
    """Values of a map, the corners of its cells, and what its axes show."""

    values: NDArray[Any]
    # edges of columns and rows, or corners of cells
    x: NDArray[Any]
    y: NDArray[Any]
    # length of a unit along y over that along x; None: these have other units, such as dates
    aspect: float | None
    # labels of the axes; None: a longitude or latitude, whose ticks say so
    labels: tuple[str | None, str | None]

    @property
    def is_geographic(self) -> bool:
        """Whether x and y are longitude and latitude in degrees."""
        return self.labels == (None, None)

    @property
    def ratio(self) -> float:
        """Height of the map over its width."""
        if self.aspect is None:
            return 0.6
        height, width = (float(np.ptp(ends)) for ends in (self.y, self.x))
        return height * self.aspect / width

    @classmethod
    def of(cls, field: xr.DataArray) -> MapGrid:
        """Find the cells of a field of two dims, by its coordinates."""
        field = _upright(field)
        y, x = (_along(field, dim) for dim in field.dims)
        curved = None if _side(x) and _side(y) else _curvilinear(field)
        if curved:
            return cls._curved(field, *curved)
        order = []
        for coord in (y, x):
            values = np.arange(len(coord)) if coord.name is None else coord.values
            if _is_angle(coord):
                values = in_degrees(values, coord.attrs.get("units"))
            order.append(_joined(values) if _side(coord) == "x" and _is_angle(coord) else values)
        rows, columns = (np.argsort(values, kind="stable") for values in order)
        edges_y, edges_x = (_edges(np.sort(values)) for values in order)
        if _is_angle(y):
            edges_y = edges_y.clip(-90, 90)
        aspect = None
        if _is_angle(x) and _is_angle(y):
            aspect = _aspect_at(edges_y)
        elif x.dtype.kind in "fiu" and y.dtype.kind in "fiu" and _unit(x) == _unit(y):
            aspect = 1.0  # both are lengths, or both count cells
        (edges_x, label_x), (edges_y, label_y) = (
            _with_label(coord, edges) for coord, edges in ((x, edges_x), (y, edges_y))
        )
        return cls(
            field.values[np.ix_(rows, columns)], edges_x, edges_y, aspect, (label_x, label_y)
        )

    @classmethod
    def _curved(cls, field: xr.DataArray, lat: xr.DataArray, lon: xr.DataArray) -> MapGrid:
        if min(field.shape) < 2:
            raise InvalidValueError(
                f"a map along 2-D latitudes must have two cells along each dim, got {field.sizes}"
            )
        y, x = (
            _corners(in_degrees(coord.transpose(*field.dims).values, coord.attrs.get("units")))
            for coord in (lat, lon)
        )
        y, x = y.clip(-90, 90), _joined(x % 360)
        return cls(field.values, x, y, _aspect_at(y), (None, None))

    def is_whole(self) -> NDArray[np.bool_]:
        """Return which cells of a curvilinear grid do not cross the ends of the map."""
        ends = np.stack([self.x[:-1, :-1], self.x[1:, :-1], self.x[:-1, 1:], self.x[1:, 1:]])
        return np.asarray(np.ptp(ends, axis=0) < 180)


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
    colors = matplotlib.colormaps[scale.colors] if isinstance(scale.colors, str) else scale.colors
    mesh = axes.pcolormesh(
        grid.x, grid.y, np.ma.masked_invalid(grid.values), cmap=colors.with_extremes(bad=GAP_COLOR),
        vmin=scale.low, vmax=scale.high, rasterized=True, **projected,
    )  # fmt: skip
    if grid.x.ndim == 2:
        # others would cover the map
        mesh.set_alpha(grid.is_whole().astype(float))  # type: ignore[arg-type]
    shapes = _coastlines() if grid.is_geographic else ()
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
        (width / 0.5, height / 0.25), strict=True,
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
    width, height = figure_of(axes).get_size_inches() * (box.width, box.height)
    return min(width, height / ratio), min(height, width * ratio)


def _step_of_degrees(low: float, high: float, n: int) -> float:
    """Return the step that has at most so many multiples in a range, and at least one."""
    multiples = {step: int(high // step - -(-low // step)) + 1 for step in _STEPS}
    fitting = [step for step, count in multiples.items() if 1 <= count <= n]
    return fitting[0] if fitting else max(step for step, count in multiples.items() if count)


def _degrees(positive: str, negative: str, value: float, _: int | None = None) -> str:
    """Format degrees as 30°E, 180° and 45°S."""
    turned = round((value + 180) % 360 - 180, 6)
    sign = "" if abs(turned) in (0, 180) else positive if turned > 0 else negative
    return f"{abs(turned):g}°{sign}"


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
    places: list[tuple[int, int]] = []
    row = int(bool(above))
    for n, n_rows in zip(groups, counts, strict=True):
        # a row of errors is below the last of the fields
        start = columns - n if places and n < columns else 0
        places += [(row + i // columns, start + i % columns) for i in range(n)]
        row += n_rows
    first = [new_axes(figure, cells[0, :])] if above else []
    panels = [new_axes(figure, cells[place]) for place in places]
    are_alike = all(_is_same_place(grid, grids[0]) for grid in grids)
    for axes, (row, column) in zip(panels, places, strict=True):
        if are_alike and (row + 1, column) in places:
            axes.tick_params(labelbottom=False)
            axes.xaxis.label.set_visible(False)
        if are_alike and (row, column - 1) in places:
            axes.tick_params(labelleft=False)
            axes.yaxis.label.set_visible(False)
    return first + panels


def _is_same_place(one: MapGrid, other: MapGrid) -> bool:
    return one.labels == other.labels and all(
        ours.dtype.kind != "M" and np.allclose([ours.min(), ours.max()], [its.min(), its.max()])
        for ours, its in ((one.x, other.x), (one.y, other.y))
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
    has_layout = figure_of(panels[0]).get_layout_engine() is not None
    where: dict[str, Any]
    if len(panels) == 1 and has_layout:
        where = {"cax": _bar_axes(panels[0], is_low)}
    else:  # without a layout, only this takes the room from the maps
        where = {"ax": list(panels), "pad": 0.02 if has_layout else 0.15 if is_low else 0.04}
        where |= {"aspect": 40, "shrink": 0.6} if is_low else {"aspect": 9 * height}
        if is_low and has_layout:
            where["fraction"] = 0.5
    letters = 70 if is_low else max(16, int(14 * height))
    figure: Any = panels[0].figure
    bar = figure.colorbar(
        mesh, label="\n".join(textwrap.wrap(scale.label, letters)), extend=scale.extend,
        location="bottom" if is_low else "right",
        ticks=MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]), **where,
    )  # fmt: skip
    bar.ax.tick_params(labelsize=7, width=0.6, length=2.5)
    bar.outline.set_linewidth(0.6)


def _bar_axes(axes: Axes, is_low: bool) -> Axes:
    """Return axes for a colour bar along the map as it will be, whatever the room around it."""
    inches, frame = figure_of(axes).dpi_scale_trans, cast("Affine2DBase", axes.transAxes)
    if is_low:
        below = inches + ScaledTranslation(0, 0, frame)
        where = blended_transform_factory(axes.transAxes, below)
        return axes.inset_axes((0.2, -0.42, 0.6, 0.09), transform=where)
    beside = inches + ScaledTranslation(1, 0, frame)
    where = blended_transform_factory(beside, axes.transAxes)
    return axes.inset_axes((0.08, 0, 0.1, 1), transform=where)


def _upright(field: xr.DataArray) -> xr.DataArray:
    """Return a field with the dim of its x coordinate last."""
    rows, columns = (_side(_along(field, dim)) for dim in field.dims)
    return field.transpose() if (rows, columns) in (("x", "y"), ("x", None), (None, "y")) else field


def _along(field: xr.DataArray, dim: Any) -> xr.DataArray:
    """Return the coordinate along a dim: an angle or a projection's, else its own, else positions.

    Positions have no name.
    """
    on_dim: list[xr.DataArray] = [coord for coord in field.coords.values() if coord.dims == (dim,)]
    drawable = [c for c in on_dim if c.dtype.kind in "fiuM" and not bool(c.isnull().any())]
    located = [coord for coord in drawable if _side(coord)]
    own = [coord for coord in drawable if coord.name == dim]
    return (located + own or [xr.DataArray(np.arange(field.sizes[dim]), dims=dim)])[0]


def _side(coord: xr.DataArray) -> str | None:
    """Return "x" or "y" for a coordinate of the horizontal plane."""
    standard_name = coord.attrs.get("standard_name", "")
    for side, is_side in (("x", is_longitude), ("y", is_latitude)):
        is_named = coord.name is not None and is_side(coord.name, coord.attrs, rotated=True)
        if is_named or standard_name == f"projection_{side}_coordinate":
            return side
    return None


def _is_angle(coord: xr.DataArray) -> bool:
    return _side(coord) is not None and _unit(coord) not in ("m", "km")


def _unit(coord: xr.DataArray) -> str:
    units = str(coord.attrs.get("units", ""))
    return "m" if units in ("meter", "meters", "metre", "metres") else units


def _curvilinear(field: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray] | None:
    """Return the 2-D latitudes and longitudes of a field without gaps, or None."""
    found = []
    for is_wanted in (is_latitude, is_longitude):
        coords = [
            coord
            for coord in field.coords.values()
            if set(coord.dims) == set(field.dims)
            and coord.dtype.kind == "f"
            and is_wanted(coord.name, coord.attrs)
            and bool(np.isfinite(coord).all())
        ]
        found += coords[:1]
    return (found[0], found[1]) if len(found) == 2 else None


def _joined(longitudes: NDArray[Any]) -> NDArray[Any]:
    """Return longitudes that do not jump from 360 to 0, or from 180 to -180, inside a region."""
    ordered = np.unique(longitudes)
    if len(ordered) < 2 or np.ptp(ordered) >= 360:
        return longitudes
    gaps = np.diff(ordered)
    widest = int(np.argmax(gaps))
    across = ordered[0] + 360 - ordered[-1]
    if gaps[widest] <= across * (1 + 1e-6):
        return longitudes
    return np.where(longitudes > ordered[widest], longitudes - 360, longitudes)


def _edges(centers: NDArray[Any]) -> NDArray[Any]:
    """Return the edges of cells, halfway between centers; a single cell is 1 or a day wide."""
    one = np.timedelta64(24, "h") if centers.dtype.kind == "M" else 1
    half = (np.diff(centers) if len(centers) > 1 else np.array([one])) / 2
    return np.concatenate([centers[:1] - half[:1], centers[:-1] + half, centers[-1:] + half[-1:]])


def _corners(centers: Floats) -> Floats:
    """Return the corners of cells, the means of four centers; the outer ones are extrapolated."""
    # differences of longitudes are at most half a turn; those of latitudes are never larger
    for axis in (0, 1):
        centers = np.moveaxis(centers, axis, 0)
        step = (np.diff(centers, axis=0) + 180) % 360 - 180
        outer = centers[:1] - step[:1] / 2, centers[-1:] + step[-1:] / 2
        centers = np.concatenate([outer[0], centers[:-1] + step / 2, outer[1]])
        centers = np.moveaxis(centers, 0, axis)
    return centers


def _aspect_at(latitudes: Floats) -> float:
    """Return the length of a degree of latitude over one of longitude, at the mid latitude."""
    middle = abs(float(latitudes.min() + latitudes.max())) / 2
    return float(1 / np.cos(np.deg2rad(min(middle, _MOST_LATITUDE))))


def _with_label(coord: xr.DataArray, edges: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
    """Return edges, in km if they are metres, and the label of their axis."""
    if _is_angle(coord):
        is_true = is_latitude(coord.name, coord.attrs) or is_longitude(coord.name, coord.attrs)
        return edges, None if is_true else with_units(name_of(coord), "°")
    if coord.name is None:
        return edges, f"{coord.dims[0]} (cell)"
    if edges.dtype.kind == "M":
        return edges, ""
    if _unit(coord) == "m" and np.ptp(edges) >= 1e4:
        return edges / 1000, f"{coord.name} (km)"
    return edges, with_units(str(coord.name), units_of(coord)) if _side(coord) else label_of(coord)


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
