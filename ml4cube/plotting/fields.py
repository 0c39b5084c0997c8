"""Maps of fields, of differences and errors, and of a field over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.plotting.grids import MapGrid
from ml4cube.plotting.maps import Scale, check_maps, draw_group, draw_maps, new_map_panels
from ml4cube.plotting.steps import positions_along, step_name
from ml4cube.plotting.style import drawing, figure_of, label_of, name_of, units_of, with_units

_MOST_STEPS = 6


def field_map(
    field: xr.DataArray,
    *,
    center: float | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw a map of one field.

    The axes have the aspect of the place: degrees of longitude are shorter by the cosine of the
    mid latitude, and lengths on projected grids are equal. Cells on a curvilinear grid are drawn
    at their 2-D latitudes and longitudes. Longitudes that jump from 360 to 0 or from 180 to -180
    are joined. Colours change between the 2nd and the 98th percentile of the values; the arrows
    of the colour bar show that there are values beyond. Missing cells are grey. Coastlines are
    drawn if cartopy is installed and has them on disk.

    Parameters
    ----------
    field : DataArray
        Dims (row, column); names and units are those of its CF attributes.
    center : float, optional
        The value about which colours diverge, such as 0 for anomalies; default: 0 if the CF
        name of the field is one of an anomaly, else none.
    title : str
        Heading.
    ax : matplotlib.axes.Axes, optional
        Where to draw, also axes of cartopy; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        The figure of `ax`.

    Raises
    ------
    InvalidValueError
        If the field does not have two dims.
    InvalidTypeError
        If it is no DataArray of numbers, or `ax` are no axes.

    Examples
    --------
    >>> sst = xr.DataArray(np.eye(3), {"lat": [59, 60, 61], "lon": [1, 2, 3]}, name="sst")
    >>> round(field_map(sst).axes[0].get_aspect(), 3)  # 1 / cos 60°
    2.0
    """
    grids = check_maps([("field", field)])
    scale = Scale.of(grids, label_of(field), _center_of(field, center))
    return draw_maps([title], grids, scale, "", ax)


def _center_of(field: xr.DataArray, center: float | None = None) -> float | None:
    """Return the value about which colours diverge: that given, or 0 for anomalies."""
    if center is None and "anomaly" in f"{name_of(field)} {field.attrs.get('standard_name')}":
        return 0.0
    return center


