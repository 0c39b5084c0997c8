"""`scorecard_figure`: skill by lead time, a map of skill, and power spectra."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.cube.coordinates import LEAD, role_of
from ml4cube.plotting.fields import axis_name, draw_field

# Okabe and Ito's colours, each with a marker of its own
_STYLES = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"),
    ("#56B4E9", "P"),
)  # fmt: skip
_GREY = "0.35"
_MOST_TICKS = 8


def scorecard_figure(
    scores: xr.Dataset, maps: xr.Dataset, spectra: xr.Dataset, *, baseline: str | None = None
) -> Figure:
    """Draw skill by lead time with intervals, the map of skill, and power spectra.

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

    Returns
    -------
    matplotlib.figure.Figure
        A row of panels for each variable.

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
    names = [str(name) for name in scores["baseline"].values] if "baseline" in scores else []
    if baseline is not None:
        check_choice("baseline", baseline, names)
    rows = []
    for name in variables:
        mapped = baseline or _hardest(scores, name, names)
        skill_map = _map_of(maps, name, mapped)
        rows.append((name, mapped, skill_map, _spectrum_of(spectra, name)))
    columns = 1 + any(row[2] is not None for row in rows) + any(row[3] is not None for row in rows)
    figure = Figure(figsize=(1.0 + 3.9 * columns, 0.3 + 3.2 * len(rows)), layout="constrained")
    for i, (name, mapped, skill_map, spectrum) in enumerate(rows):
        at = columns * i + 1
        _draw_scores(figure.add_subplot(len(rows), columns, at), scores.sel(variable=name), name)
        if skill_map is not None:
            axes = figure.add_subplot(len(rows), columns, at + 1)
            _draw_map(figure, axes, skill_map, f"Skill over {_words(mapped)}")
        if spectrum is not None:
            axes = figure.add_subplot(len(rows), columns, at + columns - 1)
            _draw_spectrum(axes, spectrum, name)
    return figure


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
    of_map = [
        dim
        for dim in skill.dims
        if dim in skill.coords and role_of(skill[dim]) in ("latitude", "longitude")
    ]
    of_map = of_map if len(of_map) == 2 else list(skill.dims[-2:])
    others = [dim for dim in skill.dims if dim not in of_map]
    return None if skill.ndim < 2 else skill.mean(others, keep_attrs=True)


def _spectrum_of(spectra: xr.Dataset, variable: str) -> xr.DataArray | None:
    """Return the spectrum of a variable; None without one, as of maps with gaps in all rows."""
    power = spectra.get(variable)
    return power if power is not None and bool((power > 0).any()) else None


def _draw_scores(axes: Axes, scores: xr.Dataset, name: str) -> None:
    """Draw the skill over each baseline, or the RMSE without one, by lead time."""
    metric, second = ("skill", "baseline") if "skill" in scores else ("rmse", "model")
    units = str(scores.coords["units"].item()) if "units" in scores.coords else ""
    has_leads = LEAD in scores[metric].dims
    leads, unit = _lead_axis(scores) if has_leads else (np.zeros(1), "")
    labels = [str(label) for label in scores[second].values]
    for i, label in enumerate(labels):
        color, marker = _STYLES[i % len(_STYLES)]
        one = scores.sel({second: label})
        value, low, high = (
            np.atleast_1d(one[metric + end].values) for end in ("", "_low", "_high")
        )
        x = leads if has_leads else np.array([float(i)])
        ends = np.stack([value - low, high - value]).clip(min=0)
        axes.errorbar(
            x, value, yerr=np.nan_to_num(ends), color=color, marker=marker, ms=4, lw=1.4,
            capsize=2.5, elinewidth=1, label=_words(label),
        )  # fmt: skip
    if metric == "skill":
        axes.axhline(0, color=_GREY, lw=1, ls="--", zorder=0)
    if has_leads:
        if len(leads) <= _MOST_TICKS:
            axes.set_xticks(leads, [f"{lead:g}" for lead in leads])
        axes.set_xlabel(f"lead time ({unit})" if unit else "lead time")
        _legend_below(axes)
    else:
        axes.set_xticks(range(len(labels)), [_words(label) for label in labels], rotation=20)
        axes.margins(x=0.3)
    shown = "skill (1 is perfect)" if metric == "skill" else "RMSE"
    axes.set_ylabel(f"{shown} ({units})" if units and metric == "rmse" else shown)
    axes.set_title(name, fontsize=10, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _lead_axis(scores: xr.Dataset) -> tuple[NDArray[Any], str]:
    """Return lead times as numbers, and their unit."""
    leads = scores[LEAD].values
    if leads.dtype.kind != "m":
        return leads, str(scores[LEAD].attrs.get("units", ""))
    hours = leads / np.timedelta64(1, "h")
    return (hours / 24, "days") if hours.max() >= 72 else (hours, "hours")


def _draw_map(figure: Figure, axes: Axes, skill: xr.DataArray, title: str) -> None:
    """Draw skill in colours that diverge at zero; limits leave out the worst cells."""
    values = skill.where(np.isfinite(skill))
    largest = 1.0
    if bool(values.notnull().any()):
        largest = float(np.nanpercentile(np.abs(values), 95)) or 1.0
    limit = min(1.0, largest)
    mesh = draw_field(axes, values, cmap="RdBu", vmin=-limit, vmax=limit)
    axes.set_xlabel(axis_name(skill, 1), fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    if _is_in_degrees(skill):
        height, width = (float(np.ptp(skill[dim].values)) for dim in skill.dims)
        # True proportions, but a narrow band stays wide enough to be seen.
        axes.set_box_aspect(float(np.clip(height / (width or 1), 0.2, 1.5)))
    extend = "both" if float(np.abs(values).max()) > limit else "neither"
    figure.colorbar(
        mesh, ax=axes, label="skill", extend=extend, shrink=0.8, orientation="horizontal"
    )


def _is_in_degrees(field: xr.DataArray) -> bool:
    units = [field[dim].attrs.get("units", "") if dim in field.coords else "" for dim in field.dims]
    return all(str(unit).startswith("degree") for unit in units)


def _draw_spectrum(axes: Axes, power: xr.DataArray, name: str) -> None:
    """Draw the power of the prediction at the shortest and the longest lead, and of the truth."""
    wavenumbers = np.arange(power.sizes["wavenumber"])[1:]
    lines = {"truth": power.sel(source="truth"), "prediction": power.sel(source="prediction")}
    if LEAD in power.dims:
        leads, unit = _lead_axis(power.to_dataset(name="power"))
        predicted = lines.pop("prediction")
        lines["truth"] = lines["truth"].isel({LEAD: 0})
        for lead in dict.fromkeys((0, len(leads) - 1)):
            at = f"prediction, {leads[lead]:g} {unit}".rstrip()
            lines[at] = predicted.isel({LEAD: lead})
    styles = (("0.1", "-"), (_STYLES[0][0], "-"), (_STYLES[1][0], "--"))
    for (label, values), (color, line) in zip(lines.items(), styles, strict=False):
        axes.plot(wavenumbers, values.values[1:], color=color, ls=line, lw=1.4, label=label)
    units = power.attrs.get("units", "")
    axes.set(xscale="log", yscale="log", xlabel=f"cycles along {power.attrs.get('rows_along', '')}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"power ({units})" if units else "power")
    axes.set_title(f"Spectrum of {name}", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.3))
