"""`scorecard_figure`: skill by lead time, a map of skill, and power spectra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.coordinates import LEAD, map_dims
from ml4cube.plotting.fields import skill_scale
from ml4cube.plotting.maps import check_maps, draw_group
from ml4cube.plotting.spectra import draw_spectrum, has_power, lead_axis
from ml4cube.plotting.style import (
    BLUE,
    COLORS,
    MARKERS,
    ORANGE,
    WIDTH,
    drawing,
    figure_of,
    ink_on,
    legend_below,
    new_axes,
    new_figure,
    with_note_on_bars,
    with_units,
)

_GREY, _PALE = "0.35", "0.6"
_MOST_TICKS = 8
# More classes have no numbers in the matrix, and smaller names; darker cells have white numbers.
_MOST_NUMBERS, _DARK = 8, 55
_SMALL, _TILTED = 6.5, 40
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
        mapped = baseline or _hardest(scores, name, names)
        rows.append(_drawings(name, scores, maps, spectra, mapped))
        if classes and confusion and name in classes:
            rows.append(_drawings_of_classes(classes[name], confusion[name], mapped))
    with drawing(ax, sum(map(len, rows)), lambda: _new_panels(rows)) as panels:
        for axes, panel in zip(panels, chain(*rows), strict=True):
            panel.draw(axes)
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
    name: str, scores: xr.Dataset, maps: xr.Dataset, spectra: xr.Dataset, mapped: str
) -> list[_Drawing]:
    """Return the panels of a variable: scores, and if there are any, map and spectrum."""
    of_variable = scores.sel(variable=name)
    drawings = [_Drawing(lambda axes: _draw_scores(axes, of_variable, name))]
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
        _Drawing(lambda axes: _draw_classes(axes, scores, baseline), row_height=height),
        _Drawing(lambda axes: _draw_confusion(axes, confusion), row_height=height),
    ]


def _new_panels(rows: Sequence[Sequence[_Drawing]]) -> list[Axes]:
    """Return axes of a new figure: a row for each variable, and one for its map if this is wide."""
    columns = max(sum(panel.height is None for panel in row) for row in rows)
    heights = _row_heights(rows)
    width = 0.3 + 2.9 * columns
    if max(panel.row_height for row in rows for panel in row) > _ROW_HEIGHT:
        width *= 1.6  # the names of many classes
    if len(heights) > len(rows):
        width = max(width, WIDTH)
    figure = new_figure(width, 0.2 + sum(heights))
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    panels, i = [], 0
    for row in rows:
        narrow = iter(range(columns))
        for panel in row:
            if panel.height:
                panels.append(new_axes(figure, cells[i + 1, :]))
            else:
                panels.append(new_axes(figure, cells[i, next(narrow)]))
        i += 1 + any(panel.height for panel in row)
    return panels


def _row_heights(rows: Sequence[Sequence[_Drawing]]) -> list[float]:
    """Return the height of the row of each variable, and of that of its map if this is wide."""
    heights = []
    for row in rows:
        heights.append(max(panel.row_height for panel in row))
        heights += [panel.height for panel in row if panel.height]
    return heights


def _value_and_ends(scores: xr.Dataset, metric: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return values, and the lengths of their bars down and up."""
    value, low, high = (np.atleast_1d(scores[metric + end].values) for end in ("", "_low", "_high"))
    return value, np.stack([value - low, high - value]).clip(min=0)  # NaN draws no bar


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
    kept = map_dims(skill.coords.values(), skill.dims)
    if len(kept) != 2:
        kept = tuple(map(str, skill.dims[-2:]))
    return skill.mean([dim for dim in skill.dims if dim not in kept], keep_attrs=True)


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
        value, ends = _value_and_ends(of_line, metric)
        x = leads
        if not has_leads:
            x = np.array([float(i)])
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


def _draw_classes(axes: Axes, scores: xr.Dataset, baseline: str) -> None:
    """Draw recall and precision of each class with intervals, and those of a baseline in grey."""
    names = _names_of_classes(scores)
    own = scores.isel(model=0)
    rows = np.arange(len(names))
    for metric, color, marker, up in (
        ("recall", BLUE, "o", -0.14),
        ("precision", ORANGE, "s", 0.14),
    ):
        value, ends = _value_and_ends(own, metric)
        axes.errorbar(
            value, rows + up, xerr=ends, color=color, marker=marker, ls="", capsize=2,
            elinewidth=1, label=metric,
        )  # fmt: skip
        if baseline:
            other = scores[metric].sel(model=baseline).values
            words = f"{metric} of {_words(baseline)}"
            axes.plot(
                other, rows + up, color=_PALE, marker=marker, ls="", mfc="none", label=words,
                zorder=1,
            )  # fmt: skip
    share = own["frequency"].values
    between, size = "\n", 7.0
    if len(names) > _MOST_NUMBERS:
        between, size = "  ", _SMALL
    shown = [f"{n}{between}{_percent(s)}" for n, s in zip(names, share, strict=True)]
    axes.set_yticks(rows, shown, size=size)
    axes.set_ylim(len(names) - 0.5, -0.5)
    xlabel = with_note_on_bars("score (1 is perfect)", own["recall_low"])
    axes.set(xlim=(-0.03, 1.03), xlabel=xlabel, ylabel="class, and its share of the truth")
    axes.set_title("Scores by class")
    axes.grid(visible=True, axis="x")
    legend_below(axes)


def _draw_confusion(axes: Axes, shares: xr.DataArray) -> None:
    """Draw how much of each true class is predicted as each class, in percent."""
    names, pairs = _names_of_classes(shares), shares.isel(model=0).values
    total = pairs.sum(1, keepdims=True)
    percent = np.divide(100 * pairs, total, out=np.full_like(pairs, np.nan), where=total > 0)
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    if len(names) <= _MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(percent):
            if np.isfinite(value):
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", size=7,
                    color=ink_on(value > _DARK),
                )  # fmt: skip
    ticks = range(len(names))
    rotation, side, size = 0, "center", 7.0
    if len(names) > _MOST_NUMBERS:
        rotation, size = 90, _SMALL
    elif max(map(len, names)) * len(names) >= 20:
        rotation, side = _TILTED, "right"
    axes.set_xticks(ticks, names, rotation=rotation, ha=side, size=size)
    axes.set_yticks(ticks, names, size=size)
    axes.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix")
    axes.spines[:].set_visible(False)
    bar = figure_of(axes).colorbar(image, ax=axes, label="% of the true class")
    bar.outline.set_visible(False)


def _names_of_classes(scores: xr.Dataset | xr.DataArray) -> list[str]:
    return [_words(str(name)) for name in scores["class_name"].values]


def _percent(share: float) -> str:
    if not share > 0:
        return "none"
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
