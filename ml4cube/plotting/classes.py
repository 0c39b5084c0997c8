"""Panels of classes: the scores of each, and how often one is taken for another."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from ml4cube.plotting.style import (
    BLUE,
    ORANGE,
    figure_of,
    ink_on,
    legend_below,
    with_note_on_bars,
)

# More classes have no numbers in the matrix.
_MOST_NUMBERS = 8
_GREY, _LIGHT = "0.6", 0.55
_SMALL, _TILTED = 6.5, 40


def draw_scores_of_classes(axes: Axes, scores: xr.Dataset, baseline: str) -> None:
    """Draw recall and precision of each class with intervals, and those of a baseline in grey."""
    names = _names(scores)
    own = scores.isel(model=0)
    rows = np.arange(len(names))
    for metric, color, marker, up in (
        ("recall", BLUE, "o", -0.14),
        ("precision", ORANGE, "s", 0.14),
    ):
        value, low, high = (own[metric + end].values for end in ("", "_low", "_high"))
        ends = np.stack([value - low, high - value]).clip(min=0)  # NaN draws no bar
        axes.errorbar(
            value, rows + up, xerr=ends, color=color, marker=marker, ls="", capsize=2,
            elinewidth=1, label=metric,
        )  # fmt: skip
        if baseline:
            other = scores[metric].sel(model=baseline).values
            words = f"{metric} of {baseline.replace('_', ' ')}"
            axes.plot(
                other,
                rows + up,
                color=_GREY,
                marker=marker,
                ls="",
                mfc="none",
                label=words,
                zorder=1,
            )
    share = own["frequency"].values
    between, size = "\n", 7.0
    if len(names) > _MOST_NUMBERS:
        between, size = "  ", _SMALL
    shown = [f"{n}{between}{_percent(s)}" for n, s in zip(names, share, strict=True)]
    axes.set_yticks(rows, shown, size=size)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel(with_note_on_bars("score (1 is perfect)", own["recall_low"]))
    axes.set_ylabel("class, and its share of the truth")
    axes.set_title("Scores by class")
    axes.grid(visible=True, axis="x")
    legend_below(axes)


def draw_confusion(axes: Axes, shares: xr.DataArray) -> None:
    """Draw how much of each true class is predicted as each class, in percent."""
    names, pairs = _names(shares), shares.isel(model=0).values
    total = pairs.sum(1, keepdims=True)
    percent = np.divide(100 * pairs, total, out=np.full_like(pairs, np.nan), where=total > 0)
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    if len(names) <= _MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(percent):
            if np.isfinite(value):
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", size=7,
                    color=ink_on(value > 100 * _LIGHT),
                )  # fmt: skip
    ticks = range(len(names))
    rotation, side, size = 0, "center", 7.0
    if len(names) > _MOST_NUMBERS:
        rotation, size = 90, _SMALL
    elif max(map(len, names)) * len(names) >= 20:
        rotation, side = _TILTED, "right"
    axes.set_xticks(ticks, names, rotation=rotation, ha=side, size=size)
    axes.set_yticks(ticks, names, size=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title("Confusion matrix")
    axes.spines[:].set_visible(False)
    bar = figure_of(axes).colorbar(image, ax=axes, label="% of the true class")
    bar.outline.set_visible(False)


def _names(scores: xr.Dataset | xr.DataArray) -> list[str]:
    return [str(name).replace("_", " ") for name in scores["class_name"].values]


def _percent(share: float) -> str:
    if not share > 0:
        return "none"
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
