"""Place the windows of a model on a cube, as the model was trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError, check_whole
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.time_steps import WindowsOverTime
from ml4cube.cube.coordinates import INIT, LEAD, find_time_dim, role_of
from ml4cube.cube.variables import cube_dims
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.lead_time import warn_of_uneven_steps
from ml4cube.prediction.source import Source
from ml4cube.prediction.windows import DimWindows, Windows
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import DimLead
from ml4cube.recipe.windows import Ints

_INIT_ATTRS = {"standard_name": "forecast_reference_time", "long_name": "last step of the inputs"}
_VALID_ATTRS = {"standard_name": "time", "long_name": "date of the forecast"}
_LEAD_ATTRS = {"standard_name": "forecast_period", "long_name": "time since the last input"}
_SOME = 5  # dates in a message


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Arguments of `predict_cube` about windows; it documents them."""

    sample_size: SizesLike | None
    overlap: SizesLike | float | None
    init_times: Any
    rollout: int

    def __post_init__(self) -> None:
        """Check the arguments that need no cube."""
        check_whole("rollout", self.rollout, 1)


@dataclass(frozen=True)
class _Trained:
    """Windows that a model was trained on, by dim of the cube; along others they have one cell."""

    # Cells of a window of inputs, and cells that neighbours share.
    size: Mapping[str, int]
    overlap: Mapping[str, int]
    # First target cell in a window and number of target cells, where these differ from the inputs.
    targets: Mapping[str, tuple[int, int]]
    # Dims of a window of inputs and of targets, in the model's order.
    input_order: tuple[str, ...]
    target_order: tuple[str, ...]

    @classmethod
    def of(cls, shape: Mapping[str, int], source: Source) -> _Trained:
        """Return the windows of a data set or store; without one, single points."""
        recipe = source.recipe
        if source.data is not None and source.data.shifted:
            return cls._of_shifted(source.data, recipe)
        size = dict(zip(recipe.dims, recipe.size, strict=True))
        overlap = dict(zip(recipe.dims, recipe.overlap, strict=True))
        return cls(size, overlap, {}, recipe.window_dims, recipe.window_dims)

    @classmethod
    def _of_shifted(cls, data: PTXrDataset, recipe: Recipe) -> _Trained:
        """Return the windows of a data set whose targets lie elsewhere than the inputs."""
        assert data.lead is not None
        cube_dim = data._source.cube_dim
        x, y, *_ = data.step_sizes
        inputs = {cube_dim(dim): n for dim, n in x.items()}
        target_window = {cube_dim(dim): n for dim, n in y.items()}
        targets = {}
        for sample_dim, (offset, _) in data.lead.items():
            dim = cube_dim(sample_dim)
            n = target_window.get(dim, 1)
            if (offset, n) != (0, inputs.get(dim, 1)):
                targets[dim] = (offset, n)
        overlap = dict(zip(recipe.dims, recipe.overlap, strict=True))
        overlap = {dim: n for dim, n in overlap.items() if dim not in targets}
        size = {dim: inputs.get(dim, 1) for dim in recipe.dims}
        return cls(size, overlap, targets, tuple(inputs), tuple(target_window))


def place_windows(
    cube: xr.Dataset, source: Source, options: WindowOptions, forcing_dims: Collection[str]
) -> tuple[Windows, dict[str, xr.Variable]]:
    """Return windows over a cube, and its axes, that of a lead time with later dates.

    `forcing_dims` are the dims of features that a rollout cannot predict.
    """
    shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
    trained = _Trained.of(shape, source)
    size, overlap = _sizes(shape, trained, options)
    axes = {dim: cube[dim].variable for dim in shape if dim in cube.coords}
    lead_dim = _lead_dim(trained, size, axes)
    if lead_dim is None:
        _refuse_forecast(options)
    else:
        _check_is_time(lead_dim, cube, shape)
    dims = {}
    for dim, n in shape.items():
        offset, target_size = trained.targets.get(dim, (0, size[dim]))
        if dim != lead_dim:
            dims[dim] = DimWindows.covering(n, size[dim], overlap[dim], offset, target_size)
            continue
        axis, lead = axis_of(cube, dim), DimLead(offset, size[dim], target_size)
        warn_of_uneven_steps({dim: lead}, {dim: axis})
        dims[dim] = _lead_windows(axis, lead, options, dim in forcing_dims)
        last = int(dims[dim].starts[-1]) + offset + dims[dim].target_size
        axes[dim] = extended(axis, last - n)
    input_steps = {dim: (windows.starts, windows.known_size) for dim, windows in dims.items()}
    WindowsOverTime.of(input_steps, {dim: axis.values for dim, axis in axes.items()}).warn()
    windows = Windows(dims, *_orders(trained, size), rollout=options.rollout)
    return windows.single(_only_targets(windows)), axes


