"""`plot_insights`: what a cube holds, on one page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import cftime
import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_choice, names_of
from ml4cube.cube.coordinates import map_dims
from ml4cube.plotting.maps import Scale, check_maps, draw_map
from ml4cube.plotting.style import BLUE, ORANGE, STYLE, ink_on, label_of, new_figure, with_units

_GREY = "0.4"
# Variables on a page, and bars of classes in a panel.
_MOST_VARIABLES, _MOST_BARS = 6, 6
_SMALL, _TINY = 7, 6


def plot_insights(insights: xr.Dataset, variables: str | Iterable[str] | None = None) -> Figure:
    """Draw what a cube holds on one page: a row for each variable, and tables below.

    Parameters
    ----------
    insights : Dataset
        From `ml4cube.insights.get_insights`.
    variables : str or iterable of str, optional
        At most six of its variables. Default: the first six.

    Returns
    -------
    matplotlib.figure.Figure
        For each variable a map of gaps, averaged over dims other than latitude and longitude;
        gaps along time; a histogram, or the fractions of classes; and the mean by month or season
        with the standard deviation of its time steps. Places without any value are grey. Below are
        correlations, ranges of autocorrelation, and chunks.

    Raises
    ------
    InvalidValueError
        If a variable is unknown, or there are more than six.

    Examples
    --------
    >>> from ml4cube.insights import get_insights
    >>> ds = xr.Dataset({"t": (("time", "x"), np.random.default_rng(0).normal(size=(30, 40)))})
    >>> len(plot_insights(get_insights(ds)).axes)
    6
    """
    all_names = [str(name) for name in insights["variable"].values]
    names = list(names_of("variables", variables)) or all_names[:_MOST_VARIABLES]
    for name in names:
        check_choice("variables", name, all_names)
    if len(names) > _MOST_VARIABLES:
        raise InvalidValueError(f"variables must be at most {_MOST_VARIABLES}, got {len(names)}")
    chosen = insights.sel(variable=names, other_variable=names)
    with rc_context(STYLE):
        return _draw_page(insights, chosen, len(all_names) - len(names))


def _draw_page(insights: xr.Dataset, chosen: xr.Dataset, n_others: int) -> Figure:
    """Draw the chosen variables; so many others are not shown."""
    names = [str(name) for name in chosen["variable"].values]
    rows = len(names)
    heights = [1.55 * rows + 0.2, 0.24 * rows + 0.75]  # in inches: at most those of A4
    figure = new_figure(8.27, sum(heights) + 0.45)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    panels = upper.subplots(rows, 4, squeeze=False, width_ratios=[1.6, 1.1, 1.0, 1.0])
    for row, name in zip(panels, names, strict=True):
        of_variable = chosen.sel(variable=name)
        _draw_gap_map(upper, row[0], of_variable, name)
        _draw_gaps_in_time(row[1], of_variable, name)
        _draw_values(row[2], of_variable)
        _draw_season(row[3], of_variable)
        row[0].set_title(_heading(of_variable, name), fontsize=8, fontweight="bold")
    _draw_tables(lower, chosen)
    sizes = ", ".join(f"{dim} {insights.sizes[dim]}" for dim in insights["dim"].values)
    figure.suptitle(f"{insights.attrs.get('title', 'Contents of the cube')} ({sizes})", fontsize=9)
    notes = (
        "Grey: no value at any time. Bands: one standard deviation of the time steps. "
        "–: no correlation or no sill; chunks: in memory."
    )
    if n_others:
        notes += f" Shown are {rows} of {rows + n_others} variables."
    figure.supxlabel(notes, fontsize=_TINY, color=_GREY)
    return figure


def _heading(of_variable: xr.Dataset, name: str) -> str:
    """Return the name of a variable with its long name and units."""
    long_name, units = (str(of_variable[key].item()) for key in ("long_name", "units"))
    heading = name
    if long_name not in ("", name):
        words = textwrap.shorten(long_name.replace("_", " "), 40, placeholder="…")
        heading = f"{name}: {words}"
    if units not in ("", "1"):
        heading += f" ({units})"
    return heading


def _draw_gap_map(figure: Any, axes: Axes, of_variable: xr.Dataset, name: str) -> None:
    """Draw the gaps of each place, in percent: as a map, along one dim, or as stations."""
    gaps = of_variable.get(f"{name}_gaps_by_place")
    if gaps is None:
        _leave_empty(axes, "no places")
        return
    percent = 100 * _mean_over_levels(gaps)
    if percent.ndim == 1:
        axes.plot(_numbers(percent, str(percent.dims[0])), percent, color=BLUE, lw=1)
        axes.set(ylim=(0, _top(percent.values)), ylabel="gaps (%)")
        dim = str(percent.dims[0])
        axes.set_xlabel(label_of(percent[dim]) or dim, fontsize=_SMALL)
        _tidy(axes)
        return
    partly = percent.where(percent < 100)  # the others are grey
    (grid,) = check_maps([(name, partly)])
    mesh = draw_map(axes, grid, Scale("YlGnBu", 0.0, _top(partly.values), "gaps (%)"))
    if grid.aspect is None:
        axes.set_box_aspect(0.6)
    has_scale = bool((partly > 0).any())
    if not has_scale:
        note = "no gaps"
        if bool(partly.isnull().any()):
            note = "no other gaps"
        axes.set_xlabel("\n".join(filter(None, (axes.get_xlabel(), note))))
    axes.tick_params(labelsize=_TINY)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(_SMALL)
        axis.get_offset_text().set_fontsize(_TINY)
    if not has_scale:
        return
    bar = figure.colorbar(mesh, ax=axes, shrink=0.5, aspect=10, pad=0.02)
    bar.set_label("gaps (%)", fontsize=_SMALL)
    bar.ax.tick_params(labelsize=_TINY)


def _mean_over_levels(field: xr.DataArray) -> xr.DataArray:
    """Return the mean over all dims but two: latitude by longitude, else the last two."""
    kept = map_dims(field.coords.values(), field.dims) or field.dims[-2:]
    others = [dim for dim in field.dims if dim not in kept]
    return field.mean(others, keep_attrs=True)


def _top(values: NDArray[Any]) -> float:
    """Return the upper limit of percentages: above nearly all of them, and at least 1."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 1.0
    return max(1.05 * float(np.percentile(finite, 99.5)), 1.0)


