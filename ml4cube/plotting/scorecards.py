"""`scorecard_figure`: skill by lead time, a map of skill, and power spectra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.coordinates import LEAD, role_of
from ml4cube.plotting.classes import draw_confusion, draw_scores_of_classes
from ml4cube.plotting.fields import skill_scale
from ml4cube.plotting.maps import check_maps, draw_group
from ml4cube.plotting.spectra import draw_spectrum, has_power, lead_axis
from ml4cube.plotting.style import (
    COLORS,
    MARKERS,
    WIDTH,
    check_axes,
    figure_of,
    legend_below,
    new_axes,
    new_figure,
    style,
    with_note_on_bars,
    with_units,
)

_GREY = "0.35"
_MOST_TICKS = 8
# Height of scores and spectra in inches; maps that are lower for their width get their own row.
_ROW_HEIGHT, _LEAST_RATIO = 2.7, 0.35


def scorecard_figure(
    scores: xr.Dataset,
    maps: xr.Dataset,
    spectra: xr.Dataset,
    *,
    baseline: str | None = None,
    classes: Mapping[str, xr.Dataset] | None = None,
    confusion: Mapping[str, xr.DataArray] | None = None,
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw skill by lead time with intervals, the map of skill, and power spectra.

    Of a variable with classes, also the scores of each, and how often one is taken for another.

    Parameters
    ----------
    scores : Dataset
        ``skill``, ``skill_low`` and ``skill_high`` with dims ``("variable", "baseline")``, and
        ``lead_time`` of a forecast; ``rmse`` and its interval with dims ``("variable", "model")``,
        drawn where there is no skill.
    maps : Dataset
        ``<variable>_skill`` with dims ``("baseline", *cells)``; drawn if the cells have two dims,
        after averaging over others, such as levels.
    spectra : Dataset
        One variable for each with dims ``("source", "lead_time", "wavenumber")``, or without
        ``lead_time``. The shortest and the longest lead time are drawn; nothing if all are NaN.
    baseline : str, optional
        The one whose skill is mapped; default: that with the lowest skill of the prediction
        against it.
    classes, confusion : mapping of str to Dataset or DataArray, optional
        `Scorecard.classes`, without further labels, and `Scorecard.confusion`.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: for each variable one for scores, one for the map and one for the spectrum,
        without those that have nothing to show, and of classes two more; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        A row of panels for each variable, and one more for its classes.

    Raises
    ------
    InvalidValueError
        If `baseline` is unknown, or there is no variable.

    Examples
    --------
    >>> skill = xr.DataArray([[[0.4, 0.1]]], dims=("variable", "baseline", "lead_time"))
    >>> scores = xr.Dataset({"skill": skill, "skill_low": skill - 0.1, "skill_high": skill + 0.1})
    >>> scores = scores.assign_coords(variable=["t"], baseline=["climatology"], lead_time=[1, 2])
    >>> len(scorecard_figure(scores, xr.Dataset(), xr.Dataset()).axes)
    1
    """
    variables = [str(name) for name in scores["variable"].values]
    if not variables:
        raise InvalidValueError("scores must have at least one variable, got none")
    names = []
    if "baseline" in scores:
        names = [str(name) for name in scores["baseline"].values]
    if baseline is not None:
        check_choice("baseline", baseline, names)
    rows = []
    for name in variables:
        rows.append(_drawings(name, scores, maps, spectra, baseline, names))
        if classes and confusion and name in classes:
            mapped = baseline or _hardest(scores, name, names)
            rows.append(_drawings_of_classes(classes[name], confusion[name], mapped))
    panels_of_user = check_axes(ax, sum(map(len, rows)))
    with style():
        panels = panels_of_user or _new_panels(rows)
        for axes, drawing in zip(panels, chain(*rows), strict=True):
            drawing.draw(axes)
    return figure_of(panels[0])


@dataclass(frozen=True)
class _Drawing:
    """A panel of a scorecard."""

    draw: Callable[[Axes], None]
    # inches of a map that is too wide to share a row
    height: float | None = None
    # inches of a row with this panel, at least
    row_height: float = _ROW_HEIGHT


def _drawings(
    name: str,
    scores: xr.Dataset,
    maps: xr.Dataset,
    spectra: xr.Dataset,
    baseline: str | None,
    names: list[str],
) -> list[_Drawing]:
    """Return the panels of a variable: scores, and if there are any, map and spectrum."""
    of_variable = scores.sel(variable=name)
    drawings = [_Drawing(lambda axes: _draw_scores(axes, of_variable, name))]
    mapped = baseline or _hardest(scores, name, names)
    skill = _map_of(maps, name, mapped)
    if skill is not None:
        (grid,) = check_maps([(f"{name}_skill", skill)])
        scale, title = skill_scale([grid]), f"Skill over {_words(mapped)}"
        height = None
        if grid.ratio <= _LEAST_RATIO:
            height = 6 * grid.ratio + 1.1
        drawings.append(_Drawing(lambda axes: draw_group([axes], [grid], [title], scale), height))
    power = spectra.get(name)
    if power is not None and has_power(power):
        drawings.append(_Drawing(lambda axes: draw_spectrum(axes, power, f"Spectrum of {name}")))
    return drawings