def _orders(trained: _Trained, size: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dims of a window of inputs and of targets, in the model's order.

    That is the order of the store, also of dims that it keeps with one cell.
    """
    kept = {dim for dim in trained.input_order if trained.size[dim] == 1}
    dims = dict.fromkeys((*trained.input_order, *size))
    input_order = tuple(dim for dim in dims if size[dim] > 1 or dim in kept)
    of_targets = {dim for dim in trained.target_order if dim in trained.targets}
    of_targets |= {dim for dim in input_order if dim not in trained.targets}
    dims = dict.fromkeys((*trained.target_order, *input_order))
    return input_order, tuple(dim for dim in dims if dim in of_targets)


def _only_targets(windows: Windows) -> list[str]:
    """Return the dims with targets at one cell of the only window, for which there is no use."""
    only = []
    for dim, of_dim in windows.dims.items():
        has_axis = dim in windows.target_order or of_dim.is_lead
        if not has_axis and of_dim.size > 1 and len(of_dim.starts) == 1:
            only.append(dim)
    return only


def _sizes(
    shape: Mapping[str, int], trained: _Trained, options: WindowOptions
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the cells of a window of inputs, and those that neighbouring targets share."""
    size = {dim: trained.size[dim] for dim in shape}
    if options.sample_size is None:
        too_long = {dim: n for dim, n in trained.size.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {dict(shape)}; predict "
                "a larger cube, or give sample_size if the model takes smaller windows"
            )
        if options.overlap is None:
            return size, {dim: trained.overlap.get(dim, 0) for dim in shape}
    else:
        sample_size = parse_sizes("sample_size", options.sample_size, shape)
        for dim, n in sample_size.items():
            if dim in trained.targets and n != trained.size[dim]:
                raise InvalidValueError(
                    f"sample_size along {dim!r}, where targets have an offset, must be that of the "
                    f"training, {trained.size[dim]}, got {n}"
                )
        size |= {dim: sample_size.get(dim, 1) for dim in shape if dim not in trained.targets}
    target_size = dict(size)
    target_size |= {dim: n for dim, (_, n) in trained.targets.items()}
    return size, parse_overlap("overlap", options.overlap, target_size)


def _lead_dim(
    trained: _Trained, size: Mapping[str, int], axes: Mapping[str, xr.Variable]
) -> str | None:
    """Return the dim along which targets have a lead time; along others they lie in the window."""
    dims = []
    for dim, (offset, n) in trained.targets.items():
        is_dated = dim in axes and is_time(axes[dim].values)
        if offset + n > size[dim] or is_dated:
            dims.append(dim)
    if len(dims) > 1:
        raise InvalidValueError(
            f"targets may lie beyond windows of inputs along one dim, got {dims}"
        )
    return dims[0] if dims else None


def _refuse_forecast(options: WindowOptions) -> None:
    """Refuse what only a data set with a lead time can do."""
    if options.init_times is not None:
        raise InvalidValueError(
            "init_times needs a data set with target_offset along time, got none"
        )
    if options.rollout > 1:
        raise InvalidValueError(
            f"rollout={options.rollout} needs a data set with target_offset along time, got none"
        )


def _check_is_time(lead_dim: str, cube: xr.Dataset, shape: Mapping[str, int]) -> None:
    """Refuse targets that lie beyond the inputs in space."""
    coords = list(cube.coords.values())
    time_dim = find_time_dim(coords, tuple(shape))
    if lead_dim == time_dim:
        return
    is_place = any(lead_dim in c.dims and role_of(c) in ("latitude", "longitude") for c in coords)
    if time_dim is not None or is_place:
        raise InvalidValueError(
            f"target_offset along {lead_dim!r} is no lead time: targets must lie beyond the inputs "
            "along time, or in their cells"
        )


def _lead_windows(
    axis: xr.Variable, lead: DimLead, options: WindowOptions, has_forcings: bool
) -> DimWindows:
    """Return windows of a forecast: one for each start that is asked for."""
    further = (options.rollout - 1) * lead.target_size
    last = len(axis) - 1
    if has_forcings:
        last -= further
    inits = choose_inits(axis, options.init_times, lead.input_size - 1, last)
    return DimWindows(
        len(axis),
        lead.input_size + further,
        inits - (lead.input_size - 1),
        lead.offset,
        lead.target_size + further,
        n_later=further,
        is_lead=True,
    )


def axis_of(cube: xr.Dataset, dim: str) -> xr.Variable:
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


def choose_inits(axis: xr.Variable, wanted: Any, first: int, last: int) -> Ints:
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