def _draw_gaps_in_time(axes: Axes, of_variable: xr.Dataset, name: str) -> None:
    """Draw the gaps of each time step, in percent."""
    gaps = of_variable.get(f"{name}_gaps_by_time")
    if gaps is None:
        _leave_empty(axes, "no time dim")
        return
    dim = str(gaps.dims[0])
    x, percent = _numbers(gaps, dim), 100 * gaps.values
    if not percent.any():
        _leave_empty(axes, "no gaps")
        return
    axes.fill_between(x, percent, step="mid", color=BLUE, alpha=0.25, lw=0, rasterized=True)
    axes.step(x, percent, where="mid", color=BLUE, lw=0.8, rasterized=True)
    axes.set(ylim=(0, _top(percent)), ylabel="gaps (%)")
    if x.dtype.kind == "M":
        locator: Any = AutoDateLocator(minticks=2, maxticks=5)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        formatter: Any = ConciseDateFormatter(locator, show_offset=False)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(formatter)
    else:
        axes.set_xlabel(dim, fontsize=_SMALL)
    _tidy(axes)


def _numbers(array: xr.DataArray, dim: str) -> NDArray[Any]:
    """Return the coordinates of a dim as dates or numbers, else positions."""
    coord = array.coords.get(dim)
    if coord is None or coord.isnull().any():
        return np.arange(array.sizes[dim])
    if coord.dtype == object and isinstance(coord.values[0], cftime.datetime):
        # other calendars as the same days; the 30th of February is early March
        return np.array([_as_numpy(date) for date in coord.values])
    if coord.dtype.kind not in "fiuM":
        return np.arange(array.sizes[dim])
    return np.asarray(coord.values)


def _as_numpy(date: cftime.datetime) -> np.datetime64:
    month = np.datetime64(f"{date.year:04d}-{date.month:02d}-01T00")
    return month + np.timedelta64(24 * (date.day - 1) + date.hour, "h")


def _draw_values(axes: Axes, of_variable: xr.Dataset) -> None:
    """Draw the histogram of numbers with their median, or the fractions of classes."""
    if "class_fraction" in of_variable and bool(of_variable["class_fraction"].notnull().any()):
        _draw_classes(axes, of_variable)
        return
    edges = of_variable["bin_edge"].values
    if not np.isfinite(edges).all():
        _leave_empty(axes, "no value")
        return
    axes.stairs(100 * of_variable["histogram"].values, edges, fill=True, color=BLUE, alpha=0.55)
    median = float(of_variable["quantile"].sel(probability=0.5))
    axes.axvline(median, color=ORANGE, lw=1)
    axes.set(xlim=(edges[0], edges[-1]), ylabel="cells (%)")
    axes.set_xlabel(f"median {median:.4g}", fontsize=_SMALL, color=ORANGE)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    _tidy(axes)


