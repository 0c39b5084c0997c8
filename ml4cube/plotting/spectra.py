"""`spectrum_plot`: power by wavenumber, of the prediction and of the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.cube.coordinates import LEAD
from ml4cube.plotting.style import (
    BLUE,
    ORANGE,
    drawing,
    figure_of,
    legend_below,
    new_panels,
    units_of,
    with_units,
)

_DIMS = {"source", "wavenumber"}


def spectrum_plot(power: xr.DataArray, *, title: str = "", ax: Axes | None = None) -> Figure:
    """Draw the power of the prediction at the shortest and the longest lead, and of the truth.

    A prediction that is too smooth has too little power at large wavenumbers.

    Parameters
    ----------
    power : DataArray
        A variable of a scorecard's `spectrum`: dims ``("source", "wavenumber")``, and
        ``lead_time`` of a forecast; the sources are ``"truth"`` and ``"prediction"``.
    title : str
        Heading; default: the name of the variable.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    InvalidValueError
        If a dim is missing, or no power is above 0, as of maps with gaps in all rows.
    InvalidTypeError
        If `power` is no DataArray.

    Examples
    --------
    >>> power = xr.DataArray(
    ...     [[9.0, 4, 1, 0.5], [9.0, 4, 0.9, 0.2]],
    ...     {"source": ["truth", "prediction"]},
    ...     ("source", "wavenumber"),
    ... )
    >>> len(spectrum_plot(power).axes[0].lines)
    2
    """
    if not isinstance(power, xr.DataArray):
        raise InvalidTypeError(f"power must be a DataArray, got {type(power).__name__}")
    if not set(power.dims) >= _DIMS or set(power.dims) > {*_DIMS, LEAD}:
        raise InvalidValueError(
            f"power must have the dims 'source', 'wavenumber' and perhaps {LEAD!r}, got "
            f"{power.dims}"
        )
    if not has_power(power):
        raise InvalidValueError("power must be above 0 at a wavenumber, got none")
    with drawing(ax, 1, lambda: new_panels(1, 3.6, 2.9)) as (axes,):
        draw_spectrum(axes, power, title or f"Spectrum of {power.name}")
    return figure_of(axes)


def has_power(power: xr.DataArray) -> bool:
    """Return whether there is anything to draw."""
    return bool((power.isel(wavenumber=slice(1, None)) > 0).any())


def draw_spectrum(axes: Axes, power: xr.DataArray, title: str) -> None:
    """Draw lines of power by wavenumber."""
    wavenumbers = np.arange(power.sizes["wavenumber"])[1:]
    lines = {"truth": power.sel(source="truth"), "prediction": power.sel(source="prediction")}
    if LEAD in power.dims:
        leads, unit = lead_axis(power)
        predicted = lines.pop("prediction")
        lines["truth"] = lines["truth"].isel({LEAD: 0})
        for lead in dict.fromkeys((0, len(leads) - 1)):
            at = f"prediction, {leads[lead]:g} {unit}".rstrip()
            lines[at] = predicted.isel({LEAD: lead})
    # the truth is broad and pale: a good prediction lies on it
    looks = (("0.7", "-", 3.5), (BLUE, "-", 1.4), (ORANGE, "--", 1.4))
    for (label, values), (color, line, width) in zip(lines.items(), looks, strict=False):
        axes.plot(wavenumbers, values.values[1:], color=color, ls=line, lw=width, label=label)
    xlabel = "wavenumber"
    if dim := str(power.attrs.get("rows_along", "")).strip():
        xlabel = f"cycles along {dim}"
    ylabel = with_units("power", units_of(power))
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(visible=True)
    legend_below(axes)


def lead_axis(array: xr.DataArray) -> tuple[NDArray[Any], str]:
    """Return lead times as numbers, and their unit."""
    lead = array[LEAD]
    if lead.dtype.kind != "m":
        return lead.values, str(lead.attrs.get("units", ""))
    hours = lead.values / np.timedelta64(1, "h")
    if hours.max() >= 72:
        return hours / 24, "days"
    return hours, "hours"
