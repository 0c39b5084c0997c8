"""Place the windows of a model on a cube, as the model was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.time_steps import WindowsOverTime
from ml4cube.cube.coordinates import INIT, LEAD, find_time_dim, role_of
from ml4cube.prediction.geometry import DimWindows, Windows
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.recipe.lead_time import warn_of_uneven_steps
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import DimLead, Lead
from ml4cube.recipe.windows import Ints

_INIT_ATTRS = {"standard_name": "forecast_reference_time", "long_name": "last step of the inputs"}
_VALID_ATTRS = {"standard_name": "time", "long_name": "date of the forecast"}
_LEAD_ATTRS = {"standard_name": "forecast_period", "long_name": "time since the last input"}
_SOME = 5  # dates in a message


def window_cells(
    fitted: FittedRecipe,
    shape: Mapping[str, int],
    sample_size: SizesLike | None,
    overlap: SizesLike | float | None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the cells of a window of inputs, and those that neighbouring targets share.

    `shape` is that of the cube. What a user does not give is as in training.
    """
    trained, shifted = fitted.window, fitted.shifted
    size = {dim: trained[dim] for dim in shape}
    if sample_size is None:
        too_long = {dim: n for dim, n in trained.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {dict(shape)}; predict "
                "a larger cube, or give sample_size if the model takes smaller windows"
            )
        if overlap is None:
            recipe = fitted.recipe
            shared = dict(zip(recipe.dims, recipe.overlap, strict=True))
            shared |= dict.fromkeys(shifted, 0)
            return size, {dim: shared[dim] for dim in shape}
    else:
        sizes = parse_sizes("sample_size", sample_size, shape)
        for dim, n in sizes.items():
            if dim in shifted and n != size[dim]:
                raise InvalidValueError(
                    f"sample_size along {dim!r}, where targets have an offset, must be that of the "
                    f"training, {size[dim]}, got {n}"
                )
        size |= {dim: sizes.get(dim, 1) for dim in shape if dim not in shifted}
    target_size = size | {dim: of_dim.target_size for dim, of_dim in shifted.items()}
    return size, parse_overlap("overlap", overlap, target_size)


def place_windows(
    cube: xr.Dataset,
    fitted: FittedRecipe,
    size: Mapping[str, int],
    shared: Mapping[str, int],
    init_times: Any,
    rollout: int,
) -> Windows:
    """Return windows over a cube, of which targets share some cells, or that start at dates."""
    coords = {dim: cube[dim].variable for dim in size if dim in cube.coords}
    lead_dim = _lead_dim(fitted.shifted, coords)
    if lead_dim is None:
        _refuse_forecast(init_times, rollout)
    else:
        _check_is_time(lead_dim, cube, size)
    dims = {}
    for dim, cells in size.items():
        n, lead = cube.sizes[dim], fitted.shifted.get(dim, DimLead(0, cells, cells))
        if dim != lead_dim:
            dims[dim] = DimWindows.covering(n, lead, shared[dim])
            continue
        axis = _axis_of(cube, dim)
        warn_of_uneven_steps({dim: lead}, {dim: axis})
        last = n - 1
        if dim in _dims_of_forcings(cube, fitted.recipe):
            last -= (rollout - 1) * lead.target_size
        inits = _choose_inits(axis, init_times, lead.input_size - 1, last)
        dims[dim] = DimWindows.starting(n, lead, inits, rollout)
        coords[dim] = extended(axis, dims[dim].cells_beyond)
    input_steps = {dim: (windows.starts, windows.known_size) for dim, windows in dims.items()}
    WindowsOverTime.of(input_steps, {dim: axis.values for dim, axis in coords.items()}).warn()
    windows = Windows(dims, *_orders(fitted, size), coords, rollout)
    return windows.single(_only_targets(windows))


def _dims_of_forcings(cube: xr.Dataset, recipe: Recipe) -> set[str]:
    """Return the dims of features that a rollout cannot predict."""
    names = [name for name in recipe.features or () if name not in recipe.predicted]
    return {str(dim) for name in names for dim in cube[name].dims}