def _draw_classes(axes: Axes, of_variable: xr.Dataset) -> None:
    """Draw the fractions of the most frequent classes."""
    fractions = of_variable["class_fraction"].dropna("class")
    order = np.argsort(-fractions.values, kind="stable")
    shown = fractions.isel({"class": order[:_MOST_BARS]})
    names = of_variable["class_name"].sel({"class": shown["class"]}).values.tolist()
    percent = (100 * shown.values).tolist()
    if rest := len(order) - len(names):
        names.append(f"{rest} others")
        percent.append(100 - sum(percent))
    rows = np.arange(len(names))
    bars = axes.barh(rows, percent, color=BLUE, alpha=0.55)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=_TINY)
    axes.set_yticks(rows, [textwrap.shorten(name, 16, placeholder="…") for name in names])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.25 * max(percent)))
    axes.set_xlabel("cells (%)", fontsize=_SMALL)
    _tidy(axes)


def _draw_season(axes: Axes, of_variable: xr.Dataset) -> None:
    """Draw the mean by month or season, and the standard deviation of time steps around it."""
    for by, names in (("month", list("JFMAMJJASOND")), ("season", None)):
        mean = of_variable.get(f"mean_by_{by}")
        if mean is None or not bool(mean.notnull().any()):
            continue
        x = np.arange(mean.size)
        spread = of_variable[f"std_by_{by}"].values
        axes.fill_between(x, mean - spread, mean + spread, color=BLUE, alpha=0.25, lw=0)
        axes.plot(x, mean, color=BLUE, lw=1.2, marker="o", ms=2)
        axes.set_xticks(x, names or mean[by].values.tolist())
        units = str(of_variable["units"].item())
        if units == "1":
            units = ""
        axes.set_ylabel(with_units("mean", units))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        _tidy(axes)
        return
    _leave_empty(axes, "no seasonal cycle")


def _draw_tables(figure: Any, insights: xr.Dataset) -> None:
    """Draw correlations, ranges of autocorrelation and chunks of all variables."""
    names = [str(name) for name in insights["variable"].values]
    dims = [str(dim) for dim in insights["dim"].values]
    chunks, of_chunks = insights["chunk_size"].values, dims
    if "chunks_per_window" in insights:
        per_window = [insights[name].values for name in ("chunks_per_window", "read_amplification")]
        chunks, of_chunks = (
            np.column_stack([chunks, *per_window]),
            [*dims, "per window", "reads per cell"],
        )
    below = np.tri(len(names), k=-1, dtype=bool)
    correlation = np.where(below, insights["correlation"].values, np.nan)[:, :-1]
    tables = [
        ("Correlation", names[:-1], correlation, "{:.2f}", True),
        ("Range of autocorrelation (cells)", dims, insights["range"].values, "{:.3g}", False),
        ("Chunks (cells)", of_chunks, chunks, "{:.4g}", False),
    ][len(names) == 1 :]
    widths = [len(columns) + 1 for _, columns, *_ in tables]
    panels = figure.subplots(1, len(tables), squeeze=False, width_ratios=widths, sharey=True)[0]
    for axes, (title, columns, values, form, is_colored) in zip(panels, tables, strict=True):
        _draw_table(axes, columns, values, form, is_colored)
        axes.set_title(title, fontsize=8, fontweight="bold")
    panels[0].set_yticks(range(len(names)), names)
    if window := insights.attrs.get("sample_size"):
        note = f"windows of {window}: chunks per window, cells read per cell of a window"
        panels[-1].set_xlabel(note, fontsize=_TINY)


def _draw_table(
    axes: Axes, columns: list[str], values: NDArray[Any], style: str, is_colored: bool
) -> None:
    """Draw numbers in rows and columns, on their colours if these are correlations."""
    colors = np.where(is_colored, values, np.nan)
    axes.imshow(colors, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if is_colored and column >= row:
            continue
        text = "–"
        if np.isfinite(value):
            text = style.format(value).replace("-0.00", "0.00")
        color = ink_on(bool(abs(colors[row, column]) > 0.7))
        axes.text(column, row, text, ha="center", va="center", fontsize=_TINY, color=color)
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(labelsize=_TINY, length=0, labelbottom=False, labeltop=True)
    axes.spines[:].set_visible(False)


def _leave_empty(axes: Axes, reason: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", fontsize=_SMALL, color=_GREY)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_TINY)
    axes.yaxis.label.set_fontsize(_SMALL)
