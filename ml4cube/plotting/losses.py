"""`loss_curve`: losses of a training run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ml4cube.core.errors import InvalidValueError


def loss_curve(
    train: Sequence[float],
    val: Sequence[float] | None = None,
    *,
    title: str = "Training and validation loss",
) -> Figure:
    """Draw the losses of a training run by epoch, and mark the best epoch.

    Parameters
    ----------
    train : sequence of float
        Mean training loss of each epoch.
    val : sequence of float, optional
        Mean validation loss of each epoch; NaN and None are left out.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidValueError
        If there is no epoch, or the two differ in length.

    Examples
    --------
    >>> figure = loss_curve([1.0, 0.5, 0.4], [1.1, 0.6, 0.7])
    >>> len(figure.axes)
    1
    """
    if not len(train):
        raise InvalidValueError("train must have at least one epoch, got none")
    if val is not None and len(val) != len(train):
        raise InvalidValueError(f"val must have {len(train)} epochs, as train has, got {len(val)}")
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    epochs = range(1, len(train) + 1)
    losses = {"training": np.array(train, dtype=float)}  # None becomes NaN
    if val is not None:
        losses["validation"] = np.array(val, dtype=float)
    for (name, curve), color in zip(losses.items(), ("tab:blue", "tab:orange"), strict=False):
        axes.plot(epochs, curve, color=color, label=name)
    judged = losses.get("validation", losses["training"])
    if not np.isnan(judged).all():
        best = int(np.nanargmin(judged))
        label = f"best: {judged[best]:.4g} (epoch {best + 1})"
        axes.plot([best + 1], [judged[best]], "o", color="black", ms=5, label=label)
    drawn = np.concatenate([*losses.values()])
    if 0 < 10 * np.fmin.reduce(drawn) < np.fmax.reduce(drawn):  # a log axis suits a decade or more
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="mean loss per sample", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
