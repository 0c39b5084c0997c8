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
    x: Sequence[float] | None = None,
    xlabel: str = "epoch",
    title: str = "Training and validation loss",
) -> Figure:
    """Draw the losses of a training run by epoch, and mark the lowest one (of validation if given).

    Parameters
    ----------
    train : sequence of float
        Mean training loss of each epoch.
    val : sequence of float, optional
        Mean validation loss of each epoch; NaN and None are left out.
    x : sequence of float, optional
        Position of each loss, such as the step at which it was measured; default: 1, 2, 3, ...
    xlabel : str
        What `x` counts.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidValueError
        If there is no epoch, or the arguments differ in length.

    Examples
    --------
    >>> figure = loss_curve([1.0, 0.5, 0.4], [1.1, 0.6, 0.7])
    >>> len(figure.axes)
    1
    """
    if not len(train):
        raise InvalidValueError("train must have at least one epoch, got none")
    for name, other in (("val", val), ("x", x)):
        if other is not None and len(other) != len(train):
            raise InvalidValueError(
                f"{name} must have length {len(train)}, as train has, got {len(other)}"
            )
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    at = np.arange(1, len(train) + 1) if x is None else np.asarray(x)
    losses = {"training": np.array(train, dtype=float)}  # None becomes NaN
    if val is not None:
        losses["validation"] = np.array(val, dtype=float)
    for (name, curve), color in zip(losses.items(), ("tab:blue", "tab:orange"), strict=False):
        known = ~np.isnan(curve)  # Gaps, of epochs without validation, would interrupt the line.
        axes.plot(at[known], curve[known], color=color, label=name)
    judged = losses.get("validation", losses["training"])
    if not np.isnan(judged).all():
        best = int(np.nanargmin(judged))
        label = f"lowest: {judged[best]:.4g} ({xlabel} {at[best]})"
        axes.plot([at[best]], [judged[best]], "o", color="black", ms=5, label=label)
    drawn = np.concatenate([*losses.values()])
    if 0 < 10 * np.fmin.reduce(drawn) < np.fmax.reduce(drawn):  # a log axis suits a decade or more
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=xlabel, ylabel="mean loss per sample", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