def _orders(
    fitted: FittedRecipe, size: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dims of a window of inputs and of targets, in the model's order.

    That is the order of the store, also of dims that it keeps with one cell.
    """
    trained = fitted.recipe.window_dims
    kept = {dim for dim in trained if fitted.window[dim] == 1}
    dims = dict.fromkeys((*trained, *size))
    input_order = tuple(dim for dim in dims if size[dim] > 1 or dim in kept)
    if not fitted.lead:
        return input_order, input_order
    shifted = fitted.shifted
    of_targets = {dim for dim in fitted.target_dims if dim in shifted}
    of_targets |= {dim for dim in input_order if dim not in shifted}
    dims = dict.fromkeys((*fitted.target_dims, *input_order))
    return input_order, tuple(dim for dim in dims if dim in of_targets)


def _only_targets(windows: Windows) -> list[str]:
    """Return the dims with targets at one cell of the only window, for which there is no use."""
    only = []
    for dim, of_dim in windows.dims.items():
        has_axis = dim in windows.target_order or of_dim.is_lead
        if not has_axis and of_dim.size > 1 and len(of_dim.starts) == 1:
            only.append(dim)
    return only


def _lead_dim(shifted: Lead, coords: Mapping[str, xr.Variable]) -> str | None:
    """Return the dim along which targets have a lead time; along others they lie in the window."""
    dims = []
    for dim, lead in shifted.items():
        is_dated = dim in coords and is_time(coords[dim].values)
        if lead.cells_past_input or is_dated:
            dims.append(dim)
    if len(dims) > 1:
        raise InvalidValueError(
            f"targets may lie beyond windows of inputs along one dim, got {dims}"
        )
    return dims[0] if dims else None


def _refuse_forecast(init_times: Any, rollout: int) -> None:
    """Refuse what only a data set with a lead time can do."""
    is_asked = {"init_times": init_times is not None, f"rollout={rollout}": rollout > 1}
    for argument, is_given in is_asked.items():
        if is_given:
            raise InvalidValueError(
                f"{argument} needs a data set with target_offset along time, got none"
            )


def _check_is_time(lead_dim: str, cube: xr.Dataset, dims: Iterable[str]) -> None:
    """Refuse targets that lie beyond the inputs in space."""
    coords = list(cube.coords.values())
    time_dim = find_time_dim(coords, tuple(dims))
    if lead_dim == time_dim:
        return
    is_place = any(lead_dim in c.dims and role_of(c) in ("latitude", "longitude") for c in coords)
    if time_dim is not None or is_place:
        raise InvalidValueError(
            f"target_offset along {lead_dim!r} is no lead time: targets must lie beyond the inputs "
            "along time, or in their cells"
        )


def _axis_of(cube: xr.Dataset, dim: str) -> xr.Variable:
    """Return the coordinate along a dim, or numbers of cells."""
    if dim in cube.coords:
        return cube[dim].variable
    return xr.Variable(dim, np.arange(cube.sizes[dim]))


def extended(axis: xr.Variable, steps: int) -> xr.Variable:
    """Return a coordinate with some more steps at its end: as even as those that are there."""
    values = np.asarray(axis.values)
    if steps <= 0:
        return axis
    if len(values) < 2 or not (is_time(values) or values.dtype.kind in "iuf"):
        raise InvalidValueError(
            f"forecasts lie beyond the end of {axis.dims[0]!r}, whose steps are not known from "
            f"{values[:_SOME].tolist()}; give the cube more dates, or init_times= for which it has "
            "the dates of all leads"
        )
    later = _later_dates(values, steps) if is_time(values) else _later_numbers(values, steps)
    return xr.Variable(axis.dims, np.concatenate([values, later]), axis.attrs, axis.encoding)


def _later_numbers(values: NDArray[Any], steps: int) -> NDArray[Any]:
    step = values[-1] - values[-2]
    later: NDArray[Any] = (values[-1] + step * np.arange(1, steps + 1)).astype(values.dtype)
    return later


def _later_dates(dates: NDArray[Any], steps: int) -> NDArray[Any]:
    """Return later dates, by calendar months where the dates have one of each month or so."""
    recent = dates[-13:]
    months = np.array([_month_of(date) for date in recent])
    strides, gaps, place = np.diff(months), np.diff(recent), _place_in_months(recent)
    is_even = (strides == strides[0]).all() and strides[0] > 0
    if not is_even or (place is None and len({*gaps.tolist()}) == 1):
        step = np.sort(gaps)[len(gaps) // 2]  # the median, also of timedelta objects
        return np.array([dates[-1] + step * n for n in range(1, steps + 1)], dates.dtype)
    later = []
    for n in range(1, steps + 1):
        month = months[-1] + n * strides[0]
        # As far into the month as the same month has it a year before, or the last date.
        same = np.flatnonzero((months - month) % 12 == 0)
        like = recent[same[-1] if len(same) else -1]
        later.append(_in_month(like, int(month), place or _place_in_month(like)))
    return np.array(later, dates.dtype)


def _month_of(date: Any) -> int:
    """Return the number of months since year 0."""
    if isinstance(date, np.datetime64):
        return int(date.astype("M8[M]").astype(np.int64)) + 1970 * 12
    return int(date.year) * 12 + int(date.month) - 1


def _start_of(month: int, like: Any) -> Any:
    """Return the first instant of a month, by its number since year 0."""
    if isinstance(like, np.datetime64):
        return np.datetime64(month - 1970 * 12, "M").astype(like.dtype)
    return like.replace(
        year=month // 12, month=month % 12 + 1, day=1, hour=0, minute=0, second=0, microsecond=0
    )


def _days(number: int, like: Any) -> Any:
    """Return some days, in the type of differences of dates."""
    if isinstance(like, np.datetime64):
        return np.timedelta64(number, "D").astype(like.dtype.str.replace("M8", "m8"))
    return timedelta(days=number)


def _within_month(date: Any) -> tuple[Any, Any]:
    """Return how far a date is into its month, and the length of the month."""
    month = _month_of(date)
    start = _start_of(month, date)
    return date - start, _start_of(month + 1, date) - start


def _place_in_months(dates: NDArray[Any]) -> str | None:
    """Return what dates have in common: the middle or the last day of their month, or the day."""
    within = [_within_month(date) for date in dates]
    if all(2 * into == length for into, length in within):
        return "middle"
    if all(into >= length - _days(1, dates[0]) for into, length in within):
        return "end"
    return "day" if all(into == within[0][0] for into, _ in within) else None


def _place_in_month(date: Any) -> str:
    """Return what a date, of dates with no place in common, is most likely meant to be."""
    into, _ = _within_month(date)
    if into >= _days(27, date):
        return "end"
    return "middle" if into >= _days(13, date) else "day"


def _in_month(date: Any, month: int, place: str) -> Any:
    """Return a date as far into another month: from its start, its middle or its end."""
    start = _start_of(month, date)
    length, (into, own_length) = _within_month(start)[1], _within_month(date)
    if place == "end":
        return start + into + (length - own_length)
    if place == "middle":
        return start + into + (length - own_length) / 2
    return start + min(into, length - _days(1, date))


def _choose_inits(axis: xr.Variable, wanted: Any, first: int, last: int) -> Ints:
    """Return the steps at which forecasts start, as positions of their last inputs.

    `first` and `last` are the first and the last such step for which a forecast can be made.
    """
    dim, n = str(axis.dims[0]), len(axis)
    if wanted is None:
        if last < first:
            raise InvalidValueError(
                f"the cube has {n} steps along {dim!r}, too few for the inputs of one forecast"
            )
        return np.arange(first, last + 1)
    positions = _positions(axis, wanted)
    past, future = positions[positions < first], positions[positions > last]
    for unfit, lacks in ((past, "past"), (future, "future")):
        if len(unfit):
            raise InvalidValueError(
                f"init_times: {[str(axis.values[i]) for i in unfit[:_SOME]]} have too little "
                f"{lacks} in the cube; the model can start from {axis.values[first]} to "
                f"{axis.values[last]}"
            )
    return positions


def _positions(axis: xr.Variable, wanted: Any) -> Ints:
    """Return the positions of dates, ascending; refuse dates that the cube lacks."""
    dim = str(axis.dims[0])
    positions = xr.DataArray(np.arange(len(axis)), {dim: axis}, dims=dim)
    if isinstance(wanted, xr.DataArray | xr.Variable):
        wanted = wanted.values
    labels = [wanted]
    if not isinstance(wanted, slice) and np.ndim(wanted):
        labels = list(wanted)
    parts = []
    refusal = InvalidValueError(
        f"init_times must be among the dates of {dim!r}, {axis.values[0]} to "
        f"{axis.values[-1]}, got {wanted!r}"
    )
    try:
        for label in labels:
            if isinstance(label, str):  # which may be a part of dates, such as a year
                label = slice(label, label)
            elif not isinstance(label, slice):
                label = [label]
            parts.append(positions.sel({dim: label}).values)
    except (KeyError, TypeError, ValueError) as error:
        raise refusal from error
    if not parts or not all(map(len, parts)):
        raise refusal
    return np.unique(np.concatenate(parts))


def forecast_coords(axis: xr.Variable, inits: Ints, leads: Ints) -> dict[str, xr.Variable]:
    """Return start dates, lead times and the date of every forecast.

    `axis` is the extended coordinate, `inits` the positions of the last inputs, and `leads` the
    steps from there.
    """
    values = np.asarray(axis.values)
    init, valid = values[inits], values[inits[:, None] + leads]
    if is_time(values):
        differences = _as_timedeltas(valid, init)
        encoding = {k: v for k, v in axis.encoding.items() if k in ("units", "calendar", "dtype")}
    else:
        differences, encoding = valid - init[:, None], {}
    lead = np.sort(differences, axis=0)[len(inits) // 2]  # the median
    attrs = dict(_LEAD_ATTRS)
    if (differences != lead).any():
        attrs["comment"] = "median over the start dates; valid_time has the exact dates"
    if not is_time(values) and "units" in axis.attrs:
        attrs["units"] = axis.attrs["units"]
    return {
        INIT: xr.Variable(INIT, init, {**axis.attrs, **_INIT_ATTRS, "axis": "T"}, dict(encoding)),
        LEAD: xr.Variable(LEAD, lead, attrs),
        "valid_time": xr.Variable(
            (INIT, LEAD), valid, {**axis.attrs, **_VALID_ATTRS}, dict(encoding)
        ),
    }


def _as_timedeltas(valid: NDArray[Any], init: NDArray[Any]) -> NDArray[Any]:
    differences = valid - init[:, None]
    if differences.dtype == object:  # of cftime dates
        differences = differences.astype("m8[us]")
    in_ns: NDArray[Any] = differences.astype("m8[ns]")
    return in_ns
