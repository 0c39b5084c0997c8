"""One style for all figures: sizes, colours, panels, legends, and names with units."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ml4cube.core.errors import InvalidTypeError, InvalidValueError

#: Inches of two columns of a journal's page; and the dots of a saved inch.
WIDTH, DPI = 7.2, 150
#: The colours of Okabe and Ito, which people with colour blindness can tell apart.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.")
PART_COLORS = {"train": BLUE, "val": YELLOW, "test": ORANGE, "excluded": "#8C8C8C"}
BLACK = "0.15"

_TICK_SIZE = 7.0
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "figure.titlesize": 10,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "xtick.labelsize": _TICK_SIZE,
    "ytick.labelsize": _TICK_SIZE,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
}
_SIGNS = {
    "1": "", "dimensionless": "", "degrees_north": "°N", "degrees_east": "°E", "degrees": "°",
    "degree": "°", "degc": "°C", "celsius": "°C", "degree_celsius": "°C", "degrees_celsius": "°C",
    "degree_c": "°C", "degrees_c": "°C",
}  # fmt: skip
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class _ShownFigure(Figure):
    """A figure that notebooks show, which they do for other figures only if pyplot draws inline."""

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.savefig(png, format="png", bbox_inches="tight")
        return png.getvalue()


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Return a figure of so many inches."""
    return _ShownFigure(figsize=(width, height), dpi=DPI, layout=layout)


def new_axes(figure: Figure, *where: Any) -> Axes:
    """Return new axes of a figure."""
    axes = figure.add_subplot(*where)
    # matplotlib makes most ticks while it draws, when the user's settings hold again
    axes.tick_params(labelsize=_TICK_SIZE, width=0.6, length=2.5)
    return axes


def _check_axes(ax: Axes | Sequence[Axes] | None, n: int) -> list[Axes] | None:
    """Return the axes that a user gave, one for each of n panels; None if there are none."""
    if ax is None:
        return None
    panels: list[Axes] = np.ravel(np.asarray(ax, dtype=object)).tolist()
    for axes in panels:
        if not isinstance(axes, Axes):
            raise InvalidTypeError(f"ax must be matplotlib axes, got {type(axes).__name__}")
    if len(panels) != n:
        wanted = "one axes" if n == 1 else f"{n} axes, one for each panel"
        raise InvalidValueError(f"ax must be {wanted}, got {len(panels)}")
    return panels


def new_panels(n: int, width: float, height: float, columns: int | None = None) -> list[Axes]:
    """Return n axes of a new figure, row by row; by default in one row."""
    figure, columns = new_figure(width, height), columns or n
    return [new_axes(figure, -(-n // columns), columns, i + 1) for i in range(n)]


@contextmanager
def drawing(
    ax: Axes | Sequence[Axes] | None,
    n: int,
    new: Callable[[], list[Axes]],
    title: str = "",
    color: str = "black",
) -> Iterator[list[Axes]]:
    """Yield the n axes that a user gave, or new ones, whose figure gets the heading.

    Artists are made in the style; the user's settings are kept.
    """
    of_user = _check_axes(ax, n)
    with rc_context(STYLE):
        panels = of_user or new()
        yield panels
        if title and not of_user:
            figure = figure_of(panels[0])
            letters = int(13 * figure.get_figwidth())
            figure.suptitle("\n".join(textwrap.wrap(title, letters)), color=color)


def figure_of(axes: Axes) -> Figure:
    """Return the figure that axes belong to, also those of a subfigure."""
    figure: Any = axes.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    return figure


def legend_below(axes: Axes, points: float = 30, **options: Any) -> None:
    """Draw a legend so many points below axes: curves may cross any corner of them."""
    down = ScaledTranslation(0, -points / 72, figure_of(axes).dpi_scale_trans)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=axes.transAxes + down,
        borderaxespad=0, **{"ncols": 2, **options},
    )  # fmt: skip


def ink_on(is_dark: bool) -> str:
    """Return the colour of text on a dark or a light ground."""
    return "white" if is_dark else "black"


def name_of(array: xr.DataArray) -> str:
    """Return the name of a quantity in words, by its CF attributes."""
    for attribute in ("long_name", "standard_name"):
        if text := str(array.attrs.get(attribute, "")).strip():
            return text.replace("_", " ")
    if array.name is None:
        return ""
    return str(array.name).replace("_", " ")


def units_of(array: xr.DataArray) -> str:
    """Return units as they are printed: W m⁻² for "W m-2"."""
    units = str(array.attrs.get("units", "")).strip()
    raised = re.sub(
        r"\b([A-Za-z]+)(?:\^|\*\*)?(-?\d+)\b",
        lambda match: match[1] + match[2].translate(_SUPERSCRIPT),
        units,
    )
    return _SIGNS.get(units.lower(), raised)


def with_units(name: str, units: str) -> str:
    """Return a name with its units, as axes and colour bars show it."""
    if name and units:
        return f"{name} ({units})"
    return name or units


def with_note_on_bars(label: str, low: xr.DataArray) -> str:
    """Return the label of an axis, which says so if some values have no interval."""
    if bool(low.notnull().all()):
        return label
    return "; ".join(filter(None, [label, "without a bar: no interval"]))


def label_of(array: xr.DataArray) -> str:
    """Return the name of a quantity with its units."""
    return with_units(name_of(array), units_of(array))
