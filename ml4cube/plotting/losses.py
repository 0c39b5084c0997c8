"""`loss_curve`: losses of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ml4cube.core.errors import InvalidValueError
from ml4cube.plotting.style import BLACK, BLUE, ORANGE, drawing, figure_of, new_panels


class _Columns(Protocol):
    """A History, or a mapping with its columns."""

    def keys(self) -> Iterable[str]: ...

    def __getitem__(self, column: str, /) -> Any: ...


def loss_curve(
    train: Sequence[float] | _Columns,
    val: Sequence[float] | None = None,
    *,
    x: Sequence[float] | None = None,
    xlabel: str = "epoch",
    title: str = "Training and validation loss",
    ax: Axes | None = None,
) -> Figure:
    """Draw the losses of a training run by epoch, and mark the lowest one (of validation if given).

    Parameters
    ----------
    train : sequence of float, or History
        Mean training loss of each epoch; or the history of a run, as object or mapping, which has
        all the rest: ``train_loss``, ``val_loss``, and the ``epoch`` or ``step`` of each row.
    val : sequence of float, optional
        Mean validation loss of each epoch; NaN and None are left out.
    x : sequence of float, optional
        Position of each loss, such as the step at which it was measured; default: 1, 2, 3, ...
    xlabel : str
        What `x` counts.
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
        If there is no epoch, or the arguments differ in length.

    Examples
    --------
    >>> figure = loss_curve({"train_loss": [1.0, 0.5, 0.4], "val_loss": [1.1, 0.6, 0.7]})
    >>> len(figure.axes)
    1
    """
    if not isinstance(train, Sequence):
        train, val, x, xlabel = _curves_of(train)
    if not len(train):
        raise InvalidValueError("train must have at least one epoch, got none")
    for name, other in (("val", val), ("x", x)):
        if other is not None and len(other) != len(train):
            raise InvalidValueError(
                f"{name} must have length {len(train)}, as train has, got {len(other)}"
            )
    if x is None:
        x = range(1, len(train) + 1)
    losses = {"training": np.array(train, dtype=float)}  # None becomes NaN
    if val is not None:
        losses["validation"] = np.array(val, dtype=float)
    with drawing(ax, 1, lambda: new_panels(1, 4.2, 2.6)) as (axes,):
        _draw_losses(axes, np.asarray(x), losses, xlabel)
        axes.set(xlabel=xlabel, ylabel="mean loss per sample", title=title)
    return figure_of(axes)


def _curves_of(history: _Columns) -> tuple[Sequence[float], Any, Any, str]:
    """Return the losses of a History, their positions, and what these count."""
    columns = {name: history[name] for name in history.keys()}  # noqa: SIM118
    if "train_loss" not in columns:
        raise InvalidValueError(f"train must have a 'train_loss', got {list(columns)}")
    # With validations between steps, several rows belong to one epoch, and all have a step.
    # Only some have one if this setting was changed when the run was resumed.
    xlabel = "epoch" if None in columns.get("step", [None]) else "step"
    return columns["train_loss"], columns.get("val_loss"), columns.get(xlabel), xlabel


def _draw_losses(axes: Axes, at: Any, losses: Mapping[str, Any], xlabel: str) -> None:
    for (name, curve), color in zip(losses.items(), (BLUE, ORANGE), strict=False):
        has_loss = ~np.isnan(curve)  # Gaps, of epochs without validation, would interrupt the line.
        axes.plot(at[has_loss], curve[has_loss], color=color, label=name)
    judged = losses.get("validation", losses["training"])
    if not np.isnan(judged).all():
        best = int(np.nanargmin(judged))
        label = f"lowest: {judged[best]:.4g} ({xlabel} {at[best]})"
        axes.plot([at[best]], [judged[best]], "o", color=BLACK, label=label)
    drawn = np.concatenate([*losses.values()])
    if 0 < 10 * np.fmin.reduce(drawn) < np.fmax.reduce(drawn):  # a log axis suits a decade or more
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    axes.legend()