def _drawings_of_classes(
    scores: xr.Dataset, confusion: xr.DataArray, baseline: str
) -> list[_Drawing]:
    """Return the panels of the classes of a variable."""
    height = max(_ROW_HEIGHT, 1.2 + 0.17 * scores.sizes["class"])
    return [
        _Drawing(lambda axes: draw_scores_of_classes(axes, scores, baseline), row_height=height),
        _Drawing(lambda axes: draw_confusion(axes, confusion), row_height=height),
    ]


def _new_panels(rows: Sequence[Sequence[_Drawing]]) -> list[Axes]:
    """Return axes of a new figure: a row for each variable, and one for its map if this is wide."""
    columns = max(sum(drawing.height is None for drawing in row) for row in rows)
    heights = _row_heights(rows)
    width = 0.3 + 2.9 * columns
    if max(drawing.row_height for row in rows for drawing in row) > _ROW_HEIGHT:
        width *= 1.6  # the names of many classes
    if len(heights) > len(rows):
        width = max(width, WIDTH)
    figure = new_figure(width, 0.2 + sum(heights))
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    panels, i = [], 0
    for row in rows:
        narrow = iter(range(columns))
        for drawing in row:
            if drawing.height:
                panels.append(new_axes(figure, cells[i + 1, :]))
            else:
                panels.append(new_axes(figure, cells[i, next(narrow)]))
        i += 1 + any(drawing.height for drawing in row)
    return panels


def _row_heights(rows: Sequence[Sequence[_Drawing]]) -> list[float]:
    """Return the height of the row of each variable, and of that of its map if this is wide."""
    heights = []
    for row in rows:
        heights.append(max(drawing.row_height for drawing in row))
        heights += [drawing.height for drawing in row if drawing.height]
    return heights


def _words(name: str) -> str:
    return name.replace("_", " ")


def _hardest(scores: xr.Dataset, variable: str, names: list[str]) -> str:
    """Return the baseline over which the prediction has least skill."""
    if not names:
        return ""
    skill = scores["skill"].sel(variable=variable)
    mean = skill.mean([dim for dim in skill.dims if dim != "baseline"])
    return names[int(np.argmin(mean.fillna(np.inf).values))]


def _map_of(maps: xr.Dataset, variable: str, baseline: str) -> xr.DataArray | None:
    """Return the map of skill, averaged over all but two dims; None if there are fewer.

    These are latitude and longitude, else the last two.
    """
    if f"{variable}_skill" not in maps:
        return None
    skill = maps[f"{variable}_skill"].sel(baseline=baseline)
    if skill.ndim < 2:
        return None
    of_map = [
        dim
        for dim in skill.dims
        if dim in skill.coords and role_of(skill[dim]) in ("latitude", "longitude")
    ]
    if len(of_map) != 2:
        of_map = list(skill.dims[-2:])
    return skill.mean([dim for dim in skill.dims if dim not in of_map], keep_attrs=True)


def _draw_scores(axes: Axes, scores: xr.Dataset, name: str) -> None:
    """Draw the skill over each baseline, or the RMSE without one, by lead time."""
    metric, second, units = "rmse", "model", ""
    if "skill" in scores:
        metric, second = "skill", "baseline"
    elif "accuracy" in scores and not bool(scores["rmse"].notnull().any()):
        metric = "accuracy"  # of classes
    elif "units" in scores.coords:
        units = str(scores.coords["units"].item())
    has_leads = scores[metric].sizes.get(LEAD, 1) > 1
    leads, unit = np.zeros(1), ""
    if has_leads:
        leads, unit = lead_axis(scores[metric])
    labels = [str(label) for label in scores[second].values]
    for i, label in enumerate(labels):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        of_line = scores.sel({second: label})
        value, low, high = (
            np.atleast_1d(of_line[metric + end].values) for end in ("", "_low", "_high")
        )
        x = leads
        if not has_leads:
            x = np.array([float(i)])
        ends = np.stack([value - low, high - value]).clip(min=0)  # NaN draws no bar
        axes.errorbar(
            x, value, yerr=ends, color=color, marker=marker, capsize=2,
            elinewidth=1, label=_words(label),
        )  # fmt: skip
    if metric == "skill":
        axes.axhline(0, color=_GREY, lw=1, ls="--", zorder=0)
    if has_leads:
        if len(leads) <= _MOST_TICKS:
            axes.set_xticks(leads, [f"{lead:g}" for lead in leads])
        axes.set_xlabel(with_note_on_bars(with_units("lead time", unit), scores[f"{metric}_low"]))
        legend_below(axes)
    else:
        axes.set_xticks(range(len(labels)), [_words(label) for label in labels], rotation=20)
        axes.margins(x=0.3)
        axes.set_xlabel(with_note_on_bars("", scores[f"{metric}_low"]))
    shown = {"skill": "skill (1 is perfect)", "rmse": "RMSE", "accuracy": "accuracy"}[metric]
    axes.set_ylabel(with_units(shown, units))
    axes.set_title(name, fontweight="bold")
    axes.grid(visible=True)