def difference_map(
    field: xr.DataArray,
    reference: xr.DataArray,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw a map of a field minus a reference, in colours that diverge at zero.

    Parameters
    ----------
    field, reference : DataArray
        Dims (row, column), on the same cells and in the same units.
    title : str
        Heading.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        The figure of `ax`.

    Raises
    ------
    InvalidValueError
        If the fields differ in their cells or units, or do not have two dims.

    Examples
    --------
    >>> truth = xr.DataArray(np.eye(3), dims=("lat", "lon"), attrs={"units": "K"})
    >>> figure = difference_map(truth + 0.5, truth)
    >>> figure.axes[0].collections[0].get_clim()
    (-0.5, 0.5)
    """
    check_maps([("field", field), ("reference", reference)])
    check_aligned("reference", reference, field)
    if (units := units_of(field)) != units_of(reference) and units and units_of(reference):
        raise InvalidValueError(
            f"field and reference must have the same units, got {units} and {units_of(reference)}"
        )
    bare = reference.transpose(*field.dims).variable
    difference = field.astype("float64") - xr.DataArray(bare)
    difference.attrs = {
        "long_name": f"difference in {name_of(field)}".removesuffix(" in "),
        "units": field.attrs.get("units", reference.attrs.get("units", "")),
    }
    return field_map(difference, center=0.0, title=title, ax=ax)


def field_maps(
    fields: Mapping[str, xr.DataArray],
    errors: Mapping[str, xr.DataArray] | None = None,
    *,
    title: str = "",
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw maps of one quantity, and of their errors on a separate colour scale.

    Missing cells, such as land, are grey. All fields share one colour scale, which diverges at zero
    if the CF name of the first is one of an anomaly; all errors share another, which always does.

    Parameters
    ----------
    fields : mapping of str to DataArray
        Heading and map, dims (row, column), all in the units of the first.
    errors : mapping of str to DataArray, optional
        Heading and map of differences.
    title : str
        Heading of the figure, if it is a new one.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for each map, fields first; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per map.

    Raises
    ------
    InvalidValueError
        If there is no field, or one does not have two dims.

    Examples
    --------
    >>> truth = xr.DataArray(np.arange(6.0).reshape(2, 3), dims=("lat", "lon"))
    >>> len(field_maps({"truth": truth}, {"error": truth - 2}).axes)
    2
    """
    errors = errors or {}
    if not fields:
        raise InvalidValueError("fields must have at least one map, got none")
    first = next(iter(fields.values()))
    grids, error_grids = check_maps(fields.items()), check_maps(errors.items())
    groups = [len(group) for group in (fields, errors) if group]
    scale = Scale.of(grids, label_of(first), _center_of(first))
    error_scale = Scale.of(error_grids, with_units("error", units_of(first)), center=0.0)
    with drawing(
        ax, sum(groups), lambda: new_map_panels(grids + error_grids, groups), title
    ) as panels:
        draw_group(panels[: len(fields)], grids, list(fields), scale)
        if errors:
            draw_group(panels[len(fields) :], error_grids, list(errors), error_scale)
    return figure_of(panels[0])


def time_maps(
    field: xr.DataArray,
    steps: Sequence[int] | None = None,
    *,
    center: float | None = None,
    title: str = "",
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw maps of a field at several time steps, with one colour scale.

    Parameters
    ----------
    field : DataArray
        Dims time and two others.
    steps : sequence of int, optional
        Positions along time; default: at most six, evenly spaced.
    center : float, optional
        The value about which colours diverge; default: 0 if the CF name of the field is one of an
        anomaly, else none.
    title : str
        Heading of the figure, if it is a new one; default: the name of the field.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for each step; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per step.

    Raises
    ------
    InvalidValueError
        If there is no time dim, a step is out of range, or there are not two other dims.

    Examples
    --------
    >>> field = xr.DataArray(np.ones((9, 2, 2)), dims=("time", "lat", "lon"))
    >>> [axes.get_title("left") for axes in time_maps(field, [0, 8]).axes[:2]]
    ['step 0', 'step 8']
    """
    if not isinstance(field, xr.DataArray):
        raise InvalidTypeError(f"field must be a DataArray, got {type(field).__name__}")
    time = find_time_dim(field.coords.values(), field.dims)
    if time is None:
        raise InvalidValueError(f"field must have a time dim, got {field.dims}")
    if steps is None:
        n = field.sizes[time]
        steps = np.unique(np.linspace(0, n - 1, min(n, _MOST_STEPS)).round().astype(int)).tolist()
    positions = positions_along(steps, field, time)
    if not positions:
        raise InvalidValueError("steps must have at least one position, got none")
    names = [step_name(field, time, step) for step in positions]
    maps = [field.isel({time: step}, drop=True) for step in positions]
    grids = check_maps(zip(names, maps, strict=True))
    scale = Scale.of(grids, label_of(field), _center_of(field, center))
    return draw_maps(names, grids, scale, title or name_of(field), ax)


def error_maps(
    maps: xr.Dataset,
    variable: str | None = None,
    *,
    metric: str = "rmse",
    title: str = "",
    ax: Sequence[Axes] | None = None,
) -> Figure:
    """Draw the error of each cell, or the skill, for each model of a scorecard.

    Parameters
    ----------
    maps : Dataset
        The `map` of a scorecard: ``<variable>_rmse`` with dims ``("model", *cells)`` and
        ``<variable>_skill`` with dims ``("baseline", *cells)``, on cells of two dims.
    variable : str, optional
        The variable; default: the first one.
    metric : {"rmse", "skill"}
        What to draw.
    title : str
        Heading of the figure, if it is a new one; default: metric and variable.
    ax : sequence of matplotlib.axes.Axes, optional
        Where to draw: one for each model or baseline; default: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per model, or per baseline.

    Raises
    ------
    InvalidValueError
        If the variable or the metric is unknown, or the cells do not have two dims.

    Examples
    --------
    >>> rmse = xr.DataArray(np.ones((2, 3, 4)), dims=("model", "lat", "lon"))
    >>> maps = xr.Dataset({"t_rmse": rmse.assign_coords(model=["prediction", "climatology"])})
    >>> [axes.get_title("left") for axes in error_maps(maps).axes[:2]]
    ['prediction', 'climatology']
    """
    check_choice("metric", metric, ("rmse", "skill"))
    variables = [
        str(name).removesuffix(f"_{metric}") for name in maps if str(name).endswith(metric)
    ]
    if not variables:
        raise InvalidValueError(f"maps must have a {metric}, got {list(maps.data_vars)}")
    if variable is not None:
        check_choice("variable", variable, variables)
    variable = variable or variables[0]
    scores = maps[f"{variable}_{metric}"]
    of = "model" if metric == "rmse" else "baseline"
    names = [str(name).replace("_", " ") for name in scores[of].values]
    fields = [scores.isel({of: i}, drop=True) for i in range(len(names))]
    grids = check_maps(zip(names, fields, strict=True))
    if metric == "skill":
        names = [f"over {name}" for name in names]
        return draw_maps(names, grids, skill_scale(grids), title or f"Skill of {variable}", ax)
    scale = Scale.of(grids, with_units("RMSE", units_of(scores)))
    return draw_maps(names, grids, scale, title or f"RMSE of {variable}", ax)


def skill_scale(grids: Sequence[MapGrid]) -> Scale:
    """Return colours for skill: blue where better than the baseline, red where worse."""
    scale = Scale.of(grids, "skill", center=0.0, colors="RdBu")
    if scale.high <= 1:
        return scale
    return replace(scale, low=-1.0, high=1.0, extend="min")  # no skill is above 1
