"""Figures of variograms, distances to the train part, and leakage reports."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.distance.variogram import Variogram
from ml4cube.core.errors import InvalidValueError
from ml4cube.plotting.style import (
    BLACK,
    BLUE,
    GREEN,
    LINES,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    drawing,
    figure_of,
    legend_below,
    new_panels,
)

_CURVE_COLORS = (ORANGE, BLUE, GREEN, PINK, YELLOW, SKY)


def variogram_plot(
    variograms: Mapping[str, Variogram],
    *,
    title: str = "Variograms",
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw empirical variograms with their fitted models, sills and ranges.

    Parameters
    ----------
    variograms : mapping of str to Variogram
        One for each dim.
    title : str
        Heading of the figure, if it is a new one.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for each dim; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per dim.

    Raises
    ------
    InvalidValueError
        If `variograms` is empty.

    Examples
    --------
    >>> found = Variogram(np.arange(1.0, 4), np.ones(3), np.ones(3, int), "linear", 0, 1, 1)
    >>> len(variogram_plot({"x": found}).axes)
    1
    """
    if not variograms:
        raise InvalidValueError("variograms must have at least one entry, got an empty mapping")
    n, columns = len(variograms), min(len(variograms), 3)
    width, height = 0.3 + 2.3 * columns, 0.3 + 2.1 * -(-n // columns)
    with drawing(ax, n, lambda: new_panels(n, width, height, columns), title) as panels:
        for axes, (dim, variogram) in zip(panels, variograms.items(), strict=True):
            _draw_variogram(axes, dim, variogram)
    return figure_of(panels[0])


def _draw_variogram(axes: Axes, dim: str, variogram: Variogram) -> None:
    axes.set(title=dim, xlabel=f"distance along {dim} (cells)", ylabel="semivariance")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if variogram.lags.size:
        # The size of a dot shows the number of pairs, by which the fit weights it.
        size = 4 + 14 * np.sqrt(variogram.pairs / variogram.pairs.max())
        axes.scatter(variogram.lags, variogram.semivariance, s=size, color=BLUE, zorder=3)
        top = max(float(variogram.semivariance.max()), np.nan_to_num(variogram.sill))
        axes.set(xlim=(0, 1.05 * float(variogram.lags.max())), ylim=(0, 1.25 * top or 1.0))
    if not np.isnan(variogram.range):
        lag = np.linspace(0, float(variogram.lags.max()) * 1.05, 200)[1:]
        axes.plot(lag, variogram.at(lag), color=ORANGE)
        axes.axhline(variogram.sill, color=BLACK, ls=":", lw=1)
        axes.axvline(variogram.range, color=BLACK, ls="--", lw=1)
        side, points = "left", 4
        if variogram.range > 0.6 * variogram.lags.max():
            side, points = "right", -4
        cells = f"{variogram.range:.3g} cells"
        if cells == "1 cells":
            cells = "1 cell"
        axes.annotate(
            f"range {cells}\n({variogram.model})", (variogram.range, axes.get_ylim()[1]),
            xytext=(points, -2), textcoords="offset points", ha=side, va="top", fontsize=7,
        )  # fmt: skip
    else:
        axes.text(
            0.04, 0.97, "\n".join(textwrap.wrap(variogram.reason, 34)), transform=axes.transAxes,
            va="top", fontsize=7, color=ORANGE,
        )  # fmt: skip


def distance_curves(
    distances: Mapping[str, ArrayLike],
    *,
    unit: str = "km",
    range_: float | None = None,
    title: str = "Distance to the nearest train cell",
    ax: Axes | None = None,
) -> Figure:
    """Draw cumulative distributions of the distance to the nearest train cell.

    If the curve of the test cells lies left of that of the deployment, the test is easier than
    the deployment, and its score is too good (Milà et al. 2022, *Nearest neighbour distance
    matching leave-one-out cross-validation for map validation*, Methods in Ecology and
    Evolution 13).

    Parameters
    ----------
    distances : mapping of str to array_like
        Distances by name of the curve; NaN is left out.
    unit : str
        Their unit.
    range_ : float, optional
        Range of autocorrelation in that unit, drawn as a line.
    title : str
        Heading.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidValueError
        If there is no finite distance.

    Examples
    --------
    >>> figure = distance_curves({"test": [0, 1, 2], "use": [10, 20]}, unit="km")
    >>> len(figure.axes[0].lines)
    2
    """
    curves = _known_distances(distances)
    with drawing(ax, 1, lambda: new_panels(1, 4.0, 2.9)) as (axes,):
        _draw_distances(axes, curves, unit, range_)
        axes.set_title(title)
    return figure_of(axes)


def _known_distances(distances: Mapping[str, ArrayLike]) -> dict[str, NDArray[np.float64]]:
    """Return the finite distances of each curve in order; refuse curves without any."""
    curves = {}
    for name, of_curve in distances.items():
        values = np.asarray(of_curve, dtype=float)
        curves[name] = np.sort(values[np.isfinite(values)])
    if not any(values.size for values in curves.values()):
        raise InvalidValueError(f"{list(distances)} have no finite distance")
    return curves


def _draw_distances(
    axes: Axes,
    curves: Mapping[str, NDArray[np.float64]],
    unit: str,
    range_: float | None = None,
    label: str = "distance to the nearest train cell",
) -> None:
    largest = max(float(values[-1]) for values in curves.values() if values.size)
    farthest = max(largest, range_ or 0.0)
    end = 1.05 * farthest or 1.0
    for (name, values), color, line in zip(curves.items(), cycle(_CURVE_COLORS), cycle(LINES)):
        if values.size:
            x = np.concatenate([[0.0], values, [end]])
            y = np.concatenate([[0.0], np.arange(1, values.size + 1) / values.size, [1.0]])
            axes.step(x, 100 * y, where="post", color=color, ls=line, lw=1.6, label=name)
    if range_ is not None and np.isfinite(range_):
        axes.axvline(range_, color=BLACK, ls="--", lw=1)
        axes.annotate("range", (range_, 3), xytext=(3, 0), textcoords="offset points", fontsize=7)
    axes.set(xlim=(-0.02 * end, end), ylim=(0, 103), yticks=[0, 25, 50, 75, 100])
    axes.set(xlabel=f"{label} ({unit})", ylabel="cells within (%)")
    if not farthest:
        axes.set_xticks([0])
        axes.text(0.5, 0.5, f"all at 0 {unit}", transform=axes.transAxes, ha="center", fontsize=8)
    axes.grid(visible=True)
    legend_below(axes)


def leakage_figure(
    verdict: str,
    leaks: bool,
    domains: Mapping[str, tuple[str, Mapping[str, ArrayLike]]],
    shares: Mapping[str, float],
    *,
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw a leakage report: fractions of test cells, and distances.

    Parameters
    ----------
    verdict : str
        Heading of the figure, if it is a new one.
    leaks : bool
        Whether there is leakage, for the colour of the heading.
    domains : mapping of str to (str, mapping of str to array_like)
        By domain ("space"): the unit, and distances by curve.
    shares : mapping of str to float
        Fractions of the test part, from 0 to 1, by description.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for the bars, and one for each domain; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        Bars, and one panel per domain.

    Raises
    ------
    InvalidValueError
        If a domain has no finite distance.

    Examples
    --------
    >>> figure = leakage_figure("all is well", False, {"space": ("km", {"test": [1]})}, {"a": 0.1})
    >>> len(figure.axes)
    2
    """
    curves_by_domain = {
        name: (unit, _known_distances(distances)) for name, (unit, distances) in domains.items()
    }
    n, color = 1 + len(domains), BLACK
    if leaks:
        color = ORANGE
    with drawing(ax, n, lambda: new_panels(n, 0.9 + 2.1 * n, 2.9), verdict, color) as panels:
        _draw_shares(panels[0], shares)
        for axes, (name, (unit, curves)) in zip(panels[1:], curves_by_domain.items(), strict=True):
            _draw_distances(axes, curves, unit, label="distance to train")
            axes.set_title(name)
    return figure_of(panels[0])


def _draw_shares(axes: Axes, shares: Mapping[str, float]) -> None:
    """Draw fractions of the test part as bars with their numbers."""
    rows = np.arange(len(shares))
    bars = axes.barh(rows, [100 * share for share in shares.values()], color=ORANGE, height=0.55)
    axes.bar_label(bars, fmt="%.3g %%", padding=3, fontsize=7)
    axes.set_yticks(rows, ["\n".join(textwrap.wrap(name, 20)) for name in shares])
    axes.set(ylim=(len(shares) - 0.5, -0.5), xlabel="fraction of the test part (%)")
    # There is room for the number beside a full bar.
    axes.set(xlim=(0, 125), xticks=[0, 25, 50, 75, 100], title="too close to train")
