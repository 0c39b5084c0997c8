"""Figures of variograms, distances to the train part, and leakage reports."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from ml4cube.core.distance.variogram import Variogram
from ml4cube.core.errors import InvalidValueError

_BLUE, _ORANGE, _GREEN, _BLACK = "#0072B2", "#D55E00", "#009E73", "0.15"
_LINE_STYLES = ((_ORANGE, "-"), (_BLUE, "--"), (_GREEN, ":"), ("#CC79A7", "-."))


def variogram_plot(variograms: Mapping[str, Variogram], *, title: str = "Variograms") -> Figure:
    """Draw empirical variograms with their fitted models, sills and ranges.

    Parameters
    ----------
    variograms : mapping of str to Variogram
        One for each dim.
    title : str
        Heading.

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
    columns = min(len(variograms), 3)
    rows = -(-len(variograms) // columns)
    figure = Figure(figsize=(3.4 * columns, 0.5 + 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (dim, variogram) in zip(panels, variograms.items(), strict=False):
        _draw_variogram(axes, dim, variogram)
    for axes in panels[len(variograms) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("semivariance")
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_variogram(axes: Axes, dim: str, variogram: Variogram) -> None:
    axes.set(title=dim, xlabel=f"distance along {dim} (cells)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if variogram.lags.size:
        # The size of a dot shows the number of pairs, by which the fit weights it.
        size = 12 + 30 * np.sqrt(variogram.pairs / variogram.pairs.max())
        axes.scatter(variogram.lags, variogram.semivariance, s=size, color=_BLUE, zorder=3)
        top = max(float(variogram.semivariance.max()), np.nan_to_num(variogram.sill))
        axes.set(xlim=(0, 1.05 * float(variogram.lags.max())), ylim=(0, 1.25 * top or 1.0))
    if not np.isnan(variogram.range):
        lag = np.linspace(0, float(variogram.lags.max()) * 1.05, 200)[1:]
        axes.plot(lag, variogram.at(lag), color=_ORANGE, lw=2)
        axes.axhline(variogram.sill, color=_BLACK, ls=":", lw=1)
        axes.axvline(variogram.range, color=_BLACK, ls="--", lw=1)
        is_right = variogram.range > 0.6 * variogram.lags.max()
        cells = f"{variogram.range:.3g}"
        axes.annotate(
            f"range {cells} cell{'' if cells == '1' else 's'}\n({variogram.model})",
            (variogram.range, axes.get_ylim()[1]),
            xytext=(-4 if is_right else 4, -2),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="top",
            fontsize=8,
        )
    else:
        axes.text(
            0.04, 0.97, "\n".join(textwrap.wrap(variogram.reason, 34)), transform=axes.transAxes,
            va="top", fontsize=8, color=_ORANGE,
        )  # fmt: skip


def distance_curves(
    distances: Mapping[str, ArrayLike],
    *,
    unit: str = "km",
    range_: float | None = None,
    title: str = "Distance to the nearest train cell",
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
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    _draw_distances(axes, distances, unit, range_)
    axes.set_title(title, fontsize=11)
    return figure


def _draw_distances(
    axes: Axes, distances: Mapping[str, ArrayLike], unit: str, range_: float | None = None
) -> None:
    known = {}
    for name, given in distances.items():
        values = np.asarray(given, dtype=float)
        known[name] = np.sort(values[np.isfinite(values)])
    largest = max((float(values[-1]) for values in known.values() if values.size), default=None)
    if largest is None:
        raise InvalidValueError(f"{list(distances)} have no finite distance")
    farthest = max(largest, range_ or 0.0)
    end = 1.05 * farthest or 1.0
    for (name, values), (color, style) in zip(known.items(), cycle(_LINE_STYLES)):
        if values.size:
            x = np.concatenate([[0.0], values, [end]])
            y = np.concatenate([[0.0], np.arange(1, values.size + 1) / values.size, [1.0]])
            axes.step(x, 100 * y, where="post", color=color, ls=style, lw=2, label=name)
    if range_ is not None and np.isfinite(range_):
        axes.axvline(range_, color=_BLACK, ls="--", lw=1)
        axes.annotate("range", (range_, 3), xytext=(3, 0), textcoords="offset points", fontsize=8)
    axes.set(xlim=(-0.02 * end, end), ylim=(0, 103), ylabel="cells within (%)")
    axes.set_xlabel(f"distance to the nearest train cell ({unit})")
    axes.set_yticks([0, 25, 50, 75, 100])
    if not farthest:
        axes.set_xticks([0])
        axes.text(0.5, 0.5, f"all at 0 {unit}", transform=axes.transAxes, ha="center", fontsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # The legend is below the panel, because curves may cross any corner.
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def leakage_figure(
    verdict: str,
    leaks: bool,
    domains: Mapping[str, tuple[str, Mapping[str, ArrayLike]]],
    shares: Mapping[str, float],
) -> Figure:
    """Draw a leakage report: fractions of test cells, and distances.

    Parameters
    ----------
    verdict : str
        Title.
    leaks : bool
        Whether there is leakage, for the colour of the title.
    domains : mapping of str to (str, mapping of str to array_like)
        By domain ("space"): the unit, and distances by curve.
    shares : mapping of str to float
        Fractions of the test part, from 0 to 1, by description.

    Returns
    -------
    matplotlib.figure.Figure
        Bars, and one panel per domain.

    Examples
    --------
    >>> figure = leakage_figure("all is well", False, {"space": ("km", {"test": [1]})}, {"a": 0.1})
    >>> len(figure.axes)
    2
    """
    panels = 1 + len(domains)
    figure = Figure(figsize=(1.2 + 3.6 * panels, 4.1), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    rows = np.arange(len(shares))
    values = [100 * value for value in shares.values()]
    bars = axes[0].barh(rows, values, color=_ORANGE, height=0.55)
    axes[0].bar_label(bars, fmt="%.3g %%", padding=3, fontsize=9)
    names = ["\n".join(textwrap.wrap(name, 20)) for name in shares]
    axes[0].set_yticks(rows, names)
    axes[0].set(ylim=(len(shares) - 0.5, -0.5), xlabel="fraction of the test part (%)")
    # There is room for the number beside a full bar.
    axes[0].set(xlim=(0, 125), xticks=[0, 25, 50, 75, 100])
    axes[0].spines[["top", "right"]].set_visible(False)
    axes[0].set_title("too close to train", fontsize=10)
    for panel, (name, (unit, distances)) in zip(axes[1:], domains.items(), strict=True):
        _draw_distances(panel, distances, unit)
        panel.set_title(name, fontsize=10)
    figure.suptitle(
        "\n".join(textwrap.wrap(verdict, 30 * panels)), fontsize=11,
        color=_ORANGE if leaks else "black",
    )  # fmt: skip
    return figure
